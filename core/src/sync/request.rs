//! Requests of many threads that one thread serves together ([`Request`]).

use super::words::{AtomicBool, Ordering, fence_after_rmw};

/// A request that many threads make, and one thread serves later for all of them. Before a thread asks, it has
/// [published](super::Published) what is to be done, or has changed it under a lock that the server takes. Only the
/// first to ask notifies the server. The server first clears the request, and then checks what is to be done. So what a
/// thread has published is served after it asked, or is requested again.
#[derive(Debug, Default)]
pub struct Request(AtomicBool);

impl Request {
    /// Returns a request that was not made.
    pub fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Makes the request. Returns `true` for the first request since the server last began: the caller must notify the
    /// server.
    #[inline]
    #[must_use]
    pub fn ask(&self) -> bool {
        // The request is mostly pending already: a load leaves the cache line shared, a swap would not.
        !self.0.load(Ordering::SeqCst) && !self.0.swap(true, Ordering::SeqCst)
    }

    /// Returns whether a request is pending. Only a hint.
    #[inline]
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Clears the request before it is served: later requests count anew. Then check what is to be done. Returns `true`
    /// if a request was pending.
    pub fn begin(&self) -> bool {
        let was_asked = self.0.swap(false, Ordering::SeqCst);
        fence_after_rmw();
        was_asked
    }
}
