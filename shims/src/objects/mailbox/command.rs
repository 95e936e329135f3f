//! The commands, and what they name.

use rdmasock_core::ids::InstanceId;
use rdmasock_core::stream::connection::Task;
use rdmasock_core::wire::LinkOffer;
use rustix::io::Errno;

use crate::config::verbs::{Dialled, Pair};
use crate::sys::remains::Remains;

/// A connection as it was when something was asked for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ref {
    /// Its object.
    pub slot: u32,
    /// Which of the connections that the object has been.
    pub generation: u64,
}

/// What calls of the program leave to the service thread. A link is named by its slot, a listener by its number.
pub enum Command {
    /// The connection has reached the threshold (connector).
    Promote(Ref),
    /// What the connection itself leaves to be done.
    Do(Ref, Task),
    /// An ASK waited for the program's first use of the connection, or for its close.
    Used(Ref),
    /// One of several processes that accept on a name holds the connection.
    Hold(Ref),
    /// The handshake needs a link.
    NeedLink(Ref, InstanceId, Option<LinkOffer>),
    /// The thread that connects to another host has come to an end.
    Dialled(InstanceId, Result<Dialled, Errno>),
    /// Direct transfers are wanted on the link.
    WantBulk(u32),
    /// The thread that connects beside the link, by its serial, has come to an end.
    BulkDialled(u64, Result<Pair, Errno>),
    /// The link's side channel is full.
    AwaitRoom(u32),
    /// The link's peer does not read what it is told.
    Overfull(u32),
    /// The peer broke the protocol in the memory of the socket's stream.
    Violation(Ref),
    /// Nothing pins a link any more that is down.
    FreeLinks,
    /// Looks for the sake of the link's peer find nothing.
    Vain(u32),
    /// A listener has accepted its first connection in this process, or there is one more.
    Listen,
    /// A connection that was closed in the middle of a promotion.
    Linger(Remains),
    /// A ring has grown: shrink it when it is idle.
    Grown,
    /// A sender finds no room.
    Blocked(Ref),
    /// A sender finds no room, and does not wait for ever (`TCP_USER_TIMEOUT`).
    Standing(Ref),
    /// The anchor's number stands for something else, it seems.
    Lost(Ref),
    /// A sender holds something back of which the peer is to be told in a while.
    DelayedWakes,
    /// Links to other hosts are to be maintained in a while.
    Maintain,
}
