//! Signals that interrupt blocked calls, and handlers that do I/O.

use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

use libc::c_int;

use crate::ctx::Ctx;
use crate::{data, sys};

static HITS: AtomicI32 = AtomicI32::new(0);
extern "C" fn count(_: c_int) {
    HITS.fetch_add(1, Ordering::Relaxed);
}

/// Runs `blocked` in this thread; another thread sends SIGUSR1 once it sleeps. If the call
/// restarts, `finish` then ends its wait.
fn interrupt(blocked: impl FnOnce(), finish: impl FnOnce() + Send) {
    let me = call!(libc::pthread_self()).value as libc::pthread_t;
    let id = sys::thread_id();
    HITS.store(0, Ordering::Relaxed);
    thread::scope(|s| {
        s.spawn(move || {
            sys::wait_asleep(id);
            call!(libc::pthread_kill(me, libc::SIGUSR1)).ok();
            sys::pause_ms(30);
            finish();
        });
        blocked();
    });
}

/// Calls poll() that only a signal ends. (`Ctx::poll` goes on after one.)
fn interrupted_poll(c: &Ctx, fd: c_int) {
    let mut p = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    c.ret("poll", call!(libc::poll(&mut p, 1, sys::SOON)));
}

/// EINTR without SA_RESTART, from each blocking call.
pub fn eintr(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        sys::on_signal(libc::SIGUSR1, count, false);
        let none = || ();
        interrupt(
            || {
                c.recv(fd, 10, 0);
            },
            none,
        );
        interrupt(
            || {
                c.ret("read", sys::read(fd, &mut [0; 4]));
            },
            none,
        );
        interrupt(
            || {
                interrupted_poll(c, fd);
            },
            none,
        );
        interrupt(
            || {
                let mut b = [0; 4];
                let mut v = [sys::iov(&mut b)];
                let mut m = sys::msghdr(&mut v);
                c.ret("recvmsg", call!(libc::recvmsg(fd, &mut m, 0)));
            },
            none,
        );
        let ep = call!(libc::epoll_create1(0)).ok();
        let mut ev = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: 0,
        };
        call!(libc::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, &mut ev)).ok();
        interrupt(
            || {
                c.ret("epoll_wait", call!(libc::epoll_wait(ep, &mut ev, 1, sys::SOON)));
            },
            none,
        );
        interrupt(
            || {
                let mut set: libc::fd_set = sys::zeroed();
                // SAFETY: fd is far below FD_SETSIZE.
                unsafe { libc::FD_SET(fd, &mut set) };
                let null = std::ptr::null_mut();
                c.ret(
                    "select",
                    call!(libc::select(fd + 1, &mut set, null, null, std::ptr::null_mut())),
                );
            },
            none,
        );
        c.log(format_args!("handler ran: {}", HITS.load(Ordering::Relaxed)));
    }
    c.sync("done");
    c.close(fd);
}

/// With SA_RESTART recv goes on waiting; poll and epoll_wait do not.
pub fn restart(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        sys::on_signal(libc::SIGUSR1, count, true);
        interrupt(
            || {
                c.recv(fd, 10, 0);
            },
            || c.sync("first"),
        );
        interrupt(
            || {
                c.recv(fd, 10, libc::MSG_WAITALL);
            },
            || c.sync("second"),
        );
        interrupt(
            || {
                interrupted_poll(c, fd);
            },
            || (),
        );
        let ep = call!(libc::epoll_create1(0)).ok();
        let mut ev = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: 0,
        };
        call!(libc::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, &mut ev)).ok();
        interrupt(
            || {
                c.ret("epoll_wait", call!(libc::epoll_wait(ep, &mut ev, 1, sys::SOON)));
            },
            || (),
        );
        // With a receive time-out a recv is not restarted.
        sys::set_timeout(fd, libc::SO_RCVTIMEO, std::time::Duration::from_secs(30)).ok();
        interrupt(
            || {
                c.recv(fd, 10, 0);
            },
            || (),
        );
        c.log(format_args!("handler ran: {}", HITS.load(Ordering::Relaxed)));
    } else {
        c.sync("first");
        c.send(fd, b"restarted", 0);
        c.sync("second");
        c.send(fd, b"0123456789", 0);
    }
    c.sync("done");
    c.close(fd);
}

/// A signal in the middle of a MSG_WAITALL and of a large blocking send: partial results.
pub fn partial(c: &Ctx) {
    let fd = c.pair();
    sys::on_signal(libc::SIGUSR1, count, false);
    if c.is_server() {
        sys::wait_readable_bytes(fd, 4);
        interrupt(
            || {
                c.recv(fd, 10, libc::MSG_WAITALL);
            },
            || (),
        );
        c.sync("sending");
        let big = data::pattern(1, 0, 32 << 20);
        interrupt(
            || {
                let r = sys::send(fd, &big, 0);
                c.log(format_args!("partial: {}", r.value > 0 && r.value < 32 << 20));
                c.exchange("sent", r.value as u64);
            },
            || (),
        );
    } else {
        c.send(fd, b"four", 0);
        c.sync("sending");
        let sent = c.exchange("sent", 0);
        data::verify(1, 0, &sys::recv_exact(fd, sent as usize));
        c.log("all that was sent");
    }
    c.sync("done");
    c.close(fd);
}

static HANDLER_FD: AtomicI32 = AtomicI32::new(-1);
extern "C" fn write_in_handler(_: c_int) {
    let fd = HANDLER_FD.load(Ordering::Relaxed);
    sys::write(fd, b"from the handler");
}

/// A handler that writes to a socket while its thread waits in recv on the same one.
pub fn handler_writes(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        HANDLER_FD.store(fd, Ordering::Relaxed);
        sys::on_signal(libc::SIGUSR1, write_in_handler, true);
        interrupt(
            || {
                c.recv(fd, 100, 0);
            },
            || (),
        );
    } else {
        c.recv_all(fd, 16);
        c.send(fd, b"answer", 0);
    }
    c.sync("done");
    c.close(fd);
}

/// A handler that hits the middle of busy sends on another socket never breaks either stream.
pub fn handler_storm(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let mut pipe = [0; 2];
        call!(libc::pipe2(pipe.as_mut_ptr(), libc::O_NONBLOCK)).ok();
        HANDLER_FD.store(pipe[1], Ordering::Relaxed);
        sys::on_signal(libc::SIGUSR1, write_in_handler, true);
        let me = call!(libc::pthread_self()).value as libc::pthread_t;
        thread::scope(|s| {
            s.spawn(move || {
                for _ in 0..300 {
                    call!(libc::pthread_kill(me, libc::SIGUSR1)).ok();
                    thread::sleep(std::time::Duration::from_micros(100));
                }
            });
            for i in 0..4000u64 {
                sys::send_all(fd, &data::pattern(2, i * 1000, 1000)).ok();
            }
        });
        c.close(fd);
    } else {
        let (end, got) = sys::recv_to_end(fd);
        data::verify(2, 0, &got);
        c.log(format_args!("{} bytes, then {end}", got.len()));
    }
}

/// ppoll and epoll_pwait with a mask: a blocked signal arrives only during the wait.
pub fn masks(c: &Ctx) {
    let fd = c.pair();
    sys::on_signal(libc::SIGUSR1, count, false);
    let mut usr1: libc::sigset_t = sys::zeroed();
    let mut before: libc::sigset_t = sys::zeroed();
    call!(libc::sigemptyset(&mut usr1)).ok();
    call!(libc::sigaddset(&mut usr1, libc::SIGUSR1)).ok();
    call!(libc::pthread_sigmask(libc::SIG_BLOCK, &usr1, &mut before)).ok();
    let hits = |what: &str| c.log(format_args!("{what}: handler ran {}", HITS.swap(0, Ordering::Relaxed)));
    let me = call!(libc::pthread_self()).value as libc::pthread_t;
    let pend = || call!(libc::pthread_kill(me, libc::SIGUSR1)).ok();
    let mut p = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let second = libc::timespec { tv_sec: 1, tv_nsec: 0 };
    let zero: libc::timespec = sys::zeroed();
    pend();
    c.ret("poll", call!(libc::poll(&mut p, 1, 10)));
    hits("blocked");
    c.ret("ppoll", call!(libc::ppoll(&mut p, 1, &second, &before)));
    hits("ppoll");
    let ep = call!(libc::epoll_create1(0)).ok();
    let mut ev = libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: 0,
    };
    call!(libc::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, &mut ev)).ok();
    pend();
    c.ret(
        "epoll_pwait",
        call!(libc::epoll_pwait(ep, &mut ev, 1, sys::SOON, &before)),
    );
    hits("epoll_pwait");
    pend();
    let mut set: libc::fd_set = sys::zeroed();
    // SAFETY: fd is far below FD_SETSIZE.
    unsafe { libc::FD_SET(fd, &mut set) };
    let null = std::ptr::null_mut();
    c.ret(
        "pselect",
        call!(libc::pselect(fd + 1, &mut set, null, null, &second, &before)),
    );
    hits("pselect");
    c.sync("send");
    c.send(fd, b"x", 0);
    sys::wait_readable_bytes(fd, 1);
    // The fd is ready, a signal is pending, and the time-out is zero: the kernel reports readiness.
    pend();
    c.ret("ppoll", call!(libc::ppoll(&mut p, 1, &zero, &before)));
    hits("ready ppoll");
    call!(libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut())).ok();
    HITS.store(0, Ordering::Relaxed);
    c.sync("done");
    c.close(fd);
}
