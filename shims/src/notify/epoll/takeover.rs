//! Moves an item from the kernel's set to the library's list when its socket's promotion begins. Moves it back when the
//! socket is on TCP for good.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Relaxed, Release};

use rdmasock_core::os::dir;
use rustix::event::epoll as kernel;

use super::{ET, EXCLUSIVE, Epoll, ONESHOT};
use crate::objects::socket::Socket;
use crate::sys::points::point;

/// Flags that are not events, and remain when an EPOLLONESHOT has fired.
const PRIVATE: u32 = ONESHOT | ET | EXCLUSIVE | libc::EPOLLWAKEUP as u32;

impl Epoll {
    /// Moves an item from the kernel's set to the library's list. Returns false if that cannot be done now: an
    /// EPOLLONESHOT that has not fired may fire at this moment, and would be reported twice. One that has fired is
    /// silent until its MOD, which the library handles.
    pub fn take_over(&'static self, index: usize, socket: &'static Socket) -> bool {
        let Some(mut set) = self.set.lock() else {
            return false;
        };
        let Some(item) = set.items.get_mut(index) else {
            return true;
        };
        if item.dead || item.taken || !std::ptr::eq(item.socket, socket) {
            return true;
        }
        if self.kernel_fd().is_none() {
            // The set is closed, and a wait that began before continues in the kernel alone.
            return false;
        }
        let fd = item.fd;
        // A parked item has fired.
        item.disabled = item.events & ONESHOT != 0;
        if item.disabled
            && !std::mem::replace(&mut item.parked, false)
            && !self.kernel_fd().is_some_and(|set| has_fired(set, fd, item.data))
        {
            item.disabled = false;
            return false;
        }
        set.set_taken(index, true);
        self.activate(&mut set);
        point!("take over: both sets have the socket");
        if let Some(control) = socket.control.lock()
            && control.own.fds.contains(&fd)
            && let Some(kernel_fd) = self.kernel_fd()
        {
            // SAFETY: the fd is still one of the socket's, and the control lock keeps close() out.
            let _ = kernel::delete(kernel_fd, unsafe { BorrowedFd::borrow_raw(fd) });
        }
        point!("take over: the kernel's set has it no more");
        // After the removal: a thread that reads the new count finds the socket in one set only.
        let moved_at = self.moves.fetch_add(1, Release) + 1;
        if let Some(item) = set.items.get_mut(index) {
            item.moved_at = moved_at;
        }
        if let Some(link) = socket.link() {
            set.links.add(link);
        }
        set.enqueue(index);
        drop(set);
        self.ring_if_sleeping();
        true
    }

    /// Moves an item back into the kernel's set, when its socket is on plain TCP again. A disabled item is parked
    /// instead.
    pub fn hand_back(&'static self, index: usize, socket: &'static Socket) {
        let Some(mut set) = self.set.lock() else {
            return;
        };
        let Some(item) = set.items.get_mut(index) else {
            return;
        };
        if item.dead || !item.taken || !std::ptr::eq(item.socket, socket) {
            return;
        }
        let Some(control) = socket.control.lock() else {
            return;
        };
        if !control.own.fds.contains(&item.fd) {
            return;
        }
        let (fd, data, events) = (item.fd, item.data, item.events);
        item.parked = item.disabled;
        let parked = item.parked;
        set.set_taken(index, false);
        point!("hand back: neither set has the socket");
        self.mixed.store(true, Relaxed);
        self.moves.fetch_add(1, Release);
        if parked {
            return;
        }
        if let Some(kernel_fd) = self.kernel_fd() {
            let _ = kernel::add(
                kernel_fd,
                // SAFETY: the fd is still one of the socket's, and the control lock keeps close() out.
                unsafe { BorrowedFd::borrow_raw(fd) },
                kernel::EventData::new_u64(data),
                kernel::EventFlags::from_bits_retain(events),
            );
        }
    }
}

/// Whether an EPOLLONESHOT item of a kernel's set has fired and waits for its MOD. The kernel shows the remaining
/// events in fdinfo (proc_pid_fdinfo(5)). False if it cannot be read.
fn has_fired(set: BorrowedFd<'_>, fd: c_int, data: u64) -> bool {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/thread-self/fdinfo/{}", set.as_raw_fd());
    let Ok(info) = dir::text(&path) else {
        return false;
    };
    info.lines().any(|line| {
        let mut words = line.split_whitespace();
        let mut after = |name: &str| words.find(|w| *w == name).and_then(|_| words.next());
        let tfd = after("tfd:").and_then(|w| w.parse().ok());
        let events = after("events:").and_then(|w| u32::from_str_radix(w, 16).ok());
        let key = after("data:").and_then(|w| u64::from_str_radix(w, 16).ok());
        tfd == Some(fd) && key == Some(data) && events.is_some_and(|e| e & !PRIVATE == 0)
    })
}
