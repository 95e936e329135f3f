//! Whether a connection is up, and why it has ended: one word that every thread may read. The first reason stays.

use std::sync::atomic::{AtomicI32, Ordering};

use super::errno::Errno;

/// 0 not up yet, 1 up, negative: over, with the errno.
#[derive(Debug, Default)]
pub struct Fate(AtomicI32);

impl Fate {
    /// Returns the word as the interface does: 0 not up yet, 1 up, negative errno: over.
    pub fn code(&self) -> i32 {
        self.0.load(Ordering::Acquire)
    }

    /// Returns why the connection is over; `None` if it is not.
    pub fn over(&self) -> Option<Errno> {
        let code = self.code();
        (code < 0).then_some(Errno(-code))
    }

    /// Records that the connection is up, unless it is over already.
    pub fn up(&self) {
        let _ = self.0.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Records that the connection is over. True if it was not before.
    pub fn end(&self, reason: Errno) -> bool {
        let code = -reason.0.max(1);
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |now| (now >= 0).then_some(code))
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays() {
        let fate = Fate::default();
        assert_eq!((fate.code(), fate.over()), (0, None));
        fate.up();
        assert_eq!((fate.code(), fate.over()), (1, None));
        assert!(fate.end(Errno(libc::ECONNRESET)));
        assert!(!fate.end(Errno(libc::EIO)));
        fate.up();
        assert_eq!(fate.code(), -libc::ECONNRESET);
        assert_eq!(fate.over(), Some(Errno(libc::ECONNRESET)));
    }
}
