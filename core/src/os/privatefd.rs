//! The library's own file descriptors, hidden from the program (ARCHITECTURE, I11).
//!
//! A [`PrivateFd`] has a high number, is close-on-exec, and is entered in a process-wide bitmap. So the hooks of close,
//! dup2 and close_range can check [`is_private`] in a few nanoseconds. This file does not decide what a hook returns
//! for such a number.
//!
//! The choice of numbers: The library never raises the program's limit (RLIMIT_NOFILE), not even for a moment. Other
//! threads would see the raised limit, and children that they start would keep it. So the numbers are allocated
//! downwards from `USUAL`, or from the limit, if that is lower or many numbers are needed. They do not start near the
//! end of a high limit, because the kernel's fd table would then extend up to there, and each fork copies that table.
//! Also, a select over getdtablesize() fds, which the kernel cuts to the table, would read beyond the 1,024 bits of an
//! fd_set. Private fds leave the program most of its limit.
//!
//! A new fd first has the lowest free number. The few instructions until it is moved to a private number are its
//! *transit* ([`Transit`]). If another thread of the program opens a file meanwhile, that file may get the next higher
//! number. `shims/src/hooks/fd.rs` detects that by the counts of transits, and corrects the number. A close_range,
//! which could close the fd in transit, waits until the transit has ended.
//!
//! A private fd has no number in the lower part of the limit, since the program would lack that number as long as the
//! fd is open. The last `SPARE` free numbers are left to the program. So a program at its limit, which closes some fds
//! to open others, finds free numbers. Both rules have an exception: a duplicate of an fd that the program is closing
//! must have a number in any case. If need be, it gets a number that was set aside, or any free number if many fds are
//! closed at once.
//!
//! The close of some private fds can block. A thread that must not block [leaves](PrivateFd::leave) such a close to a
//! thread that can wait for it.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{DupFlags, Errno, dup3, fcntl_dupfd_cloexec};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Resource, getrlimit};

use crate::os::{kernel, thread};

/// While private fds are few, all have numbers below this. Such numbers lie within an fd_set, above the numbers that
/// most programs ever use, and below the end of the usual limit of 1,024, where some programs place fds of their own.
const USUAL: u32 = 960;

/// The lowest soft limit under which private fds are made. A program that chooses a lower limit needs each number
/// itself.
const LEAST_LIMIT: u64 = 64;

/// Private numbers are searched below this bound, however high the program's limit is. The kernel's search upwards from
/// there (`place_in`) may end above it.
const CEILING: u32 = 65_536;

/// The end of the bitmap: no private fd has this number or a higher one.
const END: u32 = 131_072;

const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (END / WORD_BITS) as usize;

/// Stands in the place of a number if there is none.
const NONE: RawFd = -1;

/// The bitmap, with one bit for each number: 16 KiB of zero pages, where only the used pages take memory.
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
    n >= LOWEST.load(Relaxed) && bit(n).is_some_and(|(word, mask)| word.load(Relaxed) & mask != 0)
}

/// Returns the lowest private fd in `first..=last`; `None` if there is none.
/// Async-signal-safe.
fn next_private(first: u32, last: u32) -> Option<u32> {
    let first = first.max(LOWEST.load(Relaxed));
    let last = last.min(END - 1);
    let mut n = first;
    while n <= last {
        let word = OWNED.get((n / WORD_BITS) as usize)?.load(Relaxed);
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

/// A file descriptor that only the library knows: at a high number, close-on-exec, and in the bitmap until dropped.
#[derive(Debug)]
pub struct PrivateFd {
    fd: RawFd,
}

impl PrivateFd {
    /// Opens a file by `open` and moves it to a private number. Fails with the errors of `open`, and with EMFILE as
    /// [`Self::place`] does.
    pub fn open(open: impl FnOnce() -> Result<OwnedFd, Errno>) -> Result<Self, Errno> {
        let _transit = Transit::begin();
        Self::place(open()?)
    }

    /// Moves `fd` to a private number. The old number is free afterwards, also if this fails.
    ///
    /// Fails with EMFILE if the program's limit leaves no number.
    pub fn place(fd: OwnedFd) -> Result<Self, Errno> {
        let _transit = Transit::begin();
        let placed = Self::duplicate(fd.as_fd());
        close(fd);
        placed
    }

    /// Returns a private fd for the same open file as the program's `fd`. Fails with EMFILE as [`Self::place`] does.
    pub fn duplicate(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        let _transit = Transit::begin();
        let (count, soft) = (COUNT.load(Relaxed), soft_limit());
        if soft < LEAST_LIMIT {
            return Err(Errno::MFILE);
        }
        let mut places = places(soft).into_iter().filter(|place| count < place.most);
        let placed = places.find_map(|place| {
            let placed = place_in(fd, &place, Take::High)?;
            stock_reserve(&place);
            Some(placed)
        });
        placed.ok_or(Errno::MFILE)
    }

    /// Duplicates an `fd` that the program is closing. To be called where calls or bytes would be lost without a
    /// duplicate. The number of `fd` is free soon, so this uses any free number if needed, however many private fds
    /// there are. Fails with EMFILE if there is no free number.
    pub fn duplicate_closing(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        let _transit = Transit::begin();
        let places = places(soft_limit());
        let find = |take| places.iter().find_map(|place| place_in(fd, place, take));
        let placed = find(Take::Last)
            .or_else(|| take_reserved(fd))
            .or_else(|| find(Take::Any));
        placed.ok_or(Errno::MFILE)
    }

    /// Returns two connected AF_UNIX SEQPACKET sockets. Fails with the kernel's errno.
    pub(super) fn pair() -> Result<(Self, Self), Errno> {
        let _transit = Transit::begin();
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // Both fds are moved before either result is checked, since dropping an `OwnedFd` would close it through libc.
        let (a, b) = (Self::place(a), Self::place(b));
        Ok((a?, b?))
    }

    /// Takes over a number that [`Self::release`] returned; `None` if the number is not private.
    pub fn adopt(number: RawFd) -> Option<Self> {
        // `then_some` would make the value also for a number of the program's, and dropping that value would close the
        // number.
        is_private(number).then(|| Self { fd: number })
    }

    /// Gives up the ownership and returns the fd, which stays open and private; see [`Self::adopt`].
    pub fn release(self) -> RawFd {
        ManuallyDrop::new(self).fd
    }

    /// Leaves the close, which may block, to [`Self::close_left`]. Any thread may call this; it never waits. If the
    /// list `LEFT` is full, the fd stays open for good. A caller prevents that by [`is_left_full`].
    pub fn leave(self) {
        let number = self.release();
        LEFT.iter()
            .any(|slot| slot.compare_exchange(NONE, number, AcqRel, Relaxed).is_ok());
    }

    /// Calls `take_over` for each fd that was [left](Self::leave), and closes the fd if `take_over` has copied it
    /// elsewhere. Returns `false` at the first fd that `take_over` has not copied. Only one thread calls this.
    pub fn close_left(mut take_over: impl FnMut(BorrowedFd<'_>) -> bool) -> bool {
        for slot in &LEFT {
            let number = slot.load(Acquire);
            if number == NONE {
                continue;
            }
            // SAFETY: an fd that was left stays open until it is closed here.
            if !take_over(unsafe { BorrowedFd::borrow_raw(number) }) {
                return false;
            }
            drop(Self { fd: number });
            slot.store(NONE, Release);
        }
        true
    }
}

impl AsFd for PrivateFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the fd is open, and only `drop` closes it, which the borrow prevents. The hooks keep the program from
        // closing it.
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
        if give_back(self.fd) {
            return;
        }
        // The bitmap entry is removed before the close. After the close another thread may get the same number and
        // enter it, and that entry must not be removed.
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

/// Enters a number in the bitmap. Returns false if the number lies beyond the bitmap.
fn register(fd: RawFd) -> bool {
    let n = fd as u32;
    let Some((word, mask)) = bit(n) else {
        return false;
    };
    // The bit is set before the bound `LOWEST`. A hook in another thread loads both Relaxed, so it may see the changes
    // a moment late. No data is read through either word, so such a hook answers as if it had run a moment earlier.
    if word.fetch_or(mask, Release) & mask == 0 {
        COUNT.fetch_add(1, Relaxed);
    }
    LOWEST.fetch_min(n, Release);
    true
}

fn unregister(fd: RawFd) {
    if let Some((word, mask)) = bit(fd as u32)
        && word.fetch_and(!mask, Relaxed) & mask != 0
    {
        COUNT.fetch_sub(1, Relaxed);
    }
}

/// A range to search for numbers: the upper `most` numbers below `end`, searched from the top down. The range is used
/// while there are fewer than `most` private fds.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    end: u32,
    most: u32,
}

/// Returns the ranges in which to search for private numbers under a soft limit, the first choice first. Each is the
/// upper quarter of the numbers below its `end`, and `NEEDED` numbers more, which the library needs in any case.
fn places(soft: u64) -> [Place; 2] {
    const NEEDED: u32 = 8;
    [USUAL, CEILING].map(|end| {
        // The minimum is at most `end`, so the cast is lossless.
        let end = soft.min(end.into()) as u32;
        let most = (end / 4).saturating_add(NEEDED);
        Place { end, most }
    })
}

impl Place {
    /// Returns the lowest number of the range.
    fn least(&self) -> RawFd {
        self.end.saturating_sub(self.most) as RawFd
    }
}

fn soft_limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The number of free fd numbers that are left to the program whenever a private fd takes one. A program may close up
/// to this many fds before it opens as many.
const SPARE: usize = 4;

/// The numbers that are acceptable for a private fd.
#[derive(Clone, Copy, PartialEq)]
enum Take {
    /// Numbers of the range, if `SPARE` other numbers stay free.
    High,
    /// Numbers of the range, even if no other number stays free.
    Last,
    /// The highest free number, even below the range.
    Any,
}

fn place_in(fd: BorrowedFd<'_>, place: &Place, take: Take) -> Option<PrivateFd> {
    // Each try costs a system call. A program that uses this many numbers at the top of its range needs them more than
    // the library does.
    const TRIES: usize = 1024;
    let mut tries = (0..place.end)
        .rev()
        .filter(|n| !is_private(*n as RawFd))
        .take(TRIES)
        .peekable();
    let mut next = || {
        loop {
            match fcntl_dupfd_cloexec(fd, *tries.peek()? as RawFd) {
                // The number stays at the front of `tries`: F_DUPFD searches from that number upwards, and the next
                // call may find another free one.
                Ok(new) => return Some(new),
                Err(_) => tries.next(),
            };
        }
    };
    let new = next()?;
    let is_high = new.as_raw_fd() >= place.least();
    let mut left: [Option<OwnedFd>; SPARE] = Default::default();
    // The search for the numbers of `left` goes on downwards where the search for `new` has ended. So if enough high
    // numbers are free, all numbers of `left` are high.
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
    if does && register(new.as_raw_fd()) {
        Some(PrivateFd { fd: new.into_raw_fd() })
    } else {
        close(new);
        None
    }
}

/// Numbers set aside for duplicates that must not fail. They are for a program that has all other numbers in use, and
/// closes a connection whose calls or bytes would be lost without a duplicate of the fd. Each number is occupied by an
/// eventfd that is never used, so that the kernel does not give the number to the program. A single number would
/// prevent any loss, since each close frees a number for the next duplicate. Several are set aside: the more there are,
/// the fewer simultaneous closes take a number that the program would have been given.
static NUMBERS: [AtomicI32; RESERVED] = [const { AtomicI32::new(NONE) }; RESERVED];
const RESERVED: usize = 4;

/// The number of the eventfd that is duplicated to all of `NUMBERS`. This number itself is not used for duplicates of
/// the program's fds.
static RESERVE_FILE: AtomicI32 = AtomicI32::new(NONE);

/// The lowest number that may be set aside, by the last call of `stock_reserve`.
static RESERVE_LEAST: AtomicI32 = AtomicI32::new(0);

/// Fills the empty slots of `NUMBERS`. Also replaces numbers at or above the end of `place`: the program has lowered
/// its limit since they were set aside.
fn stock_reserve(place: &Place) {
    RESERVE_LEAST.store(place.least(), Relaxed);
    let fill = |slot: &AtomicI32, before, file: BorrowedFd<'_>| {
        let number = place_in(file, place, Take::High)?.release();
        // If another thread was faster, the new number is surplus; otherwise the number that was in the slot before is.
        let surplus = slot.compare_exchange(before, number, AcqRel, Relaxed).unwrap_or(number);
        (surplus != NONE).then(|| drop(PrivateFd { fd: surplus }));
        Some(())
    };
    if reserve_file().is_none() {
        let Ok(file) = eventfd(0, EventfdFlags::CLOEXEC) else {
            return;
        };
        fill(&RESERVE_FILE, NONE, file.as_fd());
        close(file);
    }
    let Some(file) = reserve_file() else { return };
    for slot in &NUMBERS {
        let before = slot.load(Relaxed);
        if (before == NONE || before >= place.end as RawFd) && fill(slot, before, file).is_none() {
            return;
        }
    }
}

fn reserve_file() -> Option<BorrowedFd<'static>> {
    let number = RESERVE_FILE.load(Acquire);
    // SAFETY: the file stays open as long as the process. A fork child closes it, but forgets the number first.
    (number != NONE).then(|| unsafe { BorrowedFd::borrow_raw(number) })
}

/// Takes a number that is set aside; `None` if there is none.
fn take_number() -> Option<PrivateFd> {
    let mut taken = NUMBERS.iter().map(|slot| slot.swap(NONE, AcqRel));
    taken.find(|number| *number != NONE).map(|fd| PrivateFd { fd })
}

/// Puts the open file of `fd` at a number that is set aside; `None` if there is none, or on an error.
fn take_reserved(fd: BorrowedFd<'_>) -> Option<PrivateFd> {
    let number = take_number()?;
    // On an error `number` is dropped, which sets it aside again (`give_back`).
    put_at(fd, number.fd).ok().map(|()| number)
}

/// Sets `number` aside instead of closing it, if a slot of `NUMBERS` is empty and the number is not too low
/// (`RESERVE_LEAST`). Returns `false` if the number is not set aside: the caller then closes it. The number is private,
/// and only the caller uses it.
fn give_back(number: RawFd) -> bool {
    let mut missing = NUMBERS.iter().filter(|slot| slot.load(Relaxed) == NONE).peekable();
    if missing.peek().is_none() || number < RESERVE_LEAST.load(Relaxed) {
        return false;
    }
    reserve_file().is_some_and(|file| {
        put_at(file, number).is_ok() && missing.any(|slot| slot.compare_exchange(NONE, number, AcqRel, Relaxed).is_ok())
    })
}

/// Puts the open file of `fd` at `number`, which the caller owns, in place of the file that was there.
fn put_at(fd: BorrowedFd<'_>, number: RawFd) -> Result<(), Errno> {
    // SAFETY: the caller owns the number, and still owns it afterwards (`ManuallyDrop`).
    let mut at = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
    dup3(fd, &mut at, DupFlags::CLOEXEC)
}

/// Closes the numbers that are set aside. No number is set aside again before the next [`PrivateFd::duplicate`]. The
/// eventfd that occupied them, `RESERVE_FILE`, stays open, since another thread may be about to duplicate it.
pub fn dismiss_reserve() {
    RESERVE_FILE.store(NONE, Relaxed);
    std::iter::from_fn(take_number).for_each(drop);
}

/// Descriptors that the library does not use any more and whose close may block. Each stays open until it was sent to a
/// thread that may block (`os::apart`), so that the last close is made there.
static LEFT: [AtomicI32; 64] = [const { AtomicI32::new(NONE) }; 64];

/// Returns whether `LEFT` has entries.
#[inline]
pub fn is_any_left() -> bool {
    left() != 0
}

/// Returns whether `LEFT` is at least half full. If it is, the caller must accept no further channel.
pub fn is_left_full() -> bool {
    left() >= LEFT.len() / 2
}

fn left() -> usize {
    LEFT.iter().filter(|slot| slot.load(Relaxed) != NONE).count()
}

// Two sides that exclude each other: calls of the program, and library fds on their way to a private number.
//
// The kernel gives a new fd the lowest number first, and the number of a duplicate is unknown until the call that makes
// it returns. Until the bitmap has that number, it looks like a number of the program's. So there are two sides, and
// each waits for the other: fds in transit ([`Transit`]), and calls that need all library fds settled, at private
// numbers ([`Settled`]). Such a call closes a range, forks, or puts a file at a number that the program chooses.
//
// The wait is usually short. A thread does not wait for a transit or a call of its own: it may be a signal handler that
// has interrupted that very transit or call. The calls of the program have priority: an fd whose transit has not begun
// waits until they have ended. Otherwise transits one after the other might never let such a call run.
//
// A call that makes an fd for the program waits for neither side, and neither side waits for it, as it may block.
// Before such a call, its hook reads the counts ([`Look`]). If a transit has disturbed the call, the hook corrects the
// number afterwards.

/// The counts of both sides, with 16 bits each: fds in transit, and callers that need fds settled. The upper half
/// counts the transits that have begun, and wraps.
struct Sides(AtomicU64);

const FD: u64 = 1;
const SETTLED: u64 = 1 << 16;
const BEGUN: u64 = 1 << 32;

static SIDES: Sides = Sides(AtomicU64::new(0));

impl Sides {
    /// Counts an fd in transit once no caller needs fds settled, or after `turns` checks. If the fd `is_part` of
    /// another transit of the same thread, it is counted at once, since such a caller already waits for that transit.
    fn enter_fd(&self, is_part: bool, turns: u32) {
        let others = if is_part { 0 } else { mask(SETTLED) };
        for turn in 0..turns {
            let free = |sides: u64| (sides & others == 0).then_some(sides.wrapping_add(FD + BEGUN));
            // Acquire pairs with the Release in `leave`: the accesses of the other side have happened before.
            if self.0.fetch_update(AcqRel, Relaxed, free).is_ok() {
                return;
            }
            pause(turn);
        }
        self.0.fetch_add(FD + BEGUN, AcqRel);
    }

    /// Counts a caller that needs fds settled, and waits until no fd is in transit, but for at most `turns` checks.
    fn enter_settled(&self, turns: u32) {
        let mut sides = self.0.fetch_add(SETTLED, AcqRel);
        for turn in 0..turns {
            if sides & mask(FD) == 0 {
                return;
            }
            pause(turn);
            sides = self.0.load(Acquire);
        }
    }

    /// Subtracts one from the count `own`, but never goes below zero. A signal handler may have forked since the
    /// addition, and in a fork child the counts begin at zero.
    fn leave(&self, own: u64) {
        let less = |sides: u64| (sides & mask(own) != 0).then(|| sides - own);
        let _ = self.0.fetch_update(Release, Relaxed, less);
    }
}

/// Returns the bits of the counts of these kinds.
fn mask(kinds: u64) -> u64 {
    kinds * (SETTLED - 1)
}

/// The most times that a thread checks whether the other side's count is 0 ([`Sides`]). After that it goes on although
/// the count is not 0. The checks take about 2 s or more, because on a busy machine the thread of the other side may
/// not get to run. They are bounded, because that thread may have been stopped.
const TURNS: u32 = 20_000;
/// This many first checks yield the processor. Each later check sleeps 100 µs.
const SHORT_TURNS: u32 = 100;

/// Waits between two checks. The other side needs only a few system calls to finish, once its thread runs.
fn pause(turn: u32) {
    if turn < SHORT_TURNS {
        rustix::thread::sched_yield();
    } else {
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 100_000,
        });
    }
}

/// Returns how many times to check whether the other side's count (of [`Sides`]) is 0. `own` is the part of that count
/// that comes from this thread. If that part is not 0, returns 0: the count cannot become 0 while this thread waits.
fn turns(own: &Cell<u32>) -> u32 {
    if own.get() > 0 { 0 } else { TURNS }
}

/// Subtracts one, but not below zero, for the reason given at [`Sides::leave`].
fn one_less(own: &Cell<u32>) {
    own.set(own.get().saturating_sub(1));
}

/// A period in which a library fd has, or is about to get, a number that is not in the bitmap yet. Ends when dropped.
#[derive(Debug)]
pub struct Transit(());

impl Transit {
    /// Begins a transit. Async-signal-safe; waits for some seconds at most.
    pub fn begin() -> Self {
        let thread = thread::current();
        let own = &thread.transits;
        SIDES.enter_fd(own.get() > 0, turns(&thread.settles));
        own.set(own.get() + 1);
        Self(())
    }
}

impl Drop for Transit {
    fn drop(&mut self) {
        one_less(&thread::current().transits);
        SIDES.leave(FD);
    }
}

/// A period in which every library fd is in the bitmap. Ends when dropped. It is also a section of the thread, so that
/// signal handlers are deferred. A handler that ran in the period might wait for a thread that is about to begin a
/// [`Transit`], and that thread waits for the period to end.
#[derive(Debug)]
pub struct Settled(());

impl Settled {
    /// Begins a period in which every library fd is in the bitmap. Async-signal-safe. Waits for fds in transit, some
    /// seconds at most.
    pub fn begin() -> Self {
        let thread = thread::current();
        thread.begin();
        let own = &thread.settles;
        SIDES.enter_settled(turns(&thread.transits));
        own.set(own.get() + 1);
        Self(())
    }

    /// Makes the period last until [`Self::end`], which may be called elsewhere in this thread, or in a fork child by
    /// the copy of this thread.
    pub fn hold(self) {
        std::mem::forget(self);
    }

    /// Ends a period that was [held](Self::hold).
    pub fn end() {
        drop(Self(()));
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        let thread = thread::current();
        one_less(&thread.settles);
        SIDES.leave(SETTLED);
        thread.end();
    }
}

/// The counts before a call that makes an fd for the program. They show whether library fds were in transit.
#[derive(Clone, Copy, Debug)]
pub struct Look(u64);

impl Look {
    /// Returns the present counts. Async-signal-safe; one load.
    #[inline]
    pub fn now() -> Self {
        Self(SIDES.0.load(Acquire))
    }

    /// Returns whether a library fd was in transit at any time since. Then the number that the kernel has given the
    /// program may be higher than the lowest number that is free apart from library fds.
    ///
    /// A library fd disturbs the call only if it got its number before the program's fd did. It was counted before it
    /// got that number, and the kernel assigns numbers under a lock. So the load of this function finds it counted.
    #[inline]
    pub fn is_disturbed(self) -> bool {
        is_disturbed(self.0, SIDES.0.load(Acquire))
    }
}

#[inline]
fn is_disturbed(before: u64, after: u64) -> bool {
    before & mask(FD) != 0 || (before ^ after) / BEGUN != 0
}

/// Resets the private fds in a fork child: fds for which `keep` returns true stay open and private, all others are
/// closed.
///
/// To be called from the child's atfork handler, before anything else of this module. Async-signal-safe if `keep` is.
///
/// # Safety
/// No [`PrivateFd`] that `keep` refuses may be used or dropped in the child afterwards, as its number may belong to
/// another file. (Its owner has to be forgotten.)
pub unsafe fn reset_in_fork_child(keep: impl Fn(RawFd) -> bool) {
    // The child has none of the parent's other threads, so no fd is in transit.
    SIDES.0.fetch_and(!mask(FD | SETTLED), Relaxed);
    thread::current().transits.set(0);
    thread::current().settles.set(0);
    // Numbers that are set aside, and fds whose close was left, are closed with the other private fds.
    for slot in [&RESERVE_FILE].into_iter().chain(&NUMBERS).chain(&LEFT) {
        slot.store(NONE, Relaxed);
    }
    let mut from = 0;
    while let Some(n) = next_private(from, END) {
        from = n + 1;
        let fd = n as RawFd;
        if !keep(fd) {
            unregister(fd);
            // SAFETY: by the bitmap the library owns the fd. The caller guarantees that no owner of it uses or closes
            // it again.
            let _ = unsafe { kernel::call(libc::SYS_close, [n as usize, 0, 0, 0, 0, 0]) };
        }
    }
}

#[cfg(test)]
mod tests;
