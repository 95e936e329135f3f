//! Blocking, nonblocking and time-limited calls.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libc::c_int;

use crate::ctx::Ctx;
use crate::{data, sys};

/// SO_RCVTIMEO: EAGAIN after the time; data that comes in time ends the wait.
pub fn rcvtimeo(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.ret(
            "set",
            sys::set_timeout(fd, libc::SO_RCVTIMEO, Duration::from_millis(80)),
        );
        c.recv(fd, 10, 0);
        // A single full wait is enough: on a machine that stood still the kernel's own wait ends early, because it has
        // yet to count the ticks of that time.
        let waited = (0..20).any(|_| {
            let start = Instant::now();
            sys::recv(fd, &mut [0; 10], 0);
            start.elapsed() >= Duration::from_millis(79)
        });
        c.log(format_args!("waited: {waited}"));
        let mut b = [0; 10];
        c.ret("read", sys::read(fd, &mut b));
        let mut v = [sys::iov(&mut b)];
        let mut m = sys::msghdr(&mut v);
        c.ret("recvmsg", call!(libc::recvmsg(fd, &mut m, 0)));
        sys::set_timeout(fd, libc::SO_RCVTIMEO, Duration::from_secs(30)).ok();
        c.sync("timed out");
        c.recv(fd, 10, 0);
    } else {
        c.sync("timed out");
        sys::pause_ms(30);
        c.send(fd, b"in time", 0);
    }
    c.sync("done");
    c.close(fd);
}

/// SO_SNDTIMEO on a full connection: first a partial count, then EAGAIN.
pub fn sndtimeo(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        sys::set_timeout(fd, libc::SO_SNDTIMEO, Duration::from_millis(80)).ok();
        let piece = data::pattern(1, 0, 8 << 20);
        let mut sent = 0;
        let last = loop {
            let r = sys::send(fd, &piece[sent % piece.len()..], 0);
            if r.failed() {
                break r;
            }
            sent += r.count();
        };
        c.ret("send to a full peer", last);
        c.exchange("sent", sent as u64);
        sys::set_timeout(fd, libc::SO_SNDTIMEO, Duration::ZERO).ok();
        c.send(fd, b"done", 0);
        c.close(fd);
    } else {
        let sent = c.exchange("sent", 0) as usize;
        let (end, got) = sys::recv_to_end(fd);
        let piece = data::pattern(1, 0, 8 << 20);
        let whole = got.len() == sent + 4 && got[..sent].iter().zip(piece.iter().cycle()).all(|(a, b)| a == b);
        c.log(format_args!("end {end}, all there: {whole}"));
        c.close(fd);
    }
}

/// O_NONBLOCK is shared by dup'd fds, no matter which fd sets it and how.
pub fn nonblock_shared(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let dup = call!(libc::dup(fd)).ok();
        sys::set_nonblocking(dup, true);
        c.recv(fd, 10, 0);
        c.recv(dup, 10, 0);
        let mut off: c_int = 0;
        c.ret("FIONBIO", call!(libc::ioctl(fd, libc::FIONBIO, &mut off)));
        c.ret("F_GETFL", call!(libc::fcntl(dup, libc::F_GETFL)));
        c.sync("blocking");
        c.recv(dup, 10, 0);
        let mut on: c_int = 1;
        c.ret("FIONBIO", call!(libc::ioctl(dup, libc::FIONBIO, &mut on)));
        c.recv(fd, 10, 0);
        c.close(dup);
        c.recv(fd, 10, 0);
    } else {
        c.sync("blocking");
        sys::pause_ms(50);
        c.send(fd, b"wake", 0);
    }
    c.sync("done");
    c.close(fd);
}

/// SO_RCVTIMEO and O_NONBLOCK set by a fork child, which has the same socket, after this process has waited on it.
pub fn set_by_child(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("waits");
        c.recv(fd, 10, 0);
        let child = sys::fork_child(|| {
            sys::set_timeout(fd, libc::SO_RCVTIMEO, Duration::from_millis(80)).ok();
            0
        });
        c.log(format_args!("child {}", sys::wait_child(child)));
        c.recv(fd, 10, 0);
        sys::set_timeout(fd, libc::SO_RCVTIMEO, Duration::from_secs(30)).ok();
        c.sync("waits");
        c.recv(fd, 10, 0);
        let child = sys::fork_child(|| {
            sys::set_nonblocking(fd, true);
            0
        });
        c.log(format_args!("child {}", sys::wait_child(child)));
        c.recv(fd, 10, 0);
    } else {
        for _ in 0..2 {
            c.sync("waits");
            sys::pause_ms(30);
            c.send(fd, b"in time", 0);
        }
    }
    c.sync("done");
    c.close(fd);
}

/// A blocked recv, read, poll and select wake for data; a blocked recv for EOF.
pub fn woken(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("recv");
        c.recv(fd, 10, 0);
        c.sync("read");
        let mut b = [0; 10];
        let r = sys::read(fd, &mut b);
        c.bytes("read", r, &b);
        c.sync("poll");
        c.poll(fd, libc::POLLIN, -1);
        c.recv(fd, 10, 0);
        c.sync("eof");
        c.recv(fd, 10, 0);
    } else {
        for step in ["recv", "read", "poll"] {
            c.sync(step);
            sys::pause_ms(40);
            c.send(fd, step.as_bytes(), 0);
        }
        c.sync("eof");
        sys::pause_ms(40);
        c.shutdown(fd, libc::SHUT_WR);
    }
    c.sync("done");
    c.close(fd);
}

/// Fills the connection until no more bytes are accepted for 300 ms. (Kernel TCP may accept more a moment
/// after EAGAIN: buffers grow, and the peer's window is probed after 200 ms.) Returns the number of bytes.
fn fill(fd: c_int, seed: u64) -> usize {
    let mut sent = 0;
    loop {
        let piece = data::pattern(seed, sent as u64, 65_536);
        let r = sys::send(fd, &piece, libc::MSG_DONTWAIT);
        if !r.is(libc::EAGAIN) {
            sent += r.count();
        } else if sys::poll_one(fd, libc::POLLOUT, 300) == 0 {
            return sent;
        }
    }
}

/// A full connection: EAGAIN, no POLLOUT, until the peer has drained it.
pub fn full(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        sys::set_nonblocking(fd, true);
        let sent = fill(fd, 2);
        c.poll(fd, libc::POLLOUT, 50);
        c.exchange("full", sent as u64);
        c.poll(fd, libc::POLLOUT, 10_000);
        c.sync("drained");
        c.done("send", sys::send_all(fd, b"end"));
        c.close(fd);
    } else {
        let sent = c.exchange("full", 0) as usize;
        let got = sys::recv_exact(fd, sent);
        data::verify(2, 0, &got);
        c.sync("drained");
        c.recv_to_end(fd);
        c.close(fd);
    }
}

/// epoll on a full connection: EPOLLOUT (LT and ET) comes when the peer drains, not before.
pub fn full_epoll(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        sys::set_nonblocking(fd, true);
        for et in [0, libc::EPOLLET as u32] {
            let sent = fill(fd, 2);
            let ep = call!(libc::epoll_create1(0)).ok();
            let mut ev = libc::epoll_event {
                events: libc::EPOLLOUT as u32 | et,
                u64: 1,
            };
            call!(libc::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, &mut ev)).ok();
            c.ret("epoll_wait", call!(libc::epoll_wait(ep, &mut ev, 1, 50)));
            c.exchange("full", sent as u64);
            c.ret("epoll_wait", call!(libc::epoll_wait(ep, &mut ev, 1, 10_000)));
            c.sync("drained");
            c.close(ep);
        }
        c.close(fd);
    } else {
        for _ in 0..2 {
            let sent = c.exchange("full", 0) as usize;
            data::verify(2, 0, &sys::recv_exact(fd, sent));
            c.sync("drained");
        }
        c.recv_to_end(fd);
    }
}

/// A blocking send larger than all buffers returns its full length once the peer has read.
pub fn blocked_send(c: &Ctx) {
    const LEN: usize = 12 << 20;
    let fd = c.pair();
    if c.is_server() {
        c.send(fd, &data::pattern(3, 0, LEN), 0);
        let mut half = data::pattern(4, 0, LEN);
        let (a, b) = half.split_at_mut(LEN / 3);
        let v = [sys::iov(a), sys::iov(b)];
        c.ret("writev", call!(libc::writev(fd, v.as_ptr(), 2)));
    } else {
        sys::pause_ms(50);
        data::verify(3, 0, &sys::recv_exact(fd, LEN));
        data::verify(4, 0, &sys::recv_exact(fd, LEN));
        c.log("all there");
    }
    c.sync("done");
    c.close(fd);
}

/// A blocked send returns the bytes accepted so far when the peer resets.
pub fn blocked_send_reset(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        let big = data::pattern(5, 0, 32 << 20);
        let r = sys::send(fd, &big, libc::MSG_NOSIGNAL);
        let fits = r.value > 0 && (r.value as usize) < big.len() || r.is(libc::ECONNRESET) || r.is(libc::EPIPE);
        c.log(format_args!("ended early: {fits}"));
        let again = sys::send(fd, b"x", libc::MSG_NOSIGNAL);
        c.log(format_args!("next fails: {}", again.failed()));
        c.close(fd);
    } else {
        sys::recv_exact(fd, 1000);
        sys::pause_ms(50);
        c.close(fd);
    }
}

/// A poll with a time-out on an idle connection waits that long and changes nothing.
pub fn poll_timeout(c: &Ctx) {
    let fd = c.pair();
    let start = Instant::now();
    c.poll(fd, libc::POLLIN, 60);
    c.log(format_args!("waited: {}", start.elapsed() >= Duration::from_millis(59)));
    c.poll(fd, libc::POLLIN | libc::POLLOUT, 60);
    c.poll(fd, 0, 0);
    c.sync("done");
    c.close(fd);
}

/// Ping-pong with both ends alternately early and late, beside a thread that takes their core.
pub fn early_and_late(c: &Ctx) {
    let fd = c.pair();
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                thread::yield_now();
            }
        });
        for i in 0..300u64 {
            let lag = |odd: u64| {
                if i % 10 == odd {
                    thread::sleep(Duration::from_micros(50 * (i % 7)));
                }
            };
            if c.is_server() {
                let got = sys::recv_exact(fd, 64);
                lag(1);
                sys::send_all(fd, &got).ok();
            } else {
                let want = data::pattern(i, 0, 64);
                lag(2);
                sys::send_all(fd, &want).ok();
                assert!(sys::recv_exact(fd, 64) == want);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    c.log("300 round trips");
    c.close(fd);
}
