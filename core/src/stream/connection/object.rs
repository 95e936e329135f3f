//! The state of one end of a connection: the two directions, and what moves them. What is done with it lies in the
//! modules beside this.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::atomic::{
    AtomicBool, AtomicI32,
    Ordering::{Acquire, SeqCst},
};

use crossbeam_utils::CachePadded;

use super::carry::Carry;
use crate::fabric::ring::{Consumer, Producer};
use crate::ids::{InstanceId, Nonce, Vqpn};
use crate::lock::Lock;
use crate::stats::Reason;
use crate::stream::handshake::Handshake;
use crate::stream::mode::{Mode, ModeCell, Receiving, Sending};
use crate::stream::resume::Resume;
use crate::sync::Presence;
use crate::wire::{LinkOffer, RingOffer};

/// The sending direction.
#[derive(Default)]
pub struct Tx<O> {
    /// Present while the direction is on the link, and until the peer has read it.
    pub producer: Option<Producer>,
    /// What TCP has not taken yet: marker bytes, and behind them [`again`](Self::again) bytes of the program's.
    pub marker: Vec<u8>,
    /// How many bytes at the end of [`marker`](Self::marker) are the program's: what the peer has not read on the link
    /// is sent again.
    pub again: usize,
    /// Where in the stream of TCP the last markers are that TCP has taken, which may not be acknowledged yet.
    pub ours: [Range<u64>; 2],
    /// The pending marker is a SWITCH: once it is out the direction is on the link.
    pub then_link: bool,
    /// The direction has left a link between hosts, and the other's RESUME has not come: nothing but the marker
    /// goes out.
    pub is_suspended: bool,
    /// The program has shut the direction down: once the marker is out the kernel is told.
    pub then_shut: bool,
    /// The program has shut the direction down.
    pub is_shut: bool,
    /// Bytes are in the ring of which the peer was not told: more follows.
    pub wake_delayed: bool,
    /// What the socket keeps under the same lock.
    pub own: O,
}

impl<O> Tx<O> {
    /// TCP, which was given `written` bytes in all, has taken `taken` of them last; they began with `ours` of a marker.
    pub(super) fn on_marker_taken(&mut self, written: u64, taken: usize, ours: usize) {
        let start = written.saturating_sub(taken as u64);
        let end = start + ours as u64;
        let [before, last] = &mut self.ours;
        if last.end == start {
            last.end = end;
        } else if ours > 0 {
            *before = std::mem::replace(last, start..end);
        }
    }

    /// Bytes of those markers that are at or behind the position `at` in TCP's stream.
    pub fn ours_from(&self, at: u64) -> u64 {
        let behind = |range: &Range<u64>| range.end.saturating_sub(range.start.max(at));
        self.ours.iter().map(behind).sum()
    }
}

/// The receiving direction.
#[derive(Default)]
pub struct Rx<O> {
    /// Present from OPEN on; in use while the direction is on the link.
    pub consumer: Option<Consumer>,
    /// What markers to us start with, while we look for them.
    pub scan: Option<Nonce>,
    /// Bytes taken from TCP that may be the beginning of a marker, or that a call took which was in the
    /// kernel when the direction left TCP, or that were read ahead.
    pub carry: Carry,
    /// The program has shut the direction down: once no marker may come any more the kernel is told.
    pub then_shut: bool,
    /// What came before all of that, while the connection is handed to another holder (`aside`).
    pub aside: Vec<u8>,
    /// Bytes in front, in the carry and then in TCP, that a scan has found to be payload: small
    /// reads do not scan them again.
    pub scanned: usize,
    /// The ring is one of a link between hosts: it is not left before [`read_on`](Self::read_on).
    pub stays: bool,
    /// What follows the ring is in TCP: nothing more comes on a link between hosts.
    pub read_on: bool,
    /// After the ring comes ECONNRESET.
    pub is_lost: bool,
    /// Bytes that RESUME has announced and that TCP has not brought yet.
    pub owed: u64,
    /// What the socket keeps under the same lock.
    pub own: O,
}

impl<O> Rx<O> {
    /// What was set aside is in front again.
    pub fn restore_aside(&mut self) {
        if !self.aside.is_empty() {
            let rest = self.carry.take();
            self.carry.push(&std::mem::take(&mut self.aside));
            self.carry.push(&rest);
        }
    }

    /// What follows the last byte in the ring is in TCP, and may be there already.
    #[inline]
    pub fn goes_on_in_tcp(&self) -> bool {
        match &self.consumer {
            Some(_) if self.stays => self.read_on,
            Some(consumer) => consumer.has_left(),
            None => false,
        }
    }

    /// The program has taken `n` bytes that TCP has brought, among markers.
    pub fn on_taken(&mut self, n: usize) {
        self.scanned = self.scanned.saturating_sub(n);
        self.owed = self.owed.saturating_sub(n as u64);
    }
}

/// The promotion under way and the link that it led to.
pub struct Control<L, O> {
    /// The attempt under way.
    pub handshake: Option<Handshake>,
    /// Whose ASK the attempt began with (acceptor).
    pub asked_by: Option<InstanceId>,
    /// Whose HELLO has come.
    pub greeted_by: Option<InstanceId>,
    /// Since when the socket is being handed to another holder, monotonic ns, if data or a marker was in the way.
    pub handed_since: Option<u64>,
    /// Where that HELLO says that a link can be had.
    pub offer: Option<LinkOffer>,
    /// The connector is on another host, and has reached us at this address (acceptor).
    pub reached_at: Option<IpAddr>,
    /// Our end of the stream on the link.
    pub opened: Option<Opened<L>>,
    /// The other end's number for the stream, once it is open.
    pub peer: Option<Vqpn>,
    /// The ring that it has to begin with, until it is told that it has one (acceptor).
    pub first: Option<RingOffer>,
    /// Go back to TCP as soon as the handshake is over.
    pub leave: Option<Reason>,
    /// The stay on a link between hosts, until the stream is given back.
    pub resume: Option<Resume>,
    /// Nothing but a failure of the link ends that stay: when it is over, the connection may be promoted again.
    pub returns: bool,
    /// What RESUME starts with, to us and to the other.
    pub nonces: Option<[Nonce; 2]>,
    /// The other end was asked to take its sending direction back to TCP.
    pub asked_back: bool,
    /// What the socket keeps under the same lock.
    pub own: O,
}

impl<L, O: Default> Default for Control<L, O> {
    fn default() -> Self {
        Self {
            handshake: None,
            asked_by: None,
            greeted_by: None,
            handed_since: None,
            offer: None,
            reached_at: None,
            opened: None,
            peer: None,
            first: None,
            leave: None,
            resume: None,
            returns: false,
            nonces: None,
            asked_back: false,
            own: O::default(),
        }
    }
}

/// Our end of a stream on a link.
#[derive(Clone, Debug)]
pub struct Opened<L> {
    /// The link.
    pub link: L,
    /// Our number for the stream.
    pub mine: Vqpn,
    /// OPEN is out and not answered yet.
    pub asked: bool,
}

/// One end of a connection, on links of the type `L`. `T`, `R` and `C` are what the socket keeps under the locks of the
/// sending direction, the receiving one, and both.
pub struct Connection<L, T, R, C> {
    /// What sending runs on.
    pub tx_mode: ModeCell<Sending>,
    /// Calls inside the kernel's send.
    pub tx_inside: Presence,
    /// The rest of it.
    pub tx: CachePadded<Lock<Tx<T>>>,
    /// What receiving runs on.
    pub rx_mode: ModeCell<Receiving>,
    /// Calls inside the kernel's receive.
    pub rx_inside: Presence,
    /// The rest of it.
    pub rx: CachePadded<Lock<Rx<R>>>,
    /// The program has shut the receiving direction down.
    pub rx_shut: AtomicBool,
    /// An error of the connection that no call has told of and that the kernel's socket does not hold, as errno; 0:
    /// none. The next call that asks for it says it, once.
    untold: AtomicI32,
    /// What moves the two.
    pub control: Lock<Control<L, C>>,
}

impl<L, T: Default, R: Default, C: Default> Default for Connection<L, T, R, C> {
    fn default() -> Self {
        Self {
            tx_mode: ModeCell::default(),
            tx_inside: Presence::new(),
            tx: CachePadded::new(Lock::new(Tx::default())),
            rx_mode: ModeCell::default(),
            rx_inside: Presence::new(),
            rx: CachePadded::new(Lock::new(Rx::default())),
            rx_shut: AtomicBool::new(false),
            untold: AtomicI32::new(0),
            control: Lock::new(Control::default()),
        }
    }
}

impl<L, T, R, C> Connection<L, T, R, C> {
    /// Whether neither direction needs anything but the kernel's call.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.tx_mode.load(Acquire) == Mode::Tcp && self.rx_mode.load(Acquire) == Mode::Tcp
    }

    /// The connection has ended with `error`, which the kernel's socket does not tell: it has seen an end where bytes
    /// of ours were left unread, or a call of the library's has met the error, and so taken it from the socket
    /// (`sk_err`).
    pub fn keep_error(&self, error: i32) {
        self.untold.store(error, SeqCst);
    }

    /// Whether such an error is still to be told.
    #[inline]
    pub fn has_untold(&self) -> bool {
        self.untold.load(SeqCst) != 0
    }

    /// The same, for who tells it.
    pub fn take_untold(&self) -> Option<i32> {
        Some(self.untold.swap(0, SeqCst)).filter(|error| *error != 0)
    }

    /// Whether calls are inside the kernel's receive or send.
    pub fn is_inside(&self) -> bool {
        !self.rx_inside.is_empty() || !self.tx_inside.is_empty()
    }

    /// With the mode set to MARKED: no call is inside the kernel's send.
    pub fn is_tx_quiet(&self) -> bool {
        self.tx_inside.is_empty()
    }
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
        // RESUME: what was before the last is acknowledged by then, as a rule.
        tx.on_marker_taken(1150, 40, 40);
        assert_eq!(tx.ours, [1070..1090, 1110..1150]);
    }
}
