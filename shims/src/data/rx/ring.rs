//! The size of the ring that a direction receives in: it grows for a sender that finds it too small, and
//! shrinks when it is idle.

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

/// What a ring grows to for a reader that keeps up: more no longer makes it faster.
const READING: u64 = 1024 * 1024;

/// A first ring between hosts is so much larger, as a power of two: what is read of a quarter of it takes a message
/// to tell, which its writer is woken by.
const BETWEEN_HOSTS: u32 = 4;

/// log2 of the bytes of a direction's first ring.
pub fn first(link: &Link) -> u8 {
    let config = config();
    let (min, max) = (config.ring_min.bytes(), link.max_ring());
    let bytes = if link.is_remote() { min << BETWEEN_HOSTS } else { min }.min(max);
    bytes.trailing_zeros() as u8
}

/// Puts addresses for the largest ring on offer, which the sender takes, as much of it as it may, and sees to the
/// memory of, when it finds no room while nobody reads: kernel TCP takes megabytes then, and at once.
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

/// After a read: gives a sender that is limited by its window a larger ring.
#[inline(always)]
pub(super) fn keep_fit(socket: &'static Socket, consumer: &mut Consumer) {
    if consumer.producer_limited() || consumer.is_switching() {
        fit(socket, consumer);
    }
}

/// Gives a sender that is limited by its window a larger ring, up to the bound; frees the old one.
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
        // Perhaps by the sender's own doing.
        Library::get().service.submit(Command::Grown);
    }
    let max = link.max_ring().min(READING);
    // While a switch is under way the sender's want is kept for afterwards. Without one there is nothing but the
    // switch to be done: a ring that grew for that alone would be larger than what the sender may have unread.
    if !consumer.is_switching() && consumer.heed_limit() && now < max {
        let max = if link.is_remote() {
            // No more than a sender may have unread that finds this one too small, as W4 has it use half of a ring at
            // least; one that finds no room while nobody reads has its own (`Link::lend`).
            (now * 2).min(max)
        } else {
            // In one step: until the reader has come to a new ring there cannot be a further one, and a reader that
            // stops in between (both ends may be sending) would leave the sender with that.
            max
        };
        offer(socket, link, consumer, max);
    }
}

/// Offers a ring of `bytes`, a power of two. False if there is none, or no memory for one.
fn offer(socket: &'static Socket, link: &'static Link, consumer: &mut Consumer, bytes: u64) -> bool {
    if !cgroup::take(bytes) {
        return false;
    }
    let Some(region) = link.allocate(bytes.trailing_zeros() as u8) else {
        return false;
    };
    match consumer.offer(region) {
        Ok(wake) => {
            ready::notify_peer(socket, wake);
            Library::get().service.submit(Command::Grown);
        }
        Err(_) => link.free(region),
    }
    true
}

/// The peer has asked for attention: if that is because the ring is full and the program does not
/// read, the sender gets the largest one. In one step, since a second switch of rings would wait
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
        // The reader stands still, and the sender may wait for it to: the kernel has memory of its own for that.
        drop(rx);
        tx::take_back(socket, Reason::Resources);
    }
}

/// What a look at an idle direction's ring came to.
pub enum Shrunk {
    /// Its ring has its first size.
    Small,
    /// Not now.
    Busy,
    /// A smaller ring is on offer.
    Offered,
}

/// For shrinking: an idle direction's ring goes back to its first size.
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
            // The next that fills the small one may come at any time.
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
