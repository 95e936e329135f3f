//! The demands of a link between hosts on a queue pair, and its settings. `qp.rs` describes the queue pair.

#![forbid(unsafe_code)]

use super::chunks::CHUNK_LOG2;
use super::qp::Limits;
use super::record::{DATA_BYTES, HEADER_BYTES};
use crate::wire::MAX_MESSAGE;

/// The fewest bytes of a receive buffer with which a link can work. A message of the side channel fits one, together
/// with the records that have to precede it.
pub const MIN_BUFFER: u32 = MAX_MESSAGE as u32 + 200;

/// The fewest receive buffers with which a link can work: credits are given back by halves.
pub const MIN_BUFFERS: u16 = 4;

/// The settings of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Payloads of up to this many bytes travel in the message, if they fit. Longer ones are written into the peer's
    /// ring.
    pub eager_max: u32,
    /// Bytes that one stream sends before other streams get their turn.
    pub piece: u32,
    /// log2 of the bytes that are registered at a time. Both ends need the same, so only tests change it.
    pub chunk_log2: u8,
    /// Bytes at the end of the mirror's data area, whole pages, that do not copy the peer's: room for send buffers
    /// ([`LinkEnd::lend`](crate::fabric::link::LinkEnd::lend)).
    pub buffers: u64,
    /// The fewest bytes that are written straight into a buffer with which the peer's program waits.
    pub direct_min: u32,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            eager_max: 2048,
            piece: 64 * 1024,
            chunk_log2: CHUNK_LOG2,
            buffers: 0,
            direct_min: 64 * 1024,
        }
    }
}

impl Tuning {
    /// Returns the settings for a queue pair with these limits. Where a WRITE has no immediate, a message follows each
    /// WRITE. There a payload that fits a message goes in one, since a copy costs less than another work request.
    /// Elsewhere the one WRITE saves the copy.
    pub fn fit(limits: &Limits) -> Self {
        let mut tuning = Self::default();
        if !limits.immediate {
            let headers = (HEADER_BYTES + DATA_BYTES) as u32;
            tuning.eager_max = limits.buffer_bytes.saturating_sub(headers);
        }
        tuning
    }
}

/// The queue pair cannot carry a link: [`MIN_BUFFER`], [`MIN_BUFFERS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("receive buffers too few or too small")]
pub struct Unusable;
