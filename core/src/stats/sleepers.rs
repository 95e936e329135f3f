//! Who sleeps, in what, and since when: one slot a waiter, as the owner writes it and a reader sees it.
//!
//! A thread writes here when it is about to sleep in the kernel until something comes over a link or there is room on
//! it, and when it is awake again. Threads that sleep in the kernel's own calls on TCP are not here: the kernel shows
//! those.

use core::mem::size_of;
use core::sync::atomic::{
    AtomicU8, AtomicU16, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use core::time::Duration;

use super::codes::{Call, SLEEPER_SLOTS};

/// Which waiter is told of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// None.
    Nobody,
    /// The waiter with this number.
    One(u16),
    /// More than one.
    Several,
}

impl Waiting {
    pub(super) fn to_word(self) -> u16 {
        match self {
            Self::Nobody => 0,
            Self::One(number) => number.saturating_add(1),
            Self::Several => u16::MAX,
        }
    }

    pub(super) fn from_word(word: u16) -> Self {
        match word {
            0 => Self::Nobody,
            u16::MAX => Self::Several,
            word => Self::One(word - 1),
        }
    }
}

/// A thread that is about to sleep.
#[derive(Clone, Copy, Debug)]
pub struct Asleep {
    /// The kernel's id of it, in its own pid namespace.
    pub thread: u32,
    /// What it sleeps in.
    pub call: Call,
    /// The slot of the stream that the call is on, if it is on one.
    pub stream: Option<u32>,
    /// CLOCK_MONOTONIC, ns; the kernel's coarse clock will do.
    pub since: u64,
    /// For a sender: how many bytes its reader has not read.
    pub unread: u64,
}

/// Those who sleep as one waiter. Only an epoll set's can be several at once: then all but the count is that of who
/// came last.
#[repr(C, align(32))]
#[derive(Debug)]
pub struct SleeperStats {
    since: AtomicU64,
    unread: AtomicU64,
    /// 0 if that one is awake, and others sleep on.
    thread: AtomicU32,
    /// The slot plus one; 0 is none.
    stream: AtomicU32,
    count: AtomicU16,
    call: AtomicU8,
}

// No slot crosses the border of a page: a reader does not look beyond those that have memory.
const _: () = assert!(size_of::<SleeperStats>() == 32);
const _: () = assert!((SLEEPER_SLOTS as usize * size_of::<SleeperStats>()).is_multiple_of(4096));

impl SleeperStats {
    /// A thread goes to sleep.
    pub fn begin(&self, asleep: &Asleep) {
        self.since.store(asleep.since, Relaxed);
        self.unread.store(asleep.unread, Relaxed);
        self.thread.store(asleep.thread, Relaxed);
        let stream = asleep.stream.map_or(0, |slot| slot.saturating_add(1));
        self.stream.store(stream, Relaxed);
        self.call.store(asleep.call as u8, Relaxed);
        // Pairs with the Acquire in `copy`: who sees the sleeper sees what it is.
        self.count.fetch_add(1, Release);
    }

    /// It is awake.
    pub fn end(&self, thread: u32) {
        if self.thread.load(Relaxed) == thread {
            self.thread.store(0, Relaxed);
        }
        self.count.fetch_sub(1, Relaxed);
    }

    pub(super) fn copy(&self, waiter: u16, now: u64) -> Option<SleeperSnapshot> {
        let count = self.count.load(Acquire);
        (count > 0).then(|| SleeperSnapshot {
            waiter,
            count,
            thread: Some(self.thread.load(Relaxed)).filter(|id| *id != 0),
            call: Call::from_code(self.call.load(Relaxed)),
            stream: self.stream.load(Relaxed).checked_sub(1),
            asleep: Duration::from_nanos(now.saturating_sub(self.since.load(Relaxed))),
            unread: self.unread.load(Relaxed),
        })
    }
}

/// Those who sleep as one waiter, at one moment.
#[derive(Clone, Copy, Debug)]
pub struct SleeperSnapshot {
    /// The waiter's number.
    pub waiter: u16,
    /// How many threads.
    pub count: u16,
    /// The one who came last, if that still sleeps.
    pub thread: Option<u32>,
    /// What it sleeps in; `None` for a code that this version does not know.
    pub call: Option<Call>,
    /// The slot of the stream that the call is on; `None` for poll and epoll sets.
    pub stream: Option<u32>,
    /// For how long.
    pub asleep: Duration,
    /// For a sender: how many bytes its reader had not read when it went to sleep.
    pub unread: u64,
}
