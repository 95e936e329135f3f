//! Reasons for a NO, as they are sent. The reasons why a stream is on TCP, for its own program, are in
//! `stats/reason.rs`.

use std::fmt;

/// Declares [`Reason`] by the name, number and text of each reason that this version knows.
macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal => $text:literal,)+) => {
        /// Why an end refuses, as sent in NO, LINK-REFUSE, OPEN-REFUSE and ABORT.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Reason {
            $($(#[$doc])* $name,)+
            /// A reason of a later version, by its number.
            Other(u16),
        }

        impl Reason {
            /// Returns the number on the wire.
            pub fn code(self) -> u16 {
                match self { $(Self::$name => $code,)+ Self::Other(code) => code }
            }

            /// Returns the reason with this number; every number is one.
            pub fn from_code(code: u16) -> Self {
                match code { $($code => Self::$name,)+ other => Self::Other(other) }
            }
        }

        impl fmt::Display for Reason {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self { $(Self::$name => f.write_str($text),)+ Self::Other(code) => write!(f, "reason {code}") }
            }
        }
    };
}

reasons! {
    /// This instance holds no such connection (or has not accepted it yet).
    NotHeld = 1 => "peer does not hold the connection",
    /// A rule leaves the connection on TCP.
    Rule = 2 => "a rule leaves it on TCP",
    /// More than one process may hold the connection.
    Shared = 3 => "shared by several processes",
    /// The socket is in a use that the link does not support.
    Use = 4 => "socket use not supported on a link",
    /// The connection is being closed or has been reset.
    Closing = 5 => "connection is closing",
    /// A bound was reached: links, streams, waiters.
    Limit = 6 => "limit reached",
    /// No memory, no fd, no room in the arena.
    Resources = 7 => "out of memory, fds or arena",
    /// The peer's parameters cannot be met.
    Unsupported = 8 => "parameters not supported",
    /// The nonce or the cookie is not the one that was given out.
    Secret = 9 => "wrong nonce or cookie",
    /// The peer did not keep to the protocol.
    Violation = 10 => "protocol violation",
    /// A step did not come in time.
    Timeout = 11 => "no answer in time",
    /// The peer withdrew.
    Cancelled = 12 => "withdrawn",
    /// No program with the library listens on the port there.
    Absent = 13 => "no program with the library on the port",
    /// The asker's user does not own the connector's socket, or the two ends are not in one network namespace.
    NotOwner = 14 => "asker does not own the connection",
}
