//! Threads that sleep in the kernel already when the socket or epoll set that they wait for moves to the library. Later
//! events do not come to the kernel, so these threads have to be woken. Threads in poll or select name their sockets
//! ([`Onlookers`]). Threads in the wait on an epoll set are counted ([`Gate`]). Not for threads that wait on sockets of
//! the library already (`ready`, `waiter`), nor for how threads are woken.
//!
//! A thread that is about to sleep publishes that, then checks whether the kernel still serves its socket. The thread
//! that moves the socket publishes that, then checks for sleepers ([`crate::sync`]).

use crate::sync::{AtomicBool, AtomicU64, Presence, Published};

/// A set of sockets by their slots. It may name too many: a bit stands for all slots that are equal modulo 64. So a
/// sleeping thread costs one exchange however many sockets it polls, and a thread that is woken in vain checks once
/// more.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Slots(u64);

impl Slots {
    /// Returns the set with `slot` added.
    #[must_use]
    pub fn with(self, slot: u32) -> Self {
        Self(self.0 | 1 << (slot % u64::BITS))
    }

    /// Returns whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// The sockets that threads poll in the kernel, by the number of the thread's waiter.
#[derive(Debug)]
pub struct Onlookers(Box<[Published<AtomicU64>]>);

impl Onlookers {
    /// Returns an empty list for waiters with numbers below `waiters`.
    pub fn new(waiters: u16) -> Self {
        Self((0..waiters).map(|_| Published::default()).collect())
    }

    /// Records that the thread of waiter `id` is about to poll `slots`. Afterwards the thread checks once more whether
    /// one of them has moved to the library.
    pub fn enter(&self, id: u16, slots: Slots) {
        if let Some(word) = self.0.get(usize::from(id)) {
            word.publish(slots.0);
        }
    }

    /// Records that the thread of waiter `id` polls no longer.
    pub fn leave(&self, id: u16) {
        if let Some(word) = self.0.get(usize::from(id)) {
            word.publish_quietly(0);
        }
    }

    /// Returns the waiters whose threads may poll the socket in `slot`. Its move to the library was
    /// [published](Published) before.
    pub fn of(&self, slot: u32) -> impl Iterator<Item = u16> {
        let one = Slots::default().with(slot).0;
        let polls = move |word: &Published<AtomicU64>| word.look() & one != 0;
        let words = self.0.iter().zip(0u16..);
        words.filter_map(move |(word, id)| polls(word).then_some(id))
    }
}

/// A gate before the kernel's wait on an epoll set. It closes for good once a member of the set is served by the
/// library.
#[derive(Debug, Default)]
pub struct Gate {
    closed: Published<AtomicBool>,
    inside: Presence,
}

impl Gate {
    /// Returns an open gate with no thread inside.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts the thread until it [leaves](Self::leave). False if the gate is closed: the thread must leave at once.
    #[must_use]
    pub fn enter(&self) -> bool {
        self.inside.enter();
        !self.is_closed()
    }

    /// Ends the count of this thread. True if others are inside. A thread that was woken by the ring for the closing
    /// rings for another: each ring wakes one thread.
    #[must_use]
    pub fn leave(&self) -> bool {
        !self.inside.leave()
    }

    /// Returns whether threads are inside.
    pub fn is_in_use(&self) -> bool {
        !self.inside.is_empty()
    }

    /// Closes the gate. True if threads are inside: the caller rings for one of them.
    #[must_use]
    pub fn close(&self) -> bool {
        self.closed.publish(true);
        self.is_in_use()
    }

    /// Returns whether the gate is closed.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed.look()
    }

    /// Opens the gate again, when no thread waits. True if it was closed.
    pub fn reopen(&self) -> bool {
        self.closed.take()
    }

    /// Resets the gate in a fork child, where no thread is inside.
    pub fn reset(&self) {
        self.reopen();
        self.inside.reset();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn whoever_polls_a_socket_is_named_until_he_is_back() {
        let onlookers = Onlookers::new(100);
        let named = |slot| onlookers.of(slot).collect::<Vec<_>>();
        let (first, last) = (0, 99);
        onlookers.enter(first, Slots::default().with(3).with(64));
        onlookers.enter(last, Slots::default().with(67));
        assert_eq!(named(3), [first, last]);
        assert_eq!(named(64), [first]);
        assert_eq!(named(4), []);
        onlookers.leave(first);
        assert_eq!((named(67), named(64)), (vec![last], vec![]));
    }

    #[test]
    fn a_gate_is_closed_until_it_is_opened_again() {
        let gate = Gate::new();
        assert!(gate.enter() && gate.is_in_use());
        assert!(gate.close(), "one is inside");
        assert!(!gate.enter());
        assert!(gate.leave());
        assert!(!gate.leave() && !gate.is_in_use());
        assert!(gate.reopen() && !gate.reopen() && !gate.is_closed());
    }
}

#[cfg(all(test, loom))]
mod loom_models;
