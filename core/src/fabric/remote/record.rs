//! What one message on the queue pair holds: a header and any number of records. Written into a buffer of
//! fixed size, read from any bytes at all. See docs/protocol.md, P50–P58 and P90–P100. Not what a record does.

#![forbid(unsafe_code)]

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

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

/// One record (docs/protocol.md, P50).
///
/// | field | what |
/// |---|---|
/// | `theirs` | the number that the end which reads the record gave to the stream |
/// | `tail`, `head`, `position` | positions: bytes of the direction from its beginning on |
/// | `generation` | which of the rings that were offered one after the other |
/// | `end`, `flags`, `word`, `count` | a word of the direction block, as `fabric::ring` has it; in `Tell` an attention word |
/// | `least` | bytes of the smallest buffer that is of use; 0: none is |
/// | `serial` | an advert of the end whose program waits (P91), or memory lent by the one whose program sends (P96) |
/// | `address`, `length`, `rkey` | a buffer of that program's, and its key for the WRITEs, or READs, of who reads this |
/// | `index`, `rkey`, `base` | a chunk's place in the data area, in chunks; its key and address for the reader's WRITEs (P53) |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "the fields mean the same in every record, and are in the table"
)]
pub enum Record<'a> {
    /// The direction goes on to `tail`. The payload is the last part of that; what precedes it was written
    /// before.
    Data { theirs: u32, tail: u64, payload: &'a [u8] },
    /// From `position` on, which is the tail now, the direction is in the ring on offer.
    Switch {
        theirs: u32,
        generation: u32,
        position: u64,
    },
    /// The end mark, at the tail.
    End { theirs: u32, end: u32, tail: u64 },
    /// The producer's count of windows that were too small.
    Limited { theirs: u32, count: u32 },
    /// The consumer has read up to here.
    Head { theirs: u32, head: u64 },
    /// The consumer offers a ring.
    Offer { theirs: u32, word: u64 },
    /// The consumer's flags.
    Flags { theirs: u32, flags: u32 },
    /// The consumer has stopped.
    Stop { theirs: u32 },
    /// A chunk of the sender's data area is registered: its address there.
    Chunk { index: u32, rkey: u32, base: u64 },
    /// A message of the side channel.
    Message { bytes: &'a [u8] },
    /// "Tell me, by ACK, up to where you have it, now that you have read this."
    Confirm { theirs: u32 },
    /// All up to `tail` is in the ring.
    Ack { theirs: u32, tail: u64 },
    /// "Queue the stream for these waiters of yours."
    Tell { theirs: u32, word: u32 },
    /// The reader's program waits with a buffer for the bytes from `position` on.
    Advert {
        theirs: u32,
        serial: u32,
        position: u64,
        address: u64,
        length: u32,
        rkey: u32,
    },
    /// It does not any more.
    Withdraw {
        theirs: u32,
        serial: u32,
        position: u64,
        is_final: bool,
    },
    /// All up to `tail` is in the buffer of that advert, which is over. On the bulk queue pair only.
    Placed { theirs: u32, serial: u32, tail: u64 },
    /// The bytes from `position` on can be read from the memory of the producer's program.
    Source {
        theirs: u32,
        serial: u32,
        position: u64,
        address: u64,
        length: u32,
        rkey: u32,
    },
    /// All up to `tail` was read from there, and nothing more will be.
    Taken { theirs: u32, serial: u32, tail: u64 },
    /// The producer's program waits no longer.
    Recall { theirs: u32, serial: u32 },
}

/// The numbers of the kinds.
mod kind {
    pub const DATA: u8 = 1;
    pub const SWITCH: u8 = 2;
    pub const END: u8 = 3;
    pub const LIMITED: u8 = 4;
    pub const HEAD: u8 = 5;
    pub const OFFER: u8 = 6;
    pub const FLAGS: u8 = 7;
    pub const STOP: u8 = 8;
    pub const CHUNK: u8 = 9;
    pub const MESSAGE: u8 = 10;
    pub const CONFIRM: u8 = 11;
    pub const ACK: u8 = 12;
    pub const TELL: u8 = 13;
    pub const ADVERT: u8 = 14;
    pub const WITHDRAW: u8 = 15;
    pub const PLACED: u8 = 16;
    pub const SOURCE: u8 = 17;
    pub const TAKEN: u8 = 18;
    pub const RECALL: u8 = 19;
}

/// Declares the records' bodies, which follow the kind: plain bytes, no padding, any alignment.
macro_rules! bodies {
    ($($name:ident { $($field:ident: $type:ty),* $(,)? })*) => {$(
        #[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        struct $name { $($field: $type),* }
    )*};
}

bodies! {
    Data { theirs: U32, tail: U64, payload: U16 }
    Switch { theirs: U32, generation: U32, position: U64 }
    EndMark { theirs: U32, end: u8, tail: U64 }
    Word { theirs: U32, word: U32 }
    Position { theirs: U32, position: U64 }
    Stream { theirs: U32 }
    Chunk { index: U32, rkey: U32, base: U64 }
    Message { length: U16 }
    Memory { theirs: U32, serial: U32, position: U64, address: U64, length: U32, rkey: U32 }
    Withdraw { theirs: U32, serial: U32, position: U64, is_final: u8 }
    Answer { theirs: U32, serial: U32, tail: U64 }
}

/// Bytes of a DATA record beside its payload.
pub const DATA_BYTES: usize = 1 + size_of::<Data>();
/// Bytes of a MESSAGE record beside the message.
pub const MESSAGE_BYTES: usize = 1 + size_of::<Message>();
/// Bytes of the longest record without a payload.
pub const LONGEST: usize = 1 + size_of::<Memory>();

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

impl<'a> Records<'a> {
    fn read<T: FromBytes + Unaligned>(&mut self, kind: u8) -> Result<T, Malformed> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| Malformed::Truncated(kind))?;
        self.0 = rest;
        Ok(value)
    }

    fn bytes(&mut self, kind: u8, n: U16) -> Result<&'a [u8], Malformed> {
        let (bytes, rest) = self
            .0
            .split_at_checked(n.get().into())
            .ok_or(Malformed::Truncated(kind))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn record(&mut self) -> Result<Record<'a>, Malformed> {
        let k: u8 = self.read(0)?;
        Ok(match k {
            kind::DATA => {
                let r: Data = self.read(k)?;
                Record::Data {
                    theirs: r.theirs.get(),
                    tail: r.tail.get(),
                    payload: self.bytes(k, r.payload)?,
                }
            }
            kind::SWITCH => {
                let r: Switch = self.read(k)?;
                Record::Switch {
                    theirs: r.theirs.get(),
                    generation: r.generation.get(),
                    position: r.position.get(),
                }
            }
            kind::END => {
                let r: EndMark = self.read(k)?;
                Record::End {
                    theirs: r.theirs.get(),
                    end: r.end.into(),
                    tail: r.tail.get(),
                }
            }
            kind::HEAD | kind::OFFER | kind::ACK => {
                let r: Position = self.read(k)?;
                let (theirs, word) = (r.theirs.get(), r.position.get());
                match k {
                    kind::HEAD => Record::Head { theirs, head: word },
                    kind::OFFER => Record::Offer { theirs, word },
                    _ => Record::Ack { theirs, tail: word },
                }
            }
            kind::LIMITED | kind::FLAGS | kind::TELL | kind::RECALL => {
                let r: Word = self.read(k)?;
                let (theirs, word) = (r.theirs.get(), r.word.get());
                match k {
                    kind::LIMITED => Record::Limited { theirs, count: word },
                    kind::FLAGS => Record::Flags { theirs, flags: word },
                    kind::RECALL => Record::Recall { theirs, serial: word },
                    _ => Record::Tell { theirs, word },
                }
            }
            kind::STOP | kind::CONFIRM => {
                let theirs = self.read::<Stream>(k)?.theirs.get();
                if k == kind::STOP {
                    Record::Stop { theirs }
                } else {
                    Record::Confirm { theirs }
                }
            }
            kind::CHUNK => {
                let r: Chunk = self.read(k)?;
                Record::Chunk {
                    index: r.index.get(),
                    rkey: r.rkey.get(),
                    base: r.base.get(),
                }
            }
            kind::MESSAGE => {
                let r: Message = self.read(k)?;
                Record::Message {
                    bytes: self.bytes(k, r.length)?,
                }
            }
            kind::ADVERT | kind::SOURCE => {
                let r: Memory = self.read(k)?;
                let (theirs, serial, position) = (r.theirs.get(), r.serial.get(), r.position.get());
                let (address, length, rkey) = (r.address.get(), r.length.get(), r.rkey.get());
                if k == kind::ADVERT {
                    Record::Advert {
                        theirs,
                        serial,
                        position,
                        address,
                        length,
                        rkey,
                    }
                } else {
                    Record::Source {
                        theirs,
                        serial,
                        position,
                        address,
                        length,
                        rkey,
                    }
                }
            }
            kind::WITHDRAW => {
                let r: Withdraw = self.read(k)?;
                Record::Withdraw {
                    theirs: r.theirs.get(),
                    serial: r.serial.get(),
                    position: r.position.get(),
                    is_final: match r.is_final {
                        0 => false,
                        1 => true,
                        _ => return Err(Malformed::Kind(k)),
                    },
                }
            }
            kind::PLACED | kind::TAKEN => {
                let r: Answer = self.read(k)?;
                let (theirs, serial, tail) = (r.theirs.get(), r.serial.get(), r.tail.get());
                match k {
                    kind::PLACED => Record::Placed { theirs, serial, tail },
                    _ => Record::Taken { theirs, serial, tail },
                }
            }
            _ => return Err(Malformed::Kind(k)),
        })
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let record = self.record();
        if record.is_err() {
            self.0 = &[];
        }
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

    fn put(&mut self, parts: &[&[u8]]) -> bool {
        let n: usize = parts.iter().map(|p| p.len()).sum();
        let Some(mut at) = self.buf.get_mut(self.len..self.len.saturating_add(n)) else {
            return false;
        };
        for part in parts {
            let Some((to, rest)) = at.split_at_mut_checked(part.len()) else {
                return false;
            };
            to.copy_from_slice(part);
            at = rest;
        }
        self.len += n;
        true
    }

    /// Adds a record. False, and nothing is added, if there is no room for it.
    pub fn push(&mut self, record: &Record<'_>) -> bool {
        match *record {
            Record::Data { theirs, tail, payload } => {
                let Ok(n) = u16::try_from(payload.len()) else {
                    return false;
                };
                let head = Data {
                    theirs: theirs.into(),
                    tail: tail.into(),
                    payload: n.into(),
                };
                self.put(&[&[kind::DATA], head.as_bytes(), payload])
            }
            Record::Switch {
                theirs,
                generation,
                position,
            } => {
                let body = Switch {
                    theirs: theirs.into(),
                    generation: generation.into(),
                    position: position.into(),
                };
                self.put(&[&[kind::SWITCH], body.as_bytes()])
            }
            Record::End { theirs, end, tail } => {
                let body = EndMark {
                    theirs: theirs.into(),
                    end: end as u8,
                    tail: tail.into(),
                };
                self.put(&[&[kind::END], body.as_bytes()])
            }
            Record::Limited { theirs, count } => self.word(kind::LIMITED, theirs, count),
            Record::Flags { theirs, flags } => self.word(kind::FLAGS, theirs, flags),
            Record::Tell { theirs, word } => self.word(kind::TELL, theirs, word),
            Record::Head { theirs, head } => self.position(kind::HEAD, theirs, head),
            Record::Offer { theirs, word } => self.position(kind::OFFER, theirs, word),
            Record::Ack { theirs, tail } => self.position(kind::ACK, theirs, tail),
            Record::Stop { theirs } => self.stream(kind::STOP, theirs),
            Record::Confirm { theirs } => self.stream(kind::CONFIRM, theirs),
            Record::Chunk { index, rkey, base } => {
                let body = Chunk {
                    index: index.into(),
                    rkey: rkey.into(),
                    base: base.into(),
                };
                self.put(&[&[kind::CHUNK], body.as_bytes()])
            }
            Record::Message { bytes } => {
                let Ok(n) = u16::try_from(bytes.len()) else {
                    return false;
                };
                let head = Message { length: n.into() };
                self.put(&[&[kind::MESSAGE], head.as_bytes(), bytes])
            }
            Record::Advert {
                theirs,
                serial,
                position,
                address,
                length,
                rkey,
            }
            | Record::Source {
                theirs,
                serial,
                position,
                address,
                length,
                rkey,
            } => {
                let body = Memory {
                    theirs: theirs.into(),
                    serial: serial.into(),
                    position: position.into(),
                    address: address.into(),
                    length: length.into(),
                    rkey: rkey.into(),
                };
                let is_advert = matches!(record, Record::Advert { .. });
                let kind = if is_advert { kind::ADVERT } else { kind::SOURCE };
                self.put(&[&[kind], body.as_bytes()])
            }
            Record::Withdraw {
                theirs,
                serial,
                position,
                is_final,
            } => {
                let body = Withdraw {
                    theirs: theirs.into(),
                    serial: serial.into(),
                    position: position.into(),
                    is_final: is_final.into(),
                };
                self.put(&[&[kind::WITHDRAW], body.as_bytes()])
            }
            Record::Placed { theirs, serial, tail } => self.answer(kind::PLACED, (theirs, serial), tail),
            Record::Taken { theirs, serial, tail } => self.answer(kind::TAKEN, (theirs, serial), tail),
            Record::Recall { theirs, serial } => self.word(kind::RECALL, theirs, serial),
        }
    }

    fn answer(&mut self, kind: u8, (theirs, serial): (u32, u32), tail: u64) -> bool {
        let body = Answer {
            theirs: theirs.into(),
            serial: serial.into(),
            tail: tail.into(),
        };
        self.put(&[&[kind], body.as_bytes()])
    }

    fn word(&mut self, kind: u8, theirs: u32, word: u32) -> bool {
        let body = Word {
            theirs: theirs.into(),
            word: word.into(),
        };
        self.put(&[&[kind], body.as_bytes()])
    }

    fn position(&mut self, kind: u8, theirs: u32, position: u64) -> bool {
        let body = Position {
            theirs: theirs.into(),
            position: position.into(),
        };
        self.put(&[&[kind], body.as_bytes()])
    }

    fn stream(&mut self, kind: u8, theirs: u32) -> bool {
        let body = Stream { theirs: theirs.into() };
        self.put(&[&[kind], body.as_bytes()])
    }

    /// Adds a DATA record whose `n` bytes of payload `fill` writes. False, and nothing is added, if there
    /// is no room or `fill` says so.
    pub fn push_data(&mut self, theirs: u32, tail: u64, n: usize, fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let Ok(length) = u16::try_from(n) else {
            return false;
        };
        let before = self.len;
        let head = Data {
            theirs: theirs.into(),
            tail: tail.into(),
            payload: length.into(),
        };
        let done = self.put(&[&[kind::DATA], head.as_bytes()])
            && self.buf.get_mut(self.len..self.len.saturating_add(n)).is_some_and(fill);
        self.len = if done { self.len + n } else { before };
        done
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
