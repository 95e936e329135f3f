//! The size of the ring that a direction receives in. The ring grows for a sender that finds it too small, and shrinks
//! when it is idle.

use rdmasock_core::fabric::ring::Consumer;
use rdmasock_core::stats::Reason;

use crate::config::config;
use crate::data::tx;
use crate::notify::ready;
use crate::objects::cgroup;
use crate::objects::library::Library;
use crate::objects::link::{Link, has_few_addresses};
use crate::objects::mailbox::Command;
use crate::objects::socket::Socket;

/// The size to which a ring grows for a reader that keeps up, bytes. A larger ring makes such a reader no faster.
const READING: u64 = 1024 * 1024;

/// log2 of how many times larger the first ring is between hosts. Each quarter that is read there costs a message,
/// which also wakes the writer.
const BETWEEN_HOSTS: u32 = 4;

/// Returns log2 of the bytes of a direction's first ring.
pub fn first(link: &Link) -> u8 {
    let config = config();
    let (min, max) = (config.ring_min.bytes(), link.max_ring());
    let bytes = if link.is_remote() { min << BETWEEN_HOSTS } else { min }.min(max);
    bytes.trailing_zeros() as u8
}

/// Offers addresses for the largest ring, the reserve. A sender that finds no room while the program does not read
/// moves there, as far as its bound allows, and provides the memory. Kernel TCP takes megabytes at once in that case.
pub fn reserve(link: &Link, consumer: &mut Consumer) {
    let bytes = link.max_ring();
    if consumer.has_reserve() || bytes <= 1 << first(link) || has_few_addresses() {
        return;
    }
    if let Some(region) = link.reserve(bytes.trailing_zeros() as u8)
        && consumer.offer_reserve(region).is_err()
    {
        link.free(region);
    }
}

/// Offers a larger ring after a read, if the window limits the sender.
#[inline(always)]
pub(super) fn keep_fit(socket: &'static Socket, consumer: &mut Consumer) {
    if consumer.producer_limited() || consumer.is_switching() {
        fit(socket, consumer);
    }
}

/// Frees the old ring, and offers a larger one, up to the bound, if the window limits the sender.
#[cold]
fn fit(socket: &'static Socket, consumer: &mut Consumer) {
    let Some(link) = socket.link() else { return };
    let mut has_moved = false;
    while let Ok(Some(old)) = consumer.take_retired() {
        link.free(old);
        has_moved = true;
    }
    let now = consumer.ring_size();
    if has_moved && now > 1 << first(link) {
        // The sender itself may have moved to the reserve.
        Library::get().service.submit(Command::Grown);
    }
    let max = link.max_ring().min(READING);
    // The sender's request for a larger ring is kept while a switch is under way. Without a request only the switch is
    // finished: a ring that grew for the switch alone would exceed what the sender may have unread.
    if !consumer.is_switching() && consumer.heed_limit() && now < max {
        let max = if link.is_remote() {
            // Between hosts the ring only doubles. By W4 the sender uses at least half of a ring, and that must not be
            // more than it may have unread. A sender that finds no room while the program does not read has a send
            // buffer (`Link::lend`).
            (now * 2).min(max)
        } else {
            // Within a host the ring grows in one step. No further ring can follow until the reader has come to this
            // one. A reader that stops in between (both ends may be sending) would leave the sender with a small ring.
            max
        };
        offer(socket, link, consumer, max);
    }
}

/// Offers a ring of `bytes`, a power of two. Returns false if the link has no room for the ring, the control group no
/// memory, or the consumer no use for it.
fn offer(socket: &'static Socket, link: &'static Link, consumer: &mut Consumer, bytes: u64) -> bool {
    if !cgroup::take(bytes) {
        return false;
    }
    let region = link.allocate(bytes.trailing_zeros() as u8);
    let offered = region.and_then(|region| {
        let wake = consumer.offer(region).ok();
        if wake.is_none() {
            link.free(region);
        }
        wake
    });
    let Some(wake) = offered else {
        cgroup::give_back(bytes);
        return false;
    };
    ready::notify_peer(socket, wake);
    Library::get().service.submit(Command::Grown);
    true
}

/// Offers the largest ring that there is to a sender whose ring is full while the program does not read. The peer has
/// asked for attention, which may be for this. The ring grows in one step, because a second switch of rings would wait
/// for the reader.
pub fn relieve(socket: &'static Socket, link: &'static Link) {
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
        // The reader stands still while the sender may be waiting for room. TCP has the kernel's memory for such bytes.
        drop(rx);
        tx::take_back(socket, Reason::Resources);
    }
}

/// The outcome of a check whether an idle direction's ring can shrink.
pub enum Shrunk {
    /// The ring has its first size.
    Small,
    /// The ring cannot shrink now.
    Busy,
    /// A smaller ring is on offer.
    Offered,
}

/// Offers an idle direction a ring of the first size. The direction is idle if no byte was read since the last check.
pub fn shrink(socket: &'static Socket, link: &'static Link) -> Shrunk {
    let Some(mut rx) = socket.rx.lock() else {
        return Shrunk::Busy;
    };
    let Some(consumer) = rx.consumer.as_mut() else {
        return Shrunk::Small;
    };
    while let Ok(Some(old)) = consumer.take_retired() {
        link.free(old);
    }
    let log2 = first(link);
    if !consumer.is_switching() && consumer.ring_size() <= 1 << log2 {
        reserve(link, consumer);
        return Shrunk::Small;
    }
    let position = consumer.position();
    let idle = std::mem::replace(&mut rx.own.seen_at, position) == position;
    let Some(consumer) = rx.consumer.as_mut() else {
        return Shrunk::Small;
    };
    if !idle || consumer.is_switching() || consumer.has_data().unwrap_or(true) {
        return Shrunk::Busy;
    }
    let Some(region) = link.allocate(log2) else {
        return Shrunk::Busy;
    };
    match consumer.offer(region) {
        Ok(wake) => {
            // The sender may fill the small ring again at any time.
            reserve(link, consumer);
            drop(rx);
            ready::notify_peer(socket, wake);
            Shrunk::Offered
        }
        Err(_) => {
            link.free(region);
            Shrunk::Busy
        }
    }
}
