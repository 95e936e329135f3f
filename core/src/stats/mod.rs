//! Live counters of one instance in shared memory, for `rdmasock stat`.
//!
//! Each instance owns one [`StatsPage`]: a sealed, sparse memfd named [`MEMFD_NAME`] that the
//! library maps shared and keeps open. A reader finds it among the links of `/proc/<pid>/fd`,
//! maps it read-only and copies what it needs ([`StatsReader`]), so looking never stops,
//! signals or slows the program. Slots that were never used cost no memory.
//!
//! Not here: the instance's own pointer to its page (shims hold it, and replace it after a fork),
//! and how the figures are printed (cli).

mod layout;
mod page;
mod read;
mod reason;
#[cfg(test)]
mod tests;

pub use layout::{Counts, LinkStats, StatsPage, StreamStats};
pub use page::{InstanceInfo, LinkInfo, StreamInfo};
pub use read::{
    InstanceSnapshot, LinkSnapshot, Process, ReadError, StatsReader, StreamSnapshot, Totals,
    instance_of, instances,
};
pub use reason::{Reason, Why};

/// Name of the memfd; the link in `/proc/<pid>/fd` reads `/memfd:rdmasock-stats (deleted)`.
pub const MEMFD_NAME: &str = "rdmasock-stats";
/// Streams that an instance can show at once; those beyond are simply not listed.
pub const STREAM_SLOTS: u32 = 65_536;
/// Links that an instance can show at once.
pub const LINK_SLOTS: u32 = 1_024;

/// Defines a `#[repr(u8)]` code that is stored in shared memory: each value with its text.
macro_rules! code {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $value:literal => $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $name { $($(#[$vdoc])* $variant = $value,)+ }

        impl $name {
            /// The word for it in tables and JSON.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }

            /// The value with this code; `None` where this version knows none.
            #[must_use]
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $($value => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

code! {
    /// What the bytes of one direction of a stream travel on.
    Path {
        /// The kernel's TCP.
        Tcp = 0 => "tcp",
        /// A link on shared memory.
        Shm = 1 => "shm",
        /// A link on RDMA verbs.
        Verbs = 2 => "verbs",
        /// A link in the same process (tests).
        Mem = 3 => "mem",
    }
}

code! {
    /// Which end of the TCP connection the stream is.
    Direction {
        /// This instance called accept().
        Accept = 0 => "accept",
        /// This instance called connect().
        Connect = 1 => "connect",
    }
}

code! {
    /// State of a link.
    LinkState {
        /// Being set up.
        Opening = 0 => "opening",
        /// Carries streams.
        Up = 1 => "up",
        /// Failed or closed by the peer; see its reason.
        Down = 2 => "down",
    }
}

/// Something that happened once, counted for the whole instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Event {
    /// An ASK was sent.
    Ask = 0,
    /// A YES came back.
    Yes = 1,
    /// A NO came back.
    No = 2,
    /// A step of a handshake did not come in time.
    HandshakeTimeout = 3,
    /// A peer broke the protocol, on a link or while asking; the channel was closed, or the message ignored.
    LinkViolation = 4,
}

/// Number of [`Event`]s.
pub(crate) const EVENTS: usize = 5;
