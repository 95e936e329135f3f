//! Keeps the program's calls apart from an fd of ours on its way to a private number.
//!
//! The kernel gives a new fd the lowest number first, and nobody knows a copy's number before the call that
//! makes it is back: until the bitmap says so, such a number looks like one that the program means. So either
//! fds are under way, or the program does something for which all have to be settled (it closes a range, forks, or
//! puts a file at a number of its choice), and each waits for the other: not for long, as a rule, and not at all for
//! itself, as a signal handler may have interrupted the very thread that it would wait for. The program comes first:
//! what is not under way yet when it begins to wait begins after it, or several of ours, one after the other, might
//! never leave it a moment.
//!
//! A call that makes a number for the program waits for nobody, and nobody for it: it may block. It takes a [`Look`]
//! before, and one that was disturbed puts its number right afterwards.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::os::thread;

/// How many of each kind there are, in 16 bits each: fds under way, and those who want them settled. In the upper half,
/// how often fds have been under way; that goes round.
struct Sides(AtomicU64);

const FD: u64 = 1;
const SETTLED: u64 = 1 << 16;
const BEGUN: u64 = 1 << 32;

static SIDES: Sides = Sides(AtomicU64::new(0));

impl Sides {
    /// Counts an fd under way as soon as nobody wants them settled; at once if it `is_part` of one that is under way in
    /// the same thread, for which such a one waits.
    fn enter_fd(&self, is_part: bool, turns: u32) {
        let others = if is_part { 0 } else { mask(SETTLED) };
        for turn in 0..turns {
            let free = |sides: u64| (sides & others == 0).then_some(sides.wrapping_add(FD + BEGUN));
            // Acquire: what the other side did is done; Release in `leave`.
            if self.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, free).is_ok() {
                return;
            }
            pause(turn);
        }
        self.0.fetch_add(FD + BEGUN, Ordering::AcqRel);
    }

    /// Counts one who wants fds settled, and waits until none is under way.
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

    /// Not below none: a signal handler may have forked meanwhile.
    fn leave(&self, own: u64) {
        let less = |sides: u64| (sides & mask(own) != 0).then(|| sides - own);
        let _ = self.0.fetch_update(Ordering::Release, Ordering::Relaxed, less);
    }
}

/// The bits in which these are counted.
fn mask(kinds: u64) -> u64 {
    kinds * (SETTLED - 1)
}

/// How often to look again: for two seconds at least, as a machine may be so busy that a thread does not get to run.
/// Never for ever: the other's thread may have been stopped.
const TURNS: u32 = 20_000;
/// The first of them are a moment each.
const SHORT_TURNS: u32 = 100;

/// The other side is a few system calls from its end, if its thread gets to run.
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

/// How often to look for the other side, of which the calling thread has `own`: that is not over while it waits.
fn turns(own: &Cell<u32>) -> u32 {
    if own.get() > 0 { 0 } else { TURNS }
}

/// Not below none, as in [`Sides::leave`].
fn one_less(own: &Cell<u32>) {
    own.set(own.get().saturating_sub(1));
}

/// While it lives, an fd of ours has, or is about to get, a number that does not look like ours.
#[derive(Debug)]
pub struct Transit(());

impl Transit {
    /// Async-signal-safe; waits some seconds at most.
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

/// While it lives, every fd of ours is in the bitmap. It is a section of the thread's: a signal handler that waits for
/// something, in the middle of it, might wait for a thread that is about to begin a [`Transit`].
#[derive(Debug)]
pub struct Settled(());

impl Settled {
    /// Async-signal-safe; waits some seconds at most.
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
    /// For a time that ends by [`Self::end`], perhaps elsewhere in this thread, or in its copy in a fork child.
    pub fn hold(self) {
        std::mem::forget(self);
    }

    /// Ends one time that was [held](Self::hold).
    pub fn end() {
        drop(Self(()));
    }
}

/// What a call that makes a number for the program finds before: whether fds of ours are under way.
#[derive(Clone, Copy, Debug)]
pub struct Look(u64);

impl Look {
    /// Async-signal-safe; one load.
    #[inline]
    pub fn now() -> Self {
        Self(SIDES.0.load(Ordering::Acquire))
    }

    /// Whether an fd of ours was under way at any time since, so that a number which the kernel has given meanwhile may
    /// not be the lowest that is free without ours.
    ///
    /// The kernel gives numbers under a lock: if ours was given before the program's, it was counted before, and is
    /// seen here.
    #[inline]
    pub fn is_disturbed(self) -> bool {
        is_disturbed(self.0, SIDES.0.load(Ordering::Acquire))
    }
}

#[inline]
fn is_disturbed(before: u64, after: u64) -> bool {
    before & mask(FD) != 0 || (before ^ after) / BEGUN != 0
}

/// In a fork child: those who were under way are not here.
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

    /// Until there are so many of each.
    fn await_counts(sides: &Sides, expected: u64) {
        while counts(sides) != expected {
            std::thread::yield_now();
        }
    }

    /// Time for a mistake to show.
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
            // A part of what is under way.
            sides.enter_fd(true, SHORT);
            sides.leave(FD);
            assert!(!settled.is_finished());
            sides.leave(FD);
            assert!(settled.join().is_ok());
            nothing_changes(&sides);
            // Several want it.
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
        // As in a fork child, where the count has begun anew.
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
        // The count of how often goes round.
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
