//! A word that names the waiter to notify about news ([`Attention`]).

use super::words::{AtomicU32, Ordering, fence_after_rmw};

/// A word by which a reader asks a publisher for a notification. The reader arms the word, then checks for news; the
/// publisher publishes its news, then takes the word. So the reader finds the news, or the publisher finds the word
/// armed. A publisher that takes a value other than 0 must notify the waiter that the value names.
///
/// In memory: one word, where 0 names no waiter.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Attention(AtomicU32);

impl Attention {
    /// Returns a word that is not armed.
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Asks for a notification by these bits, in addition to the bits that are set. Then check for news
    /// ([`Published::look`](super::Published::look)).
    #[inline]
    pub fn arm(&self, bits: u32) {
        self.0.fetch_or(bits, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Arms the word as [`arm`](Self::arm) does, for a reader that has armed it before and whose bits are seldom taken
    /// since.
    #[inline]
    pub fn keep_armed(&self, bits: u32) {
        // If the bits are still set, no publisher has taken them: a publisher that publishes after this load takes
        // them.
        if self.0.load(Ordering::SeqCst) & bits != bits {
            self.0.fetch_or(bits, Ordering::SeqCst);
        }
        fence_after_rmw();
    }

    /// Takes the word after a [publication](super::Published::publish). Returns the waiters to notify of it; 0 if there
    /// are none.
    #[inline(always)]
    pub fn take(&self) -> u32 {
        // The word is seldom set: a load leaves the cache line shared, a swap would not.
        if self.0.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        let bits = self.0.swap(0, Ordering::SeqCst);
        fence_after_rmw();
        bits
    }

    /// Returns the bits that this side has armed and no publisher has taken. A reader that arms the word before it
    /// raises its [`SleepFlag`](super::SleepFlag) checks this afterwards. A publisher that took the word before has
    /// found the flag down, so it rings no bell.
    #[inline]
    pub fn left(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Withdraws the bits that this side has armed; writes to the cache line only if needed. A notification that a
    /// publisher has begun already still arrives.
    pub fn disarm(&self, bits: u32) {
        if self.0.load(Ordering::Relaxed) & bits != 0 {
            self.0.fetch_and(!bits, Ordering::SeqCst);
        }
    }

    /// Disarms the word where neither side uses it. Releases the resets before it to later users of the word.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Release);
    }
}
