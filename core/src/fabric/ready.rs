//! The queue in which a peer lists, for a waiter, the streams that have events ([`ReadyQueue`]). Sleeping and waking
//! are elsewhere ([`SleepFlag`], `waiter`, `os::doorbell`).
//!
//! A ready queue is a set of vQPNs, not a list: it has a bit for each stream, and a summary bit for each word of those
//! bits. So the queue holds each stream at most once, however often the stream is pushed. It cannot overflow, and has
//! no half-written entries. Every content that a hostile peer can write is a valid one. The waiter drains the queue in
//! sweeps: a sweep takes the summary as it stands, then word by word. So the work of a sweep is bounded, and every
//! ready stream is served before any stream is served again.
//!
//! No wake-up is lost. The peer pushes, then reads the waiter's sleep flag. The waiter raises the flag, then checks the
//! queues ([`ReadyCursor::is_idle`]), then sleeps ([`crate::sync`]). A push sets the stream's bit in its word, and then
//! the summary bit of the word, unless the summary bit is set already. The waiter takes the summary bit before it takes
//! the word, so it finds the stream's bit.
//!
//! [`SleepFlag`]: crate::sync::SleepFlag

use crate::fabric::layout::{GROUP_STREAMS, GROUPS, MAX_STREAMS};
use crate::sync::{AtomicU64, Ordering, Published};

const WORDS: usize = MAX_STREAMS as usize / 64;
const SUMMARY: usize = WORDS.div_ceil(64);
const LINE_WORDS: usize = GROUP_STREAMS as usize / 64;

/// The part of one waiter's ready queue for one group of streams. If all bits are 0, the part is empty.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct ReadyLine {
    words: [Published<AtomicU64>; LINE_WORDS],
    /// Used in the first group's line only. Bit w of all these words together says that word w of the queue may be
    /// nonzero. The summary lies here so that a push for one of the first streams touches one cache line.
    summary: [Published<AtomicU64>; SUMMARY],
}

// The layout of an arena relies on both assertions.
#[cfg(not(loom))]
const _: () = assert!(size_of::<ReadyLine>() == crate::fabric::layout::LINE_BYTES);
#[cfg(not(loom))]
const _: () = assert!(align_of::<ReadyLine>() == crate::fabric::layout::LINE_BYTES);

/// The ready queue of one waiter. Many threads of one peer push; one thread at a time sweeps.
pub trait ReadyQueue {
    /// Returns the line for a group of streams; `None` if there is no such group, or if it is not mapped yet.
    fn line(&self, group: usize) -> Option<&ReadyLine>;

    /// Adds `vqpn`. Has no effect if the queue holds that stream already, or if there is no such stream. After the push
    /// the caller calls [`SleepFlag::must_ring`](crate::sync::SleepFlag::must_ring) on the waiter's flag.
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

/// A queue in this process's own memory.
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

/// The position of a sweep in one ready queue. It is private to the sweeping process, and used under the waiter's lock.
#[derive(Debug, Default)]
pub struct ReadyCursor {
    /// The part of the summary that the sweep has taken and not finished.
    summary: [u64; SUMMARY],
    /// The vQPN of bit 0 of the word that is being served; `bits` has the bits that are left of the word.
    base: u32,
    bits: u64,
}

impl ReadyCursor {
    /// Begins a sweep, unless one is unfinished. The caller then calls [`pop`](Self::pop) until it returns `None`.
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

    /// Returns the next vQPN of this sweep, below `MAX_STREAMS`; its stream need not be open. `None` at the end of the
    /// sweep. A sweep returns at most `MAX_STREAMS` numbers, and touches at most one word of shared memory for 64
    /// streams.
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

    /// Returns whether there is no stream to sweep, neither left over from an unfinished sweep nor newly pushed. The
    /// waiter calls this between [`SleepFlag::begin`](crate::sync::SleepFlag::begin) and sleeping.
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
