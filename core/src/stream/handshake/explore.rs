//! Explores every order in which two ends can receive the messages and markers that they send each other. Out-of-band
//! messages may be lost. At any moment an end may give up, end its direction of TCP or lose the link. Messages and
//! markers are always read whole here, without data between them. The pair tests (rdmasock-tests) cut them, and put
//! data between them.

use std::collections::{HashSet, VecDeque};

use crate::stream::handshake::*;

/// The elements of TCP's stream other than data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Tcp {
    Hello,
    Closing(Closing),
    Fin,
}

/// The messages on the link's side channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Side {
    Open,
    OpenAck,
    Refuse,
}

/// The out-of-band messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Oob {
    Yes,
    Cancel,
}

/// The medium of a direction, at one of its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum On {
    Tcp,
    Link,
    /// The writer has put DEMOTE on the link.
    Demoted,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct End {
    handshake: Option<Handshake>,
    scanning: bool,
    tx: On,
    rx: On,
    link: bool,
    wants_link: bool,
    fin: bool,
    /// This end has read the peer's FIN. Each further read finds it again.
    eof: bool,
    over: Option<Step>,
    to_tcp: VecDeque<Tcp>,
    to_side: VecDeque<Side>,
    to_oob: VecDeque<Oob>,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Tcp,
    Side,
    Oob,
    LoseOob,
    AskTimesOut,
    LinkUp,
    NoLink,
    LinkDies,
    GiveUp,
    Shutdown,
    NoRing,
}

const EVENTS: [Event; 11] = [
    Event::Tcp,
    Event::Side,
    Event::Oob,
    Event::LoseOob,
    Event::AskTimesOut,
    Event::LinkUp,
    Event::NoLink,
    Event::LinkDies,
    Event::GiveUp,
    Event::Shutdown,
    Event::NoRing,
];

const NONCES: [Nonce; 2] = [Nonce::from_bytes([1; 16]), Nonce::from_bytes([2; 16])];

impl End {
    fn new(handshake: Handshake) -> Self {
        Self {
            handshake: Some(handshake),
            scanning: false,
            tx: On::Tcp,
            rx: On::Tcp,
            link: true,
            wants_link: false,
            fin: false,
            eof: false,
            over: None,
            to_tcp: VecDeque::new(),
            to_side: VecDeque::new(),
            to_oob: VecDeque::new(),
        }
    }

    fn role(&self) -> Option<Role> {
        self.handshake.as_ref().map(|h| h.role)
    }

    /// Writes `what` in TCP. Returns false if this end's direction of TCP has ended.
    fn write(&mut self, what: Tcp) -> bool {
        if !self.fin {
            self.to_tcp.push_back(what);
        }
        !self.fin
    }

    /// Carries out steps. `ring` is true if there is memory for a ring to receive into.
    fn run(&mut self, steps: Steps, ring: bool) {
        for step in steps {
            match step {
                Step::StopScan => self.scanning = false,
                Step::WriteHello => {
                    if !self.write(Tcp::Hello) {
                        let steps = self.handshake.as_mut().unwrap().on_hello_unwritten();
                        return self.run(steps, ring);
                    }
                }
                Step::NeedLink(_) => self.wants_link = true,
                Step::SendOpen if ring && self.link => {
                    let acceptor = self.role() == Some(Role::Acceptor);
                    self.to_side
                        .push_back(if acceptor { Side::OpenAck } else { Side::Open });
                }
                Step::SendOpen => {
                    if self.role() == Some(Role::Acceptor) {
                        self.to_side.push_back(Side::Refuse);
                    }
                    let steps = self.handshake.as_mut().unwrap().on_open_failed();
                    return self.run(steps, ring);
                }
                Step::Write(Closing::Switch) => {
                    if self.write(Tcp::Closing(Closing::Switch)) {
                        self.tx = On::Link;
                    }
                }
                Step::Write(Closing::Abort) => {
                    self.write(Tcp::Closing(Closing::Abort));
                }
                Step::ReceiveOnLink => {
                    self.scanning = false;
                    self.rx = On::Link;
                }
                Step::Demote => {
                    if self.tx == On::Link {
                        self.tx = On::Demoted;
                    }
                }
                Step::Promoted | Step::Return | Step::Abandoned => {
                    assert!(!self.scanning, "the window stays open");
                    assert!(step != Step::Abandoned || self.rx == On::Tcp, "unread data is dropped");
                    self.handshake = None;
                    self.over = Some(step);
                }
            }
        }
    }

    fn feed(&mut self, ring: bool, input: impl FnOnce(&mut Handshake) -> Result<Steps, Misplaced>) {
        if let Some(handshake) = &mut self.handshake {
            let steps = input(handshake).expect("an honest peer is never out of turn");
            self.run(steps, ring);
        }
        if self.scanning && self.eof {
            let steps = self.handshake.as_mut().map(Handshake::on_end).unwrap_or_default();
            self.run(steps, ring);
        }
    }

    fn phase(&self) -> Option<Phase> {
        self.handshake.as_ref().map(Handshake::phase)
    }
}

/// Carries out `event` at `me`. Returns false if the event cannot happen now.
fn happen(event: Event, me: &mut End, peer: &mut End) -> bool {
    match event {
        Event::Tcp => match peer.to_tcp.pop_front() {
            None => return false,
            Some(Tcp::Fin) => {
                me.eof = true;
                me.feed(true, |h| Ok(h.on_end()));
            }
            Some(marker) => {
                assert!(me.scanning, "{marker:?} reaches the application");
                me.feed(true, |h| match marker {
                    Tcp::Closing(closing) => h.on_closing(closing),
                    _ => h.on_hello(InstanceId::from_bytes([3; 16])),
                });
            }
        },
        Event::Side | Event::NoRing => {
            if !me.link || peer.to_side.is_empty() {
                return false;
            }
            let ring = matches!(event, Event::Side);
            match peer.to_side.pop_front() {
                Some(Side::Open) if me.handshake.as_ref().is_some_and(Handshake::is_opening) => {
                    me.feed(ring, Handshake::on_open);
                }
                Some(Side::Open) => me.to_side.push_back(Side::Refuse),
                Some(Side::OpenAck) => me.feed(ring, Handshake::on_open),
                Some(Side::Refuse) => me.feed(ring, |h| Ok(h.give_up())),
                None => {}
            }
        }
        Event::Oob => match peer.to_oob.pop_front() {
            None => return false,
            Some(Oob::Yes) if me.phase() == Some(Phase::Asked) => {
                me.scanning = true;
                me.feed(true, |h| h.on_yes(NONCES[1]));
            }
            Some(Oob::Yes) => me.to_oob.push_back(Oob::Cancel),
            Some(Oob::Cancel) => me.feed(true, Handshake::on_cancel),
        },
        Event::LoseOob => return peer.to_oob.pop_front().is_some(),
        Event::AskTimesOut => {
            if me.phase() != Some(Phase::Asked) {
                return false;
            }
            me.feed(true, |h| Ok(h.give_up()));
        }
        Event::LinkUp | Event::NoLink => {
            if !std::mem::take(&mut me.wants_link) {
                return false;
            }
            if matches!(event, Event::LinkUp) && me.link {
                me.feed(true, Handshake::on_link_up);
            } else {
                me.feed(true, |h| Ok(h.give_up()));
            }
        }
        Event::LinkDies => {
            if !std::mem::take(&mut me.link) {
                return false;
            }
            me.feed(true, |h| Ok(h.give_up()));
            if me.tx == On::Link {
                me.tx = On::Demoted;
            }
        }
        Event::GiveUp => {
            let before = me.clone();
            me.feed(true, |h| Ok(h.give_up()));
            return *me != before;
        }
        Event::Shutdown => {
            if me.fin {
                return false;
            }
            me.fin = true;
            me.to_tcp.push_back(Tcp::Fin);
        }
    }
    true
}

/// Checks how the attempt has ended, in a state in which no event is left that is sure to happen.
fn check_rest(c: &End, s: &End) {
    for (writer, reader) in [(c, s), (s, c)] {
        match writer.tx {
            On::Tcp => assert_eq!(reader.rx, On::Tcp, "waits for the link in vain"),
            On::Link | On::Demoted => {
                assert_eq!(reader.rx, On::Link, "what is on the link is lost")
            }
        }
    }
    assert!(
        !c.scanning && c.handshake.is_none(),
        "the connector is stuck: {c:?} {s:?}"
    );
    let offered = s.phase() == Some(Phase::Offered);
    assert!(offered || s.handshake.is_none(), "the acceptor is stuck: {c:?} {s:?}");
    if c.link && s.link && !c.fin && !s.fin {
        let promoted = |e: &End| e.over == Some(Step::Promoted);
        assert_eq!(promoted(c), promoted(s), "the ends disagree");
    }
}

#[test]
fn no_order_of_events_loses_data_leaks_a_marker_or_leaves_an_end_waiting() {
    let mut acceptor = End::new(Handshake::acceptor(NONCES[1], NONCES[0]));
    acceptor.scanning = true;
    acceptor.to_oob.push_back(Oob::Yes);
    let start = (End::new(Handshake::connector(NONCES[0])), acceptor);
    let mut seen = HashSet::from([start.clone()]);
    let mut todo = vec![start];
    let mut rests = 0;
    while let Some((c, s)) = todo.pop() {
        let mut moves = false;
        for event in EVENTS {
            for at_connector in [true, false] {
                let (mut c, mut s) = (c.clone(), s.clone());
                let happened = if at_connector {
                    happen(event, &mut c, &mut s)
                } else {
                    happen(event, &mut s, &mut c)
                };
                if happened {
                    let by_itself = match event {
                        Event::GiveUp | Event::Shutdown => false,
                        // A link that has died at one end is sure to die at the other.
                        Event::LinkDies => c.link == s.link,
                        _ => true,
                    };
                    moves |= by_itself;
                    if seen.insert((c.clone(), s.clone())) {
                        todo.push((c, s));
                    }
                }
            }
        }
        if !moves {
            rests += 1;
            check_rest(&c, &s);
        }
    }
    assert!(seen.len() > 1000 && rests > 30, "{rests} ends in {} states", seen.len());
}
