//! This process's end of a link to another host, over a queue pair of the verbs plugin. Core's engine (`End`) moves the
//! bytes. This file has the calls by which the engine reaches the waiters of this process. It also decides which
//! threads the queue pair's completions wake, and whether a transfer is *direct*: past the rings, between the programs'
//! memory. Direct transfers use a second queue pair of the link, the *bulk* queue pair.
//!
//! If the queue pair is *armed*, its next completion makes the *completion descriptor* readable. A thread that sleeps
//! for the link in a blocking call, poll or select *polls* the descriptor, or *stands by* and is woken by a thread that
//! polls. A thread on an epoll set sleeps on the kernel's set, which has the descriptor.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};

use rdmasock_core::fabric::layout::{Layout, MAX_DATA_BYTES};
use rdmasock_core::fabric::plugin::Info;
use rdmasock_core::fabric::remote::qp::{Limits, QueuePair, Region};
use rdmasock_core::fabric::remote::{End, Fault, Local, Tuning};
use rdmasock_core::fabric::shm::Side;
use rdmasock_core::fabric::waiter::{Left, MAX_WAITERS, Pollers, WaiterId};
use rdmasock_core::lock::Lock;
use rdmasock_core::stats::{Event, Reason};
use rdmasock_core::sync::{Presence, Published, SleepFlag};
use rdmasock_core::wire::Introduction;

use crate::config::arenas::Device;
use crate::config::verbs::Pair;
use crate::config::ways::Costs;
use crate::config::{ZeroCopy, config, ways};
use crate::objects::library::Library;
use crate::objects::link::{self, News, Watchers};
use crate::objects::mailbox::Command;

/// The calls by which the engine reaches the waiters of this process.
impl Local for &'static News {
    fn flag(&self, waiter: WaiterId) -> Option<&SleepFlag> {
        Library::get().waiters.flag(waiter)
    }

    fn ring(&self, waiter: WaiterId) {
        Library::get().waiters.ring(waiter);
    }

    fn on_queued(&self, waiter: WaiterId) {
        News::on_queued(self, waiter);
    }

    fn armed(&self) -> &AtomicBool {
        &self.armed
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
}

impl Device for Remote {
    fn deregister(&self, region: Region) {
        self.with_pair(|pair| pair.deregister(region));
    }
}

/// Returns whether the address space is limited (RLIMIT_AS). The program then needs the addresses itself.
pub(crate) fn has_few_addresses() -> bool {
    rustix::process::getrlimit(rustix::process::Resource::As)
        .current
        .is_some()
}

/// Returns whether a fork gives the child its own copy of each page that a device accesses, as Linux does from 5.12 on.
/// On an older kernel the child could get the original page, and the program a copy that the device does not access.
fn copies_what_is_pinned() -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(5), Some(12))
}

/// The properties of a link that its object cannot change. The object is reused only for links with equal terms.
#[derive(PartialEq)]
pub(super) struct Terms {
    limits: Limits,
    tuning: Tuning,
    arena_bytes: u64,
    /// Whether both ends support direct transfers, which go past the rings.
    is_direct: bool,
}

impl Terms {
    /// Returns the layouts of this end's arena and of the mirror. The mirror has the picture of the peer's arena, and
    /// behind it this end's send buffers. `None` if a size has no layout.
    fn layouts(&self) -> Option<[Layout; 2]> {
        let with_buffers = self.arena_bytes + self.tuning.buffers;
        Some([Layout::for_data(self.arena_bytes)?, Layout::for_data(with_buffers)?])
    }

    pub(super) fn of(pair: &Pair, arena_bytes: u64, other: &Introduction) -> Self {
        let limits = pair.limits();
        let mut tuning = Tuning::fit(&limits);
        // The send buffers get this many bytes of addresses. The number bounds the buffers' memory too, since
        // registered memory is not given back before the link ends.
        let buffers = (arena_bytes / 4).min(MAX_DATA_BYTES - arena_bytes);
        tuning.buffers = if has_few_addresses() { 0 } else { buffers };
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

/// The end of a link to another host. Never freed, but reused for one link after another with equal [terms](Terms).
pub struct Remote {
    end: End<Pair, &'static News>,
    pub(super) terms: Terms,
    /// The queue pair's descriptors, for its state and for completions.
    state_fd: AtomicI32,
    completion_fd: AtomicI32,
    /// Whether the link is up, so that its queue pair may be used.
    up: Published<AtomicBool>,
    /// The data of the completion descriptor's events in the service thread's epoll set.
    token: AtomicU64,
    /// Threads that sleep for the link in a blocking call, poll or select: those that poll the completion descriptor,
    /// and those that stand by to poll it next.
    pollers: Pollers,
    /// Epoll sets whose kernel's sets have the completion descriptor.
    pub watchers: Watchers,
    /// Threads that may be using the queue pair or its descriptors.
    users: Presence,
    /// Whether the queue pair is ended.
    is_ended: Published<AtomicBool>,
    /// Number of times that a thread has begun to poll the completion descriptor (`in_turn`); wraps.
    sleeps: AtomicU32,
    /// The sum of `sleeps` and the epoll sets' sleeps at the last [`maintain`](Self::maintain).
    sleeps_seen: AtomicU32,
    /// How often the program's threads check the link by themselves.
    own_looks: OwnLooks,
    /// Whether completions wake the service thread.
    is_subscribed: Published<AtomicBool>,
    /// Number of epoll sets that want the service thread to be woken by completions.
    left: Published<AtomicU32>,
    /// Held to change `is_subscribed`.
    subscribing: Lock<()>,
    /// The local and the remote address if this end has connected; `None` if the peer has.
    dialled: Lock<Option<(IpAddr, SocketAddr)>>,
    /// Whether the link has a bulk queue pair, which carries direct transfers.
    has_bulk: AtomicBool,
    /// When a bulk queue pair was last asked for, monotonic ns.
    wished: AtomicU64,
    /// The measured costs of registering memory.
    pub costs: Costs,
}

impl Remote {
    /// Makes an end over a connected queue pair. `None` without memory for it.
    pub(super) fn new(pair: Pair, terms: Terms) -> Option<Self> {
        let (mine, mirror) = (Side::anonymous().ok()?, Side::anonymous().ok()?);
        let layouts = terms.layouts()?;
        for (side, layout) in [&mine, &mirror].into_iter().zip(&layouts) {
            side.map_data(layout).ok()?;
        }
        // SAFETY: the end is leaked with its link object, so it outlives its cursors. `Link::producer` asks for one
        // producer at a time for each vQPN of the peer.
        let end = unsafe { End::new(pair, mine, mirror, link::new(), terms.tuning) }.ok()?;
        Some(Self {
            end,
            terms,
            state_fd: AtomicI32::new(-1),
            completion_fd: AtomicI32::new(-1),
            up: Published::default(),
            token: AtomicU64::new(0),
            pollers: Pollers::new(MAX_WAITERS),
            watchers: Watchers::default(),
            users: Presence::default(),
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
        })
    }

    /// Turns an end that was [retired](Self::retire) into the end of another link, over the connected queue pair `pair`
    /// with equal [terms](Terms). False if there is no memory for the link, or a thread is still about to leave the
    /// earlier link: the caller then keeps `pair`.
    pub(super) fn renew(&self, pair: &Pair) -> bool {
        let Some(layouts) = self.terms.layouts() else {
            return false;
        };
        let [mine, mirror] = self.end.sides();
        let is_mapped = mine.map_data(&layouts[0]).is_ok() && mirror.map_data(&layouts[1]).is_ok();
        let is_renewed = is_mapped && self.end.renew(|old| old.stand_for(pair));
        if !is_renewed {
            // SAFETY: no stream was opened on the end since its last release, so there is no cursor. The end has no
            // queue pair either.
            unsafe { self.end.release() };
        }
        is_renewed
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
        self.news().reset();
        self.is_ended.publish(false);
        self.up.publish(true);
    }

    pub fn end(&self) -> &End<Pair, &'static News> {
        &self.end
    }

    /// Returns the state that epoll sets check before each sleep.
    pub fn news(&self) -> &'static News {
        self.end.local()
    }

    /// Returns the queue pair's descriptors, for its state and for completions; -1 before the first link.
    pub fn fds(&self) -> [c_int; 2] {
        [self.state_fd.load(Acquire), self.completion_fd.load(Acquire)]
    }

    /// Polls the queue pair, applies what the peer has sent, and sends what can be sent. True if there was a
    /// completion.
    #[inline]
    pub fn progress(&self) -> bool {
        self.end.progress().unwrap_or(false)
    }

    /// Arms the completion descriptor: the next completion makes it readable. Then polls once more. True if that poll
    /// found a completion.
    pub fn arm(&self) -> bool {
        self.end.arm().unwrap_or(false)
    }

    /// Takes the link down: the link carries nothing more, and no thread begins to sleep on its descriptor.
    pub(super) fn set_down(&self) {
        self.up.publish(false);
        // Bytes that have arrived are taken in first: if TCP has been reset, the peer does not send them again.
        self.end.take_in();
        self.end.set_down();
        self.drop_bulk();
        self.end.qp().disconnect();
    }

    /// Ends the queue pair of a link that is down, and gives the link's memory back. False if a thread may still use
    /// the queue pair or its descriptors, or is about to leave the memory.
    pub(super) fn retire(&self) -> bool {
        // Either this thread sees a user that `with_pair` has counted in, or that user sees `is_ended`.
        self.is_ended.publish(true);
        let mut pair = None;
        if self.users.is_empty() {
            self.end.end_retired(drop);
            let library = Library::get();
            library.free_kept(library.arenas.forget(self));
            pair = self.end.take_pair(Pair::take);
        }
        if pair.is_none() {
            self.is_ended.publish(false);
            return false;
        }
        // The drop ends the queue pair.
        drop(pair);
        // SAFETY: no cursor is left, since streams and producers pin the link until they have given up their cursors.
        // The queue pair is ended.
        unsafe { self.end.release() }
    }

    /// Calls `f` with the completion descriptor, unless the descriptor is closed.
    pub fn while_open(&self, f: impl FnOnce(BorrowedFd<'_>)) {
        self.with_pair(|_| f(self.fd()));
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

    /// Returns the local and the remote address if this end has connected; `None` if the peer has.
    pub fn dialled(&self) -> Option<(IpAddr, SocketAddr)> {
        self.dialled.lock().and_then(|place| *place)
    }

    /// Returns whether the link is down: then no more bytes come from the peer.
    pub fn is_down(&self) -> bool {
        self.end.is_down()
    }

    /// Returns why the link is down; `None` if it is up. For the service thread, which is not notified of the same
    /// failure again.
    pub fn fault(&self) -> Option<Reason> {
        self.end.fault().map(|fault| match fault {
            Fault::Violation(_) => Reason::Violation,
            Fault::Silent => Reason::LinkSilent,
            _ => Reason::LinkFailed,
        })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the queue pair. `retire` ends the queue pair only when no stream or
        // producer pins the link and `users` is empty. Callers are counted in `users`, or are the service thread, which
        // alone calls `retire`.
        unsafe { BorrowedFd::borrow_raw(self.completion_fd.load(Acquire)) }
    }
}

/// Least time between two requests for a bulk queue pair, ns.
const WISH_EVERY: u64 = 500_000_000;

/// For `Remote::await_word`: how long the peer's end may take to answer, and for how long this end polls for the answer
/// without a pause, ns.
const WORD_WITHIN: u64 = 200_000_000;
const SPINS_FOR: u64 = 100_000;

/// Direct transfers, which go past the link's rings: whether they are possible, from which size on they pay, and which
/// queue pair carries them.
impl Remote {
    /// Returns whether both ends support direct transfers.
    pub fn is_direct(&self) -> bool {
        self.terms.is_direct
    }

    /// Returns the least number of bytes in one buffer of a send or receive for which a direct transfer pays.
    pub fn direct_min(&self) -> usize {
        ways::least_piece(config().zcopy)
    }

    /// Returns the size from which on a send or a receive is tried as a direct transfer, and not copied into a ring
    /// (eager), bytes. `is_registered`: the device knows the memory already.
    pub fn threshold(&self, is_registered: bool) -> usize {
        ways::threshold(config().zcopy, &self.costs, is_registered)
    }

    /// Waits until `is_there` returns true, which means that the peer's end has answered, or until the link is down.
    /// The peer's end needs no call of its program to answer. After `WORD_WITHIN`, which is longer than any live end
    /// needs, gives up the bulk queue pair. The devices then cannot access the memory any more.
    #[cold]
    pub fn await_word(&self, is_there: impl Fn() -> bool) {
        let begun = crate::sys::time::now_ns();
        loop {
            self.progress();
            let waited = crate::sys::time::now_ns() - begun;
            if is_there() || self.is_down() {
                return;
            }
            if waited > WORD_WITHIN {
                return self.drop_bulk();
            }
            if waited > SPINS_FOR {
                crate::sys::time::sleep(20_000);
            }
        }
    }

    /// Returns whether direct transfers are possible now. If only the bulk queue pair is missing, asks the service
    /// thread to make one for the link, whose slot is `slot`.
    pub fn goes_direct(&self, slot: u32) -> bool {
        if !self.terms.is_direct {
            return false;
        }
        let has_bulk = self.has_bulk.load(Relaxed);
        if !has_bulk {
            self.wish(slot);
        }
        has_bulk
    }

    #[cold]
    fn wish(&self, slot: u32) {
        let (now, last) = (crate::sys::time::now_ns(), self.wished.load(Relaxed));
        let is_due = last == 0 || now > last + WISH_EVERY;
        if is_due && self.wished.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
            Library::get().service.submit(Command::WantBulk(slot));
        }
    }

    /// Makes direct transfers use the bulk queue pair `pair` from now on. Returns `pair` if the link has a bulk queue
    /// pair already, or is down. Service thread only.
    pub fn attach_bulk(&self, pair: Pair) -> Option<Pair> {
        let back = self.end.attach_bulk(pair);
        self.has_bulk.store(back.is_none(), Relaxed);
        back
    }

    /// Gives up the bulk queue pair: this end begins no transfer on it any more, and the service thread ends it later.
    pub fn drop_bulk(&self) {
        self.end.drop_bulk();
        self.has_bulk.store(false, Relaxed);
    }

    /// Ends the bulk queue pairs that were given up. Returns how many. Service thread only.
    pub fn end_retired(&self) -> usize {
        let count = self.end.end_retired(drop);
        if count > 0 {
            self.has_bulk.store(false, Relaxed);
        }
        count
    }
}

/// The result of [`Remote::maintain`].
pub enum Maintained {
    /// The link needs no further maintenance.
    Quiet,
    /// The link is to be maintained again.
    Busy,
    /// Completions wake the service thread from now on.
    TakenBack,
}

/// Which threads the completions of the link wake. There are three kinds:
///
/// - a thread that sleeps on an epoll set whose kernel's set has the completion descriptor,
/// - one of the threads that sleep for the link in a blocking call, poll or select,
/// - the service thread.
impl Remote {
    /// Makes completions wake a thread that is about to sleep on an epoll set. `has` adds the completion descriptor to
    /// the kernel's set if need be, and returns whether the set has it. Completions then do not wake the service
    /// thread, until no thread of the program has slept on the link for some ms. A change back at the end of each sleep
    /// would cost two more system calls each time.
    pub fn watch(&self, has: impl FnOnce(BorrowedFd<'_>) -> bool) {
        self.arm_after(|| match has(self.fd()) {
            true => self.hush_service(),
            // The kernel's set could not get the descriptor, since the user may have no watch left (epoll(7),
            // max_user_watches). So the service thread takes care of the completions.
            false => Library::get().service.maintain_later(),
        });
    }

    /// Calls `f` and then arms the completion descriptor. Does neither if the link is down, since its queue pair may be
    /// about to be ended.
    fn arm_after(&self, f: impl FnOnce()) {
        // Counted as a user, as in `with_pair`: `retire` does not end the queue pair meanwhile.
        self.users.enter();
        if self.up.look() {
            f();
            self.arm();
        }
        self.users.leave();
    }

    /// Notes that an epoll set has found the descriptor readable. The descriptor is armed again now if other threads
    /// may sleep on it too, and else before the next sleep.
    pub fn on_readable(&self) {
        self.end.on_readable();
        self.arm_for_others();
    }

    /// Arms the descriptor if other threads may sleep on it: the event that woke a set's thread may have used up the
    /// last arming.
    pub fn arm_for_others(&self) {
        if self.watchers.count() > 1 || !self.pollers.is_empty() {
            self.arm_after(|| ());
        }
    }

    /// Assigns a turn to a thread that is about to sleep as `waiter` in a blocking call, poll or select. The thread
    /// polls the completion descriptor if no thread does, and else stands by. Otherwise each event would wake all
    /// threads that sleep on the descriptor.
    pub fn in_turn(&self, waiter: WaiterId) -> Turn<'_> {
        if !self.pollers.is_empty() && self.pollers.stand_by(waiter.0) {
            return Turn::StandsBy(StandBy {
                remote: self,
                waiter,
                goes_on: false,
            });
        }
        // Counted as a user, as in `with_pair`: `retire` does not end the queue pair meanwhile.
        self.users.enter();
        if !self.up.look() {
            self.users.leave();
            return Turn::Down;
        }
        // Counted as a poller before `hush_service` reads `is_subscribed`; `maintain` uses the reverse order. So one of
        // the two sees the other.
        self.pollers.enter();
        self.sleeps.fetch_add(1, Relaxed);
        let poller = Poller {
            remote: self,
            has_left: AtomicBool::new(false),
        };
        self.hush_service();
        self.arm();
        Turn::Polls(poller)
    }

    /// Makes completions wake the service thread too, even if threads of the program sleep on them, until
    /// [`take_from_service`](Self::take_from_service) undoes each call of this function.
    pub fn leave_to_service(&self) {
        self.left.add_one();
        self.arm_after(|| {
            if !self.subscribe_service(true) {
                Library::get().service.maintain_later();
            }
        });
    }

    /// Undoes one [`leave_to_service`](Self::leave_to_service).
    pub fn take_from_service(&self) {
        self.left.take_one();
    }

    /// Stops completions from waking the service thread, unless an epoll set wants it (`leave_to_service`).
    fn hush_service(&self) {
        if self.is_subscribed.look() {
            self.subscribe_service(false);
        }
    }

    /// Makes completions wake the service thread if `on`, and else stops that. False if that is not possible now.
    fn subscribe_service(&self, on: bool) -> bool {
        let Some(_subscribing) = self.subscribing.lock() else {
            return false;
        };
        if !on && self.left.look() > 0 {
            return true;
        }
        if self.is_subscribed.look() != on {
            let token = self.token.load(Acquire);
            if !Library::get().service.subscribe(self.fd(), token, on) {
                return false;
            }
            self.is_subscribed.publish(on);
            if on {
                Library::get().service.taken_back.add_one();
            }
        }
        true
    }

    /// Sends the positions of readers (heads) that are owed to the peer. Makes completions wake the service thread
    /// again if no thread of the program sleeps on them any more. Service thread only, some ms after `maintain_later`.
    pub fn maintain(&self) -> Maintained {
        self.end.settle();
        let sleeps = self.sleeps.load(Relaxed).wrapping_add(self.watchers.sleeps());
        if self.sleeps_seen.swap(sleeps, Relaxed) != sleeps || self.end.owes() {
            return Maintained::Busy;
        }
        if self.is_subscribed.look() || !self.is_unheard() {
            return Maintained::Quiet;
        }
        // If the program's threads poll the link all the time, completions need not wake any thread. A service thread
        // that they woke would compete with the program's threads.
        if self.own_looks.find_often(self.end.counts().finds) {
            return Maintained::Busy;
        }
        if !self.subscribe_service(true) {
            // The user may have no watch left (epoll(7), max_user_watches). Until the descriptor can be added to the
            // epoll set, each maintenance polls the link instead.
            self.progress();
            return Maintained::Busy;
        }
        if !self.is_unheard() {
            self.subscribe_service(false);
            return Maintained::Busy;
        }
        Maintained::TakenBack
    }

    /// Returns whether the next completion is to wake the service thread, which has just checked the link. False if
    /// completions wake a thread of the program, or if the program's threads check the link as often as the service
    /// thread. (The service thread may have been subscribed while those threads paused for a moment.) Service thread
    /// only.
    pub fn service_hears_on(&self) -> bool {
        if !self.is_subscribed.look() || !self.is_unheard() {
            return false;
        }
        if self.left.look() == 0 && self.own_looks.is_in_the_way(|| self.end.counts().looks) {
            self.hush_service();
            Library::get().service.maintain_later();
        }
        self.is_subscribed.look()
    }

    /// Sets the data of the completion descriptor's events in the service thread's epoll set.
    pub fn set_token(&self, token: u64) {
        self.token.store(token, Release);
    }

    /// Returns whether no thread polls the completion descriptor (`Turn::Polls`).
    pub fn is_unpolled(&self) -> bool {
        self.pollers.is_empty()
    }

    /// Returns whether completions wake no thread of the program.
    fn is_unheard(&self) -> bool {
        self.is_unpolled() && !self.watchers.is_any_asleep()
    }
}

/// The turn of a thread that sleeps on the completion descriptor, see [`Remote::in_turn`]. Completions wake the thread
/// until the value is dropped. The thread checks the link once more before it sleeps.
pub struct Poller<'a> {
    /// The end of the link.
    pub remote: &'a Remote,
    /// Whether the thread has ended its polling. The thread's own signal handlers may set this too.
    has_left: AtomicBool,
}

/// The turn of a thread that is about to sleep.
pub enum Turn<'a> {
    /// The thread sleeps on the completion descriptor and on its own waiter.
    Polls(Poller<'a>),
    /// The thread sleeps on its own waiter, and a polling thread wakes it.
    StandsBy(StandBy<'a>),
    /// The thread sleeps on its own waiter, since the link is down and has no more completions.
    Down,
}

impl Poller<'_> {
    /// Returns the descriptor that is readable when something has completed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.remote.fd()
    }

    /// Arms the descriptor for another sleep, after a sleep that ended by an event for other threads. False if the
    /// thread is to stand by from now on: one of its signal handlers has ended its polling, or several threads poll.
    pub fn stays(&self) -> bool {
        let stays = !self.has_left.load(Relaxed) && self.remote.pollers.is_at_most_one();
        if stays {
            self.remote.arm();
        }
        stays
    }

    /// Ends this thread's polling. If no other thread polls, wakes one that stands by.
    pub fn leave(&self) {
        if self.has_left.swap(true, Relaxed) {
            return;
        }
        let errno = crate::sys::errno::get();
        match self.remote.pollers.leave() {
            Left::Last(next) => {
                call(next);
                Library::get().service.maintain_later();
            }
            Left::Others => {
                // The event that woke this thread may have used up the arming, and other threads sleep on.
                self.remote.arm();
            }
        }
        crate::sys::errno::set(errno);
    }
}

impl Drop for Poller<'_> {
    fn drop(&mut self) {
        self.leave();
        self.remote.users.leave();
    }
}

/// The turn of a thread that does not poll itself, see [`Remote::in_turn`]. A polling thread wakes this thread's waiter
/// when there is something for it. The last polling thread that leaves wakes one thread that stands by, to poll in its
/// place.
pub struct StandBy<'a> {
    /// The end of the link.
    pub remote: &'a Remote,
    waiter: WaiterId,
    goes_on: bool,
}

impl StandBy<'_> {
    /// Ends the turn of a thread that sleeps again at once. If the thread was called to poll, it does so in that sleep,
    /// so no other thread is called.
    pub fn go_on(mut self) {
        self.goes_on = true;
    }
}

impl Drop for StandBy<'_> {
    fn drop(&mut self) {
        let pollers = &self.remote.pollers;
        let is_called = pollers.stand_down(self.waiter.0);
        if is_called && !self.goes_on {
            let errno = crate::sys::errno::get();
            call(pollers.call());
            crate::sys::errno::set(errno);
        }
    }
}

/// Wakes a thread that stands by, so that it polls.
fn call(next: Option<u16>) {
    if let Some(next) = next {
        Library::get().waiters.ring(WaiterId(next));
    }
}

/// If at least this many checks have found something since the last maintenance of the link, the program's threads
/// count as checking the link all the time.
const OFTEN: u64 = 16;
/// After this many checks the service thread compares their number with the number of checks by other threads. Each
/// check by the service thread is `LOOKS_A_LOOK` polls, since the thread polls once more after arming.
const OWN: u32 = 8;
const LOOKS_A_LOOK: u32 = 2;

/// Counts by which the service thread sees whether threads of the program check a link all the time, as a thread does
/// that sends without a pause. Then completions need not wake the service thread, which would compete with these
/// threads.
#[derive(Default)]
struct OwnLooks {
    /// The number of checks by all threads that had found something, as of the last call of `find_often`.
    finds: AtomicU64,
    /// Number of checks by all threads at the last comparison in `is_in_the_way`, and of checks by the service thread
    /// since then.
    all: AtomicU64,
    own: AtomicU32,
}

impl OwnLooks {
    /// Returns whether the program's threads have often found something since the last call. Then completions, which do
    /// not wake the service thread now, need not wake it. `finds` is the number of checks so far that found something.
    fn find_often(&self, finds: u64) -> bool {
        finds.wrapping_sub(self.finds.swap(finds, Relaxed)) >= OFTEN
    }

    /// Counts a check of the service thread, which completions wake. Returns whether the service thread competes with
    /// other threads: they check as often as it does. `looks` returns the number of all checks so far. (The number of
    /// finds is no measure here, since the service thread often finds the data first.)
    fn is_in_the_way(&self, looks: impl FnOnce() -> u64) -> bool {
        let own = self.own.load(Relaxed) + 1;
        if own < OWN {
            self.own.store(own, Relaxed);
            return false;
        }
        self.own.store(0, Relaxed);
        let looks = looks();
        let since = looks.wrapping_sub(self.all.swap(looks, Relaxed));
        since >= (own + own * LOOKS_A_LOOK).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how often the service thread is found in the way (`OwnLooks::is_in_the_way`), if other threads check
    /// `others` times for each check of the service thread.
    fn asked(others: u64) -> u32 {
        let looks = OwnLooks::default();
        let mut all = 0;
        let in_the_way = (0..4 * OWN).filter(|_| {
            all += u64::from(LOOKS_A_LOOK) + others;
            looks.is_in_the_way(|| all)
        });
        in_the_way.count() as u32
    }

    #[test]
    fn the_service_thread_alone_is_in_nobodys_way() {
        assert_eq!(asked(0), 0);
    }

    #[test]
    fn it_is_where_others_look_as_often() {
        assert_eq!(asked(1), 4);
    }

    #[test]
    fn who_finds_little_by_himself_is_helped() {
        let looks = OwnLooks::default();
        assert!(looks.find_often(100) && !looks.find_often(101));
    }
}
