//! The numbers that an end gives to its streams, and the memory of its arena. Records which ends are done with a
//! number; its rings are free once both are. Private to the end; the peer never sees it.

#![forbid(unsafe_code)]

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Release};

use super::arena::Arena;
use super::layout::{MAX_STREAMS, Region};
use super::link::OpenError;
use super::ring::{Consumer, REGIONS};
use crate::ids::Vqpn;
use crate::lock::Lock;
use crate::sparse::Sparse;

/// Which ends are done with a stream's number.
pub(super) mod done {
    pub const LOCAL: u8 = 1;
    pub const PEER: u8 = 2;
    pub const BOTH: u8 = LOCAL | PEER;
    /// A user in this process still accesses its rings.
    pub const HELD: u8 = 4;
}

struct Inner {
    arena: Arena,
    next: u32,
    free: Vec<u32>,
    /// Rings of streams that this end is done with but the peer is not.
    zombies: Vec<(u32, [Option<Region>; REGIONS])>,
}

impl Inner {
    fn new(data_bytes: u64) -> Self {
        Self {
            arena: Arena::new(data_bytes),
            next: 0,
            free: Vec::new(),
            zombies: Vec::new(),
        }
    }
}

/// The numbers and the arena of one end.
pub(super) struct Numbers {
    done: Sparse<AtomicU8, { MAX_STREAMS as usize / 128 }, 128>,
    inner: Lock<Inner>,
}

/// A number that both ends are done with. The caller gives back its rings, then the number.
#[must_use = "the number and its rings stay taken"]
#[derive(Debug)]
pub(super) struct Done {
    pub number: Vqpn,
    pub regions: Vec<Region>,
}

impl Numbers {
    /// Returns the numbers for an arena whose data area has `data_bytes` bytes; none is in use.
    pub fn new(data_bytes: u64) -> Self {
        Self {
            done: Sparse::new(),
            inner: Lock::new(Inner::new(data_bytes)),
        }
    }

    /// Starts anew for another arena, whose data area has `data_bytes` bytes; no number is in use.
    pub fn reset(&self, data_bytes: u64) {
        if let Some(mut inner) = self.inner.lock() {
            *inner = Inner::new(data_bytes);
        }
    }

    /// Returns a bound: every number ever given is below it.
    pub fn ever_given(&self) -> u32 {
        self.inner.lock().map_or(0, |n| n.next)
    }

    /// Takes a free number, and a ring of `1 << log2` bytes.
    pub fn take(&self, log2: u8) -> Result<(Vqpn, Region), OpenError> {
        let mut inner = self.inner.lock().ok_or(OpenError::Busy)?;
        let number = match inner.free.pop() {
            Some(number) => number,
            None if inner.next < MAX_STREAMS => {
                inner.next += 1;
                inner.next - 1
            }
            None => return Err(OpenError::Streams),
        };
        let Some(region) = inner.arena.alloc(log2) else {
            inner.free.push(number);
            return Err(OpenError::Arena);
        };
        if let Some(done) = self.done.make(number as usize) {
            done.store(0, Release);
        }
        Ok((Vqpn(number), region))
    }

    /// Gives back a number that was not used, and its ring.
    pub fn put_back(&self, number: Vqpn, region: Region) {
        if let Some(mut inner) = self.inner.lock() {
            inner.arena.free(region);
            inner.free.push(number.0);
        }
    }

    /// Keeps the rings of a stream that this end has left until both have.
    pub fn keep(&self, number: Vqpn, consumer: Option<Consumer>) {
        if let (Some(consumer), Some(mut inner)) = (consumer, self.inner.lock()) {
            inner.zombies.push((number.0, consumer.into_regions()));
        }
    }

    /// Records that the ends in `bits` ([`done`]) are done with the number. Returns its rings, once: when both ends are
    /// done and no user holds them.
    pub fn mark(&self, number: Vqpn, bits: u8) -> Option<Done> {
        let before = self.done.get(number.0 as usize)?.fetch_or(bits, AcqRel);
        if before == done::BOTH || before | bits != done::BOTH {
            return None;
        }
        self.done(number)
    }

    /// Holds the rings of a number that this end is not done with: they are not given back before
    /// [`let_go`](Self::let_go) is called, once.
    pub fn hold(&self, number: Vqpn) {
        if let Some(done) = self.done.get(number.0 as usize) {
            done.fetch_or(done::HELD, AcqRel);
        }
    }

    /// Ends a [`hold`](Self::hold). Returns the rings if both ends are done with the number by now.
    pub fn let_go(&self, number: Vqpn) -> Option<Done> {
        let before = self.done.get(number.0 as usize)?.fetch_and(!done::HELD, AcqRel);
        if before != done::BOTH | done::HELD {
            return None;
        }
        self.done(number)
    }

    fn done(&self, number: Vqpn) -> Option<Done> {
        let mut inner = self.inner.lock()?;
        let mut regions = Vec::new();
        inner.zombies.retain(|(v, r)| {
            if *v == number.0 {
                regions.extend(r.iter().flatten().copied());
            }
            *v != number.0
        });
        Some(Done { number, regions })
    }

    /// Makes the number free for another stream.
    pub fn give_back(&self, number: Vqpn) {
        if let Some(mut inner) = self.inner.lock() {
            inner.free.push(number.0);
        }
    }

    /// Allocates a ring of `1 << log2` bytes; `None` if the arena has no room.
    pub fn allocate(&self, log2: u8) -> Option<Region> {
        self.inner.lock()?.arena.alloc(log2)
    }

    /// Allocates a ring of `1 << log2` bytes, if then at most `most` bytes of the arena are in use; otherwise `None`.
    pub fn reserve(&self, log2: u8, most: u64) -> Option<Region> {
        let mut inner = self.inner.lock()?;
        let fits = inner.arena.bytes_in_use() + (1 << log2) <= most;
        fits.then(|| inner.arena.alloc(log2)).flatten()
    }

    /// Frees a ring that neither end uses any more.
    pub fn free(&self, region: Region) {
        if let Some(mut inner) = self.inner.lock() {
            inner.arena.free(region);
        }
    }

    #[cfg(test)]
    pub fn bytes_in_use(&self) -> u64 {
        self.inner.lock().map_or(0, |n| n.arena.bytes_in_use())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_that_are_held_are_given_back_when_they_are_let_go_of() {
        let numbers = Numbers::new(1 << 20);
        let (number, _) = numbers.take(12).unwrap();
        numbers.hold(number);
        assert!(numbers.mark(number, done::LOCAL).is_none());
        assert!(numbers.mark(number, done::PEER).is_none());
        let (other, _) = numbers.take(12).unwrap();
        assert_ne!(other, number);
        assert_eq!(numbers.let_go(number).unwrap().number, number);
        assert!(numbers.let_go(number).is_none() && numbers.mark(number, done::LOCAL).is_none());
    }

    #[test]
    fn what_is_let_go_of_first_is_given_back_when_both_ends_are_done() {
        let numbers = Numbers::new(1 << 20);
        let (number, _) = numbers.take(12).unwrap();
        numbers.hold(number);
        assert!(numbers.mark(number, done::PEER).is_none());
        assert!(numbers.let_go(number).is_none());
        assert_eq!(numbers.mark(number, done::LOCAL).unwrap().number, number);
    }
}
