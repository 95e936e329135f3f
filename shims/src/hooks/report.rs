//! Corrects what a program reads of its connection from the kernel: by the bytes that went over links, and by the
//! library's own bytes in TCP. The options are TCP_INFO (tcp(7); struct tcp_info of linux/tcp.h), SO_MEMINFO, SIOCOUTQ
//! and SIOCOUTQNSD. Not here: FIONREAD ([`rx::available`]), and options that the library keeps
//! ([`Keepalive`](sockopt::Keepalive), [`tx::cork`](crate::data::tx::cork)).
//!
//! To TCP a byte is acknowledged when it has arrived at the peer's host, whether or not the program there has read it.
//! On a link within the host a byte has arrived at once. The ring lies in the reader's memory, and is read to its end
//! even if the sender has ended. Between hosts a byte has arrived when the other end confirms it.
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

/// Longer than either value on any kernel so far, bytes.
const LONGEST: usize = 512;

/// SK_MEMINFO_RMEM_ALLOC (linux/sock_diag.h): the first of an array of 32 bits each.
const RMEM_ALLOC: usize = 0;

/// The traffic of one direction up to now.
#[derive(Clone, Copy, Default)]
struct Traffic {
    /// Bytes and calls that went over links.
    bytes: u64,
    calls: u64,
    /// The part of `bytes` that no call has received yet.
    unread: u64,
    /// Bytes in TCP that are not the program's.
    ours: u64,
    /// Bytes that have left the program, and have not arrived.
    waiting: u64,
    /// The part of `waiting` that TCP or the other host has not been given yet.
    unsent: u64,
    /// The [tick](crate::sys::time::tick) at which the link was last used; 0: never.
    last: u64,
}

impl Traffic {
    fn is_none(&self) -> bool {
        self.bytes | self.ours | self.waiting == 0
    }

    /// Returns how many segments TCP would have needed at least, with one or more for each call.
    fn segments(&self, mss: u64) -> u64 {
        let mss = mss.max(1);
        self.calls.max((self.bytes - self.unread).div_ceil(mss)) + self.unread.div_ceil(mss)
    }

    /// Returns the time since the link was last used, ms, or `kernel` if that is less.
    fn idle(&self, kernel: u32) -> u32 {
        if self.last == 0 {
            return kernel;
        }
        kernel.min(bounded(crate::sys::time::tick().saturating_sub(self.last) / 1_000_000))
    }
}

/// Returns the traffic of the sending direction. The caller holds its lock. `away` is what the function `away` has
/// returned.
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
    // In this order: bytes that are sent in between count as unconfirmed alone.
    let unconfirmed = remote.end().unconfirmed(theirs).unwrap_or(0);
    Away {
        unconfirmed,
        unsent: remote.end().unsent(theirs).min(unconfirmed),
    }
}

/// Returns the traffic of the receiving direction. The caller holds its lock, and has got `uncounted` under it.
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

/// Returns the value of SIOCOUTQ, the bytes that the peer's host does not have, from the kernel's value `kernel`. With
/// `unsent`, of SIOCOUTQNSD: the bytes that have not been sent.
pub(super) fn out_queue(socket: &'static Socket, kernel: c_int, unsent: bool) -> c_int {
    let away = away(socket);
    let Some(tx) = socket.tx.lock() else {
        return kernel;
    };
    let traffic = sent(socket, &tx, away);
    let more = if unsent { traffic.unsent } else { traffic.waiting };
    let mut queued = kernel.max(0) as u64;
    // The library's share of these bytes can be computed only together with their number.
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

/// Corrects what the kernel has written for the program.
///
/// # Safety
/// `value` is valid for writes of `len` bytes, which getsockopt(2) has just written for `option`.
#[cold]
pub(super) unsafe fn correct(socket: &'static Socket, option: sockopt::Name, value: *mut u8, len: usize) {
    let away = away(socket);
    // With both locks the kernel's counts and the library's are of one moment. A thread that puts bytes of the library
    // into TCP, or takes them out, holds one of the locks until they are counted.
    let (Some(mut rx), Some(tx)) = (socket.rx.lock(), socket.tx.lock()) else {
        return;
    };
    let sent = sent(socket, &tx, away);
    let is_quiet = socket.is_plain() && sent.is_none();
    if is_quiet && received(socket, &Uncounted::default()).is_none() {
        // The connection has only ever been on TCP.
        return;
    }
    // The program may ask for the first bytes alone, which may end in the middle of a number.
    let anchor = socket.numbers.anchor_fd();
    let asked = anchor.and_then(|fd| sockopt::bytes::<LONGEST>(fd, option).ok());
    // After the kernel's counts: bytes that come in between are left out rather than counted twice.
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
    // A marker is not the program's, and the peer's host may be slow to acknowledge it.
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
    // Each segment is acknowledged by another, as TCP does where there are few of them.
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
    // Bytes on a link have arrived when they are sent.
    info.put_u32(at::LAST_ACK_RECV, |ms| sent.idle(ms));
}

/// Returns `n`, or the largest value of 32 bits if `n` is larger.
fn bounded(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Returns the state after a shutdown(SHUT_WR) that the kernel does not know of yet (tcp_states.h).
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

/// Returns a count that wraps, or the value that was last reported for it if that is later.
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
