//! The two directions of one stream as the engine sees them: what was carried over, and what the peer may
//! do next. Its words are in the direction blocks, which are given to each call; nothing is sent here.

use super::direct::{Landings, Targets};
use super::fault::Breach;
use super::loan::{Loans, Takings};
use super::record::Memory;
use crate::fabric::layout::{MAX_STREAMS, Region};
use crate::fabric::ring::proxy::{ProducerView, next_generation, pack_offer, unpack_offer};
use crate::fabric::ring::{DataArea, DirectionBlock, EndMark, Wake};

/// Where a number of ours is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    /// No stream has it.
    #[default]
    Free,
    /// A stream of ours; `theirs` says whether it is paired.
    Open,
    /// CLOSED was sent. What the peer still says is of no interest.
    Left,
}

/// What the peer said about a stream whose number there we did not know yet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Early {
    pub offer: Option<u64>,
    pub flags: u32,
    pub stop: bool,
}

/// See the module. By our number.
#[derive(Debug, Default)]
pub(super) struct Stream {
    pub state: State,
    /// The peer's number.
    pub theirs: Option<u32>,
    /// CLOSED is to be sent when all is carried over.
    pub closing: bool,
    /// CLOSED has come.
    pub peer_left: bool,
    /// Both ends have ended one of the directions.
    pub crossed: bool,
    pub early: Early,
    pub inc: Incoming,
    pub out: Outgoing,
}

impl Stream {
    /// A new stream with this number.
    pub fn open(&mut self) {
        *self = Self {
            state: State::Open,
            ..Self::default()
        };
    }

    /// Something may still come into its ring by what was asked for.
    pub fn is_read_into(&mut self) -> bool {
        self.inc.takings.is_under_way(self.inc.tail)
    }
}

/// The direction that we receive, in a block of mine: in place of its producer.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// All before it is in the ring.
    pub tail: u64,
    /// The ring that the peer uses.
    pub ring: Option<Region>,
    /// First position in the ring.
    start: u64,
    /// A ring that the peer was told of and has not adopted.
    offered: Option<(u32, Region)>,
    pub offer_told: u64,
    pub head_told: u64,
    /// Where the head was when it was last found held back.
    pub head_held: u64,
    pub flags_told: u32,
    pub stop_told: bool,
    ended: bool,
    /// The mark is in the block: our consumer has not stopped before.
    marked: bool,
    /// CONFIRM has come.
    pub ack_due: bool,
    /// The head is to be told even if little is new.
    pub settle: bool,
    /// A buffer that our program waits with.
    pub landings: Landings,
    /// Memory that the peer's program lends.
    pub takings: Takings,
    /// Bytes that our device has read from there into buffers of our program's.
    pub landed: u64,
}

impl Incoming {
    /// A quarter of the ring: heads are told at least that often.
    pub fn quarter(&self) -> u64 {
        self.ring.map_or(0, |r| r.len() as u64 / 4)
    }

    pub fn on_data(
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
        // SAFETY: within the window, which the consumer does not read before the tail is put.
        if !unsafe { area.copy_in(ring, tail - payload.len() as u64, payload) } {
            return Err(Breach::Tail);
        }
        self.landings.on_ring();
        self.tail = tail;
        Ok(block.put_tail(tail))
    }

    /// Up to where the peer may write: what the ring has room for.
    fn window(&self, block: &DirectionBlock) -> u64 {
        let size = self.ring.map_or(0, |ring| ring.len() as u64);
        block.head().max(self.start).saturating_add(size)
    }

    /// How much of a buffer may be used for what comes next: the ring is empty, and has room for so much. 0 if it
    /// cannot be.
    pub fn room_to_land(&self, block: &DirectionBlock) -> u64 {
        let is_empty = block.head() == self.tail && self.tail > 0;
        if !is_empty || self.ended || self.landings.is_busy() || self.takings.is_under_way(self.tail) {
            return 0;
        }
        self.window(block) - self.tail
    }

    /// Bytes are in our program's buffer, which count as if the ring had them.
    pub fn on_placed(&mut self, block: &DirectionBlock, serial: u32, tail: u64) -> Result<Wake, Breach> {
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

    /// The peer's program lends memory for what comes next. A buffer of ours is of no use to it then, but to our
    /// device.
    pub fn on_loan(&mut self, block: &DirectionBlock, loan: Memory) -> Result<(), Breach> {
        if self.ended {
            return Err(Breach::End);
        }
        self.takings.begin(loan, self.tail, self.window(block))?;
        self.landings.on_loan();
        Ok(())
    }

    /// The next bytes of that are in the ring.
    pub fn on_read(&mut self, block: &DirectionBlock, bytes: u32) -> Wake {
        self.tail = self.tail.saturating_add(bytes.into());
        block.put_tail(self.tail)
    }

    /// What our device reads into a buffer counts as if the ring had it, when that is over. Whom to wake.
    pub fn end_own_landing(&mut self, block: &DirectionBlock) -> Wake {
        let has_more = self.takings.next().is_some();
        let bytes = self.landings.end_own(has_more);
        self.on_landed(block, bytes.unwrap_or(0))
    }

    /// The bulk queue pair is given up. Gives whom to wake.
    pub fn lapse(&mut self, block: &DirectionBlock) -> Wake {
        let bytes = self.landings.lapse();
        self.on_landed(block, bytes)
    }

    fn on_landed(&mut self, block: &DirectionBlock, bytes: u64) -> Wake {
        if bytes == 0 {
            return Wake::NONE;
        }
        self.tail = self.tail.saturating_add(bytes);
        self.takings.on_landed(self.tail);
        self.landed += bytes;
        block.put_tail(self.tail)
    }

    pub fn on_switch(&mut self, block: &DirectionBlock, generation: u32, position: u64) -> Result<(), Breach> {
        match self.offered {
            _ if self.takings.is_open() => Err(Breach::Loan),
            Some((offered, region)) if offered == generation && position == self.tail && !self.ended => {
                self.ring = Some(region);
                self.start = position;
                self.offered = None;
                block.put_switch(generation, position);
                Ok(())
            }
            _ => Err(Breach::Switch),
        }
    }

    /// Whom to wake; `None` if our consumer has stopped, and its mark stays.
    pub fn on_end(&mut self, block: &DirectionBlock, end: u32, tail: u64) -> Result<Option<Wake>, Breach> {
        let end = EndMark::from_word(end).ok_or(Breach::End)?;
        if std::mem::replace(&mut self.ended, true) || tail != self.tail || self.takings.is_open() {
            return Err(Breach::End);
        }
        let put = block.put_end(end).ok();
        self.marked = put.is_some();
        Ok(put)
    }

    /// Up to where all is in the ring, the end mark included.
    pub fn ack(&self) -> u64 {
        self.tail.saturating_add(self.marked.into())
    }

    /// The peer is being told of this offer of our consumer's.
    pub fn on_offer_told(&mut self, word: u64) {
        self.offer_told = word;
        self.offered = unpack_offer(word);
    }
}

/// Where our producer writes while the peer's ring has no room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Aside {
    /// From which position on it writes there.
    pub from: u64,
    /// The ring of ours that it writes to (`lend.rs`).
    pub region: Region,
}

/// What is to be carried over next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Next {
    /// Our ring that it is in.
    pub source: Region,
    /// The peer's ring that it goes to, at the same positions.
    pub ring: Region,
    /// Up to which position it is to be carried.
    pub until: u64,
}

/// The direction that we send, in a block of the mirror: in place of its consumer.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    pub ring: Option<Region>,
    /// First position in the ring.
    pub start: u64,
    pub generation: u32,
    /// A ring that our producer was told of; the peer has not seen it adopted.
    pub offered: Option<(u32, Region)>,
    /// The first ring, as OPEN has named it: our producer may use it, and nothing is carried over before the peer has
    /// offered it.
    foreseen: Option<u64>,
    /// From where on our producer uses it. While that writes aside it does not: then it is for us to switch.
    pub switch_at: Option<u64>,
    pub aside: Option<Aside>,
    /// How often the peer's ring had no room for what is written aside, and where that was last.
    stalls: u32,
    stalled_at: Option<u64>,
    /// All before it was written to the peer's ring, or sent.
    pub placed: u64,
    /// What of that the peer was told.
    pub told: u64,
    pub head: u64,
    /// As the peer said. The end mark counts as one byte after the last, as TCP's FIN does.
    pub acked: u64,
    pub limited_told: u32,
    pub end_told: bool,
    /// Our producer has ended, as far as we have looked.
    has_ended: bool,
    /// The peer's consumer has stopped.
    pub stopped: bool,
    /// The position is to be confirmed when all is told.
    pub want_confirm: bool,
    /// CONFIRM was sent when all up to here had been told.
    pub asked: u64,
    /// A buffer that the peer's program waits with.
    pub targets: Targets,
    /// Memory that our program lends.
    pub loans: Loans,
}

impl Outgoing {
    /// Asks to be told of more, then looks.
    pub fn look(&mut self, block: &DirectionBlock, wake: u32) -> ProducerView {
        let view = block.watch_producer(wake);
        self.has_ended = EndMark::from_word(view.end).is_some();
        // A producer that writes aside has adopted nothing since.
        let is_new = self.switch_at.is_none() && self.aside.is_none();
        if is_new && self.offered.is_some_and(|(g, _)| g == view.generation) {
            self.switch_at = Some(view.switch_pos);
        }
        view
    }

    /// The generation of the ring that begins at the position that was told.
    pub fn next_generation(&self) -> Option<u32> {
        let is_due = match self.switch_at {
            Some(at) => at == self.told,
            None => self.adopts(self.told),
        };
        let is_here = is_due && self.placed == self.told;
        self.offered.filter(|_| is_here).map(|(g, _)| g)
    }

    /// SWITCH is told.
    pub fn on_switched(&mut self) {
        if let Some((generation, region)) = self.offered.take() {
            self.generation = generation;
            self.ring = Some(region);
            self.start = self.told;
            self.switch_at = None;
        }
    }

    /// The ring in which our producer has put the byte at a position that was not told.
    pub fn ring_at(&self, position: u64) -> Option<Region> {
        match (self.switch_at, self.offered) {
            (Some(at), Some((_, region))) if position >= at => Some(region),
            _ => self.ring,
        }
    }

    fn is_aside_at(&self, position: u64) -> bool {
        self.aside.is_some_and(|aside| position >= aside.from)
    }

    /// Whether we move on to the ring on offer, at a position at which our producer writes aside. Not to a larger one
    /// than it has there, unless it has ended: of that the reader could hold back more than W4 allows. Nor behind the
    /// end, where there is nothing that it could be for.
    fn adopts(&self, position: u64) -> bool {
        let aside = self.aside.filter(|_| self.is_aside_at(position));
        let fits = aside.zip(self.offered);
        let is_small = fits.is_some_and(|(a, (_, ring))| ring.len() <= a.region.len());
        !self.end_told && (is_small || fits.is_some() && self.has_ended)
    }

    /// Up to where the peer's ring has room, as far as is known.
    pub fn window(&self) -> u64 {
        let size = self.ring.map_or(0, |ring| ring.len() as u64);
        self.head.max(self.start).saturating_add(size)
    }

    /// What can be carried over of all up to `tail`, before the next switch of rings. `None` if the peer has no ring
    /// yet.
    pub fn next(&self, tail: u64) -> Option<Next> {
        let ring = self.ring?;
        let (source, until) = match self.aside {
            // The next ring begins here.
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

    /// How often the window was too small, by what our producer has counted of that.
    pub fn limited(&self, counted: u32) -> u32 {
        counted.wrapping_add(self.stalls)
    }

    /// There is more, up to `tail`. If that is for want of room in the peer's ring, and that is the smaller one, it
    /// counts as limited, once per position, as it would if our producer had found it.
    pub fn on_rest(&mut self, tail: u64) {
        let ring = self.ring.map_or(0, Region::len);
        let is_small = self.aside.is_some_and(|aside| aside.region.len() > ring);
        let is_full = self.placed < tail && self.placed == self.window();
        if is_small && is_full && self.stalled_at != Some(self.placed) {
            self.stalled_at = Some(self.placed);
            self.stalls = self.stalls.wrapping_add(1);
        }
    }

    pub fn on_head(&mut self, block: &DirectionBlock, head: u64) -> Result<Wake, Breach> {
        if !(self.head..=self.reach()).contains(&head) {
            return Err(Breach::Head);
        }
        self.head = head;
        Ok(block.put_head(head))
    }

    /// The peer has still to be told that we are here before it can offer its first ring, and our producer is not to
    /// wait for that. (One that cannot be is not used: the offer tells.)
    pub fn foresee(&mut self, block: &DirectionBlock, data_len: usize, first: Region) {
        let word = pack_offer(next_generation(self.generation), first);
        if self.check_offer(data_len, word).is_ok() {
            self.foreseen = Some(word);
            // Nobody waits for it yet.
            let _ = block.put_offer(word);
        }
    }

    /// Whether our producer may be in a ring that the peer has not offered yet.
    pub fn is_ahead_of_offers(&self) -> bool {
        self.foreseen.is_some()
    }

    pub fn on_offer(&mut self, block: &DirectionBlock, data_len: usize, word: u64) -> Result<Wake, Breach> {
        self.offered = Some(self.check_offer(data_len, word)?);
        if self.foreseen.take().is_some_and(|foreseen| foreseen != word) {
            return Err(Breach::Offer);
        }
        Ok(match self.aside {
            // It is for us to adopt it.
            Some(_) => Wake::NONE,
            None => block.put_offer(word),
        })
    }

    /// An offer that is the next one, within the peer's arena.
    pub fn check_offer(&self, data_len: usize, word: u64) -> Result<(u32, Region), Breach> {
        let (generation, region) = unpack_offer(word).ok_or(Breach::Offer)?;
        let fits = region
            .offset()
            .checked_add(region.len())
            .is_some_and(|end| end <= data_len);
        if !fits || self.offered.is_some() || generation != next_generation(self.generation) {
            return Err(Breach::Offer);
        }
        Ok((generation, region))
    }

    /// False if our producer has ended the direction, and its mark stays.
    pub fn on_stop(&mut self, block: &DirectionBlock) -> bool {
        self.stopped = block.put_stop().is_ok();
        self.stopped
    }

    /// All up to `tail` was posted to a buffer of the peer's program, and is told.
    pub fn on_direct(&mut self, tail: u64) {
        (self.placed, self.told) = (tail, tail);
    }

    /// What was told behind `position` has not come.
    pub fn go_back(&mut self, position: u64) -> Result<(), Breach> {
        if !(self.head..=self.told).contains(&position) || self.loans.is_open() {
            return Err(Breach::Advert);
        }
        (self.placed, self.told) = (position, position);
        Ok(())
    }

    /// What was lent, and not told, goes by the ring.
    pub fn cancel_loan(&mut self) {
        self.loans.recall();
        if let Some(source) = &mut self.targets.source {
            source.is_needed = true;
        }
    }

    /// Up to where the peer may have the bytes: what it was told, and what it may have read of what is lent to it.
    fn reach(&self) -> u64 {
        self.loans.reach().map_or(self.told, |reach| reach.max(self.told))
    }

    pub fn on_ack(&mut self, tail: u64) -> Result<(), Breach> {
        if tail > self.reach().saturating_add(self.end_told.into()) {
            return Err(Breach::Ack);
        }
        self.acked = self.acked.max(tail);
        Ok(())
    }
}

const PAGE: usize = 64;

/// All streams of a link, by our number; and our number by the peer's. Made as numbers are first used.
pub(super) struct Streams {
    pages: Vec<Option<Box<[Stream]>>>,
    /// Our number plus 1.
    by_theirs: Vec<u16>,
}

const _: () = assert!(MAX_STREAMS < u16::MAX as u32);

impl Streams {
    pub fn new() -> Self {
        Self {
            pages: (0..MAX_STREAMS as usize / PAGE).map(|_| None).collect(),
            by_theirs: vec![0; MAX_STREAMS as usize],
        }
    }

    /// Our stream; only if it was ever opened.
    pub fn get(&mut self, mine: u32) -> Option<&mut Stream> {
        let page = self.pages.get_mut(mine as usize / PAGE)?.as_deref_mut()?;
        page.get_mut(mine as usize % PAGE)
    }

    /// Our stream, which is about to be opened.
    pub fn make(&mut self, mine: u32) -> Option<&mut Stream> {
        let page = self.pages.get_mut(mine as usize / PAGE)?;
        let page = page.get_or_insert_with(|| (0..PAGE).map(|_| Stream::default()).collect());
        page.get_mut(mine as usize % PAGE)
    }

    /// Our stream that the peer calls `theirs`.
    pub fn of_peer(&mut self, theirs: u32) -> Option<&mut Stream> {
        let mine = self.mine(theirs)?;
        self.get(mine)
    }

    /// Our number for the peer's stream.
    pub fn mine(&self, theirs: u32) -> Option<u32> {
        let number = *self.by_theirs.get(theirs as usize)?;
        u32::from(number).checked_sub(1)
    }

    /// None has a number as high as this.
    pub fn most(&self) -> u32 {
        (self.pages.len() * PAGE) as u32
    }

    /// Sets or clears that.
    pub fn link(&mut self, theirs: u32, mine: Option<u32>) {
        if let Some(slot) = self.by_theirs.get_mut(theirs as usize) {
            *slot = mine.map_or(0, |m| m as u16 + 1);
        }
    }
}
