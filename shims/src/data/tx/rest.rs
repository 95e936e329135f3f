//! The rest of a send whose beginning went over a link, once the direction is on TCP again. The call goes on there. A
//! blocking send of kernel TCP does not return short when the peer's program puts its socket to another use. Few
//! programs check for a short return.

use std::ffi::c_int;

use libc::ssize_t;
use rdmasock_core::stream::connection::{SocketIo as _, Tcp as _};

use crate::notify::reset;
use crate::objects::socket::Socket;
use crate::sys::errno;
use crate::sys::iov::Iov;
use crate::sys::real::{self, Cancellable};

/// Returns whether the peer can still take the rest. If the peer has ended its direction, or the connection is over,
/// kernel TCP too returns with what it has taken. The program's next call then gets the error.
pub fn is_taken(socket: &'static Socket) -> bool {
    let Some(_control) = socket.control.lock() else {
        return false;
    };
    let tcp = socket.tcp();
    !socket.wakes.is_dead() && !socket.has_untold() && tcp.is_some_and(|tcp| !tcp.has_failed() && !tcp.has_peer_ended())
}

/// Gives the rest to the kernel by `fd`. Returns how many bytes TCP has taken, 0 if none. The program gets the count of
/// bytes sent, not an error. An error that ends the connection is kept for the next call; of any other error only the
/// errno is lost.
pub fn send(socket: &'static Socket, fd: c_int, iov: &mut Iov, flags: c_int) -> ssize_t {
    // A send that has taken bytes raises no SIGPIPE.
    let flags = flags | libc::MSG_NOSIGNAL;
    let before = errno::get();
    let mut taken = 0;
    while iov.len() > 0 {
        let (piece, len) = iov.head();
        let more = if len < iov.len() { libc::MSG_MORE } else { 0 };
        // SAFETY: a piece of the program's memory, readable during the program's call.
        let n = unsafe { real::send().cancellable()(fd, piece.cast(), len, flags | more) };
        if n < 0 {
            // The failed send has taken the error from the socket.
            reset::keep(socket, errno::get());
            break;
        }
        iov.advance(n.cast_unsigned());
        taken += n;
        if n.cast_unsigned() < len {
            break;
        }
    }
    errno::set(before);
    taken
}
