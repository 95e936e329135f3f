//! Room in the rings. A sender that finds no room asks for a wake-up, and gets a larger ring if its reader stands
//! still. Between hosts it gets a send buffer of its own end instead. A receiver offers a larger ring to a sender that
//! finds the ring too small, and shrinks a ring that is idle.
//!
//! Within a host a reader also offers a *reserve*: addresses for a ring of the largest size, without memory. A sender
//! that finds no room may move to the reserve, and provides the memory.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::ring::{Consumer, Producer, Wake};
use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::Reason;

use crate::config::config;
use crate::data::tx;
use crate::notify::ready;
use crate::objects::cgroup;
use crate::objects::library::Library;
use crate::objects::link::Link;
use crate::objects::mailbox::Command;
use crate::objects::socket::{Mode, Socket, Tx};
use crate::sys::sockopt;

/// The size to which a ring grows for a reader that keeps up with its sender, bytes. A larger ring makes such a reader
/// no faster.
const READING: u64 = 1024 * 1024;

/// The ways in which a send that found too little room can go on.
pub(super) enum Room {
    /// There is room by now: try again.
    There,
    /// There is no room now.
    Full,
    /// The ring has room, but this process has no memory for it. The next bytes have to go by TCP, whose memory is the
    /// kernel's.
    Unbacked,
}

/// Handles a send that has found too little room. `waits`: the call may wait. If it may not, first tries to make room
/// by [`take_reserve`]. If there is still none, asks the reader to notify the epoll sets when there is room, because an
/// edge-triggered set reports only changes after this moment.
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

/// Tries to make room in three ways: by the reader's own count of what it has read, by the reader's reserve, or between
/// hosts by a send buffer of this end. A broken ring counts as room, because the next send finds the fault. Without
/// memory for the reserve, the result is `Unbacked`: the reader stands still, and only TCP can take the bytes.
pub(super) fn take_reserve(socket: &Socket, tx: &mut Tx) -> Room {
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

/// Returns whether a full ring has room by the reader's own count, or whether there is a reserve or a send buffer with
/// room. The program's bound on unread bytes decides how much may be used. Between hosts this call itself may move the
/// producer to a send buffer of this end.
pub(crate) fn could_have_room(socket: &Socket, producer: &mut Producer) -> bool {
    if !producer.has_bound() {
        producer.set_bound(bound(socket));
    }
    producer.could_have_room().unwrap_or(true) || borrow(socket, producer)
}

/// Moves the producer to a send buffer of this end, between hosts. The buffer keeps the bytes that the peer's ring has
/// no room for. Returns false if there is no buffer or no memory, or if the producer writes into a send buffer already.
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

/// Moves the producer back to the peer's ring and gives the send buffer back, if the peer has read all of the buffer.
/// Returns false if the buffer is still in use; true also if there is none.
pub(crate) fn give_back(socket: &Socket) -> bool {
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

/// Returns how many bytes kernel TCP would let be unread in this direction. If the program has [set](set_size) the size
/// of its send buffer, that size decides, up to `RDMASOCK_RING_MAX`. If not, the result is `RDMASOCK_RING_MAX`: 4 MiB
/// by default, to which the kernel's own buffer would grow.
fn bound(socket: &Socket) -> u64 {
    let most = config().ring_max.bytes();
    set_size(socket).map_or(most, |size| size.min(most))
}

/// Returns the size of the send buffer, if the program has set one, plus the window that the peer's receive buffer
/// grants, bytes. `None` if the program has set no size.
pub(super) fn set_size(socket: &Socket) -> Option<u64> {
    // The option that says which buffer sizes the program has set (Linux 5.14). The constant is not among libc's.
    const SO_BUF_LOCK: c_int = 72;
    const SNDBUF: c_int = 1;
    let fd = socket.numbers.anchor_fd()?;
    let get = |name| sockopt::get(fd, (libc::SOL_SOCKET, name));
    get(SO_BUF_LOCK).filter(|set| set & SNDBUF != 0)?;
    let own = u64::try_from(get(libc::SO_SNDBUF)?).ok()?;
    Some(own + sockopt::peers_window(fd))
}

/// Applies the size that the program has just set for its send buffer.
#[cold]
pub(crate) fn on_buffer_size(socket: &'static Socket) {
    if let Some(mut tx) = socket.tx.lock()
        && socket.tx_mode.load(Acquire) == Mode::Link
        && let Some(producer) = tx.producer.as_mut()
    {
        producer.set_bound(bound(socket));
        drop(tx);
        ready::notify_local(socket);
    }
}

/// Reports to the service thread that nothing can be sent now. If the reader stands still, the service thread then asks
/// the peer for a larger ring. Kernel TCP takes megabytes without a reader, and programs count on that: both ends may
/// send before they read. But a ring by itself grows only when its reader reads. If a larger ring does not help and the
/// program has set TCP_USER_TIMEOUT, the stream leaves the link.
pub(crate) fn report_blocked(socket: &'static Socket, tx: &mut Tx) {
    let max = config().ring_max.bytes();
    // In mode Marked this end has not read the marker that ends the handshake, for which the sender may be waiting
    // (P73). The service thread then searches TCP for that marker.
    let is_answered = socket.rx_mode.load(Acquire) != Mode::Marked;
    let may_grow = |p: &Producer| {
        let grows = p.ring_size() < max && p.may_grow();
        grows || p.is_aside() && !is_answered || is_timed(socket)
    };
    if !tx.own.blocked && tx.producer.as_ref().is_some_and(may_grow) {
        tx.own.blocked = true;
        Library::get().service.submit(Command::Blocked(socket.into()));
    }
}

/// Returns whether the direction is on a link that has no room for more bytes.
pub(crate) fn is_full(socket: &'static Socket) -> bool {
    let full = |tx: &mut Tx| Some(tx.producer.as_mut()?.has_space() == Ok(false));
    socket.tx_mode.load(Acquire) == Mode::Link && socket.tx.lock().and_then(|mut tx| full(&mut tx)) == Some(true)
}

/// Returns whether the direction is on a link with bytes that the reader has not read.
pub(crate) fn is_unread(socket: &'static Socket) -> bool {
    socket.tx_mode.load(Acquire) == Mode::Link && unread(socket).is_some_and(|n| n > 0)
}

/// Returns the bytes on the link that the reader is not known to have read; `None` if there is no ring.
pub(crate) fn unread(socket: &'static Socket) -> Option<u64> {
    let mut tx = socket.tx.lock()?;
    tx.producer.as_mut()?.used().ok()
}

/// Returns whether the program has set TCP_USER_TIMEOUT.
fn is_timed(socket: &Socket) -> bool {
    socket.options.user_timeout.load(Relaxed) != 0
}

/// Returns the position up to which the reader has made room. With TCP_USER_TIMEOUT, returns the position up to which
/// the reader has read. `None` if there is no ring.
pub(crate) fn reader_at(socket: &'static Socket) -> Option<u64> {
    let mut tx = socket.tx.lock()?;
    let producer = tx.producer.as_mut()?;
    match is_timed(socket) {
        true => producer.consumed().ok(),
        false => Some(producer.position().saturating_sub(producer.used().ok()?)),
    }
}

/// Asks the peer for the largest ring, if the direction has no room, only that ring would make room, and the reader has
/// not moved from position `then`. The service thread calls this some time after [`report_blocked`].
///
/// Returns the reader's position if the socket is to be checked again, else `None`. Bytes in a send buffer of this end
/// may stay there while the direction goes on. After the direction has ended, the peer has to take them, because this
/// process may end too.
///
/// The second value is true if the reader stands still and TCP_USER_TIMEOUT bounds the wait. Then, too, the socket is
/// to be checked again.
pub(crate) fn ask_for_room(socket: &'static Socket, then: u64) -> Option<(u64, bool)> {
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
        return Some((now?, false));
    }
    let times_out = full && !has_ended && is_timed(socket);
    tx.own.blocked = times_out;
    drop(tx);
    if full && (is_owed || !is_aside) {
        ready::notify_peer(socket, Wake(Link::service_bits()));
    }
    now.filter(|_| is_owed || times_out).map(|now| (now, times_out))
}

/// Returns whether this end keeps bytes in a send buffer, for which the peer's ring has no room.
fn is_behind(socket: &Socket) -> bool {
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    let remote = socket.link().and_then(Link::remote);
    remote.is_some_and(|remote| remote.end().unsent(theirs) > 0)
}

// The receiving end.

/// Offers a larger ring after a read, if the sender has found the ring too small.
#[inline(always)]
pub(super) fn keep_fit(socket: &'static Socket, consumer: &mut Consumer) {
    if consumer.producer_limited() || consumer.is_switching() {
        fit(socket, consumer);
    }
}

/// Frees the old ring after a switch to another one. If the sender has found the ring too small, offers a larger one,
/// up to the largest that this end allows.
#[cold]
fn fit(socket: &'static Socket, consumer: &mut Consumer) {
    let Some(link) = socket.link() else { return };
    let mut has_moved = false;
    while let Ok(Some(old)) = consumer.take_retired() {
        link.free(old);
        has_moved = true;
    }
    let now = consumer.ring_size();
    if has_moved && now > 1 << link.first_ring() {
        // The sender itself may have moved to the reserve, which is large. The service thread shrinks the ring when it
        // is idle.
        Library::get().service.submit(Command::Grown);
    }
    let max = link.max_ring().min(READING);
    // The sender's request for a larger ring (`heed_limit`) stays pending while a switch of rings is under way. Without
    // a request nothing is offered. If the ring grew after each switch, it would exceed what the sender may have
    // unread.
    if !consumer.is_switching() && consumer.heed_limit() && now < max {
        let max = if link.is_remote() {
            // Between hosts each offer only doubles the ring. The sender may use half of a ring even beyond its bound
            // on unread bytes (W4 in `fabric/ring`), so half of the new ring must not exceed that bound. The old ring,
            // which is that half, was too small for the sender. A sender that finds no room while the program does not
            // read has a send buffer (`Link::lend`).
            (now * 2).min(max)
        } else {
            // Within a host the ring grows in one step, because no further ring can be offered before the reader has
            // come to this one. If the reader stopped before that (both ends may be sending), the sender would be left
            // with a small ring.
            max
        };
        offer(socket, link, consumer, max);
    }
}

/// Offers a ring of `1 << log2` bytes. Returns the wake-up for the sender; `None` if the link has no room for the ring,
/// or the consumer no use for it.
fn offer_ring(link: &Link, consumer: &mut Consumer, log2: u8) -> Option<Wake> {
    let region = link.allocate(log2)?;
    let wake = consumer.offer(region).ok();
    if wake.is_none() {
        link.free(region);
    }
    wake
}

/// Offers a ring of `bytes`, a power of two. Returns false if that is not possible, or the control group has no memory
/// for the ring.
fn offer(socket: &'static Socket, link: &Link, consumer: &mut Consumer, bytes: u64) -> bool {
    if !cgroup::take(bytes) {
        return false;
    }
    let Some(wake) = offer_ring(link, consumer, bytes.trailing_zeros() as u8) else {
        cgroup::give_back(bytes);
        return false;
    };
    ready::notify_peer(socket, wake);
    Library::get().service.submit(Command::Grown);
    true
}

/// Offers the largest ring that the link has room for, if the sender's ring is full while this program does not read.
/// To be called when the peer has notified the service thread of the socket, perhaps because it wants a larger ring
/// (`ask_for_room`). The ring grows in one step, because a second switch of rings would wait for the reader.
pub(crate) fn relieve(socket: &'static Socket, link: &'static Link) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    let Some(consumer) = rx.consumer.as_mut() else {
        return;
    };
    while let Ok(Some(old)) = consumer.take_retired() {
        link.free(old);
    }
    let now = consumer.ring_size();
    let is_full = consumer.available().is_ok_and(|n| n > now / 4 * 3);
    if !is_full || consumer.is_switching() {
        return;
    }
    let mut bytes = link.max_ring();
    while bytes > now && !offer(socket, link, consumer, bytes) {
        bytes /= 2;
    }
    if bytes <= now && now < link.max_ring() && cgroup::is_short() {
        // There is no memory for a larger ring, and the sender may be waiting for room. On TCP the kernel has memory
        // for the sender's bytes.
        drop(rx);
        tx::take_back(socket, Reason::Resources);
    }
}

/// The outcome of a check whether an idle direction's ring can shrink.
pub(crate) enum Shrunk {
    /// The ring has its first size.
    Small,
    /// The ring cannot shrink now.
    Busy,
    /// A smaller ring is on offer.
    Offered,
}

/// Offers an idle direction a ring of the first size. The direction is idle if no byte was read since the last check.
pub(crate) fn shrink(socket: &'static Socket, link: &'static Link) -> Shrunk {
    let Some(mut rx) = socket.rx.lock() else {
        return Shrunk::Busy;
    };
    let state = &mut *rx;
    let Some(consumer) = state.consumer.as_mut() else {
        return Shrunk::Small;
    };
    while let Ok(Some(old)) = consumer.take_retired() {
        link.free(old);
    }
    let log2 = link.first_ring();
    if !consumer.is_switching() && consumer.ring_size() <= 1 << log2 {
        link.reserve(consumer);
        return Shrunk::Small;
    }
    let position = consumer.position();
    let idle = std::mem::replace(&mut state.own.seen_at, position) == position;
    if !idle || consumer.is_switching() || consumer.has_data().unwrap_or(true) {
        return Shrunk::Busy;
    }
    let Some(wake) = offer_ring(link, consumer, log2) else {
        return Shrunk::Busy;
    };
    // A new reserve is offered with the small ring, because the sender may fill that ring at any time.
    link.reserve(consumer);
    drop(rx);
    ready::notify_peer(socket, wake);
    Shrunk::Offered
}
