//! The end of a link to another host: the engine over the verbs plugin's queue pair, how it reaches the
//! waiters of this process, and who is woken by what completes.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::fabric::layout::{Layout, MAX_DATA_BYTES};
use rdmasock_core::fabric::plugin::Info;
use rdmasock_core::fabric::remote::qp::QueuePair;
use rdmasock_core::fabric::remote::{End, Fault, Local, Tuning};
use rdmasock_core::fabric::shm::Side;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::ids::Vqpn;
use rdmasock_core::lock::Lock;
use rdmasock_core::os::memfd::Mapping;
use rdmasock_core::stats::Reason;
use rdmasock_core::sync::{Presence, Published, SleepFlag};
use rdmasock_core::wire::Message;

use crate::library::Library;
use crate::verbs::{Pair, State};

/// The waiters of this process, as the engine tells them.
pub struct Here;

impl Local for Here {
    fn flag(&self, waiter: WaiterId) -> Option<&SleepFlag> {
        Library::get().waiters.flag(waiter)
    }

    fn ring(&self, waiter: WaiterId) {
        Library::get().waiters.ring(waiter);
    }

    fn settle_later(&self) {
        Library::get().service.maintain_later();
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

/// See the module.
pub struct Remote {
    end: End<Pair, Here>,
    info: Info,
    /// The link is up: its queue pair may be used.
    up: Published<AtomicBool>,
    /// By which the service thread's epoll set knows the completion descriptor.
    token: AtomicU64,
    /// [Pollers](Poller): threads that sleep on the completion descriptor themselves, or are about to.
    pollers: Presence,
    /// Threads that may still use the queue pair's descriptors.
    users: Presence,
    /// The queue pair is ended.
    is_ended: Published<AtomicBool>,
    /// How many times a thread has come to sleep on the completion descriptor.
    sleeps: AtomicU32,
    /// What `sleeps` was at the last [`maintain`](Self::maintain).
    sleeps_seen: AtomicU32,
    /// The service thread is woken by completions.
    is_subscribed: Published<AtomicBool>,
    /// For changing `is_subscribed`.
    subscribing: Lock<()>,
}

impl Remote {
    /// The end over a connected pair, with arenas of this size. `None` without memory for it.
    pub(super) fn new(pair: Pair, arena_bytes: u64) -> Option<Self> {
        let info = pair.info().ok()?;
        let side = |data_bytes| {
            let layout = Layout::for_data(data_bytes)?;
            let memory = Mapping::anonymous(layout.file_len() as usize).ok()?;
            Side::new(memory, layout)
        };
        let mut tuning = Tuning::fit(&pair.limits());
        tuning.buffers = buffers(arena_bytes);
        let (mine, mirror) = (side(arena_bytes)?, side(arena_bytes + tuning.buffers)?);
        // SAFETY: the link, with the end, is never freed; see `Link::new`.
        let end = unsafe { End::new(pair, mine, mirror, Here, tuning) };
        Some(Self {
            end: end.ok()?,
            info,
            up: Published::from(true),
            token: AtomicU64::new(0),
            pollers: Presence::new(),
            users: Presence::new(),
            is_ended: Published::default(),
            sleeps: AtomicU32::new(0),
            sleeps_seen: AtomicU32::new(0),
            is_subscribed: Published::from(true),
            subscribing: Lock::new(()),
        })
    }

    pub(super) fn end(&self) -> &End<Pair, Here> {
        &self.end
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
        self.end.set_down();
        self.end.qp().disconnect();
    }

    /// Ends the queue pair of a link that is down. False if a thread still sleeps on its descriptor.
    pub(super) fn retire(&self) -> bool {
        // Either we see who is in `while_open`, or it sees this.
        self.is_ended.publish(true);
        let is_free = self.users.is_empty();
        if is_free {
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

    /// From now on until the value is dropped this thread is woken by completions. The service thread is not, until
    /// nobody has slept here for some ms: a program that sleeps again and again would else tell the kernel twice each
    /// time. Looks once more after this, then sleeps on the descriptor too. `None` if the link is down.
    pub fn become_poller(&self) -> Option<Poller<'_>> {
        // As in `while_open`.
        self.users.enter();
        if !self.up.look() {
            self.users.leave();
            return None;
        }
        // Before the look at `is_subscribed`; `maintain` the other way round.
        self.pollers.enter();
        self.sleeps.fetch_add(1, Relaxed);
        let poller = Poller(self);
        if self.is_subscribed.look() {
            self.subscribe_service(false);
        }
        self.arm();
        Some(poller)
    }

    /// False if that cannot be had now.
    fn subscribe_service(&self, on: bool) -> bool {
        let Some(_subscribing) = self.subscribing.lock() else {
            return false;
        };
        if self.is_subscribed.look() != on {
            let token = self.token.load(Acquire);
            if !Library::get().service.subscribe(self.fd(), token, on) {
                return false;
            }
            self.is_subscribed.publish(on);
        }
        true
    }

    /// Sends what is owed, and has the service thread hear of completions again if nobody sleeps on them any
    /// more. Service thread only, some ms after it was asked for.
    pub fn maintain(&self) -> Maintained {
        self.end.settle();
        let sleeps = self.sleeps.load(Relaxed);
        if self.sleeps_seen.swap(sleeps, Relaxed) != sleeps {
            return Maintained::Busy;
        }
        if self.end.owes() {
            return Maintained::Busy;
        }
        if self.is_subscribed.look() || !self.is_unpolled() {
            return Maintained::Quiet;
        }
        if !self.subscribe_service(true) {
            // The user may have no watch left (epoll(7), max_user_watches): this look does instead, and the next.
            self.progress();
            return Maintained::Busy;
        }
        if !self.is_unpolled() {
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

    /// Why the link cannot be used further, if so.
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

    /// Whether no thread of the program sleeps on the completion descriptor.
    pub fn is_unpolled(&self) -> bool {
        self.pollers.is_empty()
    }
}

/// What makes a thread the one that sleeps on the completion descriptor, see [`Remote::become_poller`].
pub struct Poller<'a>(&'a Remote);

impl Poller<'_> {
    /// Readable when something has completed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
}

impl Drop for Poller<'_> {
    fn drop(&mut self) {
        let errno = crate::errno::get();
        if self.0.pollers.leave() {
            Library::get().service.maintain_later();
        } else {
            // The event that woke this thread has used up what was armed, and others sleep on.
            self.0.arm();
        }
        self.0.users.leave();
        crate::errno::set(errno);
    }
}
