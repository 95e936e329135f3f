//! What a connection asks of the world: the kernel's socket that it belongs to, links, and the process around it.

use std::net::IpAddr;
use std::ops::Deref;

use super::object::{Connection, Control, Rx, Tx};
use crate::fabric::link::{NoProducer, Opened};
use crate::fabric::ring::{Consumer, Producer, Wake};
use crate::ids::{InstanceId, Vqpn};
use crate::stats::{Reason, Why};
use crate::wire::{LinkOffer, Message, RingOffer};

/// What the service thread is to do for a connection as soon as it can; what has become of that by then it sees itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Task {
    /// Tell those who wait on the socket.
    Notify,
    /// Get marker bytes into TCP that it has not taken.
    Flush,
    /// Look for what may be behind unread data in TCP: the sending direction waits for it.
    ReadAhead,
    /// A direction has changed: put the socket where it belongs.
    Settle,
    /// A direction is back on TCP: perhaps that was the last that was still to be done of a way back.
    Drained,
}

/// What TCP has in front.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peeked {
    /// So many bytes are in the buffer.
    Bytes(usize),
    /// Nothing now.
    Nothing,
    /// The end, or an error.
    Ended,
    /// Nothing, and the program has shut its receiving direction: to it this is the end, but markers may come.
    Shut,
}

/// Why TCP takes nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unsent {
    /// It has no room now.
    Full,
    /// The connection has ended with this error (errno), which this send has learnt, and nobody else will.
    Failed(i32),
    /// The connection is over.
    Dead,
}

/// A link, as its streams see it. Every call returns at once.
pub trait StreamLink: Clone + PartialEq {
    /// Who is at its other end.
    fn peer(&self) -> InstanceId;
    /// Whether it works, as far as is known.
    fn is_alive(&self) -> bool;
    /// Whether it leads to another host.
    fn is_remote(&self) -> bool;
    /// A number for the connection of the socket with this [slot](SocketIo::slot), with a first ring to receive into.
    fn open(&self, slot: u32) -> Result<Opened, Reason>;
    /// Our stream `mine` is the peer's `theirs`, which has this ring to begin with.
    fn pair(&self, mine: Vqpn, theirs: Vqpn, first: RingOffer);
    /// The end that sends to the peer's stream `theirs`.
    fn producer(&self, theirs: Vqpn) -> Result<Producer, NoProducer>;
    /// Nothing of ours sends to the peer's stream `theirs` any more.
    fn done_with(&self, theirs: Vqpn);
    /// This end is done with its number `mine`; `theirs` is the other's, if it knows of `mine`.
    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>);
    /// The same, where the peer may be about to use the number: OPEN is not answered.
    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>);
    /// Sends a message on the side channel. False if it cannot be sent.
    fn send(&self, message: &Message) -> bool;
    /// The same, with a file that holds `bytes`.
    fn send_with(&self, message: &Message, bytes: &[u8]) -> bool;
    /// Wakes whom a cursor's `wake` asks for, about the peer's stream `theirs`. errno is preserved.
    fn notify(&self, wake: Wake, theirs: Vqpn);
    /// Takes in what has come over it, where that is not simply there.
    fn take_in(&self);
    /// The other end has left a link between hosts unasked, so its end of it may have failed.
    fn doubt(&self);
}

/// The kernel's socket of a connection, as it was found a moment ago.
pub trait Tcp {
    /// Whether it has an error that was not told yet, or was reset.
    fn has_failed(&self) -> bool;
    /// Gives bytes to TCP; gives how many it has taken, at least one.
    fn send(&self, bytes: &[u8]) -> Result<usize, Unsent>;
    /// How many bytes it was given so far, if the kernel says so.
    fn written(&self) -> Option<u64>;
    /// Has TCP send at once what it has taken.
    fn push(&self);
    /// Looks at what TCP has in front, without taking it and without taking an error of which others are to tell.
    fn peek(&self, buf: &mut [u8]) -> Peeked;
    /// The same, of all that is there, whatever has ended; gives how many bytes.
    fn peek_all(&self, buf: &mut [u8]) -> usize;
    /// Bytes that TCP has.
    fn unread(&self) -> usize;
    /// Takes `len` bytes that were seen out of TCP. False if they are not there any more.
    fn take(&self, len: usize) -> bool;
    /// Takes what TCP has in front, but nothing of what urgent data is in front of.
    fn receive(&self, buf: &mut [u8]) -> Peeked;
    /// Whether urgent data is next.
    fn is_at_mark(&self) -> bool;
    /// Whether the peer has ended its direction, or the connection is over: no marker can come any more.
    fn has_peer_ended(&self) -> bool;
    /// Ends the sending direction.
    fn end(&self);
    /// Ends the receiving direction, as shutdown(SHUT_RD) does.
    fn end_receiving(&self);
}

/// The socket that a [`Connection`] belongs to, which is in it.
pub trait SocketIo: Deref<Target = ConnectionOf<Self>> + Sized {
    /// Its links.
    type Link: StreamLink;
    /// What the kernel has of it.
    type Tcp: Tcp;
    /// What it keeps under the lock of the sending direction.
    type Tx: Default;
    /// What it keeps under the lock of the receiving direction.
    type Rx: Default;
    /// What it keeps under the lock of both.
    type Control: Default;

    /// Its number in this process.
    fn slot(&self) -> u32;
    /// The instance that it belongs to.
    fn instance(&self) -> InstanceId;
    /// Now, monotonic ns.
    fn now(&self) -> u64;
    /// Leaves something to the service thread.
    fn later(&self, task: Task);

    /// The kernel's socket; `None` where that has been closed unseen. The caller holds one of the connection's locks,
    /// so that its number cannot be closed and used again meanwhile.
    fn tcp(&self) -> Option<Self::Tcp>;
    /// A close is to reset the connection.
    fn reset_on_close(&self);
    /// Resets the connection, at both ends, now.
    fn reset(&self);
    /// The next receive is to say that the connection was reset; `is_shut`: the program has shut sending down.
    fn report_reset(&self, is_shut: bool);
    /// Whether the kernel's receive may be replaced by a scan for markers: what the program has asked of the socket may
    /// forbid it.
    fn may_scan(&self, tcp: &Self::Tcp) -> bool;
    /// What was sent may be acknowledged by nobody: has the kernel give up after a while.
    fn bound_wait(&self);

    /// The link that a direction runs on, or is about to.
    fn link(&self) -> Option<Self::Link>;
    /// From now on it is this one, or none.
    fn set_link(&self, link: Option<&Self::Link>);
    /// The peer's stream on it has this number.
    fn set_peer(&self, theirs: Vqpn);
    /// Wakes whom a cursor's `wake` asks for at the peer.
    fn notify_peer(&self, wake: Wake);
    /// The farewell of a stream within a host: who is woken by `wake` once the kernel has sent its FIN.
    fn wakes_at_end(&self, wake: Wake) -> Option<(Self::Link, Wake, Vqpn)>;
    /// Nothing more will come over the link: the connection has ended, or the link has.
    fn is_link_over(&self) -> bool;
    /// A one-time offer of a link for the instance `peer`, which has reached us at `reached_at` if it is on another
    /// host; `None` if there is a link.
    fn offer_link(&self, peer: InstanceId, reached_at: Option<IpAddr>) -> Option<LinkOffer>;
    /// Has the link to `peer` made, or found.
    fn need_link(&self, peer: InstanceId, offer: Option<LinkOffer>);

    /// The sending direction is on the link.
    fn on_link(&self, tx: &mut TxOf<Self>);
    /// The sending direction has left the link.
    fn off_link(&self, tx: &mut TxOf<Self>);
    /// The end mark is in the ring.
    fn on_marked(&self, tx: &TxOf<Self>);
    /// What was committed and is not in the ring is put there: it is about to be read.
    fn fill_ring(&self, _tx: &TxOf<Self>) {}

    /// Both directions are on the link.
    fn promoted(&self);
    /// The connection stays on TCP, once it is back there.
    fn pin(&self);
    /// An attempt has come to nothing; `is_unwanted`: there is to be no other.
    fn abandoned(&self, is_unwanted: bool);

    /// For the statistics: why it is on TCP.
    fn set_why(&self, why: Why);
    /// For the statistics: a direction runs on the link, or on TCP.
    fn set_path(&self, direction: Half, on_link: bool);
    /// For the statistics: it has a stream on this link, or none.
    fn show_link(&self, link: Option<&Self::Link>);
    /// For the statistics: so many bytes that went over the link go over TCP again.
    fn count_again(&self, bytes: usize);
    /// So many bytes of TCP's are not the program's.
    fn count_ours(&self, direction: Half, bytes: usize);
}

/// One of the two directions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Half {
    /// What this end sends.
    Sending,
    /// What it receives.
    Receiving,
}

/// The connection of such a socket.
pub type ConnectionOf<S> =
    Connection<<S as SocketIo>::Link, <S as SocketIo>::Tx, <S as SocketIo>::Rx, <S as SocketIo>::Control>;
/// Its sending direction.
pub type TxOf<S> = Tx<<S as SocketIo>::Tx>;
/// Its receiving direction.
pub type RxOf<S> = Rx<<S as SocketIo>::Rx>;
/// What moves them.
pub type ControlOf<S> = Control<<S as SocketIo>::Link, <S as SocketIo>::Control>;
