//! The answerer's part of the control port: questions of other hosts about connections that a process of this host
//! holds (docs/protocol.md, P60–P69).
//!
//! The kernel hands a question to any of the instances that share the port. If the instance does not hold the
//! connection, it relays the question to the service names of this host, as a connector of this host would ask. The
//! asker's part is `hosts`.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::os::datagram::{Answerer, Arrival};
use rdmasock_core::rendezvous::control::{
    Body, Bucket, DATAGRAM, Datagram, Limiter, Memory, QueryId, Rate, Refused, Stamper,
};
use rdmasock_core::rendezvous::names;
use rdmasock_core::stats::{Event, StatsPage};
use rdmasock_core::wire;
use rdmasock_core::wire::Message;
use rustix::event::epoll as kernel;
use rustix::io::Errno;

use crate::objects::library::random_u64;
use crate::objects::mailbox::{kind, tag};
use crate::service::ask::Asking;
use crate::service::channels::send;
use crate::service::{Conn, Peer, Worker, rings};

pub(super) const MS: u64 = 1_000_000;
const PAUSE: u64 = 50 * MS;
/// The most questions that are relayed to other instances of this host at once.
const RELAYS: usize = 256;
/// How often a YES is repeated: first `FIRST_REPEAT` ns after it, then after twice as long each time (P67).
const REPEATS: u32 = 8;
const FIRST_REPEAT: u64 = 200 * MS;
/// The pause after a failed bind of the control port, until the next attempt, ns.
const BIND_AGAIN: u64 = 10_000 * MS;
/// The most datagrams that are read in a row.
const AT_ONCE: usize = 64;
/// The rate of all datagrams that are read: the number in a second, and the number at once. Beyond this rate the socket
/// is not polled for `PAUSE`, and the kernel drops datagrams.
const ARRIVALS: Rate = Rate::new(5_000, 1_000);
/// The rates of questions without a good stamp, in total and from each address. A stamp, which an earlier answer has
/// given to the sender, proves that the sender receives at its address. Without one the source address may be forged.
const STRANGERS: [Rate; 2] = [Rate::new(200, 400), Rate::new(20, 40)];
/// The rates of questions with a good stamp, in total and from each address.
const KNOWN: [Rate; 2] = [Rate::new(2_000, 2_000), Rate::new(1_000, 1_000)];
/// The most addresses whose rates are remembered.
const SOURCES: usize = 1024;
/// The most questions that are remembered, and for how long, ns: longer than a stamp is good. So a copied question is
/// either noticed or has no good stamp.
const QUERIES: usize = 65_536;
const REMEMBERED: u64 = Stamper::LIFE + 1_000 * MS;

/// The state of the answerer.
pub(super) struct Control {
    socket: Option<Answerer>,
    /// After a failed attempt to bind: when the next one may be made, monotonic ns. 0 if none has failed.
    bind_again: u64,
    stamper: Stamper,
    arrivals: Bucket,
    /// Until when the socket is not polled, monotonic ns; `None` if it is polled.
    paused_until: Option<u64>,
    strangers: Limiter,
    known: Limiter,
    queries: Memory<QueryId, Query>,
    /// Questions whose YES is to be repeated.
    repeating: Vec<QueryId>,
}

/// A question that was accepted.
struct Query {
    from: SocketAddr,
    to: IpAddr,
    request: u64,
    nonce_c: Nonce,
    state: State,
}

enum State {
    /// The question has no answer yet.
    Asked,
    Answered {
        answer: Box<[u8; DATAGRAM]>,
        repeats: u32,
        again: u64,
    },
    /// The asker has confirmed the answer, or has cancelled the question.
    Over,
}

impl Control {
    /// Returns the state of an answerer that is not bound yet. `None` without random bytes.
    pub(super) fn new(now: u64) -> Option<Self> {
        let limiter = |[total, each]: [Rate; 2]| Limiter::new(total, each, SOURCES, now);
        Some(Self {
            socket: None,
            bind_again: 0,
            stamper: Stamper::random().ok()?,
            arrivals: Bucket::new(ARRIVALS, now),
            paused_until: None,
            strangers: limiter(STRANGERS),
            known: limiter(KNOWN),
            queries: Memory::new(QUERIES, REMEMBERED),
            repeating: Vec::new(),
        })
    }

    /// Returns the time of the next repeat, or of the end of a pause, monotonic ns; `None` if there is none.
    pub(super) fn next_timeout(&self) -> Option<u64> {
        let repeats = self.repeating.iter();
        let repeats = repeats.filter_map(|query| match self.queries.get(query)?.state {
            State::Answered { again, .. } => Some(again),
            _ => None,
        });
        repeats.chain(self.paused_until).min()
    }
}

impl Worker {
    /// Binds the control port, if this process may hold connections that could be promoted. After a failure, tries
    /// again once `BIND_AGAIN` has passed and the thread is awake anyway. Until then only instances of other users, if
    /// there are any, answer on this host.
    pub(super) fn open_control(&mut self, now: u64) {
        let reach = self.library.reach;
        if self.control.socket.is_some()
            || self.listeners.is_empty()
            || now < self.control.bind_again
            || !reach.verbs_ready()
        {
            return;
        }
        let Some(port) = reach.port() else { return };
        let bound = Answerer::bind(port).and_then(|socket| {
            let is_added = self.add(socket.as_fd(), tag(kind::CONTROL, 0), kernel::EventFlags::IN);
            is_added.then_some(socket).ok_or(Errno::NOMEM)
        });
        match bound {
            Ok(socket) => {
                tracing::debug!(target: "rdmasock", port, "control port bound");
                self.control.bind_again = 0;
                self.control.socket = Some(socket);
            }
            Err(error) => {
                if std::mem::replace(&mut self.control.bind_again, now + BIND_AGAIN) == 0 {
                    self.library.stats.count(Event::ControlUnbound);
                    tracing::warn!(target: "rdmasock", port, %error, "control port not bound: not answering other hosts");
                }
            }
        }
    }

    /// Reads and handles the datagrams that have come.
    pub(super) fn on_control(&mut self) {
        let now = crate::sys::time::now_ns();
        // Larger than a datagram by one byte, so that a longer datagram is noticed.
        let mut buf = [0u8; DATAGRAM + 1];
        for _ in 0..AT_ONCE {
            if !self.control.arrivals.take(now) {
                self.library.stats.count(Event::ControlRate);
                self.control.paused_until = Some(now + PAUSE);
                return self.watch_control(kernel::EventFlags::empty());
            }
            let Some(socket) = &self.control.socket else {
                return;
            };
            match socket.recv(&mut buf) {
                Ok(Some(arrival)) => {
                    let bytes = buf.get(..arrival.length).unwrap_or(&buf);
                    match Datagram::decode(bytes, self.library.reach.key()) {
                        Ok(datagram) => self.on_datagram(&datagram, &arrival, now),
                        Err(refused) => count_refused(self.library.stats, refused),
                    }
                }
                Ok(None) => return,
                // An ICMP error for an answer whose receiver is gone.
                Err(_) => {}
            }
        }
    }

    fn watch_control(&self, flags: kernel::EventFlags) {
        if let Some(socket) = &self.control.socket {
            let data = kernel::EventData::new_u64(tag(kind::CONTROL, 0));
            let _ = kernel::modify(&self.service.epoll, socket.as_fd(), data, flags);
        }
    }

    fn on_datagram(&mut self, datagram: &Datagram, arrival: &Arrival, now: u64) {
        let source = arrival.from.ip().to_canonical();
        let is_stamped = self.control.stamper.is_good(&datagram.stamp, arrival.from, now);
        let limiter = match is_stamped {
            true => &mut self.control.known,
            false => &mut self.control.strangers,
        };
        if !limiter.take(source, now) {
            return self.library.stats.count(Event::ControlRate);
        }
        match datagram.body {
            Body::Ask {
                request,
                tuple,
                nonce_c,
                instance_c,
            } => {
                // P63: the question is sent from the connector's address to the acceptor's.
                let Some(to) = arrival
                    .to
                    .filter(|to| tuple.connector().ip() == source && tuple.acceptor().ip() == to.to_canonical())
                else {
                    return self.library.stats.count(Event::ControlMisplaced);
                };
                if !is_stamped {
                    self.library.stats.count(Event::ControlStamp);
                    self.send_control(datagram.query, Body::Stamp, arrival.from, to, now);
                    return;
                }
                let query = Query {
                    from: arrival.from,
                    to,
                    request,
                    nonce_c,
                    state: State::Asked,
                };
                self.on_query(datagram.query, query, tuple.at(self.namespace, 0), instance_c, now);
            }
            Body::Cancel { nonce_s, instance_s } => {
                self.end_query(datagram.query, arrival);
                if self.handshakes.offered.contains_key(&nonce_s) {
                    self.on_cancel(nonce_s);
                } else if let Ok(channel) = names::connect_to(names::instance(&instance_s).as_bytes()) {
                    // Another instance of this host has made the attempt. If that instance is gone, so is the
                    // connection. The message can be read even after the channel has been closed.
                    send(&channel, &Message::Cancel { nonce_s }, &[]);
                }
            }
            Body::Got => self.end_query(datagram.query, arrival),
            // Answers do not belong on the port for questions.
            Body::Stamp | Body::Yes { .. } | Body::No { .. } => {
                self.library.stats.count(Event::ControlKind);
            }
        }
    }

    /// Handles a question whose source address was proved by its stamp.
    fn on_query(&mut self, id: QueryId, query: Query, tuple: Tuple, instance_c: InstanceId, now: u64) {
        self.control.queries.expire(now);
        if let Some(known) = self.control.queries.get_mut(&id) {
            let same = known.from == query.from && known.request == query.request && known.nonce_c == query.nonce_c;
            match &known.state {
                // The asker has sent the question again, since the answer takes its time or was lost.
                State::Asked if same => {}
                State::Answered { answer, .. } if same => {
                    if let Some(socket) = &self.control.socket {
                        let _ = socket.send(&answer[..], known.from, known.to);
                    }
                }
                _ => self.library.stats.count(Event::ControlReplay),
            }
            return;
        }
        let (conn, request, nonce_c) = (self.new_conn(), query.request, query.nonce_c);
        if !self.control.queries.insert(id, query, now) {
            return self.library.stats.count(Event::ControlRate);
        }
        self.conns
            .insert(conn, Conn::new(None, Peer::Remote(id), Some(now + REMEMBERED)));
        if self.handshakes.accepted(&tuple).is_some() {
            return self.on_ask(conn, request, tuple, nonce_c, instance_c);
        }
        if self.asks.values().filter(|a| a.is_relayed()).count() >= RELAYS {
            let reason = wire::Reason::Limit;
            return self.reply(conn, &Message::No { request, reason });
        }
        self.library.stats.count(Event::ControlRelay);
        // A request number of this instance: askers on two hosts may have chosen the same number.
        let request = random_u64();
        self.ask_out(request, Asking::relayed(conn, tuple, nonce_c, instance_c));
    }

    /// Sends the answer to another host's question, whether this instance or another one has given it.
    pub(super) fn answer_remote(&mut self, id: QueryId, message: &Message) {
        let now = crate::sys::time::now_ns();
        let Some(query) = self.control.queries.get(&id) else {
            return;
        };
        let (request, from, to) = (query.request, query.from, query.to);
        let body = match *message {
            Message::Yes {
                nonce_s, instance_s, ..
            } => Body::Yes {
                request,
                nonce_s,
                instance_s,
            },
            Message::No { reason, .. } => Body::No { request, reason },
            _ => Body::No {
                request,
                reason: wire::Reason::NotHeld,
            },
        };
        self.library.stats.count(Event::ControlAnswer);
        let answer = Box::new(self.send_control(id, body, from, to, now));
        if let Some(query) = self.control.queries.get_mut(&id) {
            query.state = State::Answered {
                answer,
                repeats: 0,
                again: now + FIRST_REPEAT,
            };
        }
        if matches!(body, Body::Yes { .. }) {
            self.control.repeating.push(id);
        }
    }

    /// Sends a datagram with a new stamp to the address `to`, and returns it.
    fn send_control(&self, query: QueryId, body: Body, to: SocketAddr, from: IpAddr, now: u64) -> [u8; DATAGRAM] {
        let stamp = self.control.stamper.stamp(to, now);
        let datagram = Datagram { query, stamp, body }.encode(self.library.reach.key());
        if let Some(socket) = &self.control.socket {
            let _ = socket.send(&datagram, to, from);
        }
        datagram
    }

    /// Ends a query whose asker has the answer, or does not want it.
    fn end_query(&mut self, id: QueryId, arrival: &Arrival) {
        if let Some(query) = self.control.queries.get_mut(&id)
            && query.from == arrival.from
            && matches!(query.state, State::Answered { .. })
        {
            query.state = State::Over;
            self.control.repeating.retain(|repeating| *repeating != id);
        }
    }

    /// Repeats each YES that is due, and polls the socket again when the pause after a flood is over.
    pub(super) fn control_on_time(&mut self, now: u64) {
        self.open_control(now);
        if rings(&mut self.control.paused_until, now) {
            self.watch_control(kernel::EventFlags::IN);
        }
        let Control {
            socket: Some(socket),
            queries,
            repeating,
            ..
        } = &mut self.control
        else {
            return;
        };
        repeating.retain(|id| {
            let Some(query) = queries.get_mut(id) else {
                return false;
            };
            let State::Answered { answer, repeats, again } = &mut query.state else {
                return false;
            };
            if now >= *again {
                *repeats += 1;
                *again = now + (FIRST_REPEAT << *repeats);
                let _ = socket.send(&answer[..], query.from, query.to);
            }
            *repeats < REPEATS
        });
    }
}

/// Counts a refused datagram, by the reason.
pub(super) fn count_refused(stats: &StatsPage, refused: Refused) {
    stats.count(match refused {
        Refused::Length => Event::ControlLength,
        Refused::Version(_) => Event::ControlVersion,
        Refused::Kind => Event::ControlKind,
        Refused::Mac => Event::ControlMac,
    });
}

#[cfg(test)]
mod tests;
