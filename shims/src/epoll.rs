//! epoll sets: what the program sees of its epoll fd.
//!
//! A socket on plain TCP is in the kernel's set, with the program's own data; the library only
//! remembers that it is. When a promotion begins, the socket is *taken over*: removed from the
//! kernel's set and from then on reported from the list of ready items here, which is fed by the
//! ready queues of the links (one entry a stream that has something to do, so a wait costs
//! O(ready)) and by the service thread (what happens on the anchor). When the socket is back on
//! TCP for good it is *handed back*. The kernel's set also holds the doorbell of this set, an
//! eventfd under a random key, so that one sleep in the kernel waits for both.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst},
};

use rustix::event::epoll as kernel;

use crate::library::Library;
use crate::link::Link;
use crate::ready::{self, Arm};
use crate::socket::{Membership, Socket};
use crate::time::Timeout;
use crate::wait::{Spinner, WaiterId};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::privatefd::PrivateFd;

const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
/// What is no event, and stays when an EPOLLONESHOT has fired.
const PRIVATE: u32 = ONESHOT | ET | EXCLUSIVE | libc::EPOLLWAKEUP as u32;
/// Reported whether asked for or not.
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// What may be asked for together with EPOLLEXCLUSIVE.
const EXCLUSIVE_OK: u32 = EXCLUSIVE
    | ALWAYS
    | (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLWAKEUP | libc::EPOLLET) as u32;
/// How long waits may be answered from the links alone before the kernel's set is looked at
/// again, ns: short enough not to be felt, long enough that a busy program makes few calls.
const KERNEL_EVERY: u64 = 20_000;

/// How long to sleep at a time where nobody can wake us, ns.
const WITHOUT_DOORBELL: u64 = 1_000_000;

/// One socket in the set, under one number.
struct Item {
    socket: &'static Socket,
    fd: c_int,
    events: u32,
    data: u64,
    /// Taken over: the kernel's set no longer has it.
    taken: bool,
    /// Is in `ready`.
    queued: bool,
    /// EPOLLONESHOT has fired; MOD arms it again.
    disabled: bool,
    /// Removed, but still in `ready`.
    dead: bool,
}

#[derive(Default)]
struct Set {
    items: Vec<Item>,
    free: Vec<usize>,
    ready: VecDeque<usize>,
    /// Links that carry a socket of this set.
    links: Vec<&'static Link>,
}

/// See the module.
#[repr(align(64))]
pub struct Epoll {
    set: Lock<Set>,
    /// Some item is or was taken over: waits go through this module.
    active: AtomicBool,
    /// The set's waiter, plus one.
    waiter: AtomicU32,
    /// The doorbell's data in the kernel's set. Random, so that it is not a program's own.
    key: AtomicU64,
    fd: AtomicI32,
    /// Another set holds this one, so the kernel's object has to show when something is ready: peers
    /// ring as if somebody always slept here.
    nested: AtomicBool,
    /// For a nested set: the waiter's flag counts one sleeper for it.
    shown: AtomicBool,
    /// Shared with the process that we were forked from, which may have taken sockets over.
    inherited: AtomicBool,
    /// Threads inside the kernel's wait alone (`wait_plain`).
    plain: AtomicU32,
    /// Numbers that stand for the set.
    fds: AtomicU32,
    /// How often a socket went from the kernel's set to ours or back.
    moves: AtomicU64,
    /// When the kernel's set was last looked at, monotonic ns.
    looked_at: AtomicU64,
    /// The last wait had no room for what the kernel may have to report.
    full: AtomicU32,
    /// Whose turn it is to be looked at first.
    turn: AtomicBool,
    spinner: Spinner,
}

static FREE: Lock<Vec<&'static Epoll>> = Lock::new(Vec::new());

impl Epoll {
    /// An object for a new set behind `fd`.
    pub fn allocate(fd: c_int) -> Option<&'static Epoll> {
        let recycled = FREE.lock()?.pop();
        let epoll = recycled.unwrap_or_else(|| {
            Box::leak(Box::new(Epoll {
                set: Lock::new(Set::default()),
                active: AtomicBool::new(false),
                waiter: AtomicU32::new(0),
                key: AtomicU64::new(0),
                fd: AtomicI32::new(-1),
                nested: AtomicBool::new(false),
                shown: AtomicBool::new(false),
                inherited: AtomicBool::new(false),
                plain: AtomicU32::new(0),
                fds: AtomicU32::new(0),
                moves: AtomicU64::new(0),
                looked_at: AtomicU64::new(0),
                full: AtomicU32::new(0),
                turn: AtomicBool::new(false),
                spinner: Spinner::new(),
            }))
        });
        epoll.fd.store(fd, Release);
        epoll.nested.store(false, Release);
        epoll.inherited.store(false, Release);
        epoll.fds.store(1, Release);
        Some(epoll)
    }

    /// Another number stands for the set.
    pub fn retain(&self) {
        self.fds.fetch_add(1, Relaxed);
    }

    /// A number of the set is closed.
    pub fn release(&'static self, _fd: c_int) {
        if self.fds.fetch_sub(1, Relaxed) == 1 {
            self.recycle();
        }
    }

    /// Another set, or something else that the kernel waits on, is about to hold this one.
    pub fn on_nested(&'static self) {
        if !self.nested.swap(true, SeqCst) && self.is_active() {
            self.show_ready();
        }
    }

    /// Starts a new epoch in which peers ring, and rings if something is left to report.
    fn show_ready(&'static self) {
        let Some(waiter) = WaiterId::from_word(self.waiter.load(Relaxed)) else {
            return;
        };
        let waiters = &Library::get().waiters;
        if self.shown.swap(true, SeqCst) {
            waiters.leave_sleep(waiter);
        }
        waiters.enter_sleep(waiter);
        if self.is_ready() {
            waiters.ring(waiter);
        }
    }

    /// Whether waits have to go through this module.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.active.load(Acquire)
    }

    fn recycle(&'static self) {
        self.fd.store(-1, Release);
        self.active.store(false, Release);
        let Some(mut set) = self.set.lock() else {
            return;
        };
        let sockets: Vec<&'static Socket> = set
            .items
            .iter()
            .filter(|i| !i.dead)
            .map(|i| i.socket)
            .collect();
        *set = Set::default();
        drop(set);
        for socket in sockets {
            ready::change_interest(socket, |i| {
                i.members.retain(|m| !std::ptr::eq(m.epoll, self))
            });
        }
        if let Some(waiter) = WaiterId::from_word(self.waiter.swap(0, Relaxed)) {
            let waiters = &Library::get().waiters;
            if self.shown.swap(false, SeqCst) {
                waiters.leave_sleep(waiter);
            }
            waiters.release(waiter);
        }
        if let Some(mut free) = FREE.lock() {
            free.push(self);
        }
    }

    /// In a fork child: the set's kernel object is shared with the parent, whose doorbell it
    /// holds; nothing of ours is used on it any more.
    ///
    /// # Safety
    /// In a fork child only, before any other use.
    pub unsafe fn after_fork(&'static self) {
        // SAFETY: only this thread exists; a set that was being changed is leaked, not used.
        unsafe {
            std::mem::forget(std::mem::take(self.set.get_unlocked()));
            self.set.reset();
            FREE.reset();
        }
        self.active.store(false, Release);
        self.inherited.store(true, Release);
        self.waiter.store(0, Relaxed);
        self.plain.store(0, Relaxed);
        self.shown.store(false, Relaxed);
        // The key stays: the parent's doorbell may show up here and is filtered out.
    }

    fn kernel_fd(&self) -> Option<BorrowedFd<'static>> {
        let fd = self.fd.load(Acquire);
        // SAFETY: open while the set's lock is held or the program is inside a call on it.
        (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// The part of an attention word that names this set's ready queue; 0 without one.
    pub fn queue_bits(&self) -> u32 {
        WaiterId::from_word(self.waiter.load(Relaxed)).map_or(0, WaiterId::queue_bits)
    }

    /// epoll_ctl() on a socket that the library knows.
    pub fn control(
        &'static self,
        socket: &'static Socket,
        fd: c_int,
        op: c_int,
        event: Option<libc::epoll_event>,
        real: impl FnOnce() -> c_int,
    ) -> c_int {
        crate::fork::reclaim(socket);
        let Some(mut set) = self.set.lock() else {
            return real();
        };
        let index = find(socket, self, fd).filter(|i| set.items.get(*i).is_some_and(|i| !i.dead));
        let taken = index.and_then(|i| set.items.get(i)).map(|i| i.taken);
        let asked = event.map_or(0, |e| e.events);
        let exclusive = index
            .and_then(|i| set.items.get(i))
            .is_some_and(|i| i.events & EXCLUSIVE != 0);
        let refused = match op {
            libc::EPOLL_CTL_ADD => asked & EXCLUSIVE != 0 && asked & !EXCLUSIVE_OK != 0,
            libc::EPOLL_CTL_MOD => asked & EXCLUSIVE != 0 || exclusive,
            _ => false,
        };
        if refused {
            return crate::errno::fail(libc::EINVAL);
        }
        match (op, event, index, taken) {
            (libc::EPOLL_CTL_ADD, Some(_), Some(_), _) => crate::errno::fail(libc::EEXIST),
            (libc::EPOLL_CTL_ADD, Some(event), None, _) => {
                let index = set.insert(Item {
                    socket,
                    fd,
                    events: event.events,
                    data: event.u64,
                    taken: false,
                    queued: false,
                    disabled: false,
                    dead: false,
                });
                if ready::is_watched(socket) {
                    // Before the membership, which tells peers our ready queue.
                    self.activate(&mut set);
                }
                // First the membership, then the look (`watch` the other way round): a promotion that
                // begins now is seen here, or sees the membership.
                ready::change_interest(socket, |i| {
                    i.members.push(Membership {
                        epoll: self,
                        fd,
                        item: index,
                    })
                });
                if ready::is_watched(socket) {
                    if let Some(item) = set.items.get_mut(index) {
                        item.taken = true;
                    }
                    self.activate(&mut set);
                    if let Some(link) = socket.link() {
                        set.add_link(link);
                    }
                    set.enqueue(index);
                    drop(set);
                    self.ring_if_sleeping();
                    return 0;
                }
                let result = real();
                if result != 0 {
                    let errno = crate::errno::get();
                    set.remove(index);
                    drop(set);
                    ready::change_interest(socket, |i| {
                        i.members
                            .retain(|m| !(std::ptr::eq(m.epoll, self) && m.item == index));
                    });
                    crate::errno::set(errno);
                }
                result
            }
            (libc::EPOLL_CTL_MOD, Some(event), Some(index), Some(true)) => {
                if let Some(item) = set.items.get_mut(index) {
                    item.events = event.events;
                    item.data = event.u64;
                    item.disabled = false;
                }
                set.enqueue(index);
                drop(set);
                self.ring_if_sleeping();
                0
            }
            (libc::EPOLL_CTL_MOD, Some(event), Some(index), _)
                if asked & ONESHOT != 0 && socket.asked.swap(false, SeqCst) =>
            {
                // A promotion waits for this moment: the item has fired and nobody else has it. The
                // service thread goes on with it, or gives it back.
                if let Some(kernel_fd) = self.kernel_fd() {
                    // SAFETY: the program's own number, in the middle of its call.
                    let _ = kernel::delete(kernel_fd, unsafe { BorrowedFd::borrow_raw(fd) });
                }
                if let Some(item) = set.items.get_mut(index) {
                    item.events = event.events;
                    item.data = event.u64;
                    item.disabled = false;
                    item.taken = true;
                }
                self.activate(&mut set);
                drop(set);
                Library::get()
                    .service
                    .submit(crate::service::Command::used(socket));
                0
            }
            (libc::EPOLL_CTL_MOD, Some(event), Some(index), _) => {
                let result = real();
                if let Some(item) = set.items.get_mut(index).filter(|_| result == 0) {
                    item.events = event.events;
                    item.data = event.u64;
                }
                result
            }
            (libc::EPOLL_CTL_DEL, _, Some(index), Some(taken)) => {
                let result = if taken { 0 } else { real() };
                if result == 0 {
                    set.remove(index);
                    drop(set);
                    ready::change_interest(socket, |i| {
                        i.members
                            .retain(|m| !(std::ptr::eq(m.epoll, self) && m.item == index));
                    });
                }
                result
            }
            _ => real(),
        }
    }

    /// The socket's last number was closed.
    pub fn forget(&self, index: usize, socket: &'static Socket) {
        if let Some(mut set) = self.set.lock()
            && set
                .items
                .get(index)
                .is_some_and(|i| std::ptr::eq(i.socket, socket))
        {
            set.remove(index);
        }
    }

    /// Moves an item from the kernel's set to ours. False if that cannot be done now: an EPOLLONESHOT
    /// that has not fired may do so at this moment, and would be reported twice. One that has fired is
    /// silent until its MOD, which comes here.
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
        let fd = item.fd;
        item.disabled = item.events & ONESHOT != 0;
        if item.disabled
            && !self
                .kernel_fd()
                .is_some_and(|set| has_fired(set, fd, item.data))
        {
            item.disabled = false;
            return false;
        }
        item.taken = true;
        self.activate(&mut set);
        if let Some(kernel_fd) = self.kernel_fd() {
            // SAFETY: the number is the socket's own: closing it removes the item first.
            let _ = kernel::delete(kernel_fd, unsafe { BorrowedFd::borrow_raw(fd) });
        }
        // After the removal: who reads the new count finds it in one set only.
        self.moves.fetch_add(1, Release);
        if let Some(link) = socket.link() {
            set.add_link(link);
        }
        set.enqueue(index);
        drop(set);
        self.ring_if_sleeping();
        true
    }

    /// Moves an item back into the kernel's set, when its socket is on plain TCP again.
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
        if !control.fds.contains(&item.fd) {
            return;
        }
        item.taken = false;
        self.moves.fetch_add(1, Release);
        let events = if item.disabled { ONESHOT } else { item.events };
        if let Some(kernel_fd) = self.kernel_fd() {
            let _ = kernel::add(
                kernel_fd,
                // SAFETY: still one of the socket's numbers, and control keeps close() out.
                unsafe { BorrowedFd::borrow_raw(item.fd) },
                kernel::EventData::new_u64(item.data),
                kernel::EventFlags::from_bits_retain(events),
            );
        }
    }

    /// Something may have changed for this item.
    pub fn push(&self, index: usize, socket: &'static Socket) {
        let Some(mut set) = self.set.lock() else {
            return;
        };
        if set
            .items
            .get(index)
            .is_some_and(|i| i.taken && std::ptr::eq(i.socket, socket))
        {
            if let Some(link) = socket.link() {
                set.add_link(link);
            }
            set.enqueue(index);
            drop(set);
            self.ring_if_sleeping();
        }
    }

    fn activate(&self, set: &mut Set) {
        let _ = set;
        if self.active.load(Acquire) {
            return;
        }
        let library = Library::get();
        let waiter = match WaiterId::from_word(self.waiter.load(Relaxed)) {
            Some(w) => Some(w),
            None => library.waiters.acquire_queue(),
        };
        if let (Some(waiter), Some(kernel_fd)) = (waiter, self.kernel_fd())
            && let Some(doorbell) = library.waiters.doorbell(waiter)
        {
            self.waiter.store(waiter.to_word(), Relaxed);
            if self.key.load(Relaxed) == 0 {
                self.key.store(crate::library::random_u64() | 1, Relaxed);
            }
            let _ = kernel::add(
                kernel_fd,
                doorbell.as_fd(),
                kernel::EventData::new_u64(self.key.load(Relaxed)),
                kernel::EventFlags::IN | kernel::EventFlags::ET,
            );
        }
        self.active.store(true, SeqCst);
        if self.nested.load(SeqCst)
            && !self.shown.swap(true, SeqCst)
            && let Some(waiter) = waiter
        {
            library.waiters.enter_sleep(waiter);
        }
        if self.plain.load(SeqCst) > 0 {
            // They sleep in the kernel's wait alone.
            self.ring();
        }
    }

    fn ring_if_sleeping(&self) {
        if let Some(waiter) = WaiterId::from_word(self.waiter.load(Relaxed)) {
            Library::get().waiters.ring_if_sleeping(waiter);
        }
    }

    /// epoll_wait() and its kin. `real(events, max, timeout)` is the kernel's, with the timeout
    /// in ms: -1 the whole of what is left, 0 only a look.
    ///
    /// # Safety
    /// `events` is writable for `max` entries.
    pub unsafe fn wait(
        &'static self,
        events: *mut libc::epoll_event,
        max: c_int,
        timeout: Timeout,
        real: impl Fn(*mut libc::epoll_event, c_int, Timeout) -> c_int,
    ) -> c_int {
        let deadline = timeout.deadline();
        if let Some(n) = self.wait_plain(events, max, timeout, &real) {
            return n;
        }
        let mut spun = false;
        loop {
            // Now and then the kernel's set is looked at too, every other time first: neither may keep
            // the other out where the program takes few events at a time.
            let due = self.is_time_to_look();
            let starved = self.full.load(Relaxed) != 0 && self.full.swap(0, Relaxed) != 0;
            let kernel_first = starved || due && self.turn.fetch_xor(true, Relaxed);
            let moves = self.moves.load(Acquire);
            let first = if kernel_first {
                self.look(events, max, &real).max(0)
            } else {
                0
            };
            // SAFETY: `first` of `max` entries are used.
            let ours = self.harvest(unsafe { events.add(first as usize) }, max - first);
            if ours == max && !kernel_first {
                self.full.store(1, Relaxed);
            }
            let mut n = first + ours;
            if due && !kernel_first && 0 < n && n < max {
                // SAFETY: n < max entries are used.
                let rest = unsafe { events.add(n as usize) };
                n += self.look(rest, max - n, &real).max(0);
            }
            if n > 0 {
                let front = if kernel_first { first } else { ours };
                return if 0 < front && front < n && self.moves.load(Acquire) != moves {
                    // SAFETY: n entries are filled.
                    unsafe { without_repeats(events, front as usize, n as usize) }
                } else {
                    n
                };
            }
            if deadline.is_zero() {
                return self.look(events, max, &real);
            }
            if !spun {
                spun = true;
                let bound = self.spinner.bound();
                if bound > 0 {
                    let k = self.look(events, max, &real);
                    if k != 0 {
                        return k;
                    }
                    if self.spinner.spin(bound, || self.has_ready()) {
                        continue;
                    }
                }
            }
            let Some(waiter) = WaiterId::from_word(self.waiter.load(Relaxed)) else {
                // There was no number left for a doorbell: looks now and then.
                let n = self.look(events, max, &|e, m, _| {
                    real(e, m, deadline.left().at_most(WITHOUT_DOORBELL))
                });
                if n != 0 || deadline.is_over() {
                    return n;
                }
                continue;
            };
            let waiters = &Library::get().waiters;
            waiters.enter_sleep(waiter);
            if self.has_ready() {
                waiters.leave_sleep(waiter);
                continue;
            }
            let n = real(events, max, deadline.left());
            let errno = crate::errno::get();
            waiters.leave_sleep(waiter);
            let kept = self.strip_key(events, n);
            if n < 0 {
                crate::errno::set(errno);
                return n;
            }
            if kept > 0 {
                return kept;
            }
            if n == 0 && deadline.is_over() {
                // Something may have come with the last tick.
                return self.harvest(events, max);
            }
            spun = false;
        }
    }

    /// The kernel's wait alone, as long as nothing is taken over. `None` if that has changed.
    fn wait_plain(
        &'static self,
        events: *mut libc::epoll_event,
        max: c_int,
        timeout: Timeout,
        real: &impl Fn(*mut libc::epoll_event, c_int, Timeout) -> c_int,
    ) -> Option<c_int> {
        if max <= 0 {
            return Some(real(events, max, timeout));
        }
        if events.is_null() && self.is_ready() {
            return Some(crate::errno::fail(libc::EFAULT));
        }
        if events.is_null() {
            return Some(real(events, max, timeout));
        }
        if self.active.load(Acquire) {
            return None;
        }
        if self.inherited.load(Acquire) && self.inherited.swap(false, AcqRel) {
            crate::fork::reclaim_all();
        }
        // SeqCst on both sides (`activate`): either we see that it is active, or it sees us.
        self.plain.fetch_add(1, SeqCst);
        if self.active.load(SeqCst) {
            self.plain.fetch_sub(1, SeqCst);
            return None;
        }
        let n = real(events, max, timeout);
        let others = self.plain.fetch_sub(1, SeqCst) > 1;
        if !self.active.load(SeqCst) {
            return Some(n);
        }
        let errno = crate::errno::get();
        if others {
            // A ring wakes one thread; the next one must come here too.
            self.ring();
        }
        crate::errno::set(errno);
        let kept = self.strip_key(events, n);
        (n < 0 || kept > 0 || timeout.is_zero()).then_some(if n < 0 { n } else { kept })
    }

    fn is_time_to_look(&self) -> bool {
        let now = crate::time::now_ns();
        let due = now.wrapping_sub(self.looked_at.load(Relaxed)) > KERNEL_EVERY;
        if due {
            self.looked_at.store(now, Relaxed);
        }
        due
    }

    fn ring(&self) {
        if let Some(waiter) = WaiterId::from_word(self.waiter.load(Relaxed)) {
            Library::get().waiters.ring(waiter);
        }
    }

    fn look(
        &self,
        events: *mut libc::epoll_event,
        max: c_int,
        real: &impl Fn(*mut libc::epoll_event, c_int, Timeout) -> c_int,
    ) -> c_int {
        let n = real(events, max, Timeout::ZERO);
        if n <= 0 { n } else { self.strip_key(events, n) }
    }

    /// Takes our doorbell out of what the kernel reported.
    fn strip_key(&self, events: *mut libc::epoll_event, n: c_int) -> c_int {
        let key = self.key.load(Relaxed);
        if n <= 0 || key == 0 {
            return n.max(0);
        }
        // SAFETY: the kernel has just filled n entries.
        let filled = unsafe { std::slice::from_raw_parts_mut(events, n as usize) };
        let Some(at) = filled.iter().position(|e| e.u64 == key) else {
            return n;
        };
        filled.copy_within(at + 1.., at);
        n - 1
    }

    fn has_ready(&self) -> bool {
        let Some(waiter) = WaiterId::from_word(self.waiter.load(Relaxed)) else {
            return true;
        };
        self.set.lock().is_none_or(|set| {
            !set.ready.is_empty() || set.links.iter().any(|l| l.has_ready(waiter))
        })
    }

    /// Reports what is ready.
    fn harvest(&'static self, events: *mut libc::epoll_event, max: c_int) -> c_int {
        let Some(mut guard) = self.set.lock() else {
            return 0;
        };
        let set = &mut *guard;
        if let Some(waiter) = WaiterId::from_word(self.waiter.load(Relaxed)) {
            let Set {
                links,
                items,
                ready,
                ..
            } = set;
            for link in links.iter() {
                link.drain_ready(waiter, |socket| {
                    enqueue_all(self, socket, items, ready);
                });
            }
            links.retain(|l| l.is_alive());
        }
        let mut n = 0;
        for _ in 0..set.ready.len() {
            if n == max {
                break;
            }
            let Some(index) = set.ready.pop_front() else {
                break;
            };
            let Some(item) = set.items.get_mut(index) else {
                continue;
            };
            item.queued = false;
            if item.dead {
                set.free.push(index);
                continue;
            }
            if item.disabled || !item.taken {
                continue;
            }
            let arm = if item.events & ET != 0 {
                Arm::Always
            } else {
                Arm::IfNotReady
            };
            let mask = ready::evaluate(item.socket, item.events, arm) & (item.events | ALWAYS);
            if mask == 0 {
                continue;
            }
            // SAFETY: n < max entries, writable by `wait`'s contract.
            unsafe {
                events.add(n as usize).write(libc::epoll_event {
                    events: mask,
                    u64: item.data,
                });
            }
            n += 1;
            if item.events & ONESHOT != 0 {
                item.disabled = true;
            } else if item.events & ET == 0 {
                item.queued = true;
                set.ready.push_back(index);
            }
        }
        let more = set.ready.len() > n as usize;
        drop(guard);
        if self.nested.load(Acquire) {
            self.show_ready();
        }
        if more {
            // Another thread that sleeps on this set can take the rest.
            self.ring_if_sleeping();
        }
        n
    }

    /// Whether any taken-over item is ready now: for poll(), select() and sets that hold this one.
    pub fn is_ready(&'static self) -> bool {
        if !self.active.load(Acquire) {
            return false;
        }
        let Some(mut guard) = self.set.lock() else {
            return false;
        };
        let set = &mut *guard;
        if let Some(waiter) = WaiterId::from_word(self.waiter.load(Relaxed)) {
            let Set {
                links,
                items,
                ready,
                ..
            } = set;
            for link in links.iter() {
                link.drain_ready(waiter, |socket| enqueue_all(self, socket, items, ready));
            }
        }
        for at in 0..set.ready.len() {
            let Some(item) = set.ready.get(at).and_then(|i| set.items.get(*i)) else {
                continue;
            };
            if !item.dead
                && !item.disabled
                && item.taken
                && ready::evaluate(item.socket, item.events, Arm::IfNotReady)
                    & (item.events | ALWAYS)
                    != 0
            {
                return true;
            }
        }
        false
    }
}

fn enqueue_all(
    epoll: &'static Epoll,
    socket: &'static Socket,
    items: &mut [Item],
    ready: &mut VecDeque<usize>,
) {
    let Some(interest) = socket.interest.lock() else {
        return;
    };
    for m in interest
        .members
        .iter()
        .filter(|m| std::ptr::eq(m.epoll, epoll))
    {
        if let Some(item) = items.get_mut(m.item)
            && !item.queued
            && !item.dead
        {
            item.queued = true;
            ready.push_back(m.item);
        }
    }
}

/// Drops what the entries from `front` on repeat of those before: a socket that went from one of the
/// two sets to the other in between. The kernel never lists one twice, and a program that reads once,
/// blocking, for each entry would hang at the second.
///
/// # Safety
/// `n` entries are filled.
unsafe fn without_repeats(events: *mut libc::epoll_event, front: usize, n: usize) -> c_int {
    // SAFETY: by the contract.
    let all = unsafe { std::slice::from_raw_parts_mut(events, n) };
    let mut kept = front;
    for at in front..n {
        let (before, from) = all.split_at(at);
        let Some(event) = from.first().copied() else {
            break;
        };
        let listed = before.get(..front).unwrap_or_default();
        if listed.iter().any(|e| e.u64 == event.u64) {
            continue;
        }
        if let Some(slot) = all.get_mut(kept) {
            *slot = event;
            kept += 1;
        }
    }
    kept as c_int
}

/// Whether an EPOLLONESHOT item of a kernel's set has fired and waits for its MOD; the kernel shows the
/// events that are left (proc_pid_fdinfo(5)).
fn has_fired(set: BorrowedFd<'_>, fd: c_int, data: u64) -> bool {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/thread-self/fdinfo/{}", set.as_raw_fd());
    let Ok(info) = read_text(&path) else {
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

fn read_text(path: &str) -> rustix::io::Result<String> {
    use rustix::fs::{Mode, OFlags};
    let opened = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let file = PrivateFd::place(opened)?;
    let mut text = Vec::new();
    let mut piece = [0u8; 4096];
    loop {
        match rustix::io::read(&file, &mut piece[..]) {
            Ok(0) => return String::from_utf8(text).map_err(|_| rustix::io::Errno::ILSEQ),
            Ok(n) => text.extend_from_slice(piece.get(..n).unwrap_or_default()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

fn find(socket: &'static Socket, epoll: &Epoll, fd: c_int) -> Option<usize> {
    let interest = socket.interest.lock()?;
    interest
        .members
        .iter()
        .find(|m| std::ptr::eq(m.epoll, epoll) && m.fd == fd)
        .map(|m| m.item)
}

impl Set {
    fn insert(&mut self, item: Item) -> usize {
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
        // Not a removed one: its place may be free already, and would be given out twice.
        if let Some(item) = self.items.get_mut(index)
            && !item.queued
            && !item.dead
        {
            item.queued = true;
            self.ready.push_back(index);
        }
    }

    fn remove(&mut self, index: usize) {
        if let Some(item) = self.items.get_mut(index)
            && !item.dead
        {
            item.dead = true;
            if !item.queued {
                self.free.push(index);
            }
        }
    }

    fn add_link(&mut self, link: &'static Link) {
        if !self.links.iter().any(|l| std::ptr::eq(*l, link)) {
            self.links.push(link);
        }
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
            queued: false,
            disabled: false,
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
