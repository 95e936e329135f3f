//! The services of the kernel and libc: calls, errno, socket options, time, pieces of memory.

pub(crate) mod budget;
pub(crate) mod errno;
pub(crate) mod identity;
pub(crate) mod iov;
pub(crate) mod keepalive;
pub(crate) mod kept_on_tcp;
pub(crate) mod ledger;
pub(crate) mod points;
pub mod real;
pub(crate) mod registry;
pub(crate) mod remains;
pub(crate) mod sockopt;
pub(crate) mod tcp_info;
pub(crate) mod time;
pub mod vfork;
