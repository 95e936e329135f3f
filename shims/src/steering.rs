//! Push or pull, by the load of the two ends of a link between hosts (docs/protocol.md, P100): where a sender and a
//! reader both wait, either device can move the bytes, and its end has the work of issuing that. So it is the end that
//! has processors to spare; where both have, or neither, what has been measured decides (`ways.rs`). Not how a load is
//! measured (`load.rs`).
//!
//! A change takes a difference that is clear and lasts, and comes a while after the one before, so that two machines
//! whose loads are about the same do not change their minds all the time.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use rdmasock_core::lock::Lock;

use crate::load;

/// The end whose device moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Issuer {
    /// Push: it writes into the reader's buffer.
    Sender,
    /// Pull: it reads from the sender's memory.
    Reader,
}

/// Loads are as of [`load::average`]. The busier end has as many threads that can run as processors, and so much more
/// for each than the other; once it is spared, until it has less by so much.
const BUSY: u8 = load::ONE;
const MORE: u8 = load::ONE / 2;
const SLACK: u8 = load::ONE / 4;
/// For how long that has to be so, ns.
const LASTS: u64 = 500_000_000;
/// Time from one change to the next, ns.
const BETWEEN_CHANGES: u64 = 3_000_000_000;
/// How often the loads are looked at, ns.
const LOOK_EVERY: u64 = 50_000_000;

/// Which end has been spared, and what is thought of it now. Pure: time and loads are given.
#[derive(Debug, Default)]
struct Steering {
    issuer: Option<Issuer>,
    changed: Option<u64>,
    /// What is thought, and since when.
    wish: Option<Issuer>,
    since: u64,
}

impl Steering {
    /// Who issues for the sends of an end with this load to one with that. The time is in ns, and does not go back.
    fn look(&mut self, now: u64, sender: u8, reader: u8) -> Option<Issuer> {
        let wish = self.wish(sender, reader);
        if wish != self.wish {
            (self.wish, self.since) = (wish, now);
        }
        let lasts = now.saturating_sub(self.since) >= LASTS;
        let may_change = self.changed.is_none_or(|at| now.saturating_sub(at) >= BETWEEN_CHANGES);
        if wish != self.issuer && lasts && may_change {
            (self.issuer, self.changed) = (wish, Some(now));
        }
        self.issuer
    }

    fn wish(&self, sender: u8, reader: u8) -> Option<Issuer> {
        let (busier, other, idle) = match sender > reader {
            true => (sender, reader, Issuer::Reader),
            false => (reader, sender, Issuer::Sender),
        };
        let slack = if self.issuer == Some(idle) { SLACK } else { 0 };
        (busier >= BUSY - slack && busier - other >= MORE - slack).then_some(idle)
    }
}

/// What a link knows of it, for all of its streams.
pub struct Balance {
    steering: Lock<Steering>,
    /// The last look, and what it came to.
    at: AtomicU64,
    issuer: AtomicU8,
}

impl Default for Balance {
    fn default() -> Self {
        Self {
            steering: Lock::new(Steering::default()),
            at: AtomicU64::new(0),
            issuer: AtomicU8::new(0),
        }
    }
}

impl Balance {
    /// Who is to issue for what this end sends, as of a look that is not long ago; the caller's, if that was too long
    /// ago: then `loads` gives this end's and the other's. The time is the kernel's clock's last tick.
    pub fn issuer(&self, now: u64, loads: impl FnOnce() -> Option<(u8, u8)>) -> Option<Issuer> {
        let at = self.at.load(Relaxed);
        if now.wrapping_sub(at) >= LOOK_EVERY
            && self.at.compare_exchange(at, now, Relaxed, Relaxed).is_ok()
            && let Some((sender, reader)) = loads()
            && let Some(mut steering) = self.steering.lock()
        {
            let issuer = steering.look(now, sender, reader);
            self.issuer.store(issuer.map_or(0, |issuer| issuer as u8 + 1), Relaxed);
        }
        match self.issuer.load(Relaxed) {
            0 => None,
            1 => Some(Issuer::Sender),
            _ => Some(Issuer::Reader),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    /// Looks every 50 ms for so long.
    fn run(steering: &mut Steering, now: &mut u64, lasts: u64, (sender, reader): (u8, u8)) -> Option<Issuer> {
        let end = *now + lasts;
        while *now < end {
            *now += LOOK_EVERY;
            steering.look(*now, sender, reader);
        }
        steering.issuer
    }

    #[test]
    fn who_has_processors_to_spare_issues() {
        for (loads, expected) in [
            ((64, 8), Some(Issuer::Reader)),
            ((8, 64), Some(Issuer::Sender)),
            ((255, 0), Some(Issuer::Reader)),
            // Neither is busy, both are, or it is hardly a difference.
            ((31, 0), None),
            ((200, 200), None),
            ((200, 190), None),
            ((0, 0), None),
        ] {
            let (mut steering, mut now) = (Steering::default(), 77);
            assert_eq!(run(&mut steering, &mut now, 10 * SECOND, loads), expected, "{loads:?}");
        }
    }

    #[test]
    fn a_moment_changes_nothing_and_a_change_is_kept_for_a_while() {
        let (mut steering, mut now) = (Steering::default(), 0);
        for _ in 0..50 {
            assert_eq!(run(&mut steering, &mut now, 400_000_000, (255, 0)), None);
            assert_eq!(run(&mut steering, &mut now, 100_000_000, (0, 0)), None);
        }
        assert_eq!(run(&mut steering, &mut now, SECOND, (255, 0)), Some(Issuer::Reader));
        assert_eq!(run(&mut steering, &mut now, SECOND, (0, 255)), Some(Issuer::Reader));
        assert_eq!(run(&mut steering, &mut now, 3 * SECOND, (0, 255)), Some(Issuer::Sender));
        // It takes less of a difference to stay than to come.
        assert_eq!(
            run(&mut steering, &mut now, 10 * SECOND, (16, 25)),
            Some(Issuer::Sender)
        );
        assert_eq!(run(&mut steering, &mut now, 10 * SECOND, (20, 25)), None);
        assert_eq!(run(&mut steering, &mut now, 10 * SECOND, (16, 25)), None);
    }

    #[test]
    fn a_link_looks_now_and_then() {
        let balance = Balance::default();
        let mut looks = 0;
        for ms in 0..10_000_u64 {
            balance.issuer(SECOND + ms * 1_000_000, || {
                looks += 1;
                Some((255, 0))
            });
        }
        assert!((190..=201).contains(&looks), "{looks}");
        assert_eq!(balance.issuer(0, || None), Some(Issuer::Reader));
        // Nothing is known of the other's load.
        assert_eq!(Balance::default().issuer(SECOND, || None), None);
    }

    proptest! {
        #[test]
        fn changes_are_far_apart_whatever_the_loads_do(
            steps in proptest::collection::vec((1u64..2_000_000_000, any::<u8>(), any::<u8>()), 1..300),
        ) {
            let (mut steering, mut now, mut last) = (Steering::default(), 0, None::<u64>);
            for (passes, sender, reader) in steps {
                now += passes;
                let before = steering.issuer;
                let after = steering.look(now, sender, reader);
                if before != after {
                    prop_assert!(last.is_none_or(|last| now - last >= BETWEEN_CHANGES));
                    last = Some(now);
                    // Never against the loads.
                    match after {
                        Some(Issuer::Sender) => prop_assert!(reader > sender),
                        Some(Issuer::Reader) => prop_assert!(sender > reader),
                        None => {}
                    }
                }
            }
        }
    }
}
