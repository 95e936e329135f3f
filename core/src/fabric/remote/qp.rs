//! The connected queue pair that the engine of a link between hosts uses. The verbs plugin provides the queue pair; in
//! tests `mem.rs` does. Other files connect queue pairs, and define what the bytes mean.

// The C interface to a plugin (`plugin.rs`) uses these structures too.

/// The limits of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The number of receive buffers that this end keeps posted; the peer keeps as many. On some devices a message that
    /// finds no buffer ends the connection, so the sender counts the peer's buffers.
    pub receive_buffers: u16,
    /// The size of one receive buffer in bytes, and so of the longest message.
    pub buffer_bytes: u32,
    /// Whether a WRITE can carry an immediate (not on iWARP). Such a WRITE takes a receive buffer as a message does.
    pub immediate: bool,
    /// The most bytes of a packet, a power of two. The device divides messages and WRITEs into such packets. 0 if the
    /// packets do not matter (TCP divides iWARP's data).
    pub packet_bytes: u32,
    /// The number of READs that may be under way at a time. Further READs wait in the send queue, and so do all
    /// requests behind them. 0 if no READ can be posted.
    pub reads: u8,
}

impl Limits {
    /// Returns whether `bytes` bytes, at least one, take more packets if `header` bytes precede them.
    pub fn spills(&self, bytes: u64, header: u64) -> bool {
        let packet = u64::from(self.packet_bytes);
        packet != 0 && (bytes.wrapping_sub(1) & (packet - 1)) + header >= packet
    }
}

/// The keys that name registered memory to this end's device and to the peer's.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Key {
    /// The key for work requests of this end (lkey).
    pub local: u32,
    /// The key for the peer's WRITEs and READs (rkey).
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

/// Registered memory, as [`deregister`](QueuePair::deregister) needs it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// The keys of the memory.
    pub key: Key,
    /// The plugin's name for the memory.
    pub handle: u64,
}

/// A WRITE: `len` bytes from `from`, in memory registered under `local`, to the peer's address `to`, in
/// memory that the peer has registered under `remote`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// The source. Its bytes stay as they are until the peer has taken them.
    pub from: *const u8,
    /// The key of the source.
    pub local: u32,
    /// The number of bytes; not 0.
    pub len: u32,
    /// The target, an address in the peer's process.
    pub to: u64,
    /// The key of the target.
    pub remote: u32,
}

/// A READ: `len` bytes from the peer's address `from`, in memory that the peer has registered under `remote`, to `to`,
/// in memory registered under `local`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// The target.
    pub to: *mut u8,
    /// The key of the target.
    pub local: u32,
    /// The number of bytes; not 0.
    pub len: u32,
    /// The source, an address in the peer's process.
    pub from: u64,
    /// The key of the source.
    pub remote: u32,
}

/// Why a work request was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The send queue is full. [`Completed::Room`] comes when it has room.
    #[error("the send queue is full")]
    Full,
    /// The connection has ended.
    #[error("the connection is down")]
    Down,
}

/// Error: the connection has ended, with the reason as far as it is known (an errno, or 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection is down (errno {0})")]
pub struct Down(pub i32);

/// A completion.
#[derive(Debug)]
pub enum Completed<'a> {
    /// A message of the peer. Its receive buffer is posted again when the callback returns.
    Received(&'a [u8]),
    /// A WRITE of the peer with an immediate has completed.
    Written {
        /// The immediate, in host byte order.
        immediate: u32,
        /// The number of bytes that the WRITE has placed.
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

    /// Registers memory for a role, for this queue pair and those that were connected beside it. Takes as long as the
    /// device needs to pin the memory.
    ///
    /// # Safety
    /// Until the memory is deregistered or the queue pair has ended, it is accessed through raw pointers and atomics
    /// only. If it is unmapped before that, work requests for it fail, or access pages that are not mapped any more.
    unsafe fn register(&self, at: *mut u8, len: usize, role: Role) -> Result<Region, Down>;

    /// Deregisters memory: neither end's work requests access it after this returns. A request for the memory that is
    /// under way, or comes later, ends the queue pair on which it was posted.
    fn deregister(&self, region: Region);

    /// Posts a WRITE, with an immediate if [`Limits::immediate`] allows one.
    ///
    /// # Safety
    /// The source is within memory that was registered under its key.
    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<(), PostError>;

    /// Posts a READ, if [`Limits::reads`] allows any. Each READ completes as one [`Completed::Read`], in the order in
    /// which they were posted.
    ///
    /// # Safety
    /// The target is within memory that was registered under its key. No code relies on its content before the READ has
    /// completed, or the queue pair has ended.
    unsafe fn read(&self, read: &Read) -> Result<(), PostError>;

    /// Posts a message of at most [`Limits::buffer_bytes`] bytes, which are copied.
    fn send(&self, message: &[u8]) -> Result<(), PostError>;

    /// Posts a probe. It completes, as [`Completed::Probed`], only when the peer's device has answered it. All requests
    /// posted before it have arrived then. The peer's process takes no part in the answer, and the probe takes no
    /// receive buffer. The queue always has room for one probe; at most one may be under way. Fails with
    /// [`PostError::Full`] if the probe may not be posted yet; in that case no [`Completed::Room`] follows.
    fn probe(&self) -> Result<(), PostError>;

    /// Passes completions to `each`, in order. Returns how many events there were. One caller at a time.
    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize, Down>;

    /// Makes the queue pair's fd readable at the next completion. The caller then [polls](Self::poll) once more.
    fn arm(&self) -> Result<(), Down>;
}
