//! What the engine of a link between hosts does about direct transfers: adverts of both ends, the program's memory as a
//! source, and the bulk queue pair for them (docs/protocol.md, P90–P95). Not what is posted (`pump/direct.rs`).

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
    /// Direct transfers go over it from now on. Gives it back if there is one.
    pub fn attach_bulk(&mut self, qp: Q) -> Option<Q> {
        if self.bulk.is_some() {
            return Some(qp);
        }
        let bulk = Bulk::new(qp);
        // From now on it is armed with the other.
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

    /// Nothing goes over the bulk queue pair any more: what our programs wait with is given up, and what the peer's
    /// wait with is filled by the ring.
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
            // We have interrupted who looks for them.
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

    /// See [`End::room_to_land`](super::End::room_to_land).
    pub fn room_to_land<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) -> Option<(u32, u64)> {
        let mine = self.streams.mine(theirs)?;
        let room = self.streams.get(mine)?.inc.room_to_land(g.block_mine(mine)?);
        (room > 0).then_some((mine, room))
    }

    /// Our program waits with this buffer, and its stream's ring is empty. `None` if there is something in the ring, or
    /// this cannot be.
    pub fn advertise<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, buffer: Buffer) -> Option<Memory> {
        let Buffer { address, length, key } = buffer;
        let block = g.block_mine(mine)?;
        let s = self.streams.get(mine)?;
        let (State::Open, Some(theirs), false) = (s.state, s.theirs, s.peer_left || s.closing) else {
            return None;
        };
        let room = s.inc.room_to_land(block).min(length.into()) as u32;
        // What is lent by now has made it void: it is for our device alone.
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

    /// What has become of that.
    pub fn landed(&mut self, mine: u32, serial: u32) -> Landed {
        let s = self.streams.get(mine);
        s.map_or(Landed::Over(0), |s| s.inc.landings.look(serial))
    }

    /// Our program waits no longer.
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
        // It may be late: the number may be another stream's, which has other adverts.
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
        // Where either is missing here the peer will hear of it, or has.
        let (Some(theirs), Some(_)) = (s.theirs, &self.bulk) else {
            return Ok(());
        };
        // What precedes it may be a switch of rings that has not arrived.
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
        // It is about what has gone.
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

    /// How many bytes of our program's memory the peer's stream has a use for at once: it waits with a buffer for what
    /// is sent next.
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

    /// What the producer commits next, up to `until`, is in our program's memory, and not in the mirror. False if it
    /// has to be there.
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

    /// Whether the program's memory is needed no longer: the peer has all of it, or what is left has to go by the ring.
    pub fn is_source_done(&mut self, theirs: u32) -> bool {
        let s = self.streams.of_peer(theirs);
        s.is_none_or(|s| {
            let is_over = |source: Source| source.is_offered && !s.out.loans.is_open();
            let is_done = |source: Source| source.is_needed || s.out.head >= source.until || is_over(source);
            s.out.targets.source.is_none_or(is_done)
        })
    }

    /// Puts what the peer is not known to have into the mirror; gives how many bytes of that it may still take from the
    /// program's memory: WRITEs of them are under way.
    ///
    /// # Safety
    /// The memory that was lent can be read.
    pub unsafe fn take_source<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) -> Option<u64> {
        let s = self.streams.of_peer(theirs)?;
        let source = s.out.targets.source.take()?;
        s.out.loans.recall();
        // Also what the peer's device has read and its program has not: whoever has the connection next there may begin
        // with that (P75).
        let from = s.out.head.clamp(source.from, source.until);
        let at = std::ptr::with_exposed_provenance::<u8>(source.address + (from - source.from) as usize);
        // SAFETY: by this function's contract.
        let rest = unsafe { std::slice::from_raw_parts(at, (source.until - from) as usize) };
        if let Some(block) = g.block_mirror(theirs) {
            s.out.look(block, ENGINE.0);
        }
        if let Some(ring) = s.out.ring_at(from) {
            // SAFETY: committed, and the peer has not confirmed it: the producer does not write there, and what the
            // device reads of the mirror begins behind it.
            unsafe { g.mirror.area().copy_in(ring, from, rest) };
        }
        let posted = s
            .out
            .targets
            .at(s.out.told)
            .map_or(s.out.told, |(advert, written)| advert.position + written);
        // A loan that is open may still be read from.
        let posted = match source.is_offered {
            true => s.out.loans.reach().unwrap_or(from),
            false => posted,
        };
        g.dirty.push(theirs);
        Some(posted.saturating_sub(from).min(rest.len() as u64))
    }

    /// How many adverts have come for what we send to the peer's stream.
    pub fn adverts(&mut self, theirs: u32) -> u32 {
        let s = self.streams.of_peer(theirs);
        s.map_or(0, |s| s.out.targets.adverts)
    }

    /// How many bytes up to `until` the peer is not known to have taken.
    pub fn untaken(&mut self, theirs: u32, until: u64) -> u64 {
        let s = self.streams.of_peer(theirs);
        s.map_or(0, |s| until.saturating_sub(s.out.head))
    }

    /// The head of our stream is to be told at once.
    pub fn settle_head<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32) {
        if let Some(s) = self.streams.get(mine) {
            s.inc.settle = true;
            if let Some(theirs) = s.theirs {
                g.dirty.push(theirs);
            }
        }
    }
}
