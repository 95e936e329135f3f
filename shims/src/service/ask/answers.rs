//! What comes of a question: who answers, whether that counts, and what it leads to. What becomes of a connection that
//! nobody promotes is `retry.rs`'s business.

use std::time::{Duration, Instant};

use rdmasock_core::ids::{InstanceId, Nonce};
use rdmasock_core::rendezvous::names;
use rdmasock_core::rendezvous::peers::Answer;
use rdmasock_core::stats::{Event, Reason};
use rdmasock_core::stream::connection;
use rdmasock_core::wire::{self, Message};

use super::{CHANNEL_LIFE, MAX_KNOWN, abandon, is_asking};
use rdmasock_core::sync::store_load_fence;

use crate::objects::link::up;
use crate::objects::socket::Stage;
use crate::service::asking::{Asker, Asking};
use crate::service::retry::{later, nobody};
use crate::service::state::{Peer, Watched, Worker};
use crate::sys::sockopt;

/// How long an instance that has said YES is believed to answer for its destination.
const PRESENT_FOR: Duration = Duration::from_secs(600);
/// How many instances and names one connection is asked for at: a list that leads to lists must end.
const MAX_ASKED: usize = 64;

/// What an answer is worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Taken {
    /// To a question that waits for it.
    Yes,
    /// The question is over.
    Late,
    /// Not from whom was asked.
    No,
}

impl Worker {
    /// Whether an answer is one: to a question that went out on this channel (P11). A channel that
    /// was made for one question has served then.
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

    /// Closes a channel that was made for one question, which has been answered: when HELLO is in TCP, or will not be
    /// (P16).
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
        // P14: from whom we were redirected to it counts as NO.
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
            // The only holder says so: others have nothing to add, and some may not answer at all.
            asking.answered = Some(reason);
            asking.asked.clear();
        }
        asking.answered.get_or_insert(reason);
        self.go_on(request, asking);
    }

    /// The channel has ended without an answer.
    pub(in crate::service) fn on_silence(&mut self, conn: u64, request: u64) {
        if self.asks.get_mut(&request).is_some_and(|a| a.asked.remove(&conn)) {
            self.declined(request, wire::Reason::NotHeld);
        }
    }

    /// A link has ended: nobody answers on it any more. Between hosts an answer may have been on its way: the same
    /// question is asked in another way.
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
            // The acceptor looks for a HELLO that will not come (P15).
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

    /// Goes on with a YES: our connection greets, another host's is told. False if it comes too late.
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

    /// Goes on with HELLO. False if the attempt is over.
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
        // The program may have given up since, or be about to end: who ends holds all back, and looks then who scans.
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

    /// The same question once more, as long as the connection is in the attempt.
    fn ask_again(&mut self, request: u64, mut asking: Asking, now: u64) {
        if !asking.socket().is_some_and(|s| is_asking(s, asking.nonce)) {
            return;
        }
        asking.answered = None;
        asking.put_off(now);
        self.ask_out(request, &mut asking);
        self.asks.insert(request, asking);
    }

    /// Who has not answered on a channel that was made for one question will not.
    pub(in crate::service) fn expire_asked(&mut self, now: u64) {
        while let Some((until, conn)) = self.asked_until.front().copied()
            && until <= now
        {
            self.asked_until.pop_front();
            self.done_asking(conn);
        }
    }
}
