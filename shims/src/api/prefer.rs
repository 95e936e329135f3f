//! `rdmasock_prefer`: a program says what a connection is to run on.

use std::ffi::c_int;
use std::sync::atomic::Ordering::Relaxed;

use rdmasock_core::stats::Reason;
use rdmasock_core::stream::handshake::Role;

use super::is_tcp;
use crate::data::tx;
use crate::notify::reclaim::reclaim;
use crate::notify::table::Entry;
use crate::notify::{closing, threshold};
use crate::objects::listener::Listener;
use crate::objects::socket::{Socket, Stage, tuple_of};
use crate::signals::jump::within;
use crate::startup::lifecycle;
use crate::sys::errno;

/// The value of `RDMASOCK_TCP`.
const TCP: c_int = 0;
/// The value of `RDMASOCK_LINK`.
const LINK: c_int = 3;

/// Implements `rdmasock_prefer`: makes the connection `fd` prefer `way`. Returns 0, or -1 with errno.
pub unsafe extern "C" fn prefer(fd: c_int, way: c_int) -> c_int {
    let before = errno::get();
    match within(|| on(fd, way)) {
        Ok(()) => {
            errno::set(before);
            0
        }
        Err(error) => errno::fail(error),
    }
}

fn on(fd: c_int, way: c_int) -> Result<(), c_int> {
    let stays = match way {
        TCP => true,
        LINK => false,
        _ => return is_tcp(fd).and(Err(libc::EINVAL)),
    };
    let entry = match closing::connection(fd) {
        Some(socket) => Entry::Socket(socket),
        // The socket gets its object now, which keeps the preference for its connection.
        None => lifecycle::on_epoll_add(fd),
    };
    match entry {
        Entry::Socket(socket) if stays => {
            stay(socket);
            Ok(())
        }
        Entry::Socket(socket) => hurry(socket),
        Entry::Listener(listener) => {
            of_accepted(listener, stays);
            Ok(())
        }
        Entry::Epoll(_) => Err(libc::ENOTSOCK),
        Entry::Fresh { .. } | Entry::None => {
            is_tcp(fd)?;
            // The library does not serve this socket: all its calls go to the kernel.
            if stays { Ok(()) } else { Err(libc::EOPNOTSUPP) }
        }
    }
}

/// Keeps the connection on TCP for good, and takes it back there.
fn stay(socket: &'static Socket) {
    reclaim(socket);
    if matches!(socket.promotion.stage(), Stage::Pinned | Stage::Plain) {
        return;
    }
    // An attempt that has not begun finds this reason when it begins.
    tx::take_back(socket, Reason::Asked);
    if !socket.may_be_on_link() {
        threshold::stay(socket, Reason::Asked.into());
    }
}

/// Asks for a link without waiting for the threshold. `Err(EOPNOTSUPP)`: the connection stays on TCP for good.
fn hurry(socket: &'static Socket) -> Result<(), c_int> {
    match socket.promotion.stage() {
        Stage::Busy => return Ok(()),
        Stage::Pinned | Stage::Plain => return Err(libc::EOPNOTSUPP),
        Stage::New | Stage::Watching => {}
    }
    if socket.promotion.role() == Role::Acceptor {
        // The connector asks for the promotion; this end prepares to answer.
        threshold::worth_it(socket);
        return Ok(());
    }
    socket.promotion.progress.hurry();
    // A socket that is not connected yet asks with its first bytes.
    if socket.promotion.stage() == Stage::Watching && tuple_of(socket).is_some() {
        threshold::worth_it(socket);
    }
    Ok(())
}

/// Sets whether connections accepted from now on stay on TCP. This end cannot ask for links, since the connector does.
fn of_accepted(listener: &Listener, stays: bool) {
    listener.keeps_on_tcp.store(stays, Relaxed);
}
