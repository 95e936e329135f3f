//! Urgent data around the moment of a promotion: the library's own bytes in TCP must not follow or pass the mark.
//! `flags` has urgent data on a promoted connection.

use libc::c_int;

use super::Scenario;
use crate::ctx::Ctx;
use crate::sys;

/// Connections of one scenario.
const CONNECTIONS: u32 = 24;
const SIOCATMARK: libc::c_ulong = 0x8905;

/// Ways in which a scenario's connections differ: which end sends the urgent byte, and whether it is received in line.
pub const WAYS: u32 = 4;

/// Adds the family to the table: with thresholds that are reached by the urgent send itself, and earlier.
pub fn add_to(all: &mut Vec<Scenario>) {
    for n in 0..WAYS {
        all.push(
            Scenario::numbered("urgent_at_promotion", n, at_promotion, false).with_env("RDMASOCK_PROMOTE_AFTER", "4r"),
        );
    }
}

/// Connections on which an end sends an urgent byte near the request at which they are promoted, and then nothing
/// until the other end has read it.
pub fn at_promotion(c: &Ctx) {
    let (listener, port) = c.listener(16);
    for n in 0..CONNECTIONS {
        c.sync("next");
        let fd = match listener {
            Some(listener) => sys::accept4(listener, 0).ok(),
            None => sys::connected(&sys::Addr::v4(port)),
        };
        one(c, fd, n);
        c.close(fd);
    }
    if let Some(listener) = listener {
        c.close(listener);
    }
}

fn one(c: &Ctx, fd: c_int, n: u32) {
    let by_server = c.param & 1 == 1;
    let inline = c.param & 2 == 2;
    if inline && c.is_server() != by_server {
        sys::set_int(fd, libc::SOL_SOCKET, libc::SO_OOBINLINE, 1).ok();
    }
    for _ in 0..2 + n % 3 {
        exchange(c, fd);
    }
    if by_server {
        // The urgent byte is the answer to this request.
        if c.is_server() {
            sys::recv_exact(fd, 16);
        } else {
            sys::send_all(fd, &[b'q'; 16]).ok();
        }
    }
    if c.is_server() == by_server {
        spin(u64::from(n) * 15);
        c.send(fd, b"ab!", libc::MSG_OOB);
        c.sync("sent");
        c.sync("read");
        c.send(fd, b"cd", 0);
    } else {
        sys::wait_for(fd, libc::POLLPRI);
        c.sync("sent");
        // Later bytes have time to come.
        sys::pause_ms(3);
        if n.is_multiple_of(2) {
            read_to_mark(c, fd);
        }
        c.recv(fd, 1, libc::MSG_OOB);
        if n % 2 == 1 {
            read_to_mark(c, fd);
        }
        c.recv(fd, 1, libc::MSG_OOB);
        at_mark(c, fd);
        c.sync("read");
        if inline {
            c.recv_all(fd, 1);
        }
        c.recv_all(fd, 2);
        at_mark(c, fd);
    }
    for _ in 0..6 {
        exchange(c, fd);
    }
    c.log("went on");
}

fn read_to_mark(c: &Ctx, fd: c_int) {
    at_mark(c, fd);
    c.recv(fd, 10, 0);
    at_mark(c, fd);
    c.poll(fd, libc::POLLIN | libc::POLLPRI, 0);
}

fn at_mark(c: &Ctx, fd: c_int) {
    let mut at: c_int = -1;
    let r = call!(libc::ioctl(fd, SIOCATMARK, &mut at));
    c.log(format_args!("SIOCATMARK -> {r} {at}"));
}

/// A small request and its answer.
fn exchange(c: &Ctx, fd: c_int) {
    if c.is_server() {
        let request = sys::recv_exact(fd, 16);
        sys::send_all(fd, &request).ok();
    } else {
        sys::send_all(fd, &[b'.'; 16]).ok();
        sys::recv_exact(fd, 16);
    }
}

fn spin(us: u64) {
    let start = std::time::Instant::now();
    while start.elapsed().as_micros() < u128::from(us) {
        std::hint::spin_loop();
    }
}

/// Urgent data behind bytes that the link still holds, unread: the mark is behind them.
pub fn behind_unread(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("sent");
        sys::wait_for(fd, libc::POLLPRI);
        sys::pause_ms(20);
        at_mark(c, fd);
        c.poll(fd, libc::POLLIN | libc::POLLPRI, 0);
        c.recv(fd, 3, 0);
        at_mark(c, fd);
        c.recv(fd, 1, libc::MSG_OOB);
        c.recv(fd, 100, 0);
        at_mark(c, fd);
        c.recv(fd, 100, 0);
        at_mark(c, fd);
        c.recv(fd, 10, libc::MSG_DONTWAIT);
    } else {
        c.send(fd, b"on the link", 0);
        c.send(fd, b"+!", libc::MSG_OOB);
        c.send(fd, b"after", 0);
        sys::pause_ms(10);
        c.sync("sent");
    }
    c.sync("read");
    exchange(c, fd);
    c.close(fd);
}

/// Two urgent bytes in a row: the second takes the place of the first, which becomes an ordinary one.
pub fn twice(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("first");
        sys::wait_for(fd, libc::POLLPRI);
        c.sync("second");
        c.sync("sent");
        sys::pause_ms(20);
        c.recv(fd, 1, libc::MSG_OOB);
        c.recv(fd, 100, 0);
        c.recv(fd, 100, libc::MSG_DONTWAIT);
    } else {
        c.send(fd, b"a1", libc::MSG_OOB);
        c.sync("first");
        c.sync("second");
        c.send(fd, b"b2", libc::MSG_OOB);
        c.sync("sent");
    }
    c.sync("read");
    exchange(c, fd);
    c.close(fd);
}
