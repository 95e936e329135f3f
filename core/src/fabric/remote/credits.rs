//! Counts the peer's receive buffers: a message that finds none would end the connection. Not for the send queue.
//!
//! Each end has `most` buffers posted. A message takes one; the peer has posted it again when it has
//! handled the message, and gives it back with the next message that it sends (*grant*). Ordinary
//! messages leave the last credit; it is for a message with nothing but a grant, which is due when half of
//! the buffers are to be given back. So both ends cannot run dry: if one is down to its last credit
//! and nothing is under way, the other owes it all but one, which is at least half; and if the other has
//! used its own last credit, that grant has been received by the first or will be.

#![forbid(unsafe_code)]

use super::fault::Breach;

#[derive(Debug)]
pub(super) struct Credits {
    most: u16,
    /// Messages that may be sent.
    have: u16,
    /// Buffers that are posted again and to be granted to the peer.
    owed: u16,
}

impl Credits {
    pub fn new(most: u16) -> Self {
        Self {
            most,
            have: most,
            owed: 0,
        }
    }

    /// Returns whether an ordinary message may be sent.
    pub fn can_send(&self) -> bool {
        self.have > 1
    }

    /// Returns whether a message with only a grant is due, and may be sent.
    pub fn must_grant(&self) -> bool {
        self.owed >= self.most / 2 && self.have > 0
    }

    /// Returns how many buffers the next message gives back.
    pub fn grant(&self) -> u16 {
        self.owed
    }

    /// Records that a message was sent with this grant.
    pub fn on_sent(&mut self) {
        self.have = self.have.saturating_sub(1);
        self.owed = 0;
    }

    /// Records that a WRITE with an immediate was sent, which grants nothing.
    pub fn on_immediate(&mut self) {
        self.have = self.have.saturating_sub(1);
    }

    /// Records a message or immediate that took a receive buffer of this end. An error if the peer had no credit.
    pub fn on_received(&mut self) -> Result<(), Breach> {
        // The peer never has more credits than this end has buffers.
        self.owed = self
            .owed
            .checked_add(1)
            .filter(|o| *o <= self.most)
            .ok_or(Breach::Grant)?;
        Ok(())
    }

    /// Adds the credits of a grant. An error if that is more than the peer has buffers.
    pub fn on_grant(&mut self, grant: u16) -> Result<(), Breach> {
        self.have = self
            .have
            .checked_add(grant)
            .filter(|h| *h <= self.most)
            .ok_or(Breach::Grant)?;
        Ok(())
    }
}
