//! Accounts for the send queue: how many work requests it holds, which of them ask for a completion, and
//! whether somebody waits for room. No device here.
//!
//! Work requests have numbers, from 0. Number n asks for a completion if n + 1 is a multiple of a quarter of
//! the queue, so a full queue always holds one that does; its completion frees all up to it. The poster and
//! the poller may be two threads.

use crate::sync::{AtomicU64, Attention, Ordering, Published};

/// The poster wants to be told.
const WANTED: u32 = 1;

/// The accounts of one send queue.
#[derive(Debug)]
pub struct Slots {
    depth: u64,
    interval: u64,
    /// Work requests posted; written by the poster.
    posted: AtomicU64,
    /// Of these, completed; written by the poller.
    freed: Published<AtomicU64>,
    /// Not 0: the poster has been turned away.
    wants_room: Attention,
}

/// The right to post one work request, which is told back with [`Slots::posted`] if it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The slot whose memory it may use.
    pub slot: usize,
    /// It has to ask for a completion.
    pub signal: bool,
    /// Its number plus one: what its completion frees.
    pub frees: u64,
}

impl Slots {
    /// For a queue of this depth, at least 1.
    pub fn new(depth: u32) -> Self {
        let depth = u64::from(depth.max(1));
        Self {
            depth,
            interval: (depth / 4).max(1),
            posted: AtomicU64::new(0),
            freed: Published::default(),
            wants_room: Attention::new(),
        }
    }

    /// The next turn; `None` when the queue is full, and then [`completed`](Self::completed) will say so when
    /// there is room. One caller at a time.
    pub fn turn(&self) -> Option<Turn> {
        let number = self.posted.load(Ordering::Relaxed);
        if self.is_full(number) {
            self.wants_room.arm(WANTED);
            if self.is_full(number) {
                return None;
            }
            self.wants_room.disarm(WANTED);
        }
        Some(Turn {
            slot: (number % self.depth) as usize,
            signal: (number + 1).is_multiple_of(self.interval),
            frees: number + 1,
        })
    }

    fn is_full(&self, posted: u64) -> bool {
        // Acquires what `completed` has published: the device has read the slots that it freed.
        posted.wrapping_sub(self.freed.look()) >= self.depth
    }

    /// The work request of this turn is in the queue.
    pub fn posted(&self, turn: Turn) {
        self.posted.store(turn.frees, Ordering::Relaxed);
    }

    /// The poster was turned away for another reason, which `still` [looks](Published::look) for again; as for a full
    /// queue, [`is_wanted`](Self::is_wanted) is true afterwards, unless the reason is gone.
    pub fn turn_away(&self, still: impl Fn() -> bool) -> bool {
        self.wants_room.arm(WANTED);
        still()
    }

    /// True, once, if the poster was turned away. To be called after it was [published](Published::publish) that the
    /// reason has gone.
    pub fn is_wanted(&self) -> bool {
        self.wants_room.take() != 0
    }

    /// All up to this one have completed. True if the poster is to be told that there is room. One caller at
    /// a time.
    pub fn completed(&self, frees: u64) -> bool {
        // A completion is of something that was posted, and comes in order; the device is not relied upon.
        if frees > self.freed.load(Ordering::Relaxed) {
            self.freed.publish(frees);
        }
        self.is_wanted()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(slots: &Slots) -> Vec<Turn> {
        std::iter::from_fn(|| {
            let turn = slots.turn()?;
            slots.posted(turn);
            Some(turn)
        })
        .collect()
    }

    #[test]
    fn a_full_queue_of_any_depth_has_a_signalled_request() {
        for depth in 1..70 {
            let slots = Slots::new(depth);
            // Twenty times: the pattern need not divide the depth.
            let mut outstanding = Vec::new();
            for _ in 0..20 {
                outstanding.extend(fill(&slots));
                assert_eq!(outstanding.len(), depth as usize);
                let signalled = outstanding.iter().position(|turn| turn.signal);
                let at = signalled.expect("none is signalled");
                assert!(slots.completed(outstanding[at].frees), "somebody waits");
                outstanding.drain(..=at);
            }
        }
    }

    #[test]
    fn slots_in_use_are_different() {
        let slots = Slots::new(7);
        let mut used: Vec<_> = fill(&slots).iter().map(|turn| turn.slot).collect();
        used.sort_unstable();
        assert_eq!(used, [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn room_is_told_once_and_only_to_who_was_turned_away() {
        let slots = Slots::new(4);
        for _ in 0..4 {
            let turn = slots.turn().unwrap();
            slots.posted(turn);
        }
        assert!(!slots.completed(1), "nobody was turned away");
        slots.posted(slots.turn().unwrap());
        assert_eq!(slots.turn(), None);
        assert!(slots.completed(2));
        assert!(!slots.completed(3));
    }

    #[test]
    fn a_turn_that_was_not_used_comes_again() {
        let slots = Slots::new(4);
        assert_eq!(slots.turn(), slots.turn());
    }

    #[test]
    fn a_poster_and_a_poller_never_miss_each_other() {
        const REQUESTS: u64 = 100_000;
        let slots = Slots::new(8);
        let (posts, completions) = std::sync::mpsc::channel();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for frees in completions {
                    if slots.completed(frees) {
                        tell.send(()).unwrap();
                    }
                }
                drop(tell);
            });
            let mut done = 0;
            while done < REQUESTS {
                if let Some(turn) = slots.turn() {
                    slots.posted(turn);
                    done += 1;
                    if turn.signal {
                        posts.send(turn.frees).unwrap();
                    }
                } else {
                    // A lost wake-up ends the test here.
                    let wait = std::time::Duration::from_secs(20);
                    told.recv_timeout(wait).expect("room was not told");
                }
            }
            drop(posts);
        });
    }
}
