//! MSG_ZEROCOPY on a connection that was promoted: the first such send takes it back to TCP for good, before the send
//! reaches the kernel. So the kernel numbers all of them, and the error queue and readiness are as without the library.

use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;

use libc::{MSG_DONTWAIT, MSG_ERRQUEUE, MSG_ZEROCOPY, SOL_SOCKET, c_int};

use super::epoll;
use super::epoll::{ET, IN, ONESHOT, OUT, log_wait};
use super::told::until_acknowledged;
use crate::ctx::Ctx;
use crate::sys::{Addr, Ret};
use crate::{data, sys};

/// Runs `send` at the client. As a rule the server reads all bytes until EOF.
fn with_sender(c: &Ctx, send: impl FnOnce(c_int)) {
    let fd = c.pair();
    play(c, fd, send);
}

fn play(c: &Ctx, fd: c_int, send: impl FnOnce(c_int)) {
    if c.is_server() {
        c.recv_to_end(fd);
    } else {
        send(fd);
        is_on_tcp(fd);
    }
    c.close(fd);
}

/// struct rdmasock_info of include/rdmasock.h, which is 256 bytes long.
#[repr(C, align(8))]
struct Info([u32; 64]);

/// Looks up a function of the library; `None` without it.
fn function(name: &std::ffi::CStr) -> Option<*mut libc::c_void> {
    // SAFETY: a NUL-terminated name, looked up in the global scope.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Returns the paths of sends and receives; `None` without the library.
fn ways(fd: c_int) -> Option<[u32; 2]> {
    type Function = unsafe extern "C" fn(c_int, *mut Info) -> c_int;
    // SAFETY: the type that the header gives it.
    let ask: Function = unsafe { std::mem::transmute(function(c"rdmasock_info")?) };
    let mut info = Info([0; 64]);
    info.0[0] = size_of::<Info>() as u32;
    call!(ask(fd, &mut info)).ok();
    Some([info.0[1], info.0[2]])
}

/// Asserts that sends use TCP.
pub fn is_on_tcp(fd: c_int) {
    assert_eq!(ways(fd).map_or(0, |[sends, _]| sends), 0, "sends go by a link");
}

/// Takes the connection back to TCP for good, if the library has promoted it. Waits until it is there.
pub fn prefer_tcp(fd: c_int) {
    type Function = unsafe extern "C" fn(c_int, c_int) -> c_int;
    let Some(found) = function(c"rdmasock_prefer") else {
        return;
    };
    // SAFETY: as above.
    let prefer: Function = unsafe { std::mem::transmute(found) };
    call!(prefer(fd, 0)).ok();
    while ways(fd).is_none_or(|[sends, _]| sends != 0) {
        sys::pause_ms(1);
    }
}

/// Waits until both directions are on TCP, and the kernel reports on the socket. No bytes may be unread.
fn until_returned(fd: c_int) {
    while ways(fd).is_some_and(|ways| ways != [0, 0]) {
        // This poll finds the peer's mark on the link.
        sys::poll_one(fd, libc::POLLIN, 0);
        sys::pause_ms(1);
    }
    sys::pause_ms(100);
}

pub fn turn(fd: c_int, on: c_int) -> Ret {
    sys::set_int(fd, SOL_SOCKET, libc::SO_ZEROCOPY, on)
}

/// A message of the error queue, with control data of up to `room` bytes.
pub struct Notice {
    pub r: Ret,
    pub flags: c_int,
    pub used: usize,
    control: Vec<u64>,
}

pub const ROOM: usize = 256;

pub fn read_notice(fd: c_int, room: usize, flags: c_int) -> Notice {
    let mut m: libc::msghdr = sys::zeroed();
    let mut control = vec![0x5555_5555_5555_5555u64; ROOM / 8];
    let mut byte = [0u8; 8];
    let mut v = [sys::iov(&mut byte)];
    (m.msg_iov, m.msg_iovlen) = (v.as_mut_ptr(), 1);
    (m.msg_control, m.msg_controllen) = (control.as_mut_ptr().cast(), room);
    let r = call!(libc::recvmsg(fd, &mut m, MSG_ERRQUEUE | flags));
    Notice {
        r,
        flags: m.msg_flags,
        used: m.msg_controllen,
        control,
    }
}

impl Notice {
    /// Returns the range of sends that the message reports.
    pub fn range(&self) -> Option<(u32, u32)> {
        let words = self.words();
        let is_whole = self.r.value == 0 && self.used >= 32 && self.flags & libc::MSG_CTRUNC == 0;
        // The error begins behind the header, and has its numbers in its third and fifth words.
        is_whole.then(|| (words[6], words[7]))
    }

    pub fn words(&self) -> Vec<u32> {
        let halves = |w: &u64| [*w as u32, (*w >> 32) as u32];
        self.control.iter().flat_map(halves).collect()
    }

    pub fn log(&self, c: &Ctx) {
        if self.r.failed() {
            c.log(format_args!("no notice: {}", self.r));
            return;
        }
        let words: Vec<_> = self.words()[..(self.used + 8).div_ceil(4)].to_vec();
        c.log(format_args!(
            "notice -> {} flags {:#x} control {} {words:x?}",
            self.r, self.flags, self.used
        ));
    }
}

/// Logs the next message, once there is one.
pub fn notice(c: &Ctx, fd: c_int) {
    let events = sys::poll_one(fd, 0, sys::SOON);
    c.log(format_args!("poll nothing -> {events:#x}"));
    read_notice(fd, ROOM, 0).log(c);
}

/// Logs a poll and a read of the error queue, which should be empty.
pub fn nothing(c: &Ctx, fd: c_int) {
    c.poll(fd, 0, 0);
    read_notice(fd, ROOM, 0).log(c);
}

/// Waits until the completions of all sends are in the queue, and have been merged.
pub fn until_complete(fd: c_int) {
    until_acknowledged(fd);
    sys::pause_ms(5);
}

/// Reads until all of `ids` are reported, and panics unless each is reported once. Logs them.
pub fn collect(c: &Ctx, fd: c_int, ids: std::ops::Range<u32>) {
    let (mut seen, mut ranges) = (Vec::new(), Vec::new());
    while seen.len() < ids.len() {
        assert!(sys::poll_one(fd, 0, sys::SOON) != 0, "{ids:?}, but {ranges:?}");
        let notice = read_notice(fd, ROOM, 0);
        if notice.r.is(libc::EAGAIN) {
            continue;
        }
        let range = notice.range().unwrap_or_else(|| panic!("{}", notice.r));
        seen.extend(range.0..=range.1);
        ranges.push(range);
    }
    seen.sort_unstable();
    assert!(seen.iter().copied().eq(ids.clone()), "{ids:?}, but {ranges:?}");
    c.log(format_args!("told of {ids:?}"));
}

/// Completions of sends, merged where they follow each other. Empty sends, failed sends, and sends without
/// SO_ZEROCOPY have none.
pub fn completions(c: &Ctx) {
    with_sender(c, |fd| {
        let option = || c.log(sys::get_int(fd, SOL_SOCKET, libc::SO_ZEROCOPY).1);
        option();
        c.send(fd, b"not asked for", MSG_ZEROCOPY);
        until_complete(fd);
        nothing(c, fd);
        for value in [2, -1, 1] {
            c.ret(format_args!("SO_ZEROCOPY {value}"), turn(fd, value));
            option();
        }
        nothing(c, fd);
        c.send(fd, b"first", MSG_ZEROCOPY);
        notice(c, fd);
        nothing(c, fd);
        c.send(fd, b"", MSG_ZEROCOPY);
        nothing(c, fd);
        let bytes = data::pattern(1, 0, 100_000);
        for n in [1, 5000, 100_000] {
            c.send(fd, &bytes[..n], MSG_ZEROCOPY);
        }
        c.send(fd, b"without", 0);
        c.ret("bad", call!(libc::send(-1, b"x".as_ptr().cast(), 1, MSG_ZEROCOPY)));
        c.send(fd, b"last", MSG_ZEROCOPY);
        until_complete(fd);
        notice(c, fd);
        nothing(c, fd);
        // Without the option there is no number; unread messages stay.
        c.send(fd, b"unread", MSG_ZEROCOPY);
        until_complete(fd);
        turn(fd, 0).ok();
        c.send(fd, b"off", MSG_ZEROCOPY);
        turn(fd, 1).ok();
        c.send(fd, b"on again", MSG_ZEROCOPY);
        until_complete(fd);
        notice(c, fd);
        nothing(c, fd);
    });
}

/// Control buffers that are too small, and calls that take no control data.
pub fn control(c: &Ctx) {
    with_sender(c, |fd| control_of(c, fd));
}

fn control_of(c: &Ctx, fd: c_int) {
    turn(fd, 1).ok();
    let sent = || {
        sys::send(fd, b"x", MSG_ZEROCOPY).ok();
        until_complete(fd);
    };
    for room in [0, 10, 16, 20, 32, 47, 48, 50, 56, 60, 64, 100] {
        sent();
        let notice = read_notice(fd, room, 0);
        notice.log(c);
    }
    for flags in [libc::MSG_PEEK, libc::MSG_CMSG_CLOEXEC, MSG_DONTWAIT, libc::MSG_TRUNC] {
        sent();
        read_notice(fd, ROOM, flags).log(c);
        nothing(c, fd);
    }
    sent();
    c.recv(fd, 10, MSG_ERRQUEUE);
    c.recv(fd, 10, MSG_ERRQUEUE);
    sent();
    let (mut from, mut len): (libc::sockaddr_storage, _) = (sys::zeroed(), 77);
    from.ss_family = 33;
    let mut byte = [0u8; 4];
    let r = call!(libc::recvfrom(
        fd,
        byte.as_mut_ptr().cast(),
        4,
        MSG_ERRQUEUE,
        (&raw mut from).cast(),
        &mut len
    ));
    c.log(format_args!("recvfrom -> {r} {} {len}", from.ss_family));
    sent();
    let mut m: libc::msghdr = sys::zeroed();
    (m.msg_name, m.msg_namelen) = ((&raw mut from).cast(), 77);
    let r = call!(libc::recvmsg(fd, &mut m, MSG_ERRQUEUE));
    c.log(format_args!("named -> {r} {} {:#x}", m.msg_namelen, m.msg_flags));
    (m.msg_name, m.msg_namelen) = (std::ptr::null_mut(), 77);
    sent();
    let r = call!(libc::recvmsg(fd, &mut m, MSG_ERRQUEUE));
    c.log(format_args!("nameless -> {r} {} {:#x}", m.msg_namelen, m.msg_flags));
    c.ret("null", call!(libc::recvmsg(fd, std::ptr::null_mut(), MSG_ERRQUEUE)));
    nothing(c, fd);
}

/// IPV6_RECVERR in place of IP_RECVERR.
pub fn ipv6(c: &Ctx) {
    let fd = c.pair_at(Addr::v6, Addr::v6);
    play(c, fd, |fd| control_of(c, fd));
}

/// As [`ipv6`], for an IPv6 socket whose connection is IPv4.
pub fn mapped(c: &Ctx) {
    let fd = c.pair_at(Addr::v4, Addr::mapped);
    play(c, fd, |fd| control_of(c, fd));
}

/// Each message of recvmmsg holds one notice, as long as there are some.
pub fn recvmmsg(c: &Ctx) {
    with_sender(c, |fd| {
        turn(fd, 1).ok();
        for flags in [0, libc::MSG_WAITFORONE, MSG_DONTWAIT] {
            let mut m: [libc::mmsghdr; 3] = sys::zeroed();
            let mut control = [[0u64; 8]; 3];
            for (m, control) in m.iter_mut().zip(&mut control) {
                (m.msg_hdr.msg_control, m.msg_hdr.msg_controllen) = (control.as_mut_ptr().cast(), 64);
                m.msg_len = 9;
            }
            sys::send(fd, b"x", MSG_ZEROCOPY).ok();
            until_complete(fd);
            let how = MSG_ERRQUEUE | flags;
            let r = call!(libc::recvmmsg(fd, m.as_mut_ptr(), 3, how, std::ptr::null_mut()));
            c.log(format_args!(
                "{r} {:?} {control:x?}",
                m.map(|m| (m.msg_len, m.msg_hdr.msg_flags))
            ));
        }
        let mut none: [libc::mmsghdr; 1] = sys::zeroed();
        let r = call!(libc::recvmmsg(
            fd,
            none.as_mut_ptr(),
            1,
            MSG_ERRQUEUE,
            std::ptr::null_mut()
        ));
        c.log(r);
    });
}

/// poll, select and epoll report an error as long as the queue is not empty, and an edge for each completion.
pub fn readiness(c: &Ctx) {
    with_sender(c, |fd| {
        turn(fd, 1).ok();
        // One edge more may be reported when the kernel gets the socket back.
        sys::send(fd, b"back to TCP", MSG_ZEROCOPY).ok();
        collect(c, fd, 0..1);
        until_returned(fd);
        let sets = [0, IN, IN | OUT, ET, IN | OUT | ET, ONESHOT].map(|events| {
            let set = epoll::create();
            epoll::ctl(set, libc::EPOLL_CTL_ADD, fd, events, 1).ok();
            set
        });
        let look = |when: &str| {
            c.log(when);
            for events in [0, libc::POLLIN, libc::POLLOUT, libc::POLLPRI, libc::POLLERR] {
                c.poll(fd, events, 0);
            }
            c.log(format_args!("select {:?}", select(fd)));
            for set in sets {
                log_wait(c, set, 0);
            }
            c.so_error(fd);
            c.recv(fd, 10, MSG_DONTWAIT);
        };
        look("at rest");
        for n in 0..3 {
            sys::send(fd, b"x", MSG_ZEROCOPY).ok();
            until_complete(fd);
            look(&format!("completion {n}"));
            look("again");
        }
        epoll::ctl(sets[5], libc::EPOLL_CTL_MOD, fd, ONESHOT, 2).ok();
        look("armed again");
        notice(c, fd);
        epoll::ctl(sets[5], libc::EPOLL_CTL_MOD, fd, ONESHOT, 3).ok();
        look("read");
        nothing(c, fd);
        let late = epoll::create();
        sys::send(fd, b"x", MSG_ZEROCOPY).ok();
        until_complete(fd);
        epoll::ctl(late, libc::EPOLL_CTL_ADD, fd, ET, 4).ok();
        log_wait(c, late, 0);
        log_wait(c, late, 0);
        notice(c, fd);
        look("read again");
    });
}

/// Returns whether the fd is readable, writable, exceptional.
fn select(fd: c_int) -> (Ret, [bool; 3]) {
    let mut sets: [libc::fd_set; 3] = sys::zeroed();
    let mut now: libc::timeval = sys::zeroed();
    for set in &mut sets {
        // SAFETY: the number is below FD_SETSIZE.
        unsafe { libc::FD_SET(fd, set) };
    }
    let [r, w, e] = &mut sets;
    let result = call!(libc::select(fd + 1, r, w, e, &mut now));
    // SAFETY: as above.
    (result, sets.map(|set| unsafe { libc::FD_ISSET(fd, &set) }))
}

/// A thread that sleeps for errors alone is woken by another thread's send: in poll, in epoll_wait, and in select.
pub fn woken(c: &Ctx) {
    with_sender(c, |fd| {
        turn(fd, 1).ok();
        let set = epoll::create();
        epoll::ctl(set, libc::EPOLL_CTL_ADD, fd, 0, 1).ok();
        for n in 0..30 {
            let id = AtomicI32::new(0);
            thread::scope(|s| {
                s.spawn(|| {
                    id.store(sys::thread_id(), SeqCst);
                    match n % 3 {
                        0 => c.log(sys::poll_one(fd, 0, sys::SOON)),
                        1 => drop(log_wait(c, set, sys::SOON)),
                        _ => {
                            let mut read: libc::fd_set = sys::zeroed();
                            // SAFETY: the number is below FD_SETSIZE.
                            unsafe { libc::FD_SET(fd, &mut read) };
                            let (none, ever) = (std::ptr::null_mut(), std::ptr::null_mut());
                            c.ret("select", call!(libc::select(fd + 1, &mut read, none, none, ever)));
                        }
                    }
                });
                while id.load(SeqCst) == 0 {
                    sys::pause_ms(1);
                }
                sys::wait_asleep(id.load(SeqCst));
                sys::send(fd, b"wake", MSG_ZEROCOPY).ok();
            });
            notice(c, fd);
        }
    });
}

/// Each call has one number, in all its forms, even if only some of its bytes are accepted.
pub fn forms(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.recv_all(fd, 8 + 10 + 9 + 3 + 1_000_000);
        c.sync("full");
        let all = c.exchange("sent", 0);
        // The amount of room is another subject (`capacity`).
        sys::recv_exact(fd, all as usize);
        c.recv_to_end(fd);
        c.close(fd);
        return;
    }
    turn(fd, 1).ok();
    let (mut a, mut b) = (*b"abcd", *b"efgh");
    let mut v = [sys::iov(&mut a), sys::iov(&mut b)];
    c.ret("sendmsg", call!(libc::sendmsg(fd, &sys::msghdr(&mut v), MSG_ZEROCOPY)));
    let mut pieces = [*b"01234", *b"56789"];
    let mut v = pieces.each_mut().map(|piece| [sys::iov(piece)]);
    let mut m = v.each_mut().map(|v| libc::mmsghdr {
        msg_hdr: sys::msghdr(v),
        msg_len: 0,
    });
    c.ret("sendmmsg", call!(libc::sendmmsg(fd, m.as_mut_ptr(), 2, MSG_ZEROCOPY)));
    let no_one = std::ptr::null();
    c.ret(
        "sendto",
        call!(libc::sendto(
            fd,
            b"addressed".as_ptr().cast(),
            9,
            MSG_ZEROCOPY,
            no_one,
            0
        )),
    );
    for more in [libc::MSG_MORE, libc::MSG_MORE, 0] {
        c.send(fd, b"m", MSG_ZEROCOPY | more);
    }
    // This send waits for its reader, in parts.
    let bytes = data::pattern(3, 0, 1_000_000);
    c.send(fd, &bytes, MSG_ZEROCOPY);
    collect(c, fd, 0..8);
    c.sync("full");
    let (mut sent, mut calls) = (0, 8);
    loop {
        let r = sys::send(fd, &bytes[..300_000], MSG_ZEROCOPY | MSG_DONTWAIT);
        if r.failed() {
            c.ret("full", r);
            break;
        }
        sent += r.count();
        calls += 1;
    }
    assert!(calls > 8);
    c.exchange("sent", sent as u64);
    let (mut told, mut next) = (0, 8);
    while told < calls - 8 {
        sys::wait_for(fd, 0);
        if let Some((first, last)) = read_notice(fd, ROOM, 0).range() {
            assert_eq!(first, next);
            (told, next) = (told + last - first + 1, last + 1);
        }
    }
    c.log(read_notice(fd, ROOM, 0).r);
    is_on_tcp(fd);
    c.close(fd);
}

/// Through which fd bytes are sent, read or checked makes no difference; an end with the queue unread is as any.
pub fn dup(c: &Ctx) {
    with_sender(c, |fd| {
        let other = call!(libc::dup(fd)).ok();
        turn(other, 1).ok();
        sys::send(fd, b"one", MSG_ZEROCOPY).ok();
        until_complete(fd);
        sys::send(other, b"two", MSG_ZEROCOPY).ok();
        until_complete(fd);
        notice(c, other);
        nothing(c, fd);
        sys::send(other, b"three", MSG_ZEROCOPY).ok();
        sys::close(other).ok();
        until_complete(fd);
        c.poll(fd, 0, sys::SOON);
    });
}

pub static SEVENS: [u8; 100] = [7; 100];

/// Eight threads send, one reads the completions: each send is reported once.
pub fn threads(c: &Ctx) {
    with_sender(c, |fd| {
        turn(fd, 1).ok();
        thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    for n in 0..100 {
                        sys::send(fd, &SEVENS[..n / 2 + 1], MSG_ZEROCOPY).ok();
                    }
                });
            }
            collect(c, fd, 0..800);
        });
        nothing(c, fd);
    });
}

/// Both ends send with MSG_ZEROCOPY. Each byte has the value of its send, though the memory is used again.
pub fn both_ways(c: &Ctx) {
    let fd = c.pair();
    turn(fd, 1).ok();
    let mut buffer = vec![0; 50_000];
    for round in 0..40u64 {
        let mine = data::pattern(c.side as u64, round, buffer.len());
        buffer.copy_from_slice(&mine);
        let r = sys::send(fd, &buffer, MSG_ZEROCOPY);
        assert_eq!(r.count(), buffer.len());
        collect(c, fd, round as u32..round as u32 + 1);
        buffer.fill(0xee);
        let theirs = data::pattern(1 - c.side as u64, round, buffer.len());
        assert!(sys::recv_exact(fd, theirs.len()) == theirs, "round {round}");
    }
    is_on_tcp(fd);
    c.sync("done");
    c.close(fd);
}
