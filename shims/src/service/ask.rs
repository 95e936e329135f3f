//! The connector's part of a rendezvous: asking whether the other end can be promoted.

use std::collections::HashSet;
use std::sync::atomic::{
    Ordering::{Relaxed, SeqCst},
    fence,
};
use std::time::{Duration, Instant};

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::os::channel::Channel;
use rdmasock_core::rendezvous::diag;
use rdmasock_core::rendezvous::names;
use rdmasock_core::rendezvous::peers::Answer;
use rdmasock_core::rendezvous::route::{Place, place_of};
use rdmasock_core::stats::{Direction, Event, Reason, Why};
use rdmasock_core::stream::handshake::Handshake;
use rdmasock_core::wire::{self, MAX_MESSAGE, Message};

use super::{ASK_TIMEOUT, Peer, REMOTE_TIMEOUT, Ref, Watched, Worker};
use crate::link::Link;
use crate::promote;
use crate::socket::{Socket, Stage};

/// For whom a question is asked.
#[derive(Clone, Copy)]
enum Asker {
    /// A connection of this process.
    Here(Ref),
    /// An instance of another host, whose question came in as `conn`.
    Elsewhere { conn: u64, instance: InstanceId },
}

/// An ASK under way, to one or more instances.
pub struct Asking {
    who: Asker,
    nonce: Nonce,
    pub(super) tuple: Tuple,
    /// The other end is on another host: its control port is asked, not the names of this one.
    remote: bool,
    /// The channels from which the answer has not come. No other's counts.
    pub(super) asked: HashSet<u64>,
    /// Instances asked so far.
    tried: HashSet<InstanceId>,
    /// The service names have been asked, not only links.
    named: bool,
    /// Somebody answered, so it is not a peer without the library.
    answered: Option<wire::Reason>,
    /// There is a name, but nobody took the question now.
    busy: bool,
    /// There is a name of somebody who may not answer.
    untrusted: bool,
    /// Monotonic ns.
    pub deadline: u64,
}

#[cfg(test)]
impl Asking {
    /// A question that is out on the channel `conn`.
    pub fn for_test(r: Ref, nonce: Nonce, conn: u64) -> Self {
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 9));
        Self {
            asked: HashSet::from([conn]),
            named: true,
            deadline: u64::MAX,
            ..Self::new(Asker::Here(r), nonce, Tuple::new(address, address), false)
        }
    }

    /// A question about a connection to another host, not asked yet.
    pub fn remote_for_test(r: Ref, nonce: Nonce, tuple: Tuple) -> Self {
        Self::new(Asker::Here(r), nonce, tuple, true)
    }

    /// It is out there too.
    pub fn also_for_test(&mut self, conn: u64) {
        self.asked.insert(conn);
    }
}

impl Asking {
    fn new(who: Asker, nonce: Nonce, tuple: Tuple, remote: bool) -> Self {
        Self {
            who,
            nonce,
            tuple,
            remote,
            asked: HashSet::new(),
            tried: HashSet::new(),
            named: false,
            answered: None,
            busy: false,
            untrusted: false,
            deadline: crate::time::now_ns()
                + if remote { REMOTE_TIMEOUT } else { ASK_TIMEOUT }.as_nanos() as u64,
        }
    }

    /// A question that came from another host.
    pub(super) fn relayed(conn: u64, tuple: Tuple, nonce: Nonce, instance: InstanceId) -> Self {
        Self::new(Asker::Elsewhere { conn, instance }, nonce, tuple, false)
    }

    /// Whether it came from another host.
    pub(super) fn is_relayed(&self) -> bool {
        matches!(self.who, Asker::Elsewhere { .. })
    }

    /// The connection of this process that it is about, if it is still the same.
    fn socket(&self) -> Option<&'static Socket> {
        match self.who {
            Asker::Here(r) => r.get(),
            Asker::Elsewhere { .. } => None,
        }
    }
}

/// How long a channel for one question is kept, ns: longer than the answer counts, for a late YES is to be cancelled.
const CHANNEL_LIFE: u64 = 10_000_000_000;
/// How long a destination without the library is believed to be one.
const ABSENT_FOR: Duration = Duration::from_secs(5);
const PRESENT_FOR: Duration = Duration::from_secs(600);
/// How many instances and names one connection is asked for at: a list that leads to lists must end.
const MAX_ASKED: usize = 64;
/// Where more instances have answered for a destination, it is one of those that have a process a connection, which none
/// of them has: then the name is asked at once.
const MAX_KNOWN: usize = 4;
/// How often a connection is asked for again when the peer could not say yes yet: its program may take seconds to
/// accept it.
const TRIES: u32 = 8;
/// The first pause, ns; each is four times the one before, the last 16 s.
const FIRST_PAUSE: u64 = 1_000_000;
/// The pause after another host has not answered, ns: as long as it is left alone.
const NOBODY_PAUSE: u64 = super::remote::ABSENT_FOR.as_nanos() as u64;

impl Worker {
    /// A connection has reached its threshold.
    pub(super) fn ask(&mut self, r: Ref) {
        let Some(socket) = r.get() else { return };
        let Some(tuple) = crate::socket::tuple_of(socket) else {
            return stay(socket, Reason::NoMatch.into());
        };
        let (connector, acceptor) = (tuple.connector(), tuple.acceptor());
        if let Some(reason) = self
            .library
            .refuses(connector, acceptor, Direction::Connect)
        {
            return stay(socket, reason.into());
        }
        // Busy since before; who forks counts, and looks whether it is.
        fence(SeqCst);
        if crate::fork::is_shared(socket) {
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
        promote::set_why(socket, Reason::Handshake);
        let request = self.new_request();
        {
            let Some(mut control) = socket.control.lock() else {
                return;
            };
            if let Some(reason) = control.leave {
                // The program has put the socket to a use since that forbids it.
                drop(control);
                return stay(socket, reason.into());
            }
            let mut handshake = Handshake::connector(nonce);
            if remote {
                handshake.between_hosts();
            }
            control.handshake = Some(handshake);
            control.greeted_by = None;
            control.offer = None;
        }
        let mut asking = Asking::new(Asker::Here(r), nonce, tuple, remote);
        self.ask_links(request, &mut asking);
        self.go_on(request, asking);
    }

    /// A number for a question: not to be guessed, although a channel that was not asked cannot answer anyway.
    pub(super) fn new_request(&self) -> u64 {
        std::iter::repeat_with(crate::library::random_u64)
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
            if let Some(link) = self.service.link_to(&instance)
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
            tuple: asking.tuple,
            nonce_c: asking.nonce,
            instance_c: match asking.who {
                Asker::Here(_) => self.library.id,
                Asker::Elsewhere { instance, .. } => instance,
            },
        }
    }

    /// With answers outstanding: waits. Else asks the service names or the other host, or gives up.
    pub(super) fn go_on(&mut self, request: u64, mut asking: Asking) {
        if asking.asked.is_empty() && !asking.named {
            asking.named = true;
            if asking.remote {
                self.ask_host(request, &mut asking);
            } else {
                self.ask_names(request, &mut asking);
            }
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
        if !abandon(socket, asking.nonce) {
            return;
        }
        match asking.answered {
            None if asking.busy => later(socket, Reason::TimedOut.into()),
            None if asking.untrusted => stay(socket, Reason::NotTrusted.into()),
            None | Some(wire::Reason::Absent) => {
                self.cache.insert(
                    asking.tuple.acceptor(),
                    Answer::Absent,
                    Instant::now(),
                    ABSENT_FOR,
                );
                nobody(socket, asking.remote);
            }
            Some(reason) => {
                let why = why_declined(reason);
                match reason {
                    // The other end is not through with the link that failed.
                    wire::Reason::Use | wire::Reason::Limit
                        if socket.failures.load(Relaxed) > 0 =>
                    {
                        promote::set_why(socket, why);
                        promote::retry_later(socket);
                    }
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
            let Ok(channel) = channel else {
                asking.busy = true;
                continue;
            };
            let Ok(credentials) = channel.peer() else {
                continue;
            };
            if !diag::trusted(credentials.uid, owner, own) {
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
            && let Some(conn) = self.register(channel, Peer::Asked { request, by_name })
        {
            self.library.stats.count(Event::Ask);
            asking.asked.insert(conn);
            let until = crate::time::now_ns() + CHANNEL_LIFE;
            self.asked_until.push_back((until, conn));
        }
    }

    /// Who has not answered on a channel that was made for one question will not.
    pub(super) fn expire_asked(&mut self, now: u64) {
        while let Some((until, conn)) = self.asked_until.front().copied()
            && until <= now
        {
            self.asked_until.pop_front();
            self.done_asking(conn);
        }
    }

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

    /// A channel that was made for one question is not needed after its answer.
    fn done_asking(&mut self, conn: u64) {
        if matches!(
            self.conns.get(&conn).map(|c| &c.peer),
            Some(Peer::Asked { .. })
        ) {
            self.hang_up(conn, Reason::None);
        }
    }

    pub(super) fn on_redirect(&mut self, conn: u64, request: u64, instances: Vec<InstanceId>) {
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
            if let Some(link) = self.service.link_to(&instance) {
                self.ask_over(request, &mut asking, link);
            } else if let Ok(channel) = names::connect_to(names::instance(&instance).as_bytes()) {
                self.ask_on(request, &mut asking, channel, false);
            }
        }
        self.go_on(request, asking);
    }

    pub(super) fn on_no(&mut self, conn: u64, request: u64, reason: wire::Reason) {
        let taken = self.take_answer(conn, request);
        self.done_asking(conn);
        if taken == Taken::Yes {
            self.library.stats.count(Event::No);
            self.declined(request, reason);
        }
    }

    pub(super) fn declined(&mut self, request: u64, reason: wire::Reason) {
        let Some(mut asking) = self.asks.remove(&request) else {
            return;
        };
        // The holder's reason says more than that others do not hold it.
        if reason != wire::Reason::NotHeld || asking.answered.is_none() {
            asking.answered = Some(reason);
        }
        self.go_on(request, asking);
    }

    /// The channel has ended without an answer.
    pub(super) fn on_silence(&mut self, conn: u64, request: u64) {
        if self
            .asks
            .get_mut(&request)
            .is_some_and(|a| a.asked.remove(&conn))
        {
            self.declined(request, wire::Reason::NotHeld);
        }
    }

    /// A link has ended: nobody answers on it any more.
    pub(super) fn on_link_silence(&mut self, conn: u64) {
        let waiting = self
            .asks
            .iter()
            .filter(|(_, a)| a.asked.contains(&conn))
            .map(|(r, _)| *r);
        for request in waiting.collect::<Vec<_>>() {
            self.on_silence(conn, request);
        }
    }

    pub(super) fn on_yes(
        &mut self,
        conn: u64,
        request: u64,
        nonce_s: Nonce,
        instance_s: InstanceId,
    ) {
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
    pub(super) fn accept_yes(
        &mut self,
        asking: &Asking,
        nonce_s: Nonce,
        instance_s: InstanceId,
    ) -> bool {
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
        self.cache.insert(
            destination,
            Answer::Present(known),
            Instant::now(),
            PRESENT_FOR,
        );
        let Some(socket) = asking.socket().filter(|s| is_asking(s, asking.nonce)) else {
            return false;
        };
        if self.watch(socket) != Watched::Done || !promote::start_scan(socket, asking.nonce) {
            if abandon(socket, asking.nonce) {
                later(socket, Reason::Unsupported.into());
            }
            return false;
        }
        let Some(mut control) = socket.control.lock() else {
            return false;
        };
        // The program may have given up since, or be about to end: who ends holds all back, and looks then who scans.
        fence(SeqCst);
        let is_held = crate::hold::reason().is_some();
        let is_asking = control
            .handshake
            .as_ref()
            .is_some_and(|h| h.is_asking() && h.mine() == asking.nonce);
        if is_held || !is_asking {
            promote::stop_scan(socket);
            if is_asking {
                let steps = promote::give_up(&mut control);
                promote::run(socket, &mut control, steps);
            }
            return false;
        }
        promote::feed(socket, &mut control, |h| h.on_yes(nonce_s));
        true
    }

    /// Answers on a channel, link or not.
    pub(super) fn reply(&mut self, conn: u64, message: &Message) {
        self.send_reply(conn, message);
    }

    /// The same. False if the answer is not on its way: who asked has gone, or was hung up on.
    pub(super) fn send_reply(&mut self, conn: u64, message: &Message) -> bool {
        match self.conns.get(&conn) {
            Some(super::Conn {
                peer: Peer::Remote(query),
                ..
            }) => {
                let query = *query;
                self.answer_remote(query, message);
                true
            }
            Some(super::Conn {
                channel: Some(channel),
                ..
            }) => {
                let mut buf = [0u8; MAX_MESSAGE];
                // A channel for one question has room for its answer.
                message
                    .encode(&mut buf)
                    .is_ok_and(|bytes| channel.send(bytes, &[]).is_ok())
            }
            Some(super::Conn {
                peer: Peer::Link(link),
                ..
            }) => link.send(message, &[]).is_ok(),
            _ => false,
        }
    }

    /// Drops the questions of attempts that the program has given up: a YES is too late then.
    pub(super) fn forget_asks(&mut self, socket: &'static Socket) {
        self.asks.retain(|_, a| {
            !a.socket().is_some_and(|s| std::ptr::eq(s, socket)) || is_asking(socket, a.nonce)
        });
    }

    pub(super) fn expire_asks(&mut self, now: u64) {
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
}

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

/// Whether the socket is still in the attempt that `nonce` was drawn for, with nothing in TCP.
fn is_asking(socket: &Socket, nonce: Nonce) -> bool {
    let control = socket.control.lock();
    control.is_some_and(|c| {
        c.handshake
            .as_ref()
            .is_some_and(|h| h.is_asking() && h.mine() == nonce)
    })
}

/// Ends the attempt before anything was in TCP. False if the socket is not in it any more.
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

/// The connection stays on TCP for good.
pub(super) fn stay(socket: &'static Socket, why: Why) {
    if let Some(stats) = socket.stats() {
        stats.set_why(why);
    }
    let was_ever_ours = crate::ready::is_watched(socket) || !socket.is_plain();
    socket.set_stage(if was_ever_ours {
        Stage::Pinned
    } else {
        Stage::Plain
    });
}

/// Nobody at the other end has the library. Here that is certain. Another host may have been too busy to answer, or its
/// datagrams lost: a connection that lives on is asked for again.
fn nobody(socket: &'static Socket, remote: bool) {
    let why = Reason::PeerWithout.into();
    if remote {
        later_than(socket, why, NOBODY_PAUSE);
    } else {
        stay(socket, why);
    }
}

/// The connection may be asked for again later.
fn later(socket: &'static Socket, why: Why) {
    later_than(socket, why, 0);
}

fn later_than(socket: &'static Socket, why: Why, pause: u64) {
    let tries = socket.tries.fetch_add(1, Relaxed);
    if tries >= TRIES {
        return stay(socket, why);
    }
    if let Some(stats) = socket.stats() {
        stats.set_why(why);
    }
    let pause = pause.max(FIRST_PAUSE << (2 * tries));
    socket
        .retry_at
        .store(crate::time::now_ns() + pause, Relaxed);
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
