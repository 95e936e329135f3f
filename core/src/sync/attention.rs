//! Whom to tell when there is something new ([`Attention`]).

use super::words::{AtomicU32, Ordering, fence_after_rmw};

/// A word by which one side asks the other to be told. It arms the word, then looks for what it waits for; the other
/// side publishes that, then takes the word. So the one finds what it waits for, or the other whom to tell. Who takes a
/// value that is not 0 has to tell whom it stands for.
///
/// As in memory: one word, 0 being nobody.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Attention(AtomicU32);

impl Attention {
    /// Nobody is to be told.
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Asks to be told by these bits, beside those that are set. Then look
    /// ([`Published::look`](super::Published::look)).
    #[inline]
    pub fn arm(&self, bits: u32) {
        self.0.fetch_or(bits, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// As [`arm`](Self::arm), for who armed it before: seldom was it taken since.
    #[inline]
    pub fn keep_armed(&self, bits: u32) {
        // If it is still set nobody has taken it: who publishes after this look will.
        if self.0.load(Ordering::SeqCst) & bits != bits {
            self.0.fetch_or(bits, Ordering::SeqCst);
        }
        fence_after_rmw();
    }

    /// After something was [published](super::Published::publish): whom to tell of it.
    #[inline(always)]
    pub fn take(&self) -> u32 {
        // Seldom set: a load leaves the line shared, a swap would not.
        if self.0.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        let bits = self.0.swap(0, Ordering::SeqCst);
        fence_after_rmw();
        bits
    }

    /// What this side has asked for and nobody has taken. To be looked at by who has asked and only then raised its
    /// [`SleepFlag`](super::SleepFlag): who took the word before that has found the flag down, and rings nobody.
    #[inline]
    pub fn left(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Takes back what this side asked for by `bits`, touching the line only if needed. Who is just being told still
    /// is.
    pub fn disarm(&self, bits: u32) {
        if self.0.load(Ordering::Relaxed) & bits != 0 {
            self.0.fetch_and(!bits, Ordering::SeqCst);
        }
    }

    /// Nobody is to be told any more, where neither side uses the word. Releases what was reset before.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Release);
    }
}
