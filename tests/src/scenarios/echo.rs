//! Bytes there and back: sizes, families, many connections, sockets that are not TCP.

use std::thread;

use libc::c_int;

use crate::ctx::Ctx;
use crate::data::Rng;
use crate::sys::Addr;
use crate::{data, sys};

const LARGE: usize = 16 << 20;

/// Request and response, a few times.
pub fn basic(c: &Ctx) {
    let fd = c.pair();
    for i in 0..10 {
        if c.is_server() {
            let got = c.recv_all(fd, 100);
            c.send(fd, &got, 0);
        } else {
            c.send(fd, &data::pattern(i, 0, 100), 0);
            c.recv_all(fd, 100);
        }
    }
    c.sync("done");
    c.close(fd);
}

/// As [`basic`], on a connection that was never used before.
pub fn short(c: &Ctx) {
    let fd = c.cold_pair();
    if c.is_server() {
        let got = c.recv_all(fd, 20);
        c.send(fd, &got, 0);
        c.close(fd);
    } else {
        c.send(fd, &data::pattern(1, 0, 20), 0);
        c.recv_to_end(fd);
        c.close(fd);
    }
}

/// Small answers by a server that does not wait, at each moment of a promotion: there is always room for one.
pub fn answers_without_waiting(c: &Ctx) {
    const CONNECTIONS: usize = 40;
    const MESSAGES: usize = 30;
    const LEN: usize = 64;
    let (listener, port) = c.listener(16);
    for connection in 0..CONNECTIONS {
        let fd = match listener {
            Some(listener) => sys::accept4(listener, 0).ok(),
            None => sys::connected(&Addr::v4(port)),
        };
        for message in 0..MESSAGES {
            if c.is_server() {
                let request = sys::recv_exact(fd, LEN);
                let sent = sys::send(fd, &request, libc::MSG_DONTWAIT).value;
                assert_eq!(sent, LEN as i64, "no room: connection {connection}, message {message}");
            } else {
                let request = data::pattern(connection as u64, (message * LEN) as u64, LEN);
                sys::send_all(fd, &request).ok();
                assert!(sys::recv_exact(fd, LEN) == request);
                // Pauses vary the order of messages and the library's own steps.
                thread::sleep(std::time::Duration::from_micros(
                    10 * (connection * message % 40) as u64,
                ));
            }
        }
        sys::close(fd).ok();
    }
    c.log("all answered");
}

/// Connections that get a large answer after two requests, read with little room. While they are promoted, the received
/// bytes often end in a byte that a marker could begin with. More bytes come only once that byte is out of TCP's
/// buffer.
pub fn large_answers(c: &Ctx) {
    const N: u64 = 150;
    const ANSWER: usize = 2_000_000;
    let (listener, port) = c.listener(64);
    for connection in 0..N {
        let answer = data::pattern(connection, 0, ANSWER);
        if let Some(listener) = listener {
            let fd = sys::accept4(listener, 0).ok();
            for _ in 0..2 {
                let request = sys::recv_exact(fd, 8);
                sys::send_all(fd, &request).ok();
            }
            sys::send_all(fd, &answer).ok();
            assert!(sys::recv_exact(fd, 1) == [1]);
            sys::close(fd).ok();
            continue;
        }
        let fd = sys::connected(&Addr::v4(port));
        for trip in 0..2 {
            let request = data::pattern(connection, trip, 8);
            sys::send_all(fd, &request).ok();
            assert!(sys::recv_exact(fd, 8) == request, "trip {trip}");
        }
        let (mut got, mut buffer) = (Vec::new(), vec![0; 16 * 1024]);
        while got.len() < ANSWER {
            let n = sys::recv(fd, &mut buffer, 0).count();
            assert!(n > 0, "ended after {} bytes", got.len());
            got.extend_from_slice(&buffer[..n]);
        }
        assert!(got == answer, "connection {connection}");
        sys::send_all(fd, &[1]).ok();
        sys::close(fd).ok();
    }
    c.log("all equal");
    c.sync("done");
}

/// Requests and responses of all sizes around the powers of two.
pub fn sizes(c: &Ctx) {
    let fd = c.pair();
    for power in 0..=18 {
        for size in [(1usize << power) - 1, 1 << power, (1 << power) + 1] {
            let want = data::pattern(power, size as u64, size);
            if c.is_server() {
                let got = sys::recv_exact(fd, size);
                assert!(got == want, "size {size}");
                sys::send_all(fd, &got).ok();
            } else {
                sys::send_all(fd, &want).ok();
                assert!(sys::recv_exact(fd, size) == want, "size {size}");
            }
        }
    }
    c.log("all sizes equal");
    c.close(fd);
}

/// Four thousand writes of one byte, read as they come.
pub fn one_byte_writes(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.recv_to_end(fd);
    } else {
        for byte in data::pattern(3, 0, 4000) {
            assert_eq!(sys::send(fd, &[byte], 0).count(), 1);
        }
    }
    c.close(fd);
}

/// Sends `LARGE` bytes of stream `seed` in random pieces.
fn pour(fd: c_int, seed: u64) {
    let mut rng = Rng::new(seed);
    let mut at = 0;
    while at < LARGE {
        let n = (1 + rng.below(200_000) as usize).min(LARGE - at);
        sys::send_all(fd, &data::pattern(seed, at as u64, n)).ok();
        at += n;
    }
}

/// Receives `LARGE` bytes in random pieces, and checks each. Returns the hash.
fn drink(fd: c_int, seed: u64) -> u64 {
    let mut rng = Rng::new(seed + 77);
    let (mut at, mut state) = (0usize, data::HASH_START);
    let mut buf = vec![0; 200_000];
    while at < LARGE {
        let n = 1 + rng.below(buf.len() as u64) as usize;
        let r = sys::recv(fd, &mut buf[..n], 0).count();
        assert!(r > 0, "EOF at {at}");
        data::verify(seed, at as u64, &buf[..r]);
        state = data::hash_from(state, &buf[..r]);
        at += r;
    }
    state
}

/// 16 MiB from the client to the server.
pub fn large_to_server(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.log(format_args!("got {:#x}", drink(fd, 4)));
    } else {
        pour(fd, 4);
    }
    c.sync("done");
    c.close(fd);
}

/// 16 MiB from the server to the client.
pub fn large_to_client(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        pour(fd, 5);
    } else {
        c.log(format_args!("got {:#x}", drink(fd, 5)));
    }
    c.sync("done");
    c.close(fd);
}

/// 16 MiB each way at once, a thread for each direction.
pub fn large_both_ways(c: &Ctx) {
    let fd = c.pair();
    let (out, incoming) = if c.is_server() { (6, 7) } else { (7, 6) };
    thread::scope(|s| {
        s.spawn(|| pour(fd, out));
        c.log(format_args!("got {:#x}", drink(fd, incoming)));
    });
    c.sync("done");
    c.close(fd);
}

fn echo_with_names(c: &Ctx, fd: c_int) {
    let (r, local) = Addr::local_of(fd);
    c.log(format_args!("local -> {r} {} len {}", local.ip(), local.len));
    let (r, peer) = Addr::peer_of(fd);
    c.log(format_args!("peer -> {r} {} len {}", peer.ip(), peer.len));
    if c.is_server() {
        let got = c.recv_all(fd, 30_000);
        sys::send_all(fd, &got).ok();
    } else {
        sys::send_all(fd, &data::pattern(8, 0, 30_000)).ok();
        c.recv_all(fd, 30_000);
    }
    c.sync("done");
    c.close(fd);
}

/// Over ::1.
pub fn ipv6(c: &Ctx) {
    let fd = c.pair_at(Addr::v6, Addr::v6);
    echo_with_names(c, fd);
}

/// A server on [::] and a client on 127.0.0.1: the server sees a mapped address.
pub fn mapped_server(c: &Ctx) {
    let fd = c.pair_at(Addr::any6, Addr::v4);
    echo_with_names(c, fd);
}

/// An IPv6 client socket to a mapped address of an IPv4 server.
pub fn mapped_client(c: &Ctx) {
    let fd = c.pair_at(Addr::v4, Addr::mapped);
    echo_with_names(c, fd);
}

/// Both ends are in one process, once in each of the two processes.
pub fn own_process(c: &Ctx) {
    let (listener, port) = sys::listener(&Addr::v4(0), 4);
    let a = sys::connected(&Addr::v4(port));
    let b = sys::accept4(listener, 0).ok();
    // These exchanges take longer than the first signal of a storm.
    for i in 0..200 {
        c.send(a, &data::pattern(i, 0, 3000), 0);
        c.recv_all(b, 3000);
        c.send(b, &data::pattern(i, 5000, 2000), 0);
        c.recv_all(a, 2000);
    }
    c.shutdown(a, libc::SHUT_WR);
    c.recv(b, 10, 0);
    c.send(b, b"last", 0);
    c.close(b);
    c.recv_to_end(a);
    c.close(a);
    c.close(listener);
}

/// A socket that connects to itself by simultaneous open.
pub fn connected_to_itself(c: &Ctx) {
    let fd = sys::tcp(libc::AF_INET);
    sys::bind(fd, &Addr::v4(0)).ok();
    let own = Addr::local_of(fd).1;
    c.ret("connect to itself", sys::connect(fd, &own));
    for i in 0..20 {
        c.send(fd, &data::pattern(i, 0, 2000), 0);
        c.recv_all(fd, 2000);
    }
    c.shutdown(fd, libc::SHUT_WR);
    c.recv(fd, 10, 0);
    c.close(fd);
}

/// AF_UNIX stream, datagram and seqpacket pairs.
pub fn unix_untouched(c: &Ctx) {
    for kind in [libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_SEQPACKET] {
        let mut fds = [0; 2];
        c.ret(
            "socketpair",
            call!(libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr())),
        );
        for i in 0..6 {
            c.send(fds[0], &data::pattern(i, 0, 5000), 0);
            c.recv(fds[1], 9000, 0);
            c.send(fds[1], &data::pattern(i, 1, 10), 0);
            c.recv(fds[0], 5, libc::MSG_TRUNC);
            c.recv(fds[0], 5, libc::MSG_DONTWAIT);
        }
        c.poll(fds[0], libc::POLLIN | libc::POLLOUT, 0);
        c.close(fds[0]);
        c.recv(fds[1], 10, libc::MSG_DONTWAIT);
        c.close(fds[1]);
    }
}

/// UDP over loopback, connected and not.
pub fn udp_untouched(c: &Ctx) {
    let udp = || call!(libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0)).ok();
    let (a, b) = (udp(), udp());
    c.ret("bind", sys::bind(a, &Addr::v4(0)));
    c.ret("connect", sys::connect(b, &Addr::local_of(a).1));
    c.ret("connect back", sys::connect(a, &Addr::local_of(b).1));
    for i in 0..6 {
        c.send(b, &data::pattern(i, 0, 4000), 0);
        c.recv(a, 9000, 0);
        c.send(a, &data::pattern(i, 0, 40), 0);
        c.recv(b, 10, libc::MSG_TRUNC);
    }
    c.ret("listen", call!(libc::listen(a, 1)));
    c.close(a);
    c.close(b);
}

/// A thousand connections open at once, each used several times.
pub fn thousand_connections(c: &Ctx) {
    const N: usize = 1000;
    let (listener, port) = c.listener(N as c_int);
    let mut fds: Vec<c_int> = Vec::new();
    for i in 0..N {
        if let Some(listener) = listener {
            fds.push(sys::accept4(listener, 0).ok());
        } else {
            fds.push(sys::connected(&Addr::v4(port)));
        }
        if i % 100 == 99 {
            c.sync("batch");
        }
    }
    for round in 0..4u64 {
        for (i, fd) in fds.iter().enumerate() {
            let want = data::pattern(i as u64, round * 1000, 50 + i % 7);
            if c.is_server() {
                let got = sys::recv_exact(*fd, want.len());
                assert!(got == want, "connection {i} round {round}");
                sys::send(*fd, &got, 0).ok();
            } else {
                sys::send(*fd, &want, 0).ok();
            }
        }
        if !c.is_server() {
            for (i, fd) in fds.iter().enumerate() {
                let want = data::pattern(i as u64, round * 1000, 50 + i % 7);
                assert!(sys::recv_exact(*fd, want.len()) == want, "connection {i}");
            }
        }
        c.log(format_args!("round {round}: all equal"));
    }
    c.sync("done");
    for fd in fds {
        sys::close(fd).ok();
    }
}

/// 200 connections one after the other, each with one exchange.
pub fn many_short(c: &Ctx) {
    let (listener, port) = c.listener(64);
    for i in 0..200 {
        let want = data::pattern(i, 0, 300);
        if let Some(listener) = listener {
            let fd = sys::accept4(listener, 0).ok();
            assert!(sys::recv_exact(fd, 300) == want);
            sys::send(fd, &want, 0).ok();
            sys::close(fd).ok();
        } else {
            let fd = sys::connected(&Addr::v4(port));
            sys::send(fd, &want, 0).ok();
            let (end, got) = sys::recv_to_end(fd);
            assert!(got == want && end.value == 0, "connection {i}: {end}");
            sys::close(fd).ok();
        }
    }
    c.log("all equal");
}

/// Two listeners on one port: each connection comes to one of them and works.
pub fn reuseport(c: &Ctx) {
    const N: usize = 24;
    let listen = |port| {
        let fd = sys::tcp(libc::AF_INET);
        sys::set_int(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1).ok();
        c.ret("bind", sys::bind(fd, &Addr::v4(port)));
        c.ret("listen", call!(libc::listen(fd, 64)));
        fd
    };
    if c.is_server() {
        let first = listen(0);
        let port = Addr::local_of(first).1.port();
        let both = [first, listen(port)];
        c.exchange("port", u64::from(port));
        let mut served = 0;
        while served < N {
            let mut p = both.map(|fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            });
            call!(libc::poll(p.as_mut_ptr(), 2, sys::SOON)).ok();
            for p in p.iter().filter(|p| p.revents != 0) {
                let fd = sys::accept4(p.fd, 0).ok();
                for _ in 0..4 {
                    let got = sys::recv_exact(fd, 5000);
                    sys::send_all(fd, &got).ok();
                }
                sys::close(fd).ok();
                served += 1;
            }
        }
        c.log(format_args!("served {served}"));
    } else {
        let port = c.exchange("port", 0) as u16;
        for i in 0..N as u64 {
            let fd = sys::connected(&Addr::v4(port));
            for round in 0..4 {
                let want = data::pattern(i, round, 5000);
                sys::send_all(fd, &want).ok();
                assert!(sys::recv_exact(fd, 5000) == want);
            }
            sys::close(fd).ok();
        }
        c.log("all equal");
    }
}

/// stdio on a connected socket: fdopen, fputs, fgets, fflush, fclose.
pub fn stdio(c: &Ctx) {
    let fd = c.pair();
    let file = |fd: c_int, mode: &std::ffi::CStr| {
        // SAFETY: both strings are NUL-terminated; fd is open.
        let f = unsafe { libc::fdopen(fd, mode.as_ptr()) };
        assert!(!f.is_null());
        f
    };
    let input = file(fd, c"r");
    let output = file(call!(libc::dup(fd)).ok(), c"w");
    let mut line = vec![0u8; 200];
    for i in 0..5 {
        if !c.is_server() {
            let text = format!("line {i}\n\0");
            c.done("fputs", call!(libc::fputs(text.as_ptr().cast(), output)));
            c.ret("fflush", call!(libc::fflush(output)));
        }
        // SAFETY: the buffer is as long as said.
        let got = unsafe { libc::fgets(line.as_mut_ptr().cast(), 200, input) };
        let end = line.iter().position(|b| *b == 0).unwrap();
        c.log(format_args!(
            "fgets -> {} {:?}",
            !got.is_null(),
            String::from_utf8_lossy(&line[..end])
        ));
        if c.is_server() {
            c.done("fputs", call!(libc::fputs(line.as_ptr().cast(), output)));
            c.ret("fflush", call!(libc::fflush(output)));
        }
    }
    c.sync("done");
    c.ret("fclose", call!(libc::fclose(output)));
    c.ret("fclose", call!(libc::fclose(input)));
}
