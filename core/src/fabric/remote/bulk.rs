//! The bulk queue pair of a link between hosts: it carries the transfers straight into the memory of programs, and the
//! PLACED records behind them. A refused access ends it and nothing else (docs/protocol.md, P90); another one may take
//! its place. `pump/direct.rs` decides what it carries.

use std::collections::VecDeque;

use super::direct::Answer;
use super::qp::{Completed, Down, PostError, QueuePair, Read, Write};
use super::record;
use super::record::{Builder, HEADER_BYTES, LONGEST, Record, Serial};

/// The most answers that wait for room. A correct peer has far fewer adverts that may be answered.
const MOST_ANSWERS: usize = 1024;
/// The most READs under way, since later work requests wait behind them.
const MOST_READS: usize = 4;

/// A bulk queue pair, with the answers and READs that wait for room.
pub(super) struct Bulk<Q> {
    qp: Q,
    /// PLACED records that wait for room, each with the peer's number of its stream.
    answers: VecDeque<(u32, Answer)>,
    is_full: bool,
    /// Streams, by the peer's number, that wait for room.
    stalled: Vec<u32>,
    /// Adverts of this end that may still be answered, and their limit: each answer takes a receive buffer.
    landings: u16,
    most_landings: u16,
    /// READs that are posted and not complete, and their limit.
    reads: VecDeque<Asked>,
    most_reads: usize,
    /// Local streams that may have more to read, in the order of their turns.
    readers: VecDeque<u32>,
}

/// A PLACED record of the peer's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    /// This end's number of the stream.
    pub mine: u32,
    pub serial: u32,
    pub tail: u64,
}

/// A posted READ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    /// This end's number of the stream.
    pub mine: u32,
    pub bytes: u32,
    /// The buffer that it fills; `None`: the ring.
    pub into: Option<Serial>,
}

/// An event of a bulk queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) enum Came {
    Placed(Placed),
    /// The READ is complete.
    Read(Asked),
}

/// Why this end gives the bulk queue pair up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// The connection is over.
    Down,
    /// The peer has sent a message that does not belong on a bulk queue pair.
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

    /// Counts one more advert. False, and it is not counted, if there are too many.
    pub fn begin_landing(&mut self) -> bool {
        let may = self.landings < self.most_landings;
        self.landings += u16::from(may);
        may
    }

    /// Ends the count of an advert.
    pub fn end_landing(&mut self) {
        self.landings = self.landings.saturating_sub(1);
    }

    /// Posts a WRITE of a stream. False if there is no room; then [`poll`](Self::poll) reports the stream when there
    /// is.
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

    /// Adds a stream that has bytes to read.
    pub fn add_reader(&mut self, mine: u32) {
        if !self.readers.contains(&mine) {
            self.readers.push_back(mine);
        }
    }

    /// Returns the stream whose turn it is to read; `None` if there is none, or no READ may be added.
    /// [`read`](Self::read) adds the stream again.
    pub fn next_reader(&mut self) -> Option<u32> {
        let may = !self.is_full && (self.reads.len() < self.most_reads || self.most_reads == 0);
        may.then(|| self.readers.pop_front()).flatten()
    }

    /// Returns whether the queue pair can post READs.
    pub fn can_read(&self) -> bool {
        self.most_reads > 0
    }

    /// Posts a READ for a stream, and adds the stream again. False if there is no room; the stream then has the first
    /// turn when there is.
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

    /// Sends PLACED, behind all that was written before. An error if too many answers wait.
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

    /// Takes in completions. Returns how many events there were. `came` gets the peer's records and each complete READ;
    /// `wake` the streams that have room again.
    pub fn poll(&mut self, mut came: impl FnMut(Came), mut wake: impl FnMut(u32)) -> Result<usize, Lost> {
        let (mut has_room, mut is_malformed) = (false, false);
        let reads = &mut self.reads;
        let count = self.qp.poll(&mut |event| match event {
            Completed::Room => has_room = true,
            Completed::Received(bytes) => match read(bytes) {
                Some(record) => came(Came::Placed(record)),
                // On iWARP the connecting side sends an empty message first.
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

/// The source of a piece of a direct transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub from: *const u8,
    pub len: u64,
    /// The local key of the source.
    pub key: u32,
}

impl Piece {
    /// Returns the WRITE of this piece to an address of the peer's process.
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
