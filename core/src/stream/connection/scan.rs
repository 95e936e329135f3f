//! Scans the bytes that TCP delivers for markers. A *look* scans the bytes at the front. Markers go to the attempt, and
//! all other bytes to the program. Bytes that may be the beginning of a marker are held back. If the sending direction
//! waits for a marker, this code also reads ahead of the program. The *carry* has the bytes that were taken from TCP
//! and that the program has not read.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use crate::ids::{ID_BYTES, Nonce};
use crate::lock::Guard;
use crate::scratch;
use crate::stream::connection::attempt::{feed, on_end, on_resume};
use crate::stream::connection::directions::{is_shut, settle, take};
use crate::stream::connection::io::{ControlOf, Half, Peeked, RxOf, SocketIo, Task, Tcp};
use crate::stream::connection::{Control, stay};
use crate::stream::handshake::{Closing, Role};
use crate::stream::mode::Mode;
use crate::stream::resume;
use crate::wire::marker::{Found, payload_in, scan};
use crate::wire::{MAX_MARKER, Marker, WireError};

/// The number of bytes at the front of TCP that one look scans for markers.
const PEEK: usize = 16 * 1024;

/// The most bytes of one connection that are read ahead into its carry. ([`ALL`] bounds all connections together.) More
/// is not needed: between two programs that both do not read, kernel TCP would hold fewer bytes.
const MOST: usize = 16 * 1024 * 1024;
/// The number of bytes that one step reads ahead from TCP.
const PIECE: usize = 16 * 1024;
/// How many pieces of unread data of one connection the service thread drops before it serves other connections.
const DROPS: usize = 64;

/// The number of bytes that may be read ahead for each connection, even if other connections use up [`ALL`]. The kernel
/// would hold more bytes of a connection.
const OWN: usize = 64 * 1024;
/// The number of bytes that may be read ahead for all connections together, beyond [`OWN`] for each. Without this bound
/// the peers would decide how much memory is used.
const ALL: usize = 256 * 1024 * 1024;

/// The number of bytes that are read ahead now, over all connections. The first [`OWN`] bytes of each connection do not
/// count.
static AHEAD: AtomicUsize = AtomicUsize::new(0);

/// The result of a look at the front of the receiving direction.
pub enum Ahead {
    /// Data of the program.
    Payload {
        /// The number of bytes that come first, from the carry.
        carry: usize,
        /// The number of bytes that follow, from the kernel.
        kernel: usize,
    },
    /// TCP has no bytes now.
    Nothing,
    /// The end of TCP, or an error. The kernel's own receive call returns which.
    Ended,
    /// TCP has no bytes now, and the program has shut the direction, so a receive returns the end. Bytes that come
    /// later are scanned all the same.
    Shut,
    /// The direction is not scanned any more, so the caller checks its mode again.
    Changed,
}

impl Ahead {
    /// Returns the value for `len` bytes of data. The first `carried` bytes come from the carry, the others from the
    /// kernel.
    #[inline]
    fn payload(len: usize, carried: usize) -> Self {
        let carry = len.min(carried);
        Self::Payload {
            carry,
            kernel: len - carry,
        }
    }
}

/// How a look treats the urgent mark in front of a marker. A look that reads the marker reads past the mark, and then
/// the kernel drops the urgent byte.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AtMark {
    /// The marker stays in TCP, because the program may still ask for the urgent byte.
    Stop,
    /// The marker is read: the program itself reads past the mark, or has closed the socket.
    GoOn,
    /// The marker is read, for a hand-over of the socket. The data in front of the marker has been set aside
    /// (`Rx::aside`). Looks of the other two kinds return no bytes while data is set aside.
    HandOver,
}

/// Returns the data that an earlier look has found, if that is at least `want` bytes. `None` if a new look is needed.
pub fn seen_ahead<S: SocketIo>(socket: &S, rx: &RxOf<S>, want: usize) -> Option<Ahead> {
    if rx.scanned < want || rx.scanned == 0 || socket.rx_mode.load(Acquire) != Mode::Marked {
        return None;
    }
    Some(Ahead::payload(rx.scanned, rx.carry.len()))
}

/// Scans the bytes at the front of TCP, for a socket whose receiving direction is MARKED, and handles the markers at
/// the front. The caller holds `control`, and `rx` through `guard`. `None` without memory, or if a lock cannot be
/// taken.
pub fn look_ahead<'a, S: SocketIo>(
    socket: &'a S,
    control: &mut ControlOf<S>,
    guard: Guard<'a, RxOf<S>>,
    at_mark: AtMark,
) -> Option<(Ahead, Guard<'a, RxOf<S>>)> {
    let (ahead, guard) = look_at_front(socket, control, guard, at_mark)?;
    // If the program has shut the direction and the kernel's shutdown() is still due, TCP itself does not report the
    // shutdown.
    let is_shut = guard.then_shut && matches!(ahead, Ahead::Nothing);
    Some((if is_shut { Ahead::Shut } else { ahead }, guard))
}

fn look_at_front<'a, S: SocketIo>(
    socket: &'a S,
    control: &mut ControlOf<S>,
    mut guard: Guard<'a, RxOf<S>>,
    at_mark: AtMark,
) -> Option<(Ahead, Guard<'a, RxOf<S>>)> {
    let mut buf = scratch::zeroed(MAX_MARKER + PEEK)?;
    let mut over = false;
    loop {
        if socket.rx_mode.load(Acquire) != Mode::Marked {
            return Some((Ahead::Changed, guard));
        }
        // In two cases this look returns no bytes. Data that is set aside comes first. Or a call has been inside the
        // kernel since before the scan began, and the bytes that it receives come first.
        let is_aside = !guard.aside.is_empty();
        let waits = is_aside && (guard.scan.is_none() || at_mark != AtMark::HandOver);
        if waits || !socket.rx_inside.is_empty() {
            return Some((Ahead::Nothing, guard));
        }
        let carried = guard.carry.len().min(PEEK);
        let (front, rest) = buf.split_at_mut(carried);
        front.copy_from_slice(guard.carry.as_slice().get(..carried)?);
        let Some(tcp) = socket.tcp() else {
            return Some((Ahead::Ended, guard));
        };
        let peeked = if guard.carry.len() > carried {
            // The carry has more bytes than fit into `buf`, so the bytes in TCP are not next.
            0
        } else {
            match tcp.peek(rest) {
                Peeked::Bytes(n) => n,
                Peeked::Ended if carried == 0 => return ended(socket, control, guard),
                Peeked::Shut if carried == 0 => return Some((Ahead::Shut, guard)),
                Peeked::Ended | Peeked::Shut | Peeked::Nothing => 0,
            }
        };
        let Some(nonce) = guard.scan else {
            // The scan has ended. The program gets the bytes in the carry, then as many bytes from TCP as RESUME has
            // announced (`owed`, P78). If this end has to report a reset, the program first gets all bytes that precede
            // it.
            let resets = socket.has_untold();
            if carried == 0 && guard.owed == 0 && !resets {
                settle(socket, &guard);
                return Some((Ahead::Changed, guard));
            }
            let owed = match usize::try_from(guard.owed) {
                Ok(owed) if !resets => owed,
                _ => usize::MAX,
            };
            let kernel = peeked.min(owed.saturating_sub(carried));
            if carried + kernel == 0 {
                return Some((Ahead::Nothing, guard));
            }
            return Some((Ahead::Payload { carry: carried, kernel }, guard));
        };
        let seen = scan(&nonce, buf.get(..carried + peeked)?);
        guard.scanned = seen.payload;
        if seen.payload > 0 {
            return Some((Ahead::payload(seen.payload, carried), guard));
        }
        if !matches!(seen.what, Found::Payload) && at_mark == AtMark::Stop && tcp.is_at_mark() {
            let behind = buf.get(carried..carried + peeked).unwrap_or_default();
            let ahead = match payload_in(&nonce, behind) {
                0 => Ahead::Nothing,
                n => Ahead::payload(n, 0),
            };
            return Some((ahead, guard));
        }
        let (marker, len) = match seen.what {
            Found::Payload => return Some((Ahead::Nothing, guard)),
            // P34: TCP has ended in the middle of a possible marker, so these bytes are no marker. The loop has peeked
            // again after it saw the end, so all bytes that precede the end are in `seen`.
            Found::PartialMarker { have } if over => {
                if have < ID_BYTES {
                    return Some((Ahead::payload(have, carried), guard));
                }
                let _ = take(&tcp, &mut guard, have);
                socket.count_ours(Half::Receiving, have);
                continue;
            }
            Found::PartialMarker { have } => {
                over = tcp.has_peer_ended();
                if over {
                    continue;
                }
                // The part of a marker moves to the carry. In the kernel a single byte keeps all of the buffer that it
                // came in, and with little room TCP would close its window to the bytes that follow.
                let new = buf.get(carried..have).unwrap_or_default();
                if tcp.take(new.len()).is_ok() {
                    guard.carry.push(new);
                }
                return Some((Ahead::Nothing, guard));
            }
            Found::Marker { marker, len } => (marker, len),
        };
        let _ = take(&tcp, &mut guard, len);
        socket.count_ours(Half::Receiving, len);
        drop(guard);
        on_marker(socket, control, marker);
        guard = socket.rx.lock()?;
    }
}

/// Handles the end of TCP in the receiving direction, after which no marker comes.
fn ended<'a, S: SocketIo>(
    socket: &'a S,
    control: &mut ControlOf<S>,
    guard: Guard<'a, RxOf<S>>,
) -> Option<(Ahead, Guard<'a, RxOf<S>>)> {
    drop(guard);
    on_end(socket, control);
    let mut guard = socket.rx.lock()?;
    if std::mem::take(&mut guard.owed) > 0 {
        let is_shut = socket.tx.lock().is_none_or(|tx| tx.end.is_shut());
        socket.report_reset(is_shut);
    }
    let scanning = socket.rx_mode.load(Acquire) == Mode::Marked;
    Some((if scanning { Ahead::Ended } else { Ahead::Changed }, guard))
}

fn on_marker<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, marker: Result<Marker, WireError>) {
    match marker {
        Ok(Marker::Hello(hello)) => {
            // P32: an acceptor answers a HELLO by ABORT if it comes from another instance than the asker.
            let expected = control.handshake.as_ref().is_some_and(|h| h.role == Role::Connector);
            if !expected && (control.leave.is_some() || is_shut(socket)) {
                // Since this end's YES the program has used the socket in a way that rules out a promotion. This end
                // owes an ABORT, and nothing else.
                return feed(socket, control, |h| Ok(h.on_bad_marker()));
            }
            if !expected && control.asked_by != Some(hello.instance) {
                tracing::warn!(target: "rdmasock::promote", slot = socket.slot(), peer = %hello.instance, "greeted by another than the asker");
                return feed(socket, control, |h| Ok(h.on_bad_marker()));
            }
            control.hello = Some(hello);
            feed(socket, control, |h| h.on_hello(hello.instance));
        }
        Ok(Marker::Switch) => feed(socket, control, |h| h.on_closing(Closing::Switch)),
        Ok(Marker::Resume { received, sent }) => on_resume(socket, control, received, sent),
        Ok(Marker::Abort(reason)) => {
            tracing::debug!(target: "rdmasock::promote", slot = socket.slot(), %reason, "peer aborts");
            feed(socket, control, |h| h.on_closing(Closing::Abort));
        }
        Err(error) => {
            tracing::warn!(target: "rdmasock::promote", slot = socket.slot(), %error, "bad marker");
            feed(socket, control, |h| Ok(h.on_bad_marker()));
        }
    }
}

/// Scans `bytes`. A call that was inside the kernel when the scan began has received them. Moves the data to the front
/// of `bytes`, handles markers, and holds back the possible beginning of a marker. Returns the length of the data.
/// `rx_inside` still counts the call.
pub fn scan_taken<S: SocketIo>(socket: &S, bytes: &mut [u8]) -> usize {
    let len = bytes.len();
    let Some(mut control) = socket.control.lock() else {
        return len;
    };
    let mut kept = 0;
    let mut at = 0;
    while at < len {
        let Some(mut rx) = socket.rx.lock() else {
            break;
        };
        let Some(nonce) = rx.scan else {
            if socket.rx_mode.load(Acquire) == Mode::Link {
                // The direction has moved to the link meanwhile, and these bytes came by TCP behind its last byte on
                // the link. So the bytes on the link come first.
                rx.carry.push(bytes.get(at..len).unwrap_or_default());
                break;
            }
            bytes.copy_within(at..len, kept);
            kept += len - at;
            break;
        };
        let seen = scan(&nonce, bytes.get(at..len).unwrap_or_default());
        bytes.copy_within(at..at + seen.payload, kept);
        kept += seen.payload;
        at += seen.payload;
        let (marker, n) = match seen.what {
            Found::Payload => break,
            Found::PartialMarker { have } => {
                rx.carry.push(bytes.get(at..at + have).unwrap_or_default());
                break;
            }
            Found::Marker { marker, len } => (marker, len),
        };
        at += n;
        socket.count_ours(Half::Receiving, n);
        drop(rx);
        on_marker(socket, &mut control, marker);
    }
    kept
}

/// Returns whether the unread bytes of TCP contain a marker, or the beginning of a marker with its whole nonce. `None`
/// if there are more than `PEEK` unread bytes, or if a call of the program is inside the kernel and may have a part of
/// them.
pub fn has_marker<S: SocketIo>(socket: &S) -> Option<bool> {
    let rx = socket.rx.lock()?;
    let (Some(nonce), Some(tcp)) = (rx.scan, socket.tcp()) else {
        return Some(false);
    };
    let carried = rx.carry.len();
    if carried + tcp.unread() > PEEK || !socket.rx_inside.is_empty() {
        return None;
    }
    let mut buf = scratch::zeroed(PEEK)?;
    let (front, rest) = buf.split_at_mut_checked(carried)?;
    front.copy_from_slice(rx.carry.as_slice());
    let peeked = tcp.peek_all(rest);
    Some(match scan(&nonce, buf.get(..carried + peeked)?).what {
        Found::Payload => false,
        Found::PartialMarker { have } => have >= ID_BYTES,
        Found::Marker { .. } => true,
    })
}

/// Takes the locks, looks at the front of TCP and handles markers there. Returns what the program can read. `None`
/// without memory, or in a signal handler that has interrupted this thread's use of the connection.
pub fn look<S: SocketIo>(socket: &S) -> Option<Ahead> {
    let mut control = socket.control.lock()?;
    let rx = socket.rx.lock()?;
    seen_ahead(socket, &rx, 1).or_else(|| Some(look_ahead(socket, &mut control, rx, AtMark::Stop)?.0))
}

// Search for a marker behind data that the program does not read. A program may read nothing before it has sent all its
// data, and its sending direction may wait for that marker. Bytes move from TCP to the carry until the carry has the
// marker.

/// If the sending direction waits for a marker, searches the unread data for it, and carries out the steps that the
/// marker leads to for that direction. `is_blocked` is true if a send finds no room on the link and the peer's reader
/// does not move. Returns whether bytes were taken from the kernel. If so, the caller wakes the threads that wait for
/// data, because the kernel does not report those bytes.
pub fn read_ahead<S: SocketIo>(socket: &S, is_blocked: bool) -> bool {
    let mut took = false;
    let Some(mut control) = socket.control.lock() else {
        return false;
    };
    while waits(&control, is_blocked) {
        let seen = socket.rx.lock().and_then(|mut rx| next(socket, &mut rx, &mut took));
        let Some(ahead) = seen else { break };
        on_ahead(socket, &mut control, ahead);
        if ahead == resume::Ahead::End {
            break;
        }
    }
    took
}

fn waits<L, O>(control: &Control<L, O>, is_blocked: bool) -> bool {
    let resume = control.stay.as_ref().map(|stay| &stay.resume);
    resume.is_some_and(|r| r.looks_ahead() || is_blocked && r.is_unanswered())
}

fn on_ahead<S: SocketIo>(socket: &S, control: &mut ControlOf<S>, ahead: resume::Ahead) {
    tracing::trace!(target: "rdmasock::promote", slot = socket.slot(), ?ahead, "before its turn");
    match control.stay.as_mut().map(|stay| stay.resume.on_ahead(ahead)) {
        // The marker leads to no step, so no thread has to be woken.
        Some(Ok(steps)) if steps.is_empty() => {}
        Some(Ok(steps)) => stay::carry_out(socket, control, steps),
        _ => stay::violation(socket, "a marker out of turn"),
    }
}

/// Returns the next marker that TCP has brought, or the end of TCP. Skips HELLO. Sets `took` if it takes bytes from the
/// kernel. `None` if TCP has brought neither, if the direction is not scanned, or if no more bytes may be read ahead.
fn next<S: SocketIo>(socket: &S, rx: &mut RxOf<S>, took: &mut bool) -> Option<resume::Ahead> {
    loop {
        // A call may have been inside the kernel since before the scan began. The bytes that it receives come first.
        if socket.rx_mode.load(Acquire) != Mode::Marked || !socket.rx_inside.is_empty() {
            return None;
        }
        let nonce = rx.scan?;
        if let Some(marker) = rx.carry.next_marker(&nonce) {
            return Some(match marker {
                Marker::Switch => resume::Ahead::Closing(Closing::Switch),
                Marker::Abort(_) => resume::Ahead::Closing(Closing::Abort),
                Marker::Resume { received, sent } => resume::Ahead::Resume { received, sent },
                // The handshake gets HELLO only when the program has read the data in front of it.
                Marker::Hello(_) => continue,
            });
        }
        if rx.carry.len() >= MOST || rx.carry.charge(PIECE).is_err() {
            return None;
        }
        let mut piece = scratch::zeroed(PIECE)?;
        match socket.tcp()?.receive(&mut piece) {
            Peeked::Ended => return Some(resume::Ahead::End),
            Peeked::Bytes(n) => {
                rx.carry.push(piece.get(..n).unwrap_or_default());
                *took = true;
            }
            Peeked::Nothing | Peeked::Shut => return None,
        }
    }
}

/// Drops the data in front of the markers that this end waits for (P79). The program has closed the socket, so no call
/// reads the data. The object stays until the peer has all bytes that the program has sent.
pub fn drop_unread<S: SocketIo>(socket: &S) {
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    let mut drop_next = || {
        let (ahead, mut rx) = look_ahead(socket, &mut control, socket.rx.lock()?, AtMark::GoOn)?;
        let Ahead::Payload { carry, kernel } = ahead else {
            return None;
        };
        rx.scanned = 0;
        take(&socket.tcp()?, &mut rx, carry + kernel).ok()
    };
    // The number of pieces is bounded, so that a peer that sends without end does not occupy the service thread.
    if (0..DROPS).all(|_| drop_next().is_some()) {
        drop(control);
        socket.later(Task::Settle);
    }
}

/// Bytes that were taken from TCP and that the program has not read: the possible beginning of a marker, bytes that
/// were read ahead, or bytes that a call has received and that come behind the bytes on the link.
#[derive(Default)]
pub struct Carry {
    /// The first `read` of these bytes have been read. The others are the contents of the carry.
    bytes: Vec<u8>,
    /// The number of bytes at the front of `bytes` that the program has read.
    read: usize,
    /// The number of unread bytes at the front that [`Self::next_marker`] has searched, and whose markers it has all
    /// returned.
    looked: usize,
    /// The number of bytes that this connection has added to [`AHEAD`].
    charged: usize,
}

/// Error: no more bytes may be read ahead, because the bound is reached or there is no memory.
#[derive(Debug)]
struct NoRoom;

impl Carry {
    /// Returns all bytes in the carry.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(self.read..).unwrap_or_default()
    }

    /// Returns the number of bytes in the carry.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.read
    }

    /// Returns whether the carry has no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends `bytes`, which came next in TCP.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Reserves memory for `more` bytes that are about to be read ahead, and counts them in `AHEAD` as far as they
    /// exceed `OWN`. They count until the program has read them. The next bytes that the caller [pushes](Self::push)
    /// are these.
    fn charge(&mut self, more: usize) -> Result<(), NoRoom> {
        self.bytes.try_reserve(more).map_err(|_| NoRoom)?;
        let beyond = (self.len() + more).saturating_sub(OWN.max(self.charged + OWN));
        if beyond == 0 {
            return Ok(());
        }
        let before = AHEAD.fetch_add(beyond, Relaxed);
        self.charged += beyond;
        if before + beyond > ALL {
            self.settle();
            return Err(NoRoom);
        }
        Ok(())
    }

    /// Lowers the connection's count in `AHEAD` to the bytes that are still in the carry.
    fn settle(&mut self) {
        let held = self.len().saturating_sub(OWN).min(self.charged);
        AHEAD.fetch_sub(self.charged - held, Relaxed);
        self.charged = held;
    }

    /// Drops up to `n` bytes at the front, which have been read.
    pub fn consume(&mut self, n: usize) {
        self.read += n.min(self.len());
        self.looked = self.looked.saturating_sub(n);
        self.settle();
        if self.is_empty() {
            // Frees the memory, which may be large if many bytes were read ahead.
            *self = Self::default();
        } else if self.read > self.len() {
            // The unread bytes move to the front. They are fewer than the bytes that were read since the last move, so
            // the cost of moves stays low.
            self.bytes.drain(..self.read);
            self.read = 0;
        }
    }

    /// Removes and returns all bytes.
    pub fn take(&mut self) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.drain(..self.read);
        *self = Self::default();
        bytes
    }

    /// Searches for the next marker that starts with `nonce`. Any number of bytes may precede the marker. Each marker
    /// is returned once, and its bytes stay in the carry. `None` if there is no whole marker, or if the next marker
    /// cannot be decoded.
    fn next_marker(&mut self, nonce: &Nonce) -> Option<Marker> {
        let seen = scan(nonce, self.as_slice().get(self.looked..)?);
        self.looked += seen.payload;
        match seen.what {
            Found::Marker {
                marker: Ok(marker),
                len,
            } => {
                self.looked += len;
                Some(marker)
            }
            _ => None,
        }
    }
}

impl Drop for Carry {
    fn drop(&mut self) {
        AHEAD.fetch_sub(self.charged, Relaxed);
    }
}

/// Resets `AHEAD` in a fork child. The child leaks its copies of the parent's carries, so they must not count.
pub fn after_fork() {
    AHEAD.store(0, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_together_read_ahead_has_a_bound_and_a_little_is_always_allowed() {
        let piece = vec![0; OWN];
        let mut all: Vec<Carry> = Vec::new();
        let mut read = 0;
        'all: for _ in 0..100 {
            all.push(Carry::default());
            let carry = all.last_mut().unwrap();
            for at in 0..MOST / OWN {
                if carry.charge(OWN).is_err() {
                    assert!(at > 0, "the first piece is its own");
                    break 'all;
                }
                carry.push(&piece);
                read += OWN;
            }
        }
        assert!((ALL..=ALL + all.len() * OWN).contains(&read), "{read}");
        let mut late = Carry::default();
        late.charge(OWN).unwrap();
        late.push(&piece);
        assert!(late.charge(OWN).is_err());
        // The program of one connection reads, which makes room for another connection.
        all.first_mut().unwrap().consume(2 * OWN);
        late.charge(OWN).unwrap();
        drop(late);
        drop(all);
        assert_eq!(AHEAD.load(Relaxed), 0);
    }

    const NONCE: Nonce = Nonce::from_bytes([0xc0; 16]);

    fn encoded(marker: &Marker) -> Vec<u8> {
        let mut buf = [0; MAX_MARKER];
        marker.encode(&NONCE, &mut buf).unwrap().to_vec()
    }

    #[test]
    fn each_marker_behind_data_is_given_once_and_stays_where_it_is() {
        let resume = Marker::Resume { received: 3, sent: 5 };
        let (first, second) = (encoded(&Marker::Switch), encoded(&resume));
        let mut carry = Carry::default();
        carry.push(b"data");
        assert!(carry.next_marker(&NONCE).is_none());
        carry.push(&first);
        let (part, rest) = second.split_at(20);
        carry.push(part);
        assert!(matches!(carry.next_marker(&NONCE), Some(Marker::Switch)));
        assert!(carry.next_marker(&NONCE).is_none(), "not as a whole yet");
        // The program reads a part of the data meanwhile.
        carry.consume(2);
        carry.push(rest);
        assert!(matches!(
            carry.next_marker(&NONCE),
            Some(Marker::Resume { received: 3, sent: 5 })
        ));
        assert!(carry.next_marker(&NONCE).is_none());
        assert_eq!(carry.as_slice(), [&b"ta"[..], &first, &second].concat());
        carry.consume(2 + first.len());
        assert_eq!(carry.take(), second);
        assert!(carry.is_empty());
    }
}
