//! Get: the peer's device reads a large blocking send from the program's memory into the reader's ring
//! (docs/protocol.md, P96–P99). This is for a peer whose program does not wait with a buffer. The send waits a moment
//! for room in the ring and then for the device; kernel TCP would wait for neither. Each failure makes later tries
//! rarer.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::ring::Producer;
use rdmasock_core::ids::Vqpn;

use super::lent::{By, Taken, Within, lend};
use super::room::give_back;
use crate::notify::call::Call;
use crate::notify::wait::{self, Wanted};
use crate::objects::link::Remote;
use crate::objects::socket::{Mode, Socket};
use crate::sys::time::{Timeout, now_ns};

/// How long the reader may stand still before there is room, ns. `ALL_ROOM_WITHIN` bounds that time in all, ns. If the
/// reader's end has to be asked, the time of its answer comes on top.
const ROOM_WITHIN: u64 = 500_000;
const ALL_ROOM_WITHIN: u64 = 5_000_000;
/// How long the peer's device may take; the rest then goes by the mirror. A peer that is known to be slow has longer to
/// begin.
const TAKEN: Within = Within {
    begins: 5_000_000,
    byte: 50,
};

/// A wait for room in the peer's ring, for a send that wants to lend memory.
struct RoomToLend;

impl Wanted for RoomToLend {
    const IS_DATA: bool = false;

    fn is_worth_a_look(socket: &'static Socket) -> bool {
        let remote = socket.link().and_then(|link| link.remote());
        let has_room = |remote: &Remote| free(socket) >= remote.direct_min() || is_read_aside(socket, remote);
        Taken::is_over(socket) || remote.is_none_or(has_room)
    }
}

/// Returns whether the producer writes aside, into a send buffer of this end, because the peer's ring had no room.
fn is_aside(socket: &Socket) -> bool {
    let tx = socket.tx.lock();
    tx.is_some_and(|tx| tx.producer.as_ref().is_some_and(Producer::is_aside))
}

/// Returns whether the producer writes aside and the reader has read all of it.
fn is_read_aside(socket: &Socket, remote: &Remote) -> bool {
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    let position = {
        let tx = socket.tx.lock();
        let producer = tx.as_ref().and_then(|tx| tx.producer.as_ref());
        producer.filter(|producer| producer.is_aside()).map(Producer::position)
    };
    position.is_some_and(|position| remote.end().untaken(theirs, position) == 0)
}

/// Returns the bytes that the peer's ring has room for; 0 if the next bytes do not go there.
fn free(socket: &Socket) -> usize {
    if socket.tx_mode.load(Acquire) != Mode::Link {
        return 0;
    }
    let mut tx = socket.tx.lock();
    let producer = tx.as_mut().and_then(|tx| tx.producer.as_mut());
    let producer = producer.filter(|producer| !producer.is_aside());
    producer.map_or(0, |producer| producer.free().unwrap_or(0) as usize)
}

/// Offers `len` bytes at `memory` to the reader's device, if the reader's ring has enough room. Returns the bytes that
/// count as sent; 0 if the bytes have to go by the mirror.
pub(super) fn offer(call: &mut Call, remote: &'static Remote, theirs: Vqpn, memory: *mut u8, len: usize) -> usize {
    let socket = call.socket;
    let may_try = |socket: &Socket| socket.tx.lock().is_some_and(|mut tx| tx.own.direct.may_lend(now_ns()));
    if !may_try(socket) {
        return 0;
    }
    let (sent, taken) = if has_room(socket, remote, theirs) {
        let within = Within {
            begins: remote.answers.patience(TAKEN.begins),
            ..TAKEN
        };
        lend(call, (remote, theirs), (memory, len, len), By::Reads, within)
    } else {
        (0, 0)
    };
    if let Some(mut tx) = socket.tx.lock() {
        tx.own.direct.on_lent(sent > 0 && taken >= sent / 2, now_ns());
    }
    sent
}

/// A question to the reader's end: how far is the reader?
struct Question {
    /// When it was asked, monotonic ns.
    at: u64,
    /// The answer covers all bytes before this position.
    position: u64,
    /// All bytes before `position` were sent, and no answer has come yet. Only then is the time of the answer a
    /// measurement, because it does not depend on the reader.
    counts: bool,
}

impl Question {
    fn ask(remote: &Remote, theirs: Vqpn, position: u64, now: u64) -> Self {
        remote.end().unconfirmed(theirs);
        Self {
            at: now,
            position,
            counts: remote.end().unsent(theirs) == 0,
        }
    }

    /// Returns until when the send waits for the answer, monotonic ns.
    fn until(&self, remote: &Remote) -> u64 {
        let within = match self.counts {
            true => remote.answers.patience(ROOM_WITHIN),
            false => ROOM_WITHIN,
        };
        self.at + within
    }

    /// Takes in the answer, which is that the reader has read all bytes.
    fn on_answer(&mut self, remote: &Remote, now: u64) {
        if std::mem::take(&mut self.counts) {
            remote.answers.on_answer(now - self.at);
        }
    }

    /// Ends the wait for the answer. If none has come, records that the peer took longer than the time so far.
    fn give_up(&self, remote: &Remote, theirs: Vqpn, now: u64) {
        let is_answered = remote
            .end()
            .confirmed(theirs)
            .is_none_or(|until| until >= self.position);
        if self.counts && !is_answered {
            remote.answers.on_none(now - self.at);
        }
    }
}

/// Waits a moment for room in the peer's ring. Returns false if there is none in time, or if the next bytes have to go
/// another way. A signal handler ends the wait, also with false.
fn has_room(socket: &'static Socket, remote: &'static Remote, theirs: Vqpn) -> bool {
    let begun = now_ns();
    let (mut moved, mut unread, mut asked) = (begun, u64::MAX, None::<Question>);
    loop {
        let sent = socket.tx.lock().and_then(|tx| Some(tx.producer.as_ref()?.position()));
        let sent = sent.unwrap_or(0);
        let (before, now) = (unread, now_ns());
        unread = remote.end().untaken(theirs, sent);
        if unread < before {
            moved = now;
        }
        if Taken::is_over(socket) {
            return false;
        }
        if unread == 0 {
            if let Some(question) = &mut asked {
                question.on_answer(remote, now);
            }
            if !give_back(socket) {
                // The earlier bytes have gone by a send buffer of this end, so the next bytes have to go there too.
                return false;
            }
        }
        if free(socket) >= remote.direct_min() {
            return true;
        }
        let until = (moved + ROOM_WITHIN).min(begun + ALL_ROOM_WITHIN);
        let answered = asked.as_ref().map_or(0, |question| question.until(remote));
        let left = until.max(answered).saturating_sub(now);
        if left == 0 && asked.is_none() && is_aside(socket) {
            // A reader does not report less than a quarter of its ring unasked (P55). The producer cannot leave the
            // send buffer before this end knows that all its bytes were read.
            asked = Some(Question::ask(remote, theirs, sent, now));
            continue;
        }
        if left == 0 {
            if let Some(question) = asked {
                question.give_up(remote, theirs, now);
            }
            return false;
        }
        let mut patience = wait::Patience::at_most(Timeout::Ns(left));
        if wait::wait_for::<RoomToLend>(socket, &mut patience) == Err(libc::EINTR) {
            return false;
        }
    }
}
