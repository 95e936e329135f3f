//! A link as the shims use it: the sockets whose streams are on it, the side channel, the doorbells,
//! and whether it is up. Not its memory, which the fabric's end has, to which calls are handed on.
//!
//! Link objects are never freed, only their memory is given back when the link is down, and the
//! addresses stay readable and writable then; so a call that still holds a pointer into a link
//! that has just died does no harm.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst},
};

use once_cell::race::OnceRef;
use rdmasock_core::fabric::layout::{MAX_STREAMS, Region};
use rdmasock_core::fabric::ring::{Consumer, Producer, Wake};
use rdmasock_core::fabric::shm::{End, Outside, Side};
use rdmasock_core::fabric::waiter::FlagPage;
use rdmasock_core::fabric::{LinkEnd, OpenError, Opened, SendError};
use rdmasock_core::ids::{InstanceId, Vqpn};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::channel::Channel;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::stats::{LinkStats, Reason};
use rdmasock_core::wire::{MAX_MESSAGE, Message};
use rustix::io::Errno;

use crate::library::Library;
use crate::service::Command;
use crate::socket::Socket;
use crate::wait::{MAX_WAITERS, SERVICE, WaiterId};

/// A message for which there was no room.
struct Letter {
    bytes: Vec<u8>,
    fds: Vec<PrivateFd>,
}

/// How long a doorbell that the peer had no number for is not announced again, ns.
const REFUSED_FOR: u64 = 1_000_000_000;

/// More is not kept for a peer that reads nothing. A correct one owes at most a few a stream.
const MAX_OUTBOX: usize = 8 * MAX_STREAMS as usize;

/// The ways to the peer that are not memory.
struct ToPeer {
    /// Whose they are, for the service thread.
    link: OnceRef<'static, Link>,
    channel: Channel,
    /// What the channel had no room for, in order.
    outbox: Lock<VecDeque<Letter>>,
    doorbells: Box<[AtomicI32]>,
    /// Rings at doorbells that are not known yet.
    owed: Box<[AtomicBool]>,
}

impl ToPeer {
    fn new(channel: Channel) -> Self {
        Self {
            link: OnceRef::new(),
            channel,
            outbox: Lock::new(VecDeque::new()),
            doorbells: (0..MAX_WAITERS).map(|_| AtomicI32::new(-1)).collect(),
            owed: (0..MAX_WAITERS).map(|_| AtomicBool::new(false)).collect(),
        }
    }

    /// Sends a message on the side channel, once there is room: delivered in order, and if the link
    /// does not go down.
    fn post(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        let mut buf = [0u8; MAX_MESSAGE];
        let bytes = message.encode(&mut buf).map_err(|_| SendError::Encoding)?;
        // Held while sending: what is kept goes first.
        let mut outbox = self.outbox.lock().ok_or(SendError::Full)?;
        let sent = if outbox.is_empty() {
            self.channel.send(bytes, fds)
        } else {
            Err(Errno::AGAIN)
        };
        tracing::trace!(target: "rdmasock::link", link = self.link.get().map(|l| l.slot), ?message, ?sent);
        if sent != Err(Errno::AGAIN) {
            return sent.map_err(send_error);
        }
        if outbox.len() >= MAX_OUTBOX {
            drop(outbox);
            self.ask_service(Command::Violation);
            return Err(SendError::Down);
        }
        let fds: Result<Vec<_>, _> = fds.iter().map(|fd| PrivateFd::duplicate(*fd)).collect();
        outbox.push_back(Letter {
            bytes: bytes.to_vec(),
            fds: fds.map_err(send_error)?,
        });
        let first = outbox.len() == 1;
        drop(outbox);
        if first {
            self.ask_service(Command::AwaitRoom);
        }
        Ok(())
    }

    fn ask_service(&self, command: fn(&'static Link) -> Command) {
        if let Some(link) = self.link.get() {
            Library::get().service.submit(command(link));
        }
    }

    /// Whether messages wait for room.
    fn has_outbox(&self) -> bool {
        self.outbox.lock().is_none_or(|o| !o.is_empty())
    }

    /// There may be room on the side channel again. True if nothing is kept any more.
    fn flush(&self) -> bool {
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

    /// The peer's waiter `id` sleeps on this eventfd.
    fn on_waiter(&self, id: u32, fd: PrivateFd) {
        if let (Some(slot), Ok(id)) = (self.doorbells.get(id as usize), u16::try_from(id)) {
            let old = slot.swap(fd.release(), SeqCst);
            close_raw(old);
            self.pay(WaiterId(id));
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
            self.try_ring(waiter);
        }
    }

    /// False if the doorbell is not known.
    fn try_ring(&self, waiter: WaiterId) -> bool {
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
}

impl Outside for ToPeer {
    fn send(&self, message: &Message) -> Result<(), SendError> {
        self.post(message, &[])
    }

    /// Rings a doorbell of the peer; if its eventfd is still on its way to us, as soon as it is here.
    fn ring(&self, waiter: WaiterId) {
        if self.try_ring(waiter) {
            return;
        }
        // Noted first, then looked at again; `on_waiter` the other way round.
        if let Some(owed) = self.owed.get(waiter.0 as usize) {
            owed.store(true, SeqCst);
            self.pay(waiter);
        }
    }
}

/// Why a message was not sent, from the kernel's word.
fn send_error(errno: Errno) -> SendError {
    match errno {
        Errno::INVAL => SendError::Encoding,
        Errno::AGAIN | Errno::TOOMANYREFS | Errno::MFILE | Errno::NOBUFS => SendError::Full,
        _ => SendError::Down,
    }
}

/// See the module.
pub struct Link {
    /// The index in the library's list and in the statistics.
    pub slot: u32,
    /// Who is at the other end.
    pub peer: InstanceId,
    end: End<ToPeer>,
    alive: AtomicBool,
    announced: Box<[AtomicBool]>,
    /// The peer has no number left for this doorbell; not to be announced before then, monotonic ns.
    refused_until: Box<[AtomicU64]>,
    /// By our vQPN.
    sockets: Box<[AtomicPtr<Socket>]>,
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
        peer_flags: FlagPage,
        stats: Option<&'static LinkStats>,
    ) -> &'static Self {
        // SAFETY: the link, with the end, is leaked below, so no cursor outlives it; the handshake
        // gives each number of the peer's to one socket, which asks for its producer once.
        let end = unsafe { End::new(mine, theirs, peer_flags, ToPeer::new(channel)) };
        let link: &'static Self = Box::leak(Box::new(Self {
            slot,
            peer,
            end,
            alive: AtomicBool::new(true),
            announced: (0..MAX_WAITERS).map(|_| AtomicBool::new(false)).collect(),
            refused_until: (0..MAX_WAITERS).map(|_| AtomicU64::new(0)).collect(),
            sockets: (0..MAX_STREAMS)
                .map(|_| AtomicPtr::new(std::ptr::null_mut()))
                .collect(),
            count: AtomicU32::new(0),
            stats,
        }));
        // Nobody else has the link yet, so it is not set.
        let _ = link.end.outside().link.set(link);
        link
    }

    /// Whether the link carries streams.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.alive.load(Acquire)
    }

    /// The channel's fd, for the service thread's epoll.
    pub fn channel(&self) -> &Channel {
        &self.end.outside().channel
    }

    /// A number for a stream of `socket`, and the end that receives, with a first ring of
    /// `1 << log2` bytes.
    pub fn open(&self, socket: &'static Socket, log2: u8) -> Result<Opened, Reason> {
        let opened = self.end.open(log2).map_err(|e| match e {
            OpenError::Streams => Reason::LinkLimit,
            OpenError::Arena => Reason::ArenaFull,
            OpenError::Busy => Reason::Resources,
        })?;
        if let Some(slot) = self.sockets.get(opened.vqpn.0 as usize) {
            slot.store(std::ptr::from_ref(socket).cast_mut(), Release);
        }
        let count = self.count.fetch_add(1, Relaxed) + 1;
        if let Some(stats) = self.stats {
            stats.set_streams(count);
        }
        Ok(opened)
    }

    /// The end that sends to the peer's stream `vqpn`.
    pub fn producer(&self, vqpn: Vqpn) -> Option<Producer> {
        self.end.producer(vqpn)
    }

    /// A larger or smaller ring for a consumer of ours.
    pub fn allocate(&self, log2: u8) -> Option<Region> {
        self.end.allocate(log2)
    }

    /// A ring that neither end uses any more.
    pub fn free(&self, region: Region) {
        self.end.free(region);
    }

    /// This end is done with its number `mine`; `peer` is the other's. Without one the peer does
    /// not know of `mine` either.
    pub fn close(&self, mine: Vqpn, peer: Option<Vqpn>, consumer: Option<Consumer>) {
        self.leave(mine, || self.end.close(mine, peer, consumer));
    }

    /// This end is done with its number `mine`, but the peer may be about to use it: what answers
    /// the OPEN will say.
    pub fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>) {
        self.leave(mine, || self.end.close_unanswered(mine, consumer));
    }

    fn leave(&self, mine: Vqpn, close: impl FnOnce()) {
        // First: the number may be another socket's as soon as it is closed.
        if let Some(slot) = self.sockets.get(mine.0 as usize) {
            slot.store(std::ptr::null_mut(), Release);
        }
        close();
        let count = self.count.fetch_sub(1, Relaxed) - 1;
        if let Some(stats) = self.stats {
            stats.set_streams(count);
        }
    }

    /// The peer will not touch our stream `mine` again.
    pub fn on_closed(&self, mine: Vqpn) {
        self.end.on_closed(mine);
    }

    /// Streams that this end has not closed.
    pub fn streams(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// The socket of our stream `vqpn`.
    pub fn socket(&self, vqpn: Vqpn) -> Option<&'static Socket> {
        let ptr = self.sockets.get(vqpn.0 as usize)?.load(Acquire);
        // SAFETY: null, or a type-stable object.
        unsafe { ptr.as_ref() }
    }

    /// All sockets with a stream on this link.
    pub fn sockets(&self) -> Vec<&'static Socket> {
        (0..self.end.numbers())
            .filter_map(|v| self.socket(Vqpn(v)))
            .collect()
    }

    /// Tells the peer what `wake` asks for about its stream `theirs`.
    #[inline]
    pub fn notify(&self, wake: Wake, theirs: Vqpn) {
        self.end.notify(wake, theirs);
    }

    /// The peer's waiter `id` sleeps on this eventfd.
    pub fn on_waiter(&self, id: u32, fd: PrivateFd) {
        self.end.outside().on_waiter(id, fd);
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
    pub fn announce(&self, waiter: WaiterId) -> bool {
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
    pub fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        self.end.outside().post(message, fds)
    }

    /// Whether messages wait for room.
    pub fn has_outbox(&self) -> bool {
        self.end.outside().has_outbox()
    }

    /// There may be room on the side channel again. True if nothing is kept any more.
    pub fn flush(&self) -> bool {
        self.end.outside().flush()
    }

    /// Whether the peer has queued something for this waiter of ours.
    pub fn has_ready(&self, waiter: WaiterId) -> bool {
        self.end.has_ready(waiter)
    }

    /// Takes what the peer has queued for this waiter of ours.
    pub fn drain_ready(&self, waiter: WaiterId, mut each: impl FnMut(&'static Socket)) {
        self.end.drain_ready(waiter, |vqpn| {
            if let Some(socket) = self.socket(vqpn) {
                each(socket);
            }
        });
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
        for slot in &self.end.outside().doorbells {
            close_raw(slot.swap(-1, AcqRel));
        }
        self.end.release();
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
