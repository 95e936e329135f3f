//! The sending side's private cursor of one direction. `ring.rs` defines head, tail, switch and bound, and the rules W1
//! to W4. The file also has the two ways to make room when the consumer does not read. Between hosts the producer
//! writes *aside*, into a buffer of its own end. Within a host it takes the *reserve*, a second ring that the consumer
//! keeps on offer.

use std::ptr::NonNull;

use crate::fabric::layout::{MIN_RING_LOG2, Region};
use crate::fabric::ring::block::{ConsumerLine, DirectionBlock, EndMark, ProducerLine, RxFlags, Wake};
use crate::fabric::ring::memory::{Allowance, DataArea, NoRing, RingMemory, Spans};
use crate::fabric::ring::{Adopted, Offer, RingError, Stopped, Violation};
use crate::sync::Ordering;

/// A ring before the current one, and its first position.
#[derive(Clone, Copy, Debug)]
struct Earlier {
    ring: RingMemory,
    from: u64,
}

impl Earlier {
    /// Returns an entry for a ring that does not exist, and so holds no bytes before `position`.
    const fn none(position: u64) -> Self {
        Self {
            ring: RingMemory::NONE,
            from: position,
        }
    }
}

/// The unit in which a reserve gets memory, in bytes.
const PIECE: u64 = 128 * 1024;

/// A reserve: the word in which the consumer offers it, its whole region, and the part at its beginning that the
/// producer uses.
struct Reserve {
    word: u64,
    whole: Region,
    part: Region,
}

/// The producer of one direction. The owner uses it under the direction's lock.
///
/// To send, call [`spans`](Self::spans), copy the bytes in, and call [`commit`](Self::commit). When there is no room,
/// call [`arm_space`](Self::arm_space), then sleep if it returns false.
#[derive(Debug)]
pub struct Producer {
    block: NonNull<DirectionBlock>,
    area: DataArea,
    ring: RingMemory,
    /// The two rings before the current one, the later first. They may still hold unread bytes.
    earlier: [Earlier; 2],
    /// The count of bytes ever committed.
    tail: u64,
    /// The position up to which the producer may write, as far as it knows the consumer's progress.
    limit: u64,
    /// The consumer's position as last seen, whether the consumer has published it or not.
    head: u64,
    /// The head that the consumer has published, as last seen.
    published: u64,
    /// First position in the current ring.
    switch_pos: u64,
    /// The consumer's `offer` word from which the current ring comes, or the last one that the producer has passed
    /// over.
    offer: u64,
    /// The generation of the current ring.
    generation: u32,
    /// The consumer's `reserve` word that was taken last.
    reserve: u64,
    /// If the current ring is a reserve that lacks memory: its region, and the position up to which it has memory.
    backed: Option<(Region, u64)>,
    /// Whether there was no memory for more of the reserve.
    starved: bool,
    /// Whether the current ring is a buffer of this end, and not one of the consumer's rings.
    aside: bool,
    /// The most bytes that may be unread; 0 while it is not known. At least half of the ring is allowed in any case.
    bound: u64,
    /// Whether `bound` is an estimate.
    bound_is_early: bool,
    seen_flags: u32,
    limited: u32,
    /// The tail when `limited` was last increased. It is increased once for each position, however often a send is
    /// retried.
    limited_at: Option<u64>,
    ended: bool,
    /// Which rings of the receiver the producer may adopt.
    allowance: Allowance,
}

// SAFETY: a cursor consists of values, and of pointers into shared memory, which any thread may use.
unsafe impl Send for Producer {}

impl Producer {
    /// Returns the producer of a direction in its initial state. Its rings lie in `area`, the data area of the
    /// *receiver's* arena.
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

    /// Sets which rings the producer may adopt. To be called before it adopts the first.
    pub fn with_allowance(self, allowance: Allowance) -> Self {
        Self { allowance, ..self }
    }

    #[inline(always)]
    fn mine(&self) -> &ProducerLine {
        // SAFETY: the block is mapped while `self` exists, by the contract of `new`. All its fields are atomics.
        unsafe { &self.block.as_ref().producer }
    }

    #[inline(always)]
    fn theirs(&self) -> &ConsumerLine {
        // SAFETY: as in `mine`.
        unsafe { &self.block.as_ref().consumer }
    }

    /// Returns all free pieces of the ring. Reads the consumer's line only if fewer than `want` free bytes are known.
    /// If fewer are free even then, and the bound allows a larger ring, counts the send as limited by the window.
    #[inline(always)]
    pub fn spans(&mut self, want: usize) -> Result<Spans<'_>, RingError> {
        if self.limit - self.tail < want as u64 {
            self.refill(want as u64)?;
        }
        Ok(self.known_spans())
    }

    /// Copies `len` bytes to the beginning of the known free pieces, if the first piece has room for all of them.
    /// Otherwise does nothing, and returns false.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes and not part of the ring.
    #[inline(always)]
    pub unsafe fn put(&mut self, src: *const u8, len: usize) -> bool {
        let spans = self.known_spans();
        let [(_, first), _] = spans.pieces();
        // SAFETY: by this function's contract.
        len <= first && unsafe { spans.copy_in(0, src, len) } == len
    }

    /// Returns the free pieces that are known. Does not read the consumer's line.
    #[inline(always)]
    fn known_spans(&self) -> Spans<'_> {
        self.ring.spans(self.tail, self.limit - self.tail)
    }

    /// Passes the first `n` bytes of the spans to the consumer: at most as many as were free, and none after
    /// [`end`](Self::end). Returns the consumer's waiters to wake.
    #[inline(always)]
    pub fn commit(&mut self, n: usize) -> Wake {
        let n = (n as u64).min(self.limit - self.tail);
        if n == 0 {
            return Wake::NONE;
        }
        self.tail += n;
        // Releases the payload to the consumer's load of `tail`. This is also the publication of W2.
        self.mine().tail.publish(self.tail);
        let wake = self.theirs().take_want_data();
        // The consumer's line is in the cache anyway, so this checks it for a new offer. If there is one, the known
        // free bytes are set to none, so that the next `spans` adopts the offer.
        if self.theirs().offer.load(Ordering::Relaxed) != self.offer {
            self.limit = self.tail;
        }
        wake
    }

    /// Passes bytes to the consumer as [`commit`](Self::commit) does, but wakes no waiter before [`wake`](Self::wake)
    /// is called, since the caller soon commits more. A consumer that reads before then finds the bytes.
    #[inline]
    pub fn commit_quietly(&mut self, n: usize) {
        let n = (n as u64).min(self.limit - self.tail);
        if n > 0 {
            self.tail += n;
            // Releases the payload to the consumer's load of `tail`.
            self.mine().tail.publish_quietly(self.tail);
        }
    }

    /// Returns the consumer's waiters to wake for the bytes that were committed quietly.
    pub fn wake(&mut self) -> Wake {
        // Publishes the same value again, for W2.
        self.mine().tail.publish(self.tail);
        self.theirs().take_want_data()
    }

    /// Sets the mark for the event that follows the last byte, and returns the consumer's waiters to wake. Only the
    /// first mark counts. After this call no byte can be sent, even if the call fails. Fails with [`Stopped`] if the
    /// consumer has stopped before.
    pub fn end(&mut self, end: EndMark) -> Result<Wake, Stopped> {
        if self.ended {
            return Ok(Wake::NONE);
        }
        self.ended = true;
        self.limit = self.tail;
        self.mine().end.claim(end as u32).map_err(|_| Stopped)?;
        Ok(self.theirs().take_want_data())
    }

    /// Asks for a wake-up when there is space. Sets `bits`, which name the waiters to wake, in the wake-up word
    /// `want_space`, then checks. Returns true if there is [space](Self::has_space) at this moment: the caller must not
    /// sleep. The bits stay set even then. Other waiters may have set bits in the same word.
    pub fn arm_space(&mut self, bits: u32) -> Result<bool, RingError> {
        self.mine().want_space.arm(bits);
        self.has_space()
    }

    /// Clears `bits`, which `arm_space` has set, and so withdraws the request. A wake-up that is on its way still
    /// comes.
    pub fn disarm_space(&self, bits: u32) {
        self.mine().want_space.disarm(bits);
    }

    /// Returns the bits that were [set](Self::arm_space) and that the consumer has not taken, as
    /// [`Attention::left`](crate::sync::Attention::left) does.
    pub fn space_wanted(&self) -> u32 {
        self.mine().want_space.left()
    }

    /// Returns whether a quarter of the ring is free (a quarter of the bound, if that is less). Also returns true if
    /// another ring is offered, or if the consumer has set flags since the last call of
    /// [`consumer_flags`](Self::consumer_flags). This is the condition under which the program's socket is writable.
    pub fn has_space(&mut self) -> Result<bool, RingError> {
        self.reload()?;
        let size = self.ring.size();
        let quarter = self.ring.quarter().min(self.most() / 4);
        Ok(self.theirs().offer.look() != self.offer
            || self.theirs().flags.look() != self.seen_flags
            || size != 0 && self.window() - self.tail >= quarter)
    }

    /// Returns the flags that the consumer has set so far. Unknown bits are dropped.
    pub fn consumer_flags(&mut self) -> RxFlags {
        self.seen_flags = self.theirs().flags.look();
        RxFlags::from_bits_truncate(self.seen_flags)
    }

    /// Returns how many committed bytes are not consumed, as far as this side knows.
    pub fn used(&mut self) -> Result<u64, RingError> {
        self.reload()?;
        Ok(self.tail - self.head)
    }

    /// Returns the position up to which the consumer has read. Within a host it is the consumer's own count, published
    /// or not. Between hosts it is the head that the peer has published.
    pub fn consumed(&mut self) -> Result<u64, RingError> {
        self.reload()?;
        // SAFETY: the block is mapped while `self` exists, by the contract of `new`.
        let last = unsafe { &self.block.as_ref().last };
        Ok(last.consumed.load(Ordering::Relaxed).clamp(self.head, self.tail))
    }

    /// Returns whether the consumer has left bytes unread. To be called for a consumer whose process has died: its
    /// count of consumed bytes is final.
    pub fn is_unread(&self) -> bool {
        // SAFETY: the block is mapped while `self` exists, by the contract of `new`.
        let last = unsafe { &self.block.as_ref().last };
        last.consumed.load(Ordering::Relaxed) < self.tail
    }

    /// Returns how many bytes could be written at this moment.
    pub fn free(&mut self) -> Result<u64, RingError> {
        self.reload()?;
        Ok(self.limit - self.tail)
    }

    /// Returns how many bytes were ever committed.
    pub fn position(&self) -> u64 {
        self.tail
    }

    /// Returns the size of the current ring in bytes; 0 before the first one.
    pub fn ring_size(&self) -> u64 {
        self.ring.size()
    }

    /// Returns whether the ring on offer is within reach (`Allowance::reaches`), and this process can map it. Called
    /// for the first ring, without which no byte can be sent.
    #[cfg(not(loom))]
    pub fn can_adopt(&self) -> bool {
        let word = self.theirs().offer.look();
        // A word that names no ring is an error that `adopt` reports, so this returns true.
        Offer::unpack(word).is_none_or(|offer| {
            let region = offer.region;
            self.allowance.reaches(region) && self.area.ring(region) != Err(NoRing::Unmapped)
        })
    }

    /// Adopts the ring that the consumer offers. Returns false if no ring is on offer, or if the producer passes the
    /// offer over. `spans` calls this. Other code calls it for an idle direction whose consumer offers a smaller ring.
    pub fn adopt(&mut self) -> Result<bool, RingError> {
        let word = self.theirs().offer.look();
        if word == self.offer || self.ended {
            return Ok(false);
        }
        let offer = Offer::unpack(word).ok_or(Violation::BadOffer)?;
        // `is_late`: the consumer has offered the ring before it knew that the reserve was adopted, and will withdraw
        // the offer.
        let is_late = offer.generation != Offer::next_generation(self.generation);
        if is_late || self.is_too_large(offer.region) || !self.allowance.reaches(offer.region) {
            self.offer = word;
            return Ok(false);
        }
        let ring = match self.area.ring(offer.region) {
            Ok(ring) => ring,
            Err(NoRing::Outside) => return Err(Violation::BadOffer.into()),
            Err(NoRing::Unmapped) => {
                // The direction keeps its ring. The producer passes this offer over, since otherwise each send would
                // try to map it.
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

    /// Returns whether the ring on offer would hold more than the program's bound allows, and the producer can do
    /// without that ring.
    fn is_too_large(&self, region: Region) -> bool {
        let half = region.len() as u64 / 2;
        let has_others = self.ring.size() >= self.bound || self.has_reserve();
        self.ring.size() != 0 && self.bound != 0 && half > self.bound && has_others
    }

    /// Sets the bound: the program lets at most `bytes` bytes be unread. If half of the ring is more, half of the ring
    /// is the bound.
    pub fn set_bound(&mut self, bytes: u64) {
        self.bound = bytes.max(1);
        self.bound_is_early = false;
    }

    /// Sets the bound while it may still change. [`has_bound`](Self::has_bound) then returns false, so that the caller
    /// asks the program's socket again when the ring is full.
    pub fn estimate_bound(&mut self, bytes: u64) {
        self.bound = bytes.max(1);
        self.bound_is_early = true;
    }

    /// Returns whether the bound was set, not only estimated.
    pub fn has_bound(&self) -> bool {
        self.bound != 0 && !self.bound_is_early
    }

    /// Returns whether the bound allows more unread bytes than the ring holds.
    pub fn may_grow(&self) -> bool {
        self.bound == 0 || self.ring.size() < self.bound
    }

    /// Returns the most bytes that may be unread in this ring.
    fn most(&self) -> u64 {
        match self.bound {
            0 => u64::MAX,
            bound => bound.max(self.ring.size() / 2),
        }
    }

    /// Makes `ring` the current ring for the bytes from the tail on.
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
        // Releases the position to the consumer's load of `generation`. The store of the next tail releases both.
        let adopted = Adopted { generation, part };
        mine.generation.store(adopted.pack(), Ordering::Release);
    }

    /// Returns a copy of the bytes that the consumer, which has [stopped](crate::fabric::ring::Consumer::stop), has not
    /// read. To be called before the consumer frees their rings.
    #[cfg(not(loom))]
    pub fn unread(&mut self) -> Result<Vec<u8>, RingError> {
        self.reload()?;
        self.copy_from(self.head)
    }

    /// Returns a copy of the bytes from position `from` to the tail, for a consumer that has all bytes up to `from` and
    /// takes no more. Fails if `from` lies before the head, since consumed bytes are not kept, or beyond the tail.
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

    /// Returns whether [`end`](Self::end) was called, even if it found that the consumer had stopped.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Returns a copy of the bytes in flight from position `from` on, which lies between head and tail.
    ///
    /// A correct consumer has read up to the last switch before it offers the next ring. So two rings hold all bytes
    /// that a correct consumer can ask for. A producer that writes aside has its own end's buffer as a third ring. A
    /// consumer that breaks the protocol could ask for bytes of rings before these, which is an error.
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
            // SAFETY: `to` is writable for its length. A ring is mapped as long as the cursor exists.
            unsafe { spans.copy_out(0, to.as_mut_ptr(), to.len()) };
            (rest, pos) = (behind, pos + len);
        }
        Ok(bytes)
    }

    /// Returns the end of the current ring's window. The ring's bytes begin at the switch position; older bytes are in
    /// the ring before.
    fn window(&self) -> u64 {
        let end = self.head.max(self.switch_pos) + self.ring.size();
        // The bound counts from the head that this side knows. At least a quarter of this ring is in the window, even
        // if the ring before has more unread bytes than the bound: the consumer publishes in quarters of this ring once
        // it has read the ring before to its end.
        let most = self.head.saturating_add(self.most());
        let least = self.switch_pos + self.ring.quarter();
        end.min(most.max(least)).max(self.tail)
    }

    /// Returns the end of the part of the window that has memory.
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
        // Acquires the consumer's reads of the bytes before `head`, which it released by publishing `head`. So those
        // bytes may be overwritten. This is also the second check of W2.
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

// A producer between hosts whose peer's ring has no room writes *aside*: into a buffer of its own end. From there the
// engine carries over as many bytes as the peer has room for. The end (`remote/lend.rs`) moves the producer there and
// back, under the end's own lock and the producer's, so the block records neither move. W4 holds as long as the peer's
// ring is no larger than the buffer. Producers within a host do not write aside, since their readers see each byte as
// it is written.

impl Producer {
    /// Returns whether the producer writes aside.
    pub fn is_aside(&self) -> bool {
        self.aside
    }

    /// Returns how much of a buffer of `1 << log2` bytes the producer may use within its bound, as log2 of bytes.
    /// `None` if that is no more than its ring has, or if the producer cannot move.
    pub(in crate::fabric) fn fits_aside(&mut self, log2: u8) -> Option<u8> {
        self.reload().ok()?;
        let may_move = !self.aside && !self.ended && self.ring.size() != 0;
        self.part_of(log2).filter(|part| may_move && self.has_more(*part))
    }

    /// Moves the producer to `region` of its area, which no other stream uses. From then on the engine adopts the
    /// peer's offers. Returns false if the region cannot be used.
    pub(in crate::fabric) fn move_aside(&mut self, region: Region) -> bool {
        let Ok(ring) = self.area.ring(region) else {
            return false;
        };
        self.offer = self.theirs().offer.look();
        self.backed = None;
        let first = self.earlier[0];
        self.change_ring(ring);
        // Keeps the ring before the peer's ring as well: the known head may still lie in it, although the consumer has
        // read further.
        self.earlier[1] = first;
        self.aside = true;
        true
    }

    /// Moves the producer back to the peer's ring in `region`, which has `generation`, and lets it check the consumer's
    /// offer again. `next` is the ring on offer; `None` if there is none. Returns false if bytes are unread, or if half
    /// of the larger of the two rings exceeds the bound.
    pub(in crate::fabric) fn move_back(&mut self, region: Region, generation: u32, next: Option<Region>) -> bool {
        let is_read = self.reload().is_ok() && self.head == self.tail;
        let half = next.map_or(0, Region::len).max(region.len()) as u64 / 2;
        let is_too_large = self.bound != 0 && half > self.bound;
        if !self.aside || self.ended || !is_read || is_too_large {
            return false;
        }
        let Ok(ring) = self.area.ring(region) else {
            return false;
        };
        // The next call of `adopt` checks the offer again. An older offer is passed over, since its generation does not
        // follow.
        self.offer = 0;
        self.generation = generation;
        self.change_ring(ring);
        self.aside = false;
        // Other streams use the buffer from this moment on, so it is not kept as an earlier ring.
        self.earlier = [Earlier::none(self.switch_pos); 2];
        true
    }
}

// A producer within a host that finds no room moves to the consumer's reserve (see *The reserve* in `ring.rs`), and
// gets the memory for it. Between hosts consumers have no reserve.

impl Producer {
    /// Makes room for a sender that must not wait. First counts the bytes that the consumer has read and not published.
    /// If that is too little, moves to the reserve and uses as much of it as the bound allows. That part has to be
    /// larger than the ring, and `may_take`, called with its size in bytes, has to agree. Returns true if there is more
    /// room than before.
    pub fn make_room(&mut self, may_take: impl FnOnce(u64) -> bool) -> Result<bool, RingError> {
        if self.look_closely()? {
            return Ok(true);
        }
        match self.next_reserve() {
            Some(next) if self.has_more(next.part.log2()) && may_take(next.part.len() as u64) => self.move_to(&next),
            _ => Ok(false),
        }
    }

    /// Returns whether [`make_room`](Self::make_room) would find room.
    pub fn could_have_room(&mut self) -> Result<bool, RingError> {
        Ok(self.look_closely()? || self.has_reserve())
    }

    /// Returns whether there is a reserve to move to, as far as this side knows the consumer's progress.
    fn has_reserve(&self) -> bool {
        self.next_reserve().is_some_and(|next| self.has_more(next.part.log2()))
    }

    /// Reads the consumer's own count of consumed bytes, which costs the consumer a cache miss at its next read.
    /// Returns true if a quarter of the ring is then free.
    fn look_closely(&mut self) -> Result<bool, RingError> {
        self.reload()?;
        // SAFETY: the block is mapped while `self` exists, by the contract of `new`.
        let last = unsafe { &self.block.as_ref().last };
        // Acquires the consumer's reads of the bytes before this count, which `consume` releases.
        let consumed = last.consumed.load(Ordering::Acquire);
        if consumed > self.tail {
            return Err(Violation::HeadBeyondTail.into());
        }
        self.head = self.head.max(consumed);
        if !self.ended {
            self.limit = self.writable();
        }
        let quarter = self.ring.quarter().min(self.most() / 4);
        Ok(quarter != 0 && self.limit - self.tail >= quarter)
    }

    /// Returns whether the ring has room, but this process had no memory for it.
    pub fn is_starved(&self) -> bool {
        self.starved
    }

    /// Returns whether a ring of `1 << log2` bytes would let the producer write more bytes.
    fn has_more(&self, log2: u8) -> bool {
        let is_bound = self.bound != 0 && self.tail - self.head >= self.bound;
        1 << log2 > self.ring.size() && !is_bound
    }

    /// Returns how much of a ring of `1 << log2` bytes the producer may use within its bound, as log2 of bytes. `None`
    /// if no power of two is as large as the bound.
    fn part_of(&self, log2: u8) -> Option<u8> {
        let part = match self.bound {
            0 => log2,
            bound => bound.checked_next_power_of_two()?.ilog2() as u8,
        };
        Some(part.max(MIN_RING_LOG2).min(log2))
    }

    /// Returns the reserve; `None` if there is none, or if it cannot be taken at this moment.
    fn next_reserve(&self) -> Option<Reserve> {
        let word = self.theirs().reserve.load(Ordering::Acquire);
        if word == self.reserve || self.ended || self.aside || self.head < self.switch_pos {
            return None;
        }
        let whole = Offer::unpack(word)?.region;
        let part = Region::new(whole.page(), self.part_of(whole.log2())?)?;
        Some(Reserve { word, whole, part })
    }

    fn move_to(&mut self, &Reserve { word, whole, part }: &Reserve) -> Result<bool, RingError> {
        self.reserve = word;
        if !self.allowance.reaches(whole) {
            return Ok(false);
        }
        let ring = match self.area.ring(whole) {
            Ok(ring) => ring,
            Err(NoRing::Outside) => return Err(Violation::BadOffer.into()),
            Err(NoRing::Unmapped) => return Ok(false),
        };
        let ring = ring.part(part.log2()).ok_or(Violation::BadOffer)?;
        if !self.allowance.admits(part) {
            return Err(Violation::BeyondAllowance.into());
        }
        // Without memory for the first piece the direction keeps its ring.
        if !self.area.back(part, self.tail, PIECE) {
            return Ok(false);
        }
        self.backed = Some((part, self.tail + PIECE));
        let generation = Offer::next_generation(self.generation);
        self.switch_to(ring, generation, part.log2());
        Ok(true)
    }

    /// Gets memory for `want` more bytes of the reserve. Once the producer has written to the whole ring, all of it has
    /// memory.
    fn back_more(&mut self, want: u64) {
        let Some((region, backed)) = self.backed else {
            return;
        };
        let end = self.switch_pos + self.ring.size();
        if backed >= end {
            self.backed = None;
        } else if self.window().min(end) > backed {
            let more = want.next_multiple_of(PIECE).max(PIECE).min(end - backed);
            self.starved = !self.area.back(region, backed, more);
            if !self.starved {
                self.backed = Some((region, backed + more));
            }
        }
        self.limit = self.writable();
    }
}
