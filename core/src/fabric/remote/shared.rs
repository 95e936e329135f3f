//! The parts of an end of a link between hosts that are also used without the engine's lock. They are the arenas, the
//! queues of messages and streams to be sent, and the ways to this process's waiters.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;

use super::buffers::Buffers;
use super::local::{Local, SERVICE};
use super::qp::{Limits, QueuePair};
use super::tuning::Tuning;
use crate::fabric::layout::{MAX_STREAMS, READY_QUEUES};
use crate::fabric::numbers::Done;
use crate::fabric::ready::{PrivateQueue, ReadyQueue};
use crate::fabric::ring::{DirectionBlock, Wake};
use crate::fabric::side::Side;
use crate::fabric::waiter::{SLEEPER_MASK, WaiterId};
use crate::ids::Vqpn;
use crate::lock::Lock;
use crate::sparse::Sparse;
use crate::sync::{AtomicBool, AtomicU32, Published, Request, RungMark};

/// The most messages that are kept, in either direction. A correct end owes at most a few for each stream.
pub(super) const MAX_QUEUED_MESSAGES: usize = 8 * MAX_STREAMS as usize;

/// Names an arena of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Mine,
    Mirror,
}

/// A message to be sent on the side channel.
pub(super) struct QueuedMessage {
    /// The peer's stream that it is about.
    pub yours: Option<Vqpn>,
    pub bytes: Box<[u8]>,
}

/// A bulk queue pair that was given up.
pub(super) struct Retired<Q> {
    pub qp: Q,
    /// Local streams into whose rings bytes may come until the queue pair is gone.
    pub under_way: Vec<u32>,
}

/// The parts of an end that are also used without the engine's lock.
pub(super) struct Shared<Q, L> {
    // First, so that it is dropped first: no memory is registered any more when it is unmapped.
    pub qp: Q,
    pub limits: Limits,
    pub mine: Side,
    pub mirror: Side,
    /// Bytes of the mirror's data area that copy the peer's.
    pub peers_len: usize,
    /// The send buffers behind them.
    pub buffers: Buffers,
    pub local: L,
    pub tuning: Tuning,
    /// Streams with something to send, by the peer's number.
    pub dirty: PrivateQueue,
    /// Streams that were closed while the engine could not be used, by this end's number.
    pub closing: PrivateQueue,
    /// By the peer's number of a stream: the attention word that the peer is to be sent for it.
    pub tells: Sparse<AtomicU32, { MAX_STREAMS as usize / 128 }, 128>,
    pub outbox: Lock<VecDeque<QueuedMessage>>,
    /// Messages in the inbox.
    pub news: Published<AtomicU32>,
    /// A head was held back, for [`End::settle`](super::End::settle).
    pub owes: Request,
    /// The engine's watch needs ticks.
    pub is_watched: Published<AtomicBool>,
    /// The watch has begun, and the service thread has not asked since.
    pub watch_unseen: Published<AtomicBool>,
    pub marks: Box<[RungMark]>,
    /// Bulk queue pairs that were given up, for [`End::end_retired`](super::End::end_retired): to end them may take
    /// long.
    pub retired: Lock<Vec<Retired<Q>>>,
    /// `retired` has a queue pair for which the service thread has not asked.
    pub retired_unseen: Published<AtomicBool>,
}

impl<Q, L> Shared<Q, L> {
    /// Resets all for another link: no message or stream is queued. Called under the engine's lock.
    pub fn reset(&self) {
        self.dirty.clear();
        self.closing.clear();
        self.tells.made().for_each(|cell| cell.store(0, SeqCst));
        if let Some(mut outbox) = self.outbox.lock() {
            *outbox = VecDeque::new();
        }
        self.buffers.reset();
        self.news.publish(0);
        self.owes.begin();
        self.is_watched.publish(false);
        self.watch_unseen.publish(false);
        self.retired_unseen.publish(false);
        self.marks.iter().for_each(RungMark::reset);
    }
}

impl<Q: QueuePair, L: Local> Shared<Q, L> {
    fn block(side: &Side, number: u32) -> Option<&DirectionBlock> {
        let block = side.block(Vqpn(number))?;
        // SAFETY: within the mapping, which lives as long as the side; only atomics.
        Some(unsafe { block.as_ref() })
    }

    /// Returns the block of the direction that this end receives, by its own number.
    pub fn block_mine(&self, mine: u32) -> Option<&DirectionBlock> {
        Self::block(&self.mine, mine)
    }

    /// Returns the block of the direction that this end sends, by the peer's number.
    pub fn block_mirror(&self, theirs: u32) -> Option<&DirectionBlock> {
        Self::block(&self.mirror, theirs)
    }

    /// Adds the waiters of `word` to those that the peer is to wake for its stream. False if `word` names none, or
    /// there is no such stream.
    pub fn add_tell(&self, theirs: u32, word: u32) -> bool {
        let queue = WaiterId::of_queue(word).filter(|w| u32::from(w.0) < READY_QUEUES);
        let sleeper = WaiterId::of_sleeper(word);
        let word = queue.map_or(0, WaiterId::queue_bits) | sleeper.map_or(0, WaiterId::sleeper_bits);
        // `pair` has allocated the cell, so that no signal handler has to.
        let theirs = theirs as usize;
        let Some(cell) = self.tells.get(theirs).or_else(|| self.tells.make(theirs)) else {
            return false;
        };
        let merge = |old| Some(merge_tells(old, word));
        word != 0 && cell.fetch_update(SeqCst, SeqCst, merge).is_ok()
    }

    /// Queues stream `mine` for the waiters of this process that an attention word names, and wakes them.
    pub fn tell_here(&self, after: &mut After, wake: Wake, mine: u32) {
        if let Some(waiter) = WaiterId::of_queue(wake.0)
            && let Some(queue) = self.mine.queue(waiter)
        {
            queue.push(mine);
            self.local.on_queued(waiter);
            self.ring_if_asleep(after, waiter);
        }
        if let Some(sleeper) = WaiterId::of_sleeper(wake.0) {
            self.ring_after(after, sleeper);
        }
    }

    pub fn ring_if_asleep(&self, after: &mut After, waiter: WaiterId) {
        if let (Some(flag), Some(mark)) = (self.local.flag(waiter), self.marks.get(waiter.0 as usize))
            && flag.must_ring(mark)
        {
            self.ring_after(after, waiter);
        }
    }

    fn ring_after(&self, after: &mut After, waiter: WaiterId) {
        if !after.add_ring(waiter) {
            self.local.ring(waiter);
        }
    }
}

/// Merges two attention words of one stream. Two different waiters do not fit one word: then the service thread is
/// notified, which wakes all of them.
fn merge_tells(a: u32, b: u32) -> u32 {
    let part = |mask: u32| match (a & mask, b & mask) {
        (0, other) | (other, 0) => Some(other),
        (x, y) => (x == y).then_some(x),
    };
    match (part(!SLEEPER_MASK), part(SLEEPER_MASK)) {
        (Some(queue), Some(sleeper)) => queue | sleeper,
        (_, sleeper) => SERVICE.queue_bits() | sleeper.unwrap_or(0),
    }
}

/// The work that is left for after the release of the lock.
#[derive(Debug, Default)]
pub(super) struct After {
    rings: [u16; 8],
    count: u8,
    /// CLOSED was sent for these streams, by this end's number.
    pub closed: Vec<Vqpn>,
    /// A chunk of the mirror is to be registered.
    pub register: Option<u32>,
    /// Numbers that are to be given back.
    pub done: Vec<Done>,
}

impl After {
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// Returns whether the work uses streams or memory of the link, which must stay until it is done.
    pub fn is_of_link(&self) -> bool {
        self.register.is_some() || !self.closed.is_empty() || !self.done.is_empty()
    }

    fn add_ring(&mut self, waiter: WaiterId) -> bool {
        match self.rings.get_mut(usize::from(self.count)) {
            Some(slot) => {
                *slot = waiter.0;
                self.count += 1;
                true
            }
            None => false,
        }
    }

    pub fn rings(&self) -> impl Iterator<Item = WaiterId> {
        self.rings.into_iter().take(usize::from(self.count)).map(WaiterId)
    }
}
