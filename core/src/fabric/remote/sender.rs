//! Collects records into a message, and sends the message when it is full or there is no more to add. Sending a message
//! takes a credit and room in the send queue. Collected records count as sent, and go out before any later message.
//! `pump.rs` decides what is collected.
//!
//! A credit stands for one of the peer's receive buffers; a message that finds no buffer would end the connection. Each
//! end has `most` buffers posted. A message takes one buffer. When the peer has handled the message it posts the buffer
//! again, and grants the credit back with the next message that it sends (*grant*). Ordinary messages leave the last
//! credit. That credit is for a message with nothing but a grant, which is due when half of the buffers are to be
//! granted back. So the two ends cannot both run out of credits. Suppose that end A has one credit left and nothing is
//! under way. Then end B has all of A's other credits to grant. They are at least half, so B's grant is due. If B has
//! used its own last credit, it was for such a grant, which A has received or will receive.

use crate::fabric::remote::qp::{Down, Limits, PostError, QueuePair, Write};
use crate::fabric::remote::record::{Builder, DATA_BYTES, HEADER_BYTES, MESSAGE_BYTES, Record};
use crate::fabric::remote::{Breach, Counts, Fault, record};
use crate::wire::MAX_MESSAGE;

/// Why no more can be sent at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Halt {
    /// A credit or room in the send queue is missing. The send is tried again when a completion has brought it.
    Blocked,
    /// The link is down.
    Down(Fault),
}

impl From<Breach> for Halt {
    fn from(breach: Breach) -> Self {
        Self::Down(breach.into())
    }
}

/// Turns [`Halt::Blocked`] into success: blocked work waits, and is no fault.
pub(super) fn unless_blocked(sent: Result<(), Halt>) -> Result<(), Fault> {
    match sent {
        Ok(()) | Err(Halt::Blocked) => Ok(()),
        Err(Halt::Down(fault)) => Err(fault),
    }
}

/// The message being collected, and the means to send it.
pub(super) struct Sender {
    staged: Builder,
    /// The number of receive buffers of each end.
    most: u16,
    /// The number of messages that may be sent.
    credits: u16,
    /// The number of buffers that are posted again, and whose credits are not granted to the peer yet.
    owed: u16,
    is_full: bool,
    pub counts: Counts,
}

impl Sender {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            staged: Builder::new(limits.buffer_bytes as usize),
            most: limits.receive_buffers,
            credits: limits.receive_buffers,
            owed: 0,
            is_full: false,
            counts: Counts::default(),
        }
    }

    /// Returns whether a credit or room in the send queue is missing. Only completions can bring either.
    pub(super) fn is_short(&self) -> bool {
        self.is_full || !self.has_credit()
    }

    /// Returns a number that grows with each post, each attempt that found the queue full, and each call of
    /// `End::doubt`.
    #[inline]
    pub(super) fn done(&self) -> u64 {
        let counts = &self.counts;
        counts
            .sends
            .wrapping_add(counts.writes)
            .wrapping_add(counts.full)
            .wrapping_add(counts.doubts)
    }

    pub(super) fn on_room(&mut self) {
        self.is_full = false;
    }

    /// Records a message or immediate that took a receive buffer of this end. Fails if the peer had no credit for it.
    pub(super) fn on_received(&mut self) -> Result<(), Breach> {
        self.counts.received += 1;
        // The peer never has more credits than this end has buffers, so this end never owes more.
        let owed = self.owed.checked_add(1).filter(|owed| *owed <= self.most);
        self.owed = owed.ok_or(Breach::Grant)?;
        Ok(())
    }

    /// Adds the credits of a grant. Fails if the sum is more than the peer has buffers.
    pub(super) fn on_grant(&mut self, grant: u16) -> Result<(), Breach> {
        let credits = self.credits.checked_add(grant).filter(|credits| *credits <= self.most);
        self.credits = credits.ok_or(Breach::Grant)?;
        Ok(())
    }

    /// Returns whether no record is collected.
    pub(super) fn is_empty(&self) -> bool {
        self.staged.is_empty()
    }

    /// Returns whether the peer has a receive buffer for an ordinary message.
    pub(super) fn has_credit(&self) -> bool {
        self.credits > 1
    }

    /// Returns how many bytes of payload fit one message.
    pub(super) fn most_payload(&self) -> usize {
        self.staged.capacity().saturating_sub(DATA_BYTES)
    }

    /// Processes the result of a post.
    fn posted(&mut self, result: Result<(), PostError>) -> Result<(), Halt> {
        match result {
            Ok(()) => Ok(()),
            Err(PostError::Full) => {
                self.is_full = true;
                self.counts.full += 1;
                Err(Halt::Blocked)
            }
            Err(PostError::Down) => Err(Halt::Down(Down(0).into())),
        }
    }

    /// Processes the result of posting a message, which has granted all credits that were owed.
    fn sent(&mut self, result: Result<(), PostError>) -> Result<(), Halt> {
        self.posted(result)?;
        self.credits = self.credits.saturating_sub(1);
        self.owed = 0;
        self.counts.sends += 1;
        Ok(())
    }

    /// Sends the collected message, if it has records.
    fn flush(&mut self, qp: &impl QueuePair) -> Result<(), Halt> {
        if self.staged.is_empty() {
            return Ok(());
        }
        if self.is_short() {
            return Err(Halt::Blocked);
        }
        let posted = qp.send(self.staged.finish(self.owed));
        self.sent(posted)?;
        self.staged.clear();
        Ok(())
    }

    /// Sends a message with only a grant, if one is due.
    fn grant(&mut self, qp: &impl QueuePair) -> Result<(), Halt> {
        if self.is_full || self.owed < self.most / 2 || self.credits == 0 {
            return Ok(());
        }
        self.sent(qp.send(&record::bare(self.owed)))
    }

    /// Sends the collected message, and then a grant if one is due. To be called when there is no more to add.
    pub(super) fn finish(&mut self, qp: &impl QueuePair) -> Result<(), Fault> {
        unless_blocked(self.flush(qp))?;
        unless_blocked(self.grant(qp))
    }

    /// Adds a record. If there is no room, first sends the collected message.
    pub(super) fn put(&mut self, qp: &impl QueuePair, record: &Record<'_>) -> Result<(), Halt> {
        if self.staged.push(record) {
            return Ok(());
        }
        self.flush(qp)?;
        // Every record fits an empty message: the length of a MESSAGE record is checked when it is queued.
        if !self.staged.push(record) {
            return Err(Breach::Message.into());
        }
        Ok(())
    }

    /// Adds a DATA record with `len` bytes of payload, which end at position `tail`; `len` is at most
    /// [`most_payload`](Self::most_payload). `fill` writes the payload. If there is no room, first sends the collected
    /// message.
    pub(super) fn put_data(
        &mut self,
        qp: &impl QueuePair,
        theirs: u32,
        tail: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> Result<(), Halt> {
        if self.staged.room() < len + DATA_BYTES {
            self.flush(qp)?;
        }
        if !self.staged.push_data(theirs, tail, len, fill) {
            // This cannot happen: the payload is no longer than the room, and lies within the ring.
            return Err(Breach::Message.into());
        }
        self.counts.eager_bytes += len as u64;
        Ok(())
    }

    /// Posts a WRITE. A WRITE with an immediate takes a credit.
    ///
    /// # Safety
    /// As for [`QueuePair::write`].
    pub(super) unsafe fn write(
        &mut self,
        qp: &impl QueuePair,
        write: &Write,
        immediate: Option<u32>,
    ) -> Result<(), Halt> {
        if self.is_full {
            return Err(Halt::Blocked);
        }
        // SAFETY: by this function's contract.
        let posted = unsafe { qp.write(write, immediate) };
        self.posted(posted)?;
        self.counts.writes += 1;
        if immediate.is_some() {
            self.counts.immediates += 1;
            self.credits = self.credits.saturating_sub(1);
        }
        Ok(())
    }
}

const _: () = assert!(MESSAGE_BYTES + MAX_MESSAGE + HEADER_BYTES + record::LONGEST < 2048);
