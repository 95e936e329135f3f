//! System calls that differ from libc's functions in their arguments, or in the values that they leave in them.

use core::ffi::c_long;

use libc::{c_int, epoll_event, fd_set, iovec, nfds_t, off_t, pollfd, sigset_t, size_t, ssize_t, timespec};
use rdmasock_core::os::kernel;
use rdmasock_core::stats::Reason;

use super::ways::{Handler, result, waits, waits_on};
use crate::config::{IoUring, config};
use crate::hooks::{io, process, ready};
use crate::polling::poll;
use crate::process::pass;
use crate::startup::instance;
use crate::sys::{errno, iov, time, vfork};

/// The numbers of these calls, with their handlers.
pub(super) const OTHERS: &[(c_long, Handler)] = &[
    (libc::SYS_preadv2, preadv2),
    (libc::SYS_pwritev2, pwritev2),
    (libc::SYS_ppoll, ppoll),
    (libc::SYS_pselect6, pselect6),
    (libc::SYS_epoll_pwait, epoll_pwait),
    (libc::SYS_epoll_pwait2, epoll_pwait2),
    (libc::SYS_exit_group, exit_group),
    (libc::SYS_io_uring_setup, io_uring_setup),
];

/// `system_call!(NUMBER(ARGUMENT: TYPE, …) -> RESULT = WORD, …)`: a function of libc's shape for the system call.
macro_rules! system_call {
    ($number:ident($($argument:ident: $type:ty),*) -> $result:ty = $($word:expr),*) => {{
        unsafe extern "C" fn system_call($($argument: $type),*) -> $result {
            // SAFETY: the program's own call.
            result(unsafe { kernel::call(libc::$number, [$($word as usize),*]) }) as $result
        }
        system_call
    }};
}

/// Defines a handler for a call whose offset comes in two halves. On a 64-bit machine the lower half is the whole
/// offset.
macro_rules! vector_at {
    ($name:ident, $number:ident) => {
        unsafe extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
            let call = system_call!($number(fd: c_int, iov: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t
                = fd, iov, count, at, 0, flags);
            let (fd, iov, count, flags) = (a as c_int, b as *const iovec, c as c_int, f as c_int);
            // SAFETY: the program's own call.
            let served = || unsafe { io::$name(call, fd, iov, count, d as off_t, flags) } as c_long;
            // SAFETY: likewise.
            let plain = || result(unsafe { kernel::call(libc::$number, [a, b, c, d, e, f]) });
            waits_on(a, served, plain)
        }
    };
}

vector_at!(preadv2, SYS_preadv2);
vector_at!(pwritev2, SYS_pwritev2);

/// The size of a signal mask that the kernel accepts, bytes.
const MASK_SIZE: usize = 8;

/// Returns whether the kernel accepts a signal mask of the program. (libc's type is longer, but only the kernel reads
/// the mask.)
fn is_mask(mask: usize, size: usize) -> bool {
    mask == 0 || size == MASK_SIZE
}

/// Makes the call, and leaves the rest of the time in the program's time-out, as the kernel does.
unsafe fn leave_rest(timeout: *mut timespec, call: impl FnOnce() -> c_int) -> c_int {
    let begun = time::now_ns();
    // SAFETY: by the contract.
    let given = time::Timeout::from_timespec(unsafe { timeout.as_ref() });
    let done = call();
    if let Some(time::Timeout::Ns(ns @ 1..)) = given {
        let left = ns.saturating_sub(time::now_ns().saturating_sub(begun));
        // SAFETY: not null, since it had a time in it.
        unsafe {
            (*timeout).tv_sec = (left / 1_000_000_000) as libc::time_t;
            (*timeout).tv_nsec = (left % 1_000_000_000) as libc::c_long;
        }
    }
    done
}

unsafe extern "C" fn ppoll(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    let system_call = system_call!(
        SYS_ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int
            = fds, count, timeout, mask, MASK_SIZE, 0
    );
    let (fds, count, timeout) = (a as *mut pollfd, b as nfds_t, c as *mut timespec);
    // SAFETY: the program's array.
    let served = is_mask(d, e) && unsafe { poll::has_ours(fds, count) };
    if !served {
        // SAFETY: the program's own call.
        return result(unsafe { kernel::call(libc::SYS_ppoll, [a, b, c, d, e, f]) });
    }
    // SAFETY: likewise.
    let call = || unsafe { ready::ppoll(system_call, fds, count, timeout, d as *const sigset_t) };
    // SAFETY: the program's own time-out.
    let call = || c_long::from(unsafe { leave_rest(timeout, call) });
    waits(a, call, || 0)
}

/// The sixth argument of pselect6(2).
#[repr(C)]
struct Mask {
    mask: *const sigset_t,
    size: size_t,
}

unsafe extern "C" fn pselect6(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    unsafe extern "C" fn system_call(
        count: c_int,
        read: *mut fd_set,
        write: *mut fd_set,
        except: *mut fd_set,
        timeout: *const timespec,
        mask: *const sigset_t,
    ) -> c_int {
        let mask = Mask { mask, size: MASK_SIZE };
        let sets = [read, write, except].map(|set| set as usize);
        let mask = kernel::address(&raw const mask);
        let words = [count as usize, sets[0], sets[1], sets[2], timeout as usize, mask];
        // SAFETY: the program's own call.
        result(unsafe { kernel::call(libc::SYS_pselect6, words) }) as c_int
    }
    let sets = poll::Sets {
        count: a as c_int,
        read: b as *mut fd_set,
        write: c as *mut fd_set,
        except: d as *mut fd_set,
    };
    let timeout = e as *mut timespec;
    // SAFETY: the program's own, or an address where no memory can be.
    let mask = match unsafe { iov::plausible(f as *const Mask) } {
        Some(given) if is_mask(given.mask as usize, given.size) => Some(given.mask),
        None if f == 0 => Some(core::ptr::null()),
        _ => None,
    };
    // SAFETY: the program's sets.
    let Some(mask) = mask.filter(|_| unsafe { sets.has_ours() }) else {
        // SAFETY: the program's own call.
        return result(unsafe { kernel::call(libc::SYS_pselect6, [a, b, c, d, e, f]) });
    };
    // SAFETY: likewise.
    let call = || unsafe {
        ready::pselect(
            system_call,
            sets.count,
            sets.read,
            sets.write,
            sets.except,
            timeout,
            mask,
        )
    };
    // SAFETY: the program's own time-out.
    let call = || c_long::from(unsafe { leave_rest(timeout, call) });
    waits(a, call, || 0)
}

/// Defines a handler for a wait on an epoll set. The argument behind the mask is the size of the mask.
macro_rules! epoll_wait {
    ($name:ident, $number:ident, $timeout:ty) => {
        unsafe extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
            let call = system_call!(
                $number(epoll: c_int, events: *mut epoll_event, n: c_int, time: $timeout, mask: *const sigset_t) -> c_int
                    = epoll, events, n, time, mask, MASK_SIZE
            );
            // SAFETY: the program's own call.
            let plain = || result(unsafe { kernel::call(libc::$number, [a, b, c, d, e, f]) });
            if !is_mask(e, f) {
                return plain();
            }
            let (epoll, events, n, mask) = (a as c_int, b as *mut epoll_event, c as c_int, e as *const sigset_t);
            // SAFETY: likewise.
            let served = || unsafe { ready::$name(call, epoll, events, n, d as $timeout, mask) } as c_long;
            waits_on(a, served, plain)
        }
    };
}

epoll_wait!(epoll_pwait, SYS_epoll_pwait, c_int);
epoll_wait!(epoll_pwait2, SYS_epoll_pwait2, *const timespec);

unsafe extern "C" fn exit_group(a: usize, _: usize, _: usize, _: usize, _: usize, _: usize) -> c_long {
    unsafe extern "C" fn system_call(status: c_int) {
        // SAFETY: the program's own call, which does not return.
        let _ = unsafe { kernel::call(libc::SYS_exit_group, [status as usize, 0, 0, 0, 0, 0]) };
    }
    if vfork::is_stranger() {
        // SAFETY: likewise.
        unsafe { system_call(a as c_int) };
    }
    // SAFETY: likewise.
    unsafe { process::exit_now(system_call, a as c_int) };
    0
}

/// Hides io_uring, or takes all connections to TCP once the program has a ring. liburing makes this call in line, which
/// no hook sees.
unsafe extern "C" fn io_uring_setup(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    let is_on = instance::is_on();
    if is_on && is_hidden(config().io_uring) {
        return errno::fail(libc::ENOSYS);
    }
    // SAFETY: the program's own call.
    let ring = result(unsafe { kernel::call(libc::SYS_io_uring_setup, [a, b, c, d, e, f]) });
    if ring >= 0 && is_on {
        pass::all_on_tcp(Reason::IoUring);
    }
    ring
}

/// Returns whether io_uring is hidden from the program. An event loop of libuv makes an io_uring to add descriptors to
/// its epoll set, and works without one. The functions of libuv are exported, in Node too.
fn is_hidden(setting: IoUring) -> bool {
    match setting {
        IoUring::Hide => true,
        IoUring::Allow => false,
        // SAFETY: a C string.
        IoUring::Auto => !unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"uv_loop_init".as_ptr()) }.is_null(),
    }
}
