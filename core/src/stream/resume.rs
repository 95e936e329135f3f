//! How a stream leaves a link between hosts, as a state machine without I/O (docs/protocol.md, P70–P79).
//!
//! Such a link can fail while both processes and the TCP connection live. Then each direction goes on over TCP where
//! the *reader* stands. Only the reader knows which bytes have come, and the sender still holds the rest in its send
//! buffer, the shadow of the peer's ring. So both ends write one marker in TCP, RESUME { received, sent }. Each end
//! then sends from the position that the peer's `received` names. `sent` is the position of the writer's own direction.
//! By it the peer can tell a clean end of TCP from the end of a process that has died before it could send again.
//!
//! There is no second way back. A stream that leaves a link that works (a use that the link does not serve, shutdown(),
//! a fork) exchanges the same markers. So a failure of the link in the middle of the exchange needs no case of its own,
//! and both directions always leave together. In TCP each direction reads
//!
//! ```text
//!  data, HELLO, data, SWITCH,                RESUME, data, end        an end that had switched
//!  data, HELLO, data, ABORT, data,           RESUME, data, end        one that had not, if the other had
//! ```
//!
//! so an end that has switched, or has read SWITCH, knows that exactly one RESUME follows. It looks for RESUME until
//! that has come or TCP has ended. No direction of TCP is ended before its RESUME is in it, except by [`Step::Mark`].
//! An end writes RESUME as soon as
//!
//! | it has written | and                                                                         |
//! |----------------|-----------------------------------------------------------------------------|
//! | SWITCH         | its link has failed (see below), or the peer has asked, or RESUME or ABORT has been read |
//! | ABORT          | SWITCH has been read                                                        |
//!
//! Then this follows; written and read come in either order:
//!
//! | RESUME written | RESUME read | the sending direction | the receiving direction |
//! |---|---|---|---|
//! | no | no | on the link | on the link |
//! | yes | no | waits, as for a full window | the ring up to `received`, then waits |
//! | yes | yes | TCP, from the peer's `received` | the ring up to `received`, then TCP |
//! | yes | end of TCP | the kernel's results | the ring, then ECONNRESET |
//!
//! Reading RESUME is itself a reason to write one, so there is no row "no, yes". If TCP ends before it has brought all
//! bytes up to the peer's `sent`, a receive fails with ECONNRESET.
//!
//! A program may read nothing until it has sent all that it has to send, so the data in front of these markers may
//! never be read. An end that cannot send on without a marker therefore looks for it behind that data
//! ([`Resume::looks_ahead`], [`Resume::on_ahead`]). A marker counts for the end's sending direction from then on. It
//! counts for its receiving direction when the program has read up to it.
//!
//! Only close() has a shorter way: the mark FIN goes behind the last byte on the link. Once the peer's engine confirms
//! that both have come, TCP ends without RESUME. A reader that has the mark has every byte. Until the confirmation the
//! sender can still write RESUME instead. So a reader whose link fails behind the mark writes RESUME once it has read
//! SWITCH. If the sender has closed its socket by then, its kernel answers RESUME by a reset, which costs nothing.

use crate::stream::handshake::{Closing, Misplaced};

/// A step for the caller. Steps are carried out in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Ask the peer on the link, behind all that was sent there, to write its RESUME: so it will have received all of
    /// it. Nothing depends on the request. If the link fails on the way, RESUME is written at once.
    Ask,
    /// Write the end mark (FIN) behind the last byte on the link.
    Mark,
    /// Stop receiving and sending on the link, and write RESUME in TCP. It has the position up to which the peer's
    /// direction has come, and the one up to which this end's was given to the link. If this end's direction is on the
    /// link, no other byte follows in TCP before [`Step::SendFrom`].
    WriteResume,
    /// Continue this end's direction over TCP: first the bytes that were given to the link from this position on, then
    /// all later ones. A position that was not sent, or is no longer held, is a violation by the peer: reset the
    /// connection.
    SendFrom(u64),
    /// Send no more: this end's direction was on the link, and its reader has gone. The kernel's results for TCP hold.
    SendNothing,
    /// Stop scanning TCP. If the peer's direction was on the link, the reader reads the ring up to where this end has
    /// stopped. Then the next byte of that direction, or its end, is in TCP. An end before TCP has brought all bytes up
    /// to the position given here is [`Step::Lost`].
    ReadOn(u64),
    /// The peer's process has ended, and bytes may be missing. The program reads the bytes in the ring, then gets
    /// ECONNRESET.
    Lost,
    /// End TCP's sending direction, after the bytes that are to be sent.
    EndTcp,
    /// The exchange has ended: the stream's numbers on the link can be given back.
    Done,
}

/// An event that was seen in TCP behind data that the program has not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ahead {
    /// The closing marker of the handshake.
    Closing(Closing),
    /// RESUME.
    Resume {
        /// Up to where the peer has received, as in [`Resume::on_resume`].
        received: u64,
        /// Up to where the peer has sent, as in [`Resume::on_resume`].
        sent: u64,
    },
    /// The end of TCP.
    End,
}

/// The steps that one input leads to, in order.
pub type Steps = Vec<Step>;

/// The state of the end of this end's direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Fin {
    /// The program may send.
    #[default]
    Open,
    /// shutdown() or close() was called.
    Wanted,
    /// As before, and the mark is on the link and not confirmed.
    Marked,
    /// [`Step::EndTcp`] was returned.
    Out,
}

/// A stream on a link between hosts, from when this end's OPEN goes out. The caller gives the attempt up instead if
/// this end's direction of TCP has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Resume {
    sent: Option<Closing>,
    got: Option<Closing>,
    /// RESUME is to be written as soon as the protocol allows it.
    due: bool,
    /// RESUME is to be written once the peer's SWITCH has been seen: this end of the link has failed behind the peer's
    /// mark.
    is_whole: bool,
    asked: bool,
    /// This end's RESUME is in TCP, or about to be: then this end receives no more on the link.
    wrote: bool,
    /// `received` and `sent` of the peer's RESUME.
    read: Option<(u64, u64)>,
    /// The values of `got` and `read` that were seen before their turn.
    got_ahead: Option<Closing>,
    read_ahead: Option<(u64, u64)>,
    /// This end's direction has gone on over TCP, or its reader has gone.
    went_on: bool,
    fin: Fin,
    over: bool,
}

impl Resume {
    /// Returns whether the exchange has ended, or was not needed.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Returns whether the mark is on the link and its confirmation is awaited.
    pub fn is_marked(&self) -> bool {
        self.fin == Fin::Marked && !self.wrote && !self.over
    }

    /// Returns whether RESUME is the next marker that TCP brings.
    fn is_expecting(&self) -> bool {
        let switched = self.sent == Some(Closing::Switch) || self.got == Some(Closing::Switch);
        self.got.is_some() && switched && self.read.is_none() && !self.over
    }

    /// Returns whether TCP's next bytes have to be RESUME, because the peer's direction is on the link.
    pub fn is_next(&self) -> bool {
        self.got == Some(Closing::Switch) && self.read.is_none() && !self.over
    }

    /// Returns whether this end's direction has left the link and cannot go on yet.
    pub fn is_suspended(&self) -> bool {
        self.sent == Some(Closing::Switch) && self.wrote && !self.went_on && !self.over
    }

    /// Returns whether this end's sending direction cannot go on, or end, before the peer's next marker, wherever in
    /// TCP that is.
    pub fn looks_ahead(&self) -> bool {
        let leaves = self.asked || matches!(self.fin, Fin::Wanted | Fin::Marked);
        let waits = match self.sent {
            Some(Closing::Switch) => leaves && !self.wrote || self.awaits_switch(),
            Some(Closing::Abort) => self.known().is_none(),
            None => false,
        };
        waits && !self.over || self.is_suspended()
    }

    /// Returns whether the link has failed, and RESUME waits for the peer's SWITCH.
    fn awaits_switch(&self) -> bool {
        let is_held = self.is_whole && !self.due && self.known().is_none();
        is_held && self.sent == Some(Closing::Switch) && !self.went_on && !self.over
    }

    /// Returns whether this end has switched, and the peer's closing marker has not come. The peer may have given up,
    /// and then receives no more on the link.
    pub fn is_unanswered(&self) -> bool {
        self.sent == Some(Closing::Switch) && self.known().is_none() && !self.wrote && !self.over
    }

    fn known(&self) -> Option<Closing> {
        self.got.or(self.got_ahead)
    }

    /// Notes that this end has written its closing marker.
    pub fn on_sent(&mut self, closing: Closing) -> Steps {
        self.sent.get_or_insert(closing);
        self.advance()
    }

    /// Handles the peer's closing marker, read in TCP.
    pub fn on_got(&mut self, closing: Closing) -> Steps {
        self.got.get_or_insert(closing);
        self.advance()
    }

    /// Handles a failure of this end of the link. The caller has given up an attempt that is not closed. `marked`: all
    /// of the peer's direction has come over the link, with its end mark. If that was confirmed, the peer has closed
    /// its socket. Then its kernel answers RESUME by a reset, and all that TCP has not brought yet is lost. So SWITCH
    /// has to come first.
    pub fn on_link_failed(&mut self, marked: bool) -> Steps {
        self.is_whole |= marked;
        self.due |= !marked;
        self.advance()
    }

    /// Leaves the link as soon as the protocol allows it. The peer has asked for that on the link, and the caller has
    /// given up an attempt that is not closed. Or a new holder reads the kernel alone: the peer sends again the bytes
    /// that the program has not read.
    pub fn leave_at_once(&mut self) -> Steps {
        self.due = true;
        self.advance()
    }

    /// Begins to leave a link that works.
    pub fn leave(&mut self) -> Steps {
        let asks = self.is_on_link() && !self.asked && !self.due && self.fin != Fin::Marked;
        self.asked |= asks;
        asks.then_some(Step::Ask).into_iter().collect()
    }

    /// Shuts this end's direction. The caller has given up an attempt that is not closed.
    pub fn shut(&mut self) -> Steps {
        let mut steps = Steps::new();
        if self.fin == Fin::Open {
            self.fin = Fin::Wanted;
            steps = self.leave();
        }
        steps.extend(self.advance());
        steps
    }

    /// Handles close(): the peer's direction is not needed any more. The caller has given up an attempt that is not
    /// closed.
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

    /// Handles the peer's confirmation that it has all that this end has given to the link, and the mark.
    pub fn on_confirmed(&mut self) -> Steps {
        if self.fin != Fin::Marked || self.wrote || self.over {
            return Steps::new();
        }
        self.fin = Fin::Out;
        self.over = true;
        vec![Step::EndTcp, Step::Done]
    }

    /// Handles a marker, or the end, that was seen in TCP before its turn; it is met again then. The caller has given
    /// up an attempt that is not closed.
    pub fn on_ahead(&mut self, ahead: Ahead) -> Result<Steps, Misplaced> {
        if self.over {
            return Ok(Steps::new());
        }
        match ahead {
            Ahead::Closing(closing) => {
                if self.known().is_some() {
                    return Err(Misplaced("a second closing marker"));
                }
                self.got_ahead = Some(closing);
            }
            Ahead::Resume { received, sent } => {
                let known = self.known();
                let switched = self.sent == Some(Closing::Switch) || known == Some(Closing::Switch);
                let is_first = self.read.is_none() && self.read_ahead.is_none();
                if known.is_none() || !switched || !is_first || !self.may_say(received, sent) {
                    return Err(Misplaced("RESUME"));
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

    /// Returns whether RESUME may have these positions: they are 0 for a direction that was not on the link.
    fn may_say(&self, received: u64, sent: u64) -> bool {
        let fits = |closing, n| closing == Some(Closing::Switch) || n == 0;
        fits(self.sent, received) && fits(self.known(), sent)
    }

    /// Handles the peer's RESUME, read in TCP. `received` is the position up to which the peer has this end's
    /// direction. `sent` is the one up to which the peer gave its own to the link. The caller has given up an attempt
    /// that is not closed.
    pub fn on_resume(&mut self, received: u64, sent: u64) -> Result<Steps, Misplaced> {
        let was_seen = self.read_ahead.is_none_or(|seen| seen == (received, sent));
        if !self.is_expecting() || !was_seen || !self.may_say(received, sent) {
            return Err(Misplaced("RESUME"));
        }
        self.read = Some((received, sent));
        self.due = true;
        Ok(self.advance())
    }

    /// Handles the end of TCP in the peer's direction. `marked`: the bytes that this end has received on the link are
    /// followed by the end mark.
    pub fn on_end(&mut self, marked: bool) -> Steps {
        if self.read.is_some() || self.over {
            return Steps::new();
        }
        self.over = true;
        let is_lost = self.got == Some(Closing::Switch) && !marked;
        let mut steps = vec![if is_lost { Step::Lost } else { Step::ReadOn(0) }];
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
        // This end's direction is on TCP already, and RESUME is out if there is to be one.
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
