//! The engine's part of memory that a sending program lends to the reader's device (docs/protocol.md, P96–P99): loans
//! of both ends, and the READs of memory lent to this end. `loan.rs` has the state of a loan, `bulk.rs` the queue pair.

use super::bulk::{Asked, Bulk, Lost};
use super::direct::Source;
use super::engine::Engine;
use super::fault::Breach;
use super::loan::Piece;
use super::local::{ENGINE, Local};
use super::qp::{QueuePair, Read};
use super::record::{Memory, Serial};
use super::shared::Shared;
use super::stream::{State, Stream};
use crate::fabric::numbers::Done;
use crate::fabric::ready::ReadyQueue;
use crate::fabric::ring::Wake;

/// The longest READ in bytes; its bytes become readable together.
const READ: u64 = 128 * 1024;

impl<Q: QueuePair> Engine<Q> {
    /// Lends program memory to the peer's device under `rkey`, for the bytes that the producer commits next, up to
    /// `source.until`. False if they have to be in the mirror.
    pub fn offer_source<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32, source: Source, rkey: u32) -> bool {
        let s = self.streams.of_peer(theirs);
        let s = s.filter(|s| s.state == State::Open && !s.closing && !s.peer_left && !s.out.stopped);
        let (Some(s), Some(block), Some(_)) = (s, g.block_mirror(theirs), &self.bulk) else {
            return false;
        };
        let out = &mut s.out;
        // If the producer has moved on to another ring, SWITCH goes first.
        out.look(block, ENGINE.0);
        let is_at_end = [block.tail(), out.told, out.placed] == [source.from; 3] && out.aside.is_none();
        let is_free = out.targets.source.is_none() && !out.loans.is_open() && !out.targets.holds(out.head);
        let Ok(length) = u32::try_from(source.until - source.from) else {
            return false;
        };
        if !is_at_end || !is_free || length == 0 {
            return false;
        }
        self.serial = self.serial.wrapping_add(1);
        out.loans.begin(Memory {
            serial: self.serial,
            position: source.from,
            address: source.address as u64,
            length,
            rkey,
        });
        out.targets.source = Some(source);
        true
    }

    /// Recalls a loan: the local program waits no longer. The loan is over when
    /// [`is_source_done`](Self::is_source_done).
    pub fn recall_source<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) {
        let s = self.streams.of_peer(theirs);
        if s.is_some_and(|s| s.out.loans.recall()) {
            self.direct.recalled += 1;
            g.local.on_recalled();
            g.dirty.push(theirs);
        }
    }

    /// Takes in TAKEN: the peer's device has read up to `tail`.
    pub fn on_taken<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, serial: u32, tail: u64) -> Result<(), Breach> {
        let Some(s) = self.streams.get(mine).filter(|s| s.state == State::Open) else {
            return Ok(());
        };
        let (Some(theirs), out) = (s.theirs, &mut s.out) else {
            return Err(Breach::Loan);
        };
        let bytes = out.loans.on_taken(serial, tail, out.head)?;
        out.on_direct(tail);
        self.direct.lent += bytes;
        g.local.on_lent(bytes);
        if let Some(source) = &mut out.targets.source {
            source.is_needed |= source.covers(tail);
        }
        self.wake_sender(g, mine, theirs);
        g.dirty.push(theirs);
        Ok(())
    }

    /// Returns the position up to which the peer has read, as [`End::taken`](super::End::taken) says.
    pub fn taken(&mut self, theirs: u32) -> u64 {
        let s = self.streams.of_peer(theirs);
        s.map_or(0, |s| match s.out.loans.is_open() {
            true => s.out.head,
            false => s.out.head.max(s.out.told),
        })
    }

    /// Wakes the local sender, so that it checks the state of its loan again.
    pub fn wake_sender<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, theirs: u32) {
        if let (Some(s), Some(block)) = (self.streams.get(mine), g.block_mirror(theirs)) {
            let wake = block.put_head(s.out.head);
            g.tell_here(&mut self.after, wake, mine);
        }
    }

    /// Takes in SOURCE: the peer's program lends memory.
    pub fn on_loan<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, loan: Memory) -> Result<(), Breach> {
        let block = g.block_mine(mine).ok_or(Breach::Stream)?;
        let Some(s) = self.streams.get(mine).filter(|s| s.state == State::Open) else {
            // CLOSED informs the peer that this end has left.
            return Ok(());
        };
        let was_open = s.inc.landings.may_be_answered();
        s.inc.on_loan(block, loan)?;
        if was_open && !s.inc.landings.may_be_answered() {
            self.end_landing();
        }
        match &mut self.bulk {
            Some(bulk) => bulk.add_reader(mine),
            None => self.stop_taking(g, mine),
        }
        Ok(())
    }

    /// Takes in RECALL: the peer's program wants its memory back.
    pub fn on_recall<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, serial: u32) {
        if let Some(s) = self.streams.get(mine) {
            s.inc.takings.on_recall(serial);
            self.go_on(g, mine);
        }
    }

    /// Posts no more READs for the loan of a stream.
    pub fn stop_taking<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32) {
        if let Some(s) = self.streams.get(mine) {
            s.inc.takings.stop();
            self.go_on(g, mine);
        }
    }

    /// Records that the bytes of a buffer are in the ring, as [`End::put_back`](super::End::put_back) says.
    pub fn put_back<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32) {
        if let Some(s) = self.streams.get(mine) {
            s.inc.takings.on_landed(0);
            self.go_on(g, mine);
        }
    }

    /// Checks what of stream `mine` is over. A transfer into the program's buffer: the buffer is the program's again. A
    /// loan: TAKEN is to be sent. All READs, with both ends done: the number is free.
    pub fn go_on<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32) {
        let (Some(s), Some(block)) = (self.streams.get(mine), g.block_mine(mine)) else {
            return;
        };
        let before = s.inc.landed;
        let wake = s.inc.end_own_landing(block);
        self.direct.taken_into += s.inc.landed - before;
        g.tell_here(&mut self.after, wake, mine);
        let is_over = s.inc.takings.answer(s.inc.tail, block.head()).is_some();
        if let Some(theirs) = s.theirs.filter(|_| is_over) {
            g.dirty.push(theirs);
        }
        if !s.inc.takings.is_under_way(s.inc.tail)
            && let Some(at) = self.unforgotten.iter().position(|done| done.number.0 == mine)
        {
            let done = self.unforgotten.swap_remove(at);
            self.forget(g, mine);
            self.after.done.push(done);
        }
    }

    /// Forgets a number that both ends are done with, and returns it to be freed. `None` if READs may still bring bytes
    /// into its ring: then it is freed later.
    pub fn forget_when_quiet<L: Local>(&mut self, g: &Shared<Q, L>, done: Done) -> Option<Done> {
        let mine = done.number.0;
        if self.streams.get(mine).is_some_and(Stream::is_read_into) {
            self.unforgotten.push(done);
            return None;
        }
        self.forget(g, mine);
        Some(done)
    }

    /// Posts READs of lent memory, as many as may be under way.
    pub fn read_on<L: Local>(&mut self, g: &Shared<Q, L>) {
        let Some(mut bulk) = self.bulk.take() else { return };
        let read = self.read_by(g, &mut bulk);
        self.bulk = Some(bulk);
        self.lost = self.lost.or(read.err());
    }

    fn read_by<L: Local>(&mut self, g: &Shared<Q, L>, bulk: &mut Bulk<Q>) -> Result<(), Lost> {
        while let Some(mine) = bulk.next_reader() {
            let Some(s) = self.streams.get(mine) else { continue };
            let Some(piece) = s.inc.takings.next() else { continue };
            let read = self.next_read(g, mine, piece).filter(|_| bulk.can_read());
            let Some((read, into)) = read else {
                self.stop_taking(g, mine);
                continue;
            };
            // SAFETY: within a chunk of this end's arena that is registered under the key, at positions for which the
            // ring has room. The reader does not read there before the tail goes on, and the ring is kept as long as
            // the READ may be under way (`forget_when_quiet`). Or within a buffer with which a call of the program
            // waits: the call returns only when all READs into it have completed, or the registration has ended.
            if !unsafe { bulk.read(mine, &read, into) }? {
                return Ok(());
            }
            if let Some(s) = self.streams.get(mine) {
                s.inc.takings.on_posted(read.len.into());
                if into.is_some() {
                    s.inc.landings.on_asked(read.len.into());
                }
            }
        }
        Ok(())
    }

    /// Returns the next READ of a stream, and the buffer that it fills if it is not for the ring. `None` if the ring's
    /// memory is not registered.
    fn next_read<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, piece: Piece) -> Option<(Read, Option<Serial>)> {
        let log2 = g.tuning.chunk_log2;
        let area = g.mine.area();
        let inc = &self.streams.get(mine)?.inc;
        if let Some(spot) = inc.landings.spot(piece.position) {
            let read = Read {
                to: std::ptr::with_exposed_provenance_mut(spot.address as usize),
                local: spot.key,
                len: piece.length.min(READ).min(spot.room) as u32,
                from: piece.address,
                remote: piece.rkey,
            };
            return Some((read, Some(spot.serial)));
        }
        let ring = inc.ring?;
        // The ring wraps, and lies in several chunks.
        let (to, len) = area.piece(ring, piece.position, piece.length.min(READ))?;
        let offset = area.offset_of(to);
        let local = self.chunks.sinks.get((offset >> log2) as u32)?;
        let len = len.min((1 << log2) - (offset & ((1 << log2) - 1)));
        let read = Read {
            to,
            local,
            len: len as u32,
            from: piece.address,
            remote: piece.rkey,
        };
        (len > 0).then_some((read, None))
    }

    /// Takes in a complete READ: its bytes are in the ring, or in the buffer.
    pub fn on_read<L: Local>(&mut self, g: &Shared<Q, L>, asked: Asked) {
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
        self.direct.taken += u64::from(bytes);
        g.local.on_taken(bytes.into());
        g.tell_here(&mut self.after, wake, mine);
        self.go_on(g, mine);
    }

    /// Stops all READs over a bulk queue pair that is given up. Returns the streams for which READs may still bring
    /// bytes until it is gone.
    pub fn stop_reading<L: Local>(&mut self, g: &Shared<Q, L>) -> Vec<u32> {
        let mut under_way = Vec::new();
        for mine in 0..self.streams.most() {
            let Some(s) = self.streams.get(mine) else { continue };
            if s.inc.takings.is_open() {
                s.inc.takings.stop();
                if s.is_read_into() {
                    under_way.push(mine);
                }
                self.go_on(g, mine);
            }
        }
        under_way
    }

    /// Ends the READs of streams whose bulk queue pair is gone.
    pub fn on_bulk_ended<L: Local>(&mut self, g: &Shared<Q, L>, under_way: &[u32]) {
        for mine in under_way {
            if let Some(s) = self.streams.get(*mine) {
                s.inc.takings.on_ended(s.inc.tail);
                self.go_on(g, *mine);
            }
        }
    }

    /// Cancels the loans for which SOURCE was not sent: their bytes go by the ring.
    pub fn cancel_loans<L: Local>(&mut self, g: &Shared<Q, L>) {
        for mine in 0..self.streams.most() {
            let Some(s) = self.streams.get(mine) else { continue };
            if s.out.loans.untold().is_some()
                && let Some(theirs) = s.theirs
            {
                s.out.cancel_loan();
                self.wake_sender(g, mine, theirs);
            }
        }
    }

    /// Ends the loans of a stream that the peer has left. It sends no TAKEN for memory lent to it, and this end posts
    /// no more READs of memory that the peer lends.
    pub fn on_reader_left<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32) {
        self.stop_taking(g, mine);
        let Some(s) = self.streams.get(mine) else { return };
        if s.out.loans.is_open()
            && let Some(theirs) = s.theirs
        {
            if let Some(source) = &mut s.out.targets.source {
                source.is_needed = true;
            }
            self.wake_sender(g, mine, theirs);
        }
    }
}
