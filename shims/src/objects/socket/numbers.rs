//! Which fds stand for a connection, or have stood for it, and the kernel's socket behind them.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8};

use rdmasock_core::sync::Published;

use crate::sys::identity::{Cookie, Seen};

/// How the fds that stood for a socket were closed.
pub mod closed {
    /// An fd is open; or the object is not in use.
    pub const OPEN: u8 = 0;
    /// The program has closed the last fd, and calls that began before have not returned. Until then the connection
    /// stays as it is.
    pub const HELD: u8 = 1;
    /// The last fd was closed where no hook saw it, and calls that began before have not returned. There is no anchor
    /// any more.
    pub const LOST: u8 = 2;
}

/// The fds of one connection.
pub struct Numbers {
    /// An fd of the socket, -1 when all are closed. It is a hidden fd of the library's if the connection lives on after
    /// the program's close, for its last bytes.
    pub fd: AtomicI32,
    /// The kernel's socket behind them.
    pub cookie: Cookie,
    /// When the kernel's socket was last seen behind an fd, for calls that take no direction's lock.
    pub seen: Seen,
    /// The fd that the program is closing and that stands for a dead socket already, or -1. It counts as the
    /// connection's until the table has removed it.
    pub hidden: AtomicI32,
    /// How the fds were closed ([`closed`]).
    pub closed: Published<AtomicU8>,
    /// A signal handler closed fds while it had interrupted a use of the object.
    pub orphaned: AtomicBool,
    /// The program has closed all fds; the connection lives on until the peer has all bytes.
    pub left_behind: AtomicBool,
}

impl Numbers {
    /// Returns a record without fds.
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

    /// Resets the record for a new connection, which `fd` stands for, if it is not negative. The caller alone has it.
    pub fn reset(&self, fd: c_int) {
        self.closed.reset(closed::OPEN);
        self.hidden.store(-1, Relaxed);
        self.orphaned.store(false, Relaxed);
        // SAFETY: the fd comes from the program's call that has just made it or that uses it, and is open meanwhile.
        match (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) }) {
            Some(fd) => {
                self.cookie.record(fd);
                // `record` has asked the kernel. So a short connection need not ask again in its few calls.
                self.seen.note(fd.as_raw_fd());
            }
            None => {
                self.cookie.clear();
                self.seen.forget();
            }
        }
        self.fd.store(fd, Release);
    }

    /// Returns the anchor, for a system call that does not block. The caller holds one of the socket's locks, so that
    /// the fd cannot be closed and reused meanwhile. `None` if no fd is left, or the fd was closed unseen and reused.
    pub fn anchor_fd(&self) -> Option<BorrowedFd<'static>> {
        let fd = self.fd.load(Acquire);
        // SAFETY: the caller holds a lock that `close` takes, so the fd stays open. An fd that was closed past the
        // hooks is only asked for the socket behind it.
        let fd = (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })?;
        self.cookie.is_behind(fd).then_some(fd)
    }

    /// Asks the kernel whether `fd` stands for the connection.
    pub fn is_behind(&self, fd: c_int) -> bool {
        // SAFETY: the fd is only asked for the socket behind it, which is harmless for any number.
        let is_it = || self.cookie.is_behind(unsafe { BorrowedFd::borrow_raw(fd) });
        fd >= 0 && (self.hidden.load(Acquire) == fd || is_it())
    }

    /// Returns whether `fd` stands for the connection. Asks the kernel unless it was asked at the same
    /// [tick](crate::sys::time::tick), which the caller has just read. The result is recorded only after the kernel's
    /// answer: other calls that rely on the record would go on before it.
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

    /// Returns whether no fd stands for the connection any more.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed.look() != closed::OPEN
    }

    /// Returns whether an fd still stands for the connection, by an answer of the kernel's that is at most a tick old.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.is_seen(self.fd.load(Acquire), crate::sys::time::tick())
    }
}
