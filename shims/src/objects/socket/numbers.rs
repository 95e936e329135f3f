//! Which numbers stand for a connection, or have stood, and the kernel's socket behind them.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::sync::Published;

use crate::sys::identity::{Cookie, Seen};

/// What has become of the numbers that stood for a socket.
pub mod closed {
    /// There is one; or the object is not in use.
    pub const OPEN: u8 = 0;
    /// The program has closed the last, and calls that began before are not back: until then all is as it was.
    pub const HELD: u8 = 1;
    /// The last was closed where no hook saw it, and calls that began before are not back: there is no anchor any more.
    pub const LOST: u8 = 2;
}

/// See the module.
pub struct Numbers {
    /// One of them, -1 when closed. Of a connection that lives on for its last bytes it is a number of ours.
    pub fd: AtomicI32,
    /// The kernel's socket behind them.
    pub cookie: Cookie,
    /// When that was last seen, for calls that take no direction's lock.
    pub seen: Seen,
    /// The number of which the program's close is under way and that stands for a dead socket already, or -1. Until the
    /// table has forgotten the number it counts as the connection's.
    pub hidden: AtomicI32,
    /// What has become of them ([`closed`]).
    pub closed: Published<AtomicU8>,
    /// Some were closed by a signal handler that interrupted a use of the object.
    pub orphaned: AtomicBool,
    /// The program has closed them; the connection lives on until the peer has all of it.
    pub left_behind: AtomicBool,
}

impl Numbers {
    /// None yet.
    pub fn new() -> Self {
        Self {
            fd: AtomicI32::new(-1),
            cookie: Cookie::default(),
            seen: Seen::default(),
            hidden: AtomicI32::new(-1),
            closed: Published::from(closed::OPEN),
            orphaned: AtomicBool::new(false),
            left_behind: AtomicBool::new(false),
        }
    }

    /// For a new connection, which `fd` stands for, if it is not negative. The caller alone has it.
    pub fn reset(&self, fd: c_int) {
        self.closed.reset(closed::OPEN);
        self.hidden.store(-1, Relaxed);
        self.orphaned.store(false, Relaxed);
        // SAFETY: the program's number, in the middle of the call that has made it.
        match (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) }) {
            Some(fd) => {
                self.cookie.record(fd);
                // That was a look. A connection of a few calls, which is most of a short one, need not ask once more.
                self.seen.note(fd.as_raw_fd());
            }
            None => {
                self.cookie.clear();
                self.seen.forget();
            }
        }
        self.fd.store(fd, Release);
    }

    /// The anchor, for a call that does not block. The caller holds one of the socket's locks, so
    /// that the number cannot be closed and reused meanwhile. `None` also where that has happened unseen.
    pub fn anchor_fd(&self) -> Option<BorrowedFd<'static>> {
        let fd = self.fd.load(Acquire);
        // SAFETY: a non-negative number is open as long as the caller's lock keeps close() out; one that was closed
        // past the hooks is only asked what it stands for.
        let fd = (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })?;
        self.cookie.is_behind(fd).then_some(fd)
    }

    /// Whether the number stands for the connection, by the kernel's word.
    pub fn is_behind(&self, fd: c_int) -> bool {
        // SAFETY: only asked what it stands for, whether it is open or not.
        let is_it = || self.cookie.is_behind(unsafe { BorrowedFd::borrow_raw(fd) });
        fd >= 0 && (self.hidden.load(Acquire) == fd || is_it())
    }

    /// Whether this number does, at a [tick](crate::sys::time::tick) that has just been read, by a look that is not too
    /// old. Only what was answered counts as seen: others, who rely on it, would go on before the answer is there.
    #[inline]
    pub fn is_seen(&self, fd: c_int, tick: u64) -> bool {
        if self.seen.is_at(fd, tick) {
            return true;
        }
        let is_it = self.is_behind(fd);
        if is_it {
            self.seen.note_at(fd, tick);
        }
        is_it
    }

    /// No number stands for it any more.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed.look() != closed::OPEN
    }

    /// Whether some number still stands for the connection, by a look that is not too old.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.is_seen(self.fd.load(Acquire), crate::sys::time::tick())
    }
}
