//! The receiving half of a simulated end: plain, scanning for markers, and on the link, as
//! `look_ahead` and `scan_taken` of the shims do it.

use rdmasock_core::ids::ID_BYTES;
use rdmasock_core::stream::handshake::Closing;
use rdmasock_core::wire::Marker;
use rdmasock_core::wire::scan::{Found, scan};

use super::{Endpoint, Mode, Net};

impl Endpoint {
    /// Reads up to `n` bytes, as far as they are there.
    pub fn read(&mut self, net: &mut Net<'_>, n: usize) -> usize {
        let before = self.received.len();
        if self.inside {
            self.read_inside(net, n);
        }
        while self.received.len() - before < n && !self.inside {
            let want = n - (self.received.len() - before);
            let more = match self.rx {
                Mode::Tcp => self.read_tcp(net, want),
                Mode::Link => {
                    self.look_for_resume(net);
                    self.read_link(want)
                }
                Mode::Marked => match self.look_ahead(net) {
                    Some((carry, kernel)) if carry + kernel > 0 => {
                        let from_carry = carry.min(want);
                        self.received.extend(self.carry.drain(..from_carry));
                        let rest = kernel.min(want - from_carry);
                        self.received.extend(net.inn.take(rest));
                        self.pay(from_carry + rest);
                        true
                    }
                    Some(_) => false,
                    None => self.rx != Mode::Marked,
                },
            };
            if !more {
                break;
            }
        }
        self.settle(net);
        self.received.len() - before
    }

    fn read_tcp(&mut self, net: &mut Net<'_>, want: usize) -> bool {
        let n = net.inn.peek().len().min(want);
        self.received.extend(net.inn.take(n));
        self.pay(n);
        self.eof = n == 0 && net.inn.is_ended();
        assert!(!self.eof || self.owed == 0, "TCP ends too early");
        n > 0
    }

    /// TCP has brought `n` bytes of what RESUME has announced.
    fn pay(&mut self, n: usize) {
        self.owed = self.owed.saturating_sub(n as u64);
    }

    fn read_link(&mut self, want: usize) -> bool {
        let consumer = self.consumer.as_mut().unwrap();
        let spans = consumer.spans(want).unwrap();
        let mut piece = vec![0; spans.len().min(want)];
        // SAFETY: the piece is writable and apart from the ring.
        unsafe { spans.copy_out(0, piece.as_mut_ptr(), piece.len()) };
        let _ = consumer.consume(piece.len());
        self.received.extend(&piece);
        if self.read_on && self.remote && piece.is_empty() {
            self.leave_ring();
            return true;
        }
        if piece.is_empty() && consumer.end().unwrap().is_some() {
            self.rx = Mode::Tcp;
            return true;
        }
        !piece.is_empty()
    }

    /// A read that entered the kernel before the scan began comes back with what there is.
    fn read_inside(&mut self, net: &mut Net<'_>, want: usize) {
        let n = net.inn.peek().len().min(want);
        let mut bytes = net.inn.take(n);
        if n == 0 && !net.inn.is_ended() {
            return;
        }
        while let (Some(nonce), false) = (self.scan, bytes.is_empty()) {
            let seen = scan(&nonce, &bytes);
            self.received.extend(bytes.drain(..seen.payload));
            match seen.what {
                Found::Payload => {}
                Found::PartialMarker { have } => self.carry.extend(bytes.drain(..have)),
                Found::Marker { marker, len } => {
                    bytes.drain(..len);
                    self.on_marker(net, marker);
                }
                Found::Bad { .. } => panic!("a bad marker"),
            }
        }
        if self.rx == Mode::Link {
            // RESUME, and what follows it, which comes after the ring.
            self.carry.extend(bytes);
        } else {
            self.pay(bytes.len());
            self.received.extend(bytes);
        }
        self.inside = false;
    }

    /// What of the carry and of TCP is payload; processes markers in front. `None`: the direction
    /// no longer scans, or has ended.
    pub(super) fn look_ahead(&mut self, net: &mut Net<'_>) -> Option<(usize, usize)> {
        while self.rx == Mode::Marked && !self.inside {
            let carried = self.carry.len();
            let mut bytes = self.carry.clone();
            let ended = net.inn.is_ended();
            bytes.extend(net.inn.peek());
            if bytes.is_empty() && ended {
                self.feed(net, |h| Ok(h.on_end()));
                self.resumption(net, |r| r.on_end(false));
                self.rx = Mode::Tcp;
                self.scan = None;
                return None;
            }
            let Some(nonce) = self.scan else {
                if carried == 0 {
                    self.rx = Mode::Tcp;
                }
                return (carried > 0).then_some((carried, 0));
            };
            let seen = scan(&nonce, &bytes);
            let split = |n: usize| (n.min(carried), n - n.min(carried));
            if seen.payload > 0 {
                return Some(split(seen.payload));
            }
            match seen.what {
                Found::PartialMarker { have } if ended && have < ID_BYTES => {
                    return Some(split(have));
                }
                Found::PartialMarker { .. } if ended => panic!("a marker was cut off"),
                Found::Payload | Found::PartialMarker { .. } => return Some((0, 0)),
                Found::Bad { .. } => panic!("a bad marker"),
                Found::Marker { marker, len } => {
                    let (carry, kernel) = split(len);
                    self.carry.drain(..carry);
                    net.inn.take(kernel);
                    self.on_marker(net, marker);
                }
            }
        }
        if self.inside { Some((0, 0)) } else { None }
    }

    fn on_marker(&mut self, net: &mut Net<'_>, marker: Marker) {
        match marker {
            Marker::Hello(hello) => self.feed(net, |h| h.on_hello(hello.instance)),
            Marker::Switch => self.feed(net, |h| h.on_closing(Closing::Switch)),
            Marker::Resume { received, sent } => self.on_resume(net, received, sent),
            Marker::Abort(_) => self.feed(net, |h| h.on_closing(Closing::Abort)),
        }
    }
}
