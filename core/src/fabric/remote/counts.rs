//! The counters of an end of a link between hosts, for tests and measurements. Programs see the counters of `stats/`.

#![forbid(unsafe_code)]

/// The counts since the end was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages sent on the queue pair.
    pub sends: u64,
    /// WRITEs posted, those with an immediate included.
    pub writes: u64,
    /// WRITEs with an immediate.
    pub immediates: u64,
    /// Messages that contained only a grant of credits.
    pub bare_grants: u64,
    /// Payload bytes sent in messages.
    pub eager_bytes: u64,
    /// Payload bytes sent by WRITEs.
    pub written_bytes: u64,
    /// Messages received, and WRITEs with an immediate.
    pub received: u64,
    /// Records in them.
    pub records: u64,
    /// Polls of the queue pair, including those that a thread left to another thread.
    pub looks: u64,
    /// Polls that have found a completion.
    pub finds: u64,
    /// How often the send queue was full.
    pub full: u64,
    /// How often no credit was left.
    pub no_credit: u64,
    /// How often the peer's device was probed.
    pub probes: u64,
    /// How often there was reason to probe although no work request was posted.
    pub doubts: u64,
}

/// Counts of the transfers that bypass the rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectCounts {
    /// Bytes that went straight into buffers of the peer's programs.
    pub sent: u64,
    /// Of these, bytes that came straight from the memory of this end's program.
    pub from_programs: u64,
    /// Buffers of this end's program that were announced to the peer.
    pub adverts: u64,
    /// Bytes that have come into them.
    pub received: u64,
    /// Bytes that the peer's device has read from the memory of this end's program.
    pub lent: u64,
    /// Bytes that this end's device has read from the memory of the peer's program.
    pub taken: u64,
    /// Of these, bytes that went straight into buffers of this end's program.
    pub taken_into: u64,
    /// How often this end's program has recalled memory that it had lent.
    pub recalled: u64,
    /// Bulk queue pairs that were given up.
    pub lost: u64,
}
