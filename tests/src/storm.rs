//! A storm of signals over a scenario: a fast timer whose handler makes every call that a handler may make
//! (signal-safety(7)) and that the library hooks. The calls use connections and files of the storm's own. They
//! interrupt the scenario anywhere, in its allocations too. Each call must have its usual effect; a fault is printed on
//! standard error, which is compared.
//!
//! The timer's signal goes to the process, so to its main thread as a rule; every other time the handler sends it on to
//! the next thread. A child has no timer, nor has an executed program.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32};

use libc::{c_int, c_void};
use nix::errno::Errno;

use crate::addr::Addr;
use crate::ctx::OWN_FDS;
use crate::sys;

/// The signal, which only this handler uses, and the timer's period.
const SIGNAL: c_int = libc::SIGPROF;
const PERIOD_NS: i64 = 700_000;
/// The first of the handler's descriptors, which lie below those of the scenario's runner.
const FIRST_FD: c_int = OWN_FDS - 20;

/// Returns whether there is a storm in this process.
pub fn blows() -> bool {
    PID.load(Relaxed) != 0
}

static TICKS: AtomicU32 = AtomicU32::new(0);
/// Whether a handler runs: only one runs at a time, because handlers share connections.
static IS_BUSY: AtomicBool = AtomicBool::new(false);
/// A connection to a process that echoes.
static ECHO: AtomicI32 = AtomicI32::new(-1);
/// Both ends of a pair of local sockets.
static PAIR: [AtomicI32; 2] = [AtomicI32::new(-1), AtomicI32::new(-1)];
static LISTENER: AtomicI32 = AtomicI32::new(-1);
static PORT: AtomicU32 = AtomicU32::new(0);
/// The handler's epoll set, with the connection in it.
static SET: AtomicI32 = AtomicI32::new(-1);
static TASKS: AtomicI32 = AtomicI32::new(-1);
static TIMER: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static PID: AtomicI32 = AtomicI32::new(0);

unsafe extern "C" {
    // The `fork` of glibc waits for the allocator, so it is not for handlers.
    fn _Fork() -> libc::pid_t;
}

/// Begins the storm, before the process has any other thread.
pub fn begin() {
    let port = echo_process();
    ECHO.store(up(sys::connected(&Addr::v4(port)), 0), Relaxed);
    let (listener, port) = sys::listener(&Addr::v4(0), 16);
    LISTENER.store(up(listener, 1), Relaxed);
    PORT.store(u32::from(port), Relaxed);
    let mut pair = [0; 2];
    call!(libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr())).ok();
    for (at, fd) in pair.into_iter().enumerate() {
        PAIR[at].store(up(fd, 2 + at as c_int), Relaxed);
    }
    let set = call!(libc::epoll_create1(0)).ok();
    let set = up(set, 4);
    let mut event = libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: 17,
    };
    call!(libc::epoll_ctl(
        set,
        libc::EPOLL_CTL_ADD,
        ECHO.load(Relaxed),
        &mut event
    ))
    .ok();
    SET.store(set, Relaxed);
    let tasks = call!(libc::open(
        c"/proc/self/task".as_ptr(),
        libc::O_RDONLY | libc::O_DIRECTORY
    ));
    TASKS.store(up(tasks.ok(), 5), Relaxed);
    PID.store(call!(libc::getpid()).ok(), Relaxed);
    sys::on_signal(SIGNAL, on_timer, true);
    let mut event: libc::sigevent = sys::zeroed();
    event.sigev_notify = libc::SIGEV_SIGNAL;
    event.sigev_signo = SIGNAL;
    let mut timer = std::ptr::null_mut();
    call!(libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer)).ok();
    TIMER.store(timer, Relaxed);
    soon();
}

/// Starts the timer for the next signal. Its time counts from now: the interrupted code makes progress even if handlers
/// take long.
fn soon() {
    let mut next: libc::itimerspec = sys::zeroed();
    next.it_value.tv_nsec = PERIOD_NS;
    // SAFETY: the timer of this process, and a live local.
    unsafe { libc::timer_settime(TIMER.load(Relaxed), 0, &raw const next, std::ptr::null_mut()) };
}

/// Moves a descriptor to one of the handler's numbers.
fn up(fd: c_int, at: c_int) -> c_int {
    let high = call!(libc::dup3(fd, FIRST_FD + at, libc::O_CLOEXEC)).ok();
    sys::close(fd).ok();
    high
}

/// Starts a process that echoes the bytes of one connection, and that is not a child of this one. Returns its port.
fn echo_process() -> u16 {
    let mut pipe = [0; 2];
    call!(libc::pipe(pipe.as_mut_ptr())).ok();
    let child = sys::fork_child(|| {
        sys::fork_child(|| {
            let (listener, port) = sys::listener(&Addr::v4(0), 1);
            sys::write(pipe[1], &port.to_ne_bytes());
            let fd = sys::accept4(listener, 0).ok();
            let mut buf = [0; 64];
            loop {
                let n = sys::recv(fd, &mut buf, 0).value;
                if n <= 0 {
                    return 0;
                }
                sys::send_all(fd, &buf[..n as usize]);
            }
        });
        0
    });
    assert_eq!(sys::wait_child(child), 0);
    let mut port = [0; 2];
    assert_eq!(sys::read(pipe[0], &mut port).value, 2);
    for fd in pipe {
        sys::close(fd).ok();
    }
    u16::from_ne_bytes(port)
}

/// Prints `what` unless `is_so`: no other failure in a handler is sure to be seen.
fn so(is_so: bool, what: &str) {
    if !is_so {
        let errno = Errno::last_raw();
        let digits = [
            b'0' + (errno / 100 % 10) as u8,
            b'0' + (errno / 10 % 10) as u8,
            b'0' + (errno % 10) as u8,
        ];
        for part in [
            b"in the handler: ".as_slice(),
            what.as_bytes(),
            b" (errno ",
            &digits,
            b")\n",
        ] {
            // SAFETY: live bytes.
            unsafe { libc::write(2, part.as_ptr().cast(), part.len()) };
        }
    }
}

extern "C" fn on_timer(_: c_int) {
    let kept = Errno::last_raw();
    if is_above_cancellation() {
        soon();
    } else if !IS_BUSY.swap(true, AcqRel) {
        let tick = TICKS.fetch_add(1, Relaxed);
        if tick % 2 == 1 {
            send_on(tick);
        }
        // SAFETY: only calls that a handler may make, on the handler's own files.
        unsafe { each_call(tick) };
        IS_BUSY.store(false, Release);
        soon();
    }
    Errno::from_raw(kept).set();
}

/// Whether this handler has interrupted glibc's handler for the signal of `pthread_cancel`. The signal is blocked then.
/// A cancellation point in this handler would wait for the end of glibc's handler for ever, without the library too.
fn is_above_cancellation() -> bool {
    const SIGCANCEL: u32 = 32;
    let mut mask = 0u64;
    // SAFETY: a mask of the kernel has 8 bytes, and nothing is changed.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, 0, &raw mut mask, 8) };
    mask & 1 << (SIGCANCEL - 1) != 0
}

/// Sends the signal to the next thread of the process.
fn send_on(tick: u32) {
    let mut entries = [0u8; 2048];
    let tasks = TASKS.load(Relaxed);
    // SAFETY: a buffer of that length, and a thread of this process or none.
    unsafe {
        libc::lseek(tasks, 0, libc::SEEK_SET);
        let len = libc::syscall(libc::SYS_getdents64, tasks, entries.as_mut_ptr(), entries.len());
        let mut chosen = 0;
        let mut seen = 0;
        let mut at = 0usize;
        while at + 19 < len.max(0) as usize {
            let size = usize::from(u16::from_ne_bytes([entries[at + 16], entries[at + 17]]));
            let name = &entries[at + 19..at + size];
            let id = name
                .iter()
                .take_while(|byte| byte.is_ascii_digit())
                .fold(0, |id: i64, byte| id * 10 + i64::from(byte - b'0'));
            if id != 0 {
                seen += 1;
                // Each thread is the last one seen in some tick.
                if (tick / 2).is_multiple_of(seen) {
                    chosen = id;
                }
            }
            at += size.max(1);
        }
        if chosen != 0 {
            libc::syscall(libc::SYS_tgkill, PID.load(Relaxed), chosen, SIGNAL);
        }
    }
}

unsafe fn each_call(tick: u32) {
    let echo = ECHO.load(Relaxed);
    // SAFETY: see the single calls.
    unsafe {
        match tick % 9 {
            0 | 1 => byte_on(echo, echo, tick / 9),
            2 => byte_on(PAIR[0].load(Relaxed), PAIR[1].load(Relaxed), tick / 9),
            3 => asks(echo),
            4 => copies(echo, tick / 9),
            5 => connection(),
            6 => many(echo),
            7 => set_of_its_own(echo),
            _ if tick % 27 == 8 => fork(),
            _ => file(),
        }
    }
}

/// Sends a byte into `to` and receives one from `from`, by each call in turn.
unsafe fn byte_on(to: c_int, from: c_int, how: u32) {
    let mut out = how as u8;
    let mut back = 0u8;
    let mut piece = libc::iovec {
        iov_base: (&raw mut out).cast(),
        iov_len: 1,
    };
    let mut message: libc::msghdr = sys::zeroed();
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    let data: *const c_void = (&raw const out).cast();
    let flags = libc::MSG_NOSIGNAL;
    // SAFETY: live bytes, one each.
    unsafe {
        let sent = match how % 5 {
            0 => libc::write(to, data, 1),
            1 => libc::send(to, data, 1, flags),
            2 => libc::sendto(to, data, 1, flags, std::ptr::null(), 0),
            3 => libc::writev(to, &raw const piece, 1),
            _ => libc::sendmsg(to, &raw const message, flags),
        };
        so(sent == 1, "sent");
        waits(from, how);
        let into: *mut c_void = (&raw mut back).cast();
        piece.iov_base = into;
        let got = match how % 6 {
            0 => libc::read(from, into, 1),
            1 => libc::recv(from, into, 1, 0),
            2 => libc::recvfrom(from, into, 1, 0, std::ptr::null_mut(), std::ptr::null_mut()),
            3 => libc::recvmsg(from, &raw mut message, 0),
            4 => libc::readv(from, &raw const piece, 1),
            _ => libc::recv(from, into, 1, libc::MSG_WAITALL),
        };
        so(got == 1, "received");
        so(back == out, "the byte that was sent");
    }
}

/// Repeats a call that the scenario's signals interrupt.
fn whatever_interrupts(mut call: impl FnMut() -> c_int) -> c_int {
    loop {
        let result = call();
        if result >= 0 || Errno::last() != Errno::EINTR {
            return result;
        }
    }
}

/// Waits until the fd is readable.
unsafe fn waits(fd: c_int, how: u32) {
    let mut entry = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let mut read: libc::fd_set = sys::zeroed();
    let null = std::ptr::null_mut();
    // SAFETY: live sets.
    let ready = whatever_interrupts(|| unsafe {
        if fd < libc::FD_SETSIZE as c_int {
            libc::FD_SET(fd, &mut read);
        }
        match how % 7 {
            1 | 2 if fd >= libc::FD_SETSIZE as c_int => 1,
            0 => libc::poll(&raw mut entry, 1, sys::SOON),
            1 => libc::select(fd + 1, &raw mut read, null, null, std::ptr::null_mut()),
            2 => {
                let null_set = std::ptr::null();
                libc::pselect(fd + 1, &raw mut read, null, null, std::ptr::null(), null_set)
            }
            3 => libc::ppoll(&raw mut entry, 1, std::ptr::null(), std::ptr::null()),
            _ => 1,
        }
    });
    so(ready == 1, "readable");
}

/// Makes the calls that only query.
unsafe fn asks(fd: c_int) {
    let mut value: c_int = 1;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    let mut address: libc::sockaddr_in = sys::zeroed();
    let mut address_len = size_of::<libc::sockaddr_in>() as libc::socklen_t;
    let at: *mut c_void = (&raw mut value).cast();
    // SAFETY: live locals of these lengths.
    unsafe {
        so(
            libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, at, &raw mut len) == 0 && value == 0,
            "no error",
        );
        so(
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, at, len) == 0,
            "an option",
        );
        so(libc::fcntl(fd, libc::F_GETFL) >= 0, "flags");
        let into = (&raw mut address).cast();
        so(libc::getpeername(fd, into, &raw mut address_len) == 0, "a peer");
        so(libc::getsockname(fd, into, &raw mut address_len) == 0, "a name");
    }
}

/// Uses the connection by other fds.
unsafe fn copies(fd: c_int, how: u32) {
    // SAFETY: the fds are the handler's own.
    unsafe {
        let copy = libc::dup(fd);
        so(copy >= 0, "a copy");
        byte_on(copy, fd, how);
        so(libc::dup2(fd, copy) == copy, "over itself");
        byte_on(fd, copy, how + 1);
        so(libc::close(copy) == 0, "closed");
        let copy = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, FIRST_FD + 8);
        so(copy >= FIRST_FD + 8, "a high copy");
        so(libc::close(copy) == 0, "closed high");
    }
}

/// Makes a connection for the moment, and ends it.
unsafe fn connection() {
    let mut byte = 1u8;
    let at: *mut c_void = (&raw mut byte).cast();
    let reset = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    let to = Addr::v4(PORT.load(Relaxed) as u16);
    // SAFETY: live locals of these lengths.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        so(libc::connect(fd, to.ptr(), to.len) == 0, "connected");
        let accepted = libc::accept(LISTENER.load(Relaxed), std::ptr::null_mut(), std::ptr::null_mut());
        so(accepted >= 0, "accepted");
        so(libc::send(fd, at, 1, libc::MSG_NOSIGNAL) == 1, "sent on it");
        so(libc::recv(accepted, at, 1, 0) == 1, "received on it");
        so(libc::shutdown(accepted, libc::SHUT_WR) == 0, "shut down");
        so(libc::recv(fd, at, 1, 0) == 0, "its end");
        let option = (&raw const reset).cast();
        let len = size_of::<libc::linger>() as libc::socklen_t;
        so(
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, option, len) == 0,
            "linger",
        );
        so(libc::close(fd) == 0, "closed it");
        so(libc::close(accepted) == 0, "closed its other end");
    }
}

/// Polls more entries than the library has memory for at hand.
unsafe fn many(fd: c_int) {
    const MANY: usize = 300;
    static mut ENTRIES: [libc::pollfd; MANY] = [libc::pollfd {
        fd: -1,
        events: libc::POLLOUT,
        revents: 0,
    }; MANY];
    let entries = &raw mut ENTRIES;
    // SAFETY: one handler at a time, by `IS_BUSY`.
    unsafe {
        for at in 0..MANY {
            (*entries)[at].fd = if at % 2 == 0 { fd } else { -1 };
        }
        so(
            libc::poll(entries.cast(), MANY as libc::nfds_t, 0) == MANY as c_int / 2,
            "half of them",
        );
    }
}

/// Uses an epoll set: glibc's epoll functions are system calls alone.
unsafe fn set_of_its_own(fd: c_int) {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    let byte = 9u8;
    let mut back = 0u8;
    let set = SET.load(Relaxed);
    // SAFETY: live locals.
    unsafe {
        so(libc::epoll_wait(set, &raw mut event, 1, 0) == 0, "nothing yet");
        so(libc::write(fd, (&raw const byte).cast(), 1) == 1, "written");
        let events = whatever_interrupts(|| libc::epoll_wait(set, &raw mut event, 1, sys::SOON));
        so(events == 1, "an event");
        so(event.u64 == 17, "its data");
        so(libc::read(fd, (&raw mut back).cast(), 1) == 1 && back == byte, "read");
    }
}

/// Forks a child that ends at once.
unsafe fn fork() {
    // SAFETY: the child only ends, and no other code waits for it by its id.
    unsafe {
        let child = _Fork();
        if child == 0 {
            libc::_exit(7);
        }
        so(child > 0, "a child");
        let mut status = 0;
        // Another thread of the scenario may wait for any child.
        let waited = libc::waitpid(child, &raw mut status, 0);
        so(
            waited == child && status == 7 << 8 || waited == -1 && Errno::last() == Errno::ECHILD,
            "its end",
        );
    }
}

/// Makes a file, which gets an fd that a connection had.
unsafe fn file() {
    // SAFETY: live locals.
    unsafe {
        let fd = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        let mut byte = 3u8;
        so(fd >= 0, "a file");
        so(libc::write(fd, (&raw const byte).cast(), 1) == 1, "written to it");
        so(libc::read(fd, (&raw mut byte).cast(), 1) == 0, "its end of file");
        so(libc::close(fd) == 0, "closed it again");
    }
}

/// Returns whether the handler has run, so that the absence of errors has a meaning.
pub fn has_blown() -> bool {
    TICKS.load(Acquire) > 0
}
