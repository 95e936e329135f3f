//! What a program reads of its connection from the kernel, put right by what went over links instead, and by what in
//! TCP is ours: TCP_INFO (tcp(7); struct tcp_info of linux/tcp.h), SO_MEMINFO, SIOCOUTQ and SIOCOUTQNSD. Not here:
//! FIONREAD (`rx::count`), and options that are kept here (`keepalive`, `tx::cork`).
//!
//! To TCP a byte is acknowledged when it has arrived at the peer's host, whether or not the program there has read it.
//! So is what is on a link within the host as soon as it is there: the ring lies in the reader's memory, and is read to
//! its end whatever becomes of the sender. Between hosts it is when the other end says that it has it.
//!
//! What has been told is never taken back: a count does not fall while bytes change from the link to TCP.

use std::ffi::c_int;
use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed},
};

use rdmasock_core::ids::Vqpn;
use rdmasock_core::stats::StreamStats;

use crate::data::rx::{self, Uncounted};
use crate::notify::ready;
use crate::objects::link::Link;
use crate::objects::socket::{Mode, Socket, Tx};
use crate::sys::sockopt;
use crate::sys::tcp_info::{self, Fields, Positions, at};

/// One direction as it is now.
#[derive(Clone, Copy, Default)]
struct Traffic {
    /// Bytes and calls that went over links.
    bytes: u64,
    calls: u64,
    /// Of those bytes, what no call has received yet.
    unread: u64,
    /// Bytes in TCP that are not the program's.
    ours: u64,
    /// Bytes that have left the program, and have not arrived.
    waiting: u64,
    /// Of those, what TCP or the other host is still to be given.
    unsent: u64,
    /// When the link was last used, by the [tick](crate::sys::time::tick); 0: never.
    last: u64,
}

impl Traffic {
    fn is_none(&self) -> bool {
        self.bytes | self.ours | self.waiting == 0
    }

    /// As many segments as TCP would have needed at least, a call at a time.
    fn segments(&self, mss: u64) -> u64 {
        let mss = mss.max(1);
        self.calls.max((self.bytes - self.unread).div_ceil(mss)) + self.unread.div_ceil(mss)
    }

    /// ms since the link was last used, as far as that is later than `kernel` says.
    fn idle(&self, kernel: u32) -> u32 {
        if self.last == 0 {
            return kernel;
        }
        let ms = crate::sys::time::tick().saturating_sub(self.last) / 1_000_000;
        kernel.min(u32::try_from(ms).unwrap_or(u32::MAX))
    }
}

/// The caller holds the direction's lock. `away` is what the function of that name says.
fn sent(socket: &Socket, tx: &Tx, away: Away) -> Traffic {
    let way = &socket.told.ledger.sent;
    let counts = socket.told.stats().map(StreamStats::sent).unwrap_or_default();
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

/// What is on its way to another host.
#[derive(Clone, Copy, Default)]
struct Away {
    /// Bytes that the other host has not said that it has.
    unconfirmed: u64,
    /// Those of the unconfirmed bytes that the other host has no room for.
    unsent: u64,
}

/// What of the sending direction is on its way to another host, which is asked for it.
fn away(socket: &'static Socket) -> Away {
    if socket.tx_mode.load(Acquire) != Mode::Link {
        return Away::default();
    }
    let Some(remote) = socket.link().and_then(Link::remote) else {
        return Away::default();
    };
    ready::progress(socket);
    let theirs = Vqpn(socket.peer_vqpn.load(Relaxed));
    // In this order: what is sent in between counts as unconfirmed alone.
    let unconfirmed = remote.unconfirmed(theirs);
    Away {
        unconfirmed,
        unsent: remote.unsent(theirs).min(unconfirmed),
    }
}

/// The caller holds the direction's lock, with `held` from there.
fn received(socket: &Socket, uncounted: &Uncounted) -> Traffic {
    let way = &socket.told.ledger.received;
    let counts = socket.told.stats().map(StreamStats::received).unwrap_or_default();
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

/// SIOCOUTQ, of which the kernel says `kernel`: bytes that the peer's host does not have. With `unsent`, SIOCOUTQNSD:
/// those that have not been sent.
pub fn out_queue(socket: &'static Socket, kernel: c_int, unsent: bool) -> c_int {
    let away = away(socket);
    let Some(tx) = socket.tx.lock() else {
        return kernel;
    };
    let traffic = sent(socket, &tx, away);
    let more = if unsent { traffic.unsent } else { traffic.waiting };
    let mut queued = kernel.max(0) as u64;
    // Which of it is ours is to be seen only together with how much there is.
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

/// An option whose value this corrects.
pub fn is_corrected(option: sockopt::Name) -> bool {
    [tcp_info::NAME, MEMINFO].contains(&option)
}

/// SO_MEMINFO (asm-generic/socket.h).
const MEMINFO: sockopt::Name = (libc::SOL_SOCKET, 55);

/// Longer than either on any kernel so far.
const LONGEST: usize = 512;

/// Corrects what the kernel has written for the program.
///
/// # Safety
/// `value` is valid for writes of `len` bytes, which getsockopt(2) has just written for `option`.
#[cold]
pub unsafe fn correct(socket: &'static Socket, option: sockopt::Name, value: *mut u8, len: usize) {
    let away = away(socket);
    // With both locks the kernel's counts and ours are of one moment: whoever puts something of ours into TCP, or takes
    // it out, holds one of them until it is counted.
    let (Some(mut rx), Some(tx)) = (socket.rx.lock(), socket.tx.lock()) else {
        return;
    };
    let sent = sent(socket, &tx, away);
    let is_quiet = socket.is_plain() && sent.is_none();
    if is_quiet && received(socket, &Uncounted::default()).is_none() {
        // It was never anything else than TCP.
        return;
    }
    // The program may ask for the first bytes alone, which may end in the middle of a number.
    let mut copy = [0u8; LONGEST];
    let mut known = LONGEST as libc::socklen_t;
    let asked = socket.numbers.anchor_fd().is_some_and(|fd| {
        let fd = std::os::fd::AsRawFd::as_raw_fd(&fd);
        // SAFETY: a buffer of that length.
        unsafe { sockopt::read(fd, option, copy.as_mut_ptr(), &mut known) }
    });
    // After the kernel's counts: what comes in between is rather left out than counted twice.
    let uncounted = rx::uncounted(socket, &mut rx);
    let received = received(socket, &uncounted);
    let Some(bytes) = copy.get_mut(..known as usize).filter(|_| asked) else {
        return;
    };
    let mut fields = Fields(bytes);
    if option == tcp_info::NAME {
        correct_info(socket, &tx, &mut fields, &sent, &received);
    } else {
        let unread = u32::try_from(uncounted.on_link + uncounted.carried).unwrap_or(u32::MAX);
        fields.put_u32(RMEM_ALLOC, |n| n.saturating_add(unread));
    }
    // SAFETY: by the contract, and no more than is known.
    unsafe { std::ptr::copy_nonoverlapping(copy.as_ptr(), value, len.min(known as usize)) };
}

/// SK_MEMINFO_RMEM_ALLOC (linux/sock_diag.h): the first of an array of 32 bits each.
const RMEM_ALLOC: usize = 0;

fn correct_info(socket: &Socket, tx: &Tx, info: &mut Fields<'_>, sent: &Traffic, received: &Traffic) {
    let mss = u64::from(info.u32(at::SND_MSS));
    // The kernel hears of a shutdown when what precedes the end is in TCP.
    if tx.is_shut {
        info.put_u8(at::STATE, state_after_shutdown);
    }
    // The peer's host may be slow to acknowledge a marker, which is not the program's.
    let positions = Positions::in_info(info, socket.promotion.role()).unwrap_or_default();
    let (unanswered, unsent) = (tx.ours_from(positions.acked), tx.ours_from(positions.sent));
    if unanswered > unsent && unanswered - unsent == positions.sent - positions.acked {
        info.put_u32(at::UNACKED, |_| 0);
    }
    info.put_u32(at::NOTSENT_BYTES, |n| {
        n.saturating_sub(u32::try_from(unsent).unwrap_or(u32::MAX))
    });
    let told = &socket.told.ledger.told_bytes;
    let counts = [
        (
            at::BYTES_ACKED,
            (sent.bytes + unanswered).saturating_sub(sent.waiting),
            sent.ours,
        ),
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
    // Each is acknowledged, as TCP does where there are few of them.
    let segments = [
        (at::SEGS_OUT, out + into),
        (at::DATA_SEGS_OUT, out),
        (at::DELIVERED, out),
        (at::SEGS_IN, into + out),
        (at::DATA_SEGS_IN, into),
    ];
    for ((place, more), told) in segments.into_iter().zip(told) {
        // These go round at 2^32.
        info.put_u32(place, |n| later(told, n.wrapping_add(more as u32)));
    }
    let waiting = sent.waiting.saturating_sub(sent.unsent);
    info.put_u32(at::UNACKED, |n| {
        n.saturating_add(u32::try_from(waiting.div_ceil(mss.max(1))).unwrap_or(u32::MAX))
    });
    info.put_u32(at::NOTSENT_BYTES, |n| {
        n.saturating_add(u32::try_from(sent.unsent).unwrap_or(u32::MAX))
    });
    info.put_u32(at::LAST_DATA_SENT, |ms| sent.idle(ms));
    info.put_u32(at::LAST_DATA_RECV, |ms| received.idle(ms));
    // What is on a link has arrived.
    info.put_u32(at::LAST_ACK_RECV, |ms| sent.idle(ms));
}

/// TCP's state after a shutdown(SHUT_WR) of which it has not heard (tcp_states.h).
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

/// A count that goes round, or what was told of it if that is more.
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
