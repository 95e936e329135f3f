//! Descriptors: dup in all forms, numbering, close_range and loops that close everything.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use libc::c_int;

use super::epoll;
use crate::ctx::{Ctx, OWN_FD_COUNT, OWN_FDS};
use crate::sys::Addr;
use crate::{data, sys};

/// Makes an exchange over `fd`, logged.
fn exchange(c: &Ctx, fd: c_int, seed: u64) {
    if c.is_server() {
        let got = c.recv_all(fd, 3000);
        sys::send_all(fd, &got).ok();
    } else {
        sys::send_all(fd, &data::pattern(seed, 0, 3000)).ok();
        c.recv_all(fd, 3000);
    }
}

/// dup, dup2, dup3, F_DUPFD and F_DUPFD_CLOEXEC of a live connection: all refer to the connection.
pub fn dups(c: &Ctx) {
    let fd = c.pair();
    let all = [
        call!(libc::dup(fd)),
        call!(libc::dup2(fd, 50)),
        call!(libc::dup3(fd, 51, libc::O_CLOEXEC)),
        call!(libc::fcntl(fd, libc::F_DUPFD, 60)),
        call!(libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 60)),
    ];
    for (i, dup) in all.iter().enumerate() {
        c.ret("dup", *dup);
        c.log(format_args!("cloexec {}", call!(libc::fcntl(dup.ok(), libc::F_GETFD))));
        exchange(c, dup.ok(), i as u64);
    }
    c.ret("dup2 to itself", call!(libc::dup2(fd, fd)));
    c.ret("dup3 to itself", call!(libc::dup3(fd, fd, 0)));
    c.ret("dup2 negative", call!(libc::dup2(fd, -1)));
    c.ret("dup2 too high", call!(libc::dup2(fd, 1 << 30)));
    c.ret("dup3 odd flags", call!(libc::dup3(fd, 52, 0x33)));
    // Closing all but one leaves the connection open.
    c.close(fd);
    for dup in &all[..4] {
        exchange(c, dup.ok(), 9);
        c.close(dup.ok());
    }
    let last = all[4].ok();
    exchange(c, last, 10);
    c.sync("done");
    c.shutdown(last, libc::SHUT_WR);
    c.recv_to_end(last);
    c.close(last);
}

/// dup2 over a live connection closes it: the peer gets EOF.
pub fn dup2_over(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let mut pipe = [0; 2];
        call!(libc::pipe(pipe.as_mut_ptr())).ok();
        c.send(fd, b"bye", 0);
        c.ret("dup2", call!(libc::dup2(pipe[0], fd)));
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        c.write(pipe[1], b"through the pipe");
        let mut b = [0; 20];
        let r = sys::read(fd, &mut b);
        c.bytes("read", r, &b);
        c.sync("done");
    } else {
        c.recv_to_end(fd);
        c.sync("done");
    }
}

/// dup2 of one connection over another, and over a pipe's end.
pub fn dup2_swap(c: &Ctx) {
    let a = c.pair();
    let (listener, port) = c.listener(2);
    let b = match listener {
        Some(l) => sys::accept4(l, 0).ok(),
        None => sys::connected(&Addr::v4(port)),
    };
    exchange(c, b, 1);
    exchange(c, b, 2);
    if c.is_server() {
        c.ret("dup2", call!(libc::dup2(b, a)));
        c.sync("swapped");
        for seed in 3..6 {
            exchange(c, a, seed);
        }
    } else {
        c.sync("swapped");
        c.recv(a, 10, 0);
        for seed in 3..6 {
            exchange(c, b, seed);
        }
    }
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    c.ret("dup2 over a pipe", call!(libc::dup2(b, pipe[0])));
    exchange(c, pipe[0], 7);
    c.sync("done");
}

/// Each new fd is the lowest free one, after all kinds of calls.
pub fn numbering(c: &Ctx) {
    let fd = c.pair();
    c.log(format_args!("pair {fd}"));
    let (listener, port) = c.listener(8);
    let mut fds = Vec::new();
    let mut note = |what: &str, fd: c_int| {
        c.log(format_args!("{what} {fd}"));
        fds.push(fd);
    };
    for _ in 0..3 {
        note(
            "connection",
            match listener {
                Some(l) => sys::accept4(l, 0).ok(),
                None => sys::connected(&Addr::v4(port)),
            },
        );
        note("epoll", epoll::create());
        note("socket", sys::tcp(libc::AF_INET));
        note("dup", call!(libc::dup(fd)).ok());
        note("eventfd", call!(libc::eventfd(0, 0)).ok());
        let (own_listener, _) = sys::listener(&Addr::v4(0), 1);
        note("listener", own_listener);
        note("file", call!(libc::open(c"/dev/null".as_ptr(), 0)).ok());
    }
    for i in [0, 5, 2, 13, 9] {
        c.close(fds[i]);
    }
    for _ in 0..6 {
        c.log(format_args!("next {}", sys::tcp(libc::AF_INET)));
    }
    c.log(format_args!(
        "F_DUPFD 40: {}",
        call!(libc::fcntl(fd, libc::F_DUPFD, 40))
    ));
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    c.log(format_args!("pipe {pipe:?}"));
    c.sync("done");
}

/// Opens fds up to EMFILE: the same number of fds, the same refusals.
pub fn limit(c: &Ctx) {
    let fd = c.pair();
    let limit = libc::rlimit {
        rlim_cur: 64,
        rlim_max: 4096,
    };
    let (listener, port) = c.listener(8);
    // A connection waits to be accepted when no fd is left.
    let waiting = listener.is_none().then(|| sys::connected(&Addr::v4(port)));
    c.sync("connected");
    c.ret("setrlimit", call!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit)));
    let mut opened = Vec::new();
    let last = loop {
        let r = call!(libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0));
        if r.failed() {
            break r;
        }
        opened.push(r.ok());
    };
    c.log(format_args!("{} sockets, then {last}", opened.len()));
    c.ret("dup", call!(libc::dup(fd)));
    c.ret("epoll_create1", call!(libc::epoll_create1(0)));
    if let Some(l) = listener {
        c.ret("accept", sys::accept4(l, 0));
        c.close(opened[0]);
        c.ret("accept", sys::accept4(l, 0));
    }
    exchange(c, fd, 1);
    c.sync("done");
    if let Some(w) = waiting {
        c.close(w);
    }
}

/// Connections that are closed while every fd is in use, with data and the library's markers under way. All bytes
/// arrive, and the fd is free for the next connection.
pub fn closed_at_the_limit(c: &Ctx) {
    const CONNECTIONS: u64 = 300;
    let (listener, port) = c.listener(8);
    let limit = libc::rlimit {
        rlim_cur: 64,
        rlim_max: 4096,
    };
    c.ret("setrlimit", call!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit)));
    // The ends close in turn.
    for connection in 0..CONNECTIONS {
        let fd = match listener {
            Some(listener) => sys::accept4(listener, 0).ok(),
            None => sys::connected(&Addr::v4(port)),
        };
        for _ in 0..connection / 2 % 20 {
            if c.is_server() {
                sys::send_all(fd, &sys::recv_exact(fd, 500)).ok();
            } else {
                sys::send_all(fd, &[0; 500]).ok();
                sys::recv_exact(fd, 500);
            }
        }
        let sent = [300, 70_000][connection as usize / 2 % 2];
        if c.is_server() == (connection % 2 == 0) {
            let mut taken = Vec::new();
            while let dup = call!(libc::dup(0))
                && !dup.failed()
            {
                taken.push(dup.ok());
            }
            sys::send_all(fd, &data::pattern(connection, 0, sent)).ok();
            sys::close(fd).ok();
            taken.push(call!(libc::dup(0)).ok());
            c.log(format_args!("as the next: {}", taken.last() == Some(&fd)));
            for number in taken {
                sys::close(number).ok();
            }
        } else {
            let got = sys::recv_exact(fd, sent);
            data::verify(connection, 0, &got);
            let (end, _) = sys::recv_to_end(fd);
            c.log(format_args!("{connection}: {sent}, then {end}"));
            sys::close(fd).ok();
        }
    }
}

/// A loop that closes every fd but the connection's; the connection goes on.
pub fn close_everything(c: &Ctx) {
    let fd = c.pair();
    let mut closed = Vec::new();
    for n in 3..4096 {
        if n != fd && !(OWN_FDS..OWN_FDS + OWN_FD_COUNT).contains(&n) && !sys::close(n).failed() {
            closed.push(n);
        }
    }
    c.log(format_args!("closed {closed:?}"));
    for seed in 0..6 {
        exchange(c, fd, seed);
    }
    let (_, port) = c.listener(4);
    if !c.is_server() {
        c.log(format_args!("a new one: {}", sys::connected(&Addr::v4(port))));
    }
    c.sync("done");
    c.close(fd);
}

/// close_range over everything but the connection, and with CLOEXEC.
pub fn close_range(c: &Ctx) {
    let low = c.pair();
    let fd = call!(libc::fcntl(low, libc::F_DUPFD, 100)).ok();
    let range = |from: c_int, to: u32, flags: c_int| {
        c.ret(
            format_args!("close_range {flags}"),
            call!(libc::close_range(from as u32, to, flags)),
        );
    };
    range(3, fd as u32 - 1, 0);
    exchange(c, fd, 1);
    range(fd + 1, OWN_FDS as u32 - 1, 0);
    range(OWN_FDS + OWN_FD_COUNT, u32::MAX, 0);
    for seed in 2..6 {
        exchange(c, fd, seed);
    }
    range(fd, fd as u32, libc::CLOSE_RANGE_CLOEXEC as c_int);
    c.log(format_args!("cloexec {}", call!(libc::fcntl(fd, libc::F_GETFD))));
    exchange(c, fd, 7);
    range(10, 5, 0);
    range(3, 5, 99);
    c.sync("before the last");
    range(fd, fd as u32, 0);
    c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
    c.sync("done");
}

/// close_range around a live connection, over and over, while fresh threads use it: the library's own fds come and
/// go meanwhile.
pub fn close_range_under_use(c: &Ctx) {
    let low = c.pair();
    let fd = call!(libc::fcntl(low, libc::F_DUPFD, 100)).ok();
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            for seed in 0..60 {
                let (done, is_done) = std::sync::mpsc::channel();
                let over = &over;
                // The library counts each waiting thread as another waiter, as long as the thread lives.
                s.spawn(move || {
                    exchange(c, fd, seed);
                    done.send(()).ok();
                    while !over.load(SeqCst) {
                        std::thread::sleep(std::time::Duration::from_millis(5));
                    }
                });
                c.log(format_args!("exchange {seed} done {}", is_done.recv().is_ok()));
            }
            over.store(true, SeqCst);
        });
        let mut failed = 0;
        while !over.load(SeqCst) {
            for (from, to) in [
                (3, fd as u32 - 1),
                (fd as u32 + 1, OWN_FDS as u32 - 1),
                ((OWN_FDS + OWN_FD_COUNT) as u32, u32::MAX),
            ] {
                failed += c_int::from(call!(libc::close_range(from, to, 0)).failed());
            }
        }
        c.log(format_args!("close_range failed {failed} times"));
    });
    c.close(fd);
}

/// Close and reuse of fds at once: a new connection on the fd of an old one.
pub fn reuse(c: &Ctx) {
    let mut fd = c.pair();
    let (listener, port) = c.listener(8);
    for i in 0..30 {
        exchange(c, fd, i);
        c.sync("exchanged");
        c.close(fd);
        fd = match listener {
            Some(l) => sys::accept4(l, 0).ok(),
            None => sys::connected(&Addr::v4(port)),
        };
        c.log(fd);
    }
    exchange(c, fd, 99);
    c.sync("done");
}
