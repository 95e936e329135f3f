//! The kernel's struct tcp_info (tcp(7), TCP_INFO; linux/tcp.h). An old kernel returns a shorter struct, without its
//! last members. A [`Ledger`] has the counts by which `hooks/report.rs` corrects the struct for the program.
#![allow(missing_docs, reason = "the members of the struct have its names")]

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rdmasock_core::stats::StreamStats;
use rdmasock_core::stream::handshake::Role;

use crate::sys::sockopt;

/// The option by which the struct is read.
pub(crate) const NAME: sockopt::Name = (libc::IPPROTO_TCP, libc::TCP_INFO);

/// The offsets of the members of struct tcp_info, bytes (linux/tcp.h).
pub(crate) mod at {
    pub(crate) const STATE: usize = 0;
    pub(crate) const SND_MSS: usize = 16;
    pub(crate) const UNACKED: usize = 24;
    pub(crate) const LAST_DATA_SENT: usize = 44;
    pub(crate) const LAST_DATA_RECV: usize = 52;
    pub(crate) const LAST_ACK_RECV: usize = 56;
    pub(crate) const BYTES_ACKED: usize = 120;
    pub(crate) const BYTES_RECEIVED: usize = 128;
    pub(crate) const SEGS_OUT: usize = 136;
    pub(crate) const SEGS_IN: usize = 140;
    pub(crate) const NOTSENT_BYTES: usize = 144;
    pub(crate) const DATA_SEGS_IN: usize = 152;
    pub(crate) const DATA_SEGS_OUT: usize = 156;
    pub(crate) const DELIVERED: usize = 192;
    pub(crate) const BYTES_SENT: usize = 200;
    pub(crate) const BYTES_RETRANS: usize = 208;
}

/// Positions in the stream of bytes that TCP was given: `acked` ≤ `sent` ≤ `written`.
#[derive(Clone, Copy, Default)]
pub(crate) struct Positions {
    /// The peer's host has all bytes before this position.
    pub acked: u64,
    /// TCP has sent all bytes before this position.
    pub sent: u64,
    /// TCP was given all bytes before this position.
    pub written: u64,
}

impl Positions {
    /// Returns the positions of the connection behind `fd`, whose end has `role`. `None` if the kernel does not report
    /// them (before Linux 4.19).
    pub(crate) fn of(fd: BorrowedFd<'_>, role: Role) -> Option<Self> {
        let (mut bytes, known) = sockopt::bytes::<{ at::BYTES_RETRANS + size_of::<u64>() }>(fd, NAME).ok()?;
        Self::in_info(&Fields(bytes.get_mut(..known)?), role)
    }

    /// Returns the positions from a struct that the caller has read; `None` if the struct is too short.
    pub(crate) fn in_info(info: &Fields<'_>, role: Role) -> Option<Self> {
        if info.0.len() < at::BYTES_RETRANS + size_of::<u64>() {
            return None;
        }
        let sent = info.u64(at::BYTES_SENT).saturating_sub(info.u64(at::BYTES_RETRANS));
        // The kernel's count of acknowledged bytes includes the connector's SYN, and a FIN.
        let acked = info
            .u64(at::BYTES_ACKED)
            .saturating_sub(u64::from(role == Role::Connector));
        Some(Self {
            acked: acked.min(sent),
            sent,
            written: sent + u64::from(info.u32(at::NOTSENT_BYTES)),
        })
    }
}

/// The bytes of a kernel struct that the kernel has returned.
pub(crate) struct Fields<'a>(pub &'a mut [u8]);

impl Fields<'_> {
    /// Returns the 32-bit member at the offset `at`; 0 if the kernel does not know the member.
    pub(crate) fn u32(&self, at: usize) -> u32 {
        let bytes = self.0.get(at..).and_then(|b| b.first_chunk());
        bytes.map_or(0, |b| u32::from_ne_bytes(*b))
    }

    /// Returns the 64-bit member at the offset `at`; 0 if the kernel does not know the member.
    pub(crate) fn u64(&self, at: usize) -> u64 {
        let bytes = self.0.get(at..).and_then(|b| b.first_chunk());
        bytes.map_or(0, |b| u64::from_ne_bytes(*b))
    }

    /// Replaces the 8-bit member at the offset `at` by the result of `new`. Does nothing if the kernel does not know
    /// the member.
    pub(crate) fn put_u8(&mut self, at: usize, new: impl FnOnce(u8) -> u8) {
        if let Some(byte) = self.0.get_mut(at) {
            *byte = new(*byte);
        }
    }

    /// Replaces a 32-bit member, as [`put_u8`](Self::put_u8) does.
    pub(crate) fn put_u32(&mut self, at: usize, new: impl FnOnce(u32) -> u32) {
        if let Some(bytes) = self.0.get_mut(at..).and_then(|b| b.first_chunk_mut()) {
            *bytes = new(u32::from_ne_bytes(*bytes)).to_ne_bytes();
        }
    }

    /// Replaces a 64-bit member, as [`put_u8`](Self::put_u8) does.
    pub(crate) fn put_u64(&mut self, at: usize, new: impl FnOnce(u64) -> u64) {
        if let Some(bytes) = self.0.get_mut(at..).and_then(|b| b.first_chunk_mut()) {
            *bytes = new(u64::from_ne_bytes(*bytes)).to_ne_bytes();
        }
    }
}

/// The part of the [`Ledger`] for one direction.
#[derive(Default)]
pub struct Way {
    /// The number of bytes of markers in this direction of TCP.
    pub ours: AtomicU64,
    /// The bytes and calls that the parent of a fork child moved over links before the fork.
    pub bytes: AtomicU64,
    pub calls: AtomicU64,
}

impl Way {
    /// Adds a number of bytes of markers. The counts that the program reads must not include them.
    pub fn add_ours(&self, bytes: usize) {
        self.ours.fetch_add(bytes as u64, Relaxed);
    }

    fn reset(&self) {
        for count in [&self.ours, &self.bytes, &self.calls] {
            count.store(0, Relaxed);
        }
    }
}

/// The differences between the kernel's counts of a connection and the counts that the program reads. Also the counts
/// that the program has read, so that later ones are not lower.
#[derive(Default)]
pub struct Ledger {
    pub sent: Way,
    pub received: Way,
    /// The largest value of each 64-bit count that the program has read, in the order of `hooks/report.rs`.
    pub told_bytes: [AtomicU64; 3],
    /// The latest value of each 32-bit count that the program has read, in the same order. These counts wrap.
    pub told_segments: [AtomicU32; 5],
}

impl Ledger {
    /// Clears all counts, for a new connection.
    pub fn reset(&self) {
        self.sent.reset();
        self.received.reset();
        for told in &self.told_bytes {
            told.store(0, Relaxed);
        }
        for told in &self.told_segments {
            told.store(0, Relaxed);
        }
    }

    /// Adds the counts of the parent's statistics, in a fork child whose own statistics begin at 0.
    pub fn keep(&self, stats: Option<&StreamStats>) {
        if let Some(stats) = stats {
            for (way, counts) in [(&self.sent, stats.tx.load()), (&self.received, stats.rx.load())] {
                way.bytes.fetch_add(counts.link_bytes, Relaxed);
                way.calls.fetch_add(counts.link_calls, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_old_kernel_does_not_know_is_left_out() {
        let mut bytes = [1u8, 0, 0, 0, 9, 9];
        let mut fields = Fields(&mut bytes);
        fields.put_u32(0, |n| n + 1);
        fields.put_u32(4, |_| 0);
        fields.put_u64(0, |_| 0);
        assert_eq!(fields.u32(0), 2);
        assert_eq!(bytes, [2, 0, 0, 0, 9, 9]);
    }
}
