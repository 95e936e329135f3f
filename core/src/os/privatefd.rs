//! The library's own file descriptors, where the program does not see them (DESIGN I11).
//!
//! A [`PrivateFd`] sits at a high number, close-on-exec, and is entered in a process-wide bitmap, so
//! that the hooks of close, dup2 and close_range can ask [`is_private`] in a few nanoseconds. This
//! file does not decide what a hook answers for such a number.
//!
//! Where the numbers are. At or above the program's soft RLIMIT_NOFILE if the hard limit allows, so
//! that the program can neither reach them nor miss them: the limit is raised for the one fcntl that
//! takes the number, and an fd beyond the limit stays valid afterwards. Not below [`FLOOR`] even so,
//! because servers raise their soft limit at start-up, and not far above [`CEILING`], because the
//! kernel's fd table has 8 bytes for each number up to the highest in use, which fork copies. Where
//! the limit cannot be raised: the highest free numbers below it.
//!
//! What cannot be had: the kernel gives every new fd the lowest number first, so for the few
//! instructions until it is moved another thread of the program may get the number above. The file
//! `transit` keeps a close_range off meanwhile.

mod transit;

pub use transit::{Settled, Transit};

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, Rlimit, getrlimit, prlimit};

/// Where a hard limit allows, no private fd is below this number.
pub const FLOOR: u32 = 16_128;

/// The lowest number used where the soft limit is larger than this.
pub const CEILING: u32 = 65_536;

/// No private fd has this number or a higher one.
const END: u32 = 131_072;

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (END / WORD_BITS) as usize;

/// One bit a number. 16 KiB of zero pages, of which only those in use cost memory.
static OWNED: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

/// No private fd has ever had a lower number than this.
static LOWEST: AtomicU32 = AtomicU32::new(END);

/// Is `fd` one of the library's own? Async-signal-safe; a compare for ordinary numbers.
#[inline]
pub fn is_private(fd: RawFd) -> bool {
    // A negative number becomes a large one and is past the bitmap.
    let n = fd as u32;
    n >= LOWEST.load(Ordering::Relaxed)
        && bit(n).is_some_and(|(word, mask)| word.load(Ordering::Relaxed) & mask != 0)
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

/// A file descriptor that only the library knows: high, close-on-exec, registered until dropped.
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
        let placed = place(fd.as_fd());
        close(fd);
        placed
    }

    /// A private fd for the same open file as the program's `fd`. EMFILE as for [`Self::place`].
    pub fn duplicate(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        place(fd)
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

    /// A second fd for the same open file, under another private number. EMFILE as for [`Self::place`].
    pub fn try_clone(&self) -> Result<Self, Errno> {
        place(self.as_fd())
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
    word.fetch_or(mask, Ordering::Release);
    LOWEST.fetch_min(n, Ordering::Release);
    true
}

fn unregister(fd: RawFd) {
    if let Some((word, mask)) = bit(fd as u32) {
        word.fetch_and(!mask, Ordering::Relaxed);
    }
}

/// Where to look for a number, given the soft and the hard limit.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    /// From this number up, which the soft limit allows anyway.
    Within(u32),
    /// From this number up, with the soft limit raised meanwhile.
    Beyond(u32),
    /// Downwards from below this number.
    HighestBelow(u32),
}

fn plan(soft: u64, hard: u64) -> Plan {
    let ideal = soft.clamp(FLOOR.into(), CEILING.into());
    // All casts: the values are at most CEILING.
    if soft > ideal {
        Plan::Within(ideal as u32)
    } else if hard > ideal {
        Plan::Beyond(ideal as u32)
    } else if hard > soft {
        Plan::Beyond(soft as u32)
    } else {
        Plan::HighestBelow(soft as u32)
    }
}

fn place(fd: BorrowedFd<'_>) -> Result<PrivateFd, Errno> {
    let _transit = Transit::begin();
    let turn = Turn::take();
    let limit = getrlimit(Resource::Nofile);
    let soft = limit.current.unwrap_or(u64::MAX);
    let below = |_| place_below(fd, soft.min(CEILING.into()) as u32);
    let Some(turn) = turn else {
        return below(Errno::AGAIN);
    };
    match plan(soft, limit.maximum.unwrap_or(u64::MAX)) {
        Plan::Within(first) => dup_registered(fd, first),
        Plan::Beyond(first) => turn
            .with_raised_limit(limit, || dup_registered(fd, first))
            .or_else(below),
        Plan::HighestBelow(end) => place_below(fd, end),
    }
}

fn place_below(fd: BorrowedFd<'_>, end: u32) -> Result<PrivateFd, Errno> {
    // A try costs a system call; a program that uses this many numbers at the top of its range
    // needs them more than we do.
    const TRIES: usize = 1024;
    (0..end)
        .rev()
        .filter(|n| !is_private(*n as RawFd))
        .take(TRIES)
        .find_map(|n| dup_registered(fd, n).ok())
        .ok_or(Errno::MFILE)
}

/// Duplicates `fd` to the lowest free number from `first` and registers it.
fn dup_registered(fd: BorrowedFd<'_>, first: u32) -> Result<PrivateFd, Errno> {
    let new = fcntl_dupfd_cloexec(fd, first as RawFd)?;
    if register(new.as_raw_fd()) {
        Ok(PrivateFd {
            fd: new.into_raw_fd(),
        })
    } else {
        close(new);
        Err(Errno::MFILE)
    }
}

/// Set while a thread has its [`Turn`].
static TURN_TAKEN: AtomicBool = AtomicBool::new(false);

/// The soft limit to put back, while it is raised; otherwise 0.
static SOFT_BEFORE: AtomicU64 = AtomicU64::new(0);

/// The right to look at the limit and to raise it: one thread at a time, or each would take the other's
/// raised limit for the program's. Not a mutex, because it must be usable in a fork child, and because a
/// signal handler may come here on the thread that holds it: then the other way is taken.
struct Turn;

impl Turn {
    /// The other holder is a few system calls from its end, so a few tries are enough.
    fn take() -> Option<Self> {
        const TRIES: usize = 100;
        (0..TRIES).find_map(|_| {
            // Acquire: pairs with the Release in `drop`; the last holder's limit is back.
            if !TURN_TAKEN.swap(true, Ordering::Acquire) {
                return Some(Self);
            }
            rustix::thread::sched_yield();
            None
        })
    }

    /// Runs `f` with the soft limit at the hard one. EPERM where a sandbox forbids that.
    fn with_raised_limit<T>(
        self,
        before: Rlimit,
        f: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let raised = Rlimit {
            current: before.maximum,
            ..before
        };
        SOFT_BEFORE.store(before.current.unwrap_or(u64::MAX), Ordering::Relaxed);
        let result = prlimit(None, Resource::Nofile, raised).and_then(|old| {
            let result = f();
            let meanwhile = prlimit(None, Resource::Nofile, old);
            // Another thread of the program may have set its limit in between: then that stands.
            if let Ok(set) = meanwhile
                && (set.current, set.maximum) != (raised.current, raised.maximum)
            {
                let _ = prlimit(None, Resource::Nofile, set);
            }
            result
        });
        SOFT_BEFORE.store(0, Ordering::Relaxed);
        result
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        TURN_TAKEN.store(false, Ordering::Release);
    }
}

/// Puts things right in a fork child: the limit that another thread of the parent had raised, and the
/// inherited private fds, of which only those that `keep` names stay open and private.
///
/// To be called from the child's atfork handler, before anything else here. Async-signal-safe if
/// `keep` is.
///
/// # Safety
/// No [`PrivateFd`] that `keep` refuses may be used or dropped in the child afterwards: its number may
/// be another file's. (Forget its owner.)
pub unsafe fn reset_in_fork_child(keep: impl Fn(RawFd) -> bool) {
    transit::reset_in_fork_child();
    TURN_TAKEN.store(false, Ordering::Relaxed);
    let soft = SOFT_BEFORE.swap(0, Ordering::Relaxed);
    let now = getrlimit(Resource::Nofile);
    if soft != 0 && now.current == now.maximum {
        let current = Some(soft).filter(|s| *s != u64::MAX);
        let _ = prlimit(None, Resource::Nofile, Rlimit { current, ..now });
    }
    let mut from = 0;
    while let Some(n) = next_private(from, END) {
        from = n + 1;
        let fd = n as RawFd;
        if !keep(fd) {
            unregister(fd);
            // SAFETY: the bitmap says that the library owns it, and the caller that no owner of it
            // will use or close it again.
            unsafe { rustix::io::close(fd) };
        }
    }
}

#[cfg(test)]
#[path = "privatefd_tests.rs"]
mod tests;
