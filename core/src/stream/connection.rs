//! An end of a TCP connection: the state of its two directions, and the code that carries out a promotion, the stay on
//! a link and the way back. The library uses this object with the kernel's socket and real links, and the simulation of
//! the tests with simulated ones. All calls to the socket, the link and the process go through [`SocketIo`]. No code
//! here blocks, reads a clock or makes a system call.
//!
//! These words stand in all files of this folder. A *marker* is a message of the library between the bytes of TCP. The
//! receiving direction is *scanned* while markers may come. The *carry* has bytes that the library has taken from TCP
//! and the program has not read. A *stay* is a stream's time on a link between hosts. A *holder* is a process with a
//! descriptor of the socket; the connection is *handed over* to a holder that reads and writes the kernel's socket
//! alone.
//!
//! The state machines of [`crate::stream::handshake`] and [`crate::stream::resume`] decide on the steps.
//! [`crate::stream::mode`] decides which medium a direction may run on. This file has the state that the steps change,
//! and this end's stream on the link. The modules carry the steps out:
//!
//! | module | what it does |
//! |---|---|
//! | `io` | the interface to socket, link and process |
//! | `directions` | the operations on either direction |
//! | `stay` | carries out the way back: from a link between hosts, and where the program or its peer asks for it |
//! | `attempt` | carries out the handshake's steps |
//! | `scan` | scans the bytes that TCP delivers for markers, and handles the markers |
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
    /// The writing end of the peer's ring. Present from the peer's OPEN or OPEN-ACK until this end refuses that OPEN or
    /// gives its stream back.
    pub producer: Option<Producer>,
    /// Bytes that are to be sent on TCP and that TCP has not taken yet: markers, then [`again`](Self::again) bytes of
    /// the program.
    pub marker: Vec<u8>,
    /// The number of bytes at the end of [`marker`](Self::marker) that are the program's. They were sent on the link,
    /// but the peer has not read them there, so they are sent again.
    pub again: usize,
    /// The last two runs of marker bytes that TCP has taken, as ranges of positions in TCP's stream. The peer may not
    /// have acknowledged them yet. They do not count as bytes of the program.
    pub ours: [Range<u64>; 2],
    /// How the direction goes on once TCP has taken all of [`marker`](Self::marker).
    pub then: Then,
    /// How far the program has ended the direction.
    pub end: End,
    /// The peer has not been notified of the last bytes in the ring, because more bytes will follow soon.
    pub wake_delayed: bool,
    /// The state of the socket object (`SocketIo`) that the same lock protects.
    pub own: O,
}

/// How the sending direction goes on once TCP has taken all of `Tx::marker`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Then {
    /// Over TCP.
    #[default]
    Tcp,
    /// Over the link, because the marker is SWITCH. Or the program has shut both directions while this one was on the
    /// link: it goes back to the link for its end mark, once no marker may come.
    Link,
    /// The direction is about to leave a link between hosts, and sends nothing. RESUME is not written yet.
    Leave,
    /// The direction has left a link between hosts, and waits for the peer's RESUME.
    Resume,
}

impl Then {
    /// Returns whether sends wait, behind the marker, until the direction has left the link.
    pub fn waits(self) -> bool {
        matches!(self, Self::Leave | Self::Resume)
    }

    /// Drops the plan to go on over the link: `Link` becomes `Tcp`, and `Leave` becomes `Resume`. Returns true in these
    /// two cases, and false if there was no such plan.
    pub fn take_link(&mut self) -> bool {
        let was_on_link = matches!(self, Self::Link | Self::Leave);
        if was_on_link {
            *self = if self.waits() { Self::Resume } else { Self::Tcp };
        }
        was_on_link
    }
}

/// How far the program has ended the sending direction.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum End {
    /// The program has not ended the direction.
    #[default]
    Open,
    /// The program has shut the direction down or closed the socket. The kernel's shutdown() follows once TCP has taken
    /// the marker.
    Due,
    /// The program has ended the direction, and no shutdown() of the kernel is still due.
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
    /// Notes that TCP has taken `taken` bytes. The first `ours` of them belong to markers. `written` is the number of
    /// bytes that TCP has taken so far, including these.
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
    /// The reading end of this end's ring. Present from this end's OPEN or OPEN-ACK on, and used while the direction is
    /// on the link.
    pub consumer: Option<Consumer>,
    /// The nonce that markers to this end start with. `None` if the direction is not scanned for markers.
    pub scan: Option<Nonce>,
    /// Bytes that were taken from TCP and that the program has not read: the possible beginning of a marker, bytes that
    /// were read ahead, or bytes that a call inside the kernel has received while the direction moved to the link.
    pub carry: Carry,
    /// The program has shut the direction down. The kernel's shutdown() follows once no marker may come any more.
    pub then_shut: bool,
    /// Bytes that precede the carry, set aside while the connection is handed to another holder (P85).
    pub aside: Vec<u8>,
    /// The number of bytes at the front, in the carry and then in TCP, that a scan has found to be payload. So small
    /// reads do not scan these bytes again.
    pub scanned: usize,
    /// How the direction goes on behind the last byte in the ring.
    pub behind: Behind,
    /// If true, a receive fails with ECONNRESET once the program has read all bytes of the ring.
    pub is_lost: bool,
    /// The number of bytes that the peer's RESUME has announced and that the program has not read from TCP yet.
    pub owed: u64,
    /// The state of the socket object (`SocketIo`) that the same lock protects.
    pub own: O,
}

/// How the receiving direction goes on behind the last byte in its ring.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Behind {
    /// The end mark in the ring, or the end of the link, decides. The ring is on a link within the host, or there is no
    /// ring.
    #[default]
    Mark,
    /// More bytes may come on the link, which is one between hosts.
    Link,
    /// In TCP, because the link between hosts brings no more bytes.
    Tcp,
}

impl<O> Rx<O> {
    /// Returns whether the ring is on a link between hosts.
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

    /// Returns whether the bytes after the last byte in the ring come by TCP. They may have come already.
    #[inline]
    pub fn goes_on_in_tcp(&self) -> bool {
        match &self.consumer {
            Some(consumer) if self.behind == Behind::Mark => consumer.has_left(),
            Some(_) => self.behind == Behind::Tcp,
            None => false,
        }
    }

    /// Notes that the program has read `n` bytes that TCP has brought, while the direction is MARKED.
    pub fn on_taken(&mut self, n: usize) {
        self.scanned = self.scanned.saturating_sub(n);
        self.owed = self.owed.saturating_sub(n as u64);
    }
}

/// The promotion of a connection: the attempt under way, and this end's stream on the link.
pub struct Control<L, O> {
    /// The state machine of the attempt under way; `None` if there is none.
    pub handshake: Option<Handshake>,
    /// Acceptor: the instance whose ASK began the attempt.
    pub asked_by: Option<InstanceId>,
    /// The peer's HELLO, once it has come.
    pub hello: Option<Hello>,
    /// The time at which the hand-over of the socket to another holder first had to wait for a marker, monotonic ns.
    /// `None` if it has not.
    pub handed_since: Option<u64>,
    /// Acceptor: the address of this host that the connector has reached. `None` if the connector is on this host.
    pub reached_at: Option<IpAddr>,
    /// This end's stream on the link.
    pub opened: Option<Opened<L>>,
    /// Acceptor: the number of the peer's stream and its first ring. Present from the peer's OPEN until this end opens
    /// its own stream.
    pub offered: Option<(Vqpn, Region)>,
    /// Why the connection goes back to TCP; `None` if it does not. During a handshake the way back begins when the
    /// handshake has ended.
    pub leave: Option<Reason>,
    /// The stay on a link between hosts. Present until this end gives its stream back.
    pub stay: Option<Stay>,
    /// The state of the socket object (`SocketIo`) that the same lock protects.
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
    /// This end has asked the peer to move the peer's sending direction back to TCP.
    pub asked_back: bool,
}

/// The peer's stream at the other end of this end's stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Theirs {
    /// There is none: this end has not sent OPEN, or one of the ends has refused.
    None,
    /// This end has sent OPEN, and the peer has not answered yet.
    Awaited,
    /// The peer's stream has this number.
    Open(Vqpn),
}

/// One end of a connection, on links of the type `L`. `T`, `R` and `C` are the socket's own state that the locks `tx`,
/// `rx` and `control` protect.
pub struct Connection<L, T, R, C> {
    /// The mode of the sending direction.
    pub tx_mode: ModeCell,
    /// Counts the calls that are inside the kernel's send.
    pub tx_inside: Presence,
    /// All other state of the sending direction.
    pub tx: CachePadded<Lock<Tx<T>>>,
    /// The mode of the receiving direction.
    pub rx_mode: ModeCell,
    /// Counts the calls that are inside the kernel's receive.
    pub rx_inside: Presence,
    /// All other state of the receiving direction.
    pub rx: CachePadded<Lock<Rx<R>>>,
    /// The program has shut the receiving direction down.
    pub rx_shut: AtomicBool,
    /// An error of the connection (errno) that the program has not got yet and that the kernel's socket does not hold;
    /// 0 if there is none. The next call of the program that would report it returns it, once.
    untold: AtomicI32,
    /// The attempt to promote the connection, and this end's stream on the link.
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
    /// Returns whether both directions are on plain TCP, where each call is left to the kernel.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.tx_mode.load(Acquire) == Mode::Tcp && self.rx_mode.load(Acquire) == Mode::Tcp
    }

    /// Keeps `error` (errno) for the program's next call. The connection has ended with it, but the kernel's socket
    /// does not report it, for one of two reasons. The kernel has seen a clean end, although the peer left bytes on the
    /// link unread. Or a call of the library has got the error and so removed it from the socket (`sk_err`).
    pub fn keep_error(&self, error: i32) {
        self.untold.store(error, SeqCst);
    }

    /// Returns whether there is an error that `keep_error` keeps and no call has returned yet.
    #[inline]
    pub fn has_untold(&self) -> bool {
        self.untold.load(SeqCst) != 0
    }

    /// Takes the kept error, for the call that returns it to the program. `None` if there is none.
    pub fn take_untold(&self) -> Option<i32> {
        Some(self.untold.swap(0, SeqCst)).filter(|error| *error != 0)
    }

    /// Returns whether any call of the program is inside the kernel's receive or send.
    pub fn is_inside(&self) -> bool {
        !self.rx_inside.is_empty() || !self.tx_inside.is_empty()
    }
}

/// Takes the socket back to TCP. Within a host the sending direction goes back now, and the receiving direction when
/// the peer has answered the request that this sends. Between hosts both directions go back by an exchange of RESUME.
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

/// Asks the peer to move its sending direction of the stream `yours` back to TCP. With `resend_from`, a position in the
/// bytes that the peer has sent on the link, the peer also sends the bytes from that position on again.
pub fn ask_back(link: &impl StreamLink, yours: Vqpn, resend_from: Option<u64>) {
    let _ = link.send(&Message::DemoteRequest { yours, resend_from });
}

/// Gives this end's stream back to the link. Both directions are on TCP, or the socket is being closed.
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
        // TCP takes HELLO in two parts, the second with 5 bytes of data behind it, then data, then SWITCH.
        tx.on_marker_taken(1010, 10, 10);
        tx.on_marker_taken(1045, 35, 30);
        tx.on_marker_taken(1090, 20, 20);
        assert_eq!(tx.ours, [1000..1040, 1070..1090]);
        let behind = [0, 1000, 1039, 1040, 1069, 1080, 1090].map(|at| tx.ours_from(at));
        assert_eq!(behind, [60, 60, 21, 20, 20, 10, 0]);
        // Data alone.
        tx.on_marker_taken(1100, 10, 0);
        assert_eq!(tx.ours_from(0), 60);
        // TCP takes RESUME. HELLO is forgotten: as a rule, the peer has acknowledged it by then.
        tx.on_marker_taken(1150, 40, 40);
        assert_eq!(tx.ours, [1070..1090, 1110..1150]);
    }
}
