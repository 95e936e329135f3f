//! The acceptor's part of a promotion: answering ASKs about connections that this instance holds.
//!
//! [`Handshakes`] finds these connections by their addresses, and by the nonces of attempts under way. It keeps the
//! questions that it is too early to answer.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::SeqCst;

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::rendezvous::diag;
use rdmasock_core::rendezvous::diag::{Owner, trusted, udp_owner};
use rdmasock_core::stats::{Direction, Reason};
use rdmasock_core::stream::connection;
use rdmasock_core::stream::handshake::{Handshake, Phase, Role};
use rdmasock_core::sync::store_load_fence;
use rdmasock_core::wire;
use rdmasock_core::wire::Message;
use rustix::event::epoll as kernel;

use crate::notify::{ready, threshold};
use crate::objects::listener::Listener;
use crate::objects::mailbox::{Ref, kind, tag};
use crate::objects::socket;
use crate::objects::socket::{Socket, Stage};
use crate::service::ask::ASK_TIMEOUT;
use crate::service::{Peer, Watched, Worker};
use crate::sys::points::point;
use crate::sys::sockopt;

/// The least number of recorded attempts from which on those that are over are removed. After a removal, the next one
/// is due at twice the number of attempts that are left, but not below this number.
const OFFERED_MIN: usize = 64;
/// Pauses between the checks of an `Orphan`, ns: the first, and the longest.
const LOOK_FIRST: u64 = 5_000_000;
const LOOK_LAST: u64 = 1_000_000_000;
/// The most ASKs that wait for the program's first use of a connection. As a rule at most one waits for each
/// connection.
const MOST_DEFERRED: usize = 4096;

/// Why an ASK is not answered by YES.
enum Refusal {
    /// The ASK is answered by NO.
    No(wire::Reason),
    /// The ASK is answered when the program has used the socket.
    NotYet(&'static Socket),
}

impl From<wire::Reason> for Refusal {
    fn from(reason: wire::Reason) -> Self {
        Self::No(reason)
    }
}

impl Worker {
    /// Answers ASKs on the listener's name from now on.
    pub(super) fn listen(&mut self, listener: &'static Listener) {
        // The object may have been another listener before, whose name is gone.
        let known = self.listeners.iter().position(|l| std::ptr::eq(*l, listener));
        let id = known.unwrap_or(self.listeners.len()) as u64;
        if let Some(name) = listener.name() {
            // EXCLUSIVE: of several processes that poll one inherited name, one wakes up.
            let flags = kernel::EventFlags::IN | kernel::EventFlags::EXCLUSIVE;
            if self.add(name.as_fd(), tag(kind::NAME, id), flags) {
                if known.is_none() {
                    self.listeners.push(listener);
                }
                self.open_control(crate::sys::time::now_ns());
            }
        }
    }

    pub(super) fn on_ask(&mut self, conn: u64, request: u64, tuple: Tuple, nonce_c: Nonce, instance_c: InstanceId) {
        let no = |reason| Message::No { request, reason };
        if !self.can_begin() {
            return self.reply(conn, &no(wire::Reason::Resources));
        }
        // The socket is looked up once, so that all checks below are about the same socket. A connection that the
        // program accepts after this look-up has not been used yet.
        let accepted = self.handshakes.accepted(&tuple);
        if let Some(socket) = accepted
            && !(self.is_here(socket, &tuple) && self.may_ask(conn, &tuple))
        {
            tracing::debug!(target: "rdmasock::promote", ?tuple, "asked by who is not its other end");
            return self.reply(conn, &no(wire::Reason::NotOwner));
        }
        let answer = match accepted {
            None => Err(wire::Reason::NotHeld.into()),
            Some(socket) if !is_used(socket) => Err(Refusal::NotYet(socket)),
            Some(socket) => self.answer(socket, &tuple, nonce_c, instance_c),
        };
        if let Err(Refusal::NotYet(socket)) = answer
            && self.handshakes.deferred.len() < MOST_DEFERRED
        {
            return self.handshakes.deferred.push(Deferred {
                r: Ref::new(socket),
                conn,
                request,
                tuple,
                nonce_c,
                instance_c,
                deadline: crate::sys::time::now_ns() + ASK_TIMEOUT,
            });
        }
        let reply = match answer {
            Ok((nonce_s, r)) => {
                self.handshakes.enter(nonce_s, r);
                if let Some(Peer::Incoming { offered, .. }) = self.conns.get_mut(&conn).map(|c| &mut c.peer) {
                    *offered = Some(nonce_s);
                }
                Message::Yes {
                    request,
                    nonce_s,
                    instance_s: self.library.id,
                }
            }
            Err(Refusal::No(wire::Reason::NotHeld)) => match self.holder(conn, &tuple) {
                Some(instance) => Message::Redirect { request, instance },
                None => no(wire::Reason::NotHeld),
            },
            Err(Refusal::No(reason)) => no(reason),
            Err(Refusal::NotYet(_)) => no(wire::Reason::Limit),
        };
        tracing::debug!(target: "rdmasock::promote", ?reply, "answer");
        self.reply(conn, &reply);
    }

    /// Returns whether the asker may ask about the connection: it has to own the connector's socket (P102). If that
    /// socket is on another host, the owner cannot be checked. Then questions are accepted from the control port.
    /// Within this host, they are accepted from root, from this process's user, and from the owner of the control port.
    fn may_ask(&self, conn: u64, tuple: &Tuple) -> bool {
        if !self.conns.contains_key(&conn) {
            return false;
        }
        let credentials = self.with_channel(conn, |channel| channel.peer().ok()).flatten();
        let reach = self.library.reach;
        let own = rustix::process::geteuid().as_raw();
        match credentials.map(|c| c.uid) {
            Some(0) => true,
            Some(uid) => match (self.owner_of)(tuple) {
                Owner::None => {
                    trusted(uid, Owner::Unknown, own)
                        || reach.port().is_some_and(|port| trusted(uid, udp_owner(port), own))
                }
                owner => trusted(uid, owner, own),
            },
            None if reach.is_device_for_here() => true,
            None => match (self.owner_of)(tuple) {
                Owner::None => true,
                Owner::Uid(_) => false,
                Owner::Unknown => reach.is_between_hosts(tuple),
            },
        }
    }

    /// Answers the questions about the connection that waited until it was used or closed.
    pub(super) fn answer_deferred(&mut self, r: Ref) {
        let deferred = &mut self.handshakes.deferred;
        let about: Vec<Deferred> = deferred.extract_if(.., |question| question.r == r).collect();
        for d in about {
            self.on_ask(d.conn, d.request, d.tuple, d.nonce_c, d.instance_c);
        }
        if let Some(socket) = r.get()
            && !socket.is_watched()
        {
            // Items of epoll sets that were kept out of the kernel's sets for a promotion go back there.
            ready::hand_back(socket);
        }
    }

    /// Returns the other instance that has recorded itself, in the listener's page, as the connection's holder. `None`
    /// if there is none, or if the question did not come by a service name.
    fn holder(&self, conn: u64, tuple: &Tuple) -> Option<InstanceId> {
        match self.conns.get(&conn).map(|c| &c.peer) {
            Some(Peer::Incoming { listener, .. }) => (*listener)?.holder(tuple).filter(|h| *h != self.library.id),
            _ => None,
        }
    }

    /// Accepts the promotion of a connection that this instance holds, if the connection may be moved. Returns the
    /// nonce of the YES; `Err` is the answer to the ASK instead.
    fn answer(
        &mut self,
        socket: &'static Socket,
        tuple: &Tuple,
        nonce_c: Nonce,
        instance_c: InstanceId,
    ) -> Result<(Nonce, Ref), Refusal> {
        let r = Ref::new(socket);
        let (local, remote) = (tuple.acceptor(), tuple.connector());
        if let Some(reason) = self.library.refuses(local, remote, Direction::Accept) {
            socket.told.set_why(reason);
            return Err(match reason {
                Reason::Rule | Reason::NoRules => wire::Reason::Rule,
                _ => wire::Reason::Use,
            }
            .into());
        }
        if threshold::is_polled_unseen(socket) {
            socket.told.set_why(Reason::UnknownEpoll);
            // A program may read a first request before it asks for readiness for the first time. From the connection's
            // second request on, the refusal is final.
            return Err(refused(socket.promotion.progress.requests() > 1));
        }
        if socket.promotion.holders.are_several() {
            return Err(wire::Reason::Shared.into());
        }
        point!("answer: no other process has it");
        let reached_at = match self.library.reach.is_between_hosts(tuple) {
            false => None,
            // Done before the YES, since HELLO carries the address at which the link can be made.
            true if self.listen_for_links(local.ip()) => Some(local.ip()),
            true => return Err(wire::Reason::Unsupported.into()),
        };
        let nonce_s = Nonce::random().map_err(|_| wire::Reason::Resources)?;
        if !socket.promotion.exchange_stage(Stage::Watching, Stage::Busy) {
            // The asker may have given up an earlier attempt that is still under way here.
            return Err(refused(socket.promotion.stage() != Stage::Busy));
        }
        if let Err(refusal) = self.offer(socket, (nonce_s, nonce_c), instance_c, reached_at) {
            // This has no effect if the program has closed the socket meanwhile, or used it in a way that forbids
            // promotions.
            socket.promotion.exchange_stage(Stage::Busy, Stage::Watching);
            socket.promotion.holders.on_returned();
            self.settle(Ref::new(socket));
            return Err(refusal);
        }
        Ok((nonce_s, r))
    }

    /// Begins an attempt with these nonces; the first one belongs to this end. `Err` if the connection may not be moved
    /// now; then no marker is expected.
    fn offer(
        &mut self,
        socket: &'static Socket,
        nonces: (Nonce, Nonce),
        instance_c: InstanceId,
        reached_at: Option<IpAddr>,
    ) -> Result<(), Refusal> {
        // The connection was marked as busy before, and the number of its holders is read next. A fork does it the
        // other way round (`fork::count_holders`): it adds the child to the holders, then reads whether the connection
        // is busy. So one of the two sees the other. A child that knew nothing of the attempt would read its markers as
        // data.
        store_load_fence();
        if socket.promotion.holders.are_several() {
            return Err(wire::Reason::Shared.into());
        }
        match self.watch(socket) {
            Watched::AfterMod => {
                socket.promotion.asked.store(true, SeqCst);
                return Err(Refusal::NotYet(socket));
            }
            Watched::Done if connection::start_scan(socket, nonces.0).is_ok() => {}
            _ if socket.numbers.anchor_fd().is_some_and(sockopt::is_beyond_links) => {
                socket.told.set_why(Reason::Unsupported);
                // This has no effect if the connection has been closed meanwhile.
                socket.promotion.exchange_stage(Stage::Busy, Stage::Pinned);
                return Err(wire::Reason::Use.into());
            }
            // Calls of the program may be in the kernel now, so no scan could begin. They may have returned when the
            // connector asks again.
            _ => return Err(wire::Reason::Limit.into()),
        }
        let mut control = socket.control.lock().ok_or(wire::Reason::Resources)?;
        // Another thread may be about to keep all connections on TCP. That thread sets the reason first
        // (`Library::keep_on_tcp`), and then checks which sockets scan. This socket scans already, and the reason is
        // read next. So one of the two sees the other.
        store_load_fence();
        let refusal = if socket.numbers.anchor_fd().is_none() {
            // The connection has been closed since.
            wire::Reason::NotHeld
        } else if crate::objects::library::reason().is_some() {
            wire::Reason::Limit
        } else if let Some(reason) = control.leave {
            // The program has meanwhile used the socket in a way that forbids a promotion.
            socket.told.set_why(reason);
            socket.promotion.set_stage(Stage::Pinned);
            wire::Reason::Use
        } else {
            connection::begin_offering(&mut control, nonces, instance_c, reached_at);
            socket.told.set_why(Reason::Handshake);
            drop(control);
            ready::notify_local(socket);
            return Ok(());
        };
        connection::stop_scan(socket);
        Err(refusal.into())
    }

    pub(super) fn on_cancel(&mut self, nonce_s: Nonce) {
        let Some(socket) = self.handshakes.remove(&nonce_s) else {
            return;
        };
        if let Some(mut control) = socket.control.lock()
            && control.handshake.as_ref().is_some_and(|h| h.mine == nonce_s)
        {
            connection::feed(socket, &mut control, Handshake::on_cancel);
        }
    }
}

/// Returns a NO: for good if `is_final`, else with a reason after which the connector asks again.
fn refused(is_final: bool) -> Refusal {
    use wire::Reason::{Limit, Use};
    Refusal::No(if is_final { Use } else { Limit })
}

/// Returns whether this process has carried data over the connection. If not, its first use is reported to this thread.
fn is_used(socket: &Socket) -> bool {
    if socket.promotion.progress.has_begun() {
        return true;
    }
    // `asked` is set here, then the progress is read. A call of the program counts its bytes, then reads `asked`
    // (`tx::answer_if_asked`). So one of the two sees the other.
    socket.promotion.asked.store(true, SeqCst);
    store_load_fence();
    socket.promotion.progress.has_begun() && socket.promotion.asked.swap(false, SeqCst)
}

/// An ASK about a connection that this process has accepted and not used yet. The process may be about to fork a child
/// that will use the connection; then the child answers.
struct Deferred {
    r: Ref,
    conn: u64,
    request: u64,
    tuple: Tuple,
    nonce_c: Nonce,
    instance_c: InstanceId,
    /// When the asker stops waiting, monotonic ns.
    deadline: u64,
}

/// An attempt whose asker has closed its channel. By then HELLO is in TCP, or will not come (P16). TCP is checked again
/// and again until it shows which.
struct Orphan {
    nonce: Nonce,
    /// Time from the next check to the one after it, ns.
    every: u64,
    /// The time of the next check, monotonic ns.
    deadline: u64,
}

/// The connections that peers ask about, and the questions that wait.
#[derive(Default)]
pub(super) struct Handshakes {
    /// Sockets whose addresses have been looked up.
    tuples: HashMap<Tuple, Ref>,
    /// The attempts of this end, by its nonces. Some may be over, and their objects may have become other connections.
    pub offered: HashMap<Nonce, Ref>,
    /// The number of entries in `offered` from which on those that are over are removed.
    bound: usize,
    deferred: Vec<Deferred>,
    orphans: Vec<Orphan>,
}

impl Handshakes {
    /// Returns the accepted socket with these addresses; `None` if this process has none.
    pub(super) fn accepted(&mut self, tuple: &Tuple) -> Option<&'static Socket> {
        if let Some(socket) = self.tuples.get(tuple).and_then(|r| r.get()) {
            return Some(socket);
        }
        // Addresses are looked up only now, so that connections that are never asked for do not pay for it.
        self.tuples.retain(|_, r| r.get().is_some());
        for socket in socket::all() {
            if socket.promotion.stage() == Stage::Watching && socket.promotion.role() == Role::Acceptor {
                let r = Ref::new(socket);
                if self.tuples.try_reserve(1).is_err() {
                    break;
                }
                if let Some(found) = socket::tuple_of(socket) {
                    self.tuples.insert(found, r);
                }
            }
        }
        self.tuples.get(tuple).and_then(|r| r.get())
    }

    /// Keeps an attempt under its nonce. Now and then removes the attempts that are over.
    pub(super) fn enter(&mut self, nonce: Nonce, r: Ref) {
        if self.offered.len() >= self.bound {
            self.offered
                .retain(|nonce, r| r.get().is_some_and(|s| is_attempt(s, *nonce)));
            self.bound = OFFERED_MIN.max(2 * self.offered.len());
        }
        self.offered.insert(nonce, r);
    }

    /// Begins to check an attempt whose asker has closed its channel. If TCP shows that no HELLO comes, the attempt
    /// ends.
    pub(super) fn on_asker_gone(&mut self, nonce: Nonce, now: u64) {
        self.orphans.push(Orphan {
            nonce,
            every: LOOK_FIRST,
            deadline: now,
        });
    }

    /// Returns the connection that made the attempt with this nonce; `None` if the connection or the attempt is gone.
    pub(super) fn by_nonce(&self, nonce: &Nonce) -> Option<&'static Socket> {
        self.offered.get(nonce).and_then(|r| r.get())
    }

    /// Removes the attempt with this nonce, and returns its connection.
    pub(super) fn remove(&mut self, nonce: &Nonce) -> Option<&'static Socket> {
        self.offered.remove(nonce).and_then(Ref::get)
    }

    /// Drops the questions whose askers have stopped waiting, and checks the orphans that are due.
    pub(super) fn on_timeout(&mut self, now: u64) {
        self.deferred.retain(|question| question.deadline > now);
        let mut orphans = std::mem::take(&mut self.orphans);
        orphans.retain_mut(|orphan| {
            if orphan.deadline > now {
                return true;
            }
            orphan.deadline = now + orphan.every;
            orphan.every = LOOK_LAST.min(2 * orphan.every);
            let socket = self.by_nonce(&orphan.nonce);
            socket.is_some_and(|socket| may_be_greeted(socket, orphan.nonce))
        });
        self.orphans = orphans;
    }

    /// Returns the time of the next check or expiry, monotonic ns; `None` if nothing waits.
    pub(super) fn next_timeout(&self) -> Option<u64> {
        let deferred = self.deferred.iter().map(|question| question.deadline);
        deferred.chain(self.orphans.iter().map(|orphan| orphan.deadline)).min()
    }
}

/// Returns whether an orphan has to be checked again, since a HELLO may still be on its way. If HELLO will not come,
/// ends the attempt and returns false. Also returns false if HELLO has come, and if the kernel does not report what is
/// on its way, as from another host: then the scan of TCP alone shows what comes.
fn may_be_greeted(socket: &'static Socket, nonce: Nonce) -> bool {
    let Some(tuple) = socket::tuple_of(socket) else {
        return false;
    };
    let Some(mut control) = socket.control.lock() else {
        return true;
    };
    let is_offered = |h: &Handshake| h.mine == nonce && h.phase() == Phase::Offered;
    if !control.handshake.as_ref().is_some_and(is_offered) || connection::has_marker(socket) == Some(true) {
        return false;
    }
    match diag::under_way(&tuple) {
        None => false,
        Some(1..) => true,
        // All bytes that the connector has sent have arrived.
        Some(0) => match connection::has_marker(socket) {
            Some(is_there) => {
                if !is_there {
                    connection::feed(socket, &mut control, Handshake::on_cancel);
                }
                false
            }
            None => true,
        },
    }
}

/// Returns whether the socket is in the attempt that `nonce` was drawn for.
fn is_attempt(socket: &Socket, nonce: Nonce) -> bool {
    let control = socket.control.lock();
    control.is_some_and(|c| c.handshake.as_ref().is_some_and(|h| h.mine == nonce))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::tests::connected;

    #[test]
    fn attempts_that_are_over_are_forgotten() {
        let mut handshakes = Handshakes::default();
        let (socket, _stream) = connected();
        let live = Nonce::random().unwrap();
        socket.control.lock().unwrap().handshake = Some(Handshake::acceptor(live, live));
        handshakes.enter(live, Ref::new(socket));
        for _ in 0..4 * OFFERED_MIN {
            handshakes.enter(Nonce::random().unwrap(), Ref::new(socket));
        }
        assert!(handshakes.offered.contains_key(&live));
        assert!(handshakes.offered.len() <= OFFERED_MIN);
    }
}
