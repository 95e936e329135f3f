//! How long a peer's end takes to answer what it answers without its program: what is worth waiting for, and for how
//! long, goes by that. It is microseconds where a thread looks all the time, and tens of ms on a machine with more to
//! do than it can. Pure: times are given.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Whoever waits gives the answer so many times what the last ones took, but no longer than this, ns.
const TIMES: u64 = 2;
const LONGEST: u64 = 50_000_000;
/// Of a longer time than is known such a part is believed at once, and of a shorter one such.
const UP: u64 = 2;
const DOWN: u64 = 8;

/// See the module. That two who write at once lose one's word is no harm.
#[derive(Default)]
pub struct Answers {
    /// Smoothed, ns.
    time: AtomicU64,
}

impl Answers {
    /// For another peer: nothing is known.
    pub fn reset(&self) {
        self.time.store(0, Relaxed);
    }

    /// One has taken `ns`.
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

    /// One has taken longer than `ns`, and nobody knows how long.
    pub fn on_none(&self, ns: u64) {
        if ns >= self.time.load(Relaxed) {
            self.on_answer(ns.saturating_mul(TIMES));
        }
    }

    /// How long the next is waited for, ns: at `least` so long.
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
