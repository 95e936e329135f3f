//! Bytes that were taken from TCP and that the program does not have yet. They may be the beginning of a marker, bytes
//! of a call that come later in the stream, or bytes that were read ahead (`ahead`).

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use crate::ids::Nonce;
use crate::wire::Marker;
use crate::wire::scan::{Found, scan};

/// Bytes that each connection may be read ahead of its program, even if the others use up [`ALL`]. The kernel would
/// hold more.
const OWN: usize = 64 * 1024;
/// Bytes that all connections together may be read ahead beyond [`OWN`] each. The bound is needed because the peers
/// decide how much it is.
const ALL: usize = 256 * 1024 * 1024;

/// Bytes that are read ahead beyond [`OWN`] now, over all connections.
static AHEAD: AtomicUsize = AtomicUsize::new(0);

/// Bytes that were taken from TCP and that the program has not read.
#[derive(Default)]
pub struct Carry {
    /// The bytes that are held, behind those that the program has read.
    bytes: Vec<u8>,
    /// How many bytes in front the program has read.
    read: usize,
    /// Number of unread bytes in front whose markers [`Self::next_marker`] has all returned.
    looked: usize,
    /// How many bytes of [`AHEAD`] this connection has.
    charged: usize,
}

impl Carry {
    /// Returns all bytes that are held.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(self.read..).unwrap_or_default()
    }

    /// Returns the number of bytes that are held.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.read
    }

    /// Returns whether no byte is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends the bytes that come next in TCP.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns whether `more` bytes may be read ahead, and reserves memory for them. They count until the program has
    /// read them. The caller [pushes](Self::push) no other bytes before them. False if the bound is reached, or without
    /// memory.
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

    /// Stops counting the bytes that are not held any more.
    fn settle(&mut self) {
        let held = self.len().saturating_sub(OWN).min(self.charged);
        AHEAD.fetch_sub(self.charged - held, Relaxed);
        self.charged = held;
    }

    /// Removes the bytes that were appended last: `len` bytes stay.
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
            // Frees the memory: it may be large, if many bytes were read ahead.
            *self = Self::default();
        } else if self.read > self.len() {
            // The move copies fewer bytes than the program has read since the last move.
            self.bytes.drain(..self.read);
            self.read = 0;
        }
    }

    /// Takes all bytes; none is left.
    pub fn take(&mut self) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.drain(..self.read);
        *self = Self::default();
        bytes
    }

    /// Returns the next marker for the reader that chose `nonce`, however many bytes precede it. Each marker is
    /// returned once, and its bytes stay. `None` if no whole marker is there, and in front of one that cannot be
    /// decoded.
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

/// Resets the count in a fork child: the carries of its parent are leaked there, and count no more.
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
        // A program reads, which makes room for another.
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
