//! The calls that give the program a new fd: the lowest that is free, even if the library opens descriptors meanwhile.
//! This file has what all of them do for that, and the calls that are hooked for nothing else.
//!
//! A descriptor of the library has a low fd for some microseconds, until it is moved
//! (`core/src/os/privatefd/transit.rs`). A call of the program does not wait for that, since it may itself block with
//! an fd in hand (accept, the open of a FIFO). It checks before and after for such descriptors, which is two loads. If
//! there were some in between, the new fd is moved down to a lower one that is free by now. If the call has found no
//! free fd, it is made again.
//!
//! Not here: fds that libc makes for itself (fopen, opendir, getaddrinfo), and fds that come by SCM_RIGHTS.

use std::os::fd::{BorrowedFd, IntoRawFd};

use libc::{c_char, c_int, c_uint, sigset_t};
use rdmasock_core::os::kernel;
use rdmasock_core::os::privatefd::{Look, Settled};
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_getfd};

use crate::hooks::simple::hooks;
use crate::sys::real::{
    CreatFn, EventfdFn, InotifyFn, InotifyInitFn, MemfdFn, Open2Fn, OpenFn, Openat2Fn, OpenatFn, Pipe2Fn, PipeFn,
    SignalfdFn, SocketpairFn, TimerfdFn,
};
use crate::sys::{errno, vfork};

/// How often a call that finds no free fd is made again, if descriptors of the library were being moved each time.
const TRIES: u32 = 100;

/// Returns what `call` returns: a new fd, or -1 with errno set. The fd is the lowest that is free.
#[inline]
pub fn lowest(call: impl FnMut() -> c_int) -> c_int {
    lowest_from(0, call)
}

/// Returns what `call` returns, as [`lowest`] does. The fd is the lowest that is free from `least` on.
#[inline]
pub fn lowest_from(least: c_int, mut call: impl FnMut() -> c_int) -> c_int {
    let look = Look::now();
    let fd = call();
    if look.is_disturbed() {
        put_right(fd, least, call)
    } else {
        fd
    }
}

// In Rust's own ABI, since the call may be cancelled.
#[cold]
#[inline(never)]
fn put_right(mut fd: c_int, least: c_int, mut call: impl FnMut() -> c_int) -> c_int {
    // A child of vfork has descriptors of its own.
    if vfork::is_child() {
        return fd;
    }
    for _ in 0..TRIES {
        if fd >= 0 {
            return moved_down(fd, least);
        }
        if errno::get() != libc::EMFILE {
            return fd;
        }
        drop(Settled::begin());
        let look = Look::now();
        fd = call();
        if !look.is_disturbed() {
            return fd;
        }
    }
    fd
}

/// Moves the file that has just got `fd` to the lowest free fd from `least` on, and returns its fd. The file stays at
/// `fd` if that is lower, or if it cannot be moved.
extern "C" fn moved_down(fd: c_int, least: c_int) -> c_int {
    let _settled = Settled::begin();
    // SAFETY: the fd is open, and the program does not know of it yet.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    if is_locked(file) {
        return fd;
    }
    let Ok(flags) = fcntl_getfd(file) else {
        return fd;
    };
    let copy = if flags.contains(FdFlags::CLOEXEC) {
        fcntl_dupfd_cloexec(file, least).map(IntoRawFd::into_raw_fd)
    } else {
        duplicate(fd, least)
    };
    let Ok(copy) = copy else {
        return fd;
    };
    // SAFETY: the higher fd of the two is open, and the program will not get to know it.
    unsafe { rustix::io::close(fd.max(copy)) };
    fd.min(copy)
}

/// F_DUPFD: rustix has only F_DUPFD_CLOEXEC.
fn duplicate(fd: c_int, least: c_int) -> Result<c_int, Errno> {
    let words = [fd, libc::F_DUPFD, least, 0, 0, 0].map(|word| word as usize);
    // SAFETY: the call takes no address.
    unsafe { kernel::call(libc::SYS_fcntl, words) }.map(|copy| copy as c_int)
}

/// Returns whether the file has a lock of fcntl(2). A process loses its own locks of a file when it closes any
/// descriptor of the file.
fn is_locked(file: BorrowedFd<'_>) -> bool {
    use std::os::fd::AsRawFd;
    // SAFETY: a plain struct of the kernel, for which zeros are valid: from 0 to the end, of no process.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    let at = kernel::address(&raw mut lock);
    let fd = file.as_raw_fd() as usize;
    // As a lock of an open file description, with which locks of this process conflict too.
    let command = libc::F_OFD_GETLK as usize;
    // SAFETY: the kernel reads and writes the struct.
    let asked = unsafe { kernel::call(libc::SYS_fcntl, [fd, command, at, 0, 0, 0]) };
    asked.is_ok() && lock.l_type != libc::F_UNLCK as libc::c_short
}

/// Returns what `call` returns: 0, with the two lowest fds at `pair`, or -1 with errno set. `call` never blocks, and
/// its files are as good as the ones that it would make next.
///
/// # Safety
/// `pair` is what the call writes to.
#[inline]
unsafe fn lowest_two(pair: *mut c_int, mut call: impl FnMut() -> c_int) -> c_int {
    let look = Look::now();
    let result = call();
    if look.is_disturbed() {
        // SAFETY: by the contract.
        unsafe { two_again(pair, result, call) }
    } else {
        result
    }
}

/// # Safety
/// As for [`lowest_two`].
#[cold]
#[inline(never)]
unsafe fn two_again(pair: *mut c_int, result: c_int, mut call: impl FnMut() -> c_int) -> c_int {
    let is_short = result < 0 && errno::get() == libc::EMFILE;
    if vfork::is_child() || result < 0 && !is_short {
        return result;
    }
    let _settled = Settled::begin();
    if result == 0 {
        for i in 0..2 {
            // SAFETY: the call has written two fds there, and the program does not know of them yet.
            unsafe { rustix::io::close(*pair.add(i)) };
        }
    }
    call()
}

/// Puts a file at the fd `new` by `call`. First waits until no descriptor of the library is being moved, since one may
/// be at `new`. Never blocks for longer than the call does.
#[inline(never)]
pub fn onto(new: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if new < 0 || vfork::is_child() {
        return call();
    }
    let settled = Settled::begin();
    // SAFETY: F_GETFD only asks whether the fd is open.
    let is_open = fcntl_getfd(unsafe { BorrowedFd::borrow_raw(new) }).is_ok();
    if is_open {
        // Then the fd is the program's own. The call closes it, which may block.
        drop(settled);
    }
    call()
}

hooks! {
    /// `open(2)`. `mode` is arbitrary where the flags ask for none.
    pub fn open(OpenFn, path: *const c_char, flags: c_int, mode: c_uint) -> c_int;
    |blocking plain| lowest(plain)

    /// Fortified `open` without a mode.
    pub fn open_2(Open2Fn, path: *const c_char, flags: c_int) -> c_int;
    |blocking plain| lowest(plain)

    /// `openat(2)`; see [`open`].
    pub fn openat(OpenatFn, at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int;
    |blocking plain| lowest(plain)

    /// Fortified `openat` without a mode.
    pub fn openat_2(Openat2Fn, at: c_int, path: *const c_char, flags: c_int) -> c_int;
    |blocking plain| lowest(plain)

    /// `creat(2)`.
    pub fn creat(CreatFn, path: *const c_char, mode: c_uint) -> c_int;
    |blocking plain| lowest(plain)

    /// `pipe(2)`.
    pub fn pipe(PipeFn, ends: *mut c_int) -> c_int;
    // SAFETY: the call writes two fds to `ends`.
    |plain| unsafe { lowest_two(ends, plain) }

    /// `pipe2(2)`.
    pub fn pipe2(Pipe2Fn, ends: *mut c_int, flags: c_int) -> c_int;
    // SAFETY: likewise.
    |plain| unsafe { lowest_two(ends, plain) }

    /// `socketpair(2)`.
    pub fn socketpair(SocketpairFn, domain: c_int, kind: c_int, protocol: c_int, ends: *mut c_int) -> c_int;
    // SAFETY: likewise.
    |plain| unsafe { lowest_two(ends, plain) }

    /// `eventfd(2)`.
    pub fn eventfd(EventfdFn, value: c_uint, flags: c_int) -> c_int;
    |plain| lowest(plain)

    /// `timerfd_create(2)`.
    pub fn timerfd_create(TimerfdFn, clock: c_int, flags: c_int) -> c_int;
    |plain| lowest(plain)

    /// `signalfd(2)`. Makes an fd if `fd` is -1, else returns `fd`.
    pub fn signalfd(SignalfdFn, fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int;
    |plain| if fd == -1 { lowest(plain) } else { plain() }

    /// `inotify_init(2)`.
    pub fn inotify_init(InotifyInitFn) -> c_int;
    |plain| lowest(plain)

    /// `inotify_init1(2)`.
    pub fn inotify_init1(InotifyFn, flags: c_int) -> c_int;
    |plain| lowest(plain)

    /// `memfd_create(2)`.
    pub fn memfd_create(MemfdFn, name: *const c_char, flags: c_uint) -> c_int;
    |plain| lowest(plain)
}
