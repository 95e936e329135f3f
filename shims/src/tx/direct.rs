//! A blocking send of much, whose bytes the device takes from the program's memory, past the mirror, when the peer's
//! program waits for them with a buffer (docs/protocol.md, P90–P95).
//!
//! It waits for such a reader for a moment only, as kernel TCP would not wait at all. What was lent counts as sent;
//! before the call returns the peer has taken it, or what it has not is in the mirror and nothing reaches the program's
//! memory any more.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::remote::qp::Role;
use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::Event;

use super::room::give_back;
use crate::call::{Call, Place};
use crate::config::config;
use crate::errno;
use crate::handler;
use crate::iov::Iov;
use crate::library::Library;
use crate::link::Remote;
use crate::pinned::Pinned;
use crate::ready;
use crate::socket::{Mode, Socket};
use crate::time::{Timeout, now_ns};
use crate::wait::{self, Wanted};
use crate::ways::{Send, Way};

/// Less is never sent so, whatever `RDMASOCK_ZCOPY_MIN` says.
pub(super) const LEAST: usize = 4096;

/// How long a reader with a buffer is waited for, ns; and one that has just read what was sent so, and may have to be
/// woken.
const READER_WITHIN: u64 = 200_000;
const READER_BACK_WITHIN: u64 = 1_000_000;
/// How long it may stand still before it has read what was sent before, and how long that may take in all, ns.
const READS_WITHIN: u64 = 500_000;
const ALL_READ_WITHIN: u64 = 10_000_000;
/// How long the peer may take to take what was lent, ns; what is left then goes by the mirror.
const TAKEN_WITHIN: u64 = 100_000_000;

/// What was lent, until it is taken back.
struct Lent {
    remote: &'static Remote,
    theirs: Vqpn,
    /// The position behind it.
    until: u64,
    /// Its registration ends last.
    memory: Pinned,
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.memory.is_of_a_parent() {
            return;
        }
        let end = self.remote.end();
        // SAFETY: the program's buffer, which the call was given, and that has not returned.
        let left = unsafe { end.take_source(self.theirs) };
        if left.is_some_and(|left| left > 0) {
            self.remote.await_word(|| end.untaken(self.theirs, self.until) == 0);
        }
    }
}

/// What a call with much to send waits for first: somebody to take it.
struct Reader;

impl Wanted for Reader {
    const IS_DATA: bool = false;

    fn is_worth_a_look(socket: &'static Socket) -> bool {
        let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
        let remote = socket.link().and_then(|link| link.remote());
        Taken::is_over(socket) || remote.is_some_and(|remote| remote.end().wanted(theirs) >= remote.direct_min() as u64)
    }
}

/// And then.
struct Taken;

impl Taken {
    /// Nothing is taken any more.
    fn is_over(socket: &Socket) -> bool {
        let remote = socket.link().and_then(|link| link.remote());
        socket.wakes.is_dead() || socket.tx_mode.load(Acquire) != Mode::Link || remote.is_none_or(Remote::is_down)
    }
}

impl Wanted for Taken {
    const IS_DATA: bool = false;

    fn is_worth_a_look(socket: &'static Socket) -> bool {
        let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
        let remote = socket.link().and_then(|link| link.remote());
        Self::is_over(socket) || remote.is_none_or(|remote| remote.end().is_source_done(theirs))
    }
}

/// Sends from the next piece of `iov`, if a reader waits for it or does so in a moment. Gives how many bytes; 0: they
/// go by the mirror.
///
/// The call began with `total` bytes.
pub(super) fn send(call: &mut Call, iov: &mut Iov, flags: c_int, total: usize) -> usize {
    let socket = call.socket;
    let Some((link, remote)) = socket.link().and_then(|link| Some((link, link.remote()?))) else {
        return 0;
    };
    let (memory, len) = iov.head();
    if total < remote.direct_min() || flags & libc::MSG_MORE != 0 || !remote.goes_direct(link.slot()) {
        return 0;
    }
    let can_wait = wait::may_wait(socket, flags).is_ok();
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    let way = choose(socket, remote, theirs, total, can_wait);
    if way != Way::Direct || !can_wait || len < remote.direct_min() || iov.is_implausible() {
        return 0;
    }
    let adverts = remote.end().adverts(theirs);
    let may_try = socket.tx.lock().is_some_and(|mut tx| tx.own.direct.may_try(adverts));
    // What registers memory allocates.
    if !may_try || handler::is_in_one() || !call.is_held() && call.hold_now() != Place::Here {
        return 0;
    }
    let errno = errno::get();
    let sent = lend(call, remote, theirs, memory, len);
    // Whatever it was that was tried, the call has not failed.
    errno::set(errno);
    if let Some(mut tx) = socket.tx.lock() {
        tx.own.direct.on_tried(sent > 0);
    }
    iov.advance(sent);
    sent
}

/// Which way a call with so many bytes goes, or goes on; the peer hears whether buffers are of use.
fn choose(socket: &Socket, remote: &Remote, theirs: Vqpn, len: usize, can_wait: bool) -> Way {
    let Some(mut tx) = socket.tx.lock() else {
        return Way::Rings;
    };
    let state = &mut *tx;
    let Some(producer) = state.producer.as_ref() else {
        return Way::Rings;
    };
    let send = Send {
        now: now_ns(),
        position: producer.position(),
        len,
        ring: producer.ring_size(),
        can_wait,
    };
    let (way, ended) = state.own.direct.way(config().zcopy, &remote.known, send);
    if let Some(has_changed) = ended {
        let stats = &Library::get().stats;
        stats.count(Event::DirectTrials);
        stats.count_many(Event::DirectChanges, has_changed.into());
    }
    let invites = way != Way::Rings;
    if invites || state.own.direct.has_invited {
        let least = if invites { remote.direct_min() as u32 } else { 0 };
        remote.end().invite(theirs, least);
        state.own.direct.has_invited = invites;
    }
    way
}

/// Waits for a moment for a reader with a buffer, and for somewhat longer while it reads what precedes. Gives how much
/// of `len` it wants.
fn await_reader(call: &Call, remote: &'static Remote, theirs: Vqpn, len: usize) -> Option<usize> {
    let (socket, end) = (call.socket, remote.end());
    let (sent, reader_within) = {
        let tx = socket.tx.lock()?;
        let within = if tx.own.direct.goes_well() {
            READER_BACK_WITHIN
        } else {
            READER_WITHIN
        };
        (tx.producer.as_ref()?.position(), within)
    };
    let begun = now_ns();
    let (mut moved, mut unread) = (begun, u64::MAX);
    loop {
        let wanted = (end.wanted(theirs) as usize).min(len);
        if wanted >= remote.direct_min() {
            return Some(wanted);
        }
        let now = now_ns();
        let before = std::mem::replace(&mut unread, end.untaken(theirs, sent));
        if unread < before {
            moved = now;
            if unread == 0 {
                // What was sent before may have gone by a buffer of this end's own.
                give_back(socket);
            }
        }
        let within = if unread == 0 { reader_within } else { READS_WITHIN };
        let left = (moved + within).min(begun + ALL_READ_WITHIN).saturating_sub(now);
        if left == 0 || Taken::is_over(socket) {
            return None;
        }
        // It ends when the time is over, or by any word of the reader's.
        let mut patience = wait::Patience::at_most(Timeout::Ns(left));
        if wait::wait_for::<Reader>(socket, &mut patience) == Err(libc::EINTR) {
            return None;
        }
    }
}

fn lend(call: &mut Call, remote: &'static Remote, theirs: Vqpn, memory: *mut u8, len: usize) -> usize {
    let (socket, end) = (call.socket, remote.end());
    let least = remote.direct_min();
    let Some(wanted) = await_reader(call, remote, theirs, len) else {
        return 0;
    };
    // SAFETY: the program's buffer, which the device only reads, and this, or `Lent`, goes before the call returns.
    let Some(pinned) = (unsafe { Pinned::new(remote, memory, wanted, least, Role::Source) }) else {
        return 0;
    };
    let lent = socket.tx.lock().and_then(|mut tx| {
        let state = &mut *tx;
        let producer = state.producer.as_mut()?;
        // Meanwhile the stream may have left the link, and come back as another.
        let is_same = socket.tx_mode.load(Acquire) == Mode::Link && socket.peer_vqpn.load(Relaxed) == theirs.0;
        let is_open = is_same && !state.is_shut && !socket.wakes.is_dead();
        if !is_open || call.place(&state.own.seen) != Place::Here || ready::is_reader_gone(producer) {
            return None;
        }
        let room = producer.spans(wanted).map_or(0, |spans| spans.len());
        let (from, bytes) = (producer.position(), pinned.len().min(room));
        let (address, key) = (memory.expose_provenance(), pinned.key().local);
        if bytes < least || !end.lend_source(theirs, from, address, bytes as u64, key) {
            return None;
        }
        call.hold(&mut state.own.waiting);
        let wake = producer.commit(bytes);
        state.wake_delayed = false;
        state.own.last = state.own.seen.tick();
        if let Some(stats) = socket.told.stats() {
            stats.add_tx_link(bytes as u64);
        }
        Library::get().stats.count_many(Event::DirectSent, bytes as u64);
        state.own.direct.bytes += bytes as u64;
        Some((wake, bytes, from + bytes as u64))
    });
    let Some((wake, bytes, until)) = lent else {
        return 0;
    };
    let lent = Lent {
        remote,
        theirs,
        until,
        memory: pinned,
    };
    ready::notify_peer(socket, wake);
    let mut patience = wait::Patience::at_most(Timeout::Ns(TAKEN_WITHIN));
    while !Taken::is_worth_a_look(socket) && wait::wait_for::<Taken>(socket, &mut patience).is_ok() {}
    drop(lent);
    bytes
}
