//! The library's own file descriptors, where the program does not see them (ARCHITECTURE, I11).
//!
//! A [`PrivateFd`] sits at a high number, close-on-exec, and is entered in a process-wide bitmap, so
//! that the hooks of close, dup2 and close_range can ask [`is_private`] in a few nanoseconds. This
//! file does not decide what a hook answers for such a number.
//!
//! Where the numbers are. The program's limit (RLIMIT_NOFILE) is never raised, not even for a moment: other threads
//! would see it, and children that they start would keep it. So the numbers are from below `USUAL` downwards, and from
//! below the limit where that is lower, or many are needed. They are not near the end of a high limit at once, because
//! the kernel's fd table then reaches up to there: fork copies it, and a select over getdtablesize() numbers, which the
//! kernel cuts to that table, would read beyond the 1,024 bits of an fd_set. And they leave the program most of its
//! limit.
//!
//! The kernel gives every new fd the lowest number first, so for the few instructions until it is moved another thread
//! of the program may get the number above. It is put right there (`shims/src/hooks/numbers.rs`), by what the file
//! `transit` counts, which also keeps a close_range off meanwhile.
//!
//! Nor has one a number in the lower part of the limit, where the program would miss it for as long as it is
//! there. And the last numbers are the program's: a few are always left, so that one which is at its limit, and closes
//! some to open others, finds those free. What the program is closing must have a number all the same: one that was set
//! aside (`reserve`), or, if many do so at once, what is left.

pub mod left;
mod reserve;
mod transit;

pub use transit::{Look, Settled, Transit};

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, getrlimit};

use super::kernel;

/// As long as they are few, private fds have numbers below this: within an fd_set, above what most programs ever
/// use, and not at an end that programs choose for themselves.
const USUAL: u32 = 960;

/// None is above this, whatever the limit.
const CEILING: u32 = 65_536;

/// No private fd has this number or a higher one.
const END: u32 = 131_072;

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (END / WORD_BITS) as usize;

/// One bit a number. 16 KiB of zero pages, of which only those in use cost memory.
static OWNED: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

/// How many there are.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// No private fd has ever had a lower number than this.
static LOWEST: AtomicU32 = AtomicU32::new(END);

/// Is `fd` one of the library's own? Async-signal-safe; a compare for ordinary numbers.
#[inline]
pub fn is_private(fd: RawFd) -> bool {
    // A negative number becomes a large one and is past the bitmap.
    let n = fd as u32;
    n >= LOWEST.load(Ordering::Relaxed) && bit(n).is_some_and(|(word, mask)| word.load(Ordering::Relaxed) & mask != 0)
}

/// The lowest private fd in `first..=last`, for walking around them in a close_range.
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

/// Walks `first..=last` as the pieces that hold no private fd, in order; each is inclusive.
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

/// A file descriptor that only the library knows: out of the way, close-on-exec, registered until dropped.
#[derive(Debug)]
pub struct PrivateFd {
    fd: RawFd,
}

impl PrivateFd {
    /// Opens a file by `open` at a private number. Its errors, and EMFILE as for [`Self::place`].
    pub fn open(open: impl FnOnce() -> Result<OwnedFd, Errno>) -> Result<Self, Errno> {
        let _transit = Transit::begin();
        Self::place(open()?)
    }

    /// Moves `fd` to a private number; the old number is free again, also when this fails.
    ///
    /// EMFILE if the program's limit leaves no number.
    pub fn place(fd: OwnedFd) -> Result<Self, Errno> {
        let _transit = Transit::begin();
        let placed = place(fd.as_fd());
        close(fd);
        placed
    }

    /// A private fd for the same open file as the program's `fd`. EMFILE as for [`Self::place`].
    pub fn duplicate(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        place(fd)
    }

    /// [`Self::duplicate`] of an `fd` that the program is closing, with calls or bytes that would else be lost: its
    /// number is free soon, so any other will do. EMFILE if there is none at all.
    pub fn duplicate_closing(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        place_closing(fd)
    }

    /// Takes back a number that [`Self::release`] gave out.
    pub fn adopt(number: RawFd) -> Option<Self> {
        // Not `then_some`: a value made for a number that is not ours would close that.
        is_private(number).then(|| Self { fd: number })
    }

    /// Gives up the ownership but not the fd, which stays private; see [`Self::adopt`].
    pub fn release(self) -> RawFd {
        std::mem::ManuallyDrop::new(self).fd
    }

    /// Leaves the close, which may wait, to [`Self::close_left`].
    pub fn leave(self) {
        left::leave(self.release());
    }

    /// Closes each fd that was [left](Self::leave) and that `take_over` has copied elsewhere. False at the first that
    /// it has not. One thread alone calls this.
    pub fn close_left(mut take_over: impl FnMut(BorrowedFd<'_>) -> bool) -> bool {
        let close = |number| drop(Self { fd: number });
        // SAFETY: a fd that was left is open until it is closed here.
        left::close(|number| take_over(unsafe { BorrowedFd::borrow_raw(number) }), close)
    }
}

impl AsFd for PrivateFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the fd was opened by `place` and is closed by `drop` only, which the borrow
        // prevents; the hooks keep the program from closing it.
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
        // First the bitmap, then the fd: once closed, another thread may be given the same number
        // and enter it, and its entry must not be erased.
        unregister(self.fd);
        // SAFETY: this value owned the fd, and nobody can use it any more.
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
    // The bit before the bound: a hook that sees the bound must see the bit. Nothing is read
    // through either, so a hook on another thread that is a moment late sees what it would have
    // seen if it had run a moment earlier.
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

/// Where to look for a number: the upper `most` of those below `end`, downwards, as long as there are fewer than that
/// private fds.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    end: u32,
    most: u32,
}

/// The places under a soft limit, one after the other. Each leaves the program three quarters of its numbers, but for
/// the few that the library cannot do without.
fn places(soft: u64) -> [Place; 2] {
    const NEEDED: u32 = 8;
    [USUAL, CEILING].map(|end| {
        // At most `end`, which fits.
        let end = soft.min(end.into()) as u32;
        let most = (end / 4).saturating_add(NEEDED);
        Place { end, most }
    })
}

impl Place {
    /// The least number in it.
    fn least(&self) -> RawFd {
        self.end.saturating_sub(self.most) as RawFd
    }
}

fn soft_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// So many numbers are left to the program whenever one is taken: as many as it may close before it opens as many.
const SPARE: usize = 4;

/// Which numbers will do.
#[derive(Clone, Copy, PartialEq)]
enum Take {
    /// Those of the place, if some are left.
    High,
    /// Those of the place, and be it the last.
    Last,
    /// The highest that is free, whichever.
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

/// However many there are: the program has one fewer soon.
fn place_closing(fd: BorrowedFd<'_>) -> Result<PrivateFd, Errno> {
    let _transit = Transit::begin();
    let places = places(soft_limit());
    let find = |take| places.iter().find_map(|place| place_in(fd, place, take));
    let placed = find(Take::Last)
        .or_else(|| take_reserved(fd))
        .or_else(|| find(Take::Any));
    placed.ok_or(Errno::MFILE)
}

/// Gives up the numbers that are set aside for what the program closes.
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
    // Dropped on an error, and so set aside again.
    reserve::put(fd, number.fd).ok().map(|()| number)
}

fn place_in(fd: BorrowedFd<'_>, place: &Place, take: Take) -> Option<PrivateFd> {
    // A try costs a system call; a program that uses this many numbers at the top of its range
    // needs them more than we do.
    const TRIES: usize = 1024;
    let mut tries = (0..place.end)
        .rev()
        .filter(|n| !is_private(*n as RawFd))
        .take(TRIES)
        .peekable();
    let mut next = || {
        loop {
            match fcntl_dupfd_cloexec(fd, *tries.peek()? as RawFd) {
                // There may be another from there on.
                Ok(new) => return Some(new),
                Err(_) => tries.next(),
            };
        }
    };
    let new = next()?;
    let is_high = new.as_raw_fd() >= place.least();
    let mut left: [Option<OwnedFd>; SPARE] = Default::default();
    // From the top, as the number itself: where there are many, none of them is a low one.
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

/// Enters a number that is to be private.
fn keep(new: OwnedFd) -> Option<PrivateFd> {
    if register(new.as_raw_fd()) {
        Some(PrivateFd { fd: new.into_raw_fd() })
    } else {
        close(new);
        None
    }
}

/// Puts things right in a fork child: of the inherited private fds only those that `keep` names stay open and
/// private.
///
/// To be called from the child's atfork handler, before anything else here. Async-signal-safe if
/// `keep` is.
///
/// # Safety
/// No [`PrivateFd`] that `keep` refuses may be used or dropped in the child afterwards: its number may
/// be another file's. (Forget its owner.)
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
            // What a plugin has told of, and has closed before, is not there; nobody has opened anything since.
            // SAFETY: the bitmap says that the library owns it, and the caller that no owner of it
            // will use or close it again.
            let _ = unsafe { kernel::call(libc::SYS_close, [n as usize, 0, 0, 0, 0, 0]) };
        }
    }
}

#[cfg(test)]
mod tests;
