//! The connector's part of a rendezvous: asking whether the other end can be promoted.

use std::collections::HashSet;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::rendezvous::diag;
use rdmasock_core::rendezvous::names;
use rdmasock_core::rendezvous::peers::Answer;
use rdmasock_core::stats::{Direction, Event, Reason, Why};
use rdmasock_core::stream::handshake::Handshake;
use rdmasock_core::wire::{self, MAX_MESSAGE, Message};

use super::{ASK_TIMEOUT, Peer, Ref, Worker};
use crate::promote;
use crate::socket::{Socket, Stage};
use crate::wait;

/// An ASK under way, to one or more instances.
pub struct Asking {
    r: Ref,
    nonce: Nonce,
    tuple: Tuple,
    /// Answers that have not come.
    outstanding: usize,
    /// Instances asked so far.
    tried: HashSet<InstanceId>,
    /// The service names have been asked, not only links.
    named: bool,
    /// Somebody answered, so it is not a peer without the library.
    answered: Option<wire::Reason>,
    /// Monotonic ns.
    pub deadline: u64,
}

/// How long a destination without the library is believed to be one.
const ABSENT_FOR: Duration = Duration::from_secs(5);
const PRESENT_FOR: Duration = Duration::from_secs(600);
/// How often a connection is asked for again when the peer could not say yes yet.
const TRIES: u32 = 8;

impl Worker {
    /// A connection has reached its threshold.
    pub(super) fn ask(&mut self, r: Ref) {
        let Some(socket) = r.get() else { return };
        let Some(tuple) = crate::socket::tuple_of(socket) else {
            return stay(socket, Reason::NoMatch.into());
        };
        let (connector, acceptor) = (tuple.connector(), tuple.acceptor());
        if !self.library.may_accelerate(connector, acceptor, Direction::Connect) {
            return stay(socket, Reason::Rule.into());
        }
        if crate::fork::is_shared(socket) {
            return later(socket, Reason::Inherited.into());
        }
        let Ok(nonce) = Nonce::random() else { return later(socket, Reason::Resources.into()) };
        if self.cache.get(&acceptor, Instant::now()) == Some(&Answer::Absent) {
            return stay(socket, Reason::PeerWithout.into());
        }
        promote::set_why(socket, Reason::Handshake);
        let request = self.next_request;
        self.next_request += 1;
        {
            let Some(mut control) = socket.control.lock() else { return };
            control.handshake = Some(Handshake::connector(nonce));
            control.request = request;
        }
        let mut asking = Asking {
            r,
            nonce,
            tuple,
            outstanding: 0,
            tried: HashSet::new(),
            named: false,
            answered: None,
            deadline: wait::now_ns() + ASK_TIMEOUT.as_nanos() as u64,
        };
        self.ask_links(request, &mut asking);
        self.go_on(request, asking);
    }

    /// Asks the instances that answered for the destination before, over the links to them.
    fn ask_links(&mut self, request: u64, asking: &mut Asking) {
        let known = match self.cache.get(&asking.tuple.acceptor(), Instant::now()) {
            Some(Answer::Present(instances)) => instances.clone(),
            _ => return,
        };
        for instance in known {
            if let Some(link) = self.service.link_to(&instance)
                && link.send(&self.question(request, asking), &[]).is_ok()
            {
                self.library.stats.count(Event::Ask);
                asking.tried.insert(instance);
                asking.outstanding += 1;
            }
        }
    }

    fn question(&self, request: u64, asking: &Asking) -> Message {
        Message::Ask {
            request,
            tuple: asking.tuple,
            nonce_c: asking.nonce,
            instance_c: self.library.id,
        }
    }

    /// With answers outstanding: waits. Else asks the service names, or gives up.
    fn go_on(&mut self, request: u64, mut asking: Asking) {
        if asking.outstanding == 0 && !asking.named {
            asking.named = true;
            self.ask_names(request, &mut asking);
        }
        if asking.outstanding > 0 {
            self.asks.insert(request, asking);
            return;
        }
        let Some(socket) = asking.r.get() else { return };
        match asking.answered {
            None => {
                self.cache.insert(asking.tuple.acceptor(), Answer::Absent, Instant::now(), ABSENT_FOR);
                abandon(socket);
                stay(socket, Reason::PeerWithout.into());
            }
            Some(reason) => {
                abandon(socket);
                let why = why_declined(reason);
                match reason {
                    wire::Reason::Rule | wire::Reason::Use => stay(socket, why),
                    _ => later(socket, why),
                }
            }
        }
    }

    fn ask_names(&mut self, request: u64, asking: &mut Asking) {
        let destination = asking.tuple.acceptor();
        let owner = diag::listener_owner(destination);
        let own = rustix::process::geteuid().as_raw();
        for channel in names::connect_to_services(destination.port()) {
            let Ok(channel) = channel else { continue };
            let Ok(credentials) = channel.peer() else { continue };
            if !diag::trusted(credentials.uid, owner, own) {
                tracing::warn!(target: "rdmasock", uid = credentials.uid, %destination, "service name of another user ignored");
                continue;
            }
            self.ask_on(request, asking, channel);
        }
    }

    fn ask_on(&mut self, request: u64, asking: &mut Asking, channel: rdmasock_core::os::channel::Channel) {
        let mut buf = [0u8; MAX_MESSAGE];
        let Ok(bytes) = self.question(request, asking).encode(&mut buf).map(<[u8]>::to_vec) else { return };
        if channel.send(&bytes, &[]).is_ok() && self.register(channel, Peer::Asked { request }).is_some() {
            self.library.stats.count(Event::Ask);
            asking.outstanding += 1;
        }
    }

    pub(super) fn on_redirect(&mut self, request: u64, instances: Vec<InstanceId>) {
        let Some(mut asking) = self.asks.remove(&request) else { return };
        asking.outstanding = asking.outstanding.saturating_sub(1);
        asking.answered.get_or_insert(wire::Reason::NotHeld);
        for instance in instances {
            if instance == self.library.id && !asking.tried.is_empty() || !asking.tried.insert(instance) {
                continue;
            }
            if let Some(link) = self.service.link_to(&instance) {
                if link.send(&self.question(request, &asking), &[]).is_ok() {
                    asking.outstanding += 1;
                }
            } else if let Ok(channel) = names::connect_to(names::instance(&instance).as_bytes()) {
                self.ask_on(request, &mut asking, channel);
            }
        }
        self.go_on(request, asking);
    }

    pub(super) fn on_no(&mut self, request: u64, reason: wire::Reason) {
        self.library.stats.count(Event::No);
        let Some(mut asking) = self.asks.remove(&request) else { return };
        asking.outstanding = asking.outstanding.saturating_sub(1);
        // The holder's reason says more than that others do not hold it.
        if reason != wire::Reason::NotHeld || asking.answered.is_none() {
            asking.answered = Some(reason);
        }
        self.go_on(request, asking);
    }

    /// The channel was closed; after an answer that says nothing.
    pub(super) fn on_silence(&mut self, request: u64) {
        if self.asks.contains_key(&request) {
            self.on_no(request, wire::Reason::NotHeld);
        }
    }

    pub(super) fn on_yes(&mut self, conn: u64, request: u64, nonce_s: Nonce, instance_s: InstanceId) {
        self.library.stats.count(Event::Yes);
        let Some(asking) = self.asks.remove(&request) else {
            // Too late: the acceptor looks for a HELLO that will not come.
            return self.reply(conn, &Message::Cancel { request, nonce_c: nonce_s, nonce_s });
        };
        let cancel = Message::Cancel { request, nonce_c: asking.nonce, nonce_s };
        let Some(socket) = asking.r.get() else { return self.reply(conn, &cancel) };
        let destination = asking.tuple.acceptor();
        let mut known = match self.cache.get(&destination, Instant::now()) {
            Some(Answer::Present(instances)) => instances.clone(),
            _ => Vec::new(),
        };
        known.retain(|i| *i != instance_s);
        known.insert(0, instance_s);
        known.truncate(16);
        self.cache.insert(destination, Answer::Present(known), Instant::now(), PRESENT_FOR);
        if !self.watch(socket) || !promote::start_scan(socket, asking.nonce) {
            self.reply(conn, &cancel);
            abandon(socket);
            later(socket, Reason::Unsupported.into());
            self.settle(asking.r);
            return;
        }
        if let Some(mut control) = socket.control.lock() {
            promote::feed(socket, &mut control, |h| h.on_yes(nonce_s));
        }
    }

    /// Answers on a channel, link or not.
    pub(super) fn reply(&mut self, conn: u64, message: &Message) {
        let mut buf = [0u8; MAX_MESSAGE];
        let Ok(bytes) = message.encode(&mut buf) else { return };
        match self.conns.get(&conn) {
            Some(super::Conn { channel: Some(channel), .. }) => {
                let _ = channel.send(bytes, &[]);
            }
            Some(super::Conn { peer: Peer::Link(link), .. }) => {
                let _ = link.channel().send(bytes, &[]);
            }
            _ => {}
        }
    }

    pub(super) fn expire_asks(&mut self, now: u64) {
        let late: Vec<u64> = self.asks.iter().filter(|(_, a)| a.deadline <= now).map(|(r, _)| *r).collect();
        for request in late {
            let Some(asking) = self.asks.remove(&request) else { continue };
            self.library.stats.count(Event::HandshakeTimeout);
            if let Some(socket) = asking.r.get() {
                abandon(socket);
                later(socket, Reason::TimedOut.into());
            }
        }
    }
}

/// The attempt is over before anything was in TCP.
fn abandon(socket: &'static Socket) {
    if let Some(mut control) = socket.control.lock() {
        control.handshake = None;
    }
}

/// The connection stays on TCP for good.
fn stay(socket: &'static Socket, why: Why) {
    abandon(socket);
    if let Some(stats) = socket.stats() {
        stats.set_why(why);
    }
    socket.set_stage(Stage::Pinned);
}

/// The connection may be asked for again later.
fn later(socket: &'static Socket, why: Why) {
    let tries = socket.tries.fetch_add(1, Relaxed);
    if tries >= TRIES {
        return stay(socket, why);
    }
    if let Some(stats) = socket.stats() {
        stats.set_why(why);
    }
    socket.retry_at.store(wait::now_ns() + (1_000_000 << tries), Relaxed);
    socket.set_stage(Stage::Watching);
}

fn why_declined(reason: wire::Reason) -> Why {
    Why::declined(match reason {
        wire::Reason::NotHeld => Reason::NoMatch,
        wire::Reason::Rule => Reason::Rule,
        wire::Reason::Shared => Reason::Inherited,
        wire::Reason::Closing => Reason::Closed,
        wire::Reason::Limit => Reason::LinkLimit,
        wire::Reason::Resources => Reason::Resources,
        wire::Reason::Timeout => Reason::TimedOut,
        wire::Reason::Violation | wire::Reason::Secret => Reason::Violation,
        _ => Reason::Unsupported,
    })
}
