//! MSG_ZEROCOPY where the connection changes: it would be promoted, goes back to TCP, ends, or is shared
//! with a child. The numbers are the kernel's.

use libc::{MSG_ZEROCOPY, SOL_SOCKET, c_int};

use super::epoll;
use super::epoll::{IN, log_wait, log_wait_for};
use super::zerocopy::{
    ROOM, SEVENS, collect, is_on_tcp, nothing, notice, prefer_tcp, read_notice, turn, until_complete,
};
use crate::ctx::Ctx;
use crate::sys::Addr;
use crate::{data, sys};

/// An accepted connection has its listener's option.
pub fn accepted(c: &Ctx) {
    let (listener, port) = c.listener(4);
    let fd = match listener {
        Some(listener) => {
            turn(listener, 1).ok();
            c.sync("set");
            sys::accept4(listener, 0).ok()
        }
        None => {
            c.sync("set");
            sys::connected(&Addr::v4(port))
        }
    };
    c.warm_up(fd);
    c.log(sys::get_int(fd, SOL_SOCKET, libc::SO_ZEROCOPY).1);
    if c.is_server() {
        sys::send(fd, b"by the listener's option", MSG_ZEROCOPY).ok();
        until_complete(fd);
        notice(c, fd);
        nothing(c, fd);
    } else {
        sys::recv_exact(fd, 24);
    }
    c.sync("done");
    c.close(fd);
}

/// The peer ends its direction, and then resets the connection: unread notices can still be read, and are not an
/// error of the connection.
pub fn reset(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.sync("sent");
        c.shutdown(fd, libc::SHUT_WR);
        c.sync("ended");
        c.sync("told");
        c.close(fd);
        return;
    }
    turn(fd, 1).ok();
    sys::send(fd, b"never read", MSG_ZEROCOPY).ok();
    until_complete(fd);
    let set = epoll::create();
    epoll::ctl(set, libc::EPOLL_CTL_ADD, fd, IN, 1).ok();
    c.sync("sent");
    c.sync("ended");
    sys::wait_tcp_state(fd, sys::CLOSE_WAIT);
    sys::pause_ms(50);
    let look = || {
        c.poll(fd, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP, 0);
        log_wait(c, set, 0);
        log_wait(c, set, 0);
    };
    look();
    c.recv(fd, 10, 0);
    sys::send(fd, b"nor this", MSG_ZEROCOPY).ok();
    until_complete(fd);
    look();
    c.sync("told");
    while sys::poll_one(fd, 0, sys::SOON) & libc::POLLHUP == 0 {
        sys::pause_ms(1);
    }
    sys::pause_ms(50);
    look();
    c.so_error(fd);
    look();
    notice(c, fd);
    look();
    c.send(fd, b"broken", MSG_ZEROCOPY | libc::MSG_NOSIGNAL);
    nothing(c, fd);
    look();
    c.close(fd);
}

/// Returns the client's end of a connection on which it has sent `bytes`, and read the completion; the server has read
/// all. `None` at the server.
fn sent_once(c: &Ctx, bytes: &[u8]) -> Option<c_int> {
    let fd = c.pair();
    if c.is_server() {
        c.recv_to_end(fd);
        c.close(fd);
        return None;
    }
    turn(fd, 1).ok();
    sys::send(fd, bytes, MSG_ZEROCOPY).ok();
    until_complete(fd);
    notice(c, fd);
    Some(fd)
}

/// Other messages of the error queue come through: the times at which packets have gone, in between and
/// with control data that are cut.
pub fn timestamps(c: &Ctx) {
    const TX_SOFTWARE: c_int = 1 << 1;
    const SOFTWARE: c_int = 1 << 4;
    const ID: c_int = 1 << 7;
    const WITHOUT_DATA: c_int = 1 << 11;
    let Some(fd) = sent_once(c, b"on the link") else { return };
    // With this flag the kernel numbers them by the bytes that follow: else it counts markers that are on their way.
    const ID_TCP: c_int = 1 << 16;
    prefer_tcp(fd);
    for (how, data) in [(WITHOUT_DATA, false), (0, true)] {
        let flags = TX_SOFTWARE | SOFTWARE | ID | ID_TCP | how;
        c.ret("set", sys::set_int(fd, SOL_SOCKET, libc::SO_TIMESTAMPING, flags));
        for room in [ROOM, 0, 20, 70, 100, ROOM] {
            sys::send(fd, b"timed", 0).ok();
            until_complete(fd);
            c.log(sys::poll_one(fd, 0, sys::SOON));
            let notice = read_notice(fd, room, 0);
            // The time, which is first, differs.
            let words = notice.words();
            let told = (notice.used > 80).then(|| (&words[..4], &words[16..32]));
            c.log(format_args!(
                "{data} -> {} {:#x} {} {told:x?}",
                notice.r, notice.flags, notice.used
            ));
        }
        for _ in 0..2 {
            sys::send(fd, b"timed", 0).ok();
            until_complete(fd);
        }
        let mut m: [libc::mmsghdr; 3] = sys::zeroed();
        let none = std::ptr::null_mut();
        c.ret(
            "recvmmsg",
            call!(libc::recvmmsg(fd, m.as_mut_ptr(), 3, libc::MSG_ERRQUEUE, none)),
        );
        sys::set_int(fd, SOL_SOCKET, libc::SO_TIMESTAMPING, 0).ok();
        sys::send(fd, b"numbered on", MSG_ZEROCOPY).ok();
        until_complete(fd);
        notice(c, fd);
        nothing(c, fd);
    }
    c.close(fd);
}

/// A child closes its copy, and the parent's numbers go on. They also go on if the child has sent on the connection;
/// the child may read the notices of earlier sends that are still unread.
pub fn forked(c: &Ctx) {
    let Some(fd) = sent_once(c, b"before") else { return };
    let child = sys::fork_child(|| {
        sys::close(fd);
        0
    });
    c.log(sys::wait_child(child));
    sys::send(fd, b"between", MSG_ZEROCOPY).ok();
    until_complete(fd);
    notice(c, fd);
    let child = sys::fork_child(|| {
        sys::send(fd, b"of the child", MSG_ZEROCOPY).ok();
        until_complete(fd);
        notice(c, fd);
        nothing(c, fd);
        0
    });
    c.log(sys::wait_child(child));
    nothing(c, fd);
    sys::send(fd, b"after", MSG_ZEROCOPY).ok();
    until_complete(fd);
    c.log(sys::poll_one(fd, 0, sys::SOON));
    read_notice(fd, ROOM, 0).log(c);
    nothing(c, fd);
    c.close(fd);
}

/// The first send with MSG_ZEROCOPY follows others on the link. The stream keeps its order, and each such send is
/// reported by the kernel's number. `param`: whether the peer reads the link's bytes only later, and whether the number
/// is read at once.
fn across(c: &Ctx) {
    let fd = c.pair();
    let is_full = c.param % 2 == 1;
    if c.is_server() {
        if is_full {
            c.sync("sent");
        }
        data::verify(1, 0, &sys::recv_exact(fd, 15_000));
        sys::send_all(fd, b"answer").ok();
        c.recv_to_end(fd);
        c.close(fd);
        return;
    }
    let set = epoll::create();
    epoll::ctl(set, libc::EPOLL_CTL_ADD, fd, 0, 1).ok();
    turn(fd, 1).ok();
    let bytes = data::pattern(1, 0, 15_000);
    for (n, piece) in bytes.chunks(1000).enumerate() {
        sys::send(fd, piece, if n < 5 { 0 } else { MSG_ZEROCOPY }).ok();
        if n == 5 {
            is_on_tcp(fd);
            if c.param / 2 == 1 {
                collect(c, fd, 0..1);
            }
        }
    }
    if is_full {
        c.sync("sent");
    }
    sys::recv_exact(fd, 6);
    until_complete(fd);
    log_wait_for(c, set, 1);
    collect(c, fd, c.param / 2..10);
    nothing(c, fd);
    c.poll(fd, libc::POLLIN, 0);
    log_wait(c, set, 0);
    for n in 10..13 {
        sys::send(fd, &SEVENS, MSG_ZEROCOPY).ok();
        collect(c, fd, n..n + 1);
    }
    c.close(fd);
}

/// The connection would reach its threshold while the program sends: it stays on TCP, and each send is reported once.
fn promoted_at(c: &Ctx) {
    let fd = c.cold_pair();
    const ROUNDS: u32 = 200;
    if c.is_server() {
        for _ in 0..ROUNDS {
            c.recv_all(fd, 300);
            sys::send_all(fd, b"answer").ok();
        }
        c.sync("done");
        c.close(fd);
        return;
    }
    turn(fd, 1).ok();
    sys::set_int(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1).ok();
    let mut told = Vec::new();
    for round in 0..ROUNDS {
        for _ in 0..3 {
            sys::send(fd, &SEVENS, MSG_ZEROCOPY).ok();
        }
        sys::recv_exact(fd, 6);
        if round % 7 == c.param % 7 {
            let notice = read_notice(fd, ROOM, 0);
            told.extend(notice.range().into_iter().flat_map(|(first, last)| first..=last));
        }
    }
    while told.len() < ROUNDS as usize * 3 {
        assert!(sys::poll_one(fd, 0, sys::SOON) != 0, "{told:?}");
        let notice = read_notice(fd, ROOM, 0);
        told.extend(notice.range().into_iter().flat_map(|(first, last)| first..=last));
    }
    told.sort_unstable();
    assert!(told.into_iter().eq(0..ROUNDS * 3));
    nothing(c, fd);
    is_on_tcp(fd);
    c.sync("done");
    c.close(fd);
}

/// Adds the scenarios that differ by a number.
pub fn add_to(all: &mut Vec<super::Scenario>) {
    let across = |n| super::Scenario::numbered("zerocopy_across", n, across, true);
    all.extend((0..4).map(across));
    let promoted_at = |n: u32| {
        super::Scenario::numbered("zerocopy_promoted_at", n, promoted_at, false)
            .with_env("RDMASOCK_PROMOTE_AFTER", (n * 2501).to_string())
    };
    all.extend((0..8).map(promoted_at));
}
