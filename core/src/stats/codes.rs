//! What the owner of a page and its readers agree on: the page's name and sizes, and the codes in it. Reasons are in
//! reason.rs, where things are in the page in layout.rs.

use crate::codes::codes;

/// Name of the memfd; the link in `/proc/<pid>/fd` reads `/memfd:rdmasock-stats (deleted)`.
pub const MEMFD_NAME: &str = "rdmasock-stats";
/// Streams that an instance can show at once; those beyond are simply not listed.
pub const STREAM_SLOTS: u32 = 65_536;
/// Links that an instance can show at once.
pub const LINK_SLOTS: u32 = 1_024;
/// Sleepers that an instance can show at once: one a waiter.
pub const SLEEPER_SLOTS: u32 = crate::fabric::waiter::MAX_WAITERS as u32;

codes! {
    /// What the bytes of one direction of a stream travel on.
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
    /// Which end of the TCP connection the stream is.
    pub enum Direction: u8 {
        /// This instance called accept().
        Accept = 0 => "accept",
        /// This instance called connect().
        Connect = 1 => "connect",
    }
}

codes! {
    /// What a thread sleeps in.
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
        /// Being set up.
        Opening = 0 => "opening",
        /// Carries streams.
        Up = 1 => "up",
        /// Failed or closed by the peer; see its reason.
        Down = 2 => "down",
    }
}

codes! {
    /// Something that happened once, counted for the whole instance. Its text is its name in JSON.
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
        /// A connection's question went to another host (once, however often it was sent).
        ControlAsk = 5 => "control_asks",
        /// A question from another host was answered YES or NO.
        ControlAnswer = 6 => "control_answers",
        /// A question from another host was passed on to the service names of this one.
        ControlRelay = 7 => "control_relays",
        /// A host did not answer, or nobody listens there: it is not asked for a while.
        ControlAbsent = 8 => "control_absent",
        /// A question came without a stamp of ours and got one.
        ControlStamp = 9 => "control_stamps",
        /// The control port could not be bound.
        ControlUnbound = 10 => "control_unbound",
        /// A datagram was refused: not of the one length that there is.
        ControlLength = 11 => "control_refused_length",
        /// A datagram was refused: of another version of the protocol.
        ControlVersion = 12 => "control_refused_version",
        /// A datagram was refused: not understood, or out of place.
        ControlKind = 13 => "control_refused_kind",
        /// A datagram was refused: its HMAC is wrong or missing, or there is one and no secret here.
        ControlMac = 14 => "control_refused_hmac",
        /// A datagram was refused: an answer to nothing that was asked, or a question from an address that is not its
        /// connection's.
        ControlMisplaced = 15 => "control_refused_misplaced",
        /// A datagram was refused: its question was over, or known with other contents.
        ControlReplay = 16 => "control_refused_replay",
        /// A datagram was refused: too many.
        ControlRate = 17 => "control_refused_rate",
        /// A bulk queue pair between hosts was lost, with direct transfers that were under way: they went on by rings.
        BulkLost = 18 => "bulk_lost",
        /// Bytes that the device was to take from the memory of the program itself.
        DirectSent = 19 => "direct_sent_bytes",
        /// Bytes that the peer's device has written into the memory of the program itself.
        DirectReceived = 20 => "direct_received_bytes",
        /// A call's memory was not registered, as that would exceed the half of the memlock limit or the device refused
        /// it: its bytes went by rings.
        DirectUnpinned = 21 => "direct_unpinned",
        /// Memory of the program was registered: for a call, or a piece of the registered allocator's for a link.
        DirectRegistered = 22 => "direct_registrations",
        /// Bytes that the peer's device has read from the memory of the program itself.
        RendezvousSent = 23 => "rendezvous_sent_bytes",
        /// Bytes that this end's device has read from the memory of the peer's program.
        RendezvousReceived = 24 => "rendezvous_received_bytes",
        /// Memory that a send had lent so was wanted back before all of it was read.
        RendezvousRecalled = 25 => "rendezvous_recalled",
        /// A call's memory lay in a piece of the registered allocator's that the device knew.
        AllocHit = 26 => "alloc_hits",
        /// A call's memory lay in a piece of the registered allocator's that the device did not know: it was told, if
        /// there was room in the budget.
        AllocMiss = 27 => "alloc_misses",
        /// Bytes of such pieces that a device was told of.
        AllocKept = 28 => "alloc_kept_bytes",
        /// Bytes of such pieces that a device does not know any more.
        AllocEnded = 29 => "alloc_ended_bytes",
        /// Of the bytes that this end's device has read, those that went straight into a buffer that a call waited
        /// with.
        RendezvousLanded = 30 => "rendezvous_landed_bytes",
    }
}

/// Number of [`Event`]s.
pub(super) const EVENTS: usize = Event::ALL.len();
