//! Why a stream is on TCP, or a link is down: codes with one text each.
//!
//! The codes are stored in shared memory, where other versions of `rdmasock stat` may read them. So a number never gets
//! a second meaning, and new numbers go at the end.

use core::fmt;

use crate::codes::codes;

codes! {
    /// Why a stream is on TCP, or a link is down. `rdmasock stat` prints the text.
    #[derive(Default)]
    pub enum Reason: u16 {
        /// There is no reason.
        #[default]
        None = 0 => "none",
        /// The connection is below the promotion threshold.
        BelowThreshold = 1 => "below the promotion threshold",
        /// The steps of a promotion are under way.
        Handshake = 2 => "handshake in progress",
        /// No service name answered: the peer's program runs without the library.
        PeerWithout = 3 => "peer without the library",
        /// A rule keeps the connection on TCP.
        Rule = 4 => "rule",
        /// The library is switched off for this instance (`RDMASOCK=off`, or no fabric).
        Disabled = 5 => "disabled",
        /// Several processes hold the socket after a fork.
        Inherited = 6 => "inherited: held by several processes",
        /// The peer answered NO; [`Why`] has its reason.
        Declined = 7 => "declined by peer",
        /// The peer knows no connection between these two addresses (address translation on the way).
        NoMatch = 8 => "no match at the peer (address translation?)",
        /// The peer did not carry out a step of the handshake in time.
        TimedOut = 9 => "handshake timed out",
        /// The arena has no room for another ring.
        ArenaFull = 10 => "arena full",
        /// The instance has reached its limit of links.
        LinkLimit = 11 => "link limit reached",
        /// The link could not be set up, or failed.
        LinkFailed = 12 => "link failed",
        /// The socket is in an epoll set that the library has not seen being filled.
        UnknownEpoll = 13 => "in an epoll set not known to the library",
        /// MSG_OOB or SO_OOBINLINE was used.
        OutOfBand = 14 => "MSG_OOB",
        /// The TCP_ULP "tls" was set.
        KernelTls = 15 => "kTLS",
        /// MSG_ZEROCOPY or TCP_ZEROCOPY_RECEIVE was used.
        ZeroCopy = 16 => "MSG_ZEROCOPY",
        /// splice() or tee() was called on the socket.
        Splice = 17 => "splice",
        /// A stdio stream was opened on the socket.
        Stdio = 18 => "stdio stream",
        /// The socket survives an exec.
        Exec = 19 => "exec",
        /// The socket was passed by SCM_RIGHTS.
        Passed = 20 => "passed by SCM_RIGHTS",
        /// Another process used the socket.
        OtherProcess = 21 => "used by another process",
        /// One direction, or both, have ended.
        Closed = 22 => "closed",
        /// The program used a socket option or a call that a link does not support.
        Unsupported = 23 => "socket option or call not supported on a link",
        /// The peer asked for the demotion.
        PeerAsked = 24 => "demoted at the peer's request",
        /// The peer broke the protocol.
        Violation = 25 => "protocol violation by the peer",
        /// The two ends speak different versions of the protocol.
        Version = 26 => "protocol version differs",
        /// The service name belongs to a user that owns neither the port nor the process that accepted the connection.
        NotTrusted = 27 => "service name of another user",
        /// There is no more memory, or there are no more file descriptors.
        Resources = 28 => "out of memory or file descriptors",
        /// The peer process has ended.
        PeerGone = 29 => "peer process ended",
        /// The peer is on another host, and no RDMA device leads there, or the control port is off.
        OtherHost = 30 => "peer on another host, out of RDMA's reach",
        /// The peer's device has not answered for 5 s.
        LinkSilent = 31 => "link failed: no answer from the peer's device for 5 s",
        /// The program has made an io_uring, whose calls no hook sees.
        IoUring = 32 => "the program uses io_uring",
        /// The rules file cannot be read or understood. It may have rules that keep connections on TCP.
        NoRules = 33 => "rules file cannot be used",
        /// The program has a seccomp filter that forbids system calls of the library.
        Confined = 34 => "the program restricts its system calls",
        /// The program has opened a library whose calls no hook sees.
        DeepBind = 35 => "a library was opened with RTLD_DEEPBIND",
        /// The library has not seen how the program got the socket, so the calls on it go straight to the kernel.
        Unseen = 36 => "not known to the library",
        /// The program has requested TCP (`rdmasock_prefer`).
        Asked = 37 => "asked for by the program",
        /// The program runs as another user than the user that made the socket, or in another network namespace.
        NotOwner = 38 => "socket of another user or network namespace",
        /// The program has entered namespaces that rule out a second thread, so there can be no service thread.
        Alone = 39 => "the program can have no second thread",
    }
}

/// A [`Reason`], and the peer's own reason if the peer declined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Why {
    /// This end's reason.
    pub reason: Reason,
    /// The reason that the peer gave, with [`Reason::Declined`].
    pub peer: Option<Reason>,
}

impl Why {
    /// Returns the value for a peer that answered NO because of `reason`.
    #[must_use]
    pub const fn declined(reason: Reason) -> Self {
        Self {
            reason: Reason::Declined,
            peer: Some(reason),
        }
    }

    /// Returns both codes in one word: this end's in the lower half, the peer's in the upper.
    pub(crate) fn to_bits(self) -> u32 {
        u32::from(self.reason as u16) | u32::from(self.peer.unwrap_or_default() as u16) << u16::BITS
    }

    /// Returns the value whose [`Self::to_bits`] is `bits`. Fails with the code that this version does not know.
    pub(crate) fn from_bits(bits: u32) -> Result<Self, u16> {
        // `bits as u16` is the lower half.
        let known = |code: u16| Reason::from_code(code).ok_or(code);
        let (reason, peer) = (known(bits as u16)?, known((bits >> u16::BITS) as u16)?);
        Ok(Self {
            reason,
            peer: (peer != Reason::None).then_some(peer),
        })
    }
}

impl From<Reason> for Why {
    fn from(reason: Reason) -> Self {
        Self { reason, peer: None }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.peer {
            Some(peer) => write!(f, "{}: {peer}", self.reason),
            None => self.reason.fmt(f),
        }
    }
}
