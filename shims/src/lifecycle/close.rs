//! The last close() of a connection, and what keeps it in being for a while: calls that began before, bytes that the
//! other host may not have, a signal handler that has interrupted a use of the object.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release, SeqCst},
};

use rdmasock_core::lock::Guard;
use rdmasock_core::os::privatefd::{self, PrivateFd};
use rdmasock_core::stats::Reason;

use crate::call::Call;
use crate::errno;
use crate::fork;
use crate::library::Library;
use crate::promote::{self, Farewell};
use crate::ready;
use crate::rx;
use crate::service::Command;
use crate::socket::{self, Control, Mode, Receiving, Sending, Socket, Stage, closed};
use crate::table;
use crate::time;

/// The program closes `fd`, which is not in the table any more. Gives who is to be told when it is closed.
pub(super) fn release(socket: &'static Socket, fd: c_int) -> Farewell {
    // What another process has on a link stays there: this one only lets go.
    let is_foreign = socket.tx_mode.load(Acquire) == Mode::Foreign;
    let is_shared = fork::is_shared(socket) && !is_foreign && is_only_number(socket, fd);
    if is_shared && socket.may_be_on_link() {
        // The other holders go on with the kernel's socket.
        crate::pass::release(socket, Reason::Inherited);
    }
    let Some(mut control) = socket.control.lock() else {
        orphan(socket);
        return Farewell::NONE;
    };
    control.fds.retain(|f| *f != fd);
    if let Some(other) = control.fds.first() {
        socket.fd.store(*other, Release);
        return Farewell::NONE;
    }
    crate::tx::answer_if_asked(socket);
    if hold(socket) {
        return Farewell::NONE;
    }
    end(socket, control)
}

/// `fd` was closed where no hook saw it, and may stand for another file already. It is not in the table any more, and
/// is not touched.
#[cold]
pub(super) fn lose(socket: &'static Socket, fd: c_int) {
    let errno = errno::get();
    lose_number(socket, fd);
    errno::set(errno);
}

fn lose_number(socket: &'static Socket, fd: c_int) {
    let Some(mut control) = socket.control.lock() else {
        return orphan(socket);
    };
    control.fds.retain(|f| *f != fd);
    let mut others = control.fds.iter();
    let other = others.find(|f| table::still(**f, socket) && is_behind(socket, **f));
    if let Some(other) = other {
        socket.fd.store(*other, Release);
        return;
    }
    control.fds.clear();
    tracing::info!(target: "rdmasock", slot = socket.slot, fd, "closed past the library");
    socket.fd.store(-1, Release);
    socket.set_stage(Stage::Pinned);
    match calls_inside(socket, closed::LOST) {
        Inside::Nobody => end(socket, control).tell(),
        Inside::Interrupted => orphan(socket),
        Inside::Kernel | Inside::Ours => {
            drop(control);
            // They find that it is not theirs any more.
            ready::notify_local(socket);
        }
    }
}

/// A call has found that `fd` does not stand for `socket`, or not any more.
#[cold]
pub fn look_again(socket: &'static Socket, fd: c_int) {
    if table::still(fd, socket) && !is_behind(socket, fd) {
        table::remove(fd, socket);
        lose(socket, fd);
    }
}

/// The connection behind `fd`, for a call that holds none of its locks; not one whose number was closed past the hooks.
pub fn connection(fd: c_int) -> Option<&'static Socket> {
    table::socket(fd).and_then(|_| connection_at(fd, time::tick()))
}

/// The same, at a [tick](time::tick) that has just been read.
#[inline]
pub fn connection_at(fd: c_int, tick: u64) -> Option<&'static Socket> {
    let socket = table::socket(fd)?;
    if !is_seen(socket, fd, tick) {
        look_again(socket, fd);
        return table::socket(fd);
    }
    Some(socket)
}

/// Whether some number still stands for the connection, by a look that is not too old.
#[inline]
pub fn is_alive(socket: &Socket) -> bool {
    is_seen(socket, socket.fd.load(Acquire), time::tick())
}

/// The anchor's number was found to stand for something else.
pub fn look_at_anchor(socket: &'static Socket) {
    look_again(socket, socket.fd.load(Acquire));
}

#[inline]
fn is_seen(socket: &Socket, fd: c_int, tick: u64) -> bool {
    let is_it = !socket.seen.is_due_at(fd, tick) || is_behind(socket, fd);
    if !is_it {
        socket.seen.forget();
    }
    is_it
}

/// Whether the number stands for the connection, by the kernel's word.
pub fn is_behind(socket: &Socket, fd: c_int) -> bool {
    // SAFETY: only asked what it stands for, whether it is open or not.
    fd >= 0
        && socket
            .cookie
            .is_behind(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Calls `f` with a number of the connection, for the kernel's own call. For one that has waited already that is not the
/// program's number, which may be closed and another's before the kernel looks it up. `None`: there is no anchor.
// Not inlined: the forced unwind of pthread_cancel runs the copy's destructor here (see `calls`).
#[inline(never)]
pub fn on_its_file<R>(call: &Call, f: impl FnOnce(c_int) -> R) -> Option<R> {
    if !call.is_held() {
        return Some(f(call.fd));
    }
    let copy = {
        let _keeps_close_out = call.socket.control.lock();
        call.socket.anchor_fd().map(PrivateFd::duplicate)
    };
    match copy {
        Some(Ok(copy)) => Some(f(copy.as_raw_fd())),
        // No number left: the program's own, if it still is that.
        Some(Err(_)) => call.is_named().then(|| f(call.fd)),
        None => None,
    }
}

/// The last number is closed. True if calls that began before are not back: as in the kernel, the connection lives on
/// until they are. The caller holds the control lock.
fn hold(socket: &'static Socket) -> bool {
    let inside = calls_inside(socket, closed::HELD);
    match inside {
        Inside::Nobody => return false,
        Inside::Interrupted => {
            orphan(socket);
            return true;
        }
        Inside::Kernel | Inside::Ours => {}
    }
    socket.set_stage(Stage::Pinned);
    if inside == Inside::Kernel && socket.is_plain() && !ready::is_watched(socket) {
        // The kernel holds the file itself.
        socket.fd.store(-1, Release);
        return true;
    }
    if move_anchor(socket) {
        return true;
    }
    // There is no number left for it: they fail.
    socket.closed.store(closed::LOST, SeqCst);
    socket.fd.store(-1, Release);
    ready::notify_local(socket);
    true
}

/// Where the calls are that are not back.
#[derive(Clone, Copy, PartialEq)]
enum Inside {
    Nobody,
    /// This very thread is in the middle of a use of the object, which a signal handler has interrupted.
    Interrupted,
    /// In the kernel's receive or send.
    Kernel,
    /// In a wait of ours, some of them.
    Ours,
}

/// Says what has become of the numbers, and finds calls that began before: each of them sees that then when it is back.
/// If there are none the object is as before.
fn calls_inside(socket: &'static Socket, what: u8) -> Inside {
    let sleeps = socket.interest.lock().map(|i| !i.sleepers.is_empty());
    let (Some(sleeps), Some(rx), Some(tx)) = (sleeps, socket.rx.lock(), socket.tx.lock()) else {
        return Inside::Interrupted;
    };
    socket.closed.store(what, SeqCst);
    if sleeps || rx.waiting > 0 || tx.waiting > 0 {
        Inside::Ours
    } else if socket.is_inside() {
        Inside::Kernel
    } else {
        socket.closed.store(closed::OPEN, SeqCst);
        Inside::Nobody
    }
}

/// The anchor gets a number that the program does not know of, if it has none yet.
fn move_anchor(socket: &'static Socket) -> bool {
    if privatefd::is_private(socket.fd.load(Acquire)) {
        return true;
    }
    let Some(Ok(copy)) = socket.anchor_fd().map(PrivateFd::duplicate_closing) else {
        return false;
    };
    let service = &Library::get().service;
    service.forget_anchor(socket);
    socket.fd.store(copy.release(), Release);
    if ready::is_watched(socket) {
        service.watch_again(socket);
    }
    true
}

/// A call that began before the connection was closed is back. With the last one it ends.
#[cold]
pub fn on_call_back(socket: &'static Socket) {
    let errno = errno::get();
    let Some(control) = socket.control.lock() else {
        return orphan(socket);
    };
    let what = socket.closed.load(SeqCst);
    if what == closed::OPEN {
        return;
    }
    match calls_inside(socket, what) {
        Inside::Nobody => end(socket, control).tell(),
        Inside::Interrupted => orphan(socket),
        Inside::Kernel | Inside::Ours => {}
    }
    errno::set(errno);
}

/// A signal handler has interrupted this thread in the middle of a use of the object: the service thread does what is to
/// be done. Until then the connection has an anchor of its own.
#[cold]
fn orphan(socket: &'static Socket) {
    let fd = socket.fd.load(Acquire);
    if fd >= 0
        && !table::still(fd, socket)
        && is_behind(socket, fd)
        // SAFETY: the caller is about to close the number, and it still stands for the socket.
        && let Ok(copy) = PrivateFd::duplicate_closing(unsafe { BorrowedFd::borrow_raw(fd) })
    {
        socket.fd.store(copy.release(), Release);
    }
    socket.orphaned.store(true, SeqCst);
    ORPHANS.store(true, SeqCst);
    Library::get().waiters.ring(crate::wait::SERVICE);
}

static ORPHANS: AtomicBool = AtomicBool::new(false);

/// Ends what signal handlers could not. On the service thread.
pub fn end_orphans() {
    if !ORPHANS.swap(false, SeqCst) {
        return;
    }
    for socket in socket::all().filter(|s| s.orphaned.swap(false, SeqCst)) {
        let Some(mut control) = socket.control.lock() else {
            continue;
        };
        control.fds.retain(|fd| table::still(*fd, socket));
        let anchor = socket.fd.load(Acquire);
        if let Some(other) = control.fds.first() {
            socket.fd.store(*other, Release);
            drop(PrivateFd::adopt(anchor));
            continue;
        }
        let is_held = match socket.closed.load(SeqCst) {
            closed::OPEN => hold(socket),
            what => calls_inside(socket, what) != Inside::Nobody,
        };
        if !is_held {
            end(socket, control).tell();
        }
    }
}

/// No number stands for the connection any more, and no call is inside. Gives who is to be told when the kernel's socket is closed;
/// one of ours is by then.
fn end(socket: &'static Socket, mut control: Guard<'static, Control>) -> Farewell {
    let anchor = socket.fd.load(Acquire);
    let last = fork::let_go(socket);
    let foreign = socket.tx_mode.load(Acquire) == Mode::Foreign;
    if foreign {
        socket.tx_mode.go(Sending::Reclaimed);
        socket.rx_mode.go(Receiving::Reclaimed);
    }
    if socket.is_plain() && !ready::is_watched(socket) {
        socket.fd.store(-1, Release);
        drop(control);
        drop(PrivateFd::adopt(anchor));
        forget(socket);
        return Farewell::NONE;
    }
    if !last {
        fork::returned(socket);
    }
    // A close with unread data resets the connection (RFC 9293, 3.10.4; RFC 2525, 2.17).
    // A number that was closed where no hook saw it, and is closed now as the next file's, leads to no kernel's socket either.
    let is_lost = anchor < 0 || !is_behind(socket, anchor);
    if is_lost && last && promote::return_unread(socket, &control) {
        // No end mark: to the peer it is no orderly end.
        let_go_of(socket, &mut control);
        drop(control);
        forget(socket);
        return Farewell::NONE;
    }
    let is_unread = rx::has_unread(socket) && !is_lost;
    let resets = last && (is_unread || refuses_what_came(socket));
    if last && !resets && stay_behind(socket, &mut control) {
        drop(control);
        forget_interest(socket);
        // From here on it can come to its end, and be another connection.
        socket.left_behind.store(true, Release);
        Library::get().service.submit(Command::settle(socket));
        return Farewell::NONE;
    }
    if resets && let Some(anchor) = socket.anchor_fd() {
        let _ = rustix::net::sockopt::set_socket_linger(anchor, Some(std::time::Duration::ZERO));
    }
    let awaited = if last && socket.rx_mode.load(Acquire) == Mode::Marked {
        promote::scan_left(socket, &mut control)
    } else {
        None
    };
    let (unsent, farewell) = promote::close_tx(socket);
    if last {
        promote::linger(socket, awaited, unsent);
    }
    let_go_of(socket, &mut control);
    drop(control);
    // A connection that was held for calls has one of ours.
    drop(PrivateFd::adopt(anchor));
    forget(socket);
    farewell
}

/// The stream's numbers are given back, and the object is as new.
fn let_go_of(socket: &'static Socket, control: &mut Control) {
    control.handshake = None;
    promote::close_stream(socket, control);
    Library::get().service.forget_anchor(socket);
    {
        let rx = socket.rx.lock();
        let tx = socket.tx.lock();
        socket.fd.store(-1, Release);
        socket.rx_mode.go(Receiving::Closed);
        socket.tx_mode.go(Sending::Closed);
        socket.watched.store(false, SeqCst);
        drop(tx);
        if let Some(mut rx) = rx {
            *rx = crate::socket::Rx::default();
        }
    }
}

/// The last number of a stream between hosts is closed, and the peer may not have all of it: the anchor and
/// the stream live on until it has (P77). False if that is not so, or there is no number left.
fn stay_behind(socket: &'static Socket, control: &mut Control) -> bool {
    if !promote::resume::is_staying(control) || !move_anchor(socket) {
        return false;
    }
    promote::resume::close(socket, control);
    true
}

/// A stream that was left behind may have come to its end. True if it has.
pub fn finish(socket: &'static Socket) -> bool {
    {
        let Some(mut control) = socket.control.lock() else {
            return false;
        };
        let unsent = socket.tx.lock().is_none_or(|tx| !tx.marker.is_empty());
        if promote::resume::is_staying(&control) || control.handshake.is_some() || unsent {
            return false;
        }
        socket.left_behind.store(false, Release);
        let anchor = socket.fd.load(Acquire);
        let_go_of(socket, &mut control);
        drop(PrivateFd::adopt(anchor));
    }
    forget(socket);
    true
}

/// The process is about to end, and the kernel closes the socket without knowing of what is unread on the link.
pub fn reset_if_unread(socket: &'static Socket) {
    if rx::has_unread(socket)
        && let Some(anchor) = socket.anchor_fd()
    {
        let _ = rustix::net::sockopt::set_socket_linger(anchor, Some(std::time::Duration::ZERO));
    }
}

/// Nobody reads the link any more. True if something came before the other end could know. (Where
/// something is unread anyway, the reset tells it, and not before it is there: a program that was told
/// by us would find the connection still standing.)
fn refuses_what_came(socket: &'static Socket) -> bool {
    // A direction that is back on TCP may have another holder, who got the socket by SCM_RIGHTS.
    if socket.rx_mode.load(Acquire) == Mode::Tcp {
        return false;
    }
    let wake = promote::refuse(socket);
    if socket.anchor_fd().is_none() {
        // It was closed past the hooks, so no reset of it will tell.
        ready::notify_peer(socket, wake);
    }
    rx::has_unread(socket)
}

fn is_only_number(socket: &'static Socket, fd: c_int) -> bool {
    let control = socket.control.lock();
    control.is_some_and(|c| c.fds.iter().all(|f| *f == fd))
}

/// Nobody waits on the socket any more.
fn forget_interest(socket: &'static Socket) {
    let interest = {
        let Some(mut interest) = socket.interest.lock() else {
            return;
        };
        if interest.members.is_empty() && interest.sleepers.is_empty() {
            return;
        }
        std::mem::take(&mut *interest)
    };
    for m in interest.members {
        m.epoll.forget(m.item, socket);
    }
    for s in interest.sleepers {
        Library::get().waiters.ring(s.waiter);
    }
}

fn forget(socket: &'static Socket) {
    forget_interest(socket);
    if let Some(listener) = socket.take_listener() {
        listener.release();
    }
    socket.recycle(Library::current().map(|library| library.stats));
}

#[cfg(test)]
mod tests;
