//! The errors of the cursors: the peer has broken the protocol, or one of the two sides has ended the direction.

#![forbid(unsafe_code)]

/// The consumer has [stopped](super::Consumer::stop): the [unread](super::Producer::unread) bytes go over TCP again,
/// before any others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the reader has stopped")]
pub struct Stopped;

/// The producer has [ended](super::Producer::end) the direction: it can only be drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the direction has its end mark")]
pub struct Ended;

/// A value in shared memory that no correct peer writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The producer's tail went back.
    #[error("tail moved back")]
    TailMovedBack,
    /// The producer's tail is beyond the space that it had.
    #[error("tail beyond the window")]
    TailBeyondWindow,
    /// The consumer's head went back.
    #[error("head moved back")]
    HeadMovedBack,
    /// The consumer's head is beyond the bytes written.
    #[error("head beyond the tail")]
    HeadBeyondTail,
    /// The offered ring has a bad size or is outside the data area.
    #[error("bad ring offer")]
    BadOffer,
    /// The offered ring is larger than the allowance's largest ring, or with it this end would write into more of the
    /// area than the allowance permits.
    #[error("ring beyond what is written into")]
    BeyondAllowance,
    /// The producer adopted a ring that was not offered, or at an impossible position.
    #[error("bad ring switch")]
    BadSwitch,
    /// The consumer asks again for bytes of a ring that the producer no longer has.
    #[error("what is to be sent again is not held")]
    NotHeld,
    /// Unknown end mark.
    #[error("bad end mark")]
    BadEnd,
}

/// Why a cursor cannot go on. The link is to be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The peer broke the protocol.
    #[error("peer violation: {0}")]
    PeerViolation(#[from] Violation),
    /// The reserve that the producer has adopted cannot be mapped.
    #[error("the ring in reserve is not to be had")]
    Unmapped,
    /// There is no memory for a copy of the bytes to be sent again.
    #[error("no memory for what is to be sent again")]
    NoMemory,
}
