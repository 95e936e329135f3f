//! The layout of the shared page of counters. The owner's process writes the page, and other processes read it.
//!
//! Every field is an atomic. So all-zero memory is a valid empty page, and both sides may access it at any time. A
//! change of layout changes [`VERSION`]. The name of the memfd and the sizes of the tables are here too, and all codes
//! except the codes of `Reason`.

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
/// The longest name of a program in bytes. Longer names are cut.
pub(super) const PROGRAM_MAX: usize = 64;

/// Name of the memfd; the link in `/proc/<pid>/fd` reads `/memfd:rdmasock-stats (deleted)`.
pub const MEMFD_NAME: &str = "rdmasock-stats";
/// The most streams that an instance can list at a time. Further streams are not listed.
pub const STREAM_SLOTS: u32 = 65_536;
/// The most links that an instance can list at a time.
pub const LINK_SLOTS: u32 = 1_024;
/// The number of entries for sleeping threads: one for each waiter.
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
    /// The start of the instance: CLOCK_MONOTONIC, ns.
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
    /// Sums over closed streams, of the sending and of the receiving directions.
    pub closed_tx: Counters,
    pub closed_rx: Counters,
    /// The number of streams whose closing has begun, and has ended. If neither changes while a reader copies the page,
    /// and both are equal, the totals and the open streams of the copy fit together.
    pub closings_begun: AtomicU64,
    pub closings_done: AtomicU64,
    /// Why all connections are kept on TCP, as the code of a `Reason`; 0 if they are not.
    pub kept_on_tcp: AtomicU32,
    /// The number of stream slots whose memory is accessible in the owner's mapping. Only the owner uses this field.
    pub open: AtomicU32,
}

/// The four counters of one direction of a stream. One thread at a time writes them.
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
    /// Counts a call that moved `bytes` over TCP. One thread at a time may call this.
    #[inline]
    pub fn add_tcp(&self, bytes: u64) {
        bump(&self.tcp_bytes, bytes);
        bump(&self.tcp_calls, 1);
    }

    /// Counts a call that moved `bytes` over the link. One thread at a time may call this.
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

    /// Adds `counts` to these counters, which are the totals of closed streams.
    pub(super) fn fold(&self, counts: Counts) {
        bump(&self.tcp_bytes, counts.tcp_bytes);
        bump(&self.tcp_calls, counts.tcp_calls);
        bump(&self.link_bytes, counts.link_bytes);
        bump(&self.link_calls, counts.link_calls);
    }
}

/// Adds `by` to `counter` without an atomic read-modify-write. The caller is the only writer of `counter`.
#[inline]
pub(super) fn bump(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}

/// The state of a slot: whether it is in use (bit 0), and a generation (the other bits). If the word is the same before
/// and after a reader copies the slot, the slot belonged to one stream or link all the time. This is a seqlock whose
/// "being written" state is "free".
#[repr(transparent)]
#[derive(Debug)]
pub(super) struct SlotWord(AtomicU32);

impl SlotWord {
    const OPEN: u32 = 1;

    /// Returns whether the slot is in use.
    pub(super) fn is_open(&self) -> bool {
        self.0.load(Relaxed) & Self::OPEN != 0
    }

    /// Marks the slot as in use, with a new generation. Its fields have been written before.
    pub(super) fn publish(&self) {
        let next = (self.0.load(Relaxed) | Self::OPEN).wrapping_add(2);
        // Pairs with the Acquire load in `copy`.
        self.0.store(next, Release);
    }

    /// Marks the slot as free. Afterwards its fields may be written.
    pub(super) fn free(&self) {
        self.0.store(self.0.load(Relaxed) & !Self::OPEN, Relaxed);
        // Pairs with the Acquire fence in `copy`: a reader that sees a field which was written later also sees that the
        // slot is free.
        fence(Release);
    }

    /// Runs `copy` if the slot is in use, and returns its result. `None` if the slot was free at the beginning, or
    /// freed meanwhile.
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

/// An IP address with its port, or no address.
#[repr(C)]
#[derive(Debug)]
pub(super) struct AddrCell {
    /// 4 for IPv4, 6 for IPv6; 0 if there is no address.
    family: AtomicU16,
    port: AtomicU16,
    /// The address in network byte order. An IPv4 address is in the first word.
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

    /// Returns the address. `None` if there is none, or if its family is not known.
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
    /// Records that the link is down because of `why`. The link stays listed until its slot is freed.
    pub fn set_down(&self, why: impl Into<Why>) {
        self.why.store(why.into().to_bits(), Relaxed);
        self.state.store(LinkState::Down as u8, Relaxed);
    }

    /// Sets how many streams are on the link.
    pub fn set_streams(&self, streams: u32) {
        self.streams.store(streams, Relaxed);
    }
}

/// An open stream of the instance. The counters of sends are in the first cache line and the counters of receives in
/// the second, because two threads may send and receive at the same time. Fields that change rarely fill the rest of
/// both lines.
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
    /// The slot of the link that carries the stream, plus one. 0: there is no link.
    pub(super) link: AtomicU32,
    pub(super) why: AtomicU32,
    /// The numbers of the waiters that are woken when the link has data or room for the stream, plus one; 0 is none.
    /// `sleeper` is the waiter of a thread in a call or in poll, `set` the waiter of an epoll set.
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

    /// Moves `bytes` from the counter of the link to the counter of TCP. These bytes were sent over a link, but not
    /// read there, and are sent again over TCP.
    pub fn move_tx_to_tcp(&self, bytes: u64) {
        let moved = bytes.min(self.tx.link_bytes.load(Relaxed));
        bump(&self.tx.link_bytes, moved.wrapping_neg());
        bump(&self.tx.tcp_bytes, moved);
    }

    /// Sets the numbers of the waiters that are woken when the link has data or room for the stream. `sleeper` is the
    /// waiter of a thread, `set` the waiter of an epoll set.
    pub fn set_waiting(&self, sleeper: Option<u16>, set: Option<u16>) {
        for (word, number) in [(&self.sleeper, sleeper), (&self.set, set)] {
            word.store(number.map_or(0, |number| number.saturating_add(1)), Relaxed);
        }
    }

    /// Sets the path of the sending direction.
    pub fn set_tx_path(&self, path: Path) {
        self.note_move(self.tx_path.swap(path as u8, Relaxed), path, moved::TX);
    }

    /// Sets the path of the receiving direction.
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

    /// Sets why the stream is on TCP. Readers show this only while a direction is on TCP.
    pub fn set_why(&self, why: impl Into<Why>) {
        self.why.store(why.into().to_bits(), Relaxed);
    }

    /// Returns why the stream is on TCP.
    ///
    /// # Errors
    /// The code of the reason, if this version does not know it.
    pub fn why(&self) -> Result<Why, u16> {
        Why::from_bits(self.why.load(Relaxed))
    }

    /// Sets the slot of the link that carries the stream; `None` if no link does.
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
    /// When the sleep began: CLOCK_MONOTONIC, ns. A value of CLOCK_MONOTONIC_COARSE is precise enough.
    pub since: u64,
    /// For a sender: the number of bytes that its reader has not read.
    pub unread: u64,
}

/// The threads that sleep as one waiter: in which call, and since when. Only the waiter of an epoll set can have
/// several threads at a time. Then all fields except `count` describe the thread that went to sleep last.
///
/// A thread updates this entry when it is about to sleep until a link has data or room, and when it is awake again.
/// Threads that sleep in the kernel's own calls on TCP have no entry, because the kernel reports them.
#[repr(C, align(32))]
#[derive(Debug)]
pub struct SleeperStats {
    since: AtomicU64,
    unread: AtomicU64,
    /// The id of the thread that went to sleep last. 0 if that thread is awake again.
    thread: AtomicU32,
    /// The slot of the stream that the call is on, plus one; 0 is none.
    stream: AtomicU32,
    count: AtomicU16,
    call: AtomicU8,
}

// No entry crosses the border of a memory page, because a reader reads only pages that have memory.
const _: () = assert!(size_of::<SleeperStats>() == 32);
const _: () = assert!((SLEEPER_SLOTS as usize * size_of::<SleeperStats>()).is_multiple_of(4096));

impl SleeperStats {
    /// Notes that the thread `asleep` is about to sleep.
    pub fn begin(&self, asleep: &Asleep) {
        self.since.store(asleep.since, Relaxed);
        self.unread.store(asleep.unread, Relaxed);
        self.thread.store(asleep.thread, Relaxed);
        let stream = asleep.stream.map_or(0, |slot| slot.saturating_add(1));
        self.stream.store(stream, Relaxed);
        self.call.store(asleep.call as u8, Relaxed);
        // Pairs with the Acquire in `copy`: a reader that sees the new count also sees the fields above.
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
    /// The thread that went to sleep last; `None` if that thread is awake again.
    pub thread: Option<u32>,
    /// The call that the thread sleeps in; `None` for a code that this version does not know.
    pub call: Option<Call>,
    /// The slot of the stream that the call is on; `None` for poll and epoll sets.
    pub stream: Option<u32>,
    /// How long the thread has slept.
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
    /// Which end of the TCP connection the stream is.
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
        /// The link failed, or the peer closed it. `LinkStats` has the reason.
        Down = 2 => "down",
    }
}

codes! {
    /// An event that is counted for the whole instance. The text is the name of its counter in JSON.
    pub enum Event: usize {
        /// An ASK was sent.
        Ask = 0 => "asks",
        /// A YES came back.
        Yes = 1 => "yes",
        /// A NO came back.
        No = 2 => "no",
        /// A peer did not carry out a step of a handshake in time.
        HandshakeTimeout = 3 => "timeouts",
        /// A peer broke the protocol, on a link or with a question. The channel was closed, or the message ignored.
        LinkViolation = 4 => "violations",
        /// A question about a connection went to another host. The question counts once, however often it was repeated.
        ControlAsk = 5 => "control_asks",
        /// A question from another host was answered YES or NO.
        ControlAnswer = 6 => "control_answers",
        /// A question from another host was passed on to the service names of this host.
        ControlRelay = 7 => "control_relays",
        /// A host did not answer, or no instance listens there. The host is not asked again for a while.
        ControlAbsent = 8 => "control_absent",
        /// A question came without a valid stamp of this instance, and a stamp was sent back.
        ControlStamp = 9 => "control_stamps",
        /// The control port could not be bound.
        ControlUnbound = 10 => "control_unbound",
        /// A datagram was refused: it does not have the length that all datagrams have.
        ControlLength = 11 => "control_refused_length",
        /// A datagram was refused: it is of another version of the protocol.
        ControlVersion = 12 => "control_refused_version",
        /// A datagram was refused: it could not be decoded, or an honest peer would not send it now.
        ControlKind = 13 => "control_refused_kind",
        /// A datagram was refused: its HMAC is wrong or missing, or it has an HMAC and this instance has no secret.
        ControlMac = 14 => "control_refused_hmac",
        /// A datagram was refused: it answers no question of this instance, or it asks about a connection from an
        /// address that is not the connection's.
        ControlMisplaced = 15 => "control_refused_misplaced",
        /// A datagram was refused: its question has ended, or the same question came before with other contents.
        ControlReplay = 16 => "control_refused_replay",
        /// A datagram was refused: too many came.
        ControlRate = 17 => "control_refused_rate",
        /// A bulk queue pair between hosts was lost while direct transfers were under way. The rest of their bytes went
        /// by rings.
        BulkLost = 18 => "bulk_lost",
        /// Bytes that this end's device was given to send straight from the program's memory.
        DirectSent = 19 => "direct_sent_bytes",
        /// Bytes that the peer's device has written straight into the program's memory.
        DirectReceived = 20 => "direct_received_bytes",
        /// The memory of a call was not registered: it would have exceeded half of the memlock limit, or the device
        /// refused it. The bytes went by rings.
        DirectUnpinned = 21 => "direct_unpinned",
        /// Memory of the program was registered with a device: a call's buffer, or a piece of the registered
        /// allocator's memory.
        DirectRegistered = 22 => "direct_registrations",
        /// Bytes that the peer's device has read straight from the program's memory.
        RendezvousSent = 23 => "rendezvous_sent_bytes",
        /// Bytes that this end's device has read straight from the memory of the peer's program.
        RendezvousReceived = 24 => "rendezvous_received_bytes",
        /// Bytes that this end's device has read straight into the buffer of a waiting call. `RendezvousReceived`
        /// counts them too.
        RendezvousLanded = 25 => "rendezvous_landed_bytes",
        /// The buffer of a call lay in a piece of the registered allocator's memory that is registered with the device.
        AllocHit = 26 => "alloc_hits",
        /// The buffer of a call lay in a piece of the registered allocator's memory that was not registered with the
        /// device. The piece is registered then, if the budget has room.
        AllocMiss = 27 => "alloc_misses",
        /// Bytes of the registered allocator's pieces that were registered with a device.
        AllocKept = 28 => "alloc_kept_bytes",
        /// Bytes of the registered allocator's pieces whose registration with a device has ended.
        AllocEnded = 29 => "alloc_ended_bytes",
    }
}
