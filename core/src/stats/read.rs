//! The reader's side: finds the counter pages of running instances by the links of `/proc/<pid>/fd`, and copies them.
//!
//! This file may use std::fs, because it runs in tools and tests, never in the preloaded library. The contents of a
//! page are not trusted. Sizes are checked, unknown codes are reported as such, and control characters in text are
//! replaced.

use core::mem::{offset_of, size_of};
use core::net::SocketAddr;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use core::time::Duration;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::{fs, io, path};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use thiserror::Error;

use crate::os::memfd;
use crate::os::memfd::{Access, MapError, Mapping};
use crate::stats::layout::{
    Counts, Direction, EVENTS, Event, LinkState, LinkStats, MAGIC, MEMFD_NAME, Path, SleeperSnapshot, StatsPage,
    StreamStats, VERSION, moved,
};
use crate::stats::page::monotonic_ns;
use crate::stats::reason::{Reason, Why};

/// The most copies of the page that a reader makes. It repeats a copy during which streams were closed.
const ATTEMPTS: u32 = 8;

/// Why a page cannot be read.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The file cannot be opened or mapped.
    #[error("cannot open it: {0}")]
    Io(#[from] io::Error),
    /// The file is not a counter page, or is not safe to map.
    #[error("not a counter page: {0}")]
    NotAPage(&'static str),
    /// The process that owns the page runs another version of the library.
    #[error("counter page of version {0}, this command reads version {VERSION}")]
    Version(u32),
}

impl From<Errno> for ReadError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// A running process that has the library.
#[derive(Clone, Debug)]
pub struct Process {
    /// Pid as the calling process sees it.
    pub pid: u32,
    /// Real uid, as the kernel reports it.
    pub uid: u32,
    /// The counters of its instance.
    pub instance: InstanceSnapshot,
}

/// A copy of an instance's counters.
#[derive(Clone, Debug)]
pub struct InstanceSnapshot {
    /// The owner's pid in its own pid namespace.
    pub pid: u32,
    /// Program name, printable.
    pub program: String,
    /// Instance id.
    pub id: [u8; 16],
    /// Time since the start of the instance.
    pub uptime: Duration,
    /// Why all connections of the instance are kept on TCP: a [`Reason`], or a code that this version does not know.
    /// `None` if they are not kept on TCP.
    pub kept_on_tcp: Option<Result<Reason, u16>>,
    /// Sums over all streams of the instance, including closed ones.
    pub totals: Totals,
    /// Links in use, by slot.
    pub links: Vec<LinkSnapshot>,
    /// Open streams, by slot.
    pub streams: Vec<StreamSnapshot>,
    /// Threads that sleep until data comes over a link, or until there is room on it.
    pub sleepers: Vec<SleeperSnapshot>,
    events: [u64; EVENTS],
}

impl InstanceSnapshot {
    /// Returns how often `event` has happened.
    #[must_use]
    pub fn count(&self, event: Event) -> u64 {
        self.events.get(event as usize).copied().unwrap_or(0)
    }

    /// Returns the sleepers that wait for `stream`: in a call on the stream, or as a waiter that the stream's events
    /// wake.
    pub fn asleep_on(&self, stream: &StreamSnapshot) -> impl Iterator<Item = &SleeperSnapshot> {
        let (slot, sleeper, set) = (stream.slot, stream.sleeper, stream.set);
        self.sleepers.iter().filter(move |s| match s.stream {
            Some(of) => of == slot,
            None => [sleeper, set].contains(&Some(s.waiter)),
        })
    }
}

/// Sums over the open and the closed streams of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes and calls that sent.
    pub tx: Counts,
    /// Bytes and calls that received.
    pub rx: Counts,
    /// Streams that had both directions on a link.
    pub promoted: u64,
    /// Streams that had a direction moved back to TCP.
    pub demoted: u64,
    /// Streams opened.
    pub streams: u64,
}

/// A copy of a link's entry.
#[derive(Clone, Copy, Debug)]
pub struct LinkSnapshot {
    /// The slot of the link; streams refer to it.
    pub slot: u32,
    /// The peer's instance id.
    pub peer: [u8; 16],
    /// The peer's pid as the owner of the page sees it; 0 if it is not known.
    pub peer_pid: u32,
    /// The fabric of the link; `None` for a code that this version does not know.
    pub fabric: Option<Path>,
    /// The state of the link; `None` for an unknown code.
    pub state: Option<LinkState>,
    /// The number of streams on the link.
    pub streams: u32,
    /// Why the link is down; the code if this version does not know it.
    pub why: Result<Why, u16>,
}

/// A copy of an open stream's entry.
#[derive(Clone, Copy, Debug)]
pub struct StreamSnapshot {
    /// The slot of the stream; sleepers refer to it.
    pub slot: u32,
    /// The program's fd.
    pub fd: i32,
    /// Whether this end called connect() or accept(); `None` for an unknown code.
    pub direction: Option<Direction>,
    /// Local address.
    pub local: Option<SocketAddr>,
    /// The peer's address.
    pub peer: Option<SocketAddr>,
    /// The path of the sending direction; `None` for an unknown code.
    pub tx_path: Option<Path>,
    /// The path of the receiving direction; `None` for an unknown code.
    pub rx_path: Option<Path>,
    /// Why a direction is on TCP; the code if this version does not know it.
    pub why: Result<Why, u16>,
    /// The slot of the link that carries the stream.
    pub link: Option<u32>,
    /// Bytes and calls that sent.
    pub tx: Counts,
    /// Bytes and calls that received.
    pub rx: Counts,
    /// Both directions have been on a link.
    pub promoted: bool,
    /// A direction was moved back to TCP.
    pub demoted: bool,
    /// The waiter of a thread in a call or in poll. It is woken when the link has data or room for the stream.
    pub sleeper: Option<u16>,
    /// The waiter of an epoll set. It is woken when the link has data or room for the stream.
    pub set: Option<u16>,
}

impl StreamSnapshot {
    /// Returns true if at least one direction is on TCP, so that [`Self::why`] has a meaning.
    #[must_use]
    pub fn is_on_tcp(&self) -> bool {
        [self.tx_path, self.rx_path].contains(&Some(Path::Tcp))
    }
}

/// The counter page of another process. It stays mapped, read-only, until this value is dropped.
#[derive(Debug)]
pub struct StatsReader {
    page: Mapping,
    file: File,
}

impl StatsReader {
    /// Opens the page behind `path`, a link of `/proc/<pid>/fd`.
    ///
    /// # Errors
    /// The caller has no permission, or the file is gone. Or the file is not a counter page, or a counter page of
    /// another version.
    pub fn open(path: &path::Path) -> Result<Self, ReadError> {
        let file = fs::OpenOptions::new()
            .read(true)
            // O_NONBLOCK: the link may lead to a FIFO by now, whose open must not block.
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        let bytes = size_of::<StatsPage>() as u64;
        let page = memfd::map_received(file.as_fd(), bytes, Access::ReadOnly).map_err(|error| match error {
            MapError::Kernel(errno) => errno.into(),
            MapError::Size => ReadError::NotAPage("size differs"),
            // Without the seals the owner could truncate the file while it is mapped here: SIGBUS.
            MapError::NotMemfd | MapError::NotSealed => ReadError::NotAPage("not sealed"),
        })?;
        let reader = Self { page, file };
        let header = &reader.page().header;
        // Pairs with the Release store at the end of `StatsPage::fill_header`.
        if header.magic.load(Acquire) != MAGIC {
            return Err(ReadError::NotAPage("no magic number (yet)"));
        }
        match header.version.load(Relaxed) {
            VERSION => Ok(reader),
            other => Err(ReadError::Version(other)),
        }
    }

    fn page(&self) -> &StatsPage {
        // SAFETY: the mapping lives as long as `self`, is page-aligned and has the type's size. Every bit pattern is
        // valid. Every field is an atomic, and this process only loads it.
        unsafe { &*self.page.as_ptr().cast() }
    }

    /// Returns the owner's pid in its own pid namespace.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.page().header.pid.load(Relaxed)
    }

    /// Copies all slots in use.
    ///
    /// # Errors
    /// The kernel does not report which parts of the file have memory.
    pub fn read(&self) -> Result<InstanceSnapshot, ReadError> {
        let header = &self.page().header;
        for _ in 1..ATTEMPTS {
            let begun = header.closings_begun.load(Acquire);
            // Pairs with the Release at the end of `close_stream`.
            let done = header.closings_done.load(Acquire);
            let snapshot = self.copy()?;
            core::sync::atomic::fence(Acquire);
            if begun == done && header.closings_begun.load(Relaxed) == begun {
                return Ok(snapshot);
            }
        }
        // Streams were closed during each copy. In this last copy the sums may lack a stream, or count it twice.
        self.copy()
    }

    fn copy(&self) -> Result<InstanceSnapshot, ReadError> {
        let page = self.page();
        let header = &page.header;
        let mut totals = Totals {
            tx: header.closed_tx.load(),
            rx: header.closed_rx.load(),
            promoted: header.promoted.load(Relaxed),
            demoted: header.demoted.load(Relaxed),
            streams: header.opened.load(Relaxed),
        };
        let mut links = Vec::new();
        let mut streams = Vec::new();
        let mut sleepers = Vec::new();
        let now = monotonic_ns();
        for extent in self.extents()? {
            let offset = offset_of!(StatsPage, links);
            links.extend(slots(&page.links, offset, &extent).filter_map(|(slot, link)| copy_link(slot, link)));
            let offset = offset_of!(StatsPage, sleepers);
            let asleep = slots(&page.sleepers, offset, &extent);
            sleepers.extend(asleep.filter_map(|(slot, s)| s.copy(u16::try_from(slot).ok()?, now)));
            let offset = offset_of!(StatsPage, streams);
            let open = slots(&page.streams, offset, &extent);
            streams.extend(open.filter_map(|(slot, stream)| copy_stream(slot, stream)));
        }
        streams.iter().for_each(|stream| totals.add(stream));
        let length = header.program_len.load(Relaxed) as usize;
        let program: Vec<u8> = header.program.iter().take(length).map(|b| b.load(Relaxed)).collect();
        let started = header.started.load(Relaxed);
        // The field holds a u16 code.
        let kept = header.kept_on_tcp.load(Relaxed) as u16;
        Ok(InstanceSnapshot {
            pid: self.pid(),
            program: printable(&program),
            id: header.instance.each_ref().map(|b| b.load(Relaxed)),
            uptime: Duration::from_nanos(now.saturating_sub(started)),
            kept_on_tcp: (kept != Reason::None as u16).then(|| Reason::from_code(kept).ok_or(kept)),
            totals,
            links,
            streams,
            sleepers,
            events: header.events.each_ref().map(|e| e.load(Relaxed)),
        })
    }

    /// Returns the parts of the file that have memory, as ranges of bytes. Only these parts are read, because a read of
    /// a hole through a mapping would allocate memory for it.
    fn extents(&self) -> Result<Vec<core::ops::Range<u64>>, ReadError> {
        let mut extents = Vec::new();
        let mut at = 0;
        loop {
            let start = match seek(&self.file, SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(Errno::NXIO) => return Ok(extents),
                Err(errno) => return Err(errno.into()),
            };
            at = seek(&self.file, SeekFrom::Hole(start))?;
            extents.push(start..at);
        }
    }
}

/// Returns the slots of `table`, which begins at `offset` in the file, that lie within `extent`. `extent` begins and
/// ends at a page border, and no slot crosses one.
fn slots<'a, T>(table: &'a [T], offset: usize, extent: &core::ops::Range<u64>) -> impl Iterator<Item = (u32, &'a T)> {
    let index = |at: u64| {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        (at.saturating_sub(offset) / size_of::<T>()).min(table.len())
    };
    let range = index(extent.start)..index(extent.end);
    let first = u32::try_from(range.start).unwrap_or(u32::MAX);
    (first..).zip(table.get(range).unwrap_or_default())
}

fn copy_link(slot: u32, link: &LinkStats) -> Option<LinkSnapshot> {
    link.word.copy(|| LinkSnapshot {
        slot,
        peer: link.peer.each_ref().map(|b| b.load(Relaxed)),
        peer_pid: link.peer_pid.load(Relaxed),
        fabric: Path::from_code(link.fabric.load(Relaxed)),
        state: LinkState::from_code(link.state.load(Relaxed)),
        streams: link.streams.load(Relaxed),
        why: Why::from_bits(link.why.load(Relaxed)),
    })
}

fn copy_stream(slot: u32, stream: &StreamStats) -> Option<StreamSnapshot> {
    stream.word.copy(|| {
        let bits = stream.moved.load(Relaxed);
        StreamSnapshot {
            slot,
            fd: stream.fd.load(Relaxed),
            direction: Direction::from_code(stream.direction.load(Relaxed)),
            local: stream.local.load(),
            peer: stream.peer.load(),
            tx_path: Path::from_code(stream.tx_path.load(Relaxed)),
            rx_path: Path::from_code(stream.rx_path.load(Relaxed)),
            why: Why::from_bits(stream.why.load(Relaxed)),
            link: stream.link.load(Relaxed).checked_sub(1),
            tx: stream.tx.load(),
            rx: stream.rx.load(),
            promoted: bits & moved::PROMOTED == moved::PROMOTED,
            demoted: bits & moved::DEMOTED != 0,
            sleeper: stream.sleeper.load(Relaxed).checked_sub(1),
            set: stream.set.load(Relaxed).checked_sub(1),
        }
    })
}

impl Totals {
    fn add(&mut self, stream: &StreamSnapshot) {
        self.tx.add(stream.tx);
        self.rx.add(stream.rx);
        self.promoted = self.promoted.saturating_add(u64::from(stream.promoted));
        self.demoted = self.demoted.saturating_add(u64::from(stream.demoted));
    }
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.tcp_bytes = self.tcp_bytes.saturating_add(other.tcp_bytes);
        self.tcp_calls = self.tcp_calls.saturating_add(other.tcp_calls);
        self.link_bytes = self.link_bytes.saturating_add(other.link_bytes);
        self.link_calls = self.link_calls.saturating_add(other.link_calls);
    }
}

/// Returns text of another process with its control characters replaced, fit for a terminal.
fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .collect()
}

/// Returns all instances that the caller may read, in the order of their pids. Root may read the instances of all
/// users, other users their own.
///
/// # Errors
/// `/proc` cannot be listed. Processes that end meanwhile, or that the caller may not read, are left out without an
/// error.
pub fn instances() -> io::Result<Vec<Process>> {
    let mut pids: Vec<u32> = fs::read_dir("/proc")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    Ok(pids
        .into_iter()
        .filter_map(|pid| instance_of(pid).ok().flatten())
        .collect())
}

/// Returns the instance of process `pid`. `None` if the process runs without the library.
///
/// # Errors
/// There is no such process, the caller may not read its fds, or its page cannot be read.
pub fn instance_of(pid: u32) -> Result<Option<Process>, ReadError> {
    let link_text = format!("/memfd:{MEMFD_NAME}");
    let links: Vec<PathBuf> = descriptors(pid)?
        .into_iter()
        .filter(|path| {
            fs::read_link(path).is_ok_and(|to| to.to_string_lossy().trim_end_matches(" (deleted)") == link_text)
        })
        .collect();
    if links.is_empty() {
        return Ok(None);
    }
    let (uid, own_pid) = identity(pid)?;
    let mut failure = None;
    for link in links {
        match StatsReader::open(&link) {
            // A fork child may still have its parent's page open. That page has the parent's pid.
            Ok(reader) if reader.pid() != own_pid => {}
            Ok(reader) => {
                let mut instance = reader.read()?;
                name_threads(&mut instance.sleepers, pid, own_pid);
                return Ok(Some(Process { pid, uid, instance }));
            }
            Err(error) => failure = Some(error),
        }
    }
    failure.map_or(Ok(None), Err)
}

/// Translates the sleepers' thread ids into the pid namespace of the calling process. `own_pid` is the pid of process
/// `pid` in its own namespace. Removes sleepers whose thread has ended in its sleep.
fn name_threads(sleepers: &mut Vec<SleeperSnapshot>, pid: u32, own_pid: u32) {
    let task = format!("/proc/{pid}/task");
    if pid == own_pid {
        return sleepers.retain(|s| {
            let is_there = |t| path::Path::new(&task).join(u32::to_string(&t)).exists();
            s.thread.is_none_or(is_there)
        });
    }
    let threads = fs::read_dir(task).into_iter().flatten().filter_map(|t| {
        let t: u32 = t.ok()?.file_name().to_str()?.parse().ok()?;
        Some((identity(t).ok()?.1, t))
    });
    let names: HashMap<u32, u32> = threads.collect();
    sleepers.retain_mut(|s| {
        let Some(own) = s.thread else { return true };
        s.thread = names.get(&own).copied();
        s.thread.is_some()
    });
}

/// Returns the links of a process's open fds. If its main thread has ended before other threads, `/proc/<pid>/fd` is
/// empty. Then the links of another thread are returned.
fn descriptors(pid: u32) -> io::Result<Vec<PathBuf>> {
    let list = |of: PathBuf| -> io::Result<Vec<PathBuf>> {
        let entries = fs::read_dir(of)?;
        Ok(entries.filter_map(|e| Some(e.ok()?.path())).collect())
    };
    let own = list(format!("/proc/{pid}/fd").into())?;
    if !own.is_empty() {
        return Ok(own);
    }
    let threads = list(format!("/proc/{pid}/task").into())?;
    let theirs = threads.into_iter().filter_map(|t| list(t.join("fd")).ok());
    Ok(theirs.into_iter().find(|l| !l.is_empty()).unwrap_or_default())
}

/// Returns the real uid of a process, and its pid in its own (the innermost) pid namespace.
fn identity(pid: u32) -> io::Result<(u32, u32)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let uid = field("Uid:").and_then(|ids| ids.split_whitespace().next()?.parse().ok());
    let inner = field("NSpid:").and_then(|pids| pids.split_whitespace().last()?.parse().ok());
    let uid = uid.ok_or_else(|| io::Error::other("no Uid in its status"))?;
    Ok((uid, inner.unwrap_or(pid)))
}
