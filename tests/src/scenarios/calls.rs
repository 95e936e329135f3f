//! Every form in which bytes can be sent and received, and their refusals.

use std::ptr;

use libc::{c_int, c_void, size_t, ssize_t};

use crate::ctx::Ctx;
use crate::sys::{Addr, Ret, iov, msghdr};
use crate::{data, sys};

const BAD: usize = 8;

/// Every sending call, in turn; the peer checks the hash of the bytes.
pub fn send_forms(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.recv_to_end(fd);
        c.close(fd);
        return;
    }
    for size in [1usize, 100, 5000] {
        let mut d = data::pattern(size as u64, 0, size);
        let p = d.as_ptr().cast::<c_void>();
        c.ret("send", call!(libc::send(fd, p, size, 0)));
        c.ret("write", call!(libc::write(fd, p, size)));
        c.ret("sendto", call!(libc::sendto(fd, p, size, 0, ptr::null(), 0)));
        let half = size / 2;
        let (a, b) = d.split_at_mut(half);
        let mut v = [iov(a), iov(&mut []), iov(b)];
        c.ret("writev", call!(libc::writev(fd, v.as_ptr(), 3)));
        c.ret("pwritev2", call!(libc::pwritev2(fd, v.as_ptr(), 3, -1, 0)));
        let m = msghdr(&mut v);
        c.ret("sendmsg", call!(libc::sendmsg(fd, &m, 0)));
        let one = libc::mmsghdr { msg_hdr: m, msg_len: 0 };
        let mut many = [one; 4];
        c.ret("sendmmsg", call!(libc::sendmmsg(fd, many.as_mut_ptr(), 4, 0)));
        let lens: Vec<_> = many.iter().map(|m| m.msg_len).collect();
        c.log(format_args!("lengths {lens:?}"));
    }
    // A destination is ignored on a connected TCP socket.
    let other = Addr::v4(9);
    c.ret(
        "sendto elsewhere",
        call!(libc::sendto(fd, b"x".as_ptr().cast(), 1, 0, other.ptr(), other.len)),
    );
    c.ret("pwrite", call!(libc::pwrite(fd, b"x".as_ptr().cast(), 1, 0)));
    c.ret("lseek", call!(libc::lseek(fd, 0, libc::SEEK_CUR)));
    c.close(fd);
}

/// Every receiving call, in turn, on one stream.
pub fn recv_forms(c: &Ctx) {
    let fd = c.pair();
    if !c.is_server() {
        sys::send_all(fd, &data::pattern(1, 0, 40_000)).ok();
        c.sync("sent");
        c.recv_to_end(fd);
        c.close(fd);
        return;
    }
    c.sync("sent");
    sys::wait_readable_bytes(fd, 40_000);
    for size in [1usize, 100, 4000] {
        let mut d = vec![0; size];
        let p = d.as_mut_ptr().cast::<c_void>();
        let r = call!(libc::recv(fd, p, size, 0));
        c.bytes("recv", r, &d);
        let r = call!(libc::read(fd, p, size));
        c.bytes("read", r, &d);
        let mut from = Addr::empty();
        let r = call!(libc::recvfrom(fd, p, size, 0, from.mut_ptr(), &mut from.len));
        c.bytes("recvfrom", r, &d);
        c.log(format_args!("address length {}", from.len));
        let r = call!(libc::recvfrom(fd, p, size, 0, ptr::null_mut(), ptr::null_mut()));
        c.bytes("recvfrom without address", r, &d);
        let half = size / 2;
        let (a, b) = d.split_at_mut(half);
        let mut v = [iov(a), iov(&mut []), iov(b)];
        let r = call!(libc::readv(fd, v.as_ptr(), 3));
        c.bytes("readv", r, &d);
        let r = call!(libc::preadv2(fd, v.as_ptr(), 3, -1, 0));
        c.bytes("preadv2", r, &d);
        let r = call!(libc::preadv2(fd, v.as_ptr(), 3, -1, libc::RWF_NOWAIT));
        c.bytes("preadv2 nowait", r, &d);
        let mut m = msghdr(&mut v);
        let mut name = Addr::empty();
        let mut control = [0u8; 64];
        m.msg_name = name.mut_ptr().cast();
        m.msg_namelen = name.len;
        m.msg_control = control.as_mut_ptr().cast();
        m.msg_controllen = control.len() as _;
        m.msg_flags = 0x55;
        let r = call!(libc::recvmsg(fd, &mut m, 0));
        c.bytes("recvmsg", r, &d);
        c.log(format_args!(
            "name {} control {} flags {:#x}",
            m.msg_namelen, m.msg_controllen, m.msg_flags
        ));
    }
    c.fionread(fd);
    c.ret("pread", call!(libc::pread(fd, [0u8; 4].as_mut_ptr().cast(), 4, 0)));
    c.close(fd);
}

/// recvmmsg: all buffers filled, some left, with a time-out, MSG_WAITFORONE.
pub fn recvmmsg(c: &Ctx) {
    let fd = c.pair();
    if !c.is_server() {
        sys::send_all(fd, &data::pattern(2, 0, 1000)).ok();
        c.sync("sent");
        c.sync("read");
        c.close(fd);
        return;
    }
    c.sync("sent");
    sys::wait_readable_bytes(fd, 1000);
    let mut bufs = vec![vec![0u8; 150]; 4];
    let mut round = |flags, vlen: u32, wait_ms: i64| {
        let mut iovs: Vec<_> = bufs.iter_mut().map(|b| iov(b)).collect();
        let mut m: Vec<libc::mmsghdr> = iovs
            .iter_mut()
            .map(|v| libc::mmsghdr {
                msg_hdr: msghdr(std::slice::from_mut(v)),
                msg_len: 0,
            })
            .collect();
        let mut limit = libc::timespec {
            tv_sec: 0,
            tv_nsec: wait_ms * 1_000_000,
        };
        let r = call!(libc::recvmmsg(
            fd,
            m.as_mut_ptr(),
            vlen,
            flags,
            if wait_ms < 0 { ptr::null_mut() } else { &mut limit }
        ));
        let lens: Vec<_> = m.iter().map(|m| m.msg_len).collect();
        c.log(format_args!("recvmmsg {flags:#x} -> {r} lengths {lens:?}"));
        for (b, len) in bufs.iter().zip(lens) {
            c.log(data::show(&b[..len as usize]));
        }
    };
    round(0, 2, -1);
    round(libc::MSG_WAITFORONE, 4, 1000);
    round(libc::MSG_WAITFORONE, 4, -1);
    round(libc::MSG_DONTWAIT, 4, -1);
    c.sync("read");
    round(0, 1, -1);
    c.close(fd);
}

/// A fortified libc symbol, found as a program compiled with _FORTIFY_SOURCE finds it.
fn symbol(name: &std::ffi::CStr) -> *mut c_void {
    // SAFETY: a NUL-terminated name, looked up in the global scope.
    let p = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    assert!(!p.is_null(), "{name:?}");
    p
}

/// The server looks send and recv up in libc by its handle, as ctypes, .NET and JNA do.
pub fn by_handle(c: &Ctx) {
    let fd = c.pair();
    // SAFETY: a C string.
    looked_up_in(c, fd, || unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_NOW) });
}

/// The server loads a second libc in a namespace of its own, and calls that libc's functions.
pub fn by_another_libc(c: &Ctx) {
    unsafe extern "C" {
        fn dlmopen(namespace: libc::c_long, path: *const libc::c_char, flags: c_int) -> *mut c_void;
    }
    const NEW: libc::c_long = -1;
    let fd = c.pair();
    // SAFETY: a C string.
    looked_up_in(c, fd, || unsafe { dlmopen(NEW, c"libc.so.6".as_ptr(), libc::RTLD_NOW) });
}

fn looked_up_in(c: &Ctx, fd: c_int, libc: impl Fn() -> *mut c_void) {
    type Send = unsafe extern "C" fn(c_int, *const c_void, size_t, c_int) -> ssize_t;
    type Recv = unsafe extern "C" fn(c_int, *mut c_void, size_t, c_int) -> ssize_t;
    let libc = if c.is_server() { libc() } else { libc::RTLD_DEFAULT };
    // SAFETY: a handle, and C strings.
    let [send, recv] = [c"send", c"recv"].map(|name| unsafe { libc::dlsym(libc, name.as_ptr()) });
    assert!(!send.is_null() && !recv.is_null());
    // SAFETY: their prototypes.
    let (send, recv) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Send>(send),
            std::mem::transmute::<*mut c_void, Recv>(recv),
        )
    };
    let mut b = [0u8; 100];
    for round in 0..3 {
        if c.is_server() {
            let r = call!(recv(fd, b.as_mut_ptr().cast(), 100, libc::MSG_WAITALL));
            c.bytes("recv by handle", r, &b);
            let sent = data::pattern(1, round, 100);
            c.ret("send by handle", call!(send(fd, sent.as_ptr().cast(), 100, 0)));
        } else {
            sys::send_all(fd, &data::pattern(2, round, 100)).ok();
            c.log(data::show(&sys::recv_exact(fd, 100)));
        }
    }
    c.sync("done");
    c.close(fd);
}

/// __recv_chk, __read_chk, __recvfrom_chk, __poll_chk, __ppoll_chk.
pub fn fortified(c: &Ctx) {
    type ReadChk = unsafe extern "C" fn(c_int, *mut c_void, size_t, size_t) -> ssize_t;
    type RecvChk = unsafe extern "C" fn(c_int, *mut c_void, size_t, size_t, c_int) -> ssize_t;
    type RecvfromChk = unsafe extern "C" fn(
        c_int,
        *mut c_void,
        size_t,
        size_t,
        c_int,
        *mut libc::sockaddr,
        *mut libc::socklen_t,
    ) -> ssize_t;
    type PollChk = unsafe extern "C" fn(*mut libc::pollfd, libc::nfds_t, c_int, size_t) -> c_int;
    type PpollChk = unsafe extern "C" fn(
        *mut libc::pollfd,
        libc::nfds_t,
        *const libc::timespec,
        *const libc::sigset_t,
        size_t,
    ) -> c_int;
    // SAFETY: these are the prototypes in glibc's debug headers (bits/socket2.h and others).
    let (read, recv, recvfrom, poll, ppoll) = unsafe {
        (
            std::mem::transmute::<*mut c_void, ReadChk>(symbol(c"__read_chk")),
            std::mem::transmute::<*mut c_void, RecvChk>(symbol(c"__recv_chk")),
            std::mem::transmute::<*mut c_void, RecvfromChk>(symbol(c"__recvfrom_chk")),
            std::mem::transmute::<*mut c_void, PollChk>(symbol(c"__poll_chk")),
            std::mem::transmute::<*mut c_void, PpollChk>(symbol(c"__ppoll_chk")),
        )
    };
    let fd = c.pair();
    if !c.is_server() {
        sys::send_all(fd, &data::pattern(2, 0, 1000)).ok();
        c.sync("sent");
        c.sync("read");
        c.close(fd);
        return;
    }
    let mut p = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let size = size_of::<libc::pollfd>();
    c.sync("sent");
    sys::wait_readable_bytes(fd, 1000);
    c.ret("__poll_chk", call!(poll(&mut p, 1, sys::SOON, size)));
    c.log(p.revents);
    let zero: libc::timespec = sys::zeroed();
    c.ret("__ppoll_chk", call!(ppoll(&mut p, 1, &zero, ptr::null(), size)));
    c.log(p.revents);
    let mut b = vec![0u8; 400];
    let to = b.as_mut_ptr().cast::<c_void>();
    let r = call!(read(fd, to, 300, 400));
    c.bytes("__read_chk", r, &b);
    let r = call!(recv(fd, to, 300, 400, 0));
    c.bytes("__recv_chk", r, &b);
    let r = call!(recvfrom(fd, to, 300, 400, 0, ptr::null_mut(), ptr::null_mut()));
    c.bytes("__recvfrom_chk", r, &b);
    let r = call!(recv(fd, to, 300, 400, 0));
    c.bytes("__recv_chk", r, &b);
    let r = call!(recv(fd, to, 300, 400, libc::MSG_DONTWAIT));
    c.bytes("__recv_chk", r, &b);
    c.sync("read");
    c.close(fd);
}

/// Operations of zero length, with and without data, and after EOF.
pub fn zero_length(c: &Ctx) {
    let fd = c.pair();
    let null = ptr::null_mut::<c_void>();
    let zero = |when: &str| {
        c.log(when);
        c.ret("send 0", call!(libc::send(fd, null, 0, 0)));
        c.ret("write 0", call!(libc::write(fd, null, 0)));
        c.ret("recv 0", call!(libc::recv(fd, null, 0, libc::MSG_DONTWAIT)));
        c.ret("writev 0", call!(libc::writev(fd, ptr::null(), 0)));
        c.ret("readv 0", call!(libc::readv(fd, ptr::null(), 0)));
        let m: libc::msghdr = sys::zeroed();
        c.ret("sendmsg 0", call!(libc::sendmsg(fd, &m, 0)));
    };
    if c.is_server() {
        zero("nothing to read");
        c.sync("empty");
        c.sync("sent");
        sys::wait_readable_bytes(fd, 3);
        zero("data to read");
        c.ret("read 0", call!(libc::read(fd, null, 0)));
        c.recv_all(fd, 3);
        c.sync("closing");
        c.recv(fd, 10, 0);
        zero("at EOF");
        c.ret("read 0", call!(libc::read(fd, null, 0)));
    } else {
        c.sync("empty");
        c.send(fd, b"abc", 0);
        c.sync("sent");
        c.shutdown(fd, libc::SHUT_WR);
        c.sync("closing");
        c.recv_to_end(fd);
    }
    c.close(fd);
}

/// Addresses that the process does not have: EFAULT, and the stream is unharmed.
pub fn bad_addresses(c: &Ctx) {
    let fd = c.pair();
    let bad = BAD as *mut c_void;
    if !c.is_server() {
        c.ret("send", call!(libc::send(fd, bad, 10, 0)));
        c.ret("write", call!(libc::write(fd, bad, 10)));
        let v = libc::iovec {
            iov_base: bad,
            iov_len: 10,
        };
        c.ret("writev", call!(libc::writev(fd, &v, 1)));
        c.ret("writev", call!(libc::writev(fd, bad.cast(), 1)));
        c.ret("sendmsg", call!(libc::sendmsg(fd, bad.cast(), 0)));
        c.send(fd, b"whole", 0);
        c.sync("sent");
        c.sync("read");
        c.close(fd);
        return;
    }
    c.sync("sent");
    sys::wait_readable_bytes(fd, 5);
    c.ret("recv", call!(libc::recv(fd, bad, 10, 0)));
    c.ret("read", call!(libc::read(fd, bad, 10)));
    c.ret("recvmsg", call!(libc::recvmsg(fd, bad.cast(), 0)));
    c.ret("readv", call!(libc::readv(fd, bad.cast(), 1)));
    c.ret("ioctl", call!(libc::ioctl(fd, libc::FIONREAD, bad)));
    c.ret("poll", call!(libc::poll(bad.cast(), 1, 0)));
    c.ret(
        "getsockopt",
        call!(libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, bad, bad.cast())),
    );
    c.ret("getpeername", call!(libc::getpeername(fd, bad.cast(), bad.cast())));
    c.recv_all(fd, 5);
    c.sync("read");
    c.close(fd);
}

/// Lengths that no memory has.
pub fn wild_lengths(c: &Ctx) {
    const NONE: usize = usize::MAX;
    const PAGE: usize = 4096;
    let fd = c.pair();
    // No page is mapped behind the buffer.
    let pages = call!(libc::mmap(
        ptr::null_mut(),
        2 * PAGE,
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        -1,
        0
    ))
    .value as usize;
    let guard = (pages + PAGE) as *mut c_void;
    call!(libc::mprotect(guard, PAGE, libc::PROT_NONE));
    let at = (pages + PAGE - 100) as *mut c_void;
    let v = libc::iovec {
        iov_base: at,
        iov_len: NONE,
    };
    let mut message: libc::msghdr = sys::zeroed();
    message.msg_iov = ptr::from_ref(&v).cast_mut();
    message.msg_iovlen = 1;
    let receive = || {
        c.ret("read", call!(libc::read(fd, at, NONE)));
        c.ret("readv", call!(libc::readv(fd, &v, 1)));
        c.ret("recvmsg", call!(libc::recvmsg(fd, &mut { message }, 0)));
    };
    // The kernel shortens the length of these two, and what is there fits.
    let receive_all = |flags| {
        for (what, call) in [
            ("recv", call!(libc::recv(fd, at, NONE, flags))),
            (
                "recvfrom",
                call!(libc::recvfrom(fd, at, NONE, flags, ptr::null_mut(), ptr::null_mut())),
            ),
        ] {
            // SAFETY: the buffer has 100 bytes.
            let buf = unsafe { std::slice::from_raw_parts(at.cast::<u8>(), 100) };
            c.bytes(format_args!("{what} flags {flags:#x}"), call, buf);
        }
    };
    if c.is_server() {
        receive();
        receive_all(libc::MSG_DONTWAIT);
        c.sync("received nothing");
        c.sync("sent");
        sys::wait_readable_bytes(fd, 5);
        receive();
        receive_all(libc::MSG_PEEK);
        receive_all(libc::MSG_DONTWAIT);
        c.sync("read");
        c.sync("sent again");
        sys::wait_readable_bytes(fd, 5);
        c.ret(
            "recvfrom",
            call!(libc::recvfrom(fd, at, NONE, 0, ptr::null_mut(), ptr::null_mut())),
        );
        c.sync("read");
        c.close(fd);
        return;
    }
    c.sync("received nothing");
    c.ret("write", call!(libc::write(fd, at, NONE)));
    c.ret("writev", call!(libc::writev(fd, &v, 1)));
    c.ret("send", call!(libc::send(fd, at, NONE, 0)));
    c.ret(
        "sendto",
        call!(libc::sendto(fd, at, NONE, libc::MSG_DONTWAIT, ptr::null(), 0)),
    );
    c.ret("sendmsg", call!(libc::sendmsg(fd, &message, 0)));
    c.send(fd, b"whole", 0);
    c.sync("sent");
    c.sync("read");
    c.send(fd, b"again", 0);
    c.sync("sent again");
    c.sync("read");
    c.close(fd);
}

/// Makes the socket calls on an fd of any kind.
fn try_all(c: &Ctx, fd: c_int) {
    let mut b = [0u8; 8];
    let p = b.as_mut_ptr().cast::<c_void>();
    let null = ptr::null_mut::<c_void>();
    c.ret("send", call!(libc::send(fd, p, 1, libc::MSG_NOSIGNAL)));
    c.ret("recv", call!(libc::recv(fd, p, 8, libc::MSG_DONTWAIT)));
    c.ret("listen", call!(libc::listen(fd, 1)));
    c.ret("accept4", sys::accept4(fd, libc::SOCK_NONBLOCK));
    c.ret("shutdown", call!(libc::shutdown(fd, libc::SHUT_WR)));
    c.ret("getsockname", Addr::local_of(fd).0);
    c.ret("getpeername", Addr::peer_of(fd).0);
    c.ret("getsockopt", sys::get_int(fd, libc::SOL_SOCKET, libc::SO_TYPE).0);
    c.ret("setsockopt", sys::set_int(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1));
    c.ret("sendmmsg", call!(libc::sendmmsg(fd, null.cast(), 0, 0)));
}

/// fds that are not open: every call fails with EBADF.
pub fn bad_fds(c: &Ctx) {
    for fd in [-1, 500, 1 << 30] {
        c.log(format_args!("fd {fd}"));
        try_all(c, fd);
        let mut b = [0u8; 8];
        c.ret("read", sys::read(fd, &mut b));
        c.ret("write", sys::write(fd, &b));
        c.ret("dup", call!(libc::dup(fd)));
        c.ret("dup2", call!(libc::dup2(fd, 600)));
        c.ret("dup3", call!(libc::dup3(fd, 600, libc::O_CLOEXEC)));
        c.ret("fcntl", call!(libc::fcntl(fd, libc::F_GETFL)));
        c.ret("dupfd", call!(libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 600)));
        let mut n = 0;
        c.ret("ioctl", call!(libc::ioctl(fd, libc::FIONREAD, &mut n)));
        c.ret("connect", sys::connect(fd, &Addr::v4(1)));
        c.close(fd);
        let mut e: libc::epoll_event = sys::zeroed();
        c.ret("epoll_wait", call!(libc::epoll_wait(fd, &mut e, 1, 0)));
        c.ret("sendfile", call!(libc::sendfile(fd, 0, ptr::null_mut(), 1)));
    }
}

/// fds that are no sockets, and an unconnected socket.
pub fn not_sockets(c: &Ctx) {
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    c.log("pipe");
    try_all(c, pipe[1]);
    let null = call!(libc::open(c"/dev/null".as_ptr(), libc::O_RDWR)).ok();
    c.log("/dev/null");
    try_all(c, null);
    let ep = call!(libc::epoll_create1(0)).ok();
    c.log("epoll");
    try_all(c, ep);
    let mut b = [0u8; 4];
    c.ret("read of an epoll", sys::read(ep, &mut b));
    c.log("a new socket");
    let s = sys::tcp(libc::AF_INET);
    let connected: Ret = Addr::peer_of(s).0;
    c.ret("getpeername", connected);
    c.ret("recv", sys::recv(s, &mut b, 0));
    c.ret("send", sys::send(s, &b, libc::MSG_NOSIGNAL));
    c.ret("read", sys::read(s, &mut b));
    c.fionread(s);
    c.so_error(s);
    c.poll(s, libc::POLLIN | libc::POLLOUT, 0);
    for (d, t, p) in [
        (libc::AF_INET, 99, 0),
        (999, libc::SOCK_STREAM, 0),
        (libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_UDP),
        (libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_TCP),
    ] {
        c.ret("socket", call!(libc::socket(d, t, p)));
    }
}

/// Vectors at and beyond the kernel's limits.
pub fn vectors(c: &Ctx) {
    let fd = c.pair();
    if c.is_server() {
        c.recv_to_end(fd);
        c.close(fd);
        return;
    }
    let mut bytes = data::pattern(9, 0, 1025);
    let v: Vec<_> = bytes.chunks_mut(1).map(iov).collect();
    c.ret("writev 1024", call!(libc::writev(fd, v.as_ptr(), 1024)));
    c.ret("writev 1025", call!(libc::writev(fd, v.as_ptr(), 1025)));
    c.ret("writev -1", call!(libc::writev(fd, v.as_ptr(), -1)));
    let mut m: libc::msghdr = sys::zeroed();
    m.msg_iov = v.as_ptr().cast_mut();
    m.msg_iovlen = 1025;
    c.ret("sendmsg 1025", call!(libc::sendmsg(fd, &m, 0)));
    m.msg_iovlen = 1024;
    c.ret("sendmsg 1024", call!(libc::sendmsg(fd, &m, 0)));
    let huge = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: usize::MAX,
    };
    c.ret("writev too long", call!(libc::writev(fd, &huge, 1)));
    c.close(fd);
}
