//! The memory that the two ends of a connection share: messages in flight, and which end to wake at a completion.

use std::cell::UnsafeCell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rdmasock_core::fabric::plugin::{Errno, Hidden, Result};
use rdmasock_core::sync::{Attention, Published};
use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// The bytes of a receive buffer.
pub const BUFFER_BYTES: usize = 4096 + 64;
/// The receive buffers that the peer may use.
pub const RECEIVES: u16 = 128;
/// The number of receive buffers. Some are still being handed over when they are granted again.
const POSTED: usize = RECEIVES as usize + 16;

/// Bit of the attention word: the end waits for its completion fd.
const ARMED: u32 = 1;

/// A mapping of a memfd; a fork child does not inherit it.
#[derive(Debug)]
pub struct Shared {
    at: *mut u8,
    len: usize,
}

// SAFETY: plain memory; its users access it by atomics, or under their own rules.
unsafe impl Send for Shared {}
// SAFETY: as for Send.
unsafe impl Sync for Shared {}

impl Shared {
    /// Returns new, zeroed memory, and the file from which others map it.
    pub fn create(len: usize) -> Result<(Self, Hidden)> {
        let file = Hidden::place(rustix::fs::memfd_create("rdmasock-localnic", MemfdFlags::CLOEXEC)?)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        Ok((Self::map(file.as_fd(), len)?, file))
    }

    /// Maps the first `len` bytes of a file; EPROTO if the file is shorter.
    pub fn map(file: BorrowedFd<'_>, len: usize) -> Result<Self> {
        if rustix::fs::fstat(file)?.st_size < len as i64 {
            return Err(Errno(libc::EPROTO));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which replaces no other.
        let at = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0) }?;
        // SAFETY: exactly the mapping that was just made. If the call fails, fork children inherit the memory, and do
        // not use it.
        let _ = unsafe { madvise(at, len, Advice::LinuxDontFork) };
        Ok(Self { at: at.cast(), len })
    }

    /// Returns the address of the first byte, aligned to a page.
    pub fn at(&self) -> *mut u8 {
        self.at
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`; all references into the memory borrowed this value.
        let _ = unsafe { munmap(self.at.cast(), self.len) };
    }
}

/// The messages for one end. All zeroes: none.
#[repr(C, align(128))]
struct Inbox {
    /// The count of all messages that have arrived.
    arrived: Published<AtomicU64>,
    /// Whether a completion here makes the completion fd readable.
    attention: Attention,
    /// Whether the completion fd is readable.
    fired: AtomicU32,
    _line: [u8; 112],
    /// The count of messages whose buffer is free again.
    taken: AtomicU64,
    _line2: [u8; 120],
    buffers: [Buffer; POSTED],
}

/// The kind of the message in a buffer.
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
    /// Not 0: the connection has ended.
    over: AtomicU32,
    /// Not 0: messages and WRITEs have no effect any more.
    silent: AtomicU32,
    inboxes: [Inbox; 2],
}

/// The size of a pair's memory in bytes.
pub const BYTES: usize = size_of::<Memory>();

/// A pair's memory, as one end uses it.
#[derive(Debug)]
pub struct Pair {
    memory: Shared,
    /// The index of this end's inbox.
    me: usize,
    /// The bell that wakes this end, and that of the other end.
    bells: [Arc<Hidden>; 2],
}

/// A message that has arrived.
#[derive(Debug)]
pub enum Arrived<'a> {
    /// The bytes of a message.
    Message(&'a [u8]),
    /// A WRITE with an immediate has placed `bytes`.
    Immediate { immediate: u32, bytes: u32 },
}

impl Pair {
    /// Makes a pair over memory of at least [`BYTES`] (else EPROTO); the connecting end is end 0. The bells are this
    /// end's and the other's.
    pub fn new(memory: Shared, me: usize, bells: [Arc<Hidden>; 2]) -> Result<Self> {
        if memory.len() < BYTES || me > 1 {
            return Err(Errno(libc::EPROTO));
        }
        Ok(Self { memory, me, bells })
    }

    fn memory(&self) -> &Memory {
        // SAFETY: the memory is long enough and aligned to a page, and all zeroes are a valid `Memory`. Only atomics
        // and buffers change under the reference, and buffers are accessed by raw pointers only.
        unsafe { &*self.memory.at().cast::<Memory>() }
    }

    fn inbox(&self, end: usize) -> &Inbox {
        let [first, second] = &self.memory().inboxes;
        if end == 0 { first } else { second }
    }

    /// Ends the connection for both ends.
    pub fn end(&self) {
        self.memory().over.store(1, Release);
    }

    /// Returns whether either end has ended the connection.
    pub fn is_over(&self) -> bool {
        self.memory().over.load(Acquire) != 0
    }

    /// Makes all later messages and WRITEs of the connection have no effect, without an error.
    pub fn silence(&self) {
        self.memory().silent.store(1, Release);
    }

    /// Returns whether the connection was silenced.
    pub fn is_silent(&self) -> bool {
        self.memory().silent.load(Acquire) != 0
    }

    /// Delivers a message to the other end. EMSGSIZE if it exceeds [`BUFFER_BYTES`]; EPROTO if no receive buffer is
    /// free. One caller at a time.
    pub fn deliver(&self, message: &[u8]) -> Result<()> {
        if message.len() > BUFFER_BYTES {
            return Err(Errno(libc::EMSGSIZE));
        }
        self.arrive(Kind::Message, message.len() as u32, 0, |to| {
            // SAFETY: the length was checked. This end owns the buffer until the message is published.
            unsafe { to.copy_from_nonoverlapping(message.as_ptr(), message.len()) };
        })
    }

    /// Reports a WRITE with an immediate to the other end. EPROTO if no receive buffer is free. One caller at a time.
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

    /// Hands over the messages for this end; returns their number. One caller at a time.
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
                // SAFETY: within the memory; the other end does not write to the buffer before it is free again.
                let bytes = unsafe { std::slice::from_raw_parts(buffer.bytes.get().cast(), len) };
                each(Arrived::Message(bytes));
            }
            inbox.taken.store(number + 1, Release);
            count += 1;
        }
    }

    /// Makes the completion fd readable at the next completion here.
    pub fn arm(&self) {
        let inbox = self.inbox(self.me);
        if inbox.fired.swap(0, Acquire) != 0 {
            let _ = rustix::io::read(&*self.bells[0], &mut [0; 8]);
        }
        inbox.attention.keep_armed(ARMED);
    }

    /// Reports a completion at this end.
    pub fn fire_here(&self) {
        self.fire(self.me);
    }

    fn fire(&self, end: usize) {
        let inbox = self.inbox(end);
        if inbox.attention.take() != 0 {
            let bell = &self.bells[usize::from(end != self.me)];
            let _ = rustix::io::write(&**bell, &1u64.to_ne_bytes());
            // The flag is set after the write, so an end that finds it set can read the eventfd. Release pairs with the
            // Acquire in `arm`.
            inbox.fired.store(1, Release);
        }
    }

    /// Returns the bell, which is readable after a completion.
    pub fn bell(&self) -> &Arc<Hidden> {
        &self.bells[0]
    }
}

/// Returns the buffer of the message with this number.
fn buffer(inbox: &Inbox, number: u64) -> &Buffer {
    let at = (&raw const inbox.buffers).cast::<Buffer>();
    // SAFETY: within the array, by the remainder.
    unsafe { &*at.add((number % POSTED as u64) as usize) }
}
