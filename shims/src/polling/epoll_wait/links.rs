//! Which of its links a wait looks at, and by which it is woken. Those within this host are looked at each time. Of
//! those to other hosts, if there are many, the kernel's set tells which have something (`epoll::links`); the others
//! are looked at.

use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Relaxed},
};

use rdmasock_core::fabric::waiter::WaiterId;

use crate::notify::epoll::key::{Key, Named};
use crate::notify::epoll::links::{Far, Links};
use crate::notify::epoll::{Epoll, Set, enqueue};
use crate::objects::library::Library;
use crate::objects::link::Link;
use crate::objects::socket;
use crate::objects::waiters::SERVICE;

/// To look at a link to another host is to poll its completions. So where there are more than so many, those are left
/// out of which the kernel tells; and where one of the others has something, only so many more are looked at, and the
/// rest first by the next harvest: all of them for one message each would cost more than the messages do. (Who has sent
/// first of two peers on other hosts the network does not say either.)
const MANY: usize = 16;

/// Which links to other hosts are looked at; those within this one always are.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Sweep {
    /// Every one.
    Every,
    /// Those of which the kernel's set would not tell.
    Untold,
    /// The same, until [enough](MANY) have been.
    Some,
    /// That had something before in the same harvest.
    Again,
}

impl Links {
    /// Whether any has something for `waiter`. Then the next look begins there.
    pub(super) fn have_ready(&mut self, waiter: WaiterId) -> bool {
        if self.near.iter().any(|link| link.has_ready(waiter)) {
            return true;
        }
        let are_many = self.far.len() > MANY;
        let is_ready = |far: &Far| match are_many && far.is_told() {
            // What has been taken in.
            true => far.news.is_queued(waiter),
            false => far.link.has_ready(waiter),
        };
        let found = self.far_in_turn().find(|(_, far)| is_ready(far)).map(|(at, _)| at);
        if let Some(at) = found {
            self.next = at;
        }
        found.is_some()
    }

    /// Whether any has something for the service thread, which tells the set (`served`).
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

    /// Takes over from the ready queues what peers have put there. True if links were left out that may have
    /// something, and of which nobody would tell.
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
                    // Others may have taken in what has come.
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
        // A queue does not keep an order, and there is one for each link. The kernel's list is in the order of arrival.
        come.sort_unstable();
        for (_, index) in come.drain(..) {
            enqueue(items, ready, index);
        }
        left == 0
    }

    /// For a sleep: what completes on links to other hosts wakes this thread itself, or one that sleeps on another set.
    /// Their descriptors are in the kernel's set from the first such sleep on. `None` if there are no such links, or
    /// the service thread hears of them.
    pub(super) fn watch_links(&'static self) -> Option<Asleep> {
        if !self.set.lock()?.links.are_to_wake() {
            return None;
        }
        let asleep = Asleep::begin(self);
        // After that: what the service thread begins to hear of now it will see it is not alone with.
        let taken_back = Library::get().service.taken_back.look();
        if let (Some(mut set), Some(kernel_fd)) = (self.set.lock(), self.kernel_fd()) {
            let key = Key(self.key.load(Relaxed));
            set.links.watch(kernel_fd, key, &self.watch, taken_back);
        }
        Some(asleep)
    }

    /// The kernel's set has named these links.
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

    /// This thread may have been woken by links that others sleep on too, and does not know by which.
    pub(super) fn arm_for_others(&'static self) {
        if let Some(set) = self.set.lock() {
            set.links.far.iter().for_each(|far| far.remote.arm_for_others());
        }
    }
}

/// A thread that sleeps on a set with links to other hosts, until it is dropped.
pub(super) struct Asleep {
    set: &'static Epoll,
    /// It does not any more; for the thread's own signal handlers too.
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

    /// A signal handler runs above the sleep, for as long as it likes: what this thread was woken for others are to
    /// hear of.
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
