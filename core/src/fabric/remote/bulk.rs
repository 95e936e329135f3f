//! The bulk queue pair of a link between hosts. It carries the transfers straight into and out of the memory of
//! programs (`put.rs`, `get.rs`). PLACED records, the *answers* to adverts, follow the WRITEs on it. A refused access
//! ends the bulk queue pair and nothing else (docs/protocol.md, P90); another one may replace it. The file also has the
//! end's calls for these transfers. `pump.rs` decides what the queue pair carries. `remote.rs` defines advert, PLACED,
//! loan and SOURCE.

use std::collections::VecDeque;

use crate::fabric::remote::end::End;
use crate::fabric::remote::engine::{ARM, POLL, PUMP};
use crate::fabric::remote::put::{Answer, Buffer, Landed, Source};
use crate::fabric::remote::qp::{Down, PostError, QueuePair, Read, Write};
use crate::fabric::remote::record::{Builder, HEADER_BYTES, LONGEST, Memory, Record, Serial};
use crate::fabric::remote::shared::Retired;
use crate::fabric::remote::{Local, record};
use crate::ids::Vqpn;

/// The most answers that wait for room. A correct peer has far fewer adverts that may still be answered.
const MOST_ANSWERS: usize = 1024;
/// The most READs under way. The number is small, since later work requests wait behind READs.
const MOST_READS: usize = 4;

/// A bulk queue pair, with the answers and READs that wait for room.
pub(super) struct Bulk<Q> {
    pub qp: Q,
    /// PLACED records that wait for room, each with the peer's number of its stream.
    answers: VecDeque<(u32, Answer)>,
    is_full: bool,
    /// The streams, by the peer's number, that wait for room.
    stalled: Vec<u32>,
    /// The local streams whose adverts the peer may still answer. `most_landings` is the most of them, since each
    /// answer takes a receive buffer. Streams whose adverts have ended are removed before the next advert.
    pub landings: Vec<u32>,
    pub most_landings: usize,
    /// The READs that are posted and not complete. `most_reads` is the most of them; 0 if the queue pair takes no
    /// READs.
    pub reads: VecDeque<Asked>,
    pub most_reads: usize,
    /// The local streams that may have more to read, in the order of their turns.
    readers: VecDeque<u32>,
}

/// A posted READ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    /// This end's number of the stream.
    pub mine: u32,
    pub bytes: u32,
    /// The serial of the advert whose buffer the READ fills; `None` if it fills the ring.
    pub into: Option<Serial>,
}

impl<Q: QueuePair> Bulk<Q> {
    pub(super) fn new(qp: Q) -> Self {
        let limits = qp.limits();
        Self {
            qp,
            answers: VecDeque::new(),
            is_full: false,
            stalled: Vec::new(),
            landings: Vec::new(),
            most_landings: limits.receive_buffers.into(),
            reads: VecDeque::new(),
            most_reads: MOST_READS.min(limits.reads.into()),
            readers: VecDeque::new(),
        }
    }

    /// Processes the result of a post. Returns false if the send queue had no room.
    fn posted(&mut self, result: Result<(), PostError>) -> Result<bool, Down> {
        self.is_full |= result == Err(PostError::Full);
        match result {
            Err(PostError::Down) => Err(Down(0)),
            result => Ok(result.is_ok()),
        }
    }

    /// Posts a WRITE of a stream. Returns false if the send queue has no room. When it has room again,
    /// [`on_room`](Self::on_room) passes the stream to its callback.
    ///
    /// # Safety
    /// As for [`QueuePair::write`].
    pub(super) unsafe fn write(&mut self, theirs: u32, write: &Write) -> Result<bool, Down> {
        // SAFETY: by this function's contract.
        if !self.is_full && self.posted(unsafe { self.qp.write(write, None) })? {
            return Ok(true);
        }
        if !self.stalled.contains(&theirs) {
            self.stalled.push(theirs);
        }
        Ok(false)
    }

    /// Adds a stream that has bytes to read.
    pub(super) fn add_reader(&mut self, mine: u32) {
        if !self.readers.contains(&mine) {
            self.readers.push_back(mine);
        }
    }

    /// Returns the stream whose turn it is to read, and removes it. `None` if there is none, or if no READ may be
    /// posted at this moment. On a queue pair that takes no READs the stream is returned all the same, so that the
    /// caller ends its loan. [`read`](Self::read) adds the stream again.
    pub(super) fn next_reader(&mut self) -> Option<u32> {
        let may = !self.is_full && (self.reads.len() < self.most_reads || self.most_reads == 0);
        may.then(|| self.readers.pop_front()).flatten()
    }

    /// Posts a READ for a stream, and adds the stream again. Returns false if the send queue has no room; the stream
    /// then has the first turn when it has room again.
    ///
    /// # Safety
    /// As for [`QueuePair::read`].
    pub(super) unsafe fn read(&mut self, mine: u32, read: &Read, into: Option<Serial>) -> Result<bool, Down> {
        // SAFETY: by this function's contract.
        let is_posted = self.posted(unsafe { self.qp.read(read) })?;
        if is_posted {
            let bytes = read.len;
            self.reads.push_back(Asked { mine, bytes, into });
            self.readers.push_back(mine);
        } else {
            self.readers.push_front(mine);
        }
        Ok(is_posted)
    }

    /// Sends PLACED, behind all WRITEs that were posted before. Fails if too many answers wait, or if the queue pair
    /// has failed.
    pub(super) fn answer(&mut self, theirs: u32, answer: Answer) -> Result<(), Down> {
        if self.answers.len() >= MOST_ANSWERS {
            return Err(Down(0));
        }
        self.answers.push_back((theirs, answer));
        self.flush()
    }

    fn flush(&mut self) -> Result<(), Down> {
        while !self.is_full
            && let Some((theirs, Answer { serial, tail })) = self.answers.front().copied()
        {
            let mut message = Builder::new(HEADER_BYTES + LONGEST);
            message.push(&Record::Placed { theirs, serial, tail });
            if self.posted(self.qp.send(message.finish(0)))? {
                self.answers.pop_front();
            }
        }
        Ok(())
    }

    /// Records that the send queue has room. Calls `wake` with each stream that waits for room.
    pub(super) fn on_room(&mut self, wake: impl FnMut(u32)) -> Result<(), Down> {
        self.is_full = false;
        self.stalled.drain(..).for_each(wake);
        self.flush()
    }
}

/// Reads a message of the bulk queue pair. Returns its PLACED, with this end's number of the stream; `None` for any
/// other message.
pub(super) fn placed(message: &[u8]) -> Option<(u32, Answer)> {
    let mut records = record::decode(message).ok()?.records;
    match (records.next()?.ok()?, records.next()) {
        (Record::Placed { theirs, serial, tail }, None) => Some((theirs, Answer { serial, tail })),
        _ => None,
    }
}

// The engine does the work of these calls (`put.rs`, `get.rs`). `end.rs` decides which thread does it.

impl<Q: QueuePair, L: Local> End<Q, L> {
    /// Uses `qp` for direct transfers (P90) from now on. `qp` is connected beside the link's own queue pair, and has
    /// not been used. Returns `qp` if the end has a bulk queue pair already, or if the link is down.
    pub fn attach_bulk(&self, qp: Q) -> Option<Q> {
        if self.is_down() {
            return Some(qp);
        }
        let mut qp = Some(qp);
        self.with(|engine| {
            if engine.means.bulk.is_none() {
                engine.means.bulk = qp.take().map(Bulk::new);
            }
        });
        // This arms the bulk queue pair for the first time. Later it is armed whenever the link's own queue pair is.
        let _ = self.run(ARM | POLL | PUMP);
        qp
    }

    /// Gives the bulk queue pair up, because the peer has given up its end, or because the caller wants to.
    pub fn drop_bulk(&self) {
        self.with(|engine| engine.drop_bulk(&self.shared));
        let _ = self.run(PUMP);
    }

    /// Calls `end` for each bulk queue pair that was given up since the last call, so that `end` ends it. Returns their
    /// number. The caller notifies the peer of each.
    pub fn end_retired(&self, mut end: impl FnMut(Q)) -> usize {
        if !self.shared.retired_unseen.look() {
            return 0;
        }
        self.shared.retired_unseen.publish(false);
        let retired = self.with(|engine| std::mem::take(&mut engine.retired));
        let retired = retired.unwrap_or_default();
        let count = retired.len();
        for Retired { qp, under_way } in retired {
            end(qp);
            if !under_way.is_empty() {
                self.with(|engine| {
                    for mine in under_way {
                        engine.change_taking(&self.shared, mine, |inc| inc.takings.on_ended(inc.tail));
                    }
                });
                let _ = self.run(PUMP);
            }
        }
        count
    }

    /// Returns this end's number of the stream that the peer calls `theirs`, and the most bytes that a buffer for it
    /// may have at this moment. `None` if there is no such stream, or if its ring is not empty.
    pub fn room_to_land(&self, theirs: Vqpn) -> Option<(Vqpn, u64)> {
        self.with(|engine| {
            let (mine, s) = engine.streams.of_peer(theirs.0)?;
            let room = s.inc.room_to_land(self.shared.block_mine(mine)?);
            (room > 0).then_some((Vqpn(mine), room))
        })?
    }

    /// Announces a buffer to the peer, or only its beginning. The program waits with the buffer on stream `mine`, whose
    /// ring is empty. The buffer is for the bytes that come next. [`landed`](Self::landed) returns its state. `None` if
    /// the buffer cannot be used.
    pub fn advertise(&self, mine: Vqpn, buffer: Buffer) -> Option<Memory> {
        let made = self.with(|engine| engine.advertise(&self.shared, mine.0, buffer))?;
        let _ = self.run(PUMP);
        made
    }

    /// Returns the state of an advert. The bytes in its buffer count as the next bytes of the ring, which does not have
    /// them. A caller that uses these bytes consumes as many bytes of the ring, and then calls
    /// [`settle_head`](Self::settle_head). `None` in a signal handler that has interrupted the engine.
    pub fn landed(&self, mine: Vqpn, serial: u32) -> Option<Landed> {
        self.with(|engine| {
            let s = engine.streams.get(mine.0);
            s.map_or(Landed::Over(0), |s| s.inc.landings.look(serial))
        })
    }

    /// Withdraws an advert, because the program waits no longer. The peer's device may write to the buffer until
    /// [`landed`](Self::landed) returns that the advert has ended.
    pub fn withdraw(&self, mine: Vqpn, serial: u32) {
        self.with(|engine| engine.withdraw(&self.shared, mine.0, serial));
        let _ = self.run(PUMP);
    }

    /// Records that bytes which came into a program's buffer were copied to the ring, at their positions, because the
    /// program will not take them from the buffer.
    pub fn put_back(&self, mine: Vqpn) {
        self.with(|engine| engine.change_taking(&self.shared, mine.0, |inc| inc.takings.on_landed(0)));
        let _ = self.run(PUMP);
    }

    /// Makes the engine send the head of stream `mine` at once. The head was
    /// [published](crate::fabric::ring::Consumer::publish).
    pub fn settle_head(&self, mine: Vqpn) {
        self.of_mine(mine, |s| {
            s.inc.settle = true;
            self.shared.touch(s.theirs);
        });
        let _ = self.run(PUMP);
    }

    /// Returns how many buffers the peer's programs have announced for its stream `theirs`.
    pub fn adverts(&self, theirs: Vqpn) -> u32 {
        self.of_peer(theirs, |s| s.out.targets.adverts).unwrap_or(0)
    }

    /// Returns how many bytes fit the buffer with which the peer's program waits on its stream `theirs`. Returns 0 if
    /// there is no buffer, or if other bytes have to go first.
    pub fn wanted(&self, theirs: Vqpn) -> u64 {
        self.with(|engine| engine.wanted(&self.shared, theirs.0)).unwrap_or(0)
    }

    /// Lends program memory for WRITEs: it has the next `len` bytes of a producer, which is at `position`. The bytes
    /// are [wanted](Self::wanted), and stay at `address`, registered under `key`. The producer commits them without
    /// writing them to the ring. Returns false if the peer cannot take them. The caller ends the loan by
    /// [`take_source`](Self::take_source).
    pub fn lend_source(&self, theirs: Vqpn, position: u64, address: usize, len: u64, key: u32) -> bool {
        let source = Source::new(position, address, len, Some(key));
        self.with(|engine| engine.lend_source(&self.shared, theirs.0, source))
            .unwrap_or(false)
    }

    /// Lends program memory to the peer's device, which reads the bytes under the remote `key` into the peer's ring.
    /// Returns false if the memory cannot be lent, for example because bytes that were committed before are not sent.
    /// The caller ends the loan by [`take_source`](Self::take_source), when the loan [is done](Self::is_source_done).
    pub fn offer_source(&self, theirs: Vqpn, position: u64, address: usize, len: u64, key: u32) -> bool {
        let source = Source::new(position, address, len, None);
        self.with(|engine| engine.offer_source(&self.shared, theirs.0, source, key))
            .unwrap_or(false)
    }

    /// Ends the loan if SOURCE was not sent for it. Then the loan [is done](Self::is_source_done).
    pub fn cancel_source(&self, theirs: Vqpn) {
        self.of_peer(theirs, |s| s.out.loans.untold = None);
    }

    /// Returns whether the loan has to be ended: the peer has all of the bytes, or needs the rest in the ring. Also
    /// returns true if no memory is lent.
    pub fn is_source_done(&self, theirs: Vqpn) -> bool {
        let is_done = self.of_peer(theirs, |s| {
            let is_over = |source: Source| source.is_offered() && !s.out.loans.is_open();
            let is_done = |source: Source| source.is_needed || s.out.head >= source.until || is_over(source);
            s.out.targets.source.is_none_or(is_done)
        });
        is_done.unwrap_or(true)
    }

    /// Returns the position up to which the peer's device has read the [offered](Self::offer_source) memory, once TAKEN
    /// has come. Before that, returns the position up to which the peer's program has read, which may be less.
    pub fn taken(&self, theirs: Vqpn) -> u64 {
        let taken = self.of_peer(theirs, |s| match s.out.loans.is_open() {
            true => s.out.head,
            false => s.out.head.max(s.out.told),
        });
        taken.unwrap_or(0)
    }

    /// Ends a loan: copies the bytes that the peer does not have into the mirror. Returns how many bytes the peer's
    /// device may still get from the program's memory. `None` if no memory was lent, or in a signal handler that has
    /// interrupted the engine.
    ///
    /// # Safety
    /// The lent memory can be read.
    pub unsafe fn take_source(&self, theirs: Vqpn) -> Option<u64> {
        // SAFETY: by this function's contract.
        let left = self.with(|engine| unsafe { engine.take_source(&self.shared, theirs.0) })?;
        let _ = self.run(PUMP);
        left
    }

    /// Returns how many bytes before `position` the peer's program has not read.
    pub fn untaken(&self, theirs: Vqpn, position: u64) -> u64 {
        self.of_peer(theirs, |s| position.saturating_sub(s.out.head))
            .unwrap_or(0)
    }
}
