//! The calls that close, duplicate and control descriptors.

use std::os::fd::BorrowedFd;

use libc::{c_int, c_uint, c_ulong, c_void};
use rdmasock_core::os::privatefd::{self, Settled};

use crate::data::rx;
use crate::hooks::numbers::{lowest, lowest_from, onto};
use crate::hooks::report;
use crate::hooks::simple::hooks;
use crate::notify::closing;
use crate::notify::table::{self, Entry};
use crate::objects::socket::Farewell;
use crate::process::pass;
use crate::signals::jump::within;
use crate::startup::lifecycle;
use crate::sys::real::{CloseFn, CloseFromFn, CloseRangeFn, Dup2Fn, Dup3Fn, DupFn, FcntlFn, IoctlFn};
use crate::sys::{errno, vfork};

/// `close(2)`.
#[inline]
pub unsafe extern "C" fn close(real: CloseFn, fd: c_int) -> c_int {
    match table::lookup(fd) {
        Entry::None if !lifecycle::is_hidden(fd) => {}
        _ => {
            let mut farewell = Farewell::NONE;
            let result = close_on(fd, &mut farewell);
            if result != GO_ON {
                return result;
            }
            // SAFETY: the caller's arguments, as they are.
            let result = unsafe { real(fd) };
            tell(farewell);
            return result;
        }
    }
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fd) }
}

/// Returned by a preparation if the kernel's call is to follow. Any other value is the result of the call.
const GO_ON: c_int = c_int::MIN;

/// Prepares the close of `fd`. Fails with EBADF for a descriptor of the library.
#[inline(never)]
fn close_on(fd: c_int, farewell: &mut Farewell) -> c_int {
    if lifecycle::is_hidden(fd) {
        return errno::fail(libc::EBADF);
    }
    if !vfork::is_child() {
        *farewell = within(|| lifecycle::before_close(fd));
    }
    GO_ON
}

/// Wakes the threads that sleep at the other end of a link within the host, now that the kernel has sent its FIN.
#[inline(never)]
fn tell(farewell: Farewell) {
    within(|| farewell.tell());
}

/// `close_range(2)`.
#[inline]
pub unsafe extern "C" fn close_range(real: CloseRangeFn, first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags & !(libc::CLOSE_RANGE_CLOEXEC | libc::CLOSE_RANGE_UNSHARE) as c_int != 0 || first > last {
        // SAFETY: the caller's arguments, as they are; the kernel refuses them.
        return unsafe { real(first, last, flags) };
    }
    // SAFETY: the caller's arguments, in pieces.
    within(|| unsafe { close_range_on(real, first, last, flags) })
}

#[inline(never)]
unsafe extern "C" fn close_range_on(real: CloseRangeFn, first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let closes = flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0;
    let mut settled = None;
    // A child of vfork has descriptors of its own.
    if closes && !vfork::is_child() {
        table::for_each(first..=last, |fd, _| {
            lifecycle::before_close(fd);
        });
        settled = Some(Settled::begin());
    }
    for (from, to) in privatefd::ranges_without_private(first, last) {
        // SAFETY: a part of the range that the caller asked for.
        let result = unsafe { real(from, to, flags) };
        if result != 0 {
            return result;
        }
    }
    drop(settled);
    0
}

/// `closefrom(3)`. libc's function calls `close_range` past its hook.
#[inline]
pub unsafe extern "C" fn closefrom(real: CloseFromFn, first: c_int) {
    let from = first.max(0) as c_uint;
    // SAFETY: the range that the caller asked for; the library's own descriptors are left out.
    if within(|| unsafe { close_range_on(crate::sys::real::close_range(), from, c_uint::MAX, 0) }) != 0 {
        // No such system call: libc reads /proc instead.
        // SAFETY: the caller's arguments, as they are.
        unsafe { real(first) }
    }
}

#[inline(never)]
extern "C" fn on_dup(old: c_int, new: c_int) {
    if vfork::is_borrower() {
        // The program that the child is about to execute may get the descriptor.
        pass::for_program(old);
    } else {
        within(|| lifecycle::on_dup(old, new));
    }
}

/// Prepares that `new` becomes a descriptor of the file behind `old`: the connection behind `new` is closed. Fails with
/// EBADF if either is a descriptor of the library.
#[inline(never)]
extern "C" fn before_dup(old: c_int, new: c_int) -> c_int {
    if lifecycle::is_hidden(new) || lifecycle::is_hidden(old) {
        return errno::fail(libc::EBADF);
    }
    // SAFETY: the program's own fd, in the middle of its call.
    let open = rustix::io::fcntl_getfd(unsafe { std::os::fd::BorrowedFd::borrow_raw(old) }).is_ok();
    if open && !vfork::is_child() {
        within(|| lifecycle::before_close(new));
    }
    GO_ON
}

hooks! {
    /// `dup(2)`.
    pub fn dup(DupFn, fd: c_int) -> c_int;
    |plain| {
        let new = lowest(plain);
        if new >= 0 && table::is_known(fd) {
            on_dup(fd, new);
        }
        new
    }

    /// `dup2(2)`. As fd 0, 1 or 2 a stream may be used by stdio, whose I/O no hook sees.
    pub fn dup2(Dup2Fn, old: c_int, new: c_int) -> c_int;
    |plain| dup_onto(old, new, true, plain)

    /// `dup3(2)`; see [`dup2`].
    pub fn dup3(Dup3Fn, old: c_int, new: c_int, flags: c_int) -> c_int;
    |plain| dup_onto(old, new, flags & !libc::O_CLOEXEC == 0, plain)
}

#[inline]
fn dup_onto(old: c_int, new: c_int, is_valid: bool, call: impl FnOnce() -> c_int) -> c_int {
    let concerns = old != new
        && new >= 0
        && old >= 0
        && is_valid
        && (table::is_known(old) || table::is_known(new) || lifecycle::is_hidden(new));
    let refused = if concerns { before_dup(old, new) } else { GO_ON };
    if refused != GO_ON {
        return refused;
    }
    let result = onto(new, call);
    if concerns && result >= 0 {
        on_dup(old, new);
    }
    result
}

/// `fcntl(2)`. `argument` is arbitrary where the command has none.
#[inline]
pub unsafe extern "C" fn fcntl(real: FcntlFn, fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    let makes = matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC);
    if !makes && !table::is_known(fd) {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, command, argument) };
    }
    // SAFETY: likewise.
    unsafe { fcntl_on(real, fd, command, argument) }
}

#[inline(never)]
unsafe extern "C" fn fcntl_on(real: FcntlFn, fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the caller's arguments, as they are.
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
    if let Some(socket) = closing::connection(fd) {
        // SAFETY: the program's own fd, in the middle of its call.
        within(|| pass::on_option_beyond_links(socket, unsafe { BorrowedFd::borrow_raw(fd) }));
    }
}

/// `ioctl(2)`. `argument` is arbitrary where the request has none.
#[inline]
pub unsafe extern "C" fn ioctl(real: IoctlFn, fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if !table::is_known(fd) {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fd, request, argument) };
    }
    // SAFETY: likewise.
    unsafe { ioctl_on(real, fd, request, argument) }
}

/// sockatmark(3); libc has no constant for it, nor for the next one.
const SIOCATMARK: c_ulong = 0x8905;
/// Bytes that have not been sent (linux/sockios.h).
const SIOCOUTQNSD: c_ulong = 0x894b;

#[inline(never)]
unsafe extern "C" fn ioctl_on(real: IoctlFn, fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the caller's arguments, as they are.
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
            SIOCATMARK if closing::connection(fd).is_some_and(rx::comes_before_tcp) => *value = 0,
            // SIOCOUTQ has the same number.
            libc::TIOCOUTQ | SIOCOUTQNSD => {
                if let Some(socket) = closing::connection(fd) {
                    let is_unsent = request == SIOCOUTQNSD;
                    *value = within(|| report::out_queue(socket, *value, is_unsent));
                }
            }
            libc::FIONREAD => {
                match closing::connection(fd).and_then(rx::available) {
                    Some(n) => *value = n as c_int,
                    // The marker that was counted may have been taken by now.
                    None if has_markers => return ask(),
                    None => {}
                }
            }
            _ => {}
        }
    }
    result
}
