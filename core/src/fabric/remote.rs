//! Links between hosts: each end keeps a local copy of the peer's arena (the *mirror*), and an *engine* carries changes
//! over a queue pair. This file has the counters, faults and settings of an end, and the trait by which an end wakes
//! the waiters of its process.
//!
//! The bytes of a large send can bypass the rings, over a second queue pair, the *bulk queue pair*. An *advert*
//! announces a buffer with which a receiving program waits. The sender's device writes into the buffer, and the record
//! PLACED says up to which position. A *loan* is memory of a sending program, announced by the record SOURCE. The
//! reader's device reads the memory, and the record TAKEN ends the loan.
//!
//! | file | what it has |
//! |---|---|
//! | `qp.rs` | the queue pair that an end uses |
//! | `record.rs` | the wire: messages of records |
//! | `end.rs` | an end of a link, its calls and its threads |
//! | `shared.rs` | the parts of an end that are used without the lock; registered memory |
//! | `engine.rs` | the engine's state, the effects of the end's calls on it, and its turn |
//! | `receive.rs` | the effects of the peer's records |
//! | `pump.rs` | the choice and the order of sends |
//! | `sender.rs` | the message being collected; the peer's receive buffers |
//! | `stream.rs` | the two directions of one stream |
//! | `lend.rs` | send buffers, for bytes for which the peer's ring has no room |
//! | `put.rs` | WRITEs straight into the memory of programs |
//! | `get.rs` | READs from the memory of a sending program |
//! | `bulk.rs` | the queue pair for `put.rs` and `get.rs`, and the end's calls for them |
//! | `watch.rs` | whether the peer's device still answers |
//! | `mem.rs` | a queue pair in memory, for tests |
//!
//! Each end has, for a link, two arenas in its own memory (`layout.rs`): `mine`, where its consumers read, and the
//! `mirror` of the peer's, where its producers write. Producer and consumer are the same types as on shm. For each of
//! them the engine stands in for the cursor at the other end. The engine keeps two wake-up words set to [`ENGINE`]:
//! `want_data` of every block of the mirror, and `want_space` of every block of `mine`. So a cursor that publishes a
//! change gets that word. The cursor's caller passes the word to [`LinkEnd::notify`](crate::fabric::LinkEnd::notify),
//! and the engine carries the change over. The engine writes changes from the peer into the blocks as the peer would on
//! shm. Then it wakes the waiters of this process that the block's wake-up word names.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::codes::codes;
pub use crate::fabric::remote::end::End;
pub use crate::fabric::remote::put::{Buffer, Landed};
use crate::fabric::remote::qp::{Down, Limits};
use crate::fabric::remote::record::{DATA_BYTES, HEADER_BYTES};
use crate::fabric::remote::shared::CHUNK_LOG2;
use crate::fabric::remote::watch::SILENCE;
use crate::fabric::ring::Wake;
use crate::fabric::waiter::WaiterId;
use crate::sync::{AtomicBool, SleepFlag};

mod bulk;
mod end;
mod engine;
mod get;
mod lend;
#[cfg(any(test, feature = "mem"))]
pub mod mem;
mod pump;
mod put;
pub mod qp;
mod receive;
pub mod record;
mod sender;
mod shared;
mod stream;
#[cfg(test)]
mod tests;
mod watch;

/// The counts since the end was made, for tests and measurements. Programs see the counters of `stats/`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages sent on the queue pair.
    pub sends: u64,
    /// WRITEs posted, those with an immediate included.
    pub writes: u64,
    /// WRITEs with an immediate posted.
    pub immediates: u64,
    /// Payload bytes sent in messages.
    pub eager_bytes: u64,
    /// Messages received, plus WRITEs with an immediate received.
    pub received: u64,
    /// Polls of the queue pair, including those that a thread left to the thread that had the engine's lock.
    pub looks: u64,
    /// Polls that have found a completion.
    pub finds: u64,
    /// Posts that found the send queue full.
    pub full: u64,
    /// Probes sent to the peer's device.
    pub probes: u64,
    /// Calls that asked for a probe although no work request was posted (`End::doubt`).
    pub doubts: u64,
    /// Bulk queue pairs that were given up.
    pub lost: u64,
}

codes! {
    /// A violation of the protocol, which no correct peer commits (ARCHITECTURE, I7).
    pub enum Breach: u32 {
        /// A message that cannot be read ([`Malformed`](record::Malformed)).
        Malformed = 1 => "malformed message",
        /// A record about a stream that is not open, or that the peer has closed.
        Stream = 2 => "a record about no stream",
        /// More credits than there are receive buffers.
        Grant = 3 => "too many receive buffers granted",
        /// A tail that goes back, or is beyond the window, or does not fit its payload.
        Tail = 4 => "bad tail",
        /// A switch to a ring that was not on offer, or at another position than the tail.
        Switch = 5 => "bad ring switch",
        /// An unknown end mark, one that is not at the tail or comes twice, or a record after the end.
        End = 6 => "bad end mark",
        /// A head that goes back or is beyond the tail.
        Head = 7 => "bad head",
        /// An offer while another is pending, or of a wrong generation, or outside the arena.
        Offer = 8 => "bad ring offer",
        /// A registered chunk outside the arena, or one that was announced before.
        Chunk = 9 => "bad chunk",
        /// A message of the side channel that cannot be read, or that must not come by it.
        Message = 10 => "bad side-channel message",
        /// More messages of the side channel, not taken yet, than a correct peer ever sends.
        Flood = 11 => "too many messages",
        /// A confirmation of bytes that were not sent.
        Ack = 12 => "bad confirmation",
        /// An immediate on a link that has none.
        Immediate = 13 => "unexpected immediate",
        /// An advert without memory, or one that comes while another is in use. Also a PLACED with bytes beyond its
        /// advert, or a record that belongs on the other queue pair.
        Advert = 14 => "bad advert",
        /// A loan without memory or at a wrong position, or a record that may not come during a loan. Also a TAKEN
        /// without a loan, or for bytes beyond the loan.
        Loan = 15 => "bad loan",
    }
}

/// Why a link is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The queue pair failed, or the peer is gone. Bytes that were not received can be sent again over TCP.
    #[error("{0}")]
    Down(#[from] Down),
    /// The peer broke the protocol. The content of the rings cannot be trusted.
    #[error("peer violation: {0}")]
    Violation(#[from] Breach),
    /// The peer's device has not answered for 5 s (`SILENCE`). Bytes that were not received can be sent again over TCP.
    #[error("no answer from the peer's device for {} s", SILENCE / 1_000_000_000)]
    Silent,
    /// This end took the link down ([`End::set_down`](End::set_down)).
    #[error("taken down")]
    Closed,
}

impl std::error::Error for Breach {}

/// The first fault of a link. Any thread may read it, and so may signal handlers.
#[derive(Debug, Default)]
struct FaultCell(AtomicU64);

impl FaultCell {
    pub(crate) fn get(&self) -> Option<Fault> {
        let word = self.0.load(Acquire);
        let value = word as u32;
        match word >> 32 {
            0 => None,
            1 => Some(Fault::Down(Down(value as i32))),
            2 => Breach::from_code(value).map(Fault::Violation),
            4 => Some(Fault::Silent),
            _ => Some(Fault::Closed),
        }
    }

    /// Clears the fault, for another link.
    pub(crate) fn clear(&self) {
        self.0.store(0, Release);
    }

    /// Stores the fault unless there is one. Returns true if it is the first.
    pub(crate) fn set(&self, fault: Fault) -> bool {
        let word = match fault {
            Fault::Down(Down(errno)) => 1 << 32 | u64::from(errno as u32),
            Fault::Violation(breach) => 2 << 32 | u64::from(breach as u32),
            Fault::Closed => 3 << 32,
            Fault::Silent => 4 << 32,
        };
        self.0.compare_exchange(0, word, Release, Acquire).is_ok()
    }
}

/// The fewest bytes of a receive buffer with which a link can work. One message of the side channel fits such a buffer,
/// together with the records that have to precede it.
pub const MIN_BUFFER: u32 = 1242;

/// The fewest receive buffers with which a link can work: half of them are granted back at a time, and one credit is
/// kept for that grant.
pub const MIN_BUFFERS: u16 = 4;

/// The settings of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Payloads of up to this many bytes travel in the message, if they fit. Longer payloads are written into the
    /// peer's ring.
    pub eager_max: u32,
    /// The most bytes that one stream sends before other streams get their turn.
    pub piece: u32,
    /// log2 of the bytes that are registered at a time. Both ends need the same value, so only tests change it.
    pub chunk_log2: u8,
    /// Bytes at the end of the mirror's data area, whole pages, that are not a copy of the peer's arena. They are room
    /// for send buffers ([`LinkEnd::lend`](crate::fabric::LinkEnd::lend)).
    pub buffers: u64,
    /// The fewest bytes that are written straight into the buffer with which the peer's program waits.
    pub direct_min: u32,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            eager_max: 2048,
            piece: 64 * 1024,
            chunk_log2: CHUNK_LOG2,
            buffers: 0,
            direct_min: 64 * 1024,
        }
    }
}

impl Tuning {
    /// Returns the settings for a queue pair with these limits. If a WRITE cannot have an immediate, a message has to
    /// follow each WRITE. Then a payload that fits a message goes in the message, since a copy costs less than another
    /// work request. If a WRITE can have an immediate, one WRITE does the work of a message and saves the copy.
    pub fn fit(limits: &Limits) -> Self {
        let mut tuning = Self::default();
        if !limits.immediate {
            let headers = (HEADER_BYTES + DATA_BYTES) as u32;
            tuning.eager_max = limits.buffer_bytes.saturating_sub(headers);
        }
        tuning
    }
}

/// Error: the queue pair cannot carry a link, because of [`MIN_BUFFER`] or [`MIN_BUFFERS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("receive buffers too few or too small")]
pub struct Unusable;

/// The wake-up word by which a cursor notifies the engine. It names no waiter.
pub const ENGINE: Wake = Wake(1 << 31);

/// The service thread's waiter.
const SERVICE: WaiterId = WaiterId(0);

/// The functions by which the engine reaches the waiters of this process. No function may wait, or call the end.
pub trait Local: Send + Sync {
    /// Returns the sleep flag of this process's `waiter`.
    fn flag(&self, waiter: WaiterId) -> Option<&SleepFlag>;

    /// Wakes the thread that sleeps on the doorbell of this process's `waiter`, or the next thread that is about to.
    fn ring(&self, waiter: WaiterId);

    /// Reports that a stream was put into the ready queue of `waiter`. The waiter is rung afterwards if it sleeps.
    fn on_queued(&self, _waiter: WaiterId) {}

    /// Returns the word that records whether the queue pair [is armed](End::is_armed). Each end has a word of its own.
    /// A process with many links reads all these words often, so they should lie side by side in memory.
    fn armed(&self) -> &AtomicBool;

    /// Asks for a call of [`End::settle`](End::settle) some ms later.
    fn settle_later(&self);

    /// Reports how many bytes the peer's device has just read from the memory of this end's program.
    fn on_lent(&self, _bytes: u64) {}

    /// Reports how many bytes this end's device has just read from the memory of the peer's program.
    fn on_taken(&self, _bytes: u64) {}
}
