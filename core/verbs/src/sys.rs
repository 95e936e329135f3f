//! All calls of libibverbs and librdmacm. Each type here owns one object of these libraries, and keeps the objects
//! alive that it depends on. Only these files use the rdma-sys binding. They make no decisions, such as the steps of a
//! connection or the lengths of its queues.
//!
//! The libraries close their fds by libc's close. The preloaded library hooks it and hides these fds from it. So before
//! an object is destroyed, its fd is taken out of the struct and closed by the plugin.

mod cm;
mod completion;
mod context;
mod qp;

pub(crate) use cm::{Event, Id, Private, WIRE_BYTES, event};
pub(crate) use completion::{BATCH, CompletionChannel, Cq, Done, status};
pub(crate) use context::{Context, DeviceLimits, Mr, Pd};
pub(crate) use qp::{Piece, Qp, Work};
use std::ptr::NonNull;

use rdma_sys as ffi;

use crate::error::{Errno, Result};

/// A pointer to an object that libibverbs or librdmacm has made. The type that contains this value destroys the object.
struct Object<T>(NonNull<T>);

// SAFETY: the libraries' functions may be called from any thread. The owner accesses the object's fields itself only
// before other threads have the object, or after the last of them has given it up.
unsafe impl<T> Send for Object<T> {}
// SAFETY: as for Send.
unsafe impl<T> Sync for Object<T> {}

impl<T> Object<T> {
    /// Converts the result of a call that returns an object, or null with errno set.
    fn made(ptr: *mut T) -> Result<Self> {
        NonNull::new(ptr).map(Self).ok_or_else(Errno::last)
    }

    fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

/// Makes libibverbs keep registered memory intact across a fork. Needed before Linux 5.12; later kernels do it
/// themselves. To be called before all other functions of the library.
pub(crate) fn prepare_for_fork() {
    // SAFETY: the function has no arguments. A call that comes too late fails and has no effect.
    unsafe { ffi::ibv_fork_init() };
}
