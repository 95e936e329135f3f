//! How connections begin: connect, accept, their refusals, and the names of both ends.

use std::time::Duration;

use libc::{SOCK_CLOEXEC, SOCK_NONBLOCK, c_int};

use crate::ctx::Ctx;
use crate::sys::Addr;
use crate::{data, sys};

/// Returns a port of 127.0.0.1 that refuses connections while the returned socket is open.
fn unused_port() -> (c_int, u16) {
    let fd = sys::tcp(libc::AF_INET);
    sys::bind(fd, &Addr::v4(0)).ok();
    (fd, Addr::local_of(fd).1.port())
}

fn nonblocking_socket() -> c_int {
    call!(libc::socket(libc::AF_INET, libc::SOCK_STREAM | SOCK_NONBLOCK, 0)).ok()
}

/// A send with MSG_FASTOPEN connects: it is promoted as any connection.
pub fn fast_open(c: &Ctx) {
    fast_opened(c, |fd, port| {
        let address = Addr::v4(port);
        let first = b"first".as_ptr().cast();
        let (to, len) = (address.ptr(), address.len);
        c.ret("sendto", call!(libc::sendto(fd, first, 5, libc::MSG_FASTOPEN, to, len)));
    });
}

/// With TCP_FASTOPEN_CONNECT, connect() leaves the handshake to the first send.
pub fn fast_open_later(c: &Ctx) {
    fast_opened(c, |fd, port| {
        // Without a cookie the kernel would connect at once.
        for option in [libc::TCP_FASTOPEN_NO_COOKIE, libc::TCP_FASTOPEN_CONNECT] {
            c.ret("set", sys::set_int(fd, libc::IPPROTO_TCP, option, 1));
        }
        c.ret("connect", sys::connect(fd, &Addr::v4(port)));
        // The library may ask for a promotion meanwhile.
        sys::pause_ms(30);
        c.send(fd, b"first", 0);
    });
}

fn fast_opened(c: &Ctx, connect: impl Fn(c_int, u16)) {
    let (listener, port) = c.listener(4);
    let fd = match listener {
        Some(listener) => {
            let fd = sys::accept4(listener, 0).ok();
            c.recv_all(fd, 5);
            sys::close(listener).ok();
            fd
        }
        None => {
            let fd = sys::tcp(libc::AF_INET);
            connect(fd, port);
            fd
        }
    };
    c.warm_up(fd);
    c.sync("warm");
    c.close(fd);
}

/// Refused, blocking; the socket can be used again.
pub fn refused(c: &Ctx) {
    let (_hold, port) = unused_port();
    let fd = sys::tcp(libc::AF_INET);
    c.ret("connect", sys::connect(fd, &Addr::v4(port)));
    c.so_error(fd);
    c.ret("getpeername", Addr::peer_of(fd).0);
    c.poll(fd, libc::POLLIN | libc::POLLOUT, 0);
    let (_listener, port) = sys::listener(&Addr::v4(0), 1);
    c.ret("connect elsewhere", sys::connect(fd, &Addr::v4(port)));
    c.send(fd, b"works", 0);
    c.close(fd);
}

/// Refused, nonblocking: EINPROGRESS or at once, then SO_ERROR.
pub fn refused_nonblocking(c: &Ctx) {
    let (_hold, port) = unused_port();
    let fd = nonblocking_socket();
    c.ret("connect", sys::connect(fd, &Addr::v4(port)));
    sys::wait_for(fd, libc::POLLOUT);
    c.poll(fd, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP, 0);
    c.so_error(fd);
    c.so_error(fd);
    c.recv(fd, 1, 0);
    c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
    c.close(fd);
    let fd = nonblocking_socket();
    c.ret("connect", sys::connect(fd, &Addr::v4(port)));
    sys::wait_for(fd, libc::POLLOUT);
    c.recv(fd, 1, 0);
    c.recv(fd, 1, 0);
    c.close(fd);
}

/// Nonblocking connect and accept, with epoll, then data.
pub fn nonblocking(c: &Ctx) {
    let (listener, port) = c.listener(4);
    if let Some(listener) = listener {
        sys::set_nonblocking(listener, true);
        c.ret("accept", sys::accept4(listener, 0));
        c.sync("empty");
        sys::wait_for(listener, libc::POLLIN);
        c.poll(listener, libc::POLLIN | libc::POLLOUT, 0);
        let fd = sys::accept4(listener, SOCK_NONBLOCK).ok();
        c.ret("accept", sys::accept4(listener, 0));
        c.recv(fd, 10, 0);
        c.sync("accepted");
        for _ in 0..6 {
            let got = c.recv_all(fd, 5000);
            sys::send_all(fd, &got).ok();
        }
    } else {
        let fd = nonblocking_socket();
        c.sync("empty");
        c.ret("connect", sys::connect(fd, &Addr::v4(port)));
        sys::wait_for(fd, libc::POLLOUT);
        c.poll(fd, libc::POLLIN | libc::POLLOUT, 0);
        c.so_error(fd);
        c.ret("connect", sys::connect(fd, &Addr::v4(port)));
        c.ret("connect", sys::connect(fd, &Addr::v4(port)));
        c.sync("accepted");
        for i in 0..6 {
            sys::send_all(fd, &crate::data::pattern(i, 0, 5000)).ok();
            c.recv_all(fd, 5000);
        }
    }
    c.sync("done");
}

/// A listener whose queue is full: connects stay in progress, time out, and go on later.
pub fn full_backlog(c: &Ctx) {
    if !c.is_server() {
        return;
    }
    let (listener, port) = sys::listener(&Addr::v4(0), 0);
    // A backlog of 0 holds one connection; the next SYNs are dropped.
    let first = sys::connected(&Addr::v4(port));
    let slow = nonblocking_socket();
    c.ret("connect", sys::connect(slow, &Addr::v4(port)));
    c.poll(slow, libc::POLLIN | libc::POLLOUT, 100);
    c.ret("connect again", sys::connect(slow, &Addr::v4(port)));
    c.so_error(slow);
    c.ret("getpeername", Addr::peer_of(slow).0);
    c.ret("send", sys::send(slow, b"x", libc::MSG_NOSIGNAL));
    c.recv(slow, 1, 0);
    let timed = sys::tcp(libc::AF_INET);
    sys::set_timeout(timed, libc::SO_SNDTIMEO, Duration::from_millis(100)).ok();
    c.ret("timed connect", sys::connect(timed, &Addr::v4(port)));
    c.ret("timed connect", sys::connect(timed, &Addr::v4(port)));
    c.close(timed);
    let impatient = sys::tcp(libc::AF_INET);
    let ms = libc::TCP_USER_TIMEOUT;
    sys::set_int(impatient, libc::IPPROTO_TCP, ms, 100).ok();
    sys::set_int(impatient, libc::IPPROTO_TCP, libc::TCP_SYNCNT, 1).ok();
    c.ret("impatient connect", sys::connect(impatient, &Addr::v4(port)));
    c.close(impatient);
    // Room in the queue: the retransmitted SYN gets through.
    let a = sys::accept4(listener, 0).ok();
    sys::wait_for(slow, libc::POLLOUT);
    c.poll(slow, libc::POLLOUT, 0);
    c.so_error(slow);
    let b = sys::accept4(listener, 0).ok();
    c.send(slow, b"after all", 0);
    c.recv(b, 20, 0);
    for fd in [a, b, first, slow, listener] {
        c.close(fd);
    }
}

/// connect() on a connected and on a listening socket, to bad addresses, and send without.
pub fn errors(c: &Ctx) {
    let (listener, port) = sys::listener(&Addr::v4(0), 4);
    let to = Addr::v4(port);
    let fd = sys::tcp(libc::AF_INET);
    let mut short = to;
    short.len = 4;
    c.ret("connect, short", sys::connect(fd, &short));
    c.ret("connect, IPv6", sys::connect(fd, &Addr::v6(port)));
    c.ret("connect, unix", sys::connect(fd, &Addr::unix(b"/nowhere\0")));
    c.ret("connect", sys::connect(fd, &to));
    c.ret("connect", sys::connect(fd, &to));
    c.ret("bind", sys::bind(fd, &Addr::v4(0)));
    c.ret("listen", call!(libc::listen(fd, 1)));
    c.ret("accept", sys::accept4(fd, 0));
    c.ret("connect a listener", sys::connect(listener, &to));
    c.ret("bind in use", sys::bind(sys::tcp(libc::AF_INET), &to));
    c.ret("listen again", call!(libc::listen(listener, 8)));
    c.ret("accept, odd flags", sys::accept4(listener, 0x77));
    c.ret("recv of a listener", sys::recv(listener, &mut [0; 4], 0));
    c.ret("send on a listener", sys::send(listener, b"x", libc::MSG_NOSIGNAL));
    c.ret("connect null", call!(libc::connect(fd, std::ptr::null(), 16)));
}

/// accept4's flags, accept's address, and that neither flag is inherited.
pub fn accept_flags(c: &Ctx) {
    let (listener, port) = c.listener(8);
    let Some(listener) = listener else {
        let mut fds = Vec::new();
        for _ in 0..5 {
            fds.push(sys::connected(&Addr::v4(port)));
            c.sync("accepted");
        }
        return;
    };
    let flags = |fd: c_int| {
        let nonblock = call!(libc::fcntl(fd, libc::F_GETFL)).ok() & libc::O_NONBLOCK != 0;
        let cloexec = call!(libc::fcntl(fd, libc::F_GETFD)).ok() & libc::FD_CLOEXEC != 0;
        c.log(format_args!("nonblocking {nonblock} cloexec {cloexec}"));
    };
    for f in [0, SOCK_NONBLOCK, SOCK_CLOEXEC, SOCK_NONBLOCK | SOCK_CLOEXEC] {
        let fd = sys::accept4(listener, f).ok();
        flags(fd);
        c.sync("accepted");
        c.close(fd);
        sys::set_nonblocking(listener, f & SOCK_NONBLOCK == 0);
        sys::wait_for(listener, libc::POLLIN);
    }
    let mut from = Addr::empty();
    let r = call!(libc::accept(listener, from.mut_ptr(), &mut from.len));
    flags(r.ok());
    let peer = Addr::peer_of(r.ok()).1;
    c.log(format_args!(
        "accept's address is the peer's: {}, length {}",
        from.port() == peer.port() && from.ip() == peer.ip(),
        from.len
    ));
    c.sync("accepted");
}

/// getsockname and getpeername match crosswise, also after the peer has closed.
pub fn names(c: &Ctx) {
    let fd = c.pair();
    let (r, local) = Addr::local_of(fd);
    let (_, peer) = Addr::peer_of(fd);
    c.ret("getsockname", r);
    let theirs = c.exchange("local port", u64::from(local.port()));
    c.log(format_args!("peer's port: {}", theirs == u64::from(peer.port())));
    c.log(format_args!("{} {}", local.ip(), peer.ip()));
    let mut short = Addr::empty();
    short.len = 3;
    c.ret(
        "getpeername, little room",
        call!(libc::getpeername(fd, short.mut_ptr(), &mut short.len)),
    );
    c.log(format_args!("length {}", short.len));
    c.sync("named");
    if c.is_server() {
        c.close(fd);
        c.sync("closed");
    } else {
        c.sync("closed");
        sys::wait_for(fd, libc::POLLRDHUP);
        c.ret("getpeername", Addr::peer_of(fd).0);
        c.close(fd);
    }
}

/// A connect that is reset before accept: accept still returns it, reads then fail.
pub fn reset_before_accept(c: &Ctx) {
    let (listener, port) = c.listener(4);
    if let Some(listener) = listener {
        c.sync("reset");
        sys::wait_for(listener, libc::POLLIN);
        let fd = sys::accept4(listener, 0).ok();
        c.recv(fd, 10, 0);
        c.recv(fd, 10, 0);
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        c.close(fd);
    } else {
        let fd = sys::connected(&Addr::v4(port));
        let l = libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        call!(libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const l).cast(),
            8
        ))
        .ok();
        c.close(fd);
        c.sync("reset");
    }
}

/// Data sent and a close before accept are all there afterwards.
pub fn closed_before_accept(c: &Ctx) {
    let (listener, port) = c.listener(4);
    if let Some(listener) = listener {
        c.sync("closed");
        let fd = sys::accept4(listener, 0).ok();
        c.recv_to_end(fd);
        c.close(fd);
    } else {
        let fd = sys::connected(&Addr::v4(port));
        c.send(fd, b"early", 0);
        c.close(fd);
        c.sync("closed");
    }
}

/// A connection is used long before a program accepts it that already answers for another one.
pub fn accepted_late(c: &Ctx) {
    const CHUNKS: u64 = 80;
    let (listener, port) = c.listener(4);
    let chunk = |i| data::pattern(3, i * 1000, 1000);
    if let Some(listener) = listener {
        let first = sys::accept4(listener, 0).ok();
        assert!(sys::recv_exact(first, 1) == [1]);
        c.sync("sent");
        let fd = sys::accept4(listener, 0).ok();
        for i in 0..CHUNKS {
            assert!(sys::recv_exact(fd, 1000) == chunk(i), "chunk {i}");
        }
        c.warm_up(fd);
        c.recv_to_end(fd);
        c.close(fd);
        c.close(first);
    } else {
        let first = sys::connected(&Addr::v4(port));
        sys::send_all(first, &[1]).ok();
        let fd = sys::connected(&Addr::v4(port));
        for i in 0..CHUNKS {
            sys::send_all(fd, &chunk(i)).ok();
            sys::pause_ms(10);
        }
        c.sync("sent");
        c.warm_up(fd);
        c.close(fd);
        c.close(first);
    }
}

/// connect(AF_UNSPEC) dissolves the connection; the socket connects anew.
pub fn disconnect(c: &Ctx) {
    let fd = c.pair();
    let (listener, port) = c.listener(4);
    if let Some(listener) = listener {
        c.recv(fd, 10, 0);
        c.close(fd);
        let fd = sys::accept4(listener, 0).ok();
        for _ in 0..4 {
            let got = c.recv_all(fd, 6000);
            sys::send_all(fd, &got).ok();
        }
        c.recv_to_end(fd);
        c.close(fd);
    } else {
        c.ret("disconnect", sys::connect(fd, &Addr::unspec()));
        c.ret("getpeername", Addr::peer_of(fd).0);
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        c.ret("connect", sys::connect(fd, &Addr::v4(port)));
        for i in 0..4 {
            sys::send_all(fd, &crate::data::pattern(i, 0, 6000)).ok();
            c.recv_all(fd, 6000);
        }
        c.close(fd);
    }
}

/// The listener is closed while connections made through it live on.
pub fn listener_closed(c: &Ctx) {
    let fd = c.pair();
    let (listener, port) = c.listener(4);
    let second = match listener {
        Some(listener) => {
            let second = sys::accept4(listener, 0).ok();
            c.close(listener);
            c.sync("closed");
            second
        }
        None => {
            let second = sys::connected(&Addr::v4(port));
            c.sync("closed");
            let late = sys::tcp(libc::AF_INET);
            c.ret("connect", sys::connect(late, &Addr::v4(port)));
            sys::close(late).ok();
            second
        }
    };
    for fd in [fd, second, fd, second, second] {
        if c.is_server() {
            let got = c.recv_all(fd, 9000);
            sys::send_all(fd, &got).ok();
        } else {
            sys::send_all(fd, &crate::data::pattern(5, 0, 9000)).ok();
            c.recv_all(fd, 9000);
        }
    }
}
