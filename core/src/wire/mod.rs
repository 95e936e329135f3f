//! The wire: what two instances say to each other, byte by byte (docs/protocol.md has the rules).
//!
//! Two kinds of things are said. A [`Message`] goes out of band, one a datagram, on a service name,
//! a link's side channel or the control port. A [`Marker`] goes inside the TCP stream, where
//! [`scan`] finds it. All integers are little-endian; decoding is total, checks every length and
//! never panics. Nothing here does I/O or knows what a message leads to.

#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod introduction;
mod marker;
mod message;
pub mod scan;

use std::fmt;

pub use introduction::{INTRODUCTION, Introduction};
pub use marker::{
    Hello, LinkAddress, LinkOffer, MAX_ADDRESS, MAX_MARKER, MIN_MARKER, Marker, ShmName,
};
pub use message::{MAX_MESSAGE, MAX_REDIRECT, Message};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// The version of the whole protocol, part of every service name, message and marker (P1).
pub const VERSION: u8 = 2;

/// The size of a page of a link's arena, in which rings are placed.
pub const ARENA_PAGE: u64 = 4096;

/// Why bytes are not a message or a marker of this protocol.
///
/// Always the peer's fault, or that of whoever else wrote to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Shorter or longer than the message says or its kind demands.
    #[error("wrong length")]
    Length,
    /// Does not start as a message of this protocol.
    #[error("not an rdmasock message")]
    Magic,
    /// Another version of the protocol.
    #[error("protocol version {0}")]
    Version(u8),
    /// A kind that this version does not know.
    #[error("unknown kind {0}")]
    Kind(u8),
    /// A field has a value outside its range.
    #[error("{0} out of range")]
    Field(&'static str),
    /// The buffer to encode into is too small: the caller's fault, not the peer's.
    #[error("buffer too small")]
    Buffer,
}

/// Why an end says no, as it travels in NO, LINK-REFUSE, OPEN-REFUSE and ABORT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// This instance holds no such connection (or has not accepted it yet).
    NotHeld,
    /// A rule leaves the connection on TCP.
    Rule,
    /// More than one process may hold the connection.
    Shared,
    /// The socket is in a use that the link does not support.
    Use,
    /// The connection is being closed or has been reset.
    Closing,
    /// A bound was reached: links, streams, waiters.
    Limit,
    /// No memory, no fd, no room in the arena.
    Resources,
    /// The other end's parameters cannot be met.
    Unsupported,
    /// The nonce or the cookie is not the one that was given out.
    Secret,
    /// The other end did not keep to the protocol.
    Violation,
    /// A step did not come in time.
    Timeout,
    /// The other end withdrew.
    Cancelled,
    /// No program with the library listens on the port there.
    Absent,
    /// A reason of a later version, by its number.
    Other(u16),
}

impl Reason {
    const KNOWN: [(Self, u16, &'static str); 13] = [
        (Self::NotHeld, 1, "peer does not hold the connection"),
        (Self::Rule, 2, "a rule leaves it on TCP"),
        (Self::Shared, 3, "shared by several processes"),
        (Self::Use, 4, "socket use not supported on a link"),
        (Self::Closing, 5, "connection is closing"),
        (Self::Limit, 6, "limit reached"),
        (Self::Resources, 7, "out of memory, fds or arena"),
        (Self::Unsupported, 8, "parameters not supported"),
        (Self::Secret, 9, "wrong nonce or cookie"),
        (Self::Violation, 10, "protocol violation"),
        (Self::Timeout, 11, "no answer in time"),
        (Self::Cancelled, 12, "withdrawn"),
        (Self::Absent, 13, "no program with the library on the port"),
    ];

    /// The number on the wire.
    pub fn code(self) -> u16 {
        match self {
            Self::Other(code) => code,
            known => Self::KNOWN
                .iter()
                .find(|(r, ..)| *r == known)
                .map_or(0, |(_, code, _)| *code),
        }
    }

    /// The reason with this number; every number is one.
    pub fn from_code(code: u16) -> Self {
        Self::KNOWN
            .iter()
            .find(|(_, c, _)| *c == code)
            .map_or(Self::Other(code), |(r, ..)| *r)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::KNOWN.iter().find(|(r, ..)| r == self) {
            Some((.., text)) => f.write_str(text),
            None => write!(f, "reason {}", self.code()),
        }
    }
}

bitflags::bitflags! {
    /// What an instance can do, as it travels in HELLO. Unknown bits are kept and mean nothing.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Capabilities: u32 {
        /// The same-host fabric.
        const SHM = 1 << 0;
        /// Links between hosts.
        const VERBS = 1 << 1;
        const _ = !0;
    }
}

/// A ring for incoming data, offered to the other end: where it lies in the offerer's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingOffer {
    page: u32,
    log2: u8,
}

impl RingOffer {
    /// The smallest ring, as the logarithm of its bytes.
    pub const MIN_LOG2: u8 = 12;
    /// The largest ring, as the logarithm of its bytes.
    pub const MAX_LOG2: u8 = 26;

    /// A ring of 2^`log2` bytes at page `page` of the arena; `None` where `log2` is out of range.
    ///
    /// Whether the ring lies within the arena is for [`Self::fits`] to say.
    pub fn new(page: u32, log2: u8) -> Option<Self> {
        (Self::MIN_LOG2..=Self::MAX_LOG2)
            .contains(&log2)
            .then_some(Self { page, log2 })
    }

    /// The first page, in units of [`ARENA_PAGE`].
    pub const fn page(&self) -> u32 {
        self.page
    }

    /// The logarithm of the ring's bytes.
    pub const fn log2(&self) -> u8 {
        self.log2
    }

    /// The ring's size in bytes, a power of two.
    pub const fn bytes(&self) -> u64 {
        1 << self.log2
    }

    /// Where the ring begins, in bytes from the start of the arena.
    pub const fn offset(&self) -> u64 {
        self.page as u64 * ARENA_PAGE
    }

    /// Does the ring lie within an arena of `arena_bytes`?
    pub const fn fits(&self, arena_bytes: u64) -> bool {
        // At most 2^44 + 2^26: no overflow.
        self.offset() + self.bytes() <= arena_bytes
    }
}

/// The sizes of what one end of a link shares with the other; the fds travel beside it (P24).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of the arena memfd, which holds the rings.
    pub arena_bytes: u64,
    /// Bytes of the waiter memfd, which holds ready queues and sleeper flags.
    pub waiter_bytes: u64,
    /// Entries of one ready queue.
    pub queue_entries: u32,
    /// How many waiters the end may announce.
    pub max_waiters: u32,
    /// Bytes of the largest ring that the end writes into.
    pub max_ring: u64,
}

/// Reads a value that takes up the whole of `bytes`.
fn read<T: FromBytes + KnownLayout + Immutable + Unaligned>(bytes: &[u8]) -> Result<&T, WireError> {
    T::ref_from_bytes(bytes).map_err(|_| WireError::Length)
}

/// Reads a value off the front of `bytes`; gives the rest too.
fn read_prefix<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    bytes: &[u8],
) -> Result<(&T, &[u8]), WireError> {
    T::ref_from_prefix(bytes).map_err(|_| WireError::Length)
}

/// Appends to a caller's buffer and remembers the first overflow.
struct Writer<'a> {
    buf: &'a mut [u8],
    len: usize,
}

impl<'a> Writer<'a> {
    fn new(buf: &'a mut [u8]) -> Self {
        Self { buf, len: 0 }
    }

    fn put<T: zerocopy::IntoBytes + Immutable + ?Sized>(
        &mut self,
        value: &T,
    ) -> Result<(), WireError> {
        let bytes = value.as_bytes();
        let end = self.len.checked_add(bytes.len()).ok_or(WireError::Buffer)?;
        self.buf
            .get_mut(self.len..end)
            .ok_or(WireError::Buffer)?
            .copy_from_slice(bytes);
        self.len = end;
        Ok(())
    }
}
