//! All calls of libibverbs and librdmacm: thin owners of their objects, each of which keeps its parents alive. Only
//! these files depend on the rdma-sys binding. They contain no policy, such as the steps of a connection or the lengths
//! of its queues.
//!
//! The libraries close fds through libc's close, which does not see hidden numbers. So every fd is removed from its
//! struct before that.

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

/// An object that the libraries have made. Its owner destroys it.
struct Object<T>(NonNull<T>);

// SAFETY: the libraries' functions may be called from any thread. An owner reads and writes the object itself only
// before it is shared, or after the last user is gone.
unsafe impl<T> Send for Object<T> {}
// SAFETY: as for Send.
unsafe impl<T> Sync for Object<T> {}

impl<T> Object<T> {
    /// Takes what a call has returned: an object, or null with errno set.
    fn made(ptr: *mut T) -> Result<Self> {
        NonNull::new(ptr).map(Self).ok_or_else(Errno::last)
    }

    fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

/// Makes registered memory stay whole across a fork, where the kernel does not do so by itself (since 5.12 it does). To
/// be called before all other calls of the library.
pub(crate) fn prepare_for_fork() {
    // SAFETY: no arguments. A call that comes too late fails, and changes nothing.
    unsafe { ffi::ibv_fork_init() };
}
