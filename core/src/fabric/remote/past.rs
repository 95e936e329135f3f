//! The calls of an end of a link between hosts about what goes past the rings: its bulk queue pair, buffers that our
//! programs wait with, and memory that they lend. What is done about them is the engine's business (`landing.rs`,
//! `taking.rs`), and which thread does it `end.rs`'s.

use super::counts::DirectCounts;
use super::direct::{Buffer, Landed, Source};
use super::end::End;
use super::local::Local;
use super::qp::QueuePair;
use super::record::Memory;
use super::shared::Retired;
use super::turn::{ARM, POLL, PUMP};
use crate::ids::Vqpn;

impl<Q: QueuePair, L: Local> End<Q, L> {
    /// Direct transfers (P90) go over this queue pair from now on, which is connected, beside the link's own, and has
    /// not been used. Gives it back if there is one, or the link is down.
    pub fn attach_bulk(&self, qp: Q) -> Option<Q> {
        if self.is_down() {
            return Some(qp);
        }
        let mut qp = Some(qp);
        self.with(|engine| qp = qp.take().and_then(|qp| engine.attach_bulk(qp)));
        let _ = self.run(ARM | POLL | PUMP);
        qp
    }

    /// The peer has given its end of the bulk queue pair up, or it is to be given up.
    pub fn drop_bulk(&self) {
        self.with(|engine| engine.drop_bulk(&self.shared));
        let _ = self.run(PUMP);
    }

    /// Has `end` end the bulk queue pairs that were given up since the last call; gives how many. The peer is to be
    /// told of each.
    pub fn end_retired(&self, mut end: impl FnMut(Q)) -> usize {
        self.shared.retired_unseen.publish(false);
        // Not under that lock: who gives one up takes it under the engine's.
        let retired = match self.shared.retired.lock() {
            Some(mut retired) => std::mem::take(&mut *retired),
            None => Vec::new(),
        };
        let count = retired.len();
        for Retired { qp, under_way } in retired {
            end(qp);
            if !under_way.is_empty() {
                self.with(|engine| engine.on_bulk_ended(&self.shared, &under_way));
                let _ = self.run(PUMP);
            }
        }
        count
    }

    /// Our number of the stream that the peer calls `theirs`, and how many bytes a buffer for it may have now: the ring
    /// is empty. `None` if there is no such stream, or something in the ring.
    pub fn room_to_land(&self, theirs: Vqpn) -> Option<(Vqpn, u64)> {
        let (mine, room) = self.with(|engine| engine.room_to_land(&self.shared, theirs.0))??;
        Some((Vqpn(mine), room))
    }

    /// A buffer that our program waits with on its stream `mine`, whose ring is empty, is for what comes next, or its
    /// beginning is; the peer hears of it. What has become of it is to be asked by [`landed`](Self::landed). `None`
    /// if it cannot be used.
    pub fn advertise(&self, mine: Vqpn, buffer: Buffer) -> Option<Memory> {
        let made = self.with(|engine| engine.advertise(&self.shared, mine.0, buffer))?;
        let _ = self.run(PUMP);
        made
    }

    /// What has become of an advert. Its bytes count as the next ones of the ring, which does not have them: who gets
    /// them consumes as many, and then [says so](Self::settle_head). `None` in a signal handler that has interrupted
    /// the engine.
    pub fn landed(&self, mine: Vqpn, serial: u32) -> Option<Landed> {
        self.with(|engine| engine.landed(mine.0, serial))
    }

    /// Our program waits no longer. It is over when [`landed`](Self::landed) says so; until then the peer's device may
    /// write to the buffer.
    pub fn withdraw(&self, mine: Vqpn, serial: u32) {
        self.with(|engine| engine.withdraw(&self.shared, mine.0, serial));
        let _ = self.run(PUMP);
    }

    /// What has come into a buffer of our program's is in the ring now, where that counts it: our program is not about
    /// to take it.
    pub fn put_back(&self, mine: Vqpn) {
        self.with(|engine| engine.put_back(&self.shared, mine.0));
        let _ = self.run(PUMP);
    }

    /// The peer is told at once what was read of our stream `mine`, and
    /// [published](crate::fabric::ring::Consumer::publish).
    pub fn settle_head(&self, mine: Vqpn) {
        self.with(|engine| engine.settle_head(&self.shared, mine.0));
        let _ = self.run(PUMP);
    }

    /// How often the peer's programs have told of buffers on its stream `theirs`.
    pub fn adverts(&self, theirs: Vqpn) -> u32 {
        self.with(|engine| engine.adverts(theirs.0)).unwrap_or(0)
    }

    /// How many bytes the peer's program waits for with a buffer, on its stream `theirs`, if there is nothing else for
    /// it.
    pub fn wanted(&self, theirs: Vqpn) -> u64 {
        self.with(|engine| engine.wanted(&self.shared, theirs.0)).unwrap_or(0)
    }

    /// The next `len` bytes of a producer, which is at `position` and [wanted](Self::wanted), stay at `address` in the
    /// program's memory, registered under `key`: they are to be committed without being written. False if that cannot
    /// be. To be ended by [`take_source`](Self::take_source).
    pub fn lend_source(&self, theirs: Vqpn, position: u64, address: usize, len: u64, key: u32) -> bool {
        let source = Source {
            from: position,
            until: position.saturating_add(len),
            address,
            key,
            is_needed: false,
            is_offered: false,
        };
        self.with(|engine| engine.lend_source(&self.shared, theirs.0, source))
            .unwrap_or(false)
    }

    /// The same for the peer's device, which reads the bytes under the remote `key` into the peer's ring, if nothing
    /// that was committed before is left to be sent. To be ended by [`recall_source`](Self::recall_source), if
    /// [not done](Self::is_source_done), and [`take_source`](Self::take_source).
    pub fn offer_source(&self, theirs: Vqpn, position: u64, address: usize, len: u64, key: u32) -> bool {
        let source = Source {
            from: position,
            until: position.saturating_add(len),
            address,
            key: 0,
            is_needed: false,
            is_offered: true,
        };
        self.with(|engine| engine.offer_source(&self.shared, theirs.0, source, key))
            .unwrap_or(false)
    }

    /// The peer is to leave what was offered; its end answers how far it has come, and [then](Self::is_source_done) it
    /// reads no more.
    pub fn recall_source(&self, theirs: Vqpn) {
        self.with(|engine| engine.recall_source(&self.shared, theirs.0));
        let _ = self.run(PUMP);
    }

    /// Whether that is to be ended: the peer has all of it, or wants it by the ring.
    pub fn is_source_done(&self, theirs: Vqpn) -> bool {
        self.with(|engine| engine.is_source_done(theirs.0)).unwrap_or(true)
    }

    /// Up to where the peer's device has read of what was [offered](Self::offer_source), once its end has said so; or
    /// its program, which may be less.
    pub fn taken(&self, theirs: Vqpn) -> u64 {
        self.with(|engine| engine.taken(theirs.0)).unwrap_or(0)
    }

    /// What the peer does not have goes into the mirror now. Gives how many bytes its device may still get from the
    /// program's memory; `None` if nothing was lent, or in a signal handler that has interrupted the engine.
    ///
    /// # Safety
    /// What was lent can be read.
    pub unsafe fn take_source(&self, theirs: Vqpn) -> Option<u64> {
        // SAFETY: by this function's contract.
        let left = self.with(|engine| unsafe { engine.take_source(&self.shared, theirs.0) })?;
        let _ = self.run(PUMP);
        left
    }

    /// How many bytes before `position` the peer has not taken.
    pub fn untaken(&self, theirs: Vqpn, position: u64) -> u64 {
        self.with(|engine| engine.untaken(theirs.0, position)).unwrap_or(0)
    }

    /// What has gone past the rings. Zeroes in a signal handler that has interrupted the engine.
    pub fn direct_counts(&self) -> DirectCounts {
        self.with(|engine| engine.direct).unwrap_or_default()
    }
}
