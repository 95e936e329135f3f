//! A question under way: whether the other end of a connection can be promoted.

use std::collections::HashSet;
use std::time::Duration;

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::wire;

use crate::objects::mailbox::Ref;
use crate::objects::socket::Socket;

/// How long an answer within the host may take.
pub const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an answer from another host may take. A busy machine may have to open its RDMA device first; no call of the
/// program waits meanwhile.
pub const REMOTE_TIMEOUT: Duration = Duration::from_secs(6);

/// The first and the longest pause of a question that is asked again and again. Each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(64);

/// The asker of a question.
#[derive(Clone, Copy)]
pub enum Asker {
    /// A connection of this process.
    Here(Ref),
    /// An instance of another host, whose question came in as `conn`.
    Elsewhere {
        /// The pseudo channel that the question came over.
        conn: u64,
        /// The asking instance.
        instance: InstanceId,
    },
}

/// An ASK under way, to one or more instances.
pub struct Asking {
    pub who: Asker,
    pub nonce: Nonce,
    pub tuple: Tuple,
    /// The other end is on another host: its control port is asked, not the names of this host.
    pub remote: bool,
    /// The channels whose answer has not come yet. An answer on any other channel does not count.
    pub asked: HashSet<u64>,
    /// Instances asked so far.
    pub tried: HashSet<InstanceId>,
    /// The service names have been asked, not only links.
    pub named: bool,
    /// The reason of a NO, a REDIRECT or a closed channel; `None` if none has come. With any reason but `Absent` the
    /// peer has the library.
    pub answered: Option<wire::Reason>,
    /// A service name exists, but its instance could not take the question now.
    pub busy: bool,
    /// A service name exists, but its user may not answer for this connection.
    pub untrusted: bool,
    /// A YES may have been lost with a link between hosts. Its sender scans for HELLO until this end answers. So the
    /// question is asked until it is answered, or the connection is over (P16).
    pub is_unheard: bool,
    /// The pause after an unanswered question before the next one is asked.
    pub pause: Duration,
    /// When the wait for an answer ends, monotonic ns.
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

    /// Adds another channel that the question is out on.
    pub fn also_for_test(&mut self, conn: u64) {
        self.asked.insert(conn);
    }
}

impl Asking {
    /// Returns a question that has not been sent yet.
    pub fn new(who: Asker, nonce: Nonce, tuple: Tuple, remote: bool) -> Self {
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
            is_unheard: false,
            pause: FIRST_PAUSE,
            deadline: crate::sys::time::now_ns() + if remote { REMOTE_TIMEOUT } else { ASK_TIMEOUT }.as_nanos() as u64,
        }
    }

    /// Returns a question that came from another host over the pseudo channel `conn`.
    pub fn relayed(conn: u64, tuple: Tuple, nonce: Nonce, instance: InstanceId) -> Self {
        Self::new(Asker::Elsewhere { conn, instance }, nonce, tuple, false)
    }

    /// Has the question asked again after `pause`, between hosts not before `REMOTE_TIMEOUT`, and doubles the pause.
    pub fn put_off(&mut self, now: u64) {
        let answer_within = if self.remote { REMOTE_TIMEOUT } else { Duration::ZERO };
        self.deadline = now + self.pause.max(answer_within).as_nanos() as u64;
        self.pause = LONGEST_PAUSE.min(self.pause * 2);
    }

    /// Returns whether an answer is still needed although this one has come. Only the sender of a lost YES knows of it,
    /// and its attempt goes on until it knows that the link is down.
    pub fn goes_on_after(&self, answered: Option<wire::Reason>) -> bool {
        use wire::Reason::{Absent, Limit, NotHeld};
        self.is_unheard && matches!(answered, None | Some(NotHeld | Absent | Limit))
    }

    /// Returns whether other questions wait for this one. False if it is relayed, or asked again and again.
    pub fn takes_turn(&self) -> bool {
        !self.is_unheard && !self.is_relayed()
    }

    /// Returns whether the question came from another host.
    pub fn is_relayed(&self) -> bool {
        matches!(self.who, Asker::Elsewhere { .. })
    }

    /// Returns the connection of this process that the question is about. `None` if the question came from another
    /// host, or the connection has ended.
    pub fn socket(&self) -> Option<&'static Socket> {
        match self.who {
            Asker::Here(r) => r.get(),
            Asker::Elsewhere { .. } => None,
        }
    }
}
