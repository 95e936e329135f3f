//! What is left of a send of which a link has taken the beginning, once the direction is on TCP again. The call goes on
//! there: kernel TCP does not return from a send that may wait with less than all because the peer uses its end for
//! something else, and few programs look.

use std::ffi::c_int;

use libc::ssize_t;
use rdmasock_core::stream::connection::{SocketIo as _, Tcp as _};

use crate::notify::reset;
use crate::objects::socket::Socket;
use crate::sys::errno;
use crate::sys::iov::Iov;
use crate::sys::real::{self, Cancellable};

/// Whether there is somebody for it: where the peer has ended, or the connection is over, kernel TCP returns with what
/// it has taken too, and what comes of the rest is for the program's next call.
pub fn is_taken(socket: &'static Socket) -> bool {
    let Some(_control) = socket.control.lock() else {
        return false;
    };
    let tcp = socket.tcp();
    !socket.wakes.is_dead() && !socket.has_untold() && tcp.is_some_and(|tcp| !tcp.has_failed() && !tcp.has_peer_ended())
}

/// Gives what is left to the kernel, by `fd`: how many bytes it has taken, 0 where it takes none. What has been sent is
/// what the program is told then, so that nothing of an error may be lost but its number.
pub fn send(socket: &'static Socket, fd: c_int, iov: &mut Iov, flags: c_int) -> ssize_t {
    // A send of which something was taken raises no signal.
    let flags = flags | libc::MSG_NOSIGNAL;
    let before = errno::get();
    let mut taken = 0;
    while iov.len() > 0 {
        let (piece, len) = iov.head();
        let more = if len < iov.len() { libc::MSG_MORE } else { 0 };
        // SAFETY: a piece of the program's, in the middle of its call.
        let n = unsafe { real::send().cancellable()(fd, piece.cast(), len, flags | more) };
        if n < 0 {
            // A send takes the error from the socket.
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
