//! The calls of an end of a link between hosts for transfers that bypass the rings. They are about its bulk queue pair,
//! buffers with which local programs wait, and memory that they lend. The engine does the work (`landing.rs`,
//! `taking.rs`); `end.rs` decides which thread does it.

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
    /// Uses `qp` for direct transfers (P90) from now on. It is connected, beside the link's own queue pair, and has not
    /// been used. Returns `qp` if there is one already, or if the link is down.
    pub fn attach_bulk(&self, qp: Q) -> Option<Q> {
        if self.is_down() {
            return Some(qp);
        }
        let mut qp = Some(qp);
        self.with(|engine| qp = qp.take().and_then(|qp| engine.attach_bulk(qp)));
        let _ = self.run(ARM | POLL | PUMP);
        qp
    }

    /// Gives the bulk queue pair up: the peer has given up its end, or the caller wants to.
    pub fn drop_bulk(&self) {
        self.with(|engine| engine.drop_bulk(&self.shared));
        let _ = self.run(PUMP);
    }

    /// Calls `end` for each bulk queue pair that was given up since the last call, to end it. Returns how many; the
    /// caller notifies the peer of each.
    pub fn end_retired(&self, mut end: impl FnMut(Q)) -> usize {
        self.shared.retired_unseen.publish(false);
        // Not under this lock: a thread that gives one up takes the lock under the engine's.
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

    /// Returns this end's number of the stream that the peer calls `theirs`, and how many bytes a buffer for it may
    /// have now. `None` if there is no such stream, or its ring is not empty.
    pub fn room_to_land(&self, theirs: Vqpn) -> Option<(Vqpn, u64)> {
        let (mine, room) = self.with(|engine| engine.room_to_land(&self.shared, theirs.0))??;
        Some((Vqpn(mine), room))
    }

    /// Announces to the peer a buffer with which the program waits on stream `mine`, whose ring is empty; perhaps only
    /// its beginning. The buffer is for the bytes that come next. [`landed`](Self::landed) returns its state. `None` if
    /// the buffer cannot be used.
    pub fn advertise(&self, mine: Vqpn, buffer: Buffer) -> Option<Memory> {
        let made = self.with(|engine| engine.advertise(&self.shared, mine.0, buffer))?;
        let _ = self.run(PUMP);
        made
    }

    /// Returns the state of an advert. Its bytes count as the next ones of the ring, which does not have them. The
    /// caller that gets them consumes as many, and then calls [`settle_head`](Self::settle_head). `None` in a signal
    /// handler that has interrupted the engine.
    pub fn landed(&self, mine: Vqpn, serial: u32) -> Option<Landed> {
        self.with(|engine| engine.landed(mine.0, serial))
    }

    /// Withdraws an advert: the program waits no longer. The advert is over when [`landed`](Self::landed) says so;
    /// until then the peer's device may write to the buffer.
    pub fn withdraw(&self, mine: Vqpn, serial: u32) {
        self.with(|engine| engine.withdraw(&self.shared, mine.0, serial));
        let _ = self.run(PUMP);
    }

    /// Records that bytes which came into a program's buffer were copied to the ring, at their positions: the program
    /// is not about to take them.
    pub fn put_back(&self, mine: Vqpn) {
        self.with(|engine| engine.put_back(&self.shared, mine.0));
        let _ = self.run(PUMP);
    }

    /// Sends the peer at once the head of stream `mine`, which was [published](crate::fabric::ring::Consumer::publish).
    pub fn settle_head(&self, mine: Vqpn) {
        self.with(|engine| engine.settle_head(&self.shared, mine.0));
        let _ = self.run(PUMP);
    }

    /// Returns how many buffers the peer's programs have announced for its stream `theirs`.
    pub fn adverts(&self, theirs: Vqpn) -> u32 {
        self.with(|engine| engine.adverts(theirs.0)).unwrap_or(0)
    }

    /// Returns how many bytes fit the buffer with which the peer's program waits on its stream `theirs`. It is 0 if
    /// there is none, or other bytes come before.
    pub fn wanted(&self, theirs: Vqpn) -> u64 {
        self.with(|engine| engine.wanted(&self.shared, theirs.0)).unwrap_or(0)
    }

    /// Lends program memory for WRITEs: the next `len` bytes of a producer, which is at `position` and
    /// [wanted](Self::wanted), stay at `address`, registered under `key`. The producer commits them without writing
    /// them. False if the peer cannot take them. To be ended by [`take_source`](Self::take_source).
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

    /// Lends program memory to the peer's device, which reads the bytes under the remote `key` into the peer's ring.
    /// False if bytes that were committed before are left to be sent, among other reasons. To be ended by
    /// [`recall_source`](Self::recall_source), if [not done](Self::is_source_done), and
    /// [`take_source`](Self::take_source).
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

    /// Asks the peer to stop reading the offered memory. Its end answers how far it has read, and
    /// [then](Self::is_source_done) it reads no more.
    pub fn recall_source(&self, theirs: Vqpn) {
        self.with(|engine| engine.recall_source(&self.shared, theirs.0));
        let _ = self.run(PUMP);
    }

    /// Returns whether the loan is to be ended: the peer has all of the bytes, or needs the rest in the ring.
    pub fn is_source_done(&self, theirs: Vqpn) -> bool {
        self.with(|engine| engine.is_source_done(theirs.0)).unwrap_or(true)
    }

    /// Returns the position up to which the peer's device has read the [offered](Self::offer_source) memory, once its
    /// end has said so. Before that, the position up to which its program has read, which may be less.
    pub fn taken(&self, theirs: Vqpn) -> u64 {
        self.with(|engine| engine.taken(theirs.0)).unwrap_or(0)
    }

    /// Ends a loan: copies the bytes that the peer does not have into the mirror. Returns how many bytes its device may
    /// still get from the program's memory. `None` if no memory was lent, or in a signal handler that has interrupted
    /// the engine.
    ///
    /// # Safety
    /// The lent memory can be read.
    pub unsafe fn take_source(&self, theirs: Vqpn) -> Option<u64> {
        // SAFETY: by this function's contract.
        let left = self.with(|engine| unsafe { engine.take_source(&self.shared, theirs.0) })?;
        let _ = self.run(PUMP);
        left
    }

    /// Returns how many bytes before `position` the peer's program has not read.
    pub fn untaken(&self, theirs: Vqpn, position: u64) -> u64 {
        self.with(|engine| engine.untaken(theirs.0, position)).unwrap_or(0)
    }

    /// Returns the counts of transfers that bypass the rings. Zeroes in a signal handler that has interrupted the
    /// engine.
    pub fn direct_counts(&self) -> DirectCounts {
        self.with(|engine| engine.direct).unwrap_or_default()
    }
}
