//! epoll_ctl() on a socket that the library knows. The kernel's set has the socket while it is on plain TCP; the
//! library's list has it while it is taken over.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use rdmasock_core::lock::Guard;
use rustix::event::epoll as kernel;

use super::{ALWAYS, EXCLUSIVE, Epoll, Item, ONESHOT, Set};
use crate::notify::ready;
use crate::objects::library::Library;
use crate::objects::socket::{Membership, Socket};

/// The events that may be combined with EPOLLEXCLUSIVE.
const EXCLUSIVE_OK: u32 =
    EXCLUSIVE | ALWAYS | (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLWAKEUP | libc::EPOLLET) as u32;

impl Epoll {
    /// Carries out epoll_ctl() on a socket that the library knows. `real` is the kernel's call. Returns what
    /// epoll_ctl() returns, and sets errno.
    pub fn control(
        &'static self,
        socket: &'static Socket,
        fd: c_int,
        op: c_int,
        event: Option<libc::epoll_event>,
        real: impl FnOnce() -> c_int,
    ) -> c_int {
        crate::notify::reclaim::reclaim(socket);
        let Some(mut set) = self.set.lock() else {
            return real();
        };
        let asked = event.map_or(0, |e| e.events);
        if let (libc::EPOLL_CTL_ADD, Some(event)) = (op, event) {
            if asked & EXCLUSIVE != 0 && asked & !EXCLUSIVE_OK != 0 {
                return crate::sys::errno::fail(libc::EINVAL);
            }
            return self.add(set, socket, fd, event, real);
        }
        let index = self.find(&set, socket, fd);
        let item = index.and_then(|i| set.items.get(i));
        let taken = item.map(|i| i.taken);
        let parked = item.is_some_and(|i| i.parked);
        let exclusive = item.is_some_and(|i| i.events & EXCLUSIVE != 0);
        if op == libc::EPOLL_CTL_MOD && (asked & EXCLUSIVE != 0 || exclusive) {
            return crate::sys::errno::fail(libc::EINVAL);
        }
        match (op, event, index, taken) {
            (libc::EPOLL_CTL_MOD, Some(event), Some(index), Some(true)) => {
                set.arm(index, event);
                set.enqueue(index);
                drop(set);
                self.ring_if_sleeping();
                0
            }
            (libc::EPOLL_CTL_MOD, Some(event), Some(index), _)
                if asked & ONESHOT != 0 && socket.promotion.asked.swap(false, SeqCst) =>
            {
                // A promotion waits for this moment: the item has fired, and no other thread has it. The service thread
                // continues the promotion, or hands the item back.
                if let Some(kernel_fd) = self.kernel_fd() {
                    // SAFETY: the program's own fd, in the middle of its call.
                    let _ = kernel::delete(kernel_fd, unsafe { BorrowedFd::borrow_raw(fd) });
                }
                set.arm(index, event);
                self.activate(&mut set);
                drop(set);
                Library::get()
                    .service
                    .submit(crate::objects::mailbox::Command::Used(socket.into()));
                0
            }
            (libc::EPOLL_CTL_MOD, Some(event), Some(index), _) => {
                let result = if parked { self.unpark(fd, event) } else { real() };
                if let Some(item) = set.items.get_mut(index).filter(|_| result == 0) {
                    item.events = event.events;
                    item.data = event.u64;
                    item.parked = false;
                }
                result
            }
            (libc::EPOLL_CTL_DEL, _, Some(index), Some(taken)) => {
                let result = if taken || parked { 0 } else { real() };
                if result == 0 {
                    set.remove(index);
                    drop(set);
                    self.leave(socket, index);
                }
                result
            }
            _ => real(),
        }
    }

    /// Records an EPOLL_CTL_ADD of a connection that stays on TCP for good, and has no item.
    #[inline]
    pub fn on_plain(&self) {
        if !self.has_plain.load(Relaxed) {
            self.has_plain.store(true, Relaxed);
            self.mixed.store(true, Relaxed);
        }
    }

    /// Carries out EPOLL_CTL_MOD on a parked item: adds it to the kernel's set again.
    fn unpark(&self, fd: c_int, event: libc::epoll_event) -> c_int {
        let added = self.kernel_fd().map(|set| {
            kernel::add(
                set,
                // SAFETY: the program's own fd, in the middle of its call.
                unsafe { BorrowedFd::borrow_raw(fd) },
                kernel::EventData::new_u64(event.u64),
                kernel::EventFlags::from_bits_retain(event.events),
            )
        });
        match added {
            Some(Ok(())) => 0,
            Some(Err(error)) => crate::sys::errno::fail(error.raw_os_error()),
            None => crate::sys::errno::fail(libc::EBADF),
        }
    }

    /// Carries out EPOLL_CTL_ADD.
    fn add(
        &'static self,
        mut set: Guard<'_, Set>,
        socket: &'static Socket,
        fd: c_int,
        event: libc::epoll_event,
        real: impl FnOnce() -> c_int,
    ) -> c_int {
        if !set.has_room() {
            return crate::sys::errno::fail(libc::ENOMEM);
        }
        socket.blocking.set_polled();
        let index = set.insert(Item {
            socket,
            fd,
            events: event.events,
            data: event.u64,
            taken: false,
            moved_at: 0,
            listed_in: 0,
            queued: false,
            disabled: false,
            parked: false,
            dead: false,
        });
        if ready::is_watched(socket) {
            // Before the membership is added, which announces this set's ready queue to peers.
            self.activate(&mut set);
        }
        // First the membership is added, then the socket is checked; a promotion does it the other way round (`watch`).
        // So a promotion that begins now is seen here, or sees the membership.
        let mut is_there = false;
        ready::change_interest(socket, |i| {
            let mut items = i.members.iter().filter(|m| is_of(m, self, fd));
            is_there = items.any(|m| set.has(m.item, socket, fd));
            if !is_there {
                i.members.push(Membership {
                    epoll: self,
                    fd,
                    item: index,
                });
            }
        });
        if is_there {
            set.remove(index);
            return crate::sys::errno::fail(libc::EEXIST);
        }
        socket.wakes.last_item.store(index as u32, Relaxed);
        if ready::is_watched(socket) {
            set.set_taken(index, true);
            self.activate(&mut set);
            if let Some(link) = socket.link() {
                set.links.add(link);
            }
            set.enqueue(index);
            drop(set);
            self.ring_if_sleeping();
            return 0;
        }
        let result = real();
        if result != 0 {
            let errno = crate::sys::errno::get();
            set.remove(index);
            drop(set);
            self.leave(socket, index);
            crate::sys::errno::set(errno);
        } else {
            self.mixed.store(true, Relaxed);
        }
        result
    }

    /// Returns the index of the socket's item under this fd. `None` if there is none.
    fn find(&self, set: &Set, socket: &'static Socket, fd: c_int) -> Option<usize> {
        let last = socket.wakes.last_item.load(Relaxed) as usize;
        if set.has(last, socket, fd) {
            return Some(last);
        }
        let interest = socket.wakes.interest.lock()?;
        let mut items = interest.members.iter().filter(|m| is_of(m, self, fd));
        items.find(|m| set.has(m.item, socket, fd)).map(|m| m.item)
    }

    /// Removes the item's membership: the set is not notified for it any more.
    fn leave(&'static self, socket: &'static Socket, index: usize) {
        ready::change_interest(socket, |i| {
            i.members.retain(|m| !(m.is_in(self) && m.item == index));
        });
    }
}

fn is_of(member: &Membership, epoll: &Epoll, fd: c_int) -> bool {
    member.fd == fd && member.is_in(epoll)
}

impl Set {
    /// Whether this item is the socket under this fd.
    fn has(&self, index: usize, socket: &Socket, fd: c_int) -> bool {
        self.items
            .get(index)
            .is_some_and(|i| !i.dead && i.fd == fd && std::ptr::eq(i.socket, socket))
    }

    /// Applies an EPOLL_CTL_MOD to an item that is taken over, or is taken over by this.
    fn arm(&mut self, index: usize, event: libc::epoll_event) {
        if let Some(item) = self.items.get_mut(index) {
            item.events = event.events;
            item.data = event.u64;
            item.disabled = false;
            item.parked = false;
        }
        self.set_taken(index, true);
    }
}
