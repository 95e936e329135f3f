//! The epoll sets whose kernel's sets have the completion descriptor of a link to another host, and whether threads
//! sleep on them ([`Watchers`]). A set may have hundreds of such links, so its thread does not notify each link of its
//! sleep. Instead it counts itself in a word of the set ([`Watch`]), which the service thread reads.
//!
//! A thread that is about to sleep counts itself in, and then checks whether the service thread was subscribed to links
//! again ([`Mailbox::taken_back`]). The service thread uses the reverse order.
//!
//! [`Mailbox::taken_back`]: crate::objects::mailbox::Mailbox::taken_back

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rdmasock_core::lock::Lock;
use rdmasock_core::sync::Presence;

/// Counts the threads that sleep on an epoll set.
#[derive(Default)]
pub struct Watch {
    asleep: Presence,
    /// Number of sleeps that have begun; wraps.
    sleeps: AtomicU32,
}

impl Watch {
    /// Counts in a thread that is about to sleep. The thread then checks once more for reasons not to sleep.
    pub fn enter(&self) {
        self.asleep.enter();
        self.sleeps.fetch_add(1, Relaxed);
    }

    /// Counts out a thread that is awake. True if no other thread sleeps on the set.
    pub fn leave(&self) -> bool {
        self.asleep.leave()
    }

    /// Resets the count in a fork child, where no thread sleeps.
    pub fn reset(&self) {
        self.asleep.reset();
    }
}

/// The epoll sets that have one link's completion descriptor.
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

    /// Adds an epoll set, whose kernel's set has the descriptor from now on.
    pub fn add(&self, watch: &'static Watch) {
        self.change(|all| all.push(watch));
    }

    /// Removes an epoll set, whose kernel's set has the descriptor no longer.
    pub fn remove(&self, watch: &'static Watch) {
        self.change(|all| all.retain(|one| !std::ptr::eq(*one, watch)));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<&'static Watch>)) {
        if let Some(mut all) = self.all.lock() {
            change(&mut all);
            self.count.store(all.len() as u32, Release);
        }
    }

    /// Returns the number of epoll sets.
    pub fn count(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// Returns whether a thread sleeps on one of them; true also if that is not known.
    pub fn is_any_asleep(&self) -> bool {
        self.count() > 0
            && self
                .all
                .lock()
                .is_none_or(|all| all.iter().any(|w| !w.asleep.is_empty()))
    }

    /// Returns a number that changes whenever a thread goes to sleep on one of them.
    pub fn sleeps(&self) -> u32 {
        let all = self.all.lock();
        let each = |all: &Vec<&Watch>| {
            all.iter()
                .fold(0, |sum: u32, w| sum.wrapping_add(w.sleeps.load(Relaxed)))
        };
        all.map_or(0, |all| each(&all))
    }
}
