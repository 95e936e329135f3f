//! One direction of a stream: a single-producer single-consumer byte ring in the receiver's
//! arena, with the words by which each side lets the other wake it. Not for waking anybody, for
//! allocating ring memory, nor for what the attention words mean: a nonzero [`Wake`] goes to
//! the caller.
//!
//! # Positions
//! A position counts the bytes of the direction from its beginning and never wraps; the byte at
//! position p lies at `p & (size - 1)` of its ring. `head` ≤ position < `tail` is in flight. Each
//! side's cursor ([`Producer`], [`Consumer`]) keeps its own position privately and only publishes
//! it, so nothing that the peer writes can move it; what the peer publishes is copied, then
//! validated, and a bad value is a [`Violation`].
//!
//! # Cache lines
//! The block has one line per side. Per message the producer writes its own (`tail`) and the
//! payload; it reads the consumer's line (`want_data`), which stays shared in its cache because
//! the consumer writes it only when it arms or when a quarter of the ring is unpublished. So a
//! ping-pong of spinning sides moves two lines per direction.
//!
//! # No lost wake-up
//! W1. `want_data` is set by the consumer and swapped to 0 by the producer; `want_space` the
//!     other way round. Who takes a nonzero word must wake what it names.
//! W2. The side that will sleep sets its word (`arm_*`), then looks again. The other side
//!     publishes (`tail`, `end`; `head`, flags, an offer), then looks at the word. All are `SeqCst`
//!     and each first step is a read-modify-write (see [`fence_after_rmw`]), so at least one of
//!     the two sees the other: either the sleeper finds what it waits for and does not sleep, or
//!     the publisher finds the word and wakes it.
//! W3. The consumer holds back less than a quarter of its ring: as soon as `consume` brings the
//!     unpublished part to a quarter it publishes by W2.
//! W4. The producer sleeps only while less than a quarter of the ring is free by the published
//!     head. By W3 more than half of the ring is then still to be read, and reading it crosses a
//!     quarter, which publishes and wakes. So a consumer that has drained the ring (the only
//!     one that sleeps for data) cannot meet a producer that sleeps for space, though the
//!     producer does not see the last bytes' consumption. `arm_data` publishes nonetheless, so
//!     that the producer's count of unread bytes becomes exact when the consumer goes idle.
//!
//! # Another ring in mid-stream
//! The consumer owns the memory, so it *offers* a ring ({generation, page, log2 size} in one
//! word). The producer *adopts* it at its current tail, the switch position: it writes that,
//! then the generation, before any later tail. Bytes before the switch position are in the old
//! ring, from it on in the new one. The consumer reads the generation after the tail, so it
//! knows of every switch that the tail can be beyond. Once its head has passed the switch
//! position the old ring is *retired* and may be freed; until then nothing else can be offered.
//! The first ring is an offer too: an all-zero block is a direction without a ring.
//!
//! # The reserve
//! A ring that is offered for good: addresses without memory, for a producer that finds no room while nobody reads. It
//! switches to it as to any other ring, with the next generation, but says how much of its beginning it uses
//! (`Adopted`), and sees to the memory itself, piece by piece before it writes, so it is charged for it. Where it finds none
//! it is [starved](Producer::is_starved): reading frees none of what it has not been through, so it has to end the direction.
//! It takes the reserve only once it knows that the consumer has come to the current ring, so that two rings hold all that is
//! in flight. The consumer may be offering another ring at that moment: that has not the generation after the
//! reserve's, so the producer leaves it alone and the consumer withdraws it.
//!
//! # A bound
//! A producer may keep less unread than the ring holds ([`Producer::set_bound`]), but not less than half of it: W4 holds
//! for three eighths. So it uses no more of a reserve than the next power of two.
//!
//! # Who ends a direction
//! Either side may, once: the producer with an [`End`], or the consumer that [stops](Consumer::stop)
//! reading in the middle and wants the rest sent again on TCP. Both set the one word `end` from 0 by
//! compare-and-swap, so exactly one of them wins and the other learns of it: a direction that the
//! producer has left is drained, and one that the consumer has stopped is sent again, never both.

mod allowance;
#[cfg(not(loom))]
pub(in crate::fabric) mod carry;
mod consumer;
mod memory;
mod producer;
#[cfg(test)]
mod tests;

pub use allowance::{Allowance, Ground};
pub use consumer::{Armed, Consumer, OfferError, REGIONS};
pub use memory::{Byte, DataArea, Spans};
pub use producer::Producer;

use super::layout::Region;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence_after_rmw};

/// Whom to wake: the attention word that was taken, as the other side set it. 0 is nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "whoever set these bits may be asleep"]
pub struct Wake(pub u32);

impl Wake {
    /// Nobody.
    pub const NONE: Wake = Wake(0);

    /// Nobody is to be woken.
    #[inline]
    pub fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// What follows the last byte of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum End {
    /// End of the stream.
    Fin = 1,
    /// The next byte is on TCP.
    Demote = 2,
}

/// The consumer has stopped; not an [`End`] of the producer's.
const STOPPED: u32 = 3;

/// The consumer has [stopped](Consumer::stop): what it has not [read](Producer::unread) goes over
/// TCP again, before anything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reader has stopped")]
pub struct Stopped;

/// The producer has [ended](Producer::end) the direction: it can only be drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the direction has its end mark")]
pub struct Ended;

bitflags::bitflags! {
    /// What the consumer tells the producer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RxFlags: u32 {
        /// Nobody will read any more.
        const RX_CLOSED = 1;
    }
}

/// A value in shared memory that no correct peer writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The producer's tail went back.
    #[error("tail moved back")]
    TailMovedBack,
    /// The producer's tail is beyond the space that it had.
    #[error("tail beyond the window")]
    TailBeyondWindow,
    /// The consumer's head went back.
    #[error("head moved back")]
    HeadMovedBack,
    /// The consumer has read what was not written.
    #[error("head beyond the tail")]
    HeadBeyondTail,
    /// The offered ring has a bad size or is outside the data area.
    #[error("bad ring offer")]
    BadOffer,
    /// The offered ring is larger than the producer lets it be, or one more than it writes into.
    #[error("ring beyond what is written into")]
    BeyondAllowance,
    /// The producer adopted what was not offered, or at an impossible position.
    #[error("bad ring switch")]
    BadSwitch,
    /// The consumer wants bytes again whose ring was given up two rings ago.
    #[error("what is to be sent again is not held")]
    NotHeld,
    /// Unknown end mark.
    #[error("bad end mark")]
    BadEnd,
}

/// Why a cursor cannot go on. The link is to be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The peer broke the protocol.
    #[error("peer violation: {0}")]
    PeerViolation(#[from] Violation),
    /// The kernel does not open what it has mapped for a reserve.
    #[error("the ring in reserve is not to be had")]
    Unmapped,
}

/// Written by the producer only, but for `want_space`, which the consumer swaps to 0, and `end`.
#[derive(Debug)]
#[repr(C, align(64))]
struct ProducerLine {
    /// Bytes ever produced.
    tail: AtomicU64,
    /// 0; or an [`End`], valid for the tail at that time, which is final; or [`STOPPED`].
    end: AtomicU32,
    want_space: AtomicU32,
    /// How often the window was too small, modulo 2^32.
    limited: AtomicU32,
    /// The adopted ring, see [`Adopted`]; 0: none.
    generation: AtomicU32,
    /// The first position in the adopted ring.
    switch_pos: AtomicU64,
    /// The first position in the reserve, if that was adopted. Not in the place of `switch_pos`, which the consumer may be about
    /// to read for the switch before.
    reserve_pos: AtomicU64,
}

/// Written by the consumer only, but for `want_data`, which the producer swaps to 0, and `taken_at`.
#[derive(Debug)]
#[repr(C, align(64))]
struct ConsumerLine {
    /// Bytes consumed, as far as published.
    head: AtomicU64,
    want_data: AtomicU32,
    /// [`RxFlags`].
    flags: AtomicU32,
    /// The offered ring, see [`Offer`]; 0: none.
    offer: AtomicU64,
    /// The reserve, likewise, where the generation only tells one from the other; 0: none.
    reserve: AtomicU64,
    /// When `want_data` was last taken, by the host's [counter](crate::cycles): in which order streams have come to be
    /// ready. Only a hint. In this line, which the producer has for itself when it has just taken that word: its own the
    /// consumer may be reading again.
    taken_at: AtomicU64,
}

impl ConsumerLine {
    /// Whoever is to be told that there is something to be read. Dated before anybody is.
    #[inline(always)]
    fn take_want_data(&self) -> Wake {
        let wake = take(&self.want_data);
        #[cfg(not(loom))]
        if !wake.is_none() {
            self.taken_at.store(crate::cycles::now(), Ordering::Relaxed);
        }
        wake
    }
}

/// On a line of its own: the consumer writes it at every read, and the producer looks at it only
/// when it is short of room and may not wait, or when the consumer's process has died.
#[derive(Debug)]
#[repr(C, align(64))]
struct LastLine {
    /// Bytes consumed, published or not.
    consumed: AtomicU64,
}

/// The shared state of one direction. All-zero is the initial state.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct DirectionBlock {
    producer: ProducerLine,
    consumer: ConsumerLine,
    last: LastLine,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<DirectionBlock>() == 256);
    assert!(std::mem::offset_of!(DirectionBlock, consumer) == 64);
};

impl DirectionBlock {
    /// A block outside shared memory, for tests and models.
    pub fn new() -> Self {
        Self {
            producer: ProducerLine {
                tail: AtomicU64::new(0),
                end: AtomicU32::new(0),
                want_space: AtomicU32::new(0),
                limited: AtomicU32::new(0),
                generation: AtomicU32::new(0),
                switch_pos: AtomicU64::new(0),
                reserve_pos: AtomicU64::new(0),
            },
            consumer: ConsumerLine {
                head: AtomicU64::new(0),
                want_data: AtomicU32::new(0),
                flags: AtomicU32::new(0),
                offer: AtomicU64::new(0),
                reserve: AtomicU64::new(0),
                taken_at: AtomicU64::new(0),
            },
            last: LastLine {
                consumed: AtomicU64::new(0),
            },
        }
    }

    /// Back to the initial state, for the next stream with this vQPN; only when neither side has
    /// a cursor on it any more.
    pub fn reset(&self) {
        let (p, c) = (&self.producer, &self.consumer);
        for word in [&p.end, &p.want_space, &p.limited, &p.generation] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [
            &p.tail,
            &p.switch_pos,
            &c.taken_at,
            &p.reserve_pos,
            &c.head,
            &c.offer,
            &c.reserve,
            &self.last.consumed,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&c.want_data, &c.flags] {
            word.store(0, Ordering::Release);
        }
    }
}

impl DirectionBlock {
    /// When it was last said that there is something to be read.
    #[inline]
    pub(in crate::fabric) fn told_at(&self) -> u64 {
        self.consumer.taken_at.load(Ordering::Relaxed)
    }
}

impl Default for DirectionBlock {
    fn default() -> Self {
        Self::new()
    }
}

/// The ring that a producer has adopted, as one word: the generation of the offer (24 bits), or the next one and the log2 of
/// the bytes of the reserve's beginning that are the ring (8 bits; 0 for a ring that was offered).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Adopted {
    generation: u32,
    part: u8,
}

impl Adopted {
    fn pack(self) -> u32 {
        u32::from(self.part) << 24 | self.generation
    }

    fn unpack(word: u32) -> Self {
        Self {
            generation: word & 0xff_ffff,
            part: (word >> 24) as u8,
        }
    }
}

/// An offered ring. In one word, so that it is read whole: generation (24 bits, never 0),
/// log2 of the size in bytes (8), first page (32).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Offer {
    generation: u32,
    region: Region,
}

impl Offer {
    fn pack(self) -> u64 {
        u64::from(self.generation) << 40
            | u64::from(self.region.log2()) << 32
            | u64::from(self.region.page())
    }

    /// `None` when the generation is 0 or no ring may have that size; the place is not checked.
    fn unpack(word: u64) -> Option<Self> {
        let region = Region::new(word as u32, (word >> 32) as u8)?;
        let generation = (word >> 40) as u32;
        (generation != 0).then_some(Self { generation, region })
    }

    /// The generation after `generation`.
    fn next_generation(generation: u32) -> u32 {
        ((generation + 1) & 0xff_ffff).max(1)
    }
}

/// After having published something with a `SeqCst` read-modify-write: takes the attention word
/// of the side that may wait for it (W2).
#[inline(always)]
fn take(want: &AtomicU32) -> Wake {
    fence_after_rmw();
    // Seldom set: a load leaves the line shared, a swap would not.
    if want.load(Ordering::SeqCst) == 0 {
        return Wake::NONE;
    }
    Wake(want.swap(0, Ordering::SeqCst))
}

/// Clears `bits` of an attention word that this side set, touching the line only if needed.
fn disarm(want: &AtomicU32, bits: u32) {
    if want.load(Ordering::Relaxed) & bits != 0 {
        want.fetch_and(!bits, Ordering::SeqCst);
    }
}
