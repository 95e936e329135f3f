//! READs from the memory of a sending program, between hosts (docs/protocol.md, P96–P99): the rules of one direction,
//! which are pure, and the engine's part. A *loan* is memory of a sending program, which the record SOURCE announces.
//! The reader's device reads the memory into the reader's ring, or into the buffer of the reader's program. The record
//! TAKEN ends the loan. The local program lends memory ([`Loans`]), or the peer's program does ([`Takings`]). Positions
//! are exact, as for direct transfers (`put.rs`): while a loan is open no other record of the direction is sent, and
//! TAKEN reports up to which position the bytes went by the loan. `bulk.rs` has the queue pair.

use crate::fabric::remote::bulk::Asked;
use crate::fabric::remote::engine::{Engine, Means};
use crate::fabric::remote::put::Source;
use crate::fabric::remote::qp::{QueuePair, Read};
use crate::fabric::remote::record::{Memory, Serial};
use crate::fabric::remote::shared::{Chunks, Shared};
use crate::fabric::remote::stream::{Incoming, Outgoing, State, Stream};
use crate::fabric::remote::{Breach, Local};
use crate::fabric::ring::Wake;
use crate::fabric::side::Done;

/// The most bytes of one READ. They become readable together.
const READ: u32 = 128 * 1024;

/// The sending side of loans. At most one loan is open, until TAKEN has come for it.
#[derive(Debug, Default)]
pub(super) struct Loans {
    /// The loan for which SOURCE is to be sent; it may be cancelled until then.
    pub untold: Option<Memory>,
    /// The loan for which SOURCE was sent.
    told: Option<Memory>,
}

impl Loans {
    /// Returns whether a loan is open. The direction goes on when the loan has ended.
    pub(super) fn is_open(&self) -> bool {
        self.untold.or(self.told).is_some()
    }

    pub(super) fn on_told(&mut self) {
        self.told = self.untold.take().or(self.told);
    }

    /// Returns the position up to which the peer's device may have read; `None` if SOURCE was not sent.
    pub(super) fn reach(&self) -> Option<u64> {
        self.told.map(|loan| loan.end())
    }

    /// Processes TAKEN: the loan has ended, and the direction goes on at `tail`. Fails if `tail` is outside the loan,
    /// or before `head`, the position up to which the peer's program has read. Returns how many bytes went by the loan.
    fn on_taken(&mut self, serial: Serial, tail: u64, head: u64) -> Result<u64, Breach> {
        let told = self.told.filter(|loan| loan.serial == serial);
        let loan = told.ok_or(Breach::Loan)?;
        if !(loan.position.max(head)..=loan.end()).contains(&tail) {
            return Err(Breach::Loan);
        }
        self.told = None;
        Ok(tail - loan.position)
    }
}

#[derive(Clone, Copy, Debug)]
struct Taking {
    loan: Memory,
    /// READs are posted for all bytes before this position.
    posted: u64,
    /// The position behind the last byte that came into the local program's buffer; 0 if none did. TAKEN waits until
    /// the program has read up to there.
    landed: u64,
    /// Whether no more READs are posted for the loan.
    is_ending: bool,
}

/// The reading side of loans. At most one loan is open, until TAKEN is sent.
#[derive(Debug, Default)]
pub(super) struct Takings(Option<Taking>);

impl Takings {
    /// Returns whether a loan is open. A correct peer then sends no other data of the direction.
    pub(super) fn is_open(&self) -> bool {
        self.0.is_some()
    }

    /// Records a loan for the bytes that follow `tail`. The ring has room up to `window`. Fails if a loan is open, or
    /// if this loan is impossible, begins at another position or ends beyond `window`.
    pub(super) fn begin(&mut self, loan: Memory, tail: u64, window: u64) -> Result<(), Breach> {
        if !loan.is_possible() || self.is_open() || loan.position != tail || loan.end() > window {
            return Err(Breach::Loan);
        }
        self.0 = Some(Taking {
            loan,
            posted: tail,
            landed: 0,
            is_ending: false,
        });
        Ok(())
    }

    /// Returns the part of the loan that has to be read next; `None` if there is no more.
    pub(super) fn next(&self) -> Option<Memory> {
        let Taking { loan, posted, .. } = self.0.filter(|taking| !taking.is_ending)?;
        let rest = loan.from(posted - loan.position);
        (rest.length > 0).then_some(rest)
    }

    fn on_posted(&mut self, bytes: u64) {
        if let Some(taking) = &mut self.0 {
            taking.posted += bytes;
        }
    }

    /// Ends the posting of READs for the loan.
    pub(super) fn stop(&mut self) {
        if let Some(taking) = &mut self.0 {
            taking.is_ending = true;
        }
    }

    /// Returns whether posted READs may still bring bytes. All bytes before `tail` have come.
    pub(super) fn is_under_way(&self, tail: u64) -> bool {
        self.0.is_some_and(|taking| taking.posted > tail)
    }

    /// Records that the READs have ended: bytes that have not come by now never will.
    pub(super) fn on_ended(&mut self, tail: u64) {
        if let Some(taking) = &mut self.0 {
            taking.is_ending = true;
            taking.posted = tail;
        }
    }

    /// Records that bytes up to `tail` are in the local program's buffer. The program is about to take them. TAKEN
    /// waits for that, so that the peer need not keep them.
    pub(super) fn on_landed(&mut self, tail: u64) {
        if let Some(taking) = &mut self.0 {
            taking.landed = tail;
        }
    }

    /// Returns the serial for TAKEN if no more bytes can come, because all READs have brought their bytes, up to
    /// `tail`; otherwise `None`. The local program has read up to `head`.
    pub(super) fn answer(&self, tail: u64, head: u64) -> Option<Serial> {
        let Taking {
            loan,
            posted,
            landed,
            is_ending,
        } = self.0?;
        let is_over = posted == tail && (is_ending || tail == loan.end() && head >= landed);
        is_over.then_some(loan.serial)
    }
}

impl<Q: QueuePair> Engine<Q> {
    /// Lends program memory to the peer's device under `rkey`, for the bytes that the producer commits next, up to
    /// `source.until`. Returns false if those bytes have to be in the mirror.
    pub(super) fn offer_source<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32, source: Source, rkey: u32) -> bool {
        let s = self.streams.of_peer(theirs).map(|(_, s)| s);
        let s = s.filter(|s| s.state == State::Open && !s.closing && !s.peer_left && !s.out.stopped);
        let (Some(s), Some(block), Some(_)) = (s, g.block_mirror(theirs), &self.means.bulk) else {
            return false;
        };
        let out = &mut s.out;
        // If the producer has moved to another ring, SWITCH goes first.
        out.look(block);
        let is_at_end = [block.tail(), out.told, out.placed] == [source.from; 3] && out.aside.is_none();
        let is_free = out.targets.source.is_none() && !out.loans.is_open() && !out.targets.holds(out.head);
        let Ok(length) = u32::try_from(source.until - source.from) else {
            return false;
        };
        if !is_at_end || !is_free || length == 0 {
            return false;
        }
        self.serial = self.serial.wrapping_add(1);
        out.loans.untold = Some(Memory {
            serial: self.serial,
            position: source.from,
            address: source.address as u64,
            length,
            rkey,
        });
        out.targets.source = Some(source);
        true
    }

    /// Processes TAKEN: the peer's device has read up to `tail`.
    pub(super) fn on_taken<L: Local>(
        &mut self,
        g: &Shared<Q, L>,
        mine: u32,
        serial: u32,
        tail: u64,
    ) -> Result<(), Breach> {
        let Some(s) = self.streams.get(mine).filter(|s| s.state == State::Open) else {
            return Ok(());
        };
        let out = &mut s.out;
        let bytes = out.loans.on_taken(serial, tail, out.head)?;
        out.on_direct(tail);
        g.local.on_lent(bytes);
        if let Some(source) = &mut out.targets.source {
            source.is_needed |= source.covers(tail);
        }
        self.means.wake_sender(g, out, mine, s.theirs);
        g.touch(s.theirs);
        Ok(())
    }

    /// Processes SOURCE: the peer's program lends memory.
    pub(super) fn on_loan<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, loan: Memory) -> Result<(), Breach> {
        let block = g.block_mine(mine).ok_or(Breach::Stream)?;
        let Some(s) = self.streams.get(mine).filter(|s| s.state == State::Open) else {
            // CLOSED informs the peer that this end has left the stream.
            return Ok(());
        };
        s.inc.on_loan(block, loan)?;
        match &mut self.means.bulk {
            Some(bulk) => bulk.add_reader(mine),
            None => self.change_taking(g, mine, |inc| inc.takings.stop()),
        }
        Ok(())
    }

    /// Changes the state of the loan that stream `mine` reads, then checks whether a transfer or the loan has ended by
    /// that.
    pub(super) fn change_taking<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, f: impl FnOnce(&mut Incoming)) {
        if let Some(s) = self.streams.get(mine) {
            f(&mut s.inc);
            self.go_on(g, mine);
        }
    }

    /// Checks which transfers of stream `mine` have ended. If a transfer into the program's buffer has ended, the
    /// program gets the buffer back. If a loan has ended, TAKEN is to be sent. If all READs have ended, and both ends
    /// have finished with the number, the number is free.
    pub(super) fn go_on<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32) {
        let (Some(s), Some(block)) = (self.streams.get(mine), g.block_mine(mine)) else {
            return;
        };
        let wake = s.inc.end_own_landing(block);
        g.tell_here(&mut self.means.after, wake, mine);
        let is_over = s.inc.takings.answer(s.inc.tail, block.head()).is_some();
        g.touch(s.theirs.filter(|_| is_over));
        if !s.inc.takings.is_under_way(s.inc.tail)
            && let Some(at) = self.unforgotten.iter().position(|done| done.number.0 == mine)
        {
            let done = self.unforgotten.swap_remove(at);
            self.forget_when_quiet(g, done);
        }
    }

    /// Forgets a number that both ends have finished with, and schedules it to be freed. If READs may still bring bytes
    /// into the stream's ring, both happen later.
    pub(super) fn forget_when_quiet<L: Local>(&mut self, g: &Shared<Q, L>, done: Done) {
        if self.streams.get(done.number.0).is_some_and(Stream::is_read_into) {
            self.unforgotten.push(done);
        } else {
            self.forget(g, done.number.0);
            self.means.after.done.push(done);
        }
    }

    /// Posts READs of lent memory, as many as may be under way.
    pub(super) fn read_on<L: Local>(&mut self, g: &Shared<Q, L>) {
        while let Some(bulk) = &mut self.means.bulk
            && let Some(mine) = bulk.next_reader()
        {
            let Some(s) = self.streams.get(mine) else { continue };
            let Some(rest) = s.inc.takings.next() else { continue };
            let read = next_read(g, &self.means.chunks, &s.inc, rest).filter(|_| bulk.most_reads > 0);
            let Some((read, into)) = read else {
                self.change_taking(g, mine, |inc| inc.takings.stop());
                continue;
            };
            // SAFETY: the target is in a chunk of this end's arena that is registered under the key, or in the buffer
            // of a waiting call. In the arena, the ring has room at these positions, and its reader does not read there
            // before the tail goes on. The ring is kept as long as the READ may be under way (`forget_when_quiet`).
            // With a buffer, the program's call returns only when all READs into the buffer have completed, or the
            // buffer's registration has ended.
            let is_posted = unsafe { bulk.read(mine, &read, into) };
            if is_posted != Ok(true) {
                self.means.is_lost |= is_posted.is_err();
                return;
            }
            s.inc.takings.on_posted(read.len.into());
            if into.is_some() {
                s.inc.landings.on_asked(read.len.into());
            }
        }
    }

    /// Processes a complete READ: its bytes are in the ring, or in the buffer.
    pub(super) fn on_read<L: Local>(&mut self, g: &Shared<Q, L>, asked: Asked) {
        let Asked { mine, bytes, into } = asked;
        let (Some(s), Some(block)) = (self.streams.get(mine), g.block_mine(mine)) else {
            return;
        };
        let wake = match into {
            Some(serial) => {
                s.inc.landings.on_come(serial, bytes.into());
                Wake::NONE
            }
            None => s.inc.on_read(block, bytes),
        };
        g.local.on_taken(bytes.into());
        g.tell_here(&mut self.means.after, wake, mine);
        self.go_on(g, mine);
    }

    /// Ends the loans of a stream that the peer has closed. The peer sends no TAKEN for memory that was lent to it, and
    /// this end posts no more READs of memory that the peer lends.
    pub(super) fn on_reader_left<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32) {
        self.change_taking(g, mine, |inc| inc.takings.stop());
        let Some(s) = self.streams.get(mine) else { return };
        if s.out.loans.is_open() {
            self.means.need_source(g, s, mine);
        }
    }
}

impl<Q: QueuePair> Means<Q> {
    /// Wakes the local sender, so that it checks the state of its loan again.
    pub(super) fn wake_sender<L: Local>(&mut self, g: &Shared<Q, L>, out: &Outgoing, mine: u32, theirs: Option<u32>) {
        if let Some(block) = theirs.and_then(|theirs| g.block_mirror(theirs)) {
            let wake = block.put_head(out.head);
            g.tell_here(&mut self.after, wake, mine);
        }
    }

    /// Makes the local sender put the rest of lent memory into the mirror.
    pub(super) fn need_source<L: Local>(&mut self, g: &Shared<Q, L>, s: &mut Stream, mine: u32) {
        if let Some(source) = &mut s.out.targets.source {
            source.is_needed = true;
        }
        self.wake_sender(g, &s.out, mine, s.theirs);
    }
}

/// Returns the next READ of a loan, and the serial of the advert whose buffer the READ fills; no serial if the READ
/// fills the ring. `rest` is the part of the loan for which no READ was posted. `None` if the ring's memory is not
/// registered.
fn next_read<Q: QueuePair, L: Local>(
    g: &Shared<Q, L>,
    chunks: &Chunks,
    inc: &Incoming,
    rest: Memory,
) -> Option<(Read, Option<Serial>)> {
    let most = rest.length.min(READ);
    let (to, local, len, into) = match inc.landings.spot(rest.position) {
        Some((spot, key)) => {
            let to = std::ptr::with_exposed_provenance_mut(spot.address as usize);
            (to, key, most.min(spot.length), Some(spot.serial))
        }
        None => {
            let (to, len, chunk) = g.piece(&g.mine, inc.ring?, rest.position, most.into())?;
            (to, chunks.mine.get(chunk)?.sink, len as u32, None)
        }
    };
    let (from, remote) = (rest.address, rest.rkey);
    let read = Read {
        to,
        local,
        len,
        from,
        remote,
    };
    Some((read, into))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAN: Memory = Memory {
        serial: 7,
        position: 100,
        address: 5000,
        length: 50,
        rkey: 3,
    };

    #[test]
    fn what_was_told_is_over_with_its_answer_alone() {
        let mut loans = Loans {
            untold: Some(LOAN),
            told: None,
        };
        assert_eq!((loans.untold, loans.reach()), (Some(LOAN), None));
        assert_eq!(loans.on_taken(7, 150, 0), Err(Breach::Loan), "it was not told");
        loans.on_told();
        assert_eq!((loans.untold, loans.reach()), (None, Some(150)));
        for (serial, tail, head) in [(8, 120, 100), (7, 99, 100), (7, 151, 100), (7, 110, 111)] {
            assert_eq!(loans.on_taken(serial, tail, head), Err(Breach::Loan));
        }
        loans.untold = None;
        assert!(loans.is_open());
        assert_eq!(loans.on_taken(7, 120, 110), Ok(20));
        assert!(!loans.is_open());
        assert_eq!(loans.on_taken(7, 120, 110), Err(Breach::Loan), "twice");
    }

    #[test]
    fn memory_is_lent_for_what_comes_next_and_as_far_as_there_is_room() {
        let bad = [
            (Memory { length: 0, ..LOAN }, 100, 1000),
            (
                Memory {
                    address: u64::MAX - 10,
                    ..LOAN
                },
                100,
                1000,
            ),
            (LOAN, 99, 1000),
            (LOAN, 101, 1000),
            (LOAN, 100, 149),
        ];
        for (loan, tail, window) in bad {
            assert_eq!(
                Takings::default().begin(loan, tail, window),
                Err(Breach::Loan),
                "{loan:?}"
            );
        }
        let mut takings = Takings::default();
        assert_eq!(takings.begin(LOAN, 100, 150), Ok(()));
        assert_eq!(takings.begin(LOAN, 100, 150), Err(Breach::Loan), "one at a time");
    }

    #[test]
    fn it_is_answered_when_nothing_can_come_any_more() {
        let mut takings = Takings::default();
        takings.begin(LOAN, 100, 150).unwrap();
        let next = |takings: &Takings| {
            takings
                .next()
                .map(|piece| (piece.position, piece.length, piece.address))
        };
        assert_eq!(next(&takings), Some((100, 50, 5000)));
        takings.on_posted(20);
        assert_eq!(next(&takings), Some((120, 30, 5020)));
        takings.stop();
        assert_eq!(
            (next(&takings), takings.answer(100, 0), takings.answer(110, 0)),
            (None, None, None)
        );
        assert!(takings.is_under_way(119) && !takings.is_under_way(120));
        assert_eq!(takings.answer(120, 0), Some(7));
        takings.on_ended(110);
        assert_eq!(takings.answer(110, 0), Some(7));
    }
}
