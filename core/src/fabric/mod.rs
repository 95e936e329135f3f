//! Fabrics: the ways to move bytes between instances, and the calls that a link on any of them offers ([`LinkEnd`]).
//! This module does not make links, put threads to sleep, or interpret messages, and it does not know what streams are
//! for.

#[cfg(not(loom))]
use crate::fabric::layout::Region;
#[cfg(not(loom))]
use crate::fabric::ring::{Consumer, Producer, Wake};
#[cfg(not(loom))]
use crate::fabric::waiter::WaiterId;
#[cfg(not(loom))]
use crate::ids::Vqpn;
#[cfg(not(loom))]
use crate::wire::Message;

pub mod arena;
pub mod layout;
#[cfg(all(not(loom), any(test, feature = "mem")))]
pub mod mem;
#[cfg(not(loom))]
pub mod plugin;
pub mod ready;
#[cfg(not(loom))]
pub mod remote;
pub mod ring;
#[cfg(not(loom))]
pub mod shm;
#[cfg(not(loom))]
mod side;
pub mod waiter;

/// Why no stream was opened: each value is a limit of this end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// All vQPNs of this end are in use.
    #[error("too many streams on the link")]
    Streams,
    /// The arena has no room for a ring of the size asked for.
    #[error("no room in the arena")]
    Arena,
    /// The call comes from a signal handler, which has interrupted this thread in another call on this end.
    #[error("the end is in use")]
    Busy,
}

/// Why a message was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The side channel has no room at this moment.
    #[error("the side channel is full")]
    Full,
    /// The link is down.
    #[error("the link is down")]
    Down,
    /// The message cannot be encoded, which is the caller's fault.
    #[error("not a message")]
    Encoding,
}

/// Why this end cannot send to a stream of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NoProducer {
    /// The peer has named a number to which a local stream sends already, or which does not exist. Either way the peer
    /// misbehaves.
    #[error("no such stream, or one that is in use")]
    NoSuch,
    /// The link has ended, or this process has no room to map the stream's memory.
    #[error("no room for another stream")]
    Limits,
}

/// The receiving end of a stream that was just opened.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct Opened {
    /// The number that this end gave the stream.
    pub vqpn: Vqpn,
    /// The first ring, which OPEN names to the peer.
    pub ring: Region,
    /// The cursor that reads from the stream.
    pub consumer: Consumer,
}

/// An end of a link. Every call returns at once.
///
/// [`WaiterId`] defines which waiters a wake-up word names. The encoding is the same on every fabric.
#[cfg(not(loom))]
pub trait LinkEnd {
    /// Opens a stream: takes a free number of this end, and a first ring of `1 << log2` bytes to receive into.
    fn open(&self, log2: u8) -> Result<Opened, OpenError>;

    /// Pairs this end's stream `mine` with the peer's stream `theirs`, whose first ring is `first`. Called before this
    /// end's consumer of `mine`, or its producer of the peer's stream, is first used.
    fn pair(&self, _mine: Vqpn, _theirs: Vqpn, _first: Region) {}

    /// Returns the producer of the peer's stream `theirs`; `None` if no stream has such a number. The caller ensures
    /// that each number has at most one producer at a time.
    fn producer(&self, theirs: Vqpn) -> Option<Producer>;

    /// Closes stream `mine` on this end, and sends CLOSED to the peer, whose number for the connection is `theirs`.
    /// Without `theirs` nothing is sent, because the peer does not know of `mine`. Once both ends have closed the
    /// stream, its number and its rings are free. Without a `consumer` the rings are not freed, because only the
    /// consumer knows them.
    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>);

    /// Closes stream `mine` on this end while the peer has not answered its OPEN. The peer's answer frees the number: a
    /// refusal ([`on_closed`](Self::on_closed)), or else the CLOSED that follows an acceptance.
    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>);

    /// Records that the peer has closed stream `mine`: its CLOSED has come, or it has refused the OPEN.
    fn on_closed(&self, mine: Vqpn);

    /// Allocates another ring of `1 << log2` bytes; `None` if there is no room.
    fn allocate(&self, log2: u8) -> Option<Region>;

    /// Allocates a reserve: a ring of `1 << log2` bytes that is perhaps never used ([`Consumer::offer_reserve`]). The
    /// ring has no memory yet: the producer gets the memory when it writes there. The ring's addresses are taken now,
    /// so that this end cannot fail to map the ring later. `None` if the fabric has no reserves, if there are no
    /// addresses for the ring, or if rings in use need the room.
    fn reserve(&self, _log2: u8) -> Option<Region> {
        None
    }

    /// Lends a buffer of this end to the `producer` of the peer's stream `theirs`, because the peer's ring has no room.
    /// The buffer has up to `1 << log2` bytes, as far as the producer's bound allows. Returns false if the fabric has
    /// no buffers, or if the buffer would hold no more than the ring. The caller holds the lock of the producer's
    /// direction.
    fn lend(&self, _theirs: Vqpn, _producer: &mut Producer, _log2: u8) -> bool {
        false
    }

    /// Takes back the buffer that `lend` has lent to the `producer`, if the peer has read all bytes. Returns false if
    /// the producer keeps the buffer. The caller holds the lock of the producer's direction.
    fn take_back(&self, _theirs: Vqpn, _producer: &mut Producer) -> bool {
        false
    }

    /// Frees a ring that neither end uses any more.
    fn free(&self, region: Region);

    /// Sends a message on the side channel: delivered once and in order as long as the link is up. After an error the
    /// message is never delivered. If the link goes down during the call, the message may have been delivered or not.
    fn send(&self, message: &Message) -> Result<(), SendError>;

    /// Notifies the peer's waiters of an event of the peer's stream `theirs`. `wake` names these waiters: it is the
    /// value of a wake-up word, which a cursor has taken. `wake` may name a waiter with a ready queue: the stream is
    /// put into that queue, and the waiter is woken if its sleep flag is raised. `wake` may also name a sleeper, which
    /// is woken without an entry in a queue.
    fn notify(&self, wake: Wake, theirs: Vqpn);

    /// Removes the streams that the peer has queued for this end's `waiter`, and calls `each` at most once for each. A
    /// hostile peer may name streams that are not open. Only one thread at a time may call this for a waiter.
    fn drain_ready(&self, waiter: WaiterId, each: impl FnMut(Vqpn));

    /// Returns when the peer last queued stream `mine` for reading, in ticks of the host's [counter](crate::cycles); 0
    /// if that is not known. The value is a hint for the order of streams.
    fn queued_at(&self, mine: Vqpn) -> u64;

    /// Returns whether the peer has queued a stream for this end's `waiter`.
    fn has_ready(&self, waiter: WaiterId) -> bool;
}
