//! The end of a link to another host: the engine over the verbs plugin's queue pair, how it reaches the
//! waiters of this process, and who is woken by what completes.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::fabric::layout::{Layout, MAX_DATA_BYTES};
use rdmasock_core::fabric::plugin::Info;
use rdmasock_core::fabric::pollers::{Left, Pollers};
use rdmasock_core::fabric::remote::qp::{QueuePair, Region};
use rdmasock_core::fabric::remote::{End, Fault, Local, Tuning};
use rdmasock_core::fabric::shm::Side;
use rdmasock_core::fabric::waiter::{MAX_WAITERS, WaiterId};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::lock::Lock;
use rdmasock_core::os::memfd::Mapping;
use rdmasock_core::stats::{Event, Reason};
use rdmasock_core::sync::{Presence, Published, SleepFlag};
use rdmasock_core::wire::{Introduction, Message};

use super::news::{self, News};
use super::watchers::Watchers;
use crate::ahead::Device;
use crate::config::{ZeroCopy, config};
use crate::library::Library;
use crate::load;
use crate::mailbox::Command;
use crate::steering::{Balance, Issuer};
use crate::verbs::{Pair, State};
use crate::ways::{self, Known};

/// The waiters of this process, as the engine tells them.
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

/// What [`Remote::maintain`] came to.
pub enum Maintained {
    /// It can be left alone.
    Quiet,
    /// It is to be maintained again.
    Busy,
    /// The service thread hears of what completes from now on.
    TakenBack,
}

/// How often a bulk queue pair is wished for, ns.
const WISH_EVERY: u64 = 500_000_000;

/// How long the peer's end may take for a word, and how long that is looked for without a pause, ns.
const WORD_WITHIN: u64 = 200_000_000;
const SPINS_FOR: u64 = 100_000;

/// Whether the kernel copies pages that a device has for a fork child, as it does from Linux 5.12 on: before, the child
/// could get the program's, and the program another one that the device does not have.
fn copies_what_is_pinned() -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release
        .split(['.', '-'])
        .map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(5), Some(12))
}

/// Whether addresses are limited, which the program then has better use for.
pub fn has_few_addresses() -> bool {
    rustix::process::getrlimit(rustix::process::Resource::As)
        .current
        .is_some()
}

/// Addresses for the send buffers of a link whose arenas have `arena_bytes` each: registered memory is not given back
/// before the link is over, so they are a bound of it too. None where addresses are limited.
fn buffers(arena_bytes: u64) -> u64 {
    if has_few_addresses() {
        return 0;
    }
    (arena_bytes / 4).min(MAX_DATA_BYTES - arena_bytes)
}

/// Less is never worth a direct transfer, bytes.
fn least_of(zcopy: ZeroCopy) -> usize {
    match zcopy {
        ZeroCopy::Off => usize::MAX,
        ZeroCopy::Auto => ways::LEAST,
        ZeroCopy::From(least) => least.bytes() as usize,
    }
}

/// See the module.
pub struct Remote {
    end: End<Pair, Here>,
    info: Info,
    /// The link is up: its queue pair may be used.
    up: Published<AtomicBool>,
    /// By which the service thread's epoll set knows the completion descriptor.
    token: AtomicU64,
    /// Threads that sleep on the completion descriptor in a call of their own, or are about to, and who does so next.
    pollers: Pollers,
    /// Epoll sets whose kernel's sets have it.
    pub watchers: Watchers,
    /// Threads that may still use the queue pair's descriptors.
    users: Presence,
    /// The queue pair is ended.
    is_ended: Published<AtomicBool>,
    /// How many times a thread has come to poll.
    sleeps: AtomicU32,
    /// What that, and the sets' sleeps, were at the last [`maintain`](Self::maintain).
    sleeps_seen: AtomicU32,
    /// The service thread is woken by completions.
    is_subscribed: Published<AtomicBool>,
    /// How many sets want it to be.
    left: Published<AtomicU32>,
    /// For changing `is_subscribed`.
    subscribing: Lock<()>,
    /// Both ends have direct transfers.
    is_direct: bool,
    /// And the other's device reads what is lent to it.
    can_lend: bool,
    /// From where and to where it was connected, if by this end.
    dialled: Option<(IpAddr, SocketAddr)>,
    /// There is a bulk queue pair.
    has_bulk: AtomicBool,
    /// When one was last wished for, monotonic ns.
    wished: AtomicU64,
    /// Which way large sends go.
    pub known: Known,
    /// Whose device is to move their bytes, by load.
    balance: Balance,
}

impl Remote {
    /// The end over a connected pair, with arenas of this size. `None` without memory for it.
    pub(super) fn new(
        pair: Pair,
        arena_bytes: u64,
        other: &Introduction,
        dialled: Option<(IpAddr, SocketAddr)>,
    ) -> Option<Self> {
        let info = pair.info().ok()?;
        let side = |data_bytes| {
            let layout = Layout::for_data(data_bytes)?;
            let memory = Mapping::anonymous(layout.file_len() as usize).ok()?;
            Side::new(memory, layout)
        };
        let mut tuning = Tuning::fit(&pair.limits());
        tuning.buffers = buffers(arena_bytes);
        let zcopy = config().zcopy;
        let is_direct = other.is_direct && zcopy != ZeroCopy::Off && copies_what_is_pinned();
        tuning.direct_min = least_of(zcopy).min(1 << 30) as u32;
        tuning.tells_load = is_direct && other.hears_load;
        let (mine, mirror) = (side(arena_bytes)?, side(arena_bytes + tuning.buffers)?);
        let here = Here { news: news::new() };
        // SAFETY: the link, with the end, is never freed; see `Link::new`.
        let end = unsafe { End::new(pair, mine, mirror, here, tuning) };
        Some(Self {
            end: end.ok()?,
            info,
            up: Published::from(true),
            token: AtomicU64::new(0),
            pollers: Pollers::new(MAX_WAITERS),
            watchers: Watchers::new(),
            users: Presence::new(),
            is_ended: Published::default(),
            sleeps: AtomicU32::new(0),
            sleeps_seen: AtomicU32::new(0),
            is_subscribed: Published::from(true),
            left: Published::default(),
            subscribing: Lock::new(()),
            is_direct,
            can_lend: is_direct && other.reads,
            dialled,
            has_bulk: AtomicBool::new(false),
            wished: AtomicU64::new(0),
            known: Known::default(),
            balance: Balance::default(),
        })
    }

    pub fn end(&self) -> &End<Pair, Here> {
        &self.end
    }

    /// What sets with many links look at.
    pub fn news(&self) -> &'static News {
        self.end.local().news
    }

    /// Whose device is to move what this end sends, by the load of both; `None`: it does not matter, or nothing is
    /// known of the peer's. The peer hears of this end's load when it has been asked for.
    pub fn issuer(&self) -> Option<Issuer> {
        let now = crate::time::tick();
        self.balance.issuer(now, || {
            let own = load::average(now)?;
            self.end.set_load(own);
            Some((own, self.end.peer_load()?))
        })
    }

    /// Facts about the queue pair.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// How the queue pair is.
    pub fn state(&self) -> State {
        self.end.qp().state()
    }

    /// Takes in what has come, and sends what can be sent. True if there was something.
    #[inline]
    pub fn progress(&self) -> bool {
        self.end.progress().unwrap_or(false)
    }

    /// The next completion makes the descriptor readable. True if something has come meanwhile.
    pub fn arm(&self) -> bool {
        self.end.arm().unwrap_or(false)
    }

    /// Nothing goes over the link any more, and nobody begins to sleep on its descriptor.
    pub(super) fn set_down(&self) {
        self.up.publish(false);
        // What had come by now is not sent again where TCP has been reset.
        self.end.take_in();
        self.end.set_down();
        self.drop_bulk();
        self.end.qp().disconnect();
    }

    /// Ends the queue pair of a link that is down. False if a thread still sleeps on its descriptor.
    pub(super) fn retire(&self) -> bool {
        // Either we see who is in `while_open`, or it sees this.
        self.is_ended.publish(true);
        let is_free = self.users.is_empty();
        if is_free {
            self.end.end_retired(drop);
            let library = Library::get();
            library.pinned.give_back(library.ahead.forget(self));
            library.free_kept(library.arenas.forget(self) + library.on_demand.forget(self));
            self.end.qp().destroy();
        } else {
            self.is_ended.publish(false);
        }
        is_free
    }

    /// Does something with the completion descriptor, if it is still open.
    pub fn while_open(&self, f: impl FnOnce(BorrowedFd<'_>)) {
        self.users.enter();
        if !self.is_ended.look() {
            f(self.fd());
        }
        self.users.leave();
    }

    /// Does something with its queue pair, if it is still there.
    pub fn with_pair<R>(&self, f: impl FnOnce(&Pair) -> R) -> Option<R> {
        self.users.enter();
        let result = (!self.is_ended.look()).then(|| f(self.end.qp()));
        self.users.leave();
        result
    }

    /// Both ends have direct transfers.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// This end's device reaches memory by its addresses.
    pub fn reaches_on_demand(&self) -> bool {
        self.info.on_demand != 0
    }

    /// The peer's device reads what is lent to it.
    pub fn can_lend(&self) -> bool {
        self.can_lend
    }

    /// From where and to where it was connected, if by this end.
    pub fn dialled(&self) -> Option<(IpAddr, SocketAddr)> {
        self.dialled
    }

    /// Less is not worth a direct transfer, bytes.
    pub fn direct_min(&self) -> usize {
        least_of(config().zcopy)
    }

    /// Waits for what the peer's end says without its program, for as long as any end that lives needs; then the bulk
    /// queue pair is given up, and what it reaches is out of reach.
    #[cold]
    pub fn await_word(&self, is_there: impl Fn() -> bool) {
        let begun = crate::time::now_ns();
        loop {
            self.progress();
            let waited = crate::time::now_ns() - begun;
            if is_there() || self.is_down() {
                return;
            }
            if waited > WORD_WITHIN {
                return self.drop_bulk();
            }
            if waited > SPINS_FOR {
                let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
                    tv_sec: 0,
                    tv_nsec: 20_000,
                });
            }
        }
    }

    /// Whether there may be direct transfers now. If not a bulk queue pair is asked for, which may take its time.
    pub fn goes_direct(&self, slot: u32) -> bool {
        if !self.is_direct {
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
        let (now, last) = (crate::time::now_ns(), self.wished.load(Relaxed));
        let is_due = last == 0 || now > last + WISH_EVERY;
        if is_due && self.wished.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
            Library::get().service.submit(Command::WantBulk(slot));
        }
    }

    /// Direct transfers go over this one from now on. Service thread only.
    pub fn attach_bulk(&self, pair: Pair) -> Option<Pair> {
        let back = self.end.attach_bulk(pair);
        self.has_bulk.store(back.is_none(), Relaxed);
        back
    }

    /// It is lost, for both ends.
    pub fn drop_bulk(&self) {
        self.end.drop_bulk();
        self.has_bulk.store(false, Relaxed);
    }

    /// Ends those that were lost; gives how many. Service thread only.
    pub fn end_retired(&self) -> usize {
        let count = self.end.end_retired(drop);
        if count > 0 {
            self.has_bulk.store(false, Relaxed);
        }
        count
    }

    /// For a sleep on a set that has the descriptor if `has` says so, to which it is given. The service thread is not
    /// woken by completions then, until nobody has slept here for some ms: a program that sleeps again and again would
    /// else tell the kernel twice each time.
    pub fn watch(&self, has: impl FnOnce(BorrowedFd<'_>) -> bool) {
        // As in `while_open`.
        self.users.enter();
        if self.up.look() {
            if has(self.fd()) {
                self.hush_service();
            } else {
                // The user may have no watch left (epoll(7), max_user_watches).
                Library::get().service.maintain_later();
            }
            self.arm();
        }
        self.users.leave();
    }

    /// A set has found the descriptor readable. It is to be armed now if others sleep on it too, and else before the
    /// next sleep.
    pub fn on_readable(&self) {
        self.end.on_readable();
        self.arm_for_others();
    }

    /// The event that has woken a set's thread may have used up what was armed, and others sleep on.
    pub fn arm_for_others(&self) {
        if self.watchers.count() > 1 || !self.pollers.is_empty() {
            // As in `while_open`: a link that is down may be about to lose its queue pair.
            self.users.enter();
            if self.up.look() {
                self.arm();
            }
            self.users.leave();
        }
    }

    /// For a thread that is about to sleep on this waiter in a call of its own: it polls if nobody does, and else
    /// stands by. An event wakes all who sleep on the descriptor.
    pub fn in_turn(&self, waiter: WaiterId) -> Turn<'_> {
        if !self.pollers.is_empty()
            && let Some(standby) = self.stand_by(waiter)
        {
            return Turn::StandsBy(standby);
        }
        self.enter().map_or(Turn::Down, Turn::Polls)
    }

    /// From now on until the value is dropped this thread is woken by completions. Looks once more after this, then
    /// sleeps on the descriptor too. `None` if the link is down.
    fn enter(&self) -> Option<Poller<'_>> {
        // As in `while_open`.
        self.users.enter();
        if !self.up.look() {
            self.users.leave();
            return None;
        }
        // Before the look at `is_subscribed`; `maintain` the other way round.
        self.pollers.enter();
        self.sleeps.fetch_add(1, Relaxed);
        let poller = Poller {
            remote: self,
            has_left: AtomicBool::new(false),
        };
        self.hush_service();
        self.arm();
        Some(poller)
    }

    /// Whatever threads of the program do, the service thread is woken by completions too, until
    /// [it need not](Self::take_from_service) as often.
    pub fn leave_to_service(&self) {
        self.left.add_one();
        self.users.enter();
        if self.up.look() {
            if !self.subscribe_service(true) {
                Library::get().service.maintain_later();
            }
            self.arm();
        }
        self.users.leave();
    }

    /// See [`leave_to_service`](Self::leave_to_service).
    pub fn take_from_service(&self) {
        self.left.take_one();
    }

    /// The service thread is not woken by completions.
    fn hush_service(&self) {
        if self.is_subscribed.look() {
            self.subscribe_service(false);
        }
    }

    /// Until the value is dropped others are woken by completions, and ring this waiter for what is its own; the last
    /// of them rings it to take its place. `None` if there are none.
    fn stand_by(&self, waiter: WaiterId) -> Option<StandBy<'_>> {
        let others = self.pollers.stand_by(waiter.0);
        others.then_some(StandBy {
            remote: self,
            waiter,
            goes_on: false,
        })
    }

    /// False if that cannot be had now.
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

    /// Sends what is owed, and has the service thread hear of completions again if nobody sleeps on them any
    /// more. Service thread only, some ms after it was asked for.
    pub fn maintain(&self) -> Maintained {
        self.end.settle();
        let sleeps = self.sleeps.load(Relaxed).wrapping_add(self.watchers.sleeps());
        if self.sleeps_seen.swap(sleeps, Relaxed) != sleeps {
            return Maintained::Busy;
        }
        if self.end.owes() {
            return Maintained::Busy;
        }
        if self.is_subscribed.look() || !self.is_unheard() {
            return Maintained::Quiet;
        }
        if !self.subscribe_service(true) {
            // The user may have no watch left (epoll(7), max_user_watches): this look does instead, and the next.
            self.progress();
            return Maintained::Busy;
        }
        if !self.is_unheard() {
            self.subscribe_service(false);
            return Maintained::Busy;
        }
        Maintained::TakenBack
    }

    /// The number under which the service thread has the completion descriptor in its epoll set.
    pub fn set_token(&self, token: u64) {
        self.token.store(token, Release);
    }

    /// Whether the peer has all that was committed to its stream `theirs`. If not it is asked, and the service
    /// thread is told about the stream when it has answered.
    pub fn is_confirmed(&self, theirs: Vqpn) -> bool {
        self.end.unconfirmed(theirs) == Some(0)
    }

    /// How much of what was committed to the peer's stream `theirs` it is not known to have; it is asked.
    pub fn unconfirmed(&self, theirs: Vqpn) -> u64 {
        self.end.unconfirmed(theirs).unwrap_or(0)
    }

    /// How much of what was committed to the peer's stream `theirs` has not been sent, for it finds no room there yet.
    pub fn unsent(&self, theirs: Vqpn) -> u64 {
        self.end.unsent(theirs)
    }

    /// It has to be seen, about once a second, whether the peer's device still answers.
    pub fn is_watched(&self) -> bool {
        self.end.is_watched()
    }

    /// Whether anything has come from the peer.
    pub fn has_received(&self) -> bool {
        self.end.counts().received > 0
    }

    /// The peer says that its end has failed; ours may not know.
    pub fn doubt(&self) {
        self.end.doubt();
    }

    /// Sees to it. Monotonic ns.
    pub fn tick(&self, now: u64) {
        self.end.tick(now);
    }

    /// The next message on the side channel.
    pub fn take_message(&self) -> Option<Message> {
        self.end.take_message()
    }

    /// Whether the link cannot be used further; what has come from the peer is final then.
    pub fn is_down(&self) -> bool {
        self.end.is_down()
    }

    /// Why the link cannot be used further, if so. For the service thread, which is not told of it again.
    pub fn fault(&self) -> Option<Reason> {
        self.end.fault().map(|fault| match fault {
            Fault::Violation(_) => Reason::Violation,
            Fault::Silent => Reason::LinkSilent,
            _ => Reason::LinkFailed,
        })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the queue pair, which is given up only when no stream uses the link.
        unsafe { BorrowedFd::borrow_raw(self.info.completion_fd) }
    }

    /// Whether no thread polls in a call of its own.
    pub fn is_unpolled(&self) -> bool {
        self.pollers.is_empty()
    }

    /// Whether no thread of the program is woken by what completes.
    pub fn is_unheard(&self) -> bool {
        self.is_unpolled() && !self.watchers.is_any_asleep()
    }
}

/// What makes a thread the one that sleeps on the completion descriptor, see [`Remote::in_turn`].
pub struct Poller<'a> {
    remote: &'a Remote,
    /// It is not any more; for the thread's own signal handlers too.
    has_left: AtomicBool,
}

/// What a thread that takes turns does.
pub enum Turn<'a> {
    /// Sleeps on the completion descriptor too.
    Polls(Poller<'a>),
    /// Sleeps on its own waiter.
    StandsBy(StandBy<'a>),
    /// The same, for nothing completes any more.
    Down,
}

impl Poller<'_> {
    /// Readable when something has completed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.remote.fd()
    }

    /// For another sleep after one that has ended for others, as when this was made. False if the thread is to stand by
    /// from now on: it has left its place to others meanwhile, or several have come to poll at the same time.
    pub fn stays(&self) -> bool {
        let stays = !self.has_left.load(Relaxed) && self.remote.pollers.is_at_most_one();
        if stays {
            self.remote.arm();
        }
        stays
    }

    /// Whether it is of this link.
    pub fn is_of(&self, remote: &Remote) -> bool {
        std::ptr::eq(self.remote, remote)
    }

    /// Others poll from now on.
    pub fn leave(&self) {
        if self.has_left.swap(true, Relaxed) {
            return;
        }
        let errno = crate::errno::get();
        match self.remote.pollers.leave() {
            Left::Last(next) => {
                call(next);
                Library::get().service.maintain_later();
            }
            Left::Others => {
                // The event that woke this thread has used up what was armed, and others sleep on.
                self.remote.arm();
            }
        }
        crate::errno::set(errno);
    }
}

impl Drop for Poller<'_> {
    fn drop(&mut self) {
        self.leave();
        self.remote.users.leave();
    }
}

/// A thread that lets others poll, see [`Remote::in_turn`].
pub struct StandBy<'a> {
    remote: &'a Remote,
    waiter: WaiterId,
    goes_on: bool,
}

impl StandBy<'_> {
    /// Whether it is of this link.
    pub fn is_of(&self, remote: &Remote) -> bool {
        std::ptr::eq(self.remote, remote)
    }

    /// The thread sleeps again at once, and polls then if it was called to.
    pub fn go_on(mut self) {
        self.goes_on = true;
    }
}

impl Drop for StandBy<'_> {
    fn drop(&mut self) {
        let pollers = &self.remote.pollers;
        let is_called = pollers.stand_down(self.waiter.0);
        if is_called && !self.goes_on {
            let errno = crate::errno::get();
            call(pollers.call());
            crate::errno::set(errno);
        }
    }
}

/// Has a thread that stands by poll.
fn call(next: Option<u16>) {
    if let Some(next) = next {
        Library::get().waiters.ring(WaiterId(next));
    }
}
