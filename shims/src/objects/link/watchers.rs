//! Epoll sets whose kernel's sets have the completion descriptor of a link to another host, and whether threads sleep
//! on them ([`Watchers`]). A set may have hundreds of such links, so its thread does not tell each that it goes to
//! sleep: the set has a word for it ([`Watch`]), at which those who want to know look.
//!
//! Who sleeps says so, and then looks whether the service thread has begun to hear of links ([`Mailbox::taken_back`]);
//! the service thread does it the other way round.
//!
//! [`Mailbox::taken_back`]: crate::objects::mailbox::Mailbox::taken_back

use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::lock::Lock;
use rdmasock_core::sync::Presence;

/// What a set says of the threads that sleep on it.
#[derive(Default)]
pub struct Watch {
    asleep: Presence,
    /// How many sleeps have begun.
    sleeps: AtomicU32,
}

impl Watch {
    /// A thread is about to sleep. Then it looks at what could be a reason not to.
    pub fn enter(&self) {
        self.asleep.enter();
        self.sleeps.fetch_add(1, Relaxed);
    }

    /// It is awake. True if no other one sleeps.
    pub fn leave(&self) -> bool {
        self.asleep.leave()
    }

    /// In a fork child: nobody sleeps.
    pub fn reset(&self) {
        self.asleep.reset();
    }
}

/// The sets of one link.
pub struct Watchers {
    all: Lock<Vec<&'static Watch>>,
    count: AtomicU32,
}

impl Watchers {
    pub fn new() -> Self {
        Self {
            all: Lock::new(Vec::new()),
            count: AtomicU32::new(0),
        }
    }

    /// One more has the descriptor from now on.
    pub fn add(&self, watch: &'static Watch) {
        self.change(|all| all.push(watch));
    }

    /// This one has it no longer.
    pub fn remove(&self, watch: &'static Watch) {
        self.change(|all| all.retain(|one| !std::ptr::eq(*one, watch)));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<&'static Watch>)) {
        if let Some(mut all) = self.all.lock() {
            change(&mut all);
            self.count.store(all.len() as u32, Release);
        }
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// Whether a thread sleeps on one of them.
    pub fn is_any_asleep(&self) -> bool {
        self.count() > 0
            && self
                .all
                .lock()
                .is_none_or(|all| all.iter().any(|w| !w.asleep.is_empty()))
    }

    /// A number that changes whenever a thread goes to sleep on one of them.
    pub fn sleeps(&self) -> u32 {
        let all = self.all.lock();
        let each = |all: &Vec<&Watch>| {
            all.iter()
                .fold(0, |sum: u32, w| sum.wrapping_add(w.sleeps.load(Relaxed)))
        };
        all.map_or(0, |all| each(&all))
    }
}
