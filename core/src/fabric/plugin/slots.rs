//! Accounts for the send queue: the number of work requests in it, and the bytes that they move. Also decides which of
//! them ask for a completion, and records whether the poster waits for room. No device here.
//!
//! Work requests have numbers, from 0. Number n asks for a completion if n + 1 is a multiple of a quarter of the queue.
//! It also asks if a quarter of the queue's most bytes have been posted since the last request that asks. So a full
//! queue always holds one that asks; its completion frees all requests up to it. The poster and the poller may be two
//! threads.
//!
//! The device moves bytes in the order in which they were posted. So that a small message does not wait behind
//! megabytes of other streams, bytes fill the queue too. The limit is as many bytes as keep a fast device busy until
//! the next poll.

use crate::sync::{AtomicU64, Attention, Ordering, Published};

/// The most bytes in the queue of a queue pair for messages. A device of 400 Gbit/s needs 20 µs for them, which is
/// longer than a round trip.
pub const FOR_MESSAGES: u64 = 1 << 20;
/// The most bytes in the queue of a bulk queue pair, whose pieces have up to 1 MiB.
pub const FOR_BULK: u64 = 4 << 20;

/// The poster asks for a notification.
const WANTED: u32 = 1;

/// The accounts of one send queue.
#[derive(Debug)]
pub struct Slots {
    depth: u64,
    interval: u64,
    most_bytes: u64,
    /// Work requests posted; written by the poster.
    posted: AtomicU64,
    /// Work requests completed; written by the poller.
    freed: Published<AtomicU64>,
    /// By slot: bytes of all requests posted up to the one in it. Written by the poster.
    bytes: Box<[AtomicU64]>,
    /// Bytes of all requests up to the last that asks for a completion. Used by the poster only.
    signalled: AtomicU64,
    /// Not 0: the poster has been turned away.
    wants_room: Attention,
}

/// The right to post one work request. The poster calls [`Slots::posted`] if it has used it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The slot whose memory the work request may use.
    pub slot: usize,
    /// The work request has to ask for a completion.
    pub signal: bool,
    /// Its number plus one: as many requests are complete when it is.
    pub frees: u64,
    /// Bytes of all requests posted, this one included.
    bytes: u64,
}

impl Slots {
    /// Returns the accounts of a queue of `depth` work requests, at least 1. It takes no more requests while it has to
    /// move `most_bytes` or more.
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

    /// Returns the next turn, for a work request that moves `bytes` bytes. `None` when the queue is full; then
    /// [`completed`](Self::completed) returns true when there is room. One caller at a time.
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
        // Acquires the count that `completed` has published: the device has read the slots that it freed.
        let freed = self.freed.look();
        let outstanding = posted.wrapping_sub(freed);
        // The slot of the last freed request is not used again before the queue is as full as it can be.
        outstanding >= self.depth
            || outstanding > 0 && self.bytes_up_to(posted).wrapping_sub(self.bytes_up_to(freed)) >= self.most_bytes
    }

    /// Returns the bytes of the first `number` work requests.
    fn bytes_up_to(&self, number: u64) -> u64 {
        let slot = number.checked_sub(1).map(|last| (last % self.depth) as usize);
        let bytes = slot.and_then(|slot| self.bytes.get(slot));
        bytes.map_or(0, |bytes| bytes.load(Ordering::Relaxed))
    }

    /// Records that the work request of this turn is in the queue.
    pub fn posted(&self, turn: Turn) {
        if let Some(bytes) = self.bytes.get(turn.slot) {
            bytes.store(turn.bytes, Ordering::Relaxed);
        }
        if turn.signal {
            self.signalled.store(turn.bytes, Ordering::Relaxed);
        }
        self.posted.store(turn.frees, Ordering::Relaxed);
    }

    /// Records that the poster was turned away for another reason. Returns whether it still holds, by `still`, which
    /// [checks](Published::look) it again. If so, [`is_wanted`](Self::is_wanted) returns true afterwards, as for a full
    /// queue.
    pub fn turn_away(&self, still: impl Fn() -> bool) -> bool {
        self.wants_room.arm(WANTED);
        still()
    }

    /// Returns, once, whether the poster was turned away. To be called after the end of the reason was
    /// [published](Published::publish).
    pub fn is_wanted(&self) -> bool {
        self.wants_room.take() != 0
    }

    /// Records that all requests up to this one have completed. True if the poster is to be notified that there is
    /// room. One caller at a time.
    pub fn completed(&self, frees: u64) -> bool {
        // A correct device completes only requests that were posted, in order; the code does not rely on it.
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
