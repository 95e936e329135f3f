//! The memory that a probe reads on iWARP: eight bytes of the peer. The peer sends their key and address in its private
//! data.
//!
//! A READ of no bytes would need neither a key nor an address. But if siw has something else to send at that moment, it
//! answers such a READ with the length of the previous request (Linux 6.1, siw_qp.c, siw_activate_tx). Then the
//! connection ends.

use std::sync::Arc;

use rdmasock_core::fabric::plugin::PRIVATE_BYTES;

use crate::error::{Errno, Result};
use crate::memory::Slab;
use crate::sys::{Mr, Pd, Piece, Private, WIRE_BYTES};

/// The number of bytes that a probe reads.
const LEN: u32 = 8;
/// The offsets of key and address in the private data.
const KEY_AT: usize = PRIVATE_BYTES;
const ADDRESS_AT: usize = KEY_AT + 4;
const _: () = assert!(ADDRESS_AT + 8 == WIRE_BYTES);

/// Memory of this end for probes: the peer's probes read the first half, and this end's probes write to the second
/// half. Its content has no meaning.
pub(crate) struct ProbeTarget {
    mr: Mr,
    slab: Arc<Slab>,
}

impl ProbeTarget {
    pub(crate) fn new(pd: &Arc<Pd>) -> Result<Self> {
        let slab = Arc::new(Slab::new(2 * LEN as usize)?);
        Ok(Self {
            mr: Mr::of_slab(pd, &slab, true)?,
            slab,
        })
    }

    /// Returns the memory that the peer's probes read.
    pub(crate) fn offer(&self) -> Offer {
        Offer {
            key: self.mr.key().remote,
            address: self.slab.at().expose_provenance() as u64,
        }
    }

    /// Returns the memory to which this end's probes write the bytes that they read.
    pub(crate) fn sink(&self) -> Result<Piece> {
        Ok(Piece {
            at: self.slab.piece(1, LEN as usize)?,
            len: LEN,
            key: self.mr.key().local,
        })
    }
}

/// The memory of an end that its peer's probes may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub key: u32,
    pub address: u64,
}

impl Offer {
    /// Returns the offer in a peer's private data; `None` if the data has none.
    pub(crate) fn read(private: &Private) -> Option<Self> {
        let key = private.bytes.get(KEY_AT..)?.first_chunk()?;
        let address = private.bytes.get(ADDRESS_AT..)?.first_chunk()?;
        let offer = Self {
            key: u32::from_le_bytes(*key),
            address: u64::from_le_bytes(*address),
        };
        (private.len as usize >= WIRE_BYTES && offer.address != 0).then_some(offer)
    }
}

/// Returns the private data to send: `words`, the bytes of the library, then the offer, or zeroes if there is none.
/// EINVAL if `words` has more than `PRIVATE_BYTES` bytes.
pub(crate) fn compose(words: &[u8], offer: Option<Offer>) -> Result<[u8; WIRE_BYTES]> {
    let mut bytes = [0; WIRE_BYTES];
    if words.len() > PRIVATE_BYTES {
        return Err(Errno(libc::EINVAL));
    }
    let (key, address) = offer.map_or((0, 0), |offer| (offer.key, offer.address));
    let all = words.iter().copied();
    // Zeroes fill the space from the end of `words` to the beginning of the offer.
    let all = all.chain(std::iter::repeat_n(0, PRIVATE_BYTES - words.len()));
    let all = all.chain(key.to_le_bytes()).chain(address.to_le_bytes());
    for (to, from) in bytes.iter_mut().zip(all) {
        *to = from;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(words: &[u8], offer: Option<Offer>) -> Private {
        Private {
            bytes: compose(words, offer).unwrap(),
            len: WIRE_BYTES as u32,
        }
    }

    #[test]
    fn an_offer_travels_behind_the_words() {
        let offer = Offer {
            key: 0x0102_0304,
            address: 0x1122_3344_5566_7788,
        };
        for len in [0, 1, PRIVATE_BYTES] {
            let words = vec![7; len];
            let private = sent(&words, Some(offer));
            assert_eq!(private.bytes[..len], words);
            assert_eq!(Offer::read(&private), Some(offer));
        }
        assert!(compose(&[0; PRIVATE_BYTES + 1], None).is_err());
    }

    #[test]
    fn no_offer_is_none() {
        assert_eq!(Offer::read(&sent(b"words", None)), None);
        assert_eq!(Offer::read(&Private::NONE), None);
    }

    #[test]
    fn probes_do_not_read_where_they_write() {
        let slab = Slab::new(2 * LEN as usize).unwrap();
        assert_eq!(slab.piece(1, LEN as usize).unwrap() as usize - slab.at() as usize, 8);
    }
}
