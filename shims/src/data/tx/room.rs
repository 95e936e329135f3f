//! Senders that find no room in the ring: they ask for a wake-up, and they get a larger ring. A reader that stands
//! still provides it, or, between hosts, this end of the link.

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

/// The room that a send has found when the ring had too little.
pub(super) enum Room {
    /// There is room.
    There,
    /// There is no room now.
    Full,
    /// The ring has room, but this process has no memory for it. The next bytes have to go by TCP, whose memory is the
    /// kernel's.
    Unbacked,
}

/// Handles a send that has found too little room. A call that may not wait (`waits` is false) first makes room by
/// [`take_reserve`]. If there is still none, asks for a wake-up on behalf of the epoll sets, because an edge-triggered
/// set reports only changes after this moment.
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

/// Makes room by a closer look at the ring, by the reader's reserve ring, or by a send buffer of this end. A broken
/// ring counts as room: the next send finds the fault. A reserve without memory is not taken, because its reader stands
/// still and TCP has the kernel's memory.
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

/// Returns whether a full ring has room at a closer look, or can be exchanged for one with room. The program's bound on
/// unread bytes decides. Between hosts this may move the producer to a send buffer of this end.
pub fn could_have_room(socket: &Socket, producer: &mut Producer) -> bool {
    if !producer.has_bound() {
        producer.set_bound(bound(socket));
    }
    producer.could_have_room().unwrap_or(true) || borrow(socket, producer)
}

/// Moves the producer to a send buffer of this end, between hosts. The buffer keeps the bytes that the peer's ring has
/// no room for. Returns false if there is no buffer or no memory, or if the producer is there already.
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

/// Has the service thread ask the peer for room, repeatedly, if the direction has ended with bytes in a send buffer of
/// this end.
pub fn report_blocked_at_end(socket: &Socket, tx: &Tx) {
    if tx.producer.as_ref().is_some_and(Producer::is_aside) {
        Library::get().service.submit(Command::Blocked(socket.into()));
    }
}

/// Gives the send buffer back if the peer has read all of it. Returns false if the buffer is still in use.
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

/// Returns how many unread bytes kernel TCP would allow in this direction. The program may have [set](set_size) that.
/// If not, it is what the kernel's own buffer would grow to, 4 MiB by default.
fn bound(socket: &Socket) -> u64 {
    let most = config().ring_max.bytes();
    set_size(socket).map_or(most, |size| size.min(most))
}

/// Returns the size of the send buffer, if the program has set one, plus the window that the peer's receive buffer
/// grants, bytes. `None` if the program has set no size.
fn set_size(socket: &Socket) -> Option<u64> {
    // Which sizes the program has set (Linux 5.14). The constant is not among libc's.
    const SO_BUF_LOCK: c_int = 72;
    const SNDBUF: c_int = 1;
    let fd = socket.numbers.anchor_fd()?;
    let get = |name| sockopt::get(fd, (libc::SOL_SOCKET, name));
    get(SO_BUF_LOCK).filter(|set| set & SNDBUF != 0)?;
    let own = u64::try_from(get(libc::SO_SNDBUF)?).ok()?;
    Some(own + sockopt::peers_window(fd))
}

/// Bounds the ring of a direction that has just come to the link. A ring that its reader finds too small grows no
/// further than what the program has set.
pub fn on_link(socket: &Socket, tx: &mut Tx) {
    if let Some(size) = set_size(socket)
        && let Some(producer) = tx.producer.as_mut()
    {
        producer.estimate_bound(size.min(config().ring_max.bytes()));
    }
}

/// Applies a new size of the send buffer, which the program has set.
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

/// Moves a send that is about to sleep for want of room to the reserve ring, if there is one.
pub(super) fn before_sleep(socket: &'static Socket) -> Room {
    if socket.tx_mode.load(Acquire) != Mode::Link {
        return Room::Full;
    }
    let room = socket.tx.lock().map(|mut tx| take_reserve(socket, &mut tx));
    room.unwrap_or(Room::Full)
}

/// Has the service thread ask for a larger ring if the reader stands still, because nothing can be sent now. Kernel TCP
/// takes megabytes without a reader, and programs count on it (both ends may send before they read). But a ring grows
/// only as its reader finds it too small.
pub fn report_blocked(socket: &'static Socket, tx: &mut Tx) {
    if !tx.own.timed && tx.producer.is_some() && socket.options.user_timeout.load(Relaxed) != 0 {
        tx.own.timed = true;
        Library::get().service.submit(Command::Standing(socket.into()));
    }
    let max = config().ring_max.bytes();
    // Until the other end's answer to a promotion has been read, the sender may be waiting for that answer (P73). The
    // service thread then looks for it in TCP.
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

/// Returns whether the direction is on a link that has no room for more bytes.
pub fn is_full(socket: &'static Socket) -> bool {
    let full = |tx: &mut Tx| Some(tx.producer.as_mut()?.has_space() == Ok(false));
    socket.tx_mode.load(Acquire) == Mode::Link && socket.tx.lock().and_then(|mut tx| full(&mut tx)) == Some(true)
}

/// Returns whether the direction is on a link with bytes that the reader has not read.
pub fn is_unread(socket: &'static Socket) -> bool {
    let unread = |tx: &mut Tx| Some(tx.producer.as_mut()?.used().is_ok_and(|n| n > 0));
    socket.tx_mode.load(Acquire) == Mode::Link && socket.tx.lock().and_then(|mut tx| unread(&mut tx)) == Some(true)
}

/// Returns the bytes on the link that the reader is not known to have read; `None` if there is no ring.
pub fn unread(socket: &'static Socket) -> Option<u64> {
    let mut tx = socket.tx.lock()?;
    tx.producer.as_mut()?.used().ok()
}

/// Returns the reader's position while the link has no room; the service thread then goes on watching whether the
/// reader stands still ([`report_blocked`]). `None` if there is room or the direction is not on the link.
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

/// Stops watching whether the reader stands still.
pub fn forget_standing(socket: &'static Socket) {
    if let Some(mut tx) = socket.tx.lock() {
        tx.own.timed = false;
    }
}

/// Returns the position up to which the reader is known to have read; `None` if there is no ring.
pub fn reader_at(socket: &'static Socket) -> Option<u64> {
    let mut tx = socket.tx.lock()?;
    let producer = tx.producer.as_mut()?;
    Some(producer.position().saturating_sub(producer.used().ok()?))
}

/// Asks the peer for the largest ring if the reader has not moved from `then` and only that ring makes room. The
/// service thread calls this some time after [`report_blocked`].
///
/// Returns the reader's position if the socket is to be checked again, else `None`. A send buffer of this end keeps its
/// bytes until the direction has ended. After that the peer has to keep the rest, because this process may end too.
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

/// Returns whether this end keeps bytes that the peer's ring has no room for.
fn is_behind(socket: &Socket) -> bool {
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    let remote = socket.link().and_then(Link::remote);
    remote.is_some_and(|remote| remote.unsent(theirs) > 0)
}
