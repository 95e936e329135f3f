//! The fd table: one atomic word for each fd, which encodes what the library knows of the file behind the fd (`Entry`).
//!
//! Objects are type-stable: they are recycled but never unmapped, so a pointer from the table is always valid. A caller
//! that has taken the object's own lock reads the table again, to check whether the object is still the one behind the
//! fd ([`still`]). A close that races with a call takes the same lock before the kernel can reuse the fd. For a call
//! that has begun to wait, `notify/call` keeps the connection.
//!
//! A lookup takes no lock, allocates nothing and is async-signal-safe. A hook that passes through reads nothing but the
//! table (ARCHITECTURE, I10).

use std::ffi::c_int;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use rdmasock_core::os::memfd;

use crate::notify::epoll::Epoll;
use crate::objects::{holders, listener::Listener, socket::Socket};
use crate::sys::vfork;

/// The table has an entry for each fd below this bound. Sockets with higher fds are not accelerated. The value is the
/// kernel's default for fs.nr_open.
const ENTRIES: usize = 1 << 20;
const KIND: usize = 0b111;
/// O_NONBLOCK, in the word of a fresh socket.
const NONBLOCKING: usize = 1 << 3;
const SERIAL_SHIFT: u32 = 4;

/// The object behind an fd.
#[derive(Clone, Copy)]
pub(crate) enum Entry {
    /// No object of the library: the call passes through.
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
        /// A number that no other fresh socket has ([`new_serial`]).
        serial: usize,
    },
}

/// How many entries may be written, from the first on. The later entries are read-only zeroes without memory, which
/// mlockall(2) cannot fill with pages.
static OPEN: AtomicUsize = AtomicUsize::new(0);
/// The least number of entries that are made writable: one page.
const FIRST: usize = 4096 / size_of::<AtomicUsize>();

/// Returns the table's address. Null before [`init`], and in a child whose fork no hook has seen.
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
        holders::note(holders::STRANGER);
    }
    None
}

/// Maps the table. If this fails, no connection is accelerated.
pub(crate) fn init() -> Result<(), rustix::io::Errno> {
    use rustix::mm::{MapFlags, ProtFlags};
    if !base().is_null() {
        return Ok(());
    }
    let bytes = ENTRIES * size_of::<AtomicUsize>();
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // All-zero bytes are a valid AtomicUsize.
    let base = memfd::map(bytes, ProtFlags::READ, flags, None)?;
    let set = vfork::set_table(base);
    if set != Ok(true) {
        // Another thread was first, or the kernel cannot wipe a page for fork children.
        // SAFETY: the mapping was made above, and no other code has its address.
        let _ = unsafe { rustix::mm::munmap(base, bytes) };
    }
    set.map(|_| ())
}

/// Whether the entry of `fd`, which must be below `ENTRIES`, may be written. Makes its page writable if needed; false
/// if that fails.
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
    // SAFETY: the range is whole pages from the table's beginning. The table has `count` entries: `fd` is below
    // ENTRIES, which is a power of two. Threads may open overlapping ranges at once, since opening only adds
    // permissions.
    let opened = unsafe { memfd::open(base.cast(), count * size_of::<AtomicUsize>()) };
    if opened.is_ok() {
        // Release: pairs with the Acquire in `is_open`, so a thread that reads the count finds the entries open.
        OPEN.fetch_max(count, AcqRel);
    }
    opened.is_ok()
}

#[inline]
fn decode(raw: usize) -> Entry {
    let ptr = raw & !KIND;
    // SAFETY: only `put` writes words other than 0, with addresses of type-stable objects of the kind that the low bits
    // name.
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

/// Returns the object behind `fd`.
#[inline]
pub(crate) fn lookup(fd: c_int) -> Entry {
    match word(fd).map(|w| w.load(Acquire)) {
        None | Some(0) => Entry::None,
        Some(raw) => decode(raw),
    }
}

/// Whether the table has an entry for `fd`.
#[inline]
pub(crate) fn is_known(fd: c_int) -> bool {
    word(fd).is_some_and(|w| w.load(Acquire) != 0)
}

/// Returns the connected socket behind `fd`. `None` if the table has none.
#[inline]
pub(crate) fn socket(fd: c_int) -> Option<&'static Socket> {
    match lookup(fd) {
        Entry::Socket(s) => Some(s),
        _ => None,
    }
}

/// Whether `fd` still stands for this socket.
#[inline]
pub(crate) fn still(fd: c_int, socket: &'static Socket) -> bool {
    word(fd).is_some_and(|w| w.load(Relaxed) == encode(Entry::Socket(socket)))
}

/// Identifies the file behind an fd, to be compared before and after a call that blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token {
    word: usize,
    generation: u64,
}

/// Returns the token of the file behind `fd` now.
pub(crate) fn token(fd: c_int) -> Token {
    let word = word(fd).map_or(0, |w| w.load(Acquire));
    let (word, generation) = match decode(word) {
        Entry::Socket(socket) => (word, socket.generation.load(Acquire)),
        // The program may set O_NONBLOCK between two tokens of the same file.
        Entry::Fresh { .. } => (word & !NONBLOCKING, 0),
        _ => (word, 0),
    };
    Token { word, generation }
}

/// Returns a new serial number for a socket that is neither connected nor listens yet (`Entry::Fresh`).
pub(crate) fn new_serial() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Relaxed) & usize::MAX >> SERIAL_SHIFT
}

/// Removes the socket's entry, unless `fd` has another entry by now.
pub(crate) fn remove(fd: c_int, socket: &'static Socket) {
    if let Some(w) = word(fd)
        && is_open(fd)
    {
        let _ = w.compare_exchange(encode(Entry::Socket(socket)), 0, AcqRel, Relaxed);
    }
}

/// Writes an entry, if the table [covers] the fd. Returns the entry that it replaces.
pub(crate) fn put(fd: c_int, entry: Entry) -> Entry {
    match word(fd) {
        // The entry is empty already, so its page need not be made writable.
        Some(w) if matches!(entry, Entry::None) && w.load(Acquire) == 0 => Entry::None,
        Some(w) if is_open(fd) => decode(w.swap(encode(entry), AcqRel)),
        _ => Entry::None,
    }
}

/// Whether the table can hold an entry for `fd`: `fd` is below the bound, and there is memory for the entry.
pub(crate) fn covers(fd: c_int) -> bool {
    word(fd).is_some() && is_open(fd)
}

/// Returns each fd in `range` that has an entry, with the entry.
fn entries(range: std::ops::RangeInclusive<u32>) -> impl Iterator<Item = (c_int, Entry)> {
    let end = (*range.end() as usize).min(HIGHEST.load(Relaxed));
    (*range.start() as usize..=end).filter_map(|fd| {
        let raw = word(fd as c_int)?.load(Acquire);
        (raw != 0).then(|| (fd as c_int, decode(raw)))
    })
}

/// Calls `f` for each fd in `range` that has an entry.
pub(crate) fn for_each(range: std::ops::RangeInclusive<u32>, mut f: impl FnMut(c_int, Entry)) {
    entries(range).for_each(|(fd, entry)| f(fd, entry));
}

/// Returns the lowest fd that stands for this set. `None` if the table has no such fd.
pub(crate) fn another_of(set: &'static Epoll) -> Option<c_int> {
    let is_it = |entry| matches!(entry, Entry::Epoll(e) if std::ptr::eq(e, set));
    entries(0..=u32::MAX).find_map(|(fd, entry)| is_it(entry).then_some(fd))
}

/// The highest fd that ever had an entry, so that walks end early.
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

/// Returns the highest fd that ever had an entry.
pub(crate) fn highest() -> c_int {
    // The value comes from a c_int, so it fits.
    HIGHEST.load(Relaxed) as c_int
}

/// Writes the first entry of a new fd, as [`put`] does, and raises `HIGHEST` if need be.
pub(crate) fn insert(fd: c_int, entry: Entry) -> Entry {
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
        // Checked before an fd this high has been written.
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
