//! Adds the TCP sockets (anchors) of connections that the library reports on to the service thread's epoll set.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Acquire;

use rustix::event::epoll as kernel;

use crate::objects::library::Library;
use crate::objects::mailbox::{kind, tag};
use crate::objects::socket::Socket;

/// Adds the TCP socket to the service thread's epoll set, edge-triggered. Returns false if the kernel refuses.
pub fn watch(socket: &Socket, fd: BorrowedFd<'_>) -> bool {
    let generation = socket.generation.load(Acquire) & 0xffff_ffff;
    let data = tag(kind::ANCHOR, u64::from(socket.slot) << 32 | generation);
    let flags = kernel::EventFlags::IN
        | kernel::EventFlags::OUT
        | kernel::EventFlags::RDHUP
        | kernel::EventFlags::PRI
        | kernel::EventFlags::ET;
    let set = &Library::get().service.epoll;
    kernel::add(set, fd, kernel::EventData::new_u64(data), flags).is_ok()
}

/// Removes the TCP socket from the service thread's epoll set before it is closed. The caller holds the control lock.
pub fn forget(socket: &Socket) {
    if socket.is_watched()
        && let Some(fd) = socket.numbers.anchor_fd()
    {
        let _ = kernel::delete(&Library::get().service.epoll, fd);
    }
}
