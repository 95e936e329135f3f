//! Connections that end as by a reset: how the anchor is made to show what the link knows, and what calls say of it.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::SeqCst;

use rdmasock_core::os::kernel;
use rustix::event::PollFlags;

use crate::notify::ready;
use crate::objects::socket::Socket;
use crate::sys::sockopt;

/// The peer has not read what we sent, or has lost what it sent, and is gone: the next receive is to fail. If
/// TCP has had a RST it says so itself, to whichever call asks first. `is_shut`: the program has shut
/// sending down, and both ends together look like a RST.
pub fn report_reset(socket: &Socket, is_shut: bool) {
    let events = ready::kernel(socket, PollFlags::empty());
    if is_shut || events & libc::EPOLLHUP as u32 == 0 {
        socket.keep_error(libc::ECONNRESET);
    }
}

/// Whether a connection ends with this error, so that the kernel's socket holds it until a call has met it. (A send
/// says EPIPE, too, of a direction that is shut.)
pub fn is_end(error: c_int) -> bool {
    matches!(
        error,
        libc::ECONNRESET
            | libc::ETIMEDOUT
            | libc::ECONNABORTED
            | libc::EHOSTUNREACH
            | libc::EHOSTDOWN
            | libc::ENETUNREACH
            | libc::ENETDOWN
    )
}

/// A call that gives the program something else, as what it has taken until then, has met this error.
pub fn keep(socket: &Socket, error: c_int) {
    if is_end(error) {
        socket.keep_error(error);
    }
}

/// The error that is still to be told of and that the kernel does not tell, for the call that does.
#[cold]
pub fn take_untold(socket: &Socket) -> Option<c_int> {
    let error = socket.take_untold()?;
    socket.told.reset_told.store(true, SeqCst);
    Some(as_timed_out(socket, error))
}

/// What the link still held is lost: the connection is reset, at both ends. The caller holds the
/// control lock.
pub fn reset(socket: &Socket) {
    if let Some(fd) = socket.numbers.anchor_fd() {
        let _ = rustix::net::sockopt::set_socket_linger(fd, Some(std::time::Duration::ZERO));
        break_off(fd);
    }
}

/// As [`reset`], where another process has given TCP bytes that the peer is to have before that: what the peer's host
/// has not confirmed goes with the reset. It is waited for, for a moment. No lock is held.
pub fn reset_after_unsent(socket: &Socket) {
    const STEP: rustix::time::Timespec = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 200_000,
    };
    const STEPS: usize = 1000;
    let is_unsent = || {
        let _keeps_close_out = socket.control.lock();
        socket.numbers.anchor_fd().is_some_and(|fd| sockopt::unsent(fd) > 0)
    };
    for _ in 0..STEPS {
        if !is_unsent() {
            break;
        }
        let _ = rustix::thread::nanosleep(&STEP);
    }
    reset(socket);
}

/// Breaks the association: a RST goes out, and this end sees ECONNRESET, once. What is unread is dropped.
fn break_off(fd: BorrowedFd<'_>) {
    let unspecified = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as libc::sa_family_t,
        sa_data: [0; 14],
    };
    // SAFETY: a valid address.
    let _ = unsafe {
        kernel::call(
            libc::SYS_connect,
            [
                std::os::fd::AsRawFd::as_raw_fd(&fd) as usize,
                kernel::address(&raw const unspecified),
                size_of::<libc::sockaddr>(),
                0,
                0,
                0,
            ],
        )
    };
}

/// The peer has taken nothing for as long as the program lets it: the connection is over at both ends, as where the
/// kernel has found that. Of the reset that this is to the kernel, calls say ETIMEDOUT.
pub fn time_out(socket: &Socket) {
    let Some(_control) = socket.control.lock() else {
        return;
    };
    let Some(fd) = socket.numbers.anchor_fd() else { return };
    socket.told.timed_out.store(true, SeqCst);
    break_off(fd);
    // As in `on_reader_died`.
    let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
}

/// What a call on a connection that was [timed out](time_out) says in place of `error`: it is said once.
pub fn as_timed_out(socket: &Socket, error: c_int) -> c_int {
    let is_reset = error == libc::ECONNRESET;
    if is_reset && socket.told.timed_out.swap(false, SeqCst) {
        libc::ETIMEDOUT
    } else {
        error
    }
}

/// The same, for a call that has just failed.
#[cold]
pub fn say_timed_out(socket: &Socket) {
    crate::sys::errno::set(as_timed_out(socket, crate::sys::errno::get()));
}

/// The peer's process has ended, which TCP shows as the end of its direction, as a rule, and has not read what the link
/// held for it. Had that been in its socket a reset would have come in place of the end, to be seen by every call: so
/// the anchor is made what that would have made of it.
pub fn on_reader_died(socket: &Socket, is_shut: bool) {
    let Some(fd) = socket.numbers.anchor_fd() else { return };
    let has_ended = |bits: c_int| ready::kernel(socket, PollFlags::RDHUP) & bits as u32 != 0;
    // What TCP has yet to give would be lost.
    let is_read = rustix::io::ioctl_fionread(fd).is_ok_and(|n| n == 0);
    if is_shut || !is_read || !has_ended(libc::EPOLLRDHUP | libc::EPOLLHUP) {
        return report_reset(socket, is_shut);
    }
    if !has_ended(libc::EPOLLHUP) {
        break_off(fd);
        // Nothing is connected any more, so it fails; but both directions are shut from now on, as after a reset.
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
    }
    socket.take_untold();
    if socket.told.reset_told.load(SeqCst) {
        let _ = rustix::net::sockopt::socket_error(fd);
    }
}
