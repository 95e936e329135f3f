//! WRITEs straight into the memory of programs, between hosts (docs/protocol.md, P90–P95): the rules of one direction,
//! which are pure, and the engine's part.
//!
//! A receiving program may wait with a *buffer*. Its end announces the buffer by an *advert*. The sender's device
//! writes into the buffer, and the sender's end answers the advert by PLACED. At the receiving end the buffer is a
//! *landing* ([`Landings`]), at the sending end a *target* ([`Targets`]). Positions are exact: a buffer stands for the
//! bytes from the position at which its ring was empty. The sender uses the buffer only if it has announced no byte
//! beyond that position. The receiver's own device reads into the buffer if the sender lends memory (a *loan*) from
//! that position on (P97). `pump.rs` posts the WRITEs, `get.rs` the READs, and `bulk.rs` has the queue pair.

use crate::fabric::layout::MAX_STREAMS;
use crate::fabric::ready::ReadyQueue;
use crate::fabric::remote::bulk::placed;
use crate::fabric::remote::engine::Engine;
use crate::fabric::remote::qp::{Completed, Key, QueuePair};
use crate::fabric::remote::record::{Memory, Serial, Withdrawal};
use crate::fabric::remote::shared::{Retired, Shared};
use crate::fabric::remote::stream::{State, Stream};
use crate::fabric::remote::{Breach, Fault, Local, SERVICE};

/// Memory of the local program into which a waiting receive call wants its bytes.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// The address of its first byte.
    pub address: u64,
    /// The length in bytes.
    pub length: u32,
    /// The keys of its registration.
    pub key: Key,
}

/// The stage of a transfer into a buffer of the local program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// ADVERT is to be sent.
    Untold,
    Told,
    /// WITHDRAW was sent, and the peer will answer.
    Withdrawn,
    /// The peer's device writes no bytes to the buffer: the peer does not know of the buffer, or lends memory instead.
    /// This end's device may READ from the lent memory into the buffer (`get.rs`).
    Own,
}

/// A buffer of the local program, while the program waits with it.
#[derive(Clone, Copy, Debug)]
struct Landing {
    advert: Memory,
    /// The key of the buffer for this end's READs.
    key: u32,
    stage: Stage,
    /// The bytes of READs posted into the buffer, and how many of these bytes have arrived.
    asked: u64,
    come: u64,
    /// Whether no more READs are posted into the buffer.
    is_ending: bool,
}

/// The state of a local program's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landed {
    /// The transfer has not ended.
    Waits,
    /// The transfer has ended, and the peer's device has written this many bytes into the buffer. The ring counts them
    /// as its next bytes, although it does not have them.
    Over(u64),
    /// The transfer has ended as for `Over`, but this end's device has read the bytes into the buffer.
    Read(u64),
}

/// The receiving side of direct transfers. At most one buffer is open.
#[derive(Debug, Default)]
pub(super) struct Landings {
    open: Option<Landing>,
    over: Option<(Serial, Landed)>,
    /// The serial of an advert that has ended here, but that the peer will still answer.
    owed: Option<Serial>,
    /// The withdrawal that is to be sent.
    pub withdrawal: Option<Withdrawal>,
}

impl Landings {
    /// Returns whether an advert is open or unanswered, so that no other can be made.
    pub(super) fn is_busy(&self) -> bool {
        self.open.is_some() || self.owed.is_some()
    }

    /// Returns whether the peer may still answer an advert.
    pub(super) fn may_be_answered(&self) -> bool {
        self.open.is_some_and(|landing| landing.stage != Stage::Own) || self.owed.is_some()
    }

    /// Begins an advert. It is sent to the peer later.
    pub(super) fn begin(&mut self, advert: Memory, key: u32) {
        self.open = Some(Landing {
            advert,
            key,
            stage: Stage::Untold,
            asked: 0,
            come: 0,
            is_ending: false,
        });
    }

    fn in_stage(&self, stage: Stage) -> Option<Memory> {
        self.open.filter(|l| l.stage == stage).map(|l| l.advert)
    }

    fn put_stage(&mut self, stage: Stage) {
        if let Some(landing) = &mut self.open {
            landing.stage = stage;
        }
    }

    /// Returns the advert that has to be sent.
    pub(super) fn untold(&self) -> Option<Memory> {
        self.in_stage(Stage::Untold)
    }

    pub(super) fn on_told(&mut self) {
        self.put_stage(Stage::Told);
    }

    pub(super) fn on_withdrawal_told(&mut self) {
        self.withdrawal = None;
        self.put_stage(Stage::Withdrawn);
    }

    fn close(&mut self, landed: Landed) {
        if let Some(landing) = self.open.take() {
            self.over = Some((landing.advert.serial, landed));
        }
    }

    /// Ends the advert because bytes have come by the ring. The peer has not used the advert, and never will.
    pub(super) fn on_ring(&mut self) {
        self.owed = self
            .owed
            .or(self.in_stage(Stage::Withdrawn).map(|advert| advert.serial));
        self.close(Landed::Over(0));
        self.withdrawal = None;
    }

    /// Records a loan for the bytes that the buffer is for. The peer will not use the advert. This end's device reads
    /// into the buffer, if the program still waits with it.
    pub(super) fn on_loan(&mut self) {
        match self.open.map(|landing| landing.stage) {
            Some(Stage::Untold | Stage::Told) if self.withdrawal.is_none() => self.put_stage(Stage::Own),
            Some(Stage::Own) => {}
            _ => self.on_ring(),
        }
    }

    /// Returns the part of the buffer for a READ of the bytes from `position` on, and its local key. `None` if those
    /// bytes go into the ring.
    pub(super) fn spot(&self, position: u64) -> Option<(Memory, u32)> {
        let landing = self.open.filter(|l| l.stage == Stage::Own && !l.is_ending)?;
        let rest = landing.advert.from(landing.asked);
        (rest.position == position && rest.length > 0).then_some((rest, landing.key))
    }

    /// Records a posted READ of `bytes` bytes into the [spot](Self::spot).
    pub(super) fn on_asked(&mut self, bytes: u64) {
        if let Some(landing) = &mut self.open {
            landing.asked += bytes;
        }
    }

    /// Records that `bytes` bytes of a READ have come into the buffer of advert `serial`.
    pub(super) fn on_come(&mut self, serial: Serial, bytes: u64) {
        if let Some(landing) = self.open.as_mut().filter(|l| l.advert.serial == serial) {
            landing.come += bytes;
        }
    }

    /// If all READs into the buffer have completed and no more follow, ends the transfer and returns the bytes in the
    /// buffer; otherwise `None`. `has_more` tells whether the loan has more bytes to read.
    pub(super) fn end_own(&mut self, has_more: bool) -> Option<u64> {
        let landing = self.open.filter(|l| l.stage == Stage::Own && l.asked == l.come)?;
        let come = landing.come;
        let is_full = come == u64::from(landing.advert.length);
        let is_over = landing.is_ending || is_full || come > 0 && !has_more;
        if is_over {
            self.close(Landed::Read(come));
        }
        is_over.then_some(come)
    }

    /// Processes PLACED. Returns the direction's new tail, or `None` if the tail does not move.
    pub(super) fn on_placed(&mut self, serial: Serial, tail: u64, window: u64) -> Result<Option<u64>, Breach> {
        let Some(Landing { advert, stage, .. }) = self.open.filter(|l| l.advert.serial == serial) else {
            // The advert has ended here before PLACED came.
            self.owed = self.owed.filter(|owed| *owed != serial);
            return Ok(None);
        };
        if stage == Stage::Own || !(advert.position..=advert.end().min(window)).contains(&tail) {
            return Err(Breach::Advert);
        }
        let bytes = tail - advert.position;
        self.close(Landed::Over(bytes));
        self.withdrawal = None;
        Ok((bytes > 0).then_some(tail))
    }

    /// Withdraws an advert, because the program waits no longer. If the peer knows of the advert, PLACED ends it; with
    /// `is_final` the withdrawal itself ends it. If this end's device reads into the buffer, the transfer ends when the
    /// bytes of all posted READs have [come](Self::end_own).
    fn withdraw(&mut self, serial: Serial, is_final: bool) {
        let Some(Landing { advert, stage, .. }) = self.open.filter(|l| l.advert.serial == serial) else {
            return;
        };
        match stage {
            Stage::Untold => self.close(Landed::Over(0)),
            Stage::Told | Stage::Withdrawn => {
                self.withdrawal = Some(Withdrawal {
                    serial,
                    position: advert.position,
                    is_final,
                });
                if is_final {
                    self.close(Landed::Over(0));
                }
            }
            Stage::Own => self.end_asking(),
        }
    }

    fn end_asking(&mut self) {
        if let Some(landing) = &mut self.open {
            landing.is_ending = true;
        }
    }

    /// Ends an advert whose queue pair is given up: no more bytes will be placed or read. Returns how many bytes READs
    /// have brought into the buffer.
    pub(super) fn lapse(&mut self) -> u64 {
        self.owed = None;
        let Some(Landing { advert, come, .. }) = self.open else {
            return 0;
        };
        self.withdraw(advert.serial, true);
        // The transfer is still open only if this end's device reads into the buffer.
        self.close(Landed::Read(come));
        come
    }

    /// Ends the advert because the peer has closed the stream, and will not answer.
    pub(super) fn on_left(&mut self) {
        match self.open.map(|landing| landing.stage) {
            // Posted READs may still bring bytes.
            Some(Stage::Own) => self.end_asking(),
            _ => self.on_ring(),
        }
        self.owed = None;
    }

    pub(super) fn look(&self, serial: Serial) -> Landed {
        match self.over {
            Some((over, landed)) if over == serial => landed,
            _ if self.open.is_some_and(|l| l.advert.serial == serial) => Landed::Waits,
            _ => Landed::Over(0),
        }
    }
}

/// Memory of the local program that stands for bytes of the mirror. The mirror itself does not have these bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    /// The first position that the memory stands for, and the position behind the last.
    pub from: u64,
    pub until: u64,
    /// The address of the byte at `from`.
    pub address: usize,
    /// The local key of the memory, if this end's device writes it into a buffer of the peer's program. `None` if the
    /// peer's device reads the memory (`get.rs`).
    pub key: Option<u32>,
    /// Whether the rest of the bytes has to go by the ring.
    pub is_needed: bool,
}

impl Source {
    /// Returns the `len` bytes at `address` as a source for the bytes from position `from` on.
    pub(super) fn new(from: u64, address: usize, len: u64, key: Option<u32>) -> Self {
        Self {
            from,
            until: from.saturating_add(len),
            address,
            key,
            is_needed: false,
        }
    }

    /// Returns whether this memory of the local program is offered to the peer's device, which reads it. If false, this
    /// end's device writes the memory into a buffer of the peer's program.
    pub(super) fn is_offered(&self) -> bool {
        self.key.is_none()
    }

    pub(super) fn covers(&self, position: u64) -> bool {
        (self.from..self.until).contains(&position)
    }
}

/// The PLACED that answers an advert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub serial: Serial,
    pub tail: u64,
}

/// The sending side of direct transfers.
#[derive(Debug, Default)]
pub(super) struct Targets {
    open: Option<Memory>,
    /// The bytes that were posted to the open advert, and that PLACED has not reported.
    pub written: u64,
    /// The last advert that was answered by PLACED.
    answered: Option<Serial>,
    /// While this is set, the direction waits until the peer's program has read all bytes before this position.
    held: Option<u64>,
    /// The number of adverts that the peer has sent.
    pub adverts: u32,
    pub source: Option<Source>,
}

impl Targets {
    fn on_advert(&mut self, advert: Memory, told: u64, is_lent: bool) -> Result<(), Breach> {
        if !advert.is_possible() || advert.position > told || self.written > 0 {
            return Err(Breach::Advert);
        }
        self.adverts = self.adverts.wrapping_add(1);
        // No buffer is used while memory is lent: the bytes go by the loan, and the record SOURCE, which announces the
        // loan, makes all adverts before it void.
        let is_next = advert.position == told && !is_lent;
        self.open = (is_next && self.held.is_none_or(|held| held <= told)).then_some(advert);
        Ok(())
    }

    /// Returns whether the direction has to wait for the peer's program, which has read up to `head`.
    pub(super) fn holds(&mut self, head: u64) -> bool {
        self.held = self.held.filter(|held| *held > head);
        self.held.is_some()
    }

    /// Returns up to which position the mirror has the bytes from `position` on; at most `until`.
    pub(super) fn mirrored(&self, position: u64, until: u64) -> u64 {
        match self.source {
            Some(source) if position < source.until => until.min(source.from.max(position)),
            _ => until,
        }
    }

    /// Returns the advert for the byte at position `told`, and how many bytes were written to its buffer.
    pub(super) fn at(&mut self, told: u64) -> Option<(Memory, u64)> {
        self.open = self.open.filter(|advert| advert.position == told);
        self.open.map(|advert| (advert, self.written))
    }

    /// Ends the open advert. The returned PLACED reports the written bytes to the peer, and the direction goes on
    /// behind them.
    pub(super) fn finish(&mut self) -> Option<Answer> {
        let advert = self.open.take()?;
        let tail = advert.position + std::mem::take(&mut self.written);
        let serial = advert.serial;
        self.answered = Some(serial);
        if tail > advert.position {
            self.held = Some(tail);
        }
        Some(Answer { serial, tail })
    }

    /// Processes a withdrawal. Returns the answer to the peer, if one is due. For a final withdrawal also returns the
    /// position from which the direction has to send again, if any.
    fn on_withdrawal(&mut self, withdrawal: Withdrawal) -> (Option<Answer>, Option<u64>) {
        let (serial, tail) = (withdrawal.serial, withdrawal.position);
        let is_open = self.open.is_some_and(|advert| advert.serial == serial);
        if withdrawal.is_final {
            if is_open {
                self.drop_open();
            }
            let again = self.answered == Some(serial) && self.held.is_some_and(|held| held > tail);
            if again {
                self.held = None;
            }
            return (None, again.then_some(tail));
        }
        if is_open {
            return (self.finish(), None);
        }
        if self.answered == Some(serial) {
            return (None, None);
        }
        self.answered = Some(serial);
        (Some(Answer { serial, tail }), None)
    }

    /// Drops the open advert, whose buffer must not be written any more.
    pub(super) fn drop_open(&mut self) {
        self.open = None;
        self.written = 0;
    }
}

impl<Q: QueuePair> Engine<Q> {
    pub(super) fn poll_bulk<L: Local>(&mut self, g: &Shared<Q, L>) -> Result<usize, Fault> {
        let Some(mut bulk) = self.means.bulk.take() else {
            return Ok(0);
        };
        let (mut has_room, mut is_malformed, mut breach) = (false, false, None);
        let polled = bulk.qp.poll(&mut |event| match event {
            Completed::Room => has_room = true,
            Completed::Received(bytes) => match placed(bytes) {
                Some((mine, answer)) => breach = breach.or(self.on_placed(g, mine, answer).err()),
                // On iWARP the connecting side first sends an empty message.
                None => is_malformed |= !bytes.is_empty(),
            },
            Completed::Read => match bulk.reads.pop_front() {
                Some(asked) => self.on_read(g, asked),
                None => is_malformed = true,
            },
            Completed::Written { .. } | Completed::Probed => is_malformed = true,
        });
        if has_room {
            is_malformed |= bulk.on_room(|theirs| g.dirty.push(theirs)).is_err();
        }
        self.means.bulk = Some(bulk);
        self.means.is_lost |= is_malformed || polled.is_err();
        match breach {
            Some(breach) => Err(breach.into()),
            None => Ok(polled.unwrap_or(0)),
        }
    }

    /// Gives the bulk queue pair up. Adverts of local programs end. Bytes for adverts of the peer's programs go by the
    /// ring.
    #[cold]
    pub(super) fn drop_bulk<L: Local>(&mut self, g: &Shared<Q, L>) {
        self.means.is_lost = false;
        let Some(bulk) = self.means.bulk.take() else {
            return;
        };
        self.means.sender.counts.lost += 1;
        let mut under_way = Vec::new();
        for mine in 0..MAX_STREAMS {
            let (Some(s), Some(block)) = (self.streams.get(mine), g.block_mine(mine)) else {
                continue;
            };
            s.out.targets.drop_open();
            let wake = s.inc.lapse(block);
            g.touch(s.theirs);
            g.tell_here(&mut self.means.after, wake, mine);
            // The bytes of a loan for which no SOURCE was sent go by the ring.
            if s.out.loans.untold.take().is_some() {
                self.means.need_source(g, s, mine);
            }
            if s.inc.takings.is_open() {
                s.inc.takings.stop();
                // Posted READs may bring bytes until the queue pair has ended.
                if s.is_read_into() {
                    under_way.push(mine);
                }
                self.go_on(g, mine);
            }
        }
        let qp = bulk.qp;
        self.retired.push(Retired { qp, under_way });
        g.retired_unseen.publish(true);
        g.ring_if_asleep(&mut self.means.after, SERVICE);
    }

    /// Announces a buffer with which the local program waits while the stream's ring is empty. `None` if the ring is
    /// not empty, or the buffer cannot be used.
    pub(super) fn advertise<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, buffer: Buffer) -> Option<Memory> {
        let Buffer { address, length, key } = buffer;
        let block = g.block_mine(mine)?;
        let bulk = self.means.bulk.as_mut()?;
        let may_be_answered = |s: &mut Stream| s.inc.landings.may_be_answered();
        bulk.landings
            .retain(|other| self.streams.get(*other).is_some_and(may_be_answered));
        let s = self.streams.get(mine)?;
        let (State::Open, Some(theirs), false) = (s.state, s.theirs, s.peer_left || s.closing) else {
            return None;
        };
        let room = s.inc.room_to_land(block).min(length.into()) as u32;
        // An open loan makes the advert void, so the buffer is for this end's device alone.
        let is_void = s.inc.takings.is_open();
        if room < g.tuning.direct_min || !is_void && bulk.landings.len() >= bulk.most_landings {
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
        bulk.landings.push(mine);
        g.dirty.push(theirs);
        Some(advert)
    }

    /// Withdraws an advert, because the local program waits no longer.
    pub(super) fn withdraw<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, serial: u32) {
        let Some(s) = self.streams.get(mine) else {
            return;
        };
        s.inc.landings.withdraw(serial, false);
        g.touch(s.theirs);
        self.go_on(g, mine);
    }

    fn on_placed<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, answer: Answer) -> Result<(), Breach> {
        // PLACED may come late. The number may belong to another stream by then, which has other adverts.
        let (Some(s), Some(block)) = (self.streams.get(mine), g.block_mine(mine)) else {
            return Ok(());
        };
        let wake = s.inc.on_placed(block, answer.serial, answer.tail)?;
        g.tell_here(&mut self.means.after, wake, mine);
        Ok(())
    }

    pub(super) fn on_advert<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, advert: Memory) -> Result<(), Breach> {
        let s = self.streams.get(mine);
        let s = s.filter(|s| s.state == State::Open && !s.peer_left && s.theirs.is_some());
        // If the stream or the bulk queue pair is missing here, CLOSED or BULK-GONE informs the peer.
        let (Some(s), Some(_)) = (s, &self.means.bulk) else {
            return Ok(());
        };
        // An advert at or before the first position of the ring is ignored: the peer may not have received the SWITCH
        // to this ring.
        if advert.position <= s.out.start {
            return Ok(());
        }
        s.out.targets.on_advert(advert, s.out.told, s.out.loans.is_open())?;
        // A program that has a large piece to send may wait for this advert.
        self.means.wake_sender(g, &s.out, mine, s.theirs);
        g.touch(s.theirs);
        Ok(())
    }

    pub(super) fn on_withdrawal<L: Local>(
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
        // The position of a withdrawal was announced before the advert was made.
        if withdrawal.position > s.out.told {
            return Err(Breach::Advert);
        }
        let (answer, again) = s.out.targets.on_withdrawal(withdrawal);
        if let Some(position) = again {
            s.out.go_back(position)?;
        }
        if let (Some(answer), Some(bulk)) = (answer, &mut self.means.bulk) {
            if answer.tail > s.out.told {
                s.out.on_direct(answer.tail);
            }
            self.means.is_lost |= bulk.answer(theirs, answer).is_err();
        }
        g.dirty.push(theirs);
        Ok(())
    }

    /// Returns how many bytes of the local program's memory can be written at once to the buffer with which the peer's
    /// program waits. Returns 0 if no program waits, or if other bytes have to go first.
    pub(super) fn wanted<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) -> u64 {
        let s = self.streams.of_peer(theirs).map(|(_, s)| s);
        let s = s.filter(|s| s.state == State::Open && !s.out.stopped);
        let (Some(s), Some(block)) = (s, g.block_mirror(theirs)) else {
            return 0;
        };
        let is_free = s.out.targets.source.is_none() && !s.out.loans.is_open();
        let is_at_end = block.tail() == s.out.told && s.out.aside.is_none() && is_free;
        match s.out.targets.at(s.out.told) {
            Some((advert, 0)) if is_at_end && self.means.bulk.is_some() => advert.length.into(),
            _ => 0,
        }
    }

    /// Lends program memory as the source of the bytes that the producer commits next, up to `source.until`. The mirror
    /// does not get these bytes. Returns false if the mirror has to get them.
    pub(super) fn lend_source<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32, source: Source) -> bool {
        let is_wanted = self.wanted(g, theirs) >= source.until - source.from;
        let s = self.streams.of_peer(theirs).filter(|_| is_wanted);
        let s = s.filter(|(_, s)| s.out.told == source.from);
        s.map(|(_, s)| s.out.targets.source = Some(source)).is_some()
    }

    /// Copies the lent bytes into the mirror, except those that the peer's program is known to have read. Returns how
    /// many of them the peer may still take from the program's memory, because WRITEs or READs of them are under way.
    /// `None` if no memory was lent.
    ///
    /// # Safety
    /// The lent memory can be read.
    pub(super) unsafe fn take_source<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) -> Option<u64> {
        let (_, s) = self.streams.of_peer(theirs)?;
        let source = s.out.targets.source.take()?;
        s.out.loans.untold = None;
        // This includes bytes that the peer's device has read and its program has not. A process that takes over the
        // peer's end of the connection may ask for them (P75).
        let from = s.out.head.clamp(source.from, source.until);
        let at = std::ptr::with_exposed_provenance::<u8>(source.address + (from - source.from) as usize);
        // SAFETY: by this function's contract.
        let rest = unsafe { std::slice::from_raw_parts(at, (source.until - from) as usize) };
        if let Some(block) = g.block_mirror(theirs) {
            s.out.look(block);
        }
        if let Some(ring) = s.out.ring_at(from) {
            // SAFETY: the bytes are committed and the peer has not confirmed them, so the producer does not write
            // there. The part of the mirror that the device reads begins behind them.
            unsafe { g.mirror.area().copy_in(ring, from, rest) };
        }
        let posted = match source.is_offered() {
            // The peer's device may still read from an open loan.
            true => s.out.loans.reach().unwrap_or(from),
            false => s.out.told + s.out.targets.at(s.out.told).map_or(0, |(_, written)| written),
        };
        g.dirty.push(theirs);
        Some(posted.saturating_sub(from).min(rest.len() as u64))
    }
}
