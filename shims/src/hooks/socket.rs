//! The calls that make, connect, configure and shut sockets. `bind`, `getsockname` and `getpeername` are not hooked:
//! the TCP socket answers them.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Release};

use libc::{c_int, c_void, sockaddr, socklen_t};
use rdmasock_core::stats::Reason;
use rdmasock_core::stream::connection;

use crate::data::{rx, tx};
use crate::hooks::fd::lowest;
use crate::hooks::{hooks, report};
use crate::notify::fork::reclaim;
use crate::notify::table::Entry;
use crate::notify::{call, reset, table};
use crate::objects::listener::Listener;
use crate::objects::socket::{Farewell, Mode, Socket};
use crate::process::pass;
use crate::signals::jump::{or_if_cancelled, within};
use crate::startup::lifecycle;
use crate::sys::real::Cancellable;
use crate::sys::sockopt::{Keepalive, Name};
use crate::sys::{errno, iov, real, sockopt};

/// The option by which a program reads a connection's state from the kernel, or sets it (linux/tcp.h).
const TCP_REPAIR: c_int = 19;

const NODELAY: Name = (libc::IPPROTO_TCP, libc::TCP_NODELAY);
const ERROR: Name = (libc::SOL_SOCKET, libc::SO_ERROR);
const CORK: Name = (libc::IPPROTO_TCP, libc::TCP_CORK);
/// TCP_ZEROCOPY_RECEIVE: receives into memory that the program has mapped from the socket (linux/tcp.h).
const ZEROCOPY_RECEIVE: Name = (libc::IPPROTO_TCP, 35);

/// `socket(2)`.
#[inline]
pub unsafe extern "C" fn socket(real: real::socket, domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    let fd = lowest(|| unsafe { real(domain, kind, protocol) });
    let stream = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == libc::SOCK_STREAM;
    let inet = domain == libc::AF_INET || domain == libc::AF_INET6;
    if fd >= 0 && stream && inet && (protocol == 0 || protocol == libc::IPPROTO_TCP) {
        within(|| lifecycle::on_socket(fd, kind & libc::SOCK_NONBLOCK != 0));
    }
    fd
}

hooks! {
    /// `listen(2)`.
    pub fn listen(fd: c_int, backlog: c_int) -> c_int;
    |plain| {
        let result = plain();
        if result == 0 {
            within(|| lifecycle::on_listen(fd));
        }
        result
    }

    /// `accept(2)`.
    pub fn accept(fd: c_int, address: *mut sockaddr, address_len: *mut socklen_t) -> c_int;
    |blocking plain| accepted(fd, false, || lowest(plain))

    /// `accept4(2)`.
    pub fn accept4(fd: c_int, address: *mut sockaddr, address_len: *mut socklen_t, flags: c_int) -> c_int;
    |blocking plain| accepted(fd, flags & libc::SOCK_NONBLOCK != 0, || lowest(plain))
}

#[inline]
fn accepted(fd: c_int, nonblocking: bool, accept: impl FnOnce() -> c_int) -> c_int {
    match table::lookup(fd) {
        Entry::Listener(listener) => within(|| accept_from(listener, nonblocking, accept)),
        _ => {
            let new = accept();
            if new >= 0 {
                within(|| lifecycle::on_accept_of_unknown(fd, new, nonblocking));
            }
            new
        }
    }
}

/// Accepts a connection. Keeps the listener object meanwhile: another thread may close its fd, and the kernel's
/// accept() may still return a connection.
#[inline(never)]
fn accept_from(listener: &'static Listener, nonblocking: bool, accept: impl FnOnce() -> c_int) -> c_int {
    if !listener.retain() {
        // Another thread has closed the listener since the fd was looked up.
        return or_if_cancelled(accept, || ());
    }
    let new = or_if_cancelled(accept, || listener.release());
    if new >= 0 {
        lifecycle::on_accept(listener, new, nonblocking);
    }
    let errno = errno::get();
    listener.release();
    errno::set(errno);
    new
}

/// `connect(2)`.
#[inline]
pub unsafe extern "C" fn connect(
    real: real::connect,
    fd: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> c_int {
    // SAFETY: `address` is null or the program's own, and only its family is read.
    let family = unsafe { address.as_ref() }.map_or(0, |a| c_int::from(a.sa_family));
    if family == libc::AF_UNSPEC && !address.is_null() && table::socket(fd).is_some() {
        within(|| lifecycle::before_disconnect(fd));
    }
    if family != libc::AF_INET && family != libc::AF_INET6 {
        // SAFETY: the caller's arguments are passed on unchanged.
        return unsafe { real(fd, address, address_len) };
    }
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { connect_on(real, fd, address, address_len) }
}

#[inline(never)]
unsafe extern "C" fn connect_on(
    real: real::connect,
    fd: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> c_int {
    let before = table::token(fd);
    // SAFETY: the caller's arguments are passed on unchanged.
    let result = unsafe { real.cancellable()(fd, address, address_len) };
    let connects = result == 0 || matches!(errno::get(), libc::EINPROGRESS | libc::EINTR);
    // The fd may stand for another file by now.
    if connects && table::token(fd) == before {
        within(|| lifecycle::on_connect(fd));
    }
    result
}

/// `shutdown(2)`.
#[inline]
pub unsafe extern "C" fn shutdown(real: real::shutdown, fd: c_int, how: c_int) -> c_int {
    match call::connection(fd) {
        // SAFETY: the caller's arguments are passed on unchanged.
        None => unsafe { real(fd, how) },
        // SAFETY: the caller's arguments are passed on unchanged.
        Some(socket) => unsafe { shutdown_on(socket, real, fd, how) },
    }
}

#[inline(never)]
unsafe extern "C" fn shutdown_on(socket: &'static Socket, real: real::shutdown, fd: c_int, how: c_int) -> c_int {
    // SAFETY: shutdown(2) on the caller's own socket takes no address.
    let call = |how| unsafe { real(fd, how) };
    within(|| {
        reclaim(socket);
        let sends = how == libc::SHUT_WR || how == libc::SHUT_RDWR;
        let mut farewell = Farewell::NONE;
        let result = if how == libc::SHUT_RD && connection::shut_receiving(socket) {
            0
        } else if sends && connection::shut(socket, how == libc::SHUT_RDWR, &mut farewell) {
            if how == libc::SHUT_WR { 0 } else { call(libc::SHUT_RD) }
        } else {
            call(how)
        };
        farewell.tell();
        // Once both halves are shut, a hang-up is reported, whichever half was shut first.
        if result == 0 && (how != libc::SHUT_WR || socket.rx_shut.load(Acquire)) {
            rx::shut(socket);
        }
        result
    })
}

/// `getsockopt(2)`.
#[inline]
pub unsafe extern "C" fn getsockopt(
    real: real::getsockopt,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    value_len: *mut socklen_t,
) -> c_int {
    let option = (level, name);
    if is_kept(option) || [NODELAY, ERROR, ZEROCOPY_RECEIVE].contains(&option) || report::is_corrected(option) {
        // SAFETY: the caller's arguments are passed on unchanged.
        return unsafe { getsockopt_on(real, fd, level, name, value, value_len) };
    }
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { real(fd, level, name, value, value_len) }
}

#[inline(never)]
unsafe extern "C" fn getsockopt_on(
    real: real::getsockopt,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    value_len: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    let ask = || unsafe { real(fd, level, name, value, value_len) };
    if is_kept((level, name)) {
        // SAFETY: `ask` is getsockopt(2) for `value` and `value_len`.
        return unsafe { get_kept(fd, (level, name), value.cast(), value_len, ask) };
    }
    match call::connection(fd) {
        None => ask(),
        // SAFETY: `ask` is getsockopt(2) for `value` and `value_len`.
        Some(socket) => within(|| unsafe { get_corrected(socket, (level, name), value.cast(), value_len, ask) }),
    }
}

/// Calls getsockopt(2), and corrects the value by what only the library knows.
///
/// # Safety
/// `ask` is getsockopt(2) for `value` and `len`.
unsafe fn get_corrected(
    socket: &'static Socket,
    option: Name,
    value: *mut u8,
    len: *mut socklen_t,
    ask: impl FnOnce() -> c_int,
) -> c_int {
    if option == ZEROCOPY_RECEIVE {
        pass::release(socket, Reason::ZeroCopy);
    }
    if option == NODELAY {
        return asked_while_quiet(socket, ask);
    }
    let result = ask();
    if option == ERROR && result == 0 && socket.has_untold() {
        // SAFETY: the kernel has just written `*len` bytes there, by the contract.
        unsafe { correct_error(socket, value, *len as usize) };
    }
    if result == 0 && report::is_corrected(option) {
        let errno = errno::get();
        // SAFETY: the kernel has just written `*len` bytes there, by the contract.
        unsafe { report::correct(socket, option, value, *len as usize) };
        errno::set(errno);
    }
    result
}

/// Corrects SO_ERROR for a connection with an error that the library keeps and the kernel does not report.
///
/// # Safety
/// `value` is valid for reads and writes of `len` bytes.
unsafe fn correct_error(socket: &Socket, value: *mut u8, len: usize) {
    let mut error = [0; size_of::<c_int>()];
    let len = len.min(error.len());
    // SAFETY: `value` is valid for `len` bytes, by the contract.
    unsafe { std::ptr::copy_nonoverlapping(value, error.as_mut_ptr(), len) };
    let error = match c_int::from_ne_bytes(error) {
        0 => reset::take_untold(socket).unwrap_or(0),
        error => {
            // An error is reported once. The kernel has just reported one, so the library forgets its own.
            socket.take_untold();
            error
        }
    };
    // SAFETY: `value` is valid for `len` bytes, by the contract.
    unsafe { std::ptr::copy_nonoverlapping(error.to_ne_bytes().as_ptr(), value, len) };
}

/// Makes a call on TCP_NODELAY under the send lock. Without the lock, the call could come while `connection::flush` has
/// the option on for a marker, although the program has turned it off.
#[inline(never)]
fn asked_while_quiet(socket: &'static Socket, ask: impl FnOnce() -> c_int) -> c_int {
    let _tx = socket.tx.lock();
    ask()
}

/// Returns whether the library may keep the program's value of the option while the kernel has another.
#[inline]
fn is_kept(option: Name) -> bool {
    option == CORK || Keepalive::is_concerned(option)
}

/// Calls getsockopt(2), and replaces the value if the library keeps the program's value.
///
/// # Safety
/// `ask` is getsockopt(2) for `value` and `len`.
unsafe fn get_kept(fd: c_int, option: Name, value: *mut u8, len: *mut socklen_t, ask: impl FnOnce() -> c_int) -> c_int {
    let kept = || {
        let socket = call::connection(fd)?;
        if option == CORK {
            let is_kept = socket.tx_mode.load(Acquire) == Mode::Link;
            return is_kept.then(|| c_int::from(socket.options.corked.load(Acquire)));
        }
        socket.keepalive.get(option)
    };
    // The library may begin to keep the value, or stop, during the kernel's call.
    let before = kept();
    let result = ask();
    if result == 0
        && let Some(kept) = kept().or(before)
    {
        let kept = kept.to_ne_bytes();
        // SAFETY: the kernel has just written `*len` bytes there, by the contract.
        unsafe { std::ptr::copy_nonoverlapping(kept.as_ptr(), value, kept.len().min(*len as usize)) };
    }
    result
}

/// `setsockopt(2)`.
#[inline]
pub unsafe extern "C" fn setsockopt(
    real: real::setsockopt,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    value_len: socklen_t,
) -> c_int {
    match call::connection(fd) {
        // SAFETY: the caller's arguments are passed on unchanged.
        None => unsafe { real(fd, level, name, value, value_len) },
        Some(socket) => {
            let option = (level, name);
            if level == libc::IPPROTO_TCP && name == libc::TCP_ULP {
                // TCP_ULP switches on the kernel's TLS, which works on bytes that go through the kernel.
                tx::take_back(socket, Reason::KernelTls);
            }
            if option == CORK
                && iov::is_plausible(value.cast::<c_int>())
                && value_len as usize >= size_of::<c_int>()
                // SAFETY: `value` is the program's option, which is at least as long as an int.
                && tx::cork(socket, unsafe { value.cast::<c_int>().read_unaligned() } != 0)
            {
                return 0;
            }
            if level == libc::IPPROTO_TCP && name == TCP_REPAIR {
                // With TCP_REPAIR the program reads the unread and unsent bytes from the kernel, which sends nothing
                // meanwhile.
                pass::release(socket, Reason::Unsupported);
            }
            // SAFETY: the caller's arguments are passed on unchanged.
            let set = || unsafe { real(fd, level, name, value, value_len) };
            let result = if option == NODELAY {
                within(|| asked_while_quiet(socket, set))
            } else if Keepalive::is_concerned(option) {
                let ask = || match set() {
                    // SAFETY: the kernel has just read the option's int there.
                    0 => Ok(unsafe { value.cast::<c_int>().read_unaligned() }),
                    result => Err(result),
                };
                // SAFETY: `fd` is the program's own, in the middle of its call.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                within(|| socket.keepalive.on_set(fd, option, ask))
            } else {
                set()
            };
            socket.blocking.on_set(level, name);
            if level == libc::SOL_SOCKET && matches!(name, libc::SO_SNDBUF | libc::SO_SNDBUFFORCE) {
                tx::on_buffer_size(socket);
            }
            if sockopt::is_stamp(option) {
                socket.options.forget_stamps();
            }
            if result == 0 && sockopt::may_be_beyond_links(option) {
                // SAFETY: `fd` is the program's own, in the middle of its call.
                pass::on_option_beyond_links(socket, unsafe { BorrowedFd::borrow_raw(fd) });
            }
            if result == 0 && [sockopt::INQ, sockopt::USER_TIMEOUT].contains(&option) {
                // SAFETY: the kernel has just read the option's int there.
                let value = unsafe { value.cast::<c_int>().read_unaligned() };
                if option == sockopt::INQ {
                    socket.options.tells_more.store(value != 0, Release);
                } else {
                    socket.options.user_timeout.store(value.cast_unsigned(), Release);
                }
            }
            result
        }
    }
}
