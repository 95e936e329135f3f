//! The bulk queue pair of a link between hosts: what goes straight into the memory of programs goes over it, and what
//! is told behind that. An access that is refused ends it and nothing else (docs/protocol.md, P90); another one may
//! take its place. Not what goes over it (`pump/direct.rs`).

use std::collections::VecDeque;

use super::direct::Answer;
use super::qp::{Completed, Down, PostError, QueuePair, Read, Write};
use super::record::{self, Builder, HEADER_BYTES, LONGEST, Record, Serial};

/// More answers are not kept: a correct peer has far fewer adverts that may be answered.
const MOST_ANSWERS: usize = 1024;
/// More READs are not under way: what is posted next stands behind them.
const MOST_READS: usize = 4;

/// See the module.
pub(super) struct Bulk<Q> {
    qp: Q,
    /// PLACED records that wait for room, with the streams that they are for.
    answers: VecDeque<(u32, Answer)>,
    is_full: bool,
    /// Streams, by the peer's number, that wait for room.
    stalled: Vec<u32>,
    /// Adverts of ours that may still be answered, and how many of them there may be: each answer takes a receive
    /// buffer.
    landings: u16,
    most_landings: u16,
    /// READs that were posted, and how many there may be.
    reads: VecDeque<Asked>,
    most_reads: usize,
    /// Streams of ours that may have more to read, in turns.
    readers: VecDeque<u32>,
}

/// A PLACED record of the peer's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    /// Our stream.
    pub mine: u32,
    pub serial: u32,
    pub tail: u64,
}

/// A READ that was posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    /// Our stream.
    pub mine: u32,
    pub bytes: u32,
    /// The buffer that it fills; `None`: the ring.
    pub into: Option<Serial>,
}

/// What a bulk queue pair brings.
#[derive(Clone, Copy, Debug)]
pub(super) enum Came {
    Placed(Placed),
    /// It is done.
    Read(Asked),
}

/// Why the bulk queue pair is to be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// It has ended.
    Down,
    /// The peer has sent what does not belong there.
    Malformed,
}

impl From<Down> for Lost {
    fn from(_: Down) -> Self {
        Self::Down
    }
}

impl<Q: QueuePair> Bulk<Q> {
    pub fn new(qp: Q) -> Self {
        let limits = qp.limits();
        Self {
            qp,
            answers: VecDeque::new(),
            is_full: false,
            stalled: Vec::new(),
            landings: 0,
            most_landings: limits.receive_buffers,
            reads: VecDeque::new(),
            most_reads: MOST_READS.min(limits.reads.into()),
            readers: VecDeque::new(),
        }
    }

    pub fn into_inner(self) -> Q {
        self.qp
    }

    pub fn arm(&self) -> Result<(), Lost> {
        Ok(self.qp.arm()?)
    }

    /// One more advert; false if there are too many.
    pub fn begin_landing(&mut self) -> bool {
        let may = self.landings < self.most_landings;
        self.landings += u16::from(may);
        may
    }

    /// It is over.
    pub fn end_landing(&mut self) {
        self.landings = self.landings.saturating_sub(1);
    }

    /// Posts a WRITE from memory under a key to the peer's; false if there is no room, and then the stream is told when
    /// there is.
    ///
    /// # Safety
    /// As [`QueuePair::write`].
    pub unsafe fn write(&mut self, theirs: u32, write: &Write) -> Result<bool, Lost> {
        if !self.is_full {
            // SAFETY: by this function's contract.
            match unsafe { self.qp.write(write, None) } {
                Ok(()) => return Ok(true),
                Err(PostError::Full) => self.is_full = true,
                Err(PostError::Down) => return Err(Lost::Down),
            }
        }
        if !self.stalled.contains(&theirs) {
            self.stalled.push(theirs);
        }
        Ok(false)
    }

    /// The stream has something to read.
    pub fn add_reader(&mut self, mine: u32) {
        if !self.readers.contains(&mine) {
            self.readers.push_back(mine);
        }
    }

    /// Whose turn it is to read, if there may be one more READ. Who has read is [added](Self::read) again.
    pub fn next_reader(&mut self) -> Option<u32> {
        let may = !self.is_full && (self.reads.len() < self.most_reads || self.most_reads == 0);
        may.then(|| self.readers.pop_front()).flatten()
    }

    /// Whether there can be any.
    pub fn can_read(&self) -> bool {
        self.most_reads > 0
    }

    /// Posts a READ for a stream, whose turn comes again; false if there is no room, and it is tried when there is.
    ///
    /// # Safety
    /// As [`QueuePair::read`].
    pub unsafe fn read(&mut self, mine: u32, read: &Read, into: Option<Serial>) -> Result<bool, Lost> {
        // SAFETY: by this function's contract.
        match unsafe { self.qp.read(read) } {
            Ok(()) => {
                let bytes = read.len;
                self.reads.push_back(Asked { mine, bytes, into });
                self.readers.push_back(mine);
                Ok(true)
            }
            Err(PostError::Full) => {
                self.is_full = true;
                self.readers.push_front(mine);
                Ok(false)
            }
            Err(PostError::Down) => Err(Lost::Down),
        }
    }

    /// Says PLACED, behind all that was written before.
    pub fn answer(&mut self, theirs: u32, answer: Answer) -> Result<(), Lost> {
        if self.answers.len() >= MOST_ANSWERS {
            return Err(Lost::Malformed);
        }
        self.answers.push_back((theirs, answer));
        self.flush()
    }

    fn flush(&mut self) -> Result<(), Lost> {
        while let Some((theirs, Answer { serial, tail })) = self.answers.front().copied() {
            if self.is_full {
                return Ok(());
            }
            let mut message = Builder::new(HEADER_BYTES + LONGEST);
            message.push(&Record::Placed { theirs, serial, tail });
            match self.qp.send(&[message.finish(0)]) {
                Ok(()) => self.answers.pop_front(),
                Err(PostError::Full) => {
                    self.is_full = true;
                    return Ok(());
                }
                Err(PostError::Down) => return Err(Lost::Down),
            };
        }
        Ok(())
    }

    /// Takes in what has completed; gives how many events that were. `came` gets the peer's records, and each READ;
    /// `wake` the streams that have room again.
    pub fn poll(&mut self, mut came: impl FnMut(Came), mut wake: impl FnMut(u32)) -> Result<usize, Lost> {
        let (mut has_room, mut is_malformed) = (false, false);
        let reads = &mut self.reads;
        let count = self.qp.poll(&mut |event| match event {
            Completed::Room => has_room = true,
            Completed::Received(bytes) => match read(bytes) {
                Some(record) => came(Came::Placed(record)),
                // On iWARP who connects says an empty word first.
                None => is_malformed |= !bytes.is_empty(),
            },
            Completed::Read => match reads.pop_front() {
                Some(asked) => came(Came::Read(asked)),
                None => is_malformed = true,
            },
            Completed::Written { .. } | Completed::Probed => is_malformed = true,
        })?;
        if is_malformed {
            return Err(Lost::Malformed);
        }
        if has_room {
            self.is_full = false;
            self.flush()?;
            if !self.is_full {
                self.stalled.drain(..).for_each(&mut wake);
            }
        }
        Ok(count)
    }
}

fn read(message: &[u8]) -> Option<Placed> {
    let mut records = record::decode(message).ok()?.records;
    match (records.next()?.ok()?, records.next()) {
        (
            Record::Placed {
                theirs: mine,
                serial,
                tail,
            },
            None,
        ) => Some(Placed { mine, serial, tail }),
        _ => None,
    }
}

/// A piece of a direct transfer: where it comes from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub from: *const u8,
    pub len: u64,
    /// Under which it is registered here.
    pub key: u32,
}

impl Piece {
    /// Its WRITE to an address of the peer's.
    pub fn to(self, address: u64, remote: u32) -> Write {
        Write {
            from: self.from,
            local: self.key,
            len: self.len as u32,
            to: address,
            remote,
        }
    }
}
