//! Detects whether the peer's device still answers: a state machine without clock and I/O. The queue pair posts the
//! probes, `end.rs` provides the ticks, and `engine.rs` acts on the result.
//!
//! A device whose packets are lost need not report it. SoftRoCE has reported no failed request for 25 s; on iWARP, TCP
//! tries for a quarter of an hour. So the watch has to prove that posted requests arrive. A probe is a request that
//! completes only when the peer's device has answered it; all requests posted before it have arrived then. The peer's
//! process takes no part in that, so a process that is stopped or busy is not taken for a dead one.
//!
//! ```text
//!            posted                  tick
//!     Off ──────────▶ On ───────────────────────▶ Asked ──▶ silent, when it has waited for long enough
//!      ▲   tick,      │ ▲                           │
//!      └──────────────┘ └───────────────────────────┘
//!         all is proven            answered
//! ```
//!
//! While no work request is posted the watch is off, and no thread ticks. *Done* (`Sender::done`) grows with every
//! post, every attempt that found the send queue full, and every call of `End::doubt`. An answered probe proves the
//! value that *done* had when the probe was posted. If *done* still has the proven value at a tick, all is proven, and
//! the watch goes off.

#![forbid(unsafe_code)]

/// The longest time that a probe may stay without an answer, in ns (P80).
pub(super) const SILENCE: u64 = 5_000_000_000;

/// The longest time, in ns, that counts as waiting between two ticks. If more has passed, this process or its host has
/// not run for a while, and the peer is not to blame.
const GAP: u64 = 2_000_000_000;

/// The action after a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// No action, and no tick is needed before the next post.
    Idle,
    /// Post a probe, then call [`Watch::on_posted`].
    Probe,
    /// No action until the next tick.
    Wait,
    /// The peer's device does not answer, so the link has failed.
    Silent,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Off,
    On,
    Asked {
        /// The value of *done* when the probe was posted.
        covers: u64,
        /// Whether the probe is in the send queue.
        posted: bool,
        /// The time that the probe has waited, in ns.
        waited: u64,
    },
}

/// The state of the watch.
#[derive(Debug, Default)]
pub(super) struct Watch {
    stage: Stage,
    /// The value of *done* for which all requests are known to have arrived.
    proven: u64,
    /// The time of the last tick in ns.
    last: u64,
}

impl Watch {
    /// Records the current value of *done*. Returns true if the watch begins, and needs ticks from now on.
    #[inline]
    pub(super) fn on_done(&mut self, done: u64) -> bool {
        let starts = self.stage == Stage::Off && done != self.proven;
        if starts {
            self.stage = Stage::On;
        }
        starts
    }

    /// Processes a tick at the time `now`, in ns of a clock that does not go back. Returns the action.
    pub(super) fn tick(&mut self, now: u64, done: u64) -> Step {
        let gap = now.saturating_sub(self.last).min(GAP);
        self.last = now;
        match &mut self.stage {
            Stage::Off => Step::Idle,
            Stage::On if done == self.proven => {
                self.stage = Stage::Off;
                Step::Idle
            }
            Stage::On => {
                self.stage = Stage::Asked {
                    covers: done,
                    posted: false,
                    waited: 0,
                };
                Step::Probe
            }
            Stage::Asked { covers, posted, waited } => {
                *waited = waited.saturating_add(gap);
                if *waited >= SILENCE {
                    Step::Silent
                } else if *posted {
                    Step::Wait
                } else {
                    *covers = done;
                    Step::Probe
                }
            }
        }
    }

    /// Records that the probe is in the send queue. If it could not be posted, the next tick asks for it again, and the
    /// time until then counts as waiting.
    pub(super) fn on_posted(&mut self) {
        if let Stage::Asked { posted, .. } = &mut self.stage {
            *posted = true;
        }
    }

    /// Records the answer of the peer's device.
    pub(super) fn on_answered(&mut self) {
        if let Stage::Asked {
            covers, posted: true, ..
        } = self.stage
        {
            self.proven = covers;
            self.stage = Stage::On;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Returns a watch that is on, with a probe posted at second 1.
    fn asked() -> Watch {
        let mut watch = Watch::default();
        assert!(watch.on_done(1));
        assert_eq!(watch.tick(SECOND, 1), Step::Probe);
        watch.on_posted();
        watch
    }

    #[test]
    fn where_nothing_is_done_nobody_ticks() {
        let mut watch = Watch::default();
        assert!(!watch.on_done(0));
        assert_eq!(watch.tick(SECOND, 0), Step::Idle);
    }

    #[test]
    fn the_watch_is_begun_once_and_ends_when_all_is_proven() {
        let mut watch = Watch::default();
        assert!(watch.on_done(1) && !watch.on_done(2));
        assert_eq!(watch.tick(SECOND, 2), Step::Probe);
        watch.on_posted();
        watch.on_answered();
        assert!(!watch.on_done(2));
        assert_eq!(watch.tick(2 * SECOND, 2), Step::Idle);
        // *Done* has not changed.
        assert!(!watch.on_done(2));
        assert!(watch.on_done(3));
    }

    #[test]
    fn what_was_done_after_the_probe_takes_another_one() {
        let mut watch = asked();
        assert!(!watch.on_done(2));
        assert_eq!(watch.tick(2 * SECOND, 2), Step::Wait);
        watch.on_answered();
        assert_eq!(watch.tick(3 * SECOND, 2), Step::Probe);
    }

    #[test]
    fn a_probe_without_an_answer_is_silence() {
        let mut watch = asked();
        for second in 2..6 {
            assert_eq!(watch.tick(second * SECOND, second), Step::Wait);
        }
        assert_eq!(watch.tick(6 * SECOND, 6), Step::Silent);
    }

    #[test]
    fn so_is_one_that_finds_no_room() {
        let mut watch = Watch::default();
        watch.on_done(1);
        for second in 1..6 {
            assert_eq!(watch.tick(second * SECOND, 1), Step::Probe);
            // An answer without a posted probe has no effect.
            watch.on_answered();
        }
        assert_eq!(watch.tick(6 * SECOND, 1), Step::Silent);
    }

    #[test]
    fn one_that_found_room_later_covers_what_was_done_until_then() {
        let mut watch = Watch::default();
        watch.on_done(1);
        assert_eq!(watch.tick(SECOND, 1), Step::Probe);
        assert_eq!(watch.tick(2 * SECOND, 5), Step::Probe);
        watch.on_posted();
        watch.on_answered();
        assert_eq!(watch.tick(3 * SECOND, 5), Step::Idle);
    }

    #[test]
    fn time_in_which_this_process_did_not_run_counts_little() {
        let mut watch = asked();
        assert_eq!(watch.tick(1000 * SECOND, 1), Step::Wait);
        assert_eq!(watch.tick(2000 * SECOND, 1), Step::Wait);
        assert_eq!(watch.tick(3000 * SECOND, 1), Step::Silent);
    }

    #[test]
    fn an_answer_that_was_not_asked_for_proves_nothing() {
        let mut watch = Watch::default();
        watch.on_answered();
        assert!(watch.on_done(1));
        watch.on_answered();
        assert_eq!(watch.tick(SECOND, 1), Step::Probe);
    }
}
