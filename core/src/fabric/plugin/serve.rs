//! A plugin's table, made of a type that does the work: each function checks its pointers, calls what does the work,
//! and turns the result into a number. No panic passes here.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::errno::{Errno, Result};
use super::{
    ABI, Address, Completion, Conn as Handle, Device, Info, Keys, Listener as ListenerHandle, PRIVATE_BYTES, Part,
    Plugin, ReadRequest, Request, WriteRequest, completion, role,
};
use crate::fabric::remote::qp::{Completed, Read, Role, Write};

/// What a plugin does; how its functions are to be used is said in [`Plugin`].
pub trait Provider: 'static {
    /// Where requests come in.
    type Listener: Listen<Conn = Self::Conn>;
    /// A connection.
    type Conn: Connection;

    /// The device that has this local address; ENODEV if none has.
    fn device(local: &Address) -> Result<Device>;
    /// Listens at a local address, with port 0 at one that is free.
    fn listen(local: &Address) -> Result<Self::Listener>;
    /// Connects, perhaps beside another connection. The timeout is for finding the way, and again for the peer's
    /// answer.
    fn connect(
        local: &Address,
        remote: &Address,
        private: &[u8],
        timeout: Duration,
        beside: Option<&Self::Conn>,
    ) -> Result<Self::Conn>;
    /// In a fork child, which has one thread: forgets all without a word to the device.
    fn after_fork();
}

/// A listener of a [`Provider`]; dropped when it is over.
pub trait Listen {
    /// What it makes.
    type Conn;

    /// The port that it listens at.
    fn port(&self) -> u16;
    /// Readable when there may be a request.
    fn fd(&self) -> c_int;
    /// The next request; `None` if there is none now, an error if no more will come.
    fn next(&self) -> Result<Option<Incoming<Self::Conn>>>;
}

/// A connection that somebody asks for.
#[derive(Debug)]
pub struct Incoming<C> {
    /// To be accepted or rejected.
    pub conn: C,
    /// What the peer has sent along.
    pub private: [u8; PRIVATE_BYTES],
    /// Bytes of it.
    pub private_len: u32,
}

/// A connection of a [`Provider`], whose functions are those of [`Plugin`]; dropped when it is over.
pub trait Connection: Sized {
    /// Accepts, with an answer, perhaps beside another connection.
    fn accept(&self, private: &[u8], beside: Option<&Self>) -> Result<()>;
    /// Refuses.
    fn reject(self);
    /// Facts.
    fn info(&self) -> Result<Info>;
    /// Takes in what has happened: 0 it is not up yet, 1 it is up, negative: it is over, and why.
    fn state(&self) -> i32;
    /// Makes memory usable, until it is deregistered or the connection is over.
    ///
    /// # Safety
    /// As of [`QueuePair::register`](crate::fabric::remote::qp::QueuePair::register).
    unsafe fn register(&self, at: *mut c_void, len: usize, role: Role) -> Result<Keys>;
    /// Undoes that: nobody reaches the memory any more when it returns.
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
    /// Hands over what has completed; gives how many events that were.
    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize>;
    /// The next completion makes the completion descriptor readable.
    fn arm(&self) -> Result<()>;
    /// Begins to end the connection.
    fn disconnect(&self);
}

/// The table of a provider.
pub const fn table<P: Provider>() -> Plugin {
    Plugin {
        abi: ABI,
        size: size_of::<Plugin>() as u32,
        device: device::<P>,
        listen: listen::<P>,
        next_request: next_request::<P>,
        close_listener: close_listener::<P>,
        connect: connect::<P>,
        accept: accept::<P>,
        reject: reject::<P>,
        info: info::<P>,
        state: state::<P>,
        register: register::<P>,
        deregister: deregister::<P>,
        write: write::<P>,
        read: read::<P>,
        send: send::<P>,
        probe: probe::<P>,
        poll: poll::<P>,
        arm: arm::<P>,
        disconnect: disconnect::<P>,
        destroy: destroy::<P>,
        after_fork: after_fork::<P>,
    }
}

const INVALID: Errno = Errno(libc::EINVAL);

/// Runs `body`; a panic, which nothing here is meant to cause, becomes EIO.
fn guard(body: impl FnOnce() -> Result<i32>) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(count)) => count,
        Ok(Err(errno)) => errno.code(),
        Err(payload) => {
            // Dropping it may panic again.
            std::mem::forget(payload);
            -libc::EIO
        }
    }
}

/// The connection behind a handle.
///
/// # Safety
/// The handle is null, or one that was given out and not taken back; it is not during the call.
unsafe fn conn<'a, P: Provider>(handle: *mut Handle) -> Result<&'a P::Conn> {
    // SAFETY: handles are pointers to a connection from Box::into_raw.
    unsafe { handle.cast::<P::Conn>().as_ref() }.ok_or(INVALID)
}

fn give<P: Provider>(conn: P::Conn) -> *mut Handle {
    Box::into_raw(Box::new(conn)).cast()
}

/// # Safety
/// As of `conn`, and nobody uses the handle any more.
unsafe fn take<P: Provider>(handle: *mut Handle) -> Option<Box<P::Conn>> {
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
unsafe fn put<T>(at: *mut T, value: T) -> Result<i32> {
    if at.is_null() {
        return Err(INVALID);
    }
    // SAFETY: by this function's contract.
    unsafe { at.write(value) };
    Ok(0)
}

// What all functions below rely on is said in `Plugin`: pointers are null or valid for the call, handles are
// those that were given out, and each connection is used as described there.

unsafe extern "C" fn device<P: Provider>(local: *const Address, out: *mut Device) -> i32 {
    // SAFETY: the pointers are as said above.
    guard(|| unsafe { put(out, P::device(local.as_ref().ok_or(INVALID)?)?) })
}

unsafe extern "C" fn listen<P: Provider>(
    local: *const Address,
    out: *mut *mut ListenerHandle,
    port: *mut u16,
    fd: *mut c_int,
) -> i32 {
    guard(|| {
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
    })
}

unsafe extern "C" fn next_request<P: Provider>(listener: *mut ListenerHandle, out: *mut Request) -> i32 {
    guard(|| {
        // SAFETY: null or a handle of `listen`, a pointer to a listener.
        let listener = unsafe { listener.cast::<P::Listener>().as_ref() }.ok_or(INVALID)?;
        if out.is_null() {
            return Err(INVALID);
        }
        let incoming = listener.next()?.ok_or(Errno(libc::EAGAIN))?;
        let request = Request {
            conn: give::<P>(incoming.conn),
            private: incoming.private,
            private_len: incoming.private_len,
        };
        // SAFETY: the pointer is as said above.
        unsafe { put(out, request) }
    })
}

unsafe extern "C" fn close_listener<P: Provider>(listener: *mut ListenerHandle) {
    guard(|| {
        if !listener.is_null() {
            // SAFETY: a handle of `listen`, which is not used any more.
            drop(unsafe { Box::from_raw(listener.cast::<P::Listener>()) });
        }
        Ok(0)
    });
}

unsafe extern "C" fn connect<P: Provider>(
    local: *const Address,
    remote: *const Address,
    private: *const u8,
    private_len: usize,
    timeout_ms: u32,
    beside: *mut Handle,
    out: *mut *mut Handle,
) -> i32 {
    guard(|| {
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
    })
}

unsafe extern "C" fn accept<P: Provider>(
    handle: *mut Handle,
    private: *const u8,
    private_len: usize,
    beside: *mut Handle,
) -> i32 {
    guard(|| {
        // SAFETY: the pointers are as said above.
        unsafe {
            let beside = beside.cast::<P::Conn>().as_ref();
            let accepted = conn::<P>(handle)?.accept(bytes(private, private_len)?, beside);
            accepted.map(|()| 0)
        }
    })
}

unsafe extern "C" fn reject<P: Provider>(handle: *mut Handle) {
    guard(|| {
        // SAFETY: a handle that is not used any more.
        if let Some(conn) = unsafe { take::<P>(handle) } {
            conn.reject();
        }
        Ok(0)
    });
}

unsafe extern "C" fn info<P: Provider>(handle: *mut Handle, out: *mut Info) -> i32 {
    // SAFETY: the pointers are as said above.
    guard(|| unsafe { put(out, conn::<P>(handle)?.info()?) })
}

unsafe extern "C" fn state<P: Provider>(handle: *mut Handle) -> i32 {
    // SAFETY: the handle is as said above.
    guard(|| Ok(unsafe { conn::<P>(handle) }?.state()))
}

unsafe extern "C" fn register<P: Provider>(
    handle: *mut Handle,
    at: *mut c_void,
    len: usize,
    wanted: u32,
    out: *mut Keys,
) -> i32 {
    // SAFETY: the pointers are as said above; the memory is as `QueuePair::register` demands.
    guard(|| unsafe {
        if out.is_null() {
            return Err(INVALID);
        }
        let role = match wanted {
            role::BOTH => Role::Both,
            role::SOURCE => Role::Source,
            role::TARGET => Role::Target,
            role::OFFERED => Role::Offered,
            _ => return Err(INVALID),
        };
        let keys = conn::<P>(handle)?.register(at, len, role)?;
        put(out, keys)
    })
}

unsafe extern "C" fn deregister<P: Provider>(handle: *mut Handle, registered: u64) {
    guard(|| {
        // SAFETY: the handle is as said above.
        unsafe { conn::<P>(handle)? }.deregister(registered);
        Ok(0)
    });
}

unsafe extern "C" fn write<P: Provider>(handle: *mut Handle, request: *const WriteRequest) -> i32 {
    // SAFETY: the pointers are as said above; the source is as `QueuePair::write` demands.
    guard(|| unsafe {
        let request = request.as_ref().ok_or(INVALID)?;
        let write = Write {
            from: request.from,
            local: request.local,
            len: request.len,
            to: request.to,
            remote: request.remote,
        };
        let immediate = (request.has_immediate != 0).then_some(request.immediate);
        conn::<P>(handle)?.write(&write, immediate).map(|()| 0)
    })
}

unsafe extern "C" fn read<P: Provider>(handle: *mut Handle, request: *const ReadRequest) -> i32 {
    // SAFETY: the pointers are as said above; the target is as `QueuePair::read` demands.
    guard(|| unsafe {
        let request = request.as_ref().ok_or(INVALID)?;
        let read = Read {
            to: request.to,
            local: request.local,
            len: request.len,
            from: request.from,
            remote: request.remote,
        };
        conn::<P>(handle)?.read(&read).map(|()| 0)
    })
}

unsafe extern "C" fn send<P: Provider>(handle: *mut Handle, parts: *const Part, count: usize) -> i32 {
    guard(|| {
        let parts: &[Part] = match (parts.is_null(), count) {
            (_, 0) => &[],
            (true, _) => return Err(INVALID),
            // SAFETY: not null, and as said above: so many parts.
            (false, _) => unsafe { std::slice::from_raw_parts(parts, count) },
        };
        for part in parts {
            // SAFETY: each part is memory that can be read, as said above; this is the check.
            unsafe { bytes(part.at, part.len)? };
        }
        // SAFETY: as before; what could fail was checked.
        let parts = parts
            .iter()
            .map(|part| unsafe { bytes(part.at, part.len) }.unwrap_or_default());
        // SAFETY: the handle is as said above.
        unsafe { conn::<P>(handle)? }.send(parts).map(|()| 0)
    })
}

unsafe extern "C" fn probe<P: Provider>(handle: *mut Handle) -> i32 {
    // SAFETY: the handle is as said above.
    guard(|| unsafe { conn::<P>(handle)? }.probe().map(|()| 0))
}

unsafe extern "C" fn poll<P: Provider>(
    handle: *mut Handle,
    context: *mut c_void,
    each: unsafe extern "C" fn(context: *mut c_void, completion: *const Completion),
) -> i32 {
    guard(|| {
        // SAFETY: the handle is as said above.
        let count = unsafe { conn::<P>(handle)? }.poll(&mut |done| {
            let mut given = Completion {
                kind: 0,
                immediate: 0,
                bytes: std::ptr::null(),
                len: 0,
            };
            match done {
                Completed::Received(message) => {
                    given.kind = completion::RECEIVED;
                    given.bytes = message.as_ptr();
                    // At most a buffer.
                    given.len = message.len() as u32;
                }
                Completed::Written { immediate, bytes } => {
                    given.kind = completion::WRITTEN;
                    given.immediate = immediate;
                    given.len = bytes;
                }
                Completed::Room => given.kind = completion::ROOM,
                Completed::Read => given.kind = completion::READ,
                Completed::Probed => given.kind = completion::PROBED,
            }
            // SAFETY: the caller's function with the caller's context; the completion lives during the call.
            unsafe { each(context, &given) };
        })?;
        Ok(i32::try_from(count).unwrap_or(i32::MAX))
    })
}

unsafe extern "C" fn arm<P: Provider>(handle: *mut Handle) -> i32 {
    // SAFETY: the handle is as said above.
    guard(|| unsafe { conn::<P>(handle)? }.arm().map(|()| 0))
}

unsafe extern "C" fn disconnect<P: Provider>(handle: *mut Handle) {
    guard(|| {
        // SAFETY: the handle is as said above.
        unsafe { conn::<P>(handle)? }.disconnect();
        Ok(0)
    });
}

unsafe extern "C" fn destroy<P: Provider>(handle: *mut Handle) {
    guard(|| {
        // SAFETY: a handle that is not used any more.
        drop(unsafe { take::<P>(handle) });
        Ok(0)
    });
}

unsafe extern "C" fn after_fork<P: Provider>() {
    guard(|| {
        P::after_fork();
        Ok(0)
    });
}
