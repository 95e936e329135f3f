//! The fd table: what the library knows of each fd, one atomic word a number.
//!
//! Objects are type-stable: they are recycled but never unmapped, so a word read from the table
//! may always be followed. Whether the object is still the one behind the fd is settled under
//! the object's own lock by reading the table again ([`still`]); a close that races with a call
//! takes those locks before the kernel can hand the number out anew. What a call belongs to once it has
//! begun to wait is in `call`.
//!
//! Lock-free, allocation-free, async-signal-safe: this is all that a hook that passes through
//! looks at (ARCHITECTURE, I10).

use std::ffi::c_int;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use rdmasock_core::os::lazy;

use crate::notify::epoll::Epoll;
use crate::objects::holders;
use crate::objects::listener::Listener;
use crate::objects::socket::Socket;
use crate::sys::vfork;

/// Numbers beyond this are not accelerated; it is the kernel's default for fs.nr_open.
const ENTRIES: usize = 1 << 20;
const KIND: usize = 0b111;
/// In the word of a fresh socket.
const NONBLOCKING: usize = 1 << 3;
const SERIAL_SHIFT: u32 = 4;

/// What stands behind an fd number.
#[derive(Clone, Copy)]
pub enum Entry {
    /// Nothing of ours: the call passes through.
    None,
    /// A connected (or connecting) TCP socket.
    Socket(&'static Socket),
    /// A listening TCP socket.
    Listener(&'static Listener),
    /// An epoll instance.
    Epoll(&'static Epoll),
    /// A TCP socket that is neither connected nor listens yet.
    Fresh {
        /// O_NONBLOCK is set.
        nonblocking: bool,
        /// No two sockets have the same ([`new_serial`]).
        serial: usize,
    },
}

/// How many entries may be written. The others are read as zeroes, and are no memory that mlockall(2) could fill.
static OPEN: AtomicUsize = AtomicUsize::new(0);
/// How many are to begin with: a page of them.
const FIRST: usize = 4096 / size_of::<AtomicUsize>();

/// Where the table is. Null before [`init`], and in a child that no hook has seen.
#[inline]
fn base() -> *mut AtomicUsize {
    vfork::table().cast()
}

#[inline]
fn word(fd: c_int) -> Option<&'static AtomicUsize> {
    let base = base();
    if base.is_null() || fd as u32 as usize >= ENTRIES {
        return no_word();
    }
    // SAFETY: the table has ENTRIES words, zero-filled by mmap, and is never unmapped.
    Some(unsafe { &*base.add(fd as usize) })
}

#[cold]
fn no_word() -> Option<&'static AtomicUsize> {
    if vfork::is_stray() {
        holders::meet_stranger();
    }
    None
}

/// Maps the table; without it nothing is accelerated.
pub fn init() -> Result<(), rustix::io::Errno> {
    use rustix::mm::{MapFlags, ProtFlags};
    if !base().is_null() {
        return Ok(());
    }
    let bytes = ENTRIES * size_of::<AtomicUsize>();
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // Zero is a valid AtomicUsize.
    let base = lazy::map(bytes, ProtFlags::READ, flags, None)?;
    let set = vfork::set_table(base);
    if set != Ok(true) {
        // Another thread was first, or there is to be none.
        // SAFETY: our own mapping, which nobody has seen.
        let _ = unsafe { rustix::mm::munmap(base, bytes) };
    }
    set.map(|_| ())
}

/// Whether the entry of `fd`, which the table has, may be written; makes it so if it can.
#[inline]
fn is_open(fd: c_int) -> bool {
    (fd as u32 as usize) < OPEN.load(Acquire) || open(fd as u32 as usize)
}

#[cold]
fn open(fd: usize) -> bool {
    let base = base();
    if base.is_null() || fd >= ENTRIES {
        return false;
    }
    let count = (fd + 1).next_power_of_two().max(FIRST);
    // SAFETY: whole pages from the table's beginning, of which it has as many. Who does the same meanwhile does no
    // harm.
    let opened = unsafe { lazy::open(base.cast(), count * size_of::<AtomicUsize>()) };
    if opened.is_ok() {
        // Release: pairs with the Acquire in `is_open`, by which the entries are open for whoever sees the count.
        OPEN.fetch_max(count, AcqRel);
    }
    opened.is_ok()
}

#[inline]
fn decode(raw: usize) -> Entry {
    let ptr = raw & !KIND;
    // SAFETY: the words are only written by `put` with addresses of type-stable objects of the
    // kind that the low bits name.
    unsafe {
        match raw & KIND {
            1 => Entry::Socket(&*(ptr as *const Socket)),
            2 => Entry::Listener(&*(ptr as *const Listener)),
            3 => Entry::Epoll(&*(ptr as *const Epoll)),
            4 => Entry::Fresh {
                nonblocking: ptr & NONBLOCKING != 0,
                serial: raw >> SERIAL_SHIFT,
            },
            _ => Entry::None,
        }
    }
}

fn encode(entry: Entry) -> usize {
    match entry {
        Entry::None => 0,
        Entry::Socket(s) => std::ptr::from_ref(s) as usize | 1,
        Entry::Listener(l) => std::ptr::from_ref(l) as usize | 2,
        Entry::Epoll(e) => std::ptr::from_ref(e) as usize | 3,
        Entry::Fresh { nonblocking, serial } => (serial << SERIAL_SHIFT) | (usize::from(nonblocking) * NONBLOCKING) | 4,
    }
}

/// What stands behind `fd`.
#[inline]
pub fn lookup(fd: c_int) -> Entry {
    match word(fd) {
        None => Entry::None,
        Some(w) => match w.load(Acquire) {
            0 => Entry::None,
            raw => decode(raw),
        },
    }
}

/// Whether the library knows anything of `fd`.
#[inline]
pub fn is_known(fd: c_int) -> bool {
    word(fd).is_some_and(|w| w.load(Acquire) != 0)
}

/// The TCP socket behind `fd`, if there is one that the library knows.
#[inline]
pub fn socket(fd: c_int) -> Option<&'static Socket> {
    match lookup(fd) {
        Entry::Socket(s) => Some(s),
        _ => None,
    }
}

/// Whether `fd` still stands for this socket.
#[inline]
pub fn still(fd: c_int, socket: &'static Socket) -> bool {
    word(fd).is_some_and(|w| w.load(Relaxed) == encode(Entry::Socket(socket)))
}

/// What tells one file behind a number from the next: to be compared over a call that blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token {
    word: usize,
    generation: u64,
}

/// Of what stands behind `fd` now.
pub fn token(fd: c_int) -> Token {
    let word = word(fd).map_or(0, |w| w.load(Acquire));
    let generation = match decode(word) {
        Entry::Socket(socket) => socket.generation.load(Acquire),
        _ => 0,
    };
    // O_NONBLOCK may be set meanwhile.
    let word = match decode(word) {
        Entry::Fresh { .. } => word & !NONBLOCKING,
        _ => word,
    };
    Token { word, generation }
}

/// For a fresh socket.
pub fn new_serial() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Relaxed) & usize::MAX >> SERIAL_SHIFT
}

/// Takes the socket's entry out, unless another stands there by now.
pub fn remove(fd: c_int, socket: &'static Socket) {
    if let Some(w) = word(fd)
        && is_open(fd)
    {
        let _ = w.compare_exchange(encode(Entry::Socket(socket)), 0, AcqRel, Relaxed);
    }
}

/// Puts an entry, if the table [covers] the number, and returns what stood there.
pub fn put(fd: c_int, entry: Entry) -> Entry {
    match word(fd) {
        // Nothing is there, and nothing is to be.
        Some(w) if matches!(entry, Entry::None) && w.load(Acquire) == 0 => Entry::None,
        Some(w) if is_open(fd) => decode(w.swap(encode(entry), AcqRel)),
        _ => Entry::None,
    }
}

/// Whether the table can hold this number: it is not too high, and there is the memory.
pub fn covers(fd: c_int) -> bool {
    word(fd).is_some() && is_open(fd)
}

/// Calls `f` for every number in `range` that has an entry.
pub fn for_each(range: std::ops::RangeInclusive<u32>, mut f: impl FnMut(c_int, Entry)) {
    let high = HIGHEST.load(Relaxed);
    let end = (*range.end() as usize).min(high);
    for fd in *range.start() as usize..=end {
        if let Some(w) = word(fd as c_int) {
            let raw = w.load(Acquire);
            if raw != 0 {
                f(fd as c_int, decode(raw));
            }
        }
    }
}

/// A number whose entry is such.
pub fn find(mut is_such: impl FnMut(Entry) -> bool) -> Option<c_int> {
    let mut found = None;
    for_each(0..=u32::MAX, |fd, entry| {
        if found.is_none() && is_such(entry) {
            found = Some(fd);
        }
    });
    found
}

/// Another number that stands for this set.
pub fn another_of(set: &'static Epoll) -> Option<c_int> {
    find(|entry| matches!(entry, Entry::Epoll(e) if std::ptr::eq(e, set)))
}

/// The highest number that ever had an entry, so that walks end early.
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

/// No number above this has an entry.
pub fn highest() -> c_int {
    // Below ENTRIES, which fits.
    HIGHEST.load(Relaxed) as c_int
}

/// [`put`] for a new number.
pub fn insert(fd: c_int, entry: Entry) -> Entry {
    if HIGHEST.load(Relaxed) < fd.max(0) as usize {
        HIGHEST.fetch_max(fd.max(0) as usize, Relaxed);
    }
    put(fd, entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_number_has_an_entry_and_the_next_has_none() {
        init().unwrap();
        let (last, beyond) = (ENTRIES as c_int - 1, ENTRIES as c_int);
        // Before any number as high was written.
        assert!(matches!(put(last, Entry::None), Entry::None));
        assert!(!is_known(last) && covers(last) && !covers(beyond) && !covers(-1));
        let fresh = Entry::Fresh {
            nonblocking: true,
            serial: 5,
        };
        put(last, fresh);
        assert!(matches!(lookup(last), Entry::Fresh { serial: 5, .. }));
        assert!(matches!(put(last, Entry::None), Entry::Fresh { .. }));
        assert!(matches!(put(beyond, fresh), Entry::None));
    }
}
