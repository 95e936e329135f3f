//! The words that the two sides of a direction share. This file defines their places, the meaning of marks, flags and
//! wake-up words, and how a wake-up word is taken. `ring.rs` describes the order in which the sides write the words.

use crate::sync::{AtomicU32, AtomicU64, Attention, Ordering, Published};

/// The waiters to wake: the value of a wake-up word that the other side has set and this side has taken. 0 names no
/// waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "whoever set these bits may be asleep"]
pub struct Wake(pub u32);

impl Wake {
    /// No waiter.
    pub const NONE: Wake = Wake(0);

    /// Returns whether there is no waiter to wake.
    #[inline]
    pub fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// The event that follows the last byte of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum EndMark {
    /// End of the stream.
    Fin = 1,
    /// The next byte is on TCP.
    Demote = 2,
}

impl EndMark {
    /// Decodes the word `end` of a block. `None` for any word that is no mark of the producer: 0, `STOPPED` or an
    /// unknown value.
    pub(in crate::fabric) fn from_word(word: u32) -> Option<Self> {
        [Self::Fin, Self::Demote].into_iter().find(|e| *e as u32 == word)
    }
}

/// The value of `end` when the consumer has stopped. It is not an [`EndMark`] of the producer.
pub(super) const STOPPED: u32 = 3;

bitflags::bitflags! {
    /// The flags by which the consumer informs the producer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RxFlags: u32 {
        /// The consumer will not read the direction any more.
        const RX_CLOSED = 1;
    }
}

/// The words that only the producer writes, with two exceptions: the consumer swaps `want_space` to 0, and may set
/// `end`.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct ProducerLine {
    /// The count of bytes ever produced.
    pub tail: Published<AtomicU64>,
    /// 0, an [`EndMark`] or [`STOPPED`]. A mark makes the tail at that time final.
    pub end: Published<AtomicU32>,
    pub want_space: Attention,
    /// The number of sends for which the window was too small, modulo 2^32.
    pub limited: AtomicU32,
    /// The adopted ring, packed as [`Adopted`]; 0 if there is none.
    pub generation: AtomicU32,
    /// The first position in the ring that the producer adopted last from an offer.
    pub switch_pos: AtomicU64,
    /// The first position in the reserve, if the reserve was adopted. It has a word of its own, because the consumer
    /// may be about to read `switch_pos` for the switch before.
    pub reserve_pos: AtomicU64,
}

impl ProducerLine {
    /// Takes the word `want_space`. Returns the waiters to wake because there is space.
    #[inline(always)]
    pub(super) fn take_want_space(&self) -> Wake {
        Wake(self.want_space.take())
    }
}

/// The words that only the consumer writes, with two exceptions: the producer swaps `want_data` to 0, and writes
/// `taken_at`.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct ConsumerLine {
    /// The count of bytes consumed, as last published.
    pub head: Published<AtomicU64>,
    pub want_data: Attention,
    /// The [`RxFlags`] that are set, as bits.
    pub flags: Published<AtomicU32>,
    /// The offered ring, packed as [`Offer`]; 0 if there is none.
    pub offer: Published<AtomicU64>,
    /// The reserve, packed as `offer` is; 0 if there is none. The generation only distinguishes one reserve from the
    /// next.
    pub reserve: AtomicU64,
    /// The time at which the producer last took `want_data`, in ticks of the host's [counter](crate::cycles). A hint
    /// for the order in which streams became ready. The word lies in this line because the producer has the line in its
    /// cache after taking `want_data`. By then the producer's own line may be in the consumer's cache again.
    pub taken_at: AtomicU64,
}

impl ConsumerLine {
    /// Takes the word `want_data`. Returns the waiters to wake because there are bytes or an end mark. Stores the time
    /// before it returns, so before any waiter is woken.
    #[inline(always)]
    pub(super) fn take_want_data(&self) -> Wake {
        let wake = Wake(self.want_data.take());
        #[cfg(not(loom))]
        if !wake.is_none() {
            self.taken_at.store(crate::cycles::now(), Ordering::Relaxed);
        }
        wake
    }
}

/// A line of its own, because the consumer writes it at every read. The producer reads it seldom: for example, when it
/// has no room and must not wait, or when the consumer's process has died.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct LastLine {
    /// The count of bytes consumed, published or not.
    pub consumed: AtomicU64,
}

/// The shared state of one direction. If all bytes are 0, it is the initial state.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct DirectionBlock {
    pub(super) producer: ProducerLine,
    pub(super) consumer: ConsumerLine,
    pub(super) last: LastLine,
}

#[cfg(not(loom))]
const _: () = {
    // The layout of an arena relies on both assertions.
    assert!(size_of::<DirectionBlock>() == crate::fabric::layout::BLOCK_BYTES);
    assert!(std::mem::offset_of!(DirectionBlock, consumer) == 64);
};

impl DirectionBlock {
    /// Resets the block to the initial state, for the next stream with this vQPN. Neither side may have a cursor on the
    /// block.
    pub fn reset(&self) {
        let (p, c) = (&self.producer, &self.consumer);
        p.end.reset(0);
        for word in [&p.limited, &p.generation] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&p.tail, &c.head, &c.offer] {
            word.reset(0);
        }
        for word in [
            &p.switch_pos,
            &c.taken_at,
            &p.reserve_pos,
            &c.reserve,
            &self.last.consumed,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        c.flags.reset(0);
        for word in [&p.want_space, &c.want_data] {
            word.reset();
        }
    }

    /// Returns when the producer last took the word `want_data`, in ticks of the host's [counter](crate::cycles).
    #[inline]
    pub(in crate::fabric) fn told_at(&self) -> u64 {
        self.consumer.taken_at.load(Ordering::Relaxed)
    }
}
