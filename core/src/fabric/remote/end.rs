//! One end of a link between hosts: the calls, and which thread does the work. What the work is, is the
//! engine's business (`engine.rs`, `pump.rs`).
//!
//! # Threads
//! Any thread may make any call. One lock guards the engine; it is held for posting and polling, and for
//! nothing that waits. [`notify`](LinkEnd::notify), [`progress`](End::progress) and [`arm`](End::arm)
//! leave their work to whoever holds it: they say what is to be done (`again`), then try the lock; the holder lets go of the
//! lock, then looks whether something is to be done. Both with a full fence between, so one of the two
//! sees the other. A signal handler that has interrupted the holder leaves its work in the same way.
//! Doorbells are rung, and memory is registered, when the lock has been let go of.

use std::ptr::NonNull;
use std::sync::atomic::{
    AtomicU32,
    Ordering::{Relaxed, SeqCst},
    fence,
};

use super::chunks::{CHUNK_LOG2, Registry};
use super::engine::{After, Engine, Ground};
use super::fault::{Fault, FaultCell};
use super::qp::QueuePair;
use super::stream::Stream;
use crate::fabric::layout::{MAX_STREAMS, Region};
use crate::fabric::numbers::{Done, Numbers, done};
use crate::fabric::ready::{ReadyQueue, RungMark, SleepFlag};
use crate::fabric::ring::{Consumer, Producer, Wake};
use crate::fabric::side::{Side, Sweeps};
use crate::fabric::waiter::{MAX_WAITERS, WaiterId};
use crate::fabric::{LinkEnd, OpenError, Opened, SendError};
use crate::ids::Vqpn;
use crate::lock::{Guard, Lock};
use crate::wire::{MAX_MESSAGE, Message, RingOffer};

/// The attention word by which the engine is told. It names no waiter.
pub const ENGINE: Wake = Wake(1 << 31);

/// Least bytes of a receive buffer that a link can work with: a message of the side channel fits one, with
/// what has to precede it.
pub const MIN_BUFFER: u32 = MAX_MESSAGE as u32 + 200;

/// Least receive buffers: credits are given back by halves.
pub const MIN_BUFFERS: u16 = 4;

/// How the engine reaches those who wait in this process. No call may wait, or call the end.
pub trait Local: Send + Sync {
    /// By which our `waiter` sleeps.
    fn flag(&self, waiter: WaiterId) -> Option<&SleepFlag>;

    /// Wakes whoever sleeps, or will next sleep, on the doorbell of our `waiter`.
    fn ring(&self, waiter: WaiterId);
}

/// What may be set for a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Payloads of up to so many bytes travel in the message, if they fit; longer ones are written into
    /// the peer's ring.
    pub eager_max: u32,
    /// How many bytes of a stream are sent before others get their turn.
    pub piece: u32,
    /// log2 of the bytes that are registered at a time. The same at both ends, so not to be changed but by
    /// tests.
    pub chunk_log2: u8,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            eager_max: 2048,
            piece: 64 * 1024,
            chunk_log2: CHUNK_LOG2,
        }
    }
}

/// The queue pair cannot carry a link: [`MIN_BUFFER`], [`MIN_BUFFERS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("receive buffers too few or too small")]
pub struct Unusable;

/// What an end has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages sent on the queue pair.
    pub sends: u64,
    /// WRITEs posted, those with an immediate included.
    pub writes: u64,
    /// Of these, with an immediate.
    pub immediates: u64,
    /// Messages that gave nothing but credits.
    pub bare_grants: u64,
    /// Payload bytes sent in messages, and by WRITEs.
    pub eager_bytes: u64,
    /// As above.
    pub written_bytes: u64,
    /// Messages received, and WRITEs with an immediate.
    pub received: u64,
    /// Records in them.
    pub records: u64,
    /// How often the send queue was full.
    pub full: u64,
    /// How often no credit was left.
    pub no_credit: u64,
}

/// Send what is there.
const PUMP: u32 = 1;
/// Look at the queue pair first.
const POLL: u32 = 2;

/// One end of a link between hosts.
///
/// # What whoever holds it has to do beside [`LinkEnd`]
/// - [`pair`](LinkEnd::pair) before a cursor of the stream is used; by a thread that is not in a
///   signal handler.
/// - Hand *every* [`Wake`] that a cursor gives to [`notify`](LinkEnd::notify), also that of
///   [`Producer::end`] for FIN. After what gives none but has to be carried over,
///   [`touch`](Self::touch): [`Producer::adopt`], [`Consumer::stop`].
/// - Call [`progress`](Self::progress) while waiting, and when the queue pair's completion fd is readable;
///   before a sleep [`arm`](Self::arm), then look once more.
/// - When waiter 0 is told: [`take_message`](Self::take_message) until there is none, and
///   [`fault`](Self::fault).
/// - While [`owes`](Self::owes), call [`settle`](Self::settle) some ms later.
///
/// # When the link is down
/// Every call stays harmless, cursors too: producers fill their rings and consumers drain theirs.
/// Nothing that comes from the peer is applied any more, so [`received`](Self::received) is final, and
/// what the peer has to send again begins there; this end sends again from what the peer
/// [received](Producer::unread_from).
///
/// # Both end a direction
/// On shm one word decides whether a producer has ended a direction or its consumer has stopped it. Here
/// both can win, each at its own end, with END and STOP crossing on their way. Both marks then stay, and
/// [`has_crossed`](Self::has_crossed) holds at either end as soon as it knows. The producer's end may have gone on
/// with TCP, so what was not read cannot be sent in its place: who gets the DEMOTE-REQUEST with a resumption for
/// a stream that has crossed, or whose producer [is ended](Producer::is_ended), resets the connection.
pub struct End<Q, L> {
    // First: nothing is registered any more when the memory goes away.
    qp: Q,
    mine: Side,
    mirror: Side,
    local: L,
    tuning: Tuning,
    engine: Lock<Engine>,
    /// What is left to whoever holds the lock: `PUMP`, `POLL`.
    again: AtomicU32,
    fault: FaultCell,
    /// Streams, by the peer's number, with something to send.
    dirty: Box<ReadyQueue>,
    /// Streams, by the peer's number, whose peer is to be sent CLOSED.
    closing: Box<ReadyQueue>,
    /// Whom to tell at the peer, by its number.
    tells: Box<[AtomicU32]>,
    /// Messages received and not taken, and 1 for a fault that was not asked for.
    news: AtomicU32,
    /// Streams with a head that was held back.
    owed: AtomicU32,
    marks: Box<[RungMark]>,
    sweeps: Sweeps,
    numbers: Numbers,
    registry: Registry,
}
