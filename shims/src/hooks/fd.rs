//! The calls that close, duplicate and control descriptors, and the calls that give the program a new fd.
//!
//! A new fd has the lowest free number, as in the kernel, even if the library opens descriptors at the same time. A new
//! descriptor of the library has a low number for some microseconds, until it is moved to a high one
//! (`core/src/os/privatefd.rs`). A hook does not wait for that, since its call may block after the kernel has chosen
//! the number (accept, the open of a FIFO). Before and after the call the hook checks, by one load each, whether
//! descriptors were being moved. If so, it moves the new fd down to the lowest number that is free by then. If the call
//! has found no free number, the hook makes the call again.
//!
//! This is not done for fds that libc makes for itself (fopen, opendir, getaddrinfo), and for fds that come by
//! SCM_RIGHTS.

use std::os::fd::{BorrowedFd, IntoRawFd};

use libc::{c_char, c_int, c_uint, c_ulong, c_void, sigset_t};
use rdmasock_core::os::privatefd::{Look, Settled};
use rdmasock_core::os::{kernel, privatefd};
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_getfd};

use crate::data::rx;
use crate::hooks::{hooks, report};
use crate::notify::{call, table};
use crate::objects::socket::Farewell;
use crate::process::pass;
use crate::signals::jump::within;
use crate::startup::lifecycle;
use crate::sys::{errno, real, vfork};

/// How many times at most a call that fails with EMFILE is made again. It is made again only if the library was moving
/// descriptors meanwhile, because one of them may have had the last free number.
const TRIES: u32 = 100;

/// The request of sockatmark(3). The libc crate has no constant for it, nor for the next one.
const SIOCATMARK: c_ulong = 0x8905;
/// The request for the number of bytes that have not been sent (linux/sockios.h).
const SIOCOUTQNSD: c_ulong = 0x894b;

/// `close(2)`. Fails with EBADF for a descriptor of the library.
#[inline]
pub unsafe extern "C" fn close(real: real::close, fd: c_int) -> c_int {
    if privatefd::is_private(fd) {
        return errno::fail(libc::EBADF);
    }
    if !table::is_known(fd) {
        // SAFETY: the caller's arguments are passed on unchanged.
        return unsafe { real(fd) };
    }
    let farewell = before_close(fd);
    // SAFETY: the caller's arguments are passed on unchanged.
    let result = unsafe { real(fd) };
    tell(farewell);
    result
}

#[inline(never)]
fn before_close(fd: c_int) -> Farewell {
    if vfork::is_child() {
        return Farewell::NONE;
    }
    within(|| lifecycle::before_close(fd))
}

/// Wakes the threads that sleep at the other end of a link within the host. Called after the kernel has sent its FIN.
#[inline(never)]
fn tell(farewell: Farewell) {
    within(|| farewell.tell());
}

/// `close_range(2)`.
#[inline]
pub unsafe extern "C" fn close_range(real: real::close_range, first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags & !(libc::CLOSE_RANGE_CLOEXEC | libc::CLOSE_RANGE_UNSHARE) as c_int != 0 || first > last {
        // SAFETY: the caller's arguments are passed on unchanged; the kernel refuses them.
        return unsafe { real(first, last, flags) };
    }
    // SAFETY: each range is a part of the one that the caller asked for.
    within(|| unsafe { close_range_on(real, first, last, flags) })
}

#[inline(never)]
unsafe extern "C" fn close_range_on(real: real::close_range, first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let closes = flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0;
    // A child of vfork has descriptors of its own, which the table does not describe.
    let _settled = (closes && !vfork::is_child()).then(|| {
        table::for_each(first..=last, |fd, _| {
            lifecycle::before_close(fd);
        });
        Settled::begin()
    });
    for (from, to) in privatefd::ranges_without_private(first, last) {
        // SAFETY: a part of the range that the caller asked for.
        let result = unsafe { real(from, to, flags) };
        if result != 0 {
            return result;
        }
    }
    0
}

/// `closefrom(3)`. libc's function calls `close_range` past its hook.
#[inline]
pub unsafe extern "C" fn closefrom(real: real::closefrom, first: c_int) {
    let from = first.max(0) as c_uint;
    // SAFETY: the range that the caller asked for; the library's own descriptors are left out.
    if within(|| unsafe { close_range_on(real::close_range(), from, c_uint::MAX, 0) }) != 0 {
        // The kernel has no close_range: libc's `closefrom` reads /proc instead.
        // SAFETY: the caller's arguments are passed on unchanged.
        unsafe { real(first) }
    }
}

#[inline(never)]
extern "C" fn on_dup(old: c_int, new: c_int) {
    if vfork::is_borrower() {
        // The program that the vfork child is about to execute may get the descriptor.
        pass::for_program(old);
    } else {
        within(|| lifecycle::on_dup(old, new));
    }
}

/// Prepares for a call that makes `new` a descriptor of the file behind `old`: closes the connection behind `new`.
/// Returns false if either is a descriptor of the library.
#[inline(never)]
extern "C" fn before_dup(old: c_int, new: c_int) -> bool {
    if privatefd::is_private(new) || privatefd::is_private(old) {
        return false;
    }
    // SAFETY: the fd is the program's own, in the middle of its call.
    let open = rustix::io::fcntl_getfd(unsafe { std::os::fd::BorrowedFd::borrow_raw(old) }).is_ok();
    if open && !vfork::is_child() {
        within(|| lifecycle::before_close(new));
    }
    true
}

hooks! {
    /// `dup(2)`.
    pub fn dup(fd: c_int) -> c_int;
    |plain| {
        let new = lowest(plain);
        if new >= 0 && table::is_known(fd) {
            on_dup(fd, new);
        }
        new
    }

    /// `dup2(2)`. A connection that becomes fd 0, 1 or 2 goes back to TCP, because stdio may use it, whose I/O no hook
    /// sees.
    pub fn dup2(old: c_int, new: c_int) -> c_int;
    |plain| dup_onto(old, new, true, plain)

    /// `dup3(2)`; see [`dup2`].
    pub fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int;
    |plain| dup_onto(old, new, flags & !libc::O_CLOEXEC == 0, plain)
}

#[inline]
fn dup_onto(old: c_int, new: c_int, is_valid: bool, call: impl FnOnce() -> c_int) -> c_int {
    let concerns = old != new
        && new >= 0
        && old >= 0
        && is_valid
        && (table::is_known(old) || table::is_known(new) || privatefd::is_private(new));
    if concerns && !before_dup(old, new) {
        return errno::fail(libc::EBADF);
    }
    let result = onto(new, call);
    if concerns && result >= 0 {
        on_dup(old, new);
    }
    result
}

/// `fcntl(2)`. `argument` is arbitrary where the command has none.
#[inline]
pub unsafe extern "C" fn fcntl(real: real::fcntl, fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    let makes = matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC);
    if !makes && !table::is_known(fd) {
        // SAFETY: the caller's arguments are passed on unchanged.
        return unsafe { real(fd, command, argument) };
    }
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { fcntl_on(real, fd, command, argument) }
}

#[inline(never)]
unsafe extern "C" fn fcntl_on(real: real::fcntl, fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    let call = || unsafe { real(fd, command, argument) };
    let result = match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => lowest_from(argument as c_int, call),
        _ => call(),
    };
    if result < 0 || !table::is_known(fd) {
        return result;
    }
    match command {
        libc::F_SETFL => {
            lifecycle::set_nonblocking(fd, argument as c_int & libc::O_NONBLOCK != 0);
            if argument as c_int & libc::O_ASYNC != 0 {
                on_async(fd);
            }
        }
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => on_dup(fd, result),
        _ => {}
    }
    result
}

/// Handles O_ASYNC, which a link does not serve: no signal reports bytes that come over a link.
#[cold]
fn on_async(fd: c_int) {
    if let Some(socket) = call::connection(fd) {
        // SAFETY: the fd is the program's own, in the middle of its call.
        within(|| pass::on_option_beyond_links(socket, unsafe { BorrowedFd::borrow_raw(fd) }));
    }
}

/// `ioctl(2)`. `argument` is arbitrary where the request has none.
#[inline]
pub unsafe extern "C" fn ioctl(real: real::ioctl, fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if !table::is_known(fd) {
        // SAFETY: the caller's arguments are passed on unchanged.
        return unsafe { real(fd, request, argument) };
    }
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { ioctl_on(real, fd, request, argument) }
}

#[inline(never)]
unsafe extern "C" fn ioctl_on(real: real::ioctl, fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    let ask = || unsafe { real(fd, request, argument) };
    let has_markers = request == libc::FIONREAD && table::socket(fd).is_some_and(rx::may_have_markers);
    let result = ask();
    if result != 0 || argument.is_null() {
        return result;
    }
    let value = argument.cast::<c_int>();
    // SAFETY: the kernel has just read or written an int there.
    unsafe {
        match request {
            libc::FIONBIO => lifecycle::set_nonblocking(fd, *value != 0),
            libc::FIOASYNC if *value != 0 => on_async(fd),
            SIOCATMARK if call::connection(fd).is_some_and(rx::comes_before_tcp) => *value = 0,
            // TIOCOUTQ is the same number as SIOCOUTQ.
            libc::TIOCOUTQ | SIOCOUTQNSD => {
                if let Some(socket) = call::connection(fd) {
                    let is_unsent = request == SIOCOUTQNSD;
                    *value = within(|| report::out_queue(socket, *value, is_unsent));
                }
            }
            libc::FIONREAD => {
                match call::connection(fd).and_then(rx::available) {
                    Some(n) => *value = n as c_int,
                    // The kernel's count may include a marker that the library has read in between, so the kernel is
                    // asked again.
                    None if has_markers => return ask(),
                    None => {}
                }
            }
            _ => {}
        }
    }
    result
}

/// Makes `call`, and returns its result: a new fd, or -1 with errno set. The fd has the lowest free number.
#[inline]
pub(super) fn lowest(call: impl FnMut() -> c_int) -> c_int {
    lowest_from(0, call)
}

/// Makes `call`, and returns its result, as [`lowest`] does. The fd has the lowest free number from `least` on.
#[inline]
fn lowest_from(least: c_int, mut call: impl FnMut() -> c_int) -> c_int {
    let look = Look::now();
    let fd = call();
    if look.is_disturbed() {
        put_right(fd, least, call)
    } else {
        fd
    }
}

// The function has Rust's own ABI, since `pthread_cancel` may end the thread in the call (see `hooks`).
#[cold]
#[inline(never)]
fn put_right(mut fd: c_int, least: c_int, mut call: impl FnMut() -> c_int) -> c_int {
    // A child of vfork has descriptors of its own, which the table does not describe.
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
    // SAFETY: the higher fd of the two is open, and the program never gets it.
    unsafe { rustix::io::close(fd.max(copy)) };
    fd.min(copy)
}

/// Calls fcntl(2) with F_DUPFD, and returns the new fd. rustix has only F_DUPFD_CLOEXEC.
fn duplicate(fd: c_int, least: c_int) -> Result<c_int, Errno> {
    let words = [fd, libc::F_DUPFD, least, 0, 0, 0].map(|word| word as usize);
    // SAFETY: the call takes no address.
    unsafe { kernel::call(libc::SYS_fcntl, words) }.map(|copy| copy as c_int)
}

/// Returns whether the file has a lock of fcntl(2). Such a file is not moved: a process loses its locks of a file when
/// it closes any descriptor of the file.
fn is_locked(file: BorrowedFd<'_>) -> bool {
    use std::os::fd::AsRawFd;
    // SAFETY: zeroes are valid for this plain struct. They mean a lock from offset 0 to the end of the file, of no
    // process.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    let at = kernel::address(&raw mut lock);
    let fd = file.as_raw_fd() as usize;
    // Asks as for a lock of an open file description, with which locks of this process conflict too.
    let command = libc::F_OFD_GETLK as usize;
    // SAFETY: the kernel reads and writes the struct.
    let asked = unsafe { kernel::call(libc::SYS_fcntl, [fd, command, at, 0, 0, 0]) };
    asked.is_ok() && lock.l_type != libc::F_UNLCK as libc::c_short
}

/// Makes `call`, and returns its result: 0, with fds of the two lowest free numbers at `pair`, or -1 with errno set.
/// `call` never blocks. If it has to be made again, the files of the first call are closed.
///
/// # Safety
/// `pair` is the place of two fds to which `call` writes.
#[inline]
unsafe fn lowest_two(pair: *mut c_int, mut call: impl FnMut() -> c_int) -> c_int {
    let look = Look::now();
    let result = call();
    if look.is_disturbed() {
        // SAFETY: `call` has written to `pair`, by the contract.
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

/// Makes `call`, which puts a file at the fd `new`. First waits until no descriptor of the library is being moved,
/// since one may have the number `new`.
#[inline(never)]
fn onto(new: c_int, call: impl FnOnce() -> c_int) -> c_int {
    if new < 0 || vfork::is_child() {
        return call();
    }
    let settled = Settled::begin();
    // SAFETY: F_GETFD only asks whether the fd is open.
    let is_open = fcntl_getfd(unsafe { BorrowedFd::borrow_raw(new) }).is_ok();
    if is_open {
        // `new` is the program's own fd, so no descriptor of the library can get that number. `call` closes the file
        // there, which may block. So the library may move descriptors again before `call`.
        drop(settled);
    }
    call()
}

// The calls that are hooked only so that their fd has the lowest free number.

hooks! {
    /// `open(2)`. `mode` is arbitrary where the flags ask for none.
    pub fn open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int;
    |blocking plain| lowest(plain)

    /// Fortified `open` without a mode.
    pub fn open_2(path: *const c_char, flags: c_int) -> c_int;
    |blocking plain| lowest(plain)

    /// `openat(2)`; see [`open`].
    pub fn openat(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int;
    |blocking plain| lowest(plain)

    /// Fortified `openat` without a mode.
    pub fn openat_2(at: c_int, path: *const c_char, flags: c_int) -> c_int;
    |blocking plain| lowest(plain)

    /// `creat(2)`.
    pub fn creat(path: *const c_char, mode: c_uint) -> c_int;
    |blocking plain| lowest(plain)

    /// `pipe(2)`.
    pub fn pipe(ends: *mut c_int) -> c_int;
    // SAFETY: the call writes two fds to `ends`.
    |plain| unsafe { lowest_two(ends, plain) }

    /// `pipe2(2)`.
    pub fn pipe2(ends: *mut c_int, flags: c_int) -> c_int;
    // SAFETY: the call writes two fds to `ends`.
    |plain| unsafe { lowest_two(ends, plain) }

    /// `socketpair(2)`.
    pub fn socketpair(domain: c_int, kind: c_int, protocol: c_int, ends: *mut c_int) -> c_int;
    // SAFETY: the call writes two fds to `ends`.
    |plain| unsafe { lowest_two(ends, plain) }

    /// `eventfd(2)`.
    pub fn eventfd(value: c_uint, flags: c_int) -> c_int;
    |plain| lowest(plain)

    /// `timerfd_create(2)`.
    pub fn timerfd_create(clock: c_int, flags: c_int) -> c_int;
    |plain| lowest(plain)

    /// `signalfd(2)`. Makes an fd if `fd` is -1, else returns `fd`.
    pub fn signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int;
    |plain| if fd == -1 { lowest(plain) } else { plain() }

    /// `inotify_init(2)`.
    pub fn inotify_init() -> c_int;
    |plain| lowest(plain)

    /// `inotify_init1(2)`.
    pub fn inotify_init1(flags: c_int) -> c_int;
    |plain| lowest(plain)

    /// `memfd_create(2)`.
    pub fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    |plain| lowest(plain)
}
