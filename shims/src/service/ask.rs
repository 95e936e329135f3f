//! The connector's part of a promotion: asking the peer, and what each answer leads to.
//!
//! To ask *for a connection* is to send its peer an ASK, a request for the connection's promotion. A connection that is
//! not promoted then stays on TCP for good, or is asked for again after a pause.

use std::collections::HashSet;

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::os::channel::Channel;
use rdmasock_core::rendezvous::{diag, names};
use rdmasock_core::stats::{Direction, Event, Reason, Why};
use rdmasock_core::stream::connection;
use rdmasock_core::sync::store_load_fence;
use rdmasock_core::wire;
use rdmasock_core::wire::Message;

use crate::notify::threshold::stay;
use crate::objects::library::random_u64;
use crate::objects::mailbox::Ref;
use crate::objects::socket::{Control, Socket, Stage, tuple_of};
use crate::service::channels::send;
use crate::service::{Peer, Watched, Worker, keys};
use crate::sys::sockopt;
use crate::sys::time::now_ns;

/// How long the channel of one question is kept, ns. Longer than an answer may take, so that a late YES gets CANCEL.
const CHANNEL_LIFE: u64 = 10_000_000_000;
/// How long a destination counts as one without the library, ns.
pub(super) const ABSENT_FOR: u64 = 5_000_000_000;
/// The most destinations, or hosts, that count as absent at a time.
pub(super) const MOST_ABSENT: usize = 4096;
/// The most questions that wait for an answer at a time. More questions would come faster than the peer's service
/// thread answers them, and would time out. The bound is below the number of channels that one user may have at a name
/// (`channels::most_guests`).
const MOST_ASKS: usize = 48;
/// How long an answer within the host may take, ns.
pub(super) const ASK_TIMEOUT: u64 = 2_000_000_000;
/// How long an answer from another host may take, ns. A busy machine may have to open its RDMA device first; no call of
/// the program waits meanwhile.
const REMOTE_TIMEOUT: u64 = 6_000_000_000;

/// How often a connection is asked for again when the peer could not answer YES yet: its program may take seconds to
/// accept the connection. There is no such bound for a reason that passes by itself, such as a time-out: after the
/// longest pause the connection is asked for again.
const TRIES: u32 = 8;
/// The pause before a connection is asked for again for the first time, ns. Each further pause is four times as long,
/// up to 16 s.
const FIRST_RETRY: u64 = 1_000_000;
/// How long a host that does not answer is not asked, ns.
pub(super) const HOST_ABSENT_FOR: u64 = 30_000_000_000;

/// The asker of a question.
#[derive(Clone, Copy)]
enum Asker {
    /// A connection of this process.
    Here(Ref),
    /// An instance of another host. Its question came by the control port, and this instance relays it.
    Elsewhere {
        /// The id of the question's entry in `conns`, which has no channel.
        conn: u64,
        /// The asking instance.
        instance: InstanceId,
    },
}

/// An ASK under way, which may have been sent to several instances.
pub(super) struct Asking {
    who: Asker,
    pub nonce: Nonce,
    pub tuple: Tuple,
    /// The peer is on another host: its control port is asked, not the names of this host.
    remote: bool,
    /// The ids of the channels, or of the host, from which an answer has not come yet. Answers from others are not
    /// accepted.
    pub asked: HashSet<u64>,
    /// The reason of a NO, a REDIRECT or a closed channel; `None` if none has come. With any reason but `Absent` the
    /// peer has the library.
    answered: Option<wire::Reason>,
    /// A service name exists, but its instance could not take the question now, or has not answered in time.
    busy: bool,
    /// A service name exists, but its user may not answer for this connection.
    untrusted: bool,
    /// When the wait for an answer ends, monotonic ns.
    pub deadline: u64,
}

impl Worker {
    /// Queues a connection that has reached its threshold. It is asked for when its turn comes.
    pub(super) fn ask_in_turn(&mut self, r: Ref) {
        self.to_ask.push_back(r);
        self.ask_next();
    }

    /// Asks for the connections whose turn has come.
    pub(super) fn ask_next(&mut self) {
        if self.to_ask.is_empty() {
            return;
        }
        // Questions that are relayed for other hosts are not bounded by `MOST_ASKS`.
        let under_way = self.asks.values().filter(|asking| !asking.is_relayed()).count();
        for _ in under_way..MOST_ASKS {
            let Some(r) = self.to_ask.pop_front() else { return };
            self.ask(r);
        }
    }

    fn ask(&mut self, r: Ref) {
        let Some(socket) = r.get() else { return };
        if !self.can_begin() {
            return later(socket, Reason::Resources.into(), 0);
        }
        let Some(tuple) = tuple_of(socket).filter(|tuple| self.is_here(socket, tuple)) else {
            return stay(socket, Reason::NoMatch.into());
        };
        let (connector, acceptor) = (tuple.connector(), tuple.acceptor());
        if let Some(reason) = self.library.refuses(connector, acceptor, Direction::Connect) {
            return stay(socket, reason.into());
        }
        // The socket was marked as `Busy` before, and the number of its holders is read next. A fork adds the child to
        // the holders, then reads whether the socket is `Busy`. So one of the two sees the other.
        store_load_fence();
        if socket.promotion.holders.are_several() {
            return later(socket, Reason::Inherited.into(), 0);
        }
        let Ok(nonce) = Nonce::random() else {
            return later(socket, Reason::Resources.into(), 0);
        };
        let reach = self.library.reach;
        let (local, there) = (connector.ip(), acceptor.ip());
        let remote = !diag::is_here(connector, acceptor, tuple.device());
        self.absent.expire(now_ns());
        if self.absent.get(&acceptor).is_some() {
            return nobody(socket, remote);
        }
        if remote && !(reach.verbs_ready() && reach.is_candidate(local, there, &mut self.devices)) {
            return stay(socket, Reason::OtherHost.into());
        }
        socket.told.set_why(Reason::Handshake);
        // A random number, which other peers cannot guess. In any case an answer is accepted only on a channel on which
        // the question was sent.
        let request = random_u64();
        {
            let Some(mut control) = socket.control.lock() else {
                return;
            };
            if let Some(reason) = control.leave {
                // The program has meanwhile used the socket in a way that forbids a promotion.
                drop(control);
                return stay(socket, reason.into());
            }
            connection::begin_asking(&mut control, nonce, remote || reach.is_device_for_here());
        }
        self.ask_out(request, Asking::new(Asker::Here(r), nonce, tuple, remote));
    }

    /// Sends the question: to the other host, or within the host to the names that belong to the port.
    pub(super) fn ask_out(&mut self, request: u64, mut asking: Asking) {
        if asking.remote {
            self.ask_host(request, &mut asking);
        } else {
            self.ask_names(request, &mut asking);
        }
        self.go_on(request, asking);
    }

    /// Keeps the question if answers are outstanding. Otherwise gives the attempt up.
    pub(super) fn go_on(&mut self, request: u64, asking: Asking) {
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
            None if asking.busy => later(socket, Reason::TimedOut.into(), 0),
            // Perhaps no process has accepted the connection yet. Once one has, its uid is trusted too (P5).
            None if asking.untrusted => later(socket, Reason::NotTrusted.into(), 0),
            None | Some(wire::Reason::Absent) => {
                self.absent.insert(asking.tuple.acceptor(), (), now_ns());
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
        let peer = Peer::Asked {
            request,
            by_name,
            greets: None,
        };
        if send(&channel, &asking.question(request, self.library.id), &[])
            && let Some(conn) = self.register(channel, peer, CHANNEL_LIFE)
        {
            self.library.stats.count(Event::Ask);
            asking.asked.insert(conn);
        }
    }

    /// Drops the questions about this socket whose attempts the program has given up. A YES that comes later is
    /// cancelled.
    pub(super) fn forget_asks(&mut self, socket: &'static Socket) {
        self.asks
            .retain(|_, a| !a.socket().is_some_and(|s| std::ptr::eq(s, socket)) || is_asking(socket, a.nonce));
    }

    /// Removes a question that waits for an answer from the channel or host `from`, and returns it. `None` if the
    /// question does not wait for that answer, or is over.
    pub(super) fn take_asking(&mut self, request: u64, from: u64) -> Option<Asking> {
        let is_awaited = self.asks.get_mut(&request)?.asked.remove(&from);
        is_awaited.then(|| self.asks.remove(&request)).flatten()
    }

    /// Removes and returns the question that an answer on the channel `conn` belongs to. `None` if the answer is not
    /// accepted. An answer is accepted once, and only on a channel on which the question was sent (P11). A second
    /// answer while the question is open is a violation, as is an answer on any other channel. A violation closes the
    /// channel.
    fn take_answered(&mut self, conn: u64, request: u64) -> Option<Asking> {
        let peer = self.conns.get(&conn).map(|c| &c.peer);
        let is_asked = matches!(peer, Some(Peer::Asked { request: asked, .. }) if *asked == request);
        let asking = is_asked.then(|| self.take_asking(request, conn)).flatten();
        if !is_asked || asking.is_none() && self.asks.contains_key(&request) {
            self.violation(conn);
        }
        asking
    }

    /// Closes the channel of one question, unless its YES has led to a HELLO that is not in TCP as a whole yet (P16).
    /// Then the channel is kept for another `CHANNEL_LIFE`.
    pub(super) fn done_asking(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let Peer::Asked { greets, .. } = conn.peer else { return };
        let socket = greets.and_then(Ref::get);
        if socket.is_some_and(|socket| socket.tx.lock().is_none_or(|tx| !tx.marker.is_empty())) {
            conn.until = Some(now_ns() + CHANNEL_LIFE);
        } else {
            self.hang_up(id, Reason::None);
        }
    }

    pub(super) fn on_redirect(&mut self, conn: u64, request: u64, instance: InstanceId) {
        let peer = self.conns.get(&conn).map(|c| &c.peer);
        let by_name = matches!(peer, Some(Peer::Asked { by_name: true, .. }));
        let asking = self.take_answered(conn, request);
        self.done_asking(conn);
        let Some(mut asking) = asking else { return };
        asking.answered.get_or_insert(wire::Reason::NotHeld);
        // P14: only a service name may redirect. A REDIRECT from an instance's own name counts as NO.
        if by_name && let Ok(channel) = names::connect_to(names::instance(&instance).as_bytes()) {
            self.ask_on(request, &mut asking, channel, false);
        }
        self.go_on(request, asking);
    }

    pub(super) fn on_no(&mut self, conn: u64, request: u64, reason: wire::Reason) {
        let asking = self.take_answered(conn, request);
        self.done_asking(conn);
        if let Some(asking) = asking {
            self.library.stats.count(Event::No);
            self.declined(request, asking, reason);
        }
    }

    pub(super) fn declined(&mut self, request: u64, mut asking: Asking, reason: wire::Reason) {
        if !matches!(reason, wire::Reason::NotHeld | wire::Reason::Shared) {
            // This answer is from the only process that holds the connection. Other answers cannot change it, and some
            // may never come.
            asking.answered = Some(reason);
            asking.asked.clear();
        }
        asking.answered.get_or_insert(reason);
        self.go_on(request, asking);
    }

    /// Treats the end of a channel without an answer as NO.
    pub(super) fn on_silence(&mut self, conn: u64, request: u64) {
        if let Some(asking) = self.take_asking(request, conn) {
            self.declined(request, asking, wire::Reason::NotHeld);
        }
    }

    pub(super) fn on_yes(&mut self, conn: u64, request: u64, nonce_s: Nonce, instance_s: InstanceId) {
        let asking = self.take_answered(conn, request);
        if let Some(Peer::Asked { greets, .. }) = self.conns.get_mut(&conn).map(|c| &mut c.peer)
            && let Some(Asker::Here(r)) = asking.as_ref().map(|a| a.who)
        {
            *greets = Some(r);
        }
        if !asking.is_some_and(|asking| self.accept_yes(&asking, nonce_s, instance_s)) {
            // CANCEL ends the acceptor's scan of TCP, since no HELLO will come (P15).
            self.reply(conn, &Message::Cancel { nonce_s });
        }
        self.done_asking(conn);
    }

    /// Handles a YES that is accepted: a connection of this process sends HELLO, or the asker on another host gets the
    /// YES. Returns false if the YES comes too late.
    pub(super) fn accept_yes(&mut self, asking: &Asking, nonce_s: Nonce, instance_s: InstanceId) -> bool {
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
        let greeted = self.greet(asking, nonce_s);
        if !greeted {
            self.settle(r);
        }
        greeted
    }

    /// Watches the socket and begins HELLO. Returns false if the attempt is over.
    fn greet(&mut self, asking: &Asking, nonce_s: Nonce) -> bool {
        let Some(socket) = asking.socket().filter(|s| is_asking(s, asking.nonce)) else {
            return false;
        };
        if self.watch(socket) != Watched::Done || connection::start_scan(socket, asking.nonce).is_err() {
            if abandon(socket, asking.nonce) {
                later(socket, Reason::Unsupported.into(), 0);
                if socket.numbers.anchor_fd().is_some_and(sockopt::is_beyond_links) {
                    socket.promotion.exchange_stage(Stage::Watching, Stage::Pinned);
                }
            }
            return false;
        }
        let Some(mut control) = socket.control.lock() else {
            return false;
        };
        // The program may have given up the attempt since, or may be about to end. In that case another thread first
        // keeps all connections on TCP, and then checks which sockets scan. So one of the two threads sees the other.
        store_load_fence();
        let is_kept = crate::objects::library::reason().is_some();
        let is_asking = asks(&control, asking.nonce);
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

    pub(super) fn expire_asks(&mut self, now: u64) {
        for request in keys(&self.asks, |asking| asking.deadline <= now) {
            let Some(mut asking) = self.asks.remove(&request) else {
                continue;
            };
            self.library.stats.count(Event::HandshakeTimeout);
            let is_silent = asking.remote && self.is_host_silent(&asking);
            (asking.answered, asking.busy) = (None, !is_silent);
            asking.asked.clear();
            self.go_on(request, asking);
        }
    }
}

/// Returns whether the socket is still in the attempt that `nonce` was drawn for, with no marker in TCP.
fn is_asking(socket: &Socket, nonce: Nonce) -> bool {
    socket.control.lock().is_some_and(|control| asks(&control, nonce))
}

fn asks(control: &Control, nonce: Nonce) -> bool {
    let handshake = control.handshake.as_ref();
    handshake.is_some_and(|h| h.is_asking() && h.mine == nonce)
}

/// Ends the attempt before any marker was in TCP. Returns false if the socket is not in this attempt any more.
fn abandon(socket: &'static Socket, nonce: Nonce) -> bool {
    let Some(mut control) = socket.control.lock() else {
        return false;
    };
    let ours = asks(&control, nonce);
    if ours {
        control.handshake = None;
    }
    ours
}

impl Asking {
    /// Returns a question that has not been sent yet.
    fn new(who: Asker, nonce: Nonce, tuple: Tuple, remote: bool) -> Self {
        Self {
            who,
            nonce,
            tuple,
            remote,
            asked: HashSet::new(),
            answered: None,
            busy: false,
            untrusted: false,
            deadline: now_ns() + if remote { REMOTE_TIMEOUT } else { ASK_TIMEOUT },
        }
    }

    /// Returns the ASK that is sent within the host; `own` is this instance.
    fn question(&self, request: u64, own: InstanceId) -> Message {
        Message::Ask {
            request,
            tuple: self.tuple,
            nonce_c: self.nonce,
            instance_c: match self.who {
                Asker::Here(_) => own,
                Asker::Elsewhere { instance, .. } => instance,
            },
        }
    }

    /// Returns a question that came from another host; `conn` is the id of its entry in `conns`.
    pub(super) fn relayed(conn: u64, tuple: Tuple, nonce: Nonce, instance: InstanceId) -> Self {
        Self::new(Asker::Elsewhere { conn, instance }, nonce, tuple, false)
    }

    /// Returns whether the question came from another host.
    pub(super) fn is_relayed(&self) -> bool {
        matches!(self.who, Asker::Elsewhere { .. })
    }

    /// Returns the connection of this process that the question is about. `None` if the question came from another
    /// host, or the connection has ended.
    fn socket(&self) -> Option<&'static Socket> {
        match self.who {
            Asker::Here(r) => r.get(),
            Asker::Elsewhere { .. } => None,
        }
    }
}

#[cfg(test)]
impl Asking {
    /// Returns a question that was sent on the channel `conn`.
    pub(crate) fn for_test(r: Ref, nonce: Nonce, conn: u64) -> Self {
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 9));
        Self {
            asked: HashSet::from([conn]),
            deadline: u64::MAX,
            ..Self::new(Asker::Here(r), nonce, Tuple::new(address, address), false)
        }
    }

    /// Returns a question about a connection to another host that has not been sent yet.
    pub(crate) fn remote_for_test(r: Ref, nonce: Nonce, tuple: Tuple) -> Self {
        Self::new(Asker::Here(r), nonce, tuple, true)
    }
}

// Connections that are not promoted now.

/// Handles a peer without the library. Within the host that is certain, and the connection stays on TCP. Another host
/// may have been too busy to answer, or its datagrams were lost: a connection that lives on is asked for again.
fn nobody(socket: &'static Socket, remote: bool) {
    let why = Reason::PeerWithout.into();
    if remote {
        later(socket, why, HOST_ABSENT_FOR);
    } else {
        stay(socket, why);
    }
}

/// Puts the next question about the connection off, for at least `pause` ns. After `TRIES` questions keeps the
/// connection on TCP for good, unless the reason passes by itself.
fn later(socket: &'static Socket, why: Why, pause: u64) {
    let tries = socket.promotion.attempts.count();
    // These reasons come from the load of one of the two processes at this moment, and not from the connection.
    let passes = matches!(
        why.peer.unwrap_or(why.reason),
        Reason::LinkLimit | Reason::TimedOut | Reason::Resources
    );
    if tries >= TRIES && !passes {
        return stay(socket, why);
    }
    if let Some(stats) = socket.told.stats() {
        stats.set_why(why);
    }
    let pause = pause.max(FIRST_RETRY << (2 * tries.min(TRIES - 1)));
    socket.promotion.attempts.put_off(pause);
    socket.promotion.set_stage(Stage::Watching);
}

/// Handles a NO from the other end.
fn after_no(socket: &'static Socket, reason: wire::Reason) {
    let why = Why::declined(match reason {
        wire::Reason::NotHeld => Reason::NoMatch,
        wire::Reason::Rule => Reason::Rule,
        wire::Reason::Shared => Reason::Inherited,
        wire::Reason::NotOwner => Reason::NotOwner,
        wire::Reason::Closing => Reason::Closed,
        wire::Reason::Limit => Reason::LinkLimit,
        wire::Reason::Resources => Reason::Resources,
        wire::Reason::Timeout => Reason::TimedOut,
        wire::Reason::Violation | wire::Reason::Secret => Reason::Violation,
        _ => Reason::Unsupported,
    });
    match reason {
        // The peer may not have finished with the link that has failed under this connection.
        wire::Reason::Use | wire::Reason::Limit if socket.promotion.attempts.have_failed() => {
            socket.told.set_why(why);
            socket.promotion.retry_later();
        }
        wire::Reason::Rule | wire::Reason::Use | wire::Reason::NotOwner => stay(socket, why),
        _ => later(socket, why, 0),
    }
}
