//! Kernel objects the library owns: hidden fds, sealed shared memory, message channels; and where in the library a
//! thread is.
//!
//! Everything goes through raw system calls (rustix), never through libc functions that the
//! library itself interposes.

pub mod apart;
pub mod channel;
pub mod datagram;
pub mod dir;
pub mod doorbell;
pub mod extent;
#[cfg(test)]
pub(crate) mod forked;
#[cfg(target_arch = "x86_64")]
pub mod heap;
pub mod kernel;
pub mod lazy;
pub mod memfd;
pub mod privatefd;
pub mod thread;
