//! Whether a direction of a stream between hosts is worth a direct transfer, by the results of its last ones.
//!
//! A receive that advertises its buffer to the peer pays for that even if the peer does not use it. A send that waits
//! for a reader with a buffer waits in vain if there is none. After the first failure, each further failure in a row
//! doubles the number of calls that do not try. A try is allowed earlier if a reader has advertised a buffer meanwhile,
//! or if `LONGEST` has passed, so that tries cost next to nothing. The logic is pure: the caller passes the time.
//!
//! The size from which a direct transfer is worth it at all is in `ways.rs`.

/// A read of at least this fraction of the least direct transfer (1/4) still belongs to a bulk transfer.
const LARGE: usize = 4;
/// The longest pause after failures: 2^(`MOST` - 1) calls, or `LONGEST` ns. A try in vain takes some ms.
const MOST: u8 = 8;
const LONGEST: u64 = 1_000_000_000;

/// The results of direct transfers in the receiving direction.
#[derive(Default)]
pub struct Receives {
    /// A call waits with a buffer that the peer knows: the next bytes that the ring counts may lie in that buffer.
    pub is_waiting: bool,
    /// Bytes that direct transfers have received.
    pub bytes: u64,
    last_read: usize,
    /// Tries to receive with an advertised buffer.
    tries: Tries,
}

impl Receives {
    /// Notes that a call has read `bytes` bytes.
    pub fn on_read(&mut self, bytes: usize) {
        self.last_read = bytes;
    }

    /// Returns whether a call that is about to wait is to advertise its buffer to the peer, if `least` bytes are worth
    /// a direct transfer. With a size that the user has fixed (`is_fixed`), earlier failures do not count.
    pub fn may_try(&mut self, least: usize, is_fixed: bool, now: u64) -> bool {
        let is_bulk = self.last_read >= least / LARGE && !self.is_waiting;
        is_bulk && (is_fixed || self.tries.may_try(false, now))
    }

    /// Notes that the wait has ended with `bytes` bytes in the buffer.
    pub fn on_landed(&mut self, bytes: usize, now: u64) {
        self.is_waiting = false;
        self.tries.on_tried(bytes > 0, now);
        if bytes > 0 {
            self.last_read = bytes;
        }
    }
}

/// The results of tries. A try that fails costs time.
#[derive(Default)]
struct Tries {
    /// Failures in a row, at most `MOST`.
    misses: u8,
    /// Calls that may not try yet, and until when at most, monotonic ns.
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
        // The first failure causes no pause: a reader that is only late comes a moment later.
        self.pause = if self.misses > 1 { 1 << (self.misses - 1) } else { 0 };
    }
}

/// The results of direct transfers in the sending direction.
#[derive(Default)]
pub struct Sends {
    /// Tries to find a reader with a buffer, and tries to lend memory to the reader's device.
    to_readers: Tries,
    to_devices: Tries,
    /// Number of buffers that readers had advertised at the last question.
    adverts: u32,
    /// Bytes that direct transfers have sent.
    pub bytes: u64,
}

impl Sends {
    /// Returns whether a large send is to wait for a reader with a buffer. `adverts` is the number of buffers that
    /// readers have advertised so far.
    pub fn may_try(&mut self, adverts: u32, now: u64) -> bool {
        let is_new = std::mem::replace(&mut self.adverts, adverts) != adverts;
        self.to_readers.may_try(is_new, now)
    }

    /// Returns whether the last reader that a send waited for came.
    pub fn goes_well(&self) -> bool {
        self.to_readers.misses == 0
    }

    /// Notes whether a reader with a buffer came.
    pub fn on_tried(&mut self, is_there: bool, now: u64) {
        self.to_readers.on_tried(is_there, now);
    }

    /// Returns whether a large send is to lend its memory to the reader's device.
    pub fn may_lend(&mut self, now: u64) -> bool {
        self.to_devices.may_try(false, now)
    }

    /// Notes whether the reader's device has read most of the lent memory in time.
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
        // The pause for readers does not apply to lending.
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
