//! Numbers set aside for what must not fail: where a program has all others and closes a connection, with calls or
//! bytes that would else be lost, that needs one for a moment longer.
//!
//! Something has to be at a number, or it is the program's: a file that is asked nothing.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{
    AtomicI32,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{DupFlags, Errno, dup3};

const NONE: RawFd = -1;

/// One would do for nothing to be lost: each close makes a number free for the next. The more closes are under way, the
/// fewer have a number that the program would have been given.
static NUMBERS: [AtomicI32; SIZE] = [const { AtomicI32::new(NONE) }; SIZE];
pub(super) const SIZE: usize = 4;

/// The file that is at all of them, at a number of its own, which is never taken.
static FILE: AtomicI32 = AtomicI32::new(NONE);

/// No number below this is set aside.
static LEAST: AtomicI32 = AtomicI32::new(0);

/// Sets aside what is missing, or is not below the end of `range` any more, where the program has lowered its limit.
/// `another` gives a number in the range for a file, and `close` is for one that is not needed.
pub(super) fn stock(
    range: Range<RawFd>,
    mut another: impl FnMut(BorrowedFd<'_>) -> Option<RawFd>,
    close: impl Fn(RawFd),
) {
    LEAST.store(range.start, Relaxed);
    let mut fill = |slot: &AtomicI32, before, file: BorrowedFd<'_>| {
        let number = another(file)?;
        // Unless another thread was faster, what is not needed is what was there before.
        let surplus = slot.compare_exchange(before, number, AcqRel, Relaxed).unwrap_or(number);
        (surplus != NONE).then(|| close(surplus));
        Some(())
    };
    if file().is_none() {
        let Ok(file) = eventfd(0, EventfdFlags::CLOEXEC) else {
            return;
        };
        fill(&FILE, NONE, file.as_fd());
        // SAFETY: out of its owner, whose drop would call libc's close, which is hooked.
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
    // SAFETY: once made it is open for as long as the process, but for a child of fork, which forgets the number.
    (number != NONE).then(|| unsafe { BorrowedFd::borrow_raw(number) })
}

/// One of the numbers, which is the caller's from now on.
pub(super) fn take() -> Option<RawFd> {
    let mut taken = NUMBERS.iter().map(|slot| slot.swap(NONE, AcqRel));
    taken.find(|number| *number != NONE)
}

/// Sets `number` aside in place of closing it, if one is missing. It is private, and nobody uses it any more.
pub(super) fn give_back(number: RawFd) -> bool {
    let mut missing = NUMBERS.iter().filter(|slot| slot.load(Relaxed) == NONE).peekable();
    if missing.peek().is_none() || number < LEAST.load(Relaxed) {
        return false;
    }
    file().is_some_and(|file| {
        put(file, number).is_ok() && missing.any(|slot| slot.compare_exchange(NONE, number, AcqRel, Relaxed).is_ok())
    })
}

/// Puts the open file of `fd` at `number`, which is the caller's, in place of what was there.
pub(super) fn put(fd: BorrowedFd<'_>, number: RawFd) -> Result<(), Errno> {
    // SAFETY: the caller owns the number, and goes on doing so.
    let mut at = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
    dup3(fd, &mut at, DupFlags::CLOEXEC)
}

/// From now on nothing is set aside: `close` is for what was. The file stays where it is, as another thread may be
/// about to copy it.
pub(super) fn dismiss(close: impl Fn(RawFd)) {
    FILE.store(NONE, Relaxed);
    std::iter::from_fn(take).for_each(close);
}

/// In a fork child, which does not keep them.
pub(super) fn reset_in_fork_child() {
    for slot in [&FILE].into_iter().chain(&NUMBERS) {
        slot.store(NONE, Relaxed);
    }
}
