//! A link as the shims use it: the sockets whose streams are on it, whether it is up, and its fabric. The fabric's end
//! has the link's memory, and gets most calls. Also the list of links that are up, the bounds on what a peer can make
//! this process spend, and what epoll sets keep and check about a link to another host.
//!
//! Link objects are never freed. A link that is down and has no streams or producers left becomes another link. A
//! stream, a producer or a [`Pin`] keeps the object the same link. A call that holds a bare pointer, to wake a waiter,
//! may wake a waiter of another link.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};

use crossbeam_utils::CachePadded;
use rdmasock_core::fabric::layout::{MAX_RING_LOG2, MAX_STREAMS, MIN_RING_LOG2, READY_QUEUES, Region};
use rdmasock_core::fabric::ring::{Allowance, Consumer, Producer, Wake};
use rdmasock_core::fabric::shm::Memory;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::fabric::{LinkEnd, NoProducer, OpenError, Opened, SendError, shm};
use rdmasock_core::ids::{InstanceId, Vqpn};
use rdmasock_core::lock::Lock;
use rdmasock_core::os::channel::Channel;
use rdmasock_core::os::memfd;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::sparse::Sparse;
use rdmasock_core::stats::{LinkStats, Path, Reason};
use rdmasock_core::stream::connection::{Broken, StreamLink};
use rdmasock_core::sync::Presence;
use rdmasock_core::wire::{Introduction, LinkAddress, LinkOffer, Message};

use crate::config::config;
use crate::config::verbs::Pair;
use crate::objects::library::Library;
use crate::objects::local_link::LocalPeer;
use crate::objects::mailbox::Command;
use crate::objects::remote_link::Terms;
pub(crate) use crate::objects::remote_link::{Maintained, Poller, Remote, StandBy, Turn, has_few_addresses};
use crate::objects::waiters::SERVICE;
use crate::sys::errno;

/// Buttons kept for a peer: a fixed number, and more for each of its streams, for an epoll set and a thread that polls.
const BUTTONS: u32 = 16;
const BUTTONS_A_STREAM: u32 = 2;

/// The size of a peer's data area that this end writes into is at most this many of the largest rings. For each of the
/// peer's streams: its ring, the ring before, and twice as much for the gaps between them; and some for all streams.
const RINGS_A_STREAM: u64 = 4;
const RINGS: u64 = 4;

/// log2 of how many times larger the first ring is between hosts. Each quarter that is read there costs a message,
/// which also wakes the writer.
const BETWEEN_HOSTS: u32 = 4;

/// How long a cookie of this instance may be presented, ns.
const COOKIE_LIFE: u64 = 40_000_000_000;

/// The end of a link, by its fabric. The end on the hot path is stored here, without a further pointer.
#[allow(clippy::large_enum_variant)]
enum AnyEnd {
    Shm(shm::End<LocalPeer>),
    Verbs(Box<Remote>),
}

/// Makes a call that has the same form on both ends.
macro_rules! on_end {
    ($link:expr, $end:ident => $call:expr) => {
        match &$link.end {
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

/// Returns the bit of a waiter among the first 64; 0 for a further one.
fn bit(waiter: WaiterId) -> u64 {
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
    /// Number of streams, producers and [`Pin`]s of this end, or [`OVER`].
    pins: AtomicU32,
    /// The waiters whose buttons the peer was sent, and their doorbells.
    announced: Lock<Vec<(WaiterId, PrivateFd)>>,
    /// A bit for each of the first 64 waiters that has a doorbell in `announced`; these are the epoll sets with ready
    /// queues. Changed under the lock of `announced`, read by each epoll_ctl.
    has_bell: AtomicU64,
    /// Size of the largest ring that the peer writes into, bytes.
    peers_max_ring: AtomicU64,
    /// How far into the peer's data area the rings of its streams may reach, bytes. Without effect on a link to another
    /// host, where the area is this process's memory.
    reach: Arc<AtomicU64>,
    /// Counts of the checks that the peer has caused, see [`Self::judge`]. All threads write them, so they lie on other
    /// cache lines than the fields that all threads only read.
    looks: CachePadded<Looks>,
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
        if self.is_remote() { Path::Verbs } else { Path::Shm }
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

    /// Returns whether the link is up: it carries streams.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.alive.load(Acquire)
    }

    /// Calls `f` with the side channel; `None`, without a call, if it is closed or no socket.
    pub fn with_channel<R>(&self, f: impl FnOnce(&Channel) -> R) -> Option<R> {
        self.local_peer()?.with_channel(f)
    }

    /// Returns memory for another ring of `1 << log2` bytes, for a consumer of this end; `None` if there is no room.
    pub fn allocate(&self, log2: u8) -> Option<Region> {
        on_end!(self, end => end.allocate(log2))
    }

    /// Offers addresses for the largest ring, the reserve. A sender that finds no room while the program does not read
    /// moves there, as far as its bound allows, and provides the memory. Kernel TCP takes megabytes at once in that
    /// case.
    pub fn reserve(&self, consumer: &mut Consumer) {
        let bytes = self.max_ring();
        if consumer.has_reserve() || bytes <= 1 << self.first_ring() || has_few_addresses() {
            return;
        }
        if let Some(region) = on_end!(self, end => end.reserve(bytes.trailing_zeros() as u8))
            && consumer.offer_reserve(region).is_err()
        {
            self.free(region);
        }
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

    /// Keeps the button by which the peer's waiter `id` is woken, unless there are too many. `Err` if the peer may not
    /// send it.
    pub fn on_waiter(&self, id: u32, fd: PrivateFd) -> Result<(), Broken> {
        let local_peer = self.local_peer().ok_or(Broken)?;
        let most = BUTTONS + BUTTONS_A_STREAM * self.streams();
        local_peer.on_waiter(id, fd, most)
    }

    /// Makes sure that the peer can wake this process's `waiter`, and sends it a button if need be. False if no button
    /// can be made or sent now. A peer that does not keep the button sends RING.
    pub fn announce(&self, waiter: WaiterId) -> bool {
        if self.is_remote() || !waiter.is_polling() || waiter == SERVICE {
            // Between hosts this end itself wakes its waiters. Within a host a thread is woken by its futex, and the
            // service thread by the channel.
            return true;
        }
        if self.has_bell.load(Relaxed) & bit(waiter) != 0 {
            return true;
        }
        let Some(mut announced) = self.announced.lock() else {
            return false;
        };
        if announced.iter().any(|(known, _)| *known == waiter) {
            return true;
        }
        let Ok((bell, button)) = Library::get().waiters.add_doorbell(waiter) else {
            return false;
        };
        let id = waiter.0.into();
        let is_sent = self.send(&Message::Waiter { id }, &[button.as_fd()]).is_ok();
        if is_sent {
            announced.push((waiter, bell));
            self.has_bell.fetch_or(bit(waiter), Relaxed);
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

impl StreamLink for &'static Link {
    fn peer(&self) -> InstanceId {
        Link::peer(self)
    }

    fn is_alive(&self) -> bool {
        Link::is_alive(self)
    }

    fn is_remote(&self) -> bool {
        Link::is_remote(self)
    }

    fn open(&self, socket: u32) -> Result<Opened, Reason> {
        if !self.pin() {
            return Err(Reason::LinkFailed);
        }
        let opened = on_end!(self, end => end.open(self.first_ring()));
        let mut opened = opened.map_err(|error| {
            self.unpin();
            match error {
                OpenError::Streams => Reason::LinkLimit,
                OpenError::Arena => Reason::ArenaFull,
                OpenError::Busy => Reason::Resources,
            }
        })?;
        if let Some(slot) = self.sockets.make(opened.vqpn.0 as usize) {
            slot.store(socket + 1, Release);
        }
        let count = self.count.fetch_add(1, Relaxed) + 1;
        if let Some(stats) = self.stats() {
            stats.set_streams(count);
        }
        self.reserve(&mut opened.consumer);
        Ok(opened)
    }

    fn pair(&self, mine: Vqpn, theirs: Vqpn, first: Region) {
        on_end!(self, end => end.pair(mine, theirs, first));
    }

    /// The producer pins the link.
    fn producer(&self, theirs: Vqpn) -> Result<Producer, NoProducer> {
        let Some(word) = self.taken.make(theirs.0 as usize / 64) else {
            return Err(NoProducer::NoSuch);
        };
        if !self.pin() {
            return Err(NoProducer::Limits);
        }
        if word.fetch_or(1 << (theirs.0 % 64), AcqRel) & 1 << (theirs.0 % 64) != 0 {
            self.unpin();
            return Err(NoProducer::NoSuch);
        }
        // Its ring may have a size, or lie at a place, that this end's allowance excludes.
        let made = on_end!(self, end => end.producer(theirs));
        let made = made.map(|producer| producer.with_allowance(self.allowance()));
        made.filter(Producer::can_adopt).ok_or_else(|| {
            self.done_with(theirs);
            NoProducer::Limits
        })
    }

    /// To be called before the peer is notified, since the vQPN may then become another stream's.
    fn done_with(&self, theirs: Vqpn) {
        let bit = 1 << (theirs.0 % 64);
        if let Some(word) = self.taken.get(theirs.0 as usize / 64)
            && word.fetch_and(!bit, AcqRel) & bit != 0
        {
            self.unpin();
        }
    }

    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>) {
        if let Some(theirs) = theirs {
            self.done_with(theirs);
        }
        self.leave(mine, || on_end!(self, end => end.close(mine, theirs, consumer)));
    }

    /// The answer to the OPEN frees the vQPN.
    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>) {
        self.leave(mine, || on_end!(self, end => end.close_unanswered(mine, consumer)));
    }

    fn send(&self, message: &Message) -> Result<(), SendError> {
        Link::send(self, message, &[])
    }

    fn send_with(&self, message: &Message, bytes: &[u8]) -> Result<(), SendError> {
        let file = memfd::create_file("rdmasock-back", bytes.len() as u64).map_err(|_| SendError::Full)?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let n = rustix::io::write(&file, rest).unwrap_or(0);
            rest = rest.get(n..).filter(|_| n > 0).ok_or(SendError::Full)?;
        }
        Link::send(self, message, &[file.as_fd()])
    }

    fn notify(&self, wake: Wake, theirs: Vqpn) {
        let errno = errno::get();
        Link::notify(self, wake, theirs);
        errno::set(errno);
    }

    fn take_in(&self) {
        if let Some(remote) = self.remote() {
            remote.end().take_in();
        }
    }

    fn doubt(&self) {
        if let Some(remote) = self.remote() {
            remote.end().doubt();
        }
    }
}

// The life of link objects: an object becomes a link, and becomes another one when nothing of the first is left.

/// The link object that was made last; the objects form a list.
static LAST: AtomicPtr<Link> = AtomicPtr::new(null_mut());

/// Objects that are no link now, for reuse.
static FREE: Lock<Vec<&'static Link>> = Lock::new(Vec::new());

/// The identity of a link.
pub struct Identity {
    /// The index in the library's list and in the statistics.
    pub slot: u32,
    /// The instance at the other end.
    pub peer: InstanceId,
    /// Its counters.
    pub stats: Option<&'static LinkStats>,
}

impl Link {
    /// Makes a link within the host, over the memory from the handshake, still without a side channel. `None` if the
    /// memory cannot be mapped, by this process's limits or because of what the peer has sent.
    pub fn new(identity: Identity, memory: &Memory<'_>) -> Option<&'static Self> {
        let link = match take_free(|link| !link.is_remote()) {
            Some(link) => link,
            None => {
                // SAFETY: the end is leaked with its link object, so no cursor outlives it. `Link::producer` gives out
                // one producer at a time for each vQPN of the peer.
                let end = unsafe { shm::End::blank(LocalPeer::new()) }.ok()?;
                Self::leak(AnyEnd::Shm(end))
            }
        };
        let AnyEnd::Shm(end) = &link.end else {
            return None;
        };
        if let Err(error) = end.show(memory) {
            tracing::debug!(target: "rdmasock::link", %error, "no memory for a link");
            if end.is_usable() {
                put_free(link);
            }
            return None;
        }
        link.begin(identity);
        Some(link)
    }

    /// Sets the side channel, before any other thread has the link.
    pub fn attach(&self, channel: Channel) {
        if let Some(local_peer) = self.local_peer() {
            local_peer.begin(self.slot(), channel);
        }
    }

    /// Makes a link to another host, over a connected queue pair. `None` without memory for it. `other` is the other
    /// end's introduction. `dialled` has the addresses from which and to which this end has connected, if it has.
    pub fn between_hosts(
        identity: Identity,
        pair: Pair,
        arena_bytes: u64,
        other: &Introduction,
        dialled: Option<(IpAddr, SocketAddr)>,
    ) -> Option<&'static Self> {
        let info = pair.info().ok()?;
        let terms = Terms::of(&pair, arena_bytes, other);
        let link = match take_free(|link| link.remote().is_some_and(|remote| remote.terms == terms)) {
            Some(link) if link.remote()?.renew(&pair) => link,
            Some(link) => {
                put_free(link);
                return None;
            }
            None => Self::leak(AnyEnd::Verbs(Box::new(Remote::new(pair, terms)?))),
        };
        link.remote()?.begin(&info, dialled);
        link.begin(identity);
        Some(link)
    }

    /// Returns a new object, which is no link yet.
    fn leak(end: AnyEnd) -> &'static Self {
        let link: &'static Self = Box::leak(Box::new(Self {
            slot: AtomicU32::new(0),
            peer: [const { AtomicU64::new(0) }; 2],
            serial: AtomicU64::new(0),
            end,
            alive: AtomicBool::new(false),
            pins: AtomicU32::new(OVER),
            announced: Lock::new(Vec::new()),
            has_bell: AtomicU64::new(0),
            peers_max_ring: AtomicU64::new(u64::MAX),
            reach: Arc::default(),
            looks: CachePadded::default(),
            is_left: AtomicBool::new(false),
            sockets: Sparse::new(),
            taken: Sparse::new(),
            count: AtomicU32::new(0),
            stats: AtomicPtr::new(null_mut()),
            next: AtomicPtr::new(null_mut()),
        }));
        let me = std::ptr::from_ref(link).cast_mut();
        let mut last = LAST.load(Acquire);
        loop {
            link.next.store(last, Relaxed);
            match LAST.compare_exchange(last, me, AcqRel, Acquire) {
                Ok(_) => return link,
                Err(other) => last = other,
            }
        }
    }

    /// Turns the object into the link `identity`. No thread has pinned the object, and what a thread does with a stale
    /// pointer without a pin is harmless.
    fn begin(&self, identity: Identity) {
        static SERIALS: AtomicU64 = AtomicU64::new(0);
        self.serial.store(SERIALS.fetch_add(1, Relaxed), Release);
        self.slot.store(identity.slot, Release);
        let halves = identity.peer.as_bytes().as_chunks().0;
        for (word, half) in self.peer.iter().zip(halves) {
            word.store(u64::from_ne_bytes(*half), Release);
        }
        // The peer's value follows by `on_geometry`.
        self.peers_max_ring.store(u64::MAX, Relaxed);
        self.looks.reset();
        self.is_left.store(false, Relaxed);
        let stats = identity.stats.map_or(null_mut(), |s| std::ptr::from_ref(s).cast_mut());
        self.stats.store(stats, Release);
        self.alive.store(true, SeqCst);
        self.pins.store(0, SeqCst);
    }

    /// Gives up a link that is down, whose channel is [closed](Self::close_channel) and that no stream uses any more:
    /// its memory and the object. False if that is not possible yet.
    pub fn release(&'static self) -> bool {
        match self.pins.compare_exchange(0, OVER, AcqRel, Acquire) {
            Ok(_) => {}
            // The last try failed because a thread was about to leave the link.
            Err(OVER) if self.is_remote() => {}
            Err(_) => return false,
        }
        if self.remote().is_some_and(|remote| !remote.retire()) {
            return false;
        }
        let slot = self.slot();
        let had_stats = !self.stats.swap(null_mut(), AcqRel).is_null();
        match &self.end {
            AnyEnd::Verbs(_) => put_free(self),
            AnyEnd::Shm(end) => {
                self.reach.store(0, Release);
                // SAFETY: no cursor is left. Streams and producers pin the link until they have given up their cursors,
                // and the exchange above has found no pin.
                unsafe { end.release() };
                if end.is_usable() {
                    put_free(self);
                }
            }
        }
        if had_stats {
            Library::get().stats.close_link(slot);
        }
        true
    }
}

/// Takes an object for which `fits` holds from those that are no link now; `None` if there is none.
fn take_free(fits: impl Fn(&Link) -> bool) -> Option<&'static Link> {
    let mut free = FREE.lock()?;
    let at = free.iter().position(|link| fits(link))?;
    Some(free.swap_remove(at))
}

/// Keeps an object that is no link now for reuse.
fn put_free(link: &'static Link) {
    if let Some(mut free) = FREE.lock() {
        free.push(link);
    }
}

/// Gives up all links in a fork child: they are the parent's, and their memory is not mapped.
///
/// # Safety
/// The caller is the only thread.
pub(crate) unsafe fn after_fork() {
    let mut next = LAST.swap(null_mut(), AcqRel);
    // SAFETY: null, or an object that is never freed.
    while let Some(link) = unsafe { next.as_ref() } {
        // A signal handler may have forked in the middle of a call, which then goes on in the child.
        if let AnyEnd::Shm(end) = &link.end {
            end.after_fork();
            end.outside().after_fork();
        }
        next = link.next.load(Acquire);
    }
    // SAFETY: by the contract, no other thread uses the locks. The vectors are leaked and not read, since a thread of
    // the parent may have been changing them.
    unsafe {
        std::mem::forget(std::mem::take(UP.get_unlocked()));
        UP.reset();
        std::mem::forget(std::mem::take(FREE.get_unlocked()));
        FREE.reset();
    }
}

/// A pin of a link: its object does not become another link until this is dropped.
pub(crate) struct Pin(&'static Link);

impl Pin {
    /// Pins the link; `None` if the link is over.
    pub(crate) fn new(link: &'static Link) -> Option<Self> {
        link.pin().then_some(Self(link))
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.unpin();
    }
}

/// A [`Pin`], and a hold on the rings of a stream of this end, which ends when this is dropped. The rings stay mapped,
/// and no other stream gets them, even after both ends have left the stream. The hold neither reads nor writes them.
pub struct Held {
    pin: Pin,
    mine: Vqpn,
}

impl Held {
    /// Holds the rings of this end's stream `mine`, which this end has not closed. `None` if the link is over.
    pub fn new(link: &'static Link, mine: Vqpn) -> Option<Self> {
        let pin = Pin::new(link)?;
        on_end!(link, end => end.hold(mine));
        Some(Self { pin, mine })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        on_end!(self.pin.0, end => end.let_go(self.mine));
    }
}

// Bounds on what a peer can make this process spend on a link: memory by the rings that it offers, time by the streams
// that it queues.

impl Link {
    /// Sets the size of the largest ring that the peer writes into. To be called before the first stream.
    pub fn on_geometry(&self, max_ring: u64) {
        let max_ring = max_ring.clamp(1 << MIN_RING_LOG2, 1 << MAX_RING_LOG2);
        let max_ring = 1 << max_ring.ilog2();
        self.peers_max_ring.store(max_ring, Release);
    }

    /// Returns the size of the largest ring that this end receives in, bytes.
    pub fn max_ring(&self) -> u64 {
        let ours = config().ring_max.bytes();
        ours.min(self.peers_max_ring.load(Acquire))
    }

    /// Returns log2 of the bytes of a direction's first ring.
    pub fn first_ring(&self) -> u8 {
        let min = config().ring_min.bytes();
        let bytes = if self.is_remote() { min << BETWEEN_HOSTS } else { min };
        bytes.min(self.max_ring()).trailing_zeros() as u8
    }

    /// Returns the allowance by which this end adopts rings that the peer offers to one more stream.
    fn allowance(&self) -> Allowance {
        if self.is_remote() {
            return Allowance::default();
        }
        let largest = config().ring_max.bytes();
        let rings = RINGS + RINGS_A_STREAM * u64::from(self.streams() + 1);
        self.reach.fetch_max(rings.saturating_mul(largest), AcqRel);
        Allowance::new(largest.ilog2() as u8, Arc::clone(&self.reach))
    }

    /// Counts a check of a stream that the peer may have queued; `found` if the stream was ready. A peer that queues
    /// unready streams again and again keeps this process's threads awake. If nearly all checks find nothing, and there
    /// are many, the service thread checks whether bytes move on the link.
    #[inline]
    pub fn judge(&self, found: bool) {
        if found {
            bump(&self.looks.found);
        } else if bump(&self.looks.vain).is_multiple_of(MOST_VAIN) {
            self.on_many_vain();
        }
    }

    #[cold]
    fn on_many_vain(&self) {
        if self.looks.are_noise(crate::sys::time::now_ns()) && !self.is_remote() {
            Library::get().service.submit(Command::Vain(self.slot()));
        }
    }

    /// Returns whether hardly a byte has moved on the link since the last call. `moved` is the sum of its streams'
    /// positions, bytes. Service thread only.
    ///
    /// The counts of [`Self::judge`] alone do not say that. If several threads check for the same bytes, all but one
    /// find nothing. And threads that block in a receive do not count what they find.
    pub fn is_idle(&self, moved: u64) -> bool {
        let before = self.looks.moved.swap(moved, Relaxed);
        moved.wrapping_sub(before) < u64::from(MOST_VAIN)
    }
}

/// The links that are up.
static UP: Lock<Vec<&'static Link>> = Lock::new(Vec::new());

/// Adds the link to the list.
pub(crate) fn add(link: &'static Link) {
    if let Some(mut up) = UP.lock() {
        up.push(link);
    }
}

/// Removes the link from the list.
pub(crate) fn remove(link: &'static Link) {
    if let Some(mut up) = UP.lock() {
        up.retain(|l| !std::ptr::eq(*l, link));
    }
}

/// Returns all links that are up.
pub(crate) fn all() -> Vec<&'static Link> {
    UP.lock().map(|up| up.clone()).unwrap_or_default()
}

/// Returns the live link to this instance; `None` if there is none.
pub(crate) fn to(peer: &InstanceId) -> Option<&'static Link> {
    let up = UP.lock()?;
    up.iter().copied().find(|l| l.peer() == *peer && l.is_alive())
}

/// Makes a one-time offer of a link for the instance `peer`. `local` is given if the peer is on another host: the
/// address by which it has reached this host. `None` if there is a link already, or none can be offered.
pub(crate) fn offer(peer: InstanceId, local: Option<IpAddr>) -> Option<LinkOffer> {
    if to(&peer).is_some() {
        return None;
    }
    let library = Library::get();
    let address = match local {
        Some(local) => LinkAddress::Verbs(library.offers.place_at(local)?),
        None => LinkAddress::Shm,
    };
    let cookie = library.offers.make(peer, COOKIE_LIFE)?;
    Some(LinkOffer { address, cookie })
}

/// Counts the threads that sleep on an epoll set. A set may have hundreds of links to other hosts, so its thread does
/// not notify each link of its sleep. Instead it counts itself in here, which the service thread reads.
///
/// A thread that is about to sleep counts itself in, and then checks whether the service thread was subscribed to links
/// again ([`Mailbox::taken_back`](crate::objects::mailbox::Mailbox::taken_back)). The service thread uses the reverse
/// order.
#[derive(Default)]
pub struct Watch {
    asleep: Presence,
    /// Number of sleeps that have begun; wraps.
    sleeps: AtomicU32,
}

impl Watch {
    /// Counts in a thread that is about to sleep. The thread then checks once more for reasons not to sleep.
    pub fn enter(&self) {
        self.asleep.enter();
        self.sleeps.fetch_add(1, Relaxed);
    }

    /// Counts out a thread that is awake. True if no other thread sleeps on the set.
    pub fn leave(&self) -> bool {
        self.asleep.leave()
    }

    /// Resets the count in a fork child, where no thread sleeps.
    pub fn reset(&self) {
        self.asleep.reset();
    }
}

/// The epoll sets whose kernel's sets have the completion descriptor of one link to another host.
#[derive(Default)]
pub struct Watchers {
    all: Lock<Vec<&'static Watch>>,
    count: AtomicU32,
}

impl Watchers {
    /// Adds an epoll set, whose kernel's set has the descriptor from now on.
    pub fn add(&self, watch: &'static Watch) {
        self.change(|all| all.push(watch));
    }

    /// Removes an epoll set, whose kernel's set has the descriptor no longer.
    pub fn remove(&self, watch: &'static Watch) {
        self.change(|all| all.retain(|one| !std::ptr::eq(*one, watch)));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<&'static Watch>)) {
        if let Some(mut all) = self.all.lock() {
            change(&mut all);
            self.count.store(all.len() as u32, Release);
        }
    }

    /// Returns the number of epoll sets.
    pub fn count(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// Returns whether a thread sleeps on one of them; true also if that is not known.
    pub fn is_any_asleep(&self) -> bool {
        self.count() > 0
            && self
                .all
                .lock()
                .is_none_or(|all| all.iter().any(|w| !w.asleep.is_empty()))
    }

    /// Returns a number that changes whenever a thread goes to sleep on one of them.
    pub fn sleeps(&self) -> u32 {
        let each = |sum: u32, w: &&Watch| sum.wrapping_add(w.sleeps.load(Relaxed));
        self.all.lock().map_or(0, |all| all.iter().fold(0, each))
    }
}

/// The state that an epoll set checks of each of its links to other hosts before each sleep. The states of all links
/// lie side by side, so that hundreds of links take a few cache lines, and not several each.
#[derive(Default)]
pub struct News {
    /// A bit for each waiter whose ready queue may have an entry.
    queued: AtomicU64,
    /// Whether the queue pair is armed, see [`End::is_armed`](rdmasock_core::fabric::remote::End::is_armed).
    pub(super) armed: AtomicBool,
}

const _: () = assert!(READY_QUEUES == u64::BITS);

impl News {
    /// Resets the state for another link: no queue has an entry, and nothing is armed.
    pub fn reset(&self) {
        self.queued.store(0, SeqCst);
        self.armed.store(false, SeqCst);
    }

    /// Returns the value of [`End::is_armed`](rdmasock_core::fabric::remote::End::is_armed).
    pub fn is_armed(&self) -> bool {
        self.armed.load(Acquire)
    }

    /// Notes that the waiter's ready queue got an entry. The caller checks next whether the waiter sleeps. A thread
    /// that goes to sleep says so before it [checks the queue](Self::is_queued). So one of the two sees the other.
    pub fn on_queued(&self, waiter: WaiterId) {
        self.queued.fetch_or(bit(waiter), SeqCst);
    }

    /// Returns whether the waiter's ready queue may have an entry.
    pub fn is_queued(&self, waiter: WaiterId) -> bool {
        self.queued.load(SeqCst) & bit(waiter) != 0
    }

    /// Notes that all entries of the waiter's ready queue are about to be taken out.
    pub fn on_take(&self, waiter: WaiterId) {
        if self.queued.load(Relaxed) & bit(waiter) != 0 {
            self.queued.fetch_and(!bit(waiter), SeqCst);
        }
    }
}

/// Number of states made at a time. A state is never freed, as its link is not.
const AT_A_TIME: usize = 64;

/// The unused states among those that were made last.
static FREE_NEWS: Lock<&'static [News]> = Lock::new(&[]);

/// Returns a state for a link object that is made.
pub(crate) fn new() -> &'static News {
    let mut free = FREE_NEWS.lock();
    if let Some(first) = free.as_mut().and_then(|free| free.split_off_first()) {
        return first;
    }
    let made: &'static [News; AT_A_TIME] = Box::leak(Box::new(std::array::from_fn(|_| News::default())));
    let [first, rest @ ..] = made;
    // If a thread of the parent held the lock at the fork, the rest is not used.
    if let Some(free) = free.as_mut() {
        **free = rest;
    }
    first
}

/// Checks in vain after which the service thread is asked about the peer.
const MOST_VAIN: u32 = 8192;
/// A check that finds something makes up for this many checks in vain.
const VAIN_A_FIND: u32 = 256;
/// `MOST_VAIN` checks in vain that take longer than this do no harm, ns.
const FAST: u64 = 10_000_000_000;

/// The counts of the checks that a link's peer has caused; nearly all of them are to find something. Also the values of
/// the counts at the last question.
#[derive(Default)]
struct Looks {
    vain: AtomicU32,
    found: AtomicU32,
    vain_before: AtomicU32,
    found_before: AtomicU32,
    /// Time of the last question, monotonic ns.
    at: AtomicU64,
    /// Sum of the streams' positions at the last question, bytes.
    moved: AtomicU64,
}

impl Looks {
    /// Resets the counts for another peer.
    fn reset(&self) {
        for count in [&self.vain, &self.found, &self.vain_before, &self.found_before] {
            count.store(0, Relaxed);
        }
        self.at.store(0, Relaxed);
        self.moved.store(0, Relaxed);
    }

    /// Returns whether nearly all checks since the last question were in vain, and came fast. `now` in monotonic ns.
    fn are_noise(&self, now: u64) -> bool {
        let since = |count: &AtomicU32, before: &AtomicU32| {
            let count = count.load(Relaxed);
            count.wrapping_sub(before.swap(count, Relaxed))
        };
        let vain = since(&self.vain, &self.vain_before);
        let found = since(&self.found, &self.found_before);
        let is_fast = now.wrapping_sub(self.at.swap(now, Relaxed)) < FAST;
        // A thread that was slow to write its count has turned the count back. The difference is then small, or so
        // large that it looks like a wrap.
        let is_whole = (MOST_VAIN / 2..2 * MOST_VAIN).contains(&vain);
        is_whole && is_fast && found < vain / VAIN_A_FIND
    }
}

/// Counts one more, and returns the count. Several threads may count too low: an exact count would cost more than it is
/// worth.
#[inline]
fn bump(count: &AtomicU32) -> u32 {
    let n = count.load(Relaxed).wrapping_add(1);
    count.store(n, Relaxed);
    n
}

#[cfg(test)]
mod tests;
