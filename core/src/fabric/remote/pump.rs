//! What is sent, and in which order: messages of the side channel first, then the streams that have something
//! to send, in turns, then a grant if one is due. Records are collected in one message until that is
//! full or there is nothing more to add; what was put there counts as sent, and goes out before any later
//! message. So when the queue pair is full, or credits are used up, nothing has to be undone: the message waits,
//! and the stream whose turn it was goes on from there.

use std::sync::atomic::Ordering::SeqCst;

use super::chunks::{Chunks, of_region};
use super::credits::Credits;
use super::end::{Counts, ENGINE, Local};
use super::engine::Engine;
use super::fault::{Breach, Fault};
use super::ground::Ground;
use super::qp::{Limits, PostError, QueuePair};
use super::record::{self, Builder, HEADER_BYTES, MESSAGE_BYTES, Record};
use super::stream::{State, Stream};
use crate::fabric::ready::ReadyQueue;
use crate::fabric::ring::DirectionBlock;
use crate::fabric::ring::carry::unpack_offer;
use crate::ids::Vqpn;
use crate::wire::{MAX_MESSAGE, Message};

/// Whether there was room for what was to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
enum Put {
    Done,
    /// Neither a credit nor room in the send queue, one of the two: to be tried again when there is.
    Blocked,
}

/// How a stream's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// It has nothing more to send.
    Done,
    /// It has, but others are next.
    More,
    /// It has, but the peer's ring has no room for it.
    Full,
    Blocked,
}

/// Goes on only if there was room.
macro_rules! put {
    ($e:expr, $blocked:expr) => {
        if $e? == Put::Blocked {
            return Ok($blocked);
        }
    };
}

// After the macro, which it uses.
mod data;

/// The message being collected, and what it takes to send it.
pub(super) struct Sender {
    staged: Builder,
    credits: Credits,
    is_full: bool,
    pub counts: Counts,
}

impl Sender {
    pub fn new(limits: &Limits) -> Self {
        Self {
            staged: Builder::new(limits.buffer_bytes as usize),
            credits: Credits::new(limits.receive_buffers),
            is_full: false,
            counts: Counts::default(),
        }
    }

    /// Only completions can bring what is missing.
    pub fn is_short(&self) -> bool {
        self.is_full || !self.credits.can_send()
    }

    /// Grows with all that is posted, with what found the queue full, and with doubts.
    #[inline]
    pub fn done(&self) -> u64 {
        let counts = &self.counts;
        counts
            .sends
            .wrapping_add(counts.writes)
            .wrapping_add(counts.full)
            .wrapping_add(counts.doubts)
    }

    pub fn on_room(&mut self) {
        self.is_full = false;
    }

    pub fn on_received(&mut self) -> Result<(), Breach> {
        self.counts.received += 1;
        self.credits.on_received()
    }

    pub fn on_grant(&mut self, grant: u16) -> Result<(), Breach> {
        self.credits.on_grant(grant)
    }

    /// What posting came to.
    fn posted(&mut self, result: Result<(), PostError>) -> Result<Put, Fault> {
        match result {
            Ok(()) => Ok(Put::Done),
            Err(PostError::Full) => {
                self.is_full = true;
                self.counts.full += 1;
                Ok(Put::Blocked)
            }
            Err(PostError::Down) => Err(Fault::Down(super::qp::Down(0))),
        }
    }

    /// Sends what was collected.
    fn flush(&mut self, qp: &impl QueuePair) -> Result<Put, Fault> {
        if self.staged.is_empty() {
            return Ok(Put::Done);
        }
        if self.is_full {
            return Ok(Put::Blocked);
        }
        if !self.credits.can_send() {
            self.counts.no_credit += 1;
            return Ok(Put::Blocked);
        }
        let posted = qp.send(&[self.staged.finish(self.credits.grant())]);
        let put = self.posted(posted)?;
        if put == Put::Done {
            self.credits.on_sent();
            self.counts.sends += 1;
            self.staged.clear();
        }
        Ok(put)
    }

    /// Gives credits back if that is due and nothing else has done it.
    fn grant(&mut self, qp: &impl QueuePair) -> Result<(), Fault> {
        if self.is_full || !self.credits.must_grant() {
            return Ok(());
        }
        let posted = qp.send(&[&record::bare(self.credits.grant())]);
        if self.posted(posted)? == Put::Done {
            self.credits.on_sent();
            self.counts.sends += 1;
            self.counts.bare_grants += 1;
        }
        Ok(())
    }

    /// Adds a record, after sending what is there if need be.
    fn put(&mut self, qp: &impl QueuePair, record: &Record<'_>) -> Result<Put, Fault> {
        if self.staged.push(record) {
            return Ok(Put::Done);
        }
        put!(self.flush(qp), Put::Blocked);
        // A message's length is checked when it is queued; every other record fits an empty one.
        if !self.staged.push(record) {
            return Err(Breach::Message.into());
        }
        Ok(Put::Done)
    }
}

impl Engine {
    /// Sends what can be sent.
    pub fn pump<Q: QueuePair, L: Local>(&mut self, g: &Ground<Q, L>) -> Result<(), Fault> {
        self.take_closing(g);
        if self.messages(g)? == Put::Done {
            self.turns(g)?;
        }
        let _ = self.sender.flush(&g.qp)?;
        self.sender.grant(&g.qp)
    }

    fn turns<Q: QueuePair, L: Local>(&mut self, g: &Ground<Q, L>) -> Result<(), Fault> {
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
            match self.serve(g, theirs)? {
                Turn::Done | Turn::Full => {}
                Turn::More => g.dirty.push(theirs),
                Turn::Blocked => {
                    // It is the first when there is room again, so that none is passed over for ever.
                    self.current = Some(theirs);
                    return Ok(());
                }
            }
        }
    }

    fn take_closing<Q: QueuePair, L: Local>(&mut self, g: &Ground<Q, L>) {
        self.closing.begin(&g.closing);
        while let Some(mine) = self.closing.pop(&g.closing) {
            if let Some(s) = self.streams.get(mine)
                && let Some(theirs) = s.theirs
            {
                s.closing = true;
                g.dirty.push(theirs);
            }
        }
    }

    /// Messages of the side channel, each after what the peer has to know of its stream.
    fn messages<Q: QueuePair, L: Local>(&mut self, g: &Ground<Q, L>) -> Result<Put, Fault> {
        let Some(mut outbox) = g.outbox.lock() else {
            // We have interrupted whoever puts one there, and then comes here.
            return Ok(Put::Done);
        };
        while let Some(letter) = outbox.front() {
            if let Some(Vqpn(theirs)) = letter.yours
                && let Some(mine) = self.streams.mine(theirs)
                && let Some(s) = self.streams.get(mine)
            {
                s.inc.settle = true;
                put!(
                    control(g, &mut self.sender, &mut self.chunks, s, mine, theirs),
                    Put::Blocked
                );
            }
            let record = Record::Message {
                bytes: &letter.bytes,
            };
            put!(self.sender.put(&g.qp, &record), Put::Blocked);
            outbox.pop_front();
        }
        Ok(Put::Done)
    }

    /// A stream's turn.
    fn serve<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        theirs: u32,
    ) -> Result<Turn, Fault> {
        if let Some(cell) = g.tells.get(theirs as usize) {
            let word = cell.swap(0, SeqCst);
            if word != 0 && self.sender.put(&g.qp, &Record::Tell { theirs, word })? == Put::Blocked
            {
                g.add_tell(theirs, word);
                return Ok(Turn::Blocked);
            }
        }
        let Some(mine) = self.streams.mine(theirs) else {
            return Ok(Turn::Done);
        };
        let Some(s) = self.streams.get(mine).filter(|s| s.state == State::Open) else {
            return Ok(Turn::Done);
        };
        put!(
            control(g, &mut self.sender, &mut self.chunks, s, mine, theirs),
            Turn::Blocked
        );
        let turn = data::data(
            g,
            &mut self.sender,
            &self.chunks,
            &mut self.after.register,
            s,
            theirs,
        )?;
        if matches!(turn, Turn::More | Turn::Blocked) {
            return Ok(turn);
        }
        // What precedes an end mark is owed to whoever still reads. Without one it is not: it goes over TCP.
        let is_owed = turn == Turn::Full
            && !s.peer_left
            && g.block_mirror(theirs)
                .is_some_and(DirectionBlock::has_ended);
        let closes = s.closing && !is_owed;
        if closes {
            s.inc.settle = true;
        } else if s.inc.head_told != g.block_mine(mine).map_or(0, |b| b.head()) {
            if self.sender.staged.is_empty() {
                self.lazy.0.push(theirs);
                if !g.owes.swap(true, SeqCst) {
                    g.local.settle_later();
                }
                return Ok(Turn::Done);
            }
            // A message goes out anyway.
            s.inc.settle = true;
        } else {
            return Ok(Turn::Done);
        }
        put!(
            control(g, &mut self.sender, &mut self.chunks, s, mine, theirs),
            Turn::Blocked
        );
        if closes {
            let mut buf = [0; MAX_MESSAGE];
            let closed = Message::Closed {
                yours: Vqpn(theirs),
            };
            let Ok(bytes) = closed.encode(&mut buf) else {
                return Ok(Turn::Done);
            };
            put!(
                self.sender.put(&g.qp, &Record::Message { bytes }),
                Turn::Blocked
            );
            s.state = State::Left;
            s.theirs = None;
            self.unlink(mine, Some(theirs));
            self.after.closed.push(Vqpn(mine));
        }
        Ok(Turn::Done)
    }
}

/// What our consumer has to say.
fn control<Q: QueuePair, L: Local>(
    g: &Ground<Q, L>,
    sender: &mut Sender,
    chunks: &mut Chunks,
    s: &mut Stream,
    mine: u32,
    theirs: u32,
) -> Result<Put, Fault> {
    let Some(block) = g.block_mine(mine) else {
        return Ok(Put::Done);
    };
    let inc = &mut s.inc;
    let view = block.watch_consumer(ENGINE.0);
    if view.offer != inc.offer_told {
        if let Some((_, region)) = unpack_offer(view.offer) {
            for index in of_region(region, g.tuning.chunk_log2) {
                if chunks.announced.get(index).is_none()
                    && let Some(target) = chunks.mine.get(index)
                {
                    let record = Record::Chunk {
                        index,
                        rkey: target.rkey,
                        base: target.base,
                    };
                    put!(sender.put(&g.qp, &record), Put::Blocked);
                    chunks.announced.set(index, ());
                }
            }
        }
        let word = view.offer;
        put!(
            sender.put(&g.qp, &Record::Offer { theirs, word }),
            Put::Blocked
        );
        inc.on_offer_told(word);
    }
    let head = view.head;
    let untold = head.saturating_sub(inc.head_told);
    if untold > 0 && (inc.settle || untold >= inc.quarter()) {
        put!(
            sender.put(&g.qp, &Record::Head { theirs, head }),
            Put::Blocked
        );
        inc.head_told = head;
    }
    inc.settle = false;
    if view.flags != inc.flags_told {
        let flags = view.flags;
        put!(
            sender.put(&g.qp, &Record::Flags { theirs, flags }),
            Put::Blocked
        );
        inc.flags_told = flags;
    }
    if view.stopped && !inc.stop_told {
        put!(sender.put(&g.qp, &Record::Stop { theirs }), Put::Blocked);
        inc.stop_told = true;
    }
    if inc.ack_due {
        let tail = inc.ack();
        put!(
            sender.put(&g.qp, &Record::Ack { theirs, tail }),
            Put::Blocked
        );
        inc.ack_due = false;
    }
    Ok(Put::Done)
}

const _: () = assert!(MESSAGE_BYTES + MAX_MESSAGE + HEADER_BYTES + record::LONGEST < 2048);
