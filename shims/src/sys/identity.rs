//! Checks whether an fd still stands for the kernel's socket that it was created for. A program can close an fd where
//! no hook sees it: by an inline system call, by io_uring, in libc's stdio. The kernel then gives the fd to the next
//! file, and bytes for that file must not reach the connection.
//!
//! The kernel's socket is identified by its cookie (SO_COOKIE, socket(7)), which the kernel gives to no other socket.
//! Reading the cookie is a system call. So the hot path reads it only if the kernel's clock has
//! [ticked](crate::sys::time::tick) since the last check. A tick comes every 1 to 10 ms (4 ms on Debian). A server of
//! 50 connections at a million requests a second uses each connection every 50 us. With a check at each use it would
//! serve a third of the requests.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::io::Errno;

use crate::sys::sockopt;

/// The option that reads a socket's cookie (asm-generic/socket.h).
const SO_COOKIE: c_int = 57;

/// The cookie of the kernel's socket behind an object's fds; 0 means unknown.
#[derive(Default)]
pub struct Cookie(AtomicU64);

impl Cookie {
    /// Stores the cookie of the socket behind `fd`. The kernel may not return it: before Linux 4.12, or if a seccomp
    /// filter forbids the call. In that case `is_behind` returns true for every fd.
    pub fn record(&self, fd: BorrowedFd<'_>) {
        self.0.store(ask(fd).unwrap_or(None).unwrap_or(0), Release);
    }

    /// Forgets the cookie: the object has no socket yet.
    pub fn clear(&self) {
        self.0.store(0, Release);
    }

    /// Returns whether `fd` stands for the socket of the stored cookie.
    pub fn is_behind(&self, fd: BorrowedFd<'_>) -> bool {
        let known = self.0.load(Acquire);
        // A seccomp filter that no hook has seen may forbid getsockopt(2). In that case `fd` counts as unchanged.
        known == 0 || ask(fd).is_none_or(|cookie| cookie == Some(known))
    }
}

/// Returns the cookie of the socket behind `fd`, or `Some(None)` if `fd` is no socket. `None` if the kernel does not
/// report it.
fn ask(fd: BorrowedFd<'_>) -> Option<Option<u64>> {
    match sockopt::bytes(fd, (libc::SOL_SOCKET, SO_COOKIE)) {
        Ok((cookie, _)) => Some(Some(u64::from_ne_bytes(cookie))),
        Err(Errno::BADF | Errno::NOTSOCK) => Some(None),
        Err(_) => None,
    }
}

/// The last check that an fd stands for the socket: its tick and the fd. Threads share the value without a lock. If two
/// threads find a check due at the same time, both may make it.
#[derive(Default)]
pub struct Seen {
    /// The tick, with the fd in its low bits.
    at: AtomicU64,
}

impl Seen {
    /// Returns whether the caller has to check `fd`. If so, records `fd` as checked at the present tick.
    #[inline]
    pub fn is_due(&self, fd: c_int) -> bool {
        self.is_due_at(fd, crate::sys::time::tick())
    }

    /// Does what [`is_due`](Self::is_due) does, for a [tick](crate::sys::time::tick) that the caller has just read.
    #[inline]
    pub fn is_due_at(&self, fd: c_int, tick: u64) -> bool {
        let due = !self.is_at(fd, tick);
        if due {
            self.note_at(fd, tick);
        }
        due
    }

    /// Returns whether `fd` was checked at this [tick](crate::sys::time::tick).
    #[inline]
    pub fn is_at(&self, fd: c_int, tick: u64) -> bool {
        self.at.load(Relaxed) == at(tick, fd)
    }

    /// Records that `fd` was checked at `tick`.
    pub fn note_at(&self, fd: c_int, tick: u64) {
        self.at.store(at(tick, fd), Relaxed);
    }

    /// Returns the [tick](crate::sys::time::tick) of the last check, rounded down to a multiple of 4,096 ns; 0 if there
    /// is none.
    #[inline]
    pub fn tick(&self) -> u64 {
        self.at.load(Relaxed) & !FD_MASK
    }

    /// Forgets the last check, so that the next use makes one.
    pub fn forget(&self) {
        self.at.store(0, Relaxed);
    }
}

#[inline]
fn at(tick: u64, fd: c_int) -> u64 {
    tick & !FD_MASK | fd as u64 & FD_MASK
}

/// The low bits of a tick in ns, which `at` replaces by the fd. Two fds that differ by a multiple of 4,096 count as the
/// same.
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
        // A seccomp filter belongs to its thread and ends with it.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                refuse(libc::SYS_getsockopt, libc::EPERM);
                assert!(cookie.is_behind(other.as_fd()));
            });
        });
    }

    /// Makes a system call of this thread fail from here on, by a filter that no hook sees.
    fn refuse(number: libc::c_long, error: c_int) {
        let instruction = |code: u32, jf: u8, k: u32| libc::sock_filter {
            code: code as u16,
            jt: 0,
            jf,
            k,
        };
        let mut program = [
            // The system call's number is the first word that a filter reads (seccomp(2)).
            instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
            instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, number as u32),
            instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | error as u32),
            instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let filter = libc::sock_fprog {
            len: program.len() as u16,
            filter: program.as_mut_ptr(),
        };
        // SAFETY: valid arguments; the kernel copies the filter.
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
