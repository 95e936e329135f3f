//! The content of a message on the queue pair: a header and any number of records. A message is written into a buffer
//! of fixed size. Any bytes may be read as a message: malformed ones are an error. See docs/protocol.md, P50–P58 and
//! P90–P99. `receive.rs` applies the records.

#![forbid(unsafe_code)]

use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::wire::codec::{Writer, kinds, structs};

/// The header of a message, before its records.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    /// The number of receive buffers that the sender has posted again since its last message.
    grant: U16,
    /// The length of all the records in bytes, exactly.
    length: U16,
}

/// The length in bytes of a message without records.
pub const HEADER_BYTES: usize = size_of::<Header>();

kinds! {
    /// A record (docs/protocol.md, P50).
    ///
    /// | field | what |
    /// |---|---|
    /// | `theirs` | the number that the receiver of the record gave to the stream |
    /// | `tail`, `head`, `position` | positions: bytes of the direction from its beginning on |
    /// | `generation` | counts the rings that were offered one after the other |
    /// | `end`, `flags`, `word`, `count` | a word of the direction block; in `Tell` a wake-up word |
    /// | `serial` | names an advert of the waiting program's end (P91), or a loan of the lending program's end (P96) |
    /// | `memory` | memory of the program at the record's sender, for WRITEs or READs by the record's receiver |
    /// | `index` | a chunk's place in the data area, in chunks |
    /// | `rkey`, `base` | the chunk's key and address, for the WRITEs of the receiver of the record (P53) |
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[allow(
        missing_docs,
        reason = "the fields mean the same in every record, and are in the table"
    )]
    pub enum Record<'a> {
        /// The direction goes on to `tail`. The payload is the last part of the new bytes. WRITEs have brought the
        /// other new bytes before.
        1 = Data { theirs: u32, tail: u64, payload: &'a [u8] };
        /// From `position` on, which equals the tail, the direction is in the ring on offer.
        2 = Switch { theirs: u32, generation: u32, position: u64 };
        /// The producer has set this end mark, at the tail.
        3 = End { theirs: u32, end: u8, tail: u64 };
        /// The number of times that the window was too small for the producer.
        4 = Limited { theirs: u32, count: u32 };
        /// The consumer has read up to `head`.
        5 = Head { theirs: u32, head: u64 };
        /// The consumer offers a ring.
        6 = Offer { theirs: u32, word: u64 };
        /// The consumer's flags.
        7 = Flags { theirs: u32, flags: u32 };
        /// The consumer has stopped reading.
        8 = Stop { theirs: u32 };
        /// A chunk of the sender's data area is registered: its key and its address.
        9 = Chunk { index: u32, rkey: u32, base: u64 };
        /// A message of the side channel.
        10 = Message { bytes: &'a [u8] };
        /// Asks for an ACK of all that was sent before this record.
        11 = Confirm { theirs: u32 };
        /// All bytes up to `tail` are in the ring.
        12 = Ack { theirs: u32, tail: u64 };
        /// Asks the receiver to queue the stream for the waiters of its process that `word` names.
        13 = Tell { theirs: u32, word: u32 };
        /// The reader's program waits with a buffer for the bytes from the memory's position on.
        14 = Advert { theirs: u32, memory: Memory };
        /// The reader's program waits no longer with the buffer of an advert.
        15 = Withdraw { theirs: u32, withdrawal: Withdrawal };
        /// All bytes up to `tail` are in the buffer of an advert, which ends with this record. On the bulk queue pair
        /// only.
        16 = Placed { theirs: u32, serial: Serial, tail: u64 };
        /// The bytes from the memory's position on can be read from the memory of the producer's program.
        17 = Source { theirs: u32, memory: Memory };
        /// All bytes up to `tail` were read from the lent memory, and no more will be read.
        18 = Taken { theirs: u32, serial: Serial, tail: u64 };
    }
}

/// Names an advert or a loan of one end. A serial is not used again for a long time.
pub type Serial = u32;

/// Memory of a program, as described to the other end. It stands for bytes of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The serial of the advert or loan.
    pub serial: Serial,
    /// The position in the direction that the memory's first byte stands for.
    pub position: u64,
    /// The address of the first byte in the program's process.
    pub address: u64,
    /// The number of bytes.
    pub length: u32,
    /// The key for the other end's device.
    pub rkey: u32,
}

impl Memory {
    /// Returns the position behind the last byte.
    pub fn end(&self) -> u64 {
        self.position.saturating_add(self.length.into())
    }

    /// Returns the memory without its first `bytes` bytes. It must have at least as many.
    pub fn from(&self, bytes: u64) -> Self {
        Self {
            position: self.position + bytes,
            address: self.address + bytes,
            length: self.length - bytes as u32,
            ..*self
        }
    }

    /// Returns whether such memory can exist: it has at least one byte, and none beyond the last address.
    pub fn is_possible(&self) -> bool {
        self.length > 0 && self.address.checked_add(self.length.into()).is_some()
    }
}

/// The content of WITHDRAW, which ends an advert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withdrawal {
    /// The advert's serial.
    pub serial: Serial,
    /// The advert's position.
    pub position: u64,
    /// Whether bytes in the buffer that no PLACED has reported do not count, so that the reader does not wait for
    /// PLACED.
    pub is_final: bool,
}

structs! {
    Memory { serial, position, address, length, rkey }
    Withdrawal { serial, position, is_final }
}

/// The bytes of a DATA record beside its payload: the kind, `theirs`, `tail` and the payload's length.
pub const DATA_BYTES: usize = 1 + 4 + 8 + 2;
/// The bytes of a MESSAGE record beside the message: the kind and the message's length.
pub const MESSAGE_BYTES: usize = 1 + 2;
/// The bytes of the longest records without a payload, ADVERT and SOURCE: the kind, `theirs` and the memory.
pub const LONGEST: usize = 1 + 4 + (4 + 8 + 8 + 4 + 4);

/// Error: the bytes are not a message. The header is missing or states a wrong length, or a record is unknown or too
/// long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed message")]
pub struct Malformed;

/// A message that has been received.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// The number of receive buffers that the sender has posted again.
    pub grant: u16,
    /// The records, which are read one by one.
    pub records: Records<'a>,
}

/// Reads a message's header. Fails if the header is missing, or if it states another length than the bytes behind it
/// have. No other bytes follow the records, since the sender has the same version.
pub fn decode(bytes: &[u8]) -> Result<Received<'_>, Malformed> {
    let (header, rest) = Header::read_from_prefix(bytes).map_err(|_| Malformed)?;
    if rest.len() != usize::from(header.length.get()) {
        return Err(Malformed);
    }
    Ok(Received {
        grant: header.grant.get(),
        records: Records(rest),
    })
}

/// The records that are still to be read. After an error there are no more.
#[derive(Clone, Copy, Debug)]
pub struct Records<'a>(&'a [u8]);

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let (&kind, mut rest) = self.0.split_first()?;
        let record = Record::take_body(kind, &mut rest).map_err(|_| Malformed);
        self.0 = if record.is_ok() { rest } else { &[] };
        Some(record)
    }
}

/// Builds a message.
#[derive(Debug)]
pub struct Builder {
    buf: Box<[u8]>,
    len: usize,
}

impl Builder {
    /// Returns a builder for messages of at most `bytes` bytes. Its records take at most 64 KiB.
    pub fn new(bytes: usize) -> Self {
        let bytes = bytes.clamp(HEADER_BYTES, HEADER_BYTES + usize::from(u16::MAX));
        Self {
            buf: vec![0; bytes].into_boxed_slice(),
            len: HEADER_BYTES,
        }
    }

    /// Returns whether the message has no records.
    pub fn is_empty(&self) -> bool {
        self.len == HEADER_BYTES
    }

    /// Returns how many more bytes of records fit the message.
    pub fn room(&self) -> usize {
        self.buf.len() - self.len
    }

    /// Returns how many bytes of records fit an empty message.
    pub fn capacity(&self) -> usize {
        self.buf.len() - HEADER_BYTES
    }

    /// Adds a record. If there is no room, returns false and leaves the message as it was.
    pub fn push(&mut self, record: &Record<'_>) -> bool {
        self.add(record)
    }

    // Inlined: for a record whose kind is known, only the stores of its fields remain.
    #[inline(always)]
    fn add(&mut self, record: &Record<'_>) -> bool {
        let free = self.buf.get_mut(self.len..);
        let Some((kind, body)) = free.and_then(<[u8]>::split_first_mut) else {
            return false;
        };
        let mut body = Writer::new(body);
        let Ok(number) = record.put_body(&mut body) else {
            return false;
        };
        *kind = number;
        self.len += 1 + body.len;
        true
    }

    /// Adds a DATA record with `n` bytes of payload, which `fill` writes. If there is no room or `fill` returns false,
    /// returns false and leaves the message as it was.
    pub fn push_data(&mut self, theirs: u32, tail: u64, n: usize, fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let Ok(length) = u16::try_from(n) else {
            return false;
        };
        let before = self.len;
        // The record is written without its payload. `put_payload` adds the payload and its length.
        let head = Record::Data {
            theirs,
            tail,
            payload: &[],
        };
        let done = self.add(&head) && self.put_payload(length, fill);
        if !done {
            self.len = before;
        }
        done
    }

    /// Adds a payload to the last record, which has none yet.
    fn put_payload(&mut self, length: u16, fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let end = self.len.saturating_add(length.into());
        let is_filled = self.buf.get_mut(self.len..end).is_some_and(fill);
        if let Some(at) = self.buf.get_mut(self.len.saturating_sub(2)..self.len) {
            at.copy_from_slice(&length.to_le_bytes());
        }
        self.len = end;
        is_filled
    }

    /// Returns the message, with its header.
    pub fn finish(&mut self, grant: u16) -> &[u8] {
        let header = Header {
            grant: grant.into(),
            length: ((self.len - HEADER_BYTES) as u16).into(),
        };
        if let Some(at) = self.buf.get_mut(..HEADER_BYTES) {
            at.copy_from_slice(header.as_bytes());
        }
        self.buf.get(..self.len).unwrap_or_default()
    }

    /// Begins the next message.
    pub fn clear(&mut self) {
        self.len = HEADER_BYTES;
    }
}

/// Returns a message without records.
pub fn bare(grant: u16) -> [u8; HEADER_BYTES] {
    zerocopy::transmute!(Header {
        grant: grant.into(),
        length: 0.into(),
    })
}

#[cfg(test)]
mod tests;
