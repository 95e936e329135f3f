//! Reads and sets socket options by raw system calls, so that no hook is entered. [`Keepalive`] keeps the program's
//! keepalive settings while the kernel's socket has the library's.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32};

use rdmasock_core::lock::Lock;
use rdmasock_core::os::kernel;
use rustix::io::Errno;

/// An option's level and name, as in setsockopt(2).
pub(crate) type Name = (c_int, c_int);

/// Returns the value of an int option; `None` if getsockopt(2) fails, as for an option that the kernel does not know.
pub(crate) fn get(fd: BorrowedFd<'_>, name: Name) -> Option<c_int> {
    bytes(fd, name).ok().map(|(value, _)| c_int::from_ne_bytes(value))
}

/// Returns the first `N` bytes of an option's value, and how many of them the kernel has written.
///
/// # Errors
/// The kernel's errno.
pub(crate) fn bytes<const N: usize>(fd: BorrowedFd<'_>, (level, name): Name) -> Result<([u8; N], usize), Errno> {
    kernel::option(fd, level, name)
}

/// Returns the cookie of the network namespace that a socket is in; 0 where the kernel does not report it (before Linux
/// 5.14).
pub(crate) fn namespace(fd: BorrowedFd<'_>) -> u64 {
    bytes(fd, NAMESPACE).map_or(0, |(cookie, _)| u64::from_ne_bytes(cookie))
}

/// Returns the index of the interface that a socket is bound to, 0 if to none. `None` where the kernel does not report
/// it.
pub(crate) fn device(fd: BorrowedFd<'_>) -> Option<u32> {
    if let Some(index) = get(fd, DEVICE) {
        return Some(index.cast_unsigned());
    }
    // A kernel without SO_BINDTOIFINDEX reports only the interface's name, which is empty for an unbound socket.
    let (_, len) = bytes::<{ libc::IFNAMSIZ }>(fd, DEVICE_NAME).ok()?;
    (len == 0).then_some(0)
}

/// Returns whether the peer may still send by TCP: its FIN has not arrived, and the connection has not ended.
pub(crate) fn is_open_to_peer(fd: BorrowedFd<'_>) -> bool {
    // ESTABLISHED, SYN_SENT, SYN_RECV, FIN_WAIT1 and FIN_WAIT2 (Linux, tcp_states.h). The state is the first byte of
    // TCP_INFO.
    bytes(fd, STATE).is_ok_and(|([state], _)| (1..=5).contains(&state))
}

/// Returns the window that the peer has announced, bytes. Where the kernel does not report it (before Linux 5.4),
/// returns its initial size, 64 KiB.
pub(crate) fn peers_window(fd: BorrowedFd<'_>) -> u64 {
    // The offset of `tcpi_snd_wnd` in `tcp_info` (linux/tcp.h), a struct that only grows.
    const SND_WND: usize = 57 * size_of::<u32>();
    match bytes::<{ SND_WND + size_of::<u32>() }>(fd, STATE) {
        Ok((info, len)) if len == info.len() => {
            info.last_chunk().map_or(0, |window| u32::from_ne_bytes(*window).into())
        }
        _ => 64 * 1024,
    }
}

/// Sets an int option. An error is ignored.
pub(crate) fn set(fd: BorrowedFd<'_>, (level, name): Name, value: c_int) {
    let _ = kernel::set_option(fd, level, name, value);
}

/// TCP_INFO: the connection's state and counters.
const STATE: Name = (libc::IPPROTO_TCP, libc::TCP_INFO);
/// SO_NETNS_COOKIE; `DEVICE` below is SO_BINDTOIFINDEX (asm-generic/socket.h).
const NAMESPACE: Name = (libc::SOL_SOCKET, 71);
const DEVICE: Name = (libc::SOL_SOCKET, 62);
const DEVICE_NAME: Name = (libc::SOL_SOCKET, libc::SO_BINDTODEVICE);
/// The number of received bytes from which on a socket is readable and a receive ends: 1 unless the program has set
/// another number.
const LOW_WATER: Name = (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
/// TCP_NOTSENT_LOWAT: the number of unsent bytes from which on a socket is not writable (linux/tcp.h). 0, the default,
/// means the system-wide value, and -1 no limit.
const UNSENT_LOW_WATER: Name = (libc::IPPROTO_TCP, 25);
/// The offset at which MSG_PEEK begins to read: -1, for none, unless the program has set one.
const PEEK_OFFSET: Name = (libc::SOL_SOCKET, libc::SO_PEEK_OFF);
/// The most bytes that the kernel sends per second: -1, for no limit, unless the program has set one.
const PACE: Name = (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE);
/// SO_TIMESTAMP_NEW, SO_TIMESTAMPNS_NEW and SO_TIMESTAMPING_NEW, the variants with a 64-bit time_t
/// (asm-generic/socket.h). With them recvmsg reports when packets came, with the third also when packets were sent. The
/// kernel's getsockopt reports the first two apart from SO_TIMESTAMP and SO_TIMESTAMPNS. The third has the same value
/// as SO_TIMESTAMPING.
const NEW_TIMESTAMP: c_int = 63;
const NEW_TIMESTAMPNS: c_int = 64;
const NEW_TIMESTAMPING: c_int = 65;
/// TCP_INQ: whether recvmsg reports how many bytes are left to receive (tcp(7)).
pub(crate) const INQ: Name = (libc::IPPROTO_TCP, 36);

/// How long sent data may stay unacknowledged before the kernel ends the connection, ms. 0 means the kernel's default
/// (tcp(7)).
pub(crate) const USER_TIMEOUT: Name = (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT);

/// The options by which sending or receiving in the kernel differs from a link. Each has a function that returns
/// whether a value has that effect.
const BEYOND_LINKS: [(Name, Values); 5] = [
    (LOW_WATER, |bytes| bytes != 1),
    (UNSENT_LOW_WATER, |bytes| bytes != 0 && bytes != -1),
    (PEEK_OFFSET, |at| at >= 0),
    (PACE, |bytes| bytes != -1),
    ((libc::SOL_SOCKET, libc::SO_TIMESTAMPING), |flags| flags != 0),
];

/// The options by which a receive reports when its data came, if the caller has passed room for control data. No other
/// call reports that.
const STAMPS: [c_int; 4] = [libc::SO_TIMESTAMP, NEW_TIMESTAMP, libc::SO_TIMESTAMPNS, NEW_TIMESTAMPNS];

type Values = fn(c_int) -> bool;

/// Returns whether the option is one of `STAMPS`.
pub(crate) fn is_stamp((level, name): Name) -> bool {
    level == libc::SOL_SOCKET && STAMPS.contains(&name)
}

/// Returns whether one of `STAMPS` is on. An accepted connection inherits the options of its listener.
pub(crate) fn stamps(fd: BorrowedFd<'_>) -> bool {
    let is_on = |name: &c_int| get(fd, (libc::SOL_SOCKET, *name)).is_some_and(|value| value != 0);
    STAMPS.iter().any(is_on)
}

/// Returns whether the option is one of `BEYOND_LINKS`, also by the second name of SO_TIMESTAMPING.
pub(crate) fn may_be_beyond_links(option: Name) -> bool {
    option == (libc::SOL_SOCKET, NEW_TIMESTAMPING) || BEYOND_LINKS.iter().any(|(name, _)| *name == option)
}

/// Returns whether an option of `BEYOND_LINKS`, or O_ASYNC, makes sending or receiving differ from a link. An accepted
/// connection inherits the options of its listener.
pub(crate) fn is_beyond_links(fd: BorrowedFd<'_>) -> bool {
    let is = |(name, is): &(Name, Values)| get(fd, *name).is_some_and(is);
    // With O_ASYNC the kernel sends a signal for bytes that come by TCP. It sends none for bytes on a link.
    let has_signal = rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.bits() & libc::O_ASYNC.cast_unsigned() != 0);
    has_signal || BEYOND_LINKS.iter().any(is)
}

/// Returns whether the next byte to read from TCP is urgent data (tcp(7), SIOCATMARK).
pub(crate) fn is_at_mark(fd: BorrowedFd<'_>) -> bool {
    const SIOCATMARK: usize = 0x8905;
    ask(fd, SIOCATMARK).is_some_and(|at| at != 0)
}

/// Returns the number of bytes that TCP was given and that the peer's host has not acknowledged (tcp(7), SIOCOUTQ).
pub(crate) fn unsent(fd: BorrowedFd<'_>) -> usize {
    const SIOCOUTQ: usize = libc::TIOCOUTQ as usize;
    ask(fd, SIOCOUTQ).map_or(0, |n| n.unsigned_abs() as usize)
}

/// Returns an int that ioctl(2) reports; `None` if it fails.
fn ask(fd: BorrowedFd<'_>, request: usize) -> Option<c_int> {
    let mut value: c_int = 0;
    let arguments = [
        fd.as_raw_fd() as usize,
        request,
        kernel::address(&raw mut value),
        0,
        0,
        0,
    ];
    // SAFETY: the system call writes one int, to `value`.
    let result = unsafe { kernel::call(libc::SYS_ioctl, arguments) };
    result.is_ok().then_some(value)
}

/// The idle time before the first probe, s. It is below the idle time after which firewalls forget a connection: 2
/// hours and 4 minutes by RFC 5382 (REQ-5), and 5 minutes or more in practice.
const IDLE_SECONDS: c_int = 240;
/// The number of unanswered probes after which the kernel ends the connection. It is the largest that Linux accepts. At
/// the usual interval of 75 s it takes over two hours.
const PROBES: c_int = 127;

const SWITCH: Name = (libc::SOL_SOCKET, libc::SO_KEEPALIVE);
const OURS: [Name; 2] = [
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
];
const VALUES: [c_int; 2] = [IDLE_SECONDS, PROBES];
const INTERVAL: Name = (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL);

/// Keepalive for the anchor of a stream between hosts. The connection's data goes over the link, so its TCP looks idle
/// to a firewall, which would forget the connection.
///
/// The library switches keepalive on only where the program has not. With `PROBES` it ends no connection that would
/// have lived without it. While it is on, the program's getsockopt and setsockopt read and change the program's own
/// settings, which are kept here.
///
/// Where the program has its own keepalive, the kernel does not probe while bytes are unacknowledged. Such bytes may be
/// a marker to a host that is gone. So TCP_USER_TIMEOUT (tcp(7)) takes the place of the probes until the marker is
/// acknowledged.
#[derive(Default)]
pub struct Keepalive {
    /// Held by a thread that changes the kept settings together with the kernel's. Without the lock, a setting that the
    /// program makes at the same time would be lost, or a setting of the library would stay for ever. A signal handler
    /// that has interrupted the holder makes its change without the lock.
    changing: Lock<()>,
    on: AtomicBool,
    kept: [AtomicI32; 2],
    /// The kernel has the library's TCP_USER_TIMEOUT; the program has set none.
    bounded: AtomicBool,
}

impl Keepalive {
    /// Forgets the state of the earlier connection, when the object is used for a new one.
    pub fn reset(&self) {
        self.on.store(false, Relaxed);
        self.bounded.store(false, Relaxed);
    }

    /// Frees the lock in a fork child, whose other threads are gone.
    ///
    /// # Safety
    /// No other thread of this process may use this value.
    pub unsafe fn reset_in_child(&self) {
        // SAFETY: no other thread uses the lock, by the contract. The lock guards no value, and the kept settings stay
        // as they are.
        unsafe { self.changing.reset() };
    }

    /// Sets TCP_USER_TIMEOUT for the next marker, if the program has its own keepalive and no TCP_USER_TIMEOUT. Its
    /// value is the time after which the program's keepalive would end the connection.
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

    /// Restores the program's settings in the kernel.
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
        // Cleared last: as long as `on` is set, the program reads the kept settings and not the kernel's.
        self.on.store(false, Release);
    }

    /// Returns the value that the program's getsockopt has to report; `None` if the kernel's value is right.
    pub fn get(&self, option: Name) -> Option<c_int> {
        if option == USER_TIMEOUT && self.bounded.load(Acquire) {
            return Some(0);
        }
        if !self.on.load(Acquire) {
            return None;
        }
        if option == SWITCH {
            return Some(0);
        }
        let at = OURS.iter().position(|ours| *ours == option)?;
        self.kept.get(at).map(|kept| kept.load(Relaxed))
    }

    /// Returns whether [`on_set`](Self::on_set) has to serve the program's setsockopt.
    pub fn is_concerned(option: Name) -> bool {
        option == SWITCH || option == USER_TIMEOUT || OURS.contains(&option)
    }

    /// Serves the program's setsockopt of an option that `is_concerned` names; all of them take an int. `ask` makes the
    /// kernel's call: `Ok` is the value that the kernel has accepted, `Err` the failed call's result. Returns the
    /// result for the program.
    pub fn on_set(&self, fd: BorrowedFd<'_>, option: Name, ask: impl FnOnce() -> Result<c_int, c_int>) -> c_int {
        let _changing = self.changing.lock();
        match ask() {
            Ok(value) => {
                self.taken(fd, option, value);
                0
            }
            Err(result) => result,
        }
    }

    /// Updates the kept settings after the kernel has accepted a setting of the program.
    fn taken(&self, fd: BorrowedFd<'_>, option: Name, value: c_int) {
        if option == USER_TIMEOUT {
            self.bounded.store(false, Release);
        } else if option == SWITCH {
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
            && let Some(at) = OURS.iter().position(|ours| *ours == option)
            && let (Some(kept), Some(ours)) = (self.kept.get(at), VALUES.get(at))
        {
            kept.store(value, Relaxed);
            set(fd, option, *ours);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn only_the_peer_ends_its_direction() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        let has_ended = || crate::notify::ready::has_peer_ended(ours.as_fd());
        assert!(!has_ended());
        ours.shutdown(Shutdown::Read).unwrap();
        assert!(!has_ended());
        ours.shutdown(Shutdown::Both).unwrap();
        assert!(!has_ended());
        theirs.shutdown(Shutdown::Write).unwrap();
        while !has_ended() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    #[test]
    fn a_low_water_mark_is_seen_and_so_is_its_end() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let fd = socket.as_fd();
        assert!(!is_beyond_links(fd));
        set(fd, LOW_WATER, 10);
        assert!(is_beyond_links(fd));
        // The kernel stores 0 as 1.
        set(fd, LOW_WATER, 0);
        assert!(!is_beyond_links(fd));
        assert!(may_be_beyond_links(PEEK_OFFSET));
        assert!(!may_be_beyond_links((libc::SOL_SOCKET, libc::SO_KEEPALIVE)));
    }

    #[test]
    fn every_option_that_is_beyond_links_is_seen_when_it_is_set_and_when_it_is_not_any_more() {
        // The option, a value that links do not support, and a value that they do.
        let names = [
            (LOW_WATER, 5, 1),
            (UNSENT_LOW_WATER, 16_384, 0),
            (PEEK_OFFSET, 0, -1),
            (PACE, 1_000_000, -1),
            ((libc::SOL_SOCKET, libc::SO_TIMESTAMPING), 1 << 3, 0),
            ((libc::SOL_SOCKET, NEW_TIMESTAMPING), 1 << 3, 0),
        ];
        for (name, on, off) in names {
            let socket = TcpListener::bind("127.0.0.1:0").unwrap();
            let fd = socket.as_fd();
            assert!(!is_beyond_links(fd) && may_be_beyond_links(name));
            set(fd, name, on);
            assert!(is_beyond_links(fd), "{name:?}");
            set(fd, name, off);
            assert!(!is_beyond_links(fd), "{name:?}");
        }
        for name in STAMPS.map(|name| (libc::SOL_SOCKET, name)) {
            let socket = TcpListener::bind("127.0.0.1:0").unwrap();
            let fd = socket.as_fd();
            assert!(!stamps(fd) && is_stamp(name) && !may_be_beyond_links(name));
            set(fd, name, 1);
            assert!(stamps(fd) && !is_beyond_links(fd), "{name:?}");
            set(fd, name, 0);
            assert!(!stamps(fd), "{name:?}");
        }
    }

    fn all(socket: &std::net::TcpListener) -> [Option<c_int>; 3] {
        let fd = socket.as_fd();
        [get(fd, SWITCH), get(fd, OURS[0]), get(fd, OURS[1])]
    }

    fn program_sets(keepalive: &Keepalive, fd: BorrowedFd<'_>, option: Name, value: c_int) {
        assert!(Keepalive::is_concerned(option));
        let ask = || {
            set(fd, option, value);
            Ok(value)
        };
        assert_eq!(keepalive.on_set(fd, option, ask), 0);
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
        assert_eq!(keepalive.get(SWITCH), Some(0));
        assert_eq!(keepalive.get(OURS[0]), Some(777));
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
        assert_eq!(keepalive.get(SWITCH), None);
    }

    #[test]
    fn what_we_say_is_answered_within_the_programs_patience() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let fd = socket.as_fd();
        let keepalive = Keepalive::default();
        let ours = |keepalive: &Keepalive| keepalive.get(USER_TIMEOUT);
        let probes = |on| {
            set(fd, SWITCH, on);
            keepalive.bound(fd);
        };
        // Without keepalive there is no time after which the connection ends, so no bound is set.
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
        // The program's own TCP_USER_TIMEOUT takes effect, and stays afterwards.
        probes(1);
        program_sets(&keepalive, fd, USER_TIMEOUT, 4000);
        keepalive.end(fd);
        probes(1);
        assert_eq!((get(fd, USER_TIMEOUT), ours(&keepalive)), (Some(4000), None));
    }
}
