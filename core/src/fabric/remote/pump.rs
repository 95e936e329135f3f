//! Decides what is sent, in this order: messages of the side channel; then the records of the streams that have
//! something to send, in turns; then a grant if one is due. Records in the message that is being collected count as
//! sent (`sender.rs`). So when the queue pair is full, or credits are used up, nothing has to be undone. The message
//! waits, and the stream whose turn it was goes on from there.
//!
//! A stream's turn sends the records of its local consumer ([`Means::control`]), then the records of its local producer
//! ([`Means::data`]). Some bytes bypass the rings. Bytes for an *advert*, a buffer with which the peer's program waits,
//! are written straight into that buffer, and PLACED follows them ([`Means::direct`]). Bytes of a *loan*, memory of the
//! local program, are read by the peer's device between SOURCE and TAKEN. `shared.rs` defines chunk, `stream.rs` head
//! and tail.

use std::sync::atomic::Ordering::SeqCst;

use crate::fabric::ready::ReadyQueue;
use crate::fabric::remote::engine::{Engine, Means};
use crate::fabric::remote::get::Takings;
use crate::fabric::remote::qp::{QueuePair, Write};
use crate::fabric::remote::record::{DATA_BYTES, HEADER_BYTES, Record};
use crate::fabric::remote::sender::{Halt, unless_blocked};
use crate::fabric::remote::shared::{Shared, Target, of_region};
use crate::fabric::remote::stream::{Next, Outgoing, State, Stream};
use crate::fabric::remote::{Breach, ENGINE, Fault, Local};
use crate::fabric::ring::{DirectionBlock, EndMark, Offer};
use crate::ids::Vqpn;
use crate::wire::{MAX_MESSAGE, Message};

/// The longest piece of a direct transfer in bytes.
const PIECE: u64 = 1 << 20;

/// How a stream's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// The stream has nothing more to send.
    Done,
    /// The stream has more to send, but other streams are next.
    More,
    /// The stream has more to send, but has to wait for the peer, mostly for room in its ring.
    Full,
}

impl<Q: QueuePair> Engine<Q> {
    /// Sends messages, the streams' records and a grant, as far as credits and the send queue allow.
    pub(super) fn pump<L: Local>(&mut self, g: &Shared<Q, L>) -> Result<(), Fault> {
        let sent = self.messages(g).and_then(|()| self.turns(g));
        unless_blocked(sent)?;
        self.means.sender.finish(&g.qp)
    }

    fn turns<L: Local>(&mut self, g: &Shared<Q, L>) -> Result<(), Halt> {
        loop {
            let next = self.current.take().or_else(|| {
                self.sweep.pop(&g.dirty).or_else(|| {
                    self.sweep.begin(&g.dirty);
                    self.sweep.pop(&g.dirty)
                })
            });
            let Some(theirs) = next else {
                return Ok(());
            };
            match self.serve(g, theirs) {
                Ok(Turn::Done | Turn::Full) => {}
                Ok(Turn::More) => g.dirty.push(theirs),
                Err(halt) => {
                    // The stream goes first when there is room again, so that no stream is passed over for ever.
                    self.current = Some(theirs);
                    return Err(halt);
                }
            }
        }
    }

    /// Sends the messages of the side channel, each behind the state of its stream that the peer needs first.
    fn messages<L: Local>(&mut self, g: &Shared<Q, L>) -> Result<(), Halt> {
        let Some(mut outbox) = g.outbox.lock() else {
            // Only a signal handler fails to take this lock: it has interrupted its own thread while the thread queued
            // a message. The interrupted call sends the messages afterwards.
            return Ok(());
        };
        while let Some(message) = outbox.front() {
            if let Some(Vqpn(theirs)) = message.yours
                && let Some((mine, s)) = self.streams.of_peer(theirs)
            {
                s.inc.settle = true;
                self.means.control(g, s, mine, theirs)?;
            }
            let record = Record::Message { bytes: &message.bytes };
            self.means.sender.put(&g.qp, &record)?;
            outbox.pop_front();
        }
        Ok(())
    }

    /// Takes the turn of a stream.
    fn serve<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) -> Result<Turn, Halt> {
        let word = g.tells.get(theirs as usize).map_or(0, |cell| cell.swap(0, SeqCst));
        if word != 0
            && let Err(halt) = self.means.sender.put(&g.qp, &Record::Tell { theirs, word })
        {
            g.add_tell(theirs, word);
            return Err(halt);
        }
        let paired = self.streams.of_peer(theirs);
        let Some((mine, s)) = paired.filter(|(_, s)| s.state == State::Open) else {
            return Ok(Turn::Done);
        };
        self.means.control(g, s, mine, theirs)?;
        let turn = self.means.data(g, s, mine, theirs)?;
        if turn == Turn::More {
            return Ok(turn);
        }
        // Bytes before an end mark have to be sent to a peer that still reads. Bytes without an end mark need not be
        // sent: they go over TCP.
        let is_owed =
            turn == Turn::Full && !s.peer_left && g.block_mirror(theirs).is_some_and(DirectionBlock::has_ended);
        let closes = s.closing && !is_owed;
        if !closes {
            if s.inc.told.head == g.block_mine(mine).map_or(0, |b| b.head()) {
                return Ok(Turn::Done);
            }
            if self.means.sender.is_empty() {
                self.lazy.0.push(theirs);
                if g.owes.ask() {
                    g.local.settle_later();
                }
                return Ok(Turn::Done);
            }
        }
        // The head is sent even if the stream is not closed, since a message is sent anyway.
        s.inc.settle = true;
        self.means.control(g, s, mine, theirs)?;
        if closes {
            let mut buf = [0; MAX_MESSAGE];
            let closed = Message::Closed { yours: Vqpn(theirs) };
            let bytes = closed.encode(&mut buf).map_err(|_| Breach::Message)?;
            self.means.sender.put(&g.qp, &Record::Message { bytes })?;
            s.state = State::Left;
            self.streams.unlink(mine);
            self.means.after.closed.push(Vqpn(mine));
            self.change_taking(g, mine, |inc| inc.takings.stop());
        }
        Ok(Turn::Done)
    }
}

impl<Q: QueuePair> Means<Q> {
    /// Sends the records of the local consumer of a stream: rings on offer with the keys of their memory, heads, flags,
    /// a stop. Also sends answers to CONFIRM, adverts and withdrawals of buffers with which the program waits, and
    /// TAKEN for memory that the peer lends.
    fn control<L: Local>(&mut self, g: &Shared<Q, L>, s: &mut Stream, mine: u32, theirs: u32) -> Result<(), Halt> {
        let Some(block) = g.block_mine(mine) else {
            return Ok(());
        };
        let (inc, sender) = (&mut s.inc, &mut self.sender);
        // An advert is for the bytes that follow the head, so the peer needs the head first.
        inc.settle |= inc.landings.untold().is_some();
        let view = block.watch_consumer(ENGINE.0);
        let taken = inc.takings.answer(inc.tail, view.head);
        // The head is sent with TAKEN, so that the peer does not keep bytes that were read.
        inc.settle |= taken.is_some();
        if view.offer != inc.told.offer {
            let offer = Offer::unpack(view.offer);
            for index in offer
                .into_iter()
                .flat_map(|offer| of_region(offer.region, g.tuning.chunk_log2))
            {
                if let Some(chunk) = self.chunks.mine.get_mut(index).filter(|chunk| !chunk.is_announced) {
                    let Target { rkey, base } = chunk.target;
                    sender.put(&g.qp, &Record::Chunk { index, rkey, base })?;
                    chunk.is_announced = true;
                }
            }
            let word = view.offer;
            sender.put(&g.qp, &Record::Offer { theirs, word })?;
            inc.told.offer = word;
            inc.offered = offer;
        }
        let head = view.head;
        let untold = head.saturating_sub(inc.told.head);
        let quarter = inc.ring.map_or(0, |ring| ring.len() as u64 / 4);
        if untold > 0 && (inc.settle || untold >= quarter) {
            sender.put(&g.qp, &Record::Head { theirs, head })?;
            inc.told.head = head;
        }
        inc.settle = false;
        if view.flags != inc.told.flags {
            let flags = view.flags;
            sender.put(&g.qp, &Record::Flags { theirs, flags })?;
            inc.told.flags = flags;
        }
        if view.stopped && !inc.told.stopped {
            sender.put(&g.qp, &Record::Stop { theirs })?;
            inc.told.stopped = true;
        }
        if inc.ack_due {
            // The end mark counts as one byte.
            let tail = inc.tail.saturating_add(inc.marked.into());
            sender.put(&g.qp, &Record::Ack { theirs, tail })?;
            inc.ack_due = false;
        }
        if let Some(serial) = taken {
            let tail = inc.tail;
            sender.put(&g.qp, &Record::Taken { theirs, serial, tail })?;
            inc.takings = Takings::default();
        }
        if let Some(withdrawal) = inc.landings.withdrawal {
            sender.put(&g.qp, &Record::Withdraw { theirs, withdrawal })?;
            inc.landings.on_withdrawal_told();
        }
        if let Some(memory) = inc.landings.untold() {
            sender.put(&g.qp, &Record::Advert { theirs, memory })?;
            inc.landings.on_told();
        }
        Ok(())
    }

    /// Sends the records of the local producer of a stream: payload, switches of rings, the end mark. Sends at most
    /// `Tuning::piece` bytes of payload. Each piece goes from its place in the mirror to the same positions of the
    /// peer's ring, which may have another size.
    fn data<L: Local>(&mut self, g: &Shared<Q, L>, s: &mut Stream, mine: u32, theirs: u32) -> Result<Turn, Halt> {
        let Some(block) = g.block_mirror(theirs) else {
            return Ok(Turn::Done);
        };
        let out = &mut s.out;
        let view = out.look(block);
        if out.stopped {
            return Ok(Turn::Done);
        }
        // While a loan is open nothing is sent before TAKEN has come, which reports how far the peer has read. After
        // TAKEN the direction goes on once `take_source` has copied the rest of the bytes into the mirror.
        let is_lent = out.targets.source.is_some_and(|source| source.is_offered());
        if out.targets.holds(out.head) || out.loans.reach().is_some() || is_lent && !out.loans.is_open() {
            return Ok(Turn::Full);
        }
        self.tell_limited(g, out, theirs, view.limited)?;
        let area = g.mirror.area();
        let mut left = u64::from(g.tuning.piece.max(1));
        loop {
            if let Some(generation) = out.next_generation() {
                let position = out.told;
                let record = Record::Switch {
                    theirs,
                    generation,
                    position,
                };
                self.sender.put(&g.qp, &record)?;
                out.on_switched();
                // The open advert is dropped, since WRITEs for it on the bulk queue pair could arrive before this
                // record.
                out.targets.drop_open();
                continue;
            }
            if let Some(loan) = out.loans.untold {
                if loan.position == out.told && loan.end() <= out.window() {
                    self.sender.put(&g.qp, &Record::Source { theirs, memory: loan })?;
                    out.loans.on_told();
                    out.targets.drop_open();
                    return Ok(Turn::Full);
                }
                // SOURCE cannot be sent, so the loan is dropped. `direct` then makes the lending call put the bytes
                // into the mirror.
                out.loans.untold = None;
            }
            if let Some(turn) = self.direct(g, out, (mine, theirs), view.tail, &mut left) {
                return Ok(turn);
            }
            let next = out.next(view.tail).map(|next| Next {
                // Bytes that only the program's memory has, not the mirror, are left out.
                until: out.targets.mirrored(out.placed, next.until),
                ..next
            });
            let there = next.map_or(0, |next| next.until.saturating_sub(out.placed));
            let next = next.filter(|_| there > 0 && left > 0).and_then(|next| {
                let (at, len, chunk) = g.piece(&g.mirror, next.source, out.placed, there.min(left))?;
                Some((next, at, len, chunk))
            });
            let Some((next, at, len, from)) = next else {
                if out.placed == out.told {
                    break;
                }
                self.announce(g, out, theirs)?;
                continue;
            };
            let log2 = g.tuning.chunk_log2;
            let in_ring = (out.placed & (next.ring.len() as u64 - 1)) as usize;
            let to = next.ring.offset() + in_ring;
            let in_chunk = to & ((1 << log2) - 1);
            let target = self.chunks.theirs.get((to >> log2) as u32);
            let key = self.chunks.mirror.get(from);
            // A WRITE with an immediate needs no header, which may save a packet.
            let alone = g.limits.immediate && self.sender.is_empty() && out.placed == out.told;
            let header = (HEADER_BYTES + DATA_BYTES) as u64;
            let is_small = there <= u64::from(g.tuning.eager_max)
                && !(alone && g.limits.spills(there, header) && self.sender.has_credit());
            let (Some(target), Some(local), false) = (target, key, is_small) else {
                if key.is_none() && target.is_some() && !is_small {
                    self.after.register = Some(from);
                }
                self.announce(g, out, theirs)?;
                let want = there.min(left).min(u64::from(u16::MAX)) as usize;
                let want = want.min(self.sender.most_payload());
                let tail = out.placed + want as u64;
                let from = out.placed;
                // SAFETY: the bytes are committed and were not announced, so the producer does not write there.
                let fill = |to: &mut [u8]| unsafe { area.copy_out(next.source, from, to) };
                self.sender.put_data(&g.qp, theirs, tail, want, fill)?;
                (out.placed, out.told) = (tail, tail);
                left = left.saturating_sub(want as u64);
                continue;
            };
            // Each ring may wrap, and may lie in several chunks. So the WRITE is limited to bytes that are contiguous
            // in both.
            let there_too = (next.ring.len() - in_ring).min((1 << log2) - in_chunk);
            let len = len.min(there_too as u64);
            let whole = alone && len == there && self.sender.has_credit();
            let write = Write {
                from: at,
                local,
                len: len as u32,
                to: target.base.wrapping_add(in_chunk as u64),
                remote: target.rkey,
            };
            // SAFETY: the source is within the chunk, which was registered under the key.
            unsafe { self.sender.write(&g.qp, &write, whole.then_some(theirs)) }?;
            out.placed += len;
            left = left.saturating_sub(len);
            if whole {
                out.told = out.placed;
            }
        }
        let has_rest = out.told < view.tail;
        if has_rest && left == 0 {
            return Ok(Turn::More);
        }
        if has_rest {
            out.on_rest(view.tail);
            self.tell_limited(g, out, theirs, view.limited)?;
        } else if !out.end_told && EndMark::from_word(view.end).is_some() {
            let (end, tail) = (view.end as u8, view.tail);
            self.sender.put(&g.qp, &Record::End { theirs, end, tail })?;
            out.end_told = true;
        }
        let asks = out.told.saturating_add(out.end_told.into());
        if out.want_confirm && asks > out.asked {
            self.sender.put(&g.qp, &Record::Confirm { theirs })?;
            out.want_confirm = false;
            out.asked = asks;
        }
        Ok(if has_rest { Turn::Full } else { Turn::Done })
    }

    /// If bytes were written and not announced, sends a DATA record without payload for them.
    fn announce<L: Local>(&mut self, g: &Shared<Q, L>, out: &mut Outgoing, theirs: u32) -> Result<(), Halt> {
        if out.placed != out.told {
            self.sender.put_data(&g.qp, theirs, out.placed, 0, |_| true)?;
            out.told = out.placed;
        }
        Ok(())
    }

    /// Sends how often the window was too small, if that number has changed. The number is what the local producer has
    /// `counted`, plus how often bytes written aside, into a send buffer, found no room in the peer's ring.
    fn tell_limited<L: Local>(
        &mut self,
        g: &Shared<Q, L>,
        out: &mut Outgoing,
        theirs: u32,
        counted: u32,
    ) -> Result<(), Halt> {
        let count = counted.wrapping_add(out.stalls);
        if count != out.limited_told {
            self.sender.put(&g.qp, &Record::Limited { theirs, count })?;
            out.limited_told = count;
        }
        Ok(())
    }

    /// Writes as many of the bytes up to `tail` as possible, at most `left`, straight from the mirror or the local
    /// program's memory into a buffer with which the peer's program waits (P90–P95). Positions advance only when all
    /// WRITEs are posted with PLACED behind them, so nothing has to be undone before that. Returns how the stream's
    /// turn ends; `None` if the next bytes go by the ring. `(mine, theirs)` are this end's number of the stream and the
    /// peer's.
    fn direct<L: Local>(
        &mut self,
        g: &Shared<Q, L>,
        out: &mut Outgoing,
        (mine, theirs): (u32, u32),
        tail: u64,
        left: &mut u64,
    ) -> Option<Turn> {
        let told = out.told;
        while let (Some((advert, written)), Some(bulk)) = (out.targets.at(told), &mut self.bulk) {
            let is_next = out.placed == told && out.aside.is_none();
            let next = out.next(tail).filter(|_| is_next);
            let from = told + written;
            let pending = next.map_or(0, |next| next.until.min(advert.end()).saturating_sub(from));
            let source = out.targets.source.filter(|source| source.covers(from));
            if written == 0 && pending == 0 && is_next {
                // The advert stays open, since bytes for it may still come.
                return None;
            }
            let is_worth_it = written > 0 || source.is_some() || pending >= u64::from(g.tuning.direct_min);
            let next = next.filter(|_| pending > 0 && is_worth_it);
            let piece = next.and_then(|next| match source {
                Some(source) => {
                    let at = std::ptr::with_exposed_provenance(source.address + (from - source.from) as usize);
                    // Memory that was lent to the peer's device has no key for this end's device. Bytes that the peer
                    // has not read go by the mirror.
                    Some((at, pending.min(PIECE).min(source.until - from), source.key?))
                }
                None => {
                    let most = out.targets.mirrored(from, from + pending.min(PIECE)) - from;
                    let (at, len, chunk) = g.piece(&g.mirror, next.source, from, most)?;
                    let key = self.chunks.mirror.get(chunk);
                    if key.is_none() {
                        self.after.register = Some(chunk);
                    }
                    Some((at.cast_const(), len, key?))
                }
            });
            if let Some((at, len, local)) = piece {
                if *left == 0 {
                    return Some(Turn::More);
                }
                let write = Write {
                    from: at,
                    local,
                    len: len as u32,
                    to: advert.address + written,
                    remote: advert.rkey,
                };
                // SAFETY: the source lies within a chunk of the mirror, or within the program's memory. Either is
                // registered under the key.
                let is_posted = unsafe { bulk.write(theirs, &write) };
                self.is_lost |= is_posted.is_err();
                if is_posted != Ok(true) {
                    return Some(Turn::Full);
                }
                out.targets.written += len;
                *left -= len.min(*left);
                if len < pending {
                    continue;
                }
            } else if written == 0 {
                break;
            }
            // No more WRITEs go to this buffer, so PLACED follows.
            if let Some(answer) = out.targets.finish() {
                out.on_direct(answer.tail);
                self.is_lost |= bulk.answer(theirs, answer).is_err();
            }
            return Some(Turn::Full);
        }
        out.targets.drop_open();
        // The bytes go by the ring, if the mirror has them. Otherwise the lending call has to put them into the mirror.
        let position = out.placed;
        let source = out.targets.source.as_mut();
        let source = source.filter(|s| s.covers(position) && position < tail)?;
        if !std::mem::replace(&mut source.is_needed, true) {
            self.wake_sender(g, out, mine, Some(theirs));
        }
        Some(Turn::Full)
    }
}
