//! Whether one direction of a stream between hosts is worth a direct transfer, by how it went lately.
//!
//! A receive that tells the peer of its buffer pays for that whether or not the peer uses it, but with time in which it
//! has nothing to do: it always does in a bulk transfer. A send that waits for a reader with a buffer waits in vain
//! where there is none: each failure in a row doubles the number of sends that do not try, unless a reader has told of
//! a buffer meanwhile, or so much time has gone by that a try costs next to nothing. Pure: times are given.
//!
//! Whether it is faster at all is learned (`ways.rs`), or fixed by the user.

use crate::config::ZeroCopy;
use crate::steering::Issuer;
use crate::ways::{Contest, Known, Send, Way};

/// Reads of so much less than is worth a direct transfer are still those of a bulk transfer.
const LARGE: usize = 4;
/// Longest pause after failures, as a power of two of sends; and in time, ns: a try in vain takes some ms.
const MOST: u8 = 8;
const LONGEST: u64 = 1_000_000_000;
/// Sends that do not go as the loads of both ends would have it, after so many of those in a row were in vain. The
/// first has only told a reader that waits without a buffer that those are of use: it has one the next time it waits.
const NOT_BY_LOAD: u16 = 256;
const IN_VAIN: u8 = 3;
/// A reader waits with buffers if it has done so for one of so many sends.
const WAITS: u8 = 8;

/// The receiving direction's.
#[derive(Default)]
pub struct Receives {
    /// A call waits with a buffer that the peer knows of: what the ring counts next may be in there.
    pub is_waiting: bool,
    /// Bytes that came so.
    pub bytes: u64,
    last_read: usize,
}

impl Receives {
    /// So many bytes were read at once.
    pub fn on_read(&mut self, bytes: usize) {
        self.last_read = bytes;
    }

    /// Whether a call that is about to wait is to tell the peer of its buffer, where so many bytes are worth it.
    pub fn may_try(&self, least: usize) -> bool {
        self.last_read >= least / LARGE && !self.is_waiting
    }

    /// The wait is over, with so many bytes in the buffer.
    pub fn on_landed(&mut self, bytes: usize) {
        self.is_waiting = false;
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
    /// Which way they go.
    contest: Contest,
    last_way: Way,
    /// The reader has waited with a buffer lately: not 0, and less with each send for which it has not.
    waits: u8,
    /// The last send went as the loads of both ends have it; so many of those in a row were in vain; so many sends are
    /// yet to go without a look at the loads.
    is_by_load: bool,
    in_vain: u8,
    not_by_load: u16,
    /// The peer may think that buffers are of use.
    pub has_invited: bool,
}

impl Sends {
    /// Which way a send goes: by what streams of its link have learned, and who is to issue it, or as the user has
    /// fixed it. If that has ended a trial, whether another way has become the best.
    pub fn way(&mut self, asked: ZeroCopy, known: &Known, send: Send, issuer: Option<Issuer>) -> (Way, Option<bool>) {
        let way = match asked {
            ZeroCopy::Off => Way::Rings,
            ZeroCopy::Auto => {
                let best = self.contest.best(known, send);
                let by_load = self.by_load(best, send, issuer);
                let (way, ended) = match by_load {
                    Some(way) if way != best => {
                        self.contest.pause(send);
                        (way, None)
                    }
                    _ => self.contest.way(known, send, best),
                };
                self.is_by_load = by_load == Some(way);
                if std::mem::replace(&mut self.last_way, way) != way {
                    // What was in vain at another time.
                    (self.to_readers, self.to_devices) = Default::default();
                }
                return (way, ended);
            }
            ZeroCopy::From(least) if (send.len as u64) < least.bytes() => Way::Rings,
            ZeroCopy::From(_) => Way::Direct,
        };
        (way, None)
    }

    /// Push or pull: which it is decides the load of the two ends, where both wait and either is better than by rings.
    fn by_load(&mut self, best: Way, send: Send, issuer: Option<Issuer>) -> Option<Way> {
        self.not_by_load = self.not_by_load.saturating_sub(1);
        let is_open = matches!(best, Way::Direct | Way::Lent) && send.can_wait && send.can_lend;
        match issuer.filter(|_| is_open && self.waits > 0 && self.not_by_load == 0)? {
            Issuer::Sender => Some(Way::Direct),
            Issuer::Reader => Some(Way::Lent),
        }
    }

    /// Whether the last send went as the loads have it.
    pub fn is_by_load(&self) -> bool {
        self.is_by_load
    }

    /// Whether it was in vain, and whether the reader has waited with a buffer for it.
    pub fn on_sent(&mut self, in_vain: bool, reader_waits: bool) {
        self.waits = if reader_waits {
            WAITS
        } else {
            self.waits.saturating_sub(1)
        };
        if !(in_vain && self.is_by_load) {
            self.in_vain = 0;
            return;
        }
        self.in_vain += 1;
        if self.in_vain == IN_VAIN {
            (self.is_by_load, self.in_vain) = (false, 0);
            self.not_by_load = NOT_BY_LOAD;
        }
    }

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
    fn the_loads_decide_where_both_wait_and_not_after_a_send_in_vain() {
        let known = Known::default();
        let mut sends = Sends::default();
        let mut position = 0;
        let mut next = |sends: &mut Sends, len, issuer| {
            position += 1;
            let send = Send {
                now: position,
                position,
                len,
                ring: 4 << 20,
                can_wait: true,
                can_lend: true,
                goes_on: false,
            };
            let (way, _) = sends.way(ZeroCopy::Auto, &known, send, issuer);
            (way, sends.is_by_load())
        };
        let large = 1 << 20;
        // The first guess, and nobody knows whether the reader waits.
        assert_eq!(next(&mut sends, large, Some(Issuer::Reader)), (Way::Direct, false));
        sends.on_sent(false, true);
        assert_eq!(next(&mut sends, large, Some(Issuer::Reader)), (Way::Lent, true));
        sends.on_sent(false, true);
        assert_eq!(next(&mut sends, large, None), (Way::Direct, false));
        assert_eq!(next(&mut sends, large, Some(Issuer::Sender)), (Way::Direct, true));
        // A reader that does not wait with a buffer.
        (1..WAITS).for_each(|_| sends.on_sent(false, false));
        assert_eq!(next(&mut sends, large, Some(Issuer::Reader)), (Way::Lent, true));
        sends.on_sent(false, false);
        assert_eq!(next(&mut sends, large, Some(Issuer::Reader)), (Way::Direct, false));
        // In vain.
        sends.on_sent(false, true);
        for _ in 0..IN_VAIN {
            assert_eq!(next(&mut sends, large, Some(Issuer::Reader)), (Way::Lent, true));
            sends.on_sent(true, true);
        }
        let pulled = (0..NOT_BY_LOAD).filter(|_| next(&mut sends, large, Some(Issuer::Reader)).1);
        assert_eq!(pulled.count(), 1, "the last of them");
        // What goes by rings does so whatever the loads are, once it is known to be no odd one.
        let pulled = (0..100).filter(|_| next(&mut sends, 20_000, Some(Issuer::Reader)).1);
        assert!(pulled.count() < 20);
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
