//! The shm fabric: one end of a link whose memory two processes of one host share.
//!
//! Each end receives in an arena of its own, which the other maps ([`layout`]), and looks at the
//! page of sleep flags that the other shows. What is not memory comes from whoever holds the end
//! ([`Outside`]): the side channel and how a waiter is woken. Not here: making a link, whether it is up, and
//! what its streams are for.

use super::layout::{self, READY_QUEUES, Region};
use super::numbers::{Done, Numbers, done};
use super::ready::RungMark;
use super::ring::{Consumer, Producer, Wake};
pub use super::side::Side;
use super::side::Sweeps;
use super::waiter::{FlagPage, WaiterId};
use super::{LinkEnd, OpenError, Opened, SendError};
use crate::ids::Vqpn;
use crate::wire::{Message, RingOffer};

/// What an end needs that is not memory. Neither call may wait, or call the end.
pub trait Outside {
    /// As [`LinkEnd::send`].
    fn send(&self, message: &Message) -> Result<(), SendError>;

    /// Wakes whoever sleeps, or will next sleep, as the peer's `waiter`, by the `page` that the peer shows if that will do.
    fn ring(&self, waiter: WaiterId, page: &FlagPage);
}

/// See the module.
pub struct End<O> {
    mine: Side,
    theirs: Side,
    peer_flags: FlagPage,
    /// One for each waiter that has a queue.
    marks: Box<[RungMark]>,
    sweeps: Sweeps,
    numbers: Numbers,
    outside: O,
}

impl<O> End<O> {
    /// An end with nothing open. We receive in `mine`, the peer in `theirs`, and it sleeps by
    /// `peer_flags`.
    ///
    /// # Safety
    /// The end must live longer than every cursor that it gives out. [`producer`](LinkEnd::producer)
    /// must be asked at most once for each stream.
    pub unsafe fn new(mine: Side, theirs: Side, peer_flags: FlagPage, outside: O) -> Self {
        let numbers = Numbers::new(mine.layout().data_len() as u64);
        Self {
            mine,
            theirs,
            peer_flags,
            marks: (0..READY_QUEUES).map(|_| RungMark::new()).collect(),
            sweeps: Sweeps::new(),
            numbers,
            outside,
        }
    }

    /// What the end was given.
    #[inline]
    pub fn outside(&self) -> &O {
        &self.outside
    }

    /// Every number that was ever given to a stream of ours is below this.
    pub fn numbers(&self) -> u32 {
        self.numbers.ever_given()
    }

    /// Gives the memory of a link back that carries nothing any more. The addresses stay readable
    /// and writable, so that a cursor that is still about does no harm.
    pub fn release(&self) {
        self.mine.mapping().neutralise();
        self.theirs.mapping().neutralise();
    }

    fn leave(&self, mine: Vqpn, consumer: Option<Consumer>, bits: u8) {
        self.numbers.keep(mine, consumer);
        if bits != 0 {
            self.mark_done(mine, bits);
        }
    }

    fn mark_done(&self, mine: Vqpn, bits: u8) {
        if let Some(Done { number, regions }) = self.numbers.mark(mine, bits) {
            regions.into_iter().for_each(|r| self.give_back(r));
            self.numbers.give_back(number);
        }
    }

    fn give_back(&self, region: Region) {
        let start = layout::DATA_OFFSET + region.offset();
        // Gives the pages back. If it fails they just stay.
        let _ = self.mine.mapping().punch_hole(start..start + region.len());
        self.numbers.free(region);
    }
}

impl<O: Outside> End<O> {
    // Not inlined: `notify` would grow, and be called for every message that wakes nobody.
    #[inline(never)]
    fn tell(&self, wake: Wake, theirs: Vqpn) {
        if let Some(waiter) = WaiterId::of_queue(wake.0)
            && let Some(queue) = self.theirs.queue(waiter)
        {
            queue.push(theirs.0);
            if let (Some(flag), Some(mark)) = (
                self.peer_flags.flag(waiter),
                self.marks.get(waiter.0 as usize),
            ) && flag.must_ring(mark)
            {
                self.outside.ring(waiter, &self.peer_flags);
            }
        }
        if let Some(sleeper) = WaiterId::of_sleeper(wake.0) {
            self.outside.ring(sleeper, &self.peer_flags);
        }
    }
}

impl<O: Outside> LinkEnd for End<O> {
    fn open(&self, log2: u8) -> Result<Opened, OpenError> {
        let (vqpn, region) = self.numbers.take(log2)?;
        let block = self.mine.block(vqpn).ok_or(OpenError::Streams)?;
        // SAFETY: within the mapping; the number is free, so neither end has a cursor on the block.
        unsafe { block.as_ref() }.reset();
        // SAFETY: as above; this is the block's only consumer, and the end outlives it (`new`).
        let mut consumer = unsafe { Consumer::new(block, self.mine.area()) };
        let Ok(wake) = consumer.offer(region) else {
            self.numbers.put_back(vqpn, region);
            return Err(OpenError::Arena);
        };
        // Nobody can be waiting yet.
        let _ = wake;
        let ring = RingOffer::new(region.page(), region.log2()).ok_or(OpenError::Arena)?;
        Ok(Opened {
            vqpn,
            ring,
            consumer,
        })
    }

    fn producer(&self, theirs: Vqpn) -> Option<Producer> {
        let block = self.theirs.block(theirs)?;
        // SAFETY: within the mapping; the only producer, and the end outlives it (`new`).
        Some(unsafe { Producer::new(block, self.theirs.area()) })
    }

    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>) {
        let told = match theirs {
            Some(yours) => self.outside.send(&Message::Closed { yours }).is_ok(),
            None => true,
        };
        let bits = match (theirs, told) {
            (None, _) => done::BOTH,
            (_, true) => done::LOCAL,
            (_, false) => 0,
        };
        self.leave(mine, consumer, bits);
    }

    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>) {
        self.leave(mine, consumer, done::LOCAL);
    }

    fn on_closed(&self, mine: Vqpn) {
        self.mark_done(mine, done::PEER);
    }

    fn allocate(&self, log2: u8) -> Option<Region> {
        self.numbers.allocate(log2)
    }

    fn free(&self, region: Region) {
        self.give_back(region);
    }

    fn send(&self, message: &Message) -> Result<(), SendError> {
        self.outside.send(message)
    }

    #[inline]
    fn notify(&self, wake: Wake, theirs: Vqpn) {
        if !wake.is_none() {
            self.tell(wake, theirs);
        }
    }

    fn drain_ready(&self, waiter: WaiterId, each: impl FnMut(Vqpn)) {
        self.sweeps.drain(&self.mine, waiter, each);
    }

    fn has_ready(&self, waiter: WaiterId) -> bool {
        self.sweeps.has_ready(&self.mine, waiter)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::fabric::layout::Layout;
    use crate::os::memfd::Mapping;

    /// A side channel that works or not, and a count of rings.
    #[derive(Default)]
    struct Outer {
        is_down: Cell<bool>,
        rung: Cell<u32>,
    }

    impl Outside for Outer {
        fn send(&self, _: &Message) -> Result<(), SendError> {
            (!self.is_down.get()).then_some(()).ok_or(SendError::Down)
        }

        fn ring(&self, _: WaiterId, _: &FlagPage) {
            self.rung.set(self.rung.get() + 1);
        }
    }

    fn layout() -> Layout {
        Layout::for_data(1 << 16).unwrap()
    }

    fn map(bytes: u64) -> Mapping {
        Mapping::anonymous(bytes as usize).unwrap()
    }

    fn end() -> End<Outer> {
        let side = || Side::new(map(layout().file_len()), layout()).unwrap();
        let flags = FlagPage::new(map(super::super::waiter::FLAGS_BYTES)).unwrap();
        // SAFETY: the tests drop or forget cursors before the end.
        unsafe { End::new(side(), side(), flags, Outer::default()) }
    }

    fn in_use(end: &End<Outer>) -> u64 {
        end.numbers.bytes_in_use()
    }

    #[test]
    fn an_arena_is_not_shorter_than_its_layout() {
        assert!(Side::new(map(layout().file_len() - 1), layout()).is_none());
    }

    #[test]
    fn a_number_that_the_peer_could_not_be_told_of_stays_taken() {
        let end = end();
        let opened = end.open(12).unwrap();
        end.outside().is_down.set(true);
        end.close(opened.vqpn, Some(Vqpn(0)), Some(opened.consumer));
        end.on_closed(opened.vqpn);
        assert_ne!(end.open(12).unwrap().vqpn, opened.vqpn);
        assert_eq!((in_use(&end), end.numbers()), (2 * 4096, 2));
    }

    #[test]
    fn a_number_whose_consumer_is_lost_is_free_but_its_ring_is_not() {
        let end = end();
        let opened = end.open(12).unwrap();
        end.close(opened.vqpn, None, None);
        assert_eq!(in_use(&end), 4096);
        assert_eq!(end.open(12).unwrap().vqpn, opened.vqpn);
    }

    #[test]
    fn being_told_twice_that_the_peer_is_done_frees_a_number_once() {
        let end = end();
        let opened = end.open(12).unwrap();
        end.close(opened.vqpn, None, Some(opened.consumer));
        end.on_closed(opened.vqpn);
        assert_eq!(in_use(&end), 0);
        assert_ne!(end.open(12).unwrap().vqpn, end.open(12).unwrap().vqpn);
    }

    #[test]
    fn the_memory_of_a_freed_ring_reads_as_zeroes() {
        let end = end();
        let region = end.allocate(13).unwrap();
        let at = end.mine.at(layout::DATA_OFFSET + region.offset());
        // SAFETY: within the mapping, which only this test uses.
        unsafe { at.write(7) };
        end.free(region);
        // SAFETY: as above.
        assert_eq!(unsafe { at.read() }, 0);
    }

    #[test]
    fn cursors_of_a_released_link_do_no_harm() {
        let end = end();
        let mut opened = end.open(12).unwrap();
        let mut producer = end.producer(Vqpn(3)).unwrap();
        end.release();
        assert_eq!(opened.consumer.has_data(), Ok(false));
        assert_eq!(producer.spans(10).map(|s| s.len()), Ok(0));
        end.notify(Wake(WaiterId(2).queue_bits()), Vqpn(3));
        assert_eq!(end.outside().rung.get(), 0);
    }
}
