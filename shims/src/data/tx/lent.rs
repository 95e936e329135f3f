//! Memory of the program that a blocking send lends to a device, past the mirror (docs/protocol.md, P90–P99): to its
//! own, which writes into a buffer that the peer's program waits with, or to the peer's, which reads it. Not when that
//! is done (`direct.rs`, `offered.rs`).
//!
//! What was lent counts as sent; before the call returns the peer has taken it, or what it has not is in the mirror and
//! nothing reaches the program's memory any more.

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

/// Whose device moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// Ours writes them.
    Writes,
    /// The peer's reads them.
    Reads,
}

/// How long the peer may take, ns: to begin, and then for each byte.
pub(super) struct Within {
    pub begins: u64,
    pub byte: u64,
}

/// What was lent, until it is taken back.
struct Lent {
    remote: &'static Remote,
    theirs: Vqpn,
    /// The position behind it.
    until: u64,
    by: By,
    is_recalled: bool,
    /// Its registration ends last.
    memory: Pinned,
}

impl Lent {
    /// The peer's device is to read no more, and has said so when this returns, or does not find the memory any more.
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
        // SAFETY: the program's buffer, which the call was given, and that has not returned.
        let left = unsafe { end.take_source(theirs) };
        if self.by == By::Writes && left.is_some_and(|left| left > 0) {
            self.remote.await_word(|| end.untaken(theirs, self.until) == 0);
        }
    }
}

/// What a call waits for that has lent memory.
pub(super) struct Taken;

impl Taken {
    /// Nothing is taken any more.
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

/// Lends what of the next `wanted` bytes of a piece of `len` can be, and waits `within` its bounds until the peer has
/// them. Gives how many bytes count as sent, and how many of them went so, as far as is known.
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
    // SAFETY: the program's buffer, which a device only reads, and this, or `Lent`, goes before the call returns.
    let Some(pinned) = (unsafe { Pinned::new(remote, memory, wanted, least, role) }) else {
        return (0, 0);
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
        // What the peer's device has read is to be read by its program while the next is on its way.
        let most = match by {
            By::Writes => wanted,
            By::Reads => wanted.min(producer.ring_size() as usize / 2),
        };
        // A ring that is too small for the piece is to grow, though nothing is copied into it: it bounds what is lent.
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
        // An end that answers a recall at once, and has not begun, would not have done so later.
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
