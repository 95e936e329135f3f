//! The service thread's mailbox: calls of the program leave [`Command`]s here, and the thread carries them out
//! (`service`). The thread lies in a layer far above this one. So a command names sockets and links by numbers, and the
//! mailbox is given the functions that start and wake the thread ([`Thread`]). The mailbox also says whether the thread
//! runs, and has the epoll set that the thread sleeps on.

mod command;
mod queue;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};

pub use command::{Command, Ref};
use queue::Queue;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::sync::{Published, Request};
use rustix::event::epoll as kernel;
use rustix::io::Errno;

use crate::signals::handler;
use crate::sys::time::now_ns;

/// Time after a failure before the next attempt to start the thread, ns.
const RETRY_AFTER: u64 = 1_000_000_000;

/// Kinds of events in the service thread's epoll set: the upper 8 bits of an event's data.
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

/// Returns the data of an event: `kind` in the upper 8 bits, the lower 56 bits of `id` in the others.
pub fn tag(kind: u64, id: u64) -> u64 {
    kind << 56 | id & 0x00ff_ffff_ffff_ffff
}

/// The functions by which a mailbox starts and wakes the thread that empties it.
#[derive(Clone, Copy)]
pub struct Thread {
    /// Wakes the thread if it sleeps.
    pub wake: fn(),
    /// Makes the thread. False if that fails (RLIMIT_NPROC, a pids cgroup, no memory).
    pub start: fn() -> bool,
}

/// The mailbox of an instance's service thread.
pub struct Mailbox {
    queue: Queue,
    given: Thread,
    started: AtomicBool,
    /// When another attempt to make the thread may follow one that failed, monotonic ns.
    retry_at: AtomicU64,
    /// The thread's id (gettid(2)), once it runs; 0 before.
    pub thread: AtomicI32,
    /// Asks the thread to end.
    pub ending: AtomicBool,
    /// Asks the thread to end, and to keep its state for the next thread.
    pub pausing: AtomicBool,
    /// Asks the thread to send the wake-ups that senders hold back.
    pub delaying: Request,
    /// Asks the thread to maintain the links to other hosts.
    pub maintaining: Request,
    /// How many times the thread was subscribed again to the completions of a link to another host.
    pub taken_back: Published<AtomicU32>,
    /// The epoll set that the thread sleeps on.
    pub epoll: PrivateFd,
}

impl Mailbox {
    /// Makes a mailbox whose thread is not started. Fails with the errno of epoll_create1(2).
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

    /// Queues a command and wakes the thread. Never waits, also in a signal handler that has interrupted this function.
    /// False if there is no thread and none can be made now: the command is dropped.
    pub fn submit(&self, command: Command) -> bool {
        let is_there = self.start();
        if is_there {
            self.queue.push(command);
            (self.given.wake)();
        }
        is_there
    }

    /// Has the thread send, after a delay, the wake-ups that senders hold back. To be called by a sender that begins to
    /// hold one back.
    #[inline]
    pub fn delay_wake(&self) {
        if self.delaying.ask() && !self.submit(Command::DelayedWakes) {
            // The next call asks again.
            self.delaying.begin();
        }
    }

    /// Has the thread maintain the links to other hosts after a delay. It then sends what is owed on them, and decides
    /// which threads are woken by completions.
    #[inline]
    pub fn maintain_later(&self) {
        if self.maintaining.ask() && !self.submit(Command::Maintain) {
            // The next call asks again.
            self.maintaining.begin();
        }
    }

    /// Returns whether the thread runs, or was marked by [`Self::claim_start`].
    pub fn is_started(&self) -> bool {
        self.started.load(Acquire)
    }

    /// Marks the thread as started, so that no call starts it. True if it was marked already.
    pub fn claim_start(&self) -> bool {
        self.started.swap(true, AcqRel)
    }

    /// Starts the thread if it does not run yet. False if it cannot be made, could not be made within the last second,
    /// or is to end. In a signal handler nothing is started and the result is true, since the handler may have
    /// interrupted the `malloc` that pthread_create calls. A command queued there waits for the next call that starts
    /// the thread.
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

    /// Notes that the thread could not be made, or had to end at once. The next attempt follows after `RETRY_AFTER`.
    pub fn has_no_thread(&self) {
        self.retry_at.store(now_ns() + RETRY_AFTER, Release);
        self.started.store(false, Release);
    }

    /// Subscribes the thread to the completions of a link to another host if `on`, and else unsubscribes it.
    /// `completions` is the completion fd, `token` the data of its events. False if the fd could not be added to the
    /// epoll set.
    pub fn subscribe(&self, completions: BorrowedFd<'_>, token: u64, on: bool) -> bool {
        // The fd is removed, not only muted. At each event of a muted fd the kernel would still wake the thread, and
        // then let it sleep on.
        if !on {
            self.forget(completions);
            return true;
        }
        let token = kernel::EventData::new_u64(token);
        let added = kernel::add(&self.epoll, completions, token, kernel::EventFlags::IN);
        matches!(added, Ok(()) | Err(Errno::EXIST))
    }

    /// Removes `fd` from the thread's epoll set.
    pub fn forget(&self, fd: BorrowedFd<'_>) {
        let _ = kernel::delete(&self.epoll, fd);
    }

    /// Returns whether no command is queued. For the service thread only.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Moves all queued commands to the end of `to`, the oldest first. For the service thread only.
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
