//! Whether a number still stands for the kernel's socket that it was given for. A program can close one where no
//! hook sees it: by a system call of its own, by io_uring, in libc's stdio. The kernel then gives the number to the next
//! file, and what is meant for that must not reach the connection.
//!
//! The kernel's socket is known by its cookie (SO_COOKIE, socket(7)), which it never gives to another. To ask for it
//! is a system call, so the hot path asks only if the kernel's clock has [ticked](crate::time::tick) since the last answer,
//! which is every 1 to 10 ms (4 ms on Debian). A server of 50 connections at a million requests a second uses each
//! every 50 us; if it asked each time it would be a third as fast.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// Not among libc's constants (asm-generic/socket.h).
const SO_COOKIE: c_int = 57;

/// The kernel's socket behind an object's numbers; 0 is not known.
#[derive(Default)]
pub struct Cookie(AtomicU64);

impl Cookie {
    /// Remembers the socket behind `fd`. Where the kernel does not say (before Linux 4.12, or a filter forbids to ask), no
    /// number is doubted.
    pub fn record(&self, fd: BorrowedFd<'_>) {
        self.0.store(ask(fd).unwrap_or(None).unwrap_or(0), Release);
    }

    /// No socket yet.
    pub fn clear(&self) {
        self.0.store(0, Release);
    }

    /// Whether `fd` stands for the socket.
    pub fn is_behind(&self, fd: BorrowedFd<'_>) -> bool {
        let known = self.0.load(Acquire);
        // Forbidden to ask, by a filter that no hook has seen: nothing is known to have changed.
        known == 0 || ask(fd).is_none_or(|cookie| cookie == Some(known))
    }
}

/// The cookie of the socket behind `fd`, if it is one; `None` where the kernel does not tell.
fn ask(fd: BorrowedFd<'_>) -> Option<Option<u64>> {
    let errno = crate::errno::get();
    let mut cookie = 0u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel's own call with a buffer of the right size; libc's hook is not entered.
    let r = unsafe {
        crate::real::getsockopt()(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    let error = crate::errno::get();
    crate::errno::set(errno);
    match error {
        _ if r == 0 => Some(Some(cookie)),
        libc::EBADF | libc::ENOTSOCK => Some(None),
        _ => None,
    }
}

/// At which tick which number was last seen to stand for the socket. Shared, for calls that hold no lock; what two threads
/// find at once they may both look up.
#[derive(Default)]
pub struct Seen {
    /// The tick, and the number in its low bits.
    at: AtomicU64,
}

impl Seen {
    /// Whether it is time to look again at `fd`; from then on it counts as looked at.
    #[inline]
    pub fn is_due(&self, fd: c_int) -> bool {
        self.is_due_at(fd, crate::time::tick())
    }

    /// The same, at a [tick](crate::time::tick) that has just been read.
    #[inline]
    pub fn is_due_at(&self, fd: c_int, tick: u64) -> bool {
        let now = tick & !FD_MASK | fd as u64 & FD_MASK;
        let due = self.at.load(Relaxed) != now;
        if due {
            self.at.store(now, Relaxed);
        }
        due
    }

    /// Whatever is used next is looked at before.
    pub fn forget(&self) {
        self.at.store(0, Relaxed);
    }
}

/// The number, in the low bits of a time in ns; two that differ by a multiple of this pass for one.
const FD_MASK: u64 = 0xfff;

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_copy_is_the_socket_and_whatever_else_gets_the_number_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let cookie = Cookie::default();
        cookie.record(stream.as_fd());
        assert!(cookie.is_behind(stream.as_fd()));
        assert!(cookie.is_behind(stream.try_clone().unwrap().as_fd()));
        assert!(!cookie.is_behind(listener.as_fd()));
        assert!(!cookie.is_behind(std::io::stdin().as_fd()));
    }

    #[test]
    fn an_answer_is_good_for_its_number_until_the_clock_ticks_or_it_is_forgotten() {
        let seen = Seen::default();
        assert!(seen.is_due_at(5, 8_000_000));
        assert!(!seen.is_due_at(5, 8_000_000));
        assert!(seen.is_due_at(6, 8_000_000), "of another number");
        assert!(seen.is_due_at(6, 12_000_000), "at another tick");
        seen.forget();
        assert!(seen.is_due_at(6, 12_000_000));
    }
}
