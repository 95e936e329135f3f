//! An end of a connection: what its two directions run on, and the code that carries out promotion, the stay on a link
//! and the way back. A process uses this object on the kernel's socket and a real link. The simulation of the tests
//! uses the same object. All calls to the socket, the link and the process go through [`SocketIo`]. No code here
//! blocks, reads a clock or makes a system call.
//!
//! The state machines of [`crate::stream::handshake`] and [`crate::stream::resume`] decide what is to be done.
//! [`crate::stream::mode`] decides what a direction may run on. This file has the state that the machines act on, and
//! this end's stream on the link. The modules carry the steps out:
//!
//! | module | what it does |
//! |---|---|
//! | `io` | the interface to socket, link and process |
//! | `directions` | the operations on either direction |
//! | `stay` | carries out the way back: from a link between hosts, and where the program or its peer asks for it |
//! | `attempt` | carries out the handshake's steps |
//! | `scan` | scans what TCP delivers for markers, hands them over, and holds bytes back from the program |
//! | `close` | shutdown() and close(), and the hand-over of the connection to another holder |
//! | `messages` | messages of the peer on the link about the stream |
//!
//! Lock order: `control`, `rx`, `tx`. Each function's comment names the locks that its caller holds.

#![forbid(unsafe_code)]

use std::net::IpAddr;
use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32};

use crossbeam_utils::CachePadded;

use crate::fabric::ring::{Consumer, Producer};
use crate::ids::{InstanceId, Nonce, Vqpn};
use crate::lock::Lock;
use crate::region::Region;
use crate::stats::Reason;
use crate::stream::connection::directions::demote_tx;
use crate::stream::connection::stay::Stay;
use crate::stream::handshake::Handshake;
use crate::stream::mode::{Mode, ModeCell};
use crate::stream::resume::Resume;
use crate::sync::Presence;
use crate::wire::{Hello, Message};

mod attempt;
mod close;
mod directions;
mod io;
mod messages;
mod scan;
pub mod stay;

pub use crate::stream::connection::attempt::{
    begin_asking, begin_offering, end_attempt, feed, look_for_resume, on_link_up,
};
pub use crate::stream::connection::close::{
    Awaited, MOST as MOST_ASIDE, close_if_over, close_tx, on_take_back, on_taken_back, press_on, return_unread,
    scan_left, shut,
};
pub use crate::stream::connection::directions::{
    Farewell, NoScan, flush, hand_over_rest, is_over, is_scanning, leave_link_at_end, look_for_reset, on_end_told,
    refuse, resend, shut_receiving, start_scan, stop_scan, wait_for_tcp,
};
pub use crate::stream::connection::io::{
    ConnectionOf, ControlOf, Gone, Half, Peeked, RxOf, SocketIo, StreamLink, Task, Tcp, TxOf, Unsent,
};
pub use crate::stream::connection::messages::{
    Broken, Interrupted, on_demote_request, on_open, on_open_ack, on_open_refused,
};
pub use crate::stream::connection::scan::{
    Ahead, AtMark, Carry, after_fork, drop_unread, has_marker, look, look_ahead, read_ahead, scan_taken, seen_ahead,
};
pub use crate::stream::connection::stay::{leave, prefer_tcp, return_to_tcp};

/// The sending direction.
#[derive(Default)]
pub struct Tx<O> {
    /// The writing end of the peer's ring. Present while the direction is on the link, and until the peer has read it.
    pub producer: Option<Producer>,
    /// Bytes that TCP has not taken yet: markers, then [`again`](Self::again) bytes of the program's.
    pub marker: Vec<u8>,
    /// How many bytes at the end of [`marker`](Self::marker) are the program's. The peer has not read them on the link,
    /// so they are sent again.
    pub again: usize,
    /// Positions in TCP's stream of the last two runs of marker bytes that TCP has taken. The peer may not have
    /// acknowledged them yet.
    pub ours: [Range<u64>; 2],
    /// How the direction goes on behind the marker.
    pub then: Then,
    /// How far the direction's end is.
    pub end: End,
    /// The peer was not notified of the ring's last bytes, because more will follow.
    pub wake_delayed: bool,
    /// State of the socket under the same lock.
    pub own: O,
}

/// How the sending direction goes on once TCP has taken the marker.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Then {
    /// On TCP.
    #[default]
    Tcp,
    /// On the link: the marker is SWITCH, or the direction has been on the link before.
    Link,
    /// The direction waits to leave a link between hosts: RESUME is not written yet.
    Leave,
    /// The direction waits for the peer's RESUME: it has left a link between hosts.
    Resume,
}

impl Then {
    /// Returns whether the direction sends nothing but the marker.
    pub fn waits(self) -> bool {
        matches!(self, Self::Leave | Self::Resume)
    }

    /// Takes the direction off the link. Returns whether it was to be there.
    pub fn take_link(&mut self) -> bool {
        let was_on_link = matches!(self, Self::Link | Self::Leave);
        if was_on_link {
            *self = if self.waits() { Self::Resume } else { Self::Tcp };
        }
        was_on_link
    }
}

/// How far the end of the sending direction is.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum End {
    /// The program has not ended the direction.
    #[default]
    Open,
    /// The program has shut the direction down or closed the socket. The kernel's shutdown() follows once TCP has taken
    /// the marker.
    Due,
    /// The program has ended the direction, and no shutdown() waits for the marker.
    Shut,
}

impl End {
    /// Returns whether the program has ended the direction.
    #[inline]
    pub fn is_shut(self) -> bool {
        self != Self::Open
    }
}

impl<O> Tx<O> {
    /// Notes that TCP has taken `taken` bytes, the first `ours` of which are a marker's. `written` is the number of
    /// bytes that TCP was given in all, these included.
    fn on_marker_taken(&mut self, written: u64, taken: usize, ours: usize) {
        let start = written.saturating_sub(taken as u64);
        let end = start + ours as u64;
        let [before, last] = &mut self.ours;
        if last.end == start {
            last.end = end;
        } else if ours > 0 {
            *before = std::mem::replace(last, start..end);
        }
    }

    /// Returns how many of the marker bytes in [`ours`](Self::ours) are at or after the position `at` of TCP's stream.
    pub fn ours_from(&self, at: u64) -> u64 {
        let behind = |range: &Range<u64>| range.end.saturating_sub(range.start.max(at));
        self.ours.iter().map(behind).sum()
    }
}

/// The receiving direction.
#[derive(Default)]
pub struct Rx<O> {
    /// The reading end of this end's ring. Present from OPEN on; in use while the direction is on the link.
    pub consumer: Option<Consumer>,
    /// The nonce that markers to this end start with, while the direction is scanned for them.
    pub scan: Option<Nonce>,
    /// Bytes taken from TCP that the program does not have yet. They may be the beginning of a marker, or were read
    /// ahead. Or a call has taken them that was in the kernel when the direction left TCP.
    pub carry: Carry,
    /// The program has shut the direction down, and the kernel's shutdown() is still due: it follows once no marker may
    /// come any more.
    pub then_shut: bool,
    /// Bytes that precede the carry, set aside while the connection is handed to another holder (P85).
    pub aside: Vec<u8>,
    /// Number of bytes in front, in the carry and then in TCP, that a scan has found to be payload. Small reads do not
    /// scan them again.
    pub scanned: usize,
    /// How the direction goes on behind the last byte in the ring.
    pub behind: Behind,
    /// Once the ring is read, a receive fails with ECONNRESET.
    pub is_lost: bool,
    /// Number of bytes that RESUME has announced and that TCP has not brought yet.
    pub owed: u64,
    /// State of the socket under the same lock.
    pub own: O,
}

/// How the receiving direction goes on behind the last byte in its ring.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Behind {
    /// As the ring's mark says, or the end of the link. There is no ring, or it is one of a link within the host.
    #[default]
    Mark,
    /// The link between hosts may bring more: the direction does not leave it yet.
    Link,
    /// In TCP: the link between hosts delivers no more.
    Tcp,
}

impl<O> Rx<O> {
    /// Returns whether the ring is one of a link between hosts.
    #[inline]
    pub fn stays(&self) -> bool {
        self.behind != Behind::Mark
    }

    /// Moves the bytes that were set aside back to the front of the carry.
    pub fn restore_aside(&mut self) {
        if !self.aside.is_empty() {
            let rest = self.carry.take();
            self.carry.push(&std::mem::take(&mut self.aside));
            self.carry.push(&rest);
        }
    }

    /// Returns whether what follows the last byte in the ring is in TCP; it may be there already.
    #[inline]
    pub fn goes_on_in_tcp(&self) -> bool {
        match &self.consumer {
            Some(consumer) if self.behind == Behind::Mark => consumer.has_left(),
            Some(_) => self.behind == Behind::Tcp,
            None => false,
        }
    }

    /// Notes that the program has taken `n` bytes that TCP has brought, in a direction that markers may come in.
    pub fn on_taken(&mut self, n: usize) {
        self.scanned = self.scanned.saturating_sub(n);
        self.owed = self.owed.saturating_sub(n as u64);
    }
}

/// The promotion under way and the link that it led to.
pub struct Control<L, O> {
    /// The attempt under way.
    pub handshake: Option<Handshake>,
    /// The instance whose ASK the attempt began with (acceptor).
    pub asked_by: Option<InstanceId>,
    /// The peer's HELLO, once it has come.
    pub hello: Option<Hello>,
    /// Since when the socket is being handed to another holder, monotonic ns. `None` unless data or a marker was in the
    /// way.
    pub handed_since: Option<u64>,
    /// The address of this host that the connector has reached, if the connector is on another host (acceptor).
    pub reached_at: Option<IpAddr>,
    /// This end's stream on the link.
    pub opened: Option<Opened<L>>,
    /// The peer's stream and its first ring, from its OPEN until this end opens its own stream (acceptor).
    pub offered: Option<(Vqpn, Region)>,
    /// The reason to go back to TCP, as soon as the handshake has ended.
    pub leave: Option<Reason>,
    /// The stay on a link between hosts, until the stream is given back.
    pub stay: Option<Stay>,
    /// State of the socket under the same lock.
    pub own: O,
}

impl<L, O> Control<L, O> {
    /// Returns the link of the stream and the peer's number for it. `None` if the stream is not open at both ends.
    pub fn pair(&self) -> Option<(&L, Vqpn)> {
        let opened = self.opened.as_ref()?;
        match opened.theirs {
            Theirs::Open(yours) => Some((&opened.link, yours)),
            Theirs::None | Theirs::Awaited => None,
        }
    }
}

impl<L, O: Default> Default for Control<L, O> {
    fn default() -> Self {
        Self {
            handshake: None,
            asked_by: None,
            hello: None,
            handed_since: None,
            reached_at: None,
            opened: None,
            offered: None,
            leave: None,
            stay: None,
            own: O::default(),
        }
    }
}

/// This end's stream on a link.
#[derive(Clone, Debug)]
pub struct Opened<L> {
    /// The link.
    pub link: L,
    /// This end's number for the stream.
    pub mine: Vqpn,
    /// The peer's stream.
    pub theirs: Theirs,
    /// This end has asked the peer to take its sending direction back to TCP.
    pub asked_back: bool,
}

/// The peer's stream at the other end of this end's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Theirs {
    /// There is none: OPEN was not sent, or an end has refused.
    None,
    /// OPEN is sent and not answered yet.
    Awaited,
    /// The peer's stream has this number.
    Open(Vqpn),
}

/// One end of a connection, on links of the type `L`. `T`, `R` and `C` are the state of the socket under the locks
/// `tx`, `rx` and `control`.
pub struct Connection<L, T, R, C> {
    /// The mode of the sending direction.
    pub tx_mode: ModeCell,
    /// Counts the calls that are inside the kernel's send.
    pub tx_inside: Presence,
    /// The other state of the sending direction.
    pub tx: CachePadded<Lock<Tx<T>>>,
    /// The mode of the receiving direction.
    pub rx_mode: ModeCell,
    /// Counts the calls that are inside the kernel's receive.
    pub rx_inside: Presence,
    /// The other state of the receiving direction.
    pub rx: CachePadded<Lock<Rx<R>>>,
    /// The program has shut the receiving direction down.
    pub rx_shut: AtomicBool,
    /// An error of the connection, as errno, that no call has returned and that the kernel's socket does not hold; 0:
    /// none. The next call that asks for it returns it, once.
    untold: AtomicI32,
    /// The promotion, and the link that it led to.
    pub control: Lock<Control<L, C>>,
}

impl<L, T: Default, R: Default, C: Default> Default for Connection<L, T, R, C> {
    fn default() -> Self {
        Self {
            tx_mode: ModeCell::default(),
            tx_inside: Presence::default(),
            tx: CachePadded::new(Lock::new(Tx::default())),
            rx_mode: ModeCell::default(),
            rx_inside: Presence::default(),
            rx: CachePadded::new(Lock::new(Rx::default())),
            rx_shut: AtomicBool::new(false),
            untold: AtomicI32::new(0),
            control: Lock::new(Control::default()),
        }
    }
}

impl<L, T, R, C> Connection<L, T, R, C> {
    /// Returns whether neither direction needs anything but the kernel's call.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.tx_mode.load(Acquire) == Mode::Tcp && self.rx_mode.load(Acquire) == Mode::Tcp
    }

    /// Keeps `error` (errno), with which the connection has ended and which the kernel's socket does not report. Either
    /// the kernel has seen an end where bytes on the link were left unread. Or a call of the library has met the error,
    /// and so taken it from the socket (`sk_err`).
    pub fn keep_error(&self, error: i32) {
        self.untold.store(error, SeqCst);
    }

    /// Returns whether there is such an error that no call has returned yet.
    #[inline]
    pub fn has_untold(&self) -> bool {
        self.untold.load(SeqCst) != 0
    }

    /// Takes that error, for the call that returns it to the program. `None` if there is none.
    pub fn take_untold(&self) -> Option<i32> {
        Some(self.untold.swap(0, SeqCst)).filter(|error| *error != 0)
    }

    /// Returns whether calls are inside the kernel's receive or send.
    pub fn is_inside(&self) -> bool {
        !self.rx_inside.is_empty() || !self.tx_inside.is_empty()
    }
}

/// Takes the socket back to TCP: the sending direction now, the receiving one when the peer follows this end's request.
/// No handshake is under way. The caller holds the control lock.
pub fn leave_link<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, reason: Reason) {
    socket.set_why(reason.into());
    if stay::is_staying(control) {
        socket.pin();
        return stay::end_by(socket, control, Resume::leave);
    }
    demote_tx(socket);
    if let Some(opened) = &mut control.opened
        && socket.rx_mode.load(Acquire) == Mode::Link
        && !std::mem::replace(&mut opened.asked_back, true)
        && let Theirs::Open(yours) = opened.theirs
    {
        ask_back(&opened.link, yours, None);
    }
    socket.pin();
}

/// Asks the peer to take its sending direction back to TCP. With `resend_from`, a position in the bytes that the peer
/// has sent, the peer sends the bytes from there on again.
pub fn ask_back(link: &impl StreamLink, yours: Vqpn, resend_from: Option<u64>) {
    let _ = link.send(&Message::DemoteRequest { yours, resend_from });
}

/// Gives this end's stream on the link back. Both directions are on TCP, or the socket is being closed.
pub fn close_stream<S: SocketIo>(socket: &S, control: &mut ControlOf<S>) {
    let consumer = socket.rx.lock().and_then(|mut rx| {
        rx.behind = Behind::Mark;
        rx.consumer.take()
    });
    control.stay = None;
    if let Some(mut tx) = socket.tx.lock() {
        tx.producer = None;
        tx.then = Then::Tcp;
    }
    if let Some(Opened { link, mine, theirs, .. }) = control.opened.take() {
        match theirs {
            Theirs::Awaited => link.close_unanswered(mine, consumer),
            Theirs::None => link.close(mine, None, consumer),
            Theirs::Open(yours) => link.close(mine, Some(yours), consumer),
        }
    }
    socket.set_link(None);
    socket.show_link(None);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_of_ours_is_behind_a_position() {
        let mut tx = Tx::<()>::default();
        assert_eq!(tx.ours_from(0), 0);
        // HELLO in two parts, the second with data behind it; data; SWITCH.
        tx.on_marker_taken(1010, 10, 10);
        tx.on_marker_taken(1045, 35, 30);
        tx.on_marker_taken(1090, 20, 20);
        assert_eq!(tx.ours, [1000..1040, 1070..1090]);
        let behind = [0, 1000, 1039, 1040, 1069, 1080, 1090].map(|at| tx.ours_from(at));
        assert_eq!(behind, [60, 60, 21, 20, 20, 10, 0]);
        // Data alone.
        tx.on_marker_taken(1100, 10, 0);
        assert_eq!(tx.ours_from(0), 60);
        // RESUME: as a rule, the marker before the last is acknowledged by then.
        tx.on_marker_taken(1150, 40, 40);
        assert_eq!(tx.ours, [1070..1090, 1110..1150]);
    }
}
