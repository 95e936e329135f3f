//! A blocking send of much whose bytes the peer's device reads from the program's memory into the reader's ring, where
//! the peer's program does not wait with a buffer (docs/protocol.md, P96–P99). It waits for room in that ring for a
//! moment, and then for the device, as kernel TCP would not wait at all: who is not there in time is tried less often.

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

/// How long the reader may stand still before there is room, and how long that may take in all, ns. If its end has to
/// be asked, as much longer as that takes.
const ROOM_WITHIN: u64 = 500_000;
const ALL_ROOM_WITHIN: u64 = 5_000_000;
/// How long the peer's end may take: what is left then goes by the mirror. Longer to begin where that is known of it.
const TAKEN: Within = Within {
    begins: 5_000_000,
    byte: 50,
};

/// What a call waits for that would lend memory.
struct RoomToLend;

impl Wanted for RoomToLend {
    const IS_DATA: bool = false;

    fn is_worth_a_look(socket: &'static Socket) -> bool {
        let remote = socket.link().and_then(|link| link.remote());
        let has_room = |remote: &Remote| free(socket) >= remote.direct_min() || is_read_aside(socket, remote);
        Taken::is_over(socket) || remote.is_none_or(has_room)
    }
}

/// What is sent is kept aside, as the peer's ring had no room for it.
fn is_aside(socket: &Socket) -> bool {
    let tx = socket.tx.lock();
    tx.is_some_and(|tx| tx.producer.as_ref().is_some_and(Producer::is_aside))
}

/// So it was, and all of it has been read.
fn is_read_aside(socket: &Socket, remote: &Remote) -> bool {
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    let position = {
        let tx = socket.tx.lock();
        let producer = tx.as_ref().and_then(|tx| tx.producer.as_ref());
        producer.filter(|producer| producer.is_aside()).map(Producer::position)
    };
    position.is_some_and(|position| remote.end().untaken(theirs, position) == 0)
}

/// Bytes that the peer's ring has room for; 0 where what comes next does not go there.
fn free(socket: &Socket) -> usize {
    if socket.tx_mode.load(Acquire) != Mode::Link {
        return 0;
    }
    let mut tx = socket.tx.lock();
    let producer = tx.as_mut().and_then(|tx| tx.producer.as_mut());
    let producer = producer.filter(|producer| !producer.is_aside());
    producer.map_or(0, |producer| producer.free().unwrap_or(0) as usize)
}

/// Sends from `memory`, if its reader has room for enough of it and its end takes it. Gives how many bytes; 0 go by the
/// mirror.
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

/// The reader's end was asked how far the reader is.
struct Question {
    /// When, monotonic ns.
    at: u64,
    /// It answers for all before.
    position: u64,
    /// It has all of that, and has not answered yet: how long that takes does not depend on the reader.
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

    /// How long the answer is waited for.
    fn until(&self, remote: &Remote) -> u64 {
        let within = match self.counts {
            true => remote.answers.patience(ROOM_WITHIN),
            false => ROOM_WITHIN,
        };
        self.at + within
    }

    /// The answer is that all has been read.
    fn on_answer(&mut self, remote: &Remote, now: u64) {
        if std::mem::take(&mut self.counts) {
            remote.answers.on_answer(now - self.at);
        }
    }

    /// Nobody waits for it any more.
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

/// Waits for a moment for room.
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
                // What was sent before has gone by a buffer of this end's own, as what follows has to.
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
            // A reader does not tell of less than a quarter of its ring by itself (P55), and as long as not all is
            // known to have been read what is kept aside stays there.
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
