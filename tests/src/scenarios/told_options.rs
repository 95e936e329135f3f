//! Options of a connection that are read back, and have their effect, before it is promoted, on the link, and back on
//! TCP.

use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use libc::{IPPROTO_TCP, SOL_SOCKET, c_int};

use super::process::{pass_fd, socketpair, take_fd};
use super::told::{SIOCOUTQNSD, exchange, get, queue, until_acknowledged};
use crate::ctx::{Ctx, poll_names};
use crate::{data, sys};

/// linux/tcp.h; the control message has the same number.
const TCP_INQ: c_int = 36;

const KEPT: [(&str, c_int, c_int, c_int); 25] = [
    ("TCP_NODELAY", IPPROTO_TCP, libc::TCP_NODELAY, 1),
    ("TCP_CORK", IPPROTO_TCP, libc::TCP_CORK, 1),
    ("TCP_KEEPIDLE", IPPROTO_TCP, libc::TCP_KEEPIDLE, 31),
    ("TCP_KEEPINTVL", IPPROTO_TCP, libc::TCP_KEEPINTVL, 7),
    ("TCP_KEEPCNT", IPPROTO_TCP, libc::TCP_KEEPCNT, 3),
    ("TCP_USER_TIMEOUT", IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 50_000),
    ("TCP_SYNCNT", IPPROTO_TCP, libc::TCP_SYNCNT, 3),
    ("TCP_LINGER2", IPPROTO_TCP, libc::TCP_LINGER2, 10),
    ("TCP_WINDOW_CLAMP", IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, 60_000),
    ("TCP_DEFER_ACCEPT", IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 5),
    ("TCP_FASTOPEN_CONNECT", IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, 1),
    (
        "TCP_THIN_LINEAR_TIMEOUTS",
        IPPROTO_TCP,
        libc::TCP_THIN_LINEAR_TIMEOUTS,
        1,
    ),
    ("TCP_SAVE_SYN", IPPROTO_TCP, libc::TCP_SAVE_SYN, 1),
    ("TCP_INQ", IPPROTO_TCP, TCP_INQ, 1),
    ("SO_KEEPALIVE", SOL_SOCKET, libc::SO_KEEPALIVE, 1),
    ("SO_REUSEADDR", SOL_SOCKET, libc::SO_REUSEADDR, 1),
    ("SO_SNDBUF", SOL_SOCKET, libc::SO_SNDBUF, 30_000),
    ("SO_RCVBUF", SOL_SOCKET, libc::SO_RCVBUF, 30_000),
    ("SO_PRIORITY", SOL_SOCKET, libc::SO_PRIORITY, 3),
    ("SO_MARK", SOL_SOCKET, libc::SO_MARK, 17),
    ("SO_BUSY_POLL", SOL_SOCKET, libc::SO_BUSY_POLL, 20),
    ("SO_INCOMING_CPU", SOL_SOCKET, libc::SO_INCOMING_CPU, 0),
    ("SO_ZEROCOPY", SOL_SOCKET, libc::SO_ZEROCOPY, 1),
    ("IP_TOS", libc::IPPROTO_IP, libc::IP_TOS, 0x10),
    ("IP_TTL", libc::IPPROTO_IP, libc::IP_TTL, 33),
];

/// Options that were set before the promotion are read back after it, and after the demotion; so are those set on the
/// link.
pub fn kept(c: &Ctx) {
    let fd = c.cold_pair();
    let read_back = |when: &str, fds: c_int| {
        for (name, level, option, set) in KEPT {
            let (r, value) = sys::get_int(fds, level, option);
            let value = match (level, option) {
                // The processor of the last packet varies.
                (SOL_SOCKET, libc::SO_INCOMING_CPU) => c_int::from(value >= 0),
                // The kernel takes off some percent when it first sees how much memory a full segment takes
                // (tcp_measure_rcv_mss in Linux's tcp_input.c). A connection that is promoted early never gets one on
                // TCP.
                (IPPROTO_TCP, libc::TCP_WINDOW_CLAMP) if (set * 9 / 10..set).contains(&value) => set,
                _ => value,
            };
            c.log(format_args!("{when}: {name} -> {r}, {value}"));
        }
        let mut name = [0; 16];
        let (r, len) = get(fds, IPPROTO_TCP, libc::TCP_CONGESTION, &mut name);
        c.log(format_args!("{when}: {r} {len} {}", data::show(&name[..5])));
        let mut linger = [0; 8];
        let (r, len) = get(fds, SOL_SOCKET, libc::SO_LINGER, &mut linger);
        c.log(format_args!("{when}: SO_LINGER -> {r} {len} {linger:?}"));
    };
    for (name, level, option, value) in KEPT {
        c.ret(format_args!("set {name}"), sys::set_int(fd, level, option, value));
    }
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 4,
    };
    let len = size_of::<libc::linger>() as libc::socklen_t;
    let at = (&raw const linger).cast();
    c.ret(
        "linger",
        call!(libc::setsockopt(fd, SOL_SOCKET, libc::SO_LINGER, at, len)),
    );
    let reno = b"reno";
    let at = reno.as_ptr().cast();
    c.ret(
        "reno",
        call!(libc::setsockopt(fd, IPPROTO_TCP, libc::TCP_CONGESTION, at, 4)),
    );
    read_back("on TCP", fd);
    // Corked, a request would wait for 200 ms.
    sys::set_int(fd, IPPROTO_TCP, libc::TCP_CORK, 0).ok();
    c.warm_up(fd);
    read_back("promoted", fd);
    sys::set_int(fd, IPPROTO_TCP, libc::TCP_CORK, 1).ok();
    sys::set_int(fd, IPPROTO_TCP, libc::TCP_NODELAY, 0).ok();
    sys::set_int(fd, IPPROTO_TCP, libc::TCP_KEEPIDLE, 77).ok();
    read_back("set anew", fd);
    c.sync("read");
    if c.is_server() {
        let [a, b] = socketpair();
        pass_fd(a, fd).ok();
        sys::close(take_fd(b)).ok();
    }
    sys::set_int(fd, IPPROTO_TCP, libc::TCP_CORK, 0).ok();
    exchange(c, fd, 1);
    sys::set_int(fd, IPPROTO_TCP, libc::TCP_CORK, 1).ok();
    read_back("demoted", fd);
    sys::set_int(fd, IPPROTO_TCP, libc::TCP_CORK, 0).ok();
    c.sync("done");
    c.close(fd);
}

/// TCP_NODELAY stays as the program has set it during a promotion: a thread reads it all the time.
pub fn nodelay_while_promoted(c: &Ctx) {
    look_at_nodelay(c, 250, 0);
}

/// As [`nodelay_while_promoted`], at one promotion, in whose middle threads can be held up (`tests/wakes.rs`).
pub fn nodelay_at_a_promotion(c: &Ctx) {
    look_at_nodelay(c, 1, 5);
}

fn look_at_nodelay(c: &Ctx, connections: usize, pause_ms: u64) {
    let mut differs = 0;
    for _ in 0..connections {
        let fd = c.cold_pair();
        let is_over = AtomicBool::new(false);
        differs += std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                let mut differs = 0;
                while !is_over.load(Relaxed) {
                    let (_, on) = sys::get_int(fd, IPPROTO_TCP, libc::TCP_NODELAY);
                    differs += on;
                }
                differs
            });
            for at in 0..30 {
                exchange(c, fd, at);
                sys::pause_ms(pause_ms);
            }
            is_over.store(true, Relaxed);
            looks.join().unwrap()
        });
        c.sync("round");
        c.close(fd);
    }
    // The number of reads depends on the machine's speed.
    c.log(format_args!("always as it was set: {}", differs == 0));
}

#[repr(align(8))]
struct Control([u8; 64]);

/// Calls recvmsg() for up to `len` bytes with room for `room` bytes of control data. Logs the bytes and the control
/// data.
fn receive(c: &Ctx, fd: c_int, len: usize, room: usize) {
    let mut bytes = vec![0; len];
    let mut iov = [sys::iov(&mut bytes)];
    let mut message = sys::msghdr(&mut iov);
    let mut control = Control([0xee; 64]);
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = room;
    let r = call!(libc::recvmsg(fd, &mut message, 0));
    let used = message.msg_controllen.min(room);
    let untouched = control.0[room..].iter().all(|b| *b == 0xee);
    c.log(format_args!(
        "recvmsg {len} room {room} -> {r}, flags {:#x}, control {used} {:?} {untouched}",
        message.msg_flags,
        &control.0[..used.min(20)],
    ));
}

/// TCP_INQ: a receive returns how many bytes are left.
pub fn how_much_is_left(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.ret("TCP_INQ", sys::set_int(fd, IPPROTO_TCP, TCP_INQ, 1));
        for room in [64, 24, 23, 20, 19, 17, 16, 15, 0] {
            c.sync("send");
            sys::wait_readable_bytes(fd, 1000);
            receive(c, fd, 300, room);
            receive(c, fd, 700, room);
        }
        c.ret("off", sys::set_int(fd, IPPROTO_TCP, TCP_INQ, 0));
        c.sync("send");
        sys::wait_readable_bytes(fd, 1000);
        receive(c, fd, 1000, 64);
        c.ret("on", sys::set_int(fd, IPPROTO_TCP, TCP_INQ, 1));
        c.sync("end");
        sys::wait_for(fd, libc::POLLRDHUP);
        receive(c, fd, 50, 64);
        receive(c, fd, 50, 64);
        receive(c, fd, 50, 64);
    } else {
        for _ in 0..10 {
            c.sync("send");
            sys::send_all(fd, &data::pattern(1, 0, 1000)).ok();
        }
        c.sync("end");
        sys::send_all(fd, &data::pattern(1, 0, 100)).ok();
        c.shutdown(fd, libc::SHUT_WR);
    }
    c.sync("done");
    c.close(fd);
}

/// As [`how_much_is_left`], set on a listener.
pub fn how_much_is_left_by_listener(c: &Ctx) {
    let (listener, port) = c.listener(4);
    if let Some(l) = listener {
        c.ret("TCP_INQ", sys::set_int(l, IPPROTO_TCP, TCP_INQ, 1));
    }
    c.sync("set");
    let fd = match listener {
        Some(l) => sys::accept4(l, 0).ok(),
        None => sys::connected(&sys::Addr::v4(port)),
    };
    c.warm_up(fd);
    c.sync("warm");
    if c.is_server() {
        sys::wait_readable_bytes(fd, 1000);
        receive(c, fd, 300, 64);
        receive(c, fd, 700, 64);
    } else {
        sys::send_all(fd, &data::pattern(1, 0, 1000)).ok();
    }
    c.sync("done");
    c.close(fd);
}

/// Options by which a receive returns the time at which a packet came.
pub fn timestamps(c: &Ctx) {
    const RX_SOFTWARE: c_int = 1 << 3;
    const SOFTWARE: c_int = 1 << 4;
    for (name, option, value) in [
        ("SO_TIMESTAMP", libc::SO_TIMESTAMP, 1),
        ("SO_TIMESTAMPNS", libc::SO_TIMESTAMPNS, 1),
        ("SO_TIMESTAMPING", libc::SO_TIMESTAMPING, RX_SOFTWARE | SOFTWARE),
    ] {
        let fd = c.pair();
        if c.is_server() {
            c.ret(name, sys::set_int(fd, SOL_SOCKET, option, value));
            c.log(format_args!("{}", sys::get_int(fd, SOL_SOCKET, option).1));
        }
        c.sync("set");
        if c.is_server() {
            sys::wait_readable_bytes(fd, 1000);
            let mut bytes = [0; 1000];
            let mut iov = [sys::iov(&mut bytes)];
            let mut message = sys::msghdr(&mut iov);
            let mut control = Control([0; 64]);
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = control.0.len();
            let r = call!(libc::recvmsg(fd, &mut message, 0));
            let used = message.msg_controllen;
            let kind = &control.0[..16];
            c.log(format_args!("recvmsg -> {r}, {used} {kind:?}"));
        } else {
            // Time for the connection to be back on TCP, also on a busy machine: earlier bytes have no time.
            sys::pause_ms(250);
            sys::send_all(fd, &data::pattern(1, 0, 1000)).ok();
        }
        c.sync("done");
        c.close(fd);
    }
}

/// SO_MAX_PACING_RATE limits the rate of sends.
pub fn pacing(c: &Ctx) {
    let fd = c.pair();
    if !c.is_server() {
        let slow = 200_000;
        let option = libc::SO_MAX_PACING_RATE;
        c.ret("set", sys::set_int(fd, SOL_SOCKET, option, slow));
        c.log(format_args!("{}", sys::get_int(fd, SOL_SOCKET, option).1));
    }
    c.sync("set");
    let all = data::pattern(1, 0, 400_000);
    if c.is_server() {
        let got = sys::recv_exact(fd, all.len());
        c.log(format_args!("all: {}", got == all));
    } else {
        sys::send_all(fd, &all).ok();
        c.log(format_args!("held back: {}", queue(fd, SIOCOUTQNSD) > 0));
    }
    c.sync("done");
    c.close(fd);
}

/// TCP_REPAIR: the state that the kernel returns is the connection's, and the connection goes on. (Without the
/// privilege, it is refused.)
pub fn repair(c: &Ctx) {
    const TCP_REPAIR: c_int = 19;
    const TCP_REPAIR_QUEUE: c_int = 20;
    const RECV_QUEUE: c_int = 1;
    const OFF_WITHOUT_PROBE: c_int = -1;
    let fd = c.pair();
    for round in 0..3 {
        exchange(c, fd, round);
    }
    if !c.is_server() {
        sys::send_all(fd, &data::pattern(3, 0, 500)).ok();
    }
    c.sync("sent");
    if c.is_server() {
        sys::wait_readable_bytes(fd, 500);
        let set = |name, value| sys::set_int(fd, IPPROTO_TCP, name, value);
        c.ret("repair", set(TCP_REPAIR, 1));
        c.log(format_args!("{:?}", sys::get_int(fd, IPPROTO_TCP, TCP_REPAIR)));
        // No queue is selected, and then the receive queue: the kernel neither accepts nor returns bytes.
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
        c.recv(fd, 10, libc::MSG_DONTWAIT);
        c.ret("queue", set(TCP_REPAIR_QUEUE, RECV_QUEUE));
        c.recv(fd, 10, libc::MSG_DONTWAIT);
        // The unread bytes are peeked, when the peer has sent them again over TCP.
        sys::wait_readable_bytes(fd, 500);
        c.recv(fd, 600, libc::MSG_PEEK | libc::MSG_DONTWAIT);
        c.ret("off", set(TCP_REPAIR, OFF_WITHOUT_PROBE));
        c.fionread(fd);
        c.recv_all(fd, 500);
    }
    c.sync("repaired");
    for round in 3..40 {
        exchange(c, fd, round);
    }
    c.sync("done");
    c.close(fd);
}

/// TCP_ZEROCOPY_RECEIVE: all bytes come, mapped or copied, with any number of bytes unread at the first call.
pub fn zero_copy_receive(c: &Ctx) {
    const TCP_ZEROCOPY_RECEIVE: c_int = 35;
    const MAPPED: usize = 1 << 18;
    /// struct tcp_zerocopy_receive of linux/tcp.h, as it was first.
    #[repr(C)]
    struct Request {
        address: u64,
        length: u32,
        skip: u32,
    }
    let all = data::pattern(1, 0, 700_000);
    let fd = c.pair();
    if !c.is_server() {
        sys::send_all(fd, &all[..3000]).ok();
        c.sync("first");
        sys::send_all(fd, &all[3000..]).ok();
        c.sync("done");
        c.close(fd);
        return;
    }
    c.sync("first");
    sys::wait_readable_bytes(fd, 3000);
    let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: a mapping where the kernel chooses.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), MAPPED, read, shared, fd, 0) };
    c.log(format_args!("mapped: {}", at != libc::MAP_FAILED));
    let mut got = Vec::new();
    while got.len() < all.len() {
        let mut request = Request {
            address: at as u64,
            length: MAPPED as u32,
            skip: 0,
        };
        let mut len = size_of::<Request>() as libc::socklen_t;
        let to = (&raw mut request).cast();
        let asked = call!(libc::getsockopt(fd, IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE, to, &mut len));
        if asked.failed() {
            c.log(format_args!("refused: {asked}"));
            break;
        }
        // SAFETY: the kernel has mapped `request.length` bytes there.
        got.extend_from_slice(unsafe { std::slice::from_raw_parts(at.cast::<u8>(), request.length as usize) });
        let skip = (request.skip as usize).min(all.len() - got.len());
        if skip > 0 {
            got.extend(sys::recv_exact(fd, skip));
        } else if request.length == 0 {
            sys::wait_for(fd, libc::POLLIN);
        }
    }
    c.log(format_args!("all that was sent: {}", got == all));
    call!(libc::munmap(at, MAPPED)).ok();
    c.sync("done");
    c.close(fd);
}

/// Keepalive probes the peer's host, not its program: a program that stands still for longer than all probes lives.
pub fn keepalive_of_a_frozen_peer(c: &Ctx) {
    let fd = c.pair();
    let pid = c.exchange("pid", std::process::id().into()) as libc::pid_t;
    if c.is_server() {
        call!(libc::raise(libc::SIGSTOP)).ok();
    } else {
        probe_soon(c, fd);
        while !std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| s.contains(") T ")) {
            sys::pause_ms(5);
        }
        let events = sys::poll_one(fd, libc::POLLIN, 5000);
        c.log(format_args!("poll: {}", poll_names(events)));
        c.so_error(fd);
        call!(libc::kill(pid, libc::SIGCONT)).ok();
    }
    for round in 0..20 {
        exchange(c, fd, round);
    }
    c.sync("done");
    c.close(fd);
}

/// Keepalive ends a connection at rest to a host that is gone, while a receive waits: here the loopback interface
/// of a network of their own goes down.
pub fn keepalive_of_a_host_that_is_gone(c: &Ctx) {
    if !c.is_server() {
        call!(libc::unshare(libc::CLONE_NEWNET)).ok();
        loopback(libc::IFF_UP);
    }
    let pid = c.exchange("pid", std::process::id().into());
    if c.is_server() {
        let network = std::fs::File::open(format!("/proc/{pid}/ns/net")).unwrap();
        call!(libc::setns(network.as_raw_fd(), libc::CLONE_NEWNET)).ok();
    }
    let fd = c.pair();
    for round in 0..20 {
        exchange(c, fd, round);
    }
    // While bytes are on their way the kernel does not probe. The promotion's own messages count too: they are
    // acknowledged 40 ms later.
    until_acknowledged(fd);
    sys::pause_ms(300);
    c.sync("at rest");
    if !c.is_server() {
        probe_soon(c, fd);
        loopback(0);
        c.recv(fd, 10, 0);
        c.so_error(fd);
        c.poll(fd, libc::POLLIN | libc::POLLOUT, 0);
        c.ret("send", sys::send(fd, b"x", libc::MSG_NOSIGNAL));
    }
    c.sync("gone");
    c.close(fd);
}

fn loopback(flags: c_int) {
    let control = call!(libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0)).ok();
    let mut request: libc::ifreq = sys::zeroed();
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    call!(libc::ioctl(control, libc::SIOCSIFFLAGS, &request)).ok();
    sys::close(control).ok();
}

/// Sets keepalive so that 3 s of silence end the connection.
fn probe_soon(c: &Ctx, fd: c_int) {
    for (name, value) in [
        (libc::TCP_KEEPIDLE, 1),
        (libc::TCP_KEEPINTVL, 1),
        (libc::TCP_KEEPCNT, 2),
    ] {
        c.ret("probes", sys::set_int(fd, IPPROTO_TCP, name, value));
    }
    let on = sys::set_int(fd, SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    c.ret("keepalive", on);
}

/// TCP_USER_TIMEOUT ends a connection whose peer accepts no bytes for that time, for a blocking sender and for one
/// that polls.
pub fn user_timeout(c: &Ctx) {
    for polls in [false, true] {
        let fd = c.pair();
        if c.is_server() {
            c.sync("over");
            let (end, got) = sys::recv_to_end(fd);
            c.log(format_args!("something came: {}, {end}", !got.is_empty()));
        } else {
            let option = libc::TCP_USER_TIMEOUT;
            c.ret("set", sys::set_int(fd, IPPROTO_TCP, option, 1500));
            sys::set_nonblocking(fd, polls);
            let piece = data::pattern(1, 0, 65_536);
            let last = loop {
                let r = sys::send(fd, &piece, libc::MSG_NOSIGNAL);
                if r.is(libc::EAGAIN) {
                    // There may be room once more before there is none for good.
                    let events = sys::poll_one(fd, libc::POLLOUT, sys::SOON);
                    if events & libc::POLLERR != 0 {
                        c.log(format_args!("poll: {}", poll_names(events)));
                    }
                } else if r.failed() {
                    break r;
                }
            };
            c.log(format_args!("send -> {last}"));
            c.so_error(fd);
            c.poll(fd, libc::POLLIN | libc::POLLOUT, 0);
            c.recv(fd, 10, 0);
            c.sync("over");
        }
        c.close(fd);
    }
}
