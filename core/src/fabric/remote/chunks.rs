//! Registered memory: the data areas of both arenas in chunks. A chunk is registered with the device when it is first
//! needed, since arenas are large and sparse. Not here: the work requests for it.
//!
//! The device keeps the pages of a registered chunk as long as the queue pair lives. They must not be given back to the
//! kernel (`punch_hole`), or the device and the process would see different memory.

use std::ops::RangeInclusive;

use super::qp::{Key, QueuePair, Role};
use crate::fabric::layout::Region;
use crate::fabric::side::Side;
use crate::lock::Lock;

/// log2 of the bytes of a chunk: 1 MiB.
pub(super) const CHUNK_LOG2: u8 = 20;

/// Returns the chunks that a region touches.
pub(super) fn of_region(region: Region, log2: u8) -> RangeInclusive<u32> {
    let first = region.offset() >> log2;
    let last = (region.offset() + region.len() - 1) >> log2;
    first as u32..=last as u32
}

/// Returns how many chunks a data area of `data_len` bytes has.
pub(super) fn count(data_len: usize, log2: u8) -> u64 {
    (data_len as u64).div_ceil(1 << log2)
}

/// The chunks of one arena that a thread has tried to register: each is tried once.
pub(super) struct Registry(Lock<Vec<bool>>);

impl Registry {
    pub fn new() -> Self {
        Self(Lock::new(Vec::new()))
    }

    /// Forgets all attempts, for another link.
    pub fn reset(&self) {
        if let Some(mut tried) = self.0.lock() {
            *tried = Vec::new();
        }
    }

    /// Registers each of `chunks` that no thread has tried, and returns the keys. A chunk that the device refuses stays
    /// without a key, and payload for it travels in messages. Not to be called under the engine's lock, since it takes
    /// long.
    pub fn register<Q: QueuePair>(
        &self,
        qp: &Q,
        side: &Side,
        log2: u8,
        chunks: RangeInclusive<u32>,
    ) -> Vec<(u32, Key)> {
        let mut new = Vec::new();
        let Some(mut tried) = self.0.lock() else {
            return new;
        };
        let data_len = side.data_len();
        for chunk in chunks {
            let at = chunk as usize;
            if tried.len() <= at {
                tried.resize(at + 1, false);
            }
            let offset = at << log2;
            let len = data_len.saturating_sub(offset).min(1 << log2);
            if len == 0 || tried.get_mut(at).is_none_or(|t| std::mem::replace(t, true)) {
                continue;
            }
            // SAFETY: within the data area, which is mapped for as long as the end, and so longer than its queue pair;
            // no reference to ring memory is ever formed.
            if let Ok(region) = unsafe { qp.register(side.data_at(offset), len, Role::Both) } {
                new.push((chunk, region.key));
            }
        }
        new
    }
}

/// A registered chunk of the peer's arena.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub rkey: u32,
    pub base: u64,
}

/// Keys by chunk; the list ends at the highest chunk that has a key.
#[derive(Debug)]
pub(super) struct Keys<T>(Vec<Option<T>>);

impl<T> Default for Keys<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Copy> Keys<T> {
    pub fn get(&self, chunk: u32) -> Option<T> {
        self.0.get(chunk as usize).copied().flatten()
    }

    /// Sets the key of a chunk. False if the chunk has one already.
    pub fn set(&mut self, chunk: u32, key: T) -> bool {
        let at = chunk as usize;
        if self.0.len() <= at {
            self.0.resize(at + 1, None);
        }
        match self.0.get_mut(at) {
            Some(slot) if slot.is_none() => {
                *slot = Some(key);
                true
            }
            _ => false,
        }
    }
}

/// The keys of both arenas' chunks.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    /// Of this end's arena: the key for the peer, and the address.
    pub mine: Keys<Target>,
    pub announced: Keys<()>,
    /// Of this end's arena: the key for this end's READs.
    pub sinks: Keys<u32>,
    /// Of the mirror: the key for this end's WRITEs.
    pub mirror: Keys<u32>,
    /// Of the peer's arena, as its CHUNK records name them.
    pub theirs: Keys<Target>,
}
