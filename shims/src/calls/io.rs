//! The calls that move bytes.

mod file;
mod recv;
mod send;

pub use file::{sendfile, splice};
pub use recv::{
    preadv2, read, read_chk, readv, recv, recv_chk, recvfrom, recvfrom_chk, recvmmsg, recvmsg,
};
pub use send::{pwritev2, send, sendmmsg, sendmsg, sendto, write, writev};

use libc::{c_int, off_t};

/// What preadv2(2) and pwritev2(2) ask for, as flags of recv(2) and send(2); `None` for what the kernel
/// refuses on a socket.
fn socket_flags(offset: off_t, flags: c_int) -> Option<c_int> {
    if offset != -1 {
        return None;
    }
    match flags {
        0 => Some(0),
        libc::RWF_NOWAIT => Some(libc::MSG_DONTWAIT),
        _ => None,
    }
}
