//! Finds the connections of this process that peers ask about: by their addresses, and by the nonces of handshakes
//! under way. Keeps the questions that it is too early to answer.

use std::collections::HashMap;

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::rendezvous::diag;
use rdmasock_core::stream::connection;
use rdmasock_core::stream::handshake::{Handshake, Phase, Role};

use crate::objects::mailbox::Ref;
use crate::objects::socket::{self, Socket, Stage};

/// From this number of attempts on, those that are over are removed, and again whenever the number has doubled.
const OFFERED_MIN: usize = 64;
/// Time to the second check of an orphan, and the longest time between two checks, ns.
const LOOK_FIRST: u64 = 5_000_000;
const LOOK_LAST: u64 = 1_000_000_000;
/// The most questions that wait at a time. As a rule there is one for each connection.
const MOST_DEFERRED: usize = 4096;

/// An ASK about a connection that this process has accepted and not used yet. The process may be about to fork a child
/// that will use the connection; then the child answers.
pub struct Deferred {
    pub r: Ref,
    pub conn: u64,
    pub request: u64,
    pub tuple: Tuple,
    pub nonce_c: Nonce,
    pub instance_c: InstanceId,
    /// When the asker stops waiting, monotonic ns.
    pub deadline: u64,
}

/// A connection for which a YES was sent.
struct Offered {
    r: Ref,
    /// The link between hosts that the YES went over.
    link: Option<u64>,
}

/// An attempt whose asker has closed its channel. HELLO is in TCP by then, or will not come (P16).
struct Orphan {
    nonce: Nonce,
    /// Time from the next check to the one after it, ns.
    every: u64,
    /// The time of the next check, monotonic ns.
    deadline: u64,
}

/// The connections that peers ask about, and the questions that wait.
pub struct Handshakes {
    /// Sockets whose addresses have been looked up.
    tuples: HashMap<Tuple, Ref>,
    /// Handshakes under way, by this end's nonce.
    offered: HashMap<Nonce, Offered>,
    /// The number of attempts from which on those that are over are removed.
    bound: usize,
    deferred: Vec<Deferred>,
    orphans: Vec<Orphan>,
}

impl Handshakes {
    /// Returns an empty set.
    pub fn new() -> Self {
        Self {
            tuples: HashMap::new(),
            offered: HashMap::new(),
            bound: OFFERED_MIN,
            deferred: Vec::new(),
            orphans: Vec::new(),
        }
    }

    /// Returns whether there is memory for one more attempt.
    pub fn has_room(&mut self) -> bool {
        self.offered.try_reserve(1).is_ok()
    }

    /// Returns the accepted socket with these addresses; `None` if this process has none.
    pub fn accepted(&mut self, tuple: &Tuple) -> Option<&'static Socket> {
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

    /// Keeps an attempt under its nonce; `link` is the link between hosts that YES goes over. Now and then removes the
    /// attempts that are over.
    pub fn enter(&mut self, nonce: Nonce, r: Ref, link: Option<u64>) {
        if self.offered.len() >= self.bound {
            let is_live = |nonce: &Nonce, offered: &mut Offered| offered.r.get().is_some_and(|s| is_attempt(s, *nonce));
            self.offered.retain(is_live);
            self.bound = OFFERED_MIN.max(2 * self.offered.len());
        }
        self.offered.insert(nonce, Offered { r, link });
    }

    /// Begins to check an attempt whose asker has closed its channel. The attempt ends once TCP shows that no HELLO
    /// comes.
    pub fn on_asker_gone(&mut self, nonce: Nonce, now: u64) {
        self.orphans.push(Orphan {
            nonce,
            every: LOOK_FIRST,
            deadline: now,
        });
    }

    /// Returns the link between hosts that the YES with this nonce went over; `None` if it went another way.
    pub fn link_of(&self, nonce: &Nonce) -> Option<u64> {
        self.offered.get(nonce)?.link
    }

    /// Returns the connection that made the attempt with this nonce; `None` if it is over.
    pub fn by_nonce(&self, nonce: &Nonce) -> Option<&'static Socket> {
        self.offered.get(nonce).and_then(|offered| offered.r.get())
    }

    /// Returns whether there is such an attempt, even if its socket is another connection by now.
    pub fn has(&self, nonce: &Nonce) -> bool {
        self.offered.contains_key(nonce)
    }

    /// Removes the attempt with this nonce, and returns its connection.
    pub fn remove(&mut self, nonce: &Nonce) -> Option<&'static Socket> {
        self.offered.remove(nonce).and_then(|offered| offered.r.get())
    }

    /// Keeps a question until it can be answered. Returns false if `MOST_DEFERRED` questions wait already.
    pub fn defer(&mut self, question: Deferred) -> bool {
        let has_room = self.deferred.len() < MOST_DEFERRED;
        if has_room {
            self.deferred.push(question);
        }
        has_room
    }

    /// Removes and returns the questions about a connection that can be answered now.
    pub fn take_deferred(&mut self, about: Ref) -> Vec<Deferred> {
        self.deferred.extract_if(.., |question| question.r == about).collect()
    }

    /// Drops the questions whose askers have stopped waiting, and checks the orphans that are due.
    pub fn on_timeout(&mut self, now: u64) {
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
    pub fn next_timeout(&self) -> Option<u64> {
        let deferred = self.deferred.iter().map(|question| question.deadline);
        deferred.chain(self.orphans.iter().map(|orphan| orphan.deadline)).min()
    }
}

/// Returns whether a HELLO may still be on its way to an orphan. If it has come, or another host may have sent it, only
/// the scan of TCP shows more: false. If it will not come, ends the attempt: false.
fn may_be_greeted(socket: &'static Socket, nonce: Nonce) -> bool {
    let Some(tuple) = socket::tuple_of(socket) else {
        return false;
    };
    let Some(mut control) = socket.control.lock() else {
        return true;
    };
    let is_offered = |h: &Handshake| h.mine() == nonce && h.phase() == Phase::Offered;
    if !control.handshake.as_ref().is_some_and(is_offered) || connection::has_marker(socket) == Some(true) {
        return false;
    }
    match diag::under_way(&tuple) {
        None => false,
        Some(1..) => true,
        // All bytes that were sent before have arrived.
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
    control.is_some_and(|c| c.handshake.as_ref().is_some_and(|h| h.mine() == nonce))
}

#[cfg(test)]
mod tests {
    use super::super::tests::connected;
    use super::*;

    #[test]
    fn attempts_that_are_over_are_forgotten() {
        let mut handshakes = Handshakes::new();
        let (socket, _stream) = connected();
        let live = Nonce::random().unwrap();
        socket.control.lock().unwrap().handshake = Some(Handshake::acceptor(live, live).0);
        handshakes.enter(live, Ref::new(socket), None);
        for _ in 0..4 * OFFERED_MIN {
            handshakes.enter(Nonce::random().unwrap(), Ref::new(socket), None);
        }
        assert!(handshakes.has(&live));
        assert!(handshakes.offered.len() <= OFFERED_MIN);
    }
}
