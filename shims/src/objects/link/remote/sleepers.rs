//! Who is woken by what completes on a link to another host: sets whose kernel's sets have its descriptor, one of the
//! threads that sleep in calls of their own, or the service thread.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::fabric::pollers::Left;
use rdmasock_core::fabric::waiter::WaiterId;

use crate::objects::library::Library;

use super::Remote;

/// What [`Remote::maintain`] came to.
pub enum Maintained {
    /// It can be left alone.
    Quiet,
    /// It is to be maintained again.
    Busy,
    /// The service thread hears of what completes from now on.
    TakenBack,
}

impl Remote {
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
        // Threads that look all the time, and have no reason to sleep: this one would be woken by each completion, and
        // be in their way.
        if self.own_looks.find_often(self.end.counts().finds) {
            return Maintained::Busy;
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

    /// Whether the service thread, which has looked, is to be woken by the next completion: nobody else is, and threads
    /// of the program do not look as often without. They may have stopped for a moment only, and that was when it
    /// began to hear. Service thread only.
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

    /// The number under which the service thread has the completion descriptor in its epoll set.
    pub fn set_token(&self, token: u64) {
        self.token.store(token, Release);
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
        let errno = crate::sys::errno::get();
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
        crate::sys::errno::set(errno);
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
            let errno = crate::sys::errno::get();
            call(pollers.call());
            crate::sys::errno::set(errno);
        }
    }
}

/// Has a thread that stands by poll.
fn call(next: Option<u16>) {
    if let Some(next) = next {
        Library::get().waiters.ring(WaiterId(next));
    }
}
