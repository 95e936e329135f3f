//! The engine's part of direct transfers on a link between hosts: adverts of both ends, the program's memory as a
//! source, and the bulk queue pair (docs/protocol.md, P90–P95). `pump/direct.rs` posts the WRITEs.

use super::bulk::{Bulk, Came, Placed};
use super::direct::{Buffer, Landed, Source};
use super::engine::Engine;
use super::fault::{Breach, Fault};
use super::local::{ENGINE, Local, SERVICE};
use super::qp::QueuePair;
use super::record::{Memory, Withdrawal};
use super::shared::{Retired, Shared};
use super::stream::State;
use crate::fabric::ready::ReadyQueue;

impl<Q: QueuePair> Engine<Q> {
    /// Uses `qp` for direct transfers from now on. Returns it if there is one already.
    pub fn attach_bulk(&mut self, qp: Q) -> Option<Q> {
        if self.bulk.is_some() {
            return Some(qp);
        }
        let bulk = Bulk::new(qp);
        // From now on it is armed together with the link's own queue pair.
        if let Err(lost) = bulk.arm() {
            self.lost = Some(lost);
        }
        self.bulk = Some(bulk);
        None
    }

    pub fn arm_bulk(&mut self) {
        if let Some(Err(lost)) = self.bulk.as_ref().map(Bulk::arm) {
            self.lost = Some(lost);
        }
    }

    pub fn poll_bulk<L: Local>(&mut self, g: &Shared<Q, L>) -> Result<usize, Fault> {
        let Some(mut bulk) = self.bulk.take() else {
            return Ok(0);
        };
        let (mut breach, mut over) = (None, 0);
        let polled = bulk.poll(
            |came| match came {
                Came::Placed(placed) => match self.on_placed(g, placed) {
                    Ok(is_over) => over += u32::from(is_over),
                    Err(error) => breach = breach.or(Some(error)),
                },
                Came::Read(asked) => self.on_read(g, asked),
            },
            |theirs| g.dirty.push(theirs),
        );
        (0..over).for_each(|_| bulk.end_landing());
        self.bulk = Some(bulk);
        if let Some(breach) = breach {
            return Err(breach.into());
        }
        Ok(polled.unwrap_or_else(|lost| {
            self.lost = Some(lost);
            0
        }))
    }

    /// Gives the bulk queue pair up. Adverts of local programs end, and the bytes for adverts of the peer's programs go
    /// by the ring.
    #[cold]
    pub fn drop_bulk<L: Local>(&mut self, g: &Shared<Q, L>) {
        self.lost = None;
        let Some(bulk) = self.bulk.take() else {
            return;
        };
        self.direct.lost += 1;
        for mine in 0..self.streams.most() {
            let (Some(s), Some(block)) = (self.streams.get(mine), g.block_mine(mine)) else {
                continue;
            };
            s.out.targets.drop_open();
            let before = s.inc.landed;
            let wake = s.inc.lapse(block);
            self.direct.taken_into += s.inc.landed - before;
            if let Some(theirs) = s.theirs {
                g.dirty.push(theirs);
            }
            g.tell_here(&mut self.after, wake, mine);
        }
        self.cancel_loans(g);
        let under_way = self.stop_reading(g);
        let qp = bulk.into_inner();
        if let Some(mut retired) = g.retired.lock() {
            retired.push(Retired { qp, under_way });
        } else {
            // This thread was interrupted while it took the list.
            drop(qp);
            self.on_bulk_ended(g, &under_way);
        }
        g.retired_unseen.publish(true);
        g.ring_if_asleep(&mut self.after, SERVICE);
    }

    pub fn end_landing(&mut self) {
        if let Some(bulk) = &mut self.bulk {
            bulk.end_landing();
        }
    }

    /// Returns the local number and the room for a buffer, as [`End::room_to_land`](super::End::room_to_land) says.
    pub fn room_to_land<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) -> Option<(u32, u64)> {
        let mine = self.streams.mine(theirs)?;
        let room = self.streams.get(mine)?.inc.room_to_land(g.block_mine(mine)?);
        (room > 0).then_some((mine, room))
    }

    /// Announces a buffer with which the local program waits while the stream's ring is empty. `None` if the ring is
    /// not empty, or the buffer cannot be used.
    pub fn advertise<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, buffer: Buffer) -> Option<Memory> {
        let Buffer { address, length, key } = buffer;
        let block = g.block_mine(mine)?;
        let s = self.streams.get(mine)?;
        let (State::Open, Some(theirs), false) = (s.state, s.theirs, s.peer_left || s.closing) else {
            return None;
        };
        let room = s.inc.room_to_land(block).min(length.into()) as u32;
        // An open loan makes the advert void: the buffer is for this end's device alone.
        let is_void = s.inc.takings.is_open();
        if room < g.tuning.direct_min || !self.bulk.as_mut().is_some_and(|bulk| is_void || bulk.begin_landing()) {
            return None;
        }
        self.serial = self.serial.wrapping_add(1);
        let advert = Memory {
            serial: self.serial,
            position: s.inc.tail,
            address,
            length: room,
            rkey: key.remote,
        };
        s.inc.landings.begin(advert, key.local);
        if is_void {
            s.inc.landings.on_loan();
            return Some(advert);
        }
        self.direct.adverts += 1;
        g.dirty.push(theirs);
        Some(advert)
    }

    /// Returns the state of an advert.
    pub fn landed(&mut self, mine: u32, serial: u32) -> Landed {
        let s = self.streams.get(mine);
        s.map_or(Landed::Over(0), |s| s.inc.landings.look(serial))
    }

    /// Withdraws an advert: the local program waits no longer.
    pub fn withdraw<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, serial: u32) {
        let Some(s) = self.streams.get(mine) else {
            return;
        };
        let was_open = s.inc.landings.may_be_answered();
        s.inc.landings.withdraw(serial, false);
        if let Some(theirs) = s.theirs {
            g.dirty.push(theirs);
        }
        if was_open && !s.inc.landings.may_be_answered() {
            self.end_landing();
        }
        self.go_on(g, mine);
    }

    fn on_placed<L: Local>(&mut self, g: &Shared<Q, L>, placed: Placed) -> Result<bool, Breach> {
        let Placed { mine, serial, tail } = placed;
        // PLACED may be late: the number may belong to another stream by now, which has other adverts.
        let (Some(s), Some(block)) = (self.streams.get(mine), g.block_mine(mine)) else {
            return Ok(false);
        };
        let (was_open, before) = (s.inc.landings.may_be_answered(), s.inc.tail);
        let wake = s.inc.on_placed(block, serial, tail)?;
        self.direct.received += s.inc.tail - before;
        let is_over = was_open && !s.inc.landings.may_be_answered();
        g.tell_here(&mut self.after, wake, mine);
        Ok(is_over)
    }

    pub fn on_advert<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, advert: Memory) -> Result<(), Breach> {
        let Some(s) = self
            .streams
            .get(mine)
            .filter(|s| s.state == State::Open && !s.peer_left)
        else {
            return Ok(());
        };
        // If either is missing here, the peer will be informed, or has been.
        let (Some(theirs), Some(_)) = (s.theirs, &self.bulk) else {
            return Ok(());
        };
        // A switch of rings before this position may not have arrived at the peer.
        if advert.position <= s.out.start {
            return Ok(());
        }
        s.out.targets.on_advert(advert, s.out.told, s.out.loans.is_open())?;
        // A program that has a large piece to send may wait for this.
        self.wake_sender(g, mine, theirs);
        g.dirty.push(theirs);
        Ok(())
    }

    pub fn on_withdrawal<L: Local>(
        &mut self,
        g: &Shared<Q, L>,
        mine: u32,
        withdrawal: Withdrawal,
    ) -> Result<(), Breach> {
        let Some(s) = self.streams.get(mine).filter(|s| s.state == State::Open) else {
            return Ok(());
        };
        let Some(theirs) = s.theirs else {
            return Ok(());
        };
        // The position of a withdrawal was told before.
        if withdrawal.position > s.out.told {
            return Err(Breach::Advert);
        }
        let (answer, again) = s.out.targets.on_withdrawal(withdrawal);
        if let Some(position) = again {
            s.out.go_back(position)?;
        }
        if let (Some(answer), Some(bulk)) = (answer, &mut self.bulk) {
            if answer.tail > s.out.told {
                s.out.on_direct(answer.tail);
            }
            if let Err(lost) = bulk.answer(theirs, answer) {
                self.lost = Some(lost);
            }
        }
        g.dirty.push(theirs);
        Ok(())
    }

    /// Returns how many bytes of the local program's memory can go at once to the peer's program, which waits with a
    /// buffer. It is 0 if no program waits, or other bytes come before.
    pub fn wanted<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) -> u64 {
        let s = self.streams.of_peer(theirs);
        let s = s.filter(|s| s.state == State::Open && !s.out.stopped);
        let (Some(s), Some(block)) = (s, g.block_mirror(theirs)) else {
            return 0;
        };
        let is_free = s.out.targets.source.is_none() && !s.out.loans.is_open();
        let is_at_end = block.tail() == s.out.told && s.out.aside.is_none() && is_free;
        match s.out.targets.at(s.out.told) {
            Some((advert, 0)) if is_at_end && self.bulk.is_some() => advert.length.into(),
            _ => 0,
        }
    }

    /// Lends program memory as the source of the bytes that the producer commits next, up to `source.until`; the mirror
    /// does not have them. False if it has to.
    pub fn lend_source<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32, source: Source) -> bool {
        if self.wanted(g, theirs) < source.until - source.from {
            return false;
        }
        let s = self.streams.of_peer(theirs);
        let Some(s) = s.filter(|s| s.out.told == source.from) else {
            return false;
        };
        s.out.targets.source = Some(source);
        true
    }

    /// Returns whether the program's memory is needed no longer: the peer has all of the bytes, or the rest has to go
    /// by the ring.
    pub fn is_source_done(&mut self, theirs: u32) -> bool {
        let s = self.streams.of_peer(theirs);
        s.is_none_or(|s| {
            let is_over = |source: Source| source.is_offered && !s.out.loans.is_open();
            let is_done = |source: Source| source.is_needed || s.out.head >= source.until || is_over(source);
            s.out.targets.source.is_none_or(is_done)
        })
    }

    /// Copies the lent bytes that the peer is not known to have into the mirror. Returns how many of them the peer may
    /// still take from the program's memory, because WRITEs or READs of them are under way. `None` if no memory was
    /// lent.
    ///
    /// # Safety
    /// The lent memory can be read.
    pub unsafe fn take_source<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) -> Option<u64> {
        let s = self.streams.of_peer(theirs)?;
        let source = s.out.targets.source.take()?;
        s.out.loans.recall();
        // Includes bytes that the peer's device has read and its program has not: a process that takes over the
        // connection there may begin with them (P75).
        let from = s.out.head.clamp(source.from, source.until);
        let at = std::ptr::with_exposed_provenance::<u8>(source.address + (from - source.from) as usize);
        // SAFETY: by this function's contract.
        let rest = unsafe { std::slice::from_raw_parts(at, (source.until - from) as usize) };
        if let Some(block) = g.block_mirror(theirs) {
            s.out.look(block, ENGINE.0);
        }
        if let Some(ring) = s.out.ring_at(from) {
            // SAFETY: the bytes are committed and the peer has not confirmed them, so the producer does not write
            // there; the part of the mirror that the device reads begins behind them.
            unsafe { g.mirror.area().copy_in(ring, from, rest) };
        }
        let posted = s
            .out
            .targets
            .at(s.out.told)
            .map_or(s.out.told, |(advert, written)| advert.position + written);
        // The peer may still read from an open loan.
        let posted = match source.is_offered {
            true => s.out.loans.reach().unwrap_or(from),
            false => posted,
        };
        g.dirty.push(theirs);
        Some(posted.saturating_sub(from).min(rest.len() as u64))
    }

    /// Returns how many adverts have come for the peer's stream.
    pub fn adverts(&mut self, theirs: u32) -> u32 {
        let s = self.streams.of_peer(theirs);
        s.map_or(0, |s| s.out.targets.adverts)
    }

    /// Returns how many bytes up to `until` the peer's program is not known to have read.
    pub fn untaken(&mut self, theirs: u32, until: u64) -> u64 {
        let s = self.streams.of_peer(theirs);
        s.map_or(0, |s| until.saturating_sub(s.out.head))
    }

    /// Has the head of a local stream sent at once.
    pub fn settle_head<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32) {
        if let Some(s) = self.streams.get(mine) {
            s.inc.settle = true;
            if let Some(theirs) = s.theirs {
                g.dirty.push(theirs);
            }
        }
    }
}
