//! A question under way: whether the other end of a connection can be promoted.

use std::collections::HashSet;
use std::time::Duration;

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::wire;

use crate::objects::mailbox::Ref;
use crate::objects::socket::Socket;

/// How long an answer may take.
pub const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an answer from another host may take: a busy machine has to open its RDMA device first, and nobody
/// waits.
pub const REMOTE_TIMEOUT: Duration = Duration::from_secs(6);

/// The first pause of a question that is asked again and again, and the longest; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(64);

/// For whom a question is asked.
#[derive(Clone, Copy)]
pub enum Asker {
    /// A connection of this process.
    Here(Ref),
    /// An instance of another host, whose question came in as `conn`.
    Elsewhere {
        /// Over which it came, as a pseudo channel.
        conn: u64,
        /// Which that is.
        instance: InstanceId,
    },
}

/// An ASK under way, to one or more instances.
pub struct Asking {
    pub who: Asker,
    pub nonce: Nonce,
    pub tuple: Tuple,
    /// The other end is on another host: its control port is asked, not the names of this one.
    pub remote: bool,
    /// The channels from which the answer has not come. No other's counts.
    pub asked: HashSet<u64>,
    /// Instances asked so far.
    pub tried: HashSet<InstanceId>,
    /// The service names have been asked, not only links.
    pub named: bool,
    /// Somebody answered, so it is not a peer without the library.
    pub answered: Option<wire::Reason>,
    /// There is a name, but nobody took the question now.
    pub busy: bool,
    /// There is a name of somebody who may not answer.
    pub untrusted: bool,
    /// A YES may have been lost with a link between hosts. Who has said it looks for a HELLO until it hears of us, so
    /// this is asked again until it is answered, or the connection is over (P16).
    pub is_unheard: bool,
    /// How long after a question that was not answered the next one is asked.
    pub pause: Duration,
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
    /// A question that was not asked anybody yet.
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

    /// A question that came from another host.
    pub fn relayed(conn: u64, tuple: Tuple, nonce: Nonce, instance: InstanceId) -> Self {
        Self::new(Asker::Elsewhere { conn, instance }, nonce, tuple, false)
    }

    /// It is asked again in a while.
    pub fn put_off(&mut self, now: u64) {
        let answer_within = if self.remote { REMOTE_TIMEOUT } else { Duration::ZERO };
        self.deadline = now + self.pause.max(answer_within).as_nanos() as u64;
        self.pause = LONGEST_PAUSE.min(self.pause * 2);
    }

    /// Whether an answer is still needed although this one has come. Of a YES that was lost only its sender can know,
    /// to whom the attempt is under way until it knows that the link is down.
    pub fn goes_on_after(&self, answered: Option<wire::Reason>) -> bool {
        use wire::Reason::{Absent, Limit, NotHeld};
        self.is_unheard && matches!(answered, None | Some(NotHeld | Absent | Limit))
    }

    /// Whether others wait until it is over: not for one that is asked again and again.
    pub fn takes_turn(&self) -> bool {
        !self.is_unheard && !self.is_relayed()
    }

    /// Whether it came from another host.
    pub fn is_relayed(&self) -> bool {
        matches!(self.who, Asker::Elsewhere { .. })
    }

    /// The connection of this process that it is about, if it is still the same.
    pub fn socket(&self) -> Option<&'static Socket> {
        match self.who {
            Asker::Here(r) => r.get(),
            Asker::Elsewhere { .. } => None,
        }
    }
}
