//! epoll on TCP connections: trigger modes, changes of interest, data, removal.

use std::time::{Duration, Instant};

use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, c_int};

use crate::ctx::{Ctx, epoll_names};
use crate::sys::{Addr, Ret};
use crate::{data, sys};

pub const IN: u32 = libc::EPOLLIN as u32;
pub const OUT: u32 = libc::EPOLLOUT as u32;
pub const ET: u32 = libc::EPOLLET as u32;
pub const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
pub const RDHUP: u32 = libc::EPOLLRDHUP as u32;
pub const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// Makes an epoll instance.
pub fn create() -> c_int {
    call!(libc::epoll_create1(libc::EPOLL_CLOEXEC)).ok()
}

/// epoll_ctl()
pub fn ctl(ep: c_int, op: c_int, fd: c_int, events: u32, data: u64) -> Ret {
    let mut ev = libc::epoll_event { events, u64: data };
    call!(libc::epoll_ctl(ep, op, fd, &mut ev))
}

/// Calls epoll_wait(), and returns sorted pairs of data and events.
pub fn wait(ep: c_int, max: usize, timeout_ms: c_int) -> (Ret, Vec<(u64, u32)>) {
    let mut evs = vec![libc::epoll_event { events: 0, u64: 0 }; max];
    let r = call!(libc::epoll_wait(ep, evs.as_mut_ptr(), max as c_int, timeout_ms));
    let n = usize::try_from(r.value).unwrap_or(0);
    let mut got: Vec<_> = evs[..n].iter().map(|e| (e.u64, e.events)).collect();
    got.sort_unstable();
    (r, got)
}

/// Repeats an epoll_wait() that does not sleep until it reports something, for 30 s at most. FIONREAD counts bytes a
/// moment before the sets of the reader report them (docs/limits.md).
pub fn look_until_reported(ep: c_int, max: usize) -> Vec<(u64, u32)> {
    let end = Instant::now() + Duration::from_millis(sys::SOON as u64);
    loop {
        let (_, events) = wait(ep, max, 0);
        if !events.is_empty() || Instant::now() > end {
            return events;
        }
        std::thread::yield_now();
    }
}

/// Logged epoll_wait() for up to 8 events.
pub fn log_wait(c: &Ctx, ep: c_int, timeout_ms: c_int) -> Vec<(u64, u32)> {
    let (r, got) = wait(ep, 8, timeout_ms);
    let text: Vec<_> = got.iter().map(|(d, e)| format!("{d:#x} {}", epoll_names(*e))).collect();
    c.log(format_args!("epoll_wait -> {r} {text:?}"));
    got
}

/// As [`log_wait`], once `n` level-triggered registrations are ready. The wake-up of one may end a wait before the
/// others' callbacks have run.
pub fn log_wait_for(c: &Ctx, ep: c_int, n: usize) -> Vec<(u64, u32)> {
    let end = Instant::now() + Duration::from_millis(sys::SOON as u64);
    while wait(ep, 8, sys::SOON).1.len() < n && Instant::now() < end {}
    log_wait(c, ep, 0)
}

/// Level-triggered: reported until read; data, EOF and both.
pub fn level(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let ep = create();
        c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, IN | RDHUP, 7));
        log_wait(c, ep, 0);
        c.sync("armed");
        log_wait(c, ep, sys::SOON);
        sys::wait_readable_bytes(fd, 10);
        log_wait(c, ep, 0);
        c.recv(fd, 4, 0);
        log_wait(c, ep, 0);
        c.recv(fd, 10, 0);
        log_wait(c, ep, 0);
        c.sync("read");
        log_wait(c, ep, sys::SOON);
        log_wait(c, ep, 0);
        c.recv(fd, 10, 0);
        log_wait(c, ep, 0);
    } else {
        c.sync("armed");
        sys::pause_ms(20);
        c.send(fd, b"0123456789", 0);
        c.sync("read");
        c.shutdown(fd, libc::SHUT_WR);
    }
    c.sync("done");
    c.close(fd);
}

/// Edge-triggered: reported once for each arrival, not again for unread bytes, again for more.
pub fn edge(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let ep = create();
        c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, IN | OUT | RDHUP | ET, 8));
        log_wait(c, ep, 0);
        log_wait(c, ep, 0);
        c.sync("armed");
        log_wait(c, ep, sys::SOON);
        log_wait(c, ep, 30);
        c.recv(fd, 3, 0);
        log_wait(c, ep, 0);
        c.sync("more");
        log_wait(c, ep, sys::SOON);
        sys::wait_readable_bytes(fd, 10);
        c.recv(fd, 100, 0);
        log_wait(c, ep, 0);
        c.recv(fd, 100, libc::MSG_DONTWAIT);
        c.sync("closing");
        // The kernel wakes twice for a FIN: both wake-ups come before the first wait.
        sys::wait_for(fd, libc::POLLRDHUP);
        sys::pause_ms(20);
        log_wait(c, ep, sys::SOON);
        // The time is enough for a service thread to report the end a second time.
        log_wait(c, ep, 30);
    } else {
        c.sync("armed");
        c.send(fd, b"first", 0);
        c.sync("more");
        c.send(fd, b"second!!", 0);
        c.sync("closing");
        c.shutdown(fd, libc::SHUT_WR);
    }
    c.sync("done");
    c.close(fd);
}

/// Re-arming an edge-triggered fd by MOD reports its present state.
pub fn edge_mod(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let ep = create();
        c.sync("sent");
        sys::wait_readable_bytes(fd, 5);
        c.ret("add a ready one", ctl(ep, EPOLL_CTL_ADD, fd, IN | ET, 1));
        log_wait(c, ep, 0);
        log_wait(c, ep, 0);
        for data in [2, 3] {
            c.ret("mod", ctl(ep, EPOLL_CTL_MOD, fd, IN | ET, data));
            log_wait(c, ep, 0);
            log_wait(c, ep, 0);
        }
        c.ret("mod out", ctl(ep, EPOLL_CTL_MOD, fd, OUT | ET, 4));
        log_wait(c, ep, 0);
        log_wait(c, ep, 0);
        c.recv_all(fd, 5);
        c.ret("mod in", ctl(ep, EPOLL_CTL_MOD, fd, IN | ET, 5));
        log_wait(c, ep, 0);
    } else {
        c.send(fd, b"there", 0);
        c.sync("sent");
    }
    c.sync("done");
    c.close(fd);
}

/// ONESHOT: one report, silent until MOD; with level and edge.
pub fn oneshot(c: &Ctx) {
    let fd = c.pair();
    for extra in [0, ET] {
        if c.is_server() {
            let ep = create();
            c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, IN | ONESHOT | extra, 1));
            c.sync("armed");
            log_wait(c, ep, sys::SOON);
            log_wait(c, ep, 0);
            c.sync("more");
            sys::wait_readable_bytes(fd, 8);
            log_wait(c, ep, 20);
            c.ret("mod", ctl(ep, EPOLL_CTL_MOD, fd, IN | ONESHOT | extra, 2));
            log_wait(c, ep, 0);
            log_wait(c, ep, 0);
            c.recv_all(fd, 8);
            c.ret("mod", ctl(ep, EPOLL_CTL_MOD, fd, IN | ONESHOT | extra, 3));
            log_wait(c, ep, 0);
            c.sync("again");
            log_wait(c, ep, sys::SOON);
            c.recv_all(fd, 4);
            c.close(ep);
        } else {
            for step in ["armed", "more", "again"] {
                if step == "more" {
                    c.send(fd, b"more", 0);
                }
                c.sync(step);
                if step != "more" {
                    c.send(fd, b"data", 0);
                }
            }
        }
        c.sync("round");
    }
    c.close(fd);
}

/// EXCLUSIVE on two epolls: at least one wakes, MOD is refused.
pub fn exclusive(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let (a, b) = (create(), create());
        c.ret("add", ctl(a, EPOLL_CTL_ADD, fd, IN | EXCLUSIVE, 1));
        c.ret("add", ctl(b, EPOLL_CTL_ADD, fd, IN | EXCLUSIVE | ET, 2));
        c.ret("mod", ctl(a, EPOLL_CTL_MOD, fd, IN, 1));
        c.ret("add bad", ctl(create(), EPOLL_CTL_ADD, fd, IN | EXCLUSIVE | ONESHOT, 1));
        c.ret("add an epoll", ctl(a, EPOLL_CTL_ADD, b, IN | EXCLUSIVE, 1));
        c.sync("armed");
        sys::wait_readable_bytes(fd, 4);
        let n = wait(a, 4, 100).0.count() + wait(b, 4, 100).0.count();
        c.log(format_args!("woken: {}", n >= 1));
        c.recv_all(fd, 4);
        c.ret("del", ctl(a, EPOLL_CTL_DEL, fd, 0, 0));
        log_wait(c, a, 0);
    } else {
        c.sync("armed");
        c.send(fd, b"wake", 0);
    }
    c.sync("done");
    c.close(fd);
}

/// The data is kept whole, all ones and zero included, and changed by MOD.
pub fn data_kept(c: &Ctx) {
    let fd = c.pair();
    let ep = create();
    c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, OUT, u64::MAX));
    log_wait(c, ep, sys::SOON);
    for data in [0, 1 << 63, 0xdead_beef_0bad_f00d, u64::from(u32::MAX)] {
        c.ret("mod", ctl(ep, EPOLL_CTL_MOD, fd, OUT, data));
        log_wait(c, ep, sys::SOON);
    }
    c.sync("done");
    c.close(fd);
}

/// MOD and DEL, their errors, and ADD of fds that cannot be added.
pub fn control(c: &Ctx) {
    let fd = c.pair();
    let ep = create();
    c.ret("mod absent", ctl(ep, EPOLL_CTL_MOD, fd, IN, 1));
    c.ret("del absent", ctl(ep, EPOLL_CTL_DEL, fd, 0, 0));
    c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, OUT, 1));
    c.ret("add twice", ctl(ep, EPOLL_CTL_ADD, fd, IN, 2));
    log_wait(c, ep, 0);
    c.ret("mod to nothing", ctl(ep, EPOLL_CTL_MOD, fd, 0, 3));
    log_wait(c, ep, 0);
    c.ret("mod", ctl(ep, EPOLL_CTL_MOD, fd, IN | OUT, 4));
    log_wait(c, ep, 0);
    c.ret(
        "del, null",
        call!(libc::epoll_ctl(ep, EPOLL_CTL_DEL, fd, std::ptr::null_mut())),
    );
    log_wait(c, ep, 0);
    c.ret(
        "add, null",
        call!(libc::epoll_ctl(ep, EPOLL_CTL_ADD, fd, std::ptr::null_mut())),
    );
    c.ret("add itself", ctl(ep, EPOLL_CTL_ADD, ep, IN, 1));
    c.ret("add bad fd", ctl(ep, EPOLL_CTL_ADD, 555, IN, 1));
    c.ret("add to no epoll", ctl(fd, EPOLL_CTL_ADD, fd, IN, 1));
    c.ret("odd op", ctl(ep, 77, fd, IN, 1));
    let file = call!(libc::open(c"/etc/passwd".as_ptr(), libc::O_RDONLY)).ok();
    c.ret("add a file", ctl(ep, EPOLL_CTL_ADD, file, IN, 1));
    c.ret("wait 0", call!(libc::epoll_wait(ep, std::ptr::null_mut(), 0, 0)));
    c.ret("wait -1", call!(libc::epoll_wait(ep, std::ptr::null_mut(), -1, 0)));
    c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, OUT, 1));
    c.ret("wait null", call!(libc::epoll_wait(ep, std::ptr::null_mut(), 1, 0)));
    c.ret("wait no epoll", call!(libc::epoll_wait(fd, std::ptr::null_mut(), 1, 0)));
    c.ret("create 0", call!(libc::epoll_create(0)));
    c.ret("create odd", call!(libc::epoll_create1(0x55)));
    c.sync("done");
    c.close(fd);
}

/// close() removes the fd from the set; the fd, used again, is not in it.
pub fn closed_is_removed(c: &Ctx) {
    let fd = c.pair();
    let (listener, port) = c.listener(2);
    let second = match listener {
        Some(l) => sys::accept4(l, 0).ok(),
        None => sys::connected(&Addr::v4(port)),
    };
    let ep = create();
    c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, OUT, 1));
    c.ret("add", ctl(ep, EPOLL_CTL_ADD, second, OUT, 2));
    log_wait(c, ep, 0);
    c.close(fd);
    log_wait(c, ep, 0);
    let reused = call!(libc::dup(second)).ok();
    c.log(format_args!("number reused: {}", reused == fd));
    log_wait(c, ep, 0);
    c.ret("del the reused", ctl(ep, EPOLL_CTL_DEL, reused, 0, 0));
    c.ret("add the reused", ctl(ep, EPOLL_CTL_ADD, reused, OUT, 3));
    log_wait(c, ep, 0);
    c.sync("done");
}

/// With a dup'd fd the registration outlives the close of the fd it was made with.
pub fn dup_keeps_registration(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let ep = create();
        let dup = call!(libc::dup(fd)).ok();
        c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, IN, 1));
        c.ret("add dup", ctl(ep, EPOLL_CTL_ADD, dup, IN, 2));
        c.sync("armed");
        sys::wait_readable_bytes(fd, 4);
        log_wait_for(c, ep, 2);
        c.close(fd);
        log_wait(c, ep, 0);
        c.ret("del closed", ctl(ep, EPOLL_CTL_DEL, fd, 0, 0));
        c.recv(dup, 10, 0);
        log_wait(c, ep, 0);
        c.sync("again");
        log_wait_for(c, ep, 2);
        c.close(dup);
        log_wait(c, ep, 0);
        c.sync("done");
    } else {
        c.sync("armed");
        c.send(fd, b"wake", 0);
        c.sync("again");
        c.send(fd, b"x", 0);
        sys::pause_ms(20);
        c.sync("done");
        c.close(fd);
    }
}

/// Ready sockets take turns when maxevents is 1.
pub fn fairness(c: &Ctx) {
    const N: usize = 8;
    let first = c.pair();
    let (listener, port) = c.listener(16);
    let mut fds = vec![first];
    for _ in 1..N {
        fds.push(match listener {
            Some(l) => sys::accept4(l, 0).ok(),
            None => sys::connected(&Addr::v4(port)),
        });
    }
    if c.is_server() {
        let ep = create();
        for (i, fd) in fds.iter().enumerate() {
            ctl(ep, EPOLL_CTL_ADD, *fd, IN, i as u64).ok();
        }
        c.sync("sent");
        for fd in &fds {
            sys::wait_readable_bytes(*fd, 5);
        }
        let mut seen = [0; N];
        for _ in 0..2 * N {
            for (i, _) in wait(ep, 1, sys::SOON).1 {
                seen[i as usize] += 1;
            }
        }
        // The kernel promises no order among them.
        c.log(format_args!("all had a turn: {}", seen.iter().all(|n| *n > 0)));
    } else {
        for fd in &fds {
            c.send(*fd, b"ready", 0);
        }
        c.sync("sent");
    }
    c.sync("done");
}

/// Peer's half-close, full close and reset, as epoll reports them without a registration for them.
pub fn hangups(c: &Ctx) {
    let fd = c.pair();
    let ep = create();
    if c.is_server() {
        c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, 0, 1));
        c.sync("half");
        log_wait(c, ep, 50);
        c.ret("mod", ctl(ep, EPOLL_CTL_MOD, fd, RDHUP, 1));
        log_wait(c, ep, sys::SOON);
        c.ret("mod", ctl(ep, EPOLL_CTL_MOD, fd, IN | OUT | RDHUP, 1));
        log_wait(c, ep, sys::SOON);
        c.shutdown(fd, libc::SHUT_WR);
        log_wait(c, ep, sys::SOON);
        c.ret("mod", ctl(ep, EPOLL_CTL_MOD, fd, 0, 1));
        log_wait(c, ep, sys::SOON);
    } else {
        c.shutdown(fd, libc::SHUT_WR);
        c.sync("half");
        c.recv_to_end(fd);
    }
    c.sync("done");
    c.close(fd);
}

/// Edge-triggered readers that treat a short read as the end of the data, as the kernel lets them (epoll(7),
/// question 9). The connections are promoted with a backlog in TCP.
pub fn short_reads(c: &Ctx) {
    backlogs(c, |fd, got| {
        let mut buffer = vec![0; 50_000];
        loop {
            let r = sys::recv(fd, &mut buffer, libc::MSG_DONTWAIT);
            if r.is(libc::EAGAIN) {
                break;
            }
            let n = r.count();
            got.extend_from_slice(&buffer[..n]);
            if n < buffer.len() {
                break;
            }
        }
    });
}

/// As [`short_reads`], by readers that also stop after a read of more bytes than FIONREAD has counted, as nginx
/// does. Bytes that have come since the count make another edge.
pub fn counted_reads(c: &Ctx) {
    backlogs(c, |fd, got| {
        let mut buffer = vec![0; 20_000];
        let mut left = None;
        loop {
            let r = sys::recv(fd, &mut buffer, libc::MSG_DONTWAIT);
            if r.is(libc::EAGAIN) {
                break;
            }
            let n = r.count();
            got.extend_from_slice(&buffer[..n]);
            left = match left {
                None if n == buffer.len() => Some(sys::readable_bytes(fd) as usize),
                Some(left) if n <= left => Some(left - n),
                _ => break,
            };
            if n < buffer.len() {
                break;
            }
        }
    });
}

/// Connections that are promoted with a backlog in TCP, read at edges.
fn backlogs(c: &Ctx, read: fn(c_int, &mut Vec<u8>)) {
    const N: u64 = 20;
    const ANSWER: usize = 3_000_000;
    let (listener, port) = c.listener(64);
    for connection in 0..N {
        if let Some(listener) = listener {
            let fd = sys::accept4(listener, 0).ok();
            for trip in 0..2 {
                assert!(sys::recv_exact(fd, 8) == data::pattern(connection, trip * 8, 8));
                sys::send_all(fd, &data::pattern(connection, trip * 8, 8)).ok();
            }
            sys::send_all(fd, &data::pattern(connection, 0, ANSWER)).ok();
            assert!(sys::recv_exact(fd, 1) == [1]);
            sys::close(fd).ok();
            continue;
        }
        let fd = sys::connected(&Addr::v4(port));
        let ep = create();
        ctl(ep, EPOLL_CTL_ADD, fd, IN | RDHUP | ET, 1).ok();
        for trip in 0..2 {
            let ball = data::pattern(connection, trip * 8, 8);
            sys::send_all(fd, &ball).ok();
            assert!(sys::recv_exact(fd, 8) == ball, "trip {trip}");
        }
        let mut got = Vec::new();
        while got.len() < ANSWER {
            let (_, events) = wait(ep, 1, 10_000);
            assert!(!events.is_empty(), "no event in 10 s, {} bytes", got.len());
            read(fd, &mut got);
        }
        assert!(got == data::pattern(connection, 0, ANSWER));
        sys::send_all(fd, &[1]).ok();
        sys::close(ep).ok();
        sys::close(fd).ok();
    }
    c.log("all equal");
    c.sync("done");
}

/// The sender's fd is passed on, which takes the connection back to TCP. A large read at each edge gets the bytes from
/// before and after that, in all pieces of a vector.
pub fn edge_across_demotion(c: &Ctx) {
    const LEN: usize = 3000;
    let fd = c.pair();
    let all = data::pattern(5, 0, LEN);
    if c.is_server() {
        c.sync("set");
        sys::send_all(fd, &all[..500]).ok();
        let [a, b] = super::process::socketpair();
        c.ret("pass", super::process::pass_fd(a, fd));
        sys::send_all(fd, &all[500..]).ok();
        c.sync("sent");
        c.sync("read");
        sys::close(super::process::take_fd(b)).ok();
        c.close(fd);
        return;
    }
    let ep = create();
    ctl(ep, EPOLL_CTL_ADD, fd, IN | RDHUP | ET, 1).ok();
    c.sync("set");
    c.sync("sent");
    sys::wait_readable_bytes(fd, LEN as c_int);
    let mut got = Vec::new();
    while got.len() < LEN {
        let (_, events) = wait(ep, 1, 10_000);
        assert!(!events.is_empty(), "no event in 10 s, {} bytes", got.len());
        let mut pieces = [[0u8; 1000]; 4];
        let v = pieces.each_mut().map(|piece| sys::iov(piece));
        let mut left = call!(libc::readv(fd, v.as_ptr(), 4)).count();
        for piece in &pieces {
            got.extend_from_slice(&piece[..left.min(1000)]);
            left = left.saturating_sub(1000);
        }
    }
    assert!(got == all);
    c.log("all equal");
    c.sync("read");
    c.recv_to_end(fd);
    c.close(ep);
    c.close(fd);
}

/// A single thread that reads once, blocking, for each report: a report without data would hang it. Each
/// connection is promoted while the set is in use.
pub fn blocking_reads(c: &Ctx) {
    const N: usize = 300;
    let (listener, port) = c.listener(64);
    if let Some(listener) = listener {
        let ep = create();
        ctl(ep, EPOLL_CTL_ADD, listener, IN, u64::MAX).ok();
        let (mut open, mut ended) = (Vec::new(), 0);
        while ended < N {
            let (_, events) = wait(ep, 64, 10_000);
            assert!(!events.is_empty(), "no event in 10 s");
            for (data, _) in events {
                if data == u64::MAX {
                    let fd = sys::accept4(listener, 0).ok();
                    ctl(ep, EPOLL_CTL_ADD, fd, IN, open.len() as u64).ok();
                    open.push(fd);
                    continue;
                }
                let fd = open[data as usize];
                let mut b = [0; 64];
                let n = sys::recv(fd, &mut b, 0).count();
                if n == 0 {
                    ended += 1;
                    sys::close(fd).ok();
                } else {
                    sys::send_all(fd, &b[..n]).ok();
                }
            }
        }
    } else {
        let fds: Vec<c_int> = (0..N)
            .map(|i| {
                let fd = sys::connected(&Addr::v4(port));
                for trip in 0..6 {
                    let ball = data::pattern(i as u64, trip * 8, 8);
                    sys::send_all(fd, &ball).ok();
                    assert!(sys::recv_exact(fd, 8) == ball, "connection {i} trip {trip}");
                }
                fd
            })
            .collect();
        for fd in fds {
            sys::close(fd).ok();
        }
    }
    c.log("all equal");
    c.sync("done");
}

/// Four threads on one set of EPOLLONESHOT connections that are promoted meanwhile: no two threads
/// ever have the same connection.
pub fn oneshot_threads(c: &Ctx) {
    use std::sync::atomic::Ordering::SeqCst;
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    const N: usize = 40;
    const TRIPS: u64 = 30;
    let (listener, port) = c.listener(64);
    let mut fds = Vec::new();
    for _ in 0..N {
        fds.push(match listener {
            Some(listener) => sys::accept4(listener, 0).ok(),
            None => sys::connected(&Addr::v4(port)),
        });
    }
    if c.is_server() {
        let ep = create();
        for (i, fd) in fds.iter().enumerate() {
            ctl(ep, EPOLL_CTL_ADD, *fd, IN | ONESHOT, i as u64).ok();
        }
        let busy: Vec<AtomicBool> = fds.iter().map(|_| AtomicBool::new(false)).collect();
        let ended = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    while ended.load(SeqCst) < N {
                        for (data, _) in wait(ep, 1, 50).1 {
                            let (fd, mark) = (fds[data as usize], &busy[data as usize]);
                            assert!(!mark.swap(true, SeqCst), "two threads have {data}");
                            let mut b = [0; 64];
                            let n = sys::recv(fd, &mut b, 0).count();
                            sys::send_all(fd, &b[..n]).ok();
                            mark.store(false, SeqCst);
                            if n == 0 {
                                ended.fetch_add(1, SeqCst);
                            } else {
                                ctl(ep, EPOLL_CTL_MOD, fd, IN | ONESHOT, data).ok();
                            }
                        }
                    }
                });
            }
        });
    } else {
        for trip in 0..TRIPS {
            for (i, fd) in fds.iter().enumerate() {
                sys::send_all(*fd, &data::pattern(i as u64, trip * 8, 8)).ok();
            }
            for (i, fd) in fds.iter().enumerate() {
                let want = data::pattern(i as u64, trip * 8, 8);
                assert!(sys::recv_exact(*fd, 8) == want, "connection {i} trip {trip}");
            }
        }
        for fd in &fds {
            c.shutdown(*fd, libc::SHUT_WR);
        }
    }
    c.sync("done");
    for fd in fds {
        sys::close(fd).ok();
    }
}
