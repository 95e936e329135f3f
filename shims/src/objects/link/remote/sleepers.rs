//! Which threads the completions of a link to another host wake. There are three kinds:
//!
//! - a thread that sleeps on an epoll set whose kernel's set has the completion descriptor,
//! - one of the threads that sleep in calls of their own,
//! - the service thread.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rdmasock_core::fabric::pollers::Left;
use rdmasock_core::fabric::waiter::WaiterId;

use super::Remote;
use crate::objects::library::Library;

/// The result of [`Remote::maintain`].
pub enum Maintained {
    /// The link needs no further maintenance.
    Quiet,
    /// The link is to be maintained again.
    Busy,
    /// Completions wake the service thread from now on.
    TakenBack,
}

impl Remote {
    /// Makes completions wake a thread that is about to sleep on an epoll set. `has` adds the descriptor to the set if
    /// need be, and says whether the set has it. Completions then do not wake the service thread until no thread has
    /// slept here for some ms. Otherwise a program that sleeps again and again would cost two more system calls each
    /// time.
    pub fn watch(&self, has: impl FnOnce(BorrowedFd<'_>) -> bool) {
        // Counted in as in `while_open`.
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

    /// Notes that an epoll set has found the descriptor readable. It is armed now if other threads sleep on it too, and
    /// else before the next sleep.
    pub fn on_readable(&self) {
        self.end.on_readable();
        self.arm_for_others();
    }

    /// Arms the descriptor if other threads may sleep on it: the event that woke a set's thread may have used up the
    /// last arming.
    pub fn arm_for_others(&self) {
        if self.watchers.count() > 1 || !self.pollers.is_empty() {
            // Counted in as in `while_open`: a link that is down may be about to lose its queue pair.
            self.users.enter();
            if self.up.look() {
                self.arm();
            }
            self.users.leave();
        }
    }

    /// Assigns a turn to a thread that is about to sleep as `waiter` in a call of its own. The thread polls the
    /// completion descriptor if no thread does, and else stands by. Otherwise each event would wake all threads that
    /// sleep on the descriptor.
    pub fn in_turn(&self, waiter: WaiterId) -> Turn<'_> {
        if !self.pollers.is_empty()
            && let Some(standby) = self.stand_by(waiter)
        {
            return Turn::StandsBy(standby);
        }
        self.enter().map_or(Turn::Down, Turn::Polls)
    }

    /// Makes completions wake this thread until the value is dropped. The caller checks once more after this, and then
    /// sleeps on the descriptor too. `None` if the link is down.
    fn enter(&self) -> Option<Poller<'_>> {
        // Counted in as in `while_open`.
        self.users.enter();
        if !self.up.look() {
            self.users.leave();
            return None;
        }
        // Counted in before `is_subscribed` is read; `maintain` uses the reverse order.
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

    /// Makes completions wake the service thread too, even if threads of the program sleep on them, until
    /// [`take_from_service`](Self::take_from_service) was called as often.
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

    /// Undoes one [`leave_to_service`](Self::leave_to_service).
    pub fn take_from_service(&self) {
        self.left.take_one();
    }

    /// Stops completions from waking the service thread, unless an epoll set wants it.
    fn hush_service(&self) {
        if self.is_subscribed.look() {
            self.subscribe_service(false);
        }
    }

    /// Makes the thread stand by until the value is dropped. Threads that poll wake `waiter` when it has something, and
    /// the last one of them that leaves wakes it to poll in its place. `None` if no thread polls.
    fn stand_by(&self, waiter: WaiterId) -> Option<StandBy<'_>> {
        let others = self.pollers.stand_by(waiter.0);
        others.then_some(StandBy {
            remote: self,
            waiter,
            goes_on: false,
        })
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

    /// Sends what is owed to the peer. Makes completions wake the service thread again if no thread of the program
    /// sleeps on them any more. Service thread only, some ms after it was asked for.
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
        // The program's threads check all the time and need not sleep. Each completion would wake the service thread,
        // which would be in their way.
        if self.own_looks.find_often(self.end.counts().finds) {
            return Maintained::Busy;
        }
        if !self.subscribe_service(true) {
            // The user may have no watch left (epoll(7), max_user_watches). The check here makes up for that, and the
            // next maintenance does.
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
    /// completions wake a thread of the program, or the program's threads check as often by themselves. (The service
    /// thread may have been subscribed while they paused for a moment.) Service thread only.
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

    /// Returns whether no thread polls in a call of its own.
    pub fn is_unpolled(&self) -> bool {
        self.pollers.is_empty()
    }

    /// Returns whether completions wake no thread of the program.
    pub fn is_unheard(&self) -> bool {
        self.is_unpolled() && !self.watchers.is_any_asleep()
    }
}

/// Makes its thread one that sleeps on the completion descriptor, see [`Remote::in_turn`].
pub struct Poller<'a> {
    remote: &'a Remote,
    /// The thread polls no more. Also set by the thread's own signal handlers.
    has_left: AtomicBool,
}

/// The turn of a thread that is about to sleep.
pub enum Turn<'a> {
    /// Sleeps on the completion descriptor too.
    Polls(Poller<'a>),
    /// Sleeps on its own waiter.
    StandsBy(StandBy<'a>),
    /// Sleeps on its own waiter, since the link is down and has no more completions.
    Down,
}

impl Poller<'_> {
    /// Returns the descriptor that is readable when something has completed.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.remote.fd()
    }

    /// Prepares another sleep, as at the beginning, after a sleep that ended for other threads. False if the thread is
    /// to stand by from now on. Then it has left its place to others meanwhile, or several threads have come to poll at
    /// the same time.
    pub fn stays(&self) -> bool {
        let stays = !self.has_left.load(Relaxed) && self.remote.pollers.is_at_most_one();
        if stays {
            self.remote.arm();
        }
        stays
    }

    /// Returns whether it belongs to this link.
    pub fn is_of(&self, remote: &Remote) -> bool {
        std::ptr::eq(self.remote, remote)
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
                // The event that woke this thread has used up the arming, and other threads sleep on.
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

/// A thread that lets other threads poll, see [`Remote::in_turn`].
pub struct StandBy<'a> {
    remote: &'a Remote,
    waiter: WaiterId,
    goes_on: bool,
}

impl StandBy<'_> {
    /// Returns whether it belongs to this link.
    pub fn is_of(&self, remote: &Remote) -> bool {
        std::ptr::eq(self.remote, remote)
    }

    /// Notes that the thread sleeps again at once, and then polls if it was called to.
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
