//! epoll sets: what the program sees of its epoll fd.
//!
//! A socket on plain TCP is in the kernel's set, with the program's own data; the library only
//! remembers that it is. When a promotion begins, the socket is *taken over*: removed from the
//! kernel's set and from then on reported from the list of ready items here, which is fed by the
//! ready queues of the links (one entry a stream that has something to do, so a wait costs
//! O(ready)) and by the service thread (what happens on the anchor). When the socket is back on
//! TCP for good it is *handed back*. The kernel's set also holds the doorbell of this set, an
//! eventfd under a key of ours, so that one sleep in the kernel waits for both.
//!
//! Here is the set, from its making to its end, and who is put in; waiting for it is in `epoll_wait`.

mod control;
pub mod key;
pub mod links;
mod takeover;

pub use key::without_ours;

use key::Key;
use links::Links;

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst},
};

use rustix::event::epoll as kernel;

use crate::config::spin::Spinner;
use crate::notify::ready;
use crate::objects::library::Library;
use crate::objects::link::Watch;
use crate::objects::socket::{EpollSet, Socket};
use crate::sys::points::point;
use crate::sys::registry::Registry;
use rdmasock_core::fabric::asleep::Gate;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::lock::Lock;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::sync::{Presence, Published};

pub const ET: u32 = libc::EPOLLET as u32;
pub const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
/// Reported whether asked for or not.
pub const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// One socket in the set, under one number.
pub(crate) struct Item {
    pub(crate) socket: &'static Socket,
    pub(crate) fd: c_int,
    pub(crate) events: u32,
    pub(crate) data: u64,
    /// Taken over: the kernel's set no longer has it.
    pub(crate) taken: bool,
    /// The set's count of moves when it was.
    pub(crate) moved_at: u64,
    /// The result that it was listed in last ([`Set::results`]).
    pub(crate) listed_in: u64,
    /// Is in `ready`.
    pub(crate) queued: bool,
    /// EPOLLONESHOT has fired; MOD arms it again.
    pub(crate) disabled: bool,
    /// The item is disabled, and was handed back: in neither set until then, for whatever is added to the kernel's
    /// reports how a connection has ended.
    pub(crate) parked: bool,
    /// Removed, but still in `ready`.
    pub(crate) dead: bool,
}

#[derive(Default)]
pub(crate) struct Set {
    pub(crate) items: Vec<Item>,
    pub(crate) free: Vec<usize>,
    pub(crate) ready: VecDeque<usize>,
    /// Reported by the present harvest, and to be looked at again by the next. Empty in between, as is `come`.
    pub(crate) again: Vec<usize>,
    /// What peers have queued, and when.
    pub(crate) come: Vec<(u64, usize)>,
    /// How many waits have looked for results here.
    pub(crate) results: u64,
    /// How many items the kernel's set has.
    pub(crate) plain: usize,
    /// Those that carry a socket of this set.
    pub(crate) links: Links,
}

/// See the module.
#[repr(align(64))]
pub struct Epoll {
    pub(crate) set: Lock<Set>,
    /// The set's waiter, plus one.
    pub(crate) waiter: AtomicU32,
    /// The data of the doorbell in the kernel's set, once it is there ([`Key`]).
    pub(crate) key: AtomicU64,
    /// One of the program's numbers, -1 when it has closed the last.
    pub(crate) fd: AtomicI32,
    /// A number of ours for the same set, from when it is active on: what is done to it and what sleeps on it does not
    /// depend on the program's numbers. -1: none.
    pub(crate) own: AtomicI32,
    /// Changes whenever the object is another set's.
    pub(crate) generation: AtomicU32,
    /// Waits that have begun to wait, and go through this module.
    pub(crate) inside: Presence,
    /// The program has closed the last number, and waits that began before are not back.
    pub(crate) closed: Published<AtomicBool>,
    /// Another set holds this one, so the kernel's object has to show when something is ready: peers
    /// ring as if somebody always slept here.
    pub(crate) nested: Published<AtomicBool>,
    /// Peers tell the service thread of some of its sockets, for another set has them too (`served`).
    pub(crate) served: AtomicBool,
    /// For a nested set: the waiter's flag counts one sleeper for it.
    pub(crate) shown: Published<AtomicBool>,
    /// Shared with the process that we were forked from, which may have taken sockets over.
    pub(crate) inherited: AtomicBool,
    /// To the kernel's wait alone (`alone`). Closed once some item is or was taken over: the set is active, and waits
    /// go through this module.
    pub(crate) gate: Gate,
    /// The waiter's flag counts one sleeper for those who were there when the set became active, and still are.
    pub(crate) plain_sleeps: Published<AtomicBool>,
    /// Numbers that stand for the set.
    pub(crate) fds: AtomicU32,
    /// How often a socket went from the kernel's set to ours or back.
    pub(crate) moves: AtomicU64,
    /// The kernel's set has sockets that may be taken over, so connections, too.
    pub(crate) mixed: AtomicBool,
    /// Connections that stay on TCP for good have been added to the kernel's set, and no item tells of them.
    pub(crate) has_plain: AtomicBool,
    /// When the kernel's set was last looked at, monotonic ns.
    pub(crate) looked_at: AtomicU64,
    /// The last look found nothing there.
    pub(crate) kernel_quiet: AtomicBool,
    /// The last wait had no room for what the kernel may have to report.
    pub(crate) full: AtomicU32,
    /// Whose turn it is to be looked at first.
    pub(crate) turn: AtomicBool,
    pub(crate) spinner: Spinner,
    /// For links to other hosts: whether threads sleep on the set.
    pub(crate) watch: Watch,
}

static FREE: Lock<Vec<&'static Epoll>> = Lock::new(Vec::new());
static ALL: Registry<Epoll> = Registry::new();

impl Epoll {
    /// An object for a new set behind `fd`.
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

    /// Another number stands for the set.
    pub fn retain(&self) {
        self.fds.fetch_add(1, Relaxed);
    }

    /// A number of the set is closed, and not in the table any more, which may know of `another`.
    pub fn release(&'static self, fd: c_int, another: impl FnOnce(&'static Self) -> Option<c_int>) {
        if self.fds.fetch_sub(1, AcqRel) == 1 {
            self.fd.store(-1, Release);
            self.closed.publish(true);
            self.end_if_left();
        } else if self.fd.load(Acquire) == fd {
            self.fd.store(another(self).unwrap_or(-1), Release);
        }
    }

    /// The set is closed, and the last wait that began before is back: the object is as new.
    pub(crate) fn end_if_left(&'static self) {
        // Who leaves looks then whether it is closed.
        let is_left = self.inside.is_empty() && !self.gate.is_in_use();
        if is_left && self.closed.take() {
            self.recycle();
        }
    }

    /// Links to other hosts have gone down: no set keeps their objects from becoming other links.
    pub fn drop_dead_links() {
        for epoll in ALL.all() {
            if let Some(mut set) = epoll.set.lock() {
                set.links.drop_dead(epoll.kernel_fd(), &epoll.watch);
            }
        }
    }

    /// Whether waits have to go through this module.
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
        // The kernel's object may be other processes' too.
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
            // Without memory for that the object is lost.
            let _ = free.try_reserve(1).map(|()| free.push(self));
        }
    }

    /// In a fork child, for every set, also one that another thread of the parent was about to make or to end: its
    /// kernel object is shared with the parent, whose doorbell it holds; nothing of ours is used on it any more.
    /// Numbers that stand for it are told by [`Self::inherit`].
    ///
    /// # Safety
    /// In a fork child only, before any other use.
    pub unsafe fn after_fork() {
        // SAFETY: only this thread exists; what was being changed is leaked, not used.
        unsafe {
            std::mem::forget(std::mem::take(FREE.get_unlocked()));
            FREE.reset();
        }
        for epoll in ALL.all() {
            // SAFETY: as above.
            unsafe { epoll.forget_parent() };
        }
    }

    unsafe fn forget_parent(&self) {
        // SAFETY: by the contract of `after_fork`.
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

    /// In a fork child, after [`Self::after_fork`]: this number stands for the set.
    pub fn inherit(&self, fd: c_int) {
        self.fd.store(fd, Release);
        self.retain();
    }

    /// Whether nothing of the set is reported from here.
    pub fn is_kernels_alone(&self) -> bool {
        let set = self.set.lock();
        set.is_some_and(|set| set.items.iter().all(|i| i.dead || !i.taken))
    }

    /// The library lets go of a set that is the kernel's alone: it reports what is the program's, and nothing else.
    /// Its number is to be [released](Self::release) next.
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
                    // SAFETY: an item is forgotten before its number is closed.
                    unsafe { BorrowedFd::borrow_raw(item.fd) },
                    kernel::EventData::new_u64(item.data),
                    kernel::EventFlags::from_bits_retain(ONESHOT),
                );
            }
            set.links.let_go(Some(kernel_fd), &self.watch);
        }
    }

    /// The kernel's set. The caller holds the set's lock, or is inside (`epoll_wait::visit`).
    pub(crate) fn kernel_fd(&self) -> Option<BorrowedFd<'static>> {
        let fd = match self.own.load(Acquire) {
            -1 => self.fd.load(Acquire),
            own => own,
        };
        // SAFETY: ours is closed under the set's lock, when nobody is inside. Where there was no number left for it,
        // the program's is open unless it closes that at this moment.
        (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Who is told of what is ready in the set, from when it is active on.
    pub fn waiter(&self) -> Option<WaiterId> {
        WaiterId::from_word(self.waiter.load(Relaxed))
    }

    /// The last of those who were in the kernel's wait alone is back.
    pub(crate) fn end_plain_sleep(&self, waiter: Option<WaiterId>) {
        if let Some(waiter) = waiter
            && self.plain_sleeps.take()
        {
            Library::get().waiters.leave_sleep(waiter);
        }
    }

    /// From now on waits go through this module. The caller holds the set's lock.
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
            // What its last owner was rung for is not to make this set readable. Another set may have it too.
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
            // They sleep in the kernel's wait alone. A ring wakes one of all that sleep in the kernel, not always one
            // of these. As long as one is left peers are to ring.
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

    /// In a fork parent: a child of ours has taken what some thread that sleeps on a set was rung for.
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
    /// Whether one more item will find room in each of the lists. False without memory.
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

    /// Notes in which of the two sets an item is.
    fn set_taken(&mut self, index: usize, taken: bool) {
        if let Some(item) = self.items.get_mut(index)
            && !item.dead
            && std::mem::replace(&mut item.taken, taken) != taken
        {
            self.plain = if taken { self.plain - 1 } else { self.plain + 1 };
        }
    }
}

/// Puts an item on the list of ready ones.
pub(crate) fn enqueue(items: &mut [Item], ready: &mut VecDeque<usize>, index: usize) {
    // Not a removed one: its place may be free already, and would be given out twice.
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
        // The service thread still had the membership in its hands.
        set.enqueue(first);
        assert!(set.ready.is_empty());
        let (a, b) = (set.insert(item()), set.insert(item()));
        assert_ne!(a, b);
    }
}
