//! A link as the shims use it: the shared memory of two instances, and the streams on it.
//!
//! Link objects are never freed, only their memory is given back when the link is down, and the
//! addresses stay readable and writable then; so a call that still holds a pointer into a link
//! that has just died does no harm.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst},
};

use rdmasock_core::fabric::arena::Arena;
use rdmasock_core::fabric::layout::{self, Layout, MAX_STREAMS, READY_QUEUES, Region};
use rdmasock_core::fabric::ready::{ReadyCursor, ReadyQueue, RungMark};
use rdmasock_core::fabric::ring::{Consumer, DataArea, DirectionBlock, Producer, Wake};
use rdmasock_core::ids::{InstanceId, Vqpn};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::channel::Channel;
use rdmasock_core::os::memfd::Mapping;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::stats::{LinkStats, Reason};
use rdmasock_core::wire::{MAX_MESSAGE, Message, RingOffer};
use rustix::io::Errno;

use crate::library::Library;
use crate::service::Command;
use crate::socket::Socket;
use crate::wait::{MAX_WAITERS, SERVICE, WaiterId, flag_in};

/// One side's arena as mapped here.
pub struct Side {
    /// The whole file.
    pub mapping: Mapping,
    /// What lies where in it.
    pub layout: Layout,
}

impl Side {
    fn at(&self, offset: usize) -> *mut u8 {
        self.mapping.as_ptr().wrapping_add(offset)
    }

    fn area(&self) -> DataArea {
        // SAFETY: the data area ends where the file ends (Layout), and the addresses stay mapped
        // for good (see the module).
        unsafe { DataArea::new(self.at(layout::DATA_OFFSET), self.layout.data_len()) }
    }

    fn block(&self, vqpn: Vqpn) -> Option<NonNull<DirectionBlock>> {
        NonNull::new(self.at(layout::block_offset(vqpn.0)?).cast())
    }

    fn queue(&self, waiter: WaiterId) -> Option<&ReadyQueue> {
        let offset = layout::ready_offset(waiter.0.into())?;
        // SAFETY: inside the file, aligned (layout), only atomics, mapped for good.
        Some(unsafe { &*self.at(offset).cast::<ReadyQueue>() })
    }
}

/// Which ends are done with a stream's number.
mod done {
    pub const LOCAL: u8 = 1;
    pub const PEER: u8 = 2;
}

/// A message for which there was no room.
struct Letter {
    bytes: Vec<u8>,
    fds: Vec<PrivateFd>,
}

/// How long a doorbell that the peer had no number for is not announced again, ns.
const REFUSED_FOR: u64 = 1_000_000_000;

/// More is not kept for a peer that reads nothing. A correct one owes at most a few a stream.
const MAX_OUTBOX: usize = 8 * MAX_STREAMS as usize;

struct Inner {
    arena: Arena,
    next: u32,
    free: Vec<u32>,
    /// Rings of streams that we are done with but the peer is not.
    zombies: Vec<(u32, [Option<Region>; 3])>,
}

/// See the module.
pub struct Link {
    /// The index in the library's list and in the statistics.
    pub slot: u32,
    /// Who is at the other end.
    pub peer: InstanceId,
    alive: AtomicBool,
    channel: Channel,
    /// What the channel had no room for, in order.
    outbox: Lock<VecDeque<Letter>>,
    mine: Side,
    theirs: Side,
    peer_flags: Mapping,
    marks: Box<[RungMark]>,
    doorbells: Box<[AtomicI32]>,
    /// Rings at doorbells that are not known yet.
    owed: Box<[AtomicBool]>,
    announced: Box<[AtomicBool]>,
    /// The peer has no number left for this doorbell; not to be announced before then, monotonic ns.
    refused_until: Box<[AtomicU64]>,
    cursors: Box<[Lock<ReadyCursor>]>,
    streams: Box<[AtomicPtr<Socket>]>,
    done: Box<[AtomicU8]>,
    inner: Lock<Inner>,
    count: AtomicU32,
    stats: Option<&'static LinkStats>,
}

impl Link {
    /// A link over arenas and a channel that the handshake has set up.
    pub fn new(
        slot: u32,
        peer: InstanceId,
        channel: Channel,
        mine: Side,
        theirs: Side,
        peer_flags: Mapping,
        stats: Option<&'static LinkStats>,
    ) -> &'static Self {
        let data = mine.layout.data_len() as u64;
        let this = Self {
            slot,
            peer,
            alive: AtomicBool::new(true),
            channel,
            outbox: Lock::new(VecDeque::new()),
            mine,
            theirs,
            peer_flags,
            marks: (0..MAX_WAITERS).map(|_| RungMark::new()).collect(),
            doorbells: (0..MAX_WAITERS).map(|_| AtomicI32::new(-1)).collect(),
            owed: (0..MAX_WAITERS).map(|_| AtomicBool::new(false)).collect(),
            refused_until: (0..MAX_WAITERS).map(|_| AtomicU64::new(0)).collect(),
            announced: (0..MAX_WAITERS).map(|_| AtomicBool::new(false)).collect(),
            cursors: (0..READY_QUEUES)
                .map(|_| Lock::new(ReadyCursor::new()))
                .collect(),
            streams: (0..MAX_STREAMS)
                .map(|_| AtomicPtr::new(std::ptr::null_mut()))
                .collect(),
            done: (0..MAX_STREAMS).map(|_| AtomicU8::new(0)).collect(),
            inner: Lock::new(Inner {
                arena: Arena::new(data),
                next: 0,
                free: Vec::new(),
                zombies: Vec::new(),
            }),
            count: AtomicU32::new(0),
            stats,
        };
        Box::leak(Box::new(this))
    }

    /// Whether the link carries streams.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.alive.load(Acquire)
    }

    /// The channel's fd, for the service thread's epoll.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// A number for a stream of `socket`, and the end that receives, with a first ring of
    /// `1 << log2` bytes.
    pub fn open(
        &self,
        socket: &'static Socket,
        log2: u8,
    ) -> Result<(Vqpn, Consumer, RingOffer), Reason> {
        let mut inner = self.inner.lock().ok_or(Reason::Resources)?;
        let vqpn = match inner.free.pop() {
            Some(v) => v,
            None if inner.next < MAX_STREAMS => {
                inner.next += 1;
                inner.next - 1
            }
            None => return Err(Reason::LinkLimit),
        };
        let Some(region) = inner.arena.alloc(log2) else {
            inner.free.push(vqpn);
            return Err(Reason::ArenaFull);
        };
        let vqpn = Vqpn(vqpn);
        let block = self.mine.block(vqpn).ok_or(Reason::LinkLimit)?;
        // SAFETY: mapped for good; the number is free, so neither end has a cursor on the block.
        unsafe { block.as_ref() }.reset();
        // SAFETY: as above; this is the block's only consumer.
        let mut consumer = unsafe { Consumer::new(block, self.mine.area()) };
        let Ok(wake) = consumer.offer(region) else {
            inner.arena.free(region);
            inner.free.push(vqpn.0);
            return Err(Reason::ArenaFull);
        };
        // Nobody can be waiting yet.
        let _ = wake;
        let ring = RingOffer::new(region.page(), region.log2()).ok_or(Reason::ArenaFull)?;
        if let Some(slot) = self.streams.get(vqpn.0 as usize) {
            slot.store(std::ptr::from_ref(socket).cast_mut(), Release);
        }
        if let Some(done) = self.done.get(vqpn.0 as usize) {
            done.store(0, Release);
        }
        drop(inner);
        let count = self.count.fetch_add(1, Relaxed) + 1;
        if let Some(stats) = self.stats {
            stats.set_streams(count);
        }
        Ok((vqpn, consumer, ring))
    }

    /// The end that sends to the peer's stream `vqpn`.
    pub fn producer(&self, vqpn: Vqpn) -> Option<Producer> {
        let block = self.theirs.block(vqpn)?;
        // SAFETY: mapped for good; the handshake gives each number to one socket.
        Some(unsafe { Producer::new(block, self.theirs.area()) })
    }

    /// A larger or smaller ring for a consumer of ours.
    pub fn allocate(&self, log2: u8) -> Option<Region> {
        self.inner.lock()?.arena.alloc(log2)
    }

    /// A ring that neither end uses any more.
    pub fn free(&self, region: Region) {
        let start = layout::DATA_OFFSET + region.offset();
        // Gives the pages back. If it fails they just stay.
        let _ = self.mine.mapping.punch_hole(start..start + region.len());
        if let Some(mut inner) = self.inner.lock() {
            inner.arena.free(region);
        }
    }

    /// This end is done with its number `mine`; `peer` is the other's. Without one the peer does
    /// not know of `mine` either.
    pub fn close(&'static self, mine: Vqpn, peer: Option<Vqpn>, consumer: Option<Consumer>) {
        let told = match peer {
            Some(yours) => self.send(&Message::Closed { yours }, &[]).is_ok(),
            None => true,
        };
        let bits = match (peer, told) {
            (None, _) => done::LOCAL | done::PEER,
            (_, true) => done::LOCAL,
            (_, false) => 0,
        };
        self.leave(mine, consumer, bits);
    }

    /// This end is done with its number `mine`, but the peer may be about to use it: what answers
    /// the OPEN will say.
    pub fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>) {
        self.leave(mine, consumer, done::LOCAL);
    }

    fn leave(&self, mine: Vqpn, consumer: Option<Consumer>, bits: u8) {
        if let Some(slot) = self.streams.get(mine.0 as usize) {
            slot.store(std::ptr::null_mut(), Release);
        }
        if let (Some(consumer), Some(mut inner)) = (consumer, self.inner.lock()) {
            inner.zombies.push((mine.0, consumer.into_regions()));
        }
        if bits != 0 {
            self.mark_done(mine, bits);
        }
        let count = self.count.fetch_sub(1, Relaxed) - 1;
        if let Some(stats) = self.stats {
            stats.set_streams(count);
        }
    }

    /// The peer will not touch our stream `mine` again.
    pub fn on_closed(&self, mine: Vqpn) {
        self.mark_done(mine, done::PEER);
    }

    fn mark_done(&self, mine: Vqpn, bits: u8) {
        let Some(done) = self.done.get(mine.0 as usize) else {
            return;
        };
        let before = done.fetch_or(bits, AcqRel);
        if before == done::LOCAL | done::PEER || before | bits != done::LOCAL | done::PEER {
            return;
        }
        let Some(mut inner) = self.inner.lock() else {
            return;
        };
        let mut regions = Vec::new();
        inner.zombies.retain(|(v, r)| {
            if *v == mine.0 {
                regions.extend(r.iter().flatten().copied());
            }
            *v != mine.0
        });
        drop(inner);
        for region in regions {
            self.free(region);
        }
        if let Some(mut inner) = self.inner.lock() {
            inner.free.push(mine.0);
        }
    }

    /// Streams that are not closed on both sides.
    pub fn streams(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// The socket of our stream `vqpn`.
    pub fn socket(&self, vqpn: Vqpn) -> Option<&'static Socket> {
        let ptr = self.streams.get(vqpn.0 as usize)?.load(Acquire);
        // SAFETY: null, or a type-stable object.
        unsafe { ptr.as_ref() }
    }

    /// All sockets with a stream on this link.
    pub fn sockets(&self) -> Vec<&'static Socket> {
        let high = self.inner.lock().map_or(0, |i| i.next);
        (0..high).filter_map(|v| self.socket(Vqpn(v))).collect()
    }

    /// Tells the peer what `wake` asks for about its stream `theirs`.
    #[inline]
    pub fn notify(&self, wake: Wake, theirs: Vqpn) {
        if !wake.is_none() {
            self.notify_slow(wake, theirs);
        }
    }

    fn notify_slow(&self, wake: Wake, theirs: Vqpn) {
        if let Some(waiter) = WaiterId::from_word(wake.0 >> 16)
            && let Some(queue) = self.theirs.queue(waiter)
        {
            queue.push(theirs.0);
            if let (Some(flag), Some(mark)) = (
                flag_in(&self.peer_flags, waiter),
                self.marks.get(waiter.0 as usize),
            ) && flag.must_ring(mark)
            {
                self.ring_peer(waiter);
            }
        }
        if let Some(sleeper) = WaiterId::from_word(wake.0 & 0xffff) {
            self.ring_peer(sleeper);
        }
    }

    /// Rings a doorbell of the peer; if its eventfd is still on its way to us, as soon as it is here.
    fn ring_peer(&self, waiter: WaiterId) {
        if self.try_ring_peer(waiter) {
            return;
        }
        // Noted first, then looked at again; `on_waiter` the other way round.
        if let Some(owed) = self.owed.get(waiter.0 as usize) {
            owed.store(true, SeqCst);
            self.pay(waiter);
        }
    }

    /// Rings if that is owed and possible.
    fn pay(&self, waiter: WaiterId) {
        if let (Some(owed), Some(fd)) = (
            self.owed.get(waiter.0 as usize),
            self.doorbells.get(waiter.0 as usize),
        ) && fd.load(SeqCst) >= 0
            && owed.swap(false, SeqCst)
        {
            self.try_ring_peer(waiter);
        }
    }

    /// False if the doorbell is not known.
    fn try_ring_peer(&self, waiter: WaiterId) -> bool {
        let fd = self
            .doorbells
            .get(waiter.0 as usize)
            .map_or(-1, |d| d.load(Acquire));
        if fd < 0 {
            return false;
        }
        // SAFETY: a doorbell is only closed with the link, by the service thread, after `alive`
        // was cleared and the fd taken out; a ring on a reused number is a needless wake-up of
        // our own eventfds at worst, since private numbers hold nothing else that takes 8 bytes.
        crate::wait::ring(unsafe { BorrowedFd::borrow_raw(fd) });
        true
    }

    /// The peer's waiter `id` sleeps on this eventfd.
    pub fn on_waiter(&self, id: u32, fd: PrivateFd) {
        if let (Some(slot), Ok(id)) = (self.doorbells.get(id as usize), u16::try_from(id)) {
            let old = slot.swap(fd.release(), SeqCst);
            close_raw(old);
            self.pay(WaiterId(id));
        }
    }

    /// The peer cannot ring this waiter of ours.
    pub fn on_waiter_refused(&self, waiter: WaiterId) {
        if let (Some(announced), Some(until)) = (
            self.announced.get(waiter.0 as usize),
            self.refused_until.get(waiter.0 as usize),
        ) {
            until.store(crate::time::now_ns() + REFUSED_FOR, Relaxed);
            announced.store(false, SeqCst);
        }
    }

    /// Makes sure that the peer can ring this waiter of ours. False if it could not be told.
    pub fn announce(&'static self, waiter: WaiterId) -> bool {
        let Some(announced) = self.announced.get(waiter.0 as usize) else {
            return false;
        };
        if announced.load(Acquire) {
            return true;
        }
        let refused_until = self.refused_until.get(waiter.0 as usize);
        if refused_until.is_some_and(|at| {
            let at = at.load(Relaxed);
            at != 0 && crate::time::now_ns() < at
        }) {
            return false;
        }
        let Some(doorbell) = Library::get().waiters.doorbell(waiter) else {
            return false;
        };
        if self
            .send(
                &Message::Waiter {
                    id: waiter.0.into(),
                },
                &[doorbell.as_fd()],
            )
            .is_err()
        {
            return false;
        }
        announced.store(true, SeqCst);
        true
    }

    /// Sends a message on the side channel, once there is room: delivered in order, and if the link
    /// does not go down.
    pub fn send(&'static self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut buf = [0u8; MAX_MESSAGE];
        let bytes = message.encode(&mut buf).map_err(|_| Errno::INVAL)?;
        // Held while sending: what is kept goes first.
        let mut outbox = self.outbox.lock().ok_or(Errno::AGAIN)?;
        let sent = if outbox.is_empty() {
            self.channel.send(bytes, fds)
        } else {
            Err(Errno::AGAIN)
        };
        tracing::trace!(target: "rdmasock::link", link = self.slot, ?message, ?sent);
        if sent != Err(Errno::AGAIN) {
            return sent;
        }
        if outbox.len() >= MAX_OUTBOX {
            drop(outbox);
            Library::get().service.submit(Command::Violation(self));
            return Err(Errno::NOBUFS);
        }
        let fds: Result<Vec<_>, _> = fds.iter().map(|fd| PrivateFd::duplicate(*fd)).collect();
        outbox.push_back(Letter {
            bytes: bytes.to_vec(),
            fds: fds?,
        });
        let first = outbox.len() == 1;
        drop(outbox);
        if first {
            Library::get().service.submit(Command::AwaitRoom(self));
        }
        Ok(())
    }

    /// Whether messages wait for room.
    pub fn has_outbox(&self) -> bool {
        self.outbox.lock().is_none_or(|o| !o.is_empty())
    }

    /// There may be room on the side channel again. True if nothing is kept any more.
    pub fn flush(&self) -> bool {
        let Some(mut outbox) = self.outbox.lock() else {
            return false;
        };
        while let Some(letter) = outbox.front() {
            let fds: Vec<BorrowedFd<'_>> = letter.fds.iter().map(AsFd::as_fd).collect();
            if self.channel.send(&letter.bytes, &fds) == Err(Errno::AGAIN) {
                return false;
            }
            outbox.pop_front();
        }
        true
    }

    /// Whether the peer has queued something for this waiter of ours.
    pub fn has_ready(&self, waiter: WaiterId) -> bool {
        match (self.mine.queue(waiter), self.cursors.get(waiter.0 as usize)) {
            (Some(queue), Some(cursor)) => cursor.lock().is_none_or(|c| !c.is_idle(queue)),
            _ => false,
        }
    }

    /// Takes what the peer has queued for this waiter of ours.
    pub fn drain_ready(&self, waiter: WaiterId, mut each: impl FnMut(&'static Socket)) {
        let (Some(queue), Some(cursor)) =
            (self.mine.queue(waiter), self.cursors.get(waiter.0 as usize))
        else {
            return;
        };
        let Some(mut cursor) = cursor.lock() else {
            return;
        };
        cursor.begin(queue);
        while let Some(vqpn) = cursor.pop(queue) {
            if let Some(socket) = self.socket(Vqpn(vqpn)) {
                each(socket);
            }
        }
    }

    /// Takes the link down. The caller has seen to its sockets, or does so next.
    pub fn set_down(&self, why: Reason) -> bool {
        if !self.alive.swap(false, AcqRel) {
            return false;
        }
        if let Some(stats) = self.stats {
            stats.set_down(why);
        }
        true
    }

    /// Gives the memory of a link back that is down and that no socket uses any more.
    pub fn release(&self) {
        for slot in &self.doorbells {
            close_raw(slot.swap(-1, AcqRel));
        }
        self.mine.mapping.neutralise();
        self.theirs.mapping.neutralise();
        if self.stats.is_some() {
            Library::get().stats.close_link(self.slot);
        }
    }

    /// The service thread's waiter, in the form of an attention word.
    pub fn service_bits() -> u32 {
        SERVICE.queue_bits()
    }
}

fn close_raw(fd: i32) {
    drop(PrivateFd::adopt(fd));
}
