//! Keepalive for the anchors of streams between hosts. The data of such a connection takes another way, so it looks
//! idle to a firewall, which would forget it.
//!
//! The library switches keepalive on only where the program has not. Its probes are so patient that they end no
//! connection that would have lived. While the library's keepalive is on, the program reads and changes its own
//! settings, which are kept here.
//!
//! Where the program has its own keepalive, the kernel does not probe while bytes are on their way. A marker may be on
//! its way to a host that is gone. TCP_USER_TIMEOUT (tcp(7)) takes the place of the probes until the marker is
//! acknowledged.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32};

use rdmasock_core::lock::Lock;

use crate::sys::sockopt::{Name, USER_TIMEOUT, get, set};

/// Silence before the first probe, s. Shorter than firewalls remember a connection (RFC 5382, REQ-5: 2 hours and 4
/// minutes; real ones, from 5 minutes on).
const IDLE_SECONDS: c_int = 240;
/// Probes that may stay unanswered. This is the most that Linux accepts, over two hours at its usual interval.
const PROBES: c_int = 127;

const SWITCH: Name = (libc::SOL_SOCKET, libc::SO_KEEPALIVE);
const OURS: [Name; 2] = [
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
];
const VALUES: [c_int; 2] = [IDLE_SECONDS, PROBES];
const INTERVAL: Name = (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL);

/// The program's settings, while the kernel has the library's.
pub struct Keepalive {
    /// Held by a thread that changes the kept settings together with the kernel's. Without it a setting that the
    /// program makes meanwhile would be lost, or the library's would stay for ever. Changes of the same thread, in a
    /// signal handler, go on without the lock.
    changing: Lock<()>,
    on: AtomicBool,
    kept: [AtomicI32; 2],
    /// The kernel has the library's TCP_USER_TIMEOUT; the program has set none.
    bounded: AtomicBool,
}

impl Default for Keepalive {
    fn default() -> Self {
        Self {
            changing: Lock::new(()),
            on: AtomicBool::new(false),
            kept: Default::default(),
            bounded: AtomicBool::new(false),
        }
    }
}

impl Keepalive {
    /// Starts anew, for a new connection in the same slot.
    pub fn reset(&self) {
        self.on.store(false, Relaxed);
        self.bounded.store(false, Relaxed);
    }

    /// Frees the lock in a fork child, whose other threads are gone.
    ///
    /// # Safety
    /// No other thread of this process may use it.
    pub unsafe fn reset_in_child(&self) {
        // SAFETY: no other thread uses the lock, by the contract. The lock guards no value, and the kept settings stay
        // as they are.
        unsafe { self.changing.reset() };
    }

    /// Bounds how long the next marker may stay unacknowledged, if the program has its own keepalive. The bound is the
    /// time after which that keepalive ends a connection.
    pub fn bound(&self, fd: BorrowedFd<'_>) {
        let _changing = self.changing.lock();
        if self.on.load(Acquire) || get(fd, SWITCH) != Some(1) || get(fd, USER_TIMEOUT) != Some(0) {
            return;
        }
        let [idle, probes] = OURS.map(|option| get(fd, option));
        let (Some(idle), Some(probes), Some(every)) = (idle, probes, get(fd, INTERVAL)) else {
            return;
        };
        let ms = every.saturating_mul(probes).saturating_add(idle).saturating_mul(1000);
        self.bounded.store(true, Release);
        set(fd, USER_TIMEOUT, ms);
    }

    fn unbound(&self, fd: BorrowedFd<'_>) {
        if self.bounded.swap(false, AcqRel) {
            set(fd, USER_TIMEOUT, 0);
        }
    }

    /// Switches the library's keepalive on, if the program has none.
    pub fn begin(&self, fd: BorrowedFd<'_>) {
        let _changing = self.changing.lock();
        if self.on.load(Acquire) || get(fd, SWITCH) != Some(0) {
            return;
        }
        for (kept, option) in self.kept.iter().zip(OURS) {
            let Some(value) = get(fd, option) else { return };
            kept.store(value, Relaxed);
        }
        self.on.store(true, Release);
        for (option, value) in OURS.into_iter().zip(VALUES) {
            set(fd, option, value);
        }
        set(fd, SWITCH, 1);
    }

    /// Gives the kernel the program's settings again.
    pub fn end(&self, fd: BorrowedFd<'_>) {
        let _changing = self.changing.lock();
        self.end_changing(fd);
    }

    fn end_changing(&self, fd: BorrowedFd<'_>) {
        self.unbound(fd);
        if !self.on.load(Acquire) {
            return;
        }
        set(fd, SWITCH, 0);
        for (option, kept) in OURS.into_iter().zip(&self.kept) {
            set(fd, option, kept.load(Relaxed));
        }
        // Cleared last: until then the program reads the kept settings.
        self.on.store(false, Release);
    }

    /// Returns the value that the program has to read for an option; `None` where the kernel's own is right.
    pub fn get(&self, level: c_int, name: c_int) -> Option<c_int> {
        if (level, name) == USER_TIMEOUT && self.bounded.load(Acquire) {
            return Some(0);
        }
        if !self.on.load(Acquire) {
            return None;
        }
        if (level, name) == SWITCH {
            return Some(0);
        }
        let at = OURS.iter().position(|o| *o == (level, name))?;
        self.kept.get(at).map(|kept| kept.load(Relaxed))
    }

    /// Returns whether [`on_set`](Self::on_set) has to serve the program's setsockopt.
    pub fn is_concerned(level: c_int, name: c_int) -> bool {
        let option = (level, name);
        option == SWITCH || option == USER_TIMEOUT || OURS.contains(&option)
    }

    /// Serves the program's setsockopt of one of the options, which all take an int. `ask` makes the kernel's call:
    /// `Ok` is the value that the kernel has accepted, `Err` the failed call's result. Returns the call's result.
    pub fn on_set(
        &self,
        fd: BorrowedFd<'_>,
        level: c_int,
        name: c_int,
        ask: impl FnOnce() -> Result<c_int, c_int>,
    ) -> c_int {
        let _changing = self.changing.lock();
        match ask() {
            Ok(value) => {
                self.taken(fd, level, name, value);
                0
            }
            Err(result) => result,
        }
    }

    /// Updates the kept settings after the kernel has accepted the program's.
    fn taken(&self, fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) {
        if (level, name) == USER_TIMEOUT {
            self.bounded.store(false, Release);
        } else if (level, name) == SWITCH {
            if !self.on.load(Acquire) {
                if value == 0 {
                    self.unbound(fd);
                }
            } else if value == 0 {
                set(fd, SWITCH, 1);
            } else {
                self.end_changing(fd);
                set(fd, SWITCH, 1);
            }
        } else if self.on.load(Acquire)
            && let Some(at) = OURS.iter().position(|o| *o == (level, name))
            && let (Some(kept), Some(ours)) = (self.kept.get(at), VALUES.get(at))
        {
            kept.store(value, Relaxed);
            set(fd, (level, name), *ours);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn all(socket: &std::net::TcpListener) -> [Option<c_int>; 3] {
        let fd = socket.as_fd();
        [get(fd, SWITCH), get(fd, OURS[0]), get(fd, OURS[1])]
    }

    fn program_sets(keepalive: &Keepalive, fd: BorrowedFd<'_>, (level, name): Name, value: c_int) {
        assert!(Keepalive::is_concerned(level, name));
        let ask = || {
            set(fd, (level, name), value);
            Ok(value)
        };
        assert_eq!(keepalive.on_set(fd, level, name, ask), 0);
    }

    #[test]
    fn what_the_program_sets_while_ours_ends_or_begins_stays() {
        const ROUNDS: c_int = 2000;
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let fd = socket.as_fd();
        let (keepalive, barrier) = (Keepalive::default(), std::sync::Barrier::new(2));
        let mut lost = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    barrier.wait();
                    keepalive.begin(fd);
                    if round % 2 == 0 {
                        keepalive.end(fd);
                    }
                    barrier.wait();
                }
            });
            for round in 0..ROUNDS {
                barrier.wait();
                program_sets(&keepalive, fd, OURS[0], 500 + round);
                barrier.wait();
                keepalive.end(fd);
                if all(&socket)[..2] != [Some(0), Some(500 + round)] {
                    lost.push(round);
                }
            }
        });
        assert_eq!(lost, []);
    }

    #[test]
    fn the_program_sees_and_gets_back_its_own_settings() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let fd = socket.as_fd();
        set(fd, OURS[0], 777);
        let own = all(&socket);
        let keepalive = Keepalive::default();
        keepalive.begin(fd);
        assert_eq!(all(&socket), [Some(1), Some(IDLE_SECONDS), Some(PROBES)]);
        assert_eq!(keepalive.get(SWITCH.0, SWITCH.1), Some(0));
        assert_eq!(keepalive.get(OURS[0].0, OURS[0].1), Some(777));
        program_sets(&keepalive, fd, OURS[0], 888);
        assert_eq!(get(fd, OURS[0]), Some(IDLE_SECONDS));
        keepalive.end(fd);
        assert_eq!(all(&socket), [own[0], Some(888), own[2]]);
    }

    #[test]
    fn a_program_with_its_own_keepalive_keeps_it() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let fd = socket.as_fd();
        set(fd, SWITCH, 1);
        let own = all(&socket);
        let keepalive = Keepalive::default();
        keepalive.begin(fd);
        assert_eq!(all(&socket), own);
        set(fd, SWITCH, 0);
        keepalive.begin(fd);
        program_sets(&keepalive, fd, SWITCH, 1);
        assert_eq!(all(&socket), own);
        assert_eq!(keepalive.get(SWITCH.0, SWITCH.1), None);
    }

    #[test]
    fn what_we_say_is_answered_within_the_programs_patience() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let fd = socket.as_fd();
        let keepalive = Keepalive::default();
        let ours = |keepalive: &Keepalive| keepalive.get(USER_TIMEOUT.0, USER_TIMEOUT.1);
        let probes = |on| {
            set(fd, SWITCH, on);
            keepalive.bound(fd);
        };
        // Without keepalive there is no time-out to bound by.
        probes(0);
        assert_eq!((get(fd, USER_TIMEOUT), ours(&keepalive)), (Some(0), None));
        for (option, value) in [(OURS[0], 20), (OURS[1], 3), (INTERVAL, 5)] {
            set(fd, option, value);
        }
        probes(1);
        assert_eq!((get(fd, USER_TIMEOUT), ours(&keepalive)), (Some(35_000), Some(0)));
        keepalive.end(fd);
        assert_eq!((get(fd, USER_TIMEOUT), ours(&keepalive)), (Some(0), None));
        // The program switches its keepalive off.
        probes(1);
        program_sets(&keepalive, fd, SWITCH, 0);
        assert_eq!((get(fd, USER_TIMEOUT), ours(&keepalive)), (Some(0), None));
        assert_eq!(get(fd, SWITCH), Some(0));
        // The program's own time-out holds, and stays afterwards.
        probes(1);
        program_sets(&keepalive, fd, USER_TIMEOUT, 4000);
        keepalive.end(fd);
        probes(1);
        assert_eq!((get(fd, USER_TIMEOUT), ours(&keepalive)), (Some(4000), None));
    }
}
