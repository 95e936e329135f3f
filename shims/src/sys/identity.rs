//! Whether a number still stands for the kernel's socket that it was given for. A program can close one where no hook
//! sees it: by a system call of its own, by io_uring, in libc's stdio. The kernel then gives the number to the next
//! file, and what is meant for that must not reach the connection.
//!
//! The kernel's socket is known by its cookie (SO_COOKIE, socket(7)), which it never gives to another. To ask for it is
//! a system call, so the hot path asks only if the kernel's clock has [ticked](crate::sys::time::tick) since the last
//! answer, which is every 1 to 10 ms (4 ms on Debian). A server of 50 connections at a million requests a second uses
//! each every 50 us; if it asked each time it would be a third as fast.

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
    /// Remembers the socket behind `fd`. Where the kernel does not say (before Linux 4.12, or a filter forbids to ask),
    /// no number is doubted.
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
    let errno = crate::sys::errno::get();
    let mut cookie = 0u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel's own call with a buffer of the right size; libc's hook is not entered.
    let r = unsafe {
        crate::sys::real::getsockopt()(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    let error = crate::sys::errno::get();
    crate::sys::errno::set(errno);
    match error {
        _ if r == 0 => Some(Some(cookie)),
        libc::EBADF | libc::ENOTSOCK => Some(None),
        _ => None,
    }
}

/// At which tick which number was last seen to stand for the socket. Shared, for calls that hold no lock; what two
/// threads find at once they may both look up.
#[derive(Default)]
pub struct Seen {
    /// The tick, and the number in its low bits.
    at: AtomicU64,
}

impl Seen {
    /// Whether it is time to look again at `fd`; from then on it counts as looked at.
    #[inline]
    pub fn is_due(&self, fd: c_int) -> bool {
        self.is_due_at(fd, crate::sys::time::tick())
    }

    /// The same, at a [tick](crate::sys::time::tick) that has just been read.
    #[inline]
    pub fn is_due_at(&self, fd: c_int, tick: u64) -> bool {
        let due = !self.is_at(fd, tick);
        if due {
            self.note_at(fd, tick);
        }
        due
    }

    /// Whether `fd` has been looked at at this [tick](crate::sys::time::tick).
    #[inline]
    pub fn is_at(&self, fd: c_int, tick: u64) -> bool {
        self.at.load(Relaxed) == at(tick, fd)
    }

    /// It has been.
    pub fn note_at(&self, fd: c_int, tick: u64) {
        self.at.store(at(tick, fd), Relaxed);
    }

    /// `fd` has been looked at just now.
    pub fn note(&self, fd: c_int) {
        self.note_at(fd, crate::sys::time::tick());
    }

    /// The [tick](crate::sys::time::tick) of the last look, to within 4 us; 0 if that is forgotten.
    #[inline]
    pub fn tick(&self) -> u64 {
        self.at.load(Relaxed) & !FD_MASK
    }

    /// Whatever is used next is looked at before.
    pub fn forget(&self) {
        self.at.store(0, Relaxed);
    }
}

#[inline]
fn at(tick: u64, fd: c_int) -> u64 {
    tick & !FD_MASK | fd as u64 & FD_MASK
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
    fn where_it_is_forbidden_to_ask_no_number_is_doubted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let cookie = Cookie::default();
        cookie.record(listener.as_fd());
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!cookie.is_behind(other.as_fd()));
        // A thread's filter is its own, and ends with it.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                refuse(libc::SYS_getsockopt, libc::EPERM);
                assert!(cookie.is_behind(other.as_fd()));
            });
        });
    }

    /// Has a system call of this thread fail from now on, where no hook sees it.
    fn refuse(number: libc::c_long, error: c_int) {
        let instruction = |code: u32, jf: u8, k: u32| libc::sock_filter {
            code: code as u16,
            jt: 0,
            jf,
            k,
        };
        let mut program = [
            // The number is the first word of what a filter sees (seccomp(2)).
            instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
            instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, number as u32),
            instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | error as u32),
            instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let filter = libc::sock_fprog {
            len: program.len() as u16,
            filter: program.as_mut_ptr(),
        };
        // SAFETY: valid arguments; the filter is copied.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let mode = libc::SECCOMP_MODE_FILTER;
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter), 0);
        }
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
