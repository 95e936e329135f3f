//! The service thread's mailbox: calls of the program leave [`Command`]s here, and the thread carries them out
//! (`service`). The thread's code is in a layer far above this one, which must not import it. So a command names
//! sockets and links by numbers, and the mailbox is given the function that starts the thread. The mailbox also records
//! whether the thread runs, and has the epoll set that the thread sleeps on.
//!
//! Two kinds of work for the thread are here too: the one-time [`Offers`] of links, and the [`Remains`] of connections
//! that the program has closed before TCP could end them.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize};

use rdmasock_core::ids::{Cookie, InstanceId};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::stream::connection::{Awaited, Task};
use rdmasock_core::sync::{Published, Request};
use rdmasock_core::wire::LinkOffer;
use rustix::event::epoll as kernel;
use rustix::io::Errno;

use crate::config::verbs::{Dialled, Pair};
use crate::objects::library::Library;
use crate::objects::waiters::SERVICE;
use crate::signals::handler;
use crate::sys::time::now_ns;

/// Time after a failure before the next attempt to start the thread, ns.
const RETRY_AFTER: u64 = 1_000_000_000;

/// Kinds of events in the service thread's epoll set: the upper 8 bits of an event's data.
pub(crate) mod kind {
    pub(crate) const DOORBELL: u64 = 0;
    pub(crate) const INSTANCE: u64 = 1;
    pub(crate) const NAME: u64 = 2;
    pub(crate) const CHANNEL: u64 = 3;
    pub(crate) const ANCHOR: u64 = 4;
    pub(crate) const LINGER: u64 = 5;
    pub(crate) const ACCEPTOR: u64 = 6;
    pub(crate) const PAIR_STATE: u64 = 7;
    pub(crate) const COMPLETION: u64 = 8;
    pub(crate) const CONTROL: u64 = 9;
    pub(crate) const HOST: u64 = 10;
    pub(crate) const APART: u64 = 11;
}

/// Returns the data of an event: `kind` in the upper 8 bits, the lower 56 bits of `id` in the others.
pub(crate) fn tag(kind: u64, id: u64) -> u64 {
    kind << 56 | id & 0x00ff_ffff_ffff_ffff
}

/// The mailbox of an instance's service thread.
pub(crate) struct Mailbox {
    /// The commands. The thread alone takes them out.
    pub queue: Queue,
    /// Makes the thread. False if that fails (RLIMIT_NPROC, a pids cgroup, no memory).
    make: fn() -> bool,
    started: AtomicBool,
    /// The time from which on another attempt to make the thread may follow a failed one, monotonic ns.
    retry_at: AtomicU64,
    /// The thread's id (gettid(2)), once it runs; 0 before.
    pub thread: AtomicI32,
    /// Asks the thread to end.
    pub ending: AtomicBool,
    /// Asks the thread to end, and to keep its state for the next thread.
    pub pausing: AtomicBool,
    /// Asks the thread to send, after a delay, the wake-ups of peers that MSG_MORE and TCP_CORK hold back.
    pub delaying: Request,
    /// Asks the thread to maintain the links to other hosts.
    pub maintaining: Request,
    /// How many times completions of some link to another host have begun again to wake the thread; wraps.
    pub taken_back: Published<AtomicU32>,
    /// The epoll set that the thread sleeps on.
    pub epoll: PrivateFd,
}

impl Mailbox {
    /// Makes a mailbox whose thread is not started yet; `make` is to start it. Fails with the errno of
    /// epoll_create1(2).
    pub(crate) fn new(make: fn() -> bool) -> Result<Self, Errno> {
        let epoll = PrivateFd::open(|| kernel::create(kernel::CreateFlags::CLOEXEC))?;
        Ok(Self {
            queue: Queue::default(),
            make,
            started: AtomicBool::new(false),
            retry_at: AtomicU64::new(0),
            thread: AtomicI32::new(0),
            ending: AtomicBool::new(false),
            pausing: AtomicBool::new(false),
            delaying: Request::default(),
            maintaining: Request::default(),
            taken_back: Published::default(),
            epoll,
        })
    }

    /// Queues a command and wakes the thread. Never waits, also in a signal handler that has interrupted this function.
    /// False if there is no thread and none can be made now: the command is dropped.
    pub(crate) fn submit(&self, command: Command) -> bool {
        let is_there = self.start();
        if is_there {
            self.queue.push(command);
            Library::get().waiters.ring_if_sleeping(SERVICE);
        }
        is_there
    }

    /// Has the thread send, after a delay, the wake-ups of peers that MSG_MORE and TCP_CORK hold back. To be called
    /// when a send begins to hold a wake-up back.
    #[inline]
    pub(crate) fn delay_wake(&self) {
        if self.delaying.ask() && !self.submit(Command::DelayedWakes) {
            // `begin` clears the request, so the next call asks again.
            self.delaying.begin();
        }
    }

    /// Has the thread maintain the links to other hosts after a delay. The thread then sends the readers' positions
    /// (heads) that are owed on these links, and decides which threads are woken by completions.
    #[inline]
    pub(crate) fn maintain_later(&self) {
        if self.maintaining.ask() && !self.submit(Command::Maintain) {
            // `begin` clears the request, so the next call asks again.
            self.maintaining.begin();
        }
    }

    /// Returns whether the thread was started, or was marked as started by [`Self::claim_start`].
    pub(crate) fn is_started(&self) -> bool {
        self.started.load(Acquire)
    }

    /// Marks the thread as started, so that no call starts it. True if it was marked already.
    pub(crate) fn claim_start(&self) -> bool {
        self.started.swap(true, AcqRel)
    }

    /// Starts the thread if it does not run yet. False if it cannot be made, could not be made within the last second,
    /// or is to end. In a signal handler the thread is not started, since the handler may have interrupted the `malloc`
    /// that pthread_create calls. The result is true there: a queued command waits for the next call that starts the
    /// thread.
    pub(crate) fn start(&self) -> bool {
        if self.is_started() || handler::is_in_one() {
            return true;
        }
        if self.ending.load(Acquire) || now_ns() < self.retry_at.load(Acquire) {
            return false;
        }
        if self.claim_start() || (self.make)() {
            return true;
        }
        self.has_no_thread();
        false
    }

    /// Notes that the thread could not be made, or had to end at once. The next attempt follows after `RETRY_AFTER`.
    pub(crate) fn has_no_thread(&self) {
        self.retry_at.store(now_ns() + RETRY_AFTER, Release);
        self.started.store(false, Release);
    }

    /// Subscribes the thread to the completions of a link to another host if `on`, and else unsubscribes it.
    /// `completions` is the completion fd, `token` the data of its events. False if the fd could not be added to the
    /// epoll set.
    pub(crate) fn subscribe(&self, completions: BorrowedFd<'_>, token: u64, on: bool) -> bool {
        // The fd is removed from the set, and not only registered without events. The kernel would wake the thread at
        // each event of such an fd, and then let it sleep on.
        if !on {
            self.forget(completions);
            return true;
        }
        let token = kernel::EventData::new_u64(token);
        let added = kernel::add(&self.epoll, completions, token, kernel::EventFlags::IN);
        matches!(added, Ok(()) | Err(Errno::EXIST))
    }

    /// Removes `fd` from the thread's epoll set.
    pub(crate) fn forget(&self, fd: BorrowedFd<'_>) {
        let _ = kernel::delete(&self.epoll, fd);
    }
}

/// Names a connection by its object and the object's generation. The object may have become another connection by the
/// time the service thread reads the command, and then has another generation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ref {
    /// The slot of the connection's object.
    pub slot: u32,
    /// The generation of the object, which changes with each connection that it becomes.
    pub generation: u64,
}

/// What the service thread is to do. A connection is named by a `Ref`, a link by its slot or serial.
pub(crate) enum Command {
    /// Ask the peer for a promotion: the connection has reached the threshold (connector).
    Promote(Ref),
    /// Do a task that core's connection has asked for.
    Do(Ref, Task),
    /// Answer the peer's ASK, which has waited until the program used or closed the connection.
    Used(Ref),
    /// Find or make a link to the instance, by the peer's offer if there is one. A handshake of the connection needs
    /// the link.
    NeedLink(Ref, InstanceId, Option<LinkOffer>),
    /// The thread that connects to another host's instance has ended with this result.
    Dialled(InstanceId, Result<Dialled, Errno>),
    /// Make a bulk queue pair, which carries direct transfers, for the link in this slot: a call wants one.
    WantBulk(u32),
    /// The thread that connects a bulk queue pair, for the link with this serial, has ended with this result.
    BulkDialled(u64, Result<Pair, Errno>),
    /// Send the link's queued messages when its side channel has room again. Break the link off if too many are queued,
    /// since the peer does not read them.
    Outbox(u32),
    /// Take the link of the socket's stream down: the peer broke the protocol in the stream's memory.
    Violation(Ref),
    /// Free the links that are down and that no stream, producer or `Pin` holds any more.
    FreeLinks,
    /// Check whether bytes move on the link. The peer has queued many of its streams as ready, and nearly all of them
    /// were not.
    Vain(u32),
    /// Answer on the names of all listeners: one has accepted its first connection in this process.
    Listen,
    /// Keep the anchor of a closed connection until its last bytes are sent, and until the peer's markers that may be
    /// on their way have come.
    Linger(Remains),
    /// Shrink rings when they are idle, and read the memory limits again: a ring has grown, or was refused memory.
    Grown,
    /// A sender finds no room. If the reader stands still, ask the peer for a larger ring. If that does not help and
    /// TCP_USER_TIMEOUT bounds the wait, take the stream back to TCP.
    Blocked(Ref),
    /// Check the fd of the anchor, which seems to stand for another file.
    Lost(Ref),
    /// Send, after a delay, the wake-ups of peers that MSG_MORE and TCP_CORK hold back.
    DelayedWakes,
    /// Maintain the links to other hosts after a delay.
    Maintain,
}

struct Node {
    command: Command,
    before: *mut Node,
}

/// A queue of commands, in order. [`Self::push`] never waits and takes no lock, since it may run in a signal handler
/// that has interrupted another `push`. The service thread alone takes commands out, always all of them.
///
/// After [`Self::push`] its caller checks whether the service thread sleeps. The service thread announces its sleep,
/// and then checks whether a command was added. [`Published`] makes one of the two see the other.
#[derive(Default)]
pub(crate) struct Queue {
    /// The node that was added last; null if the queue is empty.
    last: Published<AtomicPtr<Node>>,
}

impl Queue {
    fn push(&self, command: Command) {
        let mut before = std::ptr::null_mut();
        let node = Box::into_raw(Box::new(Node { command, before }));
        while let Err(now) = self.last.exchange(before, node) {
            before = now;
            // SAFETY: the exchange has failed, so the node is not in the queue, and this call alone has it.
            unsafe { (*node).before = before };
        }
    }

    /// Returns whether no command is queued.
    pub(crate) fn is_empty(&self) -> bool {
        self.last.look().is_null()
    }

    /// Moves all commands to the end of `to`, the oldest first.
    pub(crate) fn take_all(&self, to: &mut VecDeque<Command>) {
        let begin = to.len();
        let mut next = self.last.take();
        while !next.is_null() {
            // SAFETY: `push` has made each node by `Box::into_raw`. `take` has removed the whole chain from the queue,
            // so no other call frees it.
            let node = unsafe { *Box::from_raw(next) };
            next = node.before;
            to.insert(begin, node.command);
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.take_all(&mut VecDeque::new());
    }
}

/// A link that another instance may ask for once.
struct Offer {
    cookie: Cookie,
    /// The instance that may present the offer.
    peer: InstanceId,
    /// When the offer expires, monotonic ns.
    until: u64,
}

/// The open offers, and the addresses at which other hosts can make links. Calls of the program add offers, and the
/// service thread redeems them. There are few offers: about as many as links that are being made.
#[derive(Default)]
pub(crate) struct Offers {
    made: Lock<Vec<Offer>>,
    /// Addresses at which other hosts can make links to this one.
    pub places: Lock<Vec<SocketAddr>>,
}

impl Offers {
    /// Makes an offer for `peer` that expires after `life` ns, and returns its cookie. `None` if the kernel gives no
    /// random bytes, or if a signal handler makes the call and has interrupted another use of the list.
    pub(crate) fn make(&self, peer: InstanceId, life: u64) -> Option<Cookie> {
        let cookie = Cookie::random().ok()?;
        let until = now_ns() + life;
        self.made.lock()?.push(Offer { cookie, peer, until });
        Some(cookie)
    }

    /// Returns whether `cookie` is valid: made for `peer`, not expired, not yet redeemed.
    pub(crate) fn has(&self, cookie: &Cookie, peer: &InstanceId) -> bool {
        self.position(cookie, peer, |_, _| ())
    }

    /// Redeems a cookie, which is then no longer valid. False if it was not valid.
    pub(crate) fn redeem(&self, cookie: &Cookie, peer: &InstanceId) -> bool {
        self.position(cookie, peer, |offers, at| {
            offers.swap_remove(at);
        })
    }

    /// Returns the address and port at which this host accepts links to its address `local`; `None` if it accepts none
    /// there.
    pub(crate) fn place_at(&self, local: IpAddr) -> Option<SocketAddr> {
        let places = self.places.lock()?;
        places.iter().find(|a| a.ip() == local).copied()
    }

    fn position(&self, cookie: &Cookie, peer: &InstanceId, found: impl FnOnce(&mut Vec<Offer>, usize)) -> bool {
        let Some(mut offers) = self.made.lock() else {
            return false;
        };
        let now = now_ns();
        offers.retain(|o| o.until > now);
        let at = offers.iter().position(|o| o.peer == *peer && o.cookie.matches(cookie));
        at.map(|at| found(&mut offers, at)).is_some()
    }
}

/// Number of [`Remains`] of this process.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A connection that the program has closed and that TCP cannot end yet: bytes or markers have to be sent before this
/// end's FIN, or markers may still come from the peer. The service thread finishes the connection (`service::watch`).
/// The end of the process waits for that, for a bounded time.
pub(crate) struct Remains {
    /// A private fd of the kernel's socket. It is closed when this value is dropped.
    pub fd: PrivateFd,
    /// The markers that may still come.
    pub awaited: Option<Awaited>,
    /// The bytes that are still to be sent.
    pub unsent: Vec<u8>,
}

impl Remains {
    /// Makes the value for a connection that is being closed, and counts it.
    pub(crate) fn new(fd: PrivateFd, awaited: Option<Awaited>, unsent: Vec<u8>) -> Self {
        COUNT.fetch_add(1, AcqRel);
        Self { fd, awaited, unsent }
    }

    /// Returns whether the awaited markers have to come before this end's FIN.
    pub(crate) fn ends_last(&self) -> bool {
        self.awaited.as_ref().is_some_and(|awaited| awaited.precede_end)
    }
}

impl Drop for Remains {
    fn drop(&mut self) {
        let _ = COUNT.fetch_update(AcqRel, Acquire, |n| n.checked_sub(1));
    }
}

/// Returns whether this process has any `Remains`.
pub(crate) fn are_any() -> bool {
    COUNT.load(Acquire) != 0
}

/// Sets the number of `Remains` to 0 in a fork child, which has none.
pub(crate) fn after_fork() {
    COUNT.store(0, Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_thread_nothing_is_queued() {
        crate::service::tests::without_thread();
        static TRIED: AtomicU32 = AtomicU32::new(0);
        let start = || TRIED.fetch_add(1, AcqRel) == 2;
        let mailbox = Mailbox::new(start).unwrap();
        for (tried, is_taken) in [(1, false), (2, false), (3, true)] {
            assert_eq!(mailbox.submit(Command::Grown), is_taken);
            assert_eq!(mailbox.queue.is_empty(), !is_taken);
            assert_eq!(mailbox.submit(Command::Grown), is_taken);
            assert_eq!(TRIED.load(Acquire), tried, "not again within a second");
            mailbox.retry_at.store(0, Release);
        }
    }

    #[test]
    fn what_threads_add_comes_in_each_ones_order() {
        const EACH: u64 = 1000;
        let queue = Queue::default();
        let command = |from: u64, i: u64| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&from.to_le_bytes());
            id[8..].copy_from_slice(&i.to_le_bytes());
            Command::Dialled(InstanceId::from_bytes(id), Err(Errno::IO))
        };
        let mut got = VecDeque::new();
        std::thread::scope(|s| {
            for from in 0..3 {
                let queue = &queue;
                s.spawn(move || (0..EACH).for_each(|i| queue.push(command(from, i))));
            }
            while got.len() < 3 * EACH as usize {
                queue.take_all(&mut got);
            }
        });
        assert!(queue.is_empty());
        let mut next = [0; 3];
        for command in got {
            let Command::Dialled(id, _) = command else {
                panic!("another command");
            };
            let (from, i) = id.as_bytes().split_at(8);
            let at = usize::from(from[0]);
            assert_eq!(i, u64::to_le_bytes(next[at]));
            next[at] += 1;
        }
    }

    #[test]
    fn an_offer_is_good_once_for_whom_it_was_made_in_time() {
        let offers = Offers::default();
        let [mine, other] = [1, 2].map(|n| InstanceId::from_bytes([n; 16]));
        let cookie = offers.make(mine, u64::MAX / 2).unwrap();
        let late = offers.make(mine, 0).unwrap();
        assert!(!offers.has(&late, &mine) && !offers.redeem(&late, &mine));
        assert!(!offers.has(&cookie, &other) && !offers.redeem(&cookie, &other));
        assert!(offers.has(&cookie, &mine) && offers.redeem(&cookie, &mine));
        assert!(!offers.has(&cookie, &mine) && !offers.redeem(&cookie, &mine));
    }
}
