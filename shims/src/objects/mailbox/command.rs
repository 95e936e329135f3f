//! The commands for the service thread, and how they name a connection.

use rdmasock_core::ids::InstanceId;
use rdmasock_core::stream::connection::Task;
use rdmasock_core::wire::LinkOffer;
use rustix::io::Errno;

use crate::config::verbs::{Dialled, Pair};
use crate::sys::remains::Remains;

/// Names a connection as it was when the command was made. The object may have become another connection by the time
/// the service thread reads it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ref {
    /// The slot of its object.
    pub slot: u32,
    /// The generation of the object, which changes with each connection that it becomes.
    pub generation: u64,
}

/// A request of a call to the service thread. A link is named by its slot or serial.
pub enum Command {
    /// Ask the peer for a promotion: the connection has reached the threshold (connector).
    Promote(Ref),
    /// Do a task that the connection itself asks for.
    Do(Ref, Task),
    /// Answer the ASK that waited for the program's first use of the connection, or for its close.
    Used(Ref),
    /// Record this instance as the holder of the connection: several processes accept on its listener's name.
    Hold(Ref),
    /// Find or make a link to the instance, by the peer's offer if there is one: a handshake needs it.
    NeedLink(Ref, InstanceId, Option<LinkOffer>),
    /// The thread that connects to another host's instance has ended with this result.
    Dialled(InstanceId, Result<Dialled, Errno>),
    /// Make a bulk queue pair: a call wants direct transfers on the link.
    WantBulk(u32),
    /// The thread that connects a bulk queue pair, for the link with this serial, has ended with this result.
    BulkDialled(u64, Result<Pair, Errno>),
    /// Send the queued messages when the link's side channel has room again.
    AwaitRoom(u32),
    /// Break the link off: its peer does not read its messages.
    Overfull(u32),
    /// Take the link of the socket's stream down: the peer broke the protocol in the stream's memory.
    Violation(Ref),
    /// Free the links that are down and have lost their last pin.
    FreeLinks,
    /// Check whether bytes move on the link: the checks that its peer caused found almost nothing.
    Vain(u32),
    /// Answer on the names of all listeners: one has accepted its first connection in this process.
    Listen,
    /// Keep the anchor of a connection that was closed in the middle of a promotion, until the peer's marker or end has
    /// come.
    Linger(Remains),
    /// Shrink rings when they are idle, and read the memory limits again: a ring has grown, or was refused memory.
    Grown,
    /// Ask for a larger ring if the reader stands still: a sender finds no room.
    Blocked(Ref),
    /// Watch how long the reader takes nothing: a sender finds no room, and `TCP_USER_TIMEOUT` bounds its wait.
    Standing(Ref),
    /// Check the fd of the anchor, which seems to stand for another file.
    Lost(Ref),
    /// Send the held-back wake-ups after a delay.
    DelayedWakes,
    /// Maintain the links to other hosts after a delay.
    Maintain,
}
