//! Calls the hooks that end a connection, for threads that find its end while they use it.
//! There are two reasons: the fd stands for another file by now, or the thread's call is the last that the close has
//! waited for. The work itself is in `process/close`, in a layer above, which registers its functions here.

use std::ffi::c_int;
use std::sync::atomic::Ordering::Acquire;

use once_cell::race::OnceRef;

use crate::notify::table;
use crate::objects::socket::Socket;
use crate::sys::time;

/// The functions that [`tell`] registers.
pub struct Told {
    /// Called when a call returns that began before the connection was closed.
    pub on_call_back: fn(&'static Socket),
    /// Called when an fd was closed without a hook, and may stand for another file already. The table has no entry for
    /// the fd any more.
    pub lose: fn(&'static Socket, c_int),
}

static TOLD: OnceRef<'static, Told> = OnceRef::new();

/// Registers the functions, once, before there is a connection.
pub fn tell(told: &'static Told) {
    let _ = TOLD.set(told);
}

/// Reports that a call has returned that began before the connection was closed. The last such call ends the
/// connection.
#[cold]
pub fn on_call_back(socket: &'static Socket) {
    if let Some(told) = TOLD.get() {
        (told.on_call_back)(socket);
    }
}

/// Checks an fd that was found not to stand for `socket`. If the table still has the entry and the kernel confirms the
/// mismatch, removes the entry and reports the connection as lost.
#[cold]
pub fn look_again(socket: &'static Socket, fd: c_int) {
    if table::still(fd, socket) && !socket.numbers.is_behind(fd) {
        table::remove(fd, socket);
        if let Some(told) = TOLD.get() {
            (told.lose)(socket, fd);
        }
    }
}

/// Calls [`look_again`] for the TCP socket's own fd.
pub fn look_at_anchor(socket: &'static Socket) {
    look_again(socket, socket.numbers.fd.load(Acquire));
}

/// Returns the connection behind `fd`, for a call that holds none of its locks. `None` also if the fd was closed
/// without a hook.
pub fn connection(fd: c_int) -> Option<&'static Socket> {
    table::socket(fd).and_then(|_| connection_at(fd, time::tick()))
}

/// Does the same as [`connection`], at a [tick](time::tick) that the caller has just read.
#[inline]
pub fn connection_at(fd: c_int, tick: u64) -> Option<&'static Socket> {
    let socket = table::socket(fd)?;
    if !socket.numbers.is_seen(fd, tick) {
        look_again(socket, fd);
        return table::socket(fd);
    }
    Some(socket)
}
