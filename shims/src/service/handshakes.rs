//! How the connections of this process are found that others speak of: by their addresses, and by the nonces of
//! handshakes under way. And questions about some that it is too early to answer.

use std::collections::HashMap;

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::rendezvous::diag;
use rdmasock_core::stream::connection;
use rdmasock_core::stream::handshake::{Handshake, Phase, Role};

use crate::objects::mailbox::Ref;
use crate::objects::socket::{self, Socket, Stage};

/// Attempts that are over are looked for from this number on, and whenever it has doubled.
const OFFERED_MIN: usize = 64;
/// How soon the second look at an orphan is, ns, and how long it is between two at most.
const LOOK_FIRST: u64 = 5_000_000;
const LOOK_LAST: u64 = 1_000_000_000;
/// How many such wait at a time; a connection is asked for by one, as a rule.
const MOST_DEFERRED: usize = 4096;

/// An ASK about a connection that this process has accepted and not used yet: it may be about to
/// fork a child that will, and then the child answers.
pub struct Deferred {
    pub r: Ref,
    pub conn: u64,
    pub request: u64,
    pub tuple: Tuple,
    pub nonce_c: Nonce,
    pub instance_c: InstanceId,
    /// The asker no longer waits then, monotonic ns.
    pub deadline: u64,
}

/// A connection that was offered by a YES.
struct Offered {
    r: Ref,
    /// The link between hosts that the YES went over.
    link: Option<u64>,
}

/// An attempt whose asker has closed its channel. HELLO is in TCP by then, or will not come (P16).
struct Orphan {
    nonce: Nonce,
    /// How long it is until the next look, ns.
    every: u64,
    /// When the next look is, monotonic ns.
    deadline: u64,
}

/// See the module.
pub struct Handshakes {
    /// Sockets whose addresses have been looked up.
    tuples: HashMap<Tuple, Ref>,
    /// Handshakes under way, by our nonce.
    offered: HashMap<Nonce, Offered>,
    /// From how many of them on those that are over are looked for.
    bound: usize,
    deferred: Vec<Deferred>,
    orphans: Vec<Orphan>,
}

impl Handshakes {
    /// None.
    pub fn new() -> Self {
        Self {
            tuples: HashMap::new(),
            offered: HashMap::new(),
            bound: OFFERED_MIN,
            deferred: Vec::new(),
            orphans: Vec::new(),
        }
    }

    /// Whether there is memory for one more attempt.
    pub fn has_room(&mut self) -> bool {
        self.offered.try_reserve(1).is_ok()
    }

    /// The accepted socket with these addresses.
    pub fn accepted(&mut self, tuple: &Tuple) -> Option<&'static Socket> {
        if let Some(socket) = self.tuples.get(tuple).and_then(|r| r.get()) {
            return Some(socket);
        }
        // Addresses are looked up only now, so that connections which are never asked for do not pay.
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

    /// Keeps an attempt to be found by its nonce; `link` is the link between hosts that YES goes over. Now and then
    /// those that are over are forgotten.
    pub fn enter(&mut self, nonce: Nonce, r: Ref, link: Option<u64>) {
        if self.offered.len() >= self.bound {
            let is_live = |nonce: &Nonce, offered: &mut Offered| offered.r.get().is_some_and(|s| is_attempt(s, *nonce));
            self.offered.retain(is_live);
            self.bound = OFFERED_MIN.max(2 * self.offered.len());
        }
        self.offered.insert(nonce, Offered { r, link });
    }

    /// The asker has closed its channel: the attempt ends once TCP shows that no HELLO comes.
    pub fn on_asker_gone(&mut self, nonce: Nonce, now: u64) {
        self.orphans.push(Orphan {
            nonce,
            every: LOOK_FIRST,
            deadline: now,
        });
    }

    /// The link between hosts that the YES with this nonce went over.
    pub fn link_of(&self, nonce: &Nonce) -> Option<u64> {
        self.offered.get(nonce)?.link
    }

    /// The connection that made an attempt with this nonce.
    pub fn by_nonce(&self, nonce: &Nonce) -> Option<&'static Socket> {
        self.offered.get(nonce).and_then(|offered| offered.r.get())
    }

    /// Whether there is such an attempt, be its connection another by now.
    pub fn has(&self, nonce: &Nonce) -> bool {
        self.offered.contains_key(nonce)
    }

    /// Nobody speaks of it any more.
    pub fn remove(&mut self, nonce: &Nonce) -> Option<&'static Socket> {
        self.offered.remove(nonce).and_then(|offered| offered.r.get())
    }

    /// The question waits. False if too many do.
    pub fn defer(&mut self, question: Deferred) -> bool {
        let has_room = self.deferred.len() < MOST_DEFERRED;
        if has_room {
            self.deferred.push(question);
        }
        has_room
    }

    /// The questions about a connection, which can be answered now.
    pub fn take_deferred(&mut self, about: Ref) -> Vec<Deferred> {
        self.deferred.extract_if(.., |question| question.r == about).collect()
    }

    /// Drops the questions whose askers do not wait any longer, and looks at the orphans.
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

    /// When that is next, monotonic ns.
    pub fn next_timeout(&self) -> Option<u64> {
        let deferred = self.deferred.iter().map(|question| question.deadline);
        deferred.chain(self.orphans.iter().map(|orphan| orphan.deadline)).min()
    }
}

/// Whether a HELLO may still be on its way to an orphan. If it has come, or another host may have sent it, only TCP
/// tells more; if it will not come the attempt ends here.
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
        // All has come that was sent before.
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

/// Whether the socket is in the attempt that `nonce` was drawn for.
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
