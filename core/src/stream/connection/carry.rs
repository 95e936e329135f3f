//! What was taken from TCP and is not the program's yet: what may become a marker, what a call has brought that
//! comes later, and what was read ahead (`ahead`).

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::ids::Nonce;
use crate::wire::Marker;
use crate::wire::scan::{Found, scan};

/// So many bytes a connection may be read ahead of its program whatever others are: less than the kernel would hold.
const OWN: usize = 64 * 1024;
/// What all connections together may beyond that: who sends decides how much it is.
const ALL: usize = 256 * 1024 * 1024;

/// What is read ahead beyond [`OWN`].
static AHEAD: AtomicUsize = AtomicUsize::new(0);

/// See the module.
#[derive(Default)]
pub struct Carry {
    /// What is held, behind what the program has already.
    bytes: Vec<u8>,
    /// How many bytes the program has already.
    read: usize,
    /// So many in front hold no marker that [`Self::next_marker`] has not given.
    looked: usize,
    /// What of [`AHEAD`] is this one's.
    charged: usize,
}

impl Carry {
    /// All of it.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(self.read..).unwrap_or_default()
    }

    /// Its bytes.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.read
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds what comes next in TCP.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether `more` bytes may be read ahead; they count then until the program has them. No other may be
    /// [pushed](Self::push) meanwhile. False too without memory for them.
    pub fn charge(&mut self, more: usize) -> bool {
        if self.bytes.try_reserve(more).is_err() {
            return false;
        }
        let beyond = (self.len() + more).saturating_sub(OWN.max(self.charged + OWN));
        if beyond == 0 {
            return true;
        }
        let before = AHEAD.fetch_add(beyond, Relaxed);
        self.charged += beyond;
        let may = before + beyond <= ALL;
        if !may {
            self.settle();
        }
        may
    }

    /// What is not held any more does not count any more.
    fn settle(&mut self) {
        let held = self.len().saturating_sub(OWN).min(self.charged);
        AHEAD.fetch_sub(self.charged - held, Relaxed);
        self.charged = held;
    }

    /// Takes back what was added last: `len` bytes stay.
    pub fn truncate(&mut self, len: usize) {
        self.bytes.truncate(self.read + len);
        self.looked = self.looked.min(len);
        self.settle();
    }

    /// Drops up to `n` bytes in front.
    pub fn consume(&mut self, n: usize) {
        self.read += n.min(self.len());
        self.looked = self.looked.saturating_sub(n);
        self.settle();
        if self.is_empty() {
            // Its memory, which may be what was read far ahead, goes.
            *self = Self::default();
        } else if self.read > self.len() {
            // Fewer bytes move than were read since the last move.
            self.bytes.drain(..self.read);
            self.read = 0;
        }
    }

    /// All of it; nothing is left.
    pub fn take(&mut self) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.drain(..self.read);
        *self = Self::default();
        bytes
    }

    /// The next marker for the reader that chose `nonce`, wherever it is; each is given once, and stays. `None`
    /// where none is there as a whole, and in front of what is no marker that can be read.
    pub fn next_marker(&mut self, nonce: &Nonce) -> Option<Marker> {
        let seen = scan(nonce, self.as_slice().get(self.looked..)?);
        self.looked += seen.payload;
        match seen.what {
            Found::Marker { marker, len } => {
                self.looked += len;
                Some(marker)
            }
            Found::Payload | Found::PartialMarker { .. } | Found::Bad { .. } => None,
        }
    }
}

impl Drop for Carry {
    fn drop(&mut self) {
        AHEAD.fetch_sub(self.charged, Relaxed);
    }
}

/// In a fork child: what was carried is leaked there, and counts no more.
pub fn after_fork() {
    AHEAD.store(0, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::MAX_MARKER;

    #[test]
    fn what_all_together_read_ahead_has_a_bound_and_a_little_is_always_allowed() {
        let piece = vec![0; OWN];
        let mut all: Vec<Carry> = Vec::new();
        let mut read = 0;
        'all: for _ in 0..100 {
            all.push(Carry::default());
            let carry = all.last_mut().unwrap();
            for at in 0..MOST / OWN {
                if !carry.charge(OWN) {
                    assert!(at > 0, "the first piece is its own");
                    break 'all;
                }
                carry.push(&piece);
                read += OWN;
            }
        }
        assert!((ALL..=ALL + all.len() * OWN).contains(&read), "{read}");
        let mut late = Carry::default();
        assert!(late.charge(OWN));
        late.push(&piece);
        assert!(!late.charge(OWN));
        // A program reads.
        all.first_mut().unwrap().consume(2 * OWN);
        assert!(late.charge(OWN));
        drop(late);
        drop(all);
        assert_eq!(AHEAD.load(Relaxed), 0);
    }

    const MOST: usize = 16 * 1024 * 1024;

    const NONCE: Nonce = Nonce::from_bytes([0xc0; 16]);

    fn encoded(marker: &Marker) -> Vec<u8> {
        let mut buf = [0; MAX_MARKER];
        marker.encode(&NONCE, &mut buf).unwrap().to_vec()
    }

    #[test]
    fn each_marker_behind_data_is_given_once_and_stays_where_it_is() {
        let resume = Marker::Resume { received: 3, sent: 5 };
        let (first, second) = (encoded(&Marker::Switch), encoded(&resume));
        let mut carry = Carry::default();
        carry.push(b"data");
        assert!(carry.next_marker(&NONCE).is_none());
        carry.push(&first);
        let (part, rest) = second.split_at(20);
        carry.push(part);
        assert!(matches!(carry.next_marker(&NONCE), Some(Marker::Switch)));
        assert!(carry.next_marker(&NONCE).is_none(), "not as a whole yet");
        // The program reads some of it meanwhile.
        carry.consume(2);
        carry.push(rest);
        assert!(matches!(
            carry.next_marker(&NONCE),
            Some(Marker::Resume { received: 3, sent: 5 })
        ));
        assert!(carry.next_marker(&NONCE).is_none());
        assert_eq!(carry.as_slice(), [&b"ta"[..], &first, &second].concat());
        carry.consume(2 + first.len());
        assert_eq!(carry.take(), second);
        assert!(carry.is_empty());
    }
}
