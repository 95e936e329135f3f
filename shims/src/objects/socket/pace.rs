//! Lets a reader that keeps up with a writer of small messages check its ring a little less often.
//!
//! Each check takes the cache lines of the ring's tail and of the payload away from the writer. The writer then pays
//! two cache misses for the next message. If the checks are several misses apart, the writer sends many messages for
//! those two misses. The reader waits only if no program can be waiting for its answer: it has sent nothing during its
//! last `KEEPS_UP` checks.

/// The reader keeps up after this many checks in a row that each found at most `LITTLE` bytes.
const KEEPS_UP: u8 = 16;
/// Bytes above which a check found enough to be late enough.
const LITTLE: u64 = 256;
/// How the reader of one direction has kept up lately.
#[derive(Default)]
pub struct Pace {
    /// Checks in a row that found at most `LITTLE` bytes, while nothing was sent in the other direction.
    kept_up: u8,
    /// Bytes read since the last check began.
    found: u64,
    /// Bytes sent in the other direction up to the last check.
    sent: u64,
}

impl Pace {
    /// Notes that `got` bytes were read and `left` are known to be unread, when `sent` bytes were sent in the other
    /// direction. True if the reader is to wait before its next check.
    #[inline]
    pub fn on_read(&mut self, got: u64, left: u64, sent: u64) -> bool {
        self.found = self.found.saturating_add(got);
        if left > 0 {
            return false;
        }
        let is_stream = std::mem::replace(&mut self.sent, sent) == sent;
        let is_little = std::mem::take(&mut self.found) <= LITTLE;
        self.kept_up = if is_stream && is_little {
            self.kept_up.saturating_add(1)
        } else {
            0
        };
        self.kept_up >= KEEPS_UP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(pace: &mut Pace, times: u8, got: u64) -> bool {
        (0..times).fold(false, |_, _| pace.on_read(got, 0, 7))
    }

    #[test]
    fn only_a_row_of_small_looks_puts_the_next_off() {
        let mut pace = Pace::default();
        assert!(!reads(&mut pace, KEEPS_UP, 8), "the first follows a send");
        assert!(reads(&mut pace, 1, 8));
        assert!(!reads(&mut pace, 1, LITTLE + 1), "found much");
        assert!(!reads(&mut pace, KEEPS_UP - 1, 8));
        assert!(reads(&mut pace, 1, 8));
    }

    #[test]
    fn what_one_look_has_found_is_read_without_a_rest() {
        let mut pace = Pace::default();
        reads(&mut pace, KEEPS_UP, 8);
        assert!(!pace.on_read(8, 16, 7));
        assert!(!pace.on_read(8, 8, 7));
        assert!(pace.on_read(8, 0, 7));
        assert!(!pace.on_read(LITTLE, 8, 7));
        assert!(!pace.on_read(8, 0, 7), "more than a little in two reads");
    }

    #[test]
    fn whoever_answers_does_not_rest() {
        let mut pace = Pace::default();
        let mut sent = 0;
        for _ in 0..100 {
            sent += 8;
            assert!(!pace.on_read(8, 0, sent));
        }
    }
}
