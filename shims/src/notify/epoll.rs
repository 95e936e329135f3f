//! Epoll sets: the object behind a program's epoll fd.
//!
//! A socket on plain TCP is in the kernel's set, with the program's own data; the library only keeps an item for it.
//! When a promotion begins, the socket is *taken over*: it is removed from the kernel's set, and reported from this
//! set's list of ready items. When the socket is back on TCP for good, it is *handed back*.
//!
//! Two sources fill the list of ready items:
//!
//! - the ready queues of the links, with one entry for each stream that has something to do, so a wait costs O(ready);
//! - the service thread, for events on the TCP socket.
//!
//! The kernel's set also holds the bell of this set, an eventfd under a key of the library's. So one sleep in the
//! kernel waits for both.
//!
//! This file has the set's life and its membership; waiting is in `polling/epoll_wait`.

mod control;
pub mod key;
pub mod links;
mod takeover;

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};

use key::Key;
pub use key::without_ours;
use links::Links;
use rdmasock_core::fabric::asleep::Gate;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::lock::Lock;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::sync::{Presence, Published};
use rustix::event::epoll as kernel;

use crate::config::spin::Spinner;
use crate::notify::ready;
use crate::objects::library::Library;
use crate::objects::link::Watch;
use crate::objects::socket::{EpollSet, Socket};
use crate::sys::points::point;
use crate::sys::registry::Registry;

pub const ET: u32 = libc::EPOLLET as u32;
pub const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
/// Events that are reported whether asked for or not.
pub const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// A socket in the set, under one fd. A socket that was added under two fds has two items.
pub(crate) struct Item {
    pub(crate) socket: &'static Socket,
    pub(crate) fd: c_int,
    pub(crate) events: u32,
    pub(crate) data: u64,
    /// The item is taken over: the kernel's set no longer has it.
    pub(crate) taken: bool,
    /// The set's count of `moves` after the item was taken over.
    pub(crate) moved_at: u64,
    /// The last result that the item was listed in ([`Set::results`]).
    pub(crate) listed_in: u64,
    /// The item is in `ready`.
    pub(crate) queued: bool,
    /// EPOLLONESHOT has fired; EPOLL_CTL_MOD arms the item again.
    pub(crate) disabled: bool,
    /// The item is disabled, and its socket was handed back. It is in neither set until its MOD, since the kernel's set
    /// would report the end of the connection even for a disabled item.
    pub(crate) parked: bool,
    /// The item is removed, but still in `ready`.
    pub(crate) dead: bool,
}

#[derive(Default)]
pub(crate) struct Set {
    pub(crate) items: Vec<Item>,
    pub(crate) free: Vec<usize>,
    pub(crate) ready: VecDeque<usize>,
    /// Items that the present harvest has reported, and the next has to check again. Empty between harvests, as is
    /// `come`.
    pub(crate) again: Vec<usize>,
    /// Items that peers have queued, with the time of each.
    pub(crate) come: Vec<(u64, usize)>,
    /// The number of waits that have asked this set for results.
    pub(crate) results: u64,
    /// The number of items in the kernel's set.
    pub(crate) plain: usize,
    /// The links that carry sockets of this set.
    pub(crate) links: Links,
}

/// An epoll set of the program, see the module.
#[repr(align(64))]
pub struct Epoll {
    pub(crate) set: Lock<Set>,
    /// The set's waiter as a word; 0: none.
    pub(crate) waiter: AtomicU32,
    /// The bell's data in the kernel's set, once the bell is there ([`Key`]).
    pub(crate) key: AtomicU64,
    /// An fd of the program's for the set, -1 when the last is closed.
    pub(crate) fd: AtomicI32,
    /// A private fd of the same set, made when the set becomes active. System calls and sleeps on the set then do not
    /// depend on the program's fds. -1: none.
    pub(crate) own: AtomicI32,
    /// Changes when the object is reused for another set.
    pub(crate) generation: AtomicU32,
    /// Waits that are under way in `epoll_wait`, and hold the set.
    pub(crate) inside: Presence,
    /// The program has closed the last fd, and waits that began before have not returned.
    pub(crate) closed: Published<AtomicBool>,
    /// Another set holds this one, so the kernel's object must show when an item is ready. Peers therefore always ring.
    pub(crate) nested: Published<AtomicBool>,
    /// Peers notify the service thread for some of the set's sockets, in place of this set's waiter (`served`).
    pub(crate) served: AtomicBool,
    /// For a nested set: the waiter's sleep flag counts one sleeper for the set itself.
    pub(crate) shown: Published<AtomicBool>,
    /// The set is shared with the parent process, which may have taken sockets over.
    pub(crate) inherited: AtomicBool,
    /// Gate to a wait in the kernel alone (`alone`). It closes when the first item is taken over: the set is active
    /// then, and waits use the library's list too.
    pub(crate) gate: Gate,
    /// The waiter's sleep flag counts one sleeper for the threads that were inside the gate when the set became active,
    /// until the last has left.
    pub(crate) plain_sleeps: Published<AtomicBool>,
    /// The number of fds that stand for the set.
    pub(crate) fds: AtomicU32,
    /// Counts the moves of sockets from the kernel's set to the library's list, and back.
    pub(crate) moves: AtomicU64,
    /// The kernel's set has connections too, and not only other files.
    pub(crate) mixed: AtomicBool,
    /// The kernel's set has connections that stay on TCP for good, for which there are no items.
    pub(crate) has_plain: AtomicBool,
    /// When the kernel's set was last checked, in cycles ([`rdmasock_core::cycles`]).
    pub(crate) looked_at: AtomicU64,
    /// The last check found nothing ready in the kernel's set.
    pub(crate) kernel_quiet: AtomicBool,
    /// 1: the last wait had no room for events that the kernel may have.
    pub(crate) full: AtomicU32,
    /// True: the kernel's set is checked before the library's list next time.
    pub(crate) turn: AtomicBool,
    pub(crate) spinner: Spinner,
    /// For links to other hosts: whether threads sleep on the set.
    pub(crate) watch: Watch,
}

static FREE: Lock<Vec<&'static Epoll>> = Lock::new(Vec::new());
static ALL: Registry<Epoll> = Registry::new();

impl Epoll {
    /// Returns an object for a new set behind `fd`. `None` in a signal handler above the free list's lock.
    pub fn allocate(fd: c_int) -> Option<&'static Epoll> {
        let recycled = FREE.lock()?.pop();
        let epoll = recycled.unwrap_or_else(|| {
            ALL.add(Epoll {
                set: Lock::new(Set::default()),
                waiter: AtomicU32::new(0),
                key: AtomicU64::new(0),
                fd: AtomicI32::new(-1),
                own: AtomicI32::new(-1),
                generation: AtomicU32::new(0),
                inside: Presence::new(),
                closed: Published::default(),
                nested: Published::default(),
                shown: Published::default(),
                inherited: AtomicBool::new(false),
                gate: Gate::new(),
                plain_sleeps: Published::default(),
                fds: AtomicU32::new(0),
                moves: AtomicU64::new(0),
                mixed: AtomicBool::new(false),
                served: AtomicBool::new(false),
                has_plain: AtomicBool::new(false),
                looked_at: AtomicU64::new(0),
                kernel_quiet: AtomicBool::new(false),
                full: AtomicU32::new(0),
                turn: AtomicBool::new(false),
                spinner: Spinner::new(),
                watch: Watch::default(),
            })
        });
        epoll.fd.store(fd, Release);
        epoll.nested.publish_quietly(false);
        epoll.inherited.store(false, Release);
        epoll.has_plain.store(false, Relaxed);
        epoll.served.store(false, Relaxed);
        epoll.fds.store(1, Release);
        Some(epoll)
    }

    /// Counts one more fd that stands for the set.
    pub fn retain(&self) {
        self.fds.fetch_add(1, Relaxed);
    }

    /// Uncounts a closed fd, which is not in the table any more. `another` finds another fd of the set in the table.
    /// With the last fd the set ends, once no wait holds it.
    pub fn release(&'static self, fd: c_int, another: impl FnOnce(&'static Self) -> Option<c_int>) {
        if self.fds.fetch_sub(1, AcqRel) == 1 {
            self.fd.store(-1, Release);
            self.closed.publish(true);
            self.end_if_left();
        } else if self.fd.load(Acquire) == fd {
            self.fd.store(another(self).unwrap_or(-1), Release);
        }
    }

    /// Recycles the object, if the set is closed and the last wait that began before has returned.
    pub(crate) fn end_if_left(&'static self) {
        // A wait that leaves checks afterwards whether the set is closed.
        let is_left = self.inside.is_empty() && !self.gate.is_in_use();
        if is_left && self.closed.take() {
            self.recycle();
        }
    }

    /// Removes links that have gone down from every set, so that their objects can be reused for other links.
    pub fn drop_dead_links() {
        for epoll in ALL.all() {
            if let Some(mut set) = epoll.set.lock() {
                set.links.drop_dead(epoll.kernel_fd(), &epoll.watch);
            }
        }
    }

    /// Whether waits use the library's list, not the kernel's set alone.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.gate.is_closed()
    }

    fn recycle(&'static self) {
        self.generation.fetch_add(1, SeqCst);
        self.fd.store(-1, Release);
        self.gate.reopen();
        let Some(mut set) = self.set.lock() else {
            return;
        };
        // Other processes may hold the kernel's object too.
        let kernel_fd = self.kernel_fd();
        set.links.let_go(kernel_fd, &self.watch);
        drop(PrivateFd::adopt(self.own.swap(-1, AcqRel)));
        let items = std::mem::take(&mut *set).items;
        drop(set);
        for item in items.into_iter().filter(|item| !item.dead) {
            ready::change_interest(item.socket, |i| i.members.retain(|m| !m.is_in(self)));
        }
        if let Some(waiter) = WaiterId::from_word(self.waiter.swap(0, Relaxed)) {
            let waiters = &Library::get().waiters;
            for counted in [&self.shown, &self.plain_sleeps] {
                if counted.take() {
                    waiters.leave_sleep(waiter);
                }
            }
            waiters.release(waiter);
        }
        if let Some(mut free) = FREE.lock() {
            // Without memory for the free list the object is lost.
            let _ = free.try_reserve(1).map(|()| free.push(self));
        }
    }

    /// Resets every set in a fork child, also those that another thread of the parent was about to make or to end.
    ///
    /// The kernel object is shared with the parent, whose bell it holds; no private fd is used on it any more.
    /// [`Self::inherit`] adds the fds that stand for the set.
    ///
    /// # Safety
    /// In a fork child only, before any other use.
    pub unsafe fn after_fork() {
        // SAFETY: this is the only thread, by the contract. A value that was being changed is leaked, not used.
        unsafe {
            std::mem::forget(std::mem::take(FREE.get_unlocked()));
            FREE.reset();
        }
        for epoll in ALL.all() {
            // SAFETY: this is the only thread, by the contract.
            unsafe { epoll.forget_parent() };
        }
    }

    unsafe fn forget_parent(&self) {
        // SAFETY: this is the only thread, by the contract of `after_fork`, the only caller.
        unsafe {
            std::mem::forget(std::mem::take(self.set.get_unlocked()));
            self.set.reset();
        }
        self.fd.store(-1, Release);
        self.fds.store(0, Release);
        self.gate.reset();
        self.inherited.store(true, Release);
        self.own.store(-1, Release);
        self.inside.reset();
        self.watch.reset();
        self.closed.reset(false);
        self.waiter.store(0, Relaxed);
        self.plain_sleeps.reset(false);
        self.shown.reset(false);
        self.key.store(0, Relaxed);
    }

    /// Adds an fd that stands for the set. For a fork child, after [`Self::after_fork`].
    pub fn inherit(&self, fd: c_int) {
        self.fd.store(fd, Release);
        self.retain();
    }

    /// Whether the kernel's set reports every item of the set.
    pub fn is_kernels_alone(&self) -> bool {
        let set = self.set.lock();
        set.is_some_and(|set| set.items.iter().all(|i| i.dead || !i.taken))
    }

    /// Makes the kernel's set report for itself again, without the library's bell and links. For a set in which no item
    /// is taken over. The caller [releases](Self::release) its fd next.
    pub fn retire(&'static self) {
        if let Some(mut set) = self.set.lock()
            && let Some(kernel_fd) = self.kernel_fd()
            && self.gate.reopen()
        {
            if let Some(waiter) = self.waiter()
                && let Some(bell) = Library::get().waiters.doorbell(waiter)
            {
                let _ = kernel::delete(kernel_fd, bell);
            }
            for item in set.items.iter().filter(|i| i.parked && !i.dead) {
                let _ = kernel::add(
                    kernel_fd,
                    // SAFETY: an item is removed before its fd is closed, and the set's lock is held.
                    unsafe { BorrowedFd::borrow_raw(item.fd) },
                    kernel::EventData::new_u64(item.data),
                    kernel::EventFlags::from_bits_retain(ONESHOT),
                );
            }
            set.links.let_go(Some(kernel_fd), &self.watch);
        }
    }

    /// Returns an fd of the kernel's set. The caller holds the set's lock, or is inside (`epoll_wait::visit`). `None`
    /// if the program has closed the last fd and there is no private one.
    pub(crate) fn kernel_fd(&self) -> Option<BorrowedFd<'static>> {
        let fd = match self.own.load(Acquire) {
            -1 => self.fd.load(Acquire),
            own => own,
        };
        // SAFETY: the private fd is closed under the set's lock, when no wait is inside. If no fd was left for a
        // private one, the program's is open unless the program closes it at this moment.
        (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Returns the waiter that peers wake for the set. `None` until the set is active, or if there is no fd for a bell.
    pub fn waiter(&self) -> Option<WaiterId> {
        WaiterId::from_word(self.waiter.load(Relaxed))
    }

    /// Removes the sleeper that stood for the threads in the kernel's wait alone, when the last of them has returned.
    pub(crate) fn end_plain_sleep(&self, waiter: Option<WaiterId>) {
        if let Some(waiter) = waiter
            && self.plain_sleeps.take()
        {
            Library::get().waiters.leave_sleep(waiter);
        }
    }

    /// Makes the set active: from now on waits use the library's list. The caller holds the set's lock.
    pub(crate) fn activate(&self, _held: &mut Set) {
        if self.is_active() {
            return;
        }
        let library = Library::get();
        if self.own.load(Acquire) < 0
            && let Some(Ok(own)) = self.kernel_fd().map(PrivateFd::duplicate)
        {
            self.own.store(own.release(), Release);
        }
        let waiter = self.waiter().or_else(|| {
            let waiter = library.waiters.acquire_for_set()?;
            // Rings of the waiter's former owner must not make this set readable. Another set may share the waiter, so
            // its sleepers are rung again.
            library.waiters.quiet(waiter);
            library.waiters.ring_if_sleeping(waiter);
            Some(waiter)
        });
        if let (Some(waiter), Some(kernel_fd)) = (waiter, self.kernel_fd())
            && let Some(doorbell) = library.waiters.doorbell(waiter)
        {
            self.waiter.store(waiter.to_word(), Relaxed);
            let key = Key::of_this_process();
            self.key.store(key.0, Relaxed);
            let _ = kernel::add(
                kernel_fd,
                doorbell.as_fd(),
                kernel::EventData::new_u64(key.0),
                kernel::EventFlags::IN | kernel::EventFlags::ET,
            );
        }
        point!("activate: the kernel's set has the doorbell");
        let are_inside = self.gate.close();
        point!("activate: the set is active");
        if self.nested.look()
            && !self.shown.publish(true)
            && let Some(waiter) = waiter
        {
            library.waiters.enter_sleep(waiter);
        }
        if are_inside {
            // These threads sleep in the kernel's wait alone. A ring wakes one of all threads that sleep on the
            // kernel's object, not always one of these. So peers have to ring until the last of them has left.
            if let Some(waiter) = waiter
                && !self.plain_sleeps.publish(true)
            {
                library.waiters.enter_sleep(waiter);
            }
            if !self.gate.is_in_use() {
                self.end_plain_sleep(waiter);
            }
            self.ring();
        }
    }

    /// Rings every active set with sleepers. For a fork parent: a child has consumed a ring that was meant for a
    /// sleeping thread.
    pub fn ring_all_who_sleep() {
        for epoll in ALL.all() {
            if epoll.is_active() {
                epoll.ring_if_sleeping();
            }
        }
    }

    pub(crate) fn ring_if_sleeping(&self) {
        if let Some(waiter) = self.waiter() {
            Library::get().waiters.ring_if_sleeping(waiter);
        }
    }

    pub(crate) fn ring(&self) {
        if let Some(waiter) = self.waiter() {
            Library::get().waiters.ring(waiter);
        }
    }
}

impl EpollSet for Epoll {
    fn be_served(&self) {
        self.served.store(true, Release);
    }

    fn forget(&self, index: usize, socket: &'static Socket) {
        if let Some(mut set) = self.set.lock()
            && set.items.get(index).is_some_and(|i| std::ptr::eq(i.socket, socket))
        {
            set.remove(index);
        }
    }

    fn push(&self, index: usize, socket: &'static Socket) {
        let Some(mut set) = self.set.lock() else {
            return;
        };
        if set
            .items
            .get(index)
            .is_some_and(|i| i.taken && std::ptr::eq(i.socket, socket))
        {
            if let Some(link) = socket.link() {
                set.links.add(link);
            }
            set.enqueue(index);
            drop(set);
            self.ring_if_sleeping();
        }
    }

    fn take_over(&'static self, index: usize, socket: &'static Socket) -> bool {
        Self::take_over(self, index, socket)
    }

    fn hand_back(&'static self, index: usize, socket: &'static Socket) {
        Self::hand_back(self, index, socket);
    }

    fn waiter(&self) -> Option<WaiterId> {
        Self::waiter(self)
    }
}

impl Set {
    /// Reserves room for one more item in each list. Returns false without memory.
    fn has_room(&mut self) -> bool {
        let most = self.items.len() + 1;
        let more = |len: usize| most.saturating_sub(len);
        self.items.try_reserve(1).is_ok()
            && self.free.try_reserve(more(self.free.len())).is_ok()
            && self.ready.try_reserve(more(self.ready.len())).is_ok()
            && self.again.try_reserve(more(self.again.len())).is_ok()
            && self.come.try_reserve(more(self.come.len())).is_ok()
    }

    fn insert(&mut self, item: Item) -> usize {
        self.plain += usize::from(!item.taken);
        match self.free.pop() {
            Some(index) => {
                if let Some(slot) = self.items.get_mut(index) {
                    *slot = item;
                }
                index
            }
            None => {
                self.items.push(item);
                self.items.len() - 1
            }
        }
    }

    fn enqueue(&mut self, index: usize) {
        enqueue(&mut self.items, &mut self.ready, index);
    }

    fn remove(&mut self, index: usize) {
        if let Some(item) = self.items.get_mut(index)
            && !item.dead
        {
            item.dead = true;
            self.plain -= usize::from(!item.taken);
            if !item.queued {
                self.free.push(index);
            }
        }
    }

    /// Records whether an item is taken over, or in the kernel's set.
    fn set_taken(&mut self, index: usize, taken: bool) {
        if let Some(item) = self.items.get_mut(index)
            && !item.dead
            && std::mem::replace(&mut item.taken, taken) != taken
        {
            self.plain = if taken { self.plain - 1 } else { self.plain + 1 };
        }
    }
}

/// Appends an item to the list of ready items, unless it is there already.
pub(crate) fn enqueue(items: &mut [Item], ready: &mut VecDeque<usize>, index: usize) {
    // A removed item is skipped: its place may be free already, and would be handed out twice.
    if let Some(item) = items.get_mut(index)
        && !item.queued
        && !item.dead
    {
        item.queued = true;
        ready.push_back(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_not_given_out_twice_when_a_removed_item_is_pushed() {
        let socket = Socket::allocate(-1, false).unwrap();
        let item = || Item {
            socket,
            fd: -1,
            events: 0,
            data: 0,
            taken: true,
            moved_at: 0,
            listed_in: 0,
            queued: false,
            disabled: false,
            parked: false,
            dead: false,
        };
        let mut set = Set::default();
        let first = set.insert(item());
        set.remove(first);
        // The service thread still has a copy of the membership.
        set.enqueue(first);
        assert!(set.ready.is_empty());
        let (a, b) = (set.insert(item()), set.insert(item()));
        assert_ne!(a, b);
    }
}
