//! The services of the kernel and libc: calls, errno, socket options, time, pieces of memory.

pub(crate) mod errno;
mod hooked;
pub(crate) mod identity;
pub(crate) mod iov;
pub(crate) mod points;
pub mod real;
pub(crate) mod registry;
pub(crate) mod sockopt;
pub(crate) mod tcp_info;
pub(crate) mod time;
pub mod vfork;
