//! Which processes hold a connection's socket: a count that parent and children share, until one holder is left. A
//! process that is killed, or executes something, does not count itself out, so where the count says that there are
//! others the kernel is asked whether these processes are there (`ancestors`). And the word between them where one of
//! them has the stream on a link, which is not there for the others. What a fork itself does is in `fork`.

use rdmasock_core::sync::store_load_fence;
use std::sync::atomic::{
    AtomicPtr, AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use rdmasock_core::os::memfd::Mapping;

use crate::objects::ancestors;
use crate::objects::library::Library;
use crate::objects::waiters::SERVICE;

/// One a socket that was ever held across a fork, in memory that parent and children share.
struct Cell {
    /// The number of holders, and whether its owner has it on a link. 0 is a free cell; in cell 0, the number of
    /// requests so far.
    word: AtomicU32,
    /// The [id](ancestors::id) of the first holder, from which the others descend. Only the first holder can have the
    /// stream on a link. In cell 0, [`LOST`] and [`STRANGER`].
    owner: AtomicU32,
}

const CELLS: usize = 65_536;
/// A count that has come to this stays there.
const COUNT: u32 = 0xffff;
/// The first holder is one of them.
const FIRST: u32 = 1 << 29;
/// The owner has the stream on a link, or is about to.
const OWNED: u32 = 1 << 30;
/// Another holder wants to use it: the owner is to take it back to TCP.
const WANTED: u32 = 1 << 31;
/// How long a child waits for the owner, ns.
const PATIENCE: u64 = 5_000_000_000;
/// How often it asks, ns: at first, and at last.
const FIRST_PAUSE: i64 = 200_000;
const LONGEST_PAUSE: i64 = 20_000_000;

static EPOCH: AtomicU32 = AtomicU32::new(1);
static COUNTS: AtomicPtr<Cell> = AtomicPtr::new(std::ptr::null_mut());

/// Makes the memory in which holders are counted. Once, before there is anything to count.
pub fn prepare() {
    if let Ok(counts) = Mapping::anonymous(CELLS * size_of::<Cell>()) {
        COUNTS.store(counts.as_ptr().cast(), Release);
        std::mem::forget(counts);
    }
}

/// Changes with each fork, from 1 on: what holds for a socket that this process alone holds may not any more.
pub fn epoch() -> u32 {
    EPOCH.load(Acquire)
}

/// A fork is about to happen, and all that it concerns counts as shared. Returns the new epoch.
pub fn begin_epoch() -> u32 {
    EPOCH.fetch_add(1, AcqRel) + 1
}

/// The epoch in which this process began.
static BIRTH: AtomicU32 = AtomicU32::new(0);

/// In a fork child: what it has so far is its parent's.
pub fn begin_life() {
    BIRTH.store(begin_epoch(), Release);
}

/// An ancestor does not know of some process any more, so the kernel cannot say that it is gone.
const LOST: u32 = 1;
/// There was a child that no hook has seen, so a connection may have holders who are not counted.
const STRANGER: u32 = 2;

/// A fork child is not known by one of its ancestors.
pub fn lose_sight() {
    note(LOST);
}

/// In a child that no hook has seen: its ancestors and their other descendants promote nothing any more. The child
/// would read their markers.
#[cold]
pub fn meet_stranger() {
    note(STRANGER);
}

fn note(what: u32) {
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
    // SAFETY: so many, of zeroes at first, mapped for good.
    (!base.is_null() && at < CELLS).then(|| unsafe { &*base.add(at) })
}

fn claim() -> Option<u32> {
    let first = (crate::objects::library::random_u64() as usize) % CELLS;
    (0..CELLS)
        .map(|i| ((first + i) % (CELLS - 1)) as u32 + 1)
        .take(64)
        .find(|index| cell(*index).is_some_and(|c| c.word.compare_exchange(0, 1, AcqRel, Relaxed).is_ok()))
}

/// One holder less. True if it was the last: the cell is free then. `is_plain`: the stream is on TCP for it, and stays
/// there. Whoever has taken it back may only come to say so when the owner has let go, and finds the cell no more.
fn leave(c: &Cell, is_plain: bool) -> bool {
    let mut gone = if is_plain { OWNED | WANTED } else { 0 };
    if c.owner.load(Acquire) == ancestors::id() {
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

/// Who holds one socket.
#[derive(Default)]
pub struct Holders {
    /// The index of its cell, plus one; `u32::MAX`: several, and nobody knows how many.
    at: AtomicU32,
    /// The epoch of forks in which the program got it.
    born: AtomicU32,
}

impl Holders {
    /// Of a new socket: this process alone.
    pub fn reset(&self) {
        self.at.store(0, Relaxed);
        self.born.store(epoch(), Relaxed);
    }

    /// The cell, where holders are counted.
    fn counted(&self) -> Option<&'static Cell> {
        match self.at.load(Acquire) {
            index @ 1..=0xffff => cell(index),
            _ => None,
        }
    }

    /// Whether more than one process may hold the socket, by the count alone.
    pub fn may_be_several(&self) -> bool {
        match self.at.load(Acquire) {
            0 => false,
            u32::MAX => true,
            index => cell(index).is_none_or(|c| c.word.load(Acquire) & COUNT > 1),
        }
    }

    /// Whether more than one process holds the socket. Asks the kernel, if others are counted; a descendant of another
    /// process's that holds it may be known only when its parent is gone too.
    pub fn are_several(&self) -> bool {
        is_noted(STRANGER) || self.may_be_several() && !self.is_alone()
    }

    /// Whether the kernel says that the other holders are gone. Removes them from the count then.
    #[cold]
    fn is_alone(&self) -> bool {
        if is_noted(LOST) {
            return false;
        }
        let born = self.born.load(Acquire);
        let Some(c) = self.counted() else {
            // Others have got it from this process alone.
            return born >= BIRTH.load(Acquire)
                && ancestors::are_children_gone(born)
                && self.at.compare_exchange(u32::MAX, 0, AcqRel, Relaxed).is_ok();
        };
        // Before the kernel is asked: who forks meanwhile changes it.
        let word = c.word.load(Acquire);
        let owner = c.owner.load(Acquire);
        let alone = if owner == ancestors::id() {
            ancestors::are_children_gone(born).then_some(word & !COUNT | 1)
        } else {
            let is_gone = word & FIRST != 0 && word & COUNT < COUNT && !ancestors::lives(owner);
            is_gone.then(|| (word & !FIRST) - 1)
        };
        let changed = alone.filter(|new| c.word.compare_exchange(word, *new, AcqRel, Relaxed).is_ok());
        changed.is_some_and(|word| word & COUNT <= 1)
    }

    /// This process lets go of the socket, which is on TCP here if it `is_plain`; if not, what other holders miss may
    /// be on a link, and they wait in vain. True if it was the last holder.
    pub fn let_go(&self, is_plain: bool) -> bool {
        match self.at.swap(0, AcqRel) {
            0 => true,
            index => cell(index).is_some_and(|c| leave(c, is_plain)),
        }
    }

    /// The owner has the stream back on TCP: the other holders can go on.
    pub fn on_returned(&self) {
        if let Some(c) = self.counted()
            && c.word.fetch_and(!(OWNED | WANTED), AcqRel) & OWNED != 0
        {
            wake_all(c);
        }
    }

    /// Whether another holder wants this stream.
    pub fn is_wanted(&self) -> bool {
        match self.at.load(Acquire) {
            0 | u32::MAX => false,
            index => cell(index).is_some_and(|c| c.word.load(Acquire) & WANTED != 0),
        }
    }

    /// Waits until the process that has the stream on a link has taken it back to TCP. False if it does not answer, or
    /// was killed before it had.
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
            if now >= until || !ancestors::lives(owner) {
                // It may have answered, and then ended.
                return c.word.load(Acquire) & OWNED == 0;
            }
            // Again and again: what the owner waits for itself may have come. Not at each signal that ends the pause.
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

    /// In a vfork child of the process that has the stream on a link, with the memory of that: [`Self::await_return`].
    pub fn await_parent(&self) -> bool {
        self.add_child(|| true) && self.await_return()
    }

    /// A fork is about to give the socket to one process more. True if that would have to ask this one for it, by what
    /// `may_be_on_link` says afterwards.
    pub fn add_child(&self, may_be_on_link: impl FnOnce() -> bool) -> bool {
        if self.at.load(Acquire) == 0 {
            self.at.store(claim().unwrap_or(u32::MAX), Release);
        }
        let Some(c) = cell(self.at.load(Acquire)) else {
            return false;
        };
        let word = c.word.load(Acquire);
        if word & COUNT <= 1 {
            c.owner.store(ancestors::id(), Release);
            // Unless another thread forks too, and was first.
            let _ = c.word.compare_exchange(word, FIRST | 1, AcqRel, Relaxed);
        }
        let more = |word: u32| (word & COUNT < COUNT).then(|| word + 1);
        let _ = c.word.fetch_update(AcqRel, Acquire, more);
        // Who begins a promotion looks the other way round (`service/answer.rs`).
        store_load_fence();
        let is_owned = may_be_on_link();
        if is_owned {
            c.word.fetch_or(OWNED, AcqRel);
        }
        is_owned
    }

    /// What another thread has got between the count and the fork is held by both, and nobody knows by how many.
    pub fn hold_uncounted(&self) {
        let _ = self.at.compare_exchange(0, u32::MAX, AcqRel, Relaxed);
    }
}

/// Whether some child has asked for a stream since `seen`; gives the new count.
pub fn requests() -> u32 {
    cell(0).map_or(0, |c| c.word.load(Acquire))
}

/// In a child: it has taken from a set that it shares with its parent what a thread of that was rung for. The parent
/// rings again.
#[cold]
pub fn give_ring_back() {
    ask_owners();
}

/// Has those who may have streams on links look which of them are wanted.
fn ask_owners() {
    if let Some(requests) = cell(0) {
        requests.word.fetch_add(1, AcqRel);
    }
    ancestors::ask();
    // Of a vfork child, it is this memory's.
    if let Some(library) = Library::current() {
        library.waiters.ring(SERVICE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A parent's holder, and that of its child, of a stream that the parent had on a link at the fork.
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
        // Too late: it finds the cell no more.
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
