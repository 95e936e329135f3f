//! Finds markers in what TCP delivers. A pure function: `stream` reads TCP, and decides when to scan at all
//! (docs/protocol.md, P33–P36).

use super::codec::WireError;
use super::marker::{MIN_MARKER, Marker};
use crate::ids::Nonce;

/// The bytes that follow the payload.
#[derive(Debug, Clone, Copy)]
pub enum Found {
    /// No byte: all bytes scanned are data.
    Payload,
    /// The possible beginning of a marker: `have` bytes (1 to `MAX_MARKER` − 1) that are neither data nor a marker yet.
    PartialMarker {
        /// Number of bytes to hold back, up to the end of those scanned.
        have: usize,
    },
    /// A whole marker. The bytes behind it have not been scanned.
    Marker {
        /// The marker.
        marker: Marker,
        /// Its length in bytes.
        len: usize,
    },
    /// Bytes that start with the reader's nonce, so they are not the application's data, but are no marker that this
    /// version can read. `len` bytes are to be dropped, and the attempt to promote has ended.
    Bad {
        /// Why it is no marker.
        error: WireError,
        /// Its length in bytes: as the header says, or the bare header if no marker is that long.
        len: usize,
    },
}

/// The result of [`scan`].
#[derive(Debug, Clone, Copy)]
pub struct Scan {
    /// Number of bytes at the front that are the application's data.
    pub payload: usize,
    /// The bytes behind them.
    pub what: Found,
}

/// Finds the first marker for the reader that chose `nonce` in `bytes`, the next bytes of TCP.
///
/// `bytes` must begin where an earlier scan left off: at the byte after the data delivered, so that a tail held back is
/// scanned again. A tail that can still become a marker is never called data. To get past a partial marker, a caller
/// needs room for the `MAX_MARKER` bytes of a whole one.
pub fn scan(nonce: &Nonce, bytes: &[u8]) -> Scan {
    let pattern = nonce.as_bytes();
    let [first, ..] = pattern;
    let mut payload = 0;
    // Finds the first place where all bytes there agree with the nonce; they may run out early only at the end of
    // `bytes`. Trying every place in order also handles a nonce that contains its own beginning.
    while let Some(skip) = bytes
        .get(payload..)
        .and_then(|rest| rest.iter().position(|b| b == first))
    {
        payload += skip;
        let tail = bytes.get(payload..).unwrap_or_default();
        if tail.iter().zip(pattern).all(|(a, b)| a == b) {
            return Scan {
                payload,
                what: read_marker(tail),
            };
        }
        payload += 1;
    }
    Scan {
        payload: bytes.len(),
        what: Found::Payload,
    }
}

/// Returns how many of `bytes` are the application's data, with markers among them or not. `bytes` follow each other in
/// TCP from where an earlier scan left off.
pub fn payload_in(nonce: &Nonce, bytes: &[u8]) -> usize {
    let (mut payload, mut rest) = (0, bytes);
    loop {
        let seen = scan(nonce, rest);
        payload += seen.payload;
        match seen.what {
            Found::Payload | Found::PartialMarker { .. } => return payload,
            Found::Marker { len, .. } | Found::Bad { len, .. } => {
                rest = rest.get(seen.payload + len..).unwrap_or_default();
            }
        }
    }
}

/// Reads the marker at the front of `tail`, which agrees with the reader's nonce as far as it reaches.
fn read_marker(tail: &[u8]) -> Found {
    let len = match Marker::total_length(tail) {
        Ok(Some(len)) => len,
        Ok(None) => return Found::PartialMarker { have: tail.len() },
        Err(error) => {
            return Found::Bad { error, len: MIN_MARKER };
        }
    };
    match tail.get(..len) {
        None => Found::PartialMarker { have: tail.len() },
        Some(whole) => match Marker::decode(whole) {
            Ok(marker) => Found::Marker { marker, len },
            Err(error) => Found::Bad { error, len },
        },
    }
}

#[cfg(test)]
mod tests;
