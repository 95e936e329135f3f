//! Makes a plugin's table from a [`Provider`]. Each function checks its pointers, calls the provider, and converts the
//! result to a number. No panic leaves this module. The module also counts the work requests in a provider's send
//! queues ([`Slots`]).

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null;
use std::time::Duration;

use crate::fabric::plugin::{
    ABI, Address, Completion, Conn, Errno, Host, Info, Listener, PRIVATE_BYTES, Request, Result, completion,
};
use crate::fabric::remote::qp::{Completed, Read, Region, Role, Write};
use crate::sync::{AtomicU64, Attention, Ordering, Published};

/// Stores the address of the plugin's table in `table`. `host` is the table of the library's functions. Both tables
/// live as long as the process. Returns 0, or a negative errno.
pub type Entry = unsafe extern "C" fn(host: *const Host, table: *mut *const Plugin) -> i32;

/// The functions that a plugin implements. The [`Plugin`] table describes how the library uses them.
pub trait Provider: 'static {
    /// The type of a listener, which receives connection requests.
    type Listener: Listen<Conn = Self::Conn>;
    /// The type of a connection.
    type Conn: Connection;

    /// Checks that a device has this local address. Fails with ENODEV if none has.
    fn device(local: &Address) -> Result<()>;
    /// Listens at a local address; port 0 stands for a free port.
    fn listen(local: &Address) -> Result<Self::Listener>;
    /// Connects, perhaps beside another connection (as `Plugin::connect` describes). The timeout bounds the search for
    /// a route, and then again the wait for the peer's answer.
    fn connect(
        local: &Address,
        remote: &Address,
        private: &[u8],
        timeout: Duration,
        beside: Option<&Self::Conn>,
    ) -> Result<Self::Conn>;
    /// Forgets all listeners and connections in a fork child, which has one thread. Does not access the device.
    fn after_fork();
}

/// A listener of a [`Provider`]; dropping it closes it.
pub trait Listen {
    /// The type of the connections that it receives.
    type Conn;

    /// Returns the port at which it listens.
    fn port(&self) -> u16;
    /// Returns an fd that is readable when there may be a request.
    fn fd(&self) -> c_int;
    /// Returns the next request; `None` if there is none at this moment, an error if no more will come.
    fn next(&self) -> Result<Option<Incoming<Self::Conn>>>;
}

/// A connection request of a peer.
#[derive(Debug)]
pub struct Incoming<C> {
    /// The connection, which the library accepts or rejects.
    pub conn: C,
    /// The private data of the peer's request, padded with zeroes.
    pub private: [u8; PRIVATE_BYTES],
}

/// A connection of a [`Provider`], with the functions of [`Plugin`]; dropping it frees it.
pub trait Connection: Sized {
    /// Accepts the request with `private` as the answer, perhaps beside another connection (as `Plugin::connect`
    /// describes).
    fn accept(&self, private: &[u8], beside: Option<&Self>) -> Result<()>;
    /// Refuses the request.
    fn reject(self);
    /// Returns the [`Info`] of the connection.
    fn info(&self) -> Result<Info>;
    /// Processes events, and returns the state: 0 if the connection is not up yet, 1 if it is up, a negative errno if
    /// it has ended for that reason.
    fn state(&self) -> i32;
    /// Registers memory, until it is deregistered or the connection has ended.
    ///
    /// # Safety
    /// As for [`QueuePair::register`](crate::fabric::remote::qp::QueuePair::register).
    unsafe fn register(&self, at: *mut c_void, len: usize, role: Role) -> Result<Region>;
    /// Deregisters memory: no work request accesses it after this returns.
    fn deregister(&self, handle: u64);
    /// Posts a WRITE.
    ///
    /// # Safety
    /// As for [`QueuePair::write`](crate::fabric::remote::qp::QueuePair::write).
    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<()>;
    /// Posts a READ.
    ///
    /// # Safety
    /// As for [`QueuePair::read`](crate::fabric::remote::qp::QueuePair::read).
    unsafe fn read(&self, read: &Read) -> Result<()>;
    /// Posts a message, which is copied.
    fn send(&self, message: &[u8]) -> Result<()>;
    /// Posts a probe.
    fn probe(&self) -> Result<()>;
    /// Passes completions to `each`. Returns how many events there were.
    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize>;
    /// Makes the completion fd readable at the next completion.
    fn arm(&self) -> Result<()>;
    /// Begins to end the connection.
    fn disconnect(&self);
}

const INVALID: Errno = Errno(libc::EINVAL);

/// Converts the result of a function's body to a number: 0 for a body without a result.
trait Code {
    fn code(self) -> i32;
}

impl Code for i32 {
    fn code(self) -> i32 {
        self
    }
}

impl Code for () {
    fn code(self) -> i32 {
        0
    }
}

/// Runs `body`. A panic, which no code here is meant to cause, becomes EIO.
fn guard<C: Code>(body: impl FnOnce() -> Result<C>) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(done)) => done.code(),
        Ok(Err(errno)) => errno.code(),
        Err(payload) => {
            // Dropping the payload may panic again.
            std::mem::forget(payload);
            -libc::EIO
        }
    }
}

/// Returns the connection behind a handle.
///
/// # Safety
/// The handle is null, or `give` has returned it, and `take` does not take it back before the end of the call.
unsafe fn connection<'a, P: Provider>(handle: *mut Conn) -> Result<&'a P::Conn> {
    // SAFETY: a handle is a pointer that Box::into_raw has returned for a connection.
    unsafe { handle.cast::<P::Conn>().as_ref() }.ok_or(INVALID)
}

fn give<P: Provider>(conn: P::Conn) -> *mut Conn {
    Box::into_raw(Box::new(conn)).cast()
}

/// # Safety
/// As for `connection`, and no code uses the handle any more.
unsafe fn take<P: Provider>(handle: *mut Conn) -> Option<Box<P::Conn>> {
    // SAFETY: the pointer comes from `give`, and is taken back once.
    (!handle.is_null()).then(|| unsafe { Box::from_raw(handle.cast::<P::Conn>()) })
}

/// # Safety
/// `at` is null, or readable for `len` bytes during the call.
unsafe fn bytes<'a>(at: *const u8, len: usize) -> Result<&'a [u8]> {
    if at.is_null() {
        return if len == 0 { Ok(&[]) } else { Err(INVALID) };
    }
    // SAFETY: the pointer is not null; the rest holds by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts(at, len) })
}

/// # Safety
/// `at` is null, or valid for a write.
unsafe fn put<T>(at: *mut T, value: T) -> Result<()> {
    if at.is_null() {
        return Err(INVALID);
    }
    // SAFETY: by this function's contract.
    unsafe { at.write(value) };
    Ok(())
}

/// Declares the functions of the table. Each becomes a field of [`Plugin`], and a function that calls a [`Provider`].
macro_rules! functions {
    (
        $(#[$about:meta])*
        pub struct Plugin;
        $($(#[$doc:meta])* fn $name:ident<$P:ident>($($arg:ident: $type:ty),* $(,)?) -> i32 $body:block)*
    ) => {
        $(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct Plugin {
            /// The version of the table, [`ABI`].
            pub abi: u32,
            /// The size of this table in bytes.
            pub size: u32,
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg: $type),*) -> i32,)*
        }

        $(unsafe extern "C" fn $name<$P: Provider>($($arg: $type),*) -> i32 {
            guard(|| $body)
        })*

        /// Returns the table of a provider.
        pub const fn table<P: Provider>() -> Plugin {
            Plugin { abi: ABI, size: size_of::<Plugin>() as u32, $($name: $name::<P>),* }
        }
    };
}

// All functions below rely on the contract of `Plugin`: a pointer is null or valid during the call, and a handle is one
// that the plugin has returned. Each connection is used as `Plugin` describes.
functions! {
    /// The functions of the plugin that the library calls. Any thread may call the functions that take no connection.
    /// For one connection, one thread at a time calls `poll`, one thread at a time calls `write`, `read`, `send` and
    /// `probe`, and any thread may call `disconnect`. Only `connect` and `destroy` may wait.
    pub struct Plugin;

    /// Returns 0 if a device has this local address; -ENODEV if none has.
    fn device<P>(local: *const Address) -> i32 {
        // SAFETY: the pointer is valid by the contract of `Plugin`.
        P::device(unsafe { local.as_ref() }.ok_or(INVALID)?)
    }

    /// Listens at a local address; with port 0 the system chooses the port.
    fn listen<P>(local: *const Address, out: *mut *mut Listener, port: *mut u16, fd: *mut c_int) -> i32 {
        // SAFETY: the pointer is valid by the contract of `Plugin`.
        let listener = P::listen(unsafe { local.as_ref() }.ok_or(INVALID)?)?;
        // SAFETY: the pointers are valid by the contract of `Plugin`.
        unsafe {
            put(port, listener.port())?;
            put(fd, listener.fd())?;
            put(out, Box::into_raw(Box::new(listener)).cast())
        }
    }

    /// Stores the next request. Returns -EAGAIN if there is none at this moment. After any other error no more requests
    /// come.
    fn next_request<P>(listener: *mut Listener, out: *mut Request) -> i32 {
        // SAFETY: the pointer is null, or a handle of `listen`, which is a pointer to a listener.
        let listener = unsafe { listener.cast::<P::Listener>().as_ref() }.ok_or(INVALID)?;
        let Incoming { conn, private } = listener.next()?.ok_or(Errno(libc::EAGAIN))?;
        let conn = give::<P>(conn);
        // SAFETY: the pointer is valid by the contract of `Plugin`.
        unsafe { put(out, Request { conn, private }) }
    }

    /// Closes a listener.
    fn close_listener<P>(listener: *mut Listener) -> i32 {
        if !listener.is_null() {
            // SAFETY: the pointer is a handle of `listen`, which is not used any more.
            drop(unsafe { Box::from_raw(listener.cast::<P::Listener>()) });
        }
        Ok(())
    }

    /// Connects from a local address, within `timeout_ms` ms for each step. Waits, so the caller needs a thread for it.
    /// `beside` is null, or a connection to the same peer that outlives this one. In the second case memory registered
    /// with `beside` is registered for this connection too, and the completion fd of `beside` reports this connection's
    /// completions. The queues of such a connection are short, since it carries bulk data.
    fn connect<P>(
        local: *const Address,
        remote: *const Address,
        private: *const u8,
        private_len: usize,
        timeout_ms: u32,
        beside: *mut Conn,
        out: *mut *mut Conn,
    ) -> i32 {
        if private_len > PRIVATE_BYTES {
            return Err(INVALID);
        }
        // SAFETY: the pointers are valid by the contract of `Plugin`.
        unsafe {
            let (local, remote) = (local.as_ref().ok_or(INVALID)?, remote.as_ref().ok_or(INVALID)?);
            let private = bytes(private, private_len)?;
            let timeout = Duration::from_millis(timeout_ms.into());
            let beside = beside.cast::<P::Conn>().as_ref();
            put(out, give::<P>(P::connect(local, remote, private, timeout, beside)?))
        }
    }

    /// Accepts a request. The connection is up when `state` returns 1. `beside` is as in `connect`.
    fn accept<P>(conn: *mut Conn, private: *const u8, private_len: usize, beside: *mut Conn) -> i32 {
        // SAFETY: the pointers are valid by the contract of `Plugin`.
        unsafe {
            let beside = beside.cast::<P::Conn>().as_ref();
            connection::<P>(conn)?.accept(bytes(private, private_len)?, beside)
        }
    }

    /// Rejects a request, and frees its connection.
    fn reject<P>(conn: *mut Conn) -> i32 {
        // SAFETY: the handle is valid by the contract of `Plugin`, and is not used after this call.
        if let Some(conn) = unsafe { take::<P>(conn) } {
            conn.reject();
        }
        Ok(())
    }

    /// Stores the [`Info`] of a connection.
    fn info<P>(conn: *mut Conn, out: *mut Info) -> i32 {
        // SAFETY: the pointers are valid by the contract of `Plugin`.
        unsafe { put(out, connection::<P>(conn)?.info()?) }
    }

    /// Processes events of the connection. Returns 0 if it is not up yet, 1 if it is up, and a negative errno if it has
    /// ended for that reason.
    fn state<P>(conn: *mut Conn) -> i32 {
        // SAFETY: the handle is valid by the contract of `Plugin`.
        Ok(unsafe { connection::<P>(conn) }?.state())
    }

    /// Registers memory, as [`QueuePair::register`](crate::fabric::remote::qp::QueuePair::register) does.
    fn register<P>(conn: *mut Conn, at: *mut c_void, len: usize, role: Role, out: *mut Region) -> i32 {
        // SAFETY: the pointers are valid by the contract of `Plugin`; the memory is as `QueuePair::register` demands.
        unsafe { put(out, connection::<P>(conn)?.register(at, len, role)?) }
    }

    /// Deregisters memory by its handle, as [`QueuePair::deregister`](crate::fabric::remote::qp::QueuePair::deregister)
    /// does.
    fn deregister<P>(conn: *mut Conn, handle: u64) -> i32 {
        // SAFETY: the handle is valid by the contract of `Plugin`.
        unsafe { connection::<P>(conn)? }.deregister(handle);
        Ok(())
    }

    /// Posts a WRITE, as [`QueuePair::write`](crate::fabric::remote::qp::QueuePair::write) does. Returns -EAGAIN if the
    /// queue is full. `immediate` is null, or points to the immediate in host byte order.
    fn write<P>(conn: *mut Conn, write: *const Write, immediate: *const u32) -> i32 {
        // SAFETY: the pointers and the handle are valid by the contract of `Plugin`; the source is as
        // `QueuePair::write` demands.
        unsafe { connection::<P>(conn)?.write(write.as_ref().ok_or(INVALID)?, immediate.as_ref().copied()) }
    }

    /// Posts a READ, as [`QueuePair::read`](crate::fabric::remote::qp::QueuePair::read) does. Returns -EAGAIN if the
    /// queue is full.
    fn read<P>(conn: *mut Conn, read: *const Read) -> i32 {
        // SAFETY: the pointer and the handle are valid by the contract of `Plugin`; the target is as `QueuePair::read`
        // demands.
        unsafe { connection::<P>(conn)?.read(read.as_ref().ok_or(INVALID)?) }
    }

    /// Posts a message, as [`QueuePair::send`](crate::fabric::remote::qp::QueuePair::send) does. Returns -EAGAIN if the
    /// queue is full.
    fn send<P>(conn: *mut Conn, message: *const u8, len: usize) -> i32 {
        // SAFETY: the handle and the message are valid by the contract of `Plugin`.
        unsafe { connection::<P>(conn)?.send(bytes(message, len)?) }
    }

    /// Posts a probe, as [`QueuePair::probe`](crate::fabric::remote::qp::QueuePair::probe) does. Returns -EAGAIN if it
    /// may not be posted yet.
    fn probe<P>(conn: *mut Conn) -> i32 {
        // SAFETY: the handle is valid by the contract of `Plugin`.
        unsafe { connection::<P>(conn)? }.probe()
    }

    /// Passes completions to `each`, as [`QueuePair::poll`](crate::fabric::remote::qp::QueuePair::poll) does. Returns
    /// the number of events, or a negative errno.
    fn poll<P>(
        conn: *mut Conn,
        context: *mut c_void,
        each: unsafe extern "C" fn(context: *mut c_void, completion: *const Completion),
    ) -> i32 {
        // SAFETY: the handle is valid by the contract of `Plugin`.
        let count = unsafe { connection::<P>(conn)? }.poll(&mut |done| {
            let (kind, immediate, bytes, len) = match done {
                // The message fits a receive buffer, so its length fits `u32`.
                Completed::Received(message) => (completion::RECEIVED, 0, message.as_ptr(), message.len() as u32),
                Completed::Written { immediate, bytes } => (completion::WRITTEN, immediate, null(), bytes),
                Completed::Room => (completion::ROOM, 0, null(), 0),
                Completed::Read => (completion::READ, 0, null(), 0),
                Completed::Probed => (completion::PROBED, 0, null(), 0),
            };
            // SAFETY: the caller has passed the function with its context. The completion lives during the call.
            unsafe { each(context, &Completion { kind, immediate, bytes, len }) };
        })?;
        Ok(i32::try_from(count).unwrap_or(i32::MAX))
    }

    /// Arms the completion fd, as [`QueuePair::arm`](crate::fabric::remote::qp::QueuePair::arm) does.
    fn arm<P>(conn: *mut Conn) -> i32 {
        // SAFETY: the handle is valid by the contract of `Plugin`.
        unsafe { connection::<P>(conn)? }.arm()
    }

    /// Begins to end the connection. After that `state` reports at both ends that the connection has ended.
    fn disconnect<P>(conn: *mut Conn) -> i32 {
        // SAFETY: the handle is valid by the contract of `Plugin`.
        unsafe { connection::<P>(conn)? }.disconnect();
        Ok(())
    }

    /// Frees the connection. No thread is in another call for the connection, and none makes one later.
    fn destroy<P>(conn: *mut Conn) -> i32 {
        // SAFETY: the handle is valid by the contract of `Plugin`, and is not used after this call.
        drop(unsafe { take::<P>(conn) });
        Ok(())
    }

    /// Forgets all handles in a fork child, before any other call there. Does not access the device. The library closes
    /// the inherited fds.
    fn after_fork<P>() -> i32 {
        P::after_fork();
        Ok(())
    }
}

// The work requests of a send queue have numbers, from 0. Request n asks for a completion if n + 1 is a multiple of a
// quarter of the queue's length. It also asks if the requests after the last one that asked, up to itself, move a
// quarter of `most_bytes` or more. So a full queue always holds a request that asks, and its completion frees all
// requests up to it. The queue also counts as full while its requests have `most_bytes` or more to move. The device
// moves bytes in the order of the posts, so this bound keeps a small message from waiting behind megabytes of other
// streams.

/// The limit `most_bytes` for the queue of a link's own queue pair, in bytes. A device of 400 Gbit/s takes 20 µs for 1
/// MiB, which is longer than a round trip, so the device stays busy until the next poll.
pub const FOR_MESSAGES: u64 = 1 << 20;
/// The limit `most_bytes` for the queue of a bulk queue pair, in bytes. That queue gets pieces of up to 1 MiB.
pub const FOR_BULK: u64 = 4 << 20;

/// The bit by which the thread that posts asks to be notified of room.
const WANTED: u32 = 1;

/// The counts of one send queue: its work requests, and the bytes that they move. They decide which requests ask for a
/// completion, and show whether the poster waits for room. The poster is the thread that posts requests, the poller the
/// thread that polls for their completions; they may be two threads.
#[derive(Debug)]
pub struct Slots {
    depth: u64,
    interval: u64,
    most_bytes: u64,
    /// The number of work requests posted; written by the poster.
    posted: AtomicU64,
    /// The number of work requests completed; written by the poller.
    freed: Published<AtomicU64>,
    /// For each slot: the bytes that all requests move, from the first to the request in that slot. Written by the
    /// poster.
    bytes: Box<[AtomicU64]>,
    /// The bytes that all requests move, from the first to the last one that asks for a completion. Used by the poster
    /// only.
    signalled: AtomicU64,
    /// Not 0 if the poster found the queue full, or was turned away for another reason.
    wants_room: Attention,
}

/// The right to post one work request. Once the request is posted, [`Slots::posted`] is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The slot whose memory the work request may use.
    pub slot: usize,
    /// Whether the work request has to ask for a completion.
    pub signal: bool,
    /// The request's number plus one: the number of requests that are complete when this one is.
    pub frees: u64,
    /// The bytes that this request and all earlier ones of the queue move. Goes into `Slots::bytes`.
    bytes: u64,
}

impl Slots {
    /// Returns the counts of an empty queue for `depth` work requests; 0 counts as 1. The queue takes no more requests
    /// while it has `most_bytes` or more bytes to move.
    pub fn new(depth: u32, most_bytes: u64) -> Self {
        let depth = u64::from(depth.max(1));
        Self {
            depth,
            interval: (depth / 4).max(1),
            most_bytes,
            posted: AtomicU64::new(0),
            freed: Published::default(),
            bytes: (0..depth).map(|_| AtomicU64::new(0)).collect(),
            signalled: AtomicU64::new(0),
            wants_room: Attention::default(),
        }
    }

    /// Returns the next turn, for a work request that moves `bytes` bytes. `None` if the queue is full; when there is
    /// room again, [`completed`](Self::completed) returns true. One caller at a time.
    pub fn turn(&self, bytes: u32) -> Option<Turn> {
        let number = self.posted.load(Ordering::Relaxed);
        if self.is_full(number) {
            self.wants_room.arm(WANTED);
            if self.is_full(number) {
                return None;
            }
            self.wants_room.disarm(WANTED);
        }
        let bytes = self.bytes_up_to(number).wrapping_add(bytes.into());
        let since = bytes.wrapping_sub(self.signalled.load(Ordering::Relaxed));
        Some(Turn {
            slot: (number % self.depth) as usize,
            signal: (number + 1).is_multiple_of(self.interval) || since >= self.most_bytes / 4,
            frees: number + 1,
            bytes,
        })
    }

    fn is_full(&self, posted: u64) -> bool {
        // Acquires the count that `completed` has published. The device has read the slots of all requests in that
        // count.
        let freed = self.freed.look();
        let outstanding = posted.wrapping_sub(freed);
        // The second condition reads the slot of the last freed request. That slot is not reused before `outstanding`
        // is `depth`.
        outstanding >= self.depth
            || outstanding > 0 && self.bytes_up_to(posted).wrapping_sub(self.bytes_up_to(freed)) >= self.most_bytes
    }

    /// Returns the bytes that the first `number` work requests move.
    fn bytes_up_to(&self, number: u64) -> u64 {
        let slot = number.checked_sub(1).map(|last| (last % self.depth) as usize);
        let bytes = slot.and_then(|slot| self.bytes.get(slot));
        bytes.map_or(0, |bytes| bytes.load(Ordering::Relaxed))
    }

    /// Records that the work request of this turn is in the queue.
    pub fn posted(&self, turn: Turn) {
        if let Some(bytes) = self.bytes.get(turn.slot) {
            bytes.store(turn.bytes, Ordering::Relaxed);
        }
        if turn.signal {
            self.signalled.store(turn.bytes, Ordering::Relaxed);
        }
        self.posted.store(turn.frees, Ordering::Relaxed);
    }

    /// Records that the poster was turned away for another reason than a full queue. Then calls `still`, which
    /// [checks](Published::look) that reason again, and returns its result. If that is true,
    /// [`is_wanted`](Self::is_wanted) returns true afterwards, as it does for a full queue.
    pub fn turn_away(&self, still: impl Fn() -> bool) -> bool {
        self.wants_room.arm(WANTED);
        still()
    }

    /// Returns whether the poster was turned away since the last call. To be called after the end of the reason was
    /// [published](Published::publish).
    pub fn is_wanted(&self) -> bool {
        self.wants_room.take() != 0
    }

    /// Records that the first `frees` requests have completed. Returns true if the poster has to be notified of room.
    /// One caller at a time.
    pub fn completed(&self, frees: u64) -> bool {
        // A correct device completes only requests that were posted, in their order. The code does not rely on that.
        if frees > self.freed.load(Ordering::Relaxed) {
            self.freed.publish(frees);
        }
        self.is_wanted()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(slots: &Slots) -> Vec<Turn> {
        std::iter::from_fn(|| {
            let turn = slots.turn(8)?;
            slots.posted(turn);
            Some(turn)
        })
        .collect()
    }

    #[test]
    fn a_full_queue_of_any_depth_has_a_signalled_request() {
        for depth in 1..70 {
            let slots = Slots::new(depth, FOR_MESSAGES);
            // Fills the queue twenty times, since the interval of requests that ask need not divide its length.
            let mut outstanding = Vec::new();
            for _ in 0..20 {
                outstanding.extend(fill(&slots));
                assert_eq!(outstanding.len(), depth as usize);
                let signalled = outstanding.iter().position(|turn| turn.signal);
                let at = signalled.expect("none is signalled");
                assert!(slots.completed(outstanding[at].frees), "somebody waits");
                outstanding.drain(..=at);
            }
        }
    }

    #[test]
    fn slots_in_use_are_different() {
        let slots = Slots::new(7, FOR_MESSAGES);
        let mut used: Vec<_> = fill(&slots).iter().map(|turn| turn.slot).collect();
        used.sort_unstable();
        assert_eq!(used, [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn room_is_told_once_and_only_to_who_was_turned_away() {
        let slots = Slots::new(4, FOR_MESSAGES);
        for _ in 0..4 {
            let turn = slots.turn(8).unwrap();
            slots.posted(turn);
        }
        assert!(!slots.completed(1), "nobody was turned away");
        slots.posted(slots.turn(8).unwrap());
        assert_eq!(slots.turn(8), None);
        assert!(slots.completed(2));
        assert!(!slots.completed(3));
    }

    #[test]
    fn a_queue_is_full_of_bytes_before_it_is_full_of_requests_and_always_has_a_signalled_one() {
        const LARGE: u32 = 64 << 10;
        for depth in [1, 2, 7, 240] {
            let slots = Slots::new(depth, FOR_MESSAGES);
            let mut outstanding: Vec<(Turn, u64)> = Vec::new();
            let mut sizes = [1, LARGE, 700, 3 * LARGE, LARGE, 2 << 20, 9].into_iter().cycle();
            for _ in 0..500 {
                let mut size = sizes.next().unwrap();
                while let Some(turn) = slots.turn(size) {
                    slots.posted(turn);
                    let before: u64 = outstanding.iter().map(|(_, bytes)| bytes).sum();
                    assert!(before < FOR_MESSAGES && outstanding.len() < depth as usize);
                    outstanding.push((turn, size.into()));
                    size = sizes.next().unwrap();
                }
                let signalled = outstanding.iter().position(|(turn, _)| turn.signal);
                let at = signalled.expect("none is signalled");
                assert!(slots.completed(outstanding[at].0.frees), "somebody waits");
                outstanding.drain(..=at);
            }
        }
    }

    #[test]
    fn a_request_of_any_size_finds_an_empty_queue_and_few_small_ones_are_no_bytes() {
        let slots = Slots::new(240, FOR_MESSAGES);
        slots.posted(slots.turn(u32::MAX).unwrap());
        assert_eq!(slots.turn(1), None);
        assert!(slots.completed(1));
        let small: Vec<_> = fill(&slots).iter().map(|turn| turn.signal).collect();
        assert_eq!(small.len(), 240);
        assert_eq!(small.iter().filter(|signal| **signal).count(), 4);
    }

    #[test]
    fn a_turn_that_was_not_used_comes_again() {
        let slots = Slots::new(4, FOR_MESSAGES);
        assert_eq!(slots.turn(8), slots.turn(8));
    }

    #[test]
    fn a_poster_and_a_poller_never_miss_each_other() {
        const REQUESTS: u64 = 100_000;
        let slots = Slots::new(8, FOR_MESSAGES);
        let (posts, completions) = std::sync::mpsc::channel();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for frees in completions {
                    if slots.completed(frees) {
                        tell.send(()).unwrap();
                    }
                }
                drop(tell);
            });
            let mut done = 0;
            while done < REQUESTS {
                if let Some(turn) = slots.turn(8) {
                    slots.posted(turn);
                    done += 1;
                    if turn.signal {
                        posts.send(turn.frees).unwrap();
                    }
                } else {
                    // If a wake-up is lost, the test fails here.
                    let wait = std::time::Duration::from_secs(20);
                    told.recv_timeout(wait).expect("room was not told");
                }
            }
            drop(posts);
        });
    }
}
