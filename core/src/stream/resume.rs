//! How a stream leaves a link between hosts, as a state machine without I/O (docs/protocol.md, P70–P79).
//!
//! Such a link can fail while both processes and the TCP connection live. Then each direction goes on over TCP, from
//! the first byte that its *reader* has not received. Only the reader knows that position. The sender still holds the
//! bytes from there on, in its mirror of the reader's ring. So each end writes one marker in TCP, RESUME { received,
//! sent }. The sender then sends from the position `received` of the peer's RESUME. `sent` is the position up to which
//! the end that writes RESUME has given its own direction to the link. If TCP ends before it has brought all bytes up
//! to `sent`, the peer's process has died before it could send them again.
//!
//! This is the only way back. A stream that leaves a working link (for a use that the link does not serve, for
//! shutdown() or a fork) exchanges the same markers. So a failure of the link in the middle of the exchange is no
//! special case, and both directions always leave together. In TCP a direction has one of these forms:
//!
//! ```text
//!  data, HELLO, data, SWITCH,                RESUME, data, end        the writer had switched
//!  data, HELLO, data, ABORT, data,           RESUME, data, end        the writer had not switched, but the reader had
//! ```
//!
//! So an end that has written or read SWITCH knows that exactly one RESUME follows. It scans TCP until RESUME has come
//! or TCP has ended. An attempt to promote is *closed* at an end once that end has written SWITCH or ABORT. An end does
//! not end its direction of TCP before its RESUME is written, except after [`Step::Mark`]. An end writes RESUME as soon
//! as one row is fulfilled:
//!
//! | it has written | and                                                                         |
//! |----------------|-----------------------------------------------------------------------------|
//! | SWITCH         | its link has failed (see below), or the peer has asked, or RESUME or ABORT has been read |
//! | ABORT          | SWITCH has been read                                                        |
//!
//! Then the directions go on as follows:
//!
//! | RESUME written | RESUME read | the sending direction | the receiving direction |
//! |---|---|---|---|
//! | no | no | on the link | on the link |
//! | yes | no | waits, as for a full window | the ring up to `received`, then waits |
//! | yes | yes | TCP, from the peer's `received` | the ring up to `received`, then TCP |
//! | yes | end of TCP | the kernel's results | the ring, then ECONNRESET |
//!
//! There is no row "no, yes", because an end that reads RESUME writes its own at once. If TCP ends before it has
//! brought all bytes up to the peer's `sent`, a receive fails with ECONNRESET.
//!
//! A program may read nothing until it has sent all its data, so the data in front of these markers may stay unread. If
//! an end can send, or end its direction, only after the peer's next marker, it searches the unread data for that
//! marker ([`Resume::looks_ahead`], [`Resume::on_ahead`]). A marker that is found in this way counts for the end's
//! sending direction at once. It counts for its receiving direction when the program has read up to it.
//!
//! Only close() may do without RESUME: the sender puts the mark FIN behind its last byte on the link. The peer's
//! library confirms when all bytes and the mark are in the ring. Then the sender ends TCP without RESUME. Until the
//! confirmation the sender can still write RESUME instead. If the link fails at the reader after the mark has come, the
//! sender may have closed its socket already. Then its kernel answers RESUME by a reset, and bytes still under way in
//! TCP are lost. So the reader writes RESUME only once it has read SWITCH. Behind SWITCH nothing but RESUME comes in
//! TCP, and a reader that has the mark has every byte of the link.

use crate::stream::handshake::{Closing, Misplaced};

/// A step for the caller. Steps are carried out in the order given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Ask the peer to write its RESUME. The request goes on the link behind all data, so the peer has received that
    /// data when it reads the request. If the link fails first, the request is not needed: both ends write RESUME then.
    Ask,
    /// Write the end mark (FIN) behind the last byte on the link.
    Mark,
    /// Stop receiving and sending on the link, and write RESUME in TCP. `received` is the position up to which the
    /// peer's direction has come. `sent` is the position up to which this end's direction was given to the link. If
    /// this end's direction is on the link, no other byte follows in TCP before [`Step::SendFrom`].
    WriteResume,
    /// Continue this end's direction over TCP: first the bytes that were given to the link from this position on, then
    /// all later bytes. If the bytes at this position were never sent, or are no longer held, the peer has broken the
    /// protocol: reset the connection.
    SendFrom(u64),
    /// Drop the pending bytes of this end's direction, which was on the link: its reader has gone. The program's sends
    /// get the kernel's results.
    SendNothing,
    /// Stop scanning TCP. If the peer's direction was on the link, the program reads the ring up to the position where
    /// this end has stopped receiving. The next byte of the direction, or its end, is in TCP. If TCP ends before it has
    /// brought all bytes up to the position given here, the program gets ECONNRESET, as for [`Step::Lost`].
    ReadOn(u64),
    /// The peer's process has died, and bytes may be missing. The program reads the bytes in the ring, then gets
    /// ECONNRESET.
    Lost,
    /// End TCP's sending direction, behind all bytes that are still to be sent.
    EndTcp,
    /// The exchange has ended: this end's number for the stream can be given back.
    Done,
}

/// A marker, or the end, that was found in TCP behind data that the program has not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ahead {
    /// The closing marker of the handshake.
    Closing(Closing),
    /// RESUME.
    Resume {
        /// The position up to which the peer has received, as in [`Resume::on_resume`].
        received: u64,
        /// The position up to which the peer has sent, as in [`Resume::on_resume`].
        sent: u64,
    },
    /// The end of TCP.
    End,
}

/// The steps that one input leads to, in order.
pub type Steps = Vec<Step>;

/// How far the end of this end's sending direction has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Fin {
    /// The program may send.
    #[default]
    Open,
    /// shutdown() or close() was called.
    Wanted,
    /// close() was called. The mark FIN is on the link, and the peer has not confirmed it.
    Marked,
    /// [`Step::EndTcp`] was returned.
    Out,
}

/// The state of a stream on a link between hosts. The caller creates it when this end's OPEN (or OPEN-ACK) is about to
/// be sent. If this end's direction of TCP has ended already, the caller gives the attempt up instead.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Resume {
    sent: Option<Closing>,
    got: Option<Closing>,
    /// RESUME is to be written as soon as the protocol allows it.
    due: bool,
    /// The link has failed at this end after all bytes of the peer's direction and its end mark had come. So this end
    /// writes RESUME only once it has seen the peer's SWITCH.
    is_whole: bool,
    asked: bool,
    /// `Step::WriteResume` was returned. This end receives no more on the link.
    wrote: bool,
    /// `received` and `sent` of the peer's RESUME, once it has been read.
    read: Option<(u64, u64)>,
    /// The peer's closing marker and RESUME that were found behind unread data. `got` and `read` get the same values
    /// when the program has read up to them.
    got_ahead: Option<Closing>,
    read_ahead: Option<(u64, u64)>,
    /// `Step::SendFrom` or `Step::SendNothing` was returned.
    went_on: bool,
    fin: Fin,
    over: bool,
}

impl Resume {
    /// Returns whether the exchange has ended, or was not needed.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Returns whether the mark FIN is on the link, and its confirmation may still come.
    pub fn is_marked(&self) -> bool {
        self.fin == Fin::Marked && !self.wrote && !self.over
    }

    /// Returns whether the next marker in TCP has to be RESUME.
    fn is_expecting(&self) -> bool {
        let switched = self.sent == Some(Closing::Switch) || self.got == Some(Closing::Switch);
        self.got.is_some() && switched && self.read.is_none() && !self.over
    }

    /// Returns whether the next bytes in TCP have to be RESUME, because the peer's direction is on the link.
    pub fn is_next(&self) -> bool {
        self.got == Some(Closing::Switch) && self.read.is_none() && !self.over
    }

    /// Returns whether this end's direction has left the link and waits for the peer's RESUME.
    pub fn is_suspended(&self) -> bool {
        self.sent == Some(Closing::Switch) && self.wrote && !self.went_on && !self.over
    }

    /// Returns whether this end cannot go on sending, or cannot end its direction, before it has the peer's next
    /// marker. Then the caller searches TCP for the marker, also behind unread data.
    pub fn looks_ahead(&self) -> bool {
        let leaves = self.asked || matches!(self.fin, Fin::Wanted | Fin::Marked);
        let waits = match self.sent {
            Some(Closing::Switch) => leaves && !self.wrote || self.awaits_switch(),
            Some(Closing::Abort) => self.known().is_none(),
            None => false,
        };
        waits && !self.over || self.is_suspended()
    }

    /// Returns whether the link has failed here, and this end writes RESUME only once it has seen the peer's SWITCH.
    fn awaits_switch(&self) -> bool {
        let is_held = self.is_whole && !self.due && self.known().is_none();
        is_held && self.sent == Some(Closing::Switch) && !self.went_on && !self.over
    }

    /// Returns whether this end has switched, and the peer's closing marker has not come. That marker may be ABORT:
    /// then the peer does not read the link.
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

    /// Handles a failure of this end of the link. The caller has first given up an attempt that is not closed. `marked`
    /// is true if all of the peer's direction has come over the link, with its end mark. If this end has confirmed
    /// that, the peer may have closed its socket. Then the peer's kernel answers RESUME by a reset, and bytes that TCP
    /// has not brought yet are lost. So this end waits for SWITCH first.
    pub fn on_link_failed(&mut self, marked: bool) -> Steps {
        self.is_whole |= marked;
        self.due |= !marked;
        self.advance()
    }

    /// Leaves the link as soon as the protocol allows it. There are two causes. The peer has asked for it on the link.
    /// Or the socket goes to a new holder that reads the kernel alone, so that the peer sends again all bytes that the
    /// program has not read. The caller has first given up an attempt that is not closed.
    pub fn leave_at_once(&mut self) -> Steps {
        self.due = true;
        self.advance()
    }

    /// Begins to leave a working link: asks the peer to write RESUME.
    pub fn leave(&mut self) -> Steps {
        let asks = self.is_on_link() && !self.asked && !self.due && self.fin != Fin::Marked;
        self.asked |= asks;
        asks.then_some(Step::Ask).into_iter().collect()
    }

    /// Shuts this end's direction. The caller has first given up an attempt that is not closed.
    pub fn shut(&mut self) -> Steps {
        let mut steps = Steps::new();
        if self.fin == Fin::Open {
            self.fin = Fin::Wanted;
            steps = self.leave();
        }
        steps.extend(self.advance());
        steps
    }

    /// Handles close(): ends this end's direction, and the program does not read the peer's direction any more. The
    /// caller has first given up an attempt that is not closed.
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

    /// Handles the peer's confirmation: it has all bytes that this end has given to the link, and the mark FIN.
    pub fn on_confirmed(&mut self) -> Steps {
        if self.fin != Fin::Marked || self.wrote || self.over {
            return Steps::new();
        }
        self.fin = Fin::Out;
        self.over = true;
        vec![Step::EndTcp, Step::Done]
    }

    /// Handles a marker, or the end, that was found in TCP behind unread data. When the program has read that data, the
    /// caller feeds it again by `on_got`, `on_resume` or `on_end`. The caller has first given up an attempt that is not
    /// closed.
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

    /// Returns whether the peer's RESUME may have these positions. The position of a direction that was not on the link
    /// has to be 0.
    fn may_say(&self, received: u64, sent: u64) -> bool {
        let fits = |closing, n| closing == Some(Closing::Switch) || n == 0;
        fits(self.sent, received) && fits(self.known(), sent)
    }

    /// Handles the peer's RESUME, read in TCP. `received` is the position up to which the peer has received this end's
    /// direction. `sent` is the position up to which the peer gave its own direction to the link. The caller has first
    /// given up an attempt that is not closed.
    pub fn on_resume(&mut self, received: u64, sent: u64) -> Result<Steps, Misplaced> {
        let was_seen = self.read_ahead.is_none_or(|seen| seen == (received, sent));
        if !self.is_expecting() || !was_seen || !self.may_say(received, sent) {
            return Err(Misplaced("RESUME"));
        }
        self.read = Some((received, sent));
        self.due = true;
        Ok(self.advance())
    }

    /// Handles the end of TCP in the peer's direction. `marked` is true if this end has received all of the peer's
    /// direction on the link, and the end mark behind it.
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
        // This end's direction never left TCP. TCP may end once RESUME is written, or the peer's ABORT shows that none
        // is due.
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
