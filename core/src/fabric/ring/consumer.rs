//! The receiving side's private cursor of one direction. `ring.rs` defines head, tail, switch and reserve, and the
//! rules W1 to W4.

use std::ptr::NonNull;

use crate::fabric::layout::Region;
use crate::fabric::ring::block::{ConsumerLine, DirectionBlock, EndMark, ProducerLine, RxFlags, STOPPED, Wake};
use crate::fabric::ring::memory::{DataArea, NoRing, RingMemory, Spans};
use crate::fabric::ring::{Adopted, Ended, Offer, RingError, Violation};
use crate::sync::Ordering;

/// Why a ring cannot be offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OfferError {
    /// The producer has not adopted the last offer, or `take_retired` has not returned the ring that it replaced.
    #[error("an earlier ring switch is not finished")]
    Pending,
    /// The region cannot be used as a ring.
    #[error("{0}")]
    NoRing(#[from] NoRing),
}

/// The result of `Consumer::arm_data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the producer may be asleep, and the caller must not sleep when ready"]
pub struct Armed {
    /// There is data or an end mark, so the caller must not sleep.
    pub ready: bool,
    /// The producer's waiters to wake, because consumed space was published.
    pub wake: Wake,
}

/// The most regions that a direction holds at a time.
pub const REGIONS: usize = 6;

/// A ring on offer, or an adopted ring that the head has not reached. If it is adopted, `Consumer::switch_pos` is its
/// first position.
#[derive(Clone, Copy, Debug)]
struct Pending {
    offer: Offer,
    ring: RingMemory,
}

/// The consumer of one direction. The owner uses it under the direction's lock.
///
/// To receive, call [`spans`](Self::spans), copy the bytes out, and call [`consume`](Self::consume). Repeat that until
/// enough bytes have come or the ring is empty, since a switch of rings ends the spans early. When the ring is empty,
/// call [`end`](Self::end) and [`arm_data`](Self::arm_data), then sleep unless [`Armed::ready`] is set.
#[derive(Debug)]
pub struct Consumer {
    block: NonNull<DirectionBlock>,
    area: DataArea,
    ring: RingMemory,
    region: Option<Region>,
    /// The count of bytes ever consumed.
    head: u64,
    /// The head as last published to the producer.
    published: u64,
    /// The producer's tail as last seen and validated.
    tail: u64,
    /// The first position in the pending ring; `u64::MAX` until the producer has adopted it.
    switch_pos: u64,
    pending: Option<Pending>,
    /// Regions to be freed: rings that a switch has replaced, and an offered ring that was withdrawn for the reserve.
    retired: [Option<Region>; 3],
    reserve: Option<Offer>,
    /// The generation of the last reserve. It distinguishes that reserve from the one before.
    reserves: u32,
    /// The producer's `generation` word as it was for the last switch that this side has seen.
    adopted: u32,
    limited_seen: u32,
    /// Whether the consumer takes no more bytes from the producer ([`freeze`](Self::freeze)).
    frozen: bool,
}

// SAFETY: a cursor consists of values, and of pointers into shared memory, which any thread may use.
unsafe impl Send for Consumer {}

impl Consumer {
    /// Returns the consumer of a direction in its initial state. Its rings lie in `area`, the data area of this end's
    /// own arena. It has no ring until one is [offered](Self::offer).
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
        // SAFETY: the block is mapped while `self` exists, by the contract of `new`. All its fields are atomics.
        unsafe { &self.block.as_ref().consumer }
    }

    #[inline(always)]
    fn theirs(&self) -> &ProducerLine {
        // SAFETY: as in `mine`.
        unsafe { &self.block.as_ref().producer }
    }

    /// Returns the readable pieces up to the next switch of rings; they are empty if there are no bytes. Reads the
    /// producer's line only if fewer than `want` readable bytes are known.
    #[inline(always)]
    pub fn spans(&mut self, want: usize) -> Result<Spans<'_>, RingError> {
        if self.tail - self.head < want as u64 {
            self.reload()?;
        }
        let end = self.tail.min(self.switch_pos);
        Ok(self.ring.spans(self.head, end - self.head))
    }

    /// Returns the readable pieces from `skip` bytes after the head on, without consuming them. Unlike
    /// [`spans`](Self::spans) it also reaches bytes behind a switch of rings.
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

    /// Returns an id that distinguishes the stream from all others that have a vQPN at the same time.
    pub fn stream(&self) -> usize {
        self.block.addr().get()
    }

    /// Returns how many readable bytes are known. Does not read the producer's line.
    #[inline]
    pub fn known(&self) -> u64 {
        self.tail - self.head
    }

    /// Returns how many bytes can be read now (FIONREAD).
    pub fn available(&mut self) -> Result<u64, RingError> {
        self.reload()?;
        Ok(self.tail - self.head)
    }

    /// Consumes the first `n` readable bytes, at most those that are known. Publishes the head only when a quarter of
    /// the ring has become free since the last publication (W3). Returns the producer's waiters to wake.
    #[inline(always)]
    pub fn consume(&mut self, n: usize) -> Wake {
        self.head += (n as u64).min(self.tail - self.head);
        // SAFETY: the block is mapped while `self` exists, by the contract of `new`.
        let last = unsafe { &self.block.as_ref().last };
        // Releases the reads of the bytes to a producer that is short of room (`Producer::make_room`).
        last.consumed.store(self.head, Ordering::Release);
        if self.head >= self.switch_pos {
            self.finish_switch();
        }
        if self.head - self.published >= self.ring.quarter() {
            return self.publish();
        }
        Wake::NONE
    }

    /// Publishes the head if it has moved. Returns the producer's waiters to wake.
    pub fn publish(&mut self) -> Wake {
        if self.published == self.head {
            return Wake::NONE;
        }
        self.published = self.head;
        // Releases the reads of the payload to the producer's load of `head`. This is also the publication of W2.
        self.mine().head.publish(self.head);
        self.theirs().take_want_space()
    }

    /// Asks for a wake-up when there is data. Publishes the head, sets `bits`, which name the waiters to wake, in the
    /// wake-up word `want_data`, then checks for data. The bits stay set even if there is data. Other waiters may have
    /// set bits in the same word.
    pub fn arm_data(&mut self, bits: u32) -> Result<Armed, RingError> {
        let wake = self.publish();
        self.mine().want_data.arm(bits);
        let ready = match self.has_data() {
            Ok(ready) => ready,
            // The error must not make the caller lose `wake`. The caller's next call returns the error again.
            Err(e) if wake.is_none() => return Err(e),
            Err(_) => true,
        };
        Ok(Armed { ready, wake })
    }

    /// Clears `bits`, which `arm_data` has set, and so withdraws the request. A wake-up that is on its way still comes.
    pub fn disarm_data(&self, bits: u32) {
        self.mine().want_data.disarm(bits);
    }

    /// Returns the bits that were [set](Self::arm_data) and that the producer has not taken, as
    /// [`Attention::left`](crate::sync::Attention::left) does.
    pub fn data_wanted(&self) -> u32 {
        self.mine().want_data.left()
    }

    /// Returns whether there is data or an end mark. This is the condition under which the program's socket is
    /// readable.
    pub fn has_data(&mut self) -> Result<bool, RingError> {
        if self.tail != self.head {
            return Ok(true);
        }
        let mark = self.theirs().end.look();
        let ended = mark != 0 && !(self.frozen && mark == STOPPED);
        self.reload()?;
        Ok(ended || self.tail != self.head)
    }

    /// Returns the producer's end mark once all bytes before it are consumed. `None` if bytes are left, or if the
    /// producer has set no mark.
    pub fn end(&mut self) -> Result<Option<EndMark>, RingError> {
        if self.tail != self.head {
            return Ok(None);
        }
        // Acquires the final tail, which the producer published before the mark.
        let mark = self.theirs().end.look();
        if mark == 0 {
            return Ok(None);
        }
        self.reload()?;
        if self.tail != self.head {
            return Ok(None);
        }
        if mark == STOPPED && self.frozen {
            return Ok(None);
        }
        Ok(Some(EndMark::from_word(mark).ok_or(Violation::BadEnd)?))
    }

    /// Stops reading at the head: the producer has to send the rest again, on TCP. The caller reports the stop to the
    /// producer's end of the link. Returns the producer's waiters to wake. Fails with [`Ended`] if the producer has set
    /// an end mark before.
    pub fn stop(&mut self) -> Result<Wake, Ended> {
        let wake = self.publish();
        self.theirs().end.claim(STOPPED).map(|()| wake).map_err(|_| Ended)
    }

    /// Freezes the consumer: it takes no byte beyond position `limit`, and none that comes later. With `u64::MAX` it
    /// keeps all bytes that have come, with 0 no unread byte. Returns the position up to which it has the bytes. If the
    /// producer has set an end mark before, `limit` has no effect, and that position is the end of all bytes sent.
    /// Bytes before the position can still be read, and the mark is still seen.
    pub fn freeze(&mut self, limit: u64) -> Result<u64, RingError> {
        if !self.frozen {
            // The producer's later marks and confirmations fail, since `end` is not 0.
            let ended = self.theirs().end.claim(STOPPED);
            self.reload()?;
            self.frozen = true;
            if ended.is_ok() {
                self.tail = self.tail.min(limit.max(self.head));
            }
        }
        Ok(self.tail)
    }

    /// Returns whether the producer has marked the end of the stream. Bytes before the mark may be unread.
    pub fn has_mark(&self) -> bool {
        self.theirs().end.look() == EndMark::Fin as u32
    }

    /// Returns whether the producer has marked that its next byte is on TCP. Bytes before the mark may be unread.
    #[inline]
    pub fn has_left(&self) -> bool {
        self.theirs().end.look() == EndMark::Demote as u32
    }

    /// Returns whether the consumer is [frozen](Self::freeze).
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// Offers `region` as the ring to use from the producer's next send on. The offered ring is the first ring, a
    /// larger ring for a producer that was limited, or a smaller ring for an idle direction. Returns the producer's
    /// waiters to wake, since the producer may be waiting for such a ring.
    pub fn offer(&mut self, region: Region) -> Result<Wake, OfferError> {
        if self.is_switching() {
            return Err(OfferError::Pending);
        }
        let ring = self.area.ring(region)?;
        let offer = Offer {
            generation: Offer::next_generation(Adopted::unpack(self.adopted).generation),
            region,
        };
        self.pending = Some(Pending { offer, ring });
        self.mine().offer.publish(offer.pack());
        Ok(self.theirs().take_want_space())
    }

    /// Offers `region` as the reserve, for a producer that finds no room. The region need not have memory, but [can be
    /// mapped](crate::fabric::LinkEnd::reserve). There is one reserve at a time; an offered ring may exist beside it.
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
        // Pairs with the Acquire in `Producer::next_reserve`: a producer that reads this reserve sees the block's other
        // words as they are at this moment, or as they are later.
        self.mine().reserve.store(offer.pack(), Ordering::Release);
        Ok(())
    }

    /// Returns whether there is a reserve that, as far as this side knows, the producer has not adopted.
    pub fn has_reserve(&self) -> bool {
        self.reserve.is_some()
    }

    /// Returns the region of a ring that is no longer used, each region once; the caller frees it. `None` if there is
    /// no such region.
    pub fn take_retired(&mut self) -> Result<Option<Region>, RingError> {
        if self.pending.is_some() {
            self.reload()?;
        }
        Ok(self.retired.iter_mut().find_map(Option::take))
    }

    fn retire(&mut self, region: Option<Region>) {
        // There is a free place: the consumer offers no ring before `take_retired` has emptied all places.
        if let Some(place) = self.retired.iter_mut().find(|r| r.is_none()) {
            *place = region;
        }
    }

    /// Returns whether a switch of rings is under way, or `take_retired` has not returned the old ring of the last
    /// switch.
    pub fn is_switching(&self) -> bool {
        self.pending.is_some() || self.retired.iter().any(Option::is_some)
    }

    /// Returns every region that this direction holds: current, offered, reserve, retired. The caller frees them when
    /// the direction has ended.
    pub fn into_regions(self) -> [Option<Region>; REGIONS] {
        let [a, b, c] = self.retired;
        let pending = self.pending.map(|p| p.offer.region);
        let reserve = self.reserve.map(|offer| offer.region);
        [self.region, pending, reserve, a, b, c]
    }

    /// Returns the size of the current ring in bytes; 0 before the first one.
    pub fn ring_size(&self) -> u64 {
        self.ring.size()
    }

    /// Returns how many bytes were ever consumed.
    pub fn position(&self) -> u64 {
        self.head
    }

    /// Returns whether the window was too small for a send of the producer since [`heed_limit`](Self::heed_limit) was
    /// last called.
    pub fn producer_limited(&self) -> bool {
        self.theirs().limited.load(Ordering::Relaxed) != self.limited_seen
    }

    /// Returns whether the window was too small for a send of the producer since the last call. The caller is expected
    /// to act on that.
    pub fn heed_limit(&mut self) -> bool {
        let now = self.theirs().limited.load(Ordering::Relaxed);
        std::mem::replace(&mut self.limited_seen, now) != now
    }

    /// Adds `flags` to the flags that the producer sees. Returns the producer's waiters to wake.
    pub fn set_flags(&self, flags: RxFlags) -> Wake {
        self.mine().flags.add_bits(flags.bits());
        self.theirs().take_want_space()
    }

    /// Copies and validates the producer's tail, and any switch that the tail may lie beyond.
    #[inline(always)]
    fn reload(&mut self) -> Result<(), RingError> {
        if self.frozen {
            return Ok(());
        }
        // Acquires the payload before `tail`. This is also the second check of W2.
        let tail = self.theirs().tail.look();
        // Loaded after the tail, so that every switch at a position before this tail is seen.
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

    /// Records a switch: the producer has adopted the pending ring or the reserve. Checks the position at which it did
    /// so.
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
            // Two switches are seen at once. The producer takes the reserve only when it knows that the ring before its
            // current one has been read to the end. This consumer has seen no byte behind that ring, so the first of
            // the two switches is at the head.
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
        // The producer adopted the ring after every tail that came with the earlier generation, and within the old
        // window.
        if pos < self.tail || pos > self.head + self.ring.size() {
            return Err(Violation::BadSwitch.into());
        }
        if let Some(offer) = taken {
            let ring = self.area.ring(offer.region).map_err(|_| RingError::Unmapped)?;
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

    /// Makes the pending ring the current one, since the old ring has been read to its end.
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
