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
    // SAFETY: `fds` is null or the program's array of `count` entries.
    |plain| match unsafe { poll::has_ours(fds, count) } {
        // SAFETY: `fds` is the program's array of `count` entries.
        true => unsafe { poll_on(fds, count, Timeout::from_ms(timeout), std::ptr::null()) },
        false => plain(),
    }

    /// `poll(2)` of a fortified program; libc aborts if `count` entries are longer than `size` bytes.
    pub fn poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, size: size_t) -> c_int;
    // SAFETY: `fds` is null or the program's array of `count` entries.
    |plain| match size / size_of::<pollfd>() >= count as usize && unsafe { poll::has_ours(fds, count) } {
        // SAFETY: `fds` is the program's array of `count` entries.
        true => unsafe { poll_on(fds, count, Timeout::from_ms(timeout), std::ptr::null()) },
        false => plain(),
    }

    /// `ppoll(2)`.
    pub fn ppoll(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t
    ) -> c_int;
    // SAFETY: `fds` is null or the program's array of `count` entries, and `timeout` is null or the program's.
    |plain| match unsafe { (poll::has_ours(fds, count), Timeout::from_timespec(timeout.as_ref())) } {
        // SAFETY: `fds` is the program's array of `count` entries, and `mask` is null or the program's.
        (true, Some(time)) => unsafe { poll_on(fds, count, time, mask) },
        _ => plain(),
    }

    /// `ppoll(2)` of a fortified program; libc aborts if `count` entries are longer than `size` bytes.
    pub fn ppoll_chk(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, size: size_t
    ) -> c_int;
    // SAFETY: `fds` is null or the program's array of `count` entries, and `timeout` is null or the program's.
    |plain| match unsafe { (poll::has_ours(fds, count), Timeout::from_timespec(timeout.as_ref())) } {
        // SAFETY: `fds` is the program's array of `count` entries, and `mask` is null or the program's.
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
        // SAFETY: the sets are null or the program's, with `count` bits.
        if !unsafe { sets.has_ours() } {
            return plain();
        }
        // SAFETY: the sets are the program's, and `timeout` is null or the program's.
        unsafe { select_on(&sets, timeout) }
    }

    /// `pselect(2)`.
    pub fn pselect(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec,
        mask: *const sigset_t
    ) -> c_int;
    |plain| {
        let sets = Sets { count, read, write, except };
        // SAFETY: the sets are null or the program's, with `count` bits; `timeout` is null or the program's.
        match unsafe { (sets.has_ours(), Timeout::from_timespec(timeout.as_ref())) } {
            // SAFETY: the sets are the program's, and `mask` is null or the program's.
            (true, Some(time)) => unsafe { pselect_on(&sets, time, mask) },
            _ => plain(),
        }
    }

    /// `epoll_create(2)`, and `epoll_create1`, whose argument is flags.
    pub fn epoll_create(size: c_int) -> c_int;
    |plain| made(lowest(plain))
}

/// Makes the object of the new epoll set `fd`, unless `fd` is -1. Returns `fd`.
#[inline]
fn made(fd: c_int) -> c_int {
    if fd >= 0 {
        within(|| lifecycle::on_epoll(fd));
    }
    fd
}

#[inline(never)]
unsafe extern "C" fn poll_on(fds: *mut pollfd, count: nfds_t, timeout: Timeout, mask: *const sigset_t) -> c_int {
    // SAFETY: the caller of this closure passes an array `fds` of `n` entries.
    let call = |fds, n, left| unsafe { kernel_poll(fds, n, left, mask) };
    // SAFETY: `fds` is the program's array of `count` entries. It is not null, since `has_ours` has returned true.
    let set = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    within_point(|| poll::poll(set, timeout, &call))
}

/// Waits by libc's ppoll(), for `poll` and `Sets::select`. A function that returned this call as an `impl Fn` would not
/// do: the compiler assumes that such a value has a destructor, so the forced unwind of `pthread_cancel` would abort in
/// its caller (see `hooks`).
///
/// # Safety
/// `fds` has `count` entries; `mask` is null or the program's.
unsafe fn kernel_poll(fds: *mut pollfd, count: nfds_t, timeout: Timeout, mask: *const sigset_t) -> c_int {
    // SAFETY: `fds` has `count` entries, and `mask` is null or the program's, by the contract.
    in_timespec(timeout, |left| unsafe {
        real::ppoll().cancellable()(fds, count, left, mask)
    })
}

#[inline(never)]
unsafe extern "C" fn select_on(sets: &Sets, timeout: *mut timeval) -> c_int {
    // SAFETY: `timeout` is null or the program's own.
    let given = unsafe { timeout.as_mut() };
    let time = match &given {
        None => Timeout::Forever,
        Some(tv) if tv.tv_sec < 0 || tv.tv_usec < 0 => return crate::sys::errno::fail(libc::EINVAL),
        Some(tv) => Timeout::Ns(tv.tv_sec as u64 * 1_000_000_000 + tv.tv_usec as u64 * 1000),
    };
    let deadline = time.deadline();
    // SAFETY: the caller of this closure passes an array `fds` of `n` entries.
    let call = |fds, n, left| unsafe { kernel_poll(fds, n, left, std::ptr::null()) };
    // SAFETY: the sets are null or the program's, with `count` bits.
    let result = within_point(|| unsafe { sets.select(time, &call) });
    if let (Some(tv), Some(left)) = (given, deadline.left().to_timespec()) {
        // As in Linux, the rest of the time is left in the program's `timeout`.
        (tv.tv_sec, tv.tv_usec) = (left.tv_sec, left.tv_nsec / 1000);
    }
    result
}

#[inline(never)]
unsafe extern "C" fn pselect_on(sets: &Sets, timeout: Timeout, mask: *const sigset_t) -> c_int {
    // SAFETY: the caller of this closure passes an array `fds` of `n` entries.
    let call = |fds, n, left| unsafe { kernel_poll(fds, n, left, mask) };
    // SAFETY: the sets are null or the program's, with `count` bits.
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
            // SAFETY: the caller's arguments are passed on unchanged.
            return unsafe { epoll_ctl_on(socket, real, epoll, operation, fd, event) };
        }
        Entry::Epoll(inner) if operation == libc::EPOLL_CTL_ADD => within(|| inner.on_nested()),
        _ => {}
    }
    // SAFETY: the caller's arguments are passed on unchanged.
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
    // SAFETY: the caller's arguments are passed on unchanged.
    let call = || unsafe { real(epoll, operation, fd, event) };
    match table::lookup(epoll) {
        Entry::Epoll(set) => {
            if !event.is_null() && !crate::sys::iov::is_plausible(event) {
                return call();
            }
            // SAFETY: `event` is null or the program's own.
            let event = unsafe { event.as_ref() }.copied();
            within(|| set.control(socket, fd, operation, event, call))
        }
        _ => {
            let result = call();
            // No hook has seen this set being made, so only the kernel can report the socket's readiness to it.
            if result == 0 && operation == libc::EPOLL_CTL_ADD {
                crate::process::pass::release(socket, rdmasock_core::stats::Reason::UnknownEpoll);
            }
            result
        }
    }
}

/// Defines the hooks that wait on an epoll set. A row has the hook's time-out argument, and its mask, if any. Behind
/// `=` stand the time-out as a [`Timeout`], `None` if the kernel refuses it, and the function that converts it back for
/// libc's call. The hooks also serve sets that the library does not know.
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
                    // SAFETY: the caller's arguments are passed on unchanged; the kernel refuses them.
                    return unsafe { real(epoll, events, count, $timeout $(, $mask)?) };
                };
                let call = |epoll: c_int, events: *mut epoll_event, count: c_int, left: Timeout| {
                    // SAFETY: the caller of this closure passes an array `events` of `count` entries.
                    $left(left, |left| unsafe { real.cancellable()(epoll, events, count, left $(, $mask)?) })
                };
                match set {
                    // SAFETY: `events` is the program's array of `count` entries.
                    Some(set) => within_point(|| unsafe { set.wait(epoll, events, count, time, &call) }),
                    // SAFETY: `events` is the program's array of `count` entries.
                    None => within(|| unsafe { without_ours(events, time, |left| call(epoll, events, count, left)) }),
                }
            }

            match table::lookup(epoll) {
                // SAFETY: the caller's arguments are passed on unchanged.
                Entry::Epoll(set) => unsafe { served(Some(set), real, epoll, events, count, $timeout $(, $mask)?) },
                // SAFETY: the caller's arguments are passed on unchanged.
                _ if Library::current().is_some() => unsafe { served(None, real, epoll, events, count, $timeout $(, $mask)?) },
                // SAFETY: the caller's arguments are passed on unchanged.
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

/// Returns the program's time-out; `None` if it is invalid.
fn given(timeout: *const timespec) -> Option<Timeout> {
    // SAFETY: `timeout` is null, the program's own, or an address where no memory can be.
    let given = unsafe { crate::sys::iov::plausible(timeout) };
    Timeout::from_timespec(given).filter(|_| given.is_some() || timeout.is_null())
}

/// Makes `call`, which takes its time-out in ms, with `time`.
#[inline]
fn in_ms(time: Timeout, call: impl FnOnce(c_int) -> c_int) -> c_int {
    let call = || call(time.to_ms());
    if time.is_zero() { call() } else { outside(call) }
}

/// Makes `call`, which takes its time-out as a `timespec`, or null to wait for ever, with `time`.
#[inline]
fn in_timespec(time: Timeout, call: impl FnOnce(*const timespec) -> c_int) -> c_int {
    let left = time.to_timespec();
    let left = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let call = || call(left);
    if time.is_zero() { call() } else { outside(call) }
}
