//! The traits by which a connection calls its environment: the kernel's socket, the link, and the process.

use std::net::IpAddr;
use std::ops::Deref;

use crate::fabric::ring::{Consumer, Producer, Wake};
use crate::fabric::{NoProducer, Opened, SendError};
use crate::ids::{InstanceId, Vqpn};
use crate::region::Region;
use crate::stats::{Reason, Why};
use crate::stream::connection::{Connection, Control, Rx, Tx};
use crate::wire::{LinkOffer, Message};

/// A task for the service thread, which carries it out soon. The connection may have changed by then, so the service
/// thread checks its state first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// Wake the threads that wait on the socket.
    Notify,
    /// Send marker bytes that TCP has not taken.
    Flush,
    /// Search the unread data in TCP for the marker that the sending direction waits for.
    ReadAhead,
    /// A direction has changed its medium. Complete a close or a way back. If neither is under way, renew the socket's
    /// requests for wake-ups, for the medium that each direction runs on.
    Settle,
    /// A direction is back on TCP: check whether that completes a way back.
    Drained,
}

/// The state of TCP's receive buffer at its front.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peeked {
    /// TCP has bytes. This number of them, at least one, was copied into the caller's buffer.
    Bytes(usize),
    /// TCP has no bytes now.
    Nothing,
    /// The peer has ended the direction, or the connection has an error.
    Ended,
    /// TCP has no bytes, and the program has shut the receiving direction. The program sees the end, but markers may
    /// still come.
    Shut,
}

/// Why TCP has taken no byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unsent {
    /// The send buffer has no room now.
    Full,
    /// The connection has ended with this error (errno). This send has removed the error from the socket, so no other
    /// call will return it.
    Failed(i32),
    /// The connection has ended, and this send has removed no error from the socket.
    Dead,
}

/// Error: bytes that a peek has seen are not in TCP any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the bytes are not in TCP any more")]
pub struct Gone;

/// The operations of a link that a connection needs. No operation blocks.
pub trait StreamLink: Clone + PartialEq {
    /// Returns the instance at the link's other end.
    fn peer(&self) -> InstanceId;
    /// Returns whether the link works, as far as this end knows.
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
    /// Gives this end's number `mine` back, although the peer has not answered its OPEN and may still use the number.
    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>);
    /// Sends a message on the side channel.
    fn send(&self, message: &Message) -> Result<(), SendError>;
    /// Sends a message with a file that holds `bytes`. The error is `Full` if the file cannot be made.
    fn send_with(&self, message: &Message, bytes: &[u8]) -> Result<(), SendError>;
    /// Notifies the waiter of the peer that `wake` names: the peer's stream `theirs` has changed. `wake` comes from a
    /// producer or consumer of a ring. Preserves errno.
    fn notify(&self, wake: Wake, theirs: Vqpn);
    /// Processes the completions of a link between hosts, so that all bytes that have come are in their rings. Has no
    /// effect within a host, where the peer writes into the ring itself.
    fn take_in(&self);
    /// Checks whether the peer's device on a link between hosts still answers. Called when the peer has left the link
    /// without a request of this end, so the peer's end of the link may have failed.
    fn doubt(&self);
}

/// The kernel's socket of a connection. The value names it by the fd that the socket had when the value was created.
pub trait Tcp {
    /// Returns whether the socket has an error that no call has returned yet, or was reset.
    fn has_failed(&self) -> bool;
    /// Sends bytes on TCP. Returns the number of bytes that TCP has taken, at least one.
    fn send(&self, bytes: &[u8]) -> Result<usize, Unsent>;
    /// Returns the number of bytes that TCP has taken so far. `None` if the kernel does not report it.
    fn written(&self) -> Option<u64>;
    /// Makes TCP send all bytes that it has taken, without a delay by Nagle's algorithm.
    fn push(&self);
    /// Copies the bytes at the front of TCP into `buf`, and leaves them in TCP. Also leaves an error in the socket, for
    /// the calls that have to return it.
    fn peek(&self, buf: &mut [u8]) -> Peeked;
    /// Copies all bytes of TCP into `buf`, as far as there is room, and leaves them in TCP. Does so even if the
    /// connection has ended. Returns the number of bytes.
    fn peek_all(&self, buf: &mut [u8]) -> usize;
    /// Returns the number of bytes that TCP has received and no call has read.
    fn unread(&self) -> usize;
    /// Removes `len` bytes from the front of TCP, which were peeked before.
    fn take(&self, len: usize) -> Result<(), Gone>;
    /// Reads bytes from the front of TCP into `buf`. Reads none while urgent data is next.
    fn receive(&self, buf: &mut [u8]) -> Peeked;
    /// Returns whether urgent data is next.
    fn is_at_mark(&self) -> bool;
    /// Returns whether the peer has ended its direction, or the connection has ended, so that no marker can come any
    /// more.
    fn has_peer_ended(&self) -> bool;
    /// Ends the sending direction.
    fn end(&self);
    /// Ends the receiving direction, as shutdown(SHUT_RD) does.
    fn end_receiving(&self);
}

/// The library's object for one TCP socket. It contains the [`Connection`].
pub trait SocketIo: Deref<Target = ConnectionOf<Self>> + Sized {
    /// The type of the links.
    type Link: StreamLink;
    /// The type of the kernel's socket.
    type Tcp: Tcp;
    /// The part of the socket's own state that the lock of the sending direction protects.
    type Tx: Default;
    /// The part of the socket's own state that the lock of the receiving direction protects.
    type Rx: Default;
    /// The part of the socket's own state that the control lock protects.
    type Control: Default;

    /// Returns the socket's number in this process.
    fn slot(&self) -> u32;
    /// Returns the instance that the socket belongs to.
    fn instance(&self) -> InstanceId;
    /// Returns the time now, monotonic ns.
    fn now(&self) -> u64;
    /// Queues a task for the service thread.
    fn later(&self, task: Task);

    /// Returns the kernel's socket. `None` if the program has closed it by a system call that no hook saw. The caller
    /// holds one of the connection's locks, so the fd cannot be closed and reused meanwhile.
    fn tcp(&self) -> Option<Self::Tcp>;
    /// Makes a later close() reset the connection.
    fn reset_on_close(&self);
    /// Resets the connection at both ends at once.
    fn reset(&self);
    /// Makes the next receive fail because the connection was reset. `is_shut` is true if the program has shut the
    /// sending direction.
    fn report_reset(&self, is_shut: bool);
    /// Returns whether the library may scan for markers in place of the kernel's plain receive. Options that the
    /// program has set on the socket may rule that out.
    fn may_scan(&self, tcp: &Self::Tcp) -> bool;
    /// Bounds the time that the kernel waits for acknowledgements, because the other host may be gone.
    fn bound_wait(&self);

    /// Returns the link that a direction is on, or is about to be on. `None` if there is none.
    fn link(&self) -> Option<Self::Link>;
    /// Sets the link that `link` returns.
    fn set_link(&self, link: Option<&Self::Link>);
    /// Sets the peer's number for the stream on the link.
    fn set_peer(&self, theirs: Vqpn);
    /// Notifies the peer's waiter that `wake` names. A producer or consumer of a ring has returned `wake`.
    fn notify_peer(&self, wake: Wake);
    /// Returns the arguments of a notification that is due once the kernel has sent its FIN: the link, `wake`, and the
    /// peer's number for the stream. `None` if `wake` names no waiter, or if the link leads to another host.
    fn wakes_at_end(&self, wake: Wake) -> Option<(Self::Link, Wake, Vqpn)>;
    /// Returns whether the link brings no more bytes, because the connection or the link has ended.
    fn is_link_over(&self) -> bool;
    /// Returns an offer of a link, for one use by the instance `peer`. `None` if the two instances have a link.
    /// `reached_at` is the address of this host that `peer` has reached; `None` if `peer` is on this host.
    fn offer_link(&self, peer: InstanceId, reached_at: Option<IpAddr>) -> Option<LinkOffer>;
    /// Requests the link to `peer`: an existing one, or else a new one.
    fn need_link(&self, peer: InstanceId, offer: Option<LinkOffer>);

    /// Called when the sending direction has moved to the link.
    fn on_link(&self, tx: &mut TxOf<Self>);
    /// Called when the sending direction has left the link.
    fn off_link(&self, tx: &mut TxOf<Self>);
    /// Called when the end mark has been put on a link between hosts.
    fn on_marked(&self, tx: &TxOf<Self>);
    /// Copies committed bytes that are still in the program's memory (a direct transfer) into the ring, because this
    /// end is about to read the ring.
    fn fill_ring(&self, _tx: &TxOf<Self>) {}

    /// Called when the attempt has ended with both directions on the link.
    fn promoted(&self);
    /// Rules out another promotion: once the connection is back on TCP, it stays there.
    fn pin(&self);
    /// Called when an attempt has failed. `is_unwanted` is true if no other attempt is to follow.
    fn abandoned(&self, is_unwanted: bool);

    /// For the statistics: sets why the connection is on TCP.
    fn set_why(&self, why: Why);
    /// For the statistics: sets whether `direction` runs on the link or on TCP.
    fn set_path(&self, direction: Half, on_link: bool);
    /// For the statistics: sets the link that the connection has a stream on; `None` if there is none.
    fn show_link(&self, link: Option<&Self::Link>);
    /// For the statistics: moves `bytes` bytes from the link's count to TCP's, because they are sent again over TCP.
    fn count_again(&self, bytes: usize);
    /// Counts `bytes` bytes that TCP has carried in `direction` for the library, so that they are left out of the
    /// program's count.
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
/// The sending direction of the connection of a socket of the type `S`.
pub type TxOf<S> = Tx<<S as SocketIo>::Tx>;
/// The receiving direction of the connection of a socket of the type `S`.
pub type RxOf<S> = Rx<<S as SocketIo>::Rx>;
/// The state of the promotion of a socket of the type `S`.
pub type ControlOf<S> = Control<<S as SocketIo>::Link, <S as SocketIo>::Control>;
