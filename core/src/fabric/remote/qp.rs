//! What the engine of a link between hosts needs of a connected queue pair, whoever provides it: the
//! verbs plugin, or memory in tests. Not here: connecting, and what the bytes mean.

/// What a queue pair can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Receive buffers that this end keeps posted; the peer has as many. A message that meets none ends
    /// the connection on some devices, so who sends counts them.
    pub receive_buffers: u16,
    /// Bytes of one receive buffer, and so the longest message.
    pub buffer_bytes: u32,
    /// A WRITE can carry an immediate (not on iWARP). It takes a receive buffer as a message does.
    pub immediate: bool,
    /// What a packet carries at most, a power of two: messages and WRITEs are cut into such. 0: it does not matter (TCP
    /// cuts iWARP's).
    pub packet_bytes: u32,
    /// READs that may be under way at a time; more wait in the send queue, with what was posted behind them. 0: none
    /// can be posted.
    pub reads: u8,
}

impl Limits {
    /// Whether so many bytes, at least one, take more packets with `header` before them than without.
    pub fn spills(&self, bytes: u64, header: u64) -> bool {
        let packet = u64::from(self.packet_bytes);
        packet != 0 && (bytes.wrapping_sub(1) & (packet - 1)) + header >= packet
    }
}

/// How registered memory is named: by this end's device, and by the peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// For work requests of this end (lkey).
    pub local: u32,
    /// For the peer's WRITEs and READs (rkey).
    pub remote: u32,
}

/// What memory is registered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The source of this end's WRITEs and the target of its READs, and the target of the peer's WRITEs.
    Both,
    /// The source of this end's WRITEs.
    Source,
    /// The target of the peer's, and of this end's READs.
    Target,
    /// The source of the peer's READs.
    Offered,
}

/// Memory that is registered, to be [given back](QueuePair::deregister).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// How it is named.
    pub key: Key,
    /// By which it is given back.
    pub handle: u64,
}

/// A WRITE: `len` bytes from `from`, in memory registered under `local`, to the peer's address `to`, in
/// memory that the peer has registered under `remote`.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// Source. Stays as it is until the peer has taken the bytes.
    pub from: *const u8,
    /// Key of the source.
    pub local: u32,
    /// Bytes; not 0.
    pub len: u32,
    /// Target, an address of the peer's process.
    pub to: u64,
    /// Key of the target.
    pub remote: u32,
}

/// A READ: `len` bytes from the peer's address `from`, in memory that the peer has registered under `remote`, to `to`,
/// in memory registered under `local`.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// Target.
    pub to: *mut u8,
    /// Key of the target.
    pub local: u32,
    /// Bytes; not 0.
    pub len: u32,
    /// Source, an address of the peer's process.
    pub from: u64,
    /// Key of the source.
    pub remote: u32,
}

/// Why nothing was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The send queue is full; [`Completed::Room`] follows.
    #[error("the send queue is full")]
    Full,
    /// The connection is over.
    #[error("the connection is down")]
    Down,
}

/// The connection is over, with the reason as far as it is known (an errno, or 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection is down (errno {0})")]
pub struct Down(pub i32);

/// Something that has completed.
#[derive(Debug)]
pub enum Completed<'a> {
    /// A message of the peer; its buffer is posted again when the callback returns.
    Received(&'a [u8]),
    /// A WRITE of the peer with this immediate has placed so many bytes.
    Written {
        /// The immediate, in host order.
        immediate: u32,
        /// Bytes placed.
        bytes: u32,
    },
    /// There is room in the send queue again.
    Room,
    /// The bytes of a [READ](QueuePair::read) are here.
    Read,
    /// The peer's device has answered a [`probe`](QueuePair::probe).
    Probed,
}

/// A connected reliable queue pair. Work requests complete in the order in which they were posted, and
/// the peer sees a message only after all that was written before it. No call waits.
pub trait QueuePair: Send + Sync {
    /// What it can do.
    fn limits(&self) -> Limits;

    /// Makes memory usable for a role, by this queue pair and those beside it. May take as long as it takes to pin it.
    ///
    /// # Safety
    /// Until it is deregistered or the queue pair is over the memory is accessed through raw pointers and atomics only.
    /// Where it may be unmapped meanwhile, what is posted for it fails, or reaches what is not mapped any more.
    unsafe fn register(&self, at: *mut u8, len: usize, role: Role) -> Result<Region, Down>;

    /// Undoes that: neither end's work requests reach the memory any more when this returns. One that is under way, or
    /// comes later, ends the queue pair that it is of.
    fn deregister(&self, region: Region);

    /// Posts a WRITE, with an immediate if [`Limits::immediate`] allows.
    ///
    /// # Safety
    /// The source is within memory that was registered under its key.
    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<(), PostError>;

    /// Posts a READ, where [`Limits::reads`] allows any. It completes as [`Completed::Read`]: one for each, in the
    /// order in which they were posted.
    ///
    /// # Safety
    /// The target is within memory that was registered under its key, and nobody relies on what is there before the
    /// READ has completed, or the queue pair is no more.
    unsafe fn read(&self, read: &Read) -> Result<(), PostError>;

    /// Posts a message made of these parts, together at most [`Limits::buffer_bytes`] long. They are copied.
    fn send(&self, parts: &[&[u8]]) -> Result<(), PostError>;

    /// Posts a request that completes, as [`Completed::Probed`], only when the peer's device has answered it, and so
    /// has all that was posted before. The peer's process has no part in that, and it takes no receive buffer.
    /// There is room for one whatever else was posted; at most one at a time. [`PostError::Full`] if nothing may
    /// be posted yet: then no [`Completed::Room`] follows.
    fn probe(&self) -> Result<(), PostError>;

    /// Hands over what has completed, in order; gives how many events that were. One caller at a time.
    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize, Down>;

    /// The next completion makes the queue pair's fd readable. To be followed by a [`poll`](Self::poll).
    fn arm(&self) -> Result<(), Down>;
}
