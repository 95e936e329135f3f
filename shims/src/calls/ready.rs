//! The calls that wait for readiness.

use crate::calls::numbers::lowest;
use crate::closing;
use crate::epoll::{Epoll, without_ours};
use crate::jump::{outside, within, within_point};
use crate::library::Library;
use crate::lifecycle;
use crate::poll::{self, Sets};
use crate::real::Cancellable;
use crate::socket::{Socket, Stage};
use crate::table::{self, Entry};
use crate::time::Timeout;

use crate::real::{
    EpollCreateFn, EpollCtlFn, EpollPwait2Fn, EpollPwaitFn, EpollWaitFn, PollChkFn, PollFn, PpollChkFn, PpollFn,
    PselectFn, SelectFn,
};
use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

/// `poll(2)`, time-out in ms.
#[inline]
pub unsafe extern "C" fn poll(real: PollFn, fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the program's array.
    if !unsafe { poll::has_ours(fds, count) } {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fds, count, timeout) };
    }
    // SAFETY: likewise.
    unsafe { poll_on(fds, count, Timeout::from_ms(timeout), std::ptr::null()) }
}

#[inline(never)]
unsafe extern "C" fn poll_on(fds: *mut pollfd, count: nfds_t, timeout: Timeout, mask: *const sigset_t) -> c_int {
    // SAFETY: `fds` has n entries.
    let call = |fds, n, left| unsafe { kernel_poll(fds, n, left, mask) };
    // SAFETY: the program's array.
    within_point(|| unsafe { poll::poll(fds, count, timeout, call) })
}

/// What `poll` and `Sets::select` call: the kernel's ppoll(). (Not a function that gives `impl Fn`: such a
/// value counts as one with a destructor, and the forced unwind of its caller aborts. See `calls`.)
///
/// # Safety
/// `fds` has `count` entries; `mask` is null or the program's.
unsafe fn kernel_poll(fds: *mut pollfd, count: nfds_t, timeout: Timeout, mask: *const sigset_t) -> c_int {
    let left = timeout.to_timespec();
    let left = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: by the contract.
    let call = || unsafe { crate::real::ppoll().cancellable()(fds, count, left, mask) };
    if timeout.is_zero() { call() } else { outside(call) }
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
    // SAFETY: the program's array.
    if size / size_of::<pollfd>() < count as usize || !unsafe { poll::has_ours(fds, count) } {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(fds, count, timeout, size) };
    }
    // SAFETY: likewise.
    unsafe { poll_on(fds, count, Timeout::from_ms(timeout), std::ptr::null()) }
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
    // SAFETY: null, or the program's own; its array.
    let (ours, time) = unsafe { (poll::has_ours(fds, count), Timeout::from_timespec(timeout.as_ref())) };
    match time {
        // SAFETY: the caller's arguments, as they are.
        Some(time) if ours => unsafe { poll_on(fds, count, time, mask) },
        // SAFETY: likewise.
        _ => unsafe { real(fds, count, timeout, mask) },
    }
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
    // SAFETY: null, or the program's own; its array.
    let (ours, time) = unsafe { (poll::has_ours(fds, count), Timeout::from_timespec(timeout.as_ref())) };
    match time {
        // SAFETY: the caller's arguments, as they are.
        Some(time) if ours && size / size_of::<pollfd>() >= count as usize => unsafe {
            poll_on(fds, count, time, mask)
        },
        // SAFETY: likewise.
        _ => unsafe { real(fds, count, timeout, mask, size) },
    }
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
    let sets = Sets {
        count,
        read,
        write,
        except,
    };
    // SAFETY: the program's sets.
    if !unsafe { sets.has_ours() } {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(count, read, write, except, timeout) };
    }
    // SAFETY: likewise.
    unsafe { select_on(&sets, timeout) }
}

#[inline(never)]
unsafe extern "C" fn select_on(sets: &Sets, timeout: *mut timeval) -> c_int {
    // SAFETY: null, or the program's own.
    let given = unsafe { timeout.as_mut() };
    let (time, begun) = match &given {
        None => (Timeout::Forever, 0),
        Some(tv) if tv.tv_sec < 0 || tv.tv_usec < 0 => return crate::errno::fail(libc::EINVAL),
        Some(tv) => (
            Timeout::Ns(tv.tv_sec as u64 * 1_000_000_000 + tv.tv_usec as u64 * 1000),
            crate::time::now_ns(),
        ),
    };
    // SAFETY: `fds` has n entries.
    let call = |fds, n, left| unsafe { kernel_poll(fds, n, left, std::ptr::null()) };
    // SAFETY: the program's sets.
    let result = within_point(|| unsafe { sets.select(time, call) });
    if let (Some(tv), Timeout::Ns(ns)) = (given, time) {
        // Linux leaves what is left of the time.
        let left = ns.saturating_sub(crate::time::now_ns().saturating_sub(begun));
        tv.tv_sec = (left / 1_000_000_000) as libc::time_t;
        tv.tv_usec = (left % 1_000_000_000 / 1000) as libc::suseconds_t;
    }
    result
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
    let sets = Sets {
        count,
        read,
        write,
        except,
    };
    // SAFETY: the program's sets; null, or its time-out.
    let (ours, time) = unsafe { (sets.has_ours(), Timeout::from_timespec(timeout.as_ref())) };
    match time {
        // SAFETY: the caller's arguments, as they are.
        Some(time) if ours => unsafe { pselect_on(&sets, time, mask) },
        // SAFETY: likewise.
        _ => unsafe { real(count, read, write, except, timeout, mask) },
    }
}

#[inline(never)]
unsafe extern "C" fn pselect_on(sets: &Sets, timeout: Timeout, mask: *const sigset_t) -> c_int {
    // SAFETY: `fds` has n entries.
    let call = |fds, n, left| unsafe { kernel_poll(fds, n, left, mask) };
    // SAFETY: the program's sets.
    within_point(|| unsafe { sets.select(timeout, call) })
}

/// `epoll_create(2)`.
#[inline]
pub unsafe extern "C" fn epoll_create(real: EpollCreateFn, size: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    let fd = lowest(|| unsafe { real(size) });
    if fd >= 0 {
        within(|| lifecycle::on_epoll(fd));
    }
    fd
}

/// `epoll_create1(2)`.
#[inline]
pub unsafe extern "C" fn epoll_create1(real: EpollCreateFn, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are: to `epoll_create` they are a size.
    unsafe { epoll_create(real, flags) }
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
    let entry = match operation {
        libc::EPOLL_CTL_ADD => within(|| lifecycle::on_epoll_add(fd)),
        _ => table::lookup(fd),
    };
    match entry {
        Entry::Socket(socket) if socket.promotion.stage() == Stage::Plain => {
            if let (libc::EPOLL_CTL_ADD, Entry::Epoll(set)) = (operation, table::lookup(epoll)) {
                set.on_plain();
            }
            // SAFETY: the caller's arguments, as they are.
            unsafe { real(epoll, operation, fd, event) }
        }
        // SAFETY: the caller's arguments, as they are.
        Entry::Socket(_) if closing::connection(fd).is_none() => unsafe { real(epoll, operation, fd, event) },
        // SAFETY: likewise.
        Entry::Socket(socket) => unsafe { epoll_ctl_on(socket, real, epoll, operation, fd, event) },
        Entry::Epoll(inner) => {
            if operation == libc::EPOLL_CTL_ADD {
                within(|| inner.on_nested());
            }
            // SAFETY: likewise.
            unsafe { real(epoll, operation, fd, event) }
        }
        // SAFETY: likewise.
        _ => unsafe { real(epoll, operation, fd, event) },
    }
}

#[inline(never)]
unsafe extern "C" fn epoll_ctl_on(
    socket: &'static Socket,
    real: EpollCtlFn,
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    let call = || unsafe { real(epoll, operation, fd, event) };
    match table::lookup(epoll) {
        Entry::Epoll(set) => {
            if !event.is_null() && !crate::iov::is_plausible(event) {
                return call();
            }
            // SAFETY: null, or the program's own.
            let event = unsafe { event.as_ref() }.copied();
            within(|| set.control(socket, fd, operation, event, call))
        }
        _ => {
            let result = call();
            // A set that the library has not seen being made: only the kernel can report to it.
            if result == 0 && operation == libc::EPOLL_CTL_ADD {
                crate::pass::release(socket, rdmasock_core::stats::Reason::UnknownEpoll);
            }
            result
        }
    }
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
    match table::lookup(epoll) {
        // SAFETY: the caller's arguments, as they are.
        Entry::Epoll(set) => unsafe { epoll_wait_on(set, real, epoll, events, count, timeout) },
        // SAFETY: likewise.
        _ if Library::current().is_some() => unsafe { epoll_wait_unknown(real, epoll, events, count, timeout) },
        // SAFETY: likewise.
        _ => unsafe { real(epoll, events, count, timeout) },
    }
}

#[inline(never)]
unsafe extern "C" fn epoll_wait_unknown(
    real: EpollWaitFn,
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
) -> c_int {
    let call = |t: Timeout| {
        // SAFETY: the caller's arguments, as they are.
        let call = || unsafe { real.cancellable()(epoll, events, count, t.to_ms()) };
        if t.is_zero() { call() } else { outside(call) }
    };
    // SAFETY: the program's array.
    within(|| unsafe { without_ours(events, Timeout::from_ms(timeout), call) })
}

#[inline(never)]
unsafe extern "C" fn epoll_wait_on(
    set: &'static Epoll,
    real: EpollWaitFn,
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
) -> c_int {
    let call = |epoll: c_int, e: *mut epoll_event, n: c_int, t: Timeout| {
        // SAFETY: `e` has n entries.
        let call = || unsafe { real.cancellable()(epoll, e, n, t.to_ms()) };
        if t.is_zero() { call() } else { outside(call) }
    };
    // SAFETY: the program's array.
    within_point(|| unsafe { set.wait(epoll, events, count, Timeout::from_ms(timeout), &call) })
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
    match table::lookup(epoll) {
        // SAFETY: the caller's arguments, as they are.
        Entry::Epoll(set) => unsafe { epoll_pwait_on(set, real, epoll, events, count, timeout, mask) },
        // SAFETY: likewise.
        _ if Library::current().is_some() => unsafe { epoll_pwait_unknown(real, epoll, events, count, timeout, mask) },
        // SAFETY: likewise.
        _ => unsafe { real(epoll, events, count, timeout, mask) },
    }
}

#[inline(never)]
unsafe extern "C" fn epoll_pwait_unknown(
    real: EpollPwaitFn,
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    let call = |t: Timeout| {
        // SAFETY: the caller's arguments, as they are.
        let call = || unsafe { real.cancellable()(epoll, events, count, t.to_ms(), mask) };
        if t.is_zero() { call() } else { outside(call) }
    };
    // SAFETY: the program's array.
    within(|| unsafe { without_ours(events, Timeout::from_ms(timeout), call) })
}

#[inline(never)]
unsafe extern "C" fn epoll_pwait_on(
    set: &'static Epoll,
    real: EpollPwaitFn,
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    let call = |epoll: c_int, e: *mut epoll_event, n: c_int, t: Timeout| {
        // SAFETY: `e` has n entries.
        let call = || unsafe { real.cancellable()(epoll, e, n, t.to_ms(), mask) };
        if t.is_zero() { call() } else { outside(call) }
    };
    // SAFETY: the program's array.
    within_point(|| unsafe { set.wait(epoll, events, count, Timeout::from_ms(timeout), &call) })
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
    match table::lookup(epoll) {
        // SAFETY: the caller's arguments, as they are.
        Entry::Epoll(set) => unsafe { epoll_pwait2_on(set, real, epoll, events, count, timeout, mask) },
        // SAFETY: likewise.
        _ if Library::current().is_some() => unsafe { epoll_pwait2_unknown(real, epoll, events, count, timeout, mask) },
        // SAFETY: likewise.
        _ => unsafe { real(epoll, events, count, timeout, mask) },
    }
}

#[inline(never)]
unsafe extern "C" fn epoll_pwait2_unknown(
    real: EpollPwait2Fn,
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: null, or the program's own.
    let (time, is_odd) = unsafe {
        let given = crate::iov::plausible(timeout);
        (Timeout::from_timespec(given), given.is_none() && !timeout.is_null())
    };
    let Some(time) = time.filter(|_| !is_odd) else {
        // SAFETY: the caller's arguments, as they are: the kernel says what is wrong.
        return unsafe { real(epoll, events, count, timeout, mask) };
    };
    let call = |t: Timeout| {
        let left = t.to_timespec();
        let left = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the caller's arguments, as they are.
        let call = || unsafe { real.cancellable()(epoll, events, count, left, mask) };
        if t.is_zero() { call() } else { outside(call) }
    };
    // SAFETY: the program's array.
    within(|| unsafe { without_ours(events, time, call) })
}

#[inline(never)]
unsafe extern "C" fn epoll_pwait2_on(
    set: &'static Epoll,
    real: EpollPwait2Fn,
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: null, or the program's own.
    let Some(time) = Timeout::from_timespec(unsafe { timeout.as_ref() }) else {
        return crate::errno::fail(libc::EINVAL);
    };
    let call = |epoll: c_int, e: *mut epoll_event, n: c_int, t: Timeout| {
        let left = t.to_timespec();
        let left = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: `e` has n entries.
        let call = || unsafe { real.cancellable()(epoll, e, n, left, mask) };
        if t.is_zero() { call() } else { outside(call) }
    };
    // SAFETY: the program's array.
    within_point(|| unsafe { set.wait(epoll, events, count, time, &call) })
}
