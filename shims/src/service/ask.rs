//! The connector's part of a rendezvous: asking whether the other end can be promoted. `ask/answers.rs` handles the
//! answers.

mod answers;

use std::time::{Duration, Instant};

use rdmasock_core::ids::Nonce;
use rdmasock_core::os::channel::Channel;
use rdmasock_core::rendezvous::peers::Answer;
use rdmasock_core::rendezvous::route::{Place, place_of};
use rdmasock_core::rendezvous::{diag, names};
use rdmasock_core::stats::{Direction, Event, Reason};
use rdmasock_core::stream::connection;
use rdmasock_core::sync::store_load_fence;
use rdmasock_core::wire::{self, MAX_MESSAGE, Message};

use super::asking::{Asker, Asking};
use super::retry::{after_no, later, nobody};
use super::state::{Peer, Worker};
use crate::notify::threshold::stay;
use crate::objects::link::{Link, up};
use crate::objects::mailbox::Ref;
use crate::objects::socket::Socket;

/// How long the channel of one question is kept, ns. Longer than the answer counts, so that a late YES is cancelled.
const CHANNEL_LIFE: u64 = 10_000_000_000;
/// How long a destination counts as one without the library.
const ABSENT_FOR: Duration = Duration::from_secs(5);
/// The most known instances of a destination that are asked over links. A destination with more has a process for each
/// connection, so no known instance holds a new one. Then the service names are asked at once.
const MAX_KNOWN: usize = 4;

/// The most questions that wait for an answer at a time. More would come faster than the peer's one thread answers, and
/// time out. The bound is below the number of channels that one user may have at a name (`guests`).
const MOST_ASKS: usize = 48;

impl Worker {
    /// Queues a connection that has reached its threshold. It is asked for when its turn comes.
    pub(super) fn ask_in_turn(&mut self, r: Ref) {
        self.to_ask.push_back(r);
        self.ask_next();
    }

    /// Asks for the connections whose turn it is.
    pub(super) fn ask_next(&mut self) {
        if self.to_ask.is_empty() {
            return;
        }
        let under_way = self.asks.values().filter(|asking| asking.takes_turn()).count();
        for _ in under_way..MOST_ASKS {
            let Some(r) = self.to_ask.pop_front() else { return };
            self.ask(r);
        }
    }

    fn ask(&mut self, r: Ref) {
        let Some(socket) = r.get() else { return };
        if !self.can_begin() {
            return later(socket, Reason::Resources.into());
        }
        let Some(tuple) = crate::objects::socket::tuple_of(socket) else {
            return stay(socket, Reason::NoMatch.into());
        };
        if !self.is_here(socket, &tuple) {
            return stay(socket, Reason::NoMatch.into());
        }
        let (connector, acceptor) = (tuple.connector(), tuple.acceptor());
        if let Some(reason) = self.library.refuses(connector, acceptor, Direction::Connect) {
            return stay(socket, reason.into());
        }
        // The socket is `Busy` already. A fork counts the holders and then checks whether the socket is busy, so one of
        // the two sees the other.
        store_load_fence();
        if socket.promotion.holders.are_several() {
            return later(socket, Reason::Inherited.into());
        }
        let Ok(nonce) = Nonce::random() else {
            return later(socket, Reason::Resources.into());
        };
        if self.cache.get(&acceptor, Instant::now()) == Some(&Answer::Absent) {
            let there = !matches!(place_of(connector.ip(), acceptor.ip()), Place::Here);
            return nobody(socket, there);
        }
        let remote = match place_of(connector.ip(), acceptor.ip()) {
            Place::Here => false,
            Place::There { .. } => {
                let reach = self.library.reach;
                let ends = (connector.ip(), acceptor.ip());
                if !reach.verbs_ready() || !reach.is_candidate(ends.0, ends.1, &mut self.devices) {
                    return stay(socket, Reason::OtherHost.into());
                }
                true
            }
        };
        socket.told.set_why(Reason::Handshake);
        let request = self.new_request();
        {
            let Some(mut control) = socket.control.lock() else {
                return;
            };
            if let Some(reason) = control.leave {
                // Since then the program has used the socket in a way that forbids a promotion.
                drop(control);
                return stay(socket, reason.into());
            }
            connection::begin_asking(&mut control, nonce, remote || self.library.reach.is_device_for_here());
        }
        let mut asking = Asking::new(Asker::Here(r), nonce, tuple, remote);
        self.ask_links(request, &mut asking);
        self.go_on(request, asking);
    }

    /// Returns an unused number for a question. Peers cannot guess it, although only a channel that was asked can
    /// answer.
    pub(super) fn new_request(&self) -> u64 {
        std::iter::repeat_with(crate::objects::library::random_u64)
            .find(|r| !self.asks.contains_key(r))
            .unwrap_or_default()
    }

    /// Asks the instances that answered for the destination before, over the links to them.
    fn ask_links(&mut self, request: u64, asking: &mut Asking) {
        let known = match self.cache.get(&asking.tuple.acceptor(), Instant::now()) {
            Some(Answer::Present(instances)) => instances.clone(),
            _ => return,
        };
        if known.len() > MAX_KNOWN {
            return;
        }
        for instance in known {
            if let Some(link) = up::to(&instance)
                && self.ask_over(request, asking, link)
            {
                asking.tried.insert(instance);
            }
        }
    }

    fn ask_over(&mut self, request: u64, asking: &mut Asking, link: &'static Link) -> bool {
        let Some(conn) = self.conn_of(link) else {
            return false;
        };
        if link.send(&self.question(request, asking), &[]).is_err() {
            return false;
        }
        self.library.stats.count(Event::Ask);
        asking.asked.insert(conn)
    }

    pub(super) fn question(&self, request: u64, asking: &Asking) -> Message {
        Message::Ask {
            request,
            // Namespaces and interfaces of this host mean nothing to another host.
            tuple: if asking.remote {
                asking.tuple.at(0, 0)
            } else {
                asking.tuple
            },
            nonce_c: asking.nonce,
            instance_c: match asking.who {
                Asker::Here(_) => self.library.id,
                Asker::Elsewhere { instance, .. } => instance,
            },
        }
    }

    /// Asks for the promotion: the other host, or within the host the names that belong to the port.
    pub(super) fn ask_out(&mut self, request: u64, asking: &mut Asking) {
        if asking.remote {
            self.ask_host(request, asking);
        } else {
            self.ask_names(request, asking);
        }
    }

    /// Waits if answers are outstanding. Otherwise asks the service names or the other host, or gives up.
    pub(super) fn go_on(&mut self, request: u64, mut asking: Asking) {
        if asking.asked.is_empty() && !asking.named {
            asking.named = true;
            self.ask_out(request, &mut asking);
        }
        if !asking.asked.is_empty() {
            self.asks.insert(request, asking);
            return;
        }
        if let Asker::Elsewhere { conn, .. } = asking.who {
            let reason = match asking.answered {
                Some(reason) => reason,
                None if asking.busy => wire::Reason::Timeout,
                None => wire::Reason::Absent,
            };
            return self.reply(conn, &Message::No { request, reason });
        }
        let Some(socket) = asking.socket() else {
            return;
        };
        if asking.goes_on_after(asking.answered) && is_asking(socket, asking.nonce) {
            asking.put_off(crate::sys::time::now_ns());
            self.asks.insert(request, asking);
            return;
        }
        if !abandon(socket, asking.nonce) {
            return;
        }
        match asking.answered {
            None if asking.busy => later(socket, Reason::TimedOut.into()),
            // The connection may not have been accepted yet.
            None if asking.untrusted => later(socket, Reason::NotTrusted.into()),
            None | Some(wire::Reason::Absent) => {
                self.cache
                    .insert(asking.tuple.acceptor(), Answer::Absent, Instant::now(), ABSENT_FOR);
                nobody(socket, asking.remote);
            }
            Some(reason) => after_no(socket, reason),
        }
    }

    fn ask_names(&mut self, request: u64, asking: &mut Asking) {
        let destination = asking.tuple.acceptor();
        let owner = diag::listener_owner(&asking.tuple);
        let own = rustix::process::geteuid().as_raw();
        for channel in names::connect_to_services(destination.port()) {
            let Ok(channel) = channel else {
                asking.busy = true;
                continue;
            };
            let Ok(credentials) = channel.peer() else {
                continue;
            };
            if !diag::trusted(credentials.uid, owner, own) && diag::acceptor_uid(&asking.tuple) != Some(credentials.uid)
            {
                tracing::warn!(target: "rdmasock", uid = credentials.uid, %destination, "service name of another user ignored");
                asking.untrusted = true;
                continue;
            }
            self.ask_on(request, asking, channel, true);
        }
    }

    fn ask_on(&mut self, request: u64, asking: &mut Asking, channel: Channel, by_name: bool) {
        let mut buf = [0u8; MAX_MESSAGE];
        let Ok(bytes) = self.question(request, asking).encode(&mut buf) else {
            return;
        };
        if channel.send(bytes, &[]).is_ok()
            && let Some(conn) = self.register(
                channel,
                Peer::Asked {
                    request,
                    by_name,
                    greets: None,
                },
            )
        {
            self.library.stats.count(Event::Ask);
            asking.asked.insert(conn);
            let until = crate::sys::time::now_ns() + CHANNEL_LIFE;
            self.asked_until.push_back((until, conn));
        }
    }

    /// Drops the questions of attempts that the program has given up. A YES that comes later is cancelled.
    pub(super) fn forget_asks(&mut self, socket: &'static Socket) {
        self.asks
            .retain(|_, a| !a.socket().is_some_and(|s| std::ptr::eq(s, socket)) || is_asking(socket, a.nonce));
    }
}

/// Returns whether the socket is still in the attempt that `nonce` was drawn for, with no marker in TCP.
fn is_asking(socket: &Socket, nonce: Nonce) -> bool {
    let control = socket.control.lock();
    control.is_some_and(|c| c.handshake.as_ref().is_some_and(|h| h.is_asking() && h.mine() == nonce))
}

/// Ends the attempt before any marker was in TCP. Returns false if the socket is not in this attempt any more.
fn abandon(socket: &'static Socket, nonce: Nonce) -> bool {
    let Some(mut control) = socket.control.lock() else {
        return false;
    };
    let ours = control
        .handshake
        .as_ref()
        .is_some_and(|h| h.is_asking() && h.mine() == nonce);
    if ours {
        control.handshake = None;
    }
    ours
}
