//! Senders that find no room in the ring: being told of it, and getting a larger ring, from a reader that
//! stands still or, between hosts, from this end of the link.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::ring::{Producer, Wake};
use rdmasock_core::ids::Vqpn;

use crate::config::config;
use crate::notify::ready;
use crate::objects::cgroup;
use crate::objects::library::Library;
use crate::objects::link::Link;
use crate::objects::mailbox::Command;
use crate::objects::socket::{Mode, Socket, Tx};
use crate::sys::sockopt;

/// What a send has found that wants more room.
pub(super) enum Room {
    /// There is some.
    There,
    /// None now.
    Full,
    /// The ring has some, and this process no memory for it: what follows has to go by TCP, whose memory is the
    /// kernel's.
    Unbacked,
}

/// A send that may not wait, or will, has found too little room: takes the ring that the reader has in reserve, or asks
/// for a wake-up on behalf of the epoll sets, since an edge-triggered one reports only what has changed after this.
#[cold]
pub(super) fn no_room(socket: &'static Socket, tx: &mut Tx, waits: bool) -> Room {
    match if waits { Room::Full } else { take_reserve(socket, tx) } {
        Room::Full => {}
        room => return room,
    }
    let bits = tx.own.bits;
    if let Some(producer) = tx.producer.as_mut() {
        if producer.is_starved() {
            return Room::Unbacked;
        }
        if bits != 0 && producer.arm_space(bits).unwrap_or(true) {
            return Room::There;
        }
    }
    report_blocked(socket, tx);
    Room::Full
}

/// What is broken the next send finds. A reserve for which there is no memory is not taken: its reader stands still,
/// and the kernel has memory of its own.
fn take_reserve(socket: &Socket, tx: &mut Tx) -> Room {
    let Some(producer) = tx.producer.as_mut() else {
        return Room::Full;
    };
    if !could_have_room(socket, producer) {
        return Room::Full;
    }
    let mut is_short = false;
    let made = producer.make_room(|bytes| {
        is_short = !cgroup::take(bytes);
        !is_short
    });
    match made.unwrap_or(true) {
        true => Room::There,
        false if is_short => Room::Unbacked,
        false => Room::Full,
    }
}

/// Whether a ring that has no room has some at a closer look, or can be changed for one that has, by what the program
/// lets be unread.
pub fn could_have_room(socket: &Socket, producer: &mut Producer) -> bool {
    if !producer.has_bound() {
        producer.set_bound(bound(socket));
    }
    producer.could_have_room().unwrap_or(true) || borrow(socket, producer)
}

/// Has this end of a link between hosts keep what its peer's ring has no room for.
fn borrow(socket: &Socket, producer: &mut Producer) -> bool {
    let bytes = config().ring_max.bytes();
    if producer.is_aside() || !cgroup::has(bytes) {
        return false;
    }
    let largest = bytes.trailing_zeros() as u8;
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    let has_borrowed = socket.link().is_some_and(|link| link.lend(theirs, producer, largest));
    if has_borrowed {
        cgroup::take(bytes);
        Library::get().service.submit(Command::Grown);
    }
    has_borrowed
}

/// The direction has ended, perhaps with bytes that this end keeps: the peer is asked for room for them, again and
/// again.
pub fn report_blocked_at_end(socket: &Socket, tx: &Tx) {
    if tx.producer.as_ref().is_some_and(Producer::is_aside) {
        Library::get().service.submit(Command::Blocked(socket.into()));
    }
}

/// Gives back what was borrowed, if all of it has been read. False if it is still in use.
pub fn give_back(socket: &Socket) -> bool {
    if socket.tx_mode.load(Acquire) != Mode::Link {
        return true;
    }
    let Some(mut tx) = socket.tx.lock() else {
        return false;
    };
    let Some(producer) = tx.producer.as_mut().filter(|p| p.is_aside()) else {
        return true;
    };
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    socket.link().is_none_or(|link| link.take_back(theirs, producer))
}

/// The bytes that kernel TCP would have of this direction: what the program has [set](set_size), else the kernel would
/// let its own buffer grow, to 4 MiB by default.
fn bound(socket: &Socket) -> u64 {
    let most = config().ring_max.bytes();
    set_size(socket).map_or(most, |size| size.min(most))
}

/// Where the program has set a size of the send buffer: that, and the window that the peer's receive buffer lets it
/// have.
fn set_size(socket: &Socket) -> Option<u64> {
    // Not among libc's constants: which sizes the program has set (Linux 5.14).
    const SO_BUF_LOCK: c_int = 72;
    const SNDBUF: c_int = 1;
    let fd = socket.numbers.anchor_fd()?;
    let get = |name| sockopt::get(fd, (libc::SOL_SOCKET, name));
    get(SO_BUF_LOCK).filter(|set| set & SNDBUF != 0)?;
    let own = u64::try_from(get(libc::SO_SNDBUF)?).ok()?;
    Some(own + sockopt::peers_window(fd))
}

/// The direction has just come to the link: a ring that its reader finds too small grows no further than by what the
/// program has set.
pub fn on_link(socket: &Socket, tx: &mut Tx) {
    if let Some(size) = set_size(socket)
        && let Some(producer) = tx.producer.as_mut()
    {
        producer.estimate_bound(size.min(config().ring_max.bytes()));
    }
}

/// The program has set the size of the send buffer.
#[cold]
pub fn on_buffer_size(socket: &'static Socket) {
    if let Some(mut tx) = socket.tx.lock()
        && socket.tx_mode.load(Acquire) == Mode::Link
        && let Some(producer) = tx.producer.as_mut()
    {
        producer.set_bound(bound(socket));
        drop(tx);
        ready::notify_local(socket);
    }
}

/// What there is by the ring in reserve for a send that is about to sleep for want of room.
pub(super) fn before_sleep(socket: &'static Socket) -> Room {
    if socket.tx_mode.load(Acquire) != Mode::Link {
        return Room::Full;
    }
    let room = socket.tx.lock().map(|mut tx| take_reserve(socket, &mut tx));
    room.unwrap_or(Room::Full)
}

/// Nothing can be sent now. Kernel TCP takes megabytes without a reader, and programs count on it
/// (both ends may send before they read), but a ring grows only as its reader finds it too small.
/// So has the service thread ask for a larger one if the reader stands still.
pub fn report_blocked(socket: &'static Socket, tx: &mut Tx) {
    if !tx.own.timed && tx.producer.is_some() && socket.options.user_timeout.load(Relaxed) != 0 {
        tx.own.timed = true;
        Library::get().service.submit(Command::Standing(socket.into()));
    }
    let max = config().ring_max.bytes();
    // While the other end has not answered a promotion its answer may be what is waited for (P73).
    let is_answered = socket.rx_mode.load(Acquire) != Mode::Marked;
    let may_grow = |p: &Producer| {
        let grows = p.ring_size() < max && p.may_grow();
        grows || p.is_aside() && !is_answered
    };
    if !tx.own.blocked && tx.producer.as_ref().is_some_and(may_grow) {
        tx.own.blocked = true;
        Library::get().service.submit(Command::Blocked(socket.into()));
    }
}

/// Whether a link has no room for what is to be sent.
pub fn is_full(socket: &'static Socket) -> bool {
    let full = |tx: &mut Tx| Some(tx.producer.as_mut()?.has_space() == Ok(false));
    socket.tx_mode.load(Acquire) == Mode::Link && socket.tx.lock().and_then(|mut tx| full(&mut tx)) == Some(true)
}

/// Whether a link holds what the reader has not read.
pub fn is_unread(socket: &'static Socket) -> bool {
    let unread = |tx: &mut Tx| Some(tx.producer.as_mut()?.used().is_ok_and(|n| n > 0));
    socket.tx_mode.load(Acquire) == Mode::Link && socket.tx.lock().and_then(|mut tx| unread(&mut tx)) == Some(true)
}

/// Bytes on the link that the reader is not known to have read.
pub fn unread(socket: &'static Socket) -> Option<u64> {
    let mut tx = socket.tx.lock()?;
    tx.producer.as_mut()?.used().ok()
}

/// How far the reader has got, as long as a link has no room: then it is watched on for whether it stands still
/// (`report_blocked`).
pub fn stands_still(socket: &'static Socket) -> Option<u64> {
    let mut tx = socket.tx.lock()?;
    let on_link = socket.tx_mode.load(Acquire) == Mode::Link;
    let full = |tx: &mut Tx| {
        let producer = tx.producer.as_mut().filter(|_| on_link)?;
        (producer.has_space() == Ok(false)).then(|| producer.consumed().ok())?
    };
    let at = full(&mut tx);
    tx.own.timed = at.is_some();
    at
}

/// The reader is not watched any more for whether it stands still.
pub fn forget_standing(socket: &'static Socket) {
    if let Some(mut tx) = socket.tx.lock() {
        tx.own.timed = false;
    }
}

/// How far the reader has got.
pub fn reader_at(socket: &'static Socket) -> Option<u64> {
    let mut tx = socket.tx.lock()?;
    let producer = tx.producer.as_mut()?;
    Some(producer.position().saturating_sub(producer.used().ok()?))
}

/// A while after `report_blocked`, when the reader was at `then`. Asks the peer for the largest ring if it still is and
/// there is no room but with it; gives where it is if it is to be looked at again. What this end keeps stays here until
/// the direction has ended: then this process may end too, and the rest is the peer's to keep.
pub fn ask_for_room(socket: &'static Socket, then: u64) -> Option<u64> {
    let now = reader_at(socket);
    let mut tx = socket.tx.lock()?;
    let on_link = socket.tx_mode.load(Acquire) == Mode::Link;
    let mut producer = tx.producer.as_mut().filter(|_| on_link);
    let (is_aside, has_ended) = producer
        .as_ref()
        .map_or((false, false), |p| (p.is_aside(), p.is_ended()));
    let is_owed = is_aside && has_ended && is_behind(socket);
    let full = is_owed || producer.as_mut().is_some_and(|p| p.has_space() == Ok(false));
    if full && now != Some(then) {
        return now;
    }
    tx.own.blocked = false;
    drop(tx);
    if full && (is_owed || !is_aside) {
        ready::notify_peer(socket, Wake(Link::service_bits()));
    }
    now.filter(|_| is_owed)
}

/// Whether this end keeps what its peer's ring has no room for.
fn is_behind(socket: &Socket) -> bool {
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    let remote = socket.link().and_then(Link::remote);
    remote.is_some_and(|remote| remote.unsent(theirs) > 0)
}
