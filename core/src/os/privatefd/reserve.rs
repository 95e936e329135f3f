//! Numbers set aside for duplicates that must not fail. A program may have all other numbers in use and close a
//! connection whose calls or bytes would be lost without a duplicate of the fd.
//!
//! Each such number is occupied by an eventfd that is never used, so that the kernel does not give it to the program.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{DupFlags, Errno, dup3};

const NONE: RawFd = -1;

/// The numbers that are set aside. A single one would prevent any loss: each close frees a number for the next. With
/// more of them, fewer closes at the same time need a number that the program would have been given.
static NUMBERS: [AtomicI32; SIZE] = [const { AtomicI32::new(NONE) }; SIZE];
pub(super) const SIZE: usize = 4;

/// The number of the eventfd that is duplicated to all of `NUMBERS`. It is never given out.
static FILE: AtomicI32 = AtomicI32::new(NONE);

/// The least number that may be set aside.
static LEAST: AtomicI32 = AtomicI32::new(0);

/// Sets missing numbers aside. Replaces those at or above the end of `range`, which are left from before the program
/// lowered its limit. `another` duplicates a file to a number in the range; `close` closes a number that is not needed.
pub(super) fn stock(
    range: Range<RawFd>,
    mut another: impl FnMut(BorrowedFd<'_>) -> Option<RawFd>,
    close: impl Fn(RawFd),
) {
    LEAST.store(range.start, Relaxed);
    let mut fill = |slot: &AtomicI32, before, file: BorrowedFd<'_>| {
        let number = another(file)?;
        // If another thread was faster, the new number is surplus; otherwise the one that was in the slot before.
        let surplus = slot.compare_exchange(before, number, AcqRel, Relaxed).unwrap_or(number);
        (surplus != NONE).then(|| close(surplus));
        Some(())
    };
    if file().is_none() {
        let Ok(file) = eventfd(0, EventfdFlags::CLOEXEC) else {
            return;
        };
        fill(&FILE, NONE, file.as_fd());
        // SAFETY: `into_raw_fd` has taken the fd out of its owner, whose drop would call libc's close, which is hooked.
        unsafe { rustix::io::close(file.into_raw_fd()) };
    }
    let Some(file) = file() else { return };
    for slot in &NUMBERS {
        let before = slot.load(Relaxed);
        if (before == NONE || before >= range.end) && fill(slot, before, file).is_none() {
            return;
        }
    }
}

fn file() -> Option<BorrowedFd<'static>> {
    let number = FILE.load(Acquire);
    // SAFETY: the file stays open as long as the process. A fork child closes it, but forgets the number first.
    (number != NONE).then(|| unsafe { BorrowedFd::borrow_raw(number) })
}

/// Returns one of the numbers, which the caller owns from now on; `None` if none is set aside.
pub(super) fn take() -> Option<RawFd> {
    let mut taken = NUMBERS.iter().map(|slot| slot.swap(NONE, AcqRel));
    taken.find(|number| *number != NONE)
}

/// Sets `number` aside instead of closing it, if one is missing. Returns `false` if not: then the caller closes it. The
/// number is private, and only the caller uses it.
pub(super) fn give_back(number: RawFd) -> bool {
    let mut missing = NUMBERS.iter().filter(|slot| slot.load(Relaxed) == NONE).peekable();
    if missing.peek().is_none() || number < LEAST.load(Relaxed) {
        return false;
    }
    file().is_some_and(|file| {
        put(file, number).is_ok() && missing.any(|slot| slot.compare_exchange(NONE, number, AcqRel, Relaxed).is_ok())
    })
}

/// Puts the open file of `fd` at `number`, which the caller owns, in place of the file that was there.
pub(super) fn put(fd: BorrowedFd<'_>, number: RawFd) -> Result<(), Errno> {
    // SAFETY: the caller owns the number, and still does afterwards (`ManuallyDrop`).
    let mut at = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
    dup3(fd, &mut at, DupFlags::CLOEXEC)
}

/// Sets no number aside from now on, and passes the existing ones to `close`. The eventfd stays open, as another thread
/// may be about to duplicate it.
pub(super) fn dismiss(close: impl Fn(RawFd)) {
    FILE.store(NONE, Relaxed);
    std::iter::from_fn(take).for_each(close);
}

/// Forgets the numbers in a fork child, which does not keep them.
pub(super) fn reset_in_fork_child() {
    for slot in [&FILE].into_iter().chain(&NUMBERS) {
        slot.store(NONE, Relaxed);
    }
}
