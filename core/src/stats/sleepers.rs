//! The threads that sleep, in what call, and since when. There is one slot a waiter: the owner writes it, and readers
//! read it.
//!
//! A thread writes here when it is about to sleep in the kernel until a link has data or room, and when it is awake
//! again. Threads that sleep in the kernel's own calls on TCP are not here: the kernel reports those.

use core::mem::size_of;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};
use core::time::Duration;

use super::codes::{Call, SLEEPER_SLOTS};

/// The waiter that is woken by an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// No waiter.
    Nobody,
    /// The waiter with this number.
    One(u16),
    /// More than one waiter.
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
    /// The thread's id, in its own pid namespace.
    pub thread: u32,
    /// The call that it sleeps in.
    pub call: Call,
    /// The slot of the stream that the call is on, if it is on one.
    pub stream: Option<u32>,
    /// When the sleep began: CLOCK_MONOTONIC, ns. The kernel's coarse clock is precise enough.
    pub since: u64,
    /// For a sender: the number of bytes that its reader has not read.
    pub unread: u64,
}

/// The threads that sleep as one waiter. They are several at once only for an epoll set's waiter. Then all fields
/// except `count` describe the thread that came last.
#[repr(C, align(32))]
#[derive(Debug)]
pub struct SleeperStats {
    since: AtomicU64,
    unread: AtomicU64,
    /// 0 if the thread that came last is awake, and others sleep on.
    thread: AtomicU32,
    /// The slot plus one; 0 is none.
    stream: AtomicU32,
    count: AtomicU16,
    call: AtomicU8,
}

// No slot crosses the border of a page: a reader reads only pages that have memory.
const _: () = assert!(size_of::<SleeperStats>() == 32);
const _: () = assert!((SLEEPER_SLOTS as usize * size_of::<SleeperStats>()).is_multiple_of(4096));

impl SleeperStats {
    /// Notes that a thread goes to sleep.
    pub fn begin(&self, asleep: &Asleep) {
        self.since.store(asleep.since, Relaxed);
        self.unread.store(asleep.unread, Relaxed);
        self.thread.store(asleep.thread, Relaxed);
        let stream = asleep.stream.map_or(0, |slot| slot.saturating_add(1));
        self.stream.store(stream, Relaxed);
        self.call.store(asleep.call as u8, Relaxed);
        // Pairs with the Acquire in `copy`: a reader that sees the sleeper sees its fields.
        self.count.fetch_add(1, Release);
    }

    /// Notes that the thread is awake.
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

/// The threads that sleep as one waiter, at one moment.
#[derive(Clone, Copy, Debug)]
pub struct SleeperSnapshot {
    /// The waiter's number.
    pub waiter: u16,
    /// The number of threads.
    pub count: u16,
    /// The thread that came last; `None` if it does not sleep any more.
    pub thread: Option<u32>,
    /// The call that it sleeps in; `None` for a code that this version does not know.
    pub call: Option<Call>,
    /// The slot of the stream that the call is on; `None` for poll and epoll sets.
    pub stream: Option<u32>,
    /// How long it has slept.
    pub asleep: Duration,
    /// For a sender: the number of bytes that its reader had not read when the sender went to sleep.
    pub unread: u64,
}
