//! Accounts for the send queue: how many work requests it holds, and how many bytes those have to move, which of
//! them ask for a completion, and whether somebody waits for room. No device here.
//!
//! Work requests have numbers, from 0. Number n asks for a completion if n + 1 is a multiple of a quarter of
//! the queue, or if a quarter of the bytes that may be in the queue have been posted since the last one that does. So a
//! full queue always holds one; its completion frees all up to it. The poster and the poller may be two threads.
//!
//! The device moves bytes in the order in which they were posted. So that a small message does not stand behind
//! megabytes of others' the queue is full with fewer of them too: what keeps a fast device busy until the next look.

use crate::sync::{AtomicU64, Attention, Ordering, Published};

/// Bytes for a queue pair of messages: a device of 400 Gbit/s needs 20 µs for so many, which is more than the way there
/// and back takes.
pub const FOR_MESSAGES: u64 = 1 << 20;
/// For one of bulk, whose pieces are as long as that.
pub const FOR_BULK: u64 = 4 << 20;

/// The poster wants to be told.
const WANTED: u32 = 1;

/// The accounts of one send queue.
#[derive(Debug)]
pub struct Slots {
    depth: u64,
    interval: u64,
    most_bytes: u64,
    /// Work requests posted; written by the poster.
    posted: AtomicU64,
    /// Of these, completed; written by the poller.
    freed: Published<AtomicU64>,
    /// Bytes of all that was posted up to the request of each slot; written by the poster.
    bytes: Box<[AtomicU64]>,
    /// Bytes of all up to the last that asks for a completion; the poster's.
    signalled: AtomicU64,
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
    /// Bytes of all that was posted, with it.
    bytes: u64,
}

impl Slots {
    /// For a queue of this depth, at least 1. Nothing more is posted while it has to move `most_bytes` or more.
    pub fn new(depth: u32, most_bytes: u64) -> Self {
        let depth = u64::from(depth.max(1));
        Self {
            depth,
            interval: (depth / 4).max(1),
            most_bytes,
            posted: AtomicU64::new(0),
            freed: Published::default(),
            bytes: (0..depth).map(|_| AtomicU64::new(0)).collect(),
            signalled: AtomicU64::new(0),
            wants_room: Attention::new(),
        }
    }

    /// The next turn, for a work request that moves so many bytes; `None` when the queue is full, and then
    /// [`completed`](Self::completed) will say so when there is room. One caller at a time.
    pub fn turn(&self, bytes: u32) -> Option<Turn> {
        let number = self.posted.load(Ordering::Relaxed);
        if self.is_full(number) {
            self.wants_room.arm(WANTED);
            if self.is_full(number) {
                return None;
            }
            self.wants_room.disarm(WANTED);
        }
        let bytes = self.bytes_up_to(number).wrapping_add(bytes.into());
        let since = bytes.wrapping_sub(self.signalled.load(Ordering::Relaxed));
        Some(Turn {
            slot: (number % self.depth) as usize,
            signal: (number + 1).is_multiple_of(self.interval) || since >= self.most_bytes / 4,
            frees: number + 1,
            bytes,
        })
    }

    fn is_full(&self, posted: u64) -> bool {
        // Acquires what `completed` has published: the device has read the slots that it freed.
        let freed = self.freed.look();
        let outstanding = posted.wrapping_sub(freed);
        // The slot of the last one that was freed is not used again before the queue is as full as it can be.
        outstanding >= self.depth
            || outstanding > 0 && self.bytes_up_to(posted).wrapping_sub(self.bytes_up_to(freed)) >= self.most_bytes
    }

    /// Bytes of the first `number` work requests.
    fn bytes_up_to(&self, number: u64) -> u64 {
        let slot = number.checked_sub(1).map(|last| (last % self.depth) as usize);
        let bytes = slot.and_then(|slot| self.bytes.get(slot));
        bytes.map_or(0, |bytes| bytes.load(Ordering::Relaxed))
    }

    /// The work request of this turn is in the queue.
    pub fn posted(&self, turn: Turn) {
        if let Some(bytes) = self.bytes.get(turn.slot) {
            bytes.store(turn.bytes, Ordering::Relaxed);
        }
        if turn.signal {
            self.signalled.store(turn.bytes, Ordering::Relaxed);
        }
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
            let turn = slots.turn(8)?;
            slots.posted(turn);
            Some(turn)
        })
        .collect()
    }

    #[test]
    fn a_full_queue_of_any_depth_has_a_signalled_request() {
        for depth in 1..70 {
            let slots = Slots::new(depth, FOR_MESSAGES);
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
        let slots = Slots::new(7, FOR_MESSAGES);
        let mut used: Vec<_> = fill(&slots).iter().map(|turn| turn.slot).collect();
        used.sort_unstable();
        assert_eq!(used, [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn room_is_told_once_and_only_to_who_was_turned_away() {
        let slots = Slots::new(4, FOR_MESSAGES);
        for _ in 0..4 {
            let turn = slots.turn(8).unwrap();
            slots.posted(turn);
        }
        assert!(!slots.completed(1), "nobody was turned away");
        slots.posted(slots.turn(8).unwrap());
        assert_eq!(slots.turn(8), None);
        assert!(slots.completed(2));
        assert!(!slots.completed(3));
    }

    #[test]
    fn a_queue_is_full_of_bytes_before_it_is_full_of_requests_and_always_has_a_signalled_one() {
        const LARGE: u32 = 64 << 10;
        for depth in [1, 2, 7, 240] {
            let slots = Slots::new(depth, FOR_MESSAGES);
            let mut outstanding: Vec<(Turn, u64)> = Vec::new();
            let mut sizes = [1, LARGE, 700, 3 * LARGE, LARGE, 2 << 20, 9].into_iter().cycle();
            for _ in 0..500 {
                let mut size = sizes.next().unwrap();
                while let Some(turn) = slots.turn(size) {
                    slots.posted(turn);
                    let before: u64 = outstanding.iter().map(|(_, bytes)| bytes).sum();
                    assert!(before < FOR_MESSAGES && outstanding.len() < depth as usize);
                    outstanding.push((turn, size.into()));
                    size = sizes.next().unwrap();
                }
                let signalled = outstanding.iter().position(|(turn, _)| turn.signal);
                let at = signalled.expect("none is signalled");
                assert!(slots.completed(outstanding[at].0.frees), "somebody waits");
                outstanding.drain(..=at);
            }
        }
    }

    #[test]
    fn a_request_of_any_size_finds_an_empty_queue_and_few_small_ones_are_no_bytes() {
        let slots = Slots::new(240, FOR_MESSAGES);
        slots.posted(slots.turn(u32::MAX).unwrap());
        assert_eq!(slots.turn(1), None);
        assert!(slots.completed(1));
        let small: Vec<_> = fill(&slots).iter().map(|turn| turn.signal).collect();
        assert_eq!(small.len(), 240);
        assert_eq!(small.iter().filter(|signal| **signal).count(), 4);
    }

    #[test]
    fn a_turn_that_was_not_used_comes_again() {
        let slots = Slots::new(4, FOR_MESSAGES);
        assert_eq!(slots.turn(8), slots.turn(8));
    }

    #[test]
    fn a_poster_and_a_poller_never_miss_each_other() {
        const REQUESTS: u64 = 100_000;
        let slots = Slots::new(8, FOR_MESSAGES);
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
                if let Some(turn) = slots.turn(8) {
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
