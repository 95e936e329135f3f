//! The functions that the library calls: each checks its pointers, calls what does the work, and turns the result
//! into a number. No panic passes here.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rdmasock_core::fabric::plugin::{
    ABI, Address, Completion, Conn as Handle, Device, Info, Keys, Listener as ListenerHandle, PRIVATE_BYTES, Part,
    Plugin, Request, WriteRequest, completion,
};

use crate::conn::{Conn, words};
use crate::connect;
use crate::device;
use crate::error::{Errno, Result};
use crate::fds;
use crate::listen::Listener;
use crate::queue;
use crate::sys::{Context, Piece};

/// What the entry hands out.
pub static TABLE: Plugin = Plugin {
    abi: ABI,
    size: size_of::<Plugin>() as u32,
    device,
    listen,
    next_request,
    close_listener,
    connect,
    accept,
    reject,
    info,
    state,
    register,
    write,
    send,
    probe,
    poll,
    arm,
    disconnect,
    destroy,
    after_fork,
};

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
unsafe fn conn<'a>(handle: *mut Handle) -> Result<&'a Conn> {
    // SAFETY: handles are pointers to a Conn from Box::into_raw.
    unsafe { handle.cast::<Conn>().as_ref() }.ok_or(INVALID)
}

fn give(conn: Conn) -> *mut Handle {
    Box::into_raw(Box::new(conn)).cast()
}

/// # Safety
/// As of `conn`, and nobody uses the handle any more.
unsafe fn take(handle: *mut Handle) -> Option<Box<Conn>> {
    // SAFETY: a pointer from `give`, taken back once.
    (!handle.is_null()).then(|| unsafe { Box::from_raw(handle.cast::<Conn>()) })
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

unsafe extern "C" fn device(local: *const Address, out: *mut Device) -> i32 {
    // SAFETY: the pointers are as said above.
    guard(|| unsafe { put(out, device::find(local.as_ref().ok_or(INVALID)?)?) })
}

unsafe extern "C" fn listen(
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
        let listener = Listener::new(unsafe { local.as_ref() }.ok_or(INVALID)?)?;
        // SAFETY: the pointers are as said above, and not null.
        unsafe {
            put(port, listener.port())?;
            put(fd, listener.fd())?;
            put(out, Box::into_raw(Box::new(listener)).cast())
        }
    })
}

unsafe extern "C" fn next_request(listener: *mut ListenerHandle, out: *mut Request) -> i32 {
    guard(|| {
        // SAFETY: null or a handle of `listen`, a pointer to a Listener.
        let listener = unsafe { listener.cast::<Listener>().as_ref() }.ok_or(INVALID)?;
        if out.is_null() {
            return Err(INVALID);
        }
        let (conn, private) = listener.next()?.ok_or(Errno(libc::EAGAIN))?;
        let request = Request {
            conn: give(conn),
            private: words(&private),
            private_len: private.len.min(PRIVATE_BYTES as u32),
        };
        // SAFETY: the pointer is as said above.
        unsafe { put(out, request) }
    })
}

unsafe extern "C" fn close_listener(listener: *mut ListenerHandle) {
    guard(|| {
        if !listener.is_null() {
            // SAFETY: a handle of `listen`, which is not used any more.
            drop(unsafe { Box::from_raw(listener.cast::<Listener>()) });
        }
        Ok(0)
    });
}

unsafe extern "C" fn connect(
    local: *const Address,
    remote: *const Address,
    private: *const u8,
    private_len: usize,
    timeout_ms: u32,
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
            put(out, give(connect::connect(local, remote, private, timeout)?))
        }
    })
}

unsafe extern "C" fn accept(handle: *mut Handle, private: *const u8, private_len: usize) -> i32 {
    // SAFETY: the pointers are as said above.
    guard(|| unsafe { conn(handle)?.accept(bytes(private, private_len)?).map(|()| 0) })
}

unsafe extern "C" fn reject(handle: *mut Handle) {
    guard(|| {
        // SAFETY: a handle that is not used any more.
        if let Some(conn) = unsafe { take(handle) } {
            conn.reject();
        }
        Ok(0)
    });
}

unsafe extern "C" fn info(handle: *mut Handle, out: *mut Info) -> i32 {
    // SAFETY: the pointers are as said above.
    guard(|| unsafe { put(out, conn(handle)?.info()?) })
}

unsafe extern "C" fn state(handle: *mut Handle) -> i32 {
    // SAFETY: the handle is as said above.
    guard(|| Ok(unsafe { conn(handle) }?.state()))
}

unsafe extern "C" fn register(handle: *mut Handle, at: *mut c_void, len: usize, out: *mut Keys) -> i32 {
    // SAFETY: the pointers are as said above; the memory is as `QueuePair::register` demands.
    guard(|| unsafe {
        if out.is_null() {
            return Err(INVALID);
        }
        let (local, remote) = conn(handle)?.queue()?.register(at, len)?;
        put(out, Keys { local, remote })
    })
}

unsafe extern "C" fn write(handle: *mut Handle, request: *const WriteRequest) -> i32 {
    // SAFETY: the pointers are as said above; the source is as `QueuePair::write` demands.
    guard(|| unsafe {
        let request = request.as_ref().ok_or(INVALID)?;
        let source = Piece {
            at: request.from,
            len: request.len,
            key: request.local,
        };
        let immediate = (request.has_immediate != 0).then_some(request.immediate);
        conn(handle)?
            .queue()?
            .write(source, request.to, request.remote, immediate)
            .map(|()| 0)
    })
}

unsafe extern "C" fn send(handle: *mut Handle, parts: *const Part, count: usize) -> i32 {
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
        unsafe { conn(handle)? }.queue()?.send(parts).map(|()| 0)
    })
}

unsafe extern "C" fn probe(handle: *mut Handle) -> i32 {
    // SAFETY: the handle is as said above.
    guard(|| unsafe { conn(handle)? }.probe().map(|()| 0))
}

unsafe extern "C" fn poll(
    handle: *mut Handle,
    context: *mut c_void,
    each: unsafe extern "C" fn(context: *mut c_void, completion: *const Completion),
) -> i32 {
    guard(|| {
        // SAFETY: the handle is as said above.
        let count = unsafe { conn(handle)? }.queue()?.poll(|done| {
            let mut given = Completion {
                kind: 0,
                immediate: 0,
                bytes: std::ptr::null(),
                len: 0,
            };
            match done {
                queue::Completion::Received(message) => {
                    given.kind = completion::RECEIVED;
                    given.bytes = message.as_ptr();
                    // At most a buffer.
                    given.len = message.len() as u32;
                }
                queue::Completion::Written { immediate, bytes } => {
                    given.kind = completion::WRITTEN;
                    given.immediate = immediate;
                    given.len = bytes;
                }
                queue::Completion::Room => given.kind = completion::ROOM,
                queue::Completion::Probed => given.kind = completion::PROBED,
            }
            // SAFETY: the caller's function with the caller's context; the completion lives during the call.
            unsafe { each(context, &given) };
        })?;
        Ok(i32::try_from(count).unwrap_or(i32::MAX))
    })
}

unsafe extern "C" fn arm(handle: *mut Handle) -> i32 {
    // SAFETY: the handle is as said above.
    guard(|| unsafe { conn(handle)? }.queue()?.arm().map(|()| 0))
}

unsafe extern "C" fn disconnect(handle: *mut Handle) {
    guard(|| {
        // SAFETY: the handle is as said above.
        unsafe { conn(handle)? }.disconnect();
        Ok(0)
    });
}

unsafe extern "C" fn destroy(handle: *mut Handle) {
    guard(|| {
        // SAFETY: a handle that is not used any more.
        drop(unsafe { take(handle) });
        Ok(0)
    });
}

unsafe extern "C" fn after_fork() {
    guard(|| {
        fds::take_all(|fd| {
            // SAFETY: the number is of an fd that this plugin had in the parent, and the child has closed none yet
            // ("before anything else"). By the raw system call: libc's may be hooked.
            unsafe { rustix::io::close(fd) };
        });
        Context::forget_all();
        // SAFETY: a fork child has one thread.
        unsafe { device::forget() };
        Ok(0)
    });
}
