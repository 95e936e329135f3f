//! Two simulated ends of one connection under a virtual clock: TCP, the channel out of band and a
//! link of the mem fabric between them. `tests/stream_pairs.rs` has the tests.

pub mod endpoint;
pub mod tcp;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;

use endpoint::{Endpoint, Link, Net, Outcome};
use rdmasock_core::fabric::mem::{Clock, Fate, Medium, heap_pair};
use rdmasock_core::ids::{Nonce, Tuple};
use rdmasock_core::stream::handshake::{Phase, Role};
use rdmasock_core::stream::mode::Mode;
use tcp::{Shape, Tcp};

use crate::conformance::pattern;

/// The µs without an answer after which the connector gives up an ASK, or a link that it waits for.
const TIMEOUT: u64 = 2_000;

/// The index of the end that called connect().
pub const CONNECTOR: usize = 0;
/// The index of the end that called accept().
pub const ACCEPTOR: usize = 1;

/// How the media behave.
#[derive(Clone, Debug)]
pub struct Weather {
    /// The shape of each direction of TCP.
    pub tcp: [Shape; 2],
    /// The fates of messages out of band, by the end that sends them.
    pub oob: [Vec<Fate>; 2],
    /// Delays on the link's side channel.
    pub side: [Vec<Fate>; 2],
    /// µs until a link is there; `None` if there never is one.
    pub link: Option<u64>,
    /// Whether the link is one between hosts.
    pub remote: bool,
}

impl Weather {
    /// Returns media on which nothing is late, small or lost.
    pub fn fair() -> Self {
        let shape = Shape {
            capacity: 4096,
            segments: vec![usize::MAX],
            latency: 0,
        };
        Self {
            tcp: [shape.clone(), shape],
            oob: Default::default(),
            side: Default::default(),
            link: Some(0),
            remote: false,
        }
    }

    /// Returns media as [`fair`](Self::fair), between hosts.
    pub fn fair_between_hosts() -> Self {
        Self {
            remote: true,
            ..Self::fair()
        }
    }
}

/// Two ends and the media between them.
#[derive(Debug)]
pub struct World {
    clock: Clock,
    /// The ends. They stand before the link, so that their cursors are dropped first.
    pub ends: [Endpoint; 2],
    /// The two directions of TCP, by sender.
    tcp: [Rc<RefCell<Tcp>>; 2],
    oob: [Rc<Medium>; 2],
    remote: bool,
    link_after: Option<u64>,
    asked_at: u64,
    linking_since: Option<u64>,
    /// The time at which the link failed at the first of the ends.
    failed_at: u64,
    nonces: u8,
    /// Bytes that each application has written.
    pub sent: [usize; 2],
    /// Bytes received that were compared.
    checked: [usize; 2],
}

impl World {
    /// Returns a connection that has just been made.
    pub fn new(weather: Weather) -> Self {
        let clock = Clock::default();
        let oob = weather.oob.map(|fates| {
            let medium = Medium::datagrams(&clock);
            medium.script(fates);
            Rc::new(medium)
        });
        let tcp = weather.tcp.map(|shape| Rc::new(RefCell::new(Tcp::new(&clock, shape))));
        let link = Link::pair(heap_pair(1 << 16, &clock).unwrap(), weather.remote);
        for (link, fates) in link.iter().zip(weather.side) {
            link.end().medium().script(fates);
        }
        let [c, s] = link;
        let end = |role, me: usize, link| {
            let net = Net {
                clock: clock.clone(),
                out: Rc::clone(&tcp[me]),
                inn: Rc::clone(&tcp[1 - me]),
                oob: Rc::clone(&oob[me]),
            };
            Endpoint::new(role, net, link)
        };
        Self {
            ends: [end(Role::Connector, CONNECTOR, c), end(Role::Acceptor, ACCEPTOR, s)],
            failed_at: 0,
            tcp,
            oob,
            remote: weather.remote,
            link_after: weather.link,
            asked_at: 0,
            linking_since: None,
            nonces: 0,
            sent: [0; 2],
            checked: [0; 2],
            clock,
        }
    }

    /// A nonce that begins with bytes which the pattern of the data contains too.
    fn nonce(&mut self) -> Nonce {
        self.nonces = self.nonces.wrapping_add(1);
        let mut bytes = [self.nonces; 16];
        bytes[..4].copy_from_slice(&pattern(usize::from(self.nonces), 4));
        Nonce::from_bytes(bytes)
    }

    /// The connector sends an ASK, if it may.
    pub fn promote(&mut self) {
        let nonce = self.nonce();
        let address: SocketAddr = ([127, 0, 0, 1], 1).into();
        self.asked_at = self.clock.now();
        self.ends[CONNECTOR].ask(nonce, Tuple::new(address, address));
    }

    /// An application writes up to `n` bytes. Returns how many were accepted.
    pub fn write(&mut self, end: usize, n: usize) -> usize {
        let data = pattern(self.sent[end] + end * 100_003, n);
        let taken = self.ends[end].write(&data);
        self.sent[end] += taken;
        taken
    }

    /// An application reads up to `n` bytes.
    pub fn read(&mut self, end: usize, n: usize) -> usize {
        let got = self.ends[end].read(n);
        self.check_received(end);
        got
    }

    /// Checks that the bytes which `end` has received are those that the other has sent, as far as they go.
    fn check_received(&mut self, end: usize) {
        let got = self.ends[end].received();
        assert!(got.len() <= self.sent[1 - end], "more than was sent");
        let from = std::mem::replace(&mut self.checked[end], got.len());
        let expected = pattern((1 - end) * 100_003 + from, got.len() - from);
        assert!(got[from..] == expected, "not what was sent");
    }

    /// A program at one end passes the socket to code that knows nothing of links.
    pub fn return_to_tcp(&mut self, end: usize) {
        self.ends[end].return_to_tcp();
    }

    /// Shuts an end's sending direction down.
    pub fn shut(&mut self, end: usize) {
        if !self.ends[end].has_shut() {
            self.ends[end].shut();
        }
    }

    /// The link fails at one end, which has got `keep` of the bytes that it has not read. With
    /// `flight`, messages on the way in either direction are lost too.
    pub fn fail(&mut self, end: usize, keep: u64, flight: bool) {
        if flight {
            self.ends.iter().for_each(|e| e.link_here().end().medium().lose_all());
        }
        if self.ends[1 - end].link_here().is_up() {
            self.failed_at = self.clock.now();
        }
        self.ends[end].link_failed(keep);
    }

    /// Both ends notice a failed link in the end. The link is replaced when neither end is on it.
    fn mend(&mut self) {
        let up = [0, 1].map(|i| self.ends[i].link_here().is_up());
        if up == [true, true] {
            return;
        }
        if self.clock.now() >= self.failed_at + 3 * TIMEOUT {
            for end in [CONNECTOR, ACCEPTOR] {
                self.ends[end].link_failed(0);
            }
        }
        let idle = |e: &Endpoint| e.is_plain() && !e.has_stream();
        if self.ends.iter().all(idle) {
            let fresh = Link::pair(heap_pair(1 << 16, &self.clock).unwrap(), self.remote);
            self.ends
                .iter()
                .zip(fresh)
                .for_each(|(end, link)| end.set_fresh_link(link));
        }
    }

    /// Does all that happens by itself at this instant.
    pub fn settle(&mut self) {
        for end in [CONNECTOR, ACCEPTOR] {
            while let Some(message) = self.oob[1 - end].recv() {
                let fresh = self.nonce();
                self.ends[end].on_oob(message, fresh);
            }
            while let Some(message) = self.ends[end].link_here().end().recv() {
                self.ends[end].on_side(message);
            }
            self.ends[end].poll();
        }
        let now = self.clock.now();
        self.ends[ACCEPTOR].repeat_yes(TIMEOUT);
        if now >= self.asked_at + TIMEOUT {
            self.ends[CONNECTOR].ask_times_out();
        }
        if self.ends[CONNECTOR].wants_link.get() {
            let since = *self.linking_since.get_or_insert(now);
            let works = self.ends.iter().all(|e| e.link_here().is_up());
            let up = works && self.link_after.is_some_and(|after| now >= since + after);
            if up || now >= since + TIMEOUT {
                self.linking_since = None;
                self.ends[CONNECTOR].on_link(up);
            }
        }
        self.mend();
    }

    /// Lets time pass.
    pub fn pass(&mut self, us: u64) {
        let until = self.clock.now() + us;
        self.settle();
        while self.clock.now() < until {
            self.clock.advance((until - self.clock.now()).min(TIMEOUT / 8));
            self.settle();
        }
    }

    /// Lets both applications read until nothing is left to happen. Then all bytes must have arrived.
    pub fn finish(&mut self) {
        let mut quiet = 0;
        while quiet < 100 {
            let before = self.progress();
            self.pass(TIMEOUT / 8);
            for end in [CONNECTOR, ACCEPTOR] {
                while self.read(end, 1000) > 0 {}
            }
            quiet = if self.progress() == before { quiet + 1 } else { 0 };
        }
        for end in [CONNECTOR, ACCEPTOR] {
            self.check_received(end);
            assert_eq!(
                self.ends[end].received().len(),
                self.sent[1 - end],
                "bytes are missing: {self:?}"
            );
            assert_eq!(self.ends[end].owed(), 0, "RESUME has announced more");
            assert_eq!(
                self.ends[end].has_read_end(),
                self.ends[1 - end].has_shut(),
                "the end of the stream"
            );
            assert_eq!(self.ends[end].rx() == Mode::Link, self.ends[1 - end].tx() == Mode::Link);
            assert_ne!(self.ends[end].tx(), Mode::Marked, "a marker that is not written");
        }
        assert!(
            self.ends[CONNECTOR].phase().is_none(),
            "the connector's attempt does not end"
        );
        let offered = self.ends[ACCEPTOR].phase();
        let waits = |phase| phase == Phase::Offered;
        assert!(offered.is_none_or(waits), "the acceptor's attempt does not end");
        if self.ends.iter().all(Endpoint::is_plain) {
            assert!(
                self.ends.iter().all(|e| e.link_here().end().bytes_in_use() == 0),
                "rings are not given back"
            );
        }
    }

    fn progress(&self) -> ([usize; 4], [bool; 2], [usize; 2]) {
        let [a, b] = &self.ends;
        let written = |end: usize| self.tcp[end].borrow().total;
        let lengths = [a.received().len(), b.received().len(), written(0), written(1)];
        (
            lengths,
            [a.has_read_end(), b.has_read_end()],
            [a.outcomes().len(), b.outcomes().len()],
        )
    }

    /// Returns how the last attempt ended at each end.
    pub fn outcomes(&self) -> [Option<Outcome>; 2] {
        [0, 1].map(|i| self.ends[i].outcomes().last().copied())
    }

    /// Returns the bytes that an end has written in TCP, the application's and the library's.
    pub fn in_tcp(&self, end: usize) -> usize {
        self.tcp[end].borrow().total
    }
}
