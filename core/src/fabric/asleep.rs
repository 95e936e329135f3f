//! Threads that are already asleep in the kernel when what they wait for becomes ours, so that what comes next does not
//! come to the kernel: those in poll or select name their sockets ([`Onlookers`]), those in the wait on an epoll set
//! are counted ([`Gate`]). Not for who sleeps on what is ours already (`ready`, `waiter`), nor for how they are woken.
//!
//! Who is about to sleep says so, and then looks whether it is still the kernel's; who makes it ours says that, and
//! then looks who sleeps ([`crate::sync`]).

use crate::sync::{AtomicBool, AtomicU64, Presence, Published};

/// A set of sockets by their slots, of which it may say too many: a bit stands for all whose slots leave the same rest.
/// So to sleep costs one exchange however many sockets are polled, and a thread that is told in vain looks once more.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Slots(u64);

impl Slots {
    /// With one more.
    #[must_use]
    pub fn with(self, slot: u32) -> Self {
        Self(self.0 | 1 << (slot % u64::BITS))
    }

    /// Whether nobody is in it.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// By the number of a waiter: which sockets its thread polls in the kernel.
#[derive(Debug)]
pub struct Onlookers(Box<[Published<AtomicU64>]>);

impl Onlookers {
    /// For waiters with numbers below `waiters`.
    pub fn new(waiters: u16) -> Self {
        Self((0..waiters).map(|_| Published::default()).collect())
    }

    /// The waiter's thread is about to poll these. It looks once more after this whether one has become ours.
    pub fn enter(&self, id: u16, slots: Slots) {
        if let Some(word) = self.0.get(usize::from(id)) {
            word.publish(slots.0);
        }
    }

    /// It is back.
    pub fn leave(&self, id: u16) {
        if let Some(word) = self.0.get(usize::from(id)) {
            word.publish_quietly(0);
        }
    }

    /// Whose threads may poll a socket that has just become ours, which was [published](Published).
    pub fn of(&self, slot: u32) -> impl Iterator<Item = u16> {
        let one = Slots::default().with(slot).0;
        let polls = move |word: &Published<AtomicU64>| word.look() & one != 0;
        let words = self.0.iter().zip(0u16..);
        words.filter_map(move |(word, id)| polls(word).then_some(id))
    }
}

/// A way into the kernel's wait, which is closed for good once something that is waited for is ours.
#[derive(Debug, Default)]
pub struct Gate {
    closed: Published<AtomicBool>,
    inside: Presence,
}

impl Gate {
    /// An open one with nobody inside.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts the thread, until it [leaves](Self::leave). False, and it is to leave at once, if the gate is closed.
    #[must_use]
    pub fn enter(&self) -> bool {
        self.inside.enter();
        !self.is_closed()
    }

    /// True if others are inside. Whoever was woken by the ring for the closing passes it on to one of them: it wakes
    /// one thread.
    #[must_use]
    pub fn leave(&self) -> bool {
        !self.inside.leave()
    }

    /// Whether threads are inside.
    pub fn is_in_use(&self) -> bool {
        !self.inside.is_empty()
    }

    /// From now on nobody goes in. True if threads are inside: one of them is to be rung for.
    #[must_use]
    pub fn close(&self) -> bool {
        self.closed.publish(true);
        self.is_in_use()
    }

    /// Whether it is closed.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.closed.look()
    }

    /// Opens it again, where nobody waits. True if it was closed.
    pub fn reopen(&self) -> bool {
        self.closed.take()
    }

    /// In a fork child, where nobody is inside: as new.
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
