//! The parts of an end of a link between hosts that are also used without the engine's lock: the two arenas (`mine`,
//! and the mirror of the peer's) with their registered memory, the queues of messages and streams to be sent, and the
//! functions that wake this process's waiters. A *chunk* is the part of an arena's data area that is registered at a
//! time.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering::SeqCst;

use crate::fabric::layout::{MAX_STREAMS, READY_QUEUES, Region};
use crate::fabric::ready::{PrivateQueue, ReadyQueue};
use crate::fabric::remote::lend::Buffers;
use crate::fabric::remote::qp::{Key, Limits, QueuePair, Role};
use crate::fabric::remote::{Local, SERVICE, Tuning};
use crate::fabric::ring::{DirectionBlock, Wake};
use crate::fabric::side::{Done, Side};
use crate::fabric::waiter::{SLEEPER_MASK, WaiterId};
use crate::ids::Vqpn;
use crate::lock::Lock;
use crate::sparse::Sparse;
use crate::sync::{AtomicBool, AtomicU32, Published, Request, RungMark};

/// The most side-channel messages that an end keeps, in each of two queues: messages to be sent, and messages that have
/// come. A correct end has at most a few to send for each stream.
pub(super) const MAX_QUEUED_MESSAGES: usize = 8 * MAX_STREAMS as usize;

/// Names an arena of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Mine,
    Mirror,
}

/// A message to be sent on the side channel.
pub(super) struct QueuedMessage {
    /// The peer's number of the stream that the message is about, if it is about one.
    pub yours: Option<Vqpn>,
    pub bytes: Box<[u8]>,
}

/// A bulk queue pair that was given up.
pub(super) struct Retired<Q> {
    pub qp: Q,
    /// The local streams into whose rings READs may bring bytes until the queue pair has ended.
    pub under_way: Vec<u32>,
}

/// The parts of an end that are also used without the engine's lock.
pub(super) struct Shared<Q, L> {
    // The first field, so that it is dropped first: when the arenas are unmapped, no memory is registered any more.
    pub qp: Q,
    pub limits: Limits,
    pub mine: Side,
    pub mirror: Side,
    /// The number of bytes at the beginning of the mirror's data area that are a copy of the peer's data area.
    pub peers_len: usize,
    /// The send buffers behind those bytes.
    pub buffers: Buffers,
    pub local: L,
    pub tuning: Tuning,
    /// The streams that have something to send, by the peer's number.
    pub dirty: PrivateQueue,
    /// By the peer's number of a stream: the wake-up word that has to be sent to the peer for the stream (TELL).
    pub tells: Sparse<AtomicU32, { MAX_STREAMS as usize / 128 }, 128>,
    pub outbox: Lock<VecDeque<QueuedMessage>>,
    /// The number of messages in the inbox.
    pub news: Published<AtomicU32>,
    /// The request for [`End::settle`](crate::fabric::remote::End::settle): it is pending while the head of a direction
    /// (how far this end's program has read) is held back.
    pub owes: Request,
    /// Whether the watch on the peer's device (`watch.rs`) needs ticks.
    pub is_watched: Published<AtomicBool>,
    /// Whether the watch has begun since the service thread last called `End::is_watched`.
    pub watch_unseen: Published<AtomicBool>,
    pub marks: Box<[RungMark]>,
    /// Whether a bulk queue pair was given up since the service thread last called `End::end_retired`.
    pub retired_unseen: Published<AtomicBool>,
}

impl<Q, L> Shared<Q, L> {
    /// Queues a stream that has something to send, by the peer's number. Does nothing if the stream is not paired.
    pub(super) fn touch(&self, theirs: Option<u32>) {
        if let Some(theirs) = theirs {
            self.dirty.push(theirs);
        }
    }

    /// Resets everything for another link: no message or stream is queued. To be called under the engine's lock.
    pub(super) fn reset(&self) {
        self.dirty.clear();
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
        // SAFETY: the block is within the mapping, which lives as long as the side, and has only atomics.
        Some(unsafe { block.as_ref() })
    }

    /// Returns the block of the direction that this end receives, by this end's number.
    pub(super) fn block_mine(&self, mine: u32) -> Option<&DirectionBlock> {
        Self::block(&self.mine, mine)
    }

    /// Returns the block of the direction that this end sends, by the peer's number.
    pub(super) fn block_mirror(&self, theirs: u32) -> Option<&DirectionBlock> {
        Self::block(&self.mirror, theirs)
    }

    /// Returns the address of position `pos` of the ring in `region` of one of the arenas, and how many of `most` bytes
    /// are contiguous there within one chunk. The third value is the index of that chunk. `None` if there are no such
    /// bytes.
    pub(super) fn piece(&self, side: &Side, region: Region, pos: u64, most: u64) -> Option<(*mut u8, u64, u32)> {
        let (area, log2) = (side.area(), self.tuning.chunk_log2);
        let (at, len) = area.piece(region, pos, most)?;
        let offset = area.offset_of(at);
        let len = len.min((1 << log2) - (offset & ((1 << log2) - 1)));
        (len > 0).then_some((at, len as u64, (offset >> log2) as u32))
    }

    /// Adds the waiters of `word` to the waiters that the peer has to wake for the stream. Returns false if `word`
    /// names none, or if there is no such stream.
    pub(super) fn add_tell(&self, theirs: u32, word: u32) -> bool {
        let queue = WaiterId::of_queue(word).filter(|w| u32::from(w.0) < READY_QUEUES);
        let sleeper = WaiterId::of_sleeper(word);
        let word = queue.map_or(0, WaiterId::queue_bits) | sleeper.map_or(0, WaiterId::sleeper_bits);
        // Mostly `pair` has allocated the cell, so that a signal handler does not allocate memory here.
        let theirs = theirs as usize;
        let Some(cell) = self.tells.get(theirs).or_else(|| self.tells.make(theirs)) else {
            return false;
        };
        let merge = |old| Some(merge_tells(old, word));
        word != 0 && cell.fetch_update(SeqCst, SeqCst, merge).is_ok()
    }

    /// Queues stream `mine` for the waiters of this process that a wake-up word names, and wakes them.
    pub(super) fn tell_here(&self, after: &mut After, wake: Wake, mine: u32) {
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

    pub(super) fn ring_if_asleep(&self, after: &mut After, waiter: WaiterId) {
        if let (Some(flag), Some(mark)) = (self.local.flag(waiter), self.marks.get(waiter.0 as usize))
            && flag.must_ring(mark)
        {
            self.ring_after(after, waiter);
        }
    }

    fn ring_after(&self, after: &mut After, waiter: WaiterId) {
        match after.rings.get_mut(usize::from(after.count)) {
            Some(slot) => {
                *slot = waiter.0;
                after.count += 1;
            }
            None => self.local.ring(waiter),
        }
    }
}

/// Merges two wake-up words of one stream. If they name two different waiters, one word cannot hold both. The merged
/// word then names the service thread, which wakes all waiters of the stream.
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

/// The work that is to be done after the engine's lock is released.
#[derive(Debug, Default)]
pub(super) struct After {
    rings: [u16; 8],
    count: u8,
    /// The streams for which CLOSED was sent, by this end's number.
    pub closed: Vec<Vqpn>,
    /// The chunk of the mirror that has to be registered.
    pub register: Option<u32>,
    /// The numbers that have to be freed.
    pub done: Vec<Done>,
}

impl After {
    /// Returns whether the work uses streams or memory of the link, which must stay until the work is done.
    pub(super) fn is_of_link(&self) -> bool {
        self.register.is_some() || !self.closed.is_empty() || !self.done.is_empty()
    }

    pub(super) fn rings(&self) -> impl Iterator<Item = WaiterId> {
        self.rings.into_iter().take(usize::from(self.count)).map(WaiterId)
    }
}

// The data areas of both arenas are registered in chunks. A chunk is registered when it is first needed, since arenas
// are large and sparse. The device keeps the pages of a chunk as long as the queue pair lives. They must not be given
// back to the kernel (`punch_hole`), or the device and the process would see different memory.

/// log2 of the size of a chunk in bytes: 1 MiB.
pub(super) const CHUNK_LOG2: u8 = 20;

/// Returns the indexes of the chunks that a region touches.
pub(super) fn of_region(region: Region, log2: u8) -> RangeInclusive<u32> {
    let first = region.offset() >> log2;
    let last = (region.offset() + region.len() - 1) >> log2;
    first as u32..=last as u32
}

/// The chunks of one arena that a thread has tried to register. Each chunk is tried once.
#[derive(Default)]
pub(super) struct Registry(Lock<Vec<bool>>);

impl Registry {
    /// Forgets all attempts, for another link.
    pub(super) fn reset(&self) {
        if let Some(mut tried) = self.0.lock() {
            *tried = Vec::new();
        }
    }

    /// Registers each of `chunks` that no thread has tried before, and returns the keys. A chunk that the device
    /// refuses stays without a key, and payload for it travels in messages. Must not be called under the engine's lock,
    /// since it takes long.
    pub(super) fn register<Q: QueuePair>(
        &self,
        qp: &Q,
        side: &Side,
        log2: u8,
        chunks: RangeInclusive<u32>,
    ) -> Vec<(u32, Key)> {
        let Some(mut tried) = self.0.lock() else {
            return Vec::new();
        };
        let count = tried.len().max(*chunks.end() as usize + 1);
        tried.resize(count, false);
        let register = |chunk: u32| {
            let offset = (chunk as usize) << log2;
            let len = side.data_len().saturating_sub(offset).min(1 << log2);
            let is_tried = std::mem::replace(tried.get_mut(chunk as usize)?, true);
            // SAFETY: the chunk lies within the data area, which stays mapped as long as the end lives, and so longer
            // than its queue pair. No reference to ring memory is ever formed.
            let register = || unsafe { qp.register(side.data_at(offset), len, Role::Both) };
            let region = (!is_tried && len > 0).then(register)?.ok()?;
            Some((chunk, region.key))
        };
        chunks.filter_map(register).collect()
    }
}

/// A registered chunk of the peer's arena.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Target {
    pub rkey: u32,
    pub base: u64,
}

/// A registered chunk of this end's arena.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OwnChunk {
    /// The key for the peer's WRITEs, and the chunk's address.
    pub target: Target,
    /// The key for this end's READs into the chunk.
    pub sink: u32,
    pub is_announced: bool,
}

/// The registration keys of chunks, found by the chunk's index. The list ends at the highest chunk that has a key.
#[derive(Debug, Default)]
pub(super) struct Keys<T>(Vec<Option<T>>);

impl<T: Copy> Keys<T> {
    pub(super) fn get(&self, chunk: u32) -> Option<T> {
        self.0.get(chunk as usize).copied().flatten()
    }

    pub(super) fn get_mut(&mut self, chunk: u32) -> Option<&mut T> {
        self.0.get_mut(chunk as usize)?.as_mut()
    }

    /// Sets the key of a chunk. Returns false if the chunk has a key already.
    pub(super) fn set(&mut self, chunk: u32, key: T) -> bool {
        let at = chunk as usize;
        if self.0.len() <= at {
            self.0.resize(at + 1, None);
        }
        let free = self.0.get_mut(at).filter(|slot| slot.is_none());
        free.map(|slot| *slot = Some(key)).is_some()
    }
}

/// The keys of both arenas' chunks.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    pub mine: Keys<OwnChunk>,
    /// For each chunk of the mirror: the key for this end's WRITEs from it.
    pub mirror: Keys<u32>,
    /// For each chunk of the peer's arena: the target that the peer's CHUNK record has named.
    pub theirs: Keys<Target>,
}
