//! Keeps a close_range of the program away from an fd on its way to a private number.
//!
//! The kernel gives a new fd the lowest number first, and nobody knows a copy's number before the call that
//! makes it is back: until the bitmap says so, such a number looks like one that the program means. So either
//! fds are under way or ranges are being closed, and each waits for the other: not for long, and not for ever,
//! because a signal handler may have interrupted the very thread that it would wait for.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many of each kind there are: fds under way in the lower half, ranges being closed in the upper.
struct Sides(AtomicU64);

const FD: u64 = 1;
const RANGE: u64 = 1 << 32;

static SIDES: Sides = Sides(AtomicU64::new(0));

impl Sides {
    /// Counts one of `own` as soon as there is none of the other kind.
    fn enter(&self, own: u64, turns: u32) {
        let others = !mask(own);
        for turn in 0..turns {
            let free = |sides: u64| (sides & others == 0).then_some(sides + own);
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

/// The half in which `own` is counted.
fn mask(own: u64) -> u64 {
    if own == FD { RANGE - 1 } else { !(RANGE - 1) }
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
        SIDES.enter(RANGE, TURNS);
        Self(())
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        SIDES.leave(RANGE);
    }
}

/// In a fork child: those who were under way are not here.
pub(super) fn reset_in_fork_child() {
    SIDES.0.store(0, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: u32 = 20;

    #[test]
    fn each_kind_keeps_the_other_out_and_lets_its_own_in() {
        for (own, other) in [(FD, RANGE), (RANGE, FD)] {
            let sides = Sides(AtomicU64::new(0));
            sides.enter(own, SHORT);
            sides.enter(own, SHORT);
            assert_eq!(sides.0.load(Ordering::Relaxed), 2 * own);
            std::thread::scope(|s| {
                let waits = s.spawn(|| sides.enter(other, u32::MAX));
                std::thread::sleep(std::time::Duration::from_millis(2));
                assert_eq!(sides.0.load(Ordering::Relaxed), 2 * own);
                sides.leave(own);
                sides.leave(own);
                assert!(waits.join().is_ok());
            });
            assert_eq!(sides.0.load(Ordering::Relaxed), other);
        }
    }

    #[test]
    fn who_would_wait_for_itself_goes_on() {
        let sides = Sides(AtomicU64::new(0));
        sides.enter(FD, SHORT);
        sides.enter(RANGE, SHORT);
        sides.leave(RANGE);
        sides.leave(FD);
        // As in a fork child, where the count has begun anew.
        sides.leave(FD);
        sides.leave(RANGE);
        assert_eq!(sides.0.load(Ordering::Relaxed), 0);
    }
}
