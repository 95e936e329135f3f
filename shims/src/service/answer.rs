//! The acceptor's part of a rendezvous: answering ASKs about connections that this instance holds.

use std::os::fd::AsFd;
use std::sync::atomic::{
    Ordering::{AcqRel, Acquire, SeqCst},
    fence,
};

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::rendezvous::route::{Place, place_of};
use rdmasock_core::stats::{Direction, Reason};
use rdmasock_core::stream::handshake::{Handshake, Role};
use rdmasock_core::wire::{self, Message};
use rustix::event::epoll as kernel;

use super::{ASK_TIMEOUT, Peer, Ref, Watched, Worker, kind, tag};
use crate::listener::Listener;
use crate::points::point;
use crate::promote;
use crate::ready;
use crate::socket::{self, Socket, Stage};

/// An ASK about a connection that this process has accepted and not used yet: it may be about to
/// fork a child that will, and then the child answers.
pub struct Deferred {
    r: Ref,
    conn: u64,
    request: u64,
    tuple: Tuple,
    nonce_c: Nonce,
    instance_c: InstanceId,
    /// The asker no longer waits then, monotonic ns.
    pub deadline: u64,
}

/// How many such wait at a time; a connection is asked for by one, as a rule.
const MOST_DEFERRED: usize = 4096;

/// Why an ASK is not answered by YES.
enum Refusal {
    /// It is answered by NO.
    No(wire::Reason),
    /// It is answered when the program has used the socket.
    NotYet(&'static Socket),
}

impl From<wire::Reason> for Refusal {
    fn from(reason: wire::Reason) -> Self {
        Self::No(reason)
    }
}

impl Worker {
    /// Answers for a listener from now on.
    pub(super) fn listen(&mut self, listener: &'static Listener) {
        if self.listeners.iter().any(|l| std::ptr::eq(*l, listener)) {
            return;
        }
        let id = self.listeners.len() as u64;
        if let Some(name) = listener.name() {
            // EXCLUSIVE: of several workers on one inherited name one wakes up.
            let flags = kernel::EventFlags::IN | kernel::EventFlags::EXCLUSIVE;
            if self.add(name.as_fd(), tag(kind::NAME, id), flags) {
                listener.enter(&self.library.id);
                self.listeners.push(listener);
                self.open_control(crate::time::now_ns());
            }
        }
    }

    pub(super) fn on_ask(
        &mut self,
        conn: u64,
        request: u64,
        tuple: Tuple,
        nonce_c: Nonce,
        instance_c: InstanceId,
    ) {
        // Looked for once: what is accepted meanwhile has not been used.
        let answer = match self.find(&tuple) {
            None => Err(wire::Reason::NotHeld.into()),
            Some(socket) if !is_used(socket) => Err(Refusal::NotYet(socket)),
            Some(socket) => self.answer(socket, &tuple, nonce_c, instance_c),
        };
        if let Err(Refusal::NotYet(socket)) = answer
            && self.deferred.len() < MOST_DEFERRED
        {
            self.deferred.push(Deferred {
                r: Ref::new(socket),
                conn,
                request,
                tuple,
                nonce_c,
                instance_c,
                deadline: crate::time::now_ns() + ASK_TIMEOUT.as_nanos() as u64,
            });
            return;
        }
        let reply = match answer {
            Ok((nonce_s, r)) => {
                self.remember_offer(nonce_s, r);
                Message::Yes {
                    request,
                    nonce_s,
                    instance_s: self.library.id,
                }
            }
            Err(Refusal::No(wire::Reason::NotHeld)) => match self.others(conn, &tuple) {
                instances if !instances.is_empty() => Message::Redirect { request, instances },
                _ => Message::No {
                    request,
                    reason: wire::Reason::NotHeld,
                },
            },
            Err(Refusal::No(reason)) => Message::No { request, reason },
            Err(Refusal::NotYet(_)) => Message::No {
                request,
                reason: wire::Reason::Limit,
            },
        };
        tracing::debug!(target: "rdmasock::promote", ?reply, "answer");
        if !self.send_reply(conn, &reply)
            && let Message::Yes { nonce_s, .. } = reply
        {
            // Nobody knows of this attempt, so nobody ends it.
            self.on_cancel(nonce_s);
        }
    }

    /// The connection has been used, or closed.
    pub(super) fn answer_deferred(&mut self, r: Ref) {
        let due: Vec<Deferred> = self.deferred.extract_if(.., |d| d.r.is_same(r)).collect();
        for d in due {
            self.on_ask(d.conn, d.request, d.tuple, d.nonce_c, d.instance_c);
        }
        if let Some(socket) = r.get()
            && !ready::is_watched(socket)
        {
            // What was kept out of the kernel's sets for a promotion goes back there.
            ready::hand_back(socket);
        }
    }

    /// Keeps an attempt to be found by its nonce. Now and then those that are over are forgotten.
    pub(super) fn remember_offer(&mut self, nonce_s: Nonce, r: Ref) {
        if self.offered.len() >= self.offered_bound {
            self.offered
                .retain(|nonce, r| r.get().is_some_and(|s| is_attempt(s, *nonce)));
            self.offered_bound = OFFERED_MIN.max(2 * self.offered.len());
        }
        self.offered.insert(nonce_s, r);
    }

    /// Other processes answer on the name too: what is asked there about this connection is to come here.
    pub(super) fn hold(&self, r: Ref) {
        if let Some(socket) = r.get()
            && let Some(listener) = socket.listener()
            && let Some(tuple) = socket::tuple_of(socket)
        {
            listener.enter_holder(&tuple, &self.library.id);
        }
    }

    /// Who else behind the name that the question came to has the connection: if nobody has said so, any of the other live
    /// instances.
    fn others(&self, conn: u64, tuple: &Tuple) -> Vec<InstanceId> {
        match self.conns.get(&conn).map(|c| &c.peer) {
            Some(Peer::Incoming {
                listener: Some(listener),
            }) => {
                if let Some(holder) = listener.holder(tuple).filter(|h| *h != self.library.id) {
                    return vec![holder];
                }
                let mut all = listener.instances();
                all.retain(|i| *i != self.library.id);
                all.truncate(wire::MAX_REDIRECT);
                all
            }
            _ => Vec::new(),
        }
    }

    /// Accepts the promotion of a connection, if it is ours and may be moved.
    fn answer(
        &mut self,
        socket: &'static Socket,
        tuple: &Tuple,
        nonce_c: Nonce,
        instance_c: InstanceId,
    ) -> Result<(Nonce, Ref), Refusal> {
        let r = Ref::new(socket);
        if let Some(reason) =
            self.library
                .refuses(tuple.acceptor(), tuple.connector(), Direction::Accept)
        {
            promote::set_why(socket, reason);
            return Err(match reason {
                Reason::Rule | Reason::NoRules => wire::Reason::Rule,
                _ => wire::Reason::Use,
            }
            .into());
        }
        if crate::fork::is_shared(socket) {
            return Err(wire::Reason::Shared.into());
        }
        point!("answer: no other process has it");
        let reached_at = match place_of(tuple.acceptor().ip(), tuple.connector().ip()) {
            Place::Here => None,
            // Before the YES: HELLO says where the link can be made.
            Place::There { .. } if self.listen_for_links(tuple.acceptor().ip()) => {
                Some(tuple.acceptor().ip())
            }
            Place::There { .. } => return Err(wire::Reason::Unsupported.into()),
        };
        let nonce_s = Nonce::random().map_err(|_| wire::Reason::Resources)?;
        if socket
            .stage
            .compare_exchange(Stage::Watching as u8, Stage::Busy as u8, Acquire, Acquire)
            .is_err()
        {
            // An attempt that the asker has given up may not be over here.
            let is_busy = socket.stage() == Stage::Busy;
            return Err(if is_busy {
                wire::Reason::Limit
            } else {
                wire::Reason::Use
            }
            .into());
        }
        // The object may have become another connection while this was looked at.
        if r.get().is_none() {
            stand_back(socket);
            return Err(wire::Reason::NotHeld.into());
        }
        // Who forks counts the holders, and looks whether the connection is busy then (`fork::count_holders`): one of the two sees the
        // other. A child that knows nothing of the attempt would read its markers.
        fence(SeqCst);
        if crate::fork::is_shared(socket) {
            stand_back(socket);
            return Err(wire::Reason::Shared.into());
        }
        match self.watch(socket) {
            Watched::AfterMod => {
                stand_back(socket);
                socket.asked.store(true, SeqCst);
                return Err(Refusal::NotYet(socket));
            }
            Watched::Done if promote::start_scan(socket, nonce_s) => {}
            _ => {
                stand_back(socket);
                self.settle(r);
                // A moment later the calls that are in the kernel now may be back.
                return Err(wire::Reason::Limit.into());
            }
        }
        let (mut handshake, _steps) = Handshake::acceptor(nonce_s, nonce_c);
        if reached_at.is_some() {
            handshake.between_hosts();
        }
        let mut control = socket.control.lock().ok_or(wire::Reason::Resources)?;
        if r.get().is_none() || socket.anchor_fd().is_none() {
            // It has been closed since, and may be another connection, for which nobody has asked.
            promote::stop_scan(socket);
            drop(control);
            self.settle(Ref::new(socket));
            return Err(wire::Reason::NotHeld.into());
        }
        // What holds all connections on TCP may have come since, and has then not seen this one: it looks who scans.
        fence(SeqCst);
        if crate::hold::reason().is_some() {
            promote::stop_scan(socket);
            stand_back(socket);
            drop(control);
            self.settle(r);
            return Err(wire::Reason::Limit.into());
        }
        if let Some(reason) = control.leave {
            // The program has put the socket to a use since that forbids it.
            promote::set_why(socket, reason);
            promote::stop_scan(socket);
            socket.set_stage(Stage::Pinned);
            drop(control);
            self.settle(r);
            return Err(wire::Reason::Use.into());
        }
        control.handshake = Some(handshake);
        control.asked_by = Some(instance_c);
        control.reached_at = reached_at;
        control.greeted_by = None;
        control.offer = None;
        promote::set_why(socket, Reason::Handshake);
        drop(control);
        ready::notify_local(socket);
        Ok((nonce_s, r))
    }

    /// The accepted socket with these addresses.
    pub(super) fn find(&mut self, tuple: &Tuple) -> Option<&'static Socket> {
        if let Some(socket) = self.tuples.get(tuple).and_then(|r| r.get()) {
            return Some(socket);
        }
        // Addresses are looked up only now, so that connections which are never asked for do not pay.
        self.tuples.retain(|_, r| r.get().is_some());
        for socket in socket::all() {
            if socket.stage() == Stage::Watching && socket.role() == Role::Acceptor {
                let r = Ref::new(socket);
                if let Some(found) = socket::tuple_of(socket) {
                    self.tuples.insert(found, r);
                }
            }
        }
        self.tuples.get(tuple).and_then(|r| r.get())
    }

    pub(super) fn on_cancel(&mut self, nonce_s: Nonce) {
        let Some(socket) = self.offered.remove(&nonce_s).and_then(Ref::get) else {
            return;
        };
        if let Some(mut control) = socket.control.lock()
            && control
                .handshake
                .as_ref()
                .is_some_and(|h| h.mine() == nonce_s)
        {
            promote::feed(socket, &mut control, Handshake::on_cancel);
        }
    }
}

/// Whether this process has carried data over the connection; if not its first use will tell.
fn is_used(socket: &Socket) -> bool {
    if socket.progress.has_begun() {
        return true;
    }
    // The other order in `tx::account`: it counts, then looks.
    socket.asked.store(true, SeqCst);
    socket.progress.has_begun() && socket.asked.swap(false, SeqCst)
}

/// There is no attempt after all.
fn stand_back(socket: &Socket) {
    // Unless the program has closed it meanwhile, or put it to a use that forbids promotions.
    let (from, to) = (Stage::Busy as u8, Stage::Watching as u8);
    let _ = socket.stage.compare_exchange(from, to, AcqRel, Acquire);
    crate::fork::returned(socket);
}

/// Attempts that are over are looked for from this number on, and whenever it has doubled.
pub const OFFERED_MIN: usize = 64;

/// Whether the socket is in the attempt that `nonce` was drawn for.
fn is_attempt(socket: &Socket, nonce: Nonce) -> bool {
    let control = socket.control.lock();
    control.is_some_and(|c| c.handshake.as_ref().is_some_and(|h| h.mine() == nonce))
}
