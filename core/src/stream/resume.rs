//! How a stream leaves a link between hosts, as a state machine without I/O (docs/protocol.md, P70–P79).
//!
//! Such a link can fail while both processes and the TCP connection live. Then each direction has
//! to go on over TCP where the *reader* stands: only the reader knows what has come, and the
//! sender still holds the rest in its mirror ring. So both ends write one marker in TCP, RESUME
//! { received, sent }, and each sends from the position that it has read in the other's as
//! `received`. `sent` is where its own direction stands, so that the other can tell a clean end of TCP from that of
//! a process which has died before it could send again.
//!
//! There is no second way back. A stream that leaves a link that works (a use that the link does not
//! serve, shutdown(), a fork) does the same, so the link may fail at any moment of that without
//! a case of its own, and both directions always leave together. In TCP each direction reads
//!
//! ```text
//!  data, HELLO, data, SWITCH,                RESUME, data, end        an end that had switched
//!  data, HELLO, data, ABORT, data,           RESUME, data, end        one that had not, if the other had
//! ```
//!
//! so whoever has switched, or has read SWITCH, knows that exactly one RESUME follows, and looks for
//! it until it has come or TCP has ended. No direction of TCP is ended before its RESUME is in it, but
//! for [`Step::Mark`]. An end writes RESUME as soon as
//!
//! | it has written | and                                                                         |
//! |----------------|-----------------------------------------------------------------------------|
//! | SWITCH         | its link has failed (see below), or the peer has asked, or RESUME or ABORT has been read |
//! | ABORT          | SWITCH has been read                                                        |
//!
//! and what comes then, whichever of the two is first:
//!
//! | RESUME written | RESUME read | the sending direction           | the receiving direction                  |
//! |----------------|-------------|---------------------------------|------------------------------------------|
//! | no             | no          | on the link                     | on the link                              |
//! | yes            | no          | waits, as for a full window     | the ring up to `received`, then waits    |
//! | yes            | yes         | TCP, from the other's `received` | the ring up to `received`, then TCP; ECONNRESET if that ends before the other's `sent` |
//! | yes            | end of TCP  | the kernel's word               | the ring, then ECONNRESET                |
//!
//! Reading RESUME is itself a reason to write one, so there is no fourth row with "no, yes".
//!
//! A program may read nothing until it has sent all that it has to say, so what comes in front of these markers may
//! never be taken. Whoever cannot send on without them therefore looks for them behind it ([`Resume::looks_ahead`],
//! [`Resume::on_ahead`]): for its sending direction they count from then on, for its receiving direction
//! when it is their turn.
//!
//! close() alone has a shorter way: the mark FIN goes out behind the last byte on the link, and once the
//! peer's engine confirms that both have come, TCP ends without RESUME. A reader that has the mark
//! has everything. Until the confirmation the sender can still write RESUME instead. So a reader whose link fails
//! behind the mark writes RESUME once it has seen SWITCH: if the sender has closed its socket by then, the reset that
//! RESUME is answered by costs nothing.

use super::handshake::{Closing, Misplaced};

/// What the caller has to do next, in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Ask the peer on the link, behind all that was sent there, to write its RESUME: so that it will have
    /// received all of it. Nothing depends on it; if the link fails on the way RESUME is written
    /// at once.
    Ask,
    /// Mark the end (FIN) behind the last byte on the link.
    Mark,
    /// Take nothing more from the link, give it nothing more, and write RESUME in TCP: up to where the other's
    /// direction has come, and ours was given. If our own direction is on the link nothing follows in TCP before
    /// [`Step::SendFrom`].
    WriteResume,
    /// Our direction goes on over TCP: first what was given to the link from this position on,
    /// then the rest. A position that was not sent or is no longer held is the peer's fault: reset.
    SendFrom(u64),
    /// Our direction was on the link, and its reader has gone: what the kernel says about TCP holds.
    SendNothing,
    /// Nothing more is to be looked for in TCP. If the other's direction was on the link: once the ring
    /// is read up to where we have stopped, the next byte is in TCP, or its end. An end before TCP has brought
    /// all up to this position of the direction is [`Step::Lost`].
    ReadOn(u64),
    /// The other's process has ended, and bytes may be missing: what is in the ring is read, then
    /// ECONNRESET.
    Lost,
    /// TCP's sending direction may be ended, after what was to be sent.
    EndTcp,
    /// Over: the stream's numbers on the link can be given back.
    Done,
}

/// What was seen in TCP behind data that the program has not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ahead {
    /// The closing marker of the handshake.
    Closing(Closing),
    /// RESUME.
    Resume {
        /// As [`Resume::on_resume`]'s.
        received: u64,
        /// As [`Resume::on_resume`]'s.
        sent: u64,
    },
    /// The end of TCP.
    End,
}

/// Up to a handful of steps.
pub type Steps = Vec<Step>;

/// How far the end of our direction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fin {
    /// The program may send.
    Open,
    /// shutdown() or close() was called.
    Wanted,
    /// As before, and the mark is on the link and not confirmed.
    Marked,
    /// [`Step::EndTcp`] was given out.
    Out,
}

/// A stream on a link between hosts, from our OPEN on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Resume {
    sent: Option<Closing>,
    got: Option<Closing>,
    /// RESUME is to be written as soon as it may be.
    due: bool,
    /// The same, once the other's SWITCH has been seen: our end of the link has failed behind the other's mark.
    is_whole: bool,
    asked: bool,
    wrote: bool,
    /// What the other's RESUME says: `received` and `sent`.
    read: Option<(u64, u64)>,
    /// What of `got` and `read` was seen before its turn.
    got_ahead: Option<Closing>,
    read_ahead: Option<(u64, u64)>,
    /// Our direction has gone on, or has nobody to go to.
    went_on: bool,
    fin: Fin,
    over: bool,
}

impl Default for Resume {
    fn default() -> Self {
        Self::new()
    }
}

impl Resume {
    /// OPEN goes out on a link between hosts. (Not after the end of our direction of TCP: then
    /// the attempt is to be given up instead.)
    pub fn new() -> Self {
        Self {
            sent: None,
            got: None,
            due: false,
            is_whole: false,
            asked: false,
            wrote: false,
            read: None,
            got_ahead: None,
            read_ahead: None,
            went_on: false,
            fin: Fin::Open,
            over: false,
        }
    }

    /// The exchange is over, or was not needed.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// The mark is on the link, and its confirmation is awaited.
    pub fn is_marked(&self) -> bool {
        self.fin == Fin::Marked && !self.wrote && !self.over
    }

    /// RESUME is the next marker that TCP brings.
    pub fn is_expecting(&self) -> bool {
        let switched = self.sent == Some(Closing::Switch) || self.got == Some(Closing::Switch);
        self.got.is_some() && switched && self.read.is_none() && !self.over
    }

    /// What TCP brings has to start with RESUME: the other's direction is not there.
    pub fn is_next(&self) -> bool {
        self.got == Some(Closing::Switch) && self.read.is_none() && !self.over
    }

    /// Our direction has left the link and cannot go on yet.
    pub fn is_suspended(&self) -> bool {
        self.sent == Some(Closing::Switch) && self.wrote && !self.went_on && !self.over
    }

    /// Our sending direction cannot go on, or end, before the other's next marker, wherever in TCP that is.
    pub fn looks_ahead(&self) -> bool {
        let leaves = self.asked || matches!(self.fin, Fin::Wanted | Fin::Marked);
        let waits = match self.sent {
            Some(Closing::Switch) => leaves && !self.wrote || self.awaits_switch(),
            Some(Closing::Abort) => self.known().is_none(),
            None => false,
        };
        waits && !self.over || self.is_suspended()
    }

    /// The link has failed, and RESUME waits for the other's SWITCH.
    fn awaits_switch(&self) -> bool {
        let is_held = self.is_whole && !self.due && self.known().is_none();
        is_held && self.sent == Some(Closing::Switch) && !self.went_on && !self.over
    }

    /// We have switched, and the other has not said what it does: it may have given up, and take nothing more from
    /// the link.
    pub fn is_unanswered(&self) -> bool {
        self.sent == Some(Closing::Switch) && self.known().is_none() && !self.wrote && !self.over
    }

    fn known(&self) -> Option<Closing> {
        self.got.or(self.got_ahead)
    }

    /// Whether our RESUME is in TCP, or about to be: nothing more is taken from the link.
    pub fn is_frozen(&self) -> bool {
        self.wrote
    }

    /// We have written our closing marker.
    pub fn on_sent(&mut self, closing: Closing) -> Steps {
        self.sent.get_or_insert(closing);
        self.advance()
    }

    /// The other's closing marker was read in TCP.
    pub fn on_got(&mut self, closing: Closing) -> Steps {
        self.got.get_or_insert(closing);
        self.advance()
    }

    /// Our end of the link has failed. An attempt that is not closed has been given up before. `marked`: all of the
    /// other's direction has come over it, and its end mark. If that was confirmed the other has closed its socket, and
    /// RESUME is answered by a reset, with which what TCP has not brought yet is lost: so SWITCH has to come first.
    pub fn on_link_failed(&mut self, marked: bool) -> Steps {
        self.is_whole |= marked;
        self.due |= !marked;
        self.advance()
    }

    /// The peer asks on the link. An attempt that is not closed has been given up before.
    pub fn on_asked(&mut self) -> Steps {
        self.due = true;
        self.advance()
    }

    /// The stream is to leave the link, which works.
    pub fn leave(&mut self) -> Steps {
        let mut steps = Steps::new();
        self.ask(&mut steps);
        steps
    }

    /// The stream is to leave the link for a new holder who reads the kernel only: at once, so that
    /// the other sends again what the program has not read.
    pub fn hand_over(&mut self) -> Steps {
        self.due = true;
        self.advance()
    }

    /// shutdown() of our direction. An attempt that is not closed has been given up before.
    pub fn shut(&mut self) -> Steps {
        let mut steps = Steps::new();
        if self.fin == Fin::Open {
            self.fin = Fin::Wanted;
            self.ask(&mut steps);
        }
        steps.extend(self.advance());
        steps
    }

    /// close(): the other's direction is of no interest any more. An attempt that is not closed has
    /// been given up before.
    pub fn close(&mut self) -> Steps {
        let mut steps = Steps::new();
        if self.fin == Fin::Open && self.is_on_link() && !self.asked && !self.due {
            self.fin = Fin::Marked;
            steps.push(Step::Mark);
        } else if self.fin == Fin::Open {
            self.fin = Fin::Wanted;
        }
        steps.extend(self.advance());
        steps
    }

    /// The peer has all that we have given to the link, and the mark.
    pub fn on_confirmed(&mut self) -> Steps {
        if self.fin != Fin::Marked || self.wrote || self.over {
            return Steps::new();
        }
        self.fin = Fin::Out;
        self.over = true;
        vec![Step::EndTcp, Step::Done]
    }

    /// A marker, or the end, was seen in TCP before its turn. It is met again then. An attempt that is not
    /// closed has been given up before.
    pub fn on_ahead(&mut self, ahead: Ahead) -> Result<Steps, Misplaced> {
        if self.over {
            return Ok(Steps::new());
        }
        match ahead {
            Ahead::Closing(closing) => {
                if self.known().is_some() {
                    return Err(Misplaced::Peer("a second closing marker"));
                }
                self.got_ahead = Some(closing);
            }
            Ahead::Resume { received, sent } => {
                let known = self.known();
                let switched = self.sent == Some(Closing::Switch) || known == Some(Closing::Switch);
                let is_first = self.read.is_none() && self.read_ahead.is_none();
                if known.is_none() || !switched || !is_first || !self.may_say(received, sent) {
                    return Err(Misplaced::Peer("RESUME"));
                }
                self.read_ahead = Some((received, sent));
                self.due = true;
            }
            Ahead::End => {
                let mut steps = Steps::new();
                if self.is_suspended() || self.awaits_switch() {
                    self.went_on = true;
                    steps.push(Step::SendNothing);
                    self.end_tcp(&mut steps);
                }
                return Ok(steps);
            }
        }
        Ok(self.advance())
    }

    /// What a direction that was not on the link has received or sent there is nothing.
    fn may_say(&self, received: u64, sent: u64) -> bool {
        let fits = |closing, n| closing == Some(Closing::Switch) || n == 0;
        fits(self.sent, received) && fits(self.known(), sent)
    }

    /// The other's RESUME was read in TCP. An attempt that is not closed has been given up before.
    pub fn on_resume(&mut self, received: u64, sent: u64) -> Result<Steps, Misplaced> {
        let was_seen = self.read_ahead.is_none_or(|seen| seen == (received, sent));
        if !self.is_expecting() || !was_seen || !self.may_say(received, sent) {
            return Err(Misplaced::Peer("RESUME"));
        }
        self.read = Some((received, sent));
        self.due = true;
        Ok(self.advance())
    }

    /// TCP has ended in the other's direction; `marked`: all that we have taken from the link has
    /// its end mark behind it.
    pub fn on_end(&mut self, marked: bool) -> Steps {
        if self.read.is_some() || self.over {
            return Steps::new();
        }
        self.over = true;
        let mut steps = Steps::new();
        if self.got == Some(Closing::Switch) && !marked {
            steps.push(Step::Lost);
        } else {
            steps.push(Step::ReadOn(0));
        }
        if self.sent == Some(Closing::Switch) && !self.went_on {
            steps.push(Step::SendNothing);
        }
        self.end_tcp(&mut steps);
        steps.push(Step::Done);
        steps
    }

    fn is_on_link(&self) -> bool {
        self.sent == Some(Closing::Switch) && !self.wrote && !self.is_whole && !self.over
    }

    fn ask(&mut self, steps: &mut Steps) {
        if self.is_on_link() && !self.asked && !self.due && self.fin != Fin::Marked {
            self.asked = true;
            steps.push(Step::Ask);
        }
    }

    fn end_tcp(&mut self, steps: &mut Steps) {
        if matches!(self.fin, Fin::Wanted | Fin::Marked) {
            self.fin = Fin::Out;
            steps.push(Step::EndTcp);
        }
    }

    fn must_write(&self) -> bool {
        use Closing::{Abort, Switch};
        match (self.sent, self.known()) {
            (Some(Switch), Some(Abort)) | (Some(Abort), Some(Switch)) => true,
            (Some(Switch), Some(Switch)) => self.due || self.is_whole,
            (Some(Switch), None) => self.due,
            _ => false,
        }
    }

    fn advance(&mut self) -> Steps {
        use Closing::Abort;
        let mut steps = Steps::new();
        if self.over {
            return steps;
        }
        if !self.wrote && self.must_write() {
            self.wrote = true;
            steps.push(Step::WriteResume);
        }
        // What we send is on TCP already, and RESUME is out if there is to be one.
        if self.sent == Some(Abort) && (self.wrote || self.known() == Some(Abort)) {
            self.end_tcp(&mut steps);
        }
        if self.is_suspended()
            && let Some((received, _)) = self.read.or(self.read_ahead)
        {
            self.went_on = true;
            steps.push(Step::SendFrom(received));
        }
        if self.went_on && self.read.is_none() {
            self.end_tcp(&mut steps);
        }
        match (self.sent, self.got, self.read) {
            (Some(Abort), Some(Abort), _) => {
                self.over = true;
                steps.push(Step::Done);
            }
            (Some(_), _, Some((_, sent))) if self.wrote => {
                self.over = true;
                steps.push(Step::ReadOn(sent));
                self.end_tcp(&mut steps);
                steps.push(Step::Done);
            }
            _ => {}
        }
        steps
    }
}

#[cfg(test)]
mod explore;

#[cfg(test)]
mod tests;
