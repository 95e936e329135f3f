//! Threads inside the kernel's poll on sockets that are the kernel's to report on. When one of these becomes ours, what
//! comes next does not come to the kernel, so they are told. Not for sockets that are ours already: those have `Sleeper`s.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Release, SeqCst},
};

use rdmasock_core::fabric::waiter::{POLLING, WaiterId};

use crate::socket::Socket;

/// A set of sockets, of which it may say too many: a bit stands for all whose slots leave the same rest. So to sleep costs
/// one store however many sockets are polled, and a thread that is told in vain looks once more.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Sockets(u64);

impl Sockets {
    /// Adds one.
    pub fn add(&mut self, socket: &Socket) {
        *self = self.with(socket.slot);
    }

    fn with(self, slot: u32) -> Self {
        Self(self.0 | 1 << (slot % u64::BITS))
    }

    /// Whether nobody is in it.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// By waiter: what its thread polls in the kernel.
pub struct Onlookers(Box<[AtomicU64]>);

impl Onlookers {
    pub fn new() -> Self {
        Self((0..POLLING).map(|_| AtomicU64::new(0)).collect())
    }

    /// The waiter's thread is about to poll these. It looks once more after this whether one has become ours.
    pub fn enter(&self, id: WaiterId, sockets: Sockets) {
        if let Some(word) = self.0.get(usize::from(id.0)) {
            // A SeqCst exchange, as all sleeps are announced by one: who makes a socket ours says so first, and then looks here.
            // One of the two sees the other.
            word.swap(sockets.0, SeqCst);
        }
    }

    /// It is back.
    pub fn leave(&self, id: WaiterId) {
        if let Some(word) = self.0.get(usize::from(id.0)) {
            word.store(0, Release);
        }
    }

    /// Whose threads may poll this socket, which has just become ours.
    pub fn of(&self, socket: &Socket) -> impl Iterator<Item = WaiterId> {
        self.at(socket.slot)
    }

    fn at(&self, slot: u32) -> impl Iterator<Item = WaiterId> {
        let one = Sockets::default().with(slot).0;
        let words = self.0.iter().zip(0..POLLING);
        words.filter_map(move |(word, id)| (word.load(SeqCst) & one != 0).then_some(WaiterId(id)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_polls_a_socket_is_named_until_he_is_back() {
        let onlookers = Onlookers::new();
        let named = |slot| onlookers.at(slot).collect::<Vec<_>>();
        let (first, last) = (WaiterId(0), WaiterId(POLLING - 1));
        onlookers.enter(first, Sockets::default().with(3).with(64));
        onlookers.enter(last, Sockets::default().with(67));
        assert_eq!(named(3), [first, last]);
        assert_eq!(named(64), [first]);
        assert_eq!(named(4), []);
        onlookers.leave(first);
        assert_eq!((named(67), named(64)), (vec![last], vec![]));
    }
}
