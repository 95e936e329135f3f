//! Corrects values about a connection that a program reads from the kernel. These lack the bytes that went over links,
//! and include the library's own bytes in TCP. They are TCP_INFO (tcp(7); struct tcp_info of linux/tcp.h), SO_MEMINFO,
//! SIOCOUTQ and SIOCOUTQNSD. FIONREAD is corrected by [`rx::available`]. The options that the library keeps are in
//! [`Keepalive`](sockopt::Keepalive) and [`tx::cork`](crate::data::tx::cork).
//!
//! TCP acknowledges a byte when it has arrived at the peer's host, whether or not the program there has read it. On a
//! link within the host a byte has arrived at once: the ring lies in the reader's memory, and is read to its end even
//! if the sender has ended. Between hosts a byte has arrived when the other end confirms it.
//!
//! A reported count never falls, even while bytes move from the link to TCP.

use std::ffi::c_int;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::ids::Vqpn;

use crate::data::rx;
use crate::data::rx::Uncounted;
use crate::notify::ready;
use crate::objects::link::Link;
use crate::objects::socket::{Mode, Socket, Tx};
use crate::sys::tcp_info::{Fields, Positions, at};
use crate::sys::{sockopt, tcp_info};

/// SO_MEMINFO (asm-generic/socket.h).
const MEMINFO: sockopt::Name = (libc::SOL_SOCKET, 55);

/// The most bytes of a value that are read from the kernel. TCP_INFO and SO_MEMINFO are shorter on all kernels so far.
const LONGEST: usize = 512;

/// The offset of SK_MEMINFO_RMEM_ALLOC (linux/sock_diag.h) in SO_MEMINFO, an array of 32-bit numbers.
const RMEM_ALLOC: usize = 0;

/// The traffic of one direction so far by which the kernel's values are corrected.
#[derive(Clone, Copy, Default)]
struct Traffic {
    /// Bytes and calls that went over links.
    bytes: u64,
    calls: u64,
    /// The part of `bytes` that no call has received yet.
    unread: u64,
    /// Bytes of markers in TCP, which are not the program's.
    ours: u64,
    /// Bytes that the program has sent, and that have not arrived at the peer's host.
    waiting: u64,
    /// The part of `waiting` that was given neither to TCP nor to the other host yet.
    unsent: u64,
    /// The [tick](crate::sys::time::tick) at which the link was last used; 0: never.
    last: u64,
}

impl Traffic {
    fn is_none(&self) -> bool {
        self.bytes | self.ours | self.waiting == 0
    }

    /// Returns the least number of TCP segments for this traffic, with at least one segment for each call.
    fn segments(&self, mss: u64) -> u64 {
        let mss = mss.max(1);
        self.calls.max((self.bytes - self.unread).div_ceil(mss)) + self.unread.div_ceil(mss)
    }

    /// Returns the time since the link was last used, ms, or the kernel's value `kernel` if that is less.
    fn idle(&self, kernel: u32) -> u32 {
        if self.last == 0 {
            return kernel;
        }
        kernel.min(bounded(crate::sys::time::tick().saturating_sub(self.last) / 1_000_000))
    }
}

/// Returns the traffic of the sending direction. The caller holds the direction's lock. `away` is the result of the
/// function `away`.
fn sent(socket: &Socket, tx: &Tx, away: Away) -> Traffic {
    let way = &socket.told.ledger.sent;
    let counts = socket.told.stats().map(|stats| stats.tx.load()).unwrap_or_default();
    let again = tx.again.min(tx.marker.len()) as u64;
    Traffic {
        bytes: way.bytes.load(Relaxed) + counts.link_bytes,
        calls: way.calls.load(Relaxed) + counts.link_calls,
        unread: 0,
        ours: way.ours.load(Relaxed),
        waiting: again + away.unconfirmed,
        unsent: again + away.unsent,
        last: tx.own.last,
    }
}

/// Bytes that are on their way to another host.
#[derive(Clone, Copy, Default)]
struct Away {
    /// Bytes that the other host has not confirmed.
    unconfirmed: u64,
    /// The part of `unconfirmed` that the other host has no room for.
    unsent: u64,
}

/// Returns the bytes of the sending direction that are on their way to another host, and asks that host to confirm
/// them.
fn away(socket: &'static Socket) -> Away {
    let on_link = socket.tx_mode.load(Acquire) == Mode::Link;
    let Some(remote) = socket.link().and_then(Link::remote).filter(|_| on_link) else {
        return Away::default();
    };
    ready::progress(socket);
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    // `unconfirmed` is read first, so bytes that are sent between the two readings count as unconfirmed, but not as
    // unsent.
    let unconfirmed = remote.end().unconfirmed(theirs).unwrap_or(0);
    Away {
        unconfirmed,
        unsent: remote.end().unsent(theirs).min(unconfirmed),
    }
}

/// Returns the traffic of the receiving direction. The caller holds the direction's lock, and has read `uncounted`
/// under it.
fn received(socket: &Socket, uncounted: &Uncounted) -> Traffic {
    let way = &socket.told.ledger.received;
    let counts = socket.told.stats().map(|stats| stats.rx.load()).unwrap_or_default();
    Traffic {
        bytes: way.bytes.load(Relaxed) + counts.link_bytes + uncounted.on_link,
        calls: way.calls.load(Relaxed) + counts.link_calls,
        unread: uncounted.on_link,
        ours: way.ours.load(Relaxed) + uncounted.ours,
        waiting: 0,
        unsent: 0,
        last: uncounted.last,
    }
}

/// Returns the corrected value of SIOCOUTQ, the number of bytes that the peer's host does not have, or with `unsent` of
/// SIOCOUTQNSD, the number of bytes that have not been sent. `kernel` is the kernel's value.
pub(super) fn out_queue(socket: &'static Socket, kernel: c_int, unsent: bool) -> c_int {
    let away = away(socket);
    let Some(tx) = socket.tx.lock() else {
        return kernel;
    };
    let traffic = sent(socket, &tx, away);
    let more = if unsent { traffic.unsent } else { traffic.waiting };
    let mut queued = kernel.max(0) as u64;
    // The number of marker bytes in `queued` follows only from TCP's positions, so `queued` is computed from these too.
    if queued > 0
        && tx.ours_from(0) > 0
        && let Some(fd) = socket.numbers.anchor_fd()
        && let Some(positions) = Positions::of(fd, socket.promotion.role())
    {
        let from = if unsent { positions.sent } else { positions.acked };
        queued = (positions.written - from).saturating_sub(tx.ours_from(from));
    }
    c_int::try_from(queued + more).unwrap_or(c_int::MAX)
}

/// Returns whether [`correct`] corrects this option.
pub(super) fn is_corrected(option: sockopt::Name) -> bool {
    [tcp_info::NAME, MEMINFO].contains(&option)
}

/// Corrects the value of `option` that the kernel has written for the program.
///
/// # Safety
/// `value` is valid for writes of `len` bytes, which getsockopt(2) has just written for `option`.
#[cold]
pub(super) unsafe fn correct(socket: &'static Socket, option: sockopt::Name, value: *mut u8, len: usize) {
    let away = away(socket);
    // Under both locks the kernel's counts and the library's counts agree. A thread that puts bytes of the library into
    // TCP, or takes them out, holds one of the locks until it has counted them.
    let (Some(mut rx), Some(tx)) = (socket.rx.lock(), socket.tx.lock()) else {
        return;
    };
    let sent = sent(socket, &tx, away);
    let is_quiet = socket.is_plain() && sent.is_none();
    if is_quiet && received(socket, &Uncounted::default()).is_none() {
        // The connection has never been on a link, so the kernel's value is right.
        return;
    }
    // Reads the whole value again: the program may have asked only for its first bytes, which may end in the middle of
    // a number.
    let anchor = socket.numbers.anchor_fd();
    let asked = anchor.and_then(|fd| sockopt::bytes::<LONGEST>(fd, option).ok());
    // Read after the kernel's counts, so that bytes that come in between are left out and not counted twice.
    let uncounted = rx::uncounted(socket, &mut rx);
    let received = received(socket, &uncounted);
    let Some((mut copy, known)) = asked else {
        return;
    };
    let mut fields = Fields(copy.get_mut(..known).unwrap_or_default());
    if option == tcp_info::NAME {
        correct_info(socket, &tx, &mut fields, &sent, &received);
    } else {
        let unread = bounded(uncounted.on_link + uncounted.carried);
        fields.put_u32(RMEM_ALLOC, |n| n.saturating_add(unread));
    }
    // SAFETY: `value` is valid for `len` bytes by the contract, and `copy` has `known` bytes.
    unsafe { std::ptr::copy_nonoverlapping(copy.as_ptr(), value, len.min(known)) };
}

fn correct_info(socket: &Socket, tx: &Tx, info: &mut Fields<'_>, sent: &Traffic, received: &Traffic) {
    let mss = u64::from(info.u32(at::SND_MSS));
    // The kernel learns of a shutdown only when all bytes before the end are in TCP.
    if tx.end.is_shut() {
        info.put_u8(at::STATE, state_after_shutdown);
    }
    // If only bytes of markers are unacknowledged, the program sees no unacknowledged segment: the peer's host may
    // acknowledge markers late.
    let positions = Positions::in_info(info, socket.promotion.role()).unwrap_or_default();
    let (unanswered, unsent) = (tx.ours_from(positions.acked), tx.ours_from(positions.sent));
    if unanswered > unsent && unanswered - unsent == positions.sent - positions.acked {
        info.put_u32(at::UNACKED, |_| 0);
    }
    info.put_u32(at::NOTSENT_BYTES, |n| n.saturating_sub(bounded(unsent)));
    let told = &socket.told.ledger.told_bytes;
    let acked = (sent.bytes + unanswered).saturating_sub(sent.waiting);
    let counts = [
        (at::BYTES_ACKED, acked, sent.ours),
        (at::BYTES_SENT, sent.bytes + unsent, sent.ours),
        (at::BYTES_RECEIVED, received.bytes, received.ours),
    ];
    for ((place, more, ours), told) in counts.into_iter().zip(told) {
        info.put_u64(place, |n| {
            let count = n.wrapping_add(more).saturating_sub(ours);
            count.max(told.fetch_max(count, Relaxed))
        });
    }
    let told = &socket.told.ledger.told_segments;
    let (out, into) = (sent.segments(mss), received.segments(mss));
    // Each data segment also counts one acknowledging segment, as TCP sends them while there are few segments.
    let segments = [
        (at::SEGS_OUT, out + into),
        (at::DATA_SEGS_OUT, out),
        (at::DELIVERED, out),
        (at::SEGS_IN, into + out),
        (at::DATA_SEGS_IN, into),
    ];
    for ((place, more), told) in segments.into_iter().zip(told) {
        // These counts wrap at 2^32.
        info.put_u32(place, |n| later(told, n.wrapping_add(more as u32)));
    }
    let waiting = sent.waiting.saturating_sub(sent.unsent);
    info.put_u32(at::UNACKED, |n| n.saturating_add(bounded(waiting.div_ceil(mss.max(1)))));
    info.put_u32(at::NOTSENT_BYTES, |n| n.saturating_add(bounded(sent.unsent)));
    info.put_u32(at::LAST_DATA_SENT, |ms| sent.idle(ms));
    info.put_u32(at::LAST_DATA_RECV, |ms| received.idle(ms));
    // Bytes on a link count as acknowledged when they are sent.
    info.put_u32(at::LAST_ACK_RECV, |ms| sent.idle(ms));
}

/// Returns `n`, or the largest value of 32 bits if `n` is larger.
fn bounded(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Returns the TCP state that follows `state` by a shutdown(SHUT_WR), which the kernel does not know of yet
/// (tcp_states.h).
fn state_after_shutdown(state: u8) -> u8 {
    const ESTABLISHED: u8 = 1;
    const FIN_WAIT1: u8 = 4;
    const CLOSE_WAIT: u8 = 8;
    const LAST_ACK: u8 = 9;
    match state {
        ESTABLISHED => FIN_WAIT1,
        CLOSE_WAIT => LAST_ACK,
        state => state,
    }
}

/// Returns `count`, which wraps, or the value that was last reported for it if that is later. Stores the result in
/// `told`.
fn later(told: &AtomicU32, count: u32) -> u32 {
    let before = told.load(Relaxed);
    if (count.wrapping_sub(before) as i32) < 0 {
        return before;
    }
    told.store(count, Relaxed);
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_goes_round_is_not_taken_back() {
        let told = AtomicU32::new(u32::MAX - 1);
        assert_eq!(later(&told, u32::MAX - 5), u32::MAX - 1);
        assert_eq!(later(&told, 3), 3);
        assert_eq!(later(&told, 2), 3);
    }

    #[test]
    fn segments_are_those_of_tcp_at_least() {
        let traffic = |bytes, calls| Traffic {
            bytes,
            calls,
            ..Traffic::default()
        };
        assert_eq!(traffic(100_000, 2).segments(1000), 100);
        assert_eq!(traffic(100, 20).segments(1000), 20);
        assert_eq!(traffic(100, 0).segments(0), 100);
        let unread = Traffic {
            unread: 1500,
            ..traffic(1600, 7)
        };
        assert_eq!(unread.segments(1000), 9);
    }
}
