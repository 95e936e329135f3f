//! The shared page's layout: the owner writes it, and readers of other processes read it.
//!
//! Every field is an atomic. So all-zero memory is a valid empty page, and both sides may access it at any time. A
//! change of layout changes [`VERSION`]. The file also has the page's name and sizes, and the codes of all but the
//! reasons.

use core::mem::size_of;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicI32, AtomicU8, AtomicU16, AtomicU32, AtomicU64, fence};
use core::time::Duration;

use crate::codes::codes;
use crate::stats::reason::Why;

/// "rdmastat", read as a little-endian number.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"rdmastat");
/// Version of this layout.
pub(super) const VERSION: u32 = 7;
/// Bytes of the program's name that are kept, at most.
pub(super) const PROGRAM_MAX: usize = 64;

/// Name of the memfd; the link in `/proc/<pid>/fd` reads `/memfd:rdmasock-stats (deleted)`.
pub const MEMFD_NAME: &str = "rdmasock-stats";
/// Streams that an instance can show at once. Streams beyond that are not listed.
pub const STREAM_SLOTS: u32 = 65_536;
/// Links that an instance can show at once.
pub const LINK_SLOTS: u32 = 1_024;
/// Sleepers that an instance can show at once: one a waiter.
pub const SLEEPER_SLOTS: u32 = crate::fabric::waiter::MAX_WAITERS as u32;

/// Number of [`Event`]s.
pub(super) const EVENTS: usize = Event::ALL.len();

/// The whole shared mapping of one instance.
#[repr(C)]
#[derive(Debug)]
pub struct StatsPage {
    pub(super) header: Header,
    pub(super) links: [LinkStats; LINK_SLOTS as usize],
    pub(super) sleepers: [SleeperStats; SLEEPER_SLOTS as usize],
    pub(super) streams: [StreamStats; STREAM_SLOTS as usize],
}

/// The identity of the instance, and its totals. `magic` is stored last (Release).
#[repr(C, align(4096))]
#[derive(Debug)]
pub(super) struct Header {
    pub magic: AtomicU64,
    pub version: AtomicU32,
    /// The owner's pid in its own pid namespace.
    pub pid: AtomicU32,
    pub program_len: AtomicU32,
    /// When the instance began: CLOCK_MONOTONIC, ns.
    pub started: AtomicU64,
    pub instance: [AtomicU8; 16],
    pub program: [AtomicU8; PROGRAM_MAX],
    pub events: [AtomicU64; EVENTS],
    /// Streams opened so far.
    pub opened: AtomicU64,
    /// Closed streams that had both directions on a link.
    pub promoted: AtomicU64,
    /// Closed streams that had a direction moved back to TCP.
    pub demoted: AtomicU64,
    /// Sums over closed streams.
    pub closed_tx: Counters,
    pub closed_rx: Counters,
    /// Closings begun and done: a reader whose copy spans no closing sees totals that add up.
    pub closings_begun: AtomicU64,
    pub closings_done: AtomicU64,
    /// Why all connections are kept on TCP, as the code of a `Reason`.
    pub kept_on_tcp: AtomicU32,
    /// Stream slots that the owner may write in its mapping. Only the owner uses this field.
    pub open: AtomicU32,
}

/// The four counters of one direction. One thread at a time writes them.
#[repr(C)]
#[derive(Debug)]
pub struct Counters {
    tcp_bytes: AtomicU64,
    tcp_calls: AtomicU64,
    link_bytes: AtomicU64,
    link_calls: AtomicU64,
}

/// A copy of the four counters of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes over TCP.
    pub tcp_bytes: u64,
    /// Calls served by TCP.
    pub tcp_calls: u64,
    /// Bytes over a link.
    pub link_bytes: u64,
    /// Calls served by a link.
    pub link_calls: u64,
}

impl Counters {
    /// Counts a call that moved `bytes` over TCP. One thread at a time.
    #[inline]
    pub fn add_tcp(&self, bytes: u64) {
        bump(&self.tcp_bytes, bytes);
        bump(&self.tcp_calls, 1);
    }

    /// Counts a call that moved `bytes` over the link. One thread at a time.
    #[inline]
    pub fn add_link(&self, bytes: u64) {
        bump(&self.link_bytes, bytes);
        bump(&self.link_calls, 1);
    }

    /// Returns a copy of the counters.
    pub fn load(&self) -> Counts {
        Counts {
            tcp_bytes: self.tcp_bytes.load(Relaxed),
            tcp_calls: self.tcp_calls.load(Relaxed),
            link_bytes: self.link_bytes.load(Relaxed),
            link_calls: self.link_calls.load(Relaxed),
        }
    }

    fn clear(&self) {
        for counter in [&self.tcp_bytes, &self.tcp_calls, &self.link_bytes, &self.link_calls] {
            counter.store(0, Relaxed);
        }
    }

    /// Adds `counts` to the totals.
    pub(super) fn fold(&self, counts: Counts) {
        bump(&self.tcp_bytes, counts.tcp_bytes);
        bump(&self.tcp_calls, counts.tcp_calls);
        bump(&self.link_bytes, counts.link_bytes);
        bump(&self.link_calls, counts.link_calls);
    }
}

/// Adds without an atomic read-modify-write: the caller is the only writer of `counter`.
#[inline]
pub(super) fn bump(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}

/// Whether a slot is in use, with a generation. By it a reader knows if the slot was given to another stream or link
/// while it copied: a seqlock whose "being written" state is "free".
#[repr(transparent)]
#[derive(Debug)]
pub(super) struct SlotWord(AtomicU32);

impl SlotWord {
    const OPEN: u32 = 1;

    /// Returns whether the slot is in use.
    pub(super) fn is_open(&self) -> bool {
        self.0.load(Relaxed) & Self::OPEN != 0
    }

    /// Makes the slot visible, after its fields are written.
    pub(super) fn publish(&self) {
        let next = (self.0.load(Relaxed) | Self::OPEN).wrapping_add(2);
        // Pairs with the Acquire load in `copy`.
        self.0.store(next, Release);
    }

    /// Frees the slot; fields may be rewritten afterwards.
    pub(super) fn free(&self) {
        self.0.store(self.0.load(Relaxed) & !Self::OPEN, Relaxed);
        // Pairs with the Acquire fence in `copy`: a reader that sees a later field sees the free slot.
        fence(Release);
    }

    /// Runs `copy` if the slot is in use. Returns its result, `None` if the slot was not in use all the time.
    pub(super) fn copy<T>(&self, copy: impl FnOnce() -> T) -> Option<T> {
        let before = self.0.load(Acquire);
        if before & Self::OPEN == 0 {
            return None;
        }
        let copied = copy();
        fence(Acquire);
        (self.0.load(Relaxed) == before).then_some(copied)
    }
}

/// An IP address with port; family 0 means "not known".
#[repr(C)]
#[derive(Debug)]
pub(super) struct AddrCell {
    /// 0, 4 or 6.
    family: AtomicU16,
    port: AtomicU16,
    /// The address in network order; IPv4 in the first word.
    words: [AtomicU32; 4],
}

impl AddrCell {
    pub(super) fn store(&self, addr: Option<SocketAddr>) {
        let mut octets = [0_u8; 16];
        let family = match addr.map(|a| a.ip()) {
            None => 0,
            Some(IpAddr::V4(ip)) => {
                octets[..4].copy_from_slice(&ip.octets());
                4
            }
            Some(IpAddr::V6(ip)) => {
                octets = ip.octets();
                6
            }
        };
        for (word, chunk) in self.words.iter().zip(octets.as_chunks::<4>().0) {
            word.store(u32::from_ne_bytes(*chunk), Relaxed);
        }
        self.port.store(addr.map_or(0, |a| a.port()), Relaxed);
        self.family.store(family, Relaxed);
    }

    /// Returns the address. `None` if it is not known, or of no known family.
    pub(super) fn load(&self) -> Option<SocketAddr> {
        let mut octets = [0_u8; 16];
        for (chunk, word) in octets.as_chunks_mut::<4>().0.iter_mut().zip(&self.words) {
            *chunk = word.load(Relaxed).to_ne_bytes();
        }
        let ip = match self.family.load(Relaxed) {
            4 => {
                let [a, b, c, d, ..] = octets;
                IpAddr::V4(Ipv4Addr::new(a, b, c, d))
            }
            6 => IpAddr::V6(Ipv6Addr::from(octets)),
            _ => return None,
        };
        Some(SocketAddr::new(ip, self.port.load(Relaxed)))
    }
}

/// A link of the instance.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct LinkStats {
    pub(super) word: SlotWord,
    pub(super) state: AtomicU8,
    pub(super) fabric: AtomicU8,
    pub(super) peer_pid: AtomicU32,
    pub(super) streams: AtomicU32,
    pub(super) why: AtomicU32,
    pub(super) peer: [AtomicU8; 16],
}

impl LinkStats {
    /// Sets that the link is down because of `why`. It stays listed until its slot is freed.
    pub fn set_down(&self, why: impl Into<Why>) {
        self.why.store(why.into().to_bits(), Relaxed);
        self.state.store(LinkState::Down as u8, Relaxed);
    }

    /// Sets how many streams are on the link.
    pub fn set_streams(&self, streams: u32) {
        self.streams.store(streams, Relaxed);
    }
}

/// An open stream of the instance. The sender's counters are in the first cache line and the receiver's in the second,
/// since two threads may send and receive at once. Fields that change rarely fill the rest of both.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct StreamStats {
    /// Counters of the sending direction.
    pub tx: Counters,
    pub(super) word: SlotWord,
    pub(super) fd: AtomicI32,
    pub(super) direction: AtomicU8,
    pub(super) tx_path: AtomicU8,
    pub(super) rx_path: AtomicU8,
    pub(super) moved: AtomicU8,
    pub(super) local: AddrCell,

    /// Counters of the receiving direction.
    pub rx: Counters,
    pub(super) peer: AddrCell,
    /// Slot of the link plus one; 0 is none.
    pub(super) link: AtomicU32,
    pub(super) why: AtomicU32,
    /// Waiters that events wake, a number plus one; 0 is none. `sleeper` is the waiter of a thread that sleeps in a
    /// call or in poll, `set` the waiter of an epoll set.
    pub(super) sleeper: AtomicU16,
    pub(super) set: AtomicU16,
}

/// Bits of [`StreamStats::moved`]: the moves of the stream so far.
pub(super) mod moved {
    pub(crate) const TX: u8 = 1;
    pub(crate) const RX: u8 = 2;
    /// Both directions have been on a link.
    pub(crate) const PROMOTED: u8 = TX | RX;
    pub(crate) const DEMOTED: u8 = 4;
}

impl StreamStats {
    /// Returns how many bytes were sent over links.
    #[inline]
    pub fn sent_on_link(&self) -> u64 {
        self.tx.link_bytes.load(Relaxed)
    }

    /// Moves `bytes` from the link's counter to TCP's: they were sent over a link, not read there, and go over TCP now.
    pub fn move_tx_to_tcp(&self, bytes: u64) {
        let moved = bytes.min(self.tx.link_bytes.load(Relaxed));
        bump(&self.tx.link_bytes, moved.wrapping_neg());
        bump(&self.tx.tcp_bytes, moved);
    }

    /// Sets the numbers of waiters that are woken when data comes, or room: a thread's, and an epoll set's.
    pub fn set_waiting(&self, sleeper: Option<u16>, set: Option<u16>) {
        for (word, number) in [(&self.sleeper, sleeper), (&self.set, set)] {
            word.store(number.map_or(0, |number| number.saturating_add(1)), Relaxed);
        }
    }

    /// Sets what the sending direction runs on from now on.
    pub fn set_tx_path(&self, path: Path) {
        self.note_move(self.tx_path.swap(path as u8, Relaxed), path, moved::TX);
    }

    /// Sets what the receiving direction runs on from now on.
    pub fn set_rx_path(&self, path: Path) {
        self.note_move(self.rx_path.swap(path as u8, Relaxed), path, moved::RX);
    }

    fn note_move(&self, from: u8, to: Path, direction: u8) {
        let bit = match (from == Path::Tcp as u8, to == Path::Tcp) {
            (_, false) => direction,
            (false, true) => moved::DEMOTED,
            (true, true) => return,
        };
        self.moved.fetch_or(bit, Relaxed);
    }

    /// Sets why the stream is on TCP; not shown while both directions are on a link.
    pub fn set_why(&self, why: impl Into<Why>) {
        self.why.store(why.into().to_bits(), Relaxed);
    }

    /// Returns why the stream is on TCP.
    ///
    /// # Errors The code, if this version does not know it.
    pub fn why(&self) -> Result<Why, u16> {
        Why::from_bits(self.why.load(Relaxed))
    }

    /// Sets the slot of the link that carries the stream, or none.
    pub fn set_link(&self, link: Option<u32>) {
        self.link.store(link.map_or(0, |slot| slot.saturating_add(1)), Relaxed);
    }

    /// Sets addresses that were not known when the stream was opened.
    pub fn set_addrs(&self, local: Option<SocketAddr>, peer: Option<SocketAddr>) {
        self.local.store(local);
        self.peer.store(peer);
    }

    /// Prepares a free slot for a new stream.
    pub(super) fn reset(&self, fd: i32, direction: Direction) {
        self.tx.clear();
        self.rx.clear();
        self.fd.store(fd, Relaxed);
        self.direction.store(direction as u8, Relaxed);
        self.tx_path.store(Path::Tcp as u8, Relaxed);
        self.rx_path.store(Path::Tcp as u8, Relaxed);
        self.moved.store(0, Relaxed);
        self.link.store(0, Relaxed);
        self.why.store(0, Relaxed);
        self.set_waiting(None, None);
    }
}

const _: () = assert!(size_of::<StreamStats>() == 128 && size_of::<LinkStats>() == 64);
const _: () = assert!(size_of::<Header>() == 4096);

/// A thread that is about to sleep.
#[derive(Clone, Copy, Debug)]
pub struct Asleep {
    /// The thread's id, in its own pid namespace.
    pub thread: u32,
    /// The call that it sleeps in.
    pub call: Call,
    /// The slot of the stream that the call is on, if it is on one.
    pub stream: Option<u32>,
    /// When the sleep began: CLOCK_MONOTONIC, ns. The kernel's coarse clock is precise enough.
    pub since: u64,
    /// For a sender: the number of bytes that its reader has not read.
    pub unread: u64,
}

/// The threads that sleep as one waiter: in what call, and since when. They are several at once only for an epoll set's
/// waiter. Then all fields except `count` describe the thread that came last.
///
/// A thread writes here when it is about to sleep in the kernel until a link has data or room, and when it is awake
/// again. Threads that sleep in the kernel's own calls on TCP are not here: the kernel reports those.
#[repr(C, align(32))]
#[derive(Debug)]
pub struct SleeperStats {
    since: AtomicU64,
    unread: AtomicU64,
    /// 0 if the thread that came last is awake, and others sleep on.
    thread: AtomicU32,
    /// The slot plus one; 0 is none.
    stream: AtomicU32,
    count: AtomicU16,
    call: AtomicU8,
}

// No slot crosses the border of a page: a reader reads only pages that have memory.
const _: () = assert!(size_of::<SleeperStats>() == 32);
const _: () = assert!((SLEEPER_SLOTS as usize * size_of::<SleeperStats>()).is_multiple_of(4096));

impl SleeperStats {
    /// Notes that a thread goes to sleep.
    pub fn begin(&self, asleep: &Asleep) {
        self.since.store(asleep.since, Relaxed);
        self.unread.store(asleep.unread, Relaxed);
        self.thread.store(asleep.thread, Relaxed);
        let stream = asleep.stream.map_or(0, |slot| slot.saturating_add(1));
        self.stream.store(stream, Relaxed);
        self.call.store(asleep.call as u8, Relaxed);
        // Pairs with the Acquire in `copy`: a reader that sees the sleeper sees its fields.
        self.count.fetch_add(1, Release);
    }

    /// Notes that the thread is awake.
    pub fn end(&self, thread: u32) {
        if self.thread.load(Relaxed) == thread {
            self.thread.store(0, Relaxed);
        }
        self.count.fetch_sub(1, Relaxed);
    }

    pub(super) fn copy(&self, waiter: u16, now: u64) -> Option<SleeperSnapshot> {
        let count = self.count.load(Acquire);
        (count > 0).then(|| SleeperSnapshot {
            waiter,
            count,
            thread: Some(self.thread.load(Relaxed)).filter(|id| *id != 0),
            call: Call::from_code(self.call.load(Relaxed)),
            stream: self.stream.load(Relaxed).checked_sub(1),
            asleep: Duration::from_nanos(now.saturating_sub(self.since.load(Relaxed))),
            unread: self.unread.load(Relaxed),
        })
    }
}

/// The threads that sleep as one waiter, at one moment.
#[derive(Clone, Copy, Debug)]
pub struct SleeperSnapshot {
    /// The waiter's number.
    pub waiter: u16,
    /// The number of threads.
    pub count: u16,
    /// The thread that came last; `None` if it does not sleep any more.
    pub thread: Option<u32>,
    /// The call that it sleeps in; `None` for a code that this version does not know.
    pub call: Option<Call>,
    /// The slot of the stream that the call is on; `None` for poll and epoll sets.
    pub stream: Option<u32>,
    /// How long it has slept.
    pub asleep: Duration,
    /// For a sender: the number of bytes that its reader had not read when the sender went to sleep.
    pub unread: u64,
}

codes! {
    /// The carrier of a direction of a stream.
    pub enum Path: u8 {
        /// The kernel's TCP.
        Tcp = 0 => "tcp",
        /// A link on shared memory.
        Shm = 1 => "shm",
        /// A link on RDMA verbs.
        Verbs = 2 => "verbs",
        /// A link in the same process (tests).
        Mem = 3 => "mem",
    }
}

codes! {
    /// The end of the TCP connection that the stream is.
    pub enum Direction: u8 {
        /// This instance called accept().
        Accept = 0 => "accept",
        /// This instance called connect().
        Connect = 1 => "connect",
    }
}

codes! {
    /// The call that a thread sleeps in.
    pub enum Call: u8 {
        /// A call that receives.
        Receive = 0 => "recv",
        /// A call that sends.
        Send = 1 => "send",
        /// poll or select.
        Poll = 2 => "poll",
        /// epoll_wait.
        Epoll = 3 => "epoll_wait",
    }
}

codes! {
    /// State of a link.
    pub enum LinkState: u8 {
        /// The link carries streams.
        Up = 1 => "up",
        /// The link failed, or the peer closed it; see its reason.
        Down = 2 => "down",
    }
}

codes! {
    /// An event, counted for the whole instance. Its text is its name in JSON.
    pub enum Event: usize {
        /// An ASK was sent.
        Ask = 0 => "asks",
        /// A YES came back.
        Yes = 1 => "yes",
        /// A NO came back.
        No = 2 => "no",
        /// A step of a handshake did not come in time.
        HandshakeTimeout = 3 => "timeouts",
        /// A peer broke the protocol, on a link or while asking; the channel was closed, or the message ignored.
        LinkViolation = 4 => "violations",
        /// A connection's question went to another host. It counts once, however often it was sent.
        ControlAsk = 5 => "control_asks",
        /// A question from another host was answered YES or NO.
        ControlAnswer = 6 => "control_answers",
        /// A question from another host was passed on to the service names of this one.
        ControlRelay = 7 => "control_relays",
        /// A host did not answer, or no instance listens there: it is not asked for a while.
        ControlAbsent = 8 => "control_absent",
        /// A question came without a stamp of this instance, and got one.
        ControlStamp = 9 => "control_stamps",
        /// The control port could not be bound.
        ControlUnbound = 10 => "control_unbound",
        /// A datagram was refused: it does not have the one length that there is.
        ControlLength = 11 => "control_refused_length",
        /// A datagram was refused: it is of another version of the protocol.
        ControlVersion = 12 => "control_refused_version",
        /// A datagram was refused: it was not understood, or out of place.
        ControlKind = 13 => "control_refused_kind",
        /// A datagram was refused: its HMAC is wrong or missing, or there is one and this instance has no secret.
        ControlMac = 14 => "control_refused_hmac",
        /// A datagram was refused: an answer to no question of this instance, or a question from an address that is not
        /// its connection's.
        ControlMisplaced = 15 => "control_refused_misplaced",
        /// A datagram was refused: its question had ended, or is known with other contents.
        ControlReplay = 16 => "control_refused_replay",
        /// A datagram was refused: too many came.
        ControlRate = 17 => "control_refused_rate",
        /// A bulk queue pair between hosts was lost while direct transfers were under way: their bytes went on by
        /// rings.
        BulkLost = 18 => "bulk_lost",
        /// Bytes that this end's device was to send straight from the program's memory.
        DirectSent = 19 => "direct_sent_bytes",
        /// Bytes that the peer's device has written straight into the program's memory.
        DirectReceived = 20 => "direct_received_bytes",
        /// A call's memory was not registered: that would exceed half of the memlock limit, or the device refused it.
        /// The bytes went by rings.
        DirectUnpinned = 21 => "direct_unpinned",
        /// Memory of the program was registered: for a call, or a piece of the registered allocator for a link.
        DirectRegistered = 22 => "direct_registrations",
        /// Bytes that the peer's device has read straight from the program's memory.
        RendezvousSent = 23 => "rendezvous_sent_bytes",
        /// Bytes that this end's device has read straight from the memory of the peer's program.
        RendezvousReceived = 24 => "rendezvous_received_bytes",
        /// Bytes that this end's device has read straight into the buffer of a waiting call. They count as read from
        /// the peer's memory too.
        RendezvousLanded = 25 => "rendezvous_landed_bytes",
        /// A call's memory lay in a piece of the registered allocator that is registered with the device.
        AllocHit = 26 => "alloc_hits",
        /// A call's memory lay in a piece of the registered allocator that is not registered with the device. It is
        /// registered then if the budget has room.
        AllocMiss = 27 => "alloc_misses",
        /// Bytes of such pieces that were registered with a device.
        AllocKept = 28 => "alloc_kept_bytes",
        /// Bytes of such pieces whose registration with a device has ended.
        AllocEnded = 29 => "alloc_ended_bytes",
    }
}
