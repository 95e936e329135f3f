//! poll, ppoll, select and pselect.

use libc::{POLLIN, POLLOUT, POLLPRI, POLLRDHUP, c_int};

use crate::ctx::{Ctx, poll_names};
use crate::sys;
use crate::sys::Addr;

/// Logged poll() of several fds.
fn poll(c: &Ctx, what: &str, fds: &[(c_int, i16)], timeout_ms: c_int) {
    let mut p: Vec<_> = fds
        .iter()
        .map(|(fd, events)| libc::pollfd {
            fd: *fd,
            events: *events,
            revents: 0x7fff,
        })
        .collect();
    let r = call!(libc::poll(p.as_mut_ptr(), p.len() as libc::nfds_t, timeout_ms));
    let names: Vec<_> = p.iter().map(|p| poll_names(p.revents)).collect();
    c.log(format_args!("poll {what} -> {r} {names:?}"));
}

/// Negative fds, closed fds, one fd several times, other kinds of fds.
pub fn odd_fds(c: &Ctx) {
    let fd = c.pair();
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    poll(c, "none", &[], 10);
    poll(c, "negative", &[(-1, POLLIN), (-fd, POLLIN)], 10);
    poll(c, "negative and ready", &[(-1, POLLIN), (fd, POLLOUT)], sys::SOON);
    poll(c, "closed", &[(777, POLLIN), (fd, POLLIN)], sys::SOON);
    poll(
        c,
        "twice",
        &[(fd, POLLOUT), (fd, POLLIN), (fd, POLLIN | POLLOUT)],
        sys::SOON,
    );
    poll(c, "with a pipe", &[(pipe[0], POLLIN), (fd, POLLIN)], 10);
    poll(
        c,
        "with a full set",
        &[(pipe[1], POLLOUT), (fd, POLLOUT | POLLPRI)],
        sys::SOON,
    );
    c.write(pipe[1], b"x");
    poll(c, "pipe wakes", &[(pipe[0], POLLIN), (fd, POLLIN)], sys::SOON);
    poll(
        c,
        "normal and band",
        &[(
            fd,
            libc::POLLRDNORM | libc::POLLWRNORM | libc::POLLRDBAND | libc::POLLWRBAND,
        )],
        sys::SOON,
    );
    c.sync("done");
    c.close(fd);
    poll(c, "after close", &[(fd, POLLIN)], sys::SOON);
}

/// The masks through the life of a connection.
pub fn masks(c: &Ctx) {
    let fd = c.pair();
    const ALL: i16 = POLLIN | POLLOUT | POLLRDHUP | POLLPRI;
    if c.is_server() {
        poll(c, "idle", &[(fd, ALL)], 0);
        c.sync("idle");
        sys::wait_readable_bytes(fd, 4);
        poll(c, "data", &[(fd, ALL)], sys::SOON);
        poll(c, "data, not asked", &[(fd, 0)], 0);
        c.recv_all(fd, 4);
        poll(c, "read", &[(fd, ALL)], 0);
        c.sync("half");
        sys::wait_for(fd, POLLRDHUP);
        poll(c, "peer's half closed", &[(fd, ALL)], 0);
        poll(c, "not asked", &[(fd, 0)], 0);
        poll(c, "only in", &[(fd, POLLIN)], 0);
        c.shutdown(fd, libc::SHUT_WR);
        sys::wait_for(fd, libc::POLLHUP);
        poll(c, "both closed", &[(fd, ALL)], 0);
        poll(c, "not asked", &[(fd, 0)], 0);
    } else {
        c.sync("idle");
        c.send(fd, b"data", 0);
        c.sync("half");
        c.shutdown(fd, libc::SHUT_WR);
        c.recv_to_end(fd);
    }
    c.sync("done");
    c.close(fd);
}

/// A listener in poll, before, with and after a waiting connection.
pub fn listener(c: &Ctx) {
    let (listener, port) = c.listener(4);
    if let Some(l) = listener {
        poll(c, "no one", &[(l, POLLIN | POLLOUT)], 10);
        c.sync("connect");
        poll(c, "waiting", &[(l, POLLIN | POLLOUT)], sys::SOON);
        let fd = sys::accept4(l, 0).ok();
        poll(c, "both", &[(l, POLLIN), (fd, POLLIN | POLLOUT)], sys::SOON);
        c.sync("send");
        poll(c, "data", &[(l, POLLIN), (fd, POLLIN)], sys::SOON);
        c.recv(fd, 10, 0);
    } else {
        c.sync("connect");
        let fd = sys::connected(&Addr::v4(port));
        c.sync("send");
        c.send(fd, b"hello", 0);
    }
    c.sync("done");
}

/// ppoll: zero, short, odd and no time-outs.
pub fn ppoll(c: &Ctx) {
    let fd = c.pair();
    let go = |events: i16, time: Option<(i64, i64)>| {
        let t = time.map(|(s, n)| libc::timespec { tv_sec: s, tv_nsec: n });
        let p_t = t.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let mut p = libc::pollfd { fd, events, revents: 0 };
        let r = call!(libc::ppoll(&mut p, 1, p_t, std::ptr::null()));
        c.log(format_args!("ppoll {time:?} -> {r} {}", poll_names(p.revents)));
        if let Some(t) = t {
            // The C library hides the kernel's update of the time-out.
            c.log(format_args!("unchanged {}", Some((t.tv_sec, t.tv_nsec)) == time));
        }
    };
    go(POLLIN, Some((0, 0)));
    go(POLLIN, Some((0, 30_000_000)));
    go(POLLIN, Some((0, 1_000_000_000)));
    go(POLLIN, Some((-1, 0)));
    go(POLLOUT, None);
    c.sync("send");
    c.send(fd, b"x", 0);
    go(POLLIN, None);
    c.sync("done");
    c.close(fd);
}

/// An fd_set with these fds.
fn set(fds: &[c_int]) -> libc::fd_set {
    let mut s: libc::fd_set = sys::zeroed();
    for fd in fds {
        // SAFETY: the scenarios' fds are below FD_SETSIZE.
        unsafe { libc::FD_SET(*fd, &mut s) };
    }
    s
}

/// Which of `fds` are in the set.
fn members(s: &libc::fd_set, fds: &[c_int]) -> Vec<bool> {
    // SAFETY: the scenarios' fds are below FD_SETSIZE.
    fds.iter().map(|fd| unsafe { libc::FD_ISSET(*fd, s) }).collect()
}

/// select with all three sets, urgent data, two connections and a pipe.
pub fn select(c: &Ctx) {
    let fd = c.pair();
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    let fds = [fd, pipe[0], pipe[1]];
    let go = |what: &str, ms: i64| {
        let (mut r, mut w, mut e) = (set(&fds[..2]), set(&[fd, pipe[1]]), set(&fds));
        let mut tv = libc::timeval {
            tv_sec: ms / 1000,
            tv_usec: ms % 1000 * 1000,
        };
        let n = call!(libc::select(pipe[1] + 1, &mut r, &mut w, &mut e, &mut tv));
        c.log(format_args!(
            "select {what} -> {n} {:?} {:?} {:?}",
            members(&r, &fds),
            members(&w, &fds),
            members(&e, &fds)
        ));
    };
    go("idle", 100);
    let read_only = |what: &str, ms: Option<i64>| {
        let mut r = set(&fds[..2]);
        let mut tv = libc::timeval {
            tv_sec: 0,
            tv_usec: ms.unwrap_or(0) * 1000,
        };
        let time = if ms.is_some() {
            &raw mut tv
        } else {
            std::ptr::null_mut()
        };
        let null = std::ptr::null_mut();
        let n = call!(libc::select(pipe[1] + 1, &mut r, null, null, time));
        c.log(format_args!("select {what} -> {n} {:?}", members(&r, &fds)));
        c.log(format_args!("time left {} {}", tv.tv_sec, tv.tv_usec == 0));
    };
    read_only("none readable", Some(20));
    if c.is_server() {
        c.sync("send");
        read_only("wait for data", None);
        sys::wait_readable_bytes(fd, 4);
        go("data", i64::from(sys::SOON));
        c.write(pipe[1], b"x");
        go("data and pipe", i64::from(sys::SOON));
        c.recv_all(fd, 4);
        c.sync("close");
        sys::wait_for(fd, POLLRDHUP);
        go("EOF", i64::from(sys::SOON));
    } else {
        c.sync("send");
        sys::pause_ms(30);
        c.send(fd, b"data", 0);
        c.sync("close");
        c.shutdown(fd, libc::SHUT_WR);
    }
    c.sync("done");
    c.close(fd);
}

/// select's errors: closed fd, negative count, bad time; nothing to wait for.
pub fn select_errors(c: &Ctx) {
    let fd = c.pair();
    let null = std::ptr::null_mut::<libc::fd_set>();
    let go = |what: &str, n: c_int, s: libc::fd_set, sec: i64, usec: i64| {
        let mut s = s;
        let mut tv = libc::timeval {
            tv_sec: sec,
            tv_usec: usec,
        };
        let r = call!(libc::select(n, &mut s, null, null, &mut tv));
        c.log(format_args!("select {what} -> {r} {:?}", members(&s, &[fd, 555])));
    };
    go("closed", 600, set(&[fd, 555]), 0, 0);
    go("negative", -1, set(&[fd]), 0, 0);
    go("bad time", fd + 1, set(&[fd]), -1, 0);
    go("bad µs", fd + 1, set(&[fd]), 0, -5);
    go("count 0", 0, set(&[fd]), 0, 10_000);
    go("count too low", fd, set(&[fd]), 0, 10_000);
    go("idle", fd + 1, set(&[fd]), 0, 10_000);
    let t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    let mut w = set(&[fd]);
    c.ret(
        "pselect",
        call!(libc::pselect(fd + 1, null, &mut w, null, &t, std::ptr::null())),
    );
    c.ret(
        "pselect none",
        call!(libc::pselect(0, null, null, null, &t, std::ptr::null())),
    );
    c.sync("done");
    c.close(fd);
}

/// A connection whose fd is above FD_SETSIZE in poll and epoll.
pub fn high_fd(c: &Ctx) {
    let low = c.pair();
    let fd = call!(libc::fcntl(low, libc::F_DUPFD, 2000)).ok();
    c.log(fd);
    c.close(low);
    if c.is_server() {
        poll(c, "idle", &[(fd, POLLIN | POLLOUT)], 0);
        c.sync("send");
        poll(c, "data", &[(fd, POLLIN)], sys::SOON);
        c.recv(fd, 10, 0);
        c.send(fd, b"back", 0);
    } else {
        c.sync("send");
        c.send(fd, b"high", 0);
        c.recv_all(fd, 4);
    }
    c.sync("done");
    c.close(fd);
}

/// Two connections and a sleeper in poll that either wakes.
pub fn two_connections(c: &Ctx) {
    let a = c.pair();
    let (listener, port) = c.listener(2);
    let b = match listener {
        Some(l) => sys::accept4(l, 0).ok(),
        None => sys::connected(&Addr::v4(port)),
    };
    for round in 0..6 {
        let which = [a, b][round % 2];
        if c.is_server() {
            c.sync("round");
            poll(c, "either", &[(a, POLLIN), (b, POLLIN)], sys::SOON);
            c.recv_all(which, 20);
        } else {
            c.sync("round");
            sys::pause_ms(10);
            c.send(which, &crate::data::pattern(round as u64, 0, 20), 0);
        }
    }
    c.sync("done");
}

/// As many entries as the limit of open files, with a thread that sleeps in poll; and one more.
pub fn as_many_as_the_limit(c: &Ctx) {
    const LIMIT: usize = 64;
    let fd = c.pair();
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    let mut limit: libc::rlimit = sys::zeroed();
    call!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit)).ok();
    limit.rlim_cur = LIMIT as libc::rlim_t;
    call!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit)).ok();
    let mut fds = vec![(pipe[0], POLLIN); LIMIT];
    // `revents` after an error is not defined.
    let poll = |what: &str, fds: &[(c_int, i16)], ms: c_int| {
        let entry = |(fd, events): &(c_int, i16)| libc::pollfd {
            fd: *fd,
            events: *events,
            revents: 0,
        };
        let mut p: Vec<_> = fds.iter().map(entry).collect();
        let r = call!(libc::poll(p.as_mut_ptr(), p.len() as libc::nfds_t, ms));
        let ready: Vec<_> = p.iter().map(|p| p.revents).enumerate().filter(|p| p.1 != 0).collect();
        c.log(format_args!("poll {what} -> {r} {ready:?}"));
    };
    poll("all plain", &fds, 5);
    fds[10] = (fd, POLLIN);
    fds[20] = (-1, POLLIN);
    if c.is_server() {
        poll("idle", &fds, 5);
        c.sync("idle");
        poll("woken", &fds, sys::SOON);
        c.recv(fd, 10, 0);
        fds.push((pipe[0], POLLIN));
        poll("too many", &fds, 5);
        c.sync("read");
    } else {
        c.sync("idle");
        sys::pause_ms(20);
        c.send(fd, b"wake", 0);
        c.sync("read");
    }
    c.close(fd);
}

/// select() over all possible fds, with a set that has bits for 1,024 only.
pub fn select_all(c: &Ctx) {
    #[repr(C)]
    struct Set {
        bits: libc::fd_set,
        beyond: [u64; 64],
    }
    let fd = c.pair();
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    let all = call!(libc::getdtablesize()).ok();
    let look = |what: &str, fds: &[c_int], ms: i64| {
        let mut set = Set {
            bits: sys::zeroed(),
            beyond: [u64::MAX; 64],
        };
        for fd in fds {
            // SAFETY: the numbers are below FD_SETSIZE.
            unsafe { libc::FD_SET(*fd, &mut set.bits) };
        }
        let mut t = libc::timeval {
            tv_sec: ms / 1000,
            tv_usec: ms % 1000 * 1000,
        };
        let none = std::ptr::null_mut();
        let r = call!(libc::select(all, &mut set.bits, none, none, &mut t));
        // SAFETY: as above.
        let left: Vec<_> = fds.iter().map(|fd| unsafe { libc::FD_ISSET(*fd, &set.bits) }).collect();
        let kept = set.beyond.iter().all(|word| *word == u64::MAX);
        c.log(format_args!("select {what} -> {r} {left:?}, beyond it {kept}"));
    };
    look("plain", &pipe[..1], 5);
    if c.is_server() {
        look("idle", &[fd, pipe[0]], 5);
        c.sync("idle");
        look("woken", &[fd, pipe[0]], i64::from(sys::SOON));
        c.recv(fd, 10, 0);
        look("closed", &[fd, 777], 5);
        c.sync("read");
    } else {
        c.sync("idle");
        sys::pause_ms(20);
        c.send(fd, b"wake", 0);
        c.sync("read");
    }
    c.close(fd);
}
