//! setsockopt, getsockopt, fcntl and ioctl: set and read back, on a live connection.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use libc::{IPPROTO_TCP, SOL_SOCKET, c_int};

use crate::ctx::Ctx;
use crate::sys::{Addr, CLOSE_WAIT, CLOSED, FIN_WAIT2};
use crate::{data, sys};

const OPTIONS: [(&str, c_int, c_int, &[c_int]); 21] = [
    ("TCP_NODELAY", IPPROTO_TCP, libc::TCP_NODELAY, &[1, 0, 7]),
    ("TCP_CORK", IPPROTO_TCP, libc::TCP_CORK, &[1, 0]),
    ("TCP_QUICKACK", IPPROTO_TCP, libc::TCP_QUICKACK, &[0, 1]),
    ("TCP_KEEPIDLE", IPPROTO_TCP, libc::TCP_KEEPIDLE, &[30, 0, 99_999]),
    ("TCP_KEEPINTVL", IPPROTO_TCP, libc::TCP_KEEPINTVL, &[7]),
    ("TCP_KEEPCNT", IPPROTO_TCP, libc::TCP_KEEPCNT, &[3, 999]),
    ("TCP_USER_TIMEOUT", IPPROTO_TCP, libc::TCP_USER_TIMEOUT, &[5000, -1]),
    ("TCP_MAXSEG", IPPROTO_TCP, libc::TCP_MAXSEG, &[1000]),
    ("TCP_SYNCNT", IPPROTO_TCP, libc::TCP_SYNCNT, &[3]),
    ("TCP_LINGER2", IPPROTO_TCP, libc::TCP_LINGER2, &[10]),
    ("TCP_NOTSENT_LOWAT", IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, &[16_384]),
    ("TCP_WINDOW_CLAMP", IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, &[60_000]),
    ("SO_KEEPALIVE", SOL_SOCKET, libc::SO_KEEPALIVE, &[1, 0]),
    ("SO_REUSEADDR", SOL_SOCKET, libc::SO_REUSEADDR, &[1, 0]),
    ("SO_SNDBUF", SOL_SOCKET, libc::SO_SNDBUF, &[30_000, 0]),
    ("SO_RCVBUF", SOL_SOCKET, libc::SO_RCVBUF, &[30_000, 0]),
    ("SO_OOBINLINE", SOL_SOCKET, libc::SO_OOBINLINE, &[1, 0]),
    ("SO_PRIORITY", SOL_SOCKET, libc::SO_PRIORITY, &[3]),
    ("SO_RCVLOWAT", SOL_SOCKET, libc::SO_RCVLOWAT, &[5, 1]),
    ("SO_BUSY_POLL", SOL_SOCKET, libc::SO_BUSY_POLL, &[0]),
    ("SO_ZEROCOPY", SOL_SOCKET, libc::SO_ZEROCOPY, &[0]),
];

/// Reads, sets and reads back every option of the table on a promoted connection.
pub fn matrix(c: &Ctx) {
    let fd = c.pair();
    for (name, level, option, values) in OPTIONS {
        // These are auto-tuned or depend on the path at this moment: not comparable before they are set.
        let varies = matches!(option, libc::SO_SNDBUF | libc::SO_RCVBUF) && level == SOL_SOCKET
            || level == IPPROTO_TCP && matches!(option, libc::TCP_WINDOW_CLAMP | libc::TCP_QUICKACK | libc::TCP_MAXSEG);
        let get = |log: bool| {
            let (r, v) = sys::get_int(fd, level, option);
            if log {
                c.log(format_args!("get {name} -> {r}, {v}"));
            } else {
                c.ret(format_args!("get {name}"), r);
            }
        };
        get(!varies);
        for v in values {
            c.ret(format_args!("set {name} {v}"), sys::set_int(fd, level, option, *v));
            get(!varies || level == SOL_SOCKET);
        }
    }
    c.sync("set");
    c.send(fd, &data::pattern(1, 0, 500), 0);
    c.recv_all(fd, 500);
    c.sync("done");
    c.close(fd);
}

/// Bad levels, names, lengths and read-only options.
pub fn errors(c: &Ctx) {
    let fd = c.pair();
    let one: c_int = 1;
    let p = (&raw const one).cast();
    c.ret(
        "set short",
        call!(libc::setsockopt(fd, SOL_SOCKET, libc::SO_KEEPALIVE, p, 2)),
    );
    c.ret(
        "set tcp short",
        call!(libc::setsockopt(fd, IPPROTO_TCP, libc::TCP_NODELAY, p, 1)),
    );
    c.ret(
        "set null",
        call!(libc::setsockopt(
            fd,
            IPPROTO_TCP,
            libc::TCP_NODELAY,
            std::ptr::null(),
            4
        )),
    );
    for (level, name) in [
        (SOL_SOCKET, 9999),
        (IPPROTO_TCP, 9999),
        (9999, 1),
        (SOL_SOCKET, libc::SO_ERROR),
        (SOL_SOCKET, libc::SO_TYPE),
        (SOL_SOCKET, libc::SO_ACCEPTCONN),
        (IPPROTO_TCP, libc::TCP_INFO),
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
        (libc::IPPROTO_UDP, 1),
    ] {
        c.ret(format_args!("set {level} {name}"), sys::set_int(fd, level, name, 1));
        let (r, v) = sys::get_int(fd, level, name);
        let comparable = name != libc::TCP_INFO || level != IPPROTO_TCP;
        c.log(format_args!(
            "get {level} {name} -> {r} {}",
            if comparable { v } else { 0 }
        ));
    }
    for len in [0u32, 1, 3, 4, 100] {
        let mut b = [0u8; 100];
        let mut l = len;
        let r = call!(libc::getsockopt(
            fd,
            SOL_SOCKET,
            libc::SO_TYPE,
            b.as_mut_ptr().cast(),
            &mut l
        ));
        c.log(format_args!("get SO_TYPE in {len} -> {r}, {l} {:?}", &b[..4]));
    }
    c.sync("done");
    c.close(fd);
}

/// SO_TYPE, SO_DOMAIN, SO_PROTOCOL, SO_ACCEPTCONN, SO_LINGER, time-outs, as read back.
pub fn identity(c: &Ctx) {
    let fd = c.pair();
    for name in [libc::SO_TYPE, libc::SO_DOMAIN, libc::SO_PROTOCOL, libc::SO_ACCEPTCONN] {
        let (r, v) = sys::get_int(fd, SOL_SOCKET, name);
        c.log(format_args!("{name} -> {r} {v}"));
    }
    for name in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        for time in [None, Some(1_250_000u64), Some(0)] {
            if let Some(us) = time {
                c.ret("set", sys::set_timeout(fd, name, std::time::Duration::from_micros(us)));
            }
            let mut tv: libc::timeval = sys::zeroed();
            let mut len = size_of::<libc::timeval>() as libc::socklen_t;
            let r = call!(libc::getsockopt(fd, SOL_SOCKET, name, (&raw mut tv).cast(), &mut len));
            c.log(format_args!("{name} -> {r} {} s {} µs, {len}", tv.tv_sec, tv.tv_usec));
        }
        let bad = libc::timeval {
            tv_sec: 0,
            tv_usec: 2_000_000,
        };
        c.ret(
            "set bad",
            call!(libc::setsockopt(fd, SOL_SOCKET, name, (&raw const bad).cast(), 16)),
        );
    }
    let mut l: libc::linger = sys::zeroed();
    let mut len = 8;
    let r = call!(libc::getsockopt(
        fd,
        SOL_SOCKET,
        libc::SO_LINGER,
        (&raw mut l).cast(),
        &mut len
    ));
    c.log(format_args!("SO_LINGER -> {r} {} {}", l.l_onoff, l.l_linger));
    let mut st: libc::stat = sys::zeroed();
    c.ret("fstat", call!(libc::fstat(fd, &mut st)));
    c.log(format_args!(
        "is a socket: {}",
        st.st_mode & libc::S_IFMT == libc::S_IFSOCK
    ));
    c.sync("done");
    c.close(fd);
}

/// TCP_INFO: the state as the connection goes through its life, and a sane RTT and MSS.
pub fn tcp_info(c: &Ctx) {
    let fd = c.pair();
    let info = |when: &str| {
        let mut b = [0u8; 256];
        let mut len = 256;
        let r = call!(libc::getsockopt(
            fd,
            IPPROTO_TCP,
            libc::TCP_INFO,
            b.as_mut_ptr().cast(),
            &mut len
        ));
        let mss = u32::from_ne_bytes([b[16], b[17], b[18], b[19]]);
        let rtt = u32::from_ne_bytes([b[68], b[69], b[70], b[71]]);
        c.log(format_args!(
            "{when}: {r} length {} state {} mss {} rtt {}",
            len > 100,
            b[0],
            mss > 0,
            rtt > 0
        ));
        b[0]
    };
    info("live");
    let mut b = [9u8; 4];
    let mut len = 1;
    let r = call!(libc::getsockopt(
        fd,
        IPPROTO_TCP,
        libc::TCP_INFO,
        b.as_mut_ptr().cast(),
        &mut len
    ));
    c.log(format_args!("one byte of it: {r} {len} {b:?}"));
    c.sync("live");
    if c.is_server() {
        c.shutdown(fd, libc::SHUT_WR);
        sys::wait_tcp_state(fd, FIN_WAIT2);
        info("FIN_WAIT2");
        c.sync("half");
        c.recv_to_end(fd);
        sys::wait_tcp_state(fd, CLOSED);
        info("closed");
    } else {
        sys::wait_tcp_state(fd, CLOSE_WAIT);
        info("CLOSE_WAIT");
        c.sync("half");
        c.shutdown(fd, libc::SHUT_WR);
        sys::wait_tcp_state(fd, CLOSED);
        info("closed");
    }
    c.sync("done");
    c.close(fd);
}

/// TCP_CONGESTION and other options that are not ints.
pub fn strings(c: &Ctx) {
    let fd = c.pair();
    let get = || {
        let mut b = [0u8; 16];
        let mut len = 16;
        let r = call!(libc::getsockopt(
            fd,
            IPPROTO_TCP,
            libc::TCP_CONGESTION,
            b.as_mut_ptr().cast(),
            &mut len
        ));
        c.log(format_args!("TCP_CONGESTION -> {r} {len} {}", data::show(&b[..5])));
    };
    get();
    for name in [&b"reno"[..], b"no such"] {
        c.ret(
            "set",
            call!(libc::setsockopt(
                fd,
                IPPROTO_TCP,
                libc::TCP_CONGESTION,
                name.as_ptr().cast(),
                name.len() as u32
            )),
        );
        get();
    }
    c.send(fd, b"still here", 0);
    c.recv_all(fd, 10);
    c.sync("done");
    c.close(fd);
}

/// fcntl: status flags, descriptor flags, owner; ioctl FIONBIO, FIOASYNC off, unknown ones.
pub fn fcntl(c: &Ctx) {
    let fd = c.pair();
    let f = |what: &str, cmd: c_int, arg: c_int| c.ret(what, call!(libc::fcntl(fd, cmd, arg)));
    f("F_GETFD", libc::F_GETFD, 0);
    f("F_SETFD", libc::F_SETFD, libc::FD_CLOEXEC);
    f("F_GETFD", libc::F_GETFD, 0);
    f("F_GETFL", libc::F_GETFL, 0);
    f("F_SETFL", libc::F_SETFL, libc::O_RDWR | libc::O_NONBLOCK);
    f("F_GETFL", libc::F_GETFL, 0);
    c.recv(fd, 1, 0);
    f("F_SETFL", libc::F_SETFL, libc::O_RDWR);
    f("F_GETOWN", libc::F_GETOWN, 0);
    f("unknown", 9999, 0);
    f("F_DUPFD below 0", libc::F_DUPFD, -1);
    f("F_DUPFD too high", libc::F_DUPFD, 1 << 30);
    let mut on: c_int = 1;
    c.ret("FIONBIO", call!(libc::ioctl(fd, libc::FIONBIO, &mut on)));
    f("F_GETFL", libc::F_GETFL, 0);
    c.recv(fd, 1, 0);
    on = 0;
    c.ret("FIONBIO", call!(libc::ioctl(fd, libc::FIONBIO, &mut on)));
    f("F_GETFL", libc::F_GETFL, 0);
    c.ret("FIOCLEX", call!(libc::ioctl(fd, libc::FIOCLEX)));
    f("F_GETFD", libc::F_GETFD, 0);
    c.ret("FIONCLEX", call!(libc::ioctl(fd, libc::FIONCLEX)));
    f("F_GETFD", libc::F_GETFD, 0);
    c.ret("unknown ioctl", call!(libc::ioctl(fd, 0x1234_5678, 0)));
    c.ret("TCGETS", call!(libc::isatty(fd)));
    c.sync("done");
    c.close(fd);
}

/// Options for which the kernel reads a null pointer as 0, though it comes with a length.
pub fn null_value(c: &Ctx) {
    let fd = c.pair_at(Addr::v6, Addr::v6);
    for name in [libc::IPV6_RECVERR, libc::IPV6_RECVPKTINFO, libc::IPV6_RECVHOPLIMIT] {
        c.ret(
            format_args!("set {name} to null"),
            call!(libc::setsockopt(fd, libc::IPPROTO_IPV6, name, std::ptr::null(), 4)),
        );
    }
    c.sync("done");
    c.close(fd);
}

static SIGNALS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_: c_int) {
    SIGNALS.fetch_add(1, SeqCst);
}

/// O_ASYNC on a promoted connection: the kernel signals arriving data.
pub fn signal(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        own(c, fd);
        let flags = call!(libc::fcntl(fd, libc::F_GETFL)).ok();
        c.ret("O_ASYNC", call!(libc::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC)));
    }
    signalled(c, fd);
}

/// As [`signal`], set by FIOASYNC before the connection could be promoted.
pub fn signal_before(c: &Ctx) {
    let fd = c.cold_pair();
    if c.is_server() {
        own(c, fd);
        let on: c_int = 1;
        c.ret("FIOASYNC", call!(libc::ioctl(fd, libc::FIOASYNC, &raw const on)));
    }
    c.sync("set");
    // The time is enough for a promotion.
    for _ in 0..5 {
        c.warm_up(fd);
        sys::pause_ms(10);
    }
    signalled(c, fd);
}

fn own(c: &Ctx, fd: c_int) {
    sys::on_signal(libc::SIGIO, count, true);
    c.ret("F_SETOWN", call!(libc::fcntl(fd, libc::F_SETOWN, libc::getpid())));
}

fn signalled(c: &Ctx, fd: c_int) {
    for round in 0..3 {
        SIGNALS.store(0, SeqCst);
        c.sync("ready");
        if c.is_server() {
            let mut ms = 0;
            while SIGNALS.load(SeqCst) == 0 && ms < 3000 {
                sys::pause_ms(1);
                ms += 1;
            }
            c.log(format_args!("round {round}: signalled {}", SIGNALS.load(SeqCst) > 0));
            c.recv_all(fd, 100);
        } else {
            sys::send_all(fd, &data::pattern(round, 0, 100)).ok();
        }
        c.sync("read");
    }
    c.close(fd);
}

/// TCP_NOTSENT_LOWAT on a promoted connection: beyond the window there is room for little more.
pub fn unsent_low_water(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        sys::set_int(fd, SOL_SOCKET, libc::SO_RCVBUF, 8192).ok();
    }
    c.sync("small");
    if !c.is_server() {
        c.ret("set", sys::set_int(fd, IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 16_384));
        sys::set_nonblocking(fd, true);
        let mut taken = 0;
        let piece = [1; 4096];
        while sys::poll_one(fd, libc::POLLOUT, 300) != 0 && taken < 8_000_000 {
            taken += sys::send(fd, &piece, 0).value.max(0);
        }
        c.log(format_args!("much is taken: {}", taken > 1_000_000));
    }
    c.sync("sent");
    c.close(fd);
}
