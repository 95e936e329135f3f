//! The medium that each direction of a connection runs on (its mode), and the one table of the moves between modes. The
//! code that moves a direction names the event, and this table decides the next mode. That code also does the work that
//! follows the move.
//!
//! A mode summarises the state that the direction's lock protects, so that a call on plain TCP needs one load and no
//! lock. The mode is changed under that lock, except in a fork child, where no other thread uses the connection.
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
    /// The direction runs on TCP, and each call is left to the kernel.
    Tcp = 0,
    /// The direction runs on TCP, and markers may stand between its bytes. A send first writes pending markers, and a
    /// receive scans for markers.
    Marked = 1,
    /// The direction runs on the link.
    Link = 2,
    /// In a fork child: the stream is on a link of another process.
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

/// The event that moves a direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Move {
    /// Sending: a marker is to be written to TCP, or bytes are to be sent again on TCP. Both precede all later bytes.
    Announced,
    /// Receiving: TCP may bring markers from now on.
    Expected,
    /// Sending: TCP has taken SWITCH. Receiving: SWITCH has been read.
    Switched,
    /// Sending: TCP has taken all announced bytes, and they do not lead to a link. Receiving: TCP brings no more
    /// markers, and no byte is held back.
    Settled,
    /// Sending: the end mark is in the ring, the ring has no reader, or the link has ended. Receiving: the bytes in the
    /// ring have been read, or will never be read, and later bytes come by TCP.
    Left,
    /// Receiving: the bytes in the ring have been read. The library still has bytes that it took from TCP earlier, or
    /// an error for the program. They precede what the kernel delivers.
    Retained,
    /// Sending: the announced bytes are dropped, because the program has ended the direction, or because no reader
    /// waits for them. Receiving: the connection is reset, and unread bytes are lost.
    Abandoned,
    /// In a fork child: the parent has the stream on a link.
    Inherited,
    /// In a fork child: the parent has taken the stream back to TCP or does not answer, or the child has closed the
    /// connection.
    Reclaimed,
    /// The object is reset: this process has closed the connection, or a fork child has a copy of a connection that is
    /// not on a link.
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

/// The mode of a direction. Any thread may read it. It is TCP at first.
#[derive(Default)]
pub struct ModeCell(Published<AtomicU8>);

impl ModeCell {
    /// Returns the mode.
    #[inline]
    pub fn load(&self, order: Ordering) -> Mode {
        Mode::of(self.0.load(order))
    }

    /// Returns the mode to a thread that has entered the direction's [`Presence`](crate::sync::Presence) for a call in
    /// the kernel. The thread asks before that call, and again after it.
    #[inline]
    pub fn look(&self) -> Mode {
        Mode::of(self.0.look())
    }

    /// Moves the direction. Afterwards the caller checks by the `Presence` whether calls are inside the kernel: they
    /// may have read the old mode.
    pub fn go(&self, event: Move) {
        let (from, to) = event.moves();
        let now = self.load(Ordering::Relaxed);
        debug_assert!(from.contains(&now), "{event:?} in {now:?}");
        self.0.publish(to as u8);
    }
}

#[cfg(test)]
mod tests;
