//! The calls that wait for readiness.

use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use crate::hooks::fd::lowest;
use crate::hooks::hooks;
use crate::notify::epoll::{Epoll, without_ours};
use crate::notify::table::Entry;
use crate::notify::{call, table};
use crate::objects::library::Library;
use crate::objects::socket::{Socket, Stage};
use crate::polling::poll;
use crate::polling::poll::Sets;
use crate::signals::jump::{outside, within, within_point};
use crate::startup::lifecycle;
use crate::sys::real;
use crate::sys::real::Cancellable;
use crate::sys::time::Timeout;

hooks! {
    /// `poll(2)`, time-out in ms.
    pub fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    // SAFETY: the program's array.
    |plain| match unsafe { poll::has_ours(fds, count) } {
        // SAFETY: likewise.
        true => unsafe { poll_on(fds, count, Timeout::from_ms(timeout), std::ptr::null()) },
        false => plain(),
    }

    /// `poll(2)` of a fortified program; libc aborts if `fds` is longer than `size` bytes.
    pub fn poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, size: size_t) -> c_int;
    // SAFETY: the program's array.
    |plain| match size / size_of::<pollfd>() >= count as usize && unsafe { poll::has_ours(fds, count) } {
        // SAFETY: likewise.
        true => unsafe { poll_on(fds, count, Timeout::from_ms(timeout), std::ptr::null()) },
        false => plain(),
    }

    /// `ppoll(2)`.
    pub fn ppoll(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t
    ) -> c_int;
    // SAFETY: the program's array; the time-out is null or the program's own.
    |plain| match unsafe { (poll::has_ours(fds, count), Timeout::from_timespec(timeout.as_ref())) } {
        // SAFETY: likewise.
        (true, Some(time)) => unsafe { poll_on(fds, count, time, mask) },
        _ => plain(),
    }

    /// `ppoll(2)` of a fortified program; libc aborts if `fds` is longer than `size` bytes.
    pub fn ppoll_chk(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, size: size_t
    ) -> c_int;
    // SAFETY: the program's array; the time-out is null or the program's own.
    |plain| match unsafe { (poll::has_ours(fds, count), Timeout::from_timespec(timeout.as_ref())) } {
        // SAFETY: likewise.
        (true, Some(time)) if size / size_of::<pollfd>() >= count as usize => unsafe {
            poll_on(fds, count, time, mask)
        },
        _ => plain(),
    }

    /// `select(2)`; Linux leaves the rest of the time in `timeout`.
    pub fn select(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval
    ) -> c_int;
    |plain| {
        let sets = Sets { count, read, write, except };
        // SAFETY: the program's sets.
        if !unsafe { sets.has_ours() } {
            return plain();
        }
        // SAFETY: likewise, and its time-out.
        unsafe { select_on(&sets, timeout) }
    }

    /// `pselect(2)`.
    pub fn pselect(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec,
        mask: *const sigset_t
    ) -> c_int;
    |plain| {
        let sets = Sets { count, read, write, except };
        // SAFETY: the program's sets; the time-out is null or the program's own.
        match unsafe { (sets.has_ours(), Timeout::from_timespec(timeout.as_ref())) } {
            // SAFETY: likewise.
            (true, Some(time)) => unsafe { pselect_on(&sets, time, mask) },
            _ => plain(),
        }
    }

    /// `epoll_create(2)`, and `epoll_create1`, whose argument is flags.
    pub fn epoll_create(size: c_int) -> c_int;
    |plain| made(lowest(plain))
}

/// Notes a new epoll set, unless `fd` is -1. Returns `fd`.
#[inline]
fn made(fd: c_int) -> c_int {
    if fd >= 0 {
        within(|| lifecycle::on_epoll(fd));
    }
    fd
}

#[inline(never)]
unsafe extern "C" fn poll_on(fds: *mut pollfd, count: nfds_t, timeout: Timeout, mask: *const sigset_t) -> c_int {
    // SAFETY: `fds` has n entries.
    let call = |fds, n, left| unsafe { kernel_poll(fds, n, left, mask) };
    // SAFETY: the program's array, which is not null (`has_ours`).
    let set = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    within_point(|| poll::poll(set, timeout, &call))
}

/// Waits by the kernel's ppoll(), for `poll` and `Sets::select`. A function that returns `impl Fn` would not do: such a
/// value counts as one with a destructor, and the forced unwind of its caller aborts (see `hooks`).
///
/// # Safety
/// `fds` has `count` entries; `mask` is null or the program's.
unsafe fn kernel_poll(fds: *mut pollfd, count: nfds_t, timeout: Timeout, mask: *const sigset_t) -> c_int {
    // SAFETY: by the contract.
    in_timespec(timeout, |left| unsafe {
        real::ppoll().cancellable()(fds, count, left, mask)
    })
}

#[inline(never)]
unsafe extern "C" fn select_on(sets: &Sets, timeout: *mut timeval) -> c_int {
    // SAFETY: null, or the program's own.
    let given = unsafe { timeout.as_mut() };
    let time = match &given {
        None => Timeout::Forever,
        Some(tv) if tv.tv_sec < 0 || tv.tv_usec < 0 => return crate::sys::errno::fail(libc::EINVAL),
        Some(tv) => Timeout::Ns(tv.tv_sec as u64 * 1_000_000_000 + tv.tv_usec as u64 * 1000),
    };
    let deadline = time.deadline();
    // SAFETY: `fds` has n entries.
    let call = |fds, n, left| unsafe { kernel_poll(fds, n, left, std::ptr::null()) };
    // SAFETY: the program's sets.
    let result = within_point(|| unsafe { sets.select(time, &call) });
    if let (Some(tv), Some(left)) = (given, deadline.left().to_timespec()) {
        // Linux leaves the rest of the time there.
        (tv.tv_sec, tv.tv_usec) = (left.tv_sec, left.tv_nsec / 1000);
    }
    result
}

#[inline(never)]
unsafe extern "C" fn pselect_on(sets: &Sets, timeout: Timeout, mask: *const sigset_t) -> c_int {
    // SAFETY: `fds` has n entries.
    let call = |fds, n, left| unsafe { kernel_poll(fds, n, left, mask) };
    // SAFETY: the program's sets.
    within_point(|| unsafe { sets.select(timeout, &call) })
}

/// `epoll_ctl(2)`.
#[inline]
pub unsafe extern "C" fn epoll_ctl(
    real: real::epoll_ctl,
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let entry = match operation {
        libc::EPOLL_CTL_ADD => within(|| lifecycle::on_epoll_add(fd)),
        _ => table::lookup(fd),
    };
    match entry {
        Entry::Socket(socket) if socket.promotion.stage() == Stage::Plain => {
            if let (libc::EPOLL_CTL_ADD, Entry::Epoll(set)) = (operation, table::lookup(epoll)) {
                set.on_plain();
            }
        }
        Entry::Socket(socket) if call::connection(fd).is_some() => {
            // SAFETY: the caller's arguments, as they are.
            return unsafe { epoll_ctl_on(socket, real, epoll, operation, fd, event) };
        }
        Entry::Epoll(inner) if operation == libc::EPOLL_CTL_ADD => within(|| inner.on_nested()),
        _ => {}
    }
    // SAFETY: the caller's arguments, as they are.
    unsafe { real(epoll, operation, fd, event) }
}

#[inline(never)]
unsafe extern "C" fn epoll_ctl_on(
    socket: &'static Socket,
    real: real::epoll_ctl,
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    let call = || unsafe { real(epoll, operation, fd, event) };
    match table::lookup(epoll) {
        Entry::Epoll(set) => {
            if !event.is_null() && !crate::sys::iov::is_plausible(event) {
                return call();
            }
            // SAFETY: null, or the program's own.
            let event = unsafe { event.as_ref() }.copied();
            within(|| set.control(socket, fd, operation, event, call))
        }
        _ => {
            let result = call();
            // The library has not seen this set being made, so only the kernel can report to it.
            if result == 0 && operation == libc::EPOLL_CTL_ADD {
                crate::process::pass::release(socket, rdmasock_core::stats::Reason::UnknownEpoll);
            }
            result
        }
    }
}

/// Defines the calls that wait on an epoll set. Each row has its time-out, and its mask, if any. Then come the time-out
/// as a [`Timeout`], `None` if the kernel refuses it, and the function that turns that back. A set may be unknown to
/// the library.
macro_rules! epoll_waits {
    ($(
        $(#[$what:meta])*
        pub fn $name:ident($timeout:ident: $type:ty $(, $mask:ident: $mask_type:ty)?) = $time:expr, $left:ident;
    )*) => {$(
        $(#[$what])*
        #[inline]
        pub unsafe extern "C" fn $name(
            real: real::$name, epoll: c_int, events: *mut epoll_event, count: c_int, $timeout: $type $(, $mask: $mask_type)?
        ) -> c_int {
            #[inline(never)]
            unsafe extern "C" fn served(
                set: Option<&'static Epoll>, real: real::$name, epoll: c_int, events: *mut epoll_event, count: c_int,
                $timeout: $type $(, $mask: $mask_type)?
            ) -> c_int {
                let Some(time) = $time else {
                    // SAFETY: the caller's arguments, as they are; the kernel refuses them.
                    return unsafe { real(epoll, events, count, $timeout $(, $mask)?) };
                };
                let call = |epoll: c_int, events: *mut epoll_event, count: c_int, left: Timeout| {
                    // SAFETY: `events` has `count` entries.
                    $left(left, |left| unsafe { real.cancellable()(epoll, events, count, left $(, $mask)?) })
                };
                match set {
                    // SAFETY: the program's array.
                    Some(set) => within_point(|| unsafe { set.wait(epoll, events, count, time, &call) }),
                    // SAFETY: likewise.
                    None => within(|| unsafe { without_ours(events, time, |left| call(epoll, events, count, left)) }),
                }
            }

            match table::lookup(epoll) {
                // SAFETY: the caller's arguments, as they are.
                Entry::Epoll(set) => unsafe { served(Some(set), real, epoll, events, count, $timeout $(, $mask)?) },
                // SAFETY: likewise.
                _ if Library::current().is_some() => unsafe { served(None, real, epoll, events, count, $timeout $(, $mask)?) },
                // SAFETY: likewise.
                _ => unsafe { real(epoll, events, count, $timeout $(, $mask)?) },
            }
        }
    )*};
}

epoll_waits! {
    /// `epoll_wait(2)`, time-out in ms.
    pub fn epoll_wait(timeout: c_int) = Some(Timeout::from_ms(timeout)), in_ms;
    /// `epoll_pwait(2)`, time-out in ms.
    pub fn epoll_pwait(timeout: c_int, mask: *const sigset_t) = Some(Timeout::from_ms(timeout)), in_ms;
    /// `epoll_pwait2(2)`.
    pub fn epoll_pwait2(timeout: *const timespec, mask: *const sigset_t) = given(timeout), in_timespec;
}

/// Returns the program's time-out; `None` if it is not a valid one.
fn given(timeout: *const timespec) -> Option<Timeout> {
    // SAFETY: null, or the program's own.
    let given = unsafe { crate::sys::iov::plausible(timeout) };
    Timeout::from_timespec(given).filter(|_| given.is_some() || timeout.is_null())
}

/// Waits for `time` by `call`, which takes ms.
#[inline]
fn in_ms(time: Timeout, call: impl FnOnce(c_int) -> c_int) -> c_int {
    let call = || call(time.to_ms());
    if time.is_zero() { call() } else { outside(call) }
}

/// Waits for `time` by `call`, which takes a `timespec`, or null to wait for ever.
#[inline]
fn in_timespec(time: Timeout, call: impl FnOnce(*const timespec) -> c_int) -> c_int {
    let left = time.to_timespec();
    let left = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let call = || call(left);
    if time.is_zero() { call() } else { outside(call) }
}
