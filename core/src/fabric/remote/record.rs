//! What one message on the queue pair holds: a header and any number of records. Written into a buffer of
//! fixed size, read from any bytes at all. See docs/protocol.md, P50–P58 and P90–P100. Not what a record does.

#![forbid(unsafe_code)]

use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::wire::codec::{WireError, Writer, kinds, structs};

/// Version of the records, in every header.
pub const VERSION: u8 = 1;
const MAGIC: u8 = 0xd7;

/// What precedes the records of a message.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    magic: u8,
    version: u8,
    /// Receive buffers that the sender has posted again since its last message.
    grant: U16,
    /// Bytes of all the records, exactly.
    length: U16,
}

/// Bytes of a message without records.
pub const HEADER_BYTES: usize = size_of::<Header>();

kinds! {
    /// One record (docs/protocol.md, P50).
    ///
    /// | field | what |
    /// |---|---|
    /// | `theirs` | the number that the end which reads the record gave to the stream |
    /// | `tail`, `head`, `position` | positions: bytes of the direction from its beginning on |
    /// | `generation` | which of the rings that were offered one after the other |
    /// | `end`, `flags`, `word`, `count` | a word of the direction block, as `fabric::ring` has it; in `Tell` an attention word |
    /// | `serial` | an advert of the end whose program waits (P91), or memory lent by the one whose program sends (P96) |
    /// | `memory` | a buffer of that program's, for the WRITEs, or READs, of the end that reads this |
    /// | `index`, `rkey`, `base` | a chunk's place in the data area, in chunks; its key and address for the reader's WRITEs (P53) |
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[allow(
        missing_docs,
        reason = "the fields mean the same in every record, and are in the table"
    )]
    pub enum Record<'a> {
        /// The direction goes on to `tail`. The payload is the last part of that; what precedes it was written
        /// before.
        1 = Data { theirs: u32, tail: u64, payload: &'a [u8] };
        /// From `position` on, which is the tail now, the direction is in the ring on offer.
        2 = Switch { theirs: u32, generation: u32, position: u64 };
        /// The end mark, at the tail.
        3 = End { theirs: u32, end: u8, tail: u64 };
        /// The producer's count of windows that were too small.
        4 = Limited { theirs: u32, count: u32 };
        /// The consumer has read up to here.
        5 = Head { theirs: u32, head: u64 };
        /// The consumer offers a ring.
        6 = Offer { theirs: u32, word: u64 };
        /// The consumer's flags.
        7 = Flags { theirs: u32, flags: u32 };
        /// The consumer has stopped.
        8 = Stop { theirs: u32 };
        /// A chunk of the sender's data area is registered: its address there.
        9 = Chunk { index: u32, rkey: u32, base: u64 };
        /// A message of the side channel.
        10 = Message { bytes: &'a [u8] };
        /// "Tell me, by ACK, up to where you have it, now that you have read this."
        11 = Confirm { theirs: u32 };
        /// All up to `tail` is in the ring.
        12 = Ack { theirs: u32, tail: u64 };
        /// "Queue the stream for these waiters of yours."
        13 = Tell { theirs: u32, word: u32 };
        /// The reader's program waits with a buffer for the bytes from its position on.
        14 = Advert { theirs: u32, memory: Memory };
        /// It does not any more.
        15 = Withdraw { theirs: u32, withdrawal: Withdrawal };
        /// All up to `tail` is in the buffer of that advert, which is over. On the bulk queue pair only.
        16 = Placed { theirs: u32, serial: Serial, tail: u64 };
        /// The bytes from its position on can be read from the memory of the producer's program.
        17 = Source { theirs: u32, memory: Memory };
        /// All up to `tail` was read from there, and nothing more will be.
        18 = Taken { theirs: u32, serial: Serial, tail: u64 };
        /// The producer's program waits no longer.
        19 = Recall { theirs: u32, serial: Serial };
    }
}

/// Names one advert, or one loan, of an end's; the next ones are others for a long time.
pub type Serial = u32;

/// Memory of a program that stands for bytes of a direction, as the other end has to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Its name.
    pub serial: Serial,
    /// The direction's position that its first byte is at.
    pub position: u64,
    /// Where it is in the program's process.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// By which the other end's device reaches it.
    pub rkey: u32,
}

impl Memory {
    /// The position behind its last byte.
    pub fn end(&self) -> u64 {
        self.position.saturating_add(self.length.into())
    }

    /// Whether there is such memory: some bytes, which do not go beyond the last address.
    pub fn is_possible(&self) -> bool {
        self.length > 0 && self.address.checked_add(self.length.into()).is_some()
    }
}

/// An advert is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withdrawal {
    /// The advert's name.
    pub serial: Serial,
    /// Its position.
    pub position: u64,
    /// Bytes in its buffer that PLACED has not told of count for nothing, and nobody waits for PLACED.
    pub is_final: bool,
}

structs! {
    Memory { serial, position, address, length, rkey }
    Withdrawal { serial, position, is_final }
}

/// Bytes of a DATA record beside its payload: the kind, `theirs`, `tail` and the payload's length.
pub const DATA_BYTES: usize = 1 + 4 + 8 + 2;
/// Bytes of a MESSAGE record beside the message: the kind and the message's length.
pub const MESSAGE_BYTES: usize = 1 + 2;
/// Bytes of the longest records without a payload, ADVERT and SOURCE: the kind, `theirs` and the memory.
pub const LONGEST: usize = 1 + 4 + (4 + 8 + 8 + 4 + 4);

/// Bytes that are no message of this version. Only the peer can have sent them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Shorter than a header.
    #[error("no header")]
    Short,
    /// Not a message of ours, or of another version.
    #[error("wrong magic or version")]
    Version,
    /// The header's length is not that of what follows.
    #[error("wrong length")]
    Length,
    /// No record has that kind.
    #[error("unknown record {0}")]
    Kind(u8),
    /// A record is longer than what is left.
    #[error("truncated record {0}")]
    Truncated(u8),
}

/// A message that has been received.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// Receive buffers that the sender has posted again.
    pub grant: u16,
    /// Its records, still to be read.
    pub records: Records<'a>,
}

/// Reads a message's header. Bytes after the records are refused, since whoever makes messages is of our
/// version.
pub fn decode(bytes: &[u8]) -> Result<Received<'_>, Malformed> {
    let (header, rest) = Header::read_from_prefix(bytes).map_err(|_| Malformed::Short)?;
    if (header.magic, header.version) != (MAGIC, VERSION) {
        return Err(Malformed::Version);
    }
    if rest.len() != usize::from(header.length.get()) {
        return Err(Malformed::Length);
    }
    Ok(Received {
        grant: header.grant.get(),
        records: Records(rest),
    })
}

/// Records that are still to be read. After an error there are no more.
#[derive(Clone, Copy, Debug)]
pub struct Records<'a>(&'a [u8]);

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let (&kind, mut rest) = self.0.split_first()?;
        let record = Record::take_body(kind, &mut rest).map_err(|error| match error {
            WireError::Length => Malformed::Truncated(kind),
            _ => Malformed::Kind(kind),
        });
        self.0 = if record.is_ok() { rest } else { &[] };
        Some(record)
    }
}

/// A message being made.
#[derive(Debug)]
pub struct Builder {
    buf: Box<[u8]>,
    len: usize,
}

impl Builder {
    /// For messages of at most so many bytes; no more than 64 KiB are used.
    pub fn new(bytes: usize) -> Self {
        let bytes = bytes.clamp(HEADER_BYTES, HEADER_BYTES + usize::from(u16::MAX));
        Self {
            buf: vec![0; bytes].into_boxed_slice(),
            len: HEADER_BYTES,
        }
    }

    /// It has no records.
    pub fn is_empty(&self) -> bool {
        self.len == HEADER_BYTES
    }

    /// Bytes that records can still take.
    pub fn room(&self) -> usize {
        self.buf.len() - self.len
    }

    /// Bytes that records can take in an empty one.
    pub fn capacity(&self) -> usize {
        self.buf.len() - HEADER_BYTES
    }

    /// Adds a record. False, and nothing is added, if there is no room for it.
    pub fn push(&mut self, record: &Record<'_>) -> bool {
        self.add(record)
    }

    // Inlined, so that of a record whose kind is known its fields alone are left.
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

    /// Adds a DATA record whose `n` bytes of payload `fill` writes. False, and nothing is added, if there
    /// is no room or `fill` says so.
    pub fn push_data(&mut self, theirs: u32, tail: u64, n: usize, fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let Ok(length) = u16::try_from(n) else {
            return false;
        };
        let before = self.len;
        // Without a payload, which follows with its length.
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

    /// Gives the record that was added last, which has none, a payload.
    fn put_payload(&mut self, length: u16, fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let end = self.len.saturating_add(length.into());
        let is_filled = self.buf.get_mut(self.len..end).is_some_and(fill);
        if let Some(at) = self.buf.get_mut(self.len.saturating_sub(2)..self.len) {
            at.copy_from_slice(&length.to_le_bytes());
        }
        self.len = end;
        is_filled
    }

    /// The message, with its header.
    pub fn finish(&mut self, grant: u16) -> &[u8] {
        let header = Header {
            magic: MAGIC,
            version: VERSION,
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

/// A message without records.
pub fn bare(grant: u16) -> [u8; HEADER_BYTES] {
    zerocopy::transmute!(Header {
        magic: MAGIC,
        version: VERSION,
        grant: grant.into(),
        length: 0.into(),
    })
}

#[cfg(test)]
mod tests;
