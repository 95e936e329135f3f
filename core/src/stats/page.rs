//! The owner's side of the page of counters: creates the page, and opens and closes its slots.
//!
//! The methods that count single calls are in layout.rs. The code of readers is in read.rs.

use core::ffi::c_void;
use core::mem::{offset_of, size_of};
use core::net::SocketAddr;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::time::{ClockId, clock_gettime};

use crate::os::memfd;
use crate::os::memfd::PAGE;
use crate::os::privatefd::PrivateFd;
use crate::stats::layout::{
    Direction, Event, LinkState, LinkStats, MAGIC, MEMFD_NAME, PROGRAM_MAX, Path, STREAM_SLOTS, SleeperStats,
    StatsPage, StreamStats, VERSION, bump, moved,
};
use crate::stats::reason::{Reason, Why};

/// The number of stream slots that are open in a new page.
const FIRST: u32 = 32;

/// A new stream, with both directions on TCP.
#[derive(Clone, Copy, Debug)]
pub struct StreamInfo {
    /// The program's fd.
    pub fd: i32,
    /// Whether this end called connect() or accept().
    pub direction: Direction,
    /// The local address, if it is known yet.
    pub local: Option<SocketAddr>,
    /// The peer's address, if it is known yet.
    pub peer: Option<SocketAddr>,
    /// Why the stream is on TCP, usually [`Reason::BelowThreshold`].
    pub why: Why,
}

impl StatsPage {
    /// Creates the page of an instance. `pid` is the process's pid in its own pid namespace, `instance` the random
    /// 128-bit id. The name `program` is cut after 64 bytes. The mapping is never removed. The caller keeps the fd
    /// open, so that readers can find the page. If no memfd can be made, the fd is `None`. Then the page is private
    /// memory: it counts, but no reader can find it.
    ///
    /// A fork child creates its own page. The page that it inherited still belongs to the parent.
    ///
    /// # Errors
    /// `ENOMEM` and the like if not even private memory can be mapped.
    pub fn create(
        pid: u32,
        instance: [u8; 16],
        program: &[u8],
    ) -> Result<(&'static StatsPage, Option<PrivateFd>), Errno> {
        // The file is sealed at its size, so that accesses to a reader's mapping cannot fault.
        let file = memfd::create_file(MEMFD_NAME, size_of::<StatsPage>() as u64);
        let shared = file.and_then(|fd| Ok((map(Some(fd.as_fd()))?, Some(fd))));
        let (page, fd) = match shared {
            Ok(made) => made,
            Err(_) => (map(None)?, None),
        };
        page.fill_header(pid, instance, program);
        Ok((page, fd))
    }

    fn fill_header(&self, pid: u32, instance: [u8; 16], program: &[u8]) {
        let header = &self.header;
        header.version.store(VERSION, Relaxed);
        header.pid.store(pid, Relaxed);
        header.started.store(monotonic_ns(), Relaxed);
        for (cell, byte) in header.instance.iter().zip(instance) {
            cell.store(byte, Relaxed);
        }
        for (cell, byte) in header.program.iter().zip(program) {
            cell.store(*byte, Relaxed);
        }
        let length = program.len().min(PROGRAM_MAX);
        header.program_len.store(length as u32, Relaxed);
        // Pairs with the reader's Acquire load of `magic`: a reader that sees the magic number sees the whole header.
        header.magic.store(MAGIC, Release);
    }

    /// Records that all connections are kept on TCP from now on because of `reason`.
    pub fn set_kept_on_tcp(&self, reason: Reason) {
        self.header.kept_on_tcp.store(u32::from(reason as u16), Relaxed);
    }

    /// Counts an event.
    pub fn count(&self, event: Event) {
        self.count_many(event, 1);
    }

    /// Counts an event `many` times.
    pub fn count_many(&self, event: Event, many: u64) {
        if let Some(counter) = self.header.events.get(event as usize) {
            counter.fetch_add(many, Relaxed);
        }
    }

    /// Returns how often an event has been counted.
    #[must_use]
    pub fn counted(&self, event: Event) -> u64 {
        let counter = self.header.events.get(event as usize);
        counter.map_or(0, |counter| counter.load(Relaxed))
    }

    /// Returns the slot of a stream, whether the slot is in use or not. `None` for a slot whose memory
    /// [`Self::open_stream`] has not made accessible yet, and beyond [`STREAM_SLOTS`].
    #[inline]
    #[must_use]
    pub fn stream(&self, slot: u32) -> Option<&StreamStats> {
        // Pairs with the Release in `reach`. Before that store the slot's memory may not be accessible.
        if slot >= self.header.open.load(Acquire) {
            return None;
        }
        self.streams.get(slot as usize)
    }

    /// Makes the memory of `slot` accessible, and of all slots below the next power of two, at least `FIRST` slots. The
    /// caller ensures that only one thread at a time calls this. `None` beyond [`STREAM_SLOTS`], or if the kernel
    /// refuses.
    #[cold]
    fn reach(&self, slot: u32) -> Option<()> {
        let open = (slot + 1).next_power_of_two().max(FIRST);
        if open > STREAM_SLOTS {
            return None;
        }
        open_streams(core::ptr::from_ref(self).cast_mut().cast(), open).ok()?;
        self.header.open.store(open, Release);
        Some(())
    }

    /// Returns the slot of a link, whether the slot is in use or not. `None` beyond `LINK_SLOTS`.
    #[inline]
    #[must_use]
    pub fn link(&self, slot: u32) -> Option<&LinkStats> {
        self.links.get(slot as usize)
    }

    /// Returns the entry for the threads that sleep as waiter `number`. `None` beyond `SLEEPER_SLOTS`.
    #[inline]
    #[must_use]
    pub fn sleeper(&self, number: u16) -> Option<&SleeperStats> {
        self.sleepers.get(usize::from(number))
    }

    /// Gives `slot` to a new stream, after the stream that had the slot is closed. The caller owns the slot: no other
    /// thread updates its counters meanwhile. The caller also ensures that no other thread opens or closes a slot.
    /// `None` beyond [`STREAM_SLOTS`], or if there is no memory.
    pub fn open_stream(&self, slot: u32, info: &StreamInfo) -> Option<&StreamStats> {
        if self.stream(slot).is_none() {
            self.reach(slot)?;
        }
        let stream = self.stream(slot)?;
        self.close_stream(slot);
        stream.reset(info.fd, info.direction);
        stream.set_addrs(info.local, info.peer);
        stream.set_why(info.why);
        bump(&self.header.opened, 1);
        stream.word.publish();
        Some(stream)
    }

    /// Frees `slot` and adds its counters to the totals. Has no effect if the slot is free. The caller owns the slot
    /// and ensures that no other thread opens or closes a slot, as for [`Self::open_stream`].
    pub fn close_stream(&self, slot: u32) {
        let Some(stream) = self.stream(slot).filter(|s| s.word.is_open()) else {
            return;
        };
        let header = &self.header;
        // Pairs with the Acquire fence in `StatsReader::read`: a reader that sees any of the stores below also sees
        // that a closing has begun.
        bump(&header.closings_begun, 1);
        core::sync::atomic::fence(Release);
        header.closed_tx.fold(stream.tx.load());
        header.closed_rx.fold(stream.rx.load());
        let bits = stream.moved.load(Relaxed);
        if bits & moved::PROMOTED == moved::PROMOTED {
            bump(&header.promoted, 1);
        }
        if bits & moved::DEMOTED != 0 {
            bump(&header.demoted, 1);
        }
        stream.word.free();
        // Pairs with the Acquire load of `closings_done` in `StatsReader::read`.
        let done = header.closings_done.load(Relaxed).wrapping_add(1);
        header.closings_done.store(done, Release);
    }

    /// Gives `slot` to a new link to the instance `peer`. The link is up. `peer_pid` is the pid of the peer's process
    /// as this process sees it; 0 if it is not known (another host). The caller owns the slot. `None` beyond
    /// `LINK_SLOTS`.
    pub fn open_link(&self, slot: u32, fabric: Path, peer: [u8; 16], peer_pid: u32) -> Option<&LinkStats> {
        let link = self.link(slot)?;
        link.word.free();
        link.state.store(LinkState::Up as u8, Relaxed);
        link.fabric.store(fabric as u8, Relaxed);
        link.peer_pid.store(peer_pid, Relaxed);
        link.streams.store(0, Relaxed);
        link.why.store(0, Relaxed);
        for (cell, byte) in link.peer.iter().zip(peer) {
            cell.store(byte, Relaxed);
        }
        link.word.publish();
        Some(link)
    }

    /// Frees the slot of a link.
    pub fn close_link(&self, slot: u32) {
        if let Some(link) = self.link(slot) {
            link.word.free();
        }
    }
}

/// Returns CLOCK_MONOTONIC in ns.
pub(super) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec)
        .unwrap_or(0)
        .saturating_mul(1_000_000_000)
        .saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// Maps an empty page of counters: the sealed memfd `fd`, or private memory without one. The mapping is never removed.
fn map(fd: Option<BorrowedFd<'_>>) -> Result<&'static StatsPage, Errno> {
    let length = size_of::<StatsPage>();
    // NORESERVE, because only a small part of the page is ever used.
    let flags = match fd {
        Some(_) => MapFlags::SHARED,
        None => MapFlags::PRIVATE | MapFlags::NORESERVE,
    };
    // The mapping has no access rights at first, so that mlockall(2) does not allocate slots that are never used.
    let address = memfd::map(length, ProtFlags::empty(), flags, fd)?;
    open_streams(address, FIRST)?;
    let page = NonNull::new(address.cast::<StatsPage>()).ok_or(Errno::NOMEM)?;
    // SAFETY: slots that are not open have no access rights and are never read or written: `stream` returns no
    // reference to them, and the compiler does not read an atomic before the code does. The mapping is page-aligned
    // (the type asks for 4096), as long as the type and never unmapped. It is zeroed, which is valid as all fields are
    // atomics. The memfd cannot be truncated, because it was sealed at this size before. Other processes map it
    // read-only, and all accesses are atomic.
    let page = unsafe { page.as_ref() };
    page.header.open.store(FIRST, Release);
    Ok(page)
}

/// Allows access to the page at `start` up to the end of its first `count` stream slots.
fn open_streams(start: *mut c_void, count: u32) -> Result<(), Errno> {
    let bytes = offset_of!(StatsPage, streams) + count as usize * size_of::<StreamStats>();
    // SAFETY: the range lies within the mapping that `map` has made, because `count` is at most STREAM_SLOTS. The last
    // memory page of the range belongs to the mapping too.
    unsafe { memfd::open(start, bytes.next_multiple_of(PAGE)) }
}
