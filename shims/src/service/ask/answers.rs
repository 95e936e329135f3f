//! The outcome of a question: which answers count, and what each leads to. `retry.rs` decides about connections that
//! are not promoted.

use std::time::{Duration, Instant};

use rdmasock_core::ids::{InstanceId, Nonce};
use rdmasock_core::rendezvous::names;
use rdmasock_core::rendezvous::peers::Answer;
use rdmasock_core::stats::{Event, Reason};
use rdmasock_core::stream::connection;
use rdmasock_core::sync::store_load_fence;
use rdmasock_core::wire::{self, Message};

use super::{CHANNEL_LIFE, MAX_KNOWN, abandon, is_asking};
use crate::objects::link::up;
use crate::objects::socket::Stage;
use crate::service::asking::{Asker, Asking};
use crate::service::retry::{later, nobody};
use crate::service::state::{Peer, Watched, Worker};
use crate::sys::sockopt;

/// How long an instance that has sent YES counts as one that answers for its destination.
const PRESENT_FOR: Duration = Duration::from_secs(600);
/// The most instances that are asked about one connection: a chain of REDIRECTs must end.
const MAX_ASKED: usize = 64;

/// How an answer is treated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Taken {
    /// The question waits for this answer.
    Yes,
    /// The question is over.
    Late,
    /// The channel was not asked, so the answer does not count.
    No,
}

impl Worker {
    /// Checks an answer: it counts only if the question went out on this channel (P11), and once. An answer on a
    /// channel that was not asked is a violation, which closes the channel unless it is a link's.
    fn take_answer(&mut self, conn: u64, request: u64) -> Taken {
        let on_link = match self.conns.get(&conn).map(|c| &c.peer) {
            Some(Peer::Link(_)) => true,
            Some(Peer::Asked { request: asked, .. }) if *asked == request => false,
            _ => {
                self.violation(conn);
                return Taken::No;
            }
        };
        let Some(asking) = self.asks.get_mut(&request) else {
            return Taken::Late;
        };
        if asking.asked.remove(&conn) {
            return Taken::Yes;
        }
        tracing::warn!(target: "rdmasock", request, "an answer from whom was not asked");
        self.library.stats.count(Event::LinkViolation);
        if !on_link {
            self.hang_up(conn, Reason::Violation);
        }
        Taken::No
    }

    /// Closes the channel of one question once HELLO is in TCP, or will not be (P16). Until then keeps it, for
    /// `CHANNEL_LIFE` at a time.
    fn done_asking(&mut self, conn: u64) {
        let Some(Peer::Asked { greets, .. }) = self.conns.get(&conn).map(|c| &c.peer) else {
            return;
        };
        let socket = greets.and_then(|r| r.get());
        if socket.is_some_and(|socket| socket.tx.lock().is_none_or(|tx| !tx.marker.is_empty())) {
            let until = crate::sys::time::now_ns() + CHANNEL_LIFE;
            return self.asked_until.push_back((until, conn));
        }
        self.hang_up(conn, Reason::None);
    }

    pub(in crate::service) fn on_redirect(&mut self, conn: u64, request: u64, instances: Vec<InstanceId>) {
        let by_name = matches!(
            self.conns.get(&conn).map(|c| &c.peer),
            Some(Peer::Asked { by_name: true, .. })
        );
        let taken = self.take_answer(conn, request);
        self.done_asking(conn);
        if taken != Taken::Yes {
            return;
        }
        let Some(mut asking) = self.asks.remove(&request) else {
            return;
        };
        asking.answered.get_or_insert(wire::Reason::NotHeld);
        // P14: only a service name may redirect. A REDIRECT over a link, or from an instance's own name, counts as NO.
        for instance in instances.into_iter().filter(|_| by_name) {
            if asking.tried.len() >= MAX_ASKED {
                break;
            }
            if !asking.tried.insert(instance) {
                continue;
            }
            if let Some(link) = up::to(&instance) {
                self.ask_over(request, &mut asking, link);
            } else if let Ok(channel) = names::connect_to(names::instance(&instance).as_bytes()) {
                self.ask_on(request, &mut asking, channel, false);
            }
        }
        self.go_on(request, asking);
    }

    pub(in crate::service) fn on_no(&mut self, conn: u64, request: u64, reason: wire::Reason) {
        let taken = self.take_answer(conn, request);
        self.done_asking(conn);
        if taken == Taken::Yes {
            self.library.stats.count(Event::No);
            self.declined(request, reason);
        }
    }

    pub(in crate::service) fn declined(&mut self, request: u64, reason: wire::Reason) {
        let Some(mut asking) = self.asks.remove(&request) else {
            return;
        };
        if !matches!(reason, wire::Reason::NotHeld | wire::Reason::Shared) {
            // This answer is from the connection's only holder. Other answers cannot change it, and some may never
            // come.
            asking.answered = Some(reason);
            asking.asked.clear();
        }
        asking.answered.get_or_insert(reason);
        self.go_on(request, asking);
    }

    /// Treats the end of a channel without an answer as NO.
    pub(in crate::service) fn on_silence(&mut self, conn: u64, request: u64) {
        if self.asks.get_mut(&request).is_some_and(|a| a.asked.remove(&conn)) {
            self.declined(request, wire::Reason::NotHeld);
        }
    }

    /// Treats the end of a link as NO to the questions that were asked on it. Between hosts an answer may have been on
    /// its way: the same question is asked in another way.
    pub(in crate::service) fn on_link_silence(&mut self, conn: u64, is_remote: bool) {
        let waiting = self
            .asks
            .iter()
            .filter(|(_, a)| a.asked.contains(&conn))
            .map(|(r, _)| *r);
        for request in waiting.collect::<Vec<_>>() {
            if let Some(asking) = self.asks.get_mut(&request) {
                asking.is_unheard |= is_remote;
                asking.named &= !is_remote;
            }
            self.on_silence(conn, request);
        }
    }

    pub(in crate::service) fn on_yes(&mut self, conn: u64, request: u64, nonce_s: Nonce, instance_s: InstanceId) {
        match self.take_answer(conn, request) {
            Taken::No => {}
            // The acceptor scans TCP for a HELLO that will not come (P15).
            Taken::Late => self.reply(
                conn,
                &Message::Cancel {
                    request,
                    nonce_c: nonce_s,
                    nonce_s,
                },
            ),
            Taken::Yes => {
                let asking = self.asks.remove(&request);
                if let Some(Peer::Asked { greets, .. }) = self.conns.get_mut(&conn).map(|c| &mut c.peer)
                    && let Some(Asker::Here(r)) = asking.as_ref().map(|a| a.who)
                {
                    *greets = Some(r);
                }
                if let Some(asking) = &asking
                    && !self.accept_yes(asking, nonce_s, instance_s)
                {
                    self.reply(
                        conn,
                        &Message::Cancel {
                            request,
                            nonce_c: asking.nonce,
                            nonce_s,
                        },
                    );
                }
            }
        }
        self.done_asking(conn);
    }

    /// Goes on after a YES: a connection of this process sends HELLO, the asker on another host gets the YES. Returns
    /// false if the YES comes too late.
    pub(in crate::service) fn accept_yes(&mut self, asking: &Asking, nonce_s: Nonce, instance_s: InstanceId) -> bool {
        let r = match asking.who {
            Asker::Here(r) => r,
            Asker::Elsewhere { conn, .. } => {
                let yes = Message::Yes {
                    request: 0,
                    nonce_s,
                    instance_s,
                };
                self.reply(conn, &yes);
                return true;
            }
        };
        self.library.stats.count(Event::Yes);
        let greeted = self.greet(asking, nonce_s, instance_s);
        if !greeted {
            self.settle(r);
        }
        greeted
    }

    /// Watches the socket and begins HELLO. Returns false if the attempt is over.
    fn greet(&mut self, asking: &Asking, nonce_s: Nonce, instance_s: InstanceId) -> bool {
        let destination = asking.tuple.acceptor();
        let mut known = match self.cache.get(&destination, Instant::now()) {
            Some(Answer::Present(instances)) => instances.clone(),
            _ => Vec::new(),
        };
        known.retain(|i| *i != instance_s);
        known.insert(0, instance_s);
        known.truncate(MAX_KNOWN + 1);
        self.cache
            .insert(destination, Answer::Present(known), Instant::now(), PRESENT_FOR);
        let Some(socket) = asking.socket().filter(|s| is_asking(s, asking.nonce)) else {
            return false;
        };
        if self.watch(socket) != Watched::Done || !connection::start_scan(socket, asking.nonce) {
            if abandon(socket, asking.nonce) {
                later(socket, Reason::Unsupported.into());
                if socket.numbers.anchor_fd().is_some_and(sockopt::is_beyond_links) {
                    socket.promotion.exchange_stage(Stage::Watching, Stage::Pinned);
                }
            }
            return false;
        }
        let Some(mut control) = socket.control.lock() else {
            return false;
        };
        // The program may have given up since, or be about to end. In that case it first keeps all connections on TCP
        // and then checks which sockets scan, so one of the two sees the other.
        store_load_fence();
        let is_kept = crate::sys::kept_on_tcp::reason().is_some();
        let is_asking = control
            .handshake
            .as_ref()
            .is_some_and(|h| h.is_asking() && h.mine() == asking.nonce);
        if is_kept || !is_asking {
            connection::stop_scan(socket);
            if is_asking {
                connection::end_attempt(socket, &mut control);
            }
            return false;
        }
        connection::feed(socket, &mut control, |h| h.on_yes(nonce_s));
        true
    }

    pub(in crate::service) fn expire_asks(&mut self, now: u64) {
        let late: Vec<u64> = self
            .asks
            .iter()
            .filter(|(_, a)| a.deadline <= now)
            .map(|(r, _)| *r)
            .collect();
        for request in late {
            let Some(asking) = self.asks.remove(&request) else {
                continue;
            };
            self.library.stats.count(Event::HandshakeTimeout);
            if let Asker::Elsewhere { conn, .. } = asking.who {
                let reason = wire::Reason::Timeout;
                self.reply(conn, &Message::No { request, reason });
                continue;
            }
            if asking.is_unheard {
                self.ask_again(request, asking, now);
                continue;
            }
            let why = if asking.remote && self.is_host_silent(&asking) {
                Reason::PeerWithout
            } else {
                Reason::TimedOut
            };
            if let Some(socket) = asking.socket()
                && abandon(socket, asking.nonce)
            {
                if why == Reason::TimedOut {
                    later(socket, why.into());
                } else {
                    nobody(socket, asking.remote);
                }
            }
        }
    }

    /// Asks the same question again, as long as the connection is in the attempt.
    fn ask_again(&mut self, request: u64, mut asking: Asking, now: u64) {
        if !asking.socket().is_some_and(|s| is_asking(s, asking.nonce)) {
            return;
        }
        asking.answered = None;
        asking.put_off(now);
        self.ask_out(request, &mut asking);
        self.asks.insert(request, asking);
    }

    /// Ends the wait on channels of one question whose time is over: an answer that has not come by then will not come.
    pub(in crate::service) fn expire_asked(&mut self, now: u64) {
        while let Some((until, conn)) = self.asked_until.front().copied()
            && until <= now
        {
            self.asked_until.pop_front();
            self.done_asking(conn);
        }
    }
}
