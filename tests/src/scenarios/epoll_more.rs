//! epoll together with other things: nesting, other kinds of fds, several epolls, listeners.

use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, c_int};

use super::epoll::{ET, IN, ONESHOT, OUT, create, ctl, log_wait, look_until_reported, wait};
use crate::ctx::{Ctx, epoll_names};
use crate::sys::Addr;
use crate::{data, sys};

/// An epoll in an epoll, in poll and in select.
pub fn nested(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let (inner, outer, outermost) = (create(), create(), create());
        c.ret("add socket", ctl(inner, EPOLL_CTL_ADD, fd, IN, 1));
        c.ret("add inner", ctl(outer, EPOLL_CTL_ADD, inner, IN, 2));
        c.ret("add outer", ctl(outermost, EPOLL_CTL_ADD, outer, IN, 3));
        c.ret("loop", ctl(inner, EPOLL_CTL_ADD, outermost, IN, 4));
        let look = |wait_ms: c_int| {
            c.poll(inner, libc::POLLIN | libc::POLLOUT, wait_ms);
            c.poll(outer, libc::POLLIN, wait_ms);
            let mut set: libc::fd_set = sys::zeroed();
            // SAFETY: the fd is far below FD_SETSIZE.
            unsafe { libc::FD_SET(inner, &mut set) };
            let mut tv = libc::timeval { tv_sec: 0, tv_usec: 0 };
            let null = std::ptr::null_mut();
            c.ret("select", call!(libc::select(inner + 1, &mut set, null, null, &mut tv)));
            log_wait(c, outermost, wait_ms);
            log_wait(c, outer, 0);
            log_wait(c, inner, 0);
        };
        look(0);
        c.sync("armed");
        sys::wait_readable_bytes(fd, 4);
        look(sys::SOON);
        c.recv_all(fd, 4);
        // The outer sets may stop being ready only after a wait.
        wait(outermost, 8, 0);
        wait(outer, 8, 0);
        log_wait(c, inner, 0);
        c.poll(inner, libc::POLLIN, 0);
        // A thread that sleeps in the outermost one is woken by the socket.
        c.sync("asleep");
        log_wait(c, outermost, sys::SOON);
        c.recv_all(fd, 4);
    } else {
        c.sync("armed");
        c.send(fd, b"wake", 0);
        c.sync("asleep");
        sys::pause_ms(40);
        c.send(fd, b"wake", 0);
    }
    c.sync("done");
    c.close(fd);
}

/// A pipe, an eventfd, a timerfd and a connection in one epoll.
pub fn mixed(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let ep = create();
        let mut pipe = [0; 2];
        call!(libc::pipe(pipe.as_mut_ptr())).ok();
        let event = call!(libc::eventfd(0, 0)).ok();
        let timer = call!(libc::timerfd_create(libc::CLOCK_MONOTONIC, 0)).ok();
        for (data, fd) in [(1, fd), (2, pipe[0]), (3, event), (4, timer)] {
            c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, IN, data));
        }
        log_wait(c, ep, 0);
        c.write(pipe[1], b"p");
        log_wait(c, ep, sys::SOON);
        c.write(event, &1u64.to_ne_bytes());
        log_wait(c, ep, sys::SOON);
        let mut time: libc::itimerspec = sys::zeroed();
        time.it_value.tv_nsec = 20_000_000;
        c.ret(
            "timerfd_settime",
            call!(libc::timerfd_settime(timer, 0, &time, std::ptr::null_mut())),
        );
        sys::wait_for(timer, libc::POLLIN);
        log_wait(c, ep, sys::SOON);
        c.sync("armed");
        // The bytes are there a moment before the wake-up is.
        c.sync("sent");
        log_wait(c, ep, sys::SOON);
        c.recv_all(fd, 4);
        let mut b = [0; 8];
        for fd in [pipe[0], event, timer] {
            c.ret("read", sys::read(fd, &mut b));
        }
        log_wait(c, ep, 0);
        // The wait sleeps on all fds: the other kinds wake it as well.
        let writer = pipe[1];
        std::thread::scope(|s| {
            s.spawn(move || {
                sys::pause_ms(40);
                sys::write(writer, b"late").ok();
            });
            log_wait(c, ep, sys::SOON);
        });
    } else {
        c.sync("armed");
        c.send(fd, b"wake", 0);
        c.sync("sent");
    }
    c.sync("done");
    c.close(fd);
}

/// A connection and a pipe that are ready all the time, with one event at a time: both take turns.
pub fn in_turns(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let ep = create();
        let mut pipe = [0; 2];
        call!(libc::pipe(pipe.as_mut_ptr())).ok();
        for (data, fd) in [(1, fd), (2, pipe[0])] {
            c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, IN, data));
        }
        c.sync("sent");
        sys::wait_readable_bytes(fd, 4);
        // The pipe is empty at first, so that waits are answered without it.
        for _ in 0..1000 {
            let (_, got) = wait(ep, 1, sys::SOON);
            if got != [(1, IN)] {
                c.log(format_args!("{got:?} where only the connection is ready"));
            }
        }
        sys::write(pipe[1], b"p").ok();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let mut turns = [0; 2];
        while turns.iter().any(|n| *n < 100) && std::time::Instant::now() < until {
            match wait(ep, 1, sys::SOON).1.first() {
                Some((1, IN)) => turns[0] += 1,
                Some((2, IN)) => turns[1] += 1,
                other => c.log(format_args!("{other:?}")),
            }
        }
        c.log(format_args!("had 100 turns each: {}", turns.iter().all(|n| *n >= 100)));
    } else {
        c.send(fd, b"here", 0);
        c.sync("sent");
    }
    c.sync("done");
    c.close(fd);
}

/// A connection in two epolls with different interest.
pub fn two_epolls(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let (a, b) = (create(), create());
        c.ret("add", ctl(a, EPOLL_CTL_ADD, fd, IN, 1));
        c.ret("add", ctl(b, EPOLL_CTL_ADD, fd, IN | OUT | ET, 2));
        // When a set is added, the library has all sets check again, which may be one edge more (docs/limits.md).
        sys::pause_ms(100);
        log_wait(c, a, 0);
        log_wait(c, b, 0);
        for _ in 0..2 {
            c.sync("round");
            // When the send has returned, the bytes are there and both sets report them.
            c.sync("sent");
            sys::wait_readable_bytes(fd, 4);
            log_wait(c, a, sys::SOON);
            log_wait(c, b, sys::SOON);
            log_wait(c, a, 0);
            log_wait(c, b, 0);
            c.recv_all(fd, 4);
            log_wait(c, a, 0);
        }
        c.ret("del", ctl(a, EPOLL_CTL_DEL, fd, 0, 0));
        c.ret("mod", ctl(b, EPOLL_CTL_MOD, fd, OUT, 5));
        log_wait(c, a, 0);
        log_wait(c, b, 0);
    } else {
        for _ in 0..2 {
            c.sync("round");
            c.send(fd, b"data", 0);
            c.sync("sent");
        }
    }
    c.sync("done");
    c.close(fd);
}

/// A connection in two epolls: waits that do not sleep report the earlier send in both, each time.
pub fn two_epolls_at_once(c: &Ctx) {
    let fd = c.pair();
    let (a, b) = (create(), create());
    if c.is_server() {
        ctl(a, EPOLL_CTL_ADD, fd, IN, 1).ok();
        ctl(b, EPOLL_CTL_ADD, fd, IN | ET, 2).ok();
        sys::pause_ms(100);
    }
    for round in 0..200 {
        if !c.is_server() {
            c.sync("read");
            sys::send_all(fd, b"data").ok();
            c.sync("sent");
            continue;
        }
        c.sync("read");
        c.sync("sent");
        sys::wait_readable_bytes(fd, 4);
        let (level, edge) = (look_until_reported(a, 4), look_until_reported(b, 4));
        assert_eq!(level, [(1, IN)], "round {round}");
        assert_eq!(edge, [(2, IN)], "round {round}");
        sys::recv_exact(fd, 4);
        let (level, edge) = (wait(a, 4, 0).1, wait(b, 4, 0).1);
        assert!(level.is_empty() && edge.is_empty(), "round {round}: {level:?} {edge:?}");
    }
    c.log("all told");
    c.sync("done");
    c.close(fd);
}

/// Two threads asleep in two epolls with the same connection: both wake.
pub fn two_sleepers(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let eps = [create(), create()];
        for ep in eps {
            ctl(ep, EPOLL_CTL_ADD, fd, IN, 1).ok();
        }
        c.sync("armed");
        let woken: usize = std::thread::scope(|s| {
            let threads = eps.map(|ep| s.spawn(move || wait(ep, 4, sys::SOON).0.count()));
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        c.log(format_args!("woken {woken}"));
        c.recv_all(fd, 4);
    } else {
        c.sync("armed");
        sys::pause_ms(60);
        c.send(fd, b"wake", 0);
    }
    c.sync("done");
    c.close(fd);
}

/// epoll_pwait2's time-outs, in ns, and its errors.
pub fn pwait2(c: &Ctx) {
    let fd = c.pair();
    // SAFETY: the prototype is epoll_pwait2(2)'s; a null means an old libc.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"epoll_pwait2".as_ptr()) };
    type Pwait2 = unsafe extern "C" fn(
        c_int,
        *mut libc::epoll_event,
        c_int,
        *const libc::timespec,
        *const libc::sigset_t,
    ) -> c_int;
    // SAFETY: Option of a function pointer has the null as None.
    let Some(pwait2) = (unsafe { std::mem::transmute::<*mut libc::c_void, Option<Pwait2>>(symbol) }) else {
        c.log("no epoll_pwait2");
        return;
    };
    let ep = create();
    ctl(ep, EPOLL_CTL_ADD, fd, IN, 1).ok();
    let mut ev: libc::epoll_event = sys::zeroed();
    let mut go = |sec, nsec| {
        let t = libc::timespec {
            tv_sec: sec,
            tv_nsec: nsec,
        };
        let r = call!(pwait2(ep, &mut ev, 1, &t, std::ptr::null()));
        let events = ev.events;
        c.log(format_args!("epoll_pwait2 {sec} {nsec} -> {r} {}", epoll_names(events)));
    };
    go(0, 0);
    go(0, 30_000_000);
    go(0, -1);
    go(0, 1_000_000_000);
    go(-1, 0);
    c.sync("send");
    c.send(fd, b"x", 0);
    go(5, 0);
    let r = call!(pwait2(ep, &mut ev, 1, std::ptr::null(), std::ptr::null()));
    c.ret("epoll_pwait2 for ever", r);
    c.sync("done");
    c.close(fd);
}

/// An event loop with a listener and many connections: accept, echo, close, level or edge.
fn server_loop(c: &Ctx, flags: u32) {
    const N: usize = 40;
    let (listener, port) = c.listener(64);
    let Some(listener) = listener else {
        let fds: Vec<_> = (0..N).map(|_| sys::connected(&Addr::v4(port))).collect();
        for round in 0..5 {
            for (i, fd) in fds.iter().enumerate() {
                sys::send_all(*fd, &data::pattern(i as u64, round, 3000)).ok();
            }
            for (i, fd) in fds.iter().enumerate() {
                assert!(sys::recv_exact(*fd, 3000) == data::pattern(i as u64, round, 3000));
            }
        }
        c.log("all equal");
        for fd in fds {
            sys::close(fd).ok();
        }
        return;
    };
    sys::set_nonblocking(listener, true);
    let ep = create();
    ctl(ep, EPOLL_CTL_ADD, listener, IN | flags, listener as u64).ok();
    let (mut accepted, mut closed, mut bytes) = (0, 0, 0);
    while closed < N {
        let (r, events) = wait(ep, 16, 10_000);
        assert!(r.ok() > 0, "no event: {accepted} accepted, {closed} closed");
        for (fd, _) in events {
            let fd = fd as c_int;
            if fd == listener {
                while let Ok(new) = usize::try_from(sys::accept4(fd, libc::SOCK_NONBLOCK).value) {
                    ctl(ep, EPOLL_CTL_ADD, new as c_int, IN | flags, new as u64).ok();
                    accepted += 1;
                }
                continue;
            }
            let mut b = [0; 2048];
            loop {
                let r = sys::recv(fd, &mut b, 0);
                if r.is(libc::EAGAIN) {
                    break;
                }
                let n = r.count();
                if n == 0 {
                    sys::close(fd).ok();
                    closed += 1;
                    break;
                }
                bytes += n;
                sys::send_all(fd, &b[..n]).ok();
            }
        }
    }
    c.log(format_args!("{accepted} accepted, {closed} closed, {bytes} bytes"));
}

/// The loop, level-triggered.
pub fn loop_level(c: &Ctx) {
    server_loop(c, 0);
}

/// The loop, edge-triggered.
pub fn loop_edge(c: &Ctx) {
    server_loop(c, ET);
}

/// A connection is added to and changed in an epoll in which a thread already sleeps.
pub fn added_while_waiting(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let ep = create();
        c.sync("sent");
        sys::wait_readable_bytes(fd, 4);
        std::thread::scope(|s| {
            let sleeper = s.spawn(move || wait(ep, 4, sys::SOON));
            sys::pause_ms(40);
            ctl(ep, EPOLL_CTL_ADD, fd, IN, 1).ok();
            c.log(format_args!("{:?}", sleeper.join().unwrap().1));
        });
        c.recv_all(fd, 4);
        std::thread::scope(|s| {
            let sleeper = s.spawn(move || wait(ep, 4, sys::SOON));
            sys::pause_ms(40);
            ctl(ep, EPOLL_CTL_MOD, fd, OUT, 2).ok();
            c.log(format_args!("{:?}", sleeper.join().unwrap().1));
        });
        // The epoll itself is dup'd: one set, two fds.
        let dup = call!(libc::dup(ep)).ok();
        c.close(ep);
        log_wait(c, dup, sys::SOON);
        c.ret("del", ctl(dup, EPOLL_CTL_DEL, fd, 0, 0));
        log_wait(c, dup, 0);
    } else {
        c.send(fd, b"data", 0);
        c.sync("sent");
    }
    c.sync("done");
    c.close(fd);
}

/// A child of fork shares the epoll set with its parent.
pub fn shared_with_child(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let ep = create();
        ctl(ep, EPOLL_CTL_ADD, fd, IN, 9).ok();
        c.sync("armed");
        sys::wait_for(fd, libc::POLLIN);
        let child = sys::fork_child(|| {
            log_wait(c, ep, sys::SOON);
            c.recv(fd, 10, 0);
            log_wait(c, ep, 0);
            0
        });
        c.log(format_args!("child {}", sys::wait_child(child)));
        log_wait(c, ep, 0);
        c.sync("again");
        log_wait(c, ep, sys::SOON);
        c.recv(fd, 10, 0);
    } else {
        c.sync("armed");
        c.send(fd, b"for child", 0);
        c.sync("again");
        c.send(fd, b"for parent", 0);
    }
    c.sync("done");
    c.close(fd);
}

/// Registered before the threshold and changed after it; in between the library learns whether the other end has
/// the library.
pub fn registered_before(c: &Ctx) {
    let fd = c.cold_pair();
    if c.is_server() {
        c.warm_up(fd);
        for word in ["known", "removed", "again", "copied", "one shot"] {
            c.sync(word);
            c.send(fd, b"word", 0);
        }
        c.sync("closed");
        c.close(fd);
        return;
    }
    let (ep, other) = (create(), create());
    c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, 0, 1));
    c.warm_up(fd);
    c.ret("add again", ctl(ep, EPOLL_CTL_ADD, fd, IN, 2));
    c.ret("change", ctl(ep, EPOLL_CTL_MOD, fd, IN, 3));
    let take = |word: &str, ep: c_int| {
        c.sync(word);
        log_wait(c, ep, sys::SOON);
        c.recv_all(fd, 4);
        log_wait(c, ep, 0);
    };
    take("known", ep);
    c.ret("remove", ctl(ep, EPOLL_CTL_DEL, fd, 0, 0));
    c.ret("remove again", ctl(ep, EPOLL_CTL_DEL, fd, 0, 0));
    c.ret("change", ctl(ep, EPOLL_CTL_MOD, fd, IN, 3));
    c.ret("add to another", ctl(other, EPOLL_CTL_ADD, fd, IN | ET, 4));
    take("removed", other);
    c.ret("add", ctl(ep, EPOLL_CTL_ADD, fd, IN, 5));
    take("again", ep);
    log_wait(c, other, 0);
    let copy = call!(libc::dup(fd)).ok();
    c.ret("remove", ctl(ep, EPOLL_CTL_DEL, fd, 0, 0));
    c.ret("change the copy", ctl(ep, EPOLL_CTL_MOD, copy, IN, 6));
    c.ret("add the copy", ctl(ep, EPOLL_CTL_ADD, copy, IN, 6));
    take("copied", ep);
    let once = IN | libc::EPOLLONESHOT as u32;
    c.ret("change the copy", ctl(ep, EPOLL_CTL_MOD, copy, once, 7));
    c.sync("one shot");
    log_wait(c, ep, sys::SOON);
    log_wait(c, ep, 0);
    c.ret("change the copy", ctl(ep, EPOLL_CTL_MOD, copy, once, 8));
    log_wait(c, ep, sys::SOON);
    c.poll(fd, libc::POLLIN | libc::POLLOUT, 0);
    c.recv_all(copy, 4);
    c.close(copy);
    c.ret("remove the copy", ctl(ep, EPOLL_CTL_DEL, copy, 0, 0));
    c.sync("closed");
    c.poll(fd, libc::POLLIN, sys::SOON);
    c.recv_to_end(fd);
    c.close(fd);
    log_wait(c, ep, 0);
    log_wait(c, other, 0);
}

/// An array that cannot be written: no error while nothing is ready, then EFAULT, and the next wait returns the event.
pub fn unwritable(c: &Ctx) {
    const PAGE: usize = 4096;
    let fd = c.pair();
    if c.is_server() {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = |protection| {
            // SAFETY: new memory.
            unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, flags, -1, 0) }
        };
        let arrays = [page(libc::PROT_NONE), page(libc::PROT_READ)];
        for events in [IN, IN | ET, IN | ONESHOT] {
            let set = create();
            ctl(set, EPOLL_CTL_ADD, fd, events, 7).ok();
            let wait_into = |array: *mut libc::c_void| {
                let wait = call!(libc::epoll_wait(set, array.cast(), 4, 0));
                c.ret("epoll_wait into what cannot be written", wait);
            };
            arrays.into_iter().for_each(wait_into);
            c.sync("nothing");
            c.sync("sent");
            sys::wait_readable_bytes(fd, 1);
            arrays.into_iter().for_each(wait_into);
            log_wait(c, set, sys::SOON);
            c.recv(fd, 10, 0);
            sys::close(set).ok();
        }
        arrays.into_iter().for_each(|array| {
            // SAFETY: mapped above, and not used any more.
            unsafe { libc::munmap(array, PAGE) };
        });
    } else {
        for _ in 0..3 {
            c.sync("nothing");
            c.send(fd, b"x", 0);
            c.sync("sent");
        }
    }
    c.sync("done");
    c.close(fd);
}
