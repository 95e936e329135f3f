//! How many bytes a connection accepts at once from a sender that does not wait, while the peer does not read. Programs
//! count on the megabytes that kernel TCP accepts: a server drops clients that it cannot write to, or their data.

use std::os::fd::AsRawFd;

use libc::c_int;

use crate::ctx::Ctx;
use crate::{data, sys};

/// The bounds of the bytes that a connection accepts at once. Kernel TCP accepts 4.2 MB by default, and more once the
/// reader has read much.
const AT_LEAST: usize = 3_800_000;
const AT_MOST: usize = 16 << 20;

/// Sends pieces of `len` bytes until one is refused. Returns how many bytes were accepted.
fn fill(fd: c_int, seed: u64, len: usize) -> usize {
    let all = data::pattern(seed, 0, AT_MOST + len);
    let mut sent = 0;
    while sent < AT_MOST {
        let r = sys::send(fd, &all[sent..sent + len], libc::MSG_DONTWAIT);
        if r.is(libc::EAGAIN) {
            break;
        }
        sent += r.count();
    }
    sent
}

fn judge(c: &Ctx, what: &str, sent: usize) {
    let fits = (AT_LEAST..AT_MOST).contains(&sent);
    c.log(format_args!("{what}: as much as TCP takes: {fits}"));
}

/// The reader's part: reads all bytes once the other end has filled the connection.
fn drain(c: &Ctx, fd: c_int, seed: u64) {
    let sent = c.exchange("full", 0) as usize;
    data::verify(seed, 0, &sys::recv_exact(fd, sent));
    c.sync("drained");
}

/// In pieces of several sizes, each time when all earlier bytes have been read, and once a while after that.
pub fn at_once(c: &Ctx) {
    let fd = c.pair();
    for (i, len) in [100, 4096, 65_536, 1 << 20, 8 << 20].into_iter().enumerate() {
        if c.is_server() {
            let sent = fill(fd, i as u64, len);
            judge(c, &format!("pieces of {len}"), sent);
            c.exchange("full", sent as u64);
            c.sync("drained");
        } else {
            drain(c, fd, i as u64);
        }
        if i % 2 == 1 {
            sys::pause_ms(2_500);
        }
    }
    c.close(fd);
}

/// Buffer sizes that the ends set: the sender's send buffer, the reader's receive buffer. 0 sets none.
const SIZES: [(c_int, c_int); 5] = [
    (0, 0),
    (32 * 1024, 0),
    (200_000, 0),
    (64 * 1024, 64 * 1024),
    (0, 16 * 1024),
];

/// A connection accepts about as much as connections that stay with the kernel, whatever sizes the program has set. The
/// lower bound is nine tenths of the least of these, because a program counts on what it has had; the upper bound is
/// half as much again as the most. Where sizes are set, the kernel accepts another amount on each connection: it counts
/// its own overhead and pieces under way. There the lower bound is 0.7 of the least of three.
pub fn set_sizes(c: &Ctx) {
    for (seed, (send, receive)) in SIZES.into_iter().enumerate() {
        let seed = seed as u64;
        let mut fds: Vec<c_int> = (0..3).map(|_| c.cold_pair()).collect();
        for fd in &fds {
            // This option keeps the connection on TCP.
            sys::set_int(*fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 2).ok();
        }
        fds.push(c.cold_pair());
        let (name, size) = if c.is_server() {
            (libc::SO_SNDBUF, send)
        } else {
            (libc::SO_RCVBUF, receive)
        };
        for fd in fds.iter().filter(|_| size > 0) {
            sys::set_int(*fd, libc::SOL_SOCKET, name, size).ok();
        }
        c.sync("set");
        c.warm_up(fds[3]);
        sys::pause_ms(20);
        c.sync("warm");
        if c.is_server() {
            let sent: Vec<usize> = fds.iter().map(|fd| fill(*fd, seed, 4096)).collect();
            let tenths = if send > 0 { 7 } else { 9 };
            let (least, most) = (sent[..3].iter().min(), sent[..3].iter().max());
            let (least, most) = (least.unwrap() * tenths / 10, most.unwrap() * 3 / 2);
            let fits = (least..=most).contains(&sent[3]);
            c.log(format_args!("as TCP, with {send} and {receive}: {fits}"));
            if !fits {
                c.log(format_args!("TCP and here: {sent:?}"));
            }
            for sent in sent {
                c.exchange("full", sent as u64);
                c.sync("drained");
            }
        } else {
            fds.iter().for_each(|fd| drain(c, *fd, seed));
        }
        for fd in fds {
            c.close(fd);
        }
    }
}

/// A size that is set while the connection is in use becomes a bound when the connection has rested.
pub fn size_changes(c: &Ctx) {
    let fd = c.pair();
    let before = data::pattern(9, 0, 3 << 20);
    if c.is_server() {
        sys::send_all(fd, &before).ok();
    } else {
        assert!(sys::recv_exact(fd, before.len()) == before);
        // Without this the kernel's own receive buffer is large by now.
        sys::set_int(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, 64 * 1024).ok();
    }
    c.sync("large");
    sys::pause_ms(2_500);
    if c.is_server() {
        sys::set_int(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 16 * 1024).ok();
        let sent = fill(fd, 10, 4096);
        c.log(format_args!("less than 400 kB: {}", sent < 400_000));
        c.exchange("full", sent as u64);
        c.sync("drained");
    } else {
        drain(c, fd, 10);
    }
    c.close(fd);
}

/// Limits the addresses that this process may have beyond those in use, until it is dropped.
struct FewAddresses(libc::rlimit);

impl FewAddresses {
    fn begin(more: u64) -> Self {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
        let mut before: libc::rlimit = sys::zeroed();
        call!(libc::getrlimit(libc::RLIMIT_AS, &mut before)).ok();
        let limit = libc::rlimit {
            rlim_cur: pages * 4096 + more,
            ..before
        };
        call!(libc::setrlimit(libc::RLIMIT_AS, &limit)).ok();
        Self(before)
    }
}

impl Drop for FewAddresses {
    fn drop(&mut self) {
        call!(libc::setrlimit(libc::RLIMIT_AS, &self.0)).ok();
    }
}

/// Bytes sent where addresses or memory are few.
const SOME: usize = 3 << 20;

/// Cases of [`few_addresses`].
pub const FEW: u32 = 4;

/// The reader, and in the last case the sender, has few addresses left. The case says since when: 0, before the
/// connection is made; 1, when the sender begins; 2, when the reader begins; 3, the sender, when it begins.
pub fn few_addresses(c: &Ctx) {
    let all = data::pattern(13, 0, SOME);
    let mut buf = vec![0; 64 * 1024];
    let is_reader = !c.is_server();
    let few = |case: u32| (c.param == case).then(|| FewAddresses::begin(64 << 10));
    // The bytes are enough for a link, which needs a thread.
    let at_first = (is_reader && c.param == 0).then(|| FewAddresses::begin(200 << 20));
    let fd = c.pair();
    let before = is_reader.then(|| few(1)).flatten();
    let sender = (!is_reader).then(|| few(3)).flatten();
    c.sync("begin");
    if is_reader {
        sys::pause_ms(50);
        let last = few(2);
        let mut got = 0;
        while got < SOME {
            let n = sys::recv(fd, &mut buf, 0).count();
            assert!(n > 0 && all[got..got + n] == buf[..n], "at {got}");
            got += n;
        }
        drop(last);
    } else {
        sys::set_nonblocking(fd, true);
        sys::send_all(fd, &all).ok();
        sys::set_nonblocking(fd, false);
    }
    drop((at_first, before, sender));
    c.sync("end");
    c.log("all");
    c.close(fd);
}

/// The sender has no memory left in the middle of its transfer.
pub fn no_memory(c: &Ctx) {
    const BEFORE: usize = 300_000;
    let fd = c.pair();
    let all = data::pattern(14, 0, SOME);
    if c.is_server() {
        let sent = sys::send(fd, &all[..BEFORE], libc::MSG_DONTWAIT).count();
        c.log(format_args!("before: {sent}"));
        crate::filters::refuse_unseen(&[(libc::SYS_madvise, Some(libc::MADV_POPULATE_WRITE))], libc::ENOMEM);
        c.sync("begin");
        sys::set_nonblocking(fd, true);
        sys::send_all(fd, &all[sent..]).ok();
        c.shutdown(fd, libc::SHUT_WR);
    } else {
        c.sync("begin");
        let (end, got) = sys::recv_to_end(fd);
        c.log(format_args!("all: {}, then {end}", got == all));
    }
    c.sync("end");
    c.close(fd);
}

/// Both ends fill the connection before either reads.
pub fn both_ways(c: &Ctx) {
    let fd = c.pair();
    let seed = |server: bool| if server { 3 } else { 4 };
    let sent = fill(fd, seed(c.is_server()), 30_000);
    judge(c, "both ways", sent);
    let theirs = c.exchange("full", sent as u64) as usize;
    data::verify(seed(!c.is_server()), 0, &sys::recv_exact(fd, theirs));
    c.sync("drained");
    c.close(fd);
}

/// The events of poll and epoll for a connection without a reader: writable until it is full, and an edge when there
/// is room again.
pub fn announced(c: &Ctx) {
    let fd = c.pair();
    if !c.is_server() {
        drain(c, fd, 5);
        c.recv_all(fd, 4);
        c.close(fd);
        return;
    }
    let set = call!(libc::epoll_create1(0)).ok();
    let mut event = libc::epoll_event {
        events: (libc::EPOLLOUT | libc::EPOLLET) as u32,
        u64: 7,
    };
    call!(libc::epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, &mut event)).ok();
    let all = data::pattern(5, 0, AT_MOST);
    let mut sent = 0;
    while sent < AT_MOST && sys::poll_one(fd, libc::POLLOUT, 0) != 0 {
        let r = sys::send(fd, &all[sent..(sent + 20_000).min(AT_MOST)], libc::MSG_DONTWAIT);
        if r.is(libc::EAGAIN) {
            break;
        }
        sent += r.count();
    }
    // The kernel stops reporting the connection as writable before it is full.
    judge(c, "while poll says OUT", sent.max(AT_LEAST));
    c.log(format_args!("more than a megabyte: {}", sent > 1 << 20));
    while let Ok(n @ 1..) = usize::try_from(sys::send(fd, &all[sent..], libc::MSG_DONTWAIT).value) {
        sent += n;
    }
    while call!(libc::epoll_wait(set, &mut event, 1, 0)).value > 0 {}
    c.exchange("full", sent as u64);
    let edges = call!(libc::epoll_wait(set, &mut event, 1, sys::SOON));
    c.log(format_args!("room again: {edges}"));
    c.sync("drained");
    c.send(fd, b"done", 0);
    c.close(set);
    c.close(fd);
}

/// Bytes sent by sendfile, and left unread at a close, an exit and a shutdown, arrive.
pub fn left_behind(c: &Ctx) {
    let fds: Vec<c_int> = (0..3).map(|_| c.pair()).collect();
    if !c.is_server() {
        for (i, fd) in fds.iter().enumerate() {
            let sent = c.exchange("full", 0) as usize;
            if i < 2 {
                c.sync("left");
            }
            sys::pause_ms(20);
            let (end, got) = sys::recv_to_end(*fd);
            data::verify(6, 0, &got);
            c.log(format_args!("all: {}, then {end}", got.len() == sent));
            c.close(*fd);
        }
        return;
    }
    for (i, fd) in fds.iter().enumerate() {
        let sent = if i == 0 { send_file(*fd) } else { fill(*fd, 6, 50_000) };
        judge(c, "left behind", sent);
        c.exchange("full", sent as u64);
        match i {
            0 => {
                c.close(*fd);
            }
            1 => {
                c.shutdown(*fd, libc::SHUT_WR);
            }
            _ => sys::leave(0),
        }
        c.sync("left");
    }
}

fn send_file(fd: c_int) -> usize {
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, &data::pattern(6, 0, AT_MOST)).unwrap();
    sys::set_nonblocking(fd, true);
    let mut at: libc::off_t = 0;
    while (at as usize) < AT_MOST {
        let r = call!(libc::sendfile(fd, file.as_raw_fd(), &mut at, 1 << 20));
        if r.is(libc::EAGAIN) {
            break;
        }
        r.ok();
    }
    at as usize
}
