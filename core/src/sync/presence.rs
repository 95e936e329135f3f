//! Who is inside something that may be closed at any moment ([`Presence`]).

use super::words::{AtomicU32, Ordering, fence_after_rmw};

/// Counts who is inside. Who comes in counts itself, then looks whether it may stay, and leaves at once if not; who is
/// to have the place to itself publishes that nobody may come in, then looks whether somebody is there. So nobody stays
/// unseen. The last to leave looks whether somebody waits for that, who [published](super::Published) it first: so one
/// of the two finds the place empty.
#[derive(Debug, Default)]
pub struct Presence(AtomicU32);

impl Presence {
    /// Nobody is inside.
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// One more is inside. Then look whether it may stay ([`Published::look`](super::Published::look)).
    #[inline(always)]
    pub fn enter(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// One has left; true if it was the last. Then look whether somebody waits for that. Releases what was done inside
    /// to whoever sees the place [empty](Self::is_empty).
    #[inline(always)]
    pub fn leave(&self) -> bool {
        let is_last = self.0.fetch_sub(1, Ordering::SeqCst) == 1;
        fence_after_rmw();
        is_last
    }

    /// Whether nobody is inside: to be asked after what keeps others out was published, or by the last who left.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// How many are inside.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// In a fork child: nobody is inside.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
