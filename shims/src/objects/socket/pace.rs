//! A reader that keeps up with a writer of small messages looks a little less often.
//!
//! Each look takes the cache lines of the ring's tail and of the payload away from the writer, who then pays two misses
//! for the next message. Between looks that are some misses apart it writes many messages for those two. Only where
//! nobody can be waiting for the reader's answer: it has sent nothing for some reads.

/// From so many looks in a row on that each found a little.
const KEEPS_UP: u8 = 16;
/// A look that has found more bytes than this was late enough.
const LITTLE: u64 = 256;
/// How the reader of one direction has fared lately.
#[derive(Default)]
pub struct Pace {
    /// Looks in a row that found a little and left nothing.
    kept_up: u8,
    /// Bytes found by the last look and read since.
    found: u64,
    /// What had been sent in the other direction by then.
    sent: u64,
}

impl Pace {
    /// `got` bytes have been read and `left` are known to be there still, when `sent` have been sent in the other
    /// direction. True if the next look is to be put off.
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
