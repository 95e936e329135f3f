//! The calls by their numbers, through `syscall`: each has the effect of the function of its name. Here are those that
//! move bytes and wait; see `numbers_more`.

use std::os::fd::AsRawFd;
use std::ptr::{null, null_mut};

use libc::{POLLIN, POLLOUT, c_int, c_long};

use super::epoll::{IN, OUT};
use crate::ctx::{Ctx, epoll_names, poll_names};
use crate::sys;
use crate::sys::{Addr, Ret};

/// `number!(SYS_read, fd, buf, len)`: the call by its number.
macro_rules! number {
    ($number:ident $(, $argument:expr)*) => {
        call!(libc::syscall(libc::$number $(, $argument)*))
    };
}

pub(super) use number;

pub(super) const NONE: *const u8 = null();

pub(super) fn send(fd: c_int, bytes: &[u8]) -> Ret {
    number!(SYS_write, fd, bytes.as_ptr(), bytes.len())
}

pub(super) fn read(c: &Ctx, fd: c_int, len: usize) {
    let mut buf = vec![0; len];
    let r = number!(SYS_read, fd, buf.as_mut_ptr(), len);
    c.bytes("read", r, &buf);
}

pub(super) fn close(c: &Ctx, fd: c_int) {
    c.ret("close", number!(SYS_close, fd));
}

/// Two pieces, and messages of them.
struct Pieces {
    parts: [[u8; 3]; 2],
    iov: [libc::iovec; 2],
    many: [libc::mmsghdr; 2],
}

impl Pieces {
    /// Returns a box, because the value points into itself.
    fn new(parts: [[u8; 3]; 2]) -> Box<Self> {
        let mut this = Box::new(Self {
            parts,
            iov: sys::zeroed(),
            many: sys::zeroed(),
        });
        let [first, second] = &mut this.parts;
        this.iov = [sys::iov(first), sys::iov(second)];
        let message = sys::msghdr(&mut this.iov);
        this.many.iter_mut().for_each(|m| m.msg_hdr = message);
        this
    }

    fn lengths(&self) -> [u32; 2] {
        self.many.map(|m| m.msg_len)
    }
}

/// The bytes that [`bytes_out`] sends.
const SENT: &[u8] = b"writtenonetwoonetwosentonetwoonetwoonetwofrom the filefrom a pipe";

/// Sends by number, with every call that sends, and receives by name.
pub fn bytes_out(c: &Ctx) {
    let fd = c.pair();
    if !c.is_server() {
        c.recv_all(fd, SENT.len());
        c.recv_to_end(fd);
        c.sync("done");
        close(c, fd);
        return;
    }
    let path = c.dir.join("file");
    std::fs::write(&path, b"from the file").unwrap();
    let file = std::fs::File::open(&path).unwrap();
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    c.write(pipe[1], b"from a pipe");
    let mut of = Pieces::new([*b"one", *b"two"]);
    let iov = of.iov.as_ptr();
    let message = &raw const of.many[0].msg_hdr;
    let at = |low: c_long, high: c_long| number!(SYS_pwritev2, fd, iov, 2, low, high, 0);
    let sendto = || {
        let flags = libc::MSG_NOSIGNAL;
        number!(SYS_sendto, fd, b"sent".as_ptr(), 4usize, flags, NONE, 0)
    };
    c.ret("write", send(fd, b"written"));
    c.ret("writev", number!(SYS_writev, fd, iov, 2));
    c.ret("pwritev2", at(-1, -1));
    c.ret("pwritev2 at an offset", at(5, 0));
    c.ret("sendto", sendto());
    c.ret("sendmsg", number!(SYS_sendmsg, fd, message, 0));
    let many = of.many.as_mut_ptr();
    c.ret("sendmmsg", number!(SYS_sendmmsg, fd, many, 2, 0));
    c.log(format_args!("{:?}", of.lengths()));
    let file = file.as_raw_fd();
    c.ret("sendfile", number!(SYS_sendfile, fd, file, NONE, 100usize));
    let splice = number!(SYS_splice, pipe[0], NONE, fd, NONE, 11usize, 0);
    c.ret("splice", splice);
    c.ret("bad address", number!(SYS_write, fd, 8usize, 4usize));
    c.ret("bad descriptor", send(888, b"x"));
    c.ret("shutdown", number!(SYS_shutdown, fd, libc::SHUT_WR));
    c.ret("after the end", sendto());
    c.sync("done");
    close(c, fd);
}

/// Sends by name, and receives by number, with every call that receives.
pub fn bytes_in(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        sys::send_all(fd, SENT).ok();
        c.shutdown(fd, libc::SHUT_WR);
        c.sync("done");
        c.close(fd);
        return;
    }
    // All bytes have arrived, so that a call's result does not depend on time.
    sys::wait_readable_bytes(fd, SENT.len() as c_int);
    let mut buf = [0u8; 64];
    let at = buf.as_mut_ptr();
    let mut into = Pieces::new([*b"   "; 2]);
    read(c, fd, 7);
    c.ret("readv", number!(SYS_readv, fd, into.iov.as_ptr(), 2));
    c.log(format_args!("{:?}", into.parts));
    let iov = into.iov.as_ptr();
    let from = |low: c_long, high: c_long| number!(SYS_preadv2, fd, iov, 2, low, high, 0);
    c.ret("preadv2", from(-1, -1));
    c.ret("preadv2 at an offset", from(5, 0));
    c.log(format_args!("{:?}", into.parts));
    let mut name = Addr::empty();
    let mut len: libc::socklen_t = 100;
    let r = number!(SYS_recvfrom, fd, at, 4usize, 0, name.mut_ptr(), &mut len);
    c.bytes("recvfrom", r, &buf);
    c.log(len);
    let message = &raw mut into.many[0].msg_hdr;
    c.ret("recvmsg", number!(SYS_recvmsg, fd, message, 0));
    c.log(format_args!("{:?}", into.parts));
    let (many, no_time) = (into.many.as_mut_ptr(), NONE);
    c.ret("recvmmsg", number!(SYS_recvmmsg, fd, many, 2, 0, no_time));
    c.log(format_args!("{:?} {:?}", into.lengths(), into.parts));
    let peek = libc::MSG_PEEK;
    let r = number!(SYS_recvfrom, fd, at, 13usize, peek, NONE, NONE);
    c.bytes("peeked", r, &buf);
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    let splice = number!(SYS_splice, fd, NONE, pipe[1], NONE, 100usize, 0);
    c.ret("splice", splice);
    read(c, pipe[0], 100);
    c.ret("bad descriptor", number!(SYS_read, 888, at, 5usize));
    read(c, fd, 100);
    c.sync("done");
    close(c, fd);
}

/// Compares a time-out after the call, in which the kernel leaves the rest: gone, kept, or something in between.
fn rest(given: (i64, i64), now: (i64, i64)) -> &'static str {
    match now {
        (0, 0) => "nothing",
        same if same == given => "all",
        less if less < given => "some",
        _ => "more",
    }
}

/// poll, ppoll, select and pselect6: time-outs are written back, masks have a size.
pub fn waits(c: &Ctx) {
    let fd = c.pair();
    let mut p = libc::pollfd {
        fd,
        events: POLLIN,
        revents: 0,
    };
    let ppoll = |p: &mut libc::pollfd, time: (i64, i64), mask: *const u64, size: usize| {
        let mut t = libc::timespec {
            tv_sec: time.0,
            tv_nsec: time.1,
        };
        let r = number!(SYS_ppoll, std::ptr::from_mut(p), 1, &raw mut t, mask, size);
        let left = rest(time, (t.tv_sec, t.tv_nsec));
        c.log(format_args!("ppoll -> {r} {} left {left}", poll_names(p.revents)));
    };
    let select = |seconds: i64, six: bool, mask: *const [usize; 2]| {
        let mut set: libc::fd_set = sys::zeroed();
        // SAFETY: a live set of this function, and the number is below FD_SETSIZE.
        unsafe { libc::FD_SET(fd, &mut set) };
        let none: *mut libc::fd_set = null_mut();
        let (r, left) = if six {
            let mut t = libc::timespec {
                tv_sec: seconds,
                tv_nsec: 2_000_000,
            };
            let r = number!(SYS_pselect6, fd + 1, &raw mut set, none, none, &raw mut t, mask);
            (r, rest((seconds, 2_000_000), (t.tv_sec, t.tv_nsec)))
        } else {
            let mut t = libc::timeval {
                tv_sec: seconds,
                tv_usec: 2000,
            };
            let r = number!(SYS_select, fd + 1, &raw mut set, none, none, &raw mut t);
            (r, rest((seconds, 2000), (t.tv_sec, t.tv_usec)))
        };
        // SAFETY: as above.
        let is_set = unsafe { libc::FD_ISSET(fd, &set) };
        c.log(format_args!("select, six {six} -> {r} {is_set} left {left}"));
    };
    let blocked = 1u64 << (libc::SIGUSR1 - 1);
    let mask = &raw const blocked;
    let six = [mask as usize, 8];
    let odd = [mask as usize, 5];
    if c.is_server() {
        let r = number!(SYS_poll, &raw mut p, 1, 5);
        c.log(format_args!("poll -> {r}"));
        ppoll(&mut p, (0, 3_000_000), null(), 0);
        ppoll(&mut p, (0, 3_000_000), mask, 8);
        ppoll(&mut p, (0, 3_000_000), mask, 128);
        ppoll(&mut p, (0, 0), mask, 8);
        ppoll(&mut p, (-1, 0), mask, 8);
        select(0, false, null());
        select(0, true, null());
        select(0, true, &six);
        select(0, true, &odd);
        select(-1, true, &six);
        c.sync("idle");
        c.sync("sent");
        let r = number!(SYS_poll, &raw mut p, 1, sys::SOON);
        c.log(format_args!("poll -> {r} {}", poll_names(p.revents)));
        ppoll(&mut p, (30, 0), mask, 8);
        select(30, false, null());
        select(30, true, &six);
        p.events = POLLIN | POLLOUT;
        ppoll(&mut p, (30, 0), null(), 8);
        read(c, fd, 10);
        c.sync("read");
    } else {
        c.sync("idle");
        c.write(fd, b"there");
        c.sync("sent");
        c.sync("read");
    }
    close(c, fd);
}

/// epoll sets made, filled and waited on by number.
pub fn sets(c: &Ctx) {
    let fd = c.pair();
    let set = number!(SYS_epoll_create1, libc::EPOLL_CLOEXEC).ok();
    let other = number!(SYS_epoll_create, 5).ok();
    c.ret("no size", number!(SYS_epoll_create, 0));
    let add = |set: c_int, events: u32, operation: c_int| {
        let event = libc::epoll_event { events, u64: 9 };
        let r = number!(SYS_epoll_ctl, set, operation, fd, &raw const event);
        c.ret(format_args!("epoll_ctl {operation}"), r);
    };
    add(set, IN, libc::EPOLL_CTL_ADD);
    add(set, IN, libc::EPOLL_CTL_ADD);
    add(other, IN, libc::EPOLL_CTL_ADD);
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
    let at = events.as_mut_ptr();
    let blocked = 1u64 << (libc::SIGUSR1 - 1);
    let mask = &raw const blocked;
    let show = |what: &str, r: Ret| {
        // SAFETY: the array above, into which the kernel has just written as many.
        let got = unsafe { &*at };
        let n = r.value.max(0);
        let (events, data) = if n > 0 { (got.events, got.u64) } else { (0, 0) };
        c.log(format_args!("{what} -> {r} {} {data}", epoll_names(events)));
    };
    let all = |ms: c_int| {
        let time = libc::timespec {
            tv_sec: ms as i64 / 1000,
            tv_nsec: ms as i64 % 1000 * 1_000_000,
        };
        let time = &raw const time;
        show("wait", number!(SYS_epoll_wait, set, at, 4, ms));
        show("other", number!(SYS_epoll_wait, other, at, 4, ms));
        show("pwait", number!(SYS_epoll_pwait, set, at, 4, ms, NONE, 0usize));
        show("pwait", number!(SYS_epoll_pwait, set, at, 4, ms, mask, 8usize));
        show("odd mask", number!(SYS_epoll_pwait, set, at, 4, ms, mask, 5usize));
        show("pwait2", number!(SYS_epoll_pwait2, set, at, 4, time, mask, 8usize));
        show("odd mask", number!(SYS_epoll_pwait2, set, at, 4, time, mask, 7usize));
    };
    all(2);
    c.sync("idle");
    c.write(fd, b"to the other");
    all(sys::SOON);
    add(set, OUT, libc::EPOLL_CTL_MOD);
    show("out", number!(SYS_epoll_wait, set, at, 4, sys::SOON));
    add(set, 0, libc::EPOLL_CTL_DEL);
    show("removed", number!(SYS_epoll_wait, set, at, 4, 2));
    read(c, fd, 12);
    c.sync("done");
    close(c, set);
    close(c, other);
    close(c, fd);
}
