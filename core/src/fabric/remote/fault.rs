//! Why a link between hosts is down: the faults, and the cell that keeps the first one.

#![forbid(unsafe_code)]

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::qp::Down;
use super::watch::SILENCE;
use crate::codes::codes;

codes! {
    /// A violation of the protocol, which no correct peer commits (ARCHITECTURE, I7).
    pub enum Breach: u32 {
        /// A message that cannot be read ([`Malformed`](super::record::Malformed)).
        Malformed = 1 => "malformed message",
        /// A record about a stream that is not open, or that the peer has closed.
        Stream = 2 => "a record about no stream",
        /// More credits than there are receive buffers.
        Grant = 3 => "too many receive buffers granted",
        /// A tail that goes back, or is beyond the window, or does not fit its payload.
        Tail = 4 => "bad tail",
        /// A switch to a ring that was not on offer, or at another position than the tail.
        Switch = 5 => "bad ring switch",
        /// An unknown end mark, one that is not at the tail or comes twice, or a record after the end.
        End = 6 => "bad end mark",
        /// A head that goes back or is beyond the tail.
        Head = 7 => "bad head",
        /// An offer while another is pending, or out of turn, or outside the arena.
        Offer = 8 => "bad ring offer",
        /// A chunk outside the arena, or announced twice.
        Chunk = 9 => "bad chunk",
        /// A message of the side channel that cannot be read, or does not belong there.
        Message = 10 => "bad side-channel message",
        /// More messages than a correct peer ever owes.
        Flood = 11 => "too many messages",
        /// A confirmation of bytes that were not sent.
        Ack = 12 => "bad confirmation",
        /// An immediate on a link that has none.
        Immediate = 13 => "unexpected immediate",
        /// An advert of no memory or while another is in use, an answer beyond it, or a record that belongs on the
        /// other queue pair.
        Advert = 14 => "bad advert",
        /// A loan of no memory or out of place, a record that may not come during a loan, or an answer to no loan or
        /// beyond it.
        Loan = 15 => "bad loan",
    }
}

/// Why a link is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The queue pair failed, or the peer is gone. Bytes that were not received can be sent again over TCP.
    #[error("{0}")]
    Down(Down),
    /// The peer broke the protocol. The content of the rings cannot be trusted.
    #[error("peer violation: {0}")]
    Violation(Breach),
    /// The peer's device has not answered for 5 s (`SILENCE`). Bytes that were not received can be sent again over TCP.
    #[error("no answer from the peer's device for {} s", SILENCE / 1_000_000_000)]
    Silent,
    /// This end took it down ([`End::set_down`](super::End::set_down)).
    #[error("taken down")]
    Closed,
}

impl From<Breach> for Fault {
    fn from(breach: Breach) -> Self {
        Self::Violation(breach)
    }
}

impl From<Down> for Fault {
    fn from(down: Down) -> Self {
        Self::Down(down)
    }
}

/// The first fault of a link. Any thread may read it, and signal handlers too.
#[derive(Debug, Default)]
pub(super) struct FaultCell(AtomicU64);

impl FaultCell {
    pub fn get(&self) -> Option<Fault> {
        let word = self.0.load(Acquire);
        let value = word as u32;
        match word >> 32 {
            0 => None,
            1 => Some(Fault::Down(Down(value as i32))),
            2 => Breach::from_code(value).map(Fault::Violation),
            4 => Some(Fault::Silent),
            _ => Some(Fault::Closed),
        }
    }

    /// Clears the fault, for another link.
    pub fn clear(&self) {
        self.0.store(0, Release);
    }

    /// Stores the fault unless there is one. True if it is the first.
    pub fn set(&self, fault: Fault) -> bool {
        let word = match fault {
            Fault::Down(Down(errno)) => 1 << 32 | u64::from(errno as u32),
            Fault::Violation(breach) => 2 << 32 | u64::from(breach as u32),
            Fault::Closed => 3 << 32,
            Fault::Silent => 4 << 32,
        };
        self.0.compare_exchange(0, word, Release, Acquire).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_fault_stays_and_reads_back() {
        let faults = Breach::ALL.iter().copied().map(Fault::Violation).chain([
            Fault::Down(Down(-5)),
            Fault::Down(Down(0)),
            Fault::Closed,
            Fault::Silent,
        ]);
        for fault in faults {
            let cell = FaultCell::default();
            assert_eq!(cell.get(), None);
            assert!(cell.set(fault) && !cell.set(Fault::Closed));
            assert_eq!(cell.get(), Some(fault));
        }
    }
}
