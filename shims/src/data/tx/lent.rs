//! Memory of the program that a blocking send lends to a device, past the mirror (docs/protocol.md, P90–P99). This
//! end's device writes the bytes into a buffer of the peer's program, or the peer's device reads them. `direct.rs` and
//! `offered.rs` decide when.
//!
//! Lent bytes count as sent. When the call returns, the peer has taken them or the rest is in the mirror, and no device
//! reaches the program's memory any more.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::remote::qp::Role;
use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::Event;

use crate::notify::call::{Call, Place};
use crate::notify::ready;
use crate::notify::wait::{self, Wanted};
use crate::objects::library::Library;
use crate::objects::link::Remote;
use crate::objects::pinned::Pinned;
use crate::objects::socket::{Mode, Socket};
use crate::sys::time::{Timeout, now_ns};

/// Which device moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// This end's device writes them.
    Writes,
    /// The peer's device reads them.
    Reads,
}

/// How long the peer may take, ns: `begins` until it begins, then `byte` for each byte.
pub(super) struct Within {
    pub begins: u64,
    pub byte: u64,
}

/// A loan: memory that is lent until the call takes it back.
struct Lent {
    remote: &'static Remote,
    theirs: Vqpn,
    /// The position behind its last byte.
    until: u64,
    by: By,
    is_recalled: bool,
    /// Dropped after `Lent::drop` has run, so that the registration ends last.
    memory: Pinned,
}

impl Lent {
    /// Recalls the memory from the peer's device, if that may still read it. When this returns, the peer has confirmed
    /// that its device reads no more, or the device can no longer reach the memory.
    fn recall(&mut self) {
        let (end, theirs) = (self.remote.end(), self.theirs);
        if self.by == By::Reads && !self.is_recalled && !end.is_source_done(theirs) {
            self.is_recalled = true;
            end.recall_source(theirs);
            self.remote.await_word(|| end.is_source_done(theirs));
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.memory.is_of_a_parent() {
            return;
        }
        let (end, theirs) = (self.remote.end(), self.theirs);
        self.recall();
        // SAFETY: the loan is of the program's buffer, which stays readable until the call returns; the call drops this
        // value first.
        let left = unsafe { end.take_source(theirs) };
        if self.by == By::Writes && left.is_some_and(|left| left > 0) {
            self.remote.await_word(|| end.untaken(theirs, self.until) == 0);
        }
    }
}

/// A wait for the end of a loan.
pub(super) struct Taken;

impl Taken {
    /// Returns whether the peer takes no more: the connection or the link is down, or the direction has left the link.
    pub fn is_over(socket: &Socket) -> bool {
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

/// Lends as many of the next `wanted` bytes as possible, from a piece of `len` bytes. Waits `within` its bounds until
/// the peer has them. Returns how many bytes count as sent, and how many of those a device is known to have moved past
/// the mirror.
pub(super) fn lend(
    call: &mut Call,
    (remote, theirs): (&'static Remote, Vqpn),
    (memory, wanted, len): (*mut u8, usize, usize),
    by: By,
    within: Within,
) -> (usize, usize) {
    let (socket, end) = (call.socket, remote.end());
    let least = remote.direct_min();
    let role = match by {
        By::Writes => Role::Source,
        By::Reads => Role::Offered,
    };
    // SAFETY: the memory is the program's buffer, which the device only reads. `pinned`, or the `Lent` that takes it
    // over, is dropped before the call returns.
    let Some(pinned) = (unsafe { Pinned::new(remote, memory, wanted, least, role) }) else {
        return (0, 0);
    };
    let lent = socket.tx.lock().and_then(|mut tx| {
        let state = &mut *tx;
        let producer = state.producer.as_mut()?;
        // Meanwhile the stream may have left the link and come back as another stream.
        let is_same = socket.tx_mode.load(Acquire) == Mode::Link && socket.peer_vqpn.load(Relaxed) == theirs.0;
        let is_open = is_same && !state.is_shut && !socket.wakes.is_dead();
        if !is_open || call.place(&state.own.seen) != Place::Here || ready::is_reader_gone(producer) {
            return None;
        }
        // Half a ring at most, so that the peer's program can read one half while its device fetches the next.
        let most = match by {
            By::Writes => wanted,
            By::Reads => wanted.min(producer.ring_size() as usize / 2),
        };
        // Asking for `len` bytes makes a ring grow that is too small for the piece. The ring bounds what is lent,
        // though nothing is copied into it.
        let room = producer.spans(len).map_or(0, |spans| spans.len()).min(most);
        let (from, bytes) = (producer.position(), pinned.len().min(room));
        let (address, key) = (memory.expose_provenance(), pinned.key());
        let is_lent = bytes >= least
            && match by {
                By::Writes => end.lend_source(theirs, from, address, bytes as u64, key.local),
                By::Reads => end.offer_source(theirs, from, address, bytes as u64, key.remote),
            };
        if !is_lent {
            return None;
        }
        call.hold(&mut state.own.waiting);
        let wake = producer.commit(bytes);
        state.wake_delayed = false;
        state.own.last = state.own.seen.tick();
        if let Some(stats) = socket.told.stats() {
            stats.add_tx_link(bytes as u64);
        }
        if by == By::Writes {
            Library::get().stats.count_many(Event::DirectSent, bytes as u64);
            state.own.direct.bytes += bytes as u64;
        }
        Some((wake, bytes, from))
    });
    let Some((wake, bytes, from)) = lent else {
        return (0, 0);
    };
    let until = from + bytes as u64;
    let mut lent = Lent {
        remote,
        theirs,
        until,
        by,
        is_recalled: false,
        memory: pinned,
    };
    ready::notify_peer(socket, wake);
    let bytes_within = bytes as u64 * within.byte;
    let mut patience = wait::Patience::at_most(Timeout::Ns(within.begins + bytes_within));
    let begun = now_ns();
    while !Taken::is_worth_a_look(socket) && wait::wait_for::<Taken>(socket, &mut patience).is_ok() {}
    let waited = now_ns() - begun;
    lent.recall();
    if by == By::Reads && !Taken::is_over(socket) {
        // A peer that has not begun and answers the recall at once would not have begun later either. So after a recall
        // only the time of the recall's answer counts.
        let answer = if lent.is_recalled {
            now_ns() - begun - waited
        } else {
            waited.saturating_sub(bytes_within)
        };
        remote.answers.on_answer(answer);
    }
    let taken = match by {
        By::Writes => bytes,
        By::Reads => end.taken(theirs).clamp(from, until).abs_diff(from) as usize,
    };
    drop(lent);
    if by == By::Reads
        && let Some(mut tx) = socket.tx.lock()
    {
        tx.own.direct.bytes += taken as u64;
    }
    (bytes, taken)
}
