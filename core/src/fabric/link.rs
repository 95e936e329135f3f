//! What the stream layer needs of one end of a link, whatever fabric it is on.
//!
//! Not here: making a link, sleeping, and what the messages mean.

use super::layout::Region;
use super::ring::{Consumer, Producer, Wake};
use crate::ids::Vqpn;
use crate::wire::{Message, RingOffer};

/// What a fabric can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Streams of one link.
    pub max_streams: u32,
    /// Ready queues of one end, and so waiters that `notify` can tell apart.
    pub ready_queues: u32,
    /// Bytes in which arenas are carved; the smallest ring.
    pub min_ring: usize,
    /// Largest ring, in bytes.
    pub max_ring: usize,
}

/// Why no stream was opened: our own limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// All numbers are in use.
    #[error("too many streams on the link")]
    Streams,
    /// The arena has no room for such a ring.
    #[error("no room in the arena")]
    Arena,
}

/// Why a message was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The side channel takes nothing now.
    #[error("the side channel is full")]
    Full,
    /// The link is down.
    #[error("the link is down")]
    Down,
    /// It cannot be encoded: the caller's fault.
    #[error("not a message")]
    Encoding,
}

/// Our receiving end of a new stream.
#[derive(Debug)]
pub struct Opened {
    /// Our number for it.
    pub vqpn: Vqpn,
    /// Its first ring, to be told to the peer in OPEN.
    pub ring: RingOffer,
    /// The cursor.
    pub consumer: Consumer,
}

/// One end of a link. Every call returns at once.
pub trait LinkEnd {
    /// What the fabric can do.
    fn capabilities(&self) -> Capabilities;

    /// A number of ours for a stream, with a first ring of `1 << log2` bytes to receive into.
    fn open(&self, log2: u8) -> Result<Opened, OpenError>;

    /// The sending end of the peer's stream `theirs`; `None` if no stream has such a number. The
    /// handshake sees to it that each number is asked for once.
    fn producer(&self, theirs: Vqpn) -> Option<Producer>;

    /// This end is done with its stream `mine`, and says so to the peer, whose number is `theirs`.
    /// Without one the peer does not know of `mine` either. Once both ends are done the number
    /// and its rings are free.
    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Consumer);

    /// This end is done with its stream `mine`, but the peer has not answered its OPEN: what does
    /// ([`on_closed`](Self::on_closed) after a refusal, or CLOSED in the end) frees the number.
    fn close_unanswered(&self, mine: Vqpn, consumer: Consumer);

    /// The peer is done with our stream `mine` (CLOSED has come, or its OPEN was refused).
    fn on_closed(&self, mine: Vqpn);

    /// Room for another ring of `1 << log2` bytes.
    fn allocate(&self, log2: u8) -> Option<Region>;

    /// A ring that neither end uses any more.
    fn free(&self, region: Region);

    /// Sends a message on the side channel: delivered once and in order as long as the link is up.
    fn send(&self, message: &Message) -> Result<(), SendError>;

    /// The attention word with which to arm a cursor of this end, so that the other end's
    /// [`notify`](Self::notify) tells this end's `waiter`; 0 if there is no such waiter.
    fn attention(&self, waiter: u32) -> u32;

    /// Tells the peer what a cursor's `wake` asks for, about its stream `theirs`: queues it for the
    /// waiter, and rings its doorbell if that sleeps.
    fn notify(&self, wake: Wake, theirs: Vqpn);

    /// Takes what the peer has queued for our `waiter`: each stream at most once.
    fn drain_ready(&self, waiter: u32, each: &mut dyn FnMut(Vqpn));

    /// Whether the peer has queued something for our `waiter`.
    fn has_ready(&self, waiter: u32) -> bool;
}
