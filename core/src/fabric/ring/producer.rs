//! The sending side's private cursor of one direction.

#[cfg(not(loom))]
mod aside;
mod reserve;

use std::ptr::NonNull;

use super::allowance::Allowance;
use super::block::{ConsumerLine, DirectionBlock, EndMark, ProducerLine, RxFlags, Wake};
use super::error::{RingError, Stopped, Violation};
use super::memory::{DataArea, NoRing, RingMemory, Spans};
use super::offer::{Adopted, Offer};
use crate::fabric::layout::Region;
use crate::sync::Ordering;

/// A ring before the current one, and its first position.
#[derive(Clone, Copy, Debug)]
struct Earlier {
    ring: RingMemory,
    from: u64,
}

impl Earlier {
    /// Nothing in front of `position` is held.
    const fn none(position: u64) -> Self {
        Self {
            ring: RingMemory::NONE,
            from: position,
        }
    }
}

/// The producer of one direction; used under the owner's lock of that direction.
///
/// A send is [`spans`](Self::spans), copy in, [`commit`](Self::commit). When there is no room:
/// [`arm_space`](Self::arm_space), then sleep if that says so.
#[derive(Debug)]
pub struct Producer {
    block: NonNull<DirectionBlock>,
    area: DataArea,
    ring: RingMemory,
    /// The rings before, which may still hold bytes that were not read, the last first.
    earlier: [Earlier; 2],
    /// Bytes ever committed.
    tail: u64,
    /// May write up to this position by what is known of the consumer.
    limit: u64,
    /// How far the consumer has come, as last seen.
    head: u64,
    /// What it has published of that, as last seen.
    published: u64,
    /// First position in the current ring.
    switch_pos: u64,
    /// The offer that the current ring comes from, as read.
    offer: u64,
    /// The generation of the current ring.
    generation: u32,
    /// The reserve that was taken last, as read.
    reserve: u64,
    /// That is the current ring, and has memory up to this position.
    backed: Option<(Region, u64)>,
    /// There was no memory for more.
    starved: bool,
    /// The ring is this end's own, not the consumer's.
    aside: bool,
    /// So many bytes may be unread, but no less than half of the ring; 0: not known yet.
    bound: u64,
    /// That is an estimate.
    bound_is_early: bool,
    seen_flags: u32,
    limited: u32,
    /// The tail when `limited` was last counted: once per position, however often retried.
    limited_at: Option<u64>,
    ended: bool,
    /// What may be written into.
    allowance: Allowance,
}

// SAFETY: a cursor is only pointers into shared memory, which any thread may use, and values.
unsafe impl Send for Producer {}

impl Producer {
    /// The producer of a direction in its initial state, with rings in `area`, the data area of
    /// the *receiver's* arena.
    ///
    /// # Safety
    /// `block` is mapped and aligned, and stays so while the cursor exists; this process has
    /// no other producer for it.
    pub unsafe fn new(block: NonNull<DirectionBlock>, area: DataArea) -> Self {
        Self {
            block,
            area,
            ring: RingMemory::NONE,
            earlier: [Earlier::none(0); 2],
            tail: 0,
            limit: 0,
            head: 0,
            published: 0,
            switch_pos: 0,
            offer: 0,
            generation: 0,
            reserve: 0,
            backed: None,
            starved: false,
            aside: false,
            bound: 0,
            bound_is_early: false,
            seen_flags: 0,
            limited: 0,
            limited_at: None,
            ended: false,
            allowance: Allowance::default(),
        }
    }

    /// Only rings that are within this are adopted. Before the first.
    pub fn with_allowance(self, allowance: Allowance) -> Self {
        Self { allowance, ..self }
    }

    #[inline(always)]
    fn mine(&self) -> &ProducerLine {
        // SAFETY: mapped while `self` exists, by the contract of `new`; all fields are atomics.
        unsafe { &self.block.as_ref().producer }
    }

    #[inline(always)]
    fn theirs(&self) -> &ConsumerLine {
        // SAFETY: as in `mine`.
        unsafe { &self.block.as_ref().consumer }
    }

    #[inline(always)]
    fn take_data(&self) -> Wake {
        self.theirs().take_want_data()
    }

    /// All the free pieces. Looks at the consumer only when less than `want` bytes are known to
    /// be free; when that is so after looking too, this counts as limited by the window.
    #[inline(always)]
    pub fn spans(&mut self, want: usize) -> Result<Spans<'_>, RingError> {
        if self.limit - self.tail < want as u64 {
            self.refill(want as u64)?;
        }
        Ok(self.ring.spans(self.tail, self.limit - self.tail))
    }

    /// Hands the first `n` bytes of the spans to the consumer; not more than was free, and
    /// nothing after [`end`](Self::end).
    #[inline(always)]
    pub fn commit(&mut self, n: usize) -> Wake {
        let n = (n as u64).min(self.limit - self.tail);
        if n == 0 {
            return Wake::NONE;
        }
        self.tail += n;
        // Releases the payload to the consumer's load of `tail`; and W2.
        self.mine().tail.publish(self.tail);
        let wake = self.take_data();
        // The line is here anyway: notice a new offer, and let the next `spans` adopt it.
        if self.theirs().offer.load(Ordering::Relaxed) != self.offer {
            self.limit = self.tail;
        }
        wake
    }

    /// As [`commit`](Self::commit), but nobody is woken, however long it takes until
    /// [`wake`](Self::wake): more follows soon. Who looks finds the bytes.
    #[inline]
    pub fn commit_quietly(&mut self, n: usize) {
        let n = (n as u64).min(self.limit - self.tail);
        if n > 0 {
            self.tail += n;
            // Releases the payload to the consumer's load of `tail`.
            self.mine().tail.publish_quietly(self.tail);
        }
    }

    /// Whom to wake for what was committed quietly.
    pub fn wake(&mut self) -> Wake {
        // The same value again: W2.
        self.mine().tail.publish(self.tail);
        self.take_data()
    }

    /// Marks what follows the last byte. Only the first mark counts; nothing can be sent after,
    /// whatever this returns.
    pub fn end(&mut self, end: EndMark) -> Result<Wake, Stopped> {
        if self.ended {
            return Ok(Wake::NONE);
        }
        self.ended = true;
        self.limit = self.tail;
        self.mine().end.claim(end as u32).map_err(|_| Stopped)?;
        Ok(self.take_data())
    }

    /// Asks for a wake-up when there is space: sets `bits` in the attention word, then looks.
    /// True: do not sleep, [`has_space`](Self::has_space) holds now. The bits stay set either
    /// way; other waiters may share them.
    pub fn arm_space(&mut self, bits: u32) -> Result<bool, RingError> {
        self.mine().want_space.arm(bits);
        self.has_space()
    }

    /// No wake-up for `bits` is needed any more (one may be on its way nonetheless).
    pub fn disarm_space(&self, bits: u32) {
        self.mine().want_space.disarm(bits);
    }

    /// What was [asked for](Self::arm_space) and nobody has taken, as in
    /// [`Attention::left`](crate::sync::Attention::left).
    pub fn space_wanted(&self) -> u32 {
        self.mine().want_space.left()
    }

    /// At least a quarter of the ring is free, or another ring is offered, or the consumer's
    /// flags say what [`consumer_flags`](Self::consumer_flags) has not yet reported. This is
    /// also the condition for "writable".
    pub fn has_space(&mut self) -> Result<bool, RingError> {
        self.reload()?;
        let size = self.ring.size();
        let quarter = self.ring.quarter().min(self.most() / 4);
        Ok(self.theirs().offer.look() != self.offer
            || self.theirs().flags.look() != self.seen_flags
            || size != 0 && self.window() - self.tail >= quarter)
    }

    /// What the consumer has told so far. Unknown bits are dropped.
    pub fn consumer_flags(&mut self) -> RxFlags {
        self.seen_flags = self.theirs().flags.look();
        RxFlags::from_bits_truncate(self.seen_flags)
    }

    /// Bytes committed that the consumer has not published as consumed.
    pub fn used(&mut self) -> Result<u64, RingError> {
        self.reload()?;
        Ok(self.tail - self.head)
    }

    /// Up to where the consumer has read, as far as its own count of that is seen here (within a host), or was
    /// published.
    pub fn consumed(&mut self) -> Result<u64, RingError> {
        self.reload()?;
        // SAFETY: mapped while `self` exists, by the contract of `new`.
        let last = unsafe { &self.block.as_ref().last };
        Ok(last.consumed.load(Ordering::Relaxed).clamp(self.head, self.tail))
    }

    /// Whether the consumer, whose process has died, has left bytes unread.
    pub fn is_unread(&self) -> bool {
        // SAFETY: mapped while `self` exists, by the contract of `new`.
        let last = unsafe { &self.block.as_ref().last };
        last.consumed.load(Ordering::Relaxed) < self.tail
    }

    /// Bytes that could be written now.
    pub fn free(&mut self) -> Result<u64, RingError> {
        self.reload()?;
        Ok(self.limit - self.tail)
    }

    /// Bytes ever committed.
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// Size of the current ring in bytes; 0 before the first one.
    pub fn ring_size(&self) -> u64 {
        self.ring.size()
    }

    /// Whether the ring that is on offer can be had: the first one, without which nothing can be sent.
    #[cfg(not(loom))]
    pub fn can_adopt(&self) -> bool {
        let word = self.theirs().offer.look();
        // What is not a ring is for `adopt` to find.
        Offer::unpack(word).is_none_or(|offer| {
            let region = offer.region;
            self.allowance.reaches(region) && self.area.ring(region) != Err(NoRing::Unmapped)
        })
    }

    /// Moves on to the ring that the consumer offers, if it does; true when it did. `spans` does
    /// this by itself; to be called for an idle direction whose consumer wants to shrink.
    pub fn adopt(&mut self) -> Result<bool, RingError> {
        let word = self.theirs().offer.look();
        if word == self.offer || self.ended {
            return Ok(false);
        }
        let offer = Offer::unpack(word).ok_or(Violation::BadOffer)?;
        if offer.generation != Offer::next_generation(self.generation) {
            // Offered when the consumer did not know yet that the reserve was taken: it is withdrawn.
            self.offer = word;
            return Ok(false);
        }
        if self.is_too_large(offer.region) || !self.allowance.reaches(offer.region) {
            self.offer = word;
            return Ok(false);
        }
        let ring = match self.area.ring(offer.region) {
            Ok(ring) => ring,
            Err(NoRing::Outside) => return Err(Violation::BadOffer.into()),
            Err(NoRing::Unmapped) => {
                // The direction stays on the ring that it has. Not tried again: each send would.
                self.offer = word;
                return Ok(false);
            }
        };
        if !self.allowance.admits(offer.region) {
            return Err(Violation::BeyondAllowance.into());
        }
        self.offer = word;
        self.backed = None;
        self.switch_to(ring, offer.generation, 0);
        Ok(true)
    }

    /// Whether a ring on offer would have the program's bound overstepped, and there are others.
    fn is_too_large(&self, region: Region) -> bool {
        let half = region.len() as u64 / 2;
        let has_others = self.ring.size() >= self.bound || self.has_reserve();
        self.ring.size() != 0 && self.bound != 0 && half > self.bound && has_others
    }

    /// The program lets so many bytes be unread: taken for half of the ring if that is more.
    pub fn set_bound(&mut self, bytes: u64) {
        self.bound = bytes.max(1);
        self.bound_is_early = false;
    }

    /// As [`Self::set_bound`], at a time when it may still change: what is full is asked again.
    pub fn estimate_bound(&mut self, bytes: u64) {
        self.bound = bytes.max(1);
        self.bound_is_early = true;
    }

    /// Whether it was said, and not estimated.
    pub fn has_bound(&self) -> bool {
        self.bound != 0 && !self.bound_is_early
    }

    /// Whether more might be unread than the ring holds.
    pub fn may_grow(&self) -> bool {
        self.bound == 0 || self.ring.size() < self.bound
    }

    /// How many bytes may be unread in this ring.
    fn most(&self) -> u64 {
        match self.bound {
            0 => u64::MAX,
            bound => bound.max(self.ring.size() / 2),
        }
    }

    /// What is committed from now on is in `ring`.
    fn change_ring(&mut self, ring: RingMemory) {
        let before = Earlier {
            ring: std::mem::replace(&mut self.ring, ring),
            from: self.switch_pos,
        };
        self.earlier = [before, Earlier::none(before.from)];
        self.switch_pos = self.tail;
        self.starved = false;
        self.limit = self.writable();
    }

    fn switch_to(&mut self, ring: RingMemory, generation: u32, part: u8) {
        self.change_ring(ring);
        self.generation = generation;
        let mine = self.mine();
        let position = match part {
            0 => &mine.switch_pos,
            _ => &mine.reserve_pos,
        };
        position.store(self.tail, Ordering::Relaxed);
        // Releases the position to the consumer's load of `generation`; the next tail releases both.
        let adopted = Adopted { generation, part };
        mine.generation.store(adopted.pack(), Ordering::Release);
    }

    /// A copy of the bytes that a consumer which has [stopped](super::Consumer::stop) has not read.
    /// It must not have freed their rings.
    #[cfg(not(loom))]
    pub fn unread(&mut self) -> Result<Vec<u8>, RingError> {
        self.reload()?;
        self.copy_from(self.head)
    }

    /// A copy of the bytes from position `from` on, up to which a consumer that takes nothing more has
    /// them. Bytes that it has consumed are not held, and those after the tail are not there.
    #[cfg(not(loom))]
    pub fn rest(&mut self, from: u64) -> Result<Vec<u8>, RingError> {
        self.reload()?;
        if from < self.head {
            return Err(Violation::HeadMovedBack.into());
        }
        if from > self.tail {
            return Err(Violation::HeadBeyondTail.into());
        }
        self.copy_from(from)
    }

    /// Whether this side has [ended](Self::end) the direction, or found it stopped when it tried to.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// A copy of what is in flight from position `from` on, which is from head to tail.
    ///
    /// A correct consumer has read up to the last switch before it offers the next ring, so two rings
    /// hold all that it can ask for, and one that is written aside. Another one could ask for any number of bytes.
    #[cfg(not(loom))]
    fn copy_from(&self, from: u64) -> Result<Vec<u8>, RingError> {
        let [before, first] = self.earlier;
        if from < first.from {
            return Err(Violation::NotHeld.into());
        }
        let mut bytes = Vec::new();
        let len = (self.tail - from) as usize;
        bytes.try_reserve_exact(len).map_err(|_| RingError::NoMemory)?;
        bytes.resize(len, 0u8);
        let mut rest = bytes.as_mut_slice();
        let mut pos = from;
        for (ring, end) in [
            (first.ring, before.from),
            (before.ring, self.switch_pos),
            (self.ring, self.tail),
        ] {
            let len = end.min(self.tail).saturating_sub(pos);
            let (to, behind) = rest.split_at_mut(len as usize);
            let spans = ring.spans(pos, len);
            // SAFETY: `to` is writable for its length; a ring is mapped while the cursor exists.
            unsafe { spans.copy_out(0, to.as_mut_ptr(), to.len()) };
            (rest, pos) = (behind, pos + len);
        }
        Ok(bytes)
    }

    /// The end of the current ring's window: its bytes begin at the switch position, and older
    /// ones are in the ring before.
    fn window(&self) -> u64 {
        let end = self.head.max(self.switch_pos) + self.ring.size();
        // By the published head, as W4; so it takes a byte in this ring for the consumer to go by this ring's quarter.
        let most = self.head.saturating_add(self.most());
        let least = self.switch_pos + self.ring.quarter();
        end.min(most.max(least)).max(self.tail)
    }

    /// What of the window has memory.
    fn writable(&self) -> u64 {
        match self.backed {
            Some((_, backed)) => self.window().min(backed).max(self.tail),
            None => self.window(),
        }
    }

    #[cold]
    fn refill(&mut self, want: u64) -> Result<(), RingError> {
        self.reload()?;
        self.adopt()?;
        if self.backed.is_some() && self.limit - self.tail < want {
            self.back_more(want);
        }
        let is_short = self.limit - self.tail < want && self.may_grow();
        if is_short && self.limited_at != Some(self.tail) && !self.ended {
            self.limited_at = Some(self.tail);
            self.limited = self.limited.wrapping_add(1);
            self.mine().limited.store(self.limited, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies and validates the consumer's head.
    fn reload(&mut self) -> Result<(), RingError> {
        // Acquires what the consumer's publishing released: it has read the bytes before `head`,
        // so they may be overwritten. And the second look of W2.
        let head = self.theirs().head.look();
        if head < self.published {
            return Err(Violation::HeadMovedBack.into());
        }
        if head > self.tail {
            return Err(Violation::HeadBeyondTail.into());
        }
        self.published = head;
        self.head = self.head.max(head);
        if !self.ended {
            self.limit = self.writable();
        }
        Ok(())
    }
}
