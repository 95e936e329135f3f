//! A link as the shims use it: the sockets whose streams are on it, whether it is up, and which fabric
//! it is on. Not its memory, which the fabric's end has, to which calls are handed on.
//!
//! Link objects are never freed, but one that is down and has neither streams nor producers left becomes another link
//! (`life`). Whoever has one of these keeps the link what it is, as a [`Pin`](held::Pin) does; a call
//! that still holds a pointer without, to wake somebody, may wake somebody of another link.

mod bounds;
pub mod held;
pub mod life;
mod local_peer;
mod looks;
mod news;
mod remote;
pub mod up;
mod watchers;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use crossbeam_utils::CachePadded;
use rdmasock_core::fabric::layout::{MAX_STREAMS, Region};
use rdmasock_core::fabric::link::{LinkEnd, NoProducer, OpenError, Opened, SendError};
use rdmasock_core::fabric::ring::{Consumer, Producer, TouchedArea, Wake};
use rdmasock_core::fabric::shm;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::ids::{InstanceId, Vqpn};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::channel::Channel;
use rdmasock_core::os::doorbell::Doorbell;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::sparse::Sparse;
use rdmasock_core::stats::{LinkStats, Path, Reason};
use rdmasock_core::wire::{Message, RingOffer};

use crate::objects::library::Library;
use crate::objects::mailbox::Command;
use crate::objects::waiters::SERVICE;

use local_peer::LocalPeer;
pub use local_peer::Refused;
pub use news::News;
pub use remote::sleepers::{Maintained, Poller, StandBy, Turn};
pub use remote::{Remote, has_few_addresses};
pub use watchers::Watch;

/// How long a button that the peer has not kept is not sent again, ns.
const REFUSED_FOR: u64 = 1_000_000_000;

/// The end of a link, by its fabric. The one on the hot path is here, not behind another pointer.
#[allow(clippy::large_enum_variant)]
enum AnyEnd {
    Shm(shm::End<LocalPeer>),
    Verbs(Box<Remote>),
}

/// A call that is the same on both.
macro_rules! on_end {
    ($self:ident, $end:ident => $call:expr) => {
        match &$self.end {
            AnyEnd::Shm($end) => $call,
            AnyEnd::Verbs(remote) => {
                let $end = remote.end();
                $call
            }
        }
    };
}

/// In [`Link::pins`]: the link is over, and has nothing that would keep it.
const OVER: u32 = 1 << 31;

/// What the peer can wake a waiter of ours by.
struct Announced {
    waiter: WaiterId,
    /// `None`: the peer has not kept the button.
    bell: Option<Doorbell>,
    /// Then it is not sent another before this, monotonic ns.
    refused_until: u64,
}

/// Buttons that are kept for a peer whatever it has on the link, and beside them for each of its streams: an epoll set
/// and a thread that polls.
const BUTTONS: u32 = 16;
const BUTTONS_A_STREAM: u32 = 2;

/// The bit of a waiter in [`Link::has_bell`]; none for those that have no place there.
fn bell_bit(waiter: WaiterId) -> u64 {
    1u64.checked_shl(waiter.0.into()).unwrap_or(0)
}

/// See the module.
pub struct Link {
    /// The index in the library's list and in the statistics.
    slot: AtomicU32,
    peer: [AtomicU64; 2],
    /// How many links this process had before this one.
    serial: AtomicU64,
    end: AnyEnd,
    alive: AtomicBool,
    /// Streams of ours, and producers, or [`OVER`].
    pins: AtomicU32,
    announced: Lock<Vec<Announced>>,
    /// A bit for each of the first waiters, which epoll sets are, that has a bell in `announced`; changed under that
    /// lock. Each epoll_ctl asks.
    has_bell: AtomicU64,
    /// Bytes of the largest ring that the peer writes into.
    peers_max_ring: AtomicU64,
    /// What was written into of the peer's arena, where that is its memory.
    touched: Lock<Option<Arc<TouchedArea>>>,
    /// Looks for the peer's sake; see `judge`. What every thread writes is apart from what they all read.
    looks: CachePadded<looks::Looks>,
    /// The link's sockets have been asked to leave it for that.
    pub is_left: AtomicBool,
    /// By our vQPN: the slot of its socket, plus one.
    sockets: Sparse<AtomicU32, { MAX_STREAMS as usize / 128 }, 128>,
    /// A bit for each of the peer's vQPNs that a stream of ours sends to.
    taken: Sparse<AtomicU64, { MAX_STREAMS as usize / 1024 }, 16>,
    count: AtomicU32,
    stats: AtomicPtr<LinkStats>,
    /// The link object that was made before this one.
    next: AtomicPtr<Link>,
}

/// One object is one link.
impl PartialEq for Link {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Link {
    /// The index in the library's list and in the statistics.
    pub fn slot(&self) -> u32 {
        self.slot.load(Acquire)
    }

    /// A number that no other link of this process has or had.
    pub fn serial(&self) -> u64 {
        self.serial.load(Acquire)
    }

    /// Who is at the other end.
    pub fn peer(&self) -> InstanceId {
        let mut bytes = [0; 16];
        for (half, word) in bytes.as_chunks_mut().0.iter_mut().zip(&self.peer) {
            *half = word.load(Acquire).to_ne_bytes();
        }
        InstanceId::from_bytes(bytes)
    }

    fn stats(&self) -> Option<&'static LinkStats> {
        // SAFETY: null, or a place in the page of statistics, which is never unmapped.
        unsafe { self.stats.load(Acquire).as_ref() }
    }

    /// From now on until [`unpin`](Self::unpin) the link stays this one. False if it is over.
    fn pin(&self) -> bool {
        let one_more = |pins| (pins & OVER == 0).then_some(pins + 1);
        self.pins.fetch_update(AcqRel, Acquire, one_more).is_ok()
    }

    /// The last that is done for whatever has pinned the link.
    fn unpin(&self) {
        if self.pins.fetch_sub(1, AcqRel) == 1 && !self.is_alive() {
            Library::get().service.submit(Command::FreeLinks);
        }
    }

    /// Whether it leads to another host: then bytes take their time, and the link can break while both ends
    /// live.
    #[inline]
    pub fn is_remote(&self) -> bool {
        matches!(self.end, AnyEnd::Verbs(_))
    }

    /// What its streams travel on.
    pub fn path(&self) -> Path {
        match self.end {
            AnyEnd::Shm(_) => Path::Shm,
            AnyEnd::Verbs(_) => Path::Verbs,
        }
    }

    /// The end of a link to another host.
    pub fn remote(&self) -> Option<&Remote> {
        match &self.end {
            AnyEnd::Shm(_) => None,
            AnyEnd::Verbs(remote) => Some(remote),
        }
    }

    fn local_peer(&self) -> Option<&LocalPeer> {
        match &self.end {
            AnyEnd::Shm(end) => Some(end.outside()),
            AnyEnd::Verbs(_) => None,
        }
    }

    /// Takes in what the peer has sent, where that is not simply there. True if there was something.
    #[inline]
    pub fn progress(&self) -> bool {
        match &self.end {
            AnyEnd::Shm(_) => false,
            AnyEnd::Verbs(remote) => remote.progress(),
        }
    }

    /// Our stream `mine` is the peer's `theirs`, which has this ring to begin with.
    pub fn pair(&self, mine: Vqpn, theirs: Vqpn, first: RingOffer) {
        on_end!(self, end => end.pair(mine, theirs, first));
    }

    /// Whether the link carries streams.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.alive.load(Acquire)
    }

    /// Does something with the side channel, where that is a socket and not closed.
    pub fn with_channel<R>(&self, f: impl FnOnce(&Channel) -> R) -> Option<R> {
        self.local_peer()?.with_channel(f)
    }

    /// A number for a stream of the socket with this slot, and the end that receives, with a first ring of
    /// `1 << log2` bytes.
    pub fn open(&self, socket: u32, log2: u8) -> Result<Opened, Reason> {
        if !self.pin() {
            return Err(Reason::LinkFailed);
        }
        let opened = match on_end!(self, end => end.open(log2)) {
            Ok(opened) => opened,
            Err(e) => {
                self.unpin();
                return Err(match e {
                    OpenError::Streams => Reason::LinkLimit,
                    OpenError::Arena => Reason::ArenaFull,
                    OpenError::Busy => Reason::Resources,
                });
            }
        };
        if let Some(slot) = self.sockets.make(opened.vqpn.0 as usize) {
            slot.store(socket + 1, Release);
        }
        let count = self.count.fetch_add(1, Relaxed) + 1;
        if let Some(stats) = self.stats() {
            stats.set_streams(count);
        }
        Ok(opened)
    }

    /// The end that sends to the peer's stream `vqpn`.
    pub fn producer(&self, vqpn: Vqpn) -> Result<Producer, NoProducer> {
        let Some(word) = self.taken.make(vqpn.0 as usize / 64) else {
            return Err(NoProducer::NoSuch);
        };
        if !self.pin() {
            return Err(NoProducer::Limits);
        }
        if word.fetch_or(1 << (vqpn.0 % 64), AcqRel) & 1 << (vqpn.0 % 64) != 0 {
            self.unpin();
            return Err(NoProducer::NoSuch);
        }
        // It may be of a size or at a place that this process has no room for.
        let made = on_end!(self, end => end.producer(vqpn));
        let made = made.map(|producer| producer.with_allowance(self.allowance()));
        let made = made.filter(Producer::can_adopt);
        let Some(producer) = made else {
            self.done_with(vqpn);
            return Err(NoProducer::Limits);
        };
        Ok(producer)
    }

    /// Nothing of ours sends to the peer's stream `vqpn` any more. To be said before the peer hears of it: then
    /// the number may be another stream's.
    pub fn done_with(&self, vqpn: Vqpn) {
        let bit = 1 << (vqpn.0 % 64);
        if let Some(word) = self.taken.get(vqpn.0 as usize / 64)
            && word.fetch_and(!bit, AcqRel) & bit != 0
        {
            self.unpin();
        }
    }

    /// A larger or smaller ring for a consumer of ours.
    pub fn allocate(&self, log2: u8) -> Option<Region> {
        on_end!(self, end => end.allocate(log2))
    }

    /// Addresses for a larger ring of a consumer of ours, which may never be used.
    pub fn reserve(&self, log2: u8) -> Option<Region> {
        on_end!(self, end => end.reserve(log2))
    }

    /// A buffer of this end's own for `producer`, of the peer's stream `theirs`, whose ring has no room: of up to `1 <<
    /// log2` bytes.
    pub fn lend(&self, theirs: Vqpn, producer: &mut Producer, log2: u8) -> bool {
        on_end!(self, end => end.lend(theirs, producer, log2))
    }

    /// Takes that back, if all has been read.
    pub fn take_back(&self, theirs: Vqpn, producer: &mut Producer) -> bool {
        on_end!(self, end => end.take_back(theirs, producer))
    }

    /// A ring that neither end uses any more.
    pub fn free(&self, region: Region) {
        on_end!(self, end => end.free(region));
    }

    /// This end is done with its number `mine`; `peer` is the other's. Without one the peer does
    /// not know of `mine` either.
    pub fn close(&self, mine: Vqpn, peer: Option<Vqpn>, consumer: Option<Consumer>) {
        if let Some(peer) = peer {
            self.done_with(peer);
        }
        self.leave(mine, || on_end!(self, end => end.close(mine, peer, consumer)));
    }

    /// This end is done with its number `mine`, but the peer may be about to use it: what answers
    /// the OPEN will say.
    pub fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>) {
        self.leave(mine, || on_end!(self, end => end.close_unanswered(mine, consumer)));
    }

    fn leave(&self, mine: Vqpn, close: impl FnOnce()) {
        // First: the number may be another socket's as soon as it is closed.
        if let Some(slot) = self.sockets.get(mine.0 as usize) {
            slot.store(0, Release);
        }
        close();
        let count = self.count.fetch_sub(1, Relaxed) - 1;
        if let Some(stats) = self.stats() {
            stats.set_streams(count);
        }
        self.unpin();
    }

    /// The peer will not touch our stream `mine` again.
    pub fn on_closed(&self, mine: Vqpn) {
        on_end!(self, end => end.on_closed(mine));
    }

    /// The rings of our stream `mine` are nobody else's until they are let go of, once.
    fn hold(&self, mine: Vqpn) {
        on_end!(self, end => end.hold(mine));
    }

    /// See [`hold`](Self::hold).
    fn let_go(&self, mine: Vqpn) {
        on_end!(self, end => end.let_go(mine));
    }

    /// Streams that this end has not closed.
    pub fn streams(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// The slot of the socket of our stream `vqpn`.
    pub fn slot_of(&self, vqpn: Vqpn) -> Option<u32> {
        self.sockets.get(vqpn.0 as usize)?.load(Acquire).checked_sub(1)
    }

    /// The slots of all sockets with a stream on this link.
    pub fn slots(&self) -> impl Iterator<Item = u32> {
        (0..on_end!(self, end => end.numbers())).filter_map(|v| self.slot_of(Vqpn(v)))
    }

    /// Tells the peer what `wake` asks for about its stream `theirs`.
    #[inline]
    pub fn notify(&self, wake: Wake, theirs: Vqpn) {
        on_end!(self, end => end.notify(wake, theirs));
    }

    /// The peer's waiter `id` is woken by this button.
    pub fn on_waiter(&self, id: u32, fd: PrivateFd) -> Result<(), Refused> {
        let local_peer = self.local_peer().ok_or(Refused::Violation)?;
        let most = BUTTONS + BUTTONS_A_STREAM * self.streams();
        local_peer.on_waiter(id, fd, most)
    }

    /// The peer has not kept the button of this waiter of ours.
    pub fn on_waiter_refused(&self, waiter: WaiterId) {
        if let Some(mut announced) = self.announced.lock()
            && let Some(a) = announced.iter_mut().find(|a| a.waiter == waiter)
        {
            a.bell = None;
            self.has_bell.fetch_and(!bell_bit(waiter), Relaxed);
            a.refused_until = crate::sys::time::now_ns() + REFUSED_FOR;
        }
    }

    /// Makes sure that the peer can wake this waiter of ours. False if it could not be told how.
    pub fn announce(&self, waiter: WaiterId) -> bool {
        if self.is_remote() || !waiter.is_polling() || waiter == SERVICE {
            // Who is told is this end's own business there. A thread is woken by its futex, the service thread by the
            // channel.
            return true;
        }
        if self.has_bell.load(Relaxed) & bell_bit(waiter) != 0 {
            return true;
        }
        let Some(mut announced) = self.announced.lock() else {
            return false;
        };
        if let Some(at) = announced.iter().position(|a| a.waiter == waiter) {
            match announced.get(at) {
                Some(a) if a.bell.is_some() => return true,
                Some(a) if crate::sys::time::now_ns() < a.refused_until => return false,
                _ => announced.swap_remove(at),
            };
        }
        let Ok((bell, button)) = Library::get().waiters.add_doorbell(waiter) else {
            return false;
        };
        let id = waiter.0.into();
        let is_sent = self.send(&Message::Waiter { id }, &[button.as_fd()]).is_ok();
        if is_sent {
            announced.push(Announced {
                waiter,
                bell: Some(bell),
                refused_until: 0,
            });
            self.has_bell.fetch_or(bell_bit(waiter), Relaxed);
        }
        is_sent
    }

    /// Sends a message on the side channel, once there is room: delivered in order, and if the link
    /// does not go down.
    pub fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        match &self.end {
            AnyEnd::Shm(end) => end.outside().post(message, fds),
            AnyEnd::Verbs(remote) => remote.end().send(message),
        }
    }

    /// Whether more messages wait for room than a correct peer leaves unread.
    pub fn is_overfull(&self) -> bool {
        self.local_peer().is_some_and(LocalPeer::is_overfull)
    }

    /// Whether messages wait for room.
    pub fn has_outbox(&self) -> bool {
        self.local_peer().is_some_and(LocalPeer::has_outbox)
    }

    /// There may be room on the side channel again. True if nothing is kept any more.
    pub fn flush(&self) -> bool {
        self.local_peer().is_none_or(LocalPeer::flush)
    }

    /// Whether the peer has queued something for this waiter of ours.
    pub fn has_ready(&self, waiter: WaiterId) -> bool {
        self.progress();
        self.is_queued(waiter)
    }

    /// The same, of what has been taken in ([`progress`](Self::progress)).
    #[inline]
    pub fn is_queued(&self, waiter: WaiterId) -> bool {
        on_end!(self, end => end.has_ready(waiter))
    }

    /// Takes what the peer has queued for this waiter of ours, as far as it has been taken in, each with the
    /// [time](rdmasock_core::cycles) at which it was. The caller looks at each, by the slot of its socket, and
    /// [judges](Self::judge).
    pub fn drain_ready(&self, waiter: WaiterId, mut each: impl FnMut(u32, u64)) {
        on_end!(self, end => end.drain_ready(waiter, |vqpn| match self.slot_of(vqpn) {
            Some(slot) => each(slot, end.queued_at(vqpn)),
            None => self.judge(false),
        }));
    }

    /// Takes the link down. The caller has seen to its sockets, or does so next.
    pub fn set_down(&self, why: Reason) -> bool {
        if !self.alive.swap(false, AcqRel) {
            return false;
        }
        if let Some(remote) = self.remote() {
            remote.set_down();
        }
        if let Some(stats) = self.stats() {
            stats.set_down(why);
        }
        true
    }

    /// Closes the descriptors of a link that is down. False if a thread is about to use one: then later. Service thread
    /// only.
    pub fn close_channel(&self) -> bool {
        let is_closed = self.local_peer().is_none_or(LocalPeer::close);
        // Afterwards: what is announced from now on is not sent.
        if is_closed && let Some(mut announced) = self.announced.lock() {
            announced.clear();
            self.has_bell.store(0, Relaxed);
        }
        is_closed
    }

    /// The service thread's waiter, in the form of an attention word.
    pub fn service_bits() -> u32 {
        SERVICE.queue_bits()
    }
}

#[cfg(test)]
mod tests;
