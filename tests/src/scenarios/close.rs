//! How connections end: half-close, RST, linger, EPIPE, exit and kill.

use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

use libc::{SHUT_RD, SHUT_RDWR, SHUT_WR, c_int};

use crate::ctx::{Ctx, poll_names};
use crate::sys::Addr;
use crate::{data, sys};

const ALL_EVENTS: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP | libc::POLLPRI;

/// The client closes its sending half; the server answers after EOF.
pub fn half_by_client(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.recv_to_end(fd);
        c.poll(fd, ALL_EVENTS, 0);
        c.recv(fd, 10, 0);
        sys::send_all(fd, &data::pattern(1, 0, 30_000)).ok();
        c.shutdown(fd, SHUT_WR);
    } else {
        sys::send_all(fd, &data::pattern(2, 0, 30_000)).ok();
        c.shutdown(fd, SHUT_WR);
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        c.recv_to_end(fd);
    }
    c.sync("both halves closed");
    sys::wait_for(fd, libc::POLLHUP);
    c.poll(fd, ALL_EVENTS, 0);
    c.close(fd);
}

/// The server closes its sending half first.
pub fn half_by_server(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.send(fd, b"last words", 0);
        c.shutdown(fd, SHUT_WR);
        c.sync("half closed");
        c.recv_to_end(fd);
    } else {
        c.sync("half closed");
        sys::wait_for(fd, libc::POLLRDHUP);
        c.poll(fd, ALL_EVENTS, 0);
        c.recv_to_end(fd);
        c.poll(fd, ALL_EVENTS, 0);
        c.send(fd, &data::pattern(3, 0, 10_000), 0);
        c.send(fd, b"more", 0);
    }
    c.close(fd);
}

/// SHUT_RD: EOF at once, but data that comes later can still be read.
pub fn shutdown_read(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.shutdown(fd, SHUT_RD);
        c.poll(fd, ALL_EVENTS, 0);
        c.recv(fd, 10, 0);
        c.sync("closed");
        c.sync("sent");
        sys::wait_readable_bytes(fd, 4);
        c.recv(fd, 10, 0);
        c.recv(fd, 10, 0);
        c.send(fd, b"back", 0);
    } else {
        c.sync("closed");
        c.send(fd, b"late", 0);
        c.sync("sent");
        c.recv_all(fd, 4);
    }
    c.sync("done");
    c.close(fd);
}

/// SHUT_RD by one end before any byte is sent, so before the connection is worth a promotion: its effect stays the
/// same when that end has sent much.
pub fn read_shut_early(c: &Ctx) {
    const MANY: usize = 300;
    let message = data::pattern(9, 0, 500);
    for by_server in [true, false] {
        let fd = c.cold_pair();
        if c.is_server() != by_server {
            assert!(sys::recv_exact(fd, MANY * message.len()) == message.repeat(MANY));
            c.sync("run");
            c.sync("looked");
            c.send(fd, b"late", 0);
            c.sync("sent");
            c.sync("shut");
            c.close(fd);
            continue;
        }
        c.shutdown(fd, SHUT_RD);
        for _ in 0..MANY {
            sys::send_all(fd, &message).ok();
            sys::pause_ms(1);
        }
        c.sync("run");
        c.poll(fd, ALL_EVENTS, 0);
        c.recv(fd, 10, libc::MSG_DONTWAIT);
        c.recv(fd, 10, 0);
        c.sync("looked");
        c.sync("sent");
        sys::wait_readable_bytes(fd, 4);
        c.recv(fd, 10, 0);
        c.recv(fd, 10, 0);
        c.poll(fd, ALL_EVENTS, 0);
        c.shutdown(fd, SHUT_WR);
        c.poll(fd, ALL_EVENTS, 0);
        c.sync("shut");
        c.close(fd);
    }
}

/// SHUT_RDWR: EOF for both.
pub fn shutdown_both(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.shutdown(fd, SHUT_RDWR);
        c.recv(fd, 10, 0);
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        c.sync("closed");
    } else {
        c.sync("closed");
        c.recv_to_end(fd);
        c.poll(fd, ALL_EVENTS, 0);
    }
    c.sync("done");
    c.close(fd);
}

/// Connections that get their last answer, and are shut both ways, after few requests: they are on TCP, on their
/// way to a link, or just there. The client receives the whole answer, then EOF.
pub fn shut_on_the_way(c: &Ctx) {
    const REQUEST: usize = 200;
    const LAST: usize = 1 << 20;
    const LAST_BUT_MANY: u64 = 9;
    let (listener, port) = c.listener(8);
    for round in 0..120u64 {
        let last = round % LAST_BUT_MANY;
        let answer = |n: u64| data::pattern(round, n << 32, if n == last { LAST } else { REQUEST });
        let Some(listener) = listener else {
            let fd = sys::connected(&Addr::v4(port));
            for n in 0..last {
                sys::send_all(fd, &data::pattern(round, n, REQUEST)).ok();
                assert!(sys::recv_exact(fd, REQUEST) == answer(n), "round {round}, answer {n}");
            }
            sys::send_all(fd, &data::pattern(round, last, REQUEST)).ok();
            // The pause leaves much of the answer under way when the server shuts down.
            sys::pause_ms(round % 4);
            let (end, got) = sys::recv_to_end(fd);
            assert!(
                end.value == 0 && got.len() == LAST,
                "round {round}: {end} after {} bytes",
                got.len()
            );
            assert!(got == answer(last), "round {round}: other bytes");
            sys::close(fd).ok();
            continue;
        };
        let fd = sys::accept4(listener, 0).ok();
        for n in 0..=last {
            assert!(
                sys::recv_exact(fd, REQUEST) == data::pattern(round, n, REQUEST),
                "round {round}, request {n}"
            );
            sys::send_all(fd, &answer(n)).ok();
        }
        let ways: &[c_int] = [&[SHUT_RDWR][..], &[SHUT_RD, SHUT_WR], &[SHUT_WR, SHUT_RD]][round as usize / 3 % 3];
        for (at, how) in ways.iter().enumerate() {
            let shut = call!(libc::shutdown(fd, *how));
            // The client may have read all, and closed, before the second shutdown.
            assert!(
                !shut.failed() || at > 0 && shut.is(libc::ENOTCONN),
                "round {round}: {shut}"
            );
        }
        let (end, got) = sys::recv_to_end(fd);
        assert!(
            end.value == 0 && got.is_empty(),
            "round {round}: {end} after {} bytes",
            got.len()
        );
        if round % 2 == 0 {
            sys::wait_for(fd, libc::POLLHUP);
        }
        sys::close(fd).ok();
    }
    c.log("all equal");
}

/// The effect of an end's own shutdowns directly after each, in a call that does not wait and in threads that wait.
pub fn shutdown_in_parts(c: &Ctx) {
    for parts in [&[SHUT_RDWR][..], &[SHUT_RD, SHUT_WR], &[SHUT_WR, SHUT_RD]] {
        let fd = c.pair();
        if !c.is_server() {
            c.send(fd, b"unread", 0);
            c.sync("sent");
            c.sync("shut");
            c.close(fd);
            continue;
        }
        c.sync("sent");
        sys::wait_readable_bytes(fd, 6);
        let waits = thread::scope(|s| {
            let poll = s.spawn(move || {
                let mut p = libc::pollfd {
                    fd,
                    events: 0,
                    revents: 0,
                };
                let r = call!(libc::poll(&mut p, 1, sys::SOON));
                format!("poll for nothing -> {r} {}", poll_names(p.revents))
            });
            let epoll = s.spawn(move || {
                let ep = call!(libc::epoll_create1(0)).ok();
                let mut ev = libc::epoll_event { events: 0, u64: 1 };
                call!(libc::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, &mut ev)).ok();
                let r = call!(libc::epoll_wait(ep, &mut ev, 1, sys::SOON));
                sys::close(ep).ok();
                format!("epoll for nothing -> {r} {:#x}", { ev.events })
            });
            sys::pause_ms(30);
            for how in parts {
                c.shutdown(fd, *how);
                c.poll(fd, ALL_EVENTS, 0);
            }
            [poll.join().unwrap(), epoll.join().unwrap()]
        });
        waits.into_iter().for_each(|line| c.log(line));
        c.recv(fd, 10, 0);
        c.recv(fd, 10, 0);
        c.poll(fd, ALL_EVENTS, 0);
        c.sync("shut");
        c.close(fd);
    }
}

/// Shutdowns twice, with bad arguments, after the peer's, and without a connection.
pub fn shutdown_again(c: &Ctx) {
    let fd = c.pair();
    c.shutdown(fd, 3);
    c.shutdown(fd, -1);
    c.sync("server first");
    if c.is_server() {
        c.shutdown(fd, SHUT_WR);
        sys::wait_tcp_state(fd, sys::FIN_WAIT2);
        c.shutdown(fd, SHUT_WR);
        c.shutdown(fd, SHUT_RD);
        c.sync("then the client");
    } else {
        c.sync("then the client");
        sys::wait_tcp_state(fd, sys::CLOSE_WAIT);
        c.shutdown(fd, SHUT_WR);
    }
    sys::wait_tcp_state(fd, sys::CLOSED);
    c.shutdown(fd, SHUT_WR);
    c.shutdown(fd, SHUT_RD);
    c.recv_to_end(fd);
    c.poll(fd, ALL_EVENTS, 0);
    c.sync("done");
    c.close(fd);
    let s = sys::tcp(libc::AF_INET);
    for how in [SHUT_RD, SHUT_WR, SHUT_RDWR] {
        c.shutdown(s, how);
    }
    c.poll(s, ALL_EVENTS, 0);
    c.close(s);
    let (listener, _) = sys::listener(&Addr::v4(0), 1);
    c.shutdown(listener, SHUT_WR);
    c.shutdown(listener, SHUT_RD);
    c.ret("accept", sys::accept4(listener, libc::SOCK_NONBLOCK));
    c.close(listener);
}

/// close() with unread bytes sends an RST: ECONNRESET at the peer, then EOF, then EPIPE.
pub fn unread_data(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("sent");
        sys::wait_readable_bytes(fd, 5);
        c.close(fd);
        c.sync("closed");
    } else {
        c.send(fd, b"never", 0);
        c.sync("sent");
        c.sync("closed");
        sys::wait_for(fd, libc::POLLHUP);
        c.poll(fd, ALL_EVENTS, 0);
        c.recv(fd, 10, 0);
        c.recv(fd, 10, 0);
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        c.so_error(fd);
        c.poll(fd, ALL_EVENTS, 0);
        c.ret("getpeername", Addr::peer_of(fd).0);
        c.close(fd);
    }
}

/// As [`unread_data`], with a peer that notices by SO_ERROR and by send.
pub fn unread_data_so_error(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("sent");
        sys::wait_readable_bytes(fd, 5);
        c.close(fd);
        c.sync("closed");
    } else {
        c.send(fd, b"never", 0);
        c.sync("sent");
        c.sync("closed");
        sys::wait_for(fd, libc::POLLHUP);
        c.so_error(fd);
        c.so_error(fd);
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        c.recv(fd, 10, 0);
        c.close(fd);
    }
}

/// Bytes that the peer had received before an RST can still be read, then ECONNRESET.
pub fn reset_keeps_received(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.send(fd, b"sent before the reset", 0);
        c.sync("sent");
        sys::wait_readable_bytes(fd, 5);
        c.close(fd);
        c.sync("closed");
    } else {
        c.send(fd, b"never", 0);
        c.sync("sent");
        c.sync("closed");
        sys::wait_for(fd, libc::POLLHUP);
        c.fionread(fd);
        c.recv(fd, 100, 0);
        c.recv(fd, 100, 0);
        c.close(fd);
    }
}

fn set_linger(fd: c_int, on: c_int, seconds: c_int) {
    let l = libc::linger {
        l_onoff: on,
        l_linger: seconds,
    };
    call!(libc::setsockopt(
        fd,
        libc::SOL_SOCKET,
        libc::SO_LINGER,
        (&raw const l).cast(),
        size_of::<libc::linger>() as libc::socklen_t
    ))
    .ok();
}

/// SO_LINGER 0: close() is an RST.
pub fn linger_zero(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        set_linger(fd, 1, 0);
        c.close(fd);
        c.sync("closed");
    } else {
        c.sync("closed");
        sys::wait_for(fd, libc::POLLHUP);
        c.poll(fd, ALL_EVENTS, 0);
        c.recv(fd, 10, 0);
        c.recv(fd, 10, 0);
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        c.close(fd);
    }
}

/// SO_LINGER with a time: close() waits until the peer's kernel has everything.
pub fn linger_wait(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        set_linger(fd, 1, 5);
        sys::send_all(fd, &data::pattern(4, 0, 200_000)).ok();
        c.close(fd);
    } else {
        c.recv_to_end(fd);
        c.close(fd);
    }
}

static SIGPIPES: AtomicI32 = AtomicI32::new(0);
extern "C" fn count_sigpipe(_: c_int) {
    SIGPIPES.fetch_add(1, Ordering::Relaxed);
}

/// EPIPE from every sending call; SIGPIPE exactly where the kernel raises it.
pub fn sigpipe(c: &Ctx) {
    let fd = c.pair();
    sys::on_signal(libc::SIGPIPE, count_sigpipe, true);
    let count = |what: &str| {
        c.log(format_args!(
            "{what}: SIGPIPE × {}",
            SIGPIPES.swap(0, Ordering::Relaxed)
        ));
    };
    c.shutdown(fd, SHUT_WR);
    c.send(fd, b"x", 0);
    count("send");
    c.send(fd, b"x", libc::MSG_NOSIGNAL);
    count("send nosignal");
    c.write(fd, b"x");
    count("write");
    let mut b = *b"xy";
    let mut v = [sys::iov(&mut b)];
    c.ret("writev", call!(libc::writev(fd, v.as_ptr(), 1)));
    count("writev");
    let m = sys::msghdr(&mut v);
    c.ret("sendmsg", call!(libc::sendmsg(fd, &m, 0)));
    count("sendmsg");
    c.send(fd, b"", 0);
    count("send of nothing");
    c.sync("done");
    c.close(fd);
}

/// Sending after the peer has closed: done, then EPIPE with SIGPIPE.
pub fn send_after_close(c: &Ctx) {
    let fd = c.pair();
    sys::on_signal(libc::SIGPIPE, count_sigpipe, true);
    if c.is_server() {
        c.close(fd);
        c.sync("closed");
    } else {
        c.sync("closed");
        sys::wait_for(fd, libc::POLLRDHUP);
        c.send(fd, b"into the void", 0);
        sys::wait_for(fd, libc::POLLHUP);
        c.poll(fd, ALL_EVENTS, 0);
        c.send(fd, b"again", 0);
        c.log(format_args!("SIGPIPE × {}", SIGPIPES.load(Ordering::Relaxed)));
        c.recv(fd, 10, 0);
        c.send(fd, b"again", 0);
        c.log(format_args!("SIGPIPE × {}", SIGPIPES.load(Ordering::Relaxed)));
        c.close(fd);
    }
}

/// SIGPIPE at its default ends the process.
pub fn sigpipe_kills(c: &Ctx) {
    let fd = c.pair();
    c.sync("ready");
    if c.is_server() {
        c.shutdown(fd, SHUT_WR);
        c.send(fd, b"x", 0);
        c.log("still alive");
    } else {
        c.recv_to_end(fd);
        c.close(fd);
    }
}

/// Bytes that are sent right before close() arrive.
pub fn sent_before_close(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        sys::send_all(fd, &data::pattern(5, 0, 100_000)).ok();
        c.close(fd);
    } else {
        sys::pause_ms(30);
        c.recv_to_end(fd);
        c.close(fd);
    }
}

/// The server exits without close, with bytes in flight; the client reads them all, then EOF.
fn leave(c: &Ctx, how: fn()) {
    let fd = c.pair();
    if c.is_server() {
        sys::send_all(fd, &data::pattern(6, 0, 100_000)).ok();
        how();
    } else {
        sys::pause_ms(30);
        c.recv_to_end(fd);
        c.poll(fd, ALL_EVENTS, 0);
        c.close(fd);
    }
}

/// The server returns from main.
pub fn leave_by_return(c: &Ctx) {
    leave(c, || ());
}

/// The server calls exit().
pub fn leave_by_exit(c: &Ctx) {
    leave(c, || sys::leave(3));
}

/// The server calls _exit().
pub fn leave_by_immediate_exit(c: &Ctx) {
    leave(c, || sys::leave_at_once(4));
}

/// The server calls exec with another program; the socket is close-on-exec.
pub fn leave_by_exec(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        sys::send_all(fd, &data::pattern(6, 0, 100_000)).ok();
        call!(libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC)).ok();
        let argv = [c"true".as_ptr(), std::ptr::null()];
        c.ret("execvp", call!(libc::execvp(argv[0], argv.as_ptr())));
    } else {
        sys::pause_ms(30);
        c.recv_to_end(fd);
        c.close(fd);
    }
}

/// SIGKILL with everything read: EOF at the peer.
pub fn killed_at_rest(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.recv_all(fd, 10);
        c.send(fd, b"last reply", 0);
        c.sync("at rest");
        call!(libc::raise(libc::SIGKILL));
    } else {
        c.send(fd, b"0123456789", 0);
        c.sync("at rest");
        c.recv_all(fd, 10);
        c.recv(fd, 10, 0);
        c.poll(fd, ALL_EVENTS, 0);
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        sys::wait_for(fd, libc::POLLHUP);
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        c.close(fd);
    }
}

/// SIGKILL with bytes that the killed side has not read: reset.
pub fn killed_with_unread_data(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("sent");
        sys::wait_readable_bytes(fd, 1000);
        call!(libc::raise(libc::SIGKILL));
    } else {
        c.send(fd, &data::pattern(7, 0, 1000), 0);
        c.sync("sent");
        c.recv(fd, 10, 0);
        c.recv(fd, 10, 0);
        c.close(fd);
    }
}

/// SIGKILL of the sender in mid-transfer: all that it sent arrives, in order, then EOF.
pub fn killed_sending(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        for i in 0..10 {
            sys::send_all(fd, &data::pattern(8, i * 10_000, 10_000)).ok();
        }
        call!(libc::raise(libc::SIGKILL));
    } else {
        let (end, got) = sys::recv_to_end(fd);
        data::verify(8, 0, &got);
        c.log(format_args!("{} bytes, then {end}", got.len()));
        c.close(fd);
    }
}

/// SIGKILL of the receiver in mid-transfer: the sender gets ECONNRESET or EPIPE, in time.
pub fn killed_receiving(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        sys::recv_exact(fd, 300_000);
        call!(libc::raise(libc::SIGKILL));
    } else {
        let piece = data::pattern(9, 0, 50_000);
        let end = loop {
            let r = sys::send_all(fd, &piece);
            if r.failed() {
                break r;
            }
        };
        let expected = end.is(libc::ECONNRESET) || end.is(libc::EPIPE);
        c.log(format_args!("ended by reset or pipe: {expected}"));
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        c.close(fd);
    }
}

/// A reader that is blocked when its peer dies wakes up.
pub fn killed_while_peer_waits(c: &Ctx) {
    let fd = c.pair();
    c.sync("ready");
    if c.is_server() {
        sys::pause_ms(50);
        call!(libc::raise(libc::SIGKILL));
    } else {
        c.recv(fd, 10, 0);
        c.close(fd);
    }
}

/// The ends close one after the other; the last bytes of the second are lost silently.
pub fn close_order(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.shutdown(fd, SHUT_WR);
        c.recv_to_end(fd);
        c.close(fd);
        c.sync("done");
        c.recv(fd, 1, 0);
    } else {
        c.recv_to_end(fd);
        c.send(fd, b"answer after EOF", 0);
        c.close(fd);
        c.sync("done");
        c.ret("close again", sys::close(fd));
    }
}
