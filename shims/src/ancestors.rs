//! In a fork child: the processes that it descends from, one of which may have a stream on a link that this one holds
//! too. Each is told by a button, which also says whether its process is still there: nobody else has the doorbell.
//! That holds across pid namespaces, and for a process that has ended and was not waited for.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{
    AtomicI32, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::os::doorbell;
use rustix::event::{PollFd, PollFlags};

/// One of them. Written in a fork child alone, before it has a second thread.
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
    let drawn = crate::library::random_u64() as u32 | 1;
    match ID.compare_exchange(0, drawn, Release, Acquire) {
        Ok(_) => drawn,
        Err(id) => id,
    }
}

fn all() -> impl DoubleEndedIterator<Item = (u32, i32)> {
    let each = ANCESTORS.iter().map(|a| (a.id.load(Acquire), a.button.load(Acquire)));
    each.filter(|(id, _)| *id != 0)
}

/// In a fork child, whose parent's service thread has that button, -1 without one. Those that are gone are forgotten.
///
/// # Safety
/// Before any other use in this process, and the buttons of all that are known are open.
pub unsafe fn remember_parent(button: i32) {
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

/// # Safety
/// The number is a button's, and stays open.
unsafe fn is_there(button: i32) -> bool {
    // SAFETY: by the contract.
    let button = unsafe { BorrowedFd::borrow_raw(button) };
    let mut polled = [PollFd::from_borrowed_fd(button, PollFlags::empty())];
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
