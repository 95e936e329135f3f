//! The shm fabric: one end of a link whose memory two processes of one host share.
//!
//! Each end receives in an arena of its own, which the peer maps too ([`layout`]). Each end also maps the page of sleep
//! flags that the peer has sent. The owner of the end provides the rest ([`Outside`]): the side channel, and the
//! wake-ups of waiters. This module does not make a link, and does not know whether it is up, or what its streams are
//! for. A *cursor* is the producer or the consumer of a stream.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

use rustix::io::Errno;

use crate::fabric::layout::{Layout, Region};
use crate::fabric::ready::ReadyQueue;
use crate::fabric::ring::{Consumer, Producer, Wake};
pub use crate::fabric::side::Side;
use crate::fabric::side::{Done, Numbers, done};
use crate::fabric::waiter::{FLAGS_BYTES, FlagPage, WaiterId};
use crate::fabric::{LinkEnd, OpenError, Opened, SendError, layout};
use crate::ids::Vqpn;
use crate::os::memfd::{Access, MapError, check_received};
use crate::sync::RungMark;
use crate::wire::Message;

/// The services that an end needs in addition to its memory. Neither function may wait, or call the end.
pub trait Outside {
    /// Sends a message, as [`LinkEnd::send`] does.
    fn send(&self, message: &Message) -> Result<(), SendError>;

    /// Wakes the thread that sleeps as the peer's `waiter`, or the next thread that is about to. Wakes it through the
    /// peer's `page` alone if that is enough.
    fn ring(&self, waiter: WaiterId, page: &FlagPage);
}

/// The files of a link: the two arenas and the page of the peer's flags. `End::show` checks the peer's files.
pub struct Memory<'a> {
    /// The file and the layout of the arena in which this end receives.
    pub mine: (BorrowedFd<'a>, Layout),
    /// The file and the layout, as the peer states them, of the arena in which the peer receives.
    pub theirs: (BorrowedFd<'a>, Layout),
    /// The page of flags by which the peer's waiters sleep.
    pub flags: BorrowedFd<'a>,
}

/// An end of a link in shared memory.
pub struct End<O> {
    mine: Side,
    theirs: Side,
    peer_flags: FlagPage,
    marks: [RungMark; layout::READY_QUEUES as usize],
    numbers: Numbers,
    is_lost: AtomicBool,
    outside: O,
}

impl<O> End<O> {
    /// Returns an end with no stream open. The end receives in `mine`, and the peer in `theirs`. The peer's waiters
    /// sleep by `peer_flags`.
    ///
    /// # Safety
    /// The end must live longer than every cursor that it has returned. [`producer`](LinkEnd::producer) must be called
    /// at most once for each stream.
    pub unsafe fn new(mine: Side, theirs: Side, peer_flags: FlagPage, outside: O) -> Self {
        let numbers = Numbers::new(mine.data_len() as u64);
        Self {
            mine,
            theirs,
            peer_flags,
            marks: std::array::from_fn(|_| RungMark::default()),
            numbers,
            is_lost: AtomicBool::new(false),
            outside,
        }
    }

    /// Returns an end that belongs to no link yet. [`show`](Self::show) makes it the end of a link.
    ///
    /// # Safety
    /// As for [`new`](Self::new).
    pub unsafe fn blank(outside: O) -> Result<Self, Errno> {
        // SAFETY: by the contract.
        Ok(unsafe { Self::new(Side::blank(), Side::blank(), FlagPage::blank()?, outside) })
    }

    /// Becomes the end of a link, with no stream open. The end must be [blank](Self::blank) or
    /// [released](Self::release). After an error it can be used for another link if it [is usable](Self::is_usable).
    pub fn show(&self, memory: &Memory<'_>) -> Result<(), MapError> {
        let shown = self.try_show(memory);
        if shown.is_err() {
            // SAFETY: no stream was opened, so there is no cursor.
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
        self.marks.iter().for_each(RungMark::reset);
        Ok(())
    }

    /// Returns whether the end can be used for another link. It cannot if the kernel could not replace its mappings.
    pub fn is_usable(&self) -> bool {
        !self.is_lost.load(Acquire)
    }

    /// Returns the services that were passed to `new`.
    #[inline]
    pub fn outside(&self) -> &O {
        &self.outside
    }

    /// Returns a bound: the number of every stream that this end has opened on the present link is below it.
    pub fn numbers(&self) -> u32 {
        self.numbers.ever_given()
    }

    /// Releases the memory of a link that carries no bytes any more. The queues and flags, which threads access without
    /// a cursor, stay readable and writable, so that an access by a late thread does no harm.
    ///
    /// # Safety
    /// No cursor is left.
    pub unsafe fn release(&self) {
        // SAFETY: by the contract.
        unsafe {
            self.mine.release();
            self.theirs.release();
        }
        if self.is_usable() && self.peer_flags.neutralise().is_err() {
            self.is_lost.store(true, Release);
        }
    }

    /// Replaces the memory in a fork child, which has not inherited it. To be called before any other use of the end.
    pub fn after_fork(&self) {
        self.mine.after_fork();
        self.theirs.after_fork();
        self.peer_flags.after_fork();
    }

    /// Holds the rings of stream `mine`, which this end has not closed. The rings are kept until
    /// [`let_go`](Self::let_go) is called, once.
    pub fn hold(&self, mine: Vqpn) {
        self.numbers.hold(mine);
    }

    /// Ends a [`hold`](Self::hold), and frees the rings if both ends have closed the stream.
    pub fn let_go(&self, mine: Vqpn) {
        self.mark_done(mine, done::USERS);
    }

    fn mark_done(&self, mine: Vqpn, bits: u8) {
        if let Some(Done { number, regions }) = self.numbers.mark(mine, bits) {
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
    // Not inlined, since that would make `notify` larger. `notify` is called for every message, and mostly wakes no
    // thread.
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
        let stream = self.mine.back_stream(vqpn);
        let backed = stream.and_then(|()| self.mine.back_ring(region));
        // SAFETY: the number was free, so this is its only consumer. The end outlives it (`new`).
        let open = |()| unsafe { self.mine.open(vqpn, region) };
        let opened = backed.map_err(|_| OpenError::Arena).and_then(open);
        opened.inspect_err(|_| {
            self.give_back(region);
            self.numbers.give_back(vqpn);
        })
    }

    fn producer(&self, theirs: Vqpn) -> Option<Producer> {
        self.theirs.reach(theirs).ok()?;
        let block = self.theirs.block(theirs)?;
        // SAFETY: the block is within the mapping. This is the stream's only producer, and the end outlives it (`new`).
        Some(unsafe { Producer::new(block, self.theirs.area()) })
    }

    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>) {
        let bits = match theirs {
            None => done::BOTH,
            Some(yours) if self.outside.send(&Message::Closed { yours }).is_ok() => done::LOCAL,
            Some(_) => 0,
        };
        self.numbers.keep(mine, consumer);
        self.mark_done(mine, bits);
    }

    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>) {
        self.numbers.keep(mine, consumer);
        self.mark_done(mine, done::LOCAL);
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
        self.mine.drain(waiter, each);
    }

    fn queued_at(&self, mine: Vqpn) -> u64 {
        self.mine.told_at(mine)
    }

    fn has_ready(&self, waiter: WaiterId) -> bool {
        self.mine.has_ready(waiter)
    }
}

#[cfg(test)]
mod tests;
