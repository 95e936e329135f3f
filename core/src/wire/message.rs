//! Out-of-band messages: one in each datagram, with a header that the receiver checks (docs/protocol.md, P10–P29).
//!
//! File descriptors travel beside a message (SCM_RIGHTS). [`Message::fds`] returns how many a message needs.
//! `os::channel` sends and receives them.

use std::fmt;

use crate::ids::{Cookie, InstanceId, Nonce, Tuple, Vqpn};
use crate::region::Region;
use crate::wire::codec::{Geometry, WireError, kinds, put_frame, take, take_frame};

/// The length of the longest message in bytes. ASK has it.
pub const MAX_MESSAGE: usize = 96;

const MAGIC: [u8; 4] = *b"rsok";

kinds! {
    /// An out-of-band message. Units, order and meaning are in docs/protocol.md.
    ///
    /// | field | meaning |
    /// |---|---|
    /// | `request` | the question's number, which the asker has chosen and the answer repeats (P11) |
    /// | `tuple` | the connection, as both ends see it (P12) |
    /// | `nonce_c`, `nonce_s` | the nonces that markers to C, and to S, start with (P31) |
    /// | `nonce_mine`, `nonce_yours` | those that markers to the message's sender, and to its receiver, start with |
    /// | `instance_c`, `instance_s`, `pid` | the sender's instance, and its pid in its own pid namespace |
    /// | `geometry`, `ring` | the sizes of the sender's memory; a ring in it |
    /// | `yours`, `mine`, `vqpn` | the number that the receiver, and the sender, gave to the stream (P26) |
    /// | `id` | a waiter (P27) |
    #[derive(Debug, Clone)]
    #[allow(
        missing_docs,
        reason = "the fields mean the same in every message, and are in the table"
    )]
    pub enum Message {
        /// "I am the connecting end of `tuple`; do you hold the other end, and do you want it moved?"
        1 = Ask { request: u64, tuple: Tuple, nonce_c: Nonce, instance_c: InstanceId };
        /// "I hold the connection and want it moved; your markers to me start with `nonce_s`."
        2 = Yes { request: u64, nonce_s: Nonce, instance_s: InstanceId };
        /// "The connection stays on TCP."
        3 = No { request: u64, reason: Reason };
        /// "I do not hold the connection; `instance`, which listens on the same socket, does."
        4 = Redirect { request: u64, instance: InstanceId };
        /// The connector gives up after YES. It has not written its HELLO and never will.
        5 = Cancel { nonce_s: Nonce };
        /// The first message on a new link, with C's arena and waiter memfds. The cookie proves that C has read S's
        /// HELLO.
        16 = Link { cookie: Cookie, instance_c: InstanceId, pid: u32, geometry: Geometry };
        /// S accepts the link. Comes with S's arena and waiter memfds.
        17 = LinkAccept { instance_s: InstanceId, pid: u32, geometry: Geometry };
        /// "Write the data that you send on this connection into my `ring`, and name my stream `vqpn`." The two nonces
        /// of the attempt name the connection.
        32 = Open { nonce_mine: Nonce, nonce_yours: Nonce, vqpn: Vqpn, ring: Region };
        /// The answer to OPEN. `yours` is the number that the sender of OPEN chose. `mine` and `ring` are the
        /// answerer's own number and ring.
        33 = OpenAck { yours: Vqpn, mine: Vqpn, ring: Region };
        /// The answer to an OPEN that is refused: the stream with the number `yours` stays on TCP.
        34 = OpenRefuse { yours: Vqpn, reason: Reason };
        /// Comes with the button (the writing end) of the doorbell that waiter `id` of the sender polls.
        35 = Waiter { id: u32 };
        /// "Move your sending direction of stream `yours` back to TCP." With `resend_from` the sender of this message
        /// has stopped reading the link at that position, and the receiver sends the bytes from there on again over TCP
        /// (P28). Without it the receiver goes on in TCP after its last byte on the link.
        37 = DemoteRequest { yours: Vqpn, resend_from: Option<u64> };
        /// "Move your sending direction of stream `yours` to the ring that is on offer."
        38 = Adopt { yours: Vqpn };
        /// "I have read these bytes, which you sent in TCP, but their new reader can get them only from TCP. Send them
        /// in TCP again, and then all bytes in the ring of stream `yours`, from which I have read none." The message
        /// comes with a file that holds the bytes.
        41 = TakeBack { yours: Vqpn, bytes: u32 };
        /// TAKE-BACK is carried out: that direction of stream `yours` is on TCP.
        42 = TakenBack { yours: Vqpn };
        /// The sender will not use stream `yours` again. An end's own number for a stream is free once that end has
        /// both sent and received CLOSED (P26).
        39 = Closed { yours: Vqpn };
        /// "Wake your waiter `id`." Sent if the sender does not have the waiter's button, or cannot wake the waiter
        /// itself.
        40 = Ring { id: u32 };
        /// "Connect a bulk queue pair beside this link's queue pair, and send `cookie` in its introduction." The end
        /// that has accepted the link sends this to an end with [direct
        /// transfers](crate::wire::Introduction::is_direct).
        43 = Bulk { cookie: Cookie };
        /// "Send me BULK: I want a bulk queue pair." The end that has connected the link sends this.
        44 = BulkWanted;
        /// The sender has given up its end of the bulk queue pair. Each end sends this once.
        45 = BulkGone;
    }
}

impl Message {
    /// Returns the receiver's number for the stream that the message is about (P26). `None` for messages without one.
    pub const fn yours(&self) -> Option<Vqpn> {
        match self {
            Self::OpenAck { yours, .. }
            | Self::OpenRefuse { yours, .. }
            | Self::DemoteRequest { yours, .. }
            | Self::Adopt { yours }
            | Self::TakeBack { yours, .. }
            | Self::TakenBack { yours }
            | Self::Closed { yours } => Some(*yours),
            _ => None,
        }
    }

    /// Returns the number of file descriptors that have to come with this message.
    pub const fn fds(&self) -> usize {
        match self {
            Self::Link { .. } | Self::LinkAccept { .. } => 2,
            Self::Waiter { .. } | Self::TakeBack { .. } => 1,
            _ => 0,
        }
    }

    /// Writes the message to the front of `buf`. Returns the message's bytes.
    ///
    /// Fails with [`WireError::Buffer`] if `buf` is shorter than the message ([`MAX_MESSAGE`] bytes always suffice).
    pub fn encode<'b>(&self, buf: &'b mut [u8]) -> Result<&'b [u8], WireError> {
        put_frame(&MAGIC, buf, |body| self.put_body(body))
    }

    /// Decodes `datagram`, which has to be exactly one message. Accepts any bytes without a panic.
    pub fn decode(datagram: &[u8]) -> Result<Self, WireError> {
        let mut frame = datagram;
        if take::<[u8; 4]>(&mut frame)? != MAGIC {
            return Err(WireError::Magic);
        }
        take_frame(frame, Self::take_body)
    }
}

/// Declares [`Reason`] by the name, number and text of each reason that this version knows.
macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal => $text:literal,)+) => {
        /// Why an end refuses, as sent in NO, OPEN-REFUSE and ABORT. [`crate::stats::Reason`] is the reason that an end
        /// shows in `rdmasock stat`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Reason {
            $($(#[$doc])* $name,)+
            /// A reason that this version does not know, by its number.
            Other(u16),
        }

        impl Reason {
            /// Returns the number on the wire.
            pub fn code(self) -> u16 {
                match self { $(Self::$name => $code,)+ Self::Other(code) => code }
            }

            /// Returns the reason with this number. Every number gives a reason.
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
    /// This instance does not hold the connection, or has not accepted it yet.
    NotHeld = 1 => "peer does not hold the connection",
    /// A rule leaves the connection on TCP.
    Rule = 2 => "a rule leaves it on TCP",
    /// More than one process may hold the connection.
    Shared = 3 => "shared by several processes",
    /// The program uses the socket in a way that a link does not support.
    Use = 4 => "socket use not supported on a link",
    /// The connection is being closed or has been reset.
    Closing = 5 => "connection is closing",
    /// A limit of links, streams or waiters was reached.
    Limit = 6 => "limit reached",
    /// There is no memory, no fd, or no room in the arena.
    Resources = 7 => "out of memory, fds or arena",
    /// The peer's parameters cannot be met.
    Unsupported = 8 => "parameters not supported",
    /// The nonce or the cookie is wrong.
    Secret = 9 => "wrong nonce or cookie",
    /// The peer broke the protocol.
    Violation = 10 => "protocol violation",
    /// The peer did not carry out a step in time.
    Timeout = 11 => "no answer in time",
    /// The sender has given up the attempt.
    Cancelled = 12 => "withdrawn",
    /// No program with the library listens on the port on the answering host.
    Absent = 13 => "no program with the library on the port",
    /// The asker's user does not own the connector's socket, or the two ends are not in one network namespace.
    NotOwner = 14 => "asker does not own the connection",
}

#[cfg(test)]
mod tests;
