//! A simulated end on a link between hosts: carries out the steps of the resumption, as
//! shims/src/promote/resume.rs does.

use rdmasock_core::fabric::link::LinkEnd as _;
use rdmasock_core::stream::handshake::Handshake;
use rdmasock_core::stream::resume::{Resume, Step, Steps};
use rdmasock_core::wire::scan::{Found, scan};
use rdmasock_core::wire::{Marker, Message};

use super::{Endpoint, Mode, Net};

impl Endpoint {
    /// OPEN goes out.
    pub(super) fn begin_stay(&mut self) {
        let handshake = self.handshake.as_ref().unwrap();
        self.nonces = Some([handshake.mine(), handshake.theirs().unwrap()]);
        self.resume = Some(Resume::new());
        self.keep = u64::MAX;
        self.read_on = false;
        assert_eq!(self.owed, 0, "bytes of an earlier stay are missing");
    }

    /// The stream's stay on a link between hosts is not over.
    pub(super) fn is_staying(&self) -> bool {
        self.resume.as_ref().is_some_and(|r| !r.is_over())
    }

    /// RESUME comes next in TCP.
    fn is_resume_next(&self) -> bool {
        self.rx == Mode::Link && self.resume.as_ref().is_some_and(Resume::is_next)
    }

    pub(super) fn resumption(
        &mut self,
        net: &mut Net<'_>,
        input: impl FnOnce(&mut Resume) -> Steps,
    ) {
        if let Some(resume) = &mut self.resume {
            for step in input(resume) {
                self.carry_out(net, step);
            }
        }
    }

    fn carry_out(&mut self, net: &mut Net<'_>, step: Step) {
        match step {
            Step::Ask => {
                if let (true, Some(yours)) = (self.link_up, self.peer) {
                    let resend_from = None;
                    let _ = net
                        .link
                        .send(&Message::DemoteRequest { yours, resend_from });
                }
            }
            Step::Mark => unreachable!("nobody closes here"),
            Step::WriteResume => {
                let limit = self.keep;
                let head = self.consumer.as_ref().map_or(0, |c| c.position());
                let received = self
                    .consumer
                    .as_mut()
                    .map_or(0, |c| c.freeze(head.saturating_add(limit)).unwrap());
                let on_link = self.tx == Mode::Link || std::mem::take(&mut self.then_link);
                self.held |= on_link;
                let position = self.producer.as_ref().map_or(0, |p| p.position());
                let sent = if on_link { position } else { 0 };
                self.queue_marker(net, &Marker::Resume { received, sent });
            }
            Step::SendFrom(from) => {
                let rest = self.producer.as_mut().unwrap().rest(from).unwrap();
                self.marker.extend(rest);
                self.held = false;
                self.tx = Mode::Marked;
                self.flush(net);
            }
            Step::SendNothing => panic!("nobody dies here"),
            Step::ReadOn(sent) => {
                self.read_on = true;
                if self.rx == Mode::Link {
                    let frozen = self.consumer.as_mut().unwrap().freeze(0).unwrap();
                    self.owed = sent - frozen;
                } else {
                    self.stop_scan();
                }
            }
            Step::Lost => panic!("nobody dies here"),
            Step::EndTcp => {
                self.tcp_ended = true;
                if self.tx == Mode::Marked {
                    self.then_shut = true;
                    self.flush(net);
                } else {
                    net.out.shut();
                }
            }
            // `settle` gives the stream back once the ring is read.
            Step::Done => assert!(!self.is_staying()),
        }
    }

    /// Our end of the link fails; of what has come and is unread, `keep` bytes have really come.
    pub fn link_failed(&mut self, net: &mut Net<'_>, keep: u64) {
        if std::mem::replace(&mut self.link_up, false) {
            self.keep = keep;
            self.give_up(net);
            self.resumption(net, Resume::on_link_failed);
        }
    }

    /// The peer asks for RESUME, behind all that it has sent.
    pub(super) fn on_asked(&mut self, net: &mut Net<'_>) {
        self.give_up(net);
        self.resumption(net, Resume::on_asked);
    }

    /// RESUME was found in TCP.
    pub(super) fn on_resume(&mut self, net: &mut Net<'_>, received: u64, sent: u64) {
        self.give_up(net);
        self.resumption(net, |r| {
            r.on_resume(received, sent).expect("an honest peer")
        });
    }

    /// For a new holder, who reads the kernel only: what is unread comes through it again.
    pub(super) fn hand_over(&mut self, net: &mut Net<'_>) {
        self.keep = 0;
        self.resumption(net, Resume::hand_over);
    }

    pub(super) fn shut_between_hosts(&mut self, net: &mut Net<'_>) {
        self.give_up(net);
        if self.is_staying() {
            self.resumption(net, Resume::shut);
        } else {
            self.carry_out(net, Step::EndTcp);
        }
    }

    /// Takes RESUME from the front of TCP, where nothing else can be.
    pub(super) fn look_for_resume(&mut self, net: &mut Net<'_>) {
        while self.is_resume_next() && !self.inside {
            let carried = self.carry.len();
            let mut bytes = self.carry.clone();
            bytes.extend(net.inn.peek());
            let seen = scan(&self.nonces.unwrap()[0], &bytes);
            assert_eq!(seen.payload, 0, "data in place of RESUME");
            match seen.what {
                Found::Marker {
                    marker: Marker::Resume { received, sent },
                    len,
                } => {
                    self.carry.drain(..len.min(carried));
                    net.inn.take(len - len.min(carried));
                    self.on_resume(net, received, sent);
                }
                Found::Payload | Found::PartialMarker { .. } => {
                    assert!(!net.inn.is_ended(), "TCP ends in place of RESUME");
                    return;
                }
                other => panic!("{other:?} in place of RESUME"),
            }
        }
    }

    /// The ring is read up to where we have stopped; what follows is in TCP.
    pub(super) fn leave_ring(&mut self) {
        self.rx = if self.carry.is_empty() {
            Mode::Tcp
        } else {
            Mode::Marked
        };
    }

    /// OPEN that comes over this link is about a link between hosts.
    pub(super) fn mark_remote(&mut self) {
        if let (true, Some(handshake)) = (self.remote, &mut self.handshake) {
            Handshake::between_hosts(handshake);
        }
    }
}
