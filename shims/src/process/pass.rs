//! Takes sockets back to TCP with all unread data, because only the kernel can serve them from then on. There are two
//! cases:
//!
//! - The socket leaves this process: it is passed by SCM_RIGHTS, kept across an exec, or given to a spawned program.
//!   The new holder reads and writes the kernel's socket (docs/design/processes.md).
//! - The program sets an option that links do not support.

use std::ffi::{c_int, c_uint};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::Acquire;

use libc::{mmsghdr, msghdr};
use rdmasock_core::stats::Reason;
use rdmasock_core::stream::connection;
use rdmasock_core::sync::store_load_fence;

use crate::data::rx;
use crate::notify::fork::reclaim;
use crate::notify::table;
use crate::objects::library::Library;
use crate::objects::socket;
use crate::objects::socket::{Mode, Socket, Stage};
use crate::sys::time::wait_until;
use crate::sys::{errno, sockopt, vfork};

/// Takes the sockets back to TCP whose fds a message is about to pass. For a message without control data this only
/// reads two fields.
///
/// # Safety
/// `message` is null or the program's own.
#[inline]
pub(crate) unsafe fn before_passing(message: *const msghdr) {
    // SAFETY: `message` is null or the program's own, by the contract.
    if unsafe { message.as_ref() }.is_some_and(|m| m.msg_controllen > 0 && !m.msg_control.is_null()) {
        // SAFETY: `message` is the program's own, by the contract, and not null.
        unsafe { pass(message) }
    }
}

/// Calls [`before_passing`] for each message of an array.
///
/// # Safety
/// `messages` has `count` entries, or is null.
pub(crate) unsafe fn before_passing_many(messages: *const mmsghdr, count: c_uint) {
    for i in 0..if messages.is_null() { 0 } else { count as usize } {
        // SAFETY: `i` is below `count`, and `messages` is not null, so it has that many entries by the contract.
        unsafe { before_passing(&raw const (*messages.add(i)).msg_hdr) }
    }
}

#[inline(never)]
unsafe fn pass(message: *const msghdr) {
    let errno = errno::get();
    // SAFETY: the macros of cmsg(3) only read the control data, which is the program's and stays valid during its call.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            let c = &*header;
            if c.cmsg_level == libc::SOL_SOCKET && c.cmsg_type == libc::SCM_RIGHTS {
                let bytes = c.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let fds = libc::CMSG_DATA(header).cast::<c_int>();
                for i in 0..bytes / size_of::<c_int>() {
                    if let Some(socket) = table::socket(fds.add(i).read_unaligned()) {
                        release(socket, Reason::Passed);
                    }
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    errno::set(errno);
}

/// Takes the socket back to TCP in both directions, so that all unread data comes through the kernel. Waits for the end
/// of a handshake that is under way, because another process must not read its markers as data. Resets the connection
/// if the peer does not answer in time.
pub(crate) fn release(socket: &'static Socket, reason: Reason) {
    withdraw(socket, reason);
    let is_staying = match socket.control.lock() {
        Some(control) => connection::stay::is_staying(&control),
        None => false,
    };
    if is_staying || socket.rx_mode.load(Acquire) == Mode::Marked {
        // The new holder of the socket would read a marker as data, or miss data that precedes the marker.
        tracing::warn!(target: "rdmasock", slot = socket.slot, %reason, "the peer does not answer, and the socket cannot follow: reset");
        crate::notify::reset::reset(socket);
        if let Some(mut rx) = socket.rx.lock() {
            rx.aside = Vec::new();
        }
    }
    keep(socket);
}

/// Takes the socket back to TCP as [`release`] does, but this process goes on using it. So the connection is not reset
/// if the peer does not answer in time: the program's calls continue to wait for the peer.
#[cold]
pub(crate) fn keep_on_tcp(socket: &'static Socket, reason: Reason) {
    let errno = errno::get();
    withdraw(socket, reason);
    if !is_on_link(socket) {
        keep(socket);
    }
    errno::set(errno);
}

fn keep(socket: &'static Socket) {
    socket.promotion.set_stage(Stage::Pinned);
    socket.promotion.holders.on_returned();
}

fn withdraw(socket: &'static Socket, reason: Reason) {
    reclaim(socket);
    // An attempt to promote that is under way continues to its end. Data that the peer sends meanwhile can be read from
    // the link.
    wait_until(|| connection::press_on(socket));
    if let Some(mut control) = socket.control.lock() {
        connection::return_to_tcp(socket, &mut control, reason);
    }
    wait_until(|| {
        connection::flush(socket);
        if socket.rx_mode.load(Acquire) == Mode::Marked {
            connection::look(socket);
            let _control = socket.control.lock();
            connection::hand_over_rest(socket);
        }
        if socket.rx_mode.load(Acquire) == Mode::Link
            && let Some(mut control) = socket.control.lock()
        {
            // The handshake has ended in a promotion, which is undone.
            connection::return_to_tcp(socket, &mut control, reason);
        }
        !is_on_link(socket)
    });
}

/// Takes the connection behind `fd` back to TCP for good, because another program will have a copy of `fd`.
#[inline(never)]
pub(crate) fn for_program(fd: c_int) {
    let errno = errno::get();
    // In a vfork child `fd` may stand for another file than in the table, which is the parent's.
    if let Some(socket) = table::socket(fd).filter(|s| s.numbers.is_behind(fd)) {
        release_here(socket);
    }
    errno::set(errno);
}

/// Calls [`release`] for an exec. In a vfork child the socket's fds may stand for other files. So there the parent's
/// service thread takes the stream back to TCP, and the child waits for that.
fn release_here(socket: &'static Socket) {
    if !vfork::is_borrower() {
        return release(socket, Reason::Exec);
    }
    reclaim(socket);
    // The child counts as one more holder of the socket, although it runs on the owner's memory.
    let holders = &socket.promotion.holders;
    let is_behind_anchor = || socket.numbers.is_behind(socket.numbers.fd.load(Acquire));
    if socket.may_be_on_link() && !(holders.add_child(|| true) && holders.await_return()) && is_behind_anchor() {
        tracing::warn!(target: "rdmasock", slot = socket.slot, "the peer does not answer, and the socket cannot follow: reset");
        crate::notify::reset::reset_after_unsent(socket);
    }
    socket.promotion.set_stage(Stage::Pinned);
}

/// Takes all connections back to TCP, and keeps later ones there. Waits for each as [`release`] does.
pub(crate) fn all_on_tcp(reason: Reason) {
    let errno = errno::get();
    Library::keep_on_tcp(reason);
    // A thread that begins a promotion sets the stage, then reads the reason. With the fences, either that thread sees
    // the reason or this one sees the stage.
    store_load_fence();
    for socket in socket::in_use() {
        if socket.may_be_on_link() {
            release(socket, reason);
        }
    }
    errno::set(errno);
}

/// Takes the connection back to TCP if the program has set an option for sending or receiving that links do not
/// support. The kernel has the option already. So a connection that is not promoted yet stays on TCP by the check in
/// `connection::start_scan`. If the peer has left the link by itself before, its data on the link is read from there
/// first.
#[cold]
pub(crate) fn on_option_beyond_links(socket: &'static Socket, fd: BorrowedFd<'_>) {
    let errno = errno::get();
    if sockopt::is_beyond_links(fd) && socket.may_be_on_link() {
        reclaim(socket);
        rx::return_to_tcp(socket, Reason::Unsupported);
    }
    errno::set(errno);
}

/// Returns whether a direction, or a stay on a link between hosts, still keeps the socket from plain TCP.
fn is_on_link(socket: &'static Socket) -> bool {
    let control = socket.control.lock();
    !socket.is_plain() || control.is_some_and(|c| connection::stay::is_staying(&c))
}

/// Prepares for an exec or a spawn: takes a socket back to TCP if one of its fds survives it. An exec `replaces` this
/// process's image. So before an exec, sockets on links between hosts and sockets with other holders go back to TCP
/// too.
pub(crate) fn before_exec(replaces: bool) {
    let errno = errno::get();
    for socket in socket::in_use() {
        let survives = socket.control.lock().is_none_or(|c| {
            c.own.fds.iter().any(|fd| {
                // SAFETY: the fd is one of the socket's, and the hook of close() waits for the control lock.
                let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
                let flags = rustix::io::fcntl_getfd(fd);
                flags.is_ok_and(|f| !f.contains(rustix::io::FdFlags::CLOEXEC))
                    && socket.numbers.is_behind(fd.as_raw_fd())
            })
        });
        if vfork::is_borrower() {
            if survives && socket.may_be_on_link() {
                release_here(socket);
            }
            continue;
        }
        let is_foreign = socket.tx_mode.load(Acquire) == Mode::Foreign;
        // Other processes that hold the socket continue with the kernel's socket.
        let is_left = || replaces && !is_foreign && socket.promotion.holders.are_several();
        // Bytes that another host has not received would be lost with this image's memory. TCP keeps them.
        let is_away = replaces && !is_foreign && socket.link().is_some_and(|link| link.is_remote());
        if socket.may_be_on_link() && (survives || is_away || is_left()) {
            release(socket, Reason::Exec);
        }
    }
    errno::set(errno);
}
