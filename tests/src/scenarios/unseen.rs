//! The peer's view of a connection that is closed by a system call in line, which no library sees, and whose fd is not
//! used after that. A table: the peer's activity, its unread data, an earlier shutdown of the connection, and the later
//! use of its fd. The time bounds only detect events that never come.
//!
//! Also a program that sends and receives by libc, but waits by system calls in line.

use std::thread;

use libc::c_int;
use rdmasock_core::os::kernel;

use super::epoll;
use crate::ctx::Ctx;
use crate::sys::{Addr, Ret};
use crate::{data, sys};

/// Exchanges before the close: enough for the connection to be on a link.
const WARM: usize = 300;
const REQUEST: usize = 32;
/// More unread bytes than a connection holds.
const MUCH: usize = 32 << 20;
/// How long the peer waits for an event that comes by itself, and for the end of its sends, in ms.
const BOUND: c_int = 3_000;

/// The peer's activity when the connection is closed.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Peer {
    /// The peer is idle, and all bytes that it has sent are read.
    Idle,
    /// The peer is idle, and some of the bytes that it has sent are not read.
    Unread,
    /// A thread is blocked in a send.
    Blocked,
    /// The peer waits by epoll for room.
    WaitsForRoom,
}

const PEERS: [Peer; 4] = [Peer::Idle, Peer::Unread, Peer::Blocked, Peer::WaitsForRoom];

/// The use of the closed fd when the peer checks.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Number {
    Free,
    /// Another file has the fd.
    Reused,
    /// Another file had the fd, and libc has closed it.
    ClosedAgain,
}

/// The scenario's number: how the connection was shut down before.
const SHUT: [Option<c_int>; 4] = [None, Some(libc::SHUT_RD), Some(libc::SHUT_WR), Some(libc::SHUT_RDWR)];

/// The number of these states.
pub const WAYS: u32 = SHUT.len() as u32;

/// A connection in each state of the table is closed in line.
pub fn close(c: &Ctx) {
    let before = SHUT[c.param as usize];
    let (listener, port) = c.listener(8);
    for peer in PEERS {
        for number in [Number::Free, Number::Reused, Number::ClosedAgain] {
            let what = format!("{peer:?}, number {number:?}");
            match listener {
                Some(listener) => closer(c, listener, before, number),
                None => observer(c, port, peer, &what),
            }
        }
    }
}

fn closer(c: &Ctx, listener: c_int, before: Option<c_int>, number: Number) {
    let fd = sys::accept4(listener, 0).ok();
    for _ in 0..2 * WARM {
        let request = sys::recv_exact(fd, REQUEST);
        sys::send_all(fd, &request).ok();
    }
    c.sync("ready");
    if let Some(how) = before {
        call!(libc::shutdown(fd, how)).ok();
        // The peer has seen the effect of the shutdown.
        sys::pause_ms(10);
    }
    in_line(libc::SYS_close, fd as usize);
    let mut file = (number != Number::Free).then(|| in_line(libc::SYS_memfd_create, c"other".as_ptr() as usize));
    assert!(file.is_none_or(|file| file == fd));
    if number == Number::ClosedAgain {
        file.take().map(sys::close);
    }
    c.sync("closed");
    c.sync("seen");
    if let Some(file) = file {
        in_line(libc::SYS_close, file as usize);
    }
}

/// How a program waits where no hook sees it.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Waits {
    /// Before each receive, level-triggered.
    Always,
    /// When there was nothing to receive, level-triggered.
    AfterEagain,
    /// When there was nothing to receive, edge-triggered.
    AtEdges,
}

const WAITS: [Waits; 3] = [Waits::Always, Waits::AfterEagain, Waits::AtEdges];

/// The number of scenarios of [`readiness`]: which side, how it waits, and whether the first message is large.
pub const READINESS: u32 = 2 * WAITS.len() as u32 * 2;

const ROUNDS: usize = 60;
const LARGE: usize = 300_000;

/// Requests and answers; one side has a non-blocking socket, whose readiness it asks for by system calls in line.
pub fn readiness(c: &Ctx) {
    let waits = WAITS[c.param as usize / 2 % WAITS.len()];
    let is_large = c.param as usize / 2 >= WAITS.len();
    let fd = c.cold_pair();
    let unseen = (c.is_server() == c.param.is_multiple_of(2)).then(|| Unseen::new(fd, waits));
    for round in 0..ROUNDS {
        let len = if round == 0 && is_large { LARGE } else { REQUEST };
        let message = data::pattern(round as u64, 0, len);
        for sends in [!c.is_server(), c.is_server()] {
            match (&unseen, sends) {
                (None, true) => assert!(!sys::send_all(fd, &message).failed()),
                (None, false) => assert!(sys::recv_exact(fd, len) == message),
                (Some(unseen), true) => unseen.send(&message),
                (Some(unseen), false) => assert!(unseen.receive(len) == message),
            };
        }
    }
    c.log("all has come");
    c.close(fd);
}

struct Unseen {
    fd: c_int,
    set: c_int,
    waits: Waits,
}

impl Unseen {
    fn new(fd: c_int, waits: Waits) -> Self {
        sys::set_nonblocking(fd, true);
        let set = in_line_with(libc::SYS_epoll_create1, [0; 6]);
        let unseen = Self { fd, set, waits };
        unseen.register(libc::EPOLL_CTL_ADD, libc::EPOLLIN);
        unseen
    }

    fn register(&self, operation: c_int, events: c_int) {
        let edges = if self.waits == Waits::AtEdges { libc::EPOLLET } else { 0 };
        let event = libc::epoll_event {
            events: (events | edges) as u32,
            u64: 0,
        };
        let [set, operation, fd] = [self.set, operation, self.fd].map(|n| n as usize);
        in_line_with(
            libc::SYS_epoll_ctl,
            [set, operation, fd, kernel::address(&raw const event), 0, 0],
        );
    }

    fn wait(&self) {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        let to = kernel::address(&raw mut event);
        let n = in_line_with(libc::SYS_epoll_pwait, [self.set as usize, to, 1, BOUND as usize, 0, 8]);
        assert_eq!(n, 1, "nothing is ready");
    }

    fn receive(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mut got = 0;
        while got < len {
            if self.waits == Waits::Always {
                self.wait();
            }
            let r = sys::recv(self.fd, &mut bytes[got..], 0);
            if r.is(libc::EAGAIN) {
                self.wait();
            } else {
                got += r.count();
            }
        }
        bytes
    }

    fn send(&self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let r = sys::send(self.fd, bytes, 0);
            if r.is(libc::EAGAIN) {
                self.register(libc::EPOLL_CTL_MOD, libc::EPOLLOUT);
                self.wait();
                self.register(libc::EPOLL_CTL_MOD, libc::EPOLLIN);
            } else {
                bytes = &bytes[r.count()..];
            }
        }
    }
}

impl Drop for Unseen {
    fn drop(&mut self) {
        in_line(libc::SYS_close, self.set as usize);
    }
}

/// Makes a system call that no library sees.
fn in_line(number: libc::c_long, argument: usize) -> c_int {
    in_line_with(number, [argument, 0, 0, 0, 0, 0])
}

fn in_line_with(number: libc::c_long, arguments: [usize; 6]) -> c_int {
    // SAFETY: close, memfd_create or a call on an epoll set, with arguments that outlive the call.
    unsafe { kernel::call(number, arguments).unwrap() as c_int }
}

fn observer(c: &Ctx, port: u16, peer: Peer, what: &str) {
    let fd = sys::connected(&Addr::v4(port));
    for i in 0..2 * WARM {
        let request = data::pattern(i as u64, 0, REQUEST);
        sys::send_all(fd, &request).ok();
        assert!(sys::recv_exact(fd, REQUEST) == request);
        if i == WARM {
            // The connection is on the link by then, if it ever gets there; the exchanges after that take the last
            // marker out of TCP.
            sys::pause_ms(40);
        }
    }
    match peer {
        Peer::Idle => c.sync("ready"),
        Peer::Unread => {
            send_until_full(fd, 10_000);
            c.sync("ready");
        }
        Peer::Blocked => return blocked(c, fd, what),
        Peer::WaitsForRoom => {
            sys::set_nonblocking(fd, true);
            fill(fd);
            c.sync("ready");
            let ep = epoll::create();
            epoll::ctl(ep, libc::EPOLL_CTL_ADD, fd, epoll::OUT, 7).ok();
            let is_told = !epoll::wait(ep, 4, BOUND).1.is_empty();
            c.log(format_args!("{what}: told by epoll {is_told}"));
            sys::close(ep).ok();
        }
    }
    c.sync("closed");
    report(c, fd, peer, what);
}

/// Logs whether a reset came by itself, how receiving ends, and how sending ends.
fn report(c: &Ctx, fd: c_int, peer: Peer, what: &str) {
    // A reset comes by itself if bytes were unread, and only then.
    let ms = if peer == Peer::Idle { 400 } else { BOUND };
    let is_reset = sys::poll_one(fd, 0, ms) != 0;
    let mut buf = [0; 8];
    let got = sys::recv(fd, &mut buf, libc::MSG_DONTWAIT);
    let sent = last_send(fd);
    c.log(format_args!("{what}: reset {is_reset}, receives {got}, sends {sent}"));
    c.sync("seen");
    sys::close(fd).ok();
}

/// Sends until a send fails, or none is accepted for a long time.
fn last_send(fd: c_int) -> Ret {
    sys::set_nonblocking(fd, true);
    for _ in 0..BOUND {
        let sent = sys::send(fd, b"late", libc::MSG_NOSIGNAL);
        if sent.failed() && !sent.is(libc::EAGAIN) {
            return sent;
        }
        sys::pause_ms(1);
    }
    sys::send(fd, b"late", libc::MSG_NOSIGNAL)
}

fn send_until_full(fd: c_int, most: usize) {
    let bytes = vec![7; most];
    sys::send_all(fd, &bytes).ok();
}

/// Sends until there is no room, and none comes by itself.
fn fill(fd: c_int) {
    let bytes = vec![7; 64 << 10];
    while sys::poll_one(fd, libc::POLLOUT, 50) != 0 {
        while !sys::send(fd, &bytes, libc::MSG_NOSIGNAL).failed() {}
    }
}

/// A thread is blocked in a send while the connection is closed.
fn blocked(c: &Ctx, fd: c_int, what: &str) {
    let (tell, told) = std::sync::mpsc::channel();
    let sender = thread::spawn(move || {
        tell.send(sys::thread_id()).unwrap();
        let bytes = vec![7; MUCH];
        let sent = sys::send(fd, &bytes, libc::MSG_NOSIGNAL);
        tell.send(0).unwrap();
        sent
    });
    sys::wait_asleep(told.recv().unwrap());
    // A ring that stands still gets more room.
    sys::pause_ms(30);
    c.sync("ready");
    c.sync("closed");
    let bound = std::time::Duration::from_millis(BOUND as u64);
    let is_back = told.recv_timeout(bound).is_ok();
    if !is_back {
        // The shutdown ends the send, for the scenarios that follow.
        call!(libc::shutdown(fd, libc::SHUT_RDWR)).ok();
    }
    let sent = sender.join().unwrap();
    let some = (1..MUCH as i64).contains(&sent.value);
    c.log(format_args!("{what}: the send is back {is_back}, with a part {some}"));
    report(c, fd, Peer::Blocked, what);
}
