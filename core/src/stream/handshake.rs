//! One attempt to promote one connection, as a state machine without I/O (DESIGN §4).
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
//! marker, SWITCH or ABORT, and reads (scans) until it has got the other's. So the window in
//! which TCP is scanned always ends with a definite event, and neither end can take a marker for
//! data or data for a marker.

use crate::ids::{InstanceId, Nonce};

/// Which end of the TCP connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The end that called connect().
    Connector,
    /// The end that called accept().
    Acceptor,
}

/// How an end closes its side of the handshake in TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// The next byte of this direction is on the link.
    Switch,
    /// This direction stays on TCP.
    Abort,
}

/// Where the attempt stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// From now on look for markers in what TCP delivers.
    StartScan,
    /// Nothing more is to be looked for in TCP.
    StopScan,
    /// Answer YES out of band.
    SendYes,
    /// Write HELLO in TCP.
    WriteHello,
    /// Get the link to this instance (the one there is, or a new one).
    NeedLink(InstanceId),
    /// Send OPEN on the link, with a ring to receive into.
    SendOpen,
    /// Write SWITCH in TCP; the next byte of this direction is on the link.
    WriteSwitch,
    /// Write ABORT in TCP; this direction stays on TCP.
    WriteAbort,
    /// The other's next byte is on the link.
    ReceiveOnLink,
    /// Over: both directions are on the link.
    Promoted,
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
#[derive(Debug, Clone)]
pub struct Handshake {
    role: Role,
    mine: Nonce,
    theirs: Option<Nonce>,
    phase: Phase,
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

    /// YES from a trusted answerer.
    pub fn on_yes(&mut self, theirs: Nonce) -> Result<Steps, Misplaced> {
        if self.phase != Phase::Asked {
            return Err(Misplaced::Peer("YES"));
        }
        self.theirs = Some(theirs);
        self.phase = Phase::Greeted;
        Ok(vec![Step::StartScan, Step::WriteHello])
    }

    /// NO, or no answer in time. Nothing was written in TCP.
    pub fn on_no(&mut self) -> Result<Steps, Misplaced> {
        if self.phase != Phase::Asked {
            return Err(Misplaced::Peer("NO"));
        }
        Ok(vec![Step::Abandoned])
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
            Phase::Closing if self.role == Role::Connector && self.sent == Some(Closing::Abort) => {
                Ok(Steps::new())
            }
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
        Ok(vec![Step::SendOpen])
    }

    /// OPEN with both nonces right: the other end can receive on the link.
    pub fn on_open(&mut self) -> Result<Steps, Misplaced> {
        if self.phase != Phase::Opening || self.sent.is_some() {
            return Err(Misplaced::Peer("OPEN"));
        }
        self.phase = Phase::Closing;
        self.sent = Some(Closing::Switch);
        let mut steps = Steps::new();
        if self.role == Role::Acceptor {
            steps.push(Step::SendOpen);
        }
        steps.push(Step::WriteSwitch);
        self.finish(&mut steps);
        Ok(steps)
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
        self.phase = Phase::Closing;
        self.sent = Some(Closing::Abort);
        let mut steps = vec![Step::WriteAbort];
        self.finish(&mut steps);
        steps
    }

    /// The other's closing marker was found in TCP.
    pub fn on_closing(&mut self, closing: Closing) -> Result<Steps, Misplaced> {
        let too_early = match self.role {
            // Its HELLO comes first, and the other switches only after our OPEN.
            Role::Connector => match closing {
                Closing::Switch => !matches!(self.phase, Phase::Opening | Phase::Closing),
                Closing::Abort => matches!(self.phase, Phase::Asked),
            },
            Role::Acceptor => match closing {
                Closing::Switch => self.sent != Some(Closing::Switch),
                Closing::Abort => false,
            },
        };
        if self.got.is_some() || too_early || (closing == Closing::Switch && self.sent == Some(Closing::Abort)) {
            return Err(Misplaced::Peer("a closing marker"));
        }
        self.got = Some(closing);
        let mut steps = vec![Step::StopScan];
        if closing == Closing::Switch {
            steps.push(Step::ReceiveOnLink);
        } else if self.sent.is_none() {
            self.phase = Phase::Closing;
            self.sent = Some(Closing::Abort);
            // An acceptor that has not greeted owes the connector an answer too: it scans for one.
            steps.push(Step::WriteAbort);
        }
        self.finish(&mut steps);
        Ok(steps)
    }

    fn finish(&self, steps: &mut Steps) {
        match (self.sent, self.got) {
            (Some(Closing::Switch), Some(Closing::Switch)) => steps.push(Step::Promoted),
            (Some(_), Some(_)) => steps.push(Step::Abandoned),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nonce() -> Nonce {
        Nonce::random().unwrap()
    }

    fn pair() -> (Handshake, Handshake) {
        let (nc, ns) = (nonce(), nonce());
        let c = Handshake::connector(nc);
        let (s, steps) = Handshake::acceptor(ns, nc);
        assert_eq!(steps, [Step::StartScan, Step::SendYes]);
        (c, s)
    }

    fn id() -> InstanceId {
        InstanceId::random().unwrap()
    }

    #[test]
    fn the_whole_handshake_promotes_both_ends() {
        let (mut c, mut s) = pair();
        assert_eq!(c.on_yes(s.mine()), Ok(vec![Step::StartScan, Step::WriteHello]));
        assert_eq!(s.on_hello(id()), Ok(vec![Step::WriteHello]));
        let peer = id();
        assert_eq!(c.on_hello(peer), Ok(vec![Step::NeedLink(peer)]));
        assert_eq!(c.on_link_up(), Ok(vec![Step::SendOpen]));
        assert_eq!(s.on_open(), Ok(vec![Step::SendOpen, Step::WriteSwitch]));
        // The acceptor's SWITCH may be seen before its OPEN: they travel on different paths.
        assert_eq!(
            c.on_closing(Closing::Switch),
            Ok(vec![Step::StopScan, Step::ReceiveOnLink])
        );
        assert_eq!(c.on_open(), Ok(vec![Step::WriteSwitch, Step::Promoted]));
        assert_eq!(
            s.on_closing(Closing::Switch),
            Ok(vec![Step::StopScan, Step::ReceiveOnLink, Step::Promoted])
        );
    }

    #[test]
    fn a_connector_without_a_link_aborts_and_both_ends_stay_on_tcp() {
        let (mut c, mut s) = pair();
        c.on_yes(s.mine()).unwrap();
        s.on_hello(id()).unwrap();
        c.on_hello(id()).unwrap();
        assert_eq!(c.give_up(), [Step::WriteAbort]);
        assert_eq!(
            s.on_closing(Closing::Abort),
            Ok(vec![Step::StopScan, Step::WriteAbort, Step::Abandoned])
        );
        assert_eq!(
            c.on_closing(Closing::Abort),
            Ok(vec![Step::StopScan, Step::Abandoned])
        );
    }

    #[test]
    fn both_giving_up_at_once_ends_cleanly() {
        let (mut c, mut s) = pair();
        c.on_yes(s.mine()).unwrap();
        s.on_hello(id()).unwrap();
        c.on_hello(id()).unwrap();
        assert_eq!(c.give_up(), [Step::WriteAbort]);
        assert_eq!(s.give_up(), [Step::WriteAbort]);
        assert!(c.give_up().is_empty(), "a second marker would be taken for data");
        assert_eq!(c.on_closing(Closing::Abort), Ok(vec![Step::StopScan, Step::Abandoned]));
        assert_eq!(s.on_closing(Closing::Abort), Ok(vec![Step::StopScan, Step::Abandoned]));
    }

    #[test]
    fn a_switch_before_open_is_refused() {
        let (mut c, mut s) = pair();
        c.on_yes(s.mine()).unwrap();
        assert!(c.on_closing(Closing::Switch).is_err());
        s.on_hello(id()).unwrap();
        assert!(s.on_closing(Closing::Switch).is_err());
    }
}
