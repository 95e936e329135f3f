//! Applies the peer's records to the engine of a link between hosts. Each record is checked first (I7). `pump.rs` sends
//! the records that follow from it. `remote.rs` defines mirror, advert, PLACED, loan, SOURCE and TAKEN.

use crate::fabric::layout::MAX_STREAMS;
use crate::fabric::ready::ReadyQueue;
use crate::fabric::remote::engine::Engine;
use crate::fabric::remote::qp::{Completed, QueuePair};
use crate::fabric::remote::record::Record;
use crate::fabric::remote::shared::{MAX_QUEUED_MESSAGES, Shared, Target};
use crate::fabric::remote::stream::{Outgoing, State, Stream, Streams};
use crate::fabric::remote::{Breach, Local, SERVICE, record};
use crate::fabric::ring::Wake;
use crate::wire::Message;

impl<Q: QueuePair> Engine<Q> {
    /// Applies a completion of the queue pair.
    pub(super) fn on_event<L: Local>(&mut self, g: &Shared<Q, L>, event: Completed<'_>) -> Result<(), Breach> {
        match event {
            Completed::Room => self.means.sender.on_room(),
            Completed::Probed => self.watch.on_answered(),
            // This queue pair carries no READs.
            Completed::Read => {}
            Completed::Written { immediate, bytes } => {
                self.means.sender.on_received()?;
                if !g.limits.immediate {
                    return Err(Breach::Immediate);
                }
                let s = known(&mut self.streams, immediate)?;
                let tail = s.inc.tail.saturating_add(bytes.into());
                self.on_data(g, immediate, tail, &[])?;
            }
            Completed::Received(bytes) => {
                self.means.sender.on_received()?;
                let received = record::decode(bytes).map_err(|_| Breach::Malformed)?;
                self.means.sender.on_grant(received.grant)?;
                for record in received.records {
                    self.on_record(g, record.map_err(|_| Breach::Malformed)?)?;
                }
            }
        }
        Ok(())
    }

    fn on_data<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, tail: u64, payload: &[u8]) -> Result<(), Breach> {
        let inc = &mut known(&mut self.streams, mine)?.inc;
        let block = g.block_mine(mine).ok_or(Breach::Stream)?;
        let wake = inc.on_data(block, &g.mine.area(), tail, payload)?;
        g.tell_here(&mut self.means.after, wake, mine);
        Ok(())
    }

    fn on_record<L: Local>(&mut self, g: &Shared<Q, L>, record: Record<'_>) -> Result<(), Breach> {
        match record {
            Record::Data {
                theirs: mine,
                tail,
                payload,
            } => self.on_data(g, mine, tail, payload),
            Record::Switch {
                theirs: mine,
                generation,
                position,
            } => {
                let s = known(&mut self.streams, mine)?;
                let block = g.block_mine(mine).ok_or(Breach::Stream)?;
                s.inc.on_switch(block, generation, position)
            }
            Record::End {
                theirs: mine,
                end,
                tail,
            } => {
                let s = known(&mut self.streams, mine)?;
                let block = g.block_mine(mine).ok_or(Breach::Stream)?;
                let wake = s.inc.on_end(block, end.into(), tail)?;
                g.tell_here(&mut self.means.after, wake, mine);
                Ok(())
            }
            Record::Limited { theirs: mine, count } => {
                known(&mut self.streams, mine)?;
                g.block_mine(mine).ok_or(Breach::Stream)?.put_limited(count);
                Ok(())
            }
            Record::Confirm { theirs: mine } => {
                let s = known(&mut self.streams, mine)?;
                s.inc.ack_due = true;
                g.touch(s.theirs);
                Ok(())
            }
            Record::Chunk { index, rkey, base } => self.on_chunk(g, index, Target { rkey, base }),
            Record::Message { bytes } => self.on_message(g, bytes),
            Record::Tell { theirs: mine, word } => {
                if mine >= MAX_STREAMS {
                    return Err(Breach::Stream);
                }
                g.tell_here(&mut self.means.after, Wake(word), mine);
                Ok(())
            }
            Record::Advert { theirs: mine, memory } => self.on_advert(g, mine, memory),
            Record::Withdraw {
                theirs: mine,
                withdrawal,
            } => self.on_withdrawal(g, mine, withdrawal),
            Record::Source { theirs: mine, memory } => {
                known(&mut self.streams, mine)?;
                self.on_loan(g, mine, memory)
            }
            Record::Taken {
                theirs: mine,
                serial,
                tail,
            } => {
                known(&mut self.streams, mine)?;
                self.on_taken(g, mine, serial, tail)
            }
            // PLACED belongs on the bulk queue pair.
            Record::Placed { .. } => Err(Breach::Advert),
            Record::Head { theirs: mine, .. }
            | Record::Offer { theirs: mine, .. }
            | Record::Flags { theirs: mine, .. }
            | Record::Stop { theirs: mine }
            | Record::Ack { theirs: mine, .. } => self.on_consumer(g, mine, record),
        }
    }

    /// Applies a record of the peer's consumer to the direction that the local producer sends.
    fn on_consumer<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, record: Record<'_>) -> Result<(), Breach> {
        let s = known(&mut self.streams, mine)?;
        if s.state == State::Left {
            return Ok(());
        }
        let Some(theirs) = s.theirs else {
            return s.out.on_early(g.peers_len, record);
        };
        let block = g.block_mirror(theirs).ok_or(Breach::Stream)?;
        let was_held = s.out.targets.holds(s.out.head);
        let mut wake = Wake::NONE;
        match record {
            Record::Head { head, .. } => wake = s.out.on_head(block, head)?,
            Record::Offer { word, .. } => wake = s.out.on_offer(block, g.peers_len, word)?,
            Record::Flags { flags, .. } => wake = block.put_flags(flags),
            Record::Stop { .. } => s.out.on_stop(block),
            Record::Ack { tail, .. } => {
                s.out.on_ack(tail)?;
                wake = Wake(SERVICE.queue_bits());
            }
            _ => {}
        }
        g.tell_here(&mut self.means.after, wake, mine);
        // The stream may have been waiting for this ring or this room. Or it waited for the peer's program to take
        // bytes that bypassed the ring.
        let has_room = matches!(record, Record::Head { .. }) && s.out.told < block.tail();
        let goes_on = was_held && !s.out.targets.holds(s.out.head);
        if has_room || goes_on || matches!(record, Record::Offer { .. }) {
            g.dirty.push(theirs);
        }
        Ok(())
    }

    fn on_chunk<L: Local>(&mut self, g: &Shared<Q, L>, index: u32, target: Target) -> Result<(), Breach> {
        let log2 = g.tuning.chunk_log2;
        let all = (g.peers_len as u64).div_ceil(1 << log2);
        let fits = u64::from(index) < all && target.base.checked_add(1 << log2).is_some();
        if !fits || !self.means.chunks.theirs.set(index, target) {
            return Err(Breach::Chunk);
        }
        Ok(())
    }

    fn on_message<L: Local>(&mut self, g: &Shared<Q, L>, bytes: &[u8]) -> Result<(), Breach> {
        let message = Message::decode(bytes).map_err(|_| Breach::Message)?;
        if message.fds() != 0 {
            return Err(Breach::Message);
        }
        if self.inbox.len() >= MAX_QUEUED_MESSAGES {
            return Err(Breach::Flood);
        }
        if let Message::Closed { yours } = message
            && let Some(s) = self.streams.get(yours.0)
        {
            s.peer_left = true;
            s.inc.landings.on_left();
            // The peer does not wait for the rest of the bytes any more, so CLOSED can be sent.
            g.touch(s.theirs.filter(|_| s.closing));
            self.on_reader_left(g, yours.0);
        }
        self.inbox.push_back(message);
        g.news.add_one();
        g.ring_if_asleep(&mut self.means.after, SERVICE);
        Ok(())
    }
}

impl Outgoing {
    /// Keeps a record of the peer's consumer that comes before the peer's number of the stream is known here.
    fn on_early(&mut self, data_len: usize, record: Record<'_>) -> Result<(), Breach> {
        match record {
            Record::Offer { word, .. } => self.offered = Some(self.check_offer(data_len, word)?),
            Record::Flags { flags, .. } => self.early_flags |= flags,
            Record::Stop { .. } => self.stopped = true,
            Record::Head { .. } => return Err(Breach::Head),
            _ => return Err(Breach::Ack),
        }
        Ok(())
    }
}

/// Returns the stream `mine`, which a record of the peer names. Fails if no stream has that number, or if the peer has
/// closed the stream.
fn known(streams: &mut Streams, mine: u32) -> Result<&mut Stream, Breach> {
    streams
        .get(mine)
        .filter(|s| s.state != State::Free && !s.peer_left)
        .ok_or(Breach::Stream)
}
