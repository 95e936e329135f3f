//! The byte ring of one direction of a stream: single producer, single consumer, in the receiver's arena. Beside the
//! bytes lie the *wake-up words*, by which each side names the waiters that the other side has to wake. This module
//! wakes no thread and allocates no ring memory. It does not interpret the wake-up words either: it returns each word
//! that it takes to the caller, as a [`Wake`].
//!
//! # Positions
//! A position counts the bytes of the direction from its beginning and never wraps. The byte at position p lies at `p &
//! (size - 1)` of its ring. Bytes at positions from `head` up to `tail` are in flight. Each side's cursor
//! ([`Producer`], [`Consumer`]) keeps its own position privately and only publishes it, so no value that the peer
//! writes can move it. A value that the peer publishes is copied, then validated; a bad one is a [`Violation`].
//!
//! # Cache lines
//! The direction's block has one line that the producer writes and one that the consumer writes (`DirectionBlock`). For
//! each message the producer writes its own line (`tail`) and the payload, and reads the consumer's line (`want_data`).
//! The consumer writes its line only when it sets `want_data` (*arms* it) before a sleep, or when a quarter of the ring
//! is unpublished. So that line stays shared in the producer's cache, and a ping-pong of spinning sides moves two lines
//! for each direction.
//!
//! # No lost wake-up
//! W1. `want_data` is set by the consumer and swapped to 0 by the producer; `want_space` the other way round. The side
//!     that takes a nonzero word must wake the waiters that it names.
//! W2. The side that will sleep sets its word (`arm_*`), then checks again. The other side publishes (`tail`, `end`;
//!     `head`, flags, an offer), then reads the word ([`Attention`](crate::sync::Attention)), so at least one of the
//!     two sees the other: either the sleeper finds what it waits for and does not sleep, or the publisher finds the
//!     word and wakes the sleeper.
//! W3. The consumer holds back less than a quarter of its ring: as soon as `consume` brings the unpublished part to a
//!     quarter, it publishes by W2.
//! W4. The producer sleeps only while less than a quarter of the ring is free by the published head. By W3 more than
//!     half of the ring is then still to be read. Reading those bytes brings the unpublished part to a quarter, which
//!     publishes and wakes. A consumer sleeps for data only when it has drained the ring. At that time no producer
//!     sleeps for space, even if it has not seen that the last bytes were consumed. `arm_data` publishes the head
//!     nonetheless, so that the producer's count of unread bytes becomes exact when the consumer goes idle.
//!
//! # Another ring in mid-stream
//! The consumer owns the memory, so it *offers* a ring ({generation, page, log2 size} in one word). The producer
//! *adopts* the ring at its current tail, the switch position: it writes that position, then the generation, before any
//! later tail. Bytes before the switch position are in the old ring, and bytes from that position on in the new one.
//! The consumer reads the generation after the tail, so it knows of every switch that the tail can be beyond. Once its
//! head has passed the switch position the old ring is *retired* and may be freed; until then nothing else can be
//! offered. The first ring is an offer too: a block of zeroes is a direction without a ring.
//!
//! # The reserve
//! The reserve is a ring that stays on offer: addresses without memory. It is for a producer that finds no room while
//! the program at the other end does not read. The producer switches to the reserve as to any other ring, with the next
//! generation, but publishes how much of its beginning it uses (`Adopted`). The producer itself gets memory for the
//! reserve, piece by piece before it writes, so its process is charged for that memory. A producer that gets no memory
//! is [starved](Producer::is_starved). Reading does not help a starved producer, since the bytes of the reserve that it
//! would write next still have no memory. So the producer has to end the direction. The producer takes the reserve only
//! once it knows that the consumer has come to the current ring, so that two rings hold all bytes in flight. The
//! consumer may be offering another ring at that moment. The generation of this other offer does not follow the
//! reserve's, so the producer does not adopt the ring, and the consumer withdraws the offer.
//!
//! # A bound
//! A bound on the unread bytes may be less than the ring holds ([`Producer::set_bound`]). The producer treats a bound
//! below half of the ring as half of the ring. It then sleeps only while more than three eighths of the ring are unread
//! by the published head. Reading them brings the unpublished part to a quarter, so W4 holds. For the same reason the
//! producer uses no more of a reserve than the next power of two after the bound.
//!
//! # Who ends a direction
//! Either side may end a direction, once. The producer does so with an [`EndMark`]. The consumer does so if it
//! [stops](Consumer::stop) reading in the middle and wants the rest sent again on TCP. Both set the word `end` from 0
//! by compare-and-swap, so exactly one of them succeeds, and the other side learns of it. If the producer succeeded,
//! the consumer drains the ring. If the consumer succeeded, the producer sends the unread bytes again. So no byte is
//! both drained and sent again.

use crate::fabric::layout::Region;
pub use crate::fabric::ring::block::{DirectionBlock, EndMark, RxFlags, Wake};
pub use crate::fabric::ring::consumer::{Armed, Consumer, OfferError, REGIONS};
pub use crate::fabric::ring::memory::{Allowance, Byte, DataArea, NoRing, Spans};
pub use crate::fabric::ring::producer::Producer;

mod block;
mod consumer;
mod memory;
mod producer;
#[cfg(not(loom))]
pub(super) mod proxy;
#[cfg(test)]
mod tests;

/// Error: the consumer has [stopped](Consumer::stop). The [unread](Producer::unread) bytes are sent again over TCP,
/// before any later ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reader has stopped")]
pub struct Stopped;

/// Error: the producer has [ended](Producer::end) the direction, so the consumer can only drain it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the direction has its end mark")]
pub struct Ended;

/// A value in shared memory that no correct peer writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The producer's tail went back.
    #[error("tail moved back")]
    TailMovedBack,
    /// The producer's tail is beyond the space that the producer had.
    #[error("tail beyond the window")]
    TailBeyondWindow,
    /// The consumer's head went back.
    #[error("head moved back")]
    HeadMovedBack,
    /// The consumer's head is beyond the bytes written.
    #[error("head beyond the tail")]
    HeadBeyondTail,
    /// The offered ring has a bad size or is outside the data area.
    #[error("bad ring offer")]
    BadOffer,
    /// The offered ring is larger than the largest ring that the `Allowance` admits.
    #[error("ring beyond what is written into")]
    BeyondAllowance,
    /// The producer adopted a ring that was not offered, or at an impossible position.
    #[error("bad ring switch")]
    BadSwitch,
    /// The bytes to be sent again begin in a ring that the producer has not kept.
    #[error("what is to be sent again is not held")]
    NotHeld,
    /// Unknown end mark.
    #[error("bad end mark")]
    BadEnd,
}

/// Why a cursor cannot go on. The link has to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The peer broke the protocol.
    #[error("peer violation: {0}")]
    PeerViolation(#[from] Violation),
    /// The consumer cannot map the reserve that the producer has adopted.
    #[error("the ring in reserve is not to be had")]
    Unmapped,
    /// There is no memory for a copy of the bytes to be sent again.
    #[error("no memory for what is to be sent again")]
    NoMemory,
}

/// The ring that a producer has adopted, as one word. Low 24 bits: the generation of the offer, or for a reserve the
/// generation after the previous ring's. High 8 bits: 0 for an offered ring. For a reserve they are log2 of the bytes
/// at its beginning that the producer uses as the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Adopted {
    pub generation: u32,
    pub part: u8,
}

impl Adopted {
    pub(crate) fn pack(self) -> u32 {
        u32::from(self.part) << 24 | self.generation
    }

    pub(crate) fn unpack(word: u32) -> Self {
        Self {
            generation: word & 0xff_ffff,
            part: (word >> 24) as u8,
        }
    }
}

/// An offered ring, or the reserve. It is packed into one word, so that one load reads all of it: generation (24 bits,
/// never 0), log2 of the size in bytes (8), first page (32).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub generation: u32,
    pub region: Region,
}

impl Offer {
    pub(super) fn pack(self) -> u64 {
        u64::from(self.generation) << 40 | u64::from(self.region.log2()) << 32 | u64::from(self.region.page())
    }

    /// Decodes an offer. `None` if the generation is 0 or no ring may have that size. The ring's place is not checked.
    pub(super) fn unpack(word: u64) -> Option<Self> {
        let region = Region::new(word as u32, (word >> 32) as u8)?;
        let generation = (word >> 40) as u32;
        (generation != 0).then_some(Self { generation, region })
    }

    /// Returns the generation after `generation`: 24 bits, and 1 instead of 0.
    pub(super) fn next_generation(generation: u32) -> u32 {
        ((generation + 1) & 0xff_ffff).max(1)
    }
}
