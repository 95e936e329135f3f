//! Fork's parents and children know of each other by a button of a doorbell, which each child has a copy of.
//!
//! - A child can ring the processes that it descends from. One of them may have a stream on a link that the child holds
//!   too. The button hangs up when the ancestor is gone: no other process has the doorbell.
//! - The doorbell hangs up when all children with that button are gone (ended, killed, or executing another program),
//!   and all of their children. Before it asks for that, the parent closes its own copy of the button.
//!
//! Both work across pid namespaces, and for a process that has ended and was not waited for.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{
    AtomicI32, AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use rdmasock_core::lock::Lock;
use rdmasock_core::os::doorbell;
use rdmasock_core::os::privatefd::PrivateFd;
use rustix::event::{PollFd, PollFlags};

use crate::objects::waiters::hang;

/// The children of some forks in a row. The parent keeps the button open for as long as further children get it. -1:
/// closed, or none.
#[derive(Clone, Copy)]
struct Brood {
    bell: i32,
    button: i32,
    /// The service thread polls the bell.
    is_polled: bool,
    /// The epoch of the last fork.
    until: u32,
}

impl Brood {
    /// No further child gets this button.
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
/// The epoch of the last fork whose child has no button: it is never known to be gone. 0: none.
static UNEQUIPPED: AtomicU32 = AtomicU32::new(0);
/// How many threads are in the middle of a fork.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// A fork begins. Until it has [ended](end_fork), children do not count as gone.
pub fn begin_fork() {
    FORKS.fetch_add(1, AcqRel);
}

/// A fork has ended, in the parent.
pub fn end_fork() {
    FORKS.fetch_sub(1, AcqRel);
}

/// Whether a fork is under way; in its child, whether it has begun by [`begin_fork`].
pub fn is_forking() -> bool {
    FORKS.load(Acquire) > 0
}

/// Before the fork that ends `epoch`: its child will have a button. `service`: what the service thread polls.
pub fn equip_child(epoch: u32, service: Option<BorrowedFd<'_>>) {
    let equip = || {
        let mut broods = BROODS.lock()?;
        // One child a brood, as long as there is room, and no other is about to get this button.
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
            // SAFETY: the bell is closed under the lock.
            brood.is_polled = hang(set, unsafe { BorrowedFd::borrow_raw(brood.bell) }).is_ok();
        }
        Some(())
    };
    id();
    if equip().is_none() {
        UNEQUIPPED.store(epoch, Release);
    }
}

/// Whether all children of forks since the epoch `since` are gone, and theirs. Asks the kernel, once for each brood.
pub fn are_children_gone(since: u32) -> bool {
    let Some(mut broods) = BROODS.lock() else { return false };
    // Under the lock: a child that is being made has its button, or will get another one.
    if is_forking() || UNEQUIPPED.load(Acquire) >= since {
        return false;
    }
    // Or the next child would get none.
    let has_room = broods.iter().any(|b| b.bell < 0);
    for brood in broods.iter_mut().filter(|b| b.bell >= 0) {
        if has_room {
            brood.close();
        }
        // SAFETY: the bell is closed under the lock.
        if !unsafe { is_there(brood.bell) } {
            drop(PrivateFd::adopt(brood.bell));
            *brood = NO_BROOD;
        }
    }
    broods.iter().all(|b| b.bell < 0 || b.until < since)
}

/// An ancestor. Written in a fork child alone, before it has a second thread.
struct Ancestor {
    /// Whatever [`id`] was there. 0: none.
    id: AtomicU32,
    /// The number of its button.
    button: AtomicI32,
}

/// The last come last. With more the first are forgotten: what they have is waited for in vain.
static ANCESTORS: [Ancestor; 8] = [const {
    Ancestor {
        id: AtomicU32::new(0),
        button: AtomicI32::new(-1),
    }
}; 8];

/// [`id`], once it is drawn.
static ID: AtomicU32 = AtomicU32::new(0);

/// By which this process's children know it: never 0. Drawn before the first fork that they may have to ask after.
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

/// In a fork child: its parent is an ancestor from now on, and has children of its own alone. Those that are gone are
/// forgotten. False if one was forgotten that is not: the child does not keep its button.
///
/// # Safety
/// Before any other use in this process, and the buttons of all that are known are open.
pub unsafe fn remember_parent() -> bool {
    FORKS.store(0, Relaxed);
    UNEQUIPPED.store(0, Relaxed);
    // SAFETY: by the contract. What it held is closed by number.
    let broods = unsafe {
        BROODS.reset();
        std::mem::replace(BROODS.get_unlocked(), [NO_BROOD; 8])
    };
    let button = broods.iter().map(|b| b.button).max().unwrap_or(-1);
    let parent = Some((ID.swap(0, Relaxed), button)).filter(|(id, button)| *id != 0 && *button >= 0);
    // SAFETY: by the contract.
    let is_known = |(_, button): &(u32, i32)| unsafe { is_there(*button) };
    let count = all().filter(is_known).chain(parent).count();
    let mut known = all()
        .filter(is_known)
        .chain(parent)
        .skip(count.saturating_sub(ANCESTORS.len()));
    // Each is read before its place is written, for none moves to a later one.
    for ancestor in &ANCESTORS {
        let (id, button) = known.next().unwrap_or((0, -1));
        ancestor.id.store(id, Release);
        ancestor.button.store(button, Release);
    }
    count <= ANCESTORS.len()
}

/// Whether the number is one of those buttons.
pub fn is_button(fd: i32) -> bool {
    all().any(|(_, button)| button == fd)
}

/// Whether that process may still be there. One that is not known may.
pub fn lives(id: u32) -> bool {
    // SAFETY: what is known stays open.
    all().all(|(known, button)| known != id || unsafe { is_there(button) })
}

/// Whether some process has the other end of a button or bell.
///
/// # Safety
/// The number is such a one's, and stays open.
unsafe fn is_there(end: i32) -> bool {
    // SAFETY: by the contract.
    let end = unsafe { BorrowedFd::borrow_raw(end) };
    let mut polled = [PollFd::from_borrowed_fd(end, PollFlags::empty())];
    let now = rustix::time::Timespec::default();
    let _ = rustix::event::poll(&mut polled, Some(&now));
    // The kernel's word for a pair whose other end is closed.
    !polled.iter().any(|p| p.revents().contains(PollFlags::HUP))
}

/// Has the service threads of all of them look what is wanted of them, the nearest first.
pub fn ask() {
    for (_, button) in all().rev() {
        // SAFETY: what is known stays open.
        doorbell::press(unsafe { BorrowedFd::borrow_raw(button) });
    }
}
