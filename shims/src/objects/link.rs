//! A link as the shims use it: the sockets whose streams are on it, whether it is up, and its fabric. The fabric's end
//! has the link's memory, and gets most calls.
//!
//! Link objects are never freed. A link that is down and has no streams or producers left becomes another link
//! (`life`). A stream, a producer or a [`Pin`](held::Pin) keeps the object the same link. A call that holds a bare
//! pointer, to wake a waiter, may wake a waiter of another link.

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
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};

use crossbeam_utils::CachePadded;
use local_peer::LocalPeer;
pub use local_peer::Refused;
pub use news::News;
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
pub use remote::sleepers::{Maintained, Poller, StandBy, Turn};
pub use remote::{Remote, has_few_addresses};
pub use watchers::Watch;

use crate::objects::library::Library;
use crate::objects::mailbox::Command;
use crate::objects::waiters::SERVICE;

/// Time after which a button that the peer has not kept is sent again, ns.
const REFUSED_FOR: u64 = 1_000_000_000;

/// The end of a link, by its fabric. The end on the hot path is stored here, without a further pointer.
#[allow(clippy::large_enum_variant)]
enum AnyEnd {
    Shm(shm::End<LocalPeer>),
    Verbs(Box<Remote>),
}

/// Makes a call that has the same form on both ends.
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

/// The value of [`Link::pins`] when the object is no link now, and cannot be pinned.
const OVER: u32 = 1 << 31;

/// A doorbell by which the peer can wake a waiter of this process.
struct Announced {
    waiter: WaiterId,
    /// The doorbell; `None` if the peer has not kept the button.
    bell: Option<Doorbell>,
    /// Earliest time at which a refused button is sent again, monotonic ns.
    refused_until: u64,
}

/// Buttons kept for a peer: a fixed number, and more for each of its streams, for an epoll set and a thread that polls.
const BUTTONS: u32 = 16;
const BUTTONS_A_STREAM: u32 = 2;

/// Returns the bit of a waiter in [`Link::has_bell`]; 0 for a waiter that has no bit there.
fn bell_bit(waiter: WaiterId) -> u64 {
    1u64.checked_shl(waiter.0.into()).unwrap_or(0)
}

/// A link object, see the [module](self).
pub struct Link {
    /// The index in the library's list and in the statistics.
    slot: AtomicU32,
    peer: [AtomicU64; 2],
    /// Number of links that this process had before this one.
    serial: AtomicU64,
    end: AnyEnd,
    alive: AtomicBool,
    /// Number of streams, producers and [`Pin`](held::Pin)s of this end, or [`OVER`].
    pins: AtomicU32,
    announced: Lock<Vec<Announced>>,
    /// A bit for each of the first 64 waiters that has a doorbell in `announced`; these are the epoll sets with ready
    /// queues. Changed under the lock of `announced`, read by each epoll_ctl.
    has_bell: AtomicU64,
    /// Size of the largest ring that the peer writes into, bytes.
    peers_max_ring: AtomicU64,
    /// The parts of the peer's data area that this end has written into. `None` on a link to another host, where the
    /// area is this process's memory.
    touched: Lock<Option<Arc<TouchedArea>>>,
    /// Counts of the checks that the peer has caused, see [`Self::judge`]. All threads write them, so they lie on other
    /// cache lines than the fields that all threads only read.
    looks: CachePadded<looks::Looks>,
    /// The link's sockets have been asked to leave it because of those checks.
    pub is_left: AtomicBool,
    /// By this end's vQPN: the slot of its socket, plus one.
    sockets: Sparse<AtomicU32, { MAX_STREAMS as usize / 128 }, 128>,
    /// A bit for each of the peer's vQPNs that a stream of this end sends to.
    taken: Sparse<AtomicU64, { MAX_STREAMS as usize / 1024 }, 16>,
    count: AtomicU32,
    stats: AtomicPtr<LinkStats>,
    /// The link object that was made before this one.
    next: AtomicPtr<Link>,
}

/// Two references are equal if they lead to the same object.
impl PartialEq for Link {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Link {
    /// Returns the index in the library's list and in the statistics.
    pub fn slot(&self) -> u32 {
        self.slot.load(Acquire)
    }

    /// Returns a number that no other link of this process has or had.
    pub fn serial(&self) -> u64 {
        self.serial.load(Acquire)
    }

    /// Returns the instance at the other end.
    pub fn peer(&self) -> InstanceId {
        let mut bytes = [0; 16];
        for (half, word) in bytes.as_chunks_mut().0.iter_mut().zip(&self.peer) {
            *half = word.load(Acquire).to_ne_bytes();
        }
        InstanceId::from_bytes(bytes)
    }

    fn stats(&self) -> Option<&'static LinkStats> {
        // SAFETY: null, or a slot in the page of statistics, which is never unmapped.
        unsafe { self.stats.load(Acquire).as_ref() }
    }

    /// Keeps the object the same link until [`unpin`](Self::unpin). False, without a pin, if the link is over.
    fn pin(&self) -> bool {
        let one_more = |pins| (pins & OVER == 0).then_some(pins + 1);
        self.pins.fetch_update(AcqRel, Acquire, one_more).is_ok()
    }

    /// Removes a pin, as the last use of the link by the pin's owner. The service thread frees a link that is down with
    /// its last pin.
    fn unpin(&self) {
        if self.pins.fetch_sub(1, AcqRel) == 1 && !self.is_alive() {
            Library::get().service.submit(Command::FreeLinks);
        }
    }

    /// Returns whether the link leads to another host. Then bytes need time to arrive, and the link can break while
    /// both ends live.
    #[inline]
    pub fn is_remote(&self) -> bool {
        matches!(self.end, AnyEnd::Verbs(_))
    }

    /// Returns the path of the link's streams.
    pub fn path(&self) -> Path {
        match self.end {
            AnyEnd::Shm(_) => Path::Shm,
            AnyEnd::Verbs(_) => Path::Verbs,
        }
    }

    /// Returns the end of a link to another host; `None` for a link within the host.
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

    /// Takes in the bytes that the peer has sent, if the fabric needs that. True if there were any.
    #[inline]
    pub fn progress(&self) -> bool {
        match &self.end {
            AnyEnd::Shm(_) => false,
            AnyEnd::Verbs(remote) => remote.progress(),
        }
    }

    /// Pairs this end's stream `mine` with the peer's stream `theirs`, whose first ring is `first`.
    pub fn pair(&self, mine: Vqpn, theirs: Vqpn, first: RingOffer) {
        on_end!(self, end => end.pair(mine, theirs, first));
    }

    /// Returns whether the link is up: it carries streams.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.alive.load(Acquire)
    }

    /// Calls `f` with the side channel; `None`, without a call, if it is closed or no socket.
    pub fn with_channel<R>(&self, f: impl FnOnce(&Channel) -> R) -> Option<R> {
        self.local_peer()?.with_channel(f)
    }

    /// Opens a stream for the socket with this slot. Returns its vQPN, and its receiving end with a first ring of
    /// `1 << log2` bytes. `Err` is the reason why the connection stays on TCP.
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

    /// Returns the end that sends to the peer's stream `vqpn`, which pins the link.
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
        // Its ring may have a size, or lie at a place, that this end's allowance excludes.
        let made = on_end!(self, end => end.producer(vqpn));
        let made = made.map(|producer| producer.with_allowance(self.allowance()));
        let made = made.filter(Producer::can_adopt);
        let Some(producer) = made else {
            self.done_with(vqpn);
            return Err(NoProducer::Limits);
        };
        Ok(producer)
    }

    /// Notes that no stream of this end sends to the peer's stream `vqpn` any more. To be called before the peer is
    /// notified, since the vQPN may then become another stream's.
    pub fn done_with(&self, vqpn: Vqpn) {
        let bit = 1 << (vqpn.0 % 64);
        if let Some(word) = self.taken.get(vqpn.0 as usize / 64)
            && word.fetch_and(!bit, AcqRel) & bit != 0
        {
            self.unpin();
        }
    }

    /// Returns memory for another ring of `1 << log2` bytes, for a consumer of this end; `None` if there is no room.
    pub fn allocate(&self, log2: u8) -> Option<Region> {
        on_end!(self, end => end.allocate(log2))
    }

    /// Returns addresses for a larger ring of a consumer of this end, which may never be used. `None` if the fabric has
    /// none, or there is no room.
    pub fn reserve(&self, log2: u8) -> Option<Region> {
        on_end!(self, end => end.reserve(log2))
    }

    /// Gives `producer`, of the peer's stream `theirs`, a buffer of this end of up to `1 << log2` bytes, since its ring
    /// has no room. False if the fabric has none, or that would not be more room.
    pub fn lend(&self, theirs: Vqpn, producer: &mut Producer, log2: u8) -> bool {
        on_end!(self, end => end.lend(theirs, producer, log2))
    }

    /// Takes that buffer back. False if the peer has not read all of it.
    pub fn take_back(&self, theirs: Vqpn, producer: &mut Producer) -> bool {
        on_end!(self, end => end.take_back(theirs, producer))
    }

    /// Frees a ring that neither end uses any more.
    pub fn free(&self, region: Region) {
        on_end!(self, end => end.free(region));
    }

    /// Closes this end's stream `mine`; `peer` is the peer's vQPN. Without it the peer does not know of `mine` either.
    pub fn close(&self, mine: Vqpn, peer: Option<Vqpn>, consumer: Option<Consumer>) {
        if let Some(peer) = peer {
            self.done_with(peer);
        }
        self.leave(mine, || on_end!(self, end => end.close(mine, peer, consumer)));
    }

    /// Closes this end's stream `mine`, whose OPEN the peer has not answered yet. The answer to the OPEN frees the
    /// vQPN.
    pub fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>) {
        self.leave(mine, || on_end!(self, end => end.close_unanswered(mine, consumer)));
    }

    fn leave(&self, mine: Vqpn, close: impl FnOnce()) {
        // First: the vQPN may belong to another socket as soon as it is closed.
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

    /// Notes that the peer will not use this end's stream `mine` again.
    pub fn on_closed(&self, mine: Vqpn) {
        on_end!(self, end => end.on_closed(mine));
    }

    /// Keeps the rings of this end's stream `mine` from other streams until one [`let_go`](Self::let_go).
    fn hold(&self, mine: Vqpn) {
        on_end!(self, end => end.hold(mine));
    }

    /// Undoes one [`hold`](Self::hold).
    fn let_go(&self, mine: Vqpn) {
        on_end!(self, end => end.let_go(mine));
    }

    /// Returns the number of streams that this end has not closed.
    pub fn streams(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// Returns the slot of the socket of this end's stream `vqpn`; `None` if there is no such stream.
    pub fn slot_of(&self, vqpn: Vqpn) -> Option<u32> {
        self.sockets.get(vqpn.0 as usize)?.load(Acquire).checked_sub(1)
    }

    /// Returns the slots of all sockets with a stream on this link.
    pub fn slots(&self) -> impl Iterator<Item = u32> {
        (0..on_end!(self, end => end.numbers())).filter_map(|v| self.slot_of(Vqpn(v)))
    }

    /// Notifies the waiter of the peer that `wake` names about the peer's stream `theirs`.
    #[inline]
    pub fn notify(&self, wake: Wake, theirs: Vqpn) {
        on_end!(self, end => end.notify(wake, theirs));
    }

    /// Keeps the button by which the peer's waiter `id` is woken. `Err` says why it is not kept.
    pub fn on_waiter(&self, id: u32, fd: PrivateFd) -> Result<(), Refused> {
        let local_peer = self.local_peer().ok_or(Refused::Violation)?;
        let most = BUTTONS + BUTTONS_A_STREAM * self.streams();
        local_peer.on_waiter(id, fd, most)
    }

    /// Notes that the peer has not kept the button of this process's `waiter`.
    pub fn on_waiter_refused(&self, waiter: WaiterId) {
        if let Some(mut announced) = self.announced.lock()
            && let Some(a) = announced.iter_mut().find(|a| a.waiter == waiter)
        {
            a.bell = None;
            self.has_bell.fetch_and(!bell_bit(waiter), Relaxed);
            a.refused_until = crate::sys::time::now_ns() + REFUSED_FOR;
        }
    }

    /// Makes sure that the peer can wake this process's `waiter`, and sends it a button if need be. False if it cannot
    /// have one now.
    pub fn announce(&self, waiter: WaiterId) -> bool {
        if self.is_remote() || !waiter.is_polling() || waiter == SERVICE {
            // Between hosts this end itself wakes its waiters. Within a host a thread is woken by its futex, and the
            // service thread by the channel.
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

    /// Sends a message on the side channel, or queues it until the channel has room. Messages arrive in order, unless
    /// the link goes down.
    pub fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        match &self.end {
            AnyEnd::Shm(end) => end.outside().post(message, fds),
            AnyEnd::Verbs(remote) => remote.end().send(message),
        }
    }

    /// Returns whether more messages wait for room than a correct peer leaves unread.
    pub fn is_overfull(&self) -> bool {
        self.local_peer().is_some_and(LocalPeer::is_overfull)
    }

    /// Returns whether messages wait for room.
    pub fn has_outbox(&self) -> bool {
        self.local_peer().is_some_and(LocalPeer::has_outbox)
    }

    /// Sends queued messages, since the side channel may have room again. True if none is left.
    pub fn flush(&self) -> bool {
        self.local_peer().is_none_or(LocalPeer::flush)
    }

    /// Takes in what has come, and returns whether the peer has queued a stream for this process's `waiter`.
    pub fn has_ready(&self, waiter: WaiterId) -> bool {
        self.progress();
        self.is_queued(waiter)
    }

    /// Returns whether a stream is queued for this process's `waiter`, among what was taken in
    /// ([`progress`](Self::progress)).
    #[inline]
    pub fn is_queued(&self, waiter: WaiterId) -> bool {
        on_end!(self, end => end.has_ready(waiter))
    }

    /// Empties the ready queue of this process's `waiter`, as far as it was taken in. Calls `each` for each stream,
    /// with the slot of its socket and the [time](rdmasock_core::cycles) at which it was queued. The caller checks each
    /// socket and [judges](Self::judge) the result.
    pub fn drain_ready(&self, waiter: WaiterId, mut each: impl FnMut(u32, u64)) {
        on_end!(self, end => end.drain_ready(waiter, |vqpn| match self.slot_of(vqpn) {
            Some(slot) => each(slot, end.queued_at(vqpn)),
            None => self.judge(false),
        }));
    }

    /// Takes the link down. The caller moves its sockets to TCP, before or next. False if it was down already.
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

    /// Closes the descriptors of a link that is down. False if a thread is about to use one: the caller tries again
    /// later. Service thread only.
    pub fn close_channel(&self) -> bool {
        let is_closed = self.local_peer().is_none_or(LocalPeer::close);
        // Cleared after the close: a button that is announced later cannot be sent.
        if is_closed && let Some(mut announced) = self.announced.lock() {
            announced.clear();
            self.has_bell.store(0, Relaxed);
        }
        is_closed
    }

    /// Returns the wake-up word that names the service thread's waiter.
    pub fn service_bits() -> u32 {
        SERVICE.queue_bits()
    }
}

#[cfg(test)]
mod tests;
