//! A turn of the engine of a link between hosts. It takes in completions (`receive.rs`), sends what can be sent
//! (`pump.rs`), and checks whether the peer's device still answers (`watch.rs`). `end.rs` decides which thread takes
//! it.

use std::sync::atomic::Ordering::Relaxed;

use super::engine::Engine;
use super::fault::Fault;
use super::local::{Local, SERVICE};
use super::qp::{Down, PostError, QueuePair};
use super::shared::Shared;
use super::watch::Step;
use crate::fabric::ready::ReadyQueue;

/// Send the queued messages and changes. A thread that queues one asks for this, since a [`POLL`] that finds no
/// completion does not check the queues.
pub(super) const PUMP: u32 = 1;
/// Poll the queue pair first.
pub(super) const POLL: u32 = 2;
/// Also send the heads that were held back.
pub(super) const SETTLE: u32 = 4;
/// The watch is due for a tick.
pub(super) const TICK: u32 = 8;
/// Arm the bulk queue pair for its next completion, before it is polled.
pub(super) const ARM: u32 = 16;

impl<Q: QueuePair> Engine<Q> {
    /// Takes a turn that does the work `what`. True if there was a completion.
    pub fn run<L: Local>(&mut self, g: &Shared<Q, L>, what: u32) -> Result<bool, Fault> {
        let mut events = 0;
        if what & ARM != 0 {
            self.arm_bulk();
        }
        if what & POLL != 0 || self.sender.is_short() {
            events = self.poll(g)? + self.poll_bulk(g)?;
            self.sender.counts.looks += 1;
            // Only where it changes: the same cache line has the words of other links.
            if events > 0 && g.local.armed().load(Relaxed) {
                g.local.armed().store(false, Relaxed);
            }
        }
        if events > 0 {
            self.sender.counts.finds += 1;
            self.read_on(g);
        }
        if what & SETTLE != 0 {
            self.settle(g);
        }
        // A poll that finds no completion leaves nothing to send: a thread that queues something asks for PUMP, and
        // blocked work waits for a completion.
        let pumped = if events > 0 || what & (PUMP | SETTLE) != 0 {
            self.pump(g)
        } else {
            Ok(())
        };
        if matches!(pumped, Err(Fault::Down(_))) {
            // Completions that have come are still valid, and polling them may give a better reason.
            self.poll(g)?;
        }
        pumped?;
        if self.lost.is_some() {
            self.drop_bulk(g);
            // `drop_bulk` has queued changes, and no other thread asks for a PUMP.
            self.pump(g)?;
        }
        if self.watch.on_done(self.sender.done()) {
            self.begin_watch(g);
        }
        // After the completions, since the answer may be among them.
        if what & TICK != 0 {
            self.tick(g)?;
        }
        Ok(events > 0)
    }

    /// Begins the watch: a work request was posted after a while without any.
    #[cold]
    fn begin_watch<L: Local>(&mut self, g: &Shared<Q, L>) {
        g.is_watched.publish(true);
        g.watch_unseen.publish(true);
        g.ring_if_asleep(&mut self.after, SERVICE);
    }

    fn tick<L: Local>(&mut self, g: &Shared<Q, L>) -> Result<(), Fault> {
        match self.watch.tick(self.now, self.sender.done()) {
            Step::Idle => {
                g.is_watched.publish(false);
            }
            Step::Wait => {}
            Step::Probe => match g.qp.probe() {
                Ok(()) => {
                    self.sender.counts.probes += 1;
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

    /// Makes due the heads that were held back and have not moved since the last call. The others go with the next
    /// message of their stream, or after the next call.
    fn settle<L: Local>(&mut self, g: &Shared<Q, L>) {
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
                let _ = g.owes.ask();
            }
        }
    }
}
