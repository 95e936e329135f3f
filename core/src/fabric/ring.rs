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

mod allowance;
mod block;
mod consumer;
mod error;
mod memory;
mod offer;
mod producer;
#[cfg(not(loom))]
pub(super) mod proxy;
#[cfg(test)]
mod tests;

pub use allowance::{Allowance, TouchedArea};
pub use block::{DirectionBlock, EndMark, RxFlags, Wake};
pub use consumer::{Armed, Consumer, OfferError, REGIONS};
pub use error::{Ended, RingError, Stopped, Violation};
pub use memory::{Byte, DataArea, Spans};
pub use producer::Producer;
