//! Explores every order of events at the two ends of a link between hosts. An end can write, read, receive from TCP and
//! from the link, leave the link, shut down, close and die. The link can fail at the two ends at different moments, and
//! records in flight may be lost or not. Markers are always read whole here; the pair tests (rdmasock-tests) cut them.

use std::collections::{HashSet, VecDeque};

use crate::ids::{InstanceId, Nonce};
use crate::stream::handshake;
use crate::stream::handshake::{Handshake, Phase, Role};
use crate::stream::resume::*;

/// The elements of TCP's stream. A byte of data has its number in its direction as its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Tcp {
    Data(u8),
    Hello,
    Closing(Closing),
    Resume(u8, u8),
    Fin,
}

/// The records of the link, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Record {
    Data(u8),
    Open,
    OpenAck,
    Refuse,
    Ask,
    Mark,
    Confirm,
}

/// The medium of a sending direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum On {
    Tcp,
    Link,
    /// This end has written RESUME, and has not read the peer's RESUME.
    Held,
    /// The reader has gone.
    Nobody,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct End {
    handshake: Option<Handshake>,
    resume: Option<Resume>,
    scanning: bool,
    link: bool,
    wants_link: bool,
    dead: bool,

    tx: On,
    /// The number of bytes that the program has written, and its value when SWITCH was written.
    written: u8,
    base: u8,
    /// The program has shut down or closed.
    shut: bool,
    closed: bool,
    /// TCP's sending direction has ended.
    fin: bool,

    /// This end has read SWITCH, and has not left the ring yet.
    on_ring: bool,
    /// The number of bytes that have come into the ring, and how many of them the program has read.
    ring: u8,
    taken: u8,
    marked: bool,
    read_on: bool,
    /// `began` is the number of bytes that the program had read when the peer's direction moved to the link. `owed` is
    /// the number of bytes that the peer has sent in all, by its RESUME.
    began: u8,
    owed: u8,
    lost: bool,
    /// The number of bytes that the program has read.
    delivered: u8,
    /// The end of TCP has been read (`ended`), and the program has got the end of the stream (`eof`).
    ended: bool,
    eof: bool,
    /// The program reads nothing before it has sent all its bytes.
    idle: bool,

    to_tcp: VecDeque<Tcp>,
    to_link: VecDeque<Record>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Tcp,
    Ahead,
    Link,
    Ring,
    Write,
    LinkUp,
    LinkFails,
    FlightLost,
    GiveUp,
    Leave,
    HandOver,
    Shutdown,
    Close,
    Die,
    NoRing,
}

const NONCES: [Nonce; 2] = [Nonce::from_bytes([1; 16]), Nonce::from_bytes([2; 16])];

impl End {
    fn new(handshake: Handshake) -> Self {
        Self {
            handshake: Some(handshake),
            resume: None,
            scanning: true,
            link: true,
            wants_link: false,
            dead: false,
            tx: On::Tcp,
            written: 0,
            base: 0,
            shut: false,
            closed: false,
            fin: false,
            on_ring: false,
            ring: 0,
            taken: 0,
            marked: false,
            read_on: false,
            began: 0,
            owed: 0,
            lost: false,
            delivered: 0,
            ended: false,
            eof: false,
            idle: false,
            to_tcp: VecDeque::new(),
            to_link: VecDeque::new(),
        }
    }

    /// Returns an end after a whole handshake, without a byte of data so far.
    fn promoted(role: Role) -> Self {
        let mut this = Self::new(Handshake::connector(NONCES[0]));
        this.handshake = None;
        this.scanning = false;
        let mut resume = Resume::default();
        assert!(resume.on_sent(Closing::Switch).is_empty());
        assert!(resume.on_got(Closing::Switch).is_empty());
        this.resume = Some(resume);
        this.tx = On::Link;
        this.on_ring = true;
        let _ = role;
        this
    }

    fn is_acceptor(&self) -> bool {
        self.handshake.as_ref().is_some_and(|h| h.role == Role::Acceptor)
    }

    fn write(&mut self, what: Tcp) {
        if !self.fin {
            self.to_tcp.push_back(what);
        }
    }

    fn send(&mut self, record: Record) {
        if self.link {
            self.to_link.push_back(record);
        }
    }

    /// Feeds `input` to the handshake, and carries out its steps. They also feed the state machine of `resume`.
    fn feed(&mut self, ring: bool, input: impl FnOnce(&mut Handshake) -> Result<handshake::Steps, Misplaced>) {
        if let Some(h) = &mut self.handshake {
            let steps = input(h).expect("an honest peer is never out of turn");
            self.carry_out(steps, ring);
        }
    }

    fn carry_out(&mut self, steps: handshake::Steps, ring: bool) {
        use handshake::Step;
        for step in steps {
            match step {
                Step::StopScan => {
                    self.scanning = false;
                    self.resumption(|r| r.on_got(Closing::Abort));
                }
                Step::WriteHello if self.fin => {
                    return self.feed(ring, |h| Ok(h.on_hello_unwritten()));
                }
                Step::WriteHello => self.write(Tcp::Hello),
                Step::NeedLink(_) => self.wants_link = true,
                Step::SendOpen if ring && self.link && !self.shut => {
                    let acceptor = self.is_acceptor();
                    self.resume = Some(Resume::default());
                    self.send(if acceptor { Record::OpenAck } else { Record::Open });
                }
                Step::SendOpen => {
                    if self.is_acceptor() {
                        self.send(Record::Refuse);
                    }
                    return self.feed(ring, |h| Ok(h.on_open_failed()));
                }
                Step::Write(Closing::Switch) => {
                    assert!(!self.fin, "SWITCH after the end");
                    self.write(Tcp::Closing(Closing::Switch));
                    self.tx = On::Link;
                    self.base = self.written;
                    self.resumption(|r| r.on_sent(Closing::Switch));
                }
                Step::Write(Closing::Abort) => {
                    self.write(Tcp::Closing(Closing::Abort));
                    self.resumption(|r| r.on_sent(Closing::Abort));
                }
                Step::ReceiveOnLink => {
                    self.scanning = false;
                    self.on_ring = true;
                    self.began = self.delivered;
                    self.resumption(|r| r.on_got(Closing::Switch));
                }
                Step::Return => {
                    self.handshake = None;
                    self.resumption(|r| r.on_got(Closing::Abort));
                }
                Step::Promoted | Step::Abandoned => self.handshake = None,
                Step::Demote => unreachable!("between hosts"),
            }
        }
    }

    fn resumption(&mut self, input: impl FnOnce(&mut Resume) -> Steps) {
        let Some(resume) = &mut self.resume else {
            return;
        };
        for step in input(resume) {
            self.carry_out_resumption(step);
        }
    }

    fn carry_out_resumption(&mut self, step: Step) {
        match step {
            Step::Ask => self.send(Record::Ask),
            Step::Mark => self.send(Record::Mark),
            Step::WriteResume => {
                assert!(!self.fin, "RESUME after the end");
                let mut sent = 0;
                if self.tx == On::Link {
                    self.tx = On::Held;
                    sent = self.written - self.base;
                }
                self.write(Tcp::Resume(self.ring, sent));
            }
            Step::SendFrom(from) => {
                assert_eq!(self.tx, On::Held);
                assert!(self.base + from as u8 <= self.written, "not sent");
                for n in self.base + from as u8..self.written {
                    self.write(Tcp::Data(n));
                }
                self.tx = On::Tcp;
            }
            Step::SendNothing => self.tx = On::Nobody,
            Step::ReadOn(sent) => {
                self.scanning = false;
                self.read_on = true;
                self.owed = self.began + sent as u8;
            }
            Step::Lost => self.lost = true,
            Step::EndTcp => {
                assert!(!self.fin);
                self.write(Tcp::Fin);
                self.fin = true;
            }
            Step::Done => assert!(self.resume.as_ref().unwrap().is_over()),
        }
        self.settle();
    }

    /// Leaves the ring when all its bytes are read and the direction goes on in TCP. Then shows the end of TCP to the
    /// program, if it has been read.
    fn settle(&mut self) {
        if self.on_ring && self.taken == self.ring && self.read_on {
            self.on_ring = false;
        }
        if self.ended && !self.on_ring {
            self.lost |= self.delivered < self.owed;
            self.eof = !self.lost;
        }
    }

    /// Gives up the attempt under way, if it is not closed.
    fn give_up(&mut self) {
        self.feed(true, |h| Ok(h.give_up()));
    }

    fn is_resuming(&self) -> bool {
        self.resume.as_ref().is_some_and(|r| !r.is_over())
    }

    fn shutdown(&mut self, close: bool) {
        self.shut = true;
        self.closed |= close;
        self.give_up();
        if self.is_resuming() {
            self.resumption(|r| if close { r.close() } else { r.shut() });
        } else if !self.fin {
            self.write(Tcp::Fin);
            self.fin = true;
        }
    }

    fn deliver(&mut self, n: u8) {
        assert_eq!(n, self.delivered, "lost, repeated or out of order");
        self.delivered += 1;
    }

    /// Reads the next element of TCP. Returns false if there is none that can be read now.
    fn read_tcp(&mut self, peer: &mut VecDeque<Tcp>) -> bool {
        let Some(next) = peer.front().copied() else {
            return false;
        };
        let expecting = self.resume.as_ref().is_some_and(Resume::is_expecting);
        let is_next = self.resume.as_ref().is_some_and(Resume::is_next);
        match next {
            Tcp::Data(_) if self.idle && !self.closed => return false,
            Tcp::Data(_) if self.on_ring && !self.closed && !is_next => return false,
            Tcp::Fin if self.on_ring && self.read_on && !self.closed => return false,
            _ => {}
        }
        peer.pop_front();
        match next {
            Tcp::Data(_) if self.closed => {}
            Tcp::Data(n) => {
                assert!(!is_next, "data in place of RESUME");
                self.deliver(n);
            }
            Tcp::Fin => {
                self.ended = true;
                self.feed(true, |h| Ok(h.on_end()));
                let marked = self.marked;
                self.resumption(|r| r.on_end(marked));
            }
            Tcp::Resume(..) if self.closed && !self.is_resuming() => {}
            Tcp::Resume(received, sent) => {
                self.give_up();
                assert!(expecting || is_next, "RESUME reaches the program");
                self.resumption(|r| r.on_resume(received.into(), sent.into()).expect("an honest peer"));
            }
            Tcp::Closing(_) | Tcp::Hello if self.closed && !self.scanning => {}
            Tcp::Closing(closing) => {
                assert!(self.scanning, "a closing marker reaches the program");
                self.feed(true, |h| h.on_closing(closing));
            }
            Tcp::Hello => {
                assert!(self.scanning, "HELLO reaches the program");
                self.feed(true, |h| h.on_hello(InstanceId::from_bytes([3; 16])));
            }
        }
        self.settle();
        true
    }

    /// Searches TCP behind unread data for the marker that the sending direction waits for. An end that has written
    /// SWITCH, and has not seen the peer's closing marker, may search at any time.
    fn look_ahead(&mut self, peer: &VecDeque<Tcp>) {
        let Some(r) = &self.resume else { return };
        let in_the_way = matches!(peer.front(), Some(Tcp::Data(_))) && !self.on_ring;
        if !in_the_way || !self.scanning || !(r.looks_ahead() || r.is_unanswered()) {
            return;
        }
        let ahead = peer.iter().find_map(|what| match *what {
            Tcp::Closing(closing) if r.known().is_none() => Some(Ahead::Closing(closing)),
            Tcp::Resume(received, sent) if r.read_ahead.is_none() => Some(Ahead::Resume {
                received: received.into(),
                sent: sent.into(),
            }),
            Tcp::Fin => Some(Ahead::End),
            _ => None,
        });
        if let Some(ahead) = ahead {
            self.resumption(|r| r.on_ahead(ahead).expect("an honest peer"));
        }
    }

    fn read_link(&mut self, record: Record, ring: bool) {
        let frozen = self.resume.as_ref().is_some_and(|r| r.wrote);
        match record {
            Record::Open if self.handshake.as_ref().is_some_and(Handshake::is_opening) => {
                self.feed(ring, |h| {
                    h.is_between_hosts = true;
                    h.on_open()
                });
            }
            Record::Open => self.send(Record::Refuse),
            Record::OpenAck => self.feed(ring, Handshake::on_open),
            Record::Refuse => self.give_up(),
            Record::Data(n) => {
                if !frozen {
                    assert_eq!(n, self.ring);
                    self.ring += 1;
                }
            }
            Record::Ask => {
                self.give_up();
                self.resumption(Resume::leave_at_once);
            }
            Record::Mark => {
                if !frozen {
                    self.marked = true;
                    self.send(Record::Confirm);
                }
            }
            Record::Confirm => self.resumption(Resume::on_confirmed),
        }
    }
}

/// Carries out `event` at `me`. Returns false if the event cannot happen now.
fn happen(event: Event, bytes: u8, me: &mut End, peer: &mut End) -> bool {
    if me.dead {
        return false;
    }
    let before = me.clone();
    match event {
        Event::Tcp => return me.read_tcp(&mut peer.to_tcp),
        Event::Ahead => me.look_ahead(&peer.to_tcp),
        Event::Link | Event::NoRing => {
            if !me.link {
                return false;
            }
            let ring = event == Event::Link;
            match peer.to_link.front() {
                Some(Record::Open) => {}
                Some(_) if ring => {}
                _ => return false,
            }
            let record = peer.to_link.pop_front().unwrap();
            me.read_link(record, ring);
            return true;
        }
        Event::Ring => {
            if !me.on_ring || me.closed || me.idle || me.taken == me.ring {
                return false;
            }
            me.deliver(me.delivered);
            me.taken += 1;
            // Bytes on the link are numbered from SWITCH on.
            assert_eq!(me.delivered - me.taken, peer.base, "out of order");
            me.settle();
        }
        Event::Write => {
            if me.shut || me.written == bytes {
                return false;
            }
            match me.tx {
                On::Tcp => me.write(Tcp::Data(me.written)),
                On::Link => me.send(Record::Data(me.written - me.base)),
                On::Held => return false,
                On::Nobody => return false,
            }
            me.written += 1;
        }
        Event::LinkUp => {
            if !std::mem::take(&mut me.wants_link) {
                return false;
            }
            if me.link {
                me.feed(true, |h| {
                    h.is_between_hosts = true;
                    h.on_link_up()
                });
            } else {
                me.give_up();
            }
        }
        Event::LinkFails => {
            if !std::mem::take(&mut me.link) {
                return false;
            }
            me.give_up();
            let marked = me.marked;
            me.resumption(|r| r.on_link_failed(marked));
        }
        Event::FlightLost => {
            if (me.link && peer.link) || me.to_link.is_empty() {
                return false;
            }
            me.to_link.clear();
        }
        Event::GiveUp => me.give_up(),
        Event::Leave => {
            me.give_up();
            me.resumption(Resume::leave);
        }
        Event::HandOver => {
            let frozen = me.resume.as_ref().is_none_or(|r| r.wrote);
            if frozen || me.handshake.is_some() {
                return false;
            }
            if !me.marked {
                me.ring = me.taken;
            }
            me.resumption(Resume::leave_at_once);
        }
        Event::Shutdown | Event::Close => {
            if me.closed || (me.shut && event == Event::Shutdown) {
                return false;
            }
            me.shutdown(event == Event::Close);
        }
        Event::Die => {
            me.dead = true;
            me.link = false;
            me.write(Tcp::Fin);
            me.fin = true;
        }
    }
    *me != before
}

/// Returns whether the event, if it can happen, is sure to happen sooner or later.
fn is_by_itself(event: Event, me: &End, peer: &End) -> bool {
    match event {
        Event::Tcp | Event::Link | Event::Ring | Event::LinkUp => true,
        Event::Ahead => me.resume.as_ref().is_some_and(Resume::looks_ahead),
        // If the link has failed at the peer, an attempt at this end times out. Without an attempt this end may never
        // notice the failure.
        Event::LinkFails => !peer.link && (me.handshake.is_some() || me.idle),
        _ => false,
    }
}

/// Checks that this end writes no marker to a socket that the peer has closed. The peer's kernel would answer by a
/// reset, and bytes of the peer that are still on their way would be lost. Data of the program may cause that, markers
/// may not.
fn check_reset(me: &End, had: usize, peer: &End) {
    let is_gone = peer.closed && peer.fin && !peer.dead && !peer.is_resuming() && peer.handshake.is_none();
    let is_marker = |what: &Tcp| !matches!(what, Tcp::Data(_) | Tcp::Fin);
    // If a marker was found behind unread data, that data has arrived and cannot be lost.
    let has_seen = me.resume.as_ref().is_some_and(|r| r.known().is_some());
    let owed = !has_seen && peer.to_tcp.iter().any(|what| *what != Tcp::Fin);
    assert!(
        !(is_gone && owed && !me.closed && me.to_tcp.iter().skip(had).any(is_marker)),
        "a marker resets what is on its way\n{me:?}\n{peer:?}"
    );
}

/// Checks the state of the connection, in a state in which no event is left that is sure to happen.
fn check_rest(ends: [&End; 2]) {
    for (writer, reader) in [(ends[0], ends[1]), (ends[1], ends[0])] {
        let both = || format!("\nwriter {writer:?}\nreader {reader:?}");
        if reader.dead {
            continue;
        }
        assert!(
            !reader.lost || writer.dead || reader.closed,
            "reset though nobody died{}",
            both()
        );
        if !writer.dead {
            assert!(
                writer
                    .handshake
                    .as_ref()
                    .is_none_or(|h| { h.phase() == Phase::Offered || writer.closed || reader.closed }),
                "stuck in the handshake{}",
                both()
            );
            assert!(writer.tx != On::Held, "waits for RESUME in vain{}", both());
            assert_eq!(writer.fin, writer.shut, "the end does not come{}", both());
        }
        if reader.closed {
            continue;
        }
        assert!(reader.delivered <= writer.written, "more than was sent{}", both());
        let whole = reader.delivered == writer.written;
        assert!(!reader.eof || whole, "a clean end is shown too early{}", both());
        if writer.dead {
            assert!(reader.eof || reader.lost, "the end is not seen{}", both());
        } else {
            let gone = writer.tx == On::Nobody;
            assert!(whole || gone, "bytes are missing{}", both());
            assert_eq!(reader.eof, writer.shut, "the end of the stream{}", both());
        }
    }
}

/// Checks the state if the programs read nothing: each end must be able to send all the same. Its FIN must be sent once
/// the peer has written its closing marker, for which the peer may have to read.
fn check_rest_of_idle(ends: &[End; 2]) {
    for (me, peer) in [(&ends[0], &ends[1]), (&ends[1], &ends[0])] {
        assert!(me.tx != On::Held, "cannot send unless it reads\n{ends:?}");
        let closing = |h: &Handshake| h.phase() == Phase::Closing;
        let has_answered = peer.handshake.as_ref().is_none_or(closing);
        let has_left = me.resume.is_some() && !(me.link && peer.link);
        assert!(
            !has_left || !has_answered || me.fin == me.shut,
            "the end does not come\n{ends:?}"
        );
    }
}

/// Explores all states that can be reached from `start`. Returns the number of states, and in how many of them no event
/// is left that is sure to happen.
fn explore(start: [End; 2], bytes: [u8; 2], events: &[Event]) -> (usize, usize) {
    let mut seen = HashSet::from([start.clone()]);
    let mut todo = vec![start];
    let mut rests = 0;
    while let Some(ends) = todo.pop() {
        let mut moves = false;
        for event in events {
            for at in [0, 1] {
                let [mut a, mut b] = ends.clone();
                let (me, peer) = if at == 0 { (&mut a, &mut b) } else { (&mut b, &mut a) };
                let by_itself = is_by_itself(*event, me, peer);
                let had = me.to_tcp.len();
                if happen(*event, bytes[at], me, peer) {
                    moves |= by_itself;
                    check_reset(me, had, peer);
                    let next = [a, b];
                    if seen.insert(next.clone()) {
                        todo.push(next);
                    }
                }
            }
        }
        if !moves {
            rests += 1;
            if ends.iter().any(|end| end.idle) {
                check_rest_of_idle(&ends);
            } else {
                check_rest([&ends[0], &ends[1]]);
            }
        }
    }
    (seen.len(), rests)
}

fn promoted() -> [End; 2] {
    [End::promoted(Role::Connector), End::promoted(Role::Acceptor)]
}

/// Returns two ends at the beginning of a handshake. The connector has received YES.
fn greeting() -> [End; 2] {
    let mut c = End::new(Handshake::connector(NONCES[0]));
    c.feed(true, |h| h.on_yes(NONCES[1]));
    let s = End::new(Handshake::acceptor(NONCES[1], NONCES[0]));
    [c, s]
}

const BASE: [Event; 8] = [
    Event::Tcp,
    Event::Ahead,
    Event::Link,
    Event::Ring,
    Event::Write,
    Event::LinkUp,
    Event::LinkFails,
    Event::FlightLost,
];

fn with(more: &[Event]) -> Vec<Event> {
    [&BASE[..], more].concat()
}

#[test]
fn a_failure_at_any_moment_costs_no_byte() {
    let (states, rests) = explore(promoted(), [2, 2], &with(&[]));
    assert!(states > 1000 && rests > 10, "{rests} ends in {states} states");
}

#[test]
fn leaving_and_handing_over_cost_no_byte_whether_or_not_the_link_fails() {
    let (states, rests) = explore(promoted(), [2, 1], &with(&[Event::Leave, Event::HandOver]));
    assert!(states > 1000 && rests > 10, "{rests} ends in {states} states");
}

#[test]
fn the_end_of_a_direction_comes_after_its_last_byte_whether_or_not_the_link_fails() {
    let (states, rests) = explore(promoted(), [2, 1], &with(&[Event::Shutdown, Event::Close]));
    assert!(states > 1000 && rests > 10, "{rests} ends in {states} states");
}

#[test]
fn who_has_lost_its_peer_sees_a_clean_end_only_after_every_byte() {
    let (states, rests) = explore(promoted(), [2, 1], &with(&[Event::Die, Event::Close, Event::Leave]));
    assert!(states > 1000 && rests > 10, "{rests} ends in {states} states");
}

#[test]
fn a_failure_in_the_handshake_costs_no_byte_and_leaks_no_marker() {
    let (states, rests) = explore(greeting(), [2, 2], &with(&[Event::GiveUp, Event::NoRing]));
    assert!(states > 1000 && rests > 10, "{rests} ends in {states} states");
}

#[test]
fn who_does_not_read_can_send_whatever_fails() {
    let mut start = greeting();
    start.iter_mut().for_each(|end| end.idle = true);
    let (states, rests) = explore(start, [2, 2], &with(&[Event::GiveUp, Event::NoRing, Event::Shutdown]));
    assert!(states > 1000 && rests > 10, "{rests} ends in {states} states");
}

#[test]
fn a_failure_in_the_handshake_of_a_connection_that_is_being_closed_costs_no_byte() {
    let (states, rests) = explore(
        greeting(),
        [1, 1],
        &with(&[Event::Shutdown, Event::Close, Event::GiveUp]),
    );
    assert!(states > 1000 && rests > 10, "{rests} ends in {states} states");
}

#[test]
fn a_death_in_the_handshake_shows_no_clean_end_before_the_last_byte() {
    let (states, rests) = explore(greeting(), [1, 1], &with(&[Event::Die, Event::GiveUp, Event::Leave]));
    assert!(states > 1000 && rests > 10, "{rests} ends in {states} states");
}
