//! The numbers that an end gives to its streams, and the memory of its arena: who is done with a number,
//! and which rings are free when both ends are. Private to the end; the peer never sees it.

#![forbid(unsafe_code)]

use std::sync::atomic::{
    AtomicU8,
    Ordering::{AcqRel, Release},
};

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
    /// Somebody here still looks at its rings.
    pub const HELD: u8 = 4;
}

struct Inner {
    arena: Arena,
    next: u32,
    free: Vec<u32>,
    /// Rings of streams that we are done with but the peer is not.
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

/// See the module.
pub(super) struct Numbers {
    done: Sparse<AtomicU8, { MAX_STREAMS as usize / 128 }, 128>,
    inner: Lock<Inner>,
}

/// Both ends are done with a number. To be given back, after its rings.
#[must_use = "the number and its rings stay taken"]
#[derive(Debug)]
pub(super) struct Done {
    pub number: Vqpn,
    pub regions: Vec<Region>,
}

impl Numbers {
    /// Of an arena with a data area of so many bytes, with none given.
    pub fn new(data_bytes: u64) -> Self {
        Self {
            done: Sparse::new(),
            inner: Lock::new(Inner::new(data_bytes)),
        }
    }

    /// For another arena, with none given.
    pub fn reset(&self, data_bytes: u64) {
        if let Some(mut inner) = self.inner.lock() {
            *inner = Inner::new(data_bytes);
        }
    }

    /// Every number that was ever given is below this.
    pub fn ever_given(&self) -> u32 {
        self.inner.lock().map_or(0, |n| n.next)
    }

    /// A number with a ring of `1 << log2` bytes.
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

    /// A number that came to nothing.
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

    /// Who has `bits` ([`done`]) is done with a number.
    pub fn mark(&self, number: Vqpn, bits: u8) -> Option<Done> {
        let before = self.done.get(number.0 as usize)?.fetch_or(bits, AcqRel);
        if before == done::BOTH || before | bits != done::BOTH {
            return None;
        }
        self.done(number)
    }

    /// The rings of a number that this end is not done with are not given back before they are let go of, once.
    pub fn hold(&self, number: Vqpn) {
        if let Some(done) = self.done.get(number.0 as usize) {
            done.fetch_or(done::HELD, AcqRel);
        }
    }

    /// See [`hold`](Self::hold).
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

    /// The number may be given again.
    pub fn give_back(&self, number: Vqpn) {
        if let Some(mut inner) = self.inner.lock() {
            inner.free.push(number.0);
        }
    }

    /// Room for a ring of `1 << log2` bytes.
    pub fn allocate(&self, log2: u8) -> Option<Region> {
        self.inner.lock()?.arena.alloc(log2)
    }

    /// The same, if no more than `most` bytes are in use with it.
    pub fn reserve(&self, log2: u8, most: u64) -> Option<Region> {
        let mut inner = self.inner.lock()?;
        let fits = inner.arena.bytes_in_use() + (1 << log2) <= most;
        fits.then(|| inner.arena.alloc(log2)).flatten()
    }

    /// A ring that nobody uses any more.
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
