//! What the engine of a link between hosts does about memory that a sending program lends to the reader's device
//! (docs/protocol.md, P96–P99): loans of both ends, and the READs of what is lent here. Not what is known of a loan
//! (`loan.rs`), nor the queue pair for it (`bulk.rs`).

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

/// The longest READ, bytes: so much at a time is put into the ring, and its reader told of.
const READ: u64 = 128 * 1024;

impl<Q: QueuePair> Engine<Q> {
    /// What the producer commits next, up to `until`, is in our program's memory, where the peer's device may read it
    /// under `rkey`. False if it has to be in the mirror.
    pub fn offer_source<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32, source: Source, rkey: u32) -> bool {
        let s = self.streams.of_peer(theirs);
        let s = s.filter(|s| s.state == State::Open && !s.closing && !s.peer_left && !s.out.stopped);
        let (Some(s), Some(block), Some(_)) = (s, g.block_mirror(theirs), &self.bulk) else {
            return false;
        };
        let out = &mut s.out;
        // A ring that the producer moves on to is told of before.
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

    /// Our program waits no longer for what it has lent. It is over when [`is_source_done`](Self::is_source_done).
    pub fn recall_source<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) {
        let s = self.streams.of_peer(theirs);
        if s.is_some_and(|s| s.out.loans.recall()) {
            self.direct.recalled += 1;
            g.local.on_recalled();
            g.dirty.push(theirs);
        }
    }

    /// The peer's end has said how far its device has read.
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

    /// See [`End::taken`](super::End::taken).
    pub fn taken(&mut self, theirs: u32) -> u64 {
        let s = self.streams.of_peer(theirs);
        s.map_or(0, |s| match s.out.loans.is_open() {
            true => s.out.head,
            false => s.out.head.max(s.out.told),
        })
    }

    /// Whoever waits for what becomes of its memory looks again.
    pub fn wake_sender<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, theirs: u32) {
        if let (Some(s), Some(block)) = (self.streams.get(mine), g.block_mirror(theirs)) {
            let wake = block.put_head(s.out.head);
            g.tell_here(&mut self.after, wake, mine);
        }
    }

    /// The peer's program lends memory.
    pub fn on_loan<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, loan: Memory) -> Result<(), Breach> {
        let block = g.block_mine(mine).ok_or(Breach::Stream)?;
        let Some(s) = self.streams.get(mine).filter(|s| s.state == State::Open) else {
            // It hears that we have left.
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

    /// The peer's program wants it back.
    pub fn on_recall<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, serial: u32) {
        if let Some(s) = self.streams.get(mine) {
            s.inc.takings.on_recall(serial);
            self.go_on(g, mine);
        }
    }

    /// No more is asked for.
    pub fn stop_taking<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32) {
        if let Some(s) = self.streams.get(mine) {
            s.inc.takings.stop();
            self.go_on(g, mine);
        }
    }

    /// See [`End::put_back`](super::End::put_back).
    pub fn put_back<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32) {
        if let Some(s) = self.streams.get(mine) {
            s.inc.takings.on_landed(0);
            self.go_on(g, mine);
        }
    }

    /// Something may be over: a buffer is our program's again, the peer is to hear of that, or the stream's number is
    /// free.
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

    /// Both ends are done with our number; it is to be given back, now or later: what was asked for may still come into
    /// its ring.
    pub fn forget_when_quiet<L: Local>(&mut self, g: &Shared<Q, L>, done: Done) -> Option<Done> {
        let mine = done.number.0;
        if self.streams.get(mine).is_some_and(Stream::is_read_into) {
            self.unforgotten.push(done);
            return None;
        }
        self.forget(g, mine);
        Some(done)
    }

    /// Asks for what is lent, as far as there may be READs.
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
            // SAFETY: within a chunk of our arena that is registered under the key, at positions that the ring has room
            // for: the reader does not look there before the tail goes on, and the ring is kept as long as the READ may
            // be under way (`forget_when_quiet`). Or within a buffer that a call of our program waits with, likewise:
            // the call does not return before all that was asked for has come, or the registration has ended.
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

    /// The next READ of a stream, and the buffer that it fills, if it is none of the ring; `None` where the device does
    /// not have the ring's memory.
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
        // The ring wraps, and is in several chunks.
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

    /// The next bytes of a READ are in the ring, or in the buffer.
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

    /// Nothing more is read over a bulk queue pair that is given up. Gives the streams for which something may still
    /// come until it is no more.
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

    /// And then.
    pub fn on_bulk_ended<L: Local>(&mut self, g: &Shared<Q, L>, under_way: &[u32]) {
        for mine in under_way {
            if let Some(s) = self.streams.get(*mine) {
                s.inc.takings.on_ended(s.inc.tail);
                self.go_on(g, *mine);
            }
        }
    }

    /// What was lent and not told goes by the ring.
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

    /// The peer has left: it says nothing more of what was lent to it, and we ask for no more of what it lends.
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
