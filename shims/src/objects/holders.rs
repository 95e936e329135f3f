//! Counts the processes that hold a connection's socket. Each fork adds a holder. The counts are in memory that parents
//! and children of forks share. A process that is killed, or executes another program, does not subtract itself, so a
//! count above 1 may be too high. Then the kernel is asked whether the other holders are alive, by doorbells that
//! parents share with their children.
//!
//! The *owner*, one of the holders, may have the stream on a link, which the other holders cannot use. Flags beside the
//! count carry their request for the stream and the owner's answer.
//!
//! An *epoch* is a number that grows with each fork. Each socket is recorded with the epoch in which the program got
//! it: the children of earlier forks cannot have inherited it. The work at a fork itself is in `notify::fork`.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32};

use rdmasock_core::lock::Lock;
use rdmasock_core::os::doorbell;
use rdmasock_core::os::memfd::Mapping;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::sync::store_load_fence;
use rustix::event::{PollFd, PollFlags};

use crate::objects::library::Library;
use crate::objects::waiters::{SERVICE, hang};

/// The count for one socket that was open at a fork. Cell 0 belongs to no socket: its words concern all sockets.
struct Cell {
    /// The number of holders, with the flags [`FIRST`], [`OWNED`] and [`WANTED`]. 0: the cell is free. In cell 0: the
    /// number of requests for streams that holders have made so far.
    word: AtomicU32,
    /// The [`id`] of the first holder, which is the owner. The other holders descend from it, and only the owner can
    /// have the stream on a link. In cell 0: the flags [`LOST`] and [`STRANGER`].
    owner: AtomicU32,
}

const CELLS: usize = 65_536;
/// Mask of the count. A count that has reached this value stays there.
const COUNT: u32 = 0xffff;
/// Flag: the first holder is still counted.
const FIRST: u32 = 1 << 29;
/// Flag: the owner has the stream on a link, or is about to.
const OWNED: u32 = 1 << 30;
/// Flag: another holder wants to use the stream, and asks the owner to take it back to TCP.
const WANTED: u32 = 1 << 31;
/// How long a process waits for the owner to take a stream back to TCP, ns.
const PATIENCE: u64 = 5_000_000_000;
/// Pause between two requests of a waiting process to the owner, ns: the first pause, and the longest.
const FIRST_PAUSE: i64 = 200_000;
const LONGEST_PAUSE: i64 = 20_000_000;

static EPOCH: AtomicU32 = AtomicU32::new(1);
static COUNTS: AtomicPtr<Cell> = AtomicPtr::new(std::ptr::null_mut());

/// Maps the memory in which holders are counted. To be called once, before a socket is counted.
pub(crate) fn prepare() {
    if let Ok(counts) = Mapping::anonymous(CELLS * size_of::<Cell>()) {
        COUNTS.store(counts.as_ptr().cast(), Release);
        std::mem::forget(counts);
    }
}

/// Returns the epoch, a number that is 1 before the first fork, and grows with each fork, in parent and child. A socket
/// that this process alone held in one epoch may have other holders in the next.
pub(crate) fn epoch() -> u32 {
    EPOCH.load(Acquire)
}

/// Begins the next epoch and returns its number. To be called before a fork, once the coming child is counted as a
/// holder of each socket.
pub(crate) fn begin_epoch() -> u32 {
    EPOCH.fetch_add(1, AcqRel) + 1
}

/// The epoch in which this process began; 0 if it is no fork child.
static BIRTH: AtomicU32 = AtomicU32::new(0);

/// Begins a new epoch in a fork child, and records it as the child's first (`BIRTH`). So a socket whose epoch
/// (`Holders::born`) is below `BIRTH` came from the parent.
pub(crate) fn begin_life() {
    BIRTH.store(begin_epoch(), Release);
}

/// Flag: some fork child does not keep the button of one of its ancestors. So that ancestor's doorbell cannot show
/// whether the child lives.
pub(crate) const LOST: u32 = 1;
/// Flag: a child was made that no hook has seen, so sockets may have holders that are not counted. From then on no
/// process that shares this memory promotes a connection: that child could read the connection's markers from TCP.
pub(crate) const STRANGER: u32 = 2;

/// Sets the flag [`LOST`] or [`STRANGER`], for all processes that share this memory.
#[cold]
pub(crate) fn note(what: u32) {
    if let Some(c) = cell(0)
        && !is_noted(what)
    {
        c.owner.fetch_or(what, AcqRel);
    }
}

fn is_noted(what: u32) -> bool {
    cell(0).is_some_and(|c| c.owner.load(Acquire) & what != 0)
}

fn cell(index: u32) -> Option<&'static Cell> {
    let base = COUNTS.load(Acquire);
    let at = index as usize;
    // SAFETY: `prepare` has mapped `CELLS` cells and never unmaps them. Their first content, zeroes, is valid.
    (!base.is_null() && at < CELLS).then(|| unsafe { &*base.add(at) })
}

fn claim() -> Option<u32> {
    let first = (crate::objects::library::random_u64() as usize) % CELLS;
    (0..CELLS)
        .map(|i| ((first + i) % (CELLS - 1)) as u32 + 1)
        .take(64)
        .find(|index| cell(*index).is_some_and(|c| c.word.compare_exchange(0, 1, AcqRel, Relaxed).is_ok()))
}

/// Counts one holder less. True if it was the last holder: the cell is then free. `is_plain`: the stream is on TCP for
/// this holder, and stays there. In that case the cell's [`OWNED`] and [`WANTED`] are cleared too. Otherwise they might
/// stay for good: the thread that has taken the stream back may call `on_returned` only after this, and then finds no
/// cell.
fn leave(c: &Cell, is_plain: bool) -> bool {
    let mut gone = if is_plain { OWNED | WANTED } else { 0 };
    if c.owner.load(Acquire) == id() {
        gone |= FIRST;
    }
    let less = |word: u32| {
        Some(match word & COUNT {
            0 | 1 => 0,
            COUNT => word & !gone,
            _ => (word & !gone) - 1,
        })
    };
    let (Ok(before) | Err(before)) = c.word.fetch_update(AcqRel, Acquire, less);
    if before & gone & OWNED != 0 {
        wake_all(c);
    }
    before & COUNT <= 1
}

fn wake_all(c: &Cell) {
    let _ = rustix::thread::futex::wake(&c.word, rustix::thread::futex::Flags::empty(), i32::MAX as u32);
}

/// The holders of one socket.
#[derive(Default)]
pub struct Holders {
    /// The index of the socket's cell. 0: only this process holds the socket. `u32::MAX`: there are several holders,
    /// which are not counted.
    at: AtomicU32,
    /// The epoch in which the program got the socket.
    born: AtomicU32,
}

impl Holders {
    /// Resets the value for a new socket, which this process alone holds.
    pub fn reset(&self) {
        self.at.store(0, Relaxed);
        self.born.store(epoch(), Relaxed);
    }

    /// Returns the cell; `None` if the holders are not counted.
    fn counted(&self) -> Option<&'static Cell> {
        match self.at.load(Acquire) {
            index @ 1..=0xffff => cell(index),
            _ => None,
        }
    }

    /// Returns whether more than one process may hold the socket, by the count alone, which may be too high.
    pub fn may_be_several(&self) -> bool {
        match self.at.load(Acquire) {
            0 => false,
            u32::MAX => true,
            index => cell(index).is_none_or(|c| c.word.load(Acquire) & COUNT > 1),
        }
    }

    /// Returns whether more than one process holds the socket. If the count is above 1, asks the kernel, which can only
    /// tell the owner that all its children are gone, and another holder that the owner is gone. So a killed holder may
    /// stay counted while others live.
    pub fn are_several(&self) -> bool {
        is_noted(STRANGER) || self.may_be_several() && !self.is_alone()
    }

    /// Asks the kernel which other holders are gone, and removes those from the count. True if this process is then the
    /// only holder.
    #[cold]
    fn is_alone(&self) -> bool {
        if is_noted(LOST) {
            return false;
        }
        let born = self.born.load(Acquire);
        let Some(c) = self.counted() else {
            // The holders are not counted. If the program got the socket in this process, all other holders descend
            // from this process.
            return born >= BIRTH.load(Acquire)
                && are_children_gone(born)
                && self.at.compare_exchange(u32::MAX, 0, AcqRel, Relaxed).is_ok();
        };
        // Loaded before the kernel is asked: a fork in between changes the word, and the exchange fails.
        let word = c.word.load(Acquire);
        let owner = c.owner.load(Acquire);
        let alone = if owner == id() {
            are_children_gone(born).then_some(word & !COUNT | 1)
        } else {
            let is_gone = word & FIRST != 0 && word & COUNT < COUNT && !lives(owner);
            is_gone.then(|| (word & !FIRST) - 1)
        };
        let changed = alone.filter(|new| c.word.compare_exchange(word, *new, AcqRel, Relaxed).is_ok());
        changed.is_some_and(|word| word & COUNT <= 1)
    }

    /// Counts this process out of the holders. True if it was the last holder. `is_plain`: the stream is on TCP in this
    /// process. If it is not, `OWNED` stays set. If this process is the owner, bytes may be on its link, and the other
    /// holders then wait in vain for the stream.
    pub fn let_go(&self, is_plain: bool) -> bool {
        match self.at.swap(0, AcqRel) {
            0 => true,
            index => cell(index).is_some_and(|c| leave(c, is_plain)),
        }
    }

    /// Notes that the owner has taken the stream back to TCP, and wakes the holders that wait for that.
    pub fn on_returned(&self) {
        if let Some(c) = self.counted()
            && c.word.fetch_and(!(OWNED | WANTED), AcqRel) & OWNED != 0
        {
            wake_all(c);
        }
    }

    /// Returns whether another holder has asked for this stream.
    pub fn is_wanted(&self) -> bool {
        self.counted().is_some_and(|c| c.word.load(Acquire) & WANTED != 0)
    }

    /// Waits until the owner has taken the stream back to TCP, for at most `PATIENCE`. False if the owner has not
    /// answered in that time, or was killed before it answered.
    pub fn await_return(&self) -> bool {
        let Some(c) = cell(self.at.load(Acquire)) else {
            return true;
        };
        let until = crate::sys::time::now_ns() + PATIENCE;
        let mut word = c.word.fetch_or(WANTED, AcqRel) | WANTED;
        let (mut pause, mut ask_at) = (FIRST_PAUSE, 0);
        let owner = c.owner.load(Acquire);
        while word & OWNED != 0 {
            let now = crate::sys::time::now_ns();
            if now >= until || !lives(owner) {
                // The owner may have answered and then ended.
                return c.word.load(Acquire) & OWNED == 0;
            }
            // The request is repeated: the owner may have had to wait for an answer of the connection's peer, which may
            // have come meanwhile. A signal that ends the pause early causes no further request.
            if now >= ask_at {
                ask_owners();
                ask_at = now + pause.unsigned_abs();
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
            let step = rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: pause,
            };
            let _ = rustix::thread::futex::wait(&c.word, rustix::thread::futex::Flags::empty(), word, Some(&step));
            word = c.word.load(Acquire);
        }
        true
    }

    /// Counts one holder more, for the child that a fork is about to make. Then calls `may_be_on_link`, which returns
    /// whether this process has the stream on a link. True if it has: the child then has to ask this process for the
    /// stream. False also if the holders are not counted.
    pub fn add_child(&self, may_be_on_link: impl FnOnce() -> bool) -> bool {
        if self.at.load(Acquire) == 0 {
            self.at.store(claim().unwrap_or(u32::MAX), Release);
        }
        let Some(c) = cell(self.at.load(Acquire)) else {
            return false;
        };
        let word = c.word.load(Acquire);
        if word & COUNT <= 1 {
            c.owner.store(id(), Release);
            // The exchange fails if another thread forks at the same time and has set the word first.
            let _ = c.word.compare_exchange(word, FIRST | 1, AcqRel, Relaxed);
        }
        let more = |word: u32| (word & COUNT < COUNT).then(|| word + 1);
        let _ = c.word.fetch_update(AcqRel, Acquire, more);
        // The start of a promotion uses the reverse order (`service/answer.rs`): it marks the connection as busy, then
        // reads the count. So one of the two sees the other.
        store_load_fence();
        let is_owned = may_be_on_link();
        if is_owned {
            c.word.fetch_or(OWNED, AcqRel);
        }
        is_owned
    }

    /// To be called after a fork for each socket. If the socket was not counted, because another thread opened it
    /// between the count and the fork, marks it as held by several processes that are not counted. Has no effect on a
    /// counted socket.
    pub fn hold_uncounted(&self) {
        let _ = self.at.compare_exchange(0, u32::MAX, AcqRel, Relaxed);
    }
}

/// Returns how many requests for streams were made so far, by all processes that share the memory. If the result
/// differs from that of the caller's last call, there is a new request.
pub(crate) fn requests() -> u32 {
    cell(0).map_or(0, |c| c.word.load(Acquire))
}

/// Asks the processes that may have streams on links to check which streams are wanted: wakes the service threads of
/// all known ancestors, the nearest first. Each of these service threads also wakes the threads of its process that
/// sleep on epoll sets. A child may have consumed an event of a shared set that was meant for them.
#[cold]
pub(crate) fn ask_owners() {
    if let Some(requests) = cell(0) {
        requests.word.fetch_add(1, AcqRel);
    }
    for (_, button) in ancestors().rev() {
        // SAFETY: the buttons of known ancestors are never closed in this process.
        doorbell::press(unsafe { BorrowedFd::borrow_raw(button) });
    }
    // A vfork child runs in its parent's memory. There `Library::current` is the parent's instance, and this wakes the
    // parent's service thread.
    if let Some(library) = Library::current() {
        library.waiters.ring(SERVICE);
    }
}

// How the parents and children of forks check whether the other lives. A parent makes a doorbell and keeps it. Each
// child gets a copy of the doorbell's button, the end by which the doorbell's poller is woken. Either end reports
// POLLHUP once no process has the other end open. This works across pid namespaces, and also for a process that has
// ended and was not waited for.

/// A group of children, of consecutive forks, that share one button. The doorbell reports POLLHUP once all of them and
/// their descendants have ended or executed another program. The parent keeps its copy of the button open while further
/// children get copies, and closes it before it polls the doorbell. An fd of -1 is closed, or was never made.
#[derive(Clone, Copy)]
struct Brood {
    bell: i32,
    button: i32,
    /// Whether the service thread polls the doorbell.
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
/// The epoch of the last fork whose child has no button: the parent cannot see when that child is gone. 0: there is no
/// such child.
static UNEQUIPPED: AtomicU32 = AtomicU32::new(0);
/// Number of threads that are forking now.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Notes that a fork begins. Until it has [ended](end_fork), children do not count as gone.
pub(crate) fn begin_fork() {
    FORKS.fetch_add(1, AcqRel);
}

/// Notes in the parent that a fork has ended.
pub(crate) fn end_fork() {
    FORKS.fetch_sub(1, AcqRel);
}

/// Returns whether a fork is under way. In the fork's child: whether [`begin_fork`] was called for that fork.
pub(crate) fn is_forking() -> bool {
    FORKS.load(Acquire) > 0
}

/// Provides a button for the child of the coming fork, which happens in `epoch`. `service` is the epoll set of the
/// service thread, to which the doorbell is added. If the button cannot be made, the parent cannot see when that child
/// is gone.
pub(crate) fn equip_child(epoch: u32, service: Option<BorrowedFd<'_>>) {
    let equip = || {
        let mut broods = BROODS.lock()?;
        // As long as more than one entry is free, each child gets a brood of its own, so the open buttons are closed
        // first. They stay open if another thread forks too, since its child is about to get one of them.
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

/// Returns whether all children of the forks from epoch `since` on, and their descendants, have ended or executed
/// another program. Makes one system call for each brood. False also if that is not known.
fn are_children_gone(since: u32) -> bool {
    let Some(mut broods) = BROODS.lock() else { return false };
    // Checked under the lock, which `equip_child` takes too. So a fork that begins after this check gets its child's
    // button only after the loop below.
    if is_forking() || UNEQUIPPED.load(Acquire) >= since {
        return false;
    }
    // If no entry is free, the open button is kept for the next child, which could get no other.
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

/// An ancestor process, which may have the stream of a shared socket on a link. This process has a copy of the
/// ancestor's button. The button reports POLLHUP once the ancestor is gone, since no other process has the doorbell. An
/// entry is written only in a fork child, before the child has a second thread.
struct Ancestor {
    /// The value of [`id`] in the ancestor. 0: the entry is free.
    id: AtomicU32,
    /// The fd of the ancestor's button in this process.
    button: AtomicI32,
}

/// The ancestors that this process knows, the nearest last. If there are more than 8, the farthest are forgotten. This
/// process then waits in vain for a stream that a forgotten ancestor has on a link.
static ANCESTORS: [Ancestor; 8] = [const {
    Ancestor {
        id: AtomicU32::new(0),
        button: AtomicI32::new(-1),
    }
}; 8];

/// The value of [`id`]; 0 before it is drawn.
static ID: AtomicU32 = AtomicU32::new(0);

/// Returns the random number, never 0, by which this process's children know it. The number is drawn before the first
/// fork whose child may have to ask this process for a stream.
fn id() -> u32 {
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

fn ancestors() -> impl DoubleEndedIterator<Item = (u32, i32)> {
    let each = ANCESTORS.iter().map(|a| (a.id.load(Acquire), a.button.load(Acquire)));
    each.filter(|(id, _)| *id != 0)
}

/// Adds the parent to the ancestors that a fork child knows, and empties the child's copy of the parent's broods.
/// Removes ancestors that are gone. False if a living ancestor had to be removed for want of room: the child does not
/// keep that ancestor's button.
///
/// # Safety
/// The caller is the only thread of a fork child, has not used this module's locks before, and the buttons of all known
/// ancestors are open.
pub(crate) unsafe fn remember_parent() -> bool {
    FORKS.store(0, Relaxed);
    UNEQUIPPED.store(0, Relaxed);
    // SAFETY: by the contract, no other thread uses the lock. The fds in the parent's broods are not closed here: the
    // fork child later closes all of the library's fds that it does not keep.
    let broods = unsafe {
        BROODS.reset();
        std::mem::replace(BROODS.get_unlocked(), [NO_BROOD; 8])
    };
    let button = broods.iter().map(|b| b.button).max().unwrap_or(-1);
    let parent = Some((ID.swap(0, Relaxed), button)).filter(|(id, button)| *id != 0 && *button >= 0);
    // SAFETY: by the contract, the buttons of all known ancestors are open.
    let is_known = |(_, button): &(u32, i32)| unsafe { is_there(*button) };
    let count = ancestors().filter(is_known).chain(parent).count();
    let mut known = ancestors()
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
pub(crate) fn is_button(fd: i32) -> bool {
    ancestors().any(|(_, button)| button == fd)
}

/// Returns whether the ancestor with this [`id`] may still live. True also for an unknown id.
fn lives(id: u32) -> bool {
    // SAFETY: the buttons of known ancestors are never closed in this process.
    ancestors().all(|(known, button)| known != id || unsafe { is_there(button) })
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the `Holders` of a parent and of its child, for a stream that the parent had on a link at the fork.
    fn parent_and_child() -> [Holders; 2] {
        if COUNTS.load(Acquire).is_null() {
            prepare();
        }
        let parent = Holders::default();
        assert!(parent.add_child(|| true));
        let child = Holders::default();
        child.at.store(parent.at.load(Acquire), Release);
        [parent, child]
    }

    fn is_owned(holders: &Holders) -> bool {
        holders.counted().is_some_and(|c| c.word.load(Acquire) & OWNED != 0)
    }

    #[test]
    fn an_owner_that_lets_go_leaves_nothing_to_wait_for() {
        let [parent, child] = parent_and_child();
        assert!(is_owned(&child) && child.are_several());
        assert!(!parent.let_go(true));
        // This call has no effect, since the parent has left the cell before.
        parent.on_returned();
        assert!(!is_owned(&child) && !child.are_several());
        assert!(child.let_go(false));
    }

    #[test]
    fn a_count_beyond_its_end_stays_several() {
        let [parent, child] = parent_and_child();
        for _ in 0..2 * COUNT {
            parent.add_child(|| false);
            assert!(child.may_be_several());
        }
        for _ in 0..2 * COUNT {
            child.counted().map(|c| leave(c, true));
        }
        assert!(parent.may_be_several());
    }

    #[test]
    fn an_owner_that_has_given_nothing_back_is_waited_for() {
        let [parent, child] = parent_and_child();
        assert!(!parent.let_go(false));
        assert!(is_owned(&child) && !child.are_several());
        assert!(child.let_go(false));
    }

    #[test]
    fn a_child_that_lets_go_leaves_the_owner_what_it_has() {
        let [parent, child] = parent_and_child();
        assert!(!child.let_go(false));
        assert!(is_owned(&parent) && !parent.are_several());
        parent.on_returned();
        assert!(!is_owned(&parent));
    }
}
