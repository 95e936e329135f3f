//! Decides what is sent, in this order: messages of the side channel, then the streams that have something to send, in
//! turns, then a grant if one is due. Records in the message that is being collected count as sent (`sender.rs`). So
//! when the queue pair is full, or credits are used up, nothing has to be undone. The message waits, and the stream
//! whose turn it was goes on from there.

mod control;
mod data;
mod direct;

use std::sync::atomic::Ordering::SeqCst;

use control::control;
use data::{Turn, data};
use direct::Means;

use super::engine::Engine;
use super::fault::Fault;
use super::local::Local;
use super::qp::QueuePair;
use super::record::Record;
use super::sender::{Halt, unless_blocked};
use super::shared::Shared;
use super::stream::State;
use crate::fabric::ready::ReadyQueue;
use crate::fabric::ring::DirectionBlock;
use crate::ids::Vqpn;
use crate::wire::{MAX_MESSAGE, Message};

impl<Q: QueuePair> Engine<Q> {
    /// Sends messages, the streams' records and a grant, as far as credits and the send queue allow.
    pub fn pump<L: Local>(&mut self, g: &Shared<Q, L>) -> Result<(), Fault> {
        self.take_closing(g);
        let sent = self.messages(g).and_then(|()| self.turns(g));
        unless_blocked(sent)?;
        self.sender.finish(&g.qp)
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
                    // The stream is the first when there is room again, so that none is passed over for ever.
                    self.current = Some(theirs);
                    return Err(halt);
                }
            }
        }
    }

    fn take_closing<L: Local>(&mut self, g: &Shared<Q, L>) {
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

    /// Sends the messages of the side channel, each after the state that the peer needs of its stream.
    fn messages<L: Local>(&mut self, g: &Shared<Q, L>) -> Result<(), Halt> {
        let Some(mut outbox) = g.outbox.lock() else {
            // This thread was interrupted while it queued a message; it pumps afterwards.
            return Ok(());
        };
        while let Some(message) = outbox.front() {
            if let Some(Vqpn(theirs)) = message.yours
                && let Some(mine) = self.streams.mine(theirs)
                && let Some(s) = self.streams.get(mine)
            {
                s.inc.settle = true;
                control(g, &mut self.sender, &mut self.chunks, s, mine, theirs)?;
            }
            let record = Record::Message { bytes: &message.bytes };
            self.sender.put(&g.qp, &record)?;
            outbox.pop_front();
        }
        Ok(())
    }

    /// Serves a stream's turn.
    fn serve<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) -> Result<Turn, Halt> {
        if let Some(cell) = g.tells.get(theirs as usize) {
            let word = cell.swap(0, SeqCst);
            if word != 0
                && let Err(halt) = self.sender.put(&g.qp, &Record::Tell { theirs, word })
            {
                g.add_tell(theirs, word);
                return Err(halt);
            }
        }
        let Some(mine) = self.streams.mine(theirs) else {
            return Ok(Turn::Done);
        };
        let Some(s) = self.streams.get(mine).filter(|s| s.state == State::Open) else {
            return Ok(Turn::Done);
        };
        control(g, &mut self.sender, &mut self.chunks, s, mine, theirs)?;
        let mut means = Means {
            bulk: &mut self.bulk,
            chunks: &self.chunks,
            counts: &mut self.direct,
            after: &mut self.after,
            lost: &mut self.lost,
            mine,
        };
        let turn = data(g, &mut self.sender, &mut means, s, theirs)?;
        if turn == Turn::More {
            return Ok(turn);
        }
        // Bytes before an end mark are owed to a peer that still reads. Bytes without an end mark are not: they go over
        // TCP.
        let is_owed =
            turn == Turn::Full && !s.peer_left && g.block_mirror(theirs).is_some_and(DirectionBlock::has_ended);
        let closes = s.closing && !is_owed;
        if closes {
            s.inc.settle = true;
        } else if s.inc.head_told != g.block_mine(mine).map_or(0, |b| b.head()) {
            if self.sender.is_empty() {
                self.lazy.0.push(theirs);
                if g.owes.ask() {
                    g.local.settle_later();
                }
                return Ok(Turn::Done);
            }
            // A message is sent anyway.
            s.inc.settle = true;
        } else {
            return Ok(Turn::Done);
        }
        control(g, &mut self.sender, &mut self.chunks, s, mine, theirs)?;
        if closes {
            let mut buf = [0; MAX_MESSAGE];
            let closed = Message::Closed { yours: Vqpn(theirs) };
            let Ok(bytes) = closed.encode(&mut buf) else {
                return Ok(Turn::Done);
            };
            self.sender.put(&g.qp, &Record::Message { bytes })?;
            s.state = State::Left;
            s.theirs = None;
            self.unlink(mine, Some(theirs));
            self.after.closed.push(Vqpn(mine));
            self.stop_taking(g, mine);
        }
        Ok(Turn::Done)
    }
}
