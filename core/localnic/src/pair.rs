//! The memory that the two ends of a connection share: messages on their way, and who is to be woken by what completes.

use std::cell::UnsafeCell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use rdmasock_core::fabric::plugin::errno::{Errno, Result};
use rdmasock_core::fabric::plugin::host::Hidden;
use rdmasock_core::sync::{Attention, Published};
use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Bytes of a receive buffer.
pub const BUFFER_BYTES: usize = 4096 + 64;
/// Receive buffers that the peer may count on.
pub const RECEIVES: u16 = 128;
/// Receive buffers: some are still being handed over when they are granted again.
const POSTED: usize = RECEIVES as usize + 16;

/// Somebody waits for the completion descriptor.
const ARMED: u32 = 1;

/// A mapping of a memfd; not in a fork child.
#[derive(Debug)]
pub struct Shared {
    at: *mut u8,
    len: usize,
}

// SAFETY: memory; whoever accesses it does so by atomics, or under its own rules.
unsafe impl Send for Shared {}
// SAFETY: as for Send.
unsafe impl Sync for Shared {}

impl Shared {
    /// New memory, zeroed, and the file that others map it from.
    pub fn create(len: usize) -> Result<(Self, Hidden)> {
        let file = Hidden::place(rustix::fs::memfd_create("rdmasock-localnic", MemfdFlags::CLOEXEC)?)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        Ok((Self::map(file.as_fd(), len)?, file))
    }

    /// The first `len` bytes of a file, which has so many.
    pub fn map(file: BorrowedFd<'_>, len: usize) -> Result<Self> {
        if rustix::fs::fstat(file)?.st_size < len as i64 {
            return Err(Errno(libc::EPROTO));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which replaces none.
        let at = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0) }?;
        // SAFETY: the mapping that was just made. If it fails fork children have it too, and do not use it.
        let _ = unsafe { madvise(at, len, Advice::LinuxDontFork) };
        Ok(Self { at: at.cast(), len })
    }

    /// Where it begins, aligned to a page.
    pub fn at(&self) -> *mut u8 {
        self.at
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`; what refers to it borrowed this value.
        let _ = unsafe { munmap(self.at.cast(), self.len) };
    }
}

/// What arrives at one end. All zeroes: nothing.
#[repr(C, align(128))]
struct Inbox {
    /// Messages that have ever arrived.
    arrived: Published<AtomicU64>,
    /// Whether something that completes here makes the descriptor readable.
    attention: Attention,
    /// It is readable.
    fired: AtomicU32,
    _line: [u8; 112],
    /// Messages whose buffer was given back.
    taken: AtomicU64,
    _line2: [u8; 120],
    buffers: [Buffer; POSTED],
}

/// What kind of message is in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Kind {
    Message = 1,
    Immediate = 2,
}

#[repr(C, align(64))]
struct Buffer {
    kind: AtomicU32,
    len: AtomicU32,
    immediate: AtomicU32,
    bytes: UnsafeCell<[u8; BUFFER_BYTES]>,
}

#[repr(C)]
struct Memory {
    /// Not 0: the connection is over.
    over: AtomicU32,
    /// Not 0: nothing gets through any more.
    silent: AtomicU32,
    inboxes: [Inbox; 2],
}

/// Bytes of a pair's memory.
pub const BYTES: usize = size_of::<Memory>();

/// A pair's memory, as one end has it.
#[derive(Debug)]
pub struct Pair {
    memory: Shared,
    /// The index of this end's inbox.
    me: usize,
    /// What wakes this end, and the other.
    bells: [Arc<Hidden>; 2],
}

/// What has arrived.
#[derive(Debug)]
pub enum Arrived<'a> {
    /// A message.
    Message(&'a [u8]),
    /// A WRITE with an immediate has placed so many bytes.
    Immediate { immediate: u32, bytes: u32 },
}

impl Pair {
    /// Over memory of [`BYTES`]; who connects is end 0. The bells are this end's, and the other's.
    pub fn new(memory: Shared, me: usize, bells: [Arc<Hidden>; 2]) -> Result<Self> {
        if memory.len() < BYTES || me > 1 {
            return Err(Errno(libc::EPROTO));
        }
        Ok(Self { memory, me, bells })
    }

    fn memory(&self) -> &Memory {
        // SAFETY: as long, aligned to a page, and all zeroes is a value; what changes under the reference are atomics
        // and buffers, which are reached by raw pointers only.
        unsafe { &*self.memory.at().cast::<Memory>() }
    }

    fn inbox(&self, end: usize) -> &Inbox {
        let [first, second] = &self.memory().inboxes;
        if end == 0 { first } else { second }
    }

    /// The connection is over for both ends.
    pub fn end(&self) {
        self.memory().over.store(1, Release);
    }

    /// Whether either end has ended it.
    pub fn is_over(&self) -> bool {
        self.memory().over.load(Acquire) != 0
    }

    /// Nothing gets through any more, and nobody is told.
    pub fn silence(&self) {
        self.memory().silent.store(1, Release);
    }

    /// Whether that is so.
    pub fn is_silent(&self) -> bool {
        self.memory().silent.load(Acquire) != 0
    }

    /// A message for the other end, of these parts, together at most [`BUFFER_BYTES`] long (else EMSGSIZE). EPROTO if
    /// it meets no receive buffer. One caller at a time.
    pub fn deliver<'a>(&self, parts: impl Iterator<Item = &'a [u8]> + Clone) -> Result<()> {
        let len: usize = parts.clone().fold(0, |sum, part| sum.saturating_add(part.len()));
        if len > BUFFER_BYTES {
            return Err(Errno(libc::EMSGSIZE));
        }
        self.arrive(Kind::Message, len as u32, 0, |to| {
            let mut done = 0;
            for part in parts {
                // SAFETY: the sum was checked; the buffer is this end's until it has arrived.
                unsafe { to.add(done).copy_from_nonoverlapping(part.as_ptr(), part.len()) };
                done += part.len();
            }
        })
    }

    /// A WRITE with an immediate has arrived at the other end. EPROTO where it meets no receive buffer. One caller at a
    /// time.
    pub fn deliver_immediate(&self, immediate: u32, bytes: u32) -> Result<()> {
        self.arrive(Kind::Immediate, bytes, immediate, |_| {})
    }

    fn arrive(&self, kind: Kind, len: u32, immediate: u32, fill: impl FnOnce(*mut u8)) -> Result<()> {
        let inbox = self.inbox(1 - self.me);
        let number = inbox.arrived.load(Relaxed);
        if number.wrapping_sub(inbox.taken.load(Acquire)) >= POSTED as u64 {
            return Err(Errno(libc::EPROTO));
        }
        let buffer = buffer(inbox, number);
        buffer.kind.store(kind as u32, Relaxed);
        buffer.len.store(len, Relaxed);
        buffer.immediate.store(immediate, Relaxed);
        fill(buffer.bytes.get().cast());
        inbox.arrived.publish(number + 1);
        self.fire(1 - self.me);
        Ok(())
    }

    /// Hands over what has arrived here; gives how much. One caller at a time.
    pub fn take(&self, mut each: impl FnMut(Arrived<'_>)) -> usize {
        let inbox = self.inbox(self.me);
        let mut count = 0;
        loop {
            let number = inbox.taken.load(Relaxed);
            if number == inbox.arrived.look() {
                return count;
            }
            let buffer = buffer(inbox, number);
            let len = buffer.len.load(Relaxed);
            if buffer.kind.load(Relaxed) == Kind::Immediate as u32 {
                let immediate = buffer.immediate.load(Relaxed);
                each(Arrived::Immediate { immediate, bytes: len });
            } else {
                let len = (len as usize).min(BUFFER_BYTES);
                // SAFETY: within the memory; the other end does not touch the buffer before it is given back.
                let bytes = unsafe { std::slice::from_raw_parts(buffer.bytes.get().cast(), len) };
                each(Arrived::Message(bytes));
            }
            inbox.taken.store(number + 1, Release);
            count += 1;
        }
    }

    /// The next completion here makes the descriptor readable.
    pub fn arm(&self) {
        let inbox = self.inbox(self.me);
        if inbox.fired.swap(0, Acquire) != 0 {
            let _ = rustix::io::read(&*self.bells[0], &mut [0; 8]);
        }
        inbox.attention.keep_armed(ARMED);
    }

    /// Something has completed at this end.
    pub fn fire_here(&self) {
        self.fire(self.me);
    }

    fn fire(&self, end: usize) {
        let inbox = self.inbox(end);
        if inbox.attention.take() != 0 {
            let bell = &self.bells[usize::from(end != self.me)];
            let _ = rustix::io::write(&**bell, &1u64.to_ne_bytes());
            // Last: who finds it reads what was written.
            inbox.fired.store(1, Release);
        }
    }

    /// Readable when something has completed.
    pub fn bell(&self) -> &Arc<Hidden> {
        &self.bells[0]
    }
}

/// The buffer of the message with this number.
fn buffer(inbox: &Inbox, number: u64) -> &Buffer {
    let at = (&raw const inbox.buffers).cast::<Buffer>();
    // SAFETY: within the array.
    unsafe { &*at.add((number % POSTED as u64) as usize) }
}
