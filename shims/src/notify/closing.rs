//! What those who use a connection have to do with its end: they find that a number stands for something else, or are
//! the last that it has waited for. What an end leads to is in `close`, far above, which is told of it by functions
//! that have been given to this.

use std::ffi::c_int;
use std::sync::atomic::Ordering::Acquire;

use once_cell::race::OnceRef;

use crate::notify::table;
use crate::objects::socket::Socket;
use crate::sys::time;

/// What is told.
pub struct Told {
    /// A call that began before the connection was closed is back.
    pub on_call_back: fn(&'static Socket),
    /// The number was closed where no hook saw it, and may stand for another file already. It is not in the table any
    /// more.
    pub lose: fn(&'static Socket, c_int),
}

static TOLD: OnceRef<'static, Told> = OnceRef::new();

/// From now on this is told. Before there is the first connection.
pub fn tell(told: &'static Told) {
    let _ = TOLD.set(told);
}

/// A call that began before the connection was closed is back. With the last one it ends.
#[cold]
pub fn on_call_back(socket: &'static Socket) {
    if let Some(told) = TOLD.get() {
        (told.on_call_back)(socket);
    }
}

/// A call has found that `fd` does not stand for `socket`, or not any more.
#[cold]
pub fn look_again(socket: &'static Socket, fd: c_int) {
    if table::still(fd, socket) && !socket.numbers.is_behind(fd) {
        table::remove(fd, socket);
        if let Some(told) = TOLD.get() {
            (told.lose)(socket, fd);
        }
    }
}

/// The anchor's number was found to stand for something else.
pub fn look_at_anchor(socket: &'static Socket) {
    look_again(socket, socket.numbers.fd.load(Acquire));
}

/// The connection behind `fd`, for a call that holds none of its locks; not one whose number was closed past the hooks.
pub fn connection(fd: c_int) -> Option<&'static Socket> {
    table::socket(fd).and_then(|_| connection_at(fd, time::tick()))
}

/// The same, at a [tick](time::tick) that has just been read.
#[inline]
pub fn connection_at(fd: c_int, tick: u64) -> Option<&'static Socket> {
    let socket = table::socket(fd)?;
    if !socket.numbers.is_seen(fd, tick) {
        look_again(socket, fd);
        return table::socket(fd);
    }
    Some(socket)
}
