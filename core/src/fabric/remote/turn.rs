//! A turn of the engine of a link between hosts: takes what has come (`receive.rs`), sends what can be sent
//! (`pump.rs`), and looks whether the peer's device still answers (`watch.rs`). Not who takes the turn (`end.rs`).

use std::sync::atomic::Ordering::Relaxed;

use super::engine::Engine;
use super::fault::Fault;
use super::local::{Local, SERVICE};
use super::qp::{Down, PostError, QueuePair};
use super::shared::Shared;
use super::watch::Step;
use crate::fabric::ready::ReadyQueue;

/// Send what is there. Whoever adds something says so: a [`POLL`] that finds nothing does not look for it.
pub(super) const PUMP: u32 = 1;
/// Look at the queue pair first.
pub(super) const POLL: u32 = 2;
/// Send the heads that were held back, too.
pub(super) const SETTLE: u32 = 4;
/// The watch's time has come.
pub(super) const TICK: u32 = 8;
/// Have the bulk queue pair tell of the next completion, before the look at it.
pub(super) const ARM: u32 = 16;

impl<Q: QueuePair> Engine<Q> {
    /// One turn: true if something came.
    pub fn run<L: Local>(&mut self, g: &Shared<Q, L>, what: u32) -> Result<bool, Fault> {
        let mut events = 0;
        if what & ARM != 0 {
            self.arm_bulk();
        }
        if what & POLL != 0 || self.sender.is_short() {
            events = self.poll(g)? + self.poll_bulk(g)?;
            self.sender.counts.looks += 1;
            // Only where it changes: what stands beside it is others'.
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
        if self.lost.is_some() {
            self.drop_bulk(g);
            // What that leaves to say, nobody else knows of.
            self.pump(g)?;
        }
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

    /// Heads that were held back, and have not moved since the last call, become due. Others are told with what their
    /// stream sends, or after the next call.
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
