//! The connected queue pair that the engine of a link between hosts uses. Its provider is the verbs plugin, or memory
//! in tests. Not here: connecting, and the meaning of the bytes.

// The C interface to a plugin (`plugin.rs`) uses the structures too.

/// The limits of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Receive buffers that this end keeps posted; the peer has as many. On some devices a message that finds none ends
    /// the connection, so the sender counts them.
    pub receive_buffers: u16,
    /// Bytes of one receive buffer, and so the longest message.
    pub buffer_bytes: u32,
    /// A WRITE can carry an immediate (not on iWARP). It takes a receive buffer as a message does.
    pub immediate: bool,
    /// The most bytes of a packet, a power of two; messages and WRITEs are cut into such packets. 0: it does not matter
    /// (TCP cuts iWARP's).
    pub packet_bytes: u32,
    /// READs that may be under way at a time. More of them wait in the send queue, and all requests behind them too. 0:
    /// none can be posted.
    pub reads: u8,
}

impl Limits {
    /// Returns whether `bytes` bytes, at least one, take more packets with `header` bytes before them than without.
    pub fn spills(&self, bytes: u64, header: u64) -> bool {
        let packet = u64::from(self.packet_bytes);
        packet != 0 && (bytes.wrapping_sub(1) & (packet - 1)) + header >= packet
    }
}

/// How registered memory is named: by this end's device, and by the peer's.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Key {
    /// For work requests of this end (lkey).
    pub local: u32,
    /// For the peer's WRITEs and READs (rkey).
    pub remote: u32,
}

/// The uses that memory is registered for.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The source of this end's WRITEs and the target of its READs, and the target of the peer's WRITEs.
    Both,
    /// The source of this end's WRITEs.
    Source,
    /// The target of the peer's WRITEs and of this end's READs.
    Target,
    /// The source of the peer's READs.
    Offered,
}

/// Registered memory, for a later [`deregister`](QueuePair::deregister).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// The keys of the memory.
    pub key: Key,
    /// Names the memory to the provider.
    pub handle: u64,
}

/// A WRITE: `len` bytes from `from`, in memory registered under `local`, to the peer's address `to`, in
/// memory that the peer has registered under `remote`.
#[repr(C)]
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
#[repr(C)]
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

/// Why a work request was not posted.
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

/// A completion.
#[derive(Debug)]
pub enum Completed<'a> {
    /// A message of the peer; its buffer is posted again when the callback returns.
    Received(&'a [u8]),
    /// A WRITE of the peer with an immediate has completed.
    Written {
        /// The immediate, in host order.
        immediate: u32,
        /// Bytes placed.
        bytes: u32,
    },
    /// There is room in the send queue again.
    Room,
    /// The bytes of a [READ](QueuePair::read) have arrived.
    Read,
    /// The peer's device has answered a [`probe`](QueuePair::probe).
    Probed,
}

/// A connected reliable queue pair. Work requests complete in the order in which they were posted. The peer sees a
/// message only after all bytes that were written before it. No call waits.
pub trait QueuePair: Send + Sync {
    /// Returns the limits of the queue pair.
    fn limits(&self) -> Limits;

    /// Registers memory for a role, for this queue pair and those beside it. Takes as long as the device needs to pin
    /// the memory.
    ///
    /// # Safety
    /// Until it is deregistered or the queue pair is over the memory is accessed through raw pointers and atomics only.
    /// If it is unmapped meanwhile, work requests for it fail, or reach pages that are not mapped any more.
    unsafe fn register(&self, at: *mut u8, len: usize, role: Role) -> Result<Region, Down>;

    /// Deregisters memory: neither end's work requests reach it any more when this returns. A request for it that is
    /// under way, or comes later, ends its queue pair.
    fn deregister(&self, region: Region);

    /// Posts a WRITE, with an immediate if [`Limits::immediate`] allows.
    ///
    /// # Safety
    /// The source is within memory that was registered under its key.
    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<(), PostError>;

    /// Posts a READ, if [`Limits::reads`] allows any. Each READ completes as one [`Completed::Read`], in the order in
    /// which they were posted.
    ///
    /// # Safety
    /// The target is within memory that was registered under its key. No code relies on its content before the READ has
    /// completed, or the queue pair is gone.
    unsafe fn read(&self, read: &Read) -> Result<(), PostError>;

    /// Posts a message of at most [`Limits::buffer_bytes`] bytes, which are copied.
    fn send(&self, message: &[u8]) -> Result<(), PostError>;

    /// Posts a probe. It completes, as [`Completed::Probed`], only when the peer's device has answered it, and so has
    /// all that was posted before. The peer's process has no part in that, and the probe takes no receive buffer. The
    /// queue always has room for one probe; at most one may be under way. [`PostError::Full`] if it may not be posted
    /// yet: then no [`Completed::Room`] follows.
    fn probe(&self) -> Result<(), PostError>;

    /// Hands over completions in order. Returns how many events there were. One caller at a time.
    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize, Down>;

    /// Makes the next completion turn the queue pair's fd readable. The caller then [polls](Self::poll) once more.
    fn arm(&self) -> Result<(), Down>;
}
