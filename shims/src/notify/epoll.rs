//! Epoll sets: the object behind a program's epoll fd, the sockets in it, and epoll_ctl(). Waits are in
//! `polling/epoll_wait`.
//!
//! The *kernel's set* is the kernel's epoll object behind the same fd. A socket on plain TCP is in the kernel's set,
//! with the program's own data, and the library only keeps an *item* for it (a socket under one fd). When a promotion
//! begins, the item is *taken over*: it is removed from the kernel's set, and the library reports it from its own list
//! of ready items. When the socket is back on TCP for good, the item is *handed back*. A disabled item (EPOLLONESHOT
//! has fired) is *parked* instead: until its EPOLL_CTL_MOD neither the kernel's set has it, nor does the library report
//! it.
//!
//! Two sources fill the library's list:
//!
//! - the ready queues of the links, with one entry for each stream that has changed, so a wait costs O(ready);
//! - the service thread, for events on the TCP socket.
//!
//! When the first item is taken over, the set becomes *active*: waits use the library's list too. The *gate* counts the
//! waits that use the kernel's set alone, and is closed while the set is active. The kernel's set of an active set also
//! holds the set's *bell*, the fd that the set's waiter polls (`objects/waiters`). The bell is registered with a
//! [key](key_of_this_process) as its data, by which the library recognises the bell in a result. To *ring* makes the
//! bell readable. So one sleep in the kernel ends for events of the kernel's set and for items of the library's list.
//! Peers ring only while the waiter's *sleep flag* is raised. The flag counts sleepers, and is raised while the count
//! is not 0. If sockets are on links to other hosts, the kernel's set also holds the completion descriptors of these
//! links, and reports which links have completions. A set is *nested* if another set holds it, or if poll() or select()
//! was called on it.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};

use rdmasock_core::fabric::waiter::{Gate, WaiterId};
use rdmasock_core::lock::{Guard, Lock};
use rdmasock_core::os::{dir, privatefd::PrivateFd};
use rdmasock_core::sync::{Presence, Published};
use rustix::event::epoll as kernel;
use rustix::io::Errno;

use crate::config::spin::Spinner;
use crate::notify::{ready, table};
use crate::objects::link::{Link, News, Pin, Remote, Watch};
use crate::objects::socket::{EpollSet, Membership, Mode, Socket, Stage};
use crate::objects::{library::Library, mailbox::Command};
use crate::sys::{errno, points::point, registry::Registry, time::Timeout};

pub(crate) const ET: u32 = libc::EPOLLET as u32;
pub(crate) const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
/// Events that are reported even if the program has not asked for them.
pub(crate) const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// The events that may be combined with EPOLLEXCLUSIVE.
const EXCLUSIVE_OK: u32 =
    EXCLUSIVE | ALWAYS | (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLWAKEUP | libc::EPOLLET) as u32;
/// A bit of `Epoll::in_kernels`: the kernel's set has connections that stay on TCP for good, for which there are no
/// items.
const PLAIN: u32 = 1 << 31;
/// The flags of a registration that are not events. They remain in the kernel's set when an EPOLLONESHOT has fired.
const PRIVATE: u32 = ONESHOT | ET | EXCLUSIVE | libc::EPOLLWAKEUP as u32;

/// The most items in `Set::young`. Each costs a system call in each result that lists another item.
const MOST_YOUNG: usize = 16;

/// A socket in the set, under one fd. A socket that was added under two fds has two items.
pub(crate) struct Item {
    pub(crate) socket: &'static Socket,
    fd: c_int,
    pub(crate) events: u32,
    pub(crate) data: u64,
    /// The item is taken over: the library reports it, and the kernel's set does not have it.
    pub(crate) taken: bool,
    /// The number of the last result of epoll_wait() that lists the item (see [`Set::results`]).
    pub(crate) listed_in: u64,
    /// The item's index is in the set's list `ready`.
    pub(crate) queued: bool,
    /// The item's index is in the set's list `young`.
    pub(crate) young: bool,
    /// EPOLLONESHOT has fired for the item, which stays silent until EPOLL_CTL_MOD arms it again.
    pub(crate) disabled: bool,
    /// The item is removed. Its index is not reused while the index is still in `ready`.
    pub(crate) dead: bool,
}

impl Item {
    /// Whether this is an item of the socket, and not removed.
    fn is_of(&self, socket: &Socket) -> bool {
        !self.dead && std::ptr::eq(self.socket, socket)
    }

    /// Whether the item is parked: disabled, and not taken over. The kernel's set would report the end of the
    /// connection even for a disabled item, so the kernel's set does not have a parked item.
    fn is_parked(&self) -> bool {
        self.disabled && !self.taken
    }

    /// Whether the item belongs into `Set::young`.
    pub(crate) fn is_young(&self) -> bool {
        let (is_listed, is_edge) = (self.taken && !self.dead, self.events & ET != 0);
        is_listed
            && !is_edge
            && self.socket.promotion.stage() == Stage::Busy
            && self.socket.rx_mode.load(Acquire) != Mode::Link
    }

    /// Applies an EPOLL_CTL_MOD of the program to the item.
    fn arm(&mut self, event: libc::epoll_event) {
        self.events = event.events;
        self.data = event.u64;
        self.disabled = false;
    }
}

#[derive(Default)]
pub(crate) struct Set {
    pub(crate) items: Vec<Item>,
    pub(crate) free: Vec<usize>,
    pub(crate) ready: VecDeque<usize>,
    /// The last [`MOST_YOUNG`] level-triggered items that were taken over, as long as what they receive may still come
    /// by TCP. A peer may send on such a connection, and then on a link, where the data is seen at once. So a result
    /// that lists any item of the set also lists the young items that are ready, and lists them first.
    pub(crate) young: VecDeque<usize>,
    /// Items whose streams were found in ready queues, each with the time at which its stream was queued. Empty outside
    /// `Epoll::sweep`.
    pub(crate) come: Vec<(u64, usize)>,
    /// The number of results of epoll_wait() so far that list an item of this set.
    pub(crate) results: u64,
    /// The links that carry sockets of this set.
    pub(crate) links: Links,
}

/// An epoll set of the program.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct Epoll {
    pub(crate) set: Lock<Set>,
    /// The id of the set's waiter as a word (`WaiterId::to_word`); 0: none.
    waiter: AtomicU32,
    /// The data of the bell in the kernel's set ([`key_of_this_process`]); 0 before the bell is added.
    pub(crate) key: AtomicU64,
    /// An fd of the program's for the set; -1 once the last is closed.
    fd: AtomicI32,
    /// A private fd of the same set, made when the set becomes active, so that the library's calls on the set do not
    /// depend on the program's fds. -1: none.
    own: AtomicI32,
    /// Changes when the object is reused for another set.
    pub(crate) generation: AtomicU32,
    /// The number of calls of epoll_wait() that hold the set (`epoll_wait::Wait`). The object is not reused for another
    /// set before they return.
    pub(crate) inside: Presence,
    /// The program has closed the last fd, and calls of epoll_wait() that began before have not returned.
    pub(crate) closed: Published<AtomicBool>,
    /// Another set holds this one, or poll() or select() was called on it. So the kernel's object must be readable
    /// while an item is ready, and peers have to ring even if no thread sleeps in epoll_wait().
    pub(crate) nested: Published<AtomicBool>,
    /// For some of the set's sockets, peers notify the service thread and not this set's waiter (`readiness::tell`).
    pub(crate) served: AtomicBool,
    /// For a nested set: the set itself counts as one sleeper in the waiter's sleep flag, so that peers ring even if no
    /// thread sleeps in epoll_wait().
    pub(crate) shown: Published<AtomicBool>,
    /// This process is a fork child, and shares the set with its parent, which may have taken sockets over.
    pub(crate) inherited: AtomicBool,
    /// Counts the waits that are in the kernel's set alone (`wait_plain`). The gate closes when the first item is taken
    /// over; the set is active while it is closed.
    pub(crate) gate: Gate,
    /// The waiter's sleep flag counts one sleeper more, for the threads that were inside the gate when the set became
    /// active. So peers ring until the last of these threads has left the gate.
    pub(crate) plain_sleeps: Published<AtomicBool>,
    /// The number of fds that stand for the set.
    fds: AtomicU32,
    /// Counts the moves of sockets from the kernel's set to the library's list, and back.
    pub(crate) moves: AtomicU64,
    /// The number of items in the kernel's set, which changes under the set's lock, and the bit [`PLAIN`].
    in_kernels: AtomicU32,
    /// When the kernel's set was last checked, in cycles ([`rdmasock_core::cycles`]).
    pub(crate) looked_at: AtomicU64,
    /// The last check of the kernel's set found nothing ready there.
    pub(crate) kernel_quiet: AtomicBool,
    /// The library's items have filled the last result, so the kernel's set could not be checked for it.
    pub(crate) full: AtomicBool,
    pub(crate) spinner: Spinner,
    /// Counts the threads that sleep on the set, for links to other hosts.
    pub(crate) watch: Watch,
}

static FREE: Lock<Vec<&'static Epoll>> = Lock::new(Vec::new());
static ALL: Registry<Epoll> = Registry::new();

impl Epoll {
    /// Returns an object for a new set behind `fd`. `None` in a signal handler that has interrupted the holder of the
    /// free list's lock.
    pub(crate) fn allocate(fd: c_int) -> Option<&'static Epoll> {
        let recycled = FREE.lock()?.pop();
        let epoll = recycled.unwrap_or_else(|| {
            ALL.add(Epoll {
                fd: AtomicI32::new(-1),
                own: AtomicI32::new(-1),
                ..Epoll::default()
            })
        });
        epoll.nested.publish_quietly(false);
        epoll.inherited.store(false, Release);
        epoll.in_kernels.store(0, Relaxed);
        epoll.served.store(false, Relaxed);
        epoll.fds.store(0, Release);
        epoll.retain(fd);
        Some(epoll)
    }

    /// Counts one more fd that stands for the set. A fork child does so for each fd, after [`Self::after_fork`].
    pub(crate) fn retain(&self, fd: c_int) {
        self.fds.fetch_add(1, Relaxed);
        self.fd.store(fd, Release);
    }

    /// Removes a closed fd from the count; the fd table has no entry for it any more. With the last fd the set ends,
    /// once no wait holds it.
    pub(crate) fn release(&'static self, fd: c_int) {
        if self.fds.fetch_sub(1, AcqRel) == 1 {
            self.fd.store(-1, Release);
            self.closed.publish(true);
            self.end_if_left();
        } else if self.fd.load(Acquire) == fd {
            self.fd.store(table::another_of(self).unwrap_or(-1), Release);
        }
    }

    /// Recycles the object, if the set is closed and the last wait that began before has returned.
    #[inline]
    pub(crate) fn end_if_left(&'static self) {
        // `release` publishes `closed`, then calls this. A wait leaves the gate or `inside`, then calls this. So at
        // least one of the two finds the set closed and unused.
        if self.closed.look() && self.inside.is_empty() && !self.gate.is_in_use() && self.closed.take() {
            self.recycle();
        }
    }

    /// Removes dead links to other hosts from every set, so that their objects can be reused. No thread takes in
    /// completions of a dead link, so until its queue pair is destroyed, its descriptor would keep the kernel's set
    /// readable.
    pub(crate) fn drop_dead_links() {
        for epoll in ALL.all() {
            if let Some(mut set) = epoll.set.lock() {
                set.links.far.retain(|far| far.link.is_alive());
            }
        }
    }

    /// Whether waits on the set use the library's list too, and not the kernel's set alone.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.gate.is_closed()
    }

    fn recycle(&'static self) {
        self.generation.fetch_add(1, SeqCst);
        self.fd.store(-1, Release);
        self.gate.reopen();
        let Some(mut set) = self.set.lock() else {
            return;
        };
        // Dropping the set's links removes their descriptors from the kernel's object. That happens before this process
        // closes its fd, since other processes may hold the object too.
        let items = std::mem::take(&mut *set).items;
        drop(PrivateFd::adopt(self.own.swap(-1, AcqRel)));
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
            // If there is no memory for the free list, the object is never reused.
            let _ = free.try_reserve(1).map(|()| free.push(self));
        }
    }

    /// Resets every set in a fork child, also those that another thread of the parent was about to make or to end.
    ///
    /// The child shares the kernel's object with the parent. The parent's bell stays in it, and is a foreign fd to the
    /// child (`Stripped::foreign`). The child uses none of the parent's private fds. The caller then counts the child's
    /// fds of each set by [`Self::retain`].
    ///
    /// # Safety
    /// In a fork child only, before any other use.
    pub(crate) unsafe fn after_fork() {
        // SAFETY: this is the only thread, by the contract.
        unsafe { FREE.renew() };
        for epoll in ALL.all() {
            // SAFETY: this is the only thread, by the contract.
            unsafe { epoll.set.renew() };
            epoll.fd.store(-1, Release);
            epoll.fds.store(0, Release);
            epoll.gate.reset();
            epoll.inherited.store(true, Release);
            epoll.own.store(-1, Release);
            epoll.inside.reset();
            epoll.watch.reset();
            epoll.closed.reset(false);
            epoll.waiter.store(0, Relaxed);
            epoll.plain_sleeps.reset(false);
            epoll.shown.reset(false);
            epoll.key.store(0, Relaxed);
            epoll.in_kernels.fetch_and(PLAIN, Relaxed);
        }
    }

    /// Whether the kernel's set reports every item of the set.
    pub(crate) fn is_kernels_alone(&self) -> bool {
        let set = self.set.lock();
        set.is_some_and(|set| set.items.iter().all(|i| i.dead || !i.taken))
    }

    /// Removes the library's bell and links from the kernel's set, and adds parked items to it, so that the kernel's
    /// set reports all items without the library. For a set in which no item is taken over. The caller then
    /// [releases](Self::release) the set's fd.
    pub(crate) fn retire(&'static self) {
        if let Some(mut set) = self.set.lock()
            && let Some(kernel_fd) = self.kernel_fd()
            && self.gate.reopen()
        {
            if let Some(waiter) = self.waiter()
                && let Some(bell) = Library::get().waiters.doorbell(waiter)
            {
                let _ = kernel::delete(kernel_fd, bell);
            }
            for item in set.items.iter().filter(|i| i.is_parked() && !i.dead) {
                // SAFETY: an item is removed before its fd is closed, and the set's lock is held.
                let fd = unsafe { BorrowedFd::borrow_raw(item.fd) };
                let _ = add_to(kernel_fd, fd, ONESHOT, item.data);
            }
            set.links.far.clear();
        }
    }

    /// Returns an fd of the kernel's set. The caller holds the set's lock, or holds the set (`epoll_wait::Wait`).
    /// `None` if the program has closed the last fd and there is no private one.
    pub(crate) fn kernel_fd(&self) -> Option<BorrowedFd<'static>> {
        let fd = match self.own.load(Acquire) {
            -1 => self.fd.load(Acquire),
            own => own,
        };
        // SAFETY: a private fd is closed only under the set's lock, and only when no wait holds the set. If there is
        // none, the result is the program's fd, which is open unless the program closes it at this moment.
        (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Ends the sleep that the sleep flag counts for the threads inside the gate (`plain_sleeps`). Called when the last
    /// of these threads has left the gate. `waiter` is the set's.
    pub(crate) fn end_plain_sleep(&self, waiter: Option<WaiterId>) {
        if let Some(waiter) = waiter
            && self.plain_sleeps.take()
        {
            Library::get().waiters.leave_sleep(waiter);
        }
    }

    /// Makes the set active: from now on waits use the library's list. The caller holds the set's lock.
    fn activate(&self, _held: &mut Set) {
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
            // The waiter may have had an owner before. `quiet` removes rings for that owner, which would make this set
            // readable. Another set may share the waiter and need such a ring, so the waiter is rung again if a thread
            // sleeps.
            library.waiters.quiet(waiter);
            library.waiters.ring_if_sleeping(waiter);
            Some(waiter)
        });
        if let (Some(waiter), Some(kernel_fd)) = (waiter, self.kernel_fd())
            && let Some(doorbell) = library.waiters.doorbell(waiter)
        {
            self.waiter.store(waiter.to_word(), Relaxed);
            let key = key_of_this_process();
            self.key.store(key, Relaxed);
            let _ = add_to(kernel_fd, doorbell, libc::EPOLLIN as u32 | ET, key);
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
            // The threads inside the gate sleep in the kernel's wait alone. A ring wakes only one of all threads that
            // sleep on the kernel's object, and that may be a thread outside the gate. So peers have to ring until the
            // last of these threads has left the gate.
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

    /// Rings every active set that has sleepers. A fork parent calls this after a child has consumed a ring that was
    /// meant for a sleeping thread of the parent.
    pub(crate) fn ring_all_who_sleep() {
        ALL.all().for_each(Epoll::ring_if_sleeping);
    }

    /// Appends an item that is taken over to the list of ready items, and wakes a thread that sleeps on the set.
    fn make_ready(&'static self, mut set: Guard<'_, Set>, index: usize, socket: &'static Socket) {
        if let Some(link) = socket.link() {
            set.links.add(self, link);
        }
        set.enqueue(index);
        drop(set);
        self.ring_if_sleeping();
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

    /// Carries out epoll_ctl() on a socket that the library knows. `real` is the kernel's call. Returns what
    /// epoll_ctl() returns, and sets errno.
    pub(crate) fn control(
        &'static self,
        socket: &'static Socket,
        fd: c_int,
        op: c_int,
        event: Option<libc::epoll_event>,
        real: impl FnOnce() -> c_int,
    ) -> c_int {
        crate::notify::fork::reclaim(socket);
        let Some(mut set) = self.set.lock() else {
            return real();
        };
        let asked = event.map_or(0, |e| e.events);
        let index = self.find(&set, socket, fd);
        if let (libc::EPOLL_CTL_ADD, Some(event)) = (op, event) {
            if asked & EXCLUSIVE != 0 && asked & !EXCLUSIVE_OK != 0 {
                return errno::fail(libc::EINVAL);
            }
            return match index {
                Some(_) => errno::fail(libc::EEXIST),
                None => self.add(set, socket, fd, event, real),
            };
        }
        let Some(index) = index else { return real() };
        let Some(item) = set.items.get_mut(index) else {
            return real();
        };
        let (taken, parked) = (item.taken, item.is_parked());
        match (op, event) {
            (libc::EPOLL_CTL_MOD, Some(_)) if (asked | item.events) & EXCLUSIVE != 0 => errno::fail(libc::EINVAL),
            (libc::EPOLL_CTL_MOD, Some(event)) if taken => {
                item.arm(event);
                set.enqueue(index);
                drop(set);
                self.ring_if_sleeping();
                0
            }
            (libc::EPOLL_CTL_MOD, Some(event))
                if asked & ONESHOT != 0 && socket.promotion.asked.swap(false, SeqCst) =>
            {
                // A promotion waits for this EPOLL_CTL_MOD. The item has fired, so no other thread can be about to get
                // its event. The item is taken over here. Then the service thread continues the promotion, or hands the
                // item back.
                item.arm(event);
                if let Some(kernel_fd) = self.kernel_fd() {
                    // SAFETY: the program's own fd, which it keeps open during its call.
                    let _ = kernel::delete(kernel_fd, unsafe { BorrowedFd::borrow_raw(fd) });
                }
                self.set_taken(item, true);
                self.activate(&mut set);
                drop(set);
                Library::get().service.submit(Command::Used(socket.into()));
                0
            }
            (libc::EPOLL_CTL_MOD, Some(event)) => {
                let result = if parked { self.unpark(fd, event) } else { real() };
                if result == 0 {
                    item.arm(event);
                }
                result
            }
            (libc::EPOLL_CTL_DEL, _) => {
                let result = if taken || parked { 0 } else { real() };
                if result == 0 {
                    self.remove(set, index, socket);
                }
                result
            }
            _ => real(),
        }
    }

    /// Records an EPOLL_CTL_ADD of a connection that stays on TCP for good, and has no item.
    #[inline]
    pub(crate) fn on_plain(&self) {
        self.in_kernels.fetch_or(PLAIN, Relaxed);
    }

    /// Whether the kernel's set has connections, and not only files of other kinds.
    #[inline]
    pub(crate) fn is_mixed(&self) -> bool {
        self.in_kernels.load(Relaxed) != 0
    }

    /// Carries out EPOLL_CTL_MOD on a parked item, which the kernel's set does not have: adds its fd to the kernel's
    /// set, with the program's new event. Returns what epoll_ctl() returns, and sets errno.
    fn unpark(&self, fd: c_int, event: libc::epoll_event) -> c_int {
        // SAFETY: the program's own fd, which it keeps open during its call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let add = |set| add_to(set, fd, event.events, event.u64);
        match self.kernel_fd().ok_or(Errno::BADF).and_then(add) {
            Ok(()) => 0,
            Err(error) => errno::fail(error.raw_os_error()),
        }
    }

    /// Carries out EPOLL_CTL_ADD. Returns what epoll_ctl() returns, and sets errno.
    fn add(
        &'static self,
        mut set: Guard<'_, Set>,
        socket: &'static Socket,
        fd: c_int,
        event: libc::epoll_event,
        real: impl FnOnce() -> c_int,
    ) -> c_int {
        if !set.has_room() {
            return errno::fail(libc::ENOMEM);
        }
        socket.blocking.set_polled();
        self.in_kernels.fetch_add(1, Relaxed);
        let index = set.insert(Item {
            socket,
            fd,
            events: event.events,
            data: event.u64,
            taken: false,
            listed_in: 0,
            queued: false,
            young: false,
            disabled: false,
            dead: false,
        });
        if socket.is_watched() {
            // The set becomes active before the membership is added: the membership announces the set's ready queue to
            // peers.
            self.activate(&mut set);
        }
        // The membership is the socket's own record of the set. It is added first, then the socket is checked. A
        // promotion first marks the socket as watched, then reads the memberships (`service/watch`). So this check sees
        // a promotion that begins now, or the promotion sees the membership.
        ready::change_interest(socket, |i| {
            i.members.push(Membership {
                epoll: self,
                fd,
                item: index,
            });
        });
        if socket.is_watched() {
            if let Some(item) = set.item(index, socket) {
                self.set_taken(item, true);
            }
            self.activate(&mut set);
            set.add_young(index);
            self.make_ready(set, index, socket);
            return 0;
        }
        let result = real();
        if result != 0 {
            let errno = errno::get();
            self.remove(set, index, socket);
            errno::set(errno);
        }
        result
    }

    /// Returns the index of the socket's item under this fd. `None` if there is none.
    fn find(&self, set: &Set, socket: &'static Socket, fd: c_int) -> Option<usize> {
        let interest = socket.wakes.interest.lock()?;
        let mut items = interest.members.iter().filter(|m| m.is_in(self)).map(|m| m.item);
        items.find(|item| set.has(*item, socket, fd))
    }

    /// Records whether an item is taken over or in the kernel's set. Keeps the count of the items in the kernel's set.
    /// The caller holds the set's lock.
    fn set_taken(&self, item: &mut Item, taken: bool) {
        if std::mem::replace(&mut item.taken, taken) != taken {
            // Two's complement: adds one, or subtracts one.
            self.in_kernels.fetch_add(if taken { u32::MAX } else { 1 }, Relaxed);
        }
    }

    /// Removes the socket's item and its membership, so that the set is not notified of the socket any more.
    fn remove(&'static self, mut set: Guard<'_, Set>, index: usize, socket: &'static Socket) {
        if let Some(item) = set.item(index, socket) {
            self.set_taken(item, true);
        }
        set.remove(index);
        drop(set);
        ready::change_interest(socket, |i| {
            i.members.retain(|m| !(m.is_in(self) && m.item == index));
        });
    }
}

impl EpollSet for Epoll {
    fn be_served(&self) {
        self.served.store(true, Release);
    }

    fn forget(&self, index: usize, socket: &'static Socket) {
        if let Some(mut set) = self.set.lock()
            && let Some(item) = set.item(index, socket)
        {
            self.set_taken(item, true);
            set.remove(index);
        }
    }

    fn push(&'static self, index: usize, socket: &'static Socket) {
        if let Some(mut set) = self.set.lock()
            && set.item(index, socket).is_some_and(|item| item.taken)
        {
            self.make_ready(set, index, socket);
        }
    }

    /// Moves an item from the kernel's set to the library's list. Returns true if the item is taken over, or removed.
    /// Returns false if it cannot be taken over now: the set is closed, the caller is a signal handler that has
    /// interrupted the holder of the set's lock, or the item has an EPOLLONESHOT that has not fired. Such an
    /// EPOLLONESHOT may fire at this moment, and would be reported twice. An EPOLLONESHOT that has fired is silent
    /// until its EPOLL_CTL_MOD, which the library handles.
    fn take_over(&'static self, index: usize, socket: &'static Socket) -> bool {
        let Some(mut set) = self.set.lock() else {
            return false;
        };
        let Some(item) = set.item(index, socket).filter(|item| !item.taken) else {
            return true;
        };
        let Some(kernel_fd) = self.kernel_fd() else {
            // The set is closed, and a wait that began before continues in the kernel alone.
            return false;
        };
        let fd = item.fd;
        // A parked item is disabled, so it has fired.
        let has_fired = item.is_parked() || item.events & ONESHOT != 0 && has_fired(kernel_fd, fd, item.data);
        if item.events & ONESHOT != 0 && !has_fired {
            return false;
        }
        item.disabled = has_fired;
        self.set_taken(item, true);
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
        // Counted after the removal, so that a thread that reads the new count finds the socket in one set only.
        self.moves.fetch_add(1, Release);
        set.add_young(index);
        self.make_ready(set, index, socket);
        true
    }

    /// Moves an item back into the kernel's set, when its socket is on plain TCP again. A disabled item is parked
    /// instead: it is not added to the kernel's set (`Item::is_parked`).
    fn hand_back(&'static self, index: usize, socket: &'static Socket) {
        let Some(mut set) = self.set.lock() else {
            return;
        };
        let Some(item) = set.item(index, socket).filter(|item| item.taken) else {
            return;
        };
        let control = socket.control.lock();
        if !control.as_ref().is_some_and(|c| c.own.fds.contains(&item.fd)) {
            return;
        }
        let (fd, data, events) = (item.fd, item.data, item.events);
        self.set_taken(item, false);
        let parked = item.is_parked();
        point!("hand back: neither set has the socket");
        self.moves.fetch_add(1, Release);
        if !parked && let Some(kernel_fd) = self.kernel_fd() {
            // SAFETY: the fd is still one of the socket's, and the control lock keeps close() out.
            let _ = add_to(kernel_fd, unsafe { BorrowedFd::borrow_raw(fd) }, events, data);
        }
    }

    /// Returns the waiter that peers wake for the set. `None` until the set is active, or if no fd was left for a bell.
    fn waiter(&self) -> Option<WaiterId> {
        WaiterId::from_word(self.waiter.load(Relaxed))
    }
}

/// Adds an fd to a kernel's set.
pub(crate) fn add_to(set: BorrowedFd<'_>, fd: BorrowedFd<'_>, events: u32, data: u64) -> rustix::io::Result<()> {
    let (events, data) = (
        kernel::EventFlags::from_bits_retain(events),
        kernel::EventData::new_u64(data),
    );
    kernel::add(set, fd, data, events)
}

/// Whether an EPOLLONESHOT item of a kernel's set has fired and waits for its EPOLL_CTL_MOD. The kernel shows the
/// remaining events in fdinfo (proc_pid_fdinfo(5)). False if fdinfo cannot be read.
fn has_fired(set: BorrowedFd<'_>, fd: c_int, data: u64) -> bool {
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

impl Set {
    /// Reserves room for one more item in each list. Returns false if there is no memory.
    fn has_room(&mut self) -> bool {
        let most = self.items.len() + 1;
        let more = |len: usize| most.saturating_sub(len);
        self.items.try_reserve(1).is_ok()
            && self.free.try_reserve(more(self.free.len())).is_ok()
            && self.ready.try_reserve(more(self.ready.len())).is_ok()
            && self.come.try_reserve(more(self.come.len())).is_ok()
            && self.young.try_reserve(MOST_YOUNG - self.young.len()).is_ok()
    }

    fn insert(&mut self, item: Item) -> usize {
        let index = self.free.pop().unwrap_or(self.items.len());
        match self.items.get_mut(index) {
            Some(free) => *free = item,
            None => self.items.push(item),
        }
        index
    }

    /// Appends an item to the list of ready items, unless it is there already or is removed.
    pub(crate) fn enqueue(&mut self, index: usize) {
        // A removed item is skipped: its index may be in `free` already, and would then be handed out twice.
        if let Some(item) = self.items.get_mut(index)
            && !item.queued
            && !item.dead
        {
            item.queued = true;
            self.ready.push_back(index);
        }
    }

    /// Appends an item that was just taken over to the young ones, if it is one.
    fn add_young(&mut self, index: usize) {
        if let Some(item) = self.items.get_mut(index)
            && item.is_young()
            && !std::mem::replace(&mut item.young, true)
        {
            if self.young.len() == MOST_YOUNG
                && let Some(oldest) = self.young.pop_front().and_then(|oldest| self.items.get_mut(oldest))
            {
                oldest.young = false;
            }
            self.young.push_back(index);
        }
    }

    fn remove(&mut self, index: usize) {
        if let Some(item) = self.items.get_mut(index) {
            item.dead = true;
            if !item.queued {
                self.free.push(index);
            }
        }
    }

    /// Returns the item at `index`. `None` if it belongs to another socket, or is removed.
    fn item(&mut self, index: usize, socket: &Socket) -> Option<&mut Item> {
        self.items.get_mut(index).filter(|item| item.is_of(socket))
    }

    /// Whether the item at `index` belongs to the socket, under this fd.
    fn has(&self, index: usize, socket: &Socket, fd: c_int) -> bool {
        let item = self.items.get(index);
        item.is_some_and(|item| item.is_of(socket) && item.fd == fd)
    }
}

/// A link to another host, and its state in an epoll set. When this value is dropped, the set's use of the link ends.
pub(crate) struct Far {
    set: &'static Epoll,
    pub link: &'static Link,
    /// Keeps the link object from being reused for another link, to which the state below would not apply.
    _pin: Pin,
    pub remote: &'static Remote,
    pub slot: u32,
    /// State of the link's end that sets check before they sleep: whether ready queues may have entries, and whether
    /// the completion descriptor is armed.
    pub news: &'static News,
    /// The kernel's set has the link's completion descriptor.
    is_watched: bool,
    /// The service thread handles the link's completions on behalf of this set.
    is_left: bool,
}

impl Far {
    /// Whether the kernel's set reports the next completion. If it does, the link need not be armed or polled.
    pub(crate) fn is_told(&self) -> bool {
        self.is_watched && self.news.is_armed()
    }

    /// Arms the link before a sleep on the kernel's set: a completion then makes the kernel's set readable.
    fn watch(&mut self, kernel_fd: BorrowedFd<'_>) {
        self.remote.watch(|fd| {
            if !self.is_watched {
                let key = self.set.key.load(Relaxed) | tag_of(self.slot);
                let added = add_to(kernel_fd, fd, libc::EPOLLIN as u32 | EXCLUSIVE, key);
                self.is_watched = matches!(added, Ok(()) | Err(Errno::EXIST));
                if self.is_watched {
                    self.remote.watchers.add(&self.set.watch);
                }
            }
            self.is_watched
        });
    }

    fn unwatch(&mut self) {
        if std::mem::take(&mut self.is_watched) {
            self.remote.watchers.remove(&self.set.watch);
            self.remote.while_open(|fd| {
                if let Some(kernel_fd) = self.set.kernel_fd() {
                    let _ = kernel::delete(kernel_fd, fd);
                }
            });
        }
    }

    /// Makes the service thread handle completions, even while threads of the program sleep on the link.
    fn leave_to_service(&mut self) {
        if !std::mem::replace(&mut self.is_left, true) {
            self.remote.leave_to_service();
        }
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        self.unwatch();
        if self.is_left {
            self.remote.take_from_service();
        }
    }
}

/// The links that carry a set's sockets. A wait checks every link within this host. A link to another host is checked
/// by polling its completions.
#[derive(Default)]
pub(crate) struct Links {
    /// Links within this host.
    pub near: Vec<&'static Link>,
    pub far: Vec<Far>,
    /// The index in `far` at which the next check begins.
    pub next: usize,
    /// Links of `far` that had data in the harvest that runs now (`Wait::harvest`, which collects ready items). Empty
    /// between harvests.
    pub spoke: Vec<&'static Link>,
    /// How often the service thread had begun to handle completions of a link, before the last sleep on the set
    /// (`Mailbox::taken_back`).
    taken_back: u32,
    /// The service thread handles completions of all links, and the kernel's set has none of their descriptors.
    pub are_left: bool,
}

impl Links {
    fn add(&mut self, set: &'static Epoll, link: &'static Link) {
        let Some(remote) = link.remote() else {
            if !self.near.iter().any(|l| std::ptr::eq(*l, link)) {
                self.near.push(link);
            }
            return;
        };
        if !self.far.iter().any(|f| std::ptr::eq(f.link, link))
            && let Some(pin) = Pin::new(link)
            // The link is pinned before this check. The service thread first takes a link down, then removes it from
            // all sets. So the service thread finds this entry, or this check finds the link dead.
            && link.is_alive()
        {
            let mut far = Far {
                set,
                link,
                _pin: pin,
                remote,
                slot: link.slot(),
                news: remote.news(),
                is_watched: false,
                is_left: false,
            };
            if self.are_left {
                far.leave_to_service();
            }
            self.far.push(far);
        }
    }

    /// Makes the service thread handle all completions, because another set holds this one from now on. The kernel's
    /// object must be readable only while an item is ready for the program, but each completion would make it readable.
    pub(crate) fn leave_to_service(&mut self) {
        self.are_left = true;
        for far in &mut self.far {
            far.leave_to_service();
            far.unwatch();
        }
    }

    /// Arms the links before a sleep on the kernel's set: a completion on any of them then makes the kernel's set
    /// readable. Skips links that are still armed, unless the service thread has begun to handle completions since the
    /// last sleep (`taken_back`).
    pub(crate) fn watch(&mut self, kernel_fd: BorrowedFd<'_>, taken_back: u32) {
        let is_heard_elsewhere = std::mem::replace(&mut self.taken_back, taken_back) != taken_back;
        for far in &mut self.far {
            if is_heard_elsewhere || !far.is_told() {
                far.watch(kernel_fd);
            }
        }
    }
}

/// The upper 34 bits of all keys. No pointer begins with these bits, since such an address would not be canonical, and
/// no small number begins with them. A program's random data begins with them with a probability of 2^-34.
const OURS: u64 = 0x2_d785_3e71;
/// The number of bits of the process id that follows the prefix `OURS` (Linux has no id above 2^22). That process is
/// the key's *owner*: its library has added the fd to the set.
const OWNER_BITS: u32 = 22;
/// The number of bits of the tag, the lowest bits of a key. Tag 0 stands for the owner's bell, any other tag for one of
/// the owner's links.
const TAG_BITS: u32 = 8;

/// The number of tags for links, which is also the mask of a tag's bits. Several links may share a tag.
const LINK_TAGS: u32 = (1 << TAG_BITS) - 1;

/// Returns the key of this process, with which its bells are registered in a kernel's set. The key has the tag 0. The
/// completion descriptor of a link is registered with the key and the link's [tag](tag_of). By these data the library
/// finds its own fds in a result and removes them, so that the program never sees one.
///
/// All holders of a set share one kernel object: fork children, the programs that they execute, and receivers of its
/// fd. So a process may find library fds of another process in a set. It recognises them by the prefix of their data.
fn key_of_this_process() -> u64 {
    let pid = rustix::process::getpid().as_raw_nonzero().get() as u64;
    (OURS << OWNER_BITS | pid & ((1 << OWNER_BITS) - 1)) << TAG_BITS
}

/// Whether these data stand for a library fd, of any process.
fn is_of_library(data: u64) -> bool {
    data >> (OWNER_BITS + TAG_BITS) == OURS
}

/// Returns the tag that stands for a link in the data of its completion descriptor. `slot` is the link's number in this
/// process. Links whose slots differ by a multiple of [`LINK_TAGS`] share a tag.
fn tag_of(slot: u32) -> u64 {
    u64::from(1 + slot % LINK_TAGS)
}

/// The links that a kernel's set has reported, by their tags.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Named([u64; 1 << (TAG_BITS - 6)]);

impl Named {
    fn add(&mut self, tag: u64) {
        if let Some(word) = self.0.get_mut(tag as usize / 64) {
            *word |= 1 << (tag % 64);
        }
    }

    pub(crate) fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the link with this slot may have been reported. Another link with the same tag may have been reported
    /// instead.
    pub(crate) fn has(&self, slot: u32) -> bool {
        let tag = tag_of(slot);
        let word = self.0.get(tag as usize / 64);
        word.is_some_and(|word| word >> (tag % 64) & 1 != 0)
    }
}

/// The result of [`strip`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Stripped {
    /// The number of the program's entries, which are at the front of the array now.
    pub kept: c_int,
    /// This process's bell, or one of its links, was among the entries.
    pub own: bool,
    /// An fd of another process's library was among the entries.
    pub foreign: bool,
    /// The links of this process that were among the entries.
    pub named: Named,
}

/// Removes the entries of library fds, of any process, and moves the program's entries to the front. `own` is the key
/// of the set's bell, or 0.
///
/// # Safety
/// If `n` is above 0, the first `n` entries are filled.
pub(crate) unsafe fn strip(events: *mut libc::epoll_event, n: c_int, own: u64) -> Stripped {
    let mut stripped = Stripped::default();
    if n <= 0 {
        return stripped;
    }
    // SAFETY: `n` entries are filled, by the contract.
    let filled = unsafe { std::slice::from_raw_parts_mut(events, n as usize) };
    let kept = keep(filled, |data| {
        if !is_of_library(data) {
            return true;
        }
        let tag = data & u64::from(LINK_TAGS);
        stripped.own |= data - tag == own;
        stripped.foreign |= data - tag != own;
        if data - tag == own && tag != 0 {
            stripped.named.add(tag);
        }
        false
    });
    stripped.kept = kept as c_int;
    stripped
}

/// Moves the entries whose data `stays` accepts to the front, in their order. Returns how many.
pub(crate) fn keep(events: &mut [libc::epoll_event], mut stays: impl FnMut(u64) -> bool) -> usize {
    let mut kept = 0;
    for at in 0..events.len() {
        if events.get(at).is_some_and(|event| stays(event.u64)) {
            events.swap(kept, at);
            kept += 1;
        }
    }
    kept
}

/// Waits on a set that the library does not know, and removes library fds of other processes from the result.
/// `real(left)` is the kernel's wait with the time that is left.
///
/// # Safety
/// `events` is the array that `real` fills, with as many entries as `real` returns.
pub(crate) unsafe fn without_ours(
    events: *mut libc::epoll_event,
    timeout: Timeout,
    real: impl Fn(Timeout) -> c_int,
) -> c_int {
    let deadline = timeout.deadline();
    let mut left = timeout;
    loop {
        let n = real(left);
        if n <= 0 {
            return n;
        }
        // SAFETY: `real` has filled `n` entries, by the contract.
        let kept = unsafe { strip(events, n, 0) }.kept;
        if kept > 0 || deadline.is_zero() {
            return kept;
        }
        left = deadline.left();
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
            listed_in: 0,
            queued: false,
            young: false,
            disabled: false,
            dead: false,
        };
        let mut set = Set::default();
        let first = set.insert(item());
        set.remove(first);
        // The service thread may still have a copy of the membership, and push the removed item.
        set.enqueue(first);
        assert!(set.ready.is_empty());
        let (a, b) = (set.insert(item()), set.insert(item()));
        assert_ne!(a, b);
    }

    #[test]
    fn what_is_ours_is_taken_out_and_the_rest_keeps_its_order() {
        let own = key_of_this_process();
        let foreign = own ^ 1 << TAG_BITS;
        assert!(is_of_library(own));
        for data in [0, 5, 0x7fff_ffff_f000, u64::MAX, own ^ 1 << (OWNER_BITS + TAG_BITS)] {
            assert!(!is_of_library(data));
        }
        let event = |u64| libc::epoll_event { events: 1, u64 };
        let mut events = [own, 7, foreign, 8, own].map(event);
        // SAFETY: `events` has five entries.
        let stripped = unsafe { strip(events.as_mut_ptr(), 5, own) };
        let expected = Stripped {
            kept: 2,
            own: true,
            foreign: true,
            named: Named::default(),
        };
        assert_eq!(stripped, expected);
        assert_eq!(events.map(|e| e.u64)[..2], [7, 8]);
        // SAFETY: no entry is filled.
        assert_eq!(unsafe { strip(std::ptr::null_mut(), -1, own) }.kept, 0);
    }

    #[test]
    fn links_are_told_apart_and_from_the_doorbell() {
        let own = key_of_this_process();
        let foreign = own ^ 1 << TAG_BITS;
        let event = |u64| libc::epoll_event { events: 1, u64 };
        let mut events = [own | tag_of(3), own, own | tag_of(254), foreign | tag_of(7)].map(event);
        // SAFETY: `events` has four entries.
        let stripped = unsafe { strip(events.as_mut_ptr(), 4, own) };
        assert!(stripped.own && stripped.foreign && stripped.kept == 0);
        let named = |slot| stripped.named.has(slot);
        assert!(named(3) && named(254) && !named(0) && !named(7) && !named(4));
        assert!(named(3 + LINK_TAGS), "several links have the same tag");
        let mut bell = [event(own)];
        // SAFETY: `bell` has one entry.
        assert!(unsafe { strip(bell.as_mut_ptr(), 1, own) }.named.is_none());
    }
}
