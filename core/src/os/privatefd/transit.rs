//! Keeps calls of the program apart from a library fd on its way to a private number.
//!
//! The kernel gives a new fd the lowest number first, and the number of a duplicate is unknown until the call that
//! makes it returns. Until the bitmap has that number, it looks like a number of the program's. So there are two sides,
//! and each waits for the other: fds in transit ([`Transit`]), and calls that need all fds settled ([`Settled`]). Such
//! a call closes a range, forks, or puts a file at a number that the program chooses.
//!
//! The wait is short as a rule. A thread does not wait for what it has begun itself: a signal handler may have
//! interrupted the very thread that it would wait for. The calls of the program come first: an fd whose transit has not
//! begun waits until they are done. Otherwise transits one after the other might never leave such a call a moment.
//!
//! A call that makes an fd for the program waits for neither side, and neither side waits for it, as it may block. The
//! hook takes a [`Look`] before, and corrects the number afterwards if the call was disturbed.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::os::thread;

/// Counts of both sides, 16 bits each: fds in transit, and callers that need them settled. The upper half counts the
/// transits that have begun, and wraps.
struct Sides(AtomicU64);

const FD: u64 = 1;
const SETTLED: u64 = 1 << 16;
const BEGUN: u64 = 1 << 32;

static SIDES: Sides = Sides(AtomicU64::new(0));

impl Sides {
    /// Counts an fd in transit once no caller needs fds settled, or after `turns` checks. If `is_part` of a transit of
    /// the same thread, for which such a caller waits already, it is counted at once.
    fn enter_fd(&self, is_part: bool, turns: u32) {
        let others = if is_part { 0 } else { mask(SETTLED) };
        for turn in 0..turns {
            let free = |sides: u64| (sides & others == 0).then_some(sides.wrapping_add(FD + BEGUN));
            // Acquire pairs with the Release in `leave`: the accesses of the other side have happened before.
            if self.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, free).is_ok() {
                return;
            }
            pause(turn);
        }
        self.0.fetch_add(FD + BEGUN, Ordering::AcqRel);
    }

    /// Counts a caller that needs fds settled, and waits until no fd is in transit, or for `turns` checks.
    fn enter_settled(&self, turns: u32) {
        let mut sides = self.0.fetch_add(SETTLED, Ordering::AcqRel);
        for turn in 0..turns {
            if sides & mask(FD) == 0 {
                return;
            }
            pause(turn);
            sides = self.0.load(Ordering::Acquire);
        }
    }

    /// Removes one from the count `own`, but never below zero: a signal handler may have forked meanwhile, and a child
    /// counts anew.
    fn leave(&self, own: u64) {
        let less = |sides: u64| (sides & mask(own) != 0).then(|| sides - own);
        let _ = self.0.fetch_update(Ordering::Release, Ordering::Relaxed, less);
    }
}

/// Returns the bits of the counts of these kinds.
fn mask(kinds: u64) -> u64 {
    kinds * (SETTLED - 1)
}

/// The most checks before giving up: 2 s at least, as on a busy machine the other thread may not get to run. Bounded,
/// because the other thread may have been stopped.
const TURNS: u32 = 20_000;
/// The first checks yield the processor; each later check sleeps 100 µs.
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

/// Returns how often to check for the other side: not at all if the calling thread has `own` entries there, which
/// cannot end while it waits.
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
        let own = thread.transits();
        SIDES.enter_fd(own.get() > 0, turns(thread.settles()));
        own.set(own.get() + 1);
        Self(())
    }
}

impl Drop for Transit {
    fn drop(&mut self) {
        one_less(thread::current().transits());
        SIDES.leave(FD);
    }
}

/// A period in which every library fd is in the bitmap. Ends when dropped. It is also a section of the thread, so that
/// signal handlers wait: one that ran in it and waited might wait for a thread that is about to begin a [`Transit`].
#[derive(Debug)]
pub struct Settled(());

impl Settled {
    /// Begins a period in which every library fd is in the bitmap. Async-signal-safe. Waits for fds in transit, some
    /// seconds at most.
    pub fn begin() -> Self {
        let thread = thread::current();
        thread.begin();
        let own = thread.settles();
        SIDES.enter_settled(turns(thread.transits()));
        own.set(own.get() + 1);
        Self(())
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        let thread = thread::current();
        one_less(thread.settles());
        SIDES.leave(SETTLED);
        thread.end();
    }
}

impl Settled {
    /// Lets the period last until [`Self::end`], which may be called elsewhere in this thread, or by its copy in a fork
    /// child.
    pub fn hold(self) {
        std::mem::forget(self);
    }

    /// Ends a period that was [held](Self::hold).
    pub fn end() {
        drop(Self(()));
    }
}

/// The counts before a call that makes an fd for the program: were library fds in transit then?
#[derive(Clone, Copy, Debug)]
pub struct Look(u64);

impl Look {
    /// Returns the counts of now. Async-signal-safe; one load.
    #[inline]
    pub fn now() -> Self {
        Self(SIDES.0.load(Ordering::Acquire))
    }

    /// Returns whether a library fd was in transit at any time since. Then the number that the kernel has given
    /// meanwhile may be higher than the lowest free number without library fds.
    ///
    /// The kernel gives numbers under a lock. A library fd that got its number before the program's fd was counted
    /// before that, and is seen here.
    #[inline]
    pub fn is_disturbed(self) -> bool {
        is_disturbed(self.0, SIDES.0.load(Ordering::Acquire))
    }
}

#[inline]
fn is_disturbed(before: u64, after: u64) -> bool {
    before & mask(FD) != 0 || (before ^ after) / BEGUN != 0
}

/// Clears the counts in a fork child, which has none of its parent's other threads.
pub(super) fn reset_in_fork_child() {
    SIDES.0.fetch_and(!mask(FD | SETTLED), Ordering::Relaxed);
    thread::current().transits().set(0);
    thread::current().settles().set(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: u32 = 20;

    fn counts(sides: &Sides) -> u64 {
        sides.0.load(Ordering::Relaxed) & mask(FD | SETTLED)
    }

    /// Waits until the counts are as expected.
    fn await_counts(sides: &Sides, expected: u64) {
        while counts(sides) != expected {
            std::thread::yield_now();
        }
    }

    /// Gives a mistake time to show, and checks that the counts stay the same.
    fn nothing_changes(sides: &Sides) {
        let before = counts(sides);
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert_eq!(counts(sides), before);
    }

    #[test]
    fn who_wants_fds_settled_waits_for_those_under_way_and_comes_before_others() {
        let sides = Sides(AtomicU64::new(0));
        sides.enter_fd(false, SHORT);
        sides.enter_fd(false, SHORT);
        sides.leave(FD);
        std::thread::scope(|s| {
            let settled = s.spawn(|| {
                sides.enter_settled(u32::MAX);
                assert_eq!(counts(&sides) & mask(FD), 0);
            });
            await_counts(&sides, FD + SETTLED);
            let next = s.spawn(|| sides.enter_fd(false, u32::MAX));
            nothing_changes(&sides);
            // A part of a transit that is in progress does not wait.
            sides.enter_fd(true, SHORT);
            sides.leave(FD);
            assert!(!settled.is_finished());
            sides.leave(FD);
            assert!(settled.join().is_ok());
            nothing_changes(&sides);
            // Two callers need fds settled at the same time.
            sides.enter_settled(SHORT);
            sides.leave(SETTLED);
            nothing_changes(&sides);
            sides.leave(SETTLED);
            assert!(next.join().is_ok());
        });
        assert_eq!(counts(&sides), FD);
    }

    #[test]
    fn who_would_wait_for_itself_goes_on() {
        let sides = Sides(AtomicU64::new(0));
        sides.enter_fd(false, SHORT);
        sides.enter_settled(SHORT);
        sides.enter_fd(false, SHORT);
        assert_eq!(counts(&sides), 2 * FD + SETTLED);
        sides.leave(FD);
        sides.leave(SETTLED);
        sides.leave(FD);
        // As in a fork child, whose counts begin at zero.
        sides.leave(FD);
        sides.leave(SETTLED);
        assert_eq!(counts(&sides), 0);
    }

    #[test]
    fn a_call_is_disturbed_by_what_was_under_way_at_any_time_of_it() {
        let sides = Sides(AtomicU64::new(u64::MAX - mask(FD | SETTLED)));
        let look = || sides.0.load(Ordering::Relaxed);
        let quiet = look();
        sides.enter_settled(SHORT);
        assert!(!is_disturbed(quiet, look()));
        sides.leave(SETTLED);
        assert!(!is_disturbed(quiet, look()));
        // The count of transits wraps.
        sides.enter_fd(false, SHORT);
        let amid = look();
        assert!(is_disturbed(quiet, look()));
        sides.leave(FD);
        assert!(is_disturbed(quiet, look()), "it began and ended meanwhile");
        assert!(is_disturbed(amid, look()), "it had begun before");
        assert!(!is_disturbed(look(), look()));
    }

    #[test]
    fn nobody_waits_for_what_its_own_thread_has() {
        let thread = thread::current();
        let own = || (turns(thread.transits()), turns(thread.settles()));
        assert_eq!(own(), (TURNS, TURNS));
        let outer = Transit::begin();
        drop(Transit::begin());
        assert_eq!(own(), (0, TURNS));
        drop(outer);
        Settled::begin().hold();
        assert_eq!(own(), (TURNS, 0));
        assert_eq!(thread.depth(), 1, "signal handlers wait");
        Settled::end();
        assert_eq!(own(), (TURNS, TURNS));
        assert_eq!(thread.depth(), 0);
    }
}
