//! Thin wrappers around the libc symbols that the library interposes.
//!
//! These functions must stay plain calls of the dynamic symbols (no raw syscalls, no std::net), or the
//! library would not see them. No function here writes a transcript; see `ctx`.

use std::fmt;
use std::time::{Duration, Instant};

use libc::{c_int, c_void};
use nix::errno::Errno;

pub use crate::addr::Addr;

/// The time limit, in ms, for an event that will come: longer than a virtual machine may stand still.
pub const SOON: c_int = 30_000;

/// The result of a libc call: its value and, if that is -1, errno.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ret {
    /// The value returned.
    pub value: i64,
    /// errno, or 0 where the call did not fail.
    pub errno: i32,
}

impl Ret {
    /// Reads errno at once; to be called right after the libc call.
    pub fn of(value: i64) -> Self {
        let errno = if value == -1 { Errno::last_raw() } else { 0 };
        Self { value, errno }
    }

    /// The value as an fd or count; panics where the call failed.
    #[track_caller]
    pub fn ok(self) -> i32 {
        assert!(self.value >= 0, "call failed: {self}");
        self.value as i32
    }

    /// The value as a length; panics where the call failed.
    #[track_caller]
    pub fn count(self) -> usize {
        self.ok() as usize
    }

    /// Whether the call failed with `errno`.
    pub fn is(self, errno: i32) -> bool {
        self.value == -1 && self.errno == errno
    }

    /// Whether the call failed.
    pub fn failed(self) -> bool {
        self.value == -1
    }
}

impl fmt::Display for Ret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.value == -1 {
            write!(f, "-1 {:?}", Errno::from_raw(self.errno))
        } else {
            write!(f, "{}", self.value)
        }
    }
}

/// Makes a libc call, and returns its result with errno: `call!(libc::listen(fd, 5))`.
#[macro_export]
macro_rules! call {
    ($e:expr) => {
        $crate::sys::Ret::of({
            // SAFETY: scenarios pass live locals (or, on purpose, addresses that the kernel
            // must refuse) whose lengths are taken from the same locals.
            #[allow(unused_unsafe, clippy::unnecessary_cast)]
            let value = unsafe { $e } as i64;
            value
        })
    };
}

/// An all-zero value of a plain C struct.
pub fn zeroed<T: Copy>() -> T {
    // SAFETY: used only for C structs of integers, arrays and nullable pointers.
    unsafe { std::mem::zeroed() }
}

/// socket(), for a TCP socket of `family`; panics where it fails.
pub fn tcp(family: c_int) -> c_int {
    call!(libc::socket(family, libc::SOCK_STREAM, 0)).ok()
}

/// bind()
pub fn bind(fd: c_int, addr: &Addr) -> Ret {
    call!(libc::bind(fd, addr.ptr(), addr.len))
}

/// connect()
pub fn connect(fd: c_int, addr: &Addr) -> Ret {
    call!(libc::connect(fd, addr.ptr(), addr.len))
}

/// accept4() without an address.
pub fn accept4(fd: c_int, flags: c_int) -> Ret {
    call!(libc::accept4(fd, std::ptr::null_mut(), std::ptr::null_mut(), flags))
}

/// A listening socket on `addr` (port 0: any), and its port.
pub fn listener(addr: &Addr, backlog: c_int) -> (c_int, u16) {
    let fd = tcp(addr.family());
    set_int(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1).ok();
    bind(fd, addr).ok();
    call!(libc::listen(fd, backlog)).ok();
    (fd, Addr::local_of(fd).1.port())
}

/// A connected client socket; panics where connect fails.
pub fn connected(addr: &Addr) -> c_int {
    let fd = tcp(addr.family());
    connect(fd, addr).ok();
    fd
}

/// send()
pub fn send(fd: c_int, data: &[u8], flags: c_int) -> Ret {
    call!(libc::send(fd, data.as_ptr().cast(), data.len(), flags))
}

/// recv() into `buf`.
pub fn recv(fd: c_int, buf: &mut [u8], flags: c_int) -> Ret {
    call!(libc::recv(fd, buf.as_mut_ptr().cast(), buf.len(), flags))
}

/// write()
pub fn write(fd: c_int, data: &[u8]) -> Ret {
    call!(libc::write(fd, data.as_ptr().cast(), data.len()))
}

/// read() into `buf`.
pub fn read(fd: c_int, buf: &mut [u8]) -> Ret {
    call!(libc::read(fd, buf.as_mut_ptr().cast(), buf.len()))
}

/// close()
pub fn close(fd: c_int) -> Ret {
    call!(libc::close(fd))
}

/// setsockopt() of an int.
pub fn set_int(fd: c_int, level: c_int, name: c_int, value: c_int) -> Ret {
    call!(libc::setsockopt(
        fd,
        level,
        name,
        (&raw const value).cast(),
        size_of::<c_int>() as libc::socklen_t
    ))
}

/// getsockopt() of an int: the call's result and the value.
pub fn get_int(fd: c_int, level: c_int, name: c_int) -> (Ret, c_int) {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    let r = call!(libc::getsockopt(fd, level, name, (&raw mut value).cast(), &mut len));
    (r, value)
}

/// Sets SO_RCVTIMEO or SO_SNDTIMEO.
pub fn set_timeout(fd: c_int, name: c_int, time: Duration) -> Ret {
    let tv = libc::timeval {
        tv_sec: time.as_secs() as libc::time_t,
        tv_usec: libc::suseconds_t::from(time.subsec_micros()),
    };
    call!(libc::setsockopt(
        fd,
        libc::SOL_SOCKET,
        name,
        (&raw const tv).cast(),
        size_of::<libc::timeval>() as libc::socklen_t
    ))
}

/// Sets or clears O_NONBLOCK by fcntl.
pub fn set_nonblocking(fd: c_int, on: bool) {
    let old = call!(libc::fcntl(fd, libc::F_GETFL)).ok();
    let new = if on {
        old | libc::O_NONBLOCK
    } else {
        old & !libc::O_NONBLOCK
    };
    call!(libc::fcntl(fd, libc::F_SETFL, new)).ok();
}

/// Sends all of `data` with blocking or nonblocking calls; the first error ends it.
pub fn send_all(fd: c_int, data: &[u8]) -> Ret {
    let mut sent = 0;
    while sent < data.len() {
        let r = send(fd, &data[sent..], libc::MSG_NOSIGNAL);
        if r.is(libc::EAGAIN) {
            wait_for(fd, libc::POLLOUT);
        } else if r.failed() {
            return r;
        } else {
            sent += r.count();
        }
    }
    Ret {
        value: sent as i64,
        errno: 0,
    }
}

/// Receives until `n` bytes are there, EOF or an error. Returns the last result and the bytes.
pub fn recv_up_to(fd: c_int, n: usize) -> (Ret, Vec<u8>) {
    let mut buf = vec![0; n];
    let mut got = 0;
    let last = loop {
        if got == n {
            break Ret {
                value: n as i64,
                errno: 0,
            };
        }
        let r = recv(fd, &mut buf[got..], 0);
        if r.is(libc::EAGAIN) {
            wait_for(fd, libc::POLLIN);
        } else if r.value <= 0 {
            break r;
        } else {
            got += r.count();
        }
    };
    buf.truncate(got);
    (last, buf)
}

/// Receives exactly `n` bytes; panics where they do not come.
#[track_caller]
pub fn recv_exact(fd: c_int, n: usize) -> Vec<u8> {
    let (last, buf) = recv_up_to(fd, n);
    assert_eq!(buf.len(), n, "the stream ended early: {last}");
    buf
}

/// Receives until EOF or an error. Returns the last result and the bytes.
pub fn recv_to_end(fd: c_int) -> (Ret, Vec<u8>) {
    let mut all = Vec::new();
    let mut buf = vec![0; 64 * 1024];
    loop {
        let r = recv(fd, &mut buf, 0);
        if r.is(libc::EAGAIN) {
            wait_for(fd, libc::POLLIN);
        } else if r.value <= 0 {
            return (r, all);
        } else {
            all.extend_from_slice(&buf[..r.count()]);
        }
    }
}

/// Calls poll() on one fd, and again after a signal. Returns the events (0 on a time-out). `timeout_ms` -1 is for ever.
pub fn poll_one(fd: c_int, events: i16, timeout_ms: c_int) -> i16 {
    let mut p = libc::pollfd { fd, events, revents: 0 };
    loop {
        let ready = call!(libc::poll(&mut p, 1, timeout_ms));
        if !ready.is(libc::EINTR) {
            ready.ok();
            return p.revents;
        }
    }
}

/// Waits, at most 10 s, until poll() reports any of `events` (or an error) for `fd`.
#[track_caller]
pub fn wait_for(fd: c_int, events: i16) {
    assert!(poll_one(fd, events, SOON) != 0, "no event");
}

/// Waits until FIONREAD reports that `n` bytes can be read; panics after a while.
#[track_caller]
pub fn wait_readable_bytes(fd: c_int, n: c_int) {
    let end = Instant::now() + Duration::from_millis(SOON as u64);
    while readable_bytes(fd) < n {
        assert!(Instant::now() < end, "fewer than {n} bytes");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// FIONREAD
pub fn readable_bytes(fd: c_int) -> c_int {
    let mut n: c_int = 0;
    call!(libc::ioctl(fd, libc::FIONREAD, &mut n)).ok();
    n
}

/// TCP_INFO's FIN_WAIT2.
pub const FIN_WAIT2: u8 = 5;
/// TCP_INFO's CLOSE.
pub const CLOSED: u8 = 7;
/// TCP_INFO's CLOSE_WAIT.
pub const CLOSE_WAIT: u8 = 8;

/// Waits until TCP_INFO gives `state`; panics after a while.
#[track_caller]
pub fn wait_tcp_state(fd: c_int, state: u8) {
    let end = Instant::now() + Duration::from_millis(SOON as u64);
    loop {
        let mut info = [0u8; 8];
        let mut len = 8;
        call!(libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &mut len
        ))
        .ok();
        if info[0] == state {
            return;
        }
        assert!(Instant::now() < end, "TCP state {}", info[0]);
        pause_ms(1);
    }
}

/// Sleeps.
pub fn pause_ms(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// The kernel's id of this thread.
pub fn thread_id() -> i32 {
    call!(libc::gettid()).ok()
}

/// Waits until thread `id` of this process has gone to sleep in a call that it is about to make.
pub fn wait_asleep(id: i32) {
    // The thread may sleep for a moment before it gets there.
    pause_ms(40);
    let end = Instant::now() + Duration::from_millis(SOON as u64);
    while !is_asleep(id) {
        assert!(Instant::now() < end, "thread {id} does not sleep");
        pause_ms(5);
    }
}

/// Whether thread `id` of this process sleeps at this moment, or has ended.
pub fn is_asleep(id: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/self/task/{id}/stat")) else {
        return true;
    };
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    state == Some('S')
}

/// Returns whether thread `id` of this process sleeps on a futex that no other process wakes (futex(2),
/// FUTEX_WAIT_PRIVATE), as locks do. False if the kernel does not tell.
pub fn is_in_lock(id: i32) -> bool {
    const WAITS_PRIVATE: &str = "0x80";
    let call = std::fs::read_to_string(format!("/proc/self/task/{id}/syscall")).unwrap_or_default();
    let mut words = call.split(' ');
    words.next() == Some(libc::SYS_futex.to_string().as_str()) && words.nth(1) == Some(WAITS_PRIVATE)
}

/// An iovec over `buf`.
pub fn iov(buf: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: buf.as_mut_ptr().cast::<c_void>(),
        iov_len: buf.len(),
    }
}

/// A msghdr over `iovs`, without address and control.
pub fn msghdr(iovs: &mut [libc::iovec]) -> libc::msghdr {
    let mut m: libc::msghdr = zeroed();
    m.msg_iov = iovs.as_mut_ptr();
    m.msg_iovlen = iovs.len() as _;
    m
}

/// Installs `handler` for `signal`, with or without SA_RESTART.
pub fn on_signal(signal: c_int, handler: extern "C" fn(c_int), restart: bool) {
    let mut action: libc::sigaction = zeroed();
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = if restart { libc::SA_RESTART } else { 0 };
    call!(libc::sigaction(signal, &action, std::ptr::null_mut())).ok();
}

/// waitpid() of one child: its exit code, or minus the signal that ended it.
pub fn wait_child(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    loop {
        let r = call!(libc::waitpid(pid, &mut status, 0));
        if !r.is(libc::EINTR) {
            r.ok();
            break;
        }
    }
    if libc::WIFEXITED(status) {
        libc::WEXITSTATUS(status)
    } else {
        -libc::WTERMSIG(status)
    }
}

/// fork(), running `child` in the child, which then leaves by _exit(its result).
pub fn fork_child(child: impl FnOnce() -> i32) -> libc::pid_t {
    let pid = call!(libc::fork()).ok();
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(101);
        leave_at_once(code);
    }
    pid
}

/// _exit()
pub fn leave_at_once(code: c_int) -> ! {
    // SAFETY: _exit has no preconditions.
    unsafe { libc::_exit(code) }
}

/// exit()
pub fn leave(code: c_int) -> ! {
    // SAFETY: no other thread runs exit handlers' data; scenarios call it from their only one.
    unsafe { libc::exit(code) }
}
