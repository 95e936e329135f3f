//! The calls that wait for readiness.

use crate::real::{
    EpollCreateFn, EpollCtlFn, EpollPwait2Fn, EpollPwaitFn, EpollWaitFn, PollChkFn, PollFn,
    PpollChkFn, PpollFn, PselectFn, SelectFn,
};
use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

/// `poll(2)`, time-out in ms.
#[inline]
pub unsafe extern "C" fn poll(
    real: PollFn,
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fds, count, timeout) }
}

/// `poll(2)` of a fortified program; libc aborts if `fds` is longer than `size` bytes.
#[inline]
pub unsafe extern "C" fn poll_chk(
    real: PollChkFn,
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    size: size_t,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fds, count, timeout, size) }
}

/// `ppoll(2)`.
#[inline]
pub unsafe extern "C" fn ppoll(
    real: PpollFn,
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fds, count, timeout, mask) }
}

/// `ppoll(2)` of a fortified program; libc aborts if `fds` is longer than `size` bytes.
#[inline]
pub unsafe extern "C" fn ppoll_chk(
    real: PpollChkFn,
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    size: size_t,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(fds, count, timeout, mask, size) }
}

/// `select(2)`; Linux leaves the rest of the time in `timeout`.
#[inline]
pub unsafe extern "C" fn select(
    real: SelectFn,
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(count, read, write, except, timeout) }
}

/// `pselect(2)`.
#[inline]
pub unsafe extern "C" fn pselect(
    real: PselectFn,
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(count, read, write, except, timeout, mask) }
}

/// `epoll_create(2)`.
#[inline]
pub unsafe extern "C" fn epoll_create(real: EpollCreateFn, size: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(size) }
}

/// `epoll_create1(2)`.
#[inline]
pub unsafe extern "C" fn epoll_create1(real: EpollCreateFn, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(flags) }
}

/// `epoll_ctl(2)`.
#[inline]
pub unsafe extern "C" fn epoll_ctl(
    real: EpollCtlFn,
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(epoll, operation, fd, event) }
}

/// `epoll_wait(2)`, time-out in ms.
#[inline]
pub unsafe extern "C" fn epoll_wait(
    real: EpollWaitFn,
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(epoll, events, count, timeout) }
}

/// `epoll_pwait(2)`, time-out in ms.
#[inline]
pub unsafe extern "C" fn epoll_pwait(
    real: EpollPwaitFn,
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(epoll, events, count, timeout, mask) }
}

/// `epoll_pwait2(2)`.
#[inline]
pub unsafe extern "C" fn epoll_pwait2(
    real: EpollPwait2Fn,
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(epoll, events, count, timeout, mask) }
}
