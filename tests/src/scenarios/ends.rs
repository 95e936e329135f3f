//! Every way in which one end of a connection ends, with and without data that it has not read, and the result of each
//! call at the other end. Five connections at once: their client is blocked in a receive, in a send, in poll, in
//! epoll_wait, or calls only afterwards.

use std::fmt::Write;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread;

use libc::{SHUT_RD, SHUT_RDWR, SHUT_WR, c_int};

use super::Scenario;
use crate::ctx::Ctx;
use crate::sys::Addr;
use crate::{data, sys};

const ALL_EVENTS: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP | libc::POLLPRI;

/// The ways in which the server ends a connection.
const WAYS: [&str; 11] = [
    "close",
    "write_shut",
    "read_shut",
    "both_shut",
    "linger_none",
    "linger_long",
    "dup2",
    "exit",
    "exit_at_once",
    "kill",
    "close_range",
];

/// Ways in which a process ends with open connections.
const EXITS: [&str; 2] = ["exit", "exit_at_once"];
const MANY: usize = 150;

/// Receives that wait for more bytes than come, and whether the connection goes back to TCP in the middle.
const CALLS: [(&str, bool); 4] = [("recv", false), ("recv", true), ("recvmmsg", false), ("recvmmsg", true)];
/// The call that first learns how the connection has ended.
const ASKS: [&str; 3] = ["poll", "SO_ERROR", "send"];
const PART: usize = 100;

/// The client's state on each connection.
const STATES: [&str; 5] = ["recv", "send", "poll", "epoll", "later"];

/// Adds the family to the table: each way, with nothing unread (even) and with unread data.
pub fn add_to(all: &mut Vec<Scenario>) {
    for (way, name) in WAYS.iter().enumerate() {
        for unread in 0..4 {
            let base = format!("ends_by_{name}");
            all.push(Scenario::numbered(&base, 4 * way as u32 + unread, ends, true));
        }
    }
    for (way, name) in EXITS.iter().enumerate() {
        let base = format!("ends_of_many_by_{name}");
        all.push(Scenario::numbered(&base, way as u32, many, false));
    }
    for n in 0..(CALLS.len() * ASKS.len()) as u32 {
        all.push(Scenario::numbered("ends_within", n, within, true));
    }
}

/// A reset finds the client in a receive that has some bytes already, on the link or in TCP behind it. That call
/// returns the bytes; the next call, of any kind, gets the error.
fn within(c: &Ctx) {
    let (call, asks) = (
        CALLS[c.param as usize % CALLS.len()],
        ASKS[c.param as usize / CALLS.len()],
    );
    let fd = c.pair();
    for _ in 0..40 {
        exchange(c, fd);
    }
    sys::pause_ms(30);
    c.sync("exchanged");
    if c.is_server() {
        sys::pause_ms(30);
        sys::send_all(fd, &[b'a'; PART]).ok();
        sys::pause_ms(60);
        if call.1 {
            // No link serves this flag.
            c.ret("send", sys::send(fd, &[b'b'; PART], libc::MSG_DONTROUTE));
            sys::pause_ms(60);
        }
        set_linger(fd, 0);
        c.close(fd);
        c.sync("closed");
        return;
    }
    let mut buf = [0u8; 4 * PART];
    if call.0 == "recvmmsg" {
        c.log(format_args!("recvmmsg -> {}", receive_messages(fd, &mut buf)));
    } else {
        let r = sys::recv(fd, &mut buf, libc::MSG_WAITALL);
        c.log(format_args!("recv -> {r}"));
    }
    c.sync("closed");
    sys::wait_for(fd, libc::POLLRDHUP);
    let mut log = String::new();
    match asks {
        "SO_ERROR" => {
            let (r, e) = sys::get_int(fd, libc::SOL_SOCKET, libc::SO_ERROR);
            writeln!(log, "  SO_ERROR -> {r} {e}").unwrap();
        }
        "send" => {
            let r = sys::send(fd, b"x", 0);
            writeln!(log, "  send -> {r}").unwrap();
        }
        _ => {}
    }
    look(&mut log, fd);
    c.log(format_args!("{}", log.trim_end()));
    c.close(fd);
}

/// Receives messages of [`PART`] bytes until a call ends that.
fn receive_messages(fd: c_int, buf: &mut [u8; 4 * PART]) -> sys::Ret {
    let mut pieces: Vec<libc::iovec> = buf.chunks_mut(PART).map(sys::iov).collect();
    let mut messages: Vec<libc::mmsghdr> = pieces
        .chunks_mut(1)
        .map(|piece| libc::mmsghdr {
            msg_hdr: sys::msghdr(piece),
            msg_len: 0,
        })
        .collect();
    let count = messages.len() as u32;
    call!(libc::recvmmsg(
        fd,
        messages.as_mut_ptr(),
        count,
        0,
        std::ptr::null_mut()
    ))
}

/// A process ends with many connections, whose other end has not noticed when the link between them goes.
fn many(c: &Ctx) {
    let fds: Vec<c_int> = (0..MANY).map(|_| c.cold_pair()).collect();
    for _ in 0..40 {
        for fd in &fds {
            exchange(c, *fd);
        }
    }
    c.sync("exchanged");
    sys::pause_ms(60);
    if c.is_server() {
        match EXITS[c.param as usize] {
            "exit" => sys::leave(3),
            _ => sys::leave_at_once(4),
        }
    }
    let mut logs = std::collections::BTreeMap::new();
    for fd in &fds {
        sys::wait_for(*fd, libc::POLLRDHUP);
    }
    sys::pause_ms(60);
    for fd in &fds {
        let mut log = String::new();
        look(&mut log, *fd);
        *logs.entry(log).or_insert(0) += 1;
        sys::close(*fd).ok();
    }
    for (log, n) in logs {
        c.log(format_args!("{n} connections:\n{}", log.trim_end()));
    }
}

/// Plays one way of the family.
fn ends(c: &Ctx) {
    let (way, unread, last_words) = (c.param / 4, c.param & 1 == 1, c.param & 2 == 2);
    let fds: Vec<c_int> = (0..STATES.len()).map(|_| c.pair()).collect();
    // The harness watches only the first connection: the others get time to be promoted.
    for fd in &fds {
        for _ in 0..40 {
            exchange(c, *fd);
        }
    }
    sys::pause_ms(30);
    if c.is_server() {
        serve(c, &fds, WAYS[way as usize], unread, last_words);
    } else {
        watch(c, &fds, WAYS[way as usize], unread, last_words);
    }
}

fn exchange(c: &Ctx, fd: c_int) {
    if c.is_server() {
        let request = sys::recv_exact(fd, 16);
        sys::send_all(fd, &request).ok();
    } else {
        sys::send_all(fd, &[b'.'; 16]).ok();
        sys::recv_exact(fd, 16);
    }
}

/// Returns whether the server has unread data on the connection in this state: a client that is blocked in a send has
/// filled it.
fn is_unread(state: usize, unread: bool) -> bool {
    unread || STATES[state] == "send"
}

fn serve(c: &Ctx, fds: &[c_int], way: &str, unread: bool, last_words: bool) {
    c.sync("sent");
    for (state, fd) in fds.iter().enumerate() {
        if is_unread(state, unread) {
            sys::wait_readable_bytes(*fd, 5);
        }
        if last_words {
            sys::send_all(*fd, b"last words").ok();
        }
    }
    c.sync("ready");
    sys::pause_ms(60);
    for fd in fds {
        match way {
            "write_shut" => c.shutdown(*fd, SHUT_WR),
            "read_shut" => c.shutdown(*fd, SHUT_RD),
            "both_shut" => c.shutdown(*fd, SHUT_RDWR),
            "linger_none" => set_linger(*fd, 0),
            "linger_long" => set_linger(*fd, 5),
            _ => continue,
        };
    }
    c.sync("half");
    sys::pause_ms(60);
    match way {
        "exit" => sys::leave(3),
        "exit_at_once" => sys::leave_at_once(4),
        "kill" => {
            call!(libc::raise(libc::SIGKILL));
        }
        "dup2" => {
            let null = call!(libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY)).ok();
            for fd in fds {
                c.ret("dup2", call!(libc::dup2(null, *fd)));
            }
        }
        "close_range" => {
            let (first, last) = (fds[0].min(fds[4]), fds[0].max(fds[4]));
            let r = call!(libc::syscall(libc::SYS_close_range, first, last, 0));
            c.ret("close_range", r);
        }
        _ => {
            for fd in fds {
                c.close(*fd);
            }
        }
    }
    c.sync("closed");
}

fn set_linger(fd: c_int, seconds: c_int) -> sys::Ret {
    let l = libc::linger {
        l_onoff: 1,
        l_linger: seconds,
    };
    call!(libc::setsockopt(
        fd,
        libc::SOL_SOCKET,
        libc::SO_LINGER,
        (&raw const l).cast(),
        size_of::<libc::linger>() as libc::socklen_t
    ))
}

fn watch(c: &Ctx, fds: &[c_int], way: &str, unread: bool, last_words: bool) {
    for (state, fd) in fds.iter().enumerate() {
        if is_unread(state, unread) {
            sys::send_all(*fd, b"never").ok();
        }
    }
    c.sync("sent");
    if last_words {
        for fd in fds {
            sys::wait_readable_bytes(*fd, 10);
        }
    }
    let (over, told) = (AtomicBool::new(false), AtomicU32::new(0));
    let stays = !matches!(way, "exit" | "exit_at_once" | "kill");
    let logs: Vec<String> = thread::scope(|s| {
        let watchers: Vec<_> = fds
            .iter()
            .enumerate()
            .map(|(state, fd)| {
                let (over, told) = (&over, &told);
                s.spawn(move || {
                    let mut log = String::new();
                    let local = Addr::local_of(*fd).1;
                    meet(&mut log, *fd, STATES[state], last_words);
                    told.fetch_add(1, SeqCst);
                    while !over.load(SeqCst) {
                        sys::pause_ms(1);
                    }
                    if STATES[state] == "send" {
                        // The send may have cleared the error, or not.
                        sys::get_int(*fd, libc::SOL_SOCKET, libc::SO_ERROR);
                    }
                    look(&mut log, *fd);
                    if way != "kill" {
                        // The library then has to break the association itself, which clears the address.
                        look_at_names(&mut log, *fd, &local);
                    }
                    let r = sys::close(*fd);
                    writeln!(log, "  close -> {r}").unwrap();
                    log
                })
            })
            .collect();
        sys::pause_ms(30);
        c.sync("ready");
        c.sync("half");
        if stays {
            c.sync("closed");
        }
        // A killed server sends no message.
        let end = std::time::Instant::now() + std::time::Duration::from_millis(sys::SOON as u64);
        while told.load(SeqCst) < STATES.len() as u32 && std::time::Instant::now() < end {
            sys::pause_ms(1);
        }
        sys::pause_ms(60);
        over.store(true, SeqCst);
        watchers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    for (state, log) in logs.iter().enumerate() {
        c.log(format_args!("{}:\n{}", STATES[state], log.trim_end()));
    }
}

/// Makes the call in which the end finds the client.
fn meet(log: &mut String, fd: c_int, state: &str, last_words: bool) {
    match state {
        "recv" => {
            if last_words {
                receive(log, fd, 10);
            }
            receive(log, fd, 10);
        }
        "send" => {
            let big = data::pattern(5, 0, 32 << 20);
            let r = sys::send(fd, &big, libc::MSG_NOSIGNAL);
            let part = r.value > 0 && (r.value as usize) < big.len();
            let part = part || r.is(libc::ECONNRESET) || r.is(libc::EPIPE);
            writeln!(log, "  send ended early: {part}").unwrap();
        }
        "poll" => {
            let events = if last_words { libc::POLLRDHUP } else { libc::POLLIN };
            let mut p = libc::pollfd { fd, events, revents: 0 };
            let r = call!(libc::poll(&mut p, 1, sys::SOON));
            writeln!(log, "  poll -> {r}").unwrap();
        }
        "epoll" => {
            let ep = call!(libc::epoll_create1(0)).ok();
            let mut ev = libc::epoll_event {
                events: libc::EPOLLRDHUP as u32,
                u64: 1,
            };
            call!(libc::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, &mut ev)).ok();
            let r = call!(libc::epoll_wait(ep, &mut ev, 1, sys::SOON));
            writeln!(log, "  epoll_wait -> {r}").unwrap();
            sys::close(ep).ok();
        }
        _ => {}
    }
}

fn receive(log: &mut String, fd: c_int, len: usize) {
    let mut buf = vec![0; len];
    let r = sys::recv(fd, &mut buf, 0);
    let n = usize::try_from(r.value).unwrap_or(0);
    writeln!(log, "  recv -> {r} {}", data::show(&buf[..n])).unwrap();
}

/// Logs the result of every call afterwards.
fn look(log: &mut String, fd: c_int) {
    let events = |log: &mut String| {
        let mut p = libc::pollfd {
            fd,
            events: ALL_EVENTS,
            revents: 0,
        };
        let r = call!(libc::poll(&mut p, 1, 0));
        let names = crate::ctx::poll_names(p.revents);
        writeln!(log, "  poll -> {r} {names}").unwrap();
    };
    events(log);
    writeln!(log, "  FIONREAD {}", sys::readable_bytes(fd)).unwrap();
    receive(log, fd, 100);
    receive(log, fd, 100);
    for _ in 0..2 {
        let r = sys::send(fd, b"x", libc::MSG_NOSIGNAL);
        writeln!(log, "  send -> {r}").unwrap();
        sys::pause_ms(20);
        events(log);
    }
    let (r, e) = sys::get_int(fd, libc::SOL_SOCKET, libc::SO_ERROR);
    writeln!(log, "  SO_ERROR -> {r} {e}").unwrap();
    receive(log, fd, 100);
}

fn look_at_names(log: &mut String, fd: c_int, was: &Addr) {
    let (r, local) = Addr::local_of(fd);
    let is_same = (local.ip(), local.port()) == (was.ip(), was.port());
    writeln!(log, "  getsockname -> {r}, as before: {is_same}").unwrap();
    writeln!(log, "  getpeername -> {}", Addr::peer_of(fd).0).unwrap();
}
