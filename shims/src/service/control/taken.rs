//! Questions of other hosts that were accepted, and their rates.

use std::net::{IpAddr, SocketAddr};

use rdmasock_core::ids::Nonce;
use rdmasock_core::os::datagram::Answerer;
use rdmasock_core::rendezvous::control::{DATAGRAM, QueryId, Refused, Stamper};
use rdmasock_core::rendezvous::guard::{Bucket, Limiter, Memory, Rate};
use rdmasock_core::stats::{Event, StatsPage};

/// All datagrams that are read. Beyond this rate the socket is not polled for a while and the kernel drops them.
const ARRIVALS: Rate = Rate {
    per_second: 5_000,
    burst: 1_000,
};
/// Questions without a good stamp, in total and from each address. Their source address may be forged.
const STRANGERS: [Rate; 2] = [
    Rate {
        per_second: 200,
        burst: 400,
    },
    Rate {
        per_second: 20,
        burst: 40,
    },
];
/// Questions with a good stamp, in total and from each address.
const KNOWN: [Rate; 2] = [
    Rate {
        per_second: 2_000,
        burst: 2_000,
    },
    Rate {
        per_second: 200,
        burst: 400,
    },
];
/// The most addresses whose rates are remembered.
const SOURCES: usize = 1024;
/// The most questions that are remembered, for longer than a stamp is good. So a copied question is either noticed or
/// has no good stamp.
const QUERIES: usize = 16_384;
const REMEMBERED: u64 = Stamper::LIFE + 1_000 * MS;
pub const MS: u64 = 1_000_000;

/// The state of the answerer.
pub struct Control {
    pub socket: Option<Answerer>,
    /// Whether a failure to bind has been logged.
    pub told: bool,
    pub bind_again: u64,
    pub stamper: Option<Stamper>,
    pub arrivals: Bucket,
    /// Until when the socket is not polled, monotonic ns; 0 if it is polled.
    pub paused_until: u64,
    pub strangers: Limiter,
    pub known: Limiter,
    pub queries: Memory<QueryId, Query>,
    /// Questions whose YES is to be repeated.
    pub repeating: Vec<QueryId>,
}

/// A question that was accepted.
pub struct Query {
    /// Its pseudo channel.
    pub conn: u64,
    pub from: SocketAddr,
    pub to: IpAddr,
    pub request: u64,
    pub nonce_c: Nonce,
    pub state: State,
}

pub enum State {
    /// The answer is outstanding.
    Asked,
    Answered {
        answer: Box<[u8; DATAGRAM]>,
        repeats: u32,
        again: u64,
    },
    /// The asker has confirmed the answer, or has cancelled.
    Over,
}

impl Control {
    pub fn new(now: u64) -> Self {
        let limiter = |[total, each]: [Rate; 2]| Limiter::new(total, each, SOURCES, now);
        Self {
            socket: None,
            told: false,
            bind_again: 0,
            stamper: Stamper::random().ok(),
            arrivals: Bucket::new(ARRIVALS, now),
            paused_until: 0,
            strangers: limiter(STRANGERS),
            known: limiter(KNOWN),
            queries: Memory::new(QUERIES, REMEMBERED),
            repeating: Vec::new(),
        }
    }

    /// Returns the time of the next repeat, or of the end of a pause, monotonic ns; `None` if there is none.
    pub fn next_timeout(&self) -> Option<u64> {
        let paused = (self.paused_until != 0).then_some(self.paused_until);
        let repeats = self
            .repeating
            .iter()
            .filter_map(|query| match self.queries.get(query)?.state {
                State::Answered { again, .. } => Some(again),
                _ => None,
            });
        repeats.chain(paused).min()
    }
}

/// Counts a refused datagram, by the reason.
pub fn count_refused(stats: &StatsPage, refused: Refused) {
    stats.count(match refused {
        Refused::Length => Event::ControlLength,
        Refused::Version(_) => Event::ControlVersion,
        Refused::Kind => Event::ControlKind,
        Refused::Mac => Event::ControlMac,
    });
}
