//! The state of one end of a link between hosts, the effects of this end's calls on it, and its turn. A turn processes
//! completions (`receive.rs`), sends what can be sent (`pump.rs`), and checks whether the peer's device still answers
//! (`watch.rs`). `end.rs` has the lock around this state, decides which thread takes the turn, and has the work that is
//! done outside the lock. `remote.rs` defines mirror, advert and loan, `shared.rs` chunk, `stream.rs` head and tail.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

use crate::fabric::layout::Region;
use crate::fabric::ready::{PrivateQueue, ReadyCursor, ReadyQueue};
use crate::fabric::remote::bulk::Bulk;
use crate::fabric::remote::qp::{Down, Key, Limits, PostError, QueuePair};
use crate::fabric::remote::sender::Sender;
use crate::fabric::remote::shared::{After, Chunks, OwnChunk, Retired, Shared, Target, Which};
use crate::fabric::remote::stream::{State, Stream, Streams};
use crate::fabric::remote::watch::{Step, Watch};
use crate::fabric::remote::{Fault, Local, SERVICE};
use crate::fabric::ring::DirectionBlock;
use crate::fabric::side::Done;
use crate::wire::Message;

// The work of a turn, as bits.

/// Send the queued messages and changes. A thread that queues a message or a change asks for this, since a [`POLL`]
/// that finds no completion does not check the queues.
pub(super) const PUMP: u32 = 1;
/// Poll the queue pair before all other work.
pub(super) const POLL: u32 = 2;
/// Send the heads (how far this end's programs have read) that were held back.
pub(super) const SETTLE: u32 = 4;
/// Call `Watch::tick`.
pub(super) const TICK: u32 = 8;
/// Arm the bulk queue pair for its next completion, before it is polled.
pub(super) const ARM: u32 = 16;

/// The parts of the engine that a stream's turn uses in addition to the stream.
pub(super) struct Means<Q> {
    pub chunks: Chunks,
    pub sender: Sender,
    pub after: After,
    pub bulk: Option<Bulk<Q>>,
    /// Whether the bulk queue pair is to be given up.
    pub is_lost: bool,
}

/// The state of one end, under the end's lock.
pub(super) struct Engine<Q> {
    pub streams: Streams,
    pub means: Means<Q>,
    pub inbox: VecDeque<Message>,
    /// The position of the sweep of `Shared::dirty`. `lazy` is the queue of streams whose heads (how far a program has
    /// read) are held back, by the peer's number, with the position of its own sweep.
    pub sweep: ReadyCursor,
    pub lazy: (PrivateQueue, ReadyCursor),
    /// The peer's number of the stream whose turn stopped because a credit or room was missing.
    pub current: Option<u32>,
    pub watch: Watch,
    /// The time of the last call of `tick`, in ns.
    pub now: u64,
    /// The serial of the last advert or loan.
    pub serial: u32,
    /// Bulk queue pairs that were given up. [`End::end_retired`](crate::fabric::remote::End::end_retired) ends them,
    /// which may take long.
    pub retired: Vec<Retired<Q>>,
    /// Numbers that both ends have finished with, but into whose rings READs may still bring bytes.
    pub unforgotten: Vec<Done>,
}

impl<Q: QueuePair> Engine<Q> {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            streams: Streams::new(),
            means: Means {
                chunks: Chunks::default(),
                sender: Sender::new(limits),
                after: After::default(),
                bulk: None,
                is_lost: false,
            },
            inbox: VecDeque::new(),
            sweep: ReadyCursor::default(),
            lazy: Default::default(),
            current: None,
            watch: Watch::default(),
            now: 0,
            serial: 0,
            retired: Vec::new(),
            unforgotten: Vec::new(),
        }
    }

    /// Records a new stream of this end.
    pub(super) fn open(&mut self, mine: u32) {
        if let Some(s) = self.streams.make(mine) {
            *s = Stream::default();
            s.state = State::Open;
        }
    }

    /// Forgets a stream whose number both ends have finished with.
    pub(super) fn forget<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32) {
        self.streams.unlink(mine);
        if let Some(s) = self.streams.get(mine) {
            if let Some(aside) = s.out.aside {
                g.buffers.give_back(aside.region);
            }
            *s = Stream::default();
        }
    }

    /// Pairs two numbers, as [`LinkEnd::pair`](crate::fabric::LinkEnd::pair) describes.
    pub(super) fn pair<L: Local>(&mut self, g: &Shared<Q, L>, mine: u32, theirs: u32, first: Region) {
        let Some(block) = g.block_mirror(theirs) else {
            return;
        };
        if let Some((_, old)) = self.streams.of_peer(theirs) {
            // The peer has used its number for a new stream, so it has finished with the old one.
            old.theirs = None;
        }
        let unpaired = self.streams.get(mine);
        let unpaired = unpaired.filter(|s| s.state == State::Open && s.theirs.is_none());
        let (Some(s), Some(_)) = (unpaired, g.tells.make(theirs as usize)) else {
            return;
        };
        s.theirs = Some(theirs);
        block.reset();
        if let Some(offer) = s.out.offered {
            // The result names no waiter, since no producer waits yet.
            let _ = block.put_offer(offer.pack());
        } else {
            s.out.foresee(block, g.peers_len, first);
        }
        let _ = block.put_flags(s.out.early_flags);
        if s.out.stopped {
            s.out.on_stop(block);
        }
        self.streams.link(mine, theirs);
    }

    /// Makes the engine send CLOSED once all bytes are carried over. Returns false if the two numbers are not paired.
    pub(super) fn close(&mut self, mine: u32, theirs: u32) -> bool {
        let s = self.streams.get(mine);
        let s = s.filter(|s| s.state == State::Open && s.theirs == Some(theirs));
        s.map(|s| s.closing = true).is_some()
    }

    /// Stores the keys of chunks that were registered.
    pub(super) fn on_registered<L: Local>(&mut self, g: &Shared<Q, L>, which: Which, keys: &[(u32, Key)]) {
        for (chunk, key) in keys {
            match which {
                Which::Mirror => self.means.chunks.mirror.set(*chunk, key.local),
                Which::Mine => {
                    let offset = (*chunk as usize) << g.tuning.chunk_log2;
                    let base = g.mine.data_at(offset).addr() as u64;
                    let own = OwnChunk {
                        target: Target { rkey: key.remote, base },
                        sink: key.local,
                        is_announced: false,
                    };
                    self.means.chunks.mine.set(*chunk, own)
                }
            };
        }
    }

    /// Returns how many committed bytes of the peer's stream are not confirmed, and whether to ask for a confirmation.
    pub(super) fn unconfirmed<L: Local>(&mut self, g: &Shared<Q, L>, theirs: u32) -> (u64, bool) {
        let Some((_, s)) = self.streams.of_peer(theirs) else {
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

    /// Takes a turn that does the work `what`, bits such as `PUMP`. Returns true if there was a completion.
    pub(super) fn run<L: Local>(&mut self, g: &Shared<Q, L>, what: u32) -> Result<bool, Fault> {
        let mut events = 0;
        if what & ARM != 0
            && let Some(bulk) = &self.means.bulk
        {
            self.means.is_lost |= bulk.qp.arm().is_err();
        }
        if what & POLL != 0 || self.means.sender.is_short() {
            events = self.poll(g)? + self.poll_bulk(g)?;
            self.means.sender.counts.looks += 1;
            // Stores only a change, since the words of other links are in the same cache line.
            if events > 0 && g.local.armed().load(Relaxed) {
                g.local.armed().store(false, Relaxed);
            }
        }
        if events > 0 {
            self.means.sender.counts.finds += 1;
            self.read_on(g);
        }
        if what & SETTLE != 0 {
            self.settle(g);
        }
        // After a poll that finds no completion there is nothing to send. A thread that queues something asks for PUMP,
        // and blocked work waits for a completion.
        if events > 0 || what & (PUMP | SETTLE) != 0 {
            let pumped = self.pump(g);
            if matches!(pumped, Err(Fault::Down(_))) {
                // Completions that have come are still valid, and polling them may give a more exact reason.
                self.poll(g)?;
            }
            pumped?;
        }
        if self.means.is_lost {
            self.drop_bulk(g);
            // `drop_bulk` has queued changes, and no other thread asks for a PUMP.
            self.pump(g)?;
        }
        if self.watch.on_done(self.means.sender.done()) {
            self.begin_watch(g);
        }
        // This follows the completions, since the answer may be among them.
        if what & TICK != 0 {
            self.tick(g)?;
        }
        Ok(events > 0)
    }

    /// Begins the watch: a work request was posted after a time without any.
    #[cold]
    fn begin_watch<L: Local>(&mut self, g: &Shared<Q, L>) {
        g.is_watched.publish(true);
        g.watch_unseen.publish(true);
        g.ring_if_asleep(&mut self.means.after, SERVICE);
    }

    fn tick<L: Local>(&mut self, g: &Shared<Q, L>) -> Result<(), Fault> {
        match self.watch.tick(self.now, self.means.sender.done()) {
            Step::Idle => {
                g.is_watched.publish(false);
            }
            Step::Wait => {}
            Step::Probe => match g.qp.probe() {
                Ok(()) => {
                    self.means.sender.counts.probes += 1;
                    self.watch.on_posted();
                }
                Err(PostError::Full) => {}
                Err(PostError::Down) => return Err(Fault::Down(Down(0))),
            },
            Step::Silent => return Err(Fault::Silent),
        }
        Ok(())
    }

    fn poll<L: Local>(&mut self, g: &Shared<Q, L>) -> Result<usize, Fault> {
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

    /// Schedules the heads that were held back, and that have not moved since the last call. A head that has moved goes
    /// with the next message of its stream, or after the next call.
    fn settle<L: Local>(&mut self, g: &Shared<Q, L>) {
        let (queue, cursor) = &mut self.lazy;
        cursor.begin(queue);
        while let Some(theirs) = cursor.pop(queue) {
            let Some((mine, s)) = self.streams.of_peer(theirs) else {
                continue;
            };
            let head = g.block_mine(mine).map_or(0, DirectionBlock::head);
            if head == s.inc.head_held {
                s.inc.settle = true;
                g.dirty.push(theirs);
            } else if head != s.inc.told.head {
                s.inc.head_held = head;
                // The push is for the next sweep, since this sweep has taken the queue's word.
                queue.push(theirs);
                let _ = g.owes.ask();
            }
        }
    }
}
