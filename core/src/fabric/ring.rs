//! The byte ring of one direction of a stream: single producer, single consumer, in the receiver's arena. Beside the
//! bytes lie the words by which each side asks the other for a wake-up. This module wakes no thread and allocates no
//! ring memory. It does not interpret attention words either: a nonzero [`Wake`] goes to the caller.
//!
//! # Positions
//! A position counts the bytes of the direction from its beginning and never wraps. The byte at position p lies at `p &
//! (size - 1)` of its ring. `head` ≤ position < `tail` is in flight. Each side's cursor ([`Producer`], [`Consumer`])
//! keeps its own position privately and only publishes it, so no value that the peer writes can move it. A value that
//! the peer publishes is copied, then validated; a bad one is a [`Violation`].
//!
//! # Cache lines
//! The block has one line per side. Per message the producer writes its own (`tail`) and the payload, and reads the
//! consumer's line (`want_data`). That line stays shared in the producer's cache, because the consumer writes it only
//! when it arms or when a quarter of the ring is unpublished. So a ping-pong of spinning sides moves two lines per
//! direction.
//!
//! # No lost wake-up
//! W1. `want_data` is set by the consumer and swapped to 0 by the producer; `want_space` the other way round. The side
//!     that takes a nonzero word must wake the waiters that it names.
//! W2. The side that will sleep sets its word (`arm_*`), then checks again. The other side publishes (`tail`, `end`;
//!     `head`, flags, an offer), then reads the word ([`Attention`](crate::sync::Attention)), so at least one of the
//!     two sees the other: either the sleeper finds what it waits for and does not sleep, or the publisher finds the
//!     word and wakes it.
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
//! The reserve is a ring that stays on offer: addresses without memory. It is for a producer that finds no room while
//! the program at the other end does not read. The producer switches to it as to any other ring, with the next
//! generation, but says how much of its beginning it uses (`Adopted`). It gets memory for the reserve itself, piece by
//! piece before it writes, so its process is charged for that memory. A producer that gets no memory is
//! [starved](Producer::is_starved): reading frees no part of the ring that it has not yet passed, so it has to end the
//! direction. The producer takes the reserve only once it knows that the consumer has come to the current ring, so that
//! two rings hold all that is in flight. The consumer may be offering another ring at that moment. Its generation does
//! not follow the reserve's, so the producer leaves it alone and the consumer withdraws it.
//!
//! # A bound
//! A producer may keep less unread than the ring holds ([`Producer::set_bound`]), but not less than half of it: W4
//! holds for three eighths. So it uses no more of a reserve than the next power of two.
//!
//! # Who ends a direction
//! Either side may, once: the producer with an [`EndMark`], or the consumer that [stops](Consumer::stop) reading in the
//! middle and wants the rest sent again on TCP. Both set the one word `end` from 0 by compare-and-swap, so exactly one
//! of them wins and the other learns of it. A direction that the producer has left is drained; a direction that the
//! consumer has stopped is sent again; never both.

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

/// The consumer has [stopped](Consumer::stop): the [unread](Producer::unread) bytes go over TCP again,
/// before any others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reader has stopped")]
pub struct Stopped;

/// The producer has [ended](Producer::end) the direction: it can only be drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the direction has its end mark")]
pub struct Ended;

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
    /// The consumer's head is beyond the bytes written.
    #[error("head beyond the tail")]
    HeadBeyondTail,
    /// The offered ring has a bad size or is outside the data area.
    #[error("bad ring offer")]
    BadOffer,
    /// The offered ring is larger than the allowance's largest ring.
    #[error("ring beyond what is written into")]
    BeyondAllowance,
    /// The producer adopted a ring that was not offered, or at an impossible position.
    #[error("bad ring switch")]
    BadSwitch,
    /// The consumer asks again for bytes of a ring that the producer no longer has.
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
    /// The reserve that the producer has adopted cannot be mapped.
    #[error("the ring in reserve is not to be had")]
    Unmapped,
    /// There is no memory for a copy of the bytes to be sent again.
    #[error("no memory for what is to be sent again")]
    NoMemory,
}

/// The ring that a producer has adopted, as one word. Low 24 bits: the generation of the offer, or for a reserve the
/// generation after the ring before. High 8 bits: for a reserve, log2 of the bytes at its beginning that are the ring;
/// 0 for an offered ring.
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

/// An offered ring, or the reserve. In one word, so that it is read whole: generation (24 bits, never 0),
/// log2 of the size in bytes (8), first page (32).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub generation: u32,
    pub region: Region,
}

impl Offer {
    pub(super) fn pack(self) -> u64 {
        u64::from(self.generation) << 40 | u64::from(self.region.log2()) << 32 | u64::from(self.region.page())
    }

    /// Decodes an offer. `None` when the generation is 0 or no ring may have that size; the place is not checked.
    pub(super) fn unpack(word: u64) -> Option<Self> {
        let region = Region::new(word as u32, (word >> 32) as u8)?;
        let generation = (word >> 40) as u32;
        (generation != 0).then_some(Self { generation, region })
    }

    /// Returns the generation after `generation`: 24 bits, never 0.
    pub(super) fn next_generation(generation: u32) -> u32 {
        ((generation + 1) & 0xff_ffff).max(1)
    }
}
