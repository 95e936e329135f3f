//! The MSG_* flags, urgent data, and the byte counts that ioctl returns.

use std::ptr;
use std::time::Duration;

use libc::{MSG_DONTWAIT, MSG_PEEK, MSG_TRUNC, MSG_WAITALL, c_int};

use crate::ctx::Ctx;
use crate::sys::Addr;
use crate::{data, sys};

/// The client sends `bytes`; the server waits until all can be read.
fn deliver(c: &Ctx, fd: c_int, bytes: &[u8]) {
    if !c.is_server() {
        sys::send_all(fd, bytes).ok();
    }
    c.sync("delivered");
    if c.is_server() {
        sys::wait_readable_bytes(fd, bytes.len() as c_int);
    }
}

/// MSG_PEEK: again and again, less and more than there is, then read.
pub fn peek(c: &Ctx) {
    let fd = c.pair();
    deliver(c, fd, &data::pattern(1, 0, 1000));
    if c.is_server() {
        for len in [1, 10, 1000, 5000, 0] {
            c.recv(fd, len, MSG_PEEK);
        }
        c.recv(fd, 400, 0);
        c.recv(fd, 5000, MSG_PEEK);
        c.recv(fd, 5000, MSG_PEEK | MSG_DONTWAIT);
        c.fionread(fd);
        c.recv(fd, 5000, 0);
        c.recv(fd, 10, MSG_PEEK | MSG_DONTWAIT);
    }
    c.sync("empty");
    if c.is_server() {
        c.recv(fd, 10, MSG_PEEK);
        c.recv(fd, 10, MSG_PEEK);
        c.recv_all(fd, 3);
        c.sync("peeked");
        c.recv(fd, 10, MSG_PEEK);
        c.recv(fd, 10, 0);
    } else {
        sys::pause_ms(30);
        c.send(fd, b"end", 0);
        c.sync("peeked");
    }
    c.close(fd);
}

/// MSG_PEEK beyond the last byte: the end of the stream can be peeked too.
pub fn peek_end(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("ended");
        c.recv(fd, 10, MSG_PEEK);
        c.recv(fd, 10, 0);
        c.recv(fd, 10, MSG_PEEK);
    } else {
        c.send(fd, b"last", 0);
        c.shutdown(fd, libc::SHUT_WR);
        c.sync("ended");
    }
    c.sync("done");
    c.close(fd);
}

/// MSG_PEEK by recvmsg over several buffers, and of more than a small ring holds.
pub fn peek_large(c: &Ctx) {
    let fd = c.pair();
    deliver(c, fd, &data::pattern(2, 0, 30_000));
    if c.is_server() {
        let mut b = vec![0; 30_000];
        let (x, y) = b.split_at_mut(12_345);
        let mut v = [sys::iov(x), sys::iov(y)];
        let mut m = sys::msghdr(&mut v);
        let r = call!(libc::recvmsg(fd, &mut m, MSG_PEEK));
        c.bytes("recvmsg peek", r, &b);
        c.log(format_args!("flags {:#x}", m.msg_flags));
        let r = sys::recv(fd, &mut b, MSG_PEEK | MSG_WAITALL);
        c.bytes("peek waitall", r, &b);
        c.recv_all(fd, 30_000);
    }
    c.sync("done");
    c.close(fd);
}

/// MSG_WAITALL satisfied by several sends.
pub fn waitall(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        for (n, _) in WAITALL {
            c.recv(fd, n, MSG_WAITALL);
        }
    } else {
        let mut at = 0;
        for (n, pieces) in WAITALL {
            for piece in data::pattern(3, at, n).chunks(n.div_ceil(pieces)) {
                sys::send_all(fd, piece).ok();
                sys::pause_ms(5);
            }
            at += n as u64;
        }
    }
    c.sync("done");
    c.close(fd);
}
/// Bytes that the receive wants, and the number of pieces that they come in.
const WAITALL: [(usize, usize); 4] = [(10, 3), (5000, 4), (100_000, 5), (1, 1)];

/// MSG_WAITALL into several pieces, by which a connection may be promoted while a call waits for the rest: each byte is
/// in its place.
pub fn waitall_pieces(c: &Ctx) {
    const RECORD: usize = 100;
    let (listener, port) = c.listener(8);
    for round in 0..60 {
        let record = |n: u64| data::pattern(round, n * RECORD as u64, RECORD);
        if let Some(listener) = listener {
            let fd = sys::accept4(listener, 0).ok();
            for n in 0..30 {
                let got = recv_pieces(fd, &[3, 0, 41, 17, RECORD - 61]);
                assert!(got == record(n), "connection {round}, record {n}: {got:?}");
                sys::send_all(fd, b".").ok();
            }
            sys::close(fd).ok();
        } else {
            let fd = sys::connected(&Addr::v4(port));
            for n in 0..30 {
                sys::send_all(fd, &record(n)).ok();
                sys::recv_exact(fd, 1);
            }
            sys::close(fd).ok();
        }
    }
    c.log("all in place");
}

/// Calls recvmsg() once with MSG_WAITALL into pieces of these lengths.
fn recv_pieces(fd: c_int, lengths: &[usize]) -> Vec<u8> {
    let mut pieces: Vec<Vec<u8>> = lengths.iter().map(|n| vec![0; *n]).collect();
    let mut array: Vec<libc::iovec> = pieces
        .iter_mut()
        .map(|piece| libc::iovec {
            iov_base: piece.as_mut_ptr().cast(),
            iov_len: piece.len(),
        })
        .collect();
    // SAFETY: all zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = array.as_mut_ptr();
    message.msg_iovlen = array.len();
    let got = call!(libc::recvmsg(fd, &raw mut message, MSG_WAITALL)).count();
    let mut all = pieces.concat();
    all.truncate(got);
    all
}

/// MSG_WAITALL cut short by EOF, then by a time-out.
pub fn waitall_cut(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        sys::set_timeout(fd, libc::SO_RCVTIMEO, Duration::from_millis(150)).ok();
        c.sync("armed");
        c.recv(fd, 100, MSG_WAITALL);
        c.recv(fd, 100, MSG_WAITALL);
        c.sync("timed out");
        c.recv(fd, 100, MSG_WAITALL);
        c.recv(fd, 100, MSG_WAITALL);
        c.close(fd);
    } else {
        c.send(fd, b"partial", 0);
        c.sync("armed");
        c.sync("timed out");
        c.send(fd, b"rest", 0);
        c.close(fd);
    }
}

/// MSG_WAITALL on a nonblocking socket, and with MSG_DONTWAIT, receives the bytes that are there.
pub fn waitall_nonblocking(c: &Ctx) {
    let fd = c.pair();
    deliver(c, fd, &data::pattern(4, 0, 50));
    if c.is_server() {
        c.recv(fd, 20, MSG_WAITALL | MSG_DONTWAIT);
        c.recv(fd, 100, MSG_WAITALL | MSG_DONTWAIT);
        c.recv(fd, 100, MSG_WAITALL | MSG_DONTWAIT);
        sys::set_nonblocking(fd, true);
        c.recv(fd, 100, MSG_WAITALL);
    }
    c.sync("done");
    c.close(fd);
}

/// MSG_TRUNC on TCP discards bytes.
pub fn trunc(c: &Ctx) {
    let fd = c.pair();
    deliver(c, fd, &data::pattern(5, 0, 1000));
    if c.is_server() {
        // A null buffer shows that nothing is copied.
        c.ret("recv MSG_TRUNC", call!(libc::recv(fd, ptr::null_mut(), 300, MSG_TRUNC)));
        c.recv(fd, 100, 0);
        c.ret(
            "recv MSG_TRUNC|MSG_PEEK",
            call!(libc::recv(fd, ptr::null_mut(), 200, MSG_TRUNC | MSG_PEEK)),
        );
        c.recv(fd, 100, 0);
        c.ret(
            "recv MSG_TRUNC",
            call!(libc::recv(fd, ptr::null_mut(), 9000, MSG_TRUNC)),
        );
        c.ret(
            "recv MSG_TRUNC",
            call!(libc::recv(fd, ptr::null_mut(), 9000, MSG_TRUNC | MSG_DONTWAIT)),
        );
    }
    c.sync("done");
    c.close(fd);
}

/// MSG_DONTWAIT, with and without data.
pub fn dontwait(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.recv(fd, 10, MSG_DONTWAIT);
    }
    c.sync("empty");
    deliver(c, fd, b"hello");
    if c.is_server() {
        c.recv(fd, 3, MSG_DONTWAIT);
        c.recv(fd, 10, MSG_DONTWAIT);
        c.recv(fd, 10, MSG_DONTWAIT);
        c.log(call!(libc::fcntl(fd, libc::F_GETFL)).ok() & libc::O_NONBLOCK);
        c.sync("read");
        c.recv_all(fd, 5);
    } else {
        c.sync("read");
        c.send(fd, b"later", MSG_DONTWAIT);
    }
    c.sync("done");
    c.close(fd);
}

/// MSG_MORE and TCP_CORK: held-back bytes come when the last part is sent.
pub fn more(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.recv_all(fd, 15);
        c.sync("first");
        c.recv_all(fd, 10);
        c.sync("second");
        c.recv_to_end(fd);
    } else {
        c.send(fd, b"hello", libc::MSG_MORE);
        c.send(fd, b"great", libc::MSG_MORE);
        c.send(fd, b"world", 0);
        c.sync("first");
        sys::set_int(fd, libc::IPPROTO_TCP, libc::TCP_CORK, 1).ok();
        c.send(fd, b"first", 0);
        c.send(fd, b"other", 0);
        sys::set_int(fd, libc::IPPROTO_TCP, libc::TCP_CORK, 0).ok();
        c.sync("second");
        c.send(fd, b"held until close", libc::MSG_MORE);
    }
    c.close(fd);
}

/// Bytes of a send that has to wait for its reader. In the middle the reader sends urgent data, which needs the kernel.
const MUCH: usize = 6 << 20;

/// A send that waits sends all its bytes, though the connection leaves its link meanwhile.
pub fn oob_meanwhile(c: &Ctx) {
    taken_as_a_whole(c, |fd, bytes| sys::send(fd, bytes, 0));
}

/// As [`oob_meanwhile`], with several pieces.
pub fn oob_meanwhile_vectors(c: &Ctx) {
    taken_as_a_whole(c, |fd, bytes| {
        let pieces: Vec<libc::iovec> = bytes
            .chunks(999_983)
            .map(|piece| libc::iovec {
                iov_base: piece.as_ptr().cast_mut().cast(),
                iov_len: piece.len(),
            })
            .collect();
        call!(libc::writev(fd, pieces.as_ptr(), pieces.len() as c_int))
    });
}

/// As [`oob_meanwhile`], with a file.
pub fn oob_meanwhile_sendfile(c: &Ctx) {
    taken_as_a_whole(c, |fd, bytes| {
        let file = call!(libc::memfd_create(c"file".as_ptr(), 0)).ok() as c_int;
        assert_eq!(sys::write(file, bytes).count(), bytes.len());
        let mut from: libc::off_t = 0;
        let sent = call!(libc::sendfile(fd, file, &mut from, bytes.len()));
        assert_eq!(from, sent.value as libc::off_t);
        sys::close(file).ok();
        sent
    });
}

fn taken_as_a_whole(c: &Ctx, send: fn(c_int, &[u8]) -> sys::Ret) {
    let fd = c.pair();
    if c.is_server() {
        c.ret("sent", send(fd, &data::pattern(1, 0, MUCH)));
        sys::wait_for(fd, libc::POLLPRI);
        c.recv(fd, 1, libc::MSG_OOB);
    } else {
        data::verify(1, 0, &sys::recv_exact(fd, 1000));
        // The sender has begun to wait.
        sys::pause_ms(50);
        c.send(fd, b"!", libc::MSG_OOB);
        sys::pause_ms(20);
        data::verify(1, 1000, &sys::recv_exact(fd, MUCH - 1000));
    }
    c.sync("done");
    c.close(fd);
}

/// Urgent data out of band: the mark, MSG_OOB, POLLPRI, and the stream around it.
pub fn oob(c: &Ctx) {
    let fd = c.pair();
    if !c.is_server() {
        c.sync("none yet");
        c.send(fd, b"before", 0);
        c.send(fd, b"!", libc::MSG_OOB);
        c.send(fd, b"after", 0);
        c.sync("sent");
        c.sync("read");
        c.send(fd, b"go on", 0);
        c.close(fd);
        return;
    }
    c.recv(fd, 1, libc::MSG_OOB);
    c.sync("none yet");
    c.sync("sent");
    sys::wait_for(fd, libc::POLLPRI);
    // The urgent byte counts as readable until the mark is passed; wait for all twelve.
    while sys::poll_one(fd, libc::POLLIN, sys::SOON) == 0 {}
    sys::pause_ms(50);
    c.poll(fd, libc::POLLIN | libc::POLLPRI, 0);
    let at_mark = || {
        let mut at: c_int = -1;
        let r = call!(libc::ioctl(fd, SIOCATMARK, &mut at));
        c.log(format_args!("SIOCATMARK -> {r} {at}"));
    };
    at_mark();
    c.recv(fd, 1, libc::MSG_OOB | MSG_PEEK);
    c.recv(fd, 1, libc::MSG_OOB);
    c.recv(fd, 1, libc::MSG_OOB);
    c.recv(fd, 100, 0);
    at_mark();
    c.recv(fd, 100, 0);
    at_mark();
    c.sync("read");
    c.recv_to_end(fd);
    c.close(fd);
}
const SIOCATMARK: libc::c_ulong = 0x8905;

/// Urgent data in line.
pub fn oobinline(c: &Ctx) {
    let fd = c.pair();
    if !c.is_server() {
        c.sync("armed");
        c.send(fd, b"before!", libc::MSG_OOB);
        c.send(fd, b"after", 0);
        c.sync("sent");
        c.sync("read");
        c.close(fd);
        return;
    }
    c.ret(
        "SO_OOBINLINE",
        sys::set_int(fd, libc::SOL_SOCKET, libc::SO_OOBINLINE, 1),
    );
    c.sync("armed");
    c.sync("sent");
    sys::wait_for(fd, libc::POLLPRI);
    sys::pause_ms(50);
    c.recv(fd, 1, libc::MSG_OOB);
    c.recv(fd, 100, 0);
    c.recv(fd, 100, 0);
    c.sync("read");
    c.close(fd);
}

/// FIONREAD with no data, data, partly read data, at EOF.
pub fn fionread(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.fionread(fd);
    }
    c.sync("empty");
    deliver(c, fd, &data::pattern(6, 0, 5000));
    if c.is_server() {
        c.fionread(fd);
        c.recv(fd, 1234, 0);
        c.fionread(fd);
        c.recv(fd, 100, MSG_PEEK);
        c.fionread(fd);
        c.recv_all(fd, 5000 - 1234);
        c.fionread(fd);
        c.sync("closing");
        sys::wait_for(fd, libc::POLLRDHUP);
        c.fionread(fd);
        c.recv(fd, 10, 0);
        c.fionread(fd);
    } else {
        c.shutdown(fd, libc::SHUT_WR);
        c.sync("closing");
        c.recv_to_end(fd);
    }
    c.close(fd);
    c.fionread(fd);
}

/// SIOCOUTQ falls to zero once the peer has everything, and works before and after.
pub fn siocoutq(c: &Ctx) {
    let fd = c.pair();
    let outq = || {
        let mut n: c_int = -1;
        (call!(libc::ioctl(fd, libc::TIOCOUTQ, &mut n)), n)
    };
    if c.is_server() {
        c.recv_all(fd, 5000);
    } else {
        sys::send_all(fd, &data::pattern(7, 0, 5000)).ok();
    }
    c.sync("read");
    let mut left = outq();
    for _ in 0..500 {
        if left.1 == 0 {
            break;
        }
        sys::pause_ms(2);
        left = outq();
    }
    c.log(format_args!("SIOCOUTQ -> {} {}", left.0, left.1));
    c.sync("done");
    c.close(fd);
}

/// SO_RCVLOWAT holds poll and recv back.
pub fn rcvlowat(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.ret("SO_RCVLOWAT", set_low_water(fd));
    }
    below_low_water(c, fd);
    c.close(fd);
}

/// An accepted socket has its listener's SO_RCVLOWAT, also after a while.
pub fn rcvlowat_of_listener(c: &Ctx) {
    let (listener, port) = c.listener(4);
    if let Some(l) = listener {
        c.ret("SO_RCVLOWAT", set_low_water(l));
    }
    c.sync("set");
    let fd = match listener {
        Some(l) => sys::accept4(l, 0).ok(),
        None => sys::connected(&Addr::v4(port)),
    };
    // The bytes are enough for a promotion.
    for seed in 0..30 {
        let data = data::pattern(seed, 0, 2000);
        if c.is_server() {
            assert!(sys::recv_exact(fd, data.len()) == data);
            sys::send_all(fd, &data).ok();
            sys::pause_ms(3);
        } else {
            sys::send_all(fd, &data).ok();
            assert!(sys::recv_exact(fd, data.len()) == data);
        }
    }
    below_low_water(c, fd);
    c.close(fd);
}

/// SO_RCVLOWAT is set after the peer's end has come, and before the bytes that precede it are received.
pub fn rcvlowat_after_end(c: &Ctx) {
    let fd = c.pair();
    if !c.is_server() {
        c.send(fd, b"0123456789abcdef", 0);
        c.close(fd);
        c.sync("closed");
    } else {
        c.sync("closed");
        sys::wait_for(fd, libc::POLLRDHUP);
        c.ret("SO_RCVLOWAT", set_low_water(fd));
        c.recv(fd, 4, 0);
        c.poll(fd, libc::POLLIN, sys::SOON);
        c.recv(fd, 100, 0);
        c.recv(fd, 100, 0);
        c.close(fd);
    }
}

/// SO_PEEK_OFF (TCP has it since Linux 6.9): each MSG_PEEK goes on where the last one ended.
pub fn peek_offset(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.ret("SO_PEEK_OFF", sys::set_int(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF, 0));
    }
    deliver(c, fd, b"0123456789");
    if c.is_server() {
        for flags in [MSG_PEEK, MSG_PEEK, 0, MSG_PEEK] {
            c.recv(fd, 3, flags);
        }
    }
    c.sync("done");
    c.close(fd);
}

const LOW_WATER: c_int = 10;

fn set_low_water(fd: c_int) -> sys::Ret {
    sys::set_int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, LOW_WATER)
}

/// Fewer bytes than [`LOW_WATER`] are neither reported nor enough for a receive that waits.
fn below_low_water(c: &Ctx, fd: c_int) {
    if c.is_server() {
        c.sync("armed");
        c.sync("five");
        sys::wait_readable_bytes(fd, 5);
        c.poll(fd, libc::POLLIN, 50);
        c.recv(fd, 3, MSG_DONTWAIT);
        c.sync("looked");
        sys::wait_readable_bytes(fd, 12);
        c.poll(fd, libc::POLLIN, sys::SOON);
        c.recv(fd, 100, 0);
        c.sync("waits");
        c.recv(fd, 100, 0);
    } else {
        c.sync("armed");
        c.send(fd, b"12345", 0);
        c.sync("five");
        c.sync("looked");
        c.send(fd, b"1234567890", 0);
        c.sync("waits");
        c.send(fd, b"abcd", 0);
        sys::pause_ms(30);
        // Linux counts anew from the bytes that a waiting receive has taken: six more would not wake it.
        c.send(fd, b"efghijklmn", 0);
    }
    c.sync("done");
}

/// Flags that do not belong to the call.
pub fn odd(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.recv_to_end(fd);
    } else {
        c.recv(fd, 10, MSG_DONTWAIT | libc::MSG_ERRQUEUE);
        c.recv(fd, 10, MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC);
        c.recv(fd, 10, MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        c.send(fd, b"dontroute", libc::MSG_DONTROUTE);
        c.send(fd, b"eor", libc::MSG_EOR);
        c.send(fd, b"confirm", libc::MSG_CONFIRM);
        c.send(fd, b"zerocopy without SO_ZEROCOPY", libc::MSG_ZEROCOPY);
    }
    c.close(fd);
}

/// Bytes that MSG_MORE and TCP_CORK hold back come in the end though no bytes follow: to a sleeping
/// receive, and to a sleeping epoll_wait.
pub fn held_back(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("asleep");
        sys::pause_ms(20);
        c.send(fd, b"alone", libc::MSG_MORE);
        c.sync("got");
        sys::set_int(fd, libc::IPPROTO_TCP, libc::TCP_CORK, 1).ok();
        c.sync("asleep again");
        sys::pause_ms(20);
        c.send(fd, b"corked", 0);
        c.sync("got again");
    } else {
        let ep = super::epoll::create();
        super::epoll::ctl(ep, libc::EPOLL_CTL_ADD, fd, super::epoll::IN, 1).ok();
        c.sync("asleep");
        c.recv_all(fd, 5);
        c.sync("got");
        super::epoll::log_wait(c, ep, 0);
        c.sync("asleep again");
        super::epoll::log_wait(c, ep, sys::SOON);
        c.recv_all(fd, 6);
        c.sync("got again");
    }
    c.sync("done");
    c.close(fd);
}
