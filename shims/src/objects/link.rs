//! The link object of the shims. It records the sockets whose streams are on the link, and whether the link is up. Its
//! field `end` is this process's end of the link in core. That end has the link's memory, and carries out most calls.
//! Also the list of links that are up, the bounds on what a peer can make this process spend, and what epoll sets check
//! of a link to another host.
//!
//! A *producer* writes into the rings of one of the peer's streams, a *consumer* reads the rings of one of this end's
//! streams.
//!
//! Link objects are never freed. Once a link is down and has no stream, producer or [`Pin`] left, its object is reused
//! for another link. Code that keeps a reference without one of these three may find another link in the object. At
//! worst it then wakes a waiter of that link in vain.

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

/// The most buttons that this end keeps for a peer's waiters: `BUTTONS`, and `BUTTONS_A_STREAM` for each stream, one
/// for an epoll set and one for a thread that polls.
const BUTTONS: u32 = 16;
const BUTTONS_A_STREAM: u32 = 2;

/// Bounds how far into the peer's data area this end writes, in rings of the largest size: `RINGS`, and
/// `RINGS_A_STREAM` for each stream. A stream uses two rings, its own and the one before. The number is doubled for
/// gaps between rings.
const RINGS_A_STREAM: u64 = 4;
const RINGS: u64 = 4;

/// log2 of the factor by which the first ring between hosts is larger than within a host. Between hosts the reader
/// sends a message, which also wakes the writer, for each quarter of a ring that it has read. A larger ring needs fewer
/// messages.
const BETWEEN_HOSTS: u32 = 4;

/// How long the cookie of a link offer is valid, ns.
const COOKIE_LIFE: u64 = 40_000_000_000;

/// The end of a link, by its fabric. The shared-memory end is on the hot path, so it is stored here without a further
/// pointer.
#[allow(clippy::large_enum_variant)]
enum AnyEnd {
    Shm(shm::End<LocalPeer>),
    Verbs(Box<Remote>),
}

/// Makes the same call on the end of either fabric.
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

/// The value of [`Link::pins`] while the object is no link: it cannot be pinned then.
const OVER: u32 = 1 << 31;

/// Returns the bit that stands for a waiter in a word of 64 bits; 0 if the waiter's id is above 63.
fn bit(waiter: WaiterId) -> u64 {
    1u64.checked_shl(waiter.0.into()).unwrap_or(0)
}

/// A link object, see the [module](self).
pub struct Link {
    /// The link's slot: its number among the links of this process, and its index in the statistics.
    slot: AtomicU32,
    peer: [AtomicU64; 2],
    /// Number of links that this process had before this one.
    serial: AtomicU64,
    end: AnyEnd,
    alive: AtomicBool,
    /// Number of streams, producers and [`Pin`]s of this end, or [`OVER`].
    pins: AtomicU32,
    /// The waiters of this process whose buttons were sent to the peer, each with its doorbell.
    announced: Lock<Vec<(WaiterId, PrivateFd)>>,
    /// A bit for each waiter below 64 that has a doorbell in `announced`. These waiters are the epoll sets with ready
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
    /// Whether the service thread has begun to take the link's streams back to TCP, because the checks in `looks` found
    /// almost nothing.
    pub is_left: AtomicBool,
    /// By this end's vQPN: the slot of the stream's socket, plus one; 0 without a stream.
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
    /// Returns the link's slot: its number among the links of this process, and its index in the statistics.
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

    /// Keeps the object the same link until [`unpin`](Self::unpin). False, without a pin, if the object is no link now.
    fn pin(&self) -> bool {
        let one_more = |pins| (pins & OVER == 0).then_some(pins + 1);
        self.pins.fetch_update(AcqRel, Acquire, one_more).is_ok()
    }

    /// Removes a pin. The pin's owner must not use the link afterwards. If this was the last pin of a link that is
    /// down, the service thread frees the link.
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

    /// Returns the path of the link's streams, for the statistics.
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

    /// Polls a link to another host: applies what the peer has sent, and sends what can be sent. True if there was a
    /// completion. Within a host does nothing and returns false, since the peer itself writes into this end's memory.
    #[inline]
    pub fn progress(&self) -> bool {
        match &self.end {
            AnyEnd::Shm(_) => false,
            AnyEnd::Verbs(remote) => remote.progress(),
        }
    }

    /// Returns whether the link is up, so that streams may use it.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.alive.load(Acquire)
    }

    /// Calls `f` with the side channel. `None`, without a call, if the channel is closed, or if the link leads to
    /// another host, where the side channel is no socket.
    pub fn with_channel<R>(&self, f: impl FnOnce(&Channel) -> R) -> Option<R> {
        self.local_peer()?.with_channel(f)
    }

    /// Returns memory for another ring of `1 << log2` bytes, for a consumer of this end; `None` if there is no room.
    pub fn allocate(&self, log2: u8) -> Option<Region> {
        on_end!(self, end => end.allocate(log2))
    }

    /// Offers the peer's producer a *reserve*: addresses, without memory yet, for a ring of the largest size. If this
    /// end's program does not read and the ring is full, the producer moves on to the reserve, as far as its bound on
    /// unread bytes allows. The peer's process then provides the memory. Kernel TCP would also take megabytes in that
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

    /// Gives `producer`, which sends to the peer's stream `theirs` and whose ring is full, a send buffer of this end of
    /// up to `1 << log2` bytes. False if the fabric has no send buffers, as within a host, or if the buffer would hold
    /// no more than the ring.
    pub fn lend(&self, theirs: Vqpn, producer: &mut Producer, log2: u8) -> bool {
        on_end!(self, end => end.lend(theirs, producer, log2))
    }

    /// Takes back the send buffer that `lend` has given. False if the peer has not read all bytes in it.
    pub fn take_back(&self, theirs: Vqpn, producer: &mut Producer) -> bool {
        on_end!(self, end => end.take_back(theirs, producer))
    }

    /// Frees a ring that neither end uses any more.
    pub fn free(&self, region: Region) {
        on_end!(self, end => end.free(region));
    }

    fn leave(&self, mine: Vqpn, close: impl FnOnce()) {
        // The entry is cleared before `close`: afterwards the vQPN may belong to another socket.
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

    /// Notifies the peer's waiter that `wake` names about the peer's stream `theirs`.
    #[inline]
    pub fn notify(&self, wake: Wake, theirs: Vqpn) {
        on_end!(self, end => end.notify(wake, theirs));
    }

    /// Keeps the button by which the peer's waiter `id` is woken, unless this end already keeps as many buttons as it
    /// may. `Err` if the peer breaks the protocol by sending the button.
    pub fn on_waiter(&self, id: u32, fd: PrivateFd) -> Result<(), Broken> {
        let local_peer = self.local_peer().ok_or(Broken)?;
        let most = BUTTONS + BUTTONS_A_STREAM * self.streams();
        local_peer.on_waiter(id, fd, most)
    }

    /// Ensures that the peer can wake this process's `waiter`: sends the peer a button for it if the peer has none.
    /// False if no button can be made or sent now. A peer that does not keep the button sends the message RING instead.
    pub fn announce(&self, waiter: WaiterId) -> bool {
        if self.is_remote() || !waiter.is_polling() || waiter == SERVICE {
            // No button is needed. Between hosts this end itself wakes its waiters. Within a host a thread is woken by
            // its futex, and the service thread by the side channel.
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
    /// the link goes down. `Err` if the message is neither sent nor queued.
    pub fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        match &self.end {
            AnyEnd::Shm(end) => end.outside().post(message, fds),
            AnyEnd::Verbs(remote) => remote.end().send(message),
        }
    }

    /// Returns whether more messages wait for room on the side channel than a correct peer leaves unread.
    pub fn is_overfull(&self) -> bool {
        self.local_peer().is_some_and(LocalPeer::is_overfull)
    }

    /// Returns whether messages or requests to wake wait for room on the side channel.
    pub fn has_outbox(&self) -> bool {
        self.local_peer().is_some_and(LocalPeer::has_outbox)
    }

    /// Sends the queued messages and requests to wake, since the side channel may have room again. True if none is
    /// left.
    pub fn flush(&self) -> bool {
        self.local_peer().is_none_or(LocalPeer::flush)
    }

    /// Polls the link as `progress` does, then returns whether a stream is in the ready queue of this process's
    /// `waiter`.
    pub fn has_ready(&self, waiter: WaiterId) -> bool {
        self.progress();
        self.is_queued(waiter)
    }

    /// Returns whether a stream is in the ready queue of this process's `waiter`. Between hosts the queue has only what
    /// [`progress`](Self::progress) has applied.
    #[inline]
    pub fn is_queued(&self, waiter: WaiterId) -> bool {
        on_end!(self, end => end.has_ready(waiter))
    }

    /// Removes all entries from the ready queue of this process's `waiter`. Calls `each` for each stream, with the slot
    /// of its socket and the [time](rdmasock_core::cycles) at which it was queued. The caller checks whether the socket
    /// is ready, and passes the result to [`judge`](Self::judge).
    pub fn drain_ready(&self, waiter: WaiterId, mut each: impl FnMut(u32, u64)) {
        on_end!(self, end => end.drain_ready(waiter, |vqpn| match self.slot_of(vqpn) {
            Some(slot) => each(slot, end.queued_at(vqpn)),
            None => self.judge(false),
        }));
    }

    /// Takes the link down. The caller moves the link's sockets to TCP, before this call or right after it. False if
    /// the link was down already.
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
        // Cleared after the close: from then on `announce` cannot send a button, so it adds none.
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

    /// The producer pins the link until `done_with`.
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
        // The peer's ring may have a size, or lie at a place, that this end's allowance excludes.
        let made = on_end!(self, end => end.producer(theirs));
        let made = made.map(|producer| producer.with_allowance(self.allowance()));
        made.filter(Producer::can_adopt).ok_or_else(|| {
            self.done_with(theirs);
            NoProducer::Limits
        })
    }

    /// To be called before the peer is notified: from then on the peer may give the vQPN to another stream.
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

    /// The vQPN stays in use until the peer answers the OPEN.
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

// The life of link objects: an object becomes a link and, once nothing uses that link any more, another link.

/// The link object that was made last; the objects form a list.
static LAST: AtomicPtr<Link> = AtomicPtr::new(null_mut());

/// Objects that are no link now, for reuse.
static FREE: Lock<Vec<&'static Link>> = Lock::new(Vec::new());

/// The identity of a link.
pub struct Identity {
    /// The link's slot: its number among the links of this process, and its index in the statistics.
    pub slot: u32,
    /// The instance at the other end.
    pub peer: InstanceId,
    /// The link's counters; `None` if the statistics have no room for them.
    pub stats: Option<&'static LinkStats>,
}

impl Link {
    /// Makes a link within the host over `memory`, still without a side channel. `None` if the memory cannot be mapped:
    /// this process's limits forbid it, or a file of the peer fails a check.
    pub fn new(identity: Identity, memory: &Memory<'_>) -> Option<&'static Self> {
        let link = match take_free(|link| !link.is_remote()) {
            Some(link) => link,
            None => {
                // SAFETY: the end is leaked with its link object, so no cursor (producer or consumer) outlives it.
                // `Link::producer` gives out one producer at a time for each vQPN of the peer.
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

    /// Makes a link to another host, over a connected queue pair. `None` if that fails, as a rule for want of memory.
    /// `other` is the message by which the other end has introduced itself. `dialled` has the local and the remote
    /// address if this end has connected.
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

    /// Returns a new object, which is no link yet, and adds it to the list of all objects.
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

    /// Turns the object into the link `identity`. No thread has pinned the object. A thread with a stale pointer and no
    /// pin does no harm.
    fn begin(&self, identity: Identity) {
        static SERIALS: AtomicU64 = AtomicU64::new(0);
        self.serial.store(SERIALS.fetch_add(1, Relaxed), Release);
        self.slot.store(identity.slot, Release);
        let halves = identity.peer.as_bytes().as_chunks().0;
        for (word, half) in self.peer.iter().zip(halves) {
            word.store(u64::from_ne_bytes(*half), Release);
        }
        // `on_geometry` sets the peer's value later.
        self.peers_max_ring.store(u64::MAX, Relaxed);
        self.looks.reset();
        self.is_left.store(false, Relaxed);
        let stats = identity.stats.map_or(null_mut(), |s| std::ptr::from_ref(s).cast_mut());
        self.stats.store(stats, Release);
        self.alive.store(true, SeqCst);
        self.pins.store(0, SeqCst);
    }

    /// Frees a link that is down and whose channel is [closed](Self::close_channel): its memory is given back, and the
    /// object is kept for reuse. False while a stream, a producer or a thread still uses the link: the caller tries
    /// again later.
    pub fn release(&'static self) -> bool {
        match self.pins.compare_exchange(0, OVER, AcqRel, Acquire) {
            Ok(_) => {}
            // An earlier call has set `OVER` and then failed, because a thread was about to leave the link.
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

/// Removes an object for which `fits` returns true from the objects for reuse, and returns it; `None` if there is none.
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

/// Gives up all links in a fork child: they are the parent's, and their memory is not mapped in the child.
///
/// # Safety
/// The caller is the only thread.
pub(crate) unsafe fn after_fork() {
    let mut next = LAST.swap(null_mut(), AcqRel);
    // SAFETY: null, or an object that is never freed.
    while let Some(link) = unsafe { next.as_ref() } {
        // A signal handler may have forked in the middle of a call on the link. The call then goes on in the child, and
        // must do no harm there.
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

/// A pin of a link: the link's object does not become another link until the `Pin` is dropped.
pub(crate) struct Pin(&'static Link);

impl Pin {
    /// Pins the link; `None` if the object is no link now.
    pub(crate) fn new(link: &'static Link) -> Option<Self> {
        link.pin().then_some(Self(link))
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.unpin();
    }
}

/// Keeps the rings of one stream of this end until the `Held` is dropped. The rings stay mapped, and no other stream
/// gets them, even after both ends have left the stream. A `Held` also pins the link. It neither reads nor writes the
/// rings.
pub struct Held {
    pin: Pin,
    mine: Vqpn,
}

impl Held {
    /// Holds the rings of this end's stream `mine`, which this end has not closed. `None` if the object is no link now.
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
// that it queues as ready.

impl Link {
    /// Sets the size of the largest ring that the peer writes into, bytes. To be called before the first stream.
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

    /// Returns the bounds within which a new producer of this end accepts the rings that the peer offers. Within a
    /// host, first raises the bound that all producers of the link share, to allow for this one more.
    fn allowance(&self) -> Allowance {
        if self.is_remote() {
            return Allowance::default();
        }
        let largest = config().ring_max.bytes();
        let rings = RINGS + RINGS_A_STREAM * u64::from(self.streams() + 1);
        self.reach.fetch_max(rings.saturating_mul(largest), AcqRel);
        Allowance::new(largest.ilog2() as u8, Arc::clone(&self.reach))
    }

    /// Counts a check of a stream that the peer has queued as ready. `found`: the stream was ready. A peer that queues
    /// unready streams again and again keeps this process's threads awake. If there are many checks and nearly all find
    /// nothing, the service thread checks whether bytes move on the link.
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

    /// Returns whether fewer than `MOST_VAIN` bytes have moved on the link since the last call. `moved` is the sum of
    /// the positions of all streams on the link, bytes. Service thread only.
    ///
    /// The counts of [`Self::judge`] alone do not show this. If several threads check for the same bytes, all but one
    /// find nothing. And threads that block in a receive do not count the checks that find something.
    pub fn is_idle(&self, moved: u64) -> bool {
        let before = self.looks.moved.swap(moved, Relaxed);
        moved.wrapping_sub(before) < u64::from(MOST_VAIN)
    }
}

/// The links that are up.
static UP: Lock<Vec<&'static Link>> = Lock::new(Vec::new());

/// Adds the link to the list of links that are up.
pub(crate) fn add(link: &'static Link) {
    if let Some(mut up) = UP.lock() {
        up.push(link);
    }
}

/// Removes the link from the list of links that are up.
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

/// Makes a one-time offer of a link for the instance `peer`. `local` is `None` if the peer is on this host, else the
/// local address that the peer has reached. Returns `None` if there is a link to the peer already, or if none can be
/// offered.
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

/// Counts the threads that sleep on an epoll set. A set may have hundreds of links to other hosts, so a thread does not
/// record its sleep in each link. It counts itself in the set's `Watch`, and the service thread reads the count.
///
/// A thread that is about to sleep counts itself in. Then it checks whether completions of a link have begun again to
/// wake the service thread ([`Mailbox::taken_back`](crate::objects::mailbox::Mailbox::taken_back)). The service thread
/// first subscribes to the completions, then reads the count. So one of the two sees the other.
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

/// The program's epoll sets that wait for completions of one link to another host. The kernel's set behind each has the
/// link's completion descriptor. If the queue pair is *armed*, its next completion makes the descriptor readable.
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

    /// Removes an epoll set, whose kernel's set does not have the descriptor any more.
    pub fn remove(&self, watch: &'static Watch) {
        self.change(|all| all.retain(|one| !std::ptr::eq(*one, watch)));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<&'static Watch>)) {
        if let Some(mut all) = self.all.lock() {
            change(&mut all);
            self.count.store(all.len() as u32, Release);
        }
    }

    /// Returns the number of these epoll sets.
    pub fn count(&self) -> u32 {
        self.count.load(Acquire)
    }

    /// Returns whether a thread sleeps on one of the sets. True also if the list cannot be read now.
    pub fn is_any_asleep(&self) -> bool {
        self.count() > 0
            && self
                .all
                .lock()
                .is_none_or(|all| all.iter().any(|w| !w.asleep.is_empty()))
    }

    /// Returns a number that changes whenever a thread goes to sleep on one of the sets.
    pub fn sleeps(&self) -> u32 {
        let each = |sum: u32, w: &&Watch| sum.wrapping_add(w.sleeps.load(Relaxed));
        self.all.lock().map_or(0, |all| all.iter().fold(0, each))
    }
}

/// The state of one link to another host that epoll sets check before each sleep. The states of all links lie side by
/// side in memory. So a check of hundreds of links reads a few cache lines, and not several for each link.
#[derive(Default)]
pub struct News {
    /// A bit for each waiter whose ready queue may have an entry.
    queued: AtomicU64,
    /// Whether the queue pair is armed: its next completion makes the completion descriptor readable. See
    /// [`End::is_armed`](rdmasock_core::fabric::remote::End::is_armed).
    pub(super) armed: AtomicBool,
}

const _: () = assert!(READY_QUEUES == u64::BITS);

impl News {
    /// Resets the state for another link: no queue has an entry, and the queue pair is not armed.
    pub fn reset(&self) {
        self.queued.store(0, SeqCst);
        self.armed.store(false, SeqCst);
    }

    /// Returns the value of [`End::is_armed`](rdmasock_core::fabric::remote::End::is_armed).
    pub fn is_armed(&self) -> bool {
        self.armed.load(Acquire)
    }

    /// Notes that the waiter's ready queue has got an entry. Next the caller checks whether the waiter sleeps. A thread
    /// that goes to sleep raises its sleep flag before it [checks the queue](Self::is_queued). So one of the two sees
    /// the other.
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

/// Number of `News` that are allocated at a time. A `News` is never freed, as its link object is not.
const AT_A_TIME: usize = 64;

/// The unused ones among the `News` that were allocated last.
static FREE_NEWS: Lock<&'static [News]> = Lock::new(&[]);

/// Returns an unused `News`, for a new link object.
pub(crate) fn new() -> &'static News {
    let mut free = FREE_NEWS.lock();
    if let Some(first) = free.as_mut().and_then(|free| free.split_off_first()) {
        return first;
    }
    let made: &'static [News; AT_A_TIME] = Box::leak(Box::new(std::array::from_fn(|_| News::default())));
    let [first, rest @ ..] = made;
    // If the lock could not be taken, the rest stays unused. In a fork child, a thread of the parent may have held the
    // lock at the fork.
    if let Some(free) = free.as_mut() {
        **free = rest;
    }
    first
}

/// Number of checks that found nothing after which the service thread checks the link. Also the bytes that have to move
/// on the link meanwhile if it is to count as in use.
const MOST_VAIN: u32 = 8192;
/// A check that finds something makes up for this many checks in vain.
const VAIN_A_FIND: u32 = 256;
/// `MOST_VAIN` checks in vain that take longer than this do no harm, ns.
const FAST: u64 = 10_000_000_000;

/// Counts of the checks that a link's peer has caused: `vain` found nothing, `found` found something. Also the values
/// of the counts at the last call of `are_noise`.
#[derive(Default)]
struct Looks {
    vain: AtomicU32,
    found: AtomicU32,
    vain_before: AtomicU32,
    found_before: AtomicU32,
    /// Time of the last call of `are_noise`, monotonic ns.
    at: AtomicU64,
    /// Sum of the streams' positions at the last call of `Link::is_idle`, bytes.
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

    /// Returns whether nearly all checks since the last call were in vain, and came fast. `now` in monotonic ns.
    fn are_noise(&self, now: u64) -> bool {
        let since = |count: &AtomicU32, before: &AtomicU32| {
            let count = count.load(Relaxed);
            count.wrapping_sub(before.swap(count, Relaxed))
        };
        let vain = since(&self.vain, &self.vain_before);
        let found = since(&self.found, &self.found_before);
        let is_fast = now.wrapping_sub(self.at.swap(now, Relaxed)) < FAST;
        // Threads add without an atomic addition, so a slow thread may write an old count back. The difference is then
        // small, or so large that it looks like a wrap, and does not count.
        let is_whole = (MOST_VAIN / 2..2 * MOST_VAIN).contains(&vain);
        is_whole && is_fast && found < vain / VAIN_A_FIND
    }
}

/// Adds one, and returns the count. If several threads add at once, the count may be too low: an exact count would cost
/// more than it is worth.
#[inline]
fn bump(count: &AtomicU32) -> u32 {
    let n = count.load(Relaxed).wrapping_add(1);
    count.store(n, Relaxed);
    n
}

#[cfg(test)]
mod tests;
