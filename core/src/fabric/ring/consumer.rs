//! The receiving side's private cursor of one direction.

use std::ptr::NonNull;

use super::block::{ConsumerLine, DirectionBlock, EndMark, ProducerLine, RxFlags, STOPPED, Wake};
use super::error::{Ended, RingError, Violation};
use super::memory::{DataArea, NoRing, RingMemory, Spans};
use super::offer::{Adopted, Offer};
use crate::fabric::layout::Region;
use crate::sync::Ordering;

/// Why a ring cannot be offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OfferError {
    /// The last offer is not adopted, or what it replaced is not yet taken by `take_retired`.
    #[error("an earlier ring switch is not finished")]
    Pending,
    /// The region is not inside the data area.
    #[error("region outside the data area")]
    Outside,
    /// The region cannot be mapped.
    #[error("no memory for the region")]
    Unmapped,
}

/// What arming for data found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the producer may be asleep, and the caller must not sleep when ready"]
pub struct Armed {
    /// There is data or an end mark: do not sleep.
    pub ready: bool,
    /// Whom to wake because consumed space was published.
    pub wake: Wake,
}

/// Regions that a direction may hold at a time.
pub const REGIONS: usize = 6;

/// A ring on offer, and from which position on it is used, once that is known.
#[derive(Clone, Copy, Debug)]
struct Pending {
    offer: Offer,
    ring: RingMemory,
}

/// The consumer of one direction; used under the owner's lock of that direction.
///
/// A receive is [`spans`](Self::spans), copy out, [`consume`](Self::consume), again until
/// satisfied or empty: a switch of rings ends the spans early. When there is nothing:
/// [`end`](Self::end), [`arm_data`](Self::arm_data), then sleep if that says so.
#[derive(Debug)]
pub struct Consumer {
    block: NonNull<DirectionBlock>,
    area: DataArea,
    ring: RingMemory,
    region: Option<Region>,
    /// Bytes ever consumed.
    head: u64,
    /// What of `head` the producer has been told.
    published: u64,
    /// The producer's tail as last seen and validated.
    tail: u64,
    /// First position in the pending ring; `u64::MAX` while not adopted.
    switch_pos: u64,
    pending: Option<Pending>,
    /// To be freed: the ring before the last switch, and what a switch to the reserve has put in their places.
    retired: [Option<Region>; 3],
    reserve: Option<Offer>,
    /// Tells one reserve from the other.
    reserves: u32,
    /// The last adopted ring, as the producer's word.
    adopted: u32,
    limited_seen: u32,
    /// Nothing more is taken from the producer, whatever it publishes.
    frozen: bool,
}

// SAFETY: a cursor is only pointers into shared memory, which any thread may use, and values.
unsafe impl Send for Consumer {}

impl Consumer {
    /// The consumer of a direction in its initial state, with rings in `area`, the data area of
    /// this side's own arena. It has no ring until one is [offered](Self::offer).
    ///
    /// # Safety
    /// `block` is mapped and aligned, and stays so while the cursor exists; this process has
    /// no other consumer for it.
    pub unsafe fn new(block: NonNull<DirectionBlock>, area: DataArea) -> Self {
        Self {
            block,
            area,
            ring: RingMemory::NONE,
            region: None,
            head: 0,
            published: 0,
            tail: 0,
            switch_pos: u64::MAX,
            pending: None,
            retired: [None; 3],
            reserve: None,
            reserves: 0,
            adopted: 0,
            limited_seen: 0,
            frozen: false,
        }
    }

    #[inline(always)]
    fn mine(&self) -> &ConsumerLine {
        // SAFETY: mapped while `self` exists, by the contract of `new`; all fields are atomics.
        unsafe { &self.block.as_ref().consumer }
    }

    #[inline(always)]
    fn theirs(&self) -> &ProducerLine {
        // SAFETY: as in `mine`.
        unsafe { &self.block.as_ref().producer }
    }

    /// The readable pieces up to the next switch of rings. Looks at the producer only when less
    /// than `want` bytes are known to be there. Empty means that nothing is there.
    #[inline(always)]
    pub fn spans(&mut self, want: usize) -> Result<Spans<'_>, RingError> {
        if self.tail - self.head < want as u64 {
            self.reload()?;
        }
        let end = self.tail.min(self.switch_pos);
        Ok(self.ring.spans(self.head, end - self.head))
    }

    /// As [`spans`](Self::spans), but `skip` bytes further on: for peeking across a switch.
    pub fn peek(&mut self, skip: usize, want: usize) -> Result<Spans<'_>, RingError> {
        let pos = self.head.saturating_add(skip as u64);
        if self.tail.saturating_sub(pos) < want as u64 {
            self.reload()?;
        }
        let pos = pos.min(self.tail);
        Ok(match self.pending {
            Some(next) if pos >= self.switch_pos => next.ring.spans(pos, self.tail - pos),
            _ => {
                let end = self.tail.min(self.switch_pos);
                self.ring.spans(pos, end - pos)
            }
        })
    }

    /// What tells the stream from others whose numbers are taken at the same time.
    pub fn stream(&self) -> usize {
        self.block.addr().get()
    }

    /// Bytes that are known to be there without a look.
    #[inline]
    pub fn known(&self) -> u64 {
        self.tail - self.head
    }

    /// Bytes that can be read now (FIONREAD).
    pub fn available(&mut self) -> Result<u64, RingError> {
        self.reload()?;
        Ok(self.tail - self.head)
    }

    /// The first `n` bytes are read; not more than were there. Tells the producer only when a
    /// quarter of the ring has become free since last time (W3).
    #[inline(always)]
    pub fn consume(&mut self, n: usize) -> Wake {
        self.head += (n as u64).min(self.tail - self.head);
        // SAFETY: mapped while `self` exists, by the contract of `new`.
        let last = unsafe { &self.block.as_ref().last };
        // Releases our reads to a producer that is short of room (`Producer::make_room`).
        last.consumed.store(self.head, Ordering::Release);
        if self.head >= self.switch_pos {
            self.finish_switch();
        }
        if self.head - self.published >= self.ring.quarter() {
            return self.publish();
        }
        Wake::NONE
    }

    /// Tells the producer all that was consumed.
    pub fn publish(&mut self) -> Wake {
        if self.published == self.head {
            return Wake::NONE;
        }
        self.published = self.head;
        // Releases our reads of the payload to the producer's load of `head`; and W2.
        self.mine().head.publish(self.head);
        self.theirs().take_want_space()
    }

    /// Asks for a wake-up when there is data: publishes, sets `bits` in the attention word, then
    /// looks. The bits stay set either way; other waiters may share them.
    pub fn arm_data(&mut self, bits: u32) -> Result<Armed, RingError> {
        let wake = self.publish();
        self.mine().want_data.arm(bits);
        let ready = match self.has_data() {
            Ok(ready) => ready,
            // The wake-up must not be lost with the error.
            Err(e) if wake.is_none() => return Err(e),
            Err(_) => true,
        };
        Ok(Armed { ready, wake })
    }

    /// No wake-up for `bits` is needed any more (one may be on its way nonetheless).
    pub fn disarm_data(&self, bits: u32) {
        self.mine().want_data.disarm(bits);
    }

    /// What was [asked for](Self::arm_data) and nobody has taken, as in
    /// [`Attention::left`](crate::sync::Attention::left).
    pub fn data_wanted(&self) -> u32 {
        self.mine().want_data.left()
    }

    /// There is data or an end mark. This is also the condition for "readable".
    pub fn has_data(&mut self) -> Result<bool, RingError> {
        if self.tail != self.head {
            return Ok(true);
        }
        let mark = self.theirs().end.look();
        let ended = mark != 0 && !(self.frozen && mark == STOPPED);
        self.reload()?;
        Ok(ended || self.tail != self.head)
    }

    /// What follows the last byte, once everything before it is consumed.
    pub fn end(&mut self) -> Result<Option<EndMark>, RingError> {
        if self.tail != self.head {
            return Ok(None);
        }
        // Acquires the final tail, which precedes the mark.
        let mark = self.theirs().end.look();
        if mark == 0 {
            return Ok(None);
        }
        self.reload()?;
        if self.tail != self.head {
            return Ok(None);
        }
        match mark {
            STOPPED if self.frozen => Ok(None),
            m if m == EndMark::Fin as u32 => Ok(Some(EndMark::Fin)),
            m if m == EndMark::Demote as u32 => Ok(Some(EndMark::Demote)),
            _ => Err(Violation::BadEnd.into()),
        }
    }

    /// Stops reading here: the producer sends the rest again, on TCP. It is to be told.
    pub fn stop(&mut self) -> Result<Wake, Ended> {
        let wake = self.publish();
        self.theirs().end.claim(STOPPED).map(|()| wake).map_err(|_| Ended)
    }

    /// Takes nothing more from the producer than what has come up to `limit` (`u64::MAX`: all that
    /// has come; 0: nothing that is unread); gives the position that was reached. After an end mark
    /// that is all that was sent, whatever the limit. What has come can still be read, and a mark seen.
    pub fn freeze(&mut self, limit: u64) -> Result<u64, RingError> {
        if !self.frozen {
            // Marks and confirmations that come from now on find it taken.
            let ended = self.theirs().end.claim(STOPPED);
            self.reload()?;
            self.frozen = true;
            if ended.is_ok() {
                self.tail = self.tail.min(limit.max(self.head));
            }
        }
        Ok(self.tail)
    }

    /// The producer has marked the end, behind bytes that may be unread.
    pub fn has_mark(&self) -> bool {
        self.theirs().end.look() == EndMark::Fin as u32
    }

    /// The producer goes on elsewhere, behind bytes that may be unread.
    #[inline]
    pub fn has_left(&self) -> bool {
        self.theirs().end.look() == EndMark::Demote as u32
    }

    /// Whether it is [frozen](Self::freeze).
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// Offers `region` as the ring to use from the producer's next send on: the first one, a
    /// larger one while the producer is limited, a smaller one when idle. The producer may be
    /// waiting for just that.
    pub fn offer(&mut self, region: Region) -> Result<Wake, OfferError> {
        if self.is_switching() {
            return Err(OfferError::Pending);
        }
        let ring = self.ring_of(region)?;
        let offer = Offer {
            generation: Offer::next_generation(Adopted::unpack(self.adopted).generation),
            region,
        };
        self.pending = Some(Pending { offer, ring });
        self.mine().offer.publish(offer.pack());
        Ok(self.theirs().take_want_space())
    }

    fn ring_of(&self, region: Region) -> Result<RingMemory, OfferError> {
        self.area.ring(region).map_err(|e| match e {
            NoRing::Outside => OfferError::Outside,
            NoRing::Unmapped => OfferError::Unmapped,
        })
    }

    /// Offers `region`, which need not have memory but [can be mapped](crate::fabric::link::LinkEnd::reserve), for a
    /// producer that finds no room. One at a time; a ring may be on offer beside it.
    pub fn offer_reserve(&mut self, region: Region) -> Result<(), OfferError> {
        let has_retired = self.retired.iter().any(Option::is_some);
        if has_retired || self.switch_pos != u64::MAX || self.reserve.is_some() {
            return Err(OfferError::Pending);
        }
        self.reserves = Offer::next_generation(self.reserves);
        let offer = Offer {
            generation: self.reserves,
            region,
        };
        self.reserve = Some(offer);
        // Releases the block as it is now, which the producer has seen anyway.
        self.mine().reserve.store(offer.pack(), Ordering::Release);
        Ok(())
    }

    /// Whether there is a reserve that has not been taken, as far as is known.
    pub fn has_reserve(&self) -> bool {
        self.reserve.is_some()
    }

    /// The region of a ring that is no longer used, once: to be freed by the caller. There may be more.
    pub fn take_retired(&mut self) -> Result<Option<Region>, RingError> {
        if self.pending.is_some() {
            self.reload()?;
        }
        Ok(self.retired.iter_mut().find_map(Option::take))
    }

    fn retire(&mut self, region: Option<Region>) {
        // There is a place: nothing is offered before all are taken.
        if let Some(place) = self.retired.iter_mut().find(|r| r.is_none()) {
            *place = region;
        }
    }

    /// A switch of rings is under way, or its old ring has not been taken.
    pub fn is_switching(&self) -> bool {
        self.pending.is_some() || self.retired.iter().any(Option::is_some)
    }

    /// Every region that this direction holds, to be freed when it is over: current, offered,
    /// the reserve, retired.
    pub fn into_regions(self) -> [Option<Region>; REGIONS] {
        let [a, b, c] = self.retired;
        let pending = self.pending.map(|p| p.offer.region);
        let reserve = self.reserve.map(|offer| offer.region);
        [self.region, pending, reserve, a, b, c]
    }

    /// Size of the current ring in bytes; 0 before the first one.
    pub fn ring_size(&self) -> u64 {
        self.ring.size()
    }

    /// Bytes ever consumed.
    pub fn position(&self) -> u64 {
        self.head
    }

    /// The window was too small for the producer since that was last [heeded](Self::heed_limit).
    pub fn producer_limited(&self) -> bool {
        self.theirs().limited.load(Ordering::Relaxed) != self.limited_seen
    }

    /// The same; what is done about it is done from now on.
    pub fn heed_limit(&mut self) -> bool {
        let now = self.theirs().limited.load(Ordering::Relaxed);
        std::mem::replace(&mut self.limited_seen, now) != now
    }

    /// Adds to what the producer is told.
    pub fn set_flags(&self, flags: RxFlags) -> Wake {
        self.mine().flags.add_bits(flags.bits());
        self.theirs().take_want_space()
    }

    /// Copies and validates the producer's tail, and a switch that it may lie beyond.
    #[inline(always)]
    fn reload(&mut self) -> Result<(), RingError> {
        if self.frozen {
            return Ok(());
        }
        // Acquires the payload before `tail`; and the second look of W2.
        let tail = self.theirs().tail.look();
        // After the tail: a switch that this tail can be beyond is seen.
        let adopted = self.theirs().generation.load(Ordering::Acquire);
        if adopted != self.adopted {
            self.see_switch(adopted)?;
        }
        if tail < self.tail {
            return Err(Violation::TailMovedBack.into());
        }
        let window = match self.pending {
            Some(next) if self.switch_pos != u64::MAX => self.switch_pos + next.ring.size(),
            _ => self.head + self.ring.size(),
        };
        if tail > window {
            return Err(Violation::TailBeyondWindow.into());
        }
        self.tail = tail;
        Ok(())
    }

    /// The producer has adopted the pending ring, or the reserve: from which position on?
    #[cold]
    fn see_switch(&mut self, word: u32) -> Result<(), RingError> {
        let Adopted { generation, part } = Adopted::unpack(word);
        let pos = match part {
            0 => &self.theirs().switch_pos,
            _ => &self.theirs().reserve_pos,
        };
        let pos = pos.load(Ordering::Relaxed);
        if let Some(next) = self.pending
            && self.reserve.is_some()
            && part != 0
            && self.switch_pos == u64::MAX
            && generation == Offer::next_generation(next.offer.generation)
        {
            // Two switches at once. The producer takes the reserve only when it knows that the ring before its own has
            // been read to the end, and of nothing behind it have we seen a byte: the first of the two was where we
            // are.
            let first = self.theirs().switch_pos.load(Ordering::Relaxed);
            if self.tail != self.head || first != self.head {
                return Err(Violation::BadSwitch.into());
            }
            self.adopted = next.offer.generation;
            self.finish_switch();
        }
        let before = Adopted::unpack(self.adopted).generation;
        let taken = self
            .reserve
            .filter(|_| part != 0 && self.switch_pos == u64::MAX && generation == Offer::next_generation(before));
        match self.pending {
            Some(next) if part == 0 && next.offer.generation == generation => {}
            _ if taken.is_some() => {}
            _ => return Err(Violation::BadSwitch.into()),
        }
        // It adopted after every tail seen with the generation before, within the old window.
        if pos < self.tail || pos > self.head + self.ring.size() {
            return Err(Violation::BadSwitch.into());
        }
        if let Some(offer) = taken {
            let ring = self.ring_of(offer.region);
            let ring = ring.map_err(|_| RingError::Unmapped)?;
            let ring = ring.part(part).ok_or(Violation::BadSwitch)?;
            let withdrawn = self.pending.replace(Pending { offer, ring });
            self.retire(withdrawn.map(|p| p.offer.region));
            self.reserve = None;
        }
        self.adopted = word;
        self.switch_pos = pos;
        if pos == self.head {
            self.finish_switch();
        }
        Ok(())
    }

    /// The old ring is read to its end.
    #[cold]
    fn finish_switch(&mut self) {
        if let Some(next) = self.pending.take() {
            let before = self.region.replace(next.offer.region);
            self.retire(before);
            self.ring = next.ring;
        }
        self.switch_pos = u64::MAX;
    }
}
