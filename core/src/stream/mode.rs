//! The medium that each direction of a connection runs on, and the one table of the moves between these modes. The code
//! that moves a direction names the event; this table says where the event leads. The work that follows a move is not
//! here.
//!
//! A mode mirrors the state that the direction's lock protects, so that one load decides the plain case. It is changed
//! under that lock. The exception is a fork child, in which no other thread uses the connection.
//!
//! | from | event | to |
//! |---|---|---|
//! | TCP, MARKED, LINK | [`Announced`](Move::Announced) | MARKED |
//! | TCP | [`Expected`](Move::Expected) | MARKED |
//! | MARKED | [`Switched`](Move::Switched) | LINK |
//! | MARKED | [`Settled`](Move::Settled) | TCP |
//! | LINK | [`Left`](Move::Left) | TCP |
//! | LINK | [`Retained`](Move::Retained) | MARKED |
//! | TCP, MARKED, LINK | [`Abandoned`](Move::Abandoned) | TCP |
//! | any | [`Inherited`](Move::Inherited) | FOREIGN |
//! | TCP, FOREIGN | [`Reclaimed`](Move::Reclaimed) | TCP |
//! | any | [`Closed`](Move::Closed) | TCP |

#![forbid(unsafe_code)]

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

/// Why a direction moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Move {
    /// Sending: a marker, or bytes that the peer is to be sent again, precede on TCP all that follows.
    Announced,
    /// Receiving: markers may come.
    Expected,
    /// TCP has taken SWITCH, or SWITCH has been read.
    Switched,
    /// Sending: TCP has taken all that was announced, which leads to no link. Receiving: no marker comes any more, and
    /// no byte is held back.
    Settled,
    /// Sending: the end mark is in the ring, the ring has no reader, or the link has ended. Receiving: the bytes in the
    /// ring were read, or stay unread, and the kernel delivers the rest.
    Left,
    /// Receiving: the ring was read. Before the kernel's bytes come those that TCP has brought earlier, or an error
    /// that is still to be returned.
    Retained,
    /// Sending: the announced bytes are not to be sent, as the program has ended the direction first, or no reader
    /// waits for them. Receiving: the connection is reset, and unread bytes are lost.
    Abandoned,
    /// In a fork child: the parent has the stream on a link.
    Inherited,
    /// In a fork child: the parent has the stream back on TCP or does not answer, or the child has closed the
    /// connection.
    Reclaimed,
    /// The object starts anew: the connection is closed in this process, or a fork child has a copy that is not on a
    /// link.
    Closed,
}

const ALL: &[Mode] = &[Tcp, Marked, Link, Foreign];

impl Move {
    /// Returns the modes in which the event can come, and the mode that it leads to.
    fn moves(self) -> (&'static [Mode], Mode) {
        match self {
            Self::Announced => (&[Tcp, Marked, Link], Marked),
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

/// The mode of a direction, for all threads to read. It is TCP at first.
#[derive(Default)]
pub struct ModeCell(Published<AtomicU8>);

impl ModeCell {
    /// Returns the mode.
    #[inline]
    pub fn load(&self, order: Ordering) -> Mode {
        Mode::of(self.0.load(order))
    }

    /// Returns the mode, for a thread that is counted in by [`Presence`](crate::sync::Presence): it is in the kernel's
    /// call, is about to be, or is back from it.
    #[inline]
    pub fn look(&self) -> Mode {
        Mode::of(self.0.look())
    }

    /// Moves the direction. Afterwards the caller checks which calls are inside the kernel.
    pub fn go(&self, event: Move) {
        let (from, to) = event.moves();
        let now = self.load(Ordering::Relaxed);
        debug_assert!(from.contains(&now), "{event:?} in {now:?}");
        self.0.publish(to as u8);
    }
}

#[cfg(test)]
mod tests;
