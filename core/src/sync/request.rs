//! What many ask for and one does, once for all ([`Request`]).

use super::words::{AtomicBool, Ordering, fence_after_rmw};

/// A request that is asked for again and again and done later, for all who have asked by then. Who asks has before
/// [published](super::Published) what is to be done, or changed it under a lock that is taken to do it; only the first
/// to ask has anybody told. Who does it begins by clearing the request, and looks what is to be done after that. So
/// what was asked for is done after it was asked for, or is asked for again.
#[derive(Debug, Default)]
pub struct Request(AtomicBool);

impl Request {
    /// Nothing was asked for.
    pub fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Asks. True if nobody has since it was last begun: whoever is to do it has to be told.
    #[inline]
    #[must_use]
    pub fn ask(&self) -> bool {
        // Mostly asked already: a load leaves the line shared, a swap would not.
        !self.0.load(Ordering::SeqCst) && !self.0.swap(true, Ordering::SeqCst)
    }

    /// Whether it was asked for and not begun. Only a hint.
    #[inline]
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// It is about to be done: who asks from now on asks again. Then look what there is to do. True if it was asked
    /// for.
    pub fn begin(&self) -> bool {
        let was_asked = self.0.swap(false, Ordering::SeqCst);
        fence_after_rmw();
        was_asked
    }
}
