//! Fabrics: the ways to move bytes between instances, and the calls that a link on any of them offers
//! ([`LinkEnd`]). Not here: how links are made, sleeping, the meaning of messages, and the purpose of streams.

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

/// Why no stream was opened: limits of this end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// All numbers are in use.
    #[error("too many streams on the link")]
    Streams,
    /// The arena has no room for such a ring.
    #[error("no room in the arena")]
    Arena,
    /// The call comes from a signal handler that has interrupted this thread's use of the end.
    #[error("the end is in use")]
    Busy,
}

/// Why a message was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The side channel has no room now.
    #[error("the side channel is full")]
    Full,
    /// The link is down.
    #[error("the link is down")]
    Down,
    /// The message cannot be encoded: the caller's fault.
    #[error("not a message")]
    Encoding,
}

/// Why this end cannot send to a stream of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NoProducer {
    /// A local stream sends there already, or there is no such number: the peer misbehaves.
    #[error("no such stream, or one that is in use")]
    NoSuch,
    /// The link is over, or this process has no room for its memory.
    #[error("no room for another stream")]
    Limits,
}

/// The receiving end of a new stream.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct Opened {
    /// The number that this end gave the stream.
    pub vqpn: Vqpn,
    /// The first ring, which OPEN names to the peer.
    pub ring: Region,
    /// The cursor.
    pub consumer: Consumer,
}

/// An end of a link. Every call returns at once.
///
/// [`WaiterId`] defines which waiters a cursor's attention words name; they are the same on every fabric.
#[cfg(not(loom))]
pub trait LinkEnd {
    /// Opens a stream: takes a number of this end, with a first ring of `1 << log2` bytes to receive into.
    fn open(&self, log2: u8) -> Result<Opened, OpenError>;

    /// Pairs this end's stream `mine` with the peer's `theirs`, whose first ring is `first`. To be called before the
    /// first use of a cursor that was given out for either.
    fn pair(&self, _mine: Vqpn, _theirs: Vqpn, _first: Region) {}

    /// Returns the producer of the peer's stream `theirs`; `None` if no stream has such a number. The caller ensures
    /// that there is one at a time for each number.
    fn producer(&self, theirs: Vqpn) -> Option<Producer>;

    /// Closes stream `mine` on this end, and sends CLOSED to the peer, whose number is `theirs`. Without `theirs`
    /// nothing is sent, because the peer does not know of `mine`. Once both ends are done, the number and its rings are
    /// free; without a `consumer` the rings are not, because only the consumer knows them.
    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>);

    /// Closes stream `mine` on this end while the peer has not answered its OPEN. The answer frees the number: a
    /// refusal ([`on_closed`](Self::on_closed)), or CLOSED in the end.
    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>);

    /// Records that the peer is done with stream `mine`: CLOSED has come, or the peer has refused the OPEN.
    fn on_closed(&self, mine: Vqpn);

    /// Allocates another ring of `1 << log2` bytes; `None` if there is no room.
    fn allocate(&self, log2: u8) -> Option<Region>;

    /// Allocates a ring of `1 << log2` bytes that may never be used ([`Consumer::offer_reserve`]). It has no memory
    /// yet, but is mapped so that its use cannot fail. `None` if the fabric has no reserves, the addresses cannot be
    /// had, or rings in use need the room.
    fn reserve(&self, _log2: u8) -> Option<Region> {
        None
    }

    /// Lends a buffer of this end to a `producer` of the peer's stream `theirs`, because the peer's ring has no room.
    /// The buffer has up to `1 << log2` bytes, as far as the producer's bound allows. False if the fabric has no
    /// buffers, or one would hold no more than the ring. The caller holds the producer's lock.
    fn lend(&self, _theirs: Vqpn, _producer: &mut Producer, _log2: u8) -> bool {
        false
    }

    /// Takes the buffer back, if the peer has read all bytes. False if it stays. The caller holds the producer's lock.
    fn take_back(&self, _theirs: Vqpn, _producer: &mut Producer) -> bool {
        false
    }

    /// Frees a ring that neither end uses any more.
    fn free(&self, region: Region);

    /// Sends a message on the side channel: delivered once and in order as long as the link is up. After an error the
    /// message is never delivered. A link that goes down meanwhile may have delivered it or not.
    fn send(&self, message: &Message) -> Result<(), SendError>;

    /// Notifies the peer as a cursor's `wake` asks, about its stream `theirs`. For a waiter with a queue: queues the
    /// stream, and rings the waiter's doorbell if it sleeps. For a sleeper: rings its doorbell.
    fn notify(&self, wake: Wake, theirs: Vqpn);

    /// Takes the streams that the peer has queued for this end's `waiter`, each at most once. A hostile peer may name
    /// streams that are not open. One thread at a time calls this for a waiter.
    fn drain_ready(&self, waiter: WaiterId, each: impl FnMut(Vqpn));

    /// Returns when stream `mine` was last queued for reading, by the host's [counter](crate::cycles); 0 if that is not
    /// known. A hint for the order of streams.
    fn queued_at(&self, mine: Vqpn) -> u64;

    /// Returns whether the peer has queued a stream for this end's `waiter`.
    fn has_ready(&self, waiter: WaiterId) -> bool;
}
