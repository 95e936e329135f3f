//! Makes a plugin's table from a [`Provider`]. Each function checks its pointers, calls the provider, and turns the
//! result into a number. No panic leaves this module.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null;
use std::time::Duration;

use super::errno::{Errno, Result};
use super::{
    ABI, Address, Completion, Conn, Device, Host, Info, Keys, Listener, PRIVATE_BYTES, Part, ReadRequest, Request,
    WriteRequest, completion, role,
};
use crate::fabric::remote::qp::{Completed, Read, Role, Write};

/// Stores the plugin's table in `table`; the table lives as long as the process, as the host's does. Returns 0, or a
/// negative errno.
pub type Entry = unsafe extern "C" fn(host: *const Host, table: *mut *const Plugin) -> i32;

/// The work of a plugin. [`Plugin`] says how the functions are to be used.
pub trait Provider: 'static {
    /// The type of a listener, which receives requests.
    type Listener: Listen<Conn = Self::Conn>;
    /// The type of a connection.
    type Conn: Connection;

    /// Returns the device that has this local address; ENODEV if none has.
    fn device(local: &Address) -> Result<Device>;
    /// Listens at a local address; port 0 stands for a free port.
    fn listen(local: &Address) -> Result<Self::Listener>;
    /// Connects, perhaps beside another connection. The timeout bounds the search for a route, and then again the wait
    /// for the peer's answer.
    fn connect(
        local: &Address,
        remote: &Address,
        private: &[u8],
        timeout: Duration,
        beside: Option<&Self::Conn>,
    ) -> Result<Self::Conn>;
    /// Forgets all listeners and connections in a fork child, which has one thread, and does not access the device.
    fn after_fork();
}

/// A listener of a [`Provider`]; dropped when it is over.
pub trait Listen {
    /// The type of the connections that it receives.
    type Conn;

    /// Returns the port that it listens at.
    fn port(&self) -> u16;
    /// Returns an fd that is readable when there may be a request.
    fn fd(&self) -> c_int;
    /// Returns the next request; `None` if there is none now, an error if no more will come.
    fn next(&self) -> Result<Option<Incoming<Self::Conn>>>;
}

/// A connection request of a peer.
#[derive(Debug)]
pub struct Incoming<C> {
    /// To be accepted or rejected.
    pub conn: C,
    /// The private data of the peer's request.
    pub private: [u8; PRIVATE_BYTES],
    /// Bytes of `private`.
    pub private_len: u32,
}

/// A connection of a [`Provider`], with the functions of [`Plugin`]; dropped when it is over.
pub trait Connection: Sized {
    /// Accepts the request with `private` as the answer, perhaps beside another connection.
    fn accept(&self, private: &[u8], beside: Option<&Self>) -> Result<()>;
    /// Refuses the request.
    fn reject(self);
    /// Returns the [`Info`] of the connection.
    fn info(&self) -> Result<Info>;
    /// Takes in events, and returns the state: 0 is not up yet, 1 is up, a negative errno says why the connection is
    /// over.
    fn state(&self) -> i32;
    /// Registers memory, until it is deregistered or the connection is over.
    ///
    /// # Safety
    /// As of [`QueuePair::register`](crate::fabric::remote::qp::QueuePair::register).
    unsafe fn register(&self, at: *mut c_void, len: usize, role: Role) -> Result<Keys>;
    /// Deregisters memory: no work request reaches it any more when this returns.
    fn deregister(&self, handle: u64);
    /// Posts a WRITE.
    ///
    /// # Safety
    /// As of [`QueuePair::write`](crate::fabric::remote::qp::QueuePair::write).
    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<()>;
    /// Posts a READ.
    ///
    /// # Safety
    /// As of [`QueuePair::read`](crate::fabric::remote::qp::QueuePair::read).
    unsafe fn read(&self, read: &Read) -> Result<()>;
    /// Posts a message made of these parts, which are copied.
    fn send<'a>(&self, parts: impl Iterator<Item = &'a [u8]> + Clone) -> Result<()>;
    /// Posts a probe.
    fn probe(&self) -> Result<()>;
    /// Hands over completions. Returns how many events there were.
    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize>;
    /// Makes the next completion turn the completion fd readable.
    fn arm(&self) -> Result<()>;
    /// Begins to end the connection.
    fn disconnect(&self);
}

const INVALID: Errno = Errno(libc::EINVAL);

/// The result of a function of the table, or of its body; no result counts as 0.
trait Code {
    fn of(code: i32) -> Self;
    fn code(self) -> i32;
}

impl Code for i32 {
    fn of(code: i32) -> Self {
        code
    }

    fn code(self) -> i32 {
        self
    }
}

impl Code for () {
    fn of(_: i32) {}

    fn code(self) -> i32 {
        0
    }
}

/// Runs `body`. A panic, which no code here is meant to cause, becomes EIO.
fn guard<C: Code, R: Code>(body: impl FnOnce() -> Result<C>) -> R {
    R::of(match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(done)) => done.code(),
        Ok(Err(errno)) => errno.code(),
        Err(payload) => {
            // A drop of the payload may panic again.
            std::mem::forget(payload);
            -libc::EIO
        }
    })
}

/// Returns the connection behind a handle.
///
/// # Safety
/// The handle is null, or one that `give` has returned and `take` has not taken back before the end of the call.
unsafe fn connection<'a, P: Provider>(handle: *mut Conn) -> Result<&'a P::Conn> {
    // SAFETY: handles are pointers to a connection from Box::into_raw.
    unsafe { handle.cast::<P::Conn>().as_ref() }.ok_or(INVALID)
}

fn give<P: Provider>(conn: P::Conn) -> *mut Conn {
    Box::into_raw(Box::new(conn)).cast()
}

/// # Safety
/// As of `connection`, and no code uses the handle any more.
unsafe fn take<P: Provider>(handle: *mut Conn) -> Option<Box<P::Conn>> {
    // SAFETY: a pointer from `give`, taken back once.
    (!handle.is_null()).then(|| unsafe { Box::from_raw(handle.cast::<P::Conn>()) })
}

/// # Safety
/// Null with length 0, or readable memory of this length for the time of the call.
unsafe fn bytes<'a>(at: *const u8, len: usize) -> Result<&'a [u8]> {
    if len == 0 {
        return Ok(&[]);
    }
    if at.is_null() || isize::try_from(len).is_err() {
        return Err(INVALID);
    }
    // SAFETY: not null, a length that a slice can have, and the rest by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts(at, len) })
}

/// # Safety
/// Null, or valid for a write.
unsafe fn put<T>(at: *mut T, value: T) -> Result<()> {
    if at.is_null() {
        return Err(INVALID);
    }
    // SAFETY: by this function's contract.
    unsafe { at.write(value) };
    Ok(())
}

/// Declares the functions of the table: each is a field of [`Plugin`] and a function that calls a [`Provider`].
macro_rules! functions {
    (
        $(#[$about:meta])*
        pub struct Plugin;
        $($(#[$doc:meta])* fn $name:ident<$P:ident>($($arg:ident: $type:ty),* $(,)?) $(-> $code:ty)? $body:block)*
    ) => {
        $(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct Plugin {
            /// [`ABI`].
            pub abi: u32,
            /// Bytes of this table.
            pub size: u32,
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg: $type),*) $(-> $code)?,)*
        }

        $(unsafe extern "C" fn $name<$P: Provider>($($arg: $type),*) $(-> $code)? {
            guard(|| $body)
        })*

        /// Returns the table of a provider.
        pub const fn table<P: Provider>() -> Plugin {
            Plugin { abi: ABI, size: size_of::<Plugin>() as u32, $($name: $name::<P>),* }
        }
    };
}

// All functions below rely on the contract in `Plugin`: pointers are null or valid for the call, handles are those that
// were given out, and each connection is used as described there.
functions! {
    /// The functions of the plugin that the library calls. Those without a connection may be called from any thread. Of
    /// one connection, `poll` by one thread at a time, `write`, `read`, `send` and `probe` by one thread at a time, and
    /// `disconnect` by any. Only `connect` and `destroy` may wait.
    pub struct Plugin;

    /// Stores the device that has this local address; -ENODEV if none has.
    fn device<P>(local: *const Address, out: *mut Device) -> i32 {
        // SAFETY: the pointers are as said above.
        unsafe { put(out, P::device(local.as_ref().ok_or(INVALID)?)?) }
    }

    /// Listens at a local address; with port 0 at one that the system chooses.
    fn listen<P>(local: *const Address, out: *mut *mut Listener, port: *mut u16, fd: *mut c_int) -> i32 {
        if out.is_null() || port.is_null() || fd.is_null() {
            return Err(INVALID);
        }
        // SAFETY: the pointer is as said above.
        let listener = P::listen(unsafe { local.as_ref() }.ok_or(INVALID)?)?;
        // SAFETY: the pointers are as said above, and not null.
        unsafe {
            put(port, listener.port())?;
            put(fd, listener.fd())?;
            put(out, Box::into_raw(Box::new(listener)).cast())
        }
    }

    /// Stores the next request; -EAGAIN if there is none now. After any other error no more requests come.
    fn next_request<P>(listener: *mut Listener, out: *mut Request) -> i32 {
        // SAFETY: null or a handle of `listen`, a pointer to a listener.
        let listener = unsafe { listener.cast::<P::Listener>().as_ref() }.ok_or(INVALID)?;
        if out.is_null() {
            return Err(INVALID);
        }
        let Incoming { conn, private, private_len } = listener.next()?.ok_or(Errno(libc::EAGAIN))?;
        let conn = give::<P>(conn);
        // SAFETY: the pointer is as said above.
        unsafe { put(out, Request { conn, private, private_len }) }
    }

    /// Ends a listener.
    fn close_listener<P>(listener: *mut Listener) {
        if !listener.is_null() {
            // SAFETY: a handle of `listen`, which is not used any more.
            drop(unsafe { Box::from_raw(listener.cast::<P::Listener>()) });
        }
        Ok(())
    }

    /// Connects from a local address, within `timeout_ms` ms for each step. It waits, so it needs a thread of its own.
    /// `beside` is null, or a connection to the same peer that outlives this one. In that case memory registered with
    /// `beside` is registered for this connection too, and the completion fd of `beside` reports its completions. Its
    /// queues are short, since it is to carry bulk.
    fn connect<P>(
        local: *const Address,
        remote: *const Address,
        private: *const u8,
        private_len: usize,
        timeout_ms: u32,
        beside: *mut Conn,
        out: *mut *mut Conn,
    ) -> i32 {
        if out.is_null() || private_len > PRIVATE_BYTES {
            return Err(INVALID);
        }
        // SAFETY: the pointers are as said above.
        unsafe {
            let (local, remote) = (local.as_ref().ok_or(INVALID)?, remote.as_ref().ok_or(INVALID)?);
            let private = bytes(private, private_len)?;
            let timeout = Duration::from_millis(timeout_ms.into());
            let beside = beside.cast::<P::Conn>().as_ref();
            put(out, give::<P>(P::connect(local, remote, private, timeout, beside)?))
        }
    }

    /// Accepts a request; the connection is up when `state` returns 1. `beside` is as in `connect`.
    fn accept<P>(conn: *mut Conn, private: *const u8, private_len: usize, beside: *mut Conn) -> i32 {
        // SAFETY: the pointers are as said above.
        unsafe {
            let beside = beside.cast::<P::Conn>().as_ref();
            connection::<P>(conn)?.accept(bytes(private, private_len)?, beside)
        }
    }

    /// Rejects, and frees the connection.
    fn reject<P>(conn: *mut Conn) {
        // SAFETY: a handle that is not used any more.
        if let Some(conn) = unsafe { take::<P>(conn) } {
            conn.reject();
        }
        Ok(())
    }

    /// Stores the [`Info`] of a connection.
    fn info<P>(conn: *mut Conn, out: *mut Info) -> i32 {
        // SAFETY: the pointers are as said above.
        unsafe { put(out, connection::<P>(conn)?.info()?) }
    }

    /// Takes in events of the connection and its device. Returns 0 if it is not up yet, 1 if it is up, and the negative
    /// reason if it is over.
    fn state<P>(conn: *mut Conn) -> i32 {
        // SAFETY: the handle is as said above.
        Ok(unsafe { connection::<P>(conn) }?.state())
    }

    /// Registers memory for one of [`role`], as [`QueuePair::register`](crate::fabric::remote::qp::QueuePair::register)
    /// does.
    fn register<P>(conn: *mut Conn, at: *mut c_void, len: usize, role: u32, out: *mut Keys) -> i32 {
        if out.is_null() {
            return Err(INVALID);
        }
        let role = match role {
            role::BOTH => Role::Both,
            role::SOURCE => Role::Source,
            role::TARGET => Role::Target,
            role::OFFERED => Role::Offered,
            _ => return Err(INVALID),
        };
        // SAFETY: the pointers are as said above; the memory is as `QueuePair::register` demands.
        unsafe { put(out, connection::<P>(conn)?.register(at, len, role)?) }
    }

    /// Deregisters memory by its handle, as [`QueuePair::deregister`](crate::fabric::remote::qp::QueuePair::deregister)
    /// does.
    fn deregister<P>(conn: *mut Conn, handle: u64) {
        // SAFETY: the handle is as said above.
        unsafe { connection::<P>(conn)? }.deregister(handle);
        Ok(())
    }

    /// Posts a WRITE, as [`QueuePair::write`](crate::fabric::remote::qp::QueuePair::write) does; -EAGAIN when the queue
    /// is full.
    fn write<P>(conn: *mut Conn, request: *const WriteRequest) -> i32 {
        // SAFETY: the pointers are as said above.
        let WriteRequest { from, to, len, local, remote, has_immediate, immediate } =
            *unsafe { request.as_ref() }.ok_or(INVALID)?;
        let immediate = (has_immediate != 0).then_some(immediate);
        // SAFETY: the handle is as said above; the source is as `QueuePair::write` demands.
        unsafe { connection::<P>(conn)?.write(&Write { from, local, len, to, remote }, immediate) }
    }

    /// Posts a READ, as [`QueuePair::read`](crate::fabric::remote::qp::QueuePair::read) does; -EAGAIN when the queue is
    /// full.
    fn read<P>(conn: *mut Conn, request: *const ReadRequest) -> i32 {
        // SAFETY: the pointers are as said above.
        let ReadRequest { to, from, len, local, remote } = *unsafe { request.as_ref() }.ok_or(INVALID)?;
        // SAFETY: the handle is as said above; the target is as `QueuePair::read` demands.
        unsafe { connection::<P>(conn)?.read(&Read { to, local, len, from, remote }) }
    }

    /// Posts a message, as [`QueuePair::send`](crate::fabric::remote::qp::QueuePair::send) does; -EAGAIN when the queue
    /// is full.
    fn send<P>(conn: *mut Conn, parts: *const Part, count: usize) -> i32 {
        let parts: &[Part] = match (parts.is_null(), count) {
            (_, 0) => &[],
            (true, _) => return Err(INVALID),
            // SAFETY: not null, and as said above an array of `count` parts.
            (false, _) => unsafe { std::slice::from_raw_parts(parts, count) },
        };
        for part in parts {
            // SAFETY: each part is memory that can be read, as said above; this is the check.
            unsafe { bytes(part.at, part.len)? };
        }
        // SAFETY: as before; the loop has checked all that can fail.
        let part = |part: &Part| unsafe { bytes(part.at, part.len) }.unwrap_or_default();
        // SAFETY: the handle is as said above.
        unsafe { connection::<P>(conn)? }.send(parts.iter().map(part))
    }

    /// Posts a probe, as [`QueuePair::probe`](crate::fabric::remote::qp::QueuePair::probe) does; -EAGAIN when it may
    /// not be posted yet.
    fn probe<P>(conn: *mut Conn) -> i32 {
        // SAFETY: the handle is as said above.
        unsafe { connection::<P>(conn)? }.probe()
    }

    /// Hands over completions, as [`QueuePair::poll`](crate::fabric::remote::qp::QueuePair::poll) does. Returns the
    /// count, or a negative errno.
    fn poll<P>(
        conn: *mut Conn,
        context: *mut c_void,
        each: unsafe extern "C" fn(context: *mut c_void, completion: *const Completion),
    ) -> i32 {
        // SAFETY: the handle is as said above.
        let count = unsafe { connection::<P>(conn)? }.poll(&mut |done| {
            let (kind, immediate, bytes, len) = match done {
                // The message fits a receive buffer, so its length fits `u32`.
                Completed::Received(message) => (completion::RECEIVED, 0, message.as_ptr(), message.len() as u32),
                Completed::Written { immediate, bytes } => (completion::WRITTEN, immediate, null(), bytes),
                Completed::Room => (completion::ROOM, 0, null(), 0),
                Completed::Read => (completion::READ, 0, null(), 0),
                Completed::Probed => (completion::PROBED, 0, null(), 0),
            };
            // SAFETY: the caller's function with the caller's context; the completion lives during the call.
            unsafe { each(context, &Completion { kind, immediate, bytes, len }) };
        })?;
        Ok(i32::try_from(count).unwrap_or(i32::MAX))
    }

    /// Arms the completion fd, as [`QueuePair::arm`](crate::fabric::remote::qp::QueuePair::arm) does.
    fn arm<P>(conn: *mut Conn) -> i32 {
        // SAFETY: the handle is as said above.
        unsafe { connection::<P>(conn)? }.arm()
    }

    /// Begins to end the connection; `state` then reports at both ends that it is over.
    fn disconnect<P>(conn: *mut Conn) {
        // SAFETY: the handle is as said above.
        unsafe { connection::<P>(conn)? }.disconnect();
        Ok(())
    }

    /// Frees the connection. No thread is in another call for it, or will make one.
    fn destroy<P>(conn: *mut Conn) {
        // SAFETY: a handle that is not used any more.
        drop(unsafe { take::<P>(conn) });
        Ok(())
    }

    /// Closes the inherited fds in a fork child, before any other call, and does not access the device. All handles are
    /// void.
    fn after_fork<P>() {
        P::after_fork();
        Ok(())
    }
}
