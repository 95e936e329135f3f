//! How the parents and children of forks check on each other. A parent makes a doorbell. Each child gets a copy of its
//! button, the end that wakes the doorbell's poller.
//!
//! - A child can press the buttons of the processes that it descends from. An ancestor may have the stream of a shared
//!   socket on a link. The button reports POLLHUP when that ancestor is gone, since no other process has the doorbell.
//! - The doorbell reports POLLHUP when all children with that button, and their descendants, have ended or executed
//!   another program. Before the parent checks for that, it closes its own copy of the button.
//!
//! Both work across pid namespaces, and also for a process that has ended and was not waited for.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU32};

use rdmasock_core::lock::Lock;
use rdmasock_core::os::doorbell;
use rdmasock_core::os::privatefd::PrivateFd;
use rustix::event::{PollFd, PollFlags};

use crate::objects::waiters::hang;

/// The children of consecutive forks that share one button. The parent keeps the button open while further children get
/// it. -1: the fd is closed, or there is none.
#[derive(Clone, Copy)]
struct Brood {
    bell: i32,
    button: i32,
    /// The service thread polls the doorbell.
    is_polled: bool,
    /// The epoch of the last fork whose child got the button.
    until: u32,
}

impl Brood {
    /// Closes the parent's copy of the button, so that no further child gets it.
    fn close(&mut self) {
        drop(PrivateFd::adopt(std::mem::replace(&mut self.button, -1)));
    }
}

const NO_BROOD: Brood = Brood {
    bell: -1,
    button: -1,
    is_polled: false,
    until: 0,
};

static BROODS: Lock<[Brood; 8]> = Lock::new([NO_BROOD; 8]);
/// The epoch of the last fork whose child has no button: the parent cannot see when that child is gone. 0: none.
static UNEQUIPPED: AtomicU32 = AtomicU32::new(0);
/// Number of threads that are forking now.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Notes that a fork begins. Until it has [ended](end_fork), children do not count as gone.
pub fn begin_fork() {
    FORKS.fetch_add(1, AcqRel);
}

/// Notes in the parent that a fork has ended.
pub fn end_fork() {
    FORKS.fetch_sub(1, AcqRel);
}

/// Returns whether a fork is under way. In the fork's child: whether [`begin_fork`] was called for that fork.
pub fn is_forking() -> bool {
    FORKS.load(Acquire) > 0
}

/// Makes a button for the child of the fork that ends `epoch`. To be called before the fork. `service` is the epoll set
/// of the service thread, which polls the doorbell. If the button cannot be made, the parent cannot see when that child
/// is gone.
pub fn equip_child(epoch: u32, service: Option<BorrowedFd<'_>>) {
    let equip = || {
        let mut broods = BROODS.lock()?;
        // Each child gets a brood of its own while places are free. If another thread forks too, its child is about to
        // get this button.
        if FORKS.load(Acquire) == 1 && broods.iter().filter(|b| b.bell < 0).count() > 1 {
            broods.iter_mut().for_each(Brood::close);
        }
        let open = broods.iter().position(|b| b.button >= 0);
        let at = open.or_else(|| broods.iter().position(|b| b.bell < 0))?;
        let brood = broods.get_mut(at)?;
        if brood.bell < 0 {
            let (bell, button) = doorbell::pair().ok()?;
            (brood.bell, brood.button) = (bell.release(), button.release());
        }
        brood.until = epoch;
        if let Some(set) = service.filter(|_| !brood.is_polled) {
            // SAFETY: `brood.bell` stays open while the lock is held, since it is only closed under the lock.
            brood.is_polled = hang(set, unsafe { BorrowedFd::borrow_raw(brood.bell) }).is_ok();
        }
        Some(())
    };
    id();
    if equip().is_none() {
        UNEQUIPPED.store(epoch, Release);
    }
}

/// Returns whether all children of forks since the epoch `since`, and their descendants, are gone. Makes one system
/// call for each brood. False also if that is not known.
pub fn are_children_gone(since: u32) -> bool {
    let Some(mut broods) = BROODS.lock() else { return false };
    // Checked under the lock: a child that is being made either has its button already, or will get another one.
    if is_forking() || UNEQUIPPED.load(Acquire) >= since {
        return false;
    }
    // With no free place the button stays open, or the next child would get none.
    let has_room = broods.iter().any(|b| b.bell < 0);
    for brood in broods.iter_mut().filter(|b| b.bell >= 0) {
        if has_room {
            brood.close();
        }
        // SAFETY: `brood.bell` stays open while the lock is held, since it is only closed under the lock.
        if !unsafe { is_there(brood.bell) } {
            drop(PrivateFd::adopt(brood.bell));
            *brood = NO_BROOD;
        }
    }
    broods.iter().all(|b| b.bell < 0 || b.until < since)
}

/// An ancestor process. Written only in a fork child, before that has a second thread.
struct Ancestor {
    /// The value of [`id`] in that process. 0: the entry is free.
    id: AtomicU32,
    /// The fd of its button.
    button: AtomicI32,
}

/// The known ancestors, the nearest last. With more than 8 the farthest are forgotten: a process waits in vain for a
/// stream that a forgotten one has.
static ANCESTORS: [Ancestor; 8] = [const {
    Ancestor {
        id: AtomicU32::new(0),
        button: AtomicI32::new(-1),
    }
}; 8];

/// The value of [`id`]; 0 before it is drawn.
static ID: AtomicU32 = AtomicU32::new(0);

/// Returns the random number by which this process's children know it; never 0. It is drawn before the first fork whose
/// child may have to ask for it.
pub fn id() -> u32 {
    let id = ID.load(Acquire);
    if id != 0 {
        return id;
    }
    let drawn = crate::objects::library::random_u64() as u32 | 1;
    match ID.compare_exchange(0, drawn, Release, Acquire) {
        Ok(_) => drawn,
        Err(id) => id,
    }
}

fn all() -> impl DoubleEndedIterator<Item = (u32, i32)> {
    let each = ANCESTORS.iter().map(|a| (a.id.load(Acquire), a.button.load(Acquire)));
    each.filter(|(id, _)| *id != 0)
}

/// Adds the parent to the ancestors of a fork child, which starts without children. Removes ancestors that are gone.
/// False if one that is not gone had to be removed: the child does not keep that button.
///
/// # Safety
/// The caller is the only thread of a fork child, has not used this module's locks before, and the buttons of all known
/// ancestors are open.
pub unsafe fn remember_parent() -> bool {
    FORKS.store(0, Relaxed);
    UNEQUIPPED.store(0, Relaxed);
    // SAFETY: by the contract, no other thread uses the lock. The fork child closes the parent's fds by number.
    let broods = unsafe {
        BROODS.reset();
        std::mem::replace(BROODS.get_unlocked(), [NO_BROOD; 8])
    };
    let button = broods.iter().map(|b| b.button).max().unwrap_or(-1);
    let parent = Some((ID.swap(0, Relaxed), button)).filter(|(id, button)| *id != 0 && *button >= 0);
    // SAFETY: by the contract, the buttons of all known ancestors are open.
    let is_known = |(_, button): &(u32, i32)| unsafe { is_there(*button) };
    let count = all().filter(is_known).chain(parent).count();
    let mut known = all()
        .filter(is_known)
        .chain(parent)
        .skip(count.saturating_sub(ANCESTORS.len()));
    // Each entry is read before it is overwritten, since entries only move towards the beginning.
    for ancestor in &ANCESTORS {
        let (id, button) = known.next().unwrap_or((0, -1));
        ancestor.id.store(id, Release);
        ancestor.button.store(button, Release);
    }
    count <= ANCESTORS.len()
}

/// Returns whether `fd` is a button of a known ancestor.
pub fn is_button(fd: i32) -> bool {
    all().any(|(_, button)| button == fd)
}

/// Returns whether the ancestor with this [`id`] may still be there. True also for an unknown one.
pub fn lives(id: u32) -> bool {
    // SAFETY: the buttons of known ancestors are never closed in this process.
    all().all(|(known, button)| known != id || unsafe { is_there(button) })
}

/// Returns whether some process has the other end of a button or doorbell.
///
/// # Safety
/// `end` is the fd of a button or doorbell, and stays open during the call.
unsafe fn is_there(end: i32) -> bool {
    // SAFETY: by the contract, `end` stays open during the call.
    let end = unsafe { BorrowedFd::borrow_raw(end) };
    let mut polled = [PollFd::from_borrowed_fd(end, PollFlags::empty())];
    let now = rustix::time::Timespec::default();
    let _ = rustix::event::poll(&mut polled, Some(&now));
    // The kernel reports POLLHUP on a socket pair whose other end is closed.
    !polled.iter().any(|p| p.revents().contains(PollFlags::HUP))
}

/// Wakes the service threads of all known ancestors, the nearest first, to check which streams their descendants want.
pub fn ask() {
    for (_, button) in all().rev() {
        // SAFETY: the buttons of known ancestors are never closed in this process.
        doorbell::press(unsafe { BorrowedFd::borrow_raw(button) });
    }
}
