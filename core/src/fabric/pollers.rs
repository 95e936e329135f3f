//! Of the threads that sleep for what one descriptor brings: who polls it, and who stands by to do so next
//! ([`Pollers`]). Each sleeps on something of its own too. Were all to poll, each event would wake all of them.
//!
//! Who is about to sleep stands by if somebody polls, and else polls. Who polled last and leaves calls one of those who
//! stand by. So as long as one sleeps one polls, or is called to, or is on the way: who stands by says so and then
//! looks who polls, who leaves does it the other way round (`sync`: [`Presence`]).

use crate::sync::{AtomicU64, Presence, Published};

const WORD: u16 = u64::BITS as u16;

/// See the module. Threads have numbers, those of their waiters.
#[derive(Debug)]
pub struct Pollers {
    polling: Presence,
    standing_by: Box<[Published<AtomicU64>]>,
}

/// What the leaving of one who polled came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "who is called sleeps"]
pub enum Left {
    /// Others poll.
    Others,
    /// Nobody does. This one is called, who is to be woken, if one stood by.
    Last(Option<u16>),
}

impl Pollers {
    /// Nobody, with numbers below `numbers`.
    pub fn new(numbers: u16) -> Self {
        let words = numbers.div_ceil(WORD);
        Self {
            polling: Presence::new(),
            standing_by: (0..words).map(|_| Published::default()).collect(),
        }
    }

    /// Whether nobody polls.
    pub fn is_empty(&self) -> bool {
        self.polling.is_empty()
    }

    /// Whether not more than one polls.
    pub fn is_at_most_one(&self) -> bool {
        self.polling.count() <= 1
    }

    /// One more polls.
    pub fn enter(&self) {
        self.polling.enter();
    }

    /// One who polled leaves.
    pub fn leave(&self) -> Left {
        if self.polling.leave() {
            Left::Last(self.call())
        } else {
            Left::Others
        }
    }

    /// Stands by. False, and it does not, if nobody polls or there is no such number.
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

    /// Stands by no longer. True if it was called: it polls next, or has another [called](Self::call).
    #[must_use]
    pub fn stand_down(&self, number: u16) -> bool {
        self.place(number).is_some_and(|(word, bit)| word.take_bits(bit) == 0)
    }

    /// Calls one who stands by, if nobody polls.
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

        /// Sleeps until it is called, if it has not to poll itself; then it polls, and leaves.
        fn sleeper(&self, number: u16) {
            while !self.pollers.is_empty() && self.pollers.stand_by(number) {
                self.bells[usize::from(number)].wait();
                assert!(self.pollers.stand_down(number));
            }
            self.pollers.enter();
            self.leave();
        }
    }

    /// Whoever is forgotten sleeps on, which loom reports as a deadlock.
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
