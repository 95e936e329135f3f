//! One end of a simulated connection: carries out the handshake's steps as the shims do
//! (shims/src/promote.rs), on simulated media. Single-threaded, without locks.

mod reading;
mod resuming;

use rdmasock_core::fabric::link::{LinkEnd as _, Opened};
use rdmasock_core::fabric::mem::{End as LinkEnd, Medium};
use rdmasock_core::fabric::ring::{Consumer, End, Producer, Stopped};
use rdmasock_core::ids::{InstanceId, Nonce, Vqpn};
use rdmasock_core::stream::handshake::{Closing, Handshake, Misplaced, Phase, Role, Step, Steps};
use rdmasock_core::stream::resume::Resume;
use rdmasock_core::wire::{self, Capabilities, Hello, MAX_MARKER, Marker, Message};

use super::tcp::Tcp;

/// What a direction runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Plain TCP.
    Tcp,
    /// TCP with markers in flight.
    Marked,
    /// The link.
    Link,
}

/// Our end of a stream on the link.
#[derive(Debug)]
struct Stream {
    mine: Vqpn,
    /// OPEN is out and not answered.
    asked: bool,
}

/// What an end reaches of the world.
pub struct Net<'a> {
    /// Our sending direction.
    pub out: &'a mut Tcp,
    /// Our receiving direction.
    pub inn: &'a mut Tcp,
    /// Out of band, to the other end.
    pub oob: &'a Medium,
    /// Our end of the link.
    pub link: &'a LinkEnd,
}

/// See the module.
#[derive(Debug)]
pub struct Endpoint {
    id: InstanceId,
    /// Which end it is.
    pub role: Role,
    /// The attempt under way.
    pub handshake: Option<Handshake>,
    /// How attempts ended.
    pub outcomes: Vec<Step>,
    pub tx: Mode,
    pub rx: Mode,
    producer: Option<Producer>,
    marker: Vec<u8>,
    then_link: bool,
    /// The application has shut its sending direction down.
    pub fin: bool,
    /// TCP's sending direction ends behind what is to be written.
    tcp_ended: bool,
    then_shut: bool,
    /// Nothing is written in TCP before the other's RESUME has come.
    held: bool,
    consumer: Option<Consumer>,
    scan: Option<Nonce>,
    carry: Vec<u8>,
    /// A read that was in the kernel before the scan began.
    pub inside: bool,
    stream: Option<Stream>,
    peer: Option<Vqpn>,
    leave: bool,
    /// The link is one between hosts.
    pub remote: bool,
    /// Our end of it works.
    pub link_up: bool,
    /// The stream's stay on a link between hosts.
    resume: Option<Resume>,
    /// What RESUME starts with, to us and to the other.
    nonces: Option<[Nonce; 2]>,
    /// Unread bytes that have come over a link when it fails: what is behind them is lost.
    pub keep: u64,
    /// The other's RESUME has been read: TCP follows the ring.
    read_on: bool,
    /// Bytes that TCP has to bring before it may end.
    pub owed: u64,
    /// The link was asked for.
    pub wants_link: bool,
    request: u64,
    /// The YES that is out, and when it is to be repeated.
    yes: Option<(Message, u64)>,
    /// Nonces that a HELLO was written for: never to be cancelled, however late a YES comes again.
    greeted: Vec<Nonce>,
    /// What the application was given.
    pub received: Vec<u8>,
    pub eof: bool,
    /// Library bytes that were written in TCP.
    pub library_bytes: usize,
}

impl Endpoint {
    /// An end of a connection that is on TCP.
    pub fn new(role: Role) -> Self {
        Self {
            id: InstanceId::from_bytes([role as u8; 16]),
            role,
            handshake: None,
            outcomes: Vec::new(),
            tx: Mode::Tcp,
            rx: Mode::Tcp,
            producer: None,
            marker: Vec::new(),
            then_link: false,
            fin: false,
            tcp_ended: false,
            then_shut: false,
            held: false,
            consumer: None,
            scan: None,
            carry: Vec::new(),
            inside: false,
            stream: None,
            peer: None,
            leave: false,
            remote: false,
            link_up: true,
            resume: None,
            nonces: None,
            keep: u64::MAX,
            read_on: false,
            owed: 0,
            wants_link: false,
            request: 0,
            yes: None,
            greeted: Vec::new(),
            received: Vec::new(),
            eof: false,
            library_bytes: 0,
        }
    }

    /// It has a number on the link.
    pub fn has_stream(&self) -> bool {
        self.stream.is_some() || self.consumer.is_some() || self.producer.is_some()
    }

    /// Nothing but TCP, and no attempt.
    pub fn is_plain(&self) -> bool {
        self.tx == Mode::Tcp && self.rx == Mode::Tcp && self.handshake.is_none()
    }

    // ---- out of band ----

    /// The connector asks.
    pub fn ask(&mut self, net: &mut Net<'_>, nonce: Nonce, tuple: rdmasock_core::ids::Tuple) {
        if !self.is_plain() || self.stream.is_some() || self.fin {
            return;
        }
        self.leave = false;
        self.request += 1;
        self.handshake = Some(Handshake::connector(nonce));
        let message = Message::Ask {
            request: self.request,
            tuple,
            nonce_c: nonce,
            instance_c: self.id,
        };
        net.oob.send(&message).unwrap();
    }

    /// The answer did not come in time.
    pub fn ask_times_out(&mut self, net: &mut Net<'_>) {
        if self.handshake.as_ref().is_some_and(Handshake::is_asking) {
            self.feed(net, Handshake::on_no);
        }
    }

    /// A message out of band; `fresh` is a nonce for whoever needs one.
    pub fn on_oob(&mut self, net: &mut Net<'_>, message: Message, fresh: Nonce) {
        match message {
            Message::Ask {
                request, nonce_c, ..
            } => {
                let again = self
                    .handshake
                    .as_ref()
                    .filter(|h| h.theirs() == Some(nonce_c))
                    .map(Handshake::mine);
                let free = self.is_plain() && self.stream.is_none();
                let answer = match again {
                    Some(nonce_s) => Message::Yes {
                        request,
                        nonce_s,
                        instance_s: self.id,
                    },
                    None if free && self.start_scan(fresh) => {
                        self.leave = false;
                        self.handshake = Some(Handshake::acceptor(fresh, nonce_c).0);
                        Message::Yes {
                            request,
                            nonce_s: fresh,
                            instance_s: self.id,
                        }
                    }
                    None => Message::No {
                        request,
                        reason: wire::Reason::Use,
                    },
                };
                net.oob.send(&answer).unwrap();
                if matches!(answer, Message::Yes { .. }) {
                    self.yes = Some((answer, u64::MAX));
                }
            }
            Message::Yes {
                request, nonce_s, ..
            } => {
                if self.greeted.contains(&nonce_s) {
                    return;
                }
                let live = self.handshake.as_ref();
                let mine = live
                    .filter(|h| h.is_asking() && request == self.request)
                    .map(Handshake::mine);
                if let Some(nonce) = mine
                    && !self.fin
                    && self.start_scan(nonce)
                {
                    self.greeted.push(nonce_s);
                    return self.feed(net, |h| h.on_yes(nonce_s));
                }
                if mine.is_some() {
                    self.feed(net, Handshake::on_no);
                }
                net.oob
                    .send(&Message::Cancel {
                        request,
                        nonce_c: nonce_s,
                        nonce_s,
                    })
                    .unwrap();
            }
            Message::No { request, .. } if request == self.request => self.ask_times_out(net),
            Message::Cancel { nonce_s, .. }
                if self.handshake.as_ref().is_some_and(|h| h.mine() == nonce_s) =>
            {
                self.feed(net, Handshake::on_cancel);
            }
            _ => {}
        }
    }

    /// While nothing has come for our YES, it or the answer may be lost: a tail of the data that
    /// could be the beginning of a HELLO must not be held back for ever (P16).
    pub fn repeat_yes(&mut self, net: &mut Net<'_>, now: u64, every: u64) {
        let offered = self
            .handshake
            .as_ref()
            .is_some_and(|h| h.phase() == Phase::Offered);
        let Some((yes, due)) = self.yes.as_mut().filter(|_| offered) else {
            return;
        };
        if *due == u64::MAX {
            *due = now + every;
        } else if now >= *due {
            *due = now + every;
            net.oob.send(yes).unwrap();
        }
    }

    fn start_scan(&mut self, nonce: Nonce) -> bool {
        let plain = self.rx == Mode::Tcp;
        if plain {
            self.scan = Some(nonce);
            self.carry.clear();
            self.rx = Mode::Marked;
        }
        plain
    }

    // ---- steps ----

    /// Feeds the machine. The peers here are honest, so nothing may be out of turn.
    pub fn feed(
        &mut self,
        net: &mut Net<'_>,
        input: impl FnOnce(&mut Handshake) -> Result<Steps, Misplaced>,
    ) {
        if let Some(handshake) = self.handshake.as_mut() {
            let steps = input(handshake).expect("an honest peer is never out of turn");
            self.run(net, steps);
        }
    }

    fn run(&mut self, net: &mut Net<'_>, steps: Steps) {
        for step in steps {
            match step {
                Step::StartScan | Step::SendYes => {}
                Step::StopScan => {
                    self.stop_scan();
                    self.resumption(net, |r| r.on_got(Closing::Abort));
                }
                Step::WriteHello if self.tcp_ended => {
                    return self.feed(net, |h| Ok(h.on_hello_unwritten()));
                }
                Step::WriteHello => {
                    let hello = Hello {
                        instance: self.id,
                        capabilities: Capabilities::SHM,
                        link: None,
                    };
                    self.queue_marker(net, &Marker::Hello(hello));
                }
                Step::NeedLink(_) => self.wants_link = true,
                Step::SendOpen => {
                    if !self.send_open(net) {
                        if let Some(yours) = self.peer.take().filter(|_| self.link_up) {
                            let reason = wire::Reason::Resources;
                            let _ = net.link.send(&Message::OpenRefuse { yours, reason });
                        }
                        return self.feed(net, |h| Ok(h.on_open_failed()));
                    }
                }
                Step::WriteSwitch => {
                    self.then_link = !self.tcp_ended;
                    self.queue_marker(net, &Marker::Switch);
                    self.resumption(net, |r| r.on_sent(Closing::Switch));
                }
                Step::WriteAbort => {
                    self.queue_marker(net, &Marker::Abort(wire::Reason::Cancelled));
                    self.resumption(net, |r| r.on_sent(Closing::Abort));
                }
                Step::ReceiveOnLink => {
                    self.scan = None;
                    self.rx = Mode::Link;
                    self.resumption(net, |r| r.on_got(Closing::Switch));
                }
                Step::Resume => {
                    self.handshake = None;
                    self.outcomes.push(step);
                    self.resumption(net, |r| r.on_got(Closing::Abort));
                }
                Step::Demote => self.demote_tx(),
                Step::Promoted | Step::Drain | Step::Abandoned => {
                    self.handshake = None;
                    self.outcomes.push(step);
                    if step == Step::Abandoned {
                        self.close_stream(net);
                    } else if step == Step::Promoted && self.leave {
                        self.leave(net);
                    }
                }
            }
        }
    }

    fn stop_scan(&mut self) {
        self.scan = None;
        if self.carry.is_empty() && self.rx == Mode::Marked {
            self.rx = Mode::Tcp;
        }
    }

    fn send_open(&mut self, net: &mut Net<'_>) -> bool {
        if self.remote && (self.fin || !self.link_up) {
            return false;
        }
        let Ok(Opened {
            vqpn,
            ring,
            consumer,
        }) = net.link.open(12)
        else {
            return false;
        };
        if self.remote {
            self.begin_stay();
        }
        let handshake = self.handshake.as_ref().unwrap();
        self.consumer = Some(consumer);
        let message = match self.peer {
            None => Message::Open {
                nonce_mine: handshake.mine(),
                nonce_yours: handshake.theirs().unwrap(),
                vqpn,
                ring,
            },
            Some(yours) => Message::OpenAck {
                yours,
                mine: vqpn,
                ring,
            },
        };
        let sent = net.link.send(&message).is_ok();
        self.stream = Some(Stream {
            mine: vqpn,
            asked: sent && self.peer.is_none(),
        });
        sent
    }

    fn queue_marker(&mut self, net: &mut Net<'_>, marker: &Marker) {
        if self.tcp_ended {
            return;
        }
        let reader = match marker {
            Marker::Resume { .. } => self.nonces.unwrap()[1],
            _ => self.handshake.as_ref().and_then(Handshake::theirs).unwrap(),
        };
        let mut buf = [0; MAX_MARKER];
        let bytes = marker.encode(&reader, &mut buf).unwrap();
        self.library_bytes += bytes.len();
        self.marker.extend(bytes);
        self.tx = Mode::Marked;
        self.flush(net);
    }

    /// True when no marker bytes are left to write.
    pub fn flush(&mut self, net: &mut Net<'_>) -> bool {
        if self.tx != Mode::Marked {
            return true;
        }
        let n = net.out.write(&self.marker);
        self.marker.drain(..n);
        if !self.marker.is_empty() || self.held {
            return false;
        }
        self.tx = if std::mem::take(&mut self.then_link) {
            Mode::Link
        } else {
            Mode::Tcp
        };
        if self.remote {
            if std::mem::take(&mut self.then_shut) {
                net.out.shut();
            }
        } else if self.fin {
            self.shut(net);
        }
        true
    }

    fn demote_tx(&mut self) {
        if self.tx == Mode::Link {
            self.end_on_link(End::Demote);
        } else if std::mem::take(&mut self.then_link)
            && let Some(producer) = &mut self.producer
        {
            let _ = producer.end(End::Demote).unwrap();
        }
    }

    /// Our direction leaves the link: the other drains it, or has stopped reading and gets the rest
    /// again.
    fn end_on_link(&mut self, end: End) {
        match self.producer.as_mut().unwrap().end(end) {
            Ok(_) => self.tx = Mode::Tcp,
            Err(Stopped) => self.send_again(),
        }
    }

    fn send_again(&mut self) {
        let bytes = self.producer.as_mut().unwrap().unread().unwrap();
        self.marker.extend(bytes);
        self.then_link = false;
        self.tx = Mode::Marked;
    }

    fn close_stream(&mut self, net: &mut Net<'_>) {
        self.producer = None;
        let peer = self.peer.take();
        self.resume = None;
        if self.remote && !self.link_up {
            self.stream = None;
            self.consumer = None;
        }
        if let (Some(stream), Some(consumer)) = (self.stream.take(), self.consumer.take()) {
            if stream.asked {
                net.link.close_unanswered(stream.mine, Some(consumer));
            } else {
                net.link.close(stream.mine, peer, Some(consumer));
            }
        }
    }

    // ---- the link ----

    /// The link is there, or will not be.
    pub fn on_link(&mut self, net: &mut Net<'_>, up: bool) {
        self.wants_link = false;
        if up {
            self.mark_remote();
            self.feed(net, Handshake::on_link_up);
        } else {
            self.give_up(net);
        }
    }

    /// A message on the link's side channel.
    pub fn on_side(&mut self, net: &mut Net<'_>, message: Message) {
        if !self.link_up {
            return;
        }
        match message {
            Message::Open {
                nonce_mine,
                nonce_yours,
                vqpn,
                ..
            } => {
                let expected = self.handshake.as_ref().is_some_and(|h| {
                    h.is_opening() && h.mine() == nonce_yours && h.theirs() == Some(nonce_mine)
                });
                if expected {
                    self.on_open(net, vqpn);
                } else {
                    let reason = wire::Reason::Cancelled;
                    net.link
                        .send(&Message::OpenRefuse {
                            yours: vqpn,
                            reason,
                        })
                        .unwrap();
                }
            }
            Message::OpenAck { yours, mine, .. } => match &self.stream {
                Some(s) if s.mine == yours && self.peer.is_none() => self.on_open(net, mine),
                _ => net.link.send(&Message::Closed { yours: mine }).unwrap(),
            },
            Message::OpenRefuse { yours, .. } => match &mut self.stream {
                Some(s) if s.mine == yours => {
                    s.asked = false;
                    self.give_up(net);
                }
                _ => net.link.on_closed(yours),
            },
            Message::DemoteRequest { yours, resend_from }
                if self.stream.as_ref().is_some_and(|s| s.mine == yours) =>
            {
                if self.remote {
                    return self.on_asked(net);
                }
                if resend_from.is_some() && self.tx == Mode::Link {
                    self.send_again();
                    self.flush(net);
                }
                self.leave(net);
            }
            Message::Closed { yours } => net.link.on_closed(yours),
            _ => {}
        }
    }

    fn on_open(&mut self, net: &mut Net<'_>, theirs: Vqpn) {
        self.peer = Some(theirs);
        if let Some(stream) = &mut self.stream {
            stream.asked = false;
        }
        self.producer = net.link.producer(theirs);
        self.mark_remote();
        self.feed(net, Handshake::on_open);
    }

    // ---- what the application and the policy do; nothing of it waits ----

    /// The attempt is to end.
    pub fn give_up(&mut self, net: &mut Net<'_>) {
        self.feed(net, |h| Ok(h.give_up()));
    }

    /// Both directions are to go back to TCP.
    pub fn leave(&mut self, net: &mut Net<'_>) {
        self.leave = true;
        if self.handshake.is_some() {
            self.give_up(net);
            return self.resumption(net, Resume::leave);
        }
        if self.is_staying() {
            return self.resumption(net, Resume::leave);
        }
        self.demote_tx();
        if let (Mode::Link, Some(yours)) = (self.rx, self.peer) {
            let _ = net.link.send(&Message::DemoteRequest {
                yours,
                resend_from: None,
            });
        }
    }

    /// As [`leave`](Self::leave), but our receiving direction goes back to TCP here and now, unless
    /// the other has ended it already.
    pub fn return_to_tcp(&mut self, net: &mut Net<'_>) {
        if self.is_staying() && self.handshake.is_none() {
            return self.hand_over(net);
        }
        if let (None, Mode::Link, Some(consumer), Some(yours)) =
            (&self.handshake, self.rx, self.consumer.as_mut(), self.peer)
            && consumer.stop().is_ok()
        {
            let resend_from = Some(consumer.position());
            self.rx = Mode::Tcp;
            self.demote_tx();
            self.flush(net);
            let _ = net
                .link
                .send(&Message::DemoteRequest { yours, resend_from });
        }
        self.leave(net);
    }

    /// Writes; gives how much was taken.
    pub fn write(&mut self, net: &mut Net<'_>, data: &[u8]) -> usize {
        if self.fin || !self.flush(net) {
            assert!(
                self.fin || net.out.room() == 0 || self.held,
                "a write waits for more than room"
            );
            return 0;
        }
        match self.tx {
            Mode::Link => {
                let producer = self.producer.as_mut().unwrap();
                let spans = producer.spans(data.len()).unwrap();
                // SAFETY: the data is readable and apart from the ring.
                let n = unsafe { spans.copy_in(0, data.as_ptr(), data.len()) };
                let _ = producer.commit(n);
                n
            }
            _ => net.out.write(data),
        }
    }

    /// shutdown(SHUT_WR): what was begun is finished before the end.
    pub fn shut(&mut self, net: &mut Net<'_>) {
        self.fin = true;
        if self.is_staying() {
            return self.shut_between_hosts(net);
        }
        self.tcp_ended = true;
        if self.tx == Mode::Link {
            self.end_on_link(End::Fin);
        }
        if self.tx == Mode::Marked {
            self.then_shut = true;
            self.flush(net);
            return;
        }
        net.out.shut();
    }

    /// What the service thread does whenever something may have happened.
    pub fn poll(&mut self, net: &mut Net<'_>) {
        self.flush(net);
        self.look_ahead(net);
        self.look_for_resume(net);
        self.settle(net);
    }

    fn settle(&mut self, net: &mut Net<'_>) {
        if self.is_plain() && !self.is_staying() {
            self.close_stream(net);
        }
    }
}
