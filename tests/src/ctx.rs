//! The context of a scenario: the side that it plays, its transcript, and a barrier with the
//! other side that does not use TCP.
//!
//! Transcript and barrier use raw syscalls, so that the library never sees them, and fds from
//! 900 up, so that fd numbers in a scenario start at 3.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use libc::c_int;
use rdmasock_core::os::kernel;

use crate::sys::{Addr, Ret};
use crate::{data, environment, sys};

/// The fds from here on (two of them) are the test's own.
pub const OWN_FDS: c_int = 900;
/// How many fds from [`OWN_FDS`] on are the test's own.
pub const OWN_FD_COUNT: c_int = 2;

/// Which end a process plays.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Side {
    /// Accepts.
    Server,
    /// Connects.
    Client,
}

impl Side {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Server, Self::Client];

    /// `server` or `client`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
        }
    }
}

/// The state of one side of a running scenario.
pub struct Ctx {
    /// The side that this process plays.
    pub side: Side,
    /// The number after the `/` in the scenario's name, or 0.
    pub param: u32,
    /// A private directory of this run, shared by the two sides.
    pub dir: PathBuf,
    /// Environments that the process enters when its listener listens, or before it connects.
    pub when_listening: Vec<String>,
    /// Whether a harness watches for the promotion, so that `warm_up` waits for it.
    observed: bool,
    log_fd: c_int,
    sync_fd: c_int,
}

impl Ctx {
    /// Opens the transcript and meets the other side in `dir` (at most 10 s).
    pub fn meet(side: Side, dir: &Path, param: u32, observed: bool) -> Self {
        let log = std::fs::File::create(dir.join(format!("{}.transcript", side.name()))).unwrap();
        let sync = rendezvous(side, &dir.join("sync"));
        let (log_fd, sync_fd) = (OWN_FDS, OWN_FDS + 1);
        for (from, to) in [(std::os::fd::AsRawFd::as_raw_fd(&log), log_fd), (sync, sync_fd)] {
            raw(libc::SYS_dup3, [from as i64, to as i64, 0]);
        }
        drop(log);
        raw(libc::SYS_close, [sync as i64, 0, 0]);
        Self {
            side,
            param,
            dir: dir.to_path_buf(),
            when_listening: Vec::new(),
            observed,
            log_fd,
            sync_fd,
        }
    }

    /// Whether this is the server.
    pub fn is_server(&self) -> bool {
        self.side == Side::Server
    }

    /// Writes a line of the transcript.
    pub fn log(&self, line: impl Display) {
        let line = format!("{line}\n");
        let n = raw(
            libc::SYS_write,
            [self.log_fd as i64, line.as_ptr() as i64, line.len() as i64],
        );
        assert_eq!(n, line.len() as i64, "transcript");
    }

    /// Logs the result of a call and returns it.
    pub fn ret(&self, what: impl Display, r: Ret) -> Ret {
        self.log(format_args!("{what} -> {r}"));
        r
    }

    /// Logs only whether a call failed, and how; for values that may differ between runs.
    pub fn done(&self, what: impl Display, r: Ret) -> Ret {
        if r.failed() {
            self.log(format_args!("{what} -> {r}"));
        } else {
            self.log(format_args!("{what} -> done"));
        }
        r
    }

    /// Logs the result of a receiving call, with the bytes.
    pub fn bytes(&self, what: impl Display, r: Ret, buf: &[u8]) -> Ret {
        let n = usize::try_from(r.value).unwrap_or(0).min(buf.len());
        if n > 0 {
            self.log(format_args!("{what} -> {r} {}", data::show(&buf[..n])));
        } else {
            self.log(format_args!("{what} -> {r}"));
        }
        r
    }

    /// Logged send().
    pub fn send(&self, fd: c_int, bytes: &[u8], flags: c_int) -> Ret {
        self.ret(
            format_args!("send {} flags {flags:#x}", bytes.len()),
            sys::send(fd, bytes, flags),
        )
    }

    /// Logged recv() of up to `len` bytes.
    pub fn recv(&self, fd: c_int, len: usize, flags: c_int) -> (Ret, Vec<u8>) {
        let mut buf = vec![0; len];
        let r = sys::recv(fd, &mut buf, flags);
        self.bytes(format_args!("recv {len} flags {flags:#x}"), r, &buf);
        buf.truncate(usize::try_from(r.value).unwrap_or(0).min(len));
        (r, buf)
    }

    /// Receives until `len` bytes, EOF or an error; logs the sum only.
    pub fn recv_all(&self, fd: c_int, len: usize) -> Vec<u8> {
        let (last, buf) = sys::recv_up_to(fd, len);
        let end = if buf.len() == len {
            "all".into()
        } else {
            last.to_string()
        };
        self.log(format_args!("recv_all {len} -> {end} {}", data::show(&buf)));
        buf
    }

    /// Receives until the stream ends; logs how, and the bytes.
    pub fn recv_to_end(&self, fd: c_int) -> (Ret, Vec<u8>) {
        let (last, buf) = sys::recv_to_end(fd);
        self.log(format_args!("recv_to_end -> {last} {}", data::show(&buf)));
        (last, buf)
    }

    /// Logged write().
    pub fn write(&self, fd: c_int, bytes: &[u8]) -> Ret {
        self.ret(format_args!("write {}", bytes.len()), sys::write(fd, bytes))
    }

    /// Logged close().
    pub fn close(&self, fd: c_int) -> Ret {
        self.ret("close", sys::close(fd))
    }

    /// Logged shutdown().
    pub fn shutdown(&self, fd: c_int, how: c_int) -> Ret {
        self.ret(format_args!("shutdown {how}"), call!(libc::shutdown(fd, how)))
    }

    /// Logged FIONREAD.
    pub fn fionread(&self, fd: c_int) {
        let mut n: c_int = -7;
        let r = call!(libc::ioctl(fd, libc::FIONREAD, &mut n));
        self.log(format_args!("FIONREAD -> {r}, {n}"));
    }

    /// Logged SO_ERROR.
    pub fn so_error(&self, fd: c_int) {
        let (r, e) = sys::get_int(fd, libc::SOL_SOCKET, libc::SO_ERROR);
        let name = match e {
            0 => "none".into(),
            e => format!("{:?}", nix::errno::Errno::from_raw(e)),
        };
        self.log(format_args!("SO_ERROR -> {r}, {name}"));
    }

    /// Logged poll() on one fd.
    pub fn poll(&self, fd: c_int, events: i16, timeout_ms: c_int) -> i16 {
        let mut p = libc::pollfd { fd, events, revents: 0 };
        // A signal ends it on any path, and no flag of a handler's restarts it (signal(7)).
        let r = loop {
            let r = call!(libc::poll(&mut p, 1, timeout_ms));
            if !r.is(libc::EINTR) {
                break r;
            }
        };
        self.log(format_args!(
            "poll {} -> {r} {}",
            poll_names(events),
            poll_names(p.revents)
        ));
        p.revents
    }

    /// Waits until the other side calls `sync` with the same name. Not over TCP.
    #[track_caller]
    pub fn sync(&self, name: &str) {
        self.exchange(name, 0);
    }

    /// Like [`Ctx::sync`]; each side also passes the other a number.
    #[track_caller]
    pub fn exchange(&self, name: &str, value: u64) -> u64 {
        let mut out = [0u8; 40];
        out[..8].copy_from_slice(&value.to_le_bytes());
        let n = name.len().min(32);
        out[8..8 + n].copy_from_slice(&name.as_bytes()[..n]);
        let sent = raw(libc::SYS_write, [self.sync_fd as i64, out.as_ptr() as i64, 40]);
        assert_eq!(sent, 40, "sync {name}: the other side is gone");
        let mut theirs = [0u8; 40];
        let mut got = 0usize;
        while got < 40 {
            let n = raw(
                libc::SYS_read,
                [
                    self.sync_fd as i64,
                    theirs.as_mut_ptr() as i64 + got as i64,
                    (40 - got) as i64,
                ],
            );
            if n == -i64::from(libc::EINTR) {
                continue;
            }
            assert!(n > 0, "sync {name}: the other side is gone");
            got += n as usize;
        }
        assert_eq!(&theirs[8..], &out[8..], "sync {name}: the other side is elsewhere");
        u64::from_le_bytes(theirs[..8].try_into().unwrap())
    }

    /// A connection between the two sides over 127.0.0.1, warmed up; the listener is closed.
    pub fn pair(&self) -> c_int {
        self.pair_at(Addr::v4, Addr::v4)
    }

    /// A connection whose server listens at `listen(port)` and whose client connects to
    /// `connect(port)`, warmed up; the listener is closed.
    pub fn pair_at(&self, listen: fn(u16) -> Addr, connect: fn(u16) -> Addr) -> c_int {
        let (fd, listener) = self.cold_pair_at(listen, connect);
        self.warm_up(fd);
        // While a link is made, each of the library's fds is for an instant the lowest free fd, before it
        // is moved out of the way. Scenarios that check fds begin after that.
        sys::pause_ms(20);
        if let Some(listener) = listener {
            sys::close(listener).ok();
        }
        fd
    }

    /// Returns a connection on which nothing has been sent yet.
    pub fn cold_pair(&self) -> c_int {
        let (fd, listener) = self.cold_pair_at(Addr::v4, Addr::v4);
        if let Some(listener) = listener {
            sys::close(listener).ok();
        }
        fd
    }

    /// Returns a connection on which nothing has been sent yet, and the server's listener.
    pub fn cold_pair_at(&self, listen: fn(u16) -> Addr, connect: fn(u16) -> Addr) -> (c_int, Option<c_int>) {
        if self.is_server() {
            let (listener, port) = sys::listener(&listen(0), 16);
            self.enter_when_listening();
            self.exchange("port", u64::from(port));
            (sys::accept4(listener, 0).ok(), Some(listener))
        } else {
            let port = self.exchange("port", 0) as u16;
            self.enter_when_listening();
            (sys::connected(&connect(port)), None)
        }
    }

    /// Returns `count` connections, none of them warmed up; the listener stays open.
    pub fn connections(&self, count: usize) -> Vec<c_int> {
        let (listener, port) = self.listener(count as c_int);
        let one = |_| match listener {
            Some(listener) => sys::accept4(listener, 0).ok(),
            None => sys::connected(&Addr::v4(port)),
        };
        (0..count).map(one).collect()
    }

    /// The server listens on 127.0.0.1 (and gets its listener, Some); both get the port.
    pub fn listener(&self, backlog: c_int) -> (Option<c_int>, u16) {
        if self.is_server() {
            let (fd, port) = sys::listener(&Addr::v4(0), backlog);
            self.enter_when_listening();
            self.exchange("port", u64::from(port));
            (Some(fd), port)
        } else {
            let port = self.exchange("port", 0) as u16;
            self.enter_when_listening();
            (None, port)
        }
    }

    fn enter_when_listening(&self) {
        for word in &self.when_listening {
            environment::enter(word).ok();
        }
    }

    /// Exchanges requests and responses until the connection can have been promoted: a few small ones,
    /// then one above 16 KiB each way. Small ones follow until the observer has seen the promotion
    /// (or has given up). Leaves no byte behind and nothing in the transcript.
    pub fn warm_up(&self, fd: c_int) {
        self.warm_up_told(fd, || {});
    }

    /// Warms up as [`Ctx::warm_up`] does, and calls `between` again and again meanwhile. Returns the bytes that went
    /// each way.
    pub fn warm_up_told(&self, fd: c_int, mut between: impl FnMut()) -> u64 {
        let mut bytes = 0;
        if self.is_server() {
            loop {
                let mut request = sys::recv_exact(fd, MESSAGE);
                if request[0] == BIG {
                    request.extend(sys::recv_exact(fd, BIG_LEN));
                }
                between();
                sys::send_all(fd, &request).ok();
                bytes += request.len() as u64;
                if request[0] == END {
                    return bytes;
                }
            }
        }
        let mut round = |kind: u8| {
            let mut request = data::pattern(1, 0, MESSAGE);
            request[0] = kind;
            if kind == BIG {
                request.extend(data::pattern(2, 0, BIG_LEN));
            }
            sys::send_all(fd, &request).ok();
            between();
            assert!(sys::recv_exact(fd, request.len()) == request, "warm-up bytes differ");
            bytes += request.len() as u64;
        };
        for kind in [SMALL, SMALL, SMALL, BIG, SMALL] {
            round(kind);
        }
        if self.observed {
            std::fs::write(self.dir.join(WARM), b"").unwrap();
            let end = Instant::now() + Duration::from_secs(25);
            while !self.dir.join(SEEN).exists() && Instant::now() < end {
                round(SMALL);
                sys::pause_ms(2);
            }
        }
        round(END);
        bytes
    }

    /// Returns how many bytes the two programs have moved outside their rings so far. `None` if links are not as
    /// between hosts, or if no harness watches. Only one side may ask.
    pub fn past_the_rings(&self) -> Option<PastTheRings> {
        if !self.observed {
            return None;
        }
        let answer = self.dir.join(ANSWERED);
        std::fs::write(self.dir.join(ASKED), b"").unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            if let Ok(text) = std::fs::read_to_string(&answer) {
                std::fs::remove_file(&answer).unwrap();
                let mut counts = text.split(' ').map_while(|count| count.parse().ok());
                return Some(PastTheRings {
                    written: counts.next()?,
                    read: counts.next()?,
                    landed: counts.next()?,
                });
            }
            assert!(Instant::now() < end, "nobody tells how much went directly");
            sys::pause_ms(1);
        }
    }
}

/// The counts of [`Ctx::past_the_rings`], in bytes.
pub struct PastTheRings {
    /// Written by the sender's device into a buffer that a receive waited with.
    pub written: u64,
    /// Read by the receiver's device from the sender's memory.
    pub read: u64,
    /// Bytes of `read` that went into a buffer that a receive waited with.
    pub landed: u64,
}

/// The events that are counted in [`PastTheRings`], in the order of its fields.
pub const COUNTED: [&str; 3] = [
    "direct_received_bytes",
    "rendezvous_received_bytes",
    "rendezvous_landed_bytes",
];

/// The file by which a side asks for [`Ctx::past_the_rings`].
pub const ASKED: &str = "asked";
/// The file that holds the answer to [`ASKED`]: numbers, or nothing.
pub const ANSWERED: &str = "answered";
/// The file by which the client reports that its connection may be promoted by now.
pub const WARM: &str = "warm";
/// The file by which the observer reports that it has seen the promotion, or has given up.
pub const SEEN: &str = "seen";

const MESSAGE: usize = 64;
const BIG_LEN: usize = 20 * 1024;
const SMALL: u8 = b's';
const BIG: u8 = b'b';
const END: u8 = b'e';

/// Makes a system call that the library does not see. Returns the kernel's result, errors negated.
fn raw(number: libc::c_long, args: [i64; 3]) -> i64 {
    let [a, b, c] = args.map(|argument| argument as usize);
    // SAFETY: the arguments are live locals of the callers, whose lengths are taken from the same locals.
    match unsafe { kernel::call(number, [a, b, c, 0, 0, 0]) } {
        Ok(value) => value as i64,
        Err(error) => -i64::from(error.raw_os_error()),
    }
}

/// A connected AF_UNIX stream between the sides, made with raw syscalls.
fn rendezvous(side: Side, path: &Path) -> c_int {
    let socket = raw(
        libc::SYS_socket,
        [i64::from(libc::AF_UNIX), i64::from(libc::SOCK_STREAM), 0],
    );
    let mut name = path.as_os_str().as_encoded_bytes().to_vec();
    name.push(0);
    let addr = Addr::unix(&name);
    let args = [socket, addr.ptr() as i64, i64::from(addr.len)];
    match side {
        Side::Server => {
            assert_eq!(raw(libc::SYS_bind, args), 0, "bind {}", path.display());
            assert_eq!(raw(libc::SYS_listen, [socket, 1, 0]), 0);
            let fd = raw(libc::SYS_accept, [socket, 0, 0]);
            raw(libc::SYS_close, [socket, 0, 0]);
            fd as c_int
        }
        Side::Client => {
            let end = Instant::now() + Duration::from_secs(30);
            while raw(libc::SYS_connect, args) != 0 {
                assert!(Instant::now() < end, "no server at {}", path.display());
                sys::pause_ms(1);
            }
            socket as c_int
        }
    }
}

/// poll() and epoll event bits by name, `-` for none. The two share their values up to RDHUP.
pub fn poll_names(events: i16) -> String {
    epoll_names(u32::from(events as u16))
}

/// epoll event bits by name, `-` for none.
pub fn epoll_names(events: u32) -> String {
    const NAMES: [(u32, &str); 11] = [
        (libc::EPOLLIN as u32, "IN"),
        (libc::EPOLLPRI as u32, "PRI"),
        (libc::EPOLLOUT as u32, "OUT"),
        (libc::EPOLLERR as u32, "ERR"),
        (libc::EPOLLHUP as u32, "HUP"),
        (libc::POLLNVAL as u32, "NVAL"),
        (libc::EPOLLRDNORM as u32, "RDNORM"),
        (libc::EPOLLRDBAND as u32, "RDBAND"),
        (libc::EPOLLWRNORM as u32, "WRNORM"),
        (libc::EPOLLWRBAND as u32, "WRBAND"),
        (libc::EPOLLRDHUP as u32, "RDHUP"),
    ];
    let mut names: Vec<&str> = NAMES
        .iter()
        .filter(|(bit, _)| events & bit != 0)
        .map(|(_, name)| *name)
        .collect();
    if names.is_empty() {
        names.push("-");
    }
    names.join("|")
}
