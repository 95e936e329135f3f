//! One attempt to promote one connection, as a state machine without I/O (docs/protocol.md, P10–P39).
//!
//! The caller feeds the machine each input: an answer out of band, a marker found in TCP, or a record of the link. Then
//! the caller carries out the [`Step`]s that the machine returns, in order. The machine holds no data of the stream and
//! no clock: a time-out is an input like any other.
//!
//! ```text
//!  connector   Asked ──YES──▶ Greeted ──HELLO──▶ Linking ──link up──▶ Opening ──OPEN──▶ Closing
//!  acceptor    Offered ──HELLO──▶ Opening ──OPEN──▶ Closing
//! ```
//!
//! Once an end has written or read a HELLO, it writes exactly one closing marker, SWITCH or ABORT. It scans TCP until
//! it has read the peer's closing marker or the end of TCP. So the scan of TCP always ends with a definite event, and
//! neither end can mistake a marker for data or data for a marker.
//!
//! Each end may write its closing marker before it has read the peer's, so the two may differ:
//!
//! | written | read   | what this end does                                                       |
//! |---------|--------|--------------------------------------------------------------------------|
//! | SWITCH  | SWITCH | both directions are on the link                                          |
//! | SWITCH  | ABORT  | demotes its direction at once; the peer drains the link, then reads TCP  |
//! | ABORT   | SWITCH | drains the link up to the DEMOTE that its ABORT leads to                 |
//! | ABORT   | ABORT  | both directions stay on TCP                                              |
//!
//! On a link [between hosts](Handshake::is_between_hosts) there is no DEMOTE. If one closing marker is SWITCH and the
//! other ABORT, [`crate::stream::resume`] takes the direction back.

use crate::ids::{InstanceId, Nonce};

/// Which end of the TCP connection an object belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The end that called connect().
    Connector,
    /// The end that called accept().
    Acceptor,
}

/// The closing marker that an end writes in TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Closing {
    /// The next byte of this direction is on the link.
    Switch,
    /// This direction stays on TCP.
    Abort,
}

/// The state of the attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Connector: it has sent ASK.
    Asked,
    /// Acceptor: it has sent YES, and scans TCP for HELLO.
    Offered,
    /// Connector: it has written HELLO, and scans TCP for the acceptor's HELLO.
    Greeted,
    /// Connector: it waits for the link.
    Linking,
    /// Acceptor: it waits for OPEN on the link. Connector: it has sent OPEN, and waits for OPEN-ACK.
    Opening,
    /// Either end: it has decided on its closing marker. It waits for the peer's closing marker, unless that has come.
    Closing,
}

/// A step for the caller. Steps are carried out in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Stop scanning: no more marker is expected. The receiving direction stays on TCP.
    StopScan,
    /// Write HELLO in TCP.
    WriteHello,
    /// Get the link to this instance: an existing one, or else a new one.
    NeedLink(InstanceId),
    /// Send OPEN (the acceptor: OPEN-ACK) on the link, with a ring to receive into. If that fails, the caller drops the
    /// steps after this one, calls [`Handshake::on_open_failed`], and carries out the steps that it returns.
    SendOpen,
    /// Write this end's closing marker in TCP.
    Write(Closing),
    /// Stop scanning, and receive on the link, where the peer's next byte is. Both are one step: between two steps a
    /// reader would wait for that byte in TCP.
    ReceiveOnLink,
    /// Write the mark DEMOTE on the link, behind the bytes that this end has sent there, even if TCP has not taken
    /// SWITCH yet. The sending direction goes on in TCP behind SWITCH.
    Demote,
    /// The attempt has ended: both directions are on the link.
    Promoted,
    /// The attempt has ended, and only one direction has switched. That direction comes back: within a host by its end
    /// mark, between hosts by RESUME.
    Return,
    /// The attempt has ended: both directions are on TCP. If `Demote` precedes, this end's direction comes back from
    /// the link.
    Abandoned,
}

/// Error: an honest peer cannot send this input, which the text names, in this phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent {0} out of turn")]
pub struct Misplaced(pub &'static str);

/// The steps that one input leads to, in order.
pub type Steps = Vec<Step>;

/// One attempt to promote one connection.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Handshake {
    /// Which end of the connection this state machine belongs to.
    pub role: Role,
    /// The nonce that markers to this end start with.
    pub mine: Nonce,
    /// The nonce that markers to the peer start with; `None` at the connector until YES has brought it.
    pub theirs: Option<Nonce>,
    phase: Phase,
    /// This end has sent OPEN or OPEN-ACK, so the peer may switch.
    opened: bool,
    /// The link leads to another host. The caller sets this before [`on_link_up`](Self::on_link_up) or
    /// [`on_open`](Self::on_open).
    pub is_between_hosts: bool,
    sent: Option<Closing>,
    got: Option<Closing>,
}

impl Handshake {
    /// Creates the connector's end, which has just sent ASK with the nonce `mine`.
    pub fn connector(mine: Nonce) -> Self {
        Self::new(Role::Connector, mine, None, Phase::Asked)
    }

    /// Creates the acceptor's end, which scans TCP for markers that start with `mine`. It answers YES to an ASK that
    /// had the nonce `theirs`.
    pub fn acceptor(mine: Nonce, theirs: Nonce) -> Self {
        Self::new(Role::Acceptor, mine, Some(theirs), Phase::Offered)
    }

    fn new(role: Role, mine: Nonce, theirs: Option<Nonce>, phase: Phase) -> Self {
        Self {
            role,
            mine,
            theirs,
            phase,
            opened: false,
            is_between_hosts: false,
            sent: None,
            got: None,
        }
    }

    /// Returns the state of the attempt.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns whether the attempt can be dropped without a marker, because this end has only sent ASK.
    pub fn is_asking(&self) -> bool {
        self.phase == Phase::Asked
    }

    /// Returns whether the peer's OPEN or OPEN-ACK is the next input.
    pub fn is_opening(&self) -> bool {
        self.phase == Phase::Opening && self.sent.is_none()
    }

    /// Handles YES from a trusted answerer. The caller has begun to scan TCP for markers before.
    pub fn on_yes(&mut self, theirs: Nonce) -> Result<Steps, Misplaced> {
        if self.phase != Phase::Asked {
            return Err(Misplaced("YES"));
        }
        self.theirs = Some(theirs);
        self.phase = Phase::Greeted;
        Ok(vec![Step::WriteHello])
    }

    /// Handles CANCEL: the connector has given up after this end's YES and has not written HELLO.
    pub fn on_cancel(&mut self) -> Result<Steps, Misplaced> {
        if self.phase != Phase::Offered {
            return Err(Misplaced("CANCEL"));
        }
        Ok(vec![Step::StopScan, Step::Abandoned])
    }

    /// Handles HELLO, found in TCP, from the instance `peer`.
    pub fn on_hello(&mut self, peer: InstanceId) -> Result<Steps, Misplaced> {
        match self.phase {
            // This end has written ABORT since its own HELLO. The peer's ABORT will follow this HELLO.
            Phase::Closing if self.role == Role::Connector && self.sent == Some(Closing::Abort) => Ok(Steps::new()),
            Phase::Offered => {
                self.phase = Phase::Opening;
                Ok(vec![Step::WriteHello])
            }
            Phase::Greeted => {
                self.phase = Phase::Linking;
                Ok(vec![Step::NeedLink(peer)])
            }
            _ => Err(Misplaced("HELLO")),
        }
    }

    /// Continues the attempt of the connector: the link that [`Step::NeedLink`] has requested is up.
    pub fn on_link_up(&mut self) -> Result<Steps, Misplaced> {
        if self.phase != Phase::Linking {
            return Ok(Steps::new());
        }
        self.phase = Phase::Opening;
        self.opened = true;
        Ok(vec![Step::SendOpen])
    }

    /// Handles OPEN or OPEN-ACK: the peer can receive on the link. The caller has checked both nonces of an OPEN. If
    /// this end has written ABORT meanwhile, the message has no effect; an acceptor's caller then refuses the OPEN.
    pub fn on_open(&mut self) -> Result<Steps, Misplaced> {
        if self.sent == Some(Closing::Abort) {
            return Ok(Steps::new());
        }
        if self.phase != Phase::Opening || self.sent.is_some() {
            return Err(Misplaced("OPEN"));
        }
        let mut steps = Steps::new();
        if self.role == Role::Acceptor {
            self.opened = true;
            steps.push(Step::SendOpen);
        }
        self.close(Closing::Switch, &mut steps);
        Ok(steps)
    }

    /// Handles a failure of [`Step::SendOpen`]. The caller has dropped the steps after it.
    pub fn on_open_failed(&mut self) -> Steps {
        self.opened = false;
        self.sent = None;
        self.give_up()
    }

    /// Gives the attempt up: this end cannot or will not go on (no link, no memory, time-out). If this end has only
    /// sent ASK, the attempt just ends. If it has written or read HELLO, and has not written a closing marker, it
    /// writes ABORT. Has no effect otherwise.
    pub fn give_up(&mut self) -> Steps {
        if self.phase == Phase::Asked {
            return vec![Step::Abandoned];
        }
        if self.sent.is_some() || self.phase == Phase::Offered {
            // This end has written its closing marker already. Or it has sent YES, and only the connector can end that
            // phase.
            return Steps::new();
        }
        let mut steps = Steps::new();
        self.close(Closing::Abort, &mut steps);
        steps
    }

    /// Handles a marker in TCP that cannot be decoded. The peer has begun the exchange of markers and waits for a
    /// closing marker, so this end writes ABORT, even in the phase `Offered`.
    pub fn on_bad_marker(&mut self) -> Steps {
        if self.phase == Phase::Offered {
            self.phase = Phase::Opening;
        }
        self.give_up()
    }

    /// Handles the peer's closing marker, found in TCP.
    pub fn on_closing(&mut self, closing: Closing) -> Result<Steps, Misplaced> {
        // The peer switches only once it has received this end's OPEN or OPEN-ACK. An acceptor sends OPEN-ACK together
        // with its SWITCH.
        let too_early = closing == Closing::Switch
            && match self.role {
                Role::Connector => !self.opened,
                Role::Acceptor => self.sent != Some(Closing::Switch),
            };
        if self.got.is_some() || too_early || self.phase == Phase::Asked {
            return Err(Misplaced("a closing marker"));
        }
        Ok(self.closed_by_peer(closing))
    }

    /// Handles the end of TCP in the peer's direction. No marker comes after it.
    pub fn on_end(&mut self) -> Steps {
        if self.got.is_some() || self.phase == Phase::Asked {
            return Steps::new();
        }
        if self.phase == Phase::Offered {
            return vec![Step::StopScan, Step::Abandoned];
        }
        self.closed_by_peer(Closing::Abort)
    }

    /// Ends the connector's attempt: this end's direction of TCP has ended before TCP took a byte of HELLO
    /// ([`Step::WriteHello`]), so the acceptor will not answer. Has an effect in the phase `Greeted` only. In other
    /// phases a marker that is dropped needs no step, because the peer handles the end of TCP as an ABORT.
    pub fn on_hello_unwritten(&mut self) -> Steps {
        if self.phase == Phase::Greeted {
            vec![Step::StopScan, Step::Abandoned]
        } else {
            Steps::new()
        }
    }

    fn closed_by_peer(&mut self, closing: Closing) -> Steps {
        self.got = Some(closing);
        let mut steps = match closing {
            Closing::Switch => vec![Step::ReceiveOnLink],
            // Scanning goes on: the peer's RESUME follows, perhaps behind data.
            Closing::Abort if self.is_between_hosts && self.sent == Some(Closing::Switch) => Steps::new(),
            Closing::Abort => vec![Step::StopScan],
        };
        if self.sent.is_none() && closing == Closing::Abort {
            self.close(Closing::Abort, &mut steps);
        } else {
            self.finish(&mut steps);
        }
        steps
    }

    fn close(&mut self, closing: Closing, steps: &mut Steps) {
        self.phase = Phase::Closing;
        self.sent = Some(closing);
        steps.push(Step::Write(closing));
        self.finish(steps);
    }

    fn finish(&self, steps: &mut Steps) {
        use Closing::{Abort, Switch};
        match (self.sent, self.got) {
            (Some(Switch), Some(Switch)) => steps.push(Step::Promoted),
            (Some(Switch), Some(Abort)) if !self.is_between_hosts => steps.extend([Step::Demote, Step::Abandoned]),
            (Some(Switch), Some(Abort)) | (Some(Abort), Some(Switch)) => steps.push(Step::Return),
            (Some(Abort), Some(Abort)) => steps.push(Step::Abandoned),
            _ => {}
        }
    }
}

#[cfg(test)]
mod explore;

#[cfg(test)]
mod tests;
