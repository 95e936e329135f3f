//! Why an end says no, as it travels. Why a stream is on TCP for its own program is another list (`stats/reason.rs`).

use std::fmt;

/// Why an end says no, as it travels in NO, LINK-REFUSE, OPEN-REFUSE and ABORT.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// This instance holds no such connection (or has not accepted it yet).
    NotHeld,
    /// A rule leaves the connection on TCP.
    Rule,
    /// More than one process may hold the connection.
    Shared,
    /// The socket is in a use that the link does not support.
    Use,
    /// The connection is being closed or has been reset.
    Closing,
    /// A bound was reached: links, streams, waiters.
    Limit,
    /// No memory, no fd, no room in the arena.
    Resources,
    /// The other end's parameters cannot be met.
    Unsupported,
    /// The nonce or the cookie is not the one that was given out.
    Secret,
    /// The other end did not keep to the protocol.
    Violation,
    /// A step did not come in time.
    Timeout,
    /// The other end withdrew.
    Cancelled,
    /// No program with the library listens on the port there.
    Absent,
    /// The asker's user does not own the connector's socket, or the two ends are not in one network namespace.
    NotOwner,
    /// A reason of a later version, by its number.
    Other(u16),
}

impl Reason {
    const KNOWN: [(Self, u16, &'static str); 14] = [
        (Self::NotHeld, 1, "peer does not hold the connection"),
        (Self::Rule, 2, "a rule leaves it on TCP"),
        (Self::Shared, 3, "shared by several processes"),
        (Self::Use, 4, "socket use not supported on a link"),
        (Self::Closing, 5, "connection is closing"),
        (Self::Limit, 6, "limit reached"),
        (Self::Resources, 7, "out of memory, fds or arena"),
        (Self::Unsupported, 8, "parameters not supported"),
        (Self::Secret, 9, "wrong nonce or cookie"),
        (Self::Violation, 10, "protocol violation"),
        (Self::Timeout, 11, "no answer in time"),
        (Self::Cancelled, 12, "withdrawn"),
        (Self::Absent, 13, "no program with the library on the port"),
        (Self::NotOwner, 14, "asker does not own the connection"),
    ];

    /// The number on the wire.
    pub fn code(self) -> u16 {
        match self {
            Self::Other(code) => code,
            known => Self::KNOWN
                .iter()
                .find(|(r, ..)| *r == known)
                .map_or(0, |(_, code, _)| *code),
        }
    }

    /// The reason with this number; every number is one.
    pub fn from_code(code: u16) -> Self {
        Self::KNOWN
            .iter()
            .find(|(_, c, _)| *c == code)
            .map_or(Self::Other(code), |(r, ..)| *r)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::KNOWN.iter().find(|(r, ..)| r == self) {
            Some((.., text)) => f.write_str(text),
            None => write!(f, "reason {}", self.code()),
        }
    }
}
