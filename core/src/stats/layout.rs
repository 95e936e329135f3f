//! The shared page's layout: the owner writes it, and readers of other processes read it.
//!
//! Every field is an atomic. So all-zero memory is a valid empty page, and both sides may access it at any time. A
//! change of layout changes [`VERSION`].

use core::mem::size_of;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicI32, AtomicU8, AtomicU16, AtomicU32, AtomicU64, fence};

use super::codes::{Direction, EVENTS, LINK_SLOTS, LinkState, Path, SLEEPER_SLOTS, STREAM_SLOTS};
use super::reason::Why;
use super::sleepers::{SleeperStats, Waiting};

/// "rdmastat", read as a little-endian number.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"rdmastat");
/// Version of this layout.
pub(super) const VERSION: u32 = 6;
/// Bytes of the program's name that are kept, at most.
pub(super) const PROGRAM_MAX: usize = 64;

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
    pub header_size: AtomicU32,
    pub link_size: AtomicU32,
    pub link_slots: AtomicU32,
    pub sleeper_size: AtomicU32,
    pub sleeper_slots: AtomicU32,
    pub stream_size: AtomicU32,
    pub stream_slots: AtomicU32,
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
pub(super) struct Counters {
    pub tcp_bytes: AtomicU64,
    pub tcp_calls: AtomicU64,
    pub link_bytes: AtomicU64,
    pub link_calls: AtomicU64,
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
    pub fn load(&self) -> Counts {
        Counts {
            tcp_bytes: self.tcp_bytes.load(Relaxed),
            tcp_calls: self.tcp_calls.load(Relaxed),
            link_bytes: self.link_bytes.load(Relaxed),
            link_calls: self.link_calls.load(Relaxed),
        }
    }

    pub fn clear(&self) {
        for counter in [&self.tcp_bytes, &self.tcp_calls, &self.link_bytes, &self.link_calls] {
            counter.store(0, Relaxed);
        }
    }

    /// Adds `counts` to the totals.
    pub fn fold(&self, counts: Counts) {
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
    pub fn is_open(&self) -> bool {
        self.0.load(Relaxed) & Self::OPEN != 0
    }

    /// Makes the slot visible, after its fields are written.
    pub fn publish(&self) {
        let next = (self.0.load(Relaxed) | Self::OPEN).wrapping_add(2);
        // Pairs with the Acquire load in `copy`.
        self.0.store(next, Release);
    }

    /// Frees the slot; fields may be rewritten afterwards.
    pub fn free(&self) {
        self.0.store(self.0.load(Relaxed) & !Self::OPEN, Relaxed);
        // Pairs with the Acquire fence in `copy`: a reader that sees a later field sees the free slot.
        fence(Release);
    }

    /// Runs `copy` if the slot is in use. Returns its result, `None` if the slot was not in use all the time.
    pub fn copy<T>(&self, copy: impl FnOnce() -> T) -> Option<T> {
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
    pub fn store(&self, addr: Option<SocketAddr>) {
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
    pub fn load(&self) -> Option<SocketAddr> {
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
    /// Sets that the link is up.
    pub fn set_up(&self) {
        self.state.store(LinkState::Up as u8, Relaxed);
    }

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
    pub(super) tx: Counters,
    pub(super) word: SlotWord,
    pub(super) fd: AtomicI32,
    pub(super) direction: AtomicU8,
    pub(super) tx_path: AtomicU8,
    pub(super) rx_path: AtomicU8,
    pub(super) moved: AtomicU8,
    pub(super) local: AddrCell,

    pub(super) rx: Counters,
    pub(super) peer: AddrCell,
    /// Slot of the link plus one; 0 is none.
    pub(super) link: AtomicU32,
    pub(super) why: AtomicU32,
    /// The waiters that events wake: `sleeper` for the thread that sleeps in a call or in poll, `set` for the epoll
    /// set.
    pub(super) sleeper: AtomicU16,
    pub(super) set: AtomicU16,
}

/// Bits of [`StreamStats::moved`]: the moves of the stream so far.
pub(super) mod moved {
    pub const TX: u8 = 1;
    pub const RX: u8 = 2;
    /// Both directions have been on a link.
    pub const PROMOTED: u8 = TX | RX;
    pub const DEMOTED: u8 = 4;
}

impl StreamStats {
    /// Counts a call that sent `bytes` over TCP. One sender at a time.
    #[inline]
    pub fn add_tx_tcp(&self, bytes: u64) {
        bump(&self.tx.tcp_bytes, bytes);
        bump(&self.tx.tcp_calls, 1);
    }

    /// Counts a call that sent `bytes` over the link. One sender at a time.
    #[inline]
    pub fn add_tx_link(&self, bytes: u64) {
        bump(&self.tx.link_bytes, bytes);
        bump(&self.tx.link_calls, 1);
    }

    /// Returns how many bytes were sent over links.
    #[inline]
    pub fn sent_on_link(&self) -> u64 {
        self.tx.link_bytes.load(Relaxed)
    }

    /// Returns the counters of the sending direction.
    #[must_use]
    pub fn sent(&self) -> Counts {
        self.tx.load()
    }

    /// Returns the counters of the receiving direction.
    #[must_use]
    pub fn received(&self) -> Counts {
        self.rx.load()
    }

    /// Moves `bytes` from the link's counter to TCP's: they were sent over a link, not read there, and go over TCP now.
    pub fn move_tx_to_tcp(&self, bytes: u64) {
        let moved = bytes.min(self.tx.link_bytes.load(Relaxed));
        bump(&self.tx.link_bytes, moved.wrapping_neg());
        bump(&self.tx.tcp_bytes, moved);
    }

    /// Sets the waiters that are woken when data comes, or room.
    pub fn set_waiting(&self, sleeper: Waiting, set: Waiting) {
        self.sleeper.store(sleeper.to_word(), Relaxed);
        self.set.store(set.to_word(), Relaxed);
    }

    /// Counts a call that received `bytes` over TCP. One receiver at a time.
    #[inline]
    pub fn add_rx_tcp(&self, bytes: u64) {
        bump(&self.rx.tcp_bytes, bytes);
        bump(&self.rx.tcp_calls, 1);
    }

    /// Counts a call that received `bytes` over the link. One receiver at a time.
    #[inline]
    pub fn add_rx_link(&self, bytes: u64) {
        bump(&self.rx.link_bytes, bytes);
        bump(&self.rx.link_calls, 1);
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
        self.set_waiting(Waiting::Nobody, Waiting::Nobody);
    }
}

const _: () = assert!(size_of::<StreamStats>() == 128 && size_of::<LinkStats>() == 64);
const _: () = assert!(size_of::<Header>() == 4096);
