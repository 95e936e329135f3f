//! Whether one direction of a stream between hosts is worth a direct transfer, by how it went lately.
//!
//! A receive that tells the peer of its buffer pays for that whether or not the peer uses it, with time in which it has
//! nothing to do; a send that waits for a reader with a buffer waits in vain where there is none. So each failure in a
//! row doubles the number of calls that do not try, up to a few receives and many sends.

/// Reads of so much less than is worth a direct transfer are still those of a bulk transfer.
const LARGE: usize = 4;
/// Longest pauses after failures, as powers of two of calls.
const MOST_RECEIVES: u8 = 3;
const MOST_SENDS: u8 = 8;

/// See the module.
#[derive(Default)]
struct Tries {
    /// In vain, in a row.
    misses: u8,
    /// Calls that are yet to be let pass.
    pause: u16,
}

impl Tries {
    fn may(&mut self) -> bool {
        let may = self.pause == 0;
        self.pause = self.pause.saturating_sub(1);
        may
    }

    fn on_result(&mut self, success: bool, most: u8) {
        self.misses = if success { 0 } else { (self.misses + 1).min(most) };
        // The first failure costs nothing: who is just not there yet comes a moment later.
        self.pause = if self.misses > 1 { 1 << (self.misses - 1) } else { 0 };
    }
}

/// The receiving direction's.
#[derive(Default)]
pub struct Receives {
    /// A call waits with a buffer that the peer knows of: what the ring counts next may be in there.
    pub is_waiting: bool,
    last_read: usize,
    tries: Tries,
}

impl Receives {
    /// So many bytes were read at once.
    pub fn on_read(&mut self, bytes: usize) {
        self.last_read = bytes;
    }

    /// Whether a call that is about to wait is to tell the peer of its buffer, where so many bytes are worth it.
    pub fn may_try(&mut self, least: usize) -> bool {
        self.last_read >= least / LARGE && !self.is_waiting && self.tries.may()
    }

    /// The wait is over, with so many bytes in the buffer.
    pub fn on_landed(&mut self, bytes: usize) {
        self.is_waiting = false;
        self.tries.on_result(bytes > 0, MOST_RECEIVES);
        if bytes > 0 {
            self.last_read = bytes;
        }
    }
}

/// The sending direction's.
#[derive(Default)]
pub struct Sends {
    tries: Tries,
}

impl Sends {
    /// Whether a call with much to send is to wait for a reader with a buffer.
    pub fn may_try(&mut self) -> bool {
        self.tries.may()
    }

    /// Whether the last one that was waited for came.
    pub fn goes_well(&self) -> bool {
        self.tries.misses == 0
    }

    /// There was one, or not.
    pub fn on_tried(&mut self, is_there: bool) {
        self.tries.on_result(is_there, MOST_SENDS);
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
                if sends.may_try() {
                    tried += 1;
                    sends.on_tried(success);
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
    fn only_bulk_is_worth_it() {
        let mut receives = Receives::default();
        assert!(!receives.may_try(4096));
        receives.on_read(1024);
        assert!(receives.may_try(4096));
        receives.on_landed(4096);
        assert!(receives.may_try(4096));
        receives.on_read(64);
        assert!(!receives.may_try(4096));
    }
}
