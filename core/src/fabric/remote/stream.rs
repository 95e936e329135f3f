//! The engine's state of the two directions of one stream: how far they were carried over, and which records of the
//! peer are valid next. The shared words are in the direction blocks, which each function gets as an argument. This
//! file sends nothing.
//!
//! Positions count the bytes of a direction. The *tail* is the position up to which it has bytes, the *head* the
//! position up to which its reader has consumed them. `told` is the last value that was sent to the peer. A producer
//! writes *aside* if it uses a send buffer of this end (`lend.rs`). `remote.rs` defines advert, PLACED, loan, SOURCE
//! and TAKEN.

use crate::fabric::layout::{MAX_STREAMS, Region};
use crate::fabric::remote::get::{Loans, Takings};
use crate::fabric::remote::put::{Landings, Targets};
use crate::fabric::remote::record::Memory;
use crate::fabric::remote::{Breach, ENGINE};
use crate::fabric::ring::proxy::{ConsumerView, ProducerView};
use crate::fabric::ring::{DataArea, DirectionBlock, EndMark, Offer, Wake};

/// The state of a local number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    /// No stream has the number.
    #[default]
    Free,
    /// A stream has the number. It is *paired* once the peer's number for it is known (`theirs`).
    Open,
    /// CLOSED was sent. Later records of the peer have no effect.
    Left,
}

/// A stream, by its local number.
#[derive(Debug, Default)]
pub(super) struct Stream {
    pub state: State,
    /// The peer's number; `None` if the stream is not paired.
    pub theirs: Option<u32>,
    /// Whether CLOSED is to be sent when all bytes are carried over.
    pub closing: bool,
    /// Whether CLOSED has come.
    pub peer_left: bool,
    pub inc: Incoming,
    pub out: Outgoing,
}

impl Stream {
    /// Returns whether READs may still bring bytes into the stream's ring.
    pub(super) fn is_read_into(&mut self) -> bool {
        self.inc.takings.is_under_way(self.inc.tail)
    }
}

/// The direction that this end receives, in a block of `mine`. The engine acts for the direction's producer.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// All bytes before this position are in the ring.
    pub tail: u64,
    /// The ring that the peer uses.
    pub ring: Option<Region>,
    /// The first position in the ring.
    start: u64,
    /// A ring that was offered to the peer, and that the peer has not adopted.
    pub offered: Option<Offer>,
    /// The local consumer's state as it was last sent to the peer.
    pub told: ConsumerView,
    /// The head at the time when it was last held back.
    pub head_held: u64,
    ended: bool,
    /// Whether the end mark is in the block. It is not if the local consumer had stopped before.
    pub marked: bool,
    /// Whether CONFIRM has come, and ACK is to be sent.
    pub ack_due: bool,
    /// Whether the head is to be sent even if it has moved little.
    pub settle: bool,
    /// The buffer with which the local program waits.
    pub landings: Landings,
    /// The memory that the peer's program lends.
    pub takings: Takings,
}

impl Incoming {
    pub(super) fn on_data(
        &mut self,
        block: &DirectionBlock,
        area: &DataArea,
        tail: u64,
        payload: &[u8],
    ) -> Result<Wake, Breach> {
        if self.ended {
            return Err(Breach::End);
        }
        if self.takings.is_open() {
            return Err(Breach::Loan);
        }
        let ring = self.ring.ok_or(Breach::Tail)?;
        let window = self.window(block);
        let n = tail.checked_sub(self.tail).filter(|n| *n > 0);
        let n = n.ok_or(Breach::Tail)?;
        if tail > window || payload.len() as u64 > n {
            return Err(Breach::Tail);
        }
        // SAFETY: the positions are within the window, and the consumer does not read there before the new tail is in
        // the block.
        if !unsafe { area.copy_in(ring, tail - payload.len() as u64, payload) } {
            return Err(Breach::Tail);
        }
        self.landings.on_ring();
        self.tail = tail;
        Ok(block.put_tail(tail))
    }

    /// Returns the position up to which the ring has room, so that the peer may write.
    fn window(&self, block: &DirectionBlock) -> u64 {
        let size = self.ring.map_or(0, |ring| ring.len() as u64);
        block.head().max(self.start).saturating_add(size)
    }

    /// Returns how many bytes a program's buffer for the next bytes may have, if the ring is empty: as many as the ring
    /// has room for. Returns 0 if no buffer can be used.
    pub(super) fn room_to_land(&self, block: &DirectionBlock) -> u64 {
        let is_empty = block.head() == self.tail && self.tail > 0;
        if !is_empty || self.ended || self.landings.is_busy() || self.takings.is_under_way(self.tail) {
            return 0;
        }
        self.window(block) - self.tail
    }

    /// Processes PLACED: bytes in the local program's buffer count as if the ring had them. Returns the waiters to
    /// wake.
    pub(super) fn on_placed(&mut self, block: &DirectionBlock, serial: u32, tail: u64) -> Result<Wake, Breach> {
        let window = self.window(block);
        match self.landings.on_placed(serial, tail, window)? {
            Some(_) if self.ended => Err(Breach::End),
            Some(tail) => {
                self.tail = tail;
                Ok(block.put_tail(tail))
            }
            None => Ok(Wake::NONE),
        }
    }

    /// Processes SOURCE: the peer's program lends memory for the next bytes. The peer then does not write to a local
    /// program's buffer, but this end's device may read into it.
    pub(super) fn on_loan(&mut self, block: &DirectionBlock, loan: Memory) -> Result<(), Breach> {
        if self.ended {
            return Err(Breach::End);
        }
        self.takings.begin(loan, self.tail, self.window(block))?;
        self.landings.on_loan();
        Ok(())
    }

    /// Records that a READ of lent memory into the ring has completed. Returns the waiters to wake.
    pub(super) fn on_read(&mut self, block: &DirectionBlock, bytes: u32) -> Wake {
        self.tail = self.tail.saturating_add(bytes.into());
        block.put_tail(self.tail)
    }

    /// If the READs into a program's buffer have ended, counts their bytes as if the ring had them. Returns the waiters
    /// to wake.
    pub(super) fn end_own_landing(&mut self, block: &DirectionBlock) -> Wake {
        let has_more = self.takings.next().is_some();
        let bytes = self.landings.end_own(has_more);
        self.on_landed(block, bytes.unwrap_or(0))
    }

    /// Ends the adverts because the bulk queue pair is given up. Returns the waiters to wake.
    pub(super) fn lapse(&mut self, block: &DirectionBlock) -> Wake {
        let bytes = self.landings.lapse();
        self.on_landed(block, bytes)
    }

    fn on_landed(&mut self, block: &DirectionBlock, bytes: u64) -> Wake {
        if bytes == 0 {
            return Wake::NONE;
        }
        self.tail = self.tail.saturating_add(bytes);
        self.takings.on_landed(self.tail);
        block.put_tail(self.tail)
    }

    pub(super) fn on_switch(&mut self, block: &DirectionBlock, generation: u32, position: u64) -> Result<(), Breach> {
        match self.offered {
            _ if self.takings.is_open() => Err(Breach::Loan),
            Some(offer) if offer.generation == generation && position == self.tail && !self.ended => {
                self.ring = Some(offer.region);
                self.start = position;
                self.offered = None;
                block.put_switch(generation, position);
                Ok(())
            }
            _ => Err(Breach::Switch),
        }
    }

    /// Processes END. If the local consumer has stopped, the consumer's mark stays. Returns the waiters to wake.
    pub(super) fn on_end(&mut self, block: &DirectionBlock, end: u32, tail: u64) -> Result<Wake, Breach> {
        let end = EndMark::from_word(end).ok_or(Breach::End)?;
        if std::mem::replace(&mut self.ended, true) || tail != self.tail || self.takings.is_open() {
            return Err(Breach::End);
        }
        let put = block.put_end(end).ok();
        self.marked = put.is_some();
        Ok(put.unwrap_or(Wake::NONE))
    }
}

/// The buffer into which the local producer writes while the peer's ring has no room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Aside {
    /// The first position in the buffer.
    pub from: u64,
    /// The place of the buffer in the mirror's data area (`lend.rs`).
    pub region: Region,
}

/// The bytes that are to be carried over next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Next {
    /// The ring or buffer of the mirror that has the bytes.
    pub source: Region,
    /// The peer's ring to which the bytes go, at the same positions.
    pub ring: Region,
    /// The position up to which the bytes are to be carried over.
    pub until: u64,
}

/// The direction that this end sends, in a block of the mirror. The engine acts for the direction's consumer.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    pub ring: Option<Region>,
    /// The first position in the ring.
    pub start: u64,
    pub generation: u32,
    /// A ring that was offered to the local producer, and to which no SWITCH was sent yet.
    pub offered: Option<Offer>,
    /// Flags of the peer's consumer that came before the peer's number of the stream was known.
    pub early_flags: u32,
    /// The `offer` word of the first ring, as OPEN has named that ring. The local producer may use the ring. The engine
    /// carries no byte over before the peer has offered it.
    pub foreseen: Option<u64>,
    /// The position from which on the local producer uses the offered ring. A producer that writes aside adopts no
    /// ring; in that case the engine decides when to switch.
    pub switch_at: Option<u64>,
    pub aside: Option<Aside>,
    /// The number of times that the peer's ring had no room for bytes written aside. `stalled_at` is the position of
    /// the last time.
    pub stalls: u32,
    stalled_at: Option<u64>,
    /// All bytes before this position were written to the peer's ring, or sent in messages.
    pub placed: u64,
    /// The position up to which bytes were announced to the peer; at most `placed`.
    pub told: u64,
    pub head: u64,
    /// The position of the peer's last ACK. The end mark counts as one byte behind the last byte, as TCP's FIN does.
    pub acked: u64,
    pub limited_told: u32,
    pub end_told: bool,
    /// Whether the local producer had ended the direction when the engine last read its words.
    has_ended: bool,
    /// Whether the peer's consumer has stopped.
    pub stopped: bool,
    /// Whether CONFIRM is to be sent when all bytes are announced.
    pub want_confirm: bool,
    /// The position up to which the last CONFIRM has asked. The end mark counts as one byte.
    pub asked: u64,
    /// The buffer with which the peer's program waits.
    pub targets: Targets,
    /// The memory that the local program lends.
    pub loans: Loans,
}

impl Outgoing {
    /// Sets the engine's wake-up word, so that the producer's next change notifies the engine. Then reads the words of
    /// the local producer.
    pub(super) fn look(&mut self, block: &DirectionBlock) -> ProducerView {
        let view = block.watch_producer(ENGINE.0);
        self.has_ended = EndMark::from_word(view.end).is_some();
        // A producer that writes aside has adopted no ring since it moved.
        let is_new = self.switch_at.is_none() && self.aside.is_none();
        if is_new && self.offered.is_some_and(|offer| offer.generation == view.generation) {
            self.switch_at = Some(view.switch_pos);
        }
        view
    }

    /// Returns the generation of the ring that begins at position `told`; `None` if no ring begins there.
    pub(super) fn next_generation(&self) -> Option<u32> {
        let is_due = match self.switch_at {
            Some(at) => at == self.told,
            None => self.adopts(self.told),
        };
        let is_here = is_due && self.placed == self.told;
        self.offered.filter(|_| is_here).map(|offer| offer.generation)
    }

    /// Records that SWITCH was sent.
    pub(super) fn on_switched(&mut self) {
        if let Some(offer) = self.offered.take() {
            self.generation = offer.generation;
            self.ring = Some(offer.region);
            self.start = self.told;
            self.switch_at = None;
        }
    }

    /// Returns the ring in which the local producer has put the byte at `position`, which was not announced yet.
    pub(super) fn ring_at(&self, position: u64) -> Option<Region> {
        match (self.switch_at, self.offered) {
            (Some(at), Some(offer)) if position >= at => Some(offer.region),
            _ => self.ring,
        }
    }

    fn is_aside_at(&self, position: u64) -> bool {
        self.aside.is_some_and(|aside| position >= aside.from)
    }

    /// Returns whether the engine moves to the ring on offer at `position`, where the producer writes aside. Unless the
    /// producer has ended the direction, the engine does not move to a ring larger than the buffer: the reader could
    /// hold back more of such a ring than W4 allows. Nor does the engine move after END was sent, since no bytes
    /// follow.
    fn adopts(&self, position: u64) -> bool {
        let aside = self.aside.filter(|_| self.is_aside_at(position));
        let fits = aside.zip(self.offered);
        let is_small = fits.is_some_and(|(aside, offer)| offer.region.len() <= aside.region.len());
        !self.end_told && (is_small || fits.is_some() && self.has_ended)
    }

    /// Returns the position up to which the peer's ring has room, as far as is known.
    pub(super) fn window(&self) -> u64 {
        let size = self.ring.map_or(0, |ring| ring.len() as u64);
        self.head.max(self.start).saturating_add(size)
    }

    /// Returns which of the bytes up to `tail` can be carried over before the next switch of rings. `None` if the peer
    /// has no ring yet.
    pub(super) fn next(&self, tail: u64) -> Option<Next> {
        let ring = self.ring?;
        let (source, until) = match self.aside {
            // The next ring begins at this position, so SWITCH has to be sent before any further byte.
            Some(aside) if self.adopts(self.placed) => (aside.region, self.placed),
            Some(aside) if self.is_aside_at(self.placed) => (aside.region, tail),
            Some(aside) => (ring, aside.from),
            None => (ring, tail),
        };
        let until = self.switch_at.map_or(until, |at| at.min(until));
        Some(Next {
            source,
            ring,
            until: until.min(tail).min(self.window()),
        })
    }

    /// Records that bytes up to `tail` could not be carried over. If the peer's ring is full and smaller than the
    /// buffer, this counts as limited by the window. It counts once for each position, as if the producer had found no
    /// room.
    pub(super) fn on_rest(&mut self, tail: u64) {
        let ring = self.ring.map_or(0, Region::len);
        let is_small = self.aside.is_some_and(|aside| aside.region.len() > ring);
        let is_full = self.placed < tail && self.placed == self.window();
        if is_small && is_full && self.stalled_at != Some(self.placed) {
            self.stalled_at = Some(self.placed);
            self.stalls = self.stalls.wrapping_add(1);
        }
    }

    pub(super) fn on_head(&mut self, block: &DirectionBlock, head: u64) -> Result<Wake, Breach> {
        if !(self.head..=self.reach()).contains(&head) {
            return Err(Breach::Head);
        }
        self.head = head;
        Ok(block.put_head(head))
    }

    /// Lets the local producer use the first ring before the peer has offered it. The peer can offer the ring only once
    /// it knows this end's number, and the producer need not wait for that. If `region` cannot be a ring, this does
    /// nothing: the peer's offer then shows the error.
    pub(super) fn foresee(&mut self, block: &DirectionBlock, data_len: usize, region: Region) {
        let generation = Offer::next_generation(self.generation);
        let word = Offer { generation, region }.pack();
        if self.check_offer(data_len, word).is_ok() {
            self.foreseen = Some(word);
            // The result names no waiter, since no producer waits yet.
            let _ = block.put_offer(word);
        }
    }

    pub(super) fn on_offer(&mut self, block: &DirectionBlock, data_len: usize, word: u64) -> Result<Wake, Breach> {
        self.offered = Some(self.check_offer(data_len, word)?);
        if self.foreseen.take().is_some_and(|foreseen| foreseen != word) {
            return Err(Breach::Offer);
        }
        Ok(match self.aside {
            // The engine adopts the ring, not the producer.
            Some(_) => Wake::NONE,
            None => block.put_offer(word),
        })
    }

    /// Checks that an offer is the next one, and lies within the peer's arena.
    pub(super) fn check_offer(&self, data_len: usize, word: u64) -> Result<Offer, Breach> {
        let offer = Offer::unpack(word).ok_or(Breach::Offer)?;
        let end = offer.region.offset().checked_add(offer.region.len());
        let fits = end.is_some_and(|end| end <= data_len);
        if !fits || self.offered.is_some() || offer.generation != Offer::next_generation(self.generation) {
            return Err(Breach::Offer);
        }
        Ok(offer)
    }

    /// Processes STOP. If the local producer has ended the direction, the producer's mark stays.
    pub(super) fn on_stop(&mut self, block: &DirectionBlock) {
        self.stopped = block.put_stop().is_ok();
    }

    /// Records that all bytes up to `tail` bypassed the ring, and that the peer knows of them.
    pub(super) fn on_direct(&mut self, tail: u64) {
        (self.placed, self.told) = (tail, tail);
    }

    /// Goes back to `position`: bytes behind it were announced and have not arrived.
    pub(super) fn go_back(&mut self, position: u64) -> Result<(), Breach> {
        if !(self.head..=self.told).contains(&position) || self.loans.is_open() {
            return Err(Breach::Advert);
        }
        (self.placed, self.told) = (position, position);
        Ok(())
    }

    /// Returns the position up to which the peer may have the bytes, because they were announced to it, or because it
    /// may have read them from a loan.
    fn reach(&self) -> u64 {
        self.loans.reach().map_or(self.told, |reach| reach.max(self.told))
    }

    pub(super) fn on_ack(&mut self, tail: u64) -> Result<(), Breach> {
        if tail > self.reach().saturating_add(self.end_told.into()) {
            return Err(Breach::Ack);
        }
        self.acked = self.acked.max(tail);
        Ok(())
    }
}

const PAGE: usize = 64;

/// All streams of a link by their local numbers, and the local numbers by the peer's numbers. Pages of streams are
/// allocated when their numbers are first used.
pub(super) struct Streams {
    pages: Vec<Option<Box<[Stream]>>>,
    /// The local number plus 1; 0 if there is none.
    by_theirs: Vec<u16>,
}

const _: () = assert!(MAX_STREAMS < u16::MAX as u32);

impl Streams {
    pub(super) fn new() -> Self {
        Self {
            pages: (0..MAX_STREAMS as usize / PAGE).map(|_| None).collect(),
            by_theirs: vec![0; MAX_STREAMS as usize],
        }
    }

    /// Returns the stream with a local number; `None` if no stream of that number's page was ever opened.
    pub(super) fn get(&mut self, mine: u32) -> Option<&mut Stream> {
        let page = self.pages.get_mut(mine as usize / PAGE)?.as_deref_mut()?;
        page.get_mut(mine as usize % PAGE)
    }

    /// Returns the stream with a local number, which is about to be opened. Allocates the number's page if needed.
    pub(super) fn make(&mut self, mine: u32) -> Option<&mut Stream> {
        let page = self.pages.get_mut(mine as usize / PAGE)?;
        let page = page.get_or_insert_with(|| (0..PAGE).map(|_| Stream::default()).collect());
        page.get_mut(mine as usize % PAGE)
    }

    /// Returns the stream with the peer's number `theirs`, and its local number.
    pub(super) fn of_peer(&mut self, theirs: u32) -> Option<(u32, &mut Stream)> {
        let mine = self.mine(theirs)?;
        Some((mine, self.get(mine)?))
    }

    /// Returns the local number of the stream with the peer's number `theirs`.
    pub(super) fn mine(&self, theirs: u32) -> Option<u32> {
        let number = *self.by_theirs.get(theirs as usize)?;
        u32::from(number).checked_sub(1)
    }

    /// Records that the peer's number `theirs` belongs to the local number `mine`.
    pub(super) fn link(&mut self, mine: u32, theirs: u32) {
        if let Some(slot) = self.by_theirs.get_mut(theirs as usize) {
            *slot = mine as u16 + 1;
        }
    }

    /// Ends the pairing of stream `mine`, if it is paired.
    pub(super) fn unlink(&mut self, mine: u32) {
        let theirs = self.get(mine).and_then(|s| s.theirs.take());
        if let Some(slot) = theirs.and_then(|theirs| self.by_theirs.get_mut(theirs as usize)) {
            *slot = 0;
        }
    }
}
