//! The end of a link to another host: the engine over the verbs plugin's queue pair, and how it reaches the waiters of
//! this process. Wake-ups by completions are in `remote/sleepers.rs`, transfers past the rings in
//! `remote/past_rings.rs`.

mod answers;
mod own_looks;
mod past_rings;
pub mod sleepers;

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};

use rdmasock_core::fabric::layout::{Layout, MAX_DATA_BYTES};
use rdmasock_core::fabric::plugin::Info;
use rdmasock_core::fabric::pollers::Pollers;
use rdmasock_core::fabric::remote::qp::{Limits, QueuePair, Region};
use rdmasock_core::fabric::remote::{End, Fault, Local, Tuning};
use rdmasock_core::fabric::shm::Side;
use rdmasock_core::fabric::waiter::{MAX_WAITERS, WaiterId};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::lock::Lock;
use rdmasock_core::stats::{Event, Reason};
use rdmasock_core::sync::{Presence, Published, SleepFlag};
use rdmasock_core::wire::{Introduction, Message};

use self::answers::Answers;
use self::own_looks::OwnLooks;
use super::news::{self, News};
use super::watchers::Watchers;
use crate::config::arenas::Device;
use crate::config::verbs::{Pair, State};
use crate::config::ways::{self, Costs};
use crate::config::{ZeroCopy, config};
use crate::objects::library::Library;

/// The waiters of this process, as the engine wakes them.
pub struct Here {
    news: &'static News,
}

impl Local for Here {
    fn flag(&self, waiter: WaiterId) -> Option<&SleepFlag> {
        Library::get().waiters.flag(waiter)
    }

    fn ring(&self, waiter: WaiterId) {
        Library::get().waiters.ring(waiter);
    }

    fn on_queued(&self, waiter: WaiterId) {
        self.news.on_queued(waiter);
    }

    fn armed(&self) -> &AtomicBool {
        self.news.armed()
    }

    fn settle_later(&self) {
        Library::get().service.maintain_later();
    }

    fn on_lent(&self, bytes: u64) {
        Library::get().stats.count_many(Event::RendezvousSent, bytes);
    }

    fn on_taken(&self, bytes: u64) {
        Library::get().stats.count_many(Event::RendezvousReceived, bytes);
    }

    fn on_recalled(&self) {
        Library::get().stats.count(Event::RendezvousRecalled);
    }
}

impl Device for Remote {
    fn deregister(&self, region: Region) {
        self.with_pair(|pair| pair.deregister(region));
    }
}

/// Returns whether the address space is limited (RLIMIT_AS). The program then needs the addresses itself.
pub fn has_few_addresses() -> bool {
    rustix::process::getrlimit(rustix::process::Resource::As)
        .current
        .is_some()
}

/// Returns the bytes of addresses for the send buffers of a link whose arenas have `arena_bytes` each; 0 if the address
/// space is limited. They bound the buffers' memory too, since registered memory is not given back before the link is
/// over.
fn buffers(arena_bytes: u64) -> u64 {
    if has_few_addresses() {
        return 0;
    }
    (arena_bytes / 4).min(MAX_DATA_BYTES - arena_bytes)
}

/// Returns whether the kernel copies pages that a device accesses for a fork child, as Linux does from 5.12 on. Before,
/// the child could get the program's page, and the program a new page that the device does not access.
fn copies_what_is_pinned() -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release
        .split(['.', '-'])
        .map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(5), Some(12))
}

/// The properties of a link that its object keeps for its later links.
#[derive(PartialEq)]
pub(super) struct Terms {
    limits: Limits,
    tuning: Tuning,
    arena_bytes: u64,
    /// Both ends support direct transfers.
    is_direct: bool,
}

impl Terms {
    /// Returns the layouts of this end's arena and of the mirror: the picture of the peer's arena, then this end's send
    /// buffers. `None` if a size has no layout.
    fn layouts(&self) -> Option<[Layout; 2]> {
        let with_buffers = self.arena_bytes + self.tuning.buffers;
        Some([Layout::for_data(self.arena_bytes)?, Layout::for_data(with_buffers)?])
    }

    pub(super) fn of(pair: &Pair, arena_bytes: u64, other: &Introduction) -> Self {
        let limits = pair.limits();
        let mut tuning = Tuning::fit(&limits);
        tuning.buffers = buffers(arena_bytes);
        let zcopy = config().zcopy;
        let is_direct = other.is_direct && zcopy != ZeroCopy::Off && copies_what_is_pinned();
        tuning.direct_min = ways::least_piece(zcopy).min(1 << 30) as u32;
        Self {
            limits,
            tuning,
            arena_bytes,
            is_direct,
        }
    }
}

/// The end of a link to another host. Never freed, but used for one link after another, of the same [terms](Terms).
pub struct Remote {
    end: End<Pair, Here>,
    terms: Terms,
    /// The queue pair's descriptors, for its state and for completions.
    state_fd: AtomicI32,
    completion_fd: AtomicI32,
    /// The link is up: its queue pair may be used.
    up: Published<AtomicBool>,
    /// The data of the completion descriptor's events in the service thread's epoll set.
    token: AtomicU64,
    /// Threads that sleep on the completion descriptor in a call of their own, and threads that stand by to do so next.
    pollers: Pollers,
    /// Epoll sets whose kernel's sets have the completion descriptor.
    pub watchers: Watchers,
    /// Threads that may be using the queue pair or its descriptors.
    users: Presence,
    /// The queue pair is ended.
    is_ended: Published<AtomicBool>,
    /// Number of times that a thread has begun to poll; wraps.
    sleeps: AtomicU32,
    /// The sum of `sleeps` and the epoll sets' sleeps at the last [`maintain`](Self::maintain).
    sleeps_seen: AtomicU32,
    /// How often the program's threads check the link by themselves.
    own_looks: OwnLooks,
    /// Completions wake the service thread.
    is_subscribed: Published<AtomicBool>,
    /// Number of epoll sets that want the service thread to be woken by completions.
    left: Published<AtomicU32>,
    /// Held to change `is_subscribed`.
    subscribing: Lock<()>,
    /// The addresses from which and to which this end has connected, if it has.
    dialled: Lock<Option<(IpAddr, SocketAddr)>>,
    /// There is a bulk queue pair.
    has_bulk: AtomicBool,
    /// When a bulk queue pair was last asked for, monotonic ns.
    wished: AtomicU64,
    /// The measured costs of registering memory.
    pub costs: Costs,
    /// How long the peer's end takes to answer without its program.
    pub answers: Answers,
}

impl Remote {
    /// Makes an end over a connected queue pair. `None` without memory for it.
    pub(super) fn new(pair: Pair, terms: Terms) -> Option<Self> {
        let (mine, mirror) = (Side::anonymous().ok()?, Side::anonymous().ok()?);
        let layouts = terms.layouts()?;
        for (side, layout) in [&mine, &mirror].into_iter().zip(&layouts) {
            side.map_data(layout).ok()?;
        }
        let here = Here { news: news::new() };
        // SAFETY: the end is leaked with its link object, so it outlives its cursors. `Link::producer` asks for one
        // producer at a time for each vQPN of the peer.
        let end = unsafe { End::new(pair, mine, mirror, here, terms.tuning) }.ok()?;
        Some(Self {
            end,
            terms,
            state_fd: AtomicI32::new(-1),
            completion_fd: AtomicI32::new(-1),
            up: Published::default(),
            token: AtomicU64::new(0),
            pollers: Pollers::new(MAX_WAITERS),
            watchers: Watchers::new(),
            users: Presence::new(),
            is_ended: Published::from(true),
            sleeps: AtomicU32::new(0),
            sleeps_seen: AtomicU32::new(0),
            own_looks: OwnLooks::default(),
            is_subscribed: Published::from(true),
            left: Published::default(),
            subscribing: Lock::new(()),
            dialled: Lock::new(None),
            has_bulk: AtomicBool::new(false),
            wished: AtomicU64::new(0),
            costs: Costs::default(),
            answers: Answers::default(),
        })
    }

    /// Becomes the end over another connected queue pair, whose [terms](Terms) are the same. To be called on an end
    /// that was [released](Self::release). False, and `pair` stays the caller's, without memory for it or while a
    /// thread is about to leave the earlier link.
    pub(super) fn renew(&self, pair: &Pair) -> bool {
        let Some(layouts) = self.terms.layouts() else {
            return false;
        };
        let [mine, mirror] = self.end.sides();
        let is_mapped = mine.map_data(&layouts[0]).is_ok() && mirror.map_data(&layouts[1]).is_ok();
        let is_renewed = is_mapped && self.end.renew(|old| old.stand_for(pair));
        if !is_renewed {
            // SAFETY: no stream was opened on the end since its last release, so there is no cursor; it has no queue
            // pair either.
            unsafe { self.end.release() };
        }
        is_renewed
    }

    /// Returns whether the end can be [renewed](Self::renew) for a link of these terms.
    pub(super) fn fits(&self, terms: &Terms) -> bool {
        self.terms == *terms
    }

    /// Begins the link: from now on threads may use its queue pair.
    pub(super) fn begin(&self, info: &Info, dialled: Option<(IpAddr, SocketAddr)>) {
        self.state_fd.store(info.state_fd, Release);
        self.completion_fd.store(info.completion_fd, Release);
        if let Some(mut place) = self.dialled.lock() {
            *place = dialled;
        }
        self.is_subscribed.publish(true);
        self.has_bulk.store(false, Relaxed);
        self.wished.store(0, Relaxed);
        self.costs.reset();
        self.answers.reset();
        self.news().reset();
        self.is_ended.publish(false);
        self.up.publish(true);
    }

    pub fn end(&self) -> &End<Pair, Here> {
        &self.end
    }

    /// Returns the state that epoll sets check before each sleep.
    pub fn news(&self) -> &'static News {
        self.end.local().news
    }

    /// Returns the queue pair's descriptors, for its state and for completions; -1 before the first link.
    pub fn fds(&self) -> [c_int; 2] {
        [self.state_fd.load(Acquire), self.completion_fd.load(Acquire)]
    }

    /// Returns the state of the queue pair.
    pub fn state(&self) -> State {
        self.end.qp().state()
    }

    /// Takes in what has come, and sends what can be sent. True if something has come.
    #[inline]
    pub fn progress(&self) -> bool {
        self.end.progress().unwrap_or(false)
    }

    /// Arms the descriptor: the next completion makes it readable. True if something has come meanwhile.
    pub fn arm(&self) -> bool {
        self.end.arm().unwrap_or(false)
    }

    /// Takes the link down: the link carries nothing more, and no thread begins to sleep on its descriptor.
    pub(super) fn set_down(&self) {
        self.up.publish(false);
        // Taken in first: if TCP has been reset, the peer does not send these bytes again.
        self.end.take_in();
        self.end.set_down();
        self.drop_bulk();
        self.end.qp().disconnect();
    }

    /// Ends the queue pair of a link that is down. False if a thread may still use it or its descriptors.
    pub(super) fn retire(&self) -> bool {
        // Either this thread sees the user that `while_open` has counted in, or that user sees `is_ended`.
        self.is_ended.publish(true);
        let is_free = self.users.is_empty();
        if is_free {
            self.end.end_retired(drop);
            let library = Library::get();
            library.free_kept(library.arenas.forget(self));
            self.end.qp().destroy();
        } else {
            self.is_ended.publish(false);
        }
        is_free
    }

    /// Gives the memory of the link back once its queue pair is [ended](Self::retire). False if a thread is about to
    /// leave that memory.
    pub(super) fn release(&self) -> bool {
        // SAFETY: no cursor is left, since streams and producers pin the link until they have given up their cursors.
        // The caller has ended the queue pair by `retire`.
        unsafe { self.end.release() }
    }

    /// Calls `f` with the completion descriptor, if it is still open.
    pub fn while_open(&self, f: impl FnOnce(BorrowedFd<'_>)) {
        self.users.enter();
        if !self.is_ended.look() {
            f(self.fd());
        }
        self.users.leave();
    }

    /// Calls `f` with the queue pair; `None`, without a call, if it is ended.
    pub fn with_pair<R>(&self, f: impl FnOnce(&Pair) -> R) -> Option<R> {
        self.users.enter();
        let result = (!self.is_ended.look()).then(|| f(self.end.qp()));
        self.users.leave();
        result
    }

    /// Keeps the queue pair from being ended until [`let_pair_go`](Self::let_pair_go). False if it is ended already.
    pub fn hold_pair(&self) -> bool {
        self.users.enter();
        let is_there = !self.is_ended.look();
        if !is_there {
            self.users.leave();
        }
        is_there
    }

    /// Undoes one [`hold_pair`](Self::hold_pair).
    pub fn let_pair_go(&self) {
        self.users.leave();
    }

    /// Returns the addresses from which and to which this end has connected; `None` if the peer has connected.
    pub fn dialled(&self) -> Option<(IpAddr, SocketAddr)> {
        self.dialled.lock().and_then(|place| *place)
    }

    /// Returns whether the peer has all bytes committed to its stream `theirs`. If not, the peer is asked, and its
    /// answer notifies the service thread about the stream.
    pub fn is_confirmed(&self, theirs: Vqpn) -> bool {
        self.end.unconfirmed(theirs) == Some(0)
    }

    /// Returns how many bytes committed to the peer's stream `theirs` the peer is not known to have. If there are any,
    /// the peer is asked.
    pub fn unconfirmed(&self, theirs: Vqpn) -> u64 {
        self.end.unconfirmed(theirs).unwrap_or(0)
    }

    /// Returns how many bytes committed to the peer's stream `theirs` are not sent yet, since the peer's ring has no
    /// room.
    pub fn unsent(&self, theirs: Vqpn) -> u64 {
        self.end.unsent(theirs)
    }

    /// Returns whether the service thread has to check, about once a second, that the peer's device still answers.
    pub fn is_watched(&self) -> bool {
        self.end.is_watched()
    }

    /// Returns whether anything has come from the peer.
    pub fn has_received(&self) -> bool {
        self.end.counts().received > 0
    }

    /// Notes a doubt about the link, since the peer reports that its end has failed. The peer's device is then asked
    /// even if nothing is posted.
    pub fn doubt(&self) {
        self.end.doubt();
    }

    /// Checks that the peer's device still answers. `now` in monotonic ns.
    pub fn tick(&self, now: u64) {
        self.end.tick(now);
    }

    /// Returns the next message on the side channel; `None` if there is none.
    pub fn take_message(&self) -> Option<Message> {
        self.end.take_message()
    }

    /// Returns whether the link cannot be used further. No more bytes come from the peer then.
    pub fn is_down(&self) -> bool {
        self.end.is_down()
    }

    /// Returns why the link cannot be used further; `None` if it can. For the service thread, which is not notified
    /// again.
    pub fn fault(&self) -> Option<Reason> {
        self.end.fault().map(|fault| match fault {
            Fault::Violation(_) => Reason::Violation,
            Fault::Silent => Reason::LinkSilent,
            _ => Reason::LinkFailed,
        })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the queue pair. `retire` ends that only when no stream or producer
        // pins the link and `users` is empty. Callers are counted in `users`, or are the service thread, which alone
        // calls `retire`.
        unsafe { BorrowedFd::borrow_raw(self.completion_fd.load(Acquire)) }
    }
}
