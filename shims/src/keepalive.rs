//! Keepalive for the anchors of streams between hosts: a connection whose data takes another way looks
//! idle to a firewall, which would forget it.
//!
//! Only where the program has none of its own, and so patient that it ends nothing that would have
//! lived. While ours is on, the program reads and changes its own settings, which are kept here.
//!
//! Where it has its own: the kernel does not probe while something is on its way, and what the library says in TCP may
//! be, to a host that is gone. Until it is answered TCP_USER_TIMEOUT (tcp(7)) stands for the probes.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{
    AtomicBool, AtomicI32,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use crate::sockopt::{Name, USER_TIMEOUT, get, set};

/// After how much silence to probe, s: less than firewalls remember (RFC 5382, REQ-5: 2 hours and 4 minutes;
/// real ones, from 5 minutes on).
const IDLE_SECONDS: c_int = 240;
/// Probes that may stay unanswered: the most that Linux takes, over two hours with its usual interval.
const PROBES: c_int = 127;

const SWITCH: Name = (libc::SOL_SOCKET, libc::SO_KEEPALIVE);
const OURS: [Name; 2] = [
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
];
const VALUES: [c_int; 2] = [IDLE_SECONDS, PROBES];
const INTERVAL: Name = (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL);

/// The program's settings, while the kernel has ours.
#[derive(Debug, Default)]
pub struct Keepalive {
    on: AtomicBool,
    /// Somebody gives the kernel the program's: one does.
    ending: AtomicBool,
    kept: [AtomicI32; 2],
    /// The kernel has a TCP_USER_TIMEOUT of ours; the program's is none.
    bounded: AtomicBool,
}

impl Keepalive {
    /// A new connection in the same slot.
    pub fn reset(&self) {
        self.on.store(false, Relaxed);
        self.ending.store(false, Relaxed);
        self.bounded.store(false, Relaxed);
    }

    /// What the library says in TCP next is to be answered within the time after which the program's own keepalive ends
    /// a connection, if it has one.
    pub fn bound(&self, fd: BorrowedFd<'_>) {
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

    /// Begins, if the program has none.
    pub fn begin(&self, fd: BorrowedFd<'_>) {
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

    /// The kernel has the program's settings again.
    pub fn end(&self, fd: BorrowedFd<'_>) {
        self.unbound(fd);
        if !self.on.load(Acquire) || self.ending.swap(true, AcqRel) {
            return;
        }
        if !self.on.load(Acquire) {
            // Somebody else has, just now.
            self.ending.store(false, Release);
            return;
        }
        set(fd, SWITCH, 0);
        for (option, kept) in OURS.into_iter().zip(&self.kept) {
            set(fd, option, kept.load(Relaxed));
        }
        // Last: until then the program is told what is kept.
        self.on.store(false, Release);
        for ((option, ours), kept) in OURS.into_iter().zip(VALUES).zip(&self.kept) {
            // It has set one in the middle of this.
            if get(fd, option) == Some(ours) {
                set(fd, option, kept.load(Relaxed));
            }
        }
        self.ending.store(false, Release);
    }

    /// What the program is to read for an option; `None` where the kernel knows.
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

    /// Whether what the program sets is for [`on_set`](Self::on_set). These options take an int.
    pub fn is_concerned(&self, level: c_int, name: c_int) -> bool {
        self.get(level, name).is_some() || (level, name) == SWITCH && self.bounded.load(Acquire)
    }

    /// The program has set one of the options, which the kernel has taken.
    pub fn on_set(&self, fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) {
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
                self.end(fd);
                set(fd, SWITCH, 1);
            }
        } else if let Some(at) = OURS.iter().position(|o| *o == (level, name))
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
        set(fd, OURS[0], 888);
        keepalive.on_set(fd, OURS[0].0, OURS[0].1, 888);
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
        set(fd, SWITCH, 1);
        assert!(keepalive.is_concerned(SWITCH.0, SWITCH.1));
        assert!(!keepalive.is_concerned(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY));
        keepalive.on_set(fd, SWITCH.0, SWITCH.1, 1);
        assert_eq!(all(&socket), own);
        assert!(!keepalive.is_concerned(SWITCH.0, SWITCH.1));
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
        // Nobody probes.
        probes(0);
        assert_eq!((get(fd, USER_TIMEOUT), ours(&keepalive)), (Some(0), None));
        for (option, value) in [(OURS[0], 20), (OURS[1], 3), (INTERVAL, 5)] {
            set(fd, option, value);
        }
        probes(1);
        assert_eq!((get(fd, USER_TIMEOUT), ours(&keepalive)), (Some(35_000), Some(0)));
        keepalive.end(fd);
        assert_eq!((get(fd, USER_TIMEOUT), ours(&keepalive)), (Some(0), None));
        // The program does not want to probe any more.
        probes(1);
        set(fd, SWITCH, 0);
        assert!(keepalive.is_concerned(SWITCH.0, SWITCH.1));
        keepalive.on_set(fd, SWITCH.0, SWITCH.1, 0);
        assert_eq!((get(fd, USER_TIMEOUT), ours(&keepalive)), (Some(0), None));
        assert_eq!(get(fd, SWITCH), Some(0));
        // The program's own holds, also afterwards.
        probes(1);
        set(fd, USER_TIMEOUT, 4000);
        keepalive.on_set(fd, USER_TIMEOUT.0, USER_TIMEOUT.1, 4000);
        keepalive.end(fd);
        probes(1);
        assert_eq!((get(fd, USER_TIMEOUT), ours(&keepalive)), (Some(4000), None));
    }
}
