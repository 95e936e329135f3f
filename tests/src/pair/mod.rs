//! Two simulated ends of one connection under a virtual clock: TCP, the channel out of band and a
//! link of the mem fabric between them. What is tested with it is in `tests/stream_pairs.rs`.

pub mod endpoint;
pub mod tcp;

use std::net::SocketAddr;

use rdmasock_core::fabric::mem::{Clock, End, Fate, Medium, heap_pair};
use rdmasock_core::ids::{Nonce, Tuple};
use rdmasock_core::stream::handshake::{Handshake, Phase, Role, Step};

use crate::conformance::pattern;
use endpoint::{Endpoint, Mode, Net};
use tcp::{Shape, Tcp};

/// After how many µs without an answer the connector gives an ASK up, and a link that it waits for.
const TIMEOUT: u64 = 2_000;

/// The index of the end that called connect().
pub const CONNECTOR: usize = 0;
/// The index of the end that called accept().
pub const ACCEPTOR: usize = 1;

/// How the media behave.
#[derive(Clone, Debug)]
pub struct Weather {
    /// Each direction of TCP.
    pub tcp: [Shape; 2],
    /// What becomes of the messages out of band, of either end.
    pub oob: [Vec<Fate>; 2],
    /// Delays on the link's side channel.
    pub side: [Vec<Fate>; 2],
    /// µs until a link is there; `None`: never.
    pub link: Option<u64>,
    /// The link is one between hosts.
    pub remote: bool,
}

impl Weather {
    /// Nothing is late, small or lost.
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

    /// As [`fair`](Self::fair), between hosts.
    pub fn fair_between_hosts() -> Self {
        Self {
            remote: true,
            ..Self::fair()
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct World {
    clock: Clock,
    /// The ends. Before the link in order, so that their cursors go first.
    pub ends: [Endpoint; 2],
    /// By sender.
    tcp: [Tcp; 2],
    oob: [Medium; 2],
    link: [End; 2],
    link_after: Option<u64>,
    asked_at: u64,
    linking_since: Option<u64>,
    /// When the link failed at the first of the ends.
    failed_at: u64,
    nonces: u8,
    /// Bytes that each application has written.
    pub sent: [usize; 2],
    /// Bytes received that were compared.
    checked: [usize; 2],
}

impl World {
    /// A connection that has just been made.
    pub fn new(weather: Weather) -> Self {
        let clock = Clock::default();
        let oob = weather.oob.map(|fates| {
            let medium = Medium::datagrams(&clock);
            medium.script(fates);
            medium
        });
        let link = heap_pair(1 << 16, &clock).unwrap();
        for (end, fates) in link.iter().zip(weather.side) {
            end.medium().script(fates);
        }
        let end = |role| {
            let mut end = Endpoint::new(role);
            end.remote = weather.remote;
            end
        };
        Self {
            ends: [end(Role::Connector), end(Role::Acceptor)],
            failed_at: 0,
            tcp: weather.tcp.map(|shape| Tcp::new(&clock, shape)),
            oob,
            link,
            link_after: weather.link,
            asked_at: 0,
            linking_since: None,
            nonces: 0,
            sent: [0; 2],
            checked: [0; 2],
            clock,
        }
    }

    /// Does something at one end.
    pub fn at<T>(&mut self, end: usize, act: impl FnOnce(&mut Endpoint, &mut Net<'_>) -> T) -> T {
        let [first, second] = &mut self.tcp;
        let (out, inn) = if end == 0 {
            (first, second)
        } else {
            (second, first)
        };
        let mut net = Net {
            out,
            inn,
            oob: &self.oob[end],
            link: &self.link[end],
        };
        act(&mut self.ends[end], &mut net)
    }

    /// A nonce that begins with bytes which the pattern of the data contains too.
    fn nonce(&mut self) -> Nonce {
        self.nonces = self.nonces.wrapping_add(1);
        let mut bytes = [self.nonces; 16];
        bytes[..4].copy_from_slice(&pattern(usize::from(self.nonces), 4));
        Nonce::from_bytes(bytes)
    }

    /// The connector asks, if it may.
    pub fn promote(&mut self) {
        let nonce = self.nonce();
        let address: SocketAddr = ([127, 0, 0, 1], 1).into();
        self.asked_at = self.clock.now();
        self.at(CONNECTOR, |e, net| {
            e.ask(net, nonce, Tuple::new(address, address))
        });
    }

    /// An application writes up to `n` bytes; gives how many were taken.
    pub fn write(&mut self, end: usize, n: usize) -> usize {
        let data = pattern(self.sent[end] + end * 100_003, n);
        let taken = self.at(end, |e, net| e.write(net, &data));
        self.sent[end] += taken;
        taken
    }

    /// An application reads up to `n` bytes.
    pub fn read(&mut self, end: usize, n: usize) -> usize {
        let got = self.at(end, |e, net| e.read(net, n));
        self.check_received(end);
        got
    }

    /// What `end` has received is what the other has sent, as far as it goes.
    fn check_received(&mut self, end: usize) {
        let got = &self.ends[end].received;
        assert!(got.len() <= self.sent[1 - end], "more than was sent");
        let from = std::mem::replace(&mut self.checked[end], got.len());
        let expected = pattern((1 - end) * 100_003 + from, got.len() - from);
        assert!(got[from..] == expected, "not what was sent");
    }

    /// One end's program hands the socket to somebody who knows nothing of links.
    pub fn return_to_tcp(&mut self, end: usize) {
        self.at(end, |e, net| e.return_to_tcp(net));
    }

    /// Half-closes.
    pub fn shut(&mut self, end: usize) {
        if !self.ends[end].fin {
            self.at(end, |e, net| e.shut(net));
        }
    }

    /// The link fails at one end, which has got `keep` of the bytes that it has not read; with
    /// `flight`, what is said on the way in either direction is lost too.
    pub fn fail(&mut self, end: usize, keep: u64, flight: bool) {
        if flight {
            self.link.iter().for_each(|l| l.medium().lose_all());
        }
        if self.ends[1 - end].link_up {
            self.failed_at = self.clock.now();
        }
        self.at(end, |e, net| e.link_failed(net, keep));
    }

    /// A link that has failed is noticed at both ends in the end, and replaced once nobody is on it.
    fn mend(&mut self) {
        let up = [0, 1].map(|i| self.ends[i].link_up);
        if up == [true, true] {
            return;
        }
        if self.clock.now() >= self.failed_at + 3 * TIMEOUT {
            for end in [CONNECTOR, ACCEPTOR] {
                self.at(end, |e, net| e.link_failed(net, 0));
            }
        }
        let idle = |e: &Endpoint| e.is_plain() && !e.has_stream();
        if self.ends.iter().all(idle) {
            self.link = heap_pair(1 << 16, &self.clock).unwrap();
            self.ends.iter_mut().for_each(|e| e.link_up = true);
        }
    }

    /// Everything that happens by itself at this instant.
    pub fn settle(&mut self) {
        for end in [CONNECTOR, ACCEPTOR] {
            while let Some(message) = self.oob[1 - end].recv() {
                let fresh = self.nonce();
                self.at(end, |e, net| e.on_oob(net, message, fresh));
            }
            while let Some(message) = self.link[end].recv() {
                self.at(end, |e, net| e.on_side(net, message));
            }
            self.at(end, |e, net| e.poll(net));
        }
        let now = self.clock.now();
        self.at(ACCEPTOR, |e, net| e.repeat_yes(net, now, TIMEOUT));
        if now >= self.asked_at + TIMEOUT {
            self.at(CONNECTOR, |e, net| e.ask_times_out(net));
        }
        if self.ends[CONNECTOR].wants_link {
            let since = *self.linking_since.get_or_insert(now);
            let works = self.ends.iter().all(|e| e.link_up);
            let up = works && self.link_after.is_some_and(|after| now >= since + after);
            if up || now >= since + TIMEOUT {
                self.linking_since = None;
                self.at(CONNECTOR, |e, net| e.on_link(net, up));
            }
        }
        self.mend();
    }

    /// Lets time pass.
    pub fn pass(&mut self, us: u64) {
        let until = self.clock.now() + us;
        self.settle();
        while self.clock.now() < until {
            self.clock
                .advance((until - self.clock.now()).min(TIMEOUT / 8));
            self.settle();
        }
    }

    /// Lets both applications read until nothing is left to happen; then all must have arrived.
    pub fn finish(&mut self) {
        let mut quiet = 0;
        while quiet < 100 {
            let before = self.progress();
            self.pass(TIMEOUT / 8);
            for end in [CONNECTOR, ACCEPTOR] {
                while self.read(end, 1000) > 0 {}
            }
            quiet = if self.progress() == before {
                quiet + 1
            } else {
                0
            };
        }
        for end in [CONNECTOR, ACCEPTOR] {
            self.check_received(end);
            assert_eq!(
                self.ends[end].received.len(),
                self.sent[1 - end],
                "bytes are missing: {self:?}"
            );
            assert_eq!(self.ends[end].owed, 0, "RESUME has announced more");
            assert_eq!(
                self.ends[end].eof,
                self.ends[1 - end].fin,
                "the end of the stream"
            );
            assert_eq!(
                self.ends[end].rx == Mode::Link,
                self.ends[1 - end].tx == Mode::Link
            );
            assert_ne!(
                self.ends[end].tx,
                Mode::Marked,
                "a marker that is not written"
            );
        }
        assert!(
            self.ends[CONNECTOR].handshake.is_none(),
            "the connector's attempt does not end"
        );
        let offered = self.ends[ACCEPTOR].handshake.as_ref();
        let waits = |h: &Handshake| h.phase() == Phase::Offered;
        assert!(
            offered.is_none_or(waits),
            "the acceptor's attempt does not end"
        );
        if self.ends.iter().all(Endpoint::is_plain) {
            assert!(
                self.link.iter().all(|l| l.bytes_in_use() == 0),
                "rings are not given back"
            );
        }
    }

    fn progress(&self) -> ([usize; 4], [bool; 2], [usize; 2]) {
        let [a, b] = &self.ends;
        let lengths = [
            a.received.len(),
            b.received.len(),
            self.tcp[0].total,
            self.tcp[1].total,
        ];
        (
            lengths,
            [a.eof, b.eof],
            [a.outcomes.len(), b.outcomes.len()],
        )
    }

    /// How the last attempt ended at each end.
    pub fn outcomes(&self) -> [Option<Step>; 2] {
        [0, 1].map(|i| self.ends[i].outcomes.last().copied())
    }

    /// Bytes that an end has written in TCP, the application's and the library's.
    pub fn in_tcp(&self, end: usize) -> usize {
        self.tcp[end].total
    }
}
