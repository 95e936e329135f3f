//! The library's own file descriptors, hidden from the program (ARCHITECTURE, I11).
//!
//! A [`PrivateFd`] has a high number, is close-on-exec, and is entered in a process-wide bitmap. So the hooks of close,
//! dup2 and close_range can check [`is_private`] in a few nanoseconds. This file does not decide what a hook answers
//! for such a number.
//!
//! The choice of numbers: The library never raises the program's limit (RLIMIT_NOFILE), not even for a moment. Other
//! threads would see the raised limit, and children that they start would keep it. So the numbers are allocated
//! downwards from `USUAL`, or from the limit, if that is lower or many numbers are needed. They do not start near the
//! end of a high limit, because the kernel's fd table would then extend up to there. Each fork copies that table. A
//! select over getdtablesize() fds, which the kernel cuts to the table, would read beyond the 1,024 bits of an fd_set.
//! Private fds leave the program most of its limit.
//!
//! A new fd first has the lowest free number. For the few instructions until it is moved, another thread of the program
//! may get the next higher number. `shims/src/hooks/numbers.rs` corrects that, by the counts of `transit`, which also
//! delay a close_range meanwhile.
//!
//! A private fd has no number in the lower part of the limit, which the program would lack as long as the fd is open.
//! The last `SPARE` free numbers are left to the program. So a program at its limit, which closes some fds to open
//! others, finds free numbers. The exception is a duplicate of an fd that the program is closing, which must have a
//! number all the same. It gets one that was set aside (`reserve`), or any free number, if many are closed at once.

pub mod left;
mod reserve;
mod transit;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, getrlimit};
pub use transit::{Look, Settled, Transit};

use super::kernel;

/// As long as private fds are few, all have numbers below this. Such numbers lie within an fd_set, above those that
/// most programs ever use, and not at an end that programs choose for themselves.
const USUAL: u32 = 960;

/// No limit gives a private fd a number above this.
const CEILING: u32 = 65_536;

/// The end of the bitmap: no private fd has this number or a higher one.
const END: u32 = 131_072;

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (END / WORD_BITS) as usize;

/// The bitmap, one bit a number: 16 KiB of zero pages, where only the used pages take memory.
static OWNED: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

/// The number of private fds.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// A lower bound of all numbers that private fds have ever had.
static LOWEST: AtomicU32 = AtomicU32::new(END);

/// Returns whether `fd` is one of the library's own. Async-signal-safe; a single compare for ordinary numbers.
#[inline]
pub fn is_private(fd: RawFd) -> bool {
    // A negative number becomes a large one, which lies beyond the bitmap.
    let n = fd as u32;
    n >= LOWEST.load(Ordering::Relaxed) && bit(n).is_some_and(|(word, mask)| word.load(Ordering::Relaxed) & mask != 0)
}

/// Returns the lowest private fd in `first..=last`, so that a close_range can skip it; `None` if there is none.
/// Async-signal-safe.
pub fn next_private(first: u32, last: u32) -> Option<u32> {
    let first = first.max(LOWEST.load(Ordering::Relaxed));
    let last = last.min(END - 1);
    let mut n = first;
    while n <= last {
        let word = OWNED.get((n / WORD_BITS) as usize)?.load(Ordering::Relaxed);
        let rest = word >> (n % WORD_BITS);
        if rest != 0 {
            return Some(n + rest.trailing_zeros()).filter(|found| *found <= last);
        }
        n = (n / WORD_BITS + 1) * WORD_BITS;
    }
    None
}

/// Returns the ranges of `first..=last` without private fds, in order. Both ends of a range are inclusive.
pub fn ranges_without_private(first: u32, last: u32) -> impl Iterator<Item = (u32, u32)> {
    let mut next = Some(first);
    std::iter::from_fn(move || {
        loop {
            let start = next.filter(|n| *n <= last)?;
            let Some(private) = next_private(start, last) else {
                next = None;
                return Some((start, last));
            };
            next = Some(private + 1);
            if private > start {
                return Some((start, private - 1));
            }
        }
    })
}

fn bit(n: u32) -> Option<(&'static AtomicU64, u64)> {
    Some((OWNED.get((n / WORD_BITS) as usize)?, 1 << (n % WORD_BITS)))
}

/// A file descriptor that only the library knows: at a high number, close-on-exec, in the bitmap until dropped.
#[derive(Debug)]
pub struct PrivateFd {
    fd: RawFd,
}

impl PrivateFd {
    /// Opens a file by `open` and moves it to a private number. Fails with the errors of `open`, and EMFILE as
    /// [`Self::place`] does.
    pub fn open(open: impl FnOnce() -> Result<OwnedFd, Errno>) -> Result<Self, Errno> {
        let _transit = Transit::begin();
        Self::place(open()?)
    }

    /// Moves `fd` to a private number; the old number is free afterwards, also when this fails.
    ///
    /// Fails with EMFILE if the program's limit leaves no number.
    pub fn place(fd: OwnedFd) -> Result<Self, Errno> {
        let _transit = Transit::begin();
        let placed = place(fd.as_fd());
        close(fd);
        placed
    }

    /// Returns a private fd for the same open file as the program's `fd`. EMFILE as for [`Self::place`].
    pub fn duplicate(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        place(fd)
    }

    /// Duplicates an `fd` that the program is closing, where calls or bytes would be lost without a duplicate. The
    /// number of `fd` is free soon, so any free number is used at need. EMFILE if there is none at all.
    pub fn duplicate_closing(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        place_closing(fd)
    }

    /// Takes over a number that [`Self::release`] returned; `None` if the number is not private.
    pub fn adopt(number: RawFd) -> Option<Self> {
        // Not `then_some`: that would make a value for a number of the program's, whose drop closes it.
        is_private(number).then(|| Self { fd: number })
    }

    /// Gives up the ownership and returns the fd, which stays open and private; see [`Self::adopt`].
    pub fn release(self) -> RawFd {
        std::mem::ManuallyDrop::new(self).fd
    }

    /// Leaves the close, which may block, to [`Self::close_left`].
    pub fn leave(self) {
        left::leave(self.release());
    }

    /// Closes each fd that was [left](Self::leave) and that `take_over` has copied elsewhere. Returns `false` at the
    /// first fd that it has not copied. Only one thread calls this.
    pub fn close_left(mut take_over: impl FnMut(BorrowedFd<'_>) -> bool) -> bool {
        let close = |number| drop(Self { fd: number });
        // SAFETY: an fd that was left stays open until it is closed here.
        left::close(|number| take_over(unsafe { BorrowedFd::borrow_raw(number) }), close)
    }
}

impl AsFd for PrivateFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `place` opened the fd and only `drop` closes it, which the borrow prevents. The hooks keep the
        // program from closing it.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

impl AsRawFd for PrivateFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}

impl Drop for PrivateFd {
    fn drop(&mut self) {
        if reserve::give_back(self.fd) {
            return;
        }
        // The bitmap entry is removed before the close: afterwards another thread may be given the same number and
        // enter it, and that entry must not be erased.
        unregister(self.fd);
        // SAFETY: this value owned the fd, and no code can use it any more.
        unsafe { rustix::io::close(self.fd) };
    }
}

/// Closes `fd` by the raw system call: dropping an `OwnedFd` calls libc's close, which is hooked.
fn close(fd: OwnedFd) {
    // SAFETY: `into_raw_fd` has taken the fd out of its owner, so it is closed once.
    unsafe { rustix::io::close(fd.into_raw_fd()) };
}

fn register(fd: RawFd) -> bool {
    let n = fd as u32;
    let Some((word, mask)) = bit(n) else {
        return false;
    };
    // The bit is set before the bound. A hook on another thread loads both Relaxed, so it may be a moment late. No data
    // is read through either, so such a hook answers as if it had run a moment earlier.
    if word.fetch_or(mask, Ordering::Release) & mask == 0 {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
    LOWEST.fetch_min(n, Ordering::Release);
    true
}

fn unregister(fd: RawFd) {
    if let Some((word, mask)) = bit(fd as u32)
        && word.fetch_and(!mask, Ordering::Relaxed) & mask != 0
    {
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A range to search for numbers: the upper `most` numbers below `end`, from the top down. Used as long as there are
/// fewer than `most` private fds.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    end: u32,
    most: u32,
}

/// Returns the ranges to search under a soft limit, in order. Each leaves the program three quarters of its numbers,
/// except for the `NEEDED` that the library cannot do without.
fn places(soft: u64) -> [Place; 2] {
    const NEEDED: u32 = 8;
    [USUAL, CEILING].map(|end| {
        // At most `end`, so the cast is lossless.
        let end = soft.min(end.into()) as u32;
        let most = (end / 4).saturating_add(NEEDED);
        Place { end, most }
    })
}

impl Place {
    /// Returns the least number of the range.
    fn least(&self) -> RawFd {
        self.end.saturating_sub(self.most) as RawFd
    }
}

fn soft_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The numbers that are left to the program whenever a private fd takes one. A program may close up to this many fds
/// before it opens as many.
const SPARE: usize = 4;

/// Which numbers are acceptable.
#[derive(Clone, Copy, PartialEq)]
enum Take {
    /// Numbers of the range, if `SPARE` others stay free.
    High,
    /// Numbers of the range, even the last one.
    Last,
    /// The highest free number, even below the range.
    Any,
}

fn place(fd: BorrowedFd<'_>) -> Result<PrivateFd, Errno> {
    let _transit = Transit::begin();
    let count = COUNT.load(Ordering::Relaxed);
    let mut places = places(soft_limit()).into_iter().filter(|place| count < place.most);
    let placed = places.find_map(|place| {
        let placed = place_in(fd, &place, Take::High);
        if placed.is_some() {
            stock_reserve(&place);
        }
        placed
    });
    placed.ok_or(Errno::MFILE)
}

/// Moves `fd` to a private number regardless of how many private fds there are: the program has one fd fewer soon.
fn place_closing(fd: BorrowedFd<'_>) -> Result<PrivateFd, Errno> {
    let _transit = Transit::begin();
    let places = places(soft_limit());
    let find = |take| places.iter().find_map(|place| place_in(fd, place, take));
    let placed = find(Take::Last)
        .or_else(|| take_reserved(fd))
        .or_else(|| find(Take::Any));
    placed.ok_or(Errno::MFILE)
}

/// Closes the numbers that are set aside for fds that the program closes.
pub fn dismiss_reserve() {
    reserve::dismiss(|number| drop(PrivateFd { fd: number }));
}

fn stock_reserve(place: &Place) {
    reserve::stock(
        place.least()..place.end as RawFd,
        |file| place_in(file, place, Take::High).map(PrivateFd::release),
        |number| drop(PrivateFd { fd: number }),
    );
}

fn take_reserved(fd: BorrowedFd<'_>) -> Option<PrivateFd> {
    let number = PrivateFd { fd: reserve::take()? };
    // On an error the number is dropped, which sets it aside again.
    reserve::put(fd, number.fd).ok().map(|()| number)
}

fn place_in(fd: BorrowedFd<'_>, place: &Place, take: Take) -> Option<PrivateFd> {
    // A try costs a system call. A program that uses this many numbers at the top of its range needs them more than the
    // library does.
    const TRIES: usize = 1024;
    let mut tries = (0..place.end)
        .rev()
        .filter(|n| !is_private(*n as RawFd))
        .take(TRIES)
        .peekable();
    let mut next = || {
        loop {
            match fcntl_dupfd_cloexec(fd, *tries.peek()? as RawFd) {
                // There may be another free number from there on.
                Ok(new) => return Some(new),
                Err(_) => tries.next(),
            };
        }
    };
    let new = next()?;
    let is_high = new.as_raw_fd() >= place.least();
    let mut left: [Option<OwnedFd>; SPARE] = Default::default();
    // Searched downwards from the top, like the number itself: if many high numbers are free, all of these are high.
    let mut is_left = || {
        left.iter_mut().all(|slot| {
            *slot = next();
            slot.is_some()
        })
    };
    let does = match take {
        Take::High => is_high && is_left(),
        Take::Last => is_high,
        Take::Any => true,
    };
    left.into_iter().flatten().for_each(close);
    if does {
        keep(new)
    } else {
        close(new);
        None
    }
}

/// Enters a number in the bitmap. Closes the fd and returns `None` if the number lies beyond the bitmap.
fn keep(new: OwnedFd) -> Option<PrivateFd> {
    if register(new.as_raw_fd()) {
        Some(PrivateFd { fd: new.into_raw_fd() })
    } else {
        close(new);
        None
    }
}

/// Resets the private fds in a fork child: those for which `keep` is true stay open and private, all others are closed.
///
/// To be called from the child's atfork handler, before anything else here. Async-signal-safe if `keep` is.
///
/// # Safety
/// No [`PrivateFd`] that `keep` refuses may be used or dropped in the child afterwards, as its number may be another
/// file's. (Forget its owner.)
pub unsafe fn reset_in_fork_child(keep: impl Fn(RawFd) -> bool) {
    transit::reset_in_fork_child();
    reserve::reset_in_fork_child();
    left::reset_in_fork_child();
    let mut from = 0;
    while let Some(n) = next_private(from, END) {
        from = n + 1;
        let fd = n as RawFd;
        if !keep(fd) {
            unregister(fd);
            // The close fails for an fd that a plugin has reported and has closed itself; no other file has that number
            // yet.
            // SAFETY: the bitmap says that the library owns the fd. The caller guarantees that no owner of it uses or
            // closes it again.
            let _ = unsafe { kernel::call(libc::SYS_close, [n as usize, 0, 0, 0, 0, 0]) };
        }
    }
}

#[cfg(test)]
mod tests;
