//! What the stream layer needs of one end of a link, whatever fabric it is on.
//!
//! Not here: making a link, sleeping, and what the messages mean.

use super::layout::Region;
use super::ring::{Consumer, Producer, Wake};
use super::waiter::WaiterId;
use crate::ids::Vqpn;
use crate::wire::{Message, RingOffer};

/// Why no stream was opened: our own limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// All numbers are in use.
    #[error("too many streams on the link")]
    Streams,
    /// The arena has no room for such a ring.
    #[error("no room in the arena")]
    Arena,
    /// We are in a signal handler that has interrupted this thread's use of the end.
    #[error("the end is in use")]
    Busy,
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

/// Why nothing of ours can send to a stream of the peer's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NoProducer {
    /// A stream of ours sends there already, or there is no such number: the peer misbehaves.
    #[error("no such stream, or one that is in use")]
    NoSuch,
    /// The link is over, or its memory has no room here.
    #[error("no room for another stream")]
    Limits,
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
///
/// Whom a cursor's attention words name is said by [`WaiterId`]; they are the same on every fabric.
pub trait LinkEnd {
    /// A number of ours for a stream, with a first ring of `1 << log2` bytes to receive into.
    fn open(&self, log2: u8) -> Result<Opened, OpenError>;

    /// Our stream `mine` is the peer's `theirs`, which has this ring to begin with. Before the first use of a cursor
    /// that was given out for either.
    fn pair(&self, mine: Vqpn, theirs: Vqpn, first: RingOffer) {
        let _ = (mine, theirs, first);
    }

    /// The sending end of the peer's stream `theirs`; `None` if no stream has such a number. The
    /// caller sees to it that there is one at a time for each number.
    fn producer(&self, theirs: Vqpn) -> Option<Producer>;

    /// This end is done with its stream `mine`, and says so to the peer, whose number is `theirs`.
    /// Without one the peer does not know of `mine` either. Once both ends are done the number
    /// and its rings are free; without a `consumer` the rings are not, for nobody knows them.
    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>);

    /// This end is done with its stream `mine`, but the peer has not answered its OPEN: what does
    /// ([`on_closed`](Self::on_closed) after a refusal, or CLOSED in the end) frees the number.
    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>);

    /// The peer is done with our stream `mine` (CLOSED has come, or its OPEN was refused).
    fn on_closed(&self, mine: Vqpn);

    /// Room for another ring of `1 << log2` bytes.
    fn allocate(&self, log2: u8) -> Option<Region>;

    /// A ring of `1 << log2` bytes that may never be used, without memory ([`Consumer::offer_reserve`]), mapped so that
    /// its use cannot fail. `None` where the fabric has no such, where that cannot be had, or where rings in use need
    /// the room.
    fn reserve(&self, log2: u8) -> Option<Region> {
        let _ = log2;
        None
    }

    /// The peer's ring has no room, and this end can keep what is sent: `producer`, of the peer's stream `theirs`, gets
    /// a buffer of this end's own in its place, of up to `1 << log2` bytes, as far as its bound goes. False where the
    /// fabric has none, or that would not be more. The caller holds the producer's lock.
    fn lend(&self, theirs: Vqpn, producer: &mut Producer, log2: u8) -> bool {
        let _ = (theirs, producer, log2);
        false
    }

    /// Takes the buffer back, if all has been read. The caller holds the producer's lock.
    fn take_back(&self, theirs: Vqpn, producer: &mut Producer) -> bool {
        let _ = (theirs, producer);
        false
    }

    /// A ring that neither end uses any more.
    fn free(&self, region: Region);

    /// Sends a message on the side channel: delivered once and in order as long as the link is up. An error says that
    /// it never is; a link that goes down meanwhile may have delivered it or not.
    fn send(&self, message: &Message) -> Result<(), SendError>;

    /// Tells the peer what a cursor's `wake` asks for, about its stream `theirs`: queues it for the
    /// waiter that has a queue, and rings its doorbell if that sleeps; rings at the sleeper.
    fn notify(&self, wake: Wake, theirs: Vqpn);

    /// Takes what the peer has queued for our `waiter`: each stream at most once. A hostile peer
    /// may name streams that are not open.
    fn drain_ready(&self, waiter: WaiterId, each: impl FnMut(Vqpn));

    /// When our stream `mine` was last queued because there is something to be read, by the host's
    /// [counter](crate::cycles); 0 where that is not known. A hint for the order of streams.
    fn queued_at(&self, mine: Vqpn) -> u64;

    /// Whether the peer has queued something for our `waiter`.
    fn has_ready(&self, waiter: WaiterId) -> bool;
}
