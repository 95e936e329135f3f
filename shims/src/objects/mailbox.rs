//! What calls of the program leave to the service thread, which is far above them: what it is to do is a [`Command`],
//! whom it concerns is named by numbers, and what starts and wakes it has been given to the mailbox. Here is also what
//! calls have to know of the thread: whether there is one, and what it watches. Not what it does (`service`).

mod command;
mod queue;

pub use command::{Command, Ref};

use queue::Queue;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Release},
};

use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::sync::{Published, Request};
use rustix::event::epoll as kernel;
use rustix::io::Errno;

use crate::signals::handler;
use crate::sys::time::now_ns;

/// How long after a failure the thread is tried again, ns.
const RETRY_AFTER: u64 = 1_000_000_000;

/// What an event of the service thread's epoll set is about, in the upper bits of its data.
pub mod kind {
    pub const DOORBELL: u64 = 0;
    pub const INSTANCE: u64 = 1;
    pub const NAME: u64 = 2;
    pub const CHANNEL: u64 = 3;
    pub const ANCHOR: u64 = 4;
    pub const LINGER: u64 = 5;
    pub const ACCEPTOR: u64 = 6;
    pub const PAIR_STATE: u64 = 7;
    pub const COMPLETION: u64 = 8;
    pub const CONTROL: u64 = 9;
    pub const HOST: u64 = 10;
    pub const APART: u64 = 11;
}

/// The data of such an event.
pub fn tag(kind: u64, id: u64) -> u64 {
    kind << 56 | id & 0x00ff_ffff_ffff_ffff
}

/// The thread that empties a mailbox, as that is told of it.
#[derive(Clone, Copy)]
pub struct Thread {
    /// Wakes it if it sleeps.
    pub wake: fn(),
    /// Makes it. False if that fails (RLIMIT_NPROC, a pids cgroup, no memory).
    pub start: fn() -> bool,
}

/// See the module.
pub struct Mailbox {
    queue: Queue,
    given: Thread,
    started: AtomicBool,
    /// When the thread may be tried again that could not be made, monotonic ns.
    retry_at: AtomicU64,
    /// The thread, once it runs.
    pub thread: AtomicI32,
    /// The thread is to end.
    pub ending: AtomicBool,
    /// The thread is to end, and what it remembers to be kept for the next.
    pub pausing: AtomicBool,
    /// The thread will send the wake-ups that are delayed.
    pub delaying: Request,
    /// The thread will look after links to other hosts.
    pub maintaining: Request,
    /// How often the thread has begun to hear of what completes on a link to another host.
    pub taken_back: Published<AtomicU32>,
    /// What the thread sleeps on.
    pub epoll: PrivateFd,
}

impl Mailbox {
    /// One whose thread is not started.
    pub fn new(thread: Thread) -> Result<Self, Errno> {
        let epoll = PrivateFd::open(|| kernel::create(kernel::CreateFlags::CLOEXEC))?;
        Ok(Self {
            queue: Queue::default(),
            given: thread,
            started: AtomicBool::new(false),
            retry_at: AtomicU64::new(0),
            thread: AtomicI32::new(0),
            ending: AtomicBool::new(false),
            pausing: AtomicBool::new(false),
            delaying: Request::new(),
            maintaining: Request::new(),
            taken_back: Published::default(),
            epoll,
        })
    }

    /// Hands over a command. Never waits, also in a signal handler that has interrupted this. False if there is no
    /// thread, and none can be made now: then the command is dropped.
    pub fn submit(&self, command: Command) -> bool {
        let is_there = self.start();
        if is_there {
            self.queue.push(command);
            (self.given.wake)();
        }
        is_there
    }

    /// In a while the peer is to be told of what a sender has just begun to hold back.
    #[inline]
    pub fn delay_wake(&self) {
        if self.delaying.ask() {
            self.submit(Command::DelayedWakes);
        }
    }

    /// In a while links to other hosts are to be maintained: what is owed on them, and who hears of what
    /// completes.
    #[inline]
    pub fn maintain_later(&self) {
        if self.maintaining.ask() {
            self.submit(Command::Maintain);
        }
    }

    /// Whether the thread runs, or is not to.
    pub fn is_started(&self) -> bool {
        self.started.load(Acquire)
    }

    /// From now on nobody starts the thread. True if somebody had.
    pub fn claim_start(&self) -> bool {
        self.started.swap(true, AcqRel)
    }

    /// Starts the thread if it does not run yet. False if it cannot be made, or could not within the last second. Not
    /// from a signal handler, which may have interrupted the `malloc` that pthread_create calls: what was asked for
    /// then waits for the next who asks.
    pub fn start(&self) -> bool {
        if self.is_started() || handler::is_in_one() {
            return true;
        }
        if self.ending.load(Acquire) || now_ns() < self.retry_at.load(Acquire) {
            return false;
        }
        if self.claim_start() || (self.given.start)() {
            return true;
        }
        self.has_no_thread();
        false
    }

    /// The thread could not be made, or had to end at once.
    pub fn has_no_thread(&self) {
        self.retry_at.store(now_ns() + RETRY_AFTER, Release);
        self.started.store(false, Release);
    }

    /// Whether the thread is woken when something completes on a link to another host. False if it cannot be.
    pub fn subscribe(&self, completions: BorrowedFd<'_>, token: u64, on: bool) -> bool {
        // Taken out, not only muted: the kernel would still wake the thread for each event, and then let it sleep on.
        if !on {
            self.forget(completions);
            return true;
        }
        let token = kernel::EventData::new_u64(token);
        let added = kernel::add(&self.epoll, completions, token, kernel::EventFlags::IN);
        matches!(added, Ok(()) | Err(Errno::EXIST))
    }

    /// The thread does not hear of this descriptor any more.
    pub fn forget(&self, fd: BorrowedFd<'_>) {
        let _ = kernel::delete(&self.epoll, fd);
    }

    /// Whether there is nothing in it. For the thread, as the next.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Puts all that is in it behind what is in `to`, the oldest first.
    pub fn take_all(&self, to: &mut VecDeque<Command>) {
        self.queue.take_all(to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_thread_nothing_is_queued() {
        static TRIED: AtomicU32 = AtomicU32::new(0);
        let start = || TRIED.fetch_add(1, AcqRel) == 2;
        let mailbox = Mailbox::new(Thread { wake: || (), start }).unwrap();
        for (tried, is_taken) in [(1, false), (2, false), (3, true)] {
            assert_eq!(mailbox.submit(Command::Grown), is_taken);
            assert_eq!(mailbox.is_empty(), !is_taken);
            assert_eq!(mailbox.submit(Command::Grown), is_taken);
            assert_eq!(TRIED.load(Acquire), tried, "not again within a second");
            mailbox.retry_at.store(0, Release);
        }
    }
}
