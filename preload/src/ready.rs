//! The hooks of the calls that wait for readiness. The implementation is in `rdmasock_shims::hooks::ready`.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every body hands on its caller's arguments, under its caller's contract"
)]

use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use rdmasock_shims::hooks::ready as calls;
use rdmasock_shims::sys::real;
use redhook::hook;

hook! {
    unsafe fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int => hook_poll {
        calls::poll(real::poll(), fds, count, timeout)
    }
}

hook! {
    unsafe fn __poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int => hook_underscore_poll {
        calls::poll(real::__poll(), fds, count, timeout)
    }
}

hook! {
    unsafe fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, size: size_t) -> c_int => hook_poll_chk {
        calls::poll_chk(real::__poll_chk(), fds, count, timeout, size)
    }
}

hook! {
    unsafe fn ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int => hook_ppoll {
        calls::ppoll(real::ppoll(), fds, count, timeout, mask)
    }
}

hook! {
    unsafe fn __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, size: size_t) -> c_int => hook_ppoll_chk {
        calls::ppoll_chk(real::__ppoll_chk(), fds, count, timeout, mask, size)
    }
}

hook! {
    unsafe fn select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int => hook_select {
        calls::select(real::select(), count, read, write, except, timeout)
    }
}

hook! {
    unsafe fn __select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int => hook_underscore_select {
        calls::select(real::__select(), count, read, write, except, timeout)
    }
}

hook! {
    unsafe fn pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int => hook_pselect {
        calls::pselect(real::pselect(), count, read, write, except, timeout, mask)
    }
}

hook! {
    unsafe fn epoll_create(size: c_int) -> c_int => hook_epoll_create {
        calls::epoll_create(real::epoll_create(), size)
    }
}

hook! {
    unsafe fn epoll_create1(flags: c_int) -> c_int => hook_epoll_create1 {
        calls::epoll_create1(real::epoll_create1(), flags)
    }
}

hook! {
    unsafe fn epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int => hook_epoll_ctl {
        calls::epoll_ctl(real::epoll_ctl(), epoll, operation, fd, event)
    }
}

hook! {
    unsafe fn epoll_wait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: c_int) -> c_int => hook_epoll_wait {
        calls::epoll_wait(real::epoll_wait(), epoll, events, count, timeout)
    }
}

hook! {
    unsafe fn epoll_pwait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: c_int, mask: *const sigset_t) -> c_int => hook_epoll_pwait {
        calls::epoll_pwait(real::epoll_pwait(), epoll, events, count, timeout, mask)
    }
}

hook! {
    unsafe fn epoll_pwait2(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int => hook_epoll_pwait2 {
        calls::epoll_pwait2(real::epoll_pwait2(), epoll, events, count, timeout, mask)
    }
}
