//! Keeps the program's calls apart from an fd of ours on its way to a private number.
//!
//! The kernel gives a new fd the lowest number first, and nobody knows a copy's number before the call that
//! makes it is back: until the bitmap says so, such a number looks like one that the program means. So either
//! fds are under way, or the program does something for which all have to be settled (it closes a range, forks, or
//! puts a file at a number of its choice), and each waits for the other: not for long, and not for ever,
//! because a signal handler may have interrupted the very thread that it would wait for.
//!
//! A call that makes a number for the program waits for nobody, and nobody for it: it may block. It takes a [`Look`] before,
//! and one that was disturbed puts its number right afterwards.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many of each kind there are, in 16 bits each: fds under way, and those who want them settled. In the upper half, how
/// often fds have been under way; that goes round.
struct Sides(AtomicU64);

const FD: u64 = 1;
const SETTLED: u64 = 1 << 16;
const BEGUN: u64 = 1 << 32;

static SIDES: Sides = Sides(AtomicU64::new(0));

impl Sides {
    /// Counts one of `own` as soon as there is none of the other kind.
    fn enter(&self, own: u64, turns: u32) {
        let others = mask(FD | SETTLED) & !mask(own);
        let own = if own == FD { FD + BEGUN } else { own };
        for turn in 0..turns {
            let free = |sides: u64| (sides & others == 0).then_some(sides.wrapping_add(own));
            // Acquire: what the other side did is done; Release in `leave`.
            if self
                .0
                .fetch_update(Ordering::AcqRel, Ordering::Relaxed, free)
                .is_ok()
            {
                return;
            }
            pause(turn);
        }
        self.0.fetch_add(own, Ordering::AcqRel);
    }

    /// Not below none: a signal handler may have forked meanwhile.
    fn leave(&self, own: u64) {
        let less = |sides: u64| (sides & mask(own) != 0).then(|| sides - own);
        let _ = self
            .0
            .fetch_update(Ordering::Release, Ordering::Relaxed, less);
    }
}

/// The bits in which these are counted.
fn mask(kinds: u64) -> u64 {
    kinds * (SETTLED - 1)
}

/// How often to look again: for 90 ms at least.
const TURNS: u32 = 1000;

/// The other side is a few system calls from its end, if its thread gets to run.
fn pause(turn: u32) {
    if turn < TURNS / 10 {
        rustix::thread::sched_yield();
    } else {
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 100_000,
        });
    }
}

/// While it lives, an fd of ours has, or is about to get, a number that does not look like ours.
#[derive(Debug)]
pub struct Transit(());

impl Transit {
    /// Async-signal-safe; waits a tenth of a second or so at most.
    pub fn begin() -> Self {
        SIDES.enter(FD, TURNS);
        Self(())
    }
}

impl Drop for Transit {
    fn drop(&mut self) {
        SIDES.leave(FD);
    }
}

/// While it lives, every fd of ours is in the bitmap.
#[derive(Debug)]
pub struct Settled(());

impl Settled {
    /// Async-signal-safe; waits a tenth of a second or so at most.
    pub fn begin() -> Self {
        SIDES.enter(SETTLED, TURNS);
        Self(())
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        SIDES.leave(SETTLED);
    }
}

impl Settled {
    /// For a time that ends by [`Self::end`], perhaps elsewhere.
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
    /// The kernel gives numbers under a lock: if ours was given before the program's, it was counted before, and is seen here.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: u32 = 20;

    fn counts(sides: &Sides) -> u64 {
        sides.0.load(Ordering::Relaxed) & mask(FD | SETTLED)
    }

    #[test]
    fn each_kind_keeps_the_other_out_and_lets_its_own_in() {
        for (own, other) in [(FD, SETTLED), (SETTLED, FD)] {
            let sides = Sides(AtomicU64::new(0));
            sides.enter(own, SHORT);
            sides.enter(own, SHORT);
            assert_eq!(counts(&sides), 2 * own);
            std::thread::scope(|s| {
                let waits = s.spawn(|| sides.enter(other, u32::MAX));
                std::thread::sleep(std::time::Duration::from_millis(2));
                assert_eq!(counts(&sides), 2 * own);
                sides.leave(own);
                sides.leave(own);
                assert!(waits.join().is_ok());
            });
            assert_eq!(counts(&sides), other);
        }
    }

    #[test]
    fn who_would_wait_for_itself_goes_on() {
        let sides = Sides(AtomicU64::new(0));
        sides.enter(FD, SHORT);
        sides.enter(SETTLED, SHORT);
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
        sides.enter(SETTLED, SHORT);
        assert!(!is_disturbed(quiet, look()));
        sides.leave(SETTLED);
        assert!(!is_disturbed(quiet, look()));
        // The count of how often goes round.
        sides.enter(FD, SHORT);
        let amid = look();
        assert!(is_disturbed(quiet, look()));
        sides.leave(FD);
        assert!(is_disturbed(quiet, look()), "it began and ended meanwhile");
        assert!(is_disturbed(amid, look()), "it had begun before");
        assert!(!is_disturbed(look(), look()));
    }
}
