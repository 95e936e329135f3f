//! The queue in which a peer lists, for a waiter, the streams that have events ([`ReadyQueue`]). Not for sleeping or
//! waking ([`SleepFlag`], `waiter`, `os::doorbell`).
//!
//! A ready queue is a set of vQPNs, not a list: a bit per stream and a summary bit per word of them. So it holds each
//! stream at most once, however often that is pushed. It cannot overflow, and has no half-written entries. Every
//! content that a hostile peer can write is a valid one. The waiter drains it in sweeps: a sweep takes the summary as
//! it stands, then word by word. That bounds the work, and serves every ready stream before any stream again.
//!
//! No wake-up is lost. The peer pushes, then reads the flag; the waiter raises the flag, then checks the queues
//! ([`ReadyCursor::is_idle`]), then sleeps ([`crate::sync`]). A push that finds its summary bit already set relies on
//! the waiter to take the word after the summary, which it does: the word's bit was set before that summary bit was
//! seen.
//!
//! [`SleepFlag`]: crate::sync::SleepFlag

use crate::fabric::layout::{GROUP_STREAMS, GROUPS, MAX_STREAMS};
use crate::sync::{AtomicU64, Ordering, Published};

const WORDS: usize = MAX_STREAMS as usize / 64;
const SUMMARY: usize = WORDS.div_ceil(64);
const LINE_WORDS: usize = GROUP_STREAMS as usize / 64;

/// The part of one waiter's ready queue for one group of streams. All-zero is empty.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct ReadyLine {
    words: [Published<AtomicU64>; LINE_WORDS],
    /// In the first group's line only. Bit w, of all these words together: word w of the queue may be nonzero. The
    /// summary lies there because a push for one of the first streams then touches one cache line.
    summary: [Published<AtomicU64>; SUMMARY],
}

// The layout of an arena relies on both.
#[cfg(not(loom))]
const _: () = assert!(size_of::<ReadyLine>() == crate::fabric::layout::LINE_BYTES);
#[cfg(not(loom))]
const _: () = assert!(align_of::<ReadyLine>() == crate::fabric::layout::LINE_BYTES);

/// The ready queue of one waiter: many pushers (the threads of one peer), one sweeper.
pub trait ReadyQueue {
    /// Returns the line of a group of streams; `None` where there is none, or not yet.
    fn line(&self, group: usize) -> Option<&ReadyLine>;

    /// Adds `vqpn`. No effect when the queue holds it already, or when there is no such stream. The caller then calls
    /// [`SleepFlag::must_ring`](crate::sync::SleepFlag::must_ring) on the waiter's flag.
    #[inline]
    fn push(&self, vqpn: u32) {
        let (at, bit) = (vqpn as usize / 64, 1u64 << (vqpn % 64));
        let (summary, summary_bit) = (at / 64, 1u64 << (at % 64));
        let (Some(word), Some(summary)) = (word(self, at), self.line(0).and_then(|l| l.summary.get(summary))) else {
            return;
        };
        word.add_bits(bit);
        if summary.look() & summary_bit == 0 {
            summary.add_bits(summary_bit);
        }
    }
}

#[inline]
fn word(queue: &(impl ReadyQueue + ?Sized), at: usize) -> Option<&Published<AtomicU64>> {
    queue.line(at / LINE_WORDS)?.words.get(at % LINE_WORDS)
}

/// A queue outside shared memory.
#[derive(Debug)]
pub struct PrivateQueue(Box<[ReadyLine]>);

impl Default for PrivateQueue {
    fn default() -> Self {
        Self((0..GROUPS).map(|_| ReadyLine::default()).collect())
    }
}

impl PrivateQueue {
    /// Empties the queue.
    pub fn clear(&self) {
        let mut cursor = ReadyCursor::default();
        cursor.begin(self);
        while cursor.pop(self).is_some() {}
    }
}

impl ReadyQueue for PrivateQueue {
    fn line(&self, group: usize) -> Option<&ReadyLine> {
        self.0.get(group)
    }
}

/// The sweeper's private place in one ready queue. Used under the waiter's lock.
#[derive(Debug, Default)]
pub struct ReadyCursor {
    /// The part of the taken summary that is still to be swept.
    summary: [u64; SUMMARY],
    /// The word being served: the vQPN of its bit 0, and the bits left.
    base: u32,
    bits: u64,
}

impl ReadyCursor {
    /// Begins a sweep, unless one is unfinished. Then call [`pop`](Self::pop) until `None`.
    pub fn begin(&mut self, queue: &(impl ReadyQueue + ?Sized)) {
        if self.bits != 0 || self.summary != [0; SUMMARY] {
            return;
        }
        let Some(first) = queue.line(0) else { return };
        for (mine, shared) in self.summary.iter_mut().zip(&first.summary) {
            if shared.load(Ordering::Relaxed) != 0 {
                *mine = shared.take();
            }
        }
    }

    /// Returns the next vQPN of this sweep, below `MAX_STREAMS`; it need not be open. `None` at the end. At most
    /// `MAX_STREAMS` per sweep; touches at most one word of shared memory per 64 streams.
    pub fn pop(&mut self, queue: &(impl ReadyQueue + ?Sized)) -> Option<u32> {
        while self.bits == 0 {
            let (at, summary) = self.summary.iter_mut().enumerate().find(|(_, s)| **s != 0)?;
            let at = at * 64 + summary.trailing_zeros() as usize;
            *summary &= *summary - 1;
            // A hostile summary bit may name a word that does not exist.
            if let Some(shared) = word(queue, at).filter(|_| at < WORDS) {
                self.base = at as u32 * 64;
                self.bits = shared.take();
            }
        }
        let vqpn = self.base + self.bits.trailing_zeros();
        self.bits &= self.bits - 1;
        Some(vqpn)
    }

    /// Returns whether there is no stream to sweep, left over or newly pushed. This is the check between
    /// [`SleepFlag::begin`](crate::sync::SleepFlag::begin) and sleeping.
    #[inline]
    pub fn is_idle(&self, queue: &(impl ReadyQueue + ?Sized)) -> bool {
        self.bits == 0
            && self.summary == [0; SUMMARY]
            && queue
                .line(0)
                .is_none_or(|first| first.summary.iter().all(|s| s.look() == 0))
    }
}

#[cfg(test)]
mod tests;
