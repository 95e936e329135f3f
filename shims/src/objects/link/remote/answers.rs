//! How long a peer's end takes to give the answers for which it does not need its program. The time bounds how long
//! calls wait for such an answer. It is microseconds if a thread of the peer checks all the time, and tens of ms on an
//! overloaded machine. The logic is pure: the caller passes the times.

#![forbid(unsafe_code)]

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// A call waits for this many times the known answer time, but no longer than `LONGEST`, ns.
const TIMES: u64 = 2;
const LONGEST: u64 = 50_000_000;
/// The difference to a longer answer counts by 1/`UP` at once, to a shorter one by 1/`DOWN`.
const UP: u64 = 2;
const DOWN: u64 = 8;

/// The answer time of one peer. Two threads that write at once may lose one measurement, which does no harm.
#[derive(Default)]
pub struct Answers {
    /// The smoothed answer time, ns; 0: not known.
    time: AtomicU64,
}

impl Answers {
    /// Forgets the answer time, for another peer.
    pub fn reset(&self) {
        self.time.store(0, Relaxed);
    }

    /// Notes that an answer has taken `ns`.
    pub fn on_answer(&self, ns: u64) {
        let time = self.time.load(Relaxed);
        let next = if ns > time {
            time + (ns - time).div_ceil(UP)
        } else {
            time - (time - ns) / DOWN
        };
        if next != time {
            self.time.store(next, Relaxed);
        }
    }

    /// Notes that an answer has taken longer than `ns`, and that its full time is not known.
    pub fn on_none(&self, ns: u64) {
        if ns >= self.time.load(Relaxed) {
            self.on_answer(ns.saturating_mul(TIMES));
        }
    }

    /// Returns how long to wait for the next answer, ns; at least `least`.
    pub fn patience(&self, least: u64) -> u64 {
        (self.time.load(Relaxed) * TIMES).min(LONGEST).max(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_peer_that_answers_at_once_is_waited_for_as_long_as_the_caller_likes() {
        let answers = Answers::default();
        (0..100).for_each(|_| answers.on_answer(3000));
        assert_eq!(answers.patience(5 * MS), 5 * MS);
    }

    #[test]
    fn a_slow_one_is_waited_for_after_a_few_answers_and_not_for_ever() {
        let answers = Answers::default();
        (0..3).for_each(|_| answers.on_answer(20 * MS));
        assert!((30 * MS..=40 * MS).contains(&answers.patience(5 * MS)));
        (0..100).for_each(|_| answers.on_answer(u64::MAX / 4));
        assert_eq!(answers.patience(5 * MS), LONGEST);
    }

    #[test]
    fn one_that_is_slower_than_anybody_waits_is_waited_for_in_the_end() {
        let answers = Answers::default();
        let given_up = (0..).find(|_| {
            let patience = answers.patience(MS / 2);
            if patience >= 20 * MS {
                return true;
            }
            answers.on_none(patience);
            false
        });
        assert!(given_up < Some(15), "{given_up:?}");
    }

    #[test]
    fn one_slow_answer_among_fast_ones_is_forgotten() {
        let answers = Answers::default();
        answers.on_answer(40 * MS);
        assert!(answers.patience(5 * MS) > 30 * MS);
        (0..20).for_each(|_| answers.on_answer(3000));
        assert_eq!(answers.patience(5 * MS), 5 * MS);
    }
}
