//! What an end of a link between hosts counts, for tests and measurements. Not what programs are shown (`stats/`).

#![forbid(unsafe_code)]

/// What an end has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages sent on the queue pair.
    pub sends: u64,
    /// WRITEs posted, those with an immediate included.
    pub writes: u64,
    /// Of these, with an immediate.
    pub immediates: u64,
    /// Messages that gave nothing but credits.
    pub bare_grants: u64,
    /// Payload bytes sent in messages, and by WRITEs.
    pub eager_bytes: u64,
    /// As above.
    pub written_bytes: u64,
    /// Messages received, and WRITEs with an immediate.
    pub received: u64,
    /// Records in them.
    pub records: u64,
    /// Looks at the queue pair, those included that a thread did not make since another was at it.
    pub looks: u64,
    /// Of these, that have found something.
    pub finds: u64,
    /// How often the send queue was full.
    pub full: u64,
    /// How often no credit was left.
    pub no_credit: u64,
    /// How often the peer's device was asked whether it is there.
    pub probes: u64,
    /// How often there was reason to ask although nothing was posted.
    pub doubts: u64,
}

/// What has gone past the rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectCounts {
    /// Bytes that went straight into buffers of the peer's programs.
    pub sent: u64,
    /// Of these, bytes that came straight from our program's.
    pub from_programs: u64,
    /// Buffers of our program's that the peer was told of.
    pub adverts: u64,
    /// Bytes that have come into them.
    pub received: u64,
    /// Bytes that the peer's device has read from our program's memory.
    pub lent: u64,
    /// Bytes that ours has read from the peer's.
    pub taken: u64,
    /// Of these, bytes that went straight into buffers that our programs waited with.
    pub taken_into: u64,
    /// How often our program has wanted back what it had lent.
    pub recalled: u64,
    /// Bulk queue pairs that were given up.
    pub lost: u64,
}
