//! A list of unused descriptors whose close may block. Each stays open until a thread that may block has taken it over
//! (`os::apart`).

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU32};

const NONE: RawFd = -1;
static NUMBERS: [AtomicI32; 64] = [const { AtomicI32::new(NONE) }; 64];
static COUNT: AtomicU32 = AtomicU32::new(0);

/// Adds a descriptor. Any thread may call this; it never waits. If the list is full, the descriptor stays open for
/// good, which [`is_full`] prevents.
pub(super) fn leave(number: RawFd) {
    let is_entered = |slot: &AtomicI32| slot.compare_exchange(NONE, number, AcqRel, Relaxed).is_ok();
    if NUMBERS.iter().any(is_entered) {
        COUNT.fetch_add(1, AcqRel);
    }
}

/// Closes each descriptor that `take_over` has taken over. Returns `false` at the first descriptor that it has not.
pub(super) fn close(mut take_over: impl FnMut(RawFd) -> bool, close: impl Fn(RawFd)) -> bool {
    for slot in &NUMBERS {
        let number = slot.load(Acquire);
        if number == NONE {
            continue;
        }
        if !take_over(number) {
            return false;
        }
        close(number);
        slot.store(NONE, Release);
        COUNT.fetch_sub(1, AcqRel);
    }
    true
}

/// Returns whether the list has entries.
#[inline]
pub fn is_any() -> bool {
    COUNT.load(Relaxed) != 0
}

/// Returns whether the list is half full: then no further channel may be accepted.
pub fn is_full() -> bool {
    COUNT.load(Relaxed) as usize >= NUMBERS.len() / 2
}

/// Empties the list in a fork child, where the descriptors are closed with the other private ones.
pub(super) fn reset_in_fork_child() {
    for slot in &NUMBERS {
        slot.store(NONE, Relaxed);
    }
    COUNT.store(0, Relaxed);
}
