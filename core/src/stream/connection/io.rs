//! The interface of a connection to the world: the kernel's socket that it belongs to, links, and the process around
//! it.

use std::net::IpAddr;
use std::ops::Deref;

use crate::fabric::ring::{Consumer, Producer, Wake};
use crate::fabric::{NoProducer, Opened, SendError};
use crate::ids::{InstanceId, Vqpn};
use crate::region::Region;
use crate::stats::{Reason, Why};
use crate::stream::connection::{Connection, Control, Rx, Tx};
use crate::wire::{LinkOffer, Message};

/// A task for the service thread, to be done as soon as it can. The state may have changed by then, so the service
/// thread checks it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// Wake the threads that wait on the socket.
    Notify,
    /// Send marker bytes that TCP has not taken.
    Flush,
    /// Look for the marker behind unread data in TCP that the sending direction waits for.
    ReadAhead,
    /// A direction has changed: complete a close or a way back, or else arm the socket for what its directions run on
    /// now.
    Settle,
    /// A direction is back on TCP: check whether that completes a way back.
    Drained,
}

/// The front of TCP's receive buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peeked {
    /// This number of bytes.
    Bytes(usize),
    /// TCP has no bytes now.
    Nothing,
    /// The end, or an error.
    Ended,
    /// TCP has no bytes, and the program has shut its receiving direction. To the program this is the end,
    /// but markers may come.
    Shut,
}

/// Why TCP has taken no byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unsent {
    /// There is no room now.
    Full,
    /// The connection has ended with this error (errno). This send has taken it from the socket, so no other call will
    /// see it.
    Failed(i32),
    /// The connection has ended.
    Dead,
}

/// Bytes that were seen in TCP are not there any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the bytes are not in TCP any more")]
pub struct Gone;

/// A link, as its streams see it. Every call returns at once.
pub trait StreamLink: Clone + PartialEq {
    /// Returns the instance at the link's other end.
    fn peer(&self) -> InstanceId;
    /// Returns whether the link works, as far as is known.
    fn is_alive(&self) -> bool;
    /// Returns whether the link leads to another host.
    fn is_remote(&self) -> bool;
    /// Opens a stream for the connection of the socket with this [slot](SocketIo::slot). Returns its number and a first
    /// ring to receive into.
    fn open(&self, slot: u32) -> Result<Opened, Reason>;
    /// Pairs this end's stream `mine` with the peer's stream `theirs`, whose first ring is `first`.
    fn pair(&self, mine: Vqpn, theirs: Vqpn, first: Region);
    /// Returns the producer that sends to the peer's stream `theirs`.
    fn producer(&self, theirs: Vqpn) -> Result<Producer, NoProducer>;
    /// Notes that no producer of this end sends to the peer's stream `theirs` any more.
    fn done_with(&self, theirs: Vqpn);
    /// Gives this end's number `mine` back. `theirs` is the peer's number, `None` if the peer does not know of `mine`.
    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>);
    /// Gives this end's number `mine` back although its OPEN is not answered: the peer may be about to use the number.
    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>);
    /// Sends a message on the side channel.
    fn send(&self, message: &Message) -> Result<(), SendError>;
    /// Sends a message with a file that holds `bytes`. The error is `Full` if the file cannot be made.
    fn send_with(&self, message: &Message, bytes: &[u8]) -> Result<(), SendError>;
    /// Notifies a waiter about the peer's stream `theirs`. `wake`, which a cursor has returned, names the waiter.
    /// Preserves errno.
    fn notify(&self, wake: Wake, theirs: Vqpn);
    /// Processes the completions of a link between hosts. Within a host what has come is in the ring already.
    fn take_in(&self);
    /// Notes that the peer has left a link between hosts unasked, so the peer's end of the link may have failed.
    fn doubt(&self);
}

/// The kernel's socket of a connection, by the fd that it had when this was made.
pub trait Tcp {
    /// Returns whether the socket has an error that no call has returned yet, or was reset.
    fn has_failed(&self) -> bool;
    /// Sends bytes on TCP. Returns how many TCP has taken, at least one.
    fn send(&self, bytes: &[u8]) -> Result<usize, Unsent>;
    /// Returns how many bytes TCP was given so far. `None` if the kernel does not say.
    fn written(&self) -> Option<u64>;
    /// Makes TCP send what it has taken at once.
    fn push(&self);
    /// Copies what is at the front of TCP into `buf`, without taking it. Takes no error from the socket either, which
    /// other calls are to return.
    fn peek(&self, buf: &mut [u8]) -> Peeked;
    /// Copies all that TCP has into `buf`, as far as there is room, even if the connection has ended. Returns the
    /// number of bytes.
    fn peek_all(&self, buf: &mut [u8]) -> usize;
    /// Returns the number of bytes that TCP has for the reader.
    fn unread(&self) -> usize;
    /// Takes `len` bytes that were peeked out of TCP.
    fn take(&self, len: usize) -> Result<(), Gone>;
    /// Takes bytes from the front of TCP, but none while urgent data is next.
    fn receive(&self, buf: &mut [u8]) -> Peeked;
    /// Returns whether urgent data is next.
    fn is_at_mark(&self) -> bool;
    /// Returns whether the peer has ended its direction, or the connection has ended: no marker can come any more.
    fn has_peer_ended(&self) -> bool;
    /// Ends the sending direction.
    fn end(&self);
    /// Ends the receiving direction, as shutdown(SHUT_RD) does.
    fn end_receiving(&self);
}

/// The socket that a [`Connection`] belongs to, and which contains it.
pub trait SocketIo: Deref<Target = ConnectionOf<Self>> + Sized {
    /// The type of its links.
    type Link: StreamLink;
    /// The type of the kernel's socket.
    type Tcp: Tcp;
    /// The socket's own state under the lock of the sending direction.
    type Tx: Default;
    /// The socket's own state under the lock of the receiving direction.
    type Rx: Default;
    /// The socket's own state under the control lock.
    type Control: Default;

    /// Returns the socket's number in this process.
    fn slot(&self) -> u32;
    /// Returns the instance that the socket belongs to.
    fn instance(&self) -> InstanceId;
    /// Returns the time now, monotonic ns.
    fn now(&self) -> u64;
    /// Queues a task for the service thread.
    fn later(&self, task: Task);

    /// Returns the kernel's socket, `None` if it has been closed where no hook saw it. The caller holds one of the
    /// connection's locks, so the fd cannot be closed and used again meanwhile.
    fn tcp(&self) -> Option<Self::Tcp>;
    /// Makes a later close() reset the connection.
    fn reset_on_close(&self);
    /// Resets the connection, at both ends, now.
    fn reset(&self);
    /// Makes the next receive return that the connection was reset. `is_shut`: the program has shut sending down.
    fn report_reset(&self, is_shut: bool);
    /// Returns whether a scan for markers may replace the kernel's receive. Options that the program has set on the
    /// socket may forbid it.
    fn may_scan(&self, tcp: &Self::Tcp) -> bool;
    /// Bounds the time that the kernel waits for acknowledgements: the other host may be gone.
    fn bound_wait(&self);

    /// Returns the link that a direction runs on, or is about to.
    fn link(&self) -> Option<Self::Link>;
    /// Sets that link, or none.
    fn set_link(&self, link: Option<&Self::Link>);
    /// Sets the peer's number for the stream on that link.
    fn set_peer(&self, theirs: Vqpn);
    /// Notifies the peer's waiter that `wake`, from a cursor, names.
    fn notify_peer(&self, wake: Wake);
    /// Returns link, wake-up and peer's number of a stream within a host, to be notified once the kernel has sent its
    /// FIN. `None` if `wake` names no waiter, or the link leads to another host.
    fn wakes_at_end(&self, wake: Wake) -> Option<(Self::Link, Wake, Vqpn)>;
    /// Returns whether the link delivers no more: the connection has ended, or the link has.
    fn is_link_over(&self) -> bool;
    /// Returns a one-time offer of a link for the instance `peer`; `None` if there is a link. `reached_at` is the
    /// address of this host that `peer` has reached, if `peer` is on another host.
    fn offer_link(&self, peer: InstanceId, reached_at: Option<IpAddr>) -> Option<LinkOffer>;
    /// Requests the link to `peer`: an existing one, or else a new one.
    fn need_link(&self, peer: InstanceId, offer: Option<LinkOffer>);

    /// Called when the sending direction is on the link.
    fn on_link(&self, tx: &mut TxOf<Self>);
    /// Called when the sending direction has left the link.
    fn off_link(&self, tx: &mut TxOf<Self>);
    /// Called when the end mark is in the ring.
    fn on_marked(&self, tx: &TxOf<Self>);
    /// Puts what was committed and is not in the ring there: the ring is about to be read.
    fn fill_ring(&self, _tx: &TxOf<Self>) {}

    /// Called when both directions are on the link.
    fn promoted(&self);
    /// Keeps the connection on TCP, from when it is back there.
    fn pin(&self);
    /// Called when an attempt has failed; `is_unwanted`: no other is to follow.
    fn abandoned(&self, is_unwanted: bool);

    /// For the statistics: sets why the connection is on TCP.
    fn set_why(&self, why: Why);
    /// For the statistics: sets that a direction runs on the link, or on TCP.
    fn set_path(&self, direction: Half, on_link: bool);
    /// For the statistics: sets the link that the connection has a stream on, or none.
    fn show_link(&self, link: Option<&Self::Link>);
    /// For the statistics: counts `bytes` bytes that went over the link and go over TCP again.
    fn count_again(&self, bytes: usize);
    /// Counts `bytes` bytes that TCP has carried in a direction and that do not count as the program's.
    fn count_ours(&self, direction: Half, bytes: usize);
}

/// A direction of the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Half {
    /// The direction that this end sends in.
    Sending,
    /// The direction that this end receives in.
    Receiving,
}

/// The connection of a socket of the type `S`.
pub type ConnectionOf<S> =
    Connection<<S as SocketIo>::Link, <S as SocketIo>::Tx, <S as SocketIo>::Rx, <S as SocketIo>::Control>;
/// The sending direction of such a connection.
pub type TxOf<S> = Tx<<S as SocketIo>::Tx>;
/// The receiving direction of such a connection.
pub type RxOf<S> = Rx<<S as SocketIo>::Rx>;
/// The control state of both.
pub type ControlOf<S> = Control<<S as SocketIo>::Link, <S as SocketIo>::Control>;
