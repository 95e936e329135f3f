//! What each direction of a connection runs on, and the one table of the moves between these modes. The code that moves
//! a direction names the event; this table says where the event leads. What is to be done after a move is not here.
//!
//! A mode mirrors the state that the direction's lock protects, so that one load decides the plain case. It is changed
//! under that lock. The exception is a fork child, in which no other thread uses the connection.
//!
//! Sending:
//!
//! | from | event | to |
//! |---|---|---|
//! | TCP, MARKED, LINK | [`Announced`](Sending::Announced) | MARKED |
//! | MARKED | [`Switched`](Sending::Switched) | LINK |
//! | MARKED | [`Flushed`](Sending::Flushed) | TCP |
//! | TCP, MARKED, LINK | [`Withdrawn`](Sending::Withdrawn) | TCP |
//! | LINK | [`Left`](Sending::Left) | TCP |
//!
//! Receiving:
//!
//! | from | event | to |
//! |---|---|---|
//! | TCP | [`Expected`](Receiving::Expected) | MARKED |
//! | MARKED | [`Switched`](Receiving::Switched) | LINK |
//! | MARKED | [`Settled`](Receiving::Settled) | TCP |
//! | LINK | [`Left`](Receiving::Left) | TCP |
//! | LINK | [`Retained`](Receiving::Retained) | MARKED |
//! | TCP, MARKED, LINK | [`Abandoned`](Receiving::Abandoned) | TCP |
//!
//! Either:
//!
//! | from | event | to |
//! |---|---|---|
//! | any | `Inherited` | FOREIGN |
//! | TCP, FOREIGN | `Reclaimed` | TCP |
//! | any | `Closed` | TCP |

#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::marker::PhantomData;

use crate::sync::{AtomicU8, Ordering, Published};

/// The medium of a direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Mode {
    /// The direction runs on the kernel's call alone.
    Tcp = 0,
    /// The direction runs on TCP, and markers are in flight: a send flushes them first, a receive scans for them.
    Marked = 1,
    /// The direction runs on the link.
    Link = 2,
    /// In a fork child: another process has the stream on a link.
    Foreign = 3,
}

use Mode::{Foreign, Link, Marked, Tcp};

impl Mode {
    #[inline]
    fn of(word: u8) -> Self {
        match word {
            0 => Tcp,
            1 => Marked,
            2 => Link,
            _ => Foreign,
        }
    }
}

/// Why the sending direction moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sending {
    /// A marker, or bytes that the peer is to be sent again, precede on TCP all that follows.
    Announced,
    /// TCP has taken SWITCH.
    Switched,
    /// TCP has taken all that was announced, which leads to no link.
    Flushed,
    /// The announced bytes are not to be sent: the program has ended the direction first, or no reader waits for them.
    Withdrawn,
    /// The end mark is in the ring, the ring has no reader, or the link has ended.
    Left,
    /// In a fork child: the parent has the stream on a link.
    Inherited,
    /// In a fork child: the parent has the stream back on TCP or does not answer, or the child has closed the
    /// connection.
    Reclaimed,
    /// The object starts anew: the connection is closed in this process, or a fork child has a copy that is not on a
    /// link.
    Closed,
}

/// Why the receiving direction moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Receiving {
    /// Markers may come.
    Expected,
    /// SWITCH has been read.
    Switched,
    /// No marker comes any more, and no byte is held back.
    Settled,
    /// The bytes in the ring were read, or stay unread, and the kernel delivers the rest.
    Left,
    /// The ring was read. Before the kernel's bytes come those that TCP has brought earlier, or an error that is still
    /// to be returned.
    Retained,
    /// The connection is reset: unread bytes are lost.
    Abandoned,
    /// As [`Sending::Inherited`].
    Inherited,
    /// As [`Sending::Reclaimed`].
    Reclaimed,
    /// As [`Sending::Closed`].
    Closed,
}

/// A reason to move, from some modes to one.
pub trait Event: Copy + Debug {
    /// Returns the modes in which the event can come, and the mode that it leads to.
    fn moves(self) -> (&'static [Mode], Mode);
}

const ALL: &[Mode] = &[Tcp, Marked, Link, Foreign];

impl Event for Sending {
    fn moves(self) -> (&'static [Mode], Mode) {
        match self {
            Self::Announced => (&[Tcp, Marked, Link], Marked),
            Self::Switched => (&[Marked], Link),
            Self::Flushed => (&[Marked], Tcp),
            Self::Withdrawn => (&[Tcp, Marked, Link], Tcp),
            Self::Left => (&[Link], Tcp),
            Self::Inherited => (ALL, Foreign),
            Self::Reclaimed => (&[Tcp, Foreign], Tcp),
            Self::Closed => (ALL, Tcp),
        }
    }
}

impl Event for Receiving {
    fn moves(self) -> (&'static [Mode], Mode) {
        match self {
            Self::Expected => (&[Tcp], Marked),
            Self::Switched => (&[Marked], Link),
            Self::Settled => (&[Marked], Tcp),
            Self::Left => (&[Link], Tcp),
            Self::Retained => (&[Link], Marked),
            Self::Abandoned => (&[Tcp, Marked, Link], Tcp),
            Self::Inherited => (ALL, Foreign),
            Self::Reclaimed => (&[Tcp, Foreign], Tcp),
            Self::Closed => (ALL, Tcp),
        }
    }
}

/// The mode of a direction, for all threads to read.
pub struct ModeCell<E> {
    mode: Published<AtomicU8>,
    events: PhantomData<fn(E)>,
}

impl<E: Event> Default for ModeCell<E> {
    fn default() -> Self {
        Self {
            mode: Published::from(Tcp as u8),
            events: PhantomData,
        }
    }
}

impl<E: Event> ModeCell<E> {
    /// Returns the mode.
    #[inline]
    pub fn load(&self, order: Ordering) -> Mode {
        Mode::of(self.mode.load(order))
    }

    /// Returns the mode, for a thread that is counted in by [`Presence`](crate::sync::Presence): it is in the kernel's
    /// call, is about to be, or is back from it.
    #[inline]
    pub fn look(&self) -> Mode {
        Mode::of(self.mode.look())
    }

    /// Moves the direction. Afterwards the caller checks which calls are inside the kernel.
    pub fn go(&self, event: E) {
        let (from, to) = event.moves();
        let now = self.load(Ordering::Relaxed);
        debug_assert!(from.contains(&now), "{event:?} in {now:?}");
        self.mode.publish(to as u8);
    }
}

#[cfg(test)]
mod tests;
