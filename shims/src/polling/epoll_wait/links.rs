//! The links that a wait checks, and by which it is woken. Links within this host are checked each time. If there are
//! many links to other hosts, the kernel's set reports which of them have completions (`epoll::links`); only the others
//! are checked.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::waiter::WaiterId;

use crate::notify::epoll::key::{Key, Named};
use crate::notify::epoll::links::{Far, Links};
use crate::notify::epoll::{Epoll, Set, enqueue};
use crate::objects::library::Library;
use crate::objects::link::Link;
use crate::objects::socket;
use crate::objects::waiters::SERVICE;

/// The number of links to other hosts that are checked at most, once one of them had data. To check such a link is to
/// poll its completions.
///
/// If a set has more links than this, links for which the kernel's set reports completions are skipped. If one of the
/// others has data, this many more are checked, and the next harvest begins with the rest. To check all of them for one
/// message each would cost more than the messages. (The network does not preserve the order between peers on other
/// hosts either.)
const MANY: usize = 16;

/// The links to other hosts that are checked; links within this host always are.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Sweep {
    /// All of them.
    Every,
    /// Links whose completions the kernel's set would not report.
    Untold,
    /// Links of [`Sweep::Untold`], until [`MANY`] have been checked after the first with data.
    Some,
    /// Links that had data before in the same harvest.
    Again,
}

impl Links {
    /// Whether any link has something for `waiter`. If so, the next check begins at that link.
    pub(super) fn have_ready(&mut self, waiter: WaiterId) -> bool {
        if self.near.iter().any(|link| link.has_ready(waiter)) {
            return true;
        }
        let are_many = self.far.len() > MANY;
        let is_ready = |far: &Far| match are_many && far.is_told() {
            // Completions that were taken in already.
            true => far.news.is_queued(waiter),
            false => far.link.has_ready(waiter),
        };
        let found = self.far_in_turn().find(|(_, far)| is_ready(far)).map(|(at, _)| at);
        if let Some(at) = found {
            self.next = at;
        }
        found.is_some()
    }

    /// Whether any link has a wake-up for the service thread, which notifies the set (`served`).
    fn have_told_the_service(&self) -> bool {
        let far = self.far.iter().map(|far| far.link);
        self.near.iter().copied().chain(far).any(|link| link.has_ready(SERVICE))
    }
}

impl Epoll {
    pub(super) fn has_ready(&self) -> bool {
        let Some(waiter) = self.waiter() else {
            return true;
        };
        let Some(mut set) = self.set.lock() else {
            return true;
        };
        !set.ready.is_empty()
            || set.links.have_ready(waiter)
            || self.served.load(Acquire) && set.links.have_told_the_service()
    }

    /// Moves what peers have put into the ready queues to the set's list. Returns true if links were skipped that may
    /// have data, and that the kernel's set would not report.
    pub(super) fn sweep(&'static self, set: &mut Set, of: Sweep) -> bool {
        let Some(waiter) = self.waiter() else { return false };
        let mut come = std::mem::take(&mut set.come);
        let mut drain = |link: &'static Link| {
            let before = come.len();
            if let Some(remote) = link.remote() {
                remote.news().on_take(waiter);
            }
            link.drain_ready(waiter, |slot, at| {
                let Some(interest) = socket::by_slot(slot).and_then(|socket| socket.wakes.interest.lock()) else {
                    return;
                };
                for m in &interest.members {
                    if m.is_in(self) {
                        come.push((at, m.item));
                    }
                }
            });
            come.len() > before
        };
        for link in &set.links.near {
            drain(link);
        }
        let (mut left, mut next, mut spoke) = (usize::MAX, set.links.next, std::mem::take(&mut set.links.spoke));
        if of == Sweep::Again {
            for link in &spoke {
                link.progress();
                drain(link);
            }
        } else {
            let are_many = set.links.far.len() > MANY;
            for (at, far) in set.links.far_in_turn() {
                let is_left_out = are_many && of != Sweep::Every && far.is_told();
                if is_left_out {
                    // Other threads may have taken in its completions.
                    if far.news.is_queued(waiter) && drain(far.link) {
                        spoke.push(far.link);
                    }
                } else if left > 0 {
                    left -= 1;
                    next = at + 1;
                    far.link.progress();
                    if drain(far.link) {
                        spoke.push(far.link);
                        left = if of == Sweep::Some { left.min(MANY) } else { left };
                    }
                }
            }
        }
        set.links.next = next;
        set.links.spoke = spoke;
        set.come = come;
        let Set { items, ready, come, .. } = set;
        // A queue does not keep an order, and each link has its own. The kernel's list is in the order of arrival.
        come.sort_unstable();
        for (_, index) in come.drain(..) {
            enqueue(items, ready, index);
        }
        left == 0
    }

    /// Prepares a sleep: completions on links to other hosts wake this thread itself, or one that sleeps on another
    /// set. Their descriptors are in the kernel's set from the first such sleep on. `None` if there are no such links,
    /// or the service thread handles their completions.
    pub(super) fn watch_links(&'static self) -> Option<Asleep> {
        if !self.set.lock()?.links.are_to_wake() {
            return None;
        }
        let asleep = Asleep::begin(self);
        // Read after that: the service thread, if it begins to handle a link's completions now, sees that a thread
        // sleeps.
        let taken_back = Library::get().service.taken_back.look();
        if let (Some(mut set), Some(kernel_fd)) = (self.set.lock(), self.kernel_fd()) {
            let key = Key(self.key.load(Relaxed));
            set.links.watch(kernel_fd, key, &self.watch, taken_back);
        }
        Some(asleep)
    }

    /// Handles links that the kernel's set has reported.
    pub(super) fn on_named(&'static self, named: &Named) {
        if named.is_none() {
            return;
        }
        let Some(set) = self.set.lock() else {
            return;
        };
        for far in set.links.far.iter().filter(|far| named.has(far.slot)) {
            far.remote.on_readable();
        }
    }

    /// Arms the links again for other threads. Several threads may sleep on one link, and this thread may have consumed
    /// its event without knowing which link it was.
    pub(super) fn arm_for_others(&'static self) {
        if let Some(set) = self.set.lock() {
            set.links.far.iter().for_each(|far| far.remote.arm_for_others());
        }
    }
}

/// Counts a thread as asleep on a set with links to other hosts, until it is dropped.
pub(super) struct Asleep {
    set: &'static Epoll,
    /// The thread is not counted any more; read by the thread's own signal handlers too.
    has_left: AtomicBool,
}

impl Asleep {
    fn begin(set: &'static Epoll) -> Self {
        set.watch.enter();
        Self {
            set,
            has_left: AtomicBool::new(false),
        }
    }

    fn leave(&self) {
        if !self.has_left.swap(true, Relaxed) && self.set.watch.leave() {
            let errno = crate::sys::errno::get();
            Library::get().service.maintain_later();
            crate::sys::errno::set(errno);
        }
    }

    /// Leaves this thread's completions to others: a signal handler runs above the sleep, for any time.
    pub fn hand_over(&self) {
        let errno = crate::sys::errno::get();
        self.leave();
        self.set.arm_for_others();
        crate::sys::errno::set(errno);
    }
}

impl Drop for Asleep {
    fn drop(&mut self) {
        self.leave();
    }
}
