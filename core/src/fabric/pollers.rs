//! Shares the polling of one descriptor between the threads that sleep for its events ([`Pollers`]). One thread polls,
//! and the others stand by to do so next. Each also sleeps on a futex or doorbell of its own. If all of them polled,
//! each event would wake all of them.
//!
//! A thread that is about to sleep stands by if another polls, and polls otherwise. The last poller that leaves calls
//! one of the threads on standby. So as long as a thread sleeps, one polls, is called, or is on its way. A thread on
//! standby first publishes that and then checks for pollers; a thread that leaves does the two in the other order
//! (`sync`: [`Presence`]).

use crate::sync::{AtomicU64, Presence, Published};

const WORD: u16 = u64::BITS as u16;

/// The pollers of one descriptor, and the threads on standby. Threads go by the numbers of their waiters.
#[derive(Debug)]
pub struct Pollers {
    polling: Presence,
    standing_by: Box<[Published<AtomicU64>]>,
}

/// The result of a poller's leaving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "who is called sleeps"]
pub enum Left {
    /// Other threads poll.
    Others,
    /// No thread polls any more. The thread with this number, if one stood by, is called: the caller wakes it.
    Last(Option<u16>),
}

impl Pollers {
    /// Returns a set with no pollers, for threads with numbers below `numbers`.
    pub fn new(numbers: u16) -> Self {
        let words = numbers.div_ceil(WORD);
        Self {
            polling: Presence::new(),
            standing_by: (0..words).map(|_| Published::default()).collect(),
        }
    }

    /// Returns whether no thread polls.
    pub fn is_empty(&self) -> bool {
        self.polling.is_empty()
    }

    /// Returns whether at most one thread polls.
    pub fn is_at_most_one(&self) -> bool {
        self.polling.count() <= 1
    }

    /// Counts one more poller.
    pub fn enter(&self) {
        self.polling.enter();
    }

    /// Ends the count of one poller. The last one calls a thread on standby.
    pub fn leave(&self) -> Left {
        if self.polling.leave() {
            Left::Last(self.call())
        } else {
            Left::Others
        }
    }

    /// Puts thread `number` on standby. False if it is not, because no thread polls or there is no such number.
    #[must_use]
    pub fn stand_by(&self, number: u16) -> bool {
        let Some((word, bit)) = self.place(number) else {
            return false;
        };
        word.add_bits(bit);
        let is_polled = !self.polling.is_empty();
        if !is_polled {
            word.take_bits(bit);
        }
        is_polled
    }

    /// Ends the standby of thread `number`. True if the thread was called: it polls next, or has another
    /// [called](Self::call).
    #[must_use]
    pub fn stand_down(&self, number: u16) -> bool {
        self.place(number).is_some_and(|(word, bit)| word.take_bits(bit) == 0)
    }

    /// Calls a thread on standby, if no thread polls. Returns its number; the caller wakes it.
    #[must_use = "who is called sleeps"]
    pub fn call(&self) -> Option<u16> {
        for (at, word) in (0..).zip(&self.standing_by) {
            let mut bits = word.look();
            while bits != 0 && self.polling.is_empty() {
                let lowest = bits & bits.wrapping_neg();
                if word.take_bits(lowest) != 0 {
                    return Some(at * WORD + lowest.trailing_zeros() as u16);
                }
                bits &= !lowest;
            }
        }
        None
    }

    fn place(&self, number: u16) -> Option<(&Published<AtomicU64>, u64)> {
        let word = self.standing_by.get(usize::from(number / WORD))?;
        Some((word, 1 << (number % WORD)))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_of_those_who_stand_by_is_called_when_nobody_polls_any_more() {
        let pollers = Pollers::new(130);
        assert!(!pollers.stand_by(7), "nobody polls");
        pollers.enter();
        pollers.enter();
        assert!(pollers.stand_by(129) && pollers.stand_by(64));
        assert_eq!(pollers.leave(), Left::Others);
        assert_eq!(pollers.call(), None);
        assert_eq!(pollers.leave(), Left::Last(Some(64)));
        assert!(pollers.stand_down(64), "it was called");
        assert!(!pollers.stand_down(129), "it was not");
        pollers.enter();
        assert_eq!(pollers.leave(), Left::Last(None));
    }

    #[test]
    fn there_is_no_number_beyond_the_last() {
        let pollers = Pollers::new(64);
        pollers.enter();
        assert!(!pollers.stand_by(64) && pollers.stand_by(63));
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::sync::loom_models::{Doorbell, check};

    struct Model {
        pollers: Pollers,
        bells: [Doorbell; 2],
    }

    impl Model {
        fn leave(&self) {
            if let Left::Last(Some(next)) = self.pollers.leave() {
                self.bells[usize::from(next)].ring();
            }
        }

        /// Sleeps until it is called, unless it has to poll itself; then polls, and leaves.
        fn sleeper(&self, number: u16) {
            while !self.pollers.is_empty() && self.pollers.stand_by(number) {
                self.bells[usize::from(number)].wait();
                assert!(self.pollers.stand_down(number));
            }
            self.pollers.enter();
            self.leave();
        }
    }

    /// A thread that is never called sleeps on, which loom reports as a deadlock.
    #[test]
    fn loom_as_long_as_one_sleeps_one_polls_or_is_called() {
        check(|| {
            let model = Arc::new(Model {
                pollers: Pollers::new(2),
                bells: [Doorbell::new(), Doorbell::new()],
            });
            model.pollers.enter();
            let sleepers = [0, 1].map(|number| {
                let model = model.clone();
                thread::spawn(move || model.sleeper(number))
            });
            model.leave();
            for sleeper in sleepers {
                sleeper.join().unwrap();
            }
        });
    }
}
