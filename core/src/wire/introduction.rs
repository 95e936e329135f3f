//! The introduction of an end of a new queue pair. Each end sends it to the other as private data of the rdma_cm
//! connection (docs/protocol.md, "Links between hosts"). This module encodes and decodes it.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::ids::{Cookie, ID_BYTES, InstanceId};
use crate::wire::codec::{VERSION, WireError, take};

/// The length of an introduction in bytes.
pub const INTRODUCTION: usize = size_of::<Frame>();

const MAGIC: [u8; 4] = *b"rsok";

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Frame {
    magic: [u8; 4],
    version: u8,
    /// 1: data may also go directly between the programs' memory, without the rings (P90 to P99). Else 0.
    transfers: u8,
    /// 1: this is a bulk queue pair, beside the queue pair of a link. 0: this is the queue pair of a link.
    purpose: u8,
    reserved: u8,
    pid: U32,
    instance: InstanceId,
    cookie: Cookie,
}

/// The identity and the terms of an end of a new queue pair.
#[derive(Debug, Clone, Copy)]
pub struct Introduction {
    /// The pid of the end's process, in its own pid namespace.
    pub pid: u32,
    /// The end's instance.
    pub instance: InstanceId,
    /// From the connecting end: the cookie from the other end's HELLO, or from BULK for a bulk queue pair. From the
    /// accepting end: zeroes.
    pub cookie: Cookie,
    /// The end allows direct transfers, because its user has not switched them off.
    pub is_direct: bool,
    /// The new queue pair is a bulk queue pair, beside the queue pair of a link.
    pub is_bulk: bool,
}

impl Introduction {
    /// The zeroes that the accepting end sends in place of a cookie.
    pub const NO_COOKIE: Cookie = Cookie::from_bytes([0; ID_BYTES]);

    /// Returns the introduction's bytes.
    pub fn encode(&self) -> [u8; INTRODUCTION] {
        zerocopy::transmute!(Frame {
            magic: MAGIC,
            version: VERSION,
            transfers: self.is_direct.into(),
            purpose: self.is_bulk.into(),
            reserved: 0,
            pid: self.pid.into(),
            instance: self.instance,
            cookie: self.cookie,
        })
    }

    /// Decodes the introduction at the beginning of `bytes`, the peer's private data. Ignores bytes behind it, because
    /// transports may pad the data. Accepts any bytes without a panic.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let frame: Frame = take(&mut &bytes[..])?;
        if frame.magic != MAGIC {
            return Err(WireError::Magic);
        }
        if frame.version != VERSION {
            return Err(WireError::Version(frame.version));
        }
        Ok(Self {
            pid: frame.pid.get(),
            instance: frame.instance,
            cookie: frame.cookie,
            is_direct: frame.transfers == 1,
            is_bulk: frame.purpose == 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_introduction_is_understood_and_another_version_or_a_short_one_is_not() {
        let introduction = Introduction {
            pid: 0x0102_0304,
            instance: InstanceId::from_bytes([3; ID_BYTES]),
            cookie: Cookie::from_bytes([9; ID_BYTES]),
            is_direct: false,
            is_bulk: false,
        };
        let bytes = introduction.encode();
        let expected = [&b"rsok"[..], &[2, 0, 0, 0, 4, 3, 2, 1], &[3; 16], &[9; 16]];
        assert_eq!(bytes[..], expected.concat());
        let padded = [&bytes[..], &[0; 140]].concat();
        let got = Introduction::decode(&padded).unwrap();
        assert_eq!((got.pid, got.instance), (0x0102_0304, introduction.instance));
        assert!(got.cookie.matches(&introduction.cookie));
        for (at, error) in [(0, WireError::Magic), (3, WireError::Magic), (4, WireError::Version(3))] {
            let mut bad = bytes;
            bad[at] ^= 1;
            assert_eq!(Introduction::decode(&bad).unwrap_err(), error);
        }
        for (at, byte, expected) in [(5, 1, (true, false)), (6, 1, (false, true))] {
            let mut other = bytes;
            other[at] = byte;
            let got = Introduction::decode(&other).unwrap();
            assert_eq!((got.is_direct, got.is_bulk), expected);
            assert_eq!(got.encode(), other);
        }
        for length in 0..INTRODUCTION {
            assert_eq!(Introduction::decode(&bytes[..length]).unwrap_err(), WireError::Length);
        }
    }
}
