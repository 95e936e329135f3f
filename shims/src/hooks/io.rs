//! The calls that move bytes.

mod file;
mod recv;
mod send;
mod shape;

pub use file::{sendfile, splice};
pub use recv::{preadv2, read, read_chk, readv, recv, recv_chk, recvfrom, recvfrom_chk, recvmmsg, recvmsg};
pub use send::{pwritev2, send, sendmmsg, sendmsg, sendto, write, writev};
