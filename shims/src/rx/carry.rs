//! What was taken from TCP and is not the program's yet: what may become a marker, what a call has brought that
//! comes later, and what was read ahead (`promote::ahead`).

use bytes::{Buf, BytesMut};

use rdmasock_core::ids::Nonce;
use rdmasock_core::wire::Marker;
use rdmasock_core::wire::scan::{Found, scan};

/// See the module.
#[derive(Default)]
pub struct Carry {
    bytes: BytesMut,
    /// So many in front hold no marker that [`Self::next_marker`] has not given.
    looked: usize,
}

impl Carry {
    /// All of it.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Adds what comes next in TCP.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Takes back what was added last: `len` bytes stay.
    pub fn truncate(&mut self, len: usize) {
        self.bytes.truncate(len);
        self.looked = self.looked.min(len);
    }

    /// Drops up to `n` bytes in front.
    pub fn consume(&mut self, n: usize) {
        self.bytes.advance(n.min(self.bytes.len()));
        self.looked = self.looked.saturating_sub(n);
        if self.bytes.is_empty() {
            // Its memory, which may be what was read far ahead, goes.
            *self = Self::default();
        }
    }

    /// All of it; nothing is left.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(self).bytes.into()
    }

    /// The next marker for the reader that chose `nonce`, wherever it is; each is given once, and stays. `None`
    /// where none is there as a whole, and in front of what is no marker that can be read.
    pub fn next_marker(&mut self, nonce: &Nonce) -> Option<Marker> {
        let seen = scan(nonce, self.bytes.get(self.looked..)?);
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

#[cfg(test)]
mod tests {
    use super::*;
    use rdmasock_core::wire::MAX_MARKER;

    const NONCE: Nonce = Nonce::from_bytes([0xc0; 16]);

    fn encoded(marker: &Marker) -> Vec<u8> {
        let mut buf = [0; MAX_MARKER];
        marker.encode(&NONCE, &mut buf).unwrap().to_vec()
    }

    #[test]
    fn each_marker_behind_data_is_given_once_and_stays_where_it_is() {
        let resume = Marker::Resume {
            received: 3,
            sent: 5,
        };
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
            Some(Marker::Resume {
                received: 3,
                sent: 5
            })
        ));
        assert!(carry.next_marker(&NONCE).is_none());
        assert_eq!(carry.as_slice(), [&b"ta"[..], &first, &second].concat());
        carry.consume(2 + first.len());
        assert_eq!(carry.take(), second);
        assert!(carry.is_empty());
    }
}
