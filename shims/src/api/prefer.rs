//! A program says on what a connection is to run: `rdmasock_prefer`.

use std::ffi::c_int;
use std::sync::atomic::Ordering::Relaxed;

use rdmasock_core::stats::Reason;
use rdmasock_core::stream::handshake::Role;

use super::is_tcp;
use crate::data::tx;
use crate::notify::closing;
use crate::notify::reclaim::reclaim;
use crate::notify::table::Entry;
use crate::notify::threshold;
use crate::objects::listener::Listener;
use crate::objects::socket::{Socket, Stage, tuple_of};
use crate::signals::jump::within;
use crate::startup::lifecycle;
use crate::sys::errno;

/// `RDMASOCK_TCP`.
const TCP: c_int = 0;
/// `RDMASOCK_LINK`.
const LINK: c_int = 3;

/// `rdmasock_prefer`.
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
        // What is asked for is kept with the connection that the socket will be.
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
            // Its calls are the kernel's alone.
            if stays { Ok(()) } else { Err(libc::EOPNOTSUPP) }
        }
    }
}

/// For good.
fn stay(socket: &'static Socket) {
    reclaim(socket);
    if matches!(socket.promotion.stage(), Stage::Pinned | Stage::Plain) {
        return;
    }
    // An attempt that has not begun finds this when it does.
    tx::take_back(socket, Reason::Asked);
    if !socket.may_be_on_link() {
        threshold::stay(socket, Reason::Asked.into());
    }
}

/// Without waiting for the threshold.
fn hurry(socket: &'static Socket) -> Result<(), c_int> {
    match socket.promotion.stage() {
        Stage::Busy => return Ok(()),
        Stage::Pinned | Stage::Plain => return Err(libc::EOPNOTSUPP),
        Stage::New | Stage::Watching => {}
    }
    if socket.promotion.role() == Role::Acceptor {
        // Who has connected asks; this end is to be there to answer.
        threshold::worth_it(socket);
        return Ok(());
    }
    socket.promotion.progress.hurry();
    // One that is not connected yet asks with its first bytes.
    if socket.promotion.stage() == Stage::Watching && tuple_of(socket).is_some() {
        threshold::worth_it(socket);
    }
    Ok(())
}

/// What is accepted from now on stays on TCP, or not: there is nothing to be hurried, for who has connected asks.
fn of_accepted(listener: &Listener, stays: bool) {
    listener.keeps_on_tcp.store(stays, Relaxed);
}
