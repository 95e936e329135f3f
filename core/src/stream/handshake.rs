//! One attempt to promote one connection, as a state machine without I/O (docs/protocol.md, P10–P39).
//!
//! The caller feeds it what arrives (answers out of band, markers found in TCP, records of the
//! link) and carries out the [`Step`]s that it returns, in order. It holds no data of the stream
//! and no clock: a time-out is an input like any other.
//!
//! ```text
//!  connector   Asked ──YES──▶ Greeted ──HELLO──▶ Linking ──link up──▶ Opening ──OPEN──▶ Closing
//!  acceptor    Offered ──HELLO──▶ Opening ──OPEN──▶ Closing
//! ```
//!
//! From the moment an end has let a HELLO of its own go, each end writes exactly one closing
//! marker, SWITCH or ABORT, and reads (scans) until it has got the other's or the end of TCP. So
//! the window in which TCP is scanned always ends with a definite event, and neither end can take
//! a marker for data or data for a marker.
//!
//! The two closing markers cross, so they may differ:
//!
//! | written | read   | what this end does                                                       |
//! |---------|--------|--------------------------------------------------------------------------|
//! | SWITCH  | SWITCH | both directions are on the link                                          |
//! | SWITCH  | ABORT  | demotes its direction at once; the other drains the link, then reads TCP |
//! | ABORT   | SWITCH | drains the link up to the DEMOTE that its ABORT leads to                 |
//! | ABORT   | ABORT  | both directions stay on TCP                                              |
//!
//! On a link [between hosts](Handshake::between_hosts) there is no DEMOTE: where one of the two is SWITCH
//! and the other ABORT, [`super::resume`] goes on from there.

use crate::ids::{InstanceId, Nonce};

/// Which end of the TCP connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The end that called connect().
    Connector,
    /// The end that called accept().
    Acceptor,
}

/// How an end closes its side of the handshake in TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Closing {
    /// The next byte of this direction is on the link.
    Switch,
    /// This direction stays on TCP.
    Abort,
}

/// Where the attempt stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Connector: ASK is out.
    Asked,
    /// Acceptor: YES is out; looks for HELLO in TCP.
    Offered,
    /// Connector: HELLO is written; looks for the other's HELLO in TCP.
    Greeted,
    /// Connector: waits for the link.
    Linking,
    /// Waits for the other's OPEN on the link.
    Opening,
    /// Has closed its own direction, or waits for the other to.
    Closing,
}

/// What the caller has to do next, in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// From now on look for markers in what TCP delivers.
    StartScan,
    /// Nothing more is to be looked for in TCP, which goes on.
    StopScan,
    /// Answer YES out of band.
    SendYes,
    /// Write HELLO in TCP.
    WriteHello,
    /// Get the link to this instance (the one there is, or a new one).
    NeedLink(InstanceId),
    /// Send OPEN on the link, with a ring to receive into. If that cannot be done, feed
    /// [`Handshake::on_open_failed`] and carry out its steps in place of those after this one.
    SendOpen,
    /// Write SWITCH in TCP; the next byte of this direction is on the link.
    WriteSwitch,
    /// Write ABORT in TCP; this direction stays on TCP.
    WriteAbort,
    /// Nothing more is to be looked for in TCP, and the other's next byte is on the link. One step: a
    /// reader that came in between would wait for that byte in TCP.
    ReceiveOnLink,
    /// Mark the end of our direction on the link, even if SWITCH is not out yet: the byte after
    /// SWITCH and after what the link got is on TCP.
    Demote,
    /// Over: both directions are on the link.
    Promoted,
    /// Over: ours is on TCP as before; the other's is once the link is read up to its end mark.
    Drain,
    /// Over, and one direction has switched to a link between hosts: it comes back by RESUME.
    Resume,
    /// Over: both directions are on TCP as before.
    Abandoned,
}

/// An input that the machine has no use for in its phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misplaced {
    /// The peer sent something that an honest one cannot send now.
    #[error("the peer sent {0} out of turn")]
    Peer(&'static str),
}

/// Up to a handful of steps.
pub type Steps = Vec<Step>;

/// One attempt to promote one connection.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Handshake {
    role: Role,
    mine: Nonce,
    theirs: Option<Nonce>,
    phase: Phase,
    /// OPEN is out, so the other may switch.
    opened: bool,
    /// The link is one between hosts.
    remote: bool,
    sent: Option<Closing>,
    got: Option<Closing>,
}

impl Handshake {
    /// The connector's end: ASK has just been sent with the nonce `mine`.
    pub fn connector(mine: Nonce) -> Self {
        Self {
            role: Role::Connector,
            mine,
            theirs: None,
            phase: Phase::Asked,
            opened: false,
            remote: false,
            sent: None,
            got: None,
        }
    }

    /// The acceptor's end: an ASK with the nonce `theirs` was accepted.
    pub fn acceptor(mine: Nonce, theirs: Nonce) -> (Self, Steps) {
        let this = Self {
            role: Role::Acceptor,
            mine,
            theirs: Some(theirs),
            phase: Phase::Offered,
            opened: false,
            remote: false,
            sent: None,
            got: None,
        };
        (this, vec![Step::StartScan, Step::SendYes])
    }

    /// The nonce that markers to this end start with.
    pub fn mine(&self) -> Nonce {
        self.mine
    }

    /// The nonce that markers to the other end start with, once known.
    pub fn theirs(&self) -> Option<Nonce> {
        self.theirs
    }

    /// Where the attempt stands.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Which end this is.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Whether an ASK may simply be forgotten: nothing in TCP depends on it yet.
    pub fn is_asking(&self) -> bool {
        self.phase == Phase::Asked
    }

    /// Whether OPEN is what comes next.
    pub fn is_opening(&self) -> bool {
        self.phase == Phase::Opening && self.sent.is_none()
    }

    /// The link that OPEN comes or goes over leads to another host. To be said before
    /// [`on_link_up`](Self::on_link_up) or [`on_open`](Self::on_open).
    pub fn between_hosts(&mut self) {
        self.remote = true;
    }

    /// Whether that was said.
    pub fn is_between_hosts(&self) -> bool {
        self.remote
    }

    /// The closing marker that this end has decided on.
    pub fn sent(&self) -> Option<Closing> {
        self.sent
    }

    /// YES from a trusted answerer.
    pub fn on_yes(&mut self, theirs: Nonce) -> Result<Steps, Misplaced> {
        if self.phase != Phase::Asked {
            return Err(Misplaced::Peer("YES"));
        }
        self.theirs = Some(theirs);
        self.phase = Phase::Greeted;
        Ok(vec![Step::StartScan, Step::WriteHello])
    }

    /// The connector gave up after our YES and has not written HELLO.
    pub fn on_cancel(&mut self) -> Result<Steps, Misplaced> {
        if self.phase != Phase::Offered {
            return Err(Misplaced::Peer("CANCEL"));
        }
        Ok(vec![Step::StopScan, Step::Abandoned])
    }

    /// HELLO found in TCP, from the instance `peer`.
    pub fn on_hello(&mut self, peer: InstanceId) -> Result<Steps, Misplaced> {
        match self.phase {
            // We have aborted since; its ABORT follows.
            Phase::Closing if self.role == Role::Connector && self.sent == Some(Closing::Abort) => Ok(Steps::new()),
            Phase::Offered => {
                self.phase = Phase::Opening;
                Ok(vec![Step::WriteHello])
            }
            Phase::Greeted => {
                self.phase = Phase::Linking;
                Ok(vec![Step::NeedLink(peer)])
            }
            _ => Err(Misplaced::Peer("HELLO")),
        }
    }

    /// The link asked for is there (connector).
    pub fn on_link_up(&mut self) -> Result<Steps, Misplaced> {
        if self.phase != Phase::Linking {
            return Ok(Steps::new());
        }
        self.phase = Phase::Opening;
        self.opened = true;
        Ok(vec![Step::SendOpen])
    }

    /// OPEN with both nonces right: the other end can receive on the link. Without effect on an
    /// end that has aborted meanwhile: if that is the acceptor, it is to be refused.
    pub fn on_open(&mut self) -> Result<Steps, Misplaced> {
        if self.sent == Some(Closing::Abort) {
            return Ok(Steps::new());
        }
        if self.phase != Phase::Opening || self.sent.is_some() {
            return Err(Misplaced::Peer("OPEN"));
        }
        let mut steps = Steps::new();
        if self.role == Role::Acceptor {
            self.opened = true;
            steps.push(Step::SendOpen);
        }
        self.close(Closing::Switch, &mut steps);
        Ok(steps)
    }

    /// [`Step::SendOpen`] could not be carried out, nor were the steps after it.
    pub fn on_open_failed(&mut self) -> Steps {
        self.opened = false;
        self.sent = None;
        self.give_up()
    }

    /// This end cannot or will not go on (no link, no memory, time-out). Before anything is in
    /// TCP the attempt just ends; after that ABORT closes it.
    pub fn give_up(&mut self) -> Steps {
        if self.phase == Phase::Asked {
            return vec![Step::Abandoned];
        }
        if self.sent.is_some() || self.phase == Phase::Offered {
            // Closed already, or only the connector can end this phase.
            return Steps::new();
        }
        let mut steps = Steps::new();
        self.close(Closing::Abort, &mut steps);
        steps
    }

    /// A marker that cannot be understood was found in TCP. Whoever wrote it has begun, so it
    /// is owed an answer in every phase.
    pub fn on_bad_marker(&mut self) -> Steps {
        if self.phase == Phase::Offered {
            self.phase = Phase::Opening;
        }
        self.give_up()
    }

    /// The other's closing marker was found in TCP.
    pub fn on_closing(&mut self, closing: Closing) -> Result<Steps, Misplaced> {
        // The other switches only once it has our OPEN; the acceptor's comes with its own SWITCH.
        let too_early = closing == Closing::Switch
            && match self.role {
                Role::Connector => !self.opened,
                Role::Acceptor => self.sent != Some(Closing::Switch),
            };
        if self.got.is_some() || too_early || self.phase == Phase::Asked {
            return Err(Misplaced::Peer("a closing marker"));
        }
        Ok(self.closed_by_peer(closing))
    }

    /// TCP has ended in the other's direction: no marker will come any more.
    pub fn on_end(&mut self) -> Steps {
        if self.got.is_some() || self.phase == Phase::Asked {
            return Steps::new();
        }
        if self.phase == Phase::Offered {
            return vec![Step::StopScan, Step::Abandoned];
        }
        self.closed_by_peer(Closing::Abort)
    }

    /// Our own direction of TCP ended before a byte of [`Step::WriteHello`] was in it, so the
    /// acceptor will not answer. (What follows HELLO may be dropped then without a word: to the
    /// other the end of TCP is an ABORT.)
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
            // RESUME follows, with data before it.
            Closing::Abort if self.remote && self.sent == Some(Closing::Switch) => Steps::new(),
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
        steps.push(match closing {
            Closing::Switch => Step::WriteSwitch,
            Closing::Abort => Step::WriteAbort,
        });
        self.finish(steps);
    }

    fn finish(&self, steps: &mut Steps) {
        use Closing::{Abort, Switch};
        match (self.sent, self.got) {
            (Some(Switch), Some(Switch)) => steps.push(Step::Promoted),
            (Some(Switch), Some(Abort)) | (Some(Abort), Some(Switch)) if self.remote => {
                steps.push(Step::Resume);
            }
            (Some(Switch), Some(Abort)) => steps.extend([Step::Demote, Step::Abandoned]),
            (Some(Abort), Some(Switch)) => steps.push(Step::Drain),
            (Some(Abort), Some(Abort)) => steps.push(Step::Abandoned),
            _ => {}
        }
    }
}

#[cfg(test)]
mod explore;

#[cfg(test)]
mod tests;
