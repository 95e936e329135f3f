//! The words that the two sides of a direction share: where they lie, what marks, flags and attention words stand for,
//! and how an attention word is taken. `ring.rs` describes the order in which they are written; the cursors keep to it.

use crate::sync::{AtomicU32, AtomicU64, Attention, Ordering, Published};

/// The waiters to wake: an attention word as the other side set it, now taken. 0 names no waiter.
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
    /// Decodes the word `end` of a block; `None` for 0 and for a consumer that has stopped.
    pub(in crate::fabric) fn from_word(word: u32) -> Option<Self> {
        [Self::Fin, Self::Demote].into_iter().find(|e| *e as u32 == word)
    }
}

/// The consumer has stopped; not an [`EndMark`] of the producer's.
pub(super) const STOPPED: u32 = 3;

bitflags::bitflags! {
    /// The flags by which the consumer informs the producer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RxFlags: u32 {
        /// The direction will not be read any more.
        const RX_CLOSED = 1;
    }
}

/// Written by the producer only, but for `want_space`, which the consumer swaps to 0, and `end`.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct ProducerLine {
    /// Bytes ever produced.
    pub tail: Published<AtomicU64>,
    /// 0; or an [`EndMark`], valid for the tail at that time, which is final; or [`STOPPED`].
    pub end: Published<AtomicU32>,
    pub want_space: Attention,
    /// How often the window was too small, modulo 2^32.
    pub limited: AtomicU32,
    /// The adopted ring, see [`Adopted`]; 0: none.
    pub generation: AtomicU32,
    /// The first position in the adopted ring.
    pub switch_pos: AtomicU64,
    /// The first position in the reserve, if that was adopted. Not in the place of `switch_pos`, which the consumer may
    /// be about to read for the switch before.
    pub reserve_pos: AtomicU64,
}

impl ProducerLine {
    /// Takes the word `want_space`: the waiters to wake now that there is space.
    #[inline(always)]
    pub(super) fn take_want_space(&self) -> Wake {
        Wake(self.want_space.take())
    }
}

/// Written by the consumer only, but for `want_data`, which the producer swaps to 0, and `taken_at`.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct ConsumerLine {
    /// Bytes consumed, as far as published.
    pub head: Published<AtomicU64>,
    pub want_data: Attention,
    /// [`RxFlags`].
    pub flags: Published<AtomicU32>,
    /// The offered ring, see [`Offer`]; 0: none.
    pub offer: Published<AtomicU64>,
    /// The reserve, packed as `offer` is; its generation only distinguishes one reserve from the next. 0: none.
    pub reserve: AtomicU64,
    /// When `want_data` was last taken, by the host's [counter](crate::cycles): a hint for the order in which streams
    /// became ready. It lies in the consumer's line because the producer has that line in its cache after taking the
    /// word. The consumer may be reading the producer's own line again.
    pub taken_at: AtomicU64,
}

impl ConsumerLine {
    /// Takes the word `want_data`: the waiters to wake now that there are bytes or an end mark. Stores the time before
    /// it returns, so before any waiter is woken.
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

/// On a line of its own, because the consumer writes it at every read. The producer reads it only when it has no room
/// and must not wait, or when the consumer's process has died.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct LastLine {
    /// Bytes consumed, published or not.
    pub consumed: AtomicU64,
}

/// The shared state of one direction. All-zero is the initial state.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct DirectionBlock {
    pub(super) producer: ProducerLine,
    pub(super) consumer: ConsumerLine,
    pub(super) last: LastLine,
}

#[cfg(not(loom))]
const _: () = {
    // The layout of an arena relies on both.
    assert!(size_of::<DirectionBlock>() == crate::fabric::layout::BLOCK_BYTES);
    assert!(std::mem::offset_of!(DirectionBlock, consumer) == 64);
};

impl DirectionBlock {
    /// Resets the block to the initial state, for the next stream with this vQPN. Neither side may have a cursor on it.
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

    /// Returns when the producer last took the word `want_data`, by the host's [counter](crate::cycles).
    #[inline]
    pub(in crate::fabric) fn told_at(&self) -> u64 {
        self.consumer.taken_at.load(Ordering::Relaxed)
    }
}
