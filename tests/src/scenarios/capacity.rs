//! How much a connection takes at once from a sender that does not wait, while nobody reads: programs count on the megabytes that
//! kernel TCP takes (a server drops clients, or its data, that it cannot write to).

use std::os::fd::AsRawFd;

use libc::c_int;

use crate::ctx::Ctx;
use crate::data;
use crate::sys;

/// What is taken at once at least, and at most, in bytes: kernel TCP takes 2.5 to 4.3 MB by default.
const AT_LEAST: usize = 2 << 20;
const AT_MOST: usize = 16 << 20;

/// Sends pieces of `len` bytes until one is not taken; gives the bytes that were.
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

/// The reader's part: all of it, once the other has filled the connection.
fn drain(c: &Ctx, fd: c_int, seed: u64) {
    let sent = c.exchange("full", 0) as usize;
    data::verify(seed, 0, &sys::recv_exact(fd, sent));
    c.sync("drained");
}

/// In pieces of several sizes, each time when all before has been read, and once when it has been for a while.
pub fn at_once(c: &Ctx) {
    let fd = c.pair();
    for (i, len) in [100, 4096, 65_536, 1 << 20, 8 << 20]
        .into_iter()
        .enumerate()
    {
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

/// What poll and epoll say of a connection that nobody reads: that it can be written to until it is full, and an edge when
/// there is room again.
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
        let r = sys::send(
            fd,
            &all[sent..(sent + 20_000).min(AT_MOST)],
            libc::MSG_DONTWAIT,
        );
        if r.is(libc::EAGAIN) {
            break;
        }
        sent += r.count();
    }
    // The kernel no longer calls it writable before it is full.
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

/// By sendfile, and what is left behind by a close, an exit and a shutdown at that moment arrives.
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
        let sent = if i == 0 {
            send_file(*fd)
        } else {
            fill(*fd, 6, 50_000)
        };
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
