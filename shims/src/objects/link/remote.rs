//! The end of a link to another host: the engine over the verbs plugin's queue pair, and how it reaches the waiters of
//! this process. Who is woken by what completes is in `remote/sleepers.rs`, what goes past the rings in
//! `remote/past_rings.rs`.

mod answers;
mod own_looks;
mod past_rings;
pub mod sleepers;

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

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

/// What an object for links keeps from one link to the next.
#[derive(PartialEq)]
pub(super) struct Terms {
    limits: Limits,
    tuning: Tuning,
    arena_bytes: u64,
    /// Both ends have direct transfers.
    is_direct: bool,
}

impl Terms {
    /// Of the two arenas: this end's, and the peer's with this end's send buffers behind it.
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

/// See the module. Never freed, but given one link after another, of the same [terms](Terms).
pub struct Remote {
    end: End<Pair, Here>,
    terms: Terms,
    /// The queue pair's descriptors.
    state_fd: AtomicI32,
    completion_fd: AtomicI32,
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
    /// How often the program's threads look by themselves.
    own_looks: OwnLooks,
    /// The service thread is woken by completions.
    is_subscribed: Published<AtomicBool>,
    /// How many sets want it to be.
    left: Published<AtomicU32>,
    /// For changing `is_subscribed`.
    subscribing: Lock<()>,
    /// From where and to where it was connected, if by this end.
    dialled: Lock<Option<(IpAddr, SocketAddr)>>,
    /// There is a bulk queue pair.
    has_bulk: AtomicBool,
    /// When one was last wished for, monotonic ns.
    wished: AtomicU64,
    /// What registrations cost.
    pub costs: Costs,
    /// How long the peer's end takes for what it does without its program.
    pub answers: Answers,
}

impl Remote {
    /// An end over a connected pair. `None` without memory for it.
    pub(super) fn new(pair: Pair, terms: Terms) -> Option<Self> {
        let (mine, mirror) = (Side::anonymous().ok()?, Side::anonymous().ok()?);
        let layouts = terms.layouts()?;
        for (side, layout) in [&mine, &mirror].into_iter().zip(&layouts) {
            side.map_data(layout).ok()?;
        }
        let here = Here { news: news::new() };
        // SAFETY: the link, with the end, is never freed; see `Link::new`.
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

    /// Becomes the end over another connected pair, whose [terms](Terms) are the same. For an end that was
    /// [released](Self::release). False, and `pair` is the caller's, without memory for it or while a thread is about
    /// to leave what the end was.
    pub(super) fn renew(&self, pair: &Pair) -> bool {
        let Some(layouts) = self.terms.layouts() else {
            return false;
        };
        let [mine, mirror] = self.end.sides();
        let is_mapped = mine.map_data(&layouts[0]).is_ok() && mirror.map_data(&layouts[1]).is_ok();
        let is_renewed = is_mapped && self.end.renew(|old| old.stand_for(pair));
        if !is_renewed {
            // SAFETY: nothing was opened, and there is no queue pair.
            unsafe { self.end.release() };
        }
        is_renewed
    }

    /// Whether it can be [renewed](Self::renew) for a link of these terms.
    pub(super) fn fits(&self, terms: &Terms) -> bool {
        self.terms == *terms
    }

    /// The link begins: threads may use its queue pair.
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

    /// What sets with many links look at.
    pub fn news(&self) -> &'static News {
        self.end.local().news
    }

    /// The queue pair's descriptors: for its state, and for what completes.
    pub fn fds(&self) -> [c_int; 2] {
        [self.state_fd.load(Acquire), self.completion_fd.load(Acquire)]
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
            library.free_kept(library.arenas.forget(self));
            self.end.qp().destroy();
        } else {
            self.is_ended.publish(false);
        }
        is_free
    }

    /// Gives the memory of the link back once its queue pair is [ended](Self::retire). False if a thread is about to
    /// leave it.
    pub(super) fn release(&self) -> bool {
        // SAFETY: no cursor is left: streams and producers pin the link until they have given theirs up; and see
        // `retire`.
        unsafe { self.end.release() }
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

    /// Its queue pair is not ended before [`let_pair_go`](Self::let_pair_go). False if it is already.
    pub fn hold_pair(&self) -> bool {
        self.users.enter();
        let is_there = !self.is_ended.look();
        if !is_there {
            self.users.leave();
        }
        is_there
    }

    /// See [`hold_pair`](Self::hold_pair).
    pub fn let_pair_go(&self) {
        self.users.leave();
    }

    /// From where and to where it was connected, if by this end.
    pub fn dialled(&self) -> Option<(IpAddr, SocketAddr)> {
        self.dialled.lock().and_then(|place| *place)
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
        unsafe { BorrowedFd::borrow_raw(self.completion_fd.load(Acquire)) }
    }
}
