//! The state of one end of a link between hosts, and what the peer's records do to it. What is sent in
//! turn is `pump.rs`; the lock around this, and what is done outside it, is `end.rs`.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;

use super::chunks::{self, Chunks, Target};
use super::end::{Local, POLL, PUMP, SETTLE, TICK};
use super::fault::{Breach, Fault};
use super::ground::{After, Ground, MAX_LETTERS, SERVICE, Which};
use super::pump::Sender;
use super::qp::{Event, Key, Limits, PostError, QueuePair};
use super::record::{self, Record};
use super::stream::{State, Stream, Streams};
use super::watch::{Step, Watch};
use crate::fabric::layout::MAX_STREAMS;
use crate::fabric::ready::{PrivateQueue, ReadyCursor, ReadyQueue};
use crate::fabric::ring::{DirectionBlock, Wake};
use crate::wire::Message;

/// See the module.
pub(super) struct Engine {
    pub streams: Streams,
    pub chunks: Chunks,
    pub sender: Sender,
    pub inbox: VecDeque<Message>,
    pub after: After,
    /// The sweeps of [`Ground::dirty`], [`Ground::closing`] and `lazy`.
    pub sweep: ReadyCursor,
    pub closing: ReadyCursor,
    pub lazy: (PrivateQueue, ReadyCursor),
    /// The stream, by the peer's number, that was served when there was no room to go on.
    pub current: Option<u32>,
    watch: Watch,
    /// The time of the next tick, ns.
    pub now: u64,
}

impl Engine {
    pub fn new(limits: &Limits) -> Self {
        Self {
            streams: Streams::new(),
            chunks: Chunks::new(),
            sender: Sender::new(limits),
            inbox: VecDeque::new(),
            after: After::default(),
            sweep: ReadyCursor::new(),
            closing: ReadyCursor::new(),
            lazy: Default::default(),
            current: None,
            watch: Watch::new(),
            now: 0,
        }
    }

    /// One turn: true if something came.
    pub fn run<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        what: u32,
    ) -> Result<bool, Fault> {
        let mut events = 0;
        if what & POLL != 0 || self.sender.is_short() {
            events = self.poll(g)?;
        }
        if what & SETTLE != 0 {
            self.settle(g);
        }
        // A look that finds nothing leaves nothing to send: who adds something says PUMP, and what is blocked waits for
        // something to come.
        let pumped = if events > 0 || what & (PUMP | SETTLE) != 0 {
            self.pump(g)
        } else {
            Ok(())
        };
        if matches!(pumped, Err(Fault::Down(_))) {
            // What has come is still good, and then there is a better reason.
            self.poll(g)?;
        }
        pumped?;
        if self.watch.on_done(self.sender.done()) {
            self.begin_watch(g);
        }
        // After what has come: the answer may be there.
        if what & TICK != 0 {
            self.tick(g)?;
        }
        Ok(events > 0)
    }

    /// Something was posted where nothing was for a while.
    #[cold]
    fn begin_watch<Q: QueuePair, L: Local>(&mut self, g: &Ground<Q, L>) {
        g.is_watched.store(true, SeqCst);
        g.watch_unseen.store(true, SeqCst);
        g.ring_if_asleep(&mut self.after, SERVICE);
    }

    fn tick<Q: QueuePair, L: Local>(&mut self, g: &Ground<Q, L>) -> Result<(), Fault> {
        match self.watch.tick(self.now, self.sender.done()) {
            Step::Idle => g.is_watched.store(false, SeqCst),
            Step::Wait => {}
            Step::Probe => match g.qp.probe() {
                Ok(()) => {
                    self.sender.counts.probes += 1;
                    self.watch.on_posted();
                }
                Err(PostError::Full) => {}
                Err(PostError::Down) => return Err(Fault::Down(super::qp::Down(0))),
            },
            Step::Silent => return Err(Fault::Silent),
        }
        Ok(())
    }

    fn poll<Q: QueuePair, L: Local>(&mut self, g: &Ground<Q, L>) -> Result<usize, Fault> {
        let mut breach = None;
        let polled = g.qp.poll(&mut |event| {
            if breach.is_none() {
                breach = self.on_event(g, event).err();
            }
        });
        if let Some(breach) = breach {
            return Err(breach.into());
        }
        Ok(polled?)
    }

    /// Heads that were held back, and have not moved since the last call, become due. Others are told with what their
    /// stream sends, or after the next call.
    fn settle<Q: QueuePair, L: Local>(&mut self, g: &Ground<Q, L>) {
        let (queue, cursor) = &mut self.lazy;
        cursor.begin(queue);
        while let Some(theirs) = cursor.pop(queue) {
            let Some(mine) = self.streams.mine(theirs) else {
                continue;
            };
            let (Some(s), Some(block)) = (self.streams.get(mine), g.block_mine(mine)) else {
                continue;
            };
            let head = block.head();
            if head == s.inc.head_held {
                s.inc.settle = true;
                g.dirty.push(theirs);
            } else if head != s.inc.head_told {
                s.inc.head_held = head;
                // For the next sweep: this one has taken the queue's word.
                queue.push(theirs);
                g.owes.store(true, SeqCst);
            }
        }
    }

    fn on_event<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        event: Event<'_>,
    ) -> Result<(), Breach> {
        match event {
            Event::Room => self.sender.on_room(),
            Event::Probed => self.watch.on_answered(),
            Event::Written { immediate, bytes } => {
                self.sender.on_received()?;
                if !g.limits.immediate {
                    return Err(Breach::Immediate);
                }
                let s = known(&mut self.streams, immediate)?;
                let tail = s.inc.tail.saturating_add(bytes.into());
                self.on_data(g, immediate, tail, &[])?;
            }
            Event::Received(bytes) => {
                self.sender.on_received()?;
                let received = record::decode(bytes).map_err(|_| Breach::Malformed)?;
                self.sender.on_grant(received.grant)?;
                for record in received.records {
                    self.sender.counts.records += 1;
                    self.on_record(g, record.map_err(|_| Breach::Malformed)?)?;
                }
            }
        }
        Ok(())
    }

    fn on_data<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        mine: u32,
        tail: u64,
        payload: &[u8],
    ) -> Result<(), Breach> {
        let s = known(&mut self.streams, mine)?;
        let block = g.block_mine(mine).ok_or(Breach::Stream)?;
        let wake = s.inc.on_data(block, &g.mine.area(), tail, payload)?;
        g.tell_here(&mut self.after, wake, mine);
        Ok(())
    }

    fn on_record<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        record: Record<'_>,
    ) -> Result<(), Breach> {
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
                match s.inc.on_end(block, end, tail)? {
                    Some(wake) => g.tell_here(&mut self.after, wake, mine),
                    None => s.crossed = true,
                }
                Ok(())
            }
            Record::Limited {
                theirs: mine,
                count,
            } => {
                known(&mut self.streams, mine)?;
                g.block_mine(mine).ok_or(Breach::Stream)?.put_limited(count);
                Ok(())
            }
            Record::Confirm { theirs: mine } => {
                let s = known(&mut self.streams, mine)?;
                s.inc.ack_due = true;
                if let Some(theirs) = s.theirs {
                    g.dirty.push(theirs);
                }
                Ok(())
            }
            Record::Chunk { index, rkey, base } => self.on_chunk(g, index, Target { rkey, base }),
            Record::Message { bytes } => self.on_message(g, bytes),
            Record::Tell { theirs: mine, word } => {
                if mine >= MAX_STREAMS {
                    return Err(Breach::Stream);
                }
                g.tell_here(&mut self.after, Wake(word), mine);
                Ok(())
            }
            Record::Head { theirs: mine, .. }
            | Record::Offer { theirs: mine, .. }
            | Record::Flags { theirs: mine, .. }
            | Record::Stop { theirs: mine }
            | Record::Ack { theirs: mine, .. } => self.on_consumer(g, mine, record),
        }
    }

    /// What the peer's consumer says to our producer.
    fn on_consumer<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        mine: u32,
        record: Record<'_>,
    ) -> Result<(), Breach> {
        let s = known(&mut self.streams, mine)?;
        if s.state == State::Left {
            return Ok(());
        }
        let Some(theirs) = s.theirs else {
            return s.on_early(g.peers_len, record);
        };
        let block = g.block_mirror(theirs).ok_or(Breach::Stream)?;
        let mut wake = Wake::NONE;
        match record {
            Record::Head { head, .. } => wake = s.out.on_head(block, head)?,
            Record::Offer { word, .. } => {
                wake = s.out.on_offer(block, g.peers_len, word)?;
            }
            Record::Flags { flags, .. } => wake = block.put_flags(flags),
            Record::Stop { .. } => s.crossed |= !s.out.on_stop(block),
            Record::Ack { tail, .. } => {
                s.out.on_ack(tail)?;
                wake = Wake(SERVICE.queue_bits());
            }
            _ => {}
        }
        g.tell_here(&mut self.after, wake, mine);
        // It may have been waiting for this ring, or for this room.
        let has_room = matches!(record, Record::Head { .. }) && s.out.told < block.tail();
        if has_room || matches!(record, Record::Offer { .. }) {
            g.dirty.push(theirs);
        }
        Ok(())
    }

    fn on_chunk<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        index: u32,
        target: Target,
    ) -> Result<(), Breach> {
        let log2 = g.tuning.chunk_log2;
        let all = chunks::count(g.peers_len, log2);
        let fits = u64::from(index) < all && target.base.checked_add(1 << log2).is_some();
        if !fits || !self.chunks.theirs.set(index, target) {
            return Err(Breach::Chunk);
        }
        Ok(())
    }

    fn on_message<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        bytes: &[u8],
    ) -> Result<(), Breach> {
        let message = Message::decode(bytes).map_err(|_| Breach::Message)?;
        if message.fds() != 0 {
            return Err(Breach::Message);
        }
        if self.inbox.len() >= MAX_LETTERS {
            return Err(Breach::Flood);
        }
        if let Message::Closed { yours } = message
            && let Some(s) = self.streams.get(yours.0)
        {
            s.peer_left = true;
            if let Some(theirs) = s.theirs.filter(|_| s.closing) {
                // Nobody waits for the rest any more.
                g.dirty.push(theirs);
            }
        }
        self.inbox.push_back(message);
        g.news.fetch_add(1, SeqCst);
        g.ring_if_asleep(&mut self.after, SERVICE);
        Ok(())
    }

    /// A new stream of ours.
    pub fn open(&mut self, mine: u32) {
        if let Some(s) = self.streams.make(mine) {
            s.open();
        }
    }

    /// Both ends are done with our number.
    pub fn forget<Q: QueuePair, L: Local>(&mut self, g: &Ground<Q, L>, mine: u32) {
        if let Some(s) = self.streams.get(mine) {
            let theirs = s.theirs;
            if let Some(aside) = s.out.aside {
                g.buffers.give_back(aside.region);
            }
            s.forget();
            self.unlink(mine, theirs);
        }
    }

    /// The peer's number is not that of our stream any more.
    pub fn unlink(&mut self, mine: u32, theirs: Option<u32>) {
        if let Some(theirs) = theirs
            && self.streams.mine(theirs) == Some(mine)
        {
            self.streams.link(theirs, None);
        }
    }

    /// See [`LinkEnd::pair`](crate::fabric::link::LinkEnd::pair).
    pub fn pair<Q: QueuePair, L: Local>(&mut self, g: &Ground<Q, L>, mine: u32, theirs: u32) {
        let Some(block) = g.block_mirror(theirs) else {
            return;
        };
        if let Some(old) = self.streams.mine(theirs)
            && let Some(s) = self.streams.get(old)
        {
            // The peer has opened its number anew, so it is done with what it was.
            s.theirs = None;
        }
        let Some(s) = self.streams.get(mine) else {
            return;
        };
        if s.state != State::Open || s.theirs.is_some() {
            return;
        }
        s.theirs = Some(theirs);
        block.reset();
        let early = std::mem::take(&mut s.early);
        if let Some(word) = early.offer {
            // It was checked when it came. Nobody waits for it yet.
            let _ = s.out.on_offer(block, g.peers_len, word);
        }
        let _ = block.put_flags(early.flags);
        if early.stop {
            s.out.on_stop(block);
        }
        self.streams.link(theirs, Some(mine));
    }

    /// CLOSED is to be sent once all is carried over. False if the two are no pair.
    pub fn close(&mut self, mine: u32, theirs: u32) -> bool {
        match self.streams.get(mine) {
            Some(s) if s.state == State::Open && s.theirs == Some(theirs) => {
                s.closing = true;
                true
            }
            _ => false,
        }
    }

    /// Memory of ours was registered.
    pub fn on_registered<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        which: Which,
        keys: &[(u32, Key)],
    ) {
        for (chunk, key) in keys {
            match which {
                Which::Mirror => self.chunks.mirror.set(*chunk, key.local),
                Which::Mine => {
                    let offset = (*chunk as usize) << g.tuning.chunk_log2;
                    let base = g.mine.data_at(offset).addr() as u64;
                    let rkey = key.remote;
                    self.chunks.mine.set(*chunk, Target { rkey, base })
                }
            };
        }
    }

    /// What is not confirmed of what was committed to the peer's stream, and whether to ask.
    pub fn unconfirmed<Q: QueuePair, L: Local>(
        &mut self,
        g: &Ground<Q, L>,
        theirs: u32,
    ) -> (u64, bool) {
        let Some(s) = self
            .streams
            .mine(theirs)
            .and_then(|mine| self.streams.get(mine))
        else {
            return (0, false);
        };
        let block = g.block_mirror(theirs);
        let ended = block.is_some_and(DirectionBlock::has_ended);
        let tail = block.map_or(0, DirectionBlock::tail) + u64::from(ended);
        let bytes = tail.saturating_sub(s.out.acked.max(s.out.head));
        if bytes == 0 || s.peer_left {
            return (0, false);
        }
        let ask = s.out.asked < tail && !s.out.stopped;
        s.out.want_confirm |= ask;
        (bytes, ask)
    }

    pub fn received(&mut self, mine: u32) -> Option<u64> {
        let s = self.streams.get(mine)?;
        (s.state != State::Free).then_some(s.inc.tail)
    }

    pub fn confirmed(&mut self, theirs: u32) -> Option<u64> {
        let mine = self.streams.mine(theirs)?;
        let s = self.streams.get(mine)?;
        // Without the end mark.
        Some(s.out.acked.max(s.out.head).min(s.out.told))
    }

    pub fn has_crossed(&mut self, mine: u32) -> bool {
        self.streams.get(mine).is_some_and(|s| s.crossed)
    }
}

impl Stream {
    /// What the peer's consumer says before we know its number: kept until then.
    fn on_early(&mut self, data_len: usize, record: Record<'_>) -> Result<(), Breach> {
        match record {
            Record::Offer { word, .. } => {
                self.out.check_offer(data_len, word)?;
                match self.early.offer.replace(word) {
                    None => Ok(()),
                    // Nothing can have been adopted yet.
                    Some(_) => Err(Breach::Offer),
                }
            }
            Record::Flags { flags, .. } => {
                self.early.flags |= flags;
                Ok(())
            }
            Record::Stop { .. } => {
                self.early.stop = true;
                Ok(())
            }
            Record::Head { .. } => Err(Breach::Head),
            _ => Err(Breach::Ack),
        }
    }
}

/// A stream that the peer may speak of.
fn known(streams: &mut Streams, mine: u32) -> Result<&mut Stream, Breach> {
    streams
        .get(mine)
        .filter(|s| s.state != State::Free && !s.peer_left)
        .ok_or(Breach::Stream)
}
