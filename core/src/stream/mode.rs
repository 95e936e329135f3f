//! What each direction of a connection runs on, and what moves it from there to something else. The one table of that:
//! whoever moves a direction says why, and where it goes is said here. Not what is to be done then.
//!
//! A mode mirrors what the direction's lock protects, so that the plain case is decided by one load. It is changed
//! under that lock, but for a fork's child, where nobody else is.
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

/// What a direction runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Mode {
    /// Plain TCP: the kernel's call, nothing else.
    Tcp = 0,
    /// TCP, but markers are in flight: sending flushes them first, receiving looks for them.
    Marked = 1,
    /// The link.
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
    /// A marker, or what the peer is to be sent again, goes out over TCP before all that follows.
    Announced,
    /// SWITCH is out.
    Switched,
    /// All that was announced is out, and leads to no link.
    Flushed,
    /// What was announced is not to go out: the program's end of the direction is first, or nobody waits for it.
    Withdrawn,
    /// The end mark is in the ring, nobody reads it, or the link is over.
    Left,
    /// In a fork child: the parent has the stream on a link.
    Inherited,
    /// In a fork child: the parent has it back on TCP, or the child lets go of it.
    Reclaimed,
    /// The connection is over, for this process.
    Closed,
}

/// Why the receiving direction moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Receiving {
    /// Markers may come.
    Expected,
    /// SWITCH has been read.
    Switched,
    /// No marker comes any more, and nothing is held back.
    Settled,
    /// What is in the ring was read, or stays unread, and the rest is the kernel's to bring.
    Left,
    /// The ring was read, and something that came in TCP before, or is still to be said, comes ahead of what the kernel
    /// brings.
    Retained,
    /// The connection is reset: what was not read is lost.
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
    /// Where it can come, and where it leads.
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

/// A direction's mode, for all threads to look at.
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
    /// The mode now.
    #[inline]
    pub fn load(&self, order: Ordering) -> Mode {
        Mode::of(self.mode.load(order))
    }

    /// The mode, for who is in the kernel's call, or is about to be or back, and has said so
    /// ([`Presence`](crate::sync::Presence)).
    #[inline]
    pub fn look(&self) -> Mode {
        Mode::of(self.mode.look())
    }

    /// Moves the direction. Who changes it looks afterwards who is in the kernel's call.
    pub fn go(&self, event: E) {
        let (from, to) = event.moves();
        let now = self.load(Ordering::Relaxed);
        debug_assert!(from.contains(&now), "{event:?} in {now:?}");
        self.mode.publish(to as u8);
    }
}

#[cfg(test)]
mod tests;
