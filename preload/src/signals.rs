//! The hooks of the calls that install signal handlers, and of `pthread_cancel`.
//! `rdmasock_shims::process::sigaction` implements them. `siginterrupt` and `sigignore` need no hook: libc changes
//! the installed handler.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every body hands on its caller's arguments, under its caller's contract"
)]

use libc::{c_int, sighandler_t};
use rdmasock_shims::process::sigaction as calls;
use rdmasock_shims::sys::real;
use redhook::hook;

hook! {
    unsafe fn sigaction(number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int => hook_sigaction {
        calls::sigaction(real::sigaction(), number, new, old)
    }
}

hook! {
    unsafe fn __sigaction(number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int => hook_sigaction_alias {
        calls::sigaction(real::__sigaction(), number, new, old)
    }
}

hook! {
    unsafe fn signal(number: c_int, handler: sighandler_t) -> sighandler_t => hook_signal {
        calls::signal(real::signal(), number, handler)
    }
}

hook! {
    unsafe fn bsd_signal(number: c_int, handler: sighandler_t) -> sighandler_t => hook_bsd_signal {
        calls::signal(real::bsd_signal(), number, handler)
    }
}

hook! {
    unsafe fn ssignal(number: c_int, handler: sighandler_t) -> sighandler_t => hook_ssignal {
        calls::signal(real::ssignal(), number, handler)
    }
}

hook! {
    unsafe fn sigset(number: c_int, handler: sighandler_t) -> sighandler_t => hook_sigset {
        calls::signal_once(real::sigset(), number, handler)
    }
}

hook! {
    unsafe fn sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t => hook_sysv_signal {
        calls::signal_once(real::sysv_signal(), number, handler)
    }
}

hook! {
    unsafe fn __sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t => hook_sysv_signal_alias {
        calls::signal_once(real::__sysv_signal(), number, handler)
    }
}

hook! {
    unsafe fn pthread_cancel(thread: libc::pthread_t) -> c_int => hook_pthread_cancel {
        calls::pthread_cancel(real::pthread_cancel(), thread)
    }
}
