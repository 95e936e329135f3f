//! Whether one direction of a stream between hosts is worth a direct transfer, by how it went lately.
//!
//! A receive that tells the peer of its buffer pays for that whether or not the peer uses it. A send that waits for a
//! reader with a buffer waits in vain where there is none. Each failure in a row doubles the number of calls that do
//! not try, unless a reader has told of a buffer meanwhile, or so much time has gone by that a try costs next to
//! nothing. Pure: times are given.
//!
//! From which size on it is worth it at all says `ways.rs`.

/// Reads of so much less than is worth a direct transfer are still those of a bulk transfer.
const LARGE: usize = 4;
/// Longest pause after failures, as a power of two of sends; and in time, ns: a try in vain takes some ms.
const MOST: u8 = 8;
const LONGEST: u64 = 1_000_000_000;

/// The receiving direction's.
#[derive(Default)]
pub struct Receives {
    /// A call waits with a buffer that the peer knows of: what the ring counts next may be in there.
    pub is_waiting: bool,
    /// Bytes that came so.
    pub bytes: u64,
    last_read: usize,
    /// Of waiting with a buffer.
    tries: Tries,
}

impl Receives {
    /// So many bytes were read at once.
    pub fn on_read(&mut self, bytes: usize) {
        self.last_read = bytes;
    }

    /// Whether a call that is about to wait is to tell the peer of its buffer, where so many bytes are worth it. A size
    /// that the user has fixed holds, whatever has been in vain.
    pub fn may_try(&mut self, least: usize, is_fixed: bool, now: u64) -> bool {
        let is_bulk = self.last_read >= least / LARGE && !self.is_waiting;
        is_bulk && (is_fixed || self.tries.may_try(false, now))
    }

    /// The wait is over, with so many bytes in the buffer.
    pub fn on_landed(&mut self, bytes: usize, now: u64) {
        self.is_waiting = false;
        self.tries.on_tried(bytes > 0, now);
        if bytes > 0 {
            self.last_read = bytes;
        }
    }
}

/// Tries, each of which costs time if it is in vain.
#[derive(Default)]
struct Tries {
    /// In vain, in a row.
    misses: u8,
    /// Sends that are yet to be let pass, and until when at most, monotonic ns.
    pause: u16,
    until: u64,
}

impl Tries {
    fn may_try(&mut self, is_new: bool, now: u64) -> bool {
        let may = self.pause == 0 || is_new || now >= self.until;
        self.pause = self.pause.saturating_sub(1);
        may
    }

    fn on_tried(&mut self, has_helped: bool, now: u64) {
        self.until = now + LONGEST;
        self.misses = if has_helped { 0 } else { (self.misses + 1).min(MOST) };
        // The first failure costs nothing: who is just not there yet comes a moment later.
        self.pause = if self.misses > 1 { 1 << (self.misses - 1) } else { 0 };
    }
}

/// The sending direction's.
#[derive(Default)]
pub struct Sends {
    /// Of finding a reader with a buffer, and of lending memory to the reader's device.
    to_readers: Tries,
    to_devices: Tries,
    /// Buffers that readers have told of until the last try.
    adverts: u32,
    /// Bytes that went so.
    pub bytes: u64,
}

impl Sends {
    /// Whether a call with much to send is to wait for a reader with a buffer, when readers have told of so many.
    pub fn may_try(&mut self, adverts: u32, now: u64) -> bool {
        let is_new = std::mem::replace(&mut self.adverts, adverts) != adverts;
        self.to_readers.may_try(is_new, now)
    }

    /// Whether the last one that was waited for came.
    pub fn goes_well(&self) -> bool {
        self.to_readers.misses == 0
    }

    /// There was one, or not.
    pub fn on_tried(&mut self, is_there: bool, now: u64) {
        self.to_readers.on_tried(is_there, now);
    }

    /// Whether a call with much to send is to lend it to the reader's device.
    pub fn may_lend(&mut self, now: u64) -> bool {
        self.to_devices.may_try(false, now)
    }

    /// That has taken most of it in time, or not.
    pub fn on_lent(&mut self, is_most: bool, now: u64) {
        self.to_devices.on_tried(is_most, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_in_a_row_are_tried_less_and_less_often_and_a_success_makes_up_for_them() {
        let mut sends = Sends::default();
        let mut tries = |calls: u32, success: bool| {
            let mut tried = 0;
            for _ in 0..calls {
                if sends.may_try(7, 0) {
                    tried += 1;
                    sends.on_tried(success, 0);
                }
            }
            tried
        };
        assert_eq!(tries(10, true), 10);
        let few = tries(1000, false);
        assert!((8..20).contains(&few), "{few}");
        assert!(tries(200, true) > 50);
        assert_eq!(tries(10, true), 10);
    }

    #[test]
    fn a_reader_that_has_told_of_a_buffer_is_tried_at_once() {
        let mut sends = Sends::default();
        for _ in 0..5 {
            sends.on_tried(false, 0);
        }
        let mut may_try = |adverts| sends.may_try(adverts, 0);
        assert!(may_try(1) && !may_try(1) && may_try(2) && !may_try(2));
        // A reader that does not wait is another matter.
        assert!(sends.may_lend(0));
        for _ in 0..5 {
            sends.on_lent(false, 0);
        }
        assert!(!sends.may_lend(0));
    }

    #[test]
    fn who_sends_now_and_then_tries_again_after_a_while() {
        let mut sends = Sends::default();
        let mut tried = 0;
        for second in 0..60 {
            for piece in 0..10 {
                let now = second * LONGEST + piece * 1000;
                if sends.may_lend(now) {
                    tried += 1;
                    sends.on_lent(false, now);
                }
            }
        }
        assert!((60..100).contains(&tried), "{tried}");
    }

    #[test]
    fn only_bulk_is_worth_it() {
        let mut receives = Receives::default();
        assert!(!receives.may_try(4096, false, 0));
        receives.on_read(1024);
        assert!(receives.may_try(4096, false, 0));
        receives.on_landed(4096, 0);
        assert!(receives.may_try(4096, false, 0));
        receives.on_read(64);
        assert!(!receives.may_try(4096, false, 0));
    }

    #[test]
    fn receive_whose_sender_writes_nothing_is_rarely_posted() {
        let mut receives = Receives::default();
        receives.on_read(4096);
        let posted = (0..1000).filter(|_| {
            let may = receives.may_try(4096, false, 0);
            if may {
                receives.on_landed(0, 0);
            }
            may
        });
        assert!((8..20).contains(&posted.count()));
    }
}
