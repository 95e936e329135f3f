//! Senders that find no room in the ring: being told of it, and getting a larger ring from a reader that
//! stands still.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::fabric::ring::Wake;

use crate::library::Library;
use crate::library::config;
use crate::link::Link;
use crate::ready;
use crate::service::Command;
use crate::socket::{Socket, Tx, mode};

/// A send has found too little room: asks for a wake-up on behalf of the epoll sets, since an
/// edge-triggered one reports only what has changed after this. True if there is room after all.
#[cold]
pub(super) fn no_room(socket: &'static Socket, tx: &mut Tx) -> bool {
    let bits = tx.bits;
    let room = tx
        .producer
        .as_mut()
        .is_some_and(|p| bits != 0 && p.arm_space(bits).unwrap_or(true));
    if !room {
        press(socket, tx);
    }
    room
}

/// Nothing can be sent now. Kernel TCP takes megabytes without a reader, and programs count on it
/// (both ends may send before they read), but a ring grows only as its reader finds it too small.
/// So has the service thread ask for a larger one if the reader stands still.
pub fn press(socket: &'static Socket, tx: &mut Tx) {
    if !tx.timed && tx.producer.is_some() && socket.user_timeout.load(Relaxed) != 0 {
        tx.timed = true;
        Library::get().service.submit(Command::standing(socket));
    }
    let max = config().ring_max.bytes();
    if !tx.pressed && tx.producer.as_ref().is_some_and(|p| p.ring_size() < max) {
        tx.pressed = true;
        Library::get().service.submit(Command::pressed(socket));
    }
}

/// Whether a link has no room for what is to be sent.
pub fn is_full(socket: &'static Socket) -> bool {
    let full = |tx: &mut Tx| Some(tx.producer.as_mut()?.has_space() == Ok(false));
    socket.tx_mode.load(Acquire) == mode::LINK
        && socket.tx.lock().and_then(|mut tx| full(&mut tx)) == Some(true)
}

/// Whether a link holds what the reader has not read.
pub fn is_unread(socket: &'static Socket) -> bool {
    let unread = |tx: &mut Tx| Some(tx.producer.as_mut()?.used().is_ok_and(|n| n > 0));
    socket.tx_mode.load(Acquire) == mode::LINK
        && socket.tx.lock().and_then(|mut tx| unread(&mut tx)) == Some(true)
}

/// Bytes on the link that the reader is not known to have read.
pub fn unread(socket: &'static Socket) -> Option<u64> {
    let mut tx = socket.tx.lock()?;
    tx.producer.as_mut()?.used().ok()
}

/// How far the reader has got, as long as a link has no room: then it is watched on for whether it stands still (`press`).
pub fn stands_still(socket: &'static Socket) -> Option<u64> {
    let mut tx = socket.tx.lock()?;
    let on_link = socket.tx_mode.load(Acquire) == mode::LINK;
    let full = |tx: &mut Tx| {
        let producer = tx.producer.as_mut().filter(|_| on_link)?;
        (producer.has_space() == Ok(false)).then(|| producer.consumed().ok())?
    };
    let at = full(&mut tx);
    tx.timed = at.is_some();
    at
}

/// It is not watched any more.
pub fn forget_standing(socket: &'static Socket) {
    if let Some(mut tx) = socket.tx.lock() {
        tx.timed = false;
    }
}

/// How far the reader has got.
pub fn reader_at(socket: &'static Socket) -> Option<u64> {
    let mut tx = socket.tx.lock()?;
    let producer = tx.producer.as_mut()?;
    Some(producer.position().saturating_sub(producer.used().ok()?))
}

/// A while after `press`, when the reader was at `then`. Asks the peer for the largest ring if it
/// still is and there is no room; gives where it is if it is to be looked at again.
pub fn ask_for_room(socket: &'static Socket, then: u64) -> Option<u64> {
    let now = reader_at(socket);
    let mut tx = socket.tx.lock()?;
    let on_link = socket.tx_mode.load(Acquire) == mode::LINK;
    let full = on_link
        && tx
            .producer
            .as_mut()
            .is_some_and(|p| p.has_space() == Ok(false));
    if full && now != Some(then) {
        return now;
    }
    tx.pressed = false;
    drop(tx);
    if full {
        ready::notify_peer(socket, Wake(Link::service_bits()));
    }
    None
}
