//! What the encodings of messages, markers and introductions share: the version, how bytes are read and appended, and
//! what can be wrong with them. Not the encodings.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of the whole protocol, part of every service name, message and marker (P1).
pub const VERSION: u8 = 2;

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

/// Reads a value that takes up the whole of `bytes`.
pub(super) fn read<T: FromBytes + KnownLayout + Immutable + Unaligned>(bytes: &[u8]) -> Result<&T, WireError> {
    T::ref_from_bytes(bytes).map_err(|_| WireError::Length)
}

/// Reads a value off the front of `bytes`; gives the rest too.
pub(super) fn read_prefix<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    bytes: &[u8],
) -> Result<(&T, &[u8]), WireError> {
    T::ref_from_prefix(bytes).map_err(|_| WireError::Length)
}

/// Appends to a caller's buffer and remembers the first overflow.
pub(super) struct Writer<'a> {
    buf: &'a mut [u8],
    /// Bytes appended.
    pub len: usize,
}

impl<'a> Writer<'a> {
    pub fn new(buf: &'a mut [u8]) -> Self {
        Self { buf, len: 0 }
    }

    pub fn put<T: IntoBytes + Immutable + ?Sized>(&mut self, value: &T) -> Result<(), WireError> {
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
