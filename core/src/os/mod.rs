//! Kernel objects that the library owns: hidden fds, sealed shared memory, message channels. Also the state of each
//! thread within the library (`thread`).
//!
//! All code here makes raw system calls (rustix), and no calls of libc functions that the library itself interposes.

pub mod apart;
pub mod channel;
pub mod datagram;
pub mod dir;
pub mod doorbell;
#[cfg(test)]
pub(crate) mod forked;
pub mod heap;
pub mod kernel;
pub mod memfd;
pub mod privatefd;
pub mod thread;
