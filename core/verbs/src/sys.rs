//! All that is said to libibverbs and librdmacm: thin owners of their objects, each of which keeps its parents
//! alive. Another binding than rdma-sys means another version of these files. No policy here: not
//! what a connection is, nor how long its queues are.
//!
//! The libraries close fds through libc's close, which does not see hidden numbers, so every fd is taken from
//! its struct before that.

mod cm;
mod completion;
mod context;
mod qp;

use rdma_sys as ffi;

pub use cm::{Event, Id, Private, WIRE_BYTES, event};
pub use completion::{BATCH, CompletionChannel, Cq, Done, status};
pub use context::{Context, DeviceLimits, Mr, Pd};
pub use qp::{Piece, Qp, QueueLengths, Work};

/// Before the first of all calls: tells the library to keep registered memory whole across a fork, where the
/// kernel does not do so by itself (since 5.12 it does).
pub fn prepare_for_fork() {
    // SAFETY: no arguments. It fails where it comes too late, and then things are as if it had not been called.
    unsafe { ffi::ibv_fork_init() };
}
