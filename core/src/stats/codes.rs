//! Constants that the owner of a page and its readers share: the page's name and sizes, and the codes in it. Reasons
//! are in reason.rs, the layout of the page is in layout.rs.

use crate::codes::codes;

/// Name of the memfd; the link in `/proc/<pid>/fd` reads `/memfd:rdmasock-stats (deleted)`.
pub const MEMFD_NAME: &str = "rdmasock-stats";
/// Streams that an instance can show at once. Streams beyond that are not listed.
pub const STREAM_SLOTS: u32 = 65_536;
/// Links that an instance can show at once.
pub const LINK_SLOTS: u32 = 1_024;
/// Sleepers that an instance can show at once: one a waiter.
pub const SLEEPER_SLOTS: u32 = crate::fabric::waiter::MAX_WAITERS as u32;

codes! {
    /// What a direction of a stream runs on.
    pub enum Path: u8 {
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

codes! {
    /// The end of the TCP connection that the stream is.
    pub enum Direction: u8 {
        /// This instance called accept().
        Accept = 0 => "accept",
        /// This instance called connect().
        Connect = 1 => "connect",
    }
}

codes! {
    /// The call that a thread sleeps in.
    pub enum Call: u8 {
        /// A call that receives.
        Receive = 0 => "recv",
        /// A call that sends.
        Send = 1 => "send",
        /// poll or select.
        Poll = 2 => "poll",
        /// epoll_wait.
        Epoll = 3 => "epoll_wait",
    }
}

codes! {
    /// State of a link.
    pub enum LinkState: u8 {
        /// The link is being set up.
        Opening = 0 => "opening",
        /// The link carries streams.
        Up = 1 => "up",
        /// The link failed, or the peer closed it; see its reason.
        Down = 2 => "down",
    }
}

codes! {
    /// An event, counted for the whole instance. Its text is its name in JSON.
    pub enum Event: usize {
        /// An ASK was sent.
        Ask = 0 => "asks",
        /// A YES came back.
        Yes = 1 => "yes",
        /// A NO came back.
        No = 2 => "no",
        /// A step of a handshake did not come in time.
        HandshakeTimeout = 3 => "timeouts",
        /// A peer broke the protocol, on a link or while asking; the channel was closed, or the message ignored.
        LinkViolation = 4 => "violations",
        /// A connection's question went to another host. It counts once, however often it was sent.
        ControlAsk = 5 => "control_asks",
        /// A question from another host was answered YES or NO.
        ControlAnswer = 6 => "control_answers",
        /// A question from another host was passed on to the service names of this one.
        ControlRelay = 7 => "control_relays",
        /// A host did not answer, or no instance listens there: it is not asked for a while.
        ControlAbsent = 8 => "control_absent",
        /// A question came without a stamp of this instance, and got one.
        ControlStamp = 9 => "control_stamps",
        /// The control port could not be bound.
        ControlUnbound = 10 => "control_unbound",
        /// A datagram was refused: it does not have the one length that there is.
        ControlLength = 11 => "control_refused_length",
        /// A datagram was refused: it is of another version of the protocol.
        ControlVersion = 12 => "control_refused_version",
        /// A datagram was refused: it was not understood, or out of place.
        ControlKind = 13 => "control_refused_kind",
        /// A datagram was refused: its HMAC is wrong or missing, or there is one and this instance has no secret.
        ControlMac = 14 => "control_refused_hmac",
        /// A datagram was refused: an answer to no question of this instance, or a question from an address that is not
        /// its connection's.
        ControlMisplaced = 15 => "control_refused_misplaced",
        /// A datagram was refused: its question had ended, or is known with other contents.
        ControlReplay = 16 => "control_refused_replay",
        /// A datagram was refused: too many came.
        ControlRate = 17 => "control_refused_rate",
        /// A bulk queue pair between hosts was lost while direct transfers were under way: their bytes went on by
        /// rings.
        BulkLost = 18 => "bulk_lost",
        /// Bytes that this end's device was to send straight from the program's memory.
        DirectSent = 19 => "direct_sent_bytes",
        /// Bytes that the peer's device has written straight into the program's memory.
        DirectReceived = 20 => "direct_received_bytes",
        /// A call's memory was not registered: that would exceed half of the memlock limit, or the device refused it.
        /// The bytes went by rings.
        DirectUnpinned = 21 => "direct_unpinned",
        /// Memory of the program was registered: for a call, or a piece of the registered allocator for a link.
        DirectRegistered = 22 => "direct_registrations",
        /// Bytes that the peer's device has read straight from the program's memory.
        RendezvousSent = 23 => "rendezvous_sent_bytes",
        /// Bytes that this end's device has read straight from the memory of the peer's program.
        RendezvousReceived = 24 => "rendezvous_received_bytes",
        /// A send recalled the memory that it had lent, before the peer's device had read all of it.
        RendezvousRecalled = 25 => "rendezvous_recalled",
        /// A call's memory lay in a piece of the registered allocator that is registered with the device.
        AllocHit = 26 => "alloc_hits",
        /// A call's memory lay in a piece of the registered allocator that is not registered with the device. It is
        /// registered then if the budget has room.
        AllocMiss = 27 => "alloc_misses",
        /// Bytes of such pieces that were registered with a device.
        AllocKept = 28 => "alloc_kept_bytes",
        /// Bytes of such pieces whose registration with a device has ended.
        AllocEnded = 29 => "alloc_ended_bytes",
        /// Bytes that this end's device has read straight into the buffer of a waiting call. They count as read from
        /// the peer's memory too.
        RendezvousLanded = 30 => "rendezvous_landed_bytes",
    }
}

/// Number of [`Event`]s.
pub(super) const EVENTS: usize = Event::ALL.len();
