//! The shm fabric: one end of a link whose memory two processes of one host share.
//!
//! Each end receives in an arena of its own, which the other maps ([`layout`]), and looks at the
//! page of sleep flags that the other shows. What is not memory comes from whoever holds the end
//! ([`Outside`]): the side channel and how a waiter is woken. Not here: making a link, whether it is up, and
//! what its streams are for.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{AcqRel, Acquire, Release},
};

use rustix::io::Errno;

use super::layout::{self, Layout, Region};
use super::link::{LinkEnd, OpenError, Opened, SendError};
use super::numbers::{Done, Numbers, done};
use super::ready::ReadyQueue;
use super::ring::{Consumer, DirectionBlock, Producer, Wake};
pub use super::side::Side;
use super::side::Sweeps;
use super::waiter::{FLAGS_BYTES, FlagPage, WaiterId};
use crate::ids::Vqpn;
use crate::os::memfd::{Access, MapError, check_received};
use crate::sync::RungMark;
use crate::wire::{Message, RingOffer};

/// What an end needs that is not memory. Neither call may wait, or call the end.
pub trait Outside {
    /// As [`LinkEnd::send`].
    fn send(&self, message: &Message) -> Result<(), SendError>;

    /// Wakes whoever sleeps, or will next sleep, as the peer's `waiter`, by the `page` that the peer shows if that will
    /// do.
    fn ring(&self, waiter: WaiterId, page: &FlagPage);
}

/// What a link is made of: the files of the arenas, ours and the peer's, and of the peer's flags. The peer's are
/// checked.
pub struct Memory<'a> {
    /// We receive here.
    pub mine: (BorrowedFd<'a>, Layout),
    /// The peer receives here, by what it says.
    pub theirs: (BorrowedFd<'a>, Layout),
    /// The peer's waiters sleep by these.
    pub flags: BorrowedFd<'a>,
}

/// See the module.
pub struct End<O> {
    mine: Side,
    theirs: Side,
    peer_flags: FlagPage,
    marks: [RungMark; layout::READY_QUEUES as usize],
    sweeps: Sweeps,
    numbers: Numbers,
    /// Numbers of ours below this have memory for their blocks.
    backed: AtomicU32,
    is_lost: AtomicBool,
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
        let numbers = Numbers::new(mine.data_len() as u64);
        Self {
            mine,
            theirs,
            peer_flags,
            marks: std::array::from_fn(|_| RungMark::new()),
            sweeps: Sweeps::new(),
            numbers,
            backed: AtomicU32::new(0),
            is_lost: AtomicBool::new(false),
            outside,
        }
    }

    /// The end of no link yet, to be [given](Self::show) one.
    ///
    /// # Safety
    /// As for [`new`](Self::new).
    pub unsafe fn blank(outside: O) -> Result<Self, Errno> {
        let (mine, theirs) = (Side::blank()?, Side::blank()?);
        // SAFETY: by the contract.
        Ok(unsafe { Self::new(mine, theirs, FlagPage::blank()?, outside) })
    }

    /// Becomes the end of a link, with nothing open. An end that is [blank](Self::blank) or was
    /// [released](Self::release) can be given one; after an error that too, if it [is usable](Self::is_usable).
    pub fn show(&self, memory: &Memory<'_>) -> Result<(), MapError> {
        let shown = self.try_show(memory);
        if shown.is_err() {
            // SAFETY: nothing was opened.
            unsafe { self.release() };
        }
        shown
    }

    fn try_show(&self, memory: &Memory<'_>) -> Result<(), MapError> {
        let (fd, layout) = memory.theirs;
        check_received(fd, layout.file_len(), Access::ReadWrite)?;
        self.theirs.show(fd, &layout)?;
        let (fd, layout) = memory.mine;
        self.mine.show(fd, &layout)?;
        check_received(memory.flags, FLAGS_BYTES, Access::ReadOnly)?;
        self.peer_flags
            .show_received(memory.flags)
            .inspect_err(|_| self.is_lost.store(true, Release))?;
        self.numbers.reset(layout.data_len() as u64);
        self.sweeps.reset();
        self.marks.iter().for_each(RungMark::reset);
        self.backed.store(0, Release);
        Ok(())
    }

    /// Whether it can be given another link. Not if the kernel could not replace what is mapped.
    pub fn is_usable(&self) -> bool {
        !self.is_lost.load(Acquire)
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

    /// Gives the memory of a link back that carries nothing any more. What is reached without a cursor (queues and
    /// flags) stays readable and writable, so that a thread that is late does no harm.
    ///
    /// # Safety
    /// No cursor is left.
    pub unsafe fn release(&self) {
        // SAFETY: by the contract.
        unsafe {
            self.mine.release();
            self.theirs.release();
        }
        self.forget_flags();
    }

    fn forget_flags(&self) {
        if self.is_usable() && self.peer_flags.neutralise().is_err() {
            self.is_lost.store(true, Release);
        }
    }

    /// In a fork child, which has none of the memory, before anything else is done with the end.
    pub fn after_fork(&self) {
        self.mine.after_fork();
        self.theirs.after_fork();
        self.peer_flags.after_fork();
    }

    /// Memory for what a new stream writes, and is written to it.
    fn back(&self, vqpn: Vqpn, region: Region) -> Result<(), Errno> {
        self.mine.reach(vqpn)?;
        if vqpn.0 >= self.backed.load(Acquire) {
            self.mine.back_stream(vqpn)?;
            // All blocks of a page have it.
            let (page, block) = (layout::PAGE, size_of::<DirectionBlock>());
            let next = (vqpn.0 + 1).next_multiple_of((page / block) as u32);
            self.backed.fetch_max(next, AcqRel);
        }
        self.mine.back_ring(region)
    }

    fn leave(&self, mine: Vqpn, consumer: Option<Consumer>, bits: u8) {
        self.numbers.keep(mine, consumer);
        if bits != 0 {
            self.mark_done(mine, bits);
        }
    }

    /// The rings of our stream `mine`, which this end has not left, stay what they are until they are
    /// [let go of](Self::let_go), once.
    pub fn hold(&self, mine: Vqpn) {
        self.numbers.hold(mine);
    }

    /// See [`hold`](Self::hold).
    pub fn let_go(&self, mine: Vqpn) {
        self.give_all_back(self.numbers.let_go(mine));
    }

    fn mark_done(&self, mine: Vqpn, bits: u8) {
        self.give_all_back(self.numbers.mark(mine, bits));
    }

    fn give_all_back(&self, done: Option<Done>) {
        if let Some(Done { number, regions }) = done {
            regions.into_iter().for_each(|r| self.give_back(r));
            self.numbers.give_back(number);
        }
    }

    fn give_back(&self, region: Region) {
        self.mine.give_back(region);
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
            if let (Some(flag), Some(mark)) = (self.peer_flags.flag(waiter), self.marks.get(waiter.0 as usize))
                && flag.must_ring(mark)
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
        if self.back(vqpn, region).is_err() {
            self.mine.give_back(region);
            self.numbers.put_back(vqpn, region);
            return Err(OpenError::Arena);
        }
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
        Ok(Opened { vqpn, ring, consumer })
    }

    fn producer(&self, theirs: Vqpn) -> Option<Producer> {
        self.theirs.reach(theirs).ok()?;
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
        let region = self.numbers.allocate(log2)?;
        if self.mine.back_ring(region).is_err() {
            self.give_back(region);
            return None;
        }
        Some(region)
    }

    fn reserve(&self, log2: u8) -> Option<Region> {
        let region = self.numbers.reserve(log2, self.mine.data_len() as u64 / 2)?;
        if self.mine.hold_ring(region).is_err() {
            self.numbers.free(region);
            return None;
        }
        Some(region)
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

    fn queued_at(&self, mine: Vqpn) -> u64 {
        self.mine.told_at(mine)
    }

    fn has_ready(&self, waiter: WaiterId) -> bool {
        Sweeps::has_ready(&self.mine, waiter)
    }
}

#[cfg(test)]
mod tests;
