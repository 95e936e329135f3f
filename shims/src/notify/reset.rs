//! Connections that end by a reset. The TCP socket does not know of a reset that happens on the link, so this module
//! makes it report one. It also keeps the errno that a later call has to return.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::SeqCst;

use rustix::event::PollFlags;

use crate::notify::ready;
use crate::objects::socket::Socket;
use crate::sys::{sockopt, time};

/// Makes the next receive fail with ECONNRESET: the peer is gone, and has left data unread or has lost data that it
/// sent. If TCP itself has received a RST, the kernel reports it to the first call, and no error is kept here.
/// `is_shut`: the program has shut down sending. If it has, HUP does not prove a RST, so the error is kept in any case.
pub(crate) fn report_reset(socket: &Socket, is_shut: bool) {
    let events = ready::kernel(socket, PollFlags::empty());
    if is_shut || events & libc::EPOLLHUP as u32 == 0 {
        socket.keep_error(libc::ECONNRESET);
    }
}

/// Whether `error` ends a connection. The kernel's socket keeps such an error until a call returns it. EPIPE is not
/// such an error, because a send also returns EPIPE after shutdown().
pub(crate) fn is_end(error: c_int) -> bool {
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

/// Keeps `error` for the next call, if it ends the connection. The present call returns something else, such as the
/// bytes moved so far.
pub(crate) fn keep(socket: &Socket, error: c_int) {
    if is_end(error) {
        socket.keep_error(error);
    }
}

/// Returns the kept error, and forgets it. The kernel does not report this error, so the caller's call fails with it.
/// `None` if no error is kept.
#[cold]
pub(crate) fn take_untold(socket: &Socket) -> Option<c_int> {
    let error = socket.take_untold()?;
    socket.told.reset_told.store(true, SeqCst);
    Some(error)
}

/// Resets the connection at both ends; data that is still on the link is lost. The caller holds the control lock.
pub(crate) fn reset(socket: &Socket) {
    if let Some(fd) = socket.numbers.anchor_fd() {
        let _ = rustix::net::sockopt::set_socket_linger(fd, Some(std::time::Duration::ZERO));
        break_off(fd);
    }
}

/// Waits until TCP has delivered its bytes, then resets the connection as [`reset`] does. Another process has written
/// those bytes to TCP, and a reset discards all bytes that the peer's host has not confirmed. The wait is at most
/// `STEPS` times `STEP`, 200 ms. The caller holds no lock.
pub(crate) fn reset_after_unsent(socket: &Socket) {
    const STEP: i64 = 200_000;
    const STEPS: usize = 1000;
    let is_unsent = || {
        let _keeps_close_out = socket.control.lock();
        socket.numbers.anchor_fd().is_some_and(|fd| sockopt::unsent(fd) > 0)
    };
    for _ in 0..STEPS {
        if !is_unsent() {
            break;
        }
        time::sleep(STEP);
    }
    reset(socket);
}

/// Disconnects the TCP socket: a RST goes out, this end gets ECONNRESET once, and unread bytes are dropped.
fn break_off(fd: BorrowedFd<'_>) {
    let _ = rustix::net::connect_unspec(fd);
}

/// Makes the TCP socket report the same as after a RST, because the peer's process has ended without reading what the
/// link held. TCP usually shows only the end of the peer's direction. If the unread data had been in the peer's TCP
/// socket, the peer's kernel would have sent a RST, which every call sees. `is_shut` is as for `report_reset`.
pub(crate) fn on_reader_died(socket: &Socket, is_shut: bool) {
    let Some(fd) = socket.numbers.anchor_fd() else { return };
    let has_ended = |bits: c_int| ready::kernel(socket, PollFlags::RDHUP) & bits as u32 != 0;
    // `break_off` would drop unread bytes of TCP. If there are any, `report_reset` is used instead.
    let is_read = rustix::io::ioctl_fionread(fd).is_ok_and(|n| n == 0);
    if is_shut || !is_read || !has_ended(libc::EPOLLRDHUP | libc::EPOLLHUP) {
        return report_reset(socket, is_shut);
    }
    if !has_ended(libc::EPOLLHUP) {
        break_off(fd);
        // shutdown() fails, since the socket is not connected any more. But both directions are shut from now on, as
        // after a reset.
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
    }
    socket.take_untold();
    if socket.told.reset_told.load(SeqCst) {
        let _ = rustix::net::sockopt::socket_error(fd);
    }
}
