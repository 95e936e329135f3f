//! Carries out the last close() of a connection. The end of the connection may have to wait for calls that began
//! before, or for bytes that another host has not confirmed. A signal handler that closes the connection while its own
//! thread uses it leaves the close to the service thread.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release, SeqCst};

use rdmasock_core::lock::Guard;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::os::{kernel, privatefd};
use rdmasock_core::stats::Reason;
use rdmasock_core::stream::connection;
use rdmasock_core::stream::connection::{Awaited, SocketIo as _, Task};
use rustix::net;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::data::{rx, tx, view};
use crate::notify::call::Told;
use crate::notify::{ready, table};
use crate::objects::library::Library;
use crate::objects::mailbox::{Command, Remains};
use crate::objects::socket;
use crate::objects::socket::{Control, Farewell, Mode, Move, Socket, Stage, closed};
use crate::sys::errno;

/// The functions that `notify/call`, a layer below, calls when a thread finds the end of a connection.
pub(crate) static TOLD: Told = Told { on_call_back, lose };

/// Releases the connection for `fd`, which the program closes and which the table has no entry for any more. Returns
/// the peer's waiter to wake once the kernel's socket is closed.
pub(crate) fn release(socket: &'static Socket, fd: c_int) -> Farewell {
    // A stream that another process has on a link stays on that link. This process only stops being a holder.
    let is_foreign = socket.tx_mode.load(Acquire) == Mode::Foreign;
    let is_only_number = || {
        let control = socket.control.lock();
        control.is_some_and(|c| c.own.fds.iter().all(|f| *f == fd))
    };
    let may_be_left = socket.may_be_on_link() && !is_foreign && is_only_number();
    if may_be_left && socket.promotion.holders.are_several() {
        // The other processes that hold the socket continue with the kernel's socket.
        crate::process::pass::release(socket, Reason::Inherited);
    }
    let Some(mut control) = socket.control.lock() else {
        orphan(socket);
        return Farewell::NONE;
    };
    control.own.fds.retain(|f| *f != fd);
    if let Some(other) = control.own.fds.first() {
        socket.numbers.fd.store(*other, Release);
        return Farewell::NONE;
    }
    tx::answer_if_asked(socket);
    if hold(socket) {
        return Farewell::NONE;
    }
    end(socket, control)
}

/// Replaces the file behind `fd` by a dead socket, if markers may still come. Runs before the program closes `fd` or
/// puts another file in its place. A call of another thread that begins between the removal from the table and the
/// kernel's close goes to the kernel, where it must not read a marker. The caller then removes the entry from the
/// table, and calls [`on_removed`].
pub(crate) fn hide_markers(socket: &'static Socket, fd: c_int) {
    if socket.rx_mode.load(Acquire) != Mode::Marked {
        return;
    }
    let Some(control) = socket.control.lock() else {
        return;
    };
    if control.own.fds[..] != [fd] || !socket.numbers.is_behind(fd) {
        return;
    }
    let dead = PrivateFd::open(|| {
        let flags = SocketFlags::CLOEXEC;
        let dead = net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        net::shutdown(&dead, net::Shutdown::Read).map(|()| dead)
    });
    if let Ok(dead) = dead
        && move_anchor(socket)
    {
        socket.numbers.hidden.store(fd, Release);
        let numbers = [dead.as_raw_fd(), fd, libc::O_CLOEXEC, 0, 0, 0].map(|number| number as usize);
        // SAFETY: dup3 gets two fds and a flag. The program is about to close `fd` itself, and the TCP socket has a
        // private fd already.
        let _ = unsafe { kernel::call(libc::SYS_dup3, numbers) };
    }
}

/// Forgets the `fd` that [`hide_markers`] has recorded, once the table has no entry for `fd`.
pub(crate) fn on_removed(socket: &'static Socket, fd: c_int) {
    let _ = socket.numbers.hidden.compare_exchange(fd, -1, AcqRel, Acquire);
}

/// Releases the connection for `fd`, which was closed without a hook. The table has no entry for `fd` any more. `fd`
/// may stand for another file already, so it is not used here.
#[cold]
pub(crate) fn lose(socket: &'static Socket, fd: c_int) {
    let errno = errno::get();
    lose_number(socket, fd);
    errno::set(errno);
}

fn lose_number(socket: &'static Socket, fd: c_int) {
    let Some(mut control) = socket.control.lock() else {
        return orphan(socket);
    };
    control.own.fds.retain(|f| *f != fd);
    let mut others = control.own.fds.iter();
    let other = others.find(|f| table::still(**f, socket) && socket.numbers.is_behind(**f));
    if let Some(other) = other {
        socket.numbers.fd.store(*other, Release);
        return;
    }
    control.own.fds.clear();
    tracing::info!(target: "rdmasock", slot = socket.slot, fd, "closed past the library");
    socket.numbers.fd.store(-1, Release);
    socket.promotion.set_stage(Stage::Pinned);
    match calls_inside(socket, closed::LOST) {
        Inside::Nobody => end(socket, control).tell(),
        Inside::Interrupted => orphan(socket),
        Inside::Kernel | Inside::Ours => {
            drop(control);
            // The woken calls find that their connection is lost.
            ready::notify_local(socket);
        }
    }
}

/// Keeps the connection for calls that began before its last fd was closed. Returns true if there are such calls: as in
/// the kernel, the connection lives until they return. Also returns true if the caller is a signal handler that has
/// interrupted a use of the object: the service thread carries the close out later. The caller holds the control lock.
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
    socket.promotion.set_stage(Stage::Pinned);
    if inside == Inside::Kernel && socket.is_plain() && !socket.is_watched() {
        // All these calls are in the kernel's receive or send, where the kernel keeps the TCP socket for them. So the
        // library needs no fd for it.
        socket.numbers.fd.store(-1, Release);
        return true;
    }
    if move_anchor(socket) {
        return true;
    }
    // Without an fd for the TCP socket these calls fail when they wake.
    socket.numbers.closed.publish(closed::LOST);
    socket.numbers.fd.store(-1, Release);
    ready::notify_local(socket);
    true
}

/// Where the calls on a connection are that have not returned.
#[derive(Clone, Copy, PartialEq)]
enum Inside {
    Nobody,
    /// The caller is a signal handler that has interrupted this thread in a use of the object, so the answer is not
    /// known.
    Interrupted,
    /// All such calls are in the kernel's receive or send.
    Kernel,
    /// At least one such call is in a wait of the library.
    Ours,
}

/// Finds out where the calls are that began before the close and have not returned. First publishes `what`, a value of
/// [`closed`], so that each of these calls sees it when it returns. If there is no such call, sets the word back to
/// `closed::OPEN`, since no call has to see it, and the caller ends the connection at once. If the result is
/// `Inside::Interrupted`, nothing was published.
fn calls_inside(socket: &'static Socket, what: u8) -> Inside {
    let sleeps = socket.wakes.interest.lock().map(|i| !i.sleepers.is_empty());
    let (Some(sleeps), Some(rx), Some(tx)) = (sleeps, socket.rx.lock(), socket.tx.lock()) else {
        return Inside::Interrupted;
    };
    socket.numbers.closed.publish(what);
    if sleeps || rx.own.waiting > 0 || tx.own.waiting > 0 {
        Inside::Ours
    } else if socket.is_inside() {
        Inside::Kernel
    } else {
        socket.numbers.closed.publish(closed::OPEN);
        Inside::Nobody
    }
}

/// Moves the TCP socket to a private fd, if it has none yet. Returns false if no fd is left for that.
fn move_anchor(socket: &'static Socket) -> bool {
    if privatefd::is_private(socket.numbers.fd.load(Acquire)) {
        return true;
    }
    let Some(Ok(copy)) = socket.numbers.anchor_fd().map(PrivateFd::duplicate_closing) else {
        return false;
    };
    ready::forget(socket);
    socket.numbers.fd.store(copy.release(), Release);
    if socket.is_watched()
        && let Some(fd) = socket.numbers.anchor_fd()
    {
        // The service thread's epoll set has to watch the new fd.
        ready::watch(socket, fd);
    }
    true
}

/// Handles the return of a call that began before the connection was closed. The last such call ends the connection.
#[cold]
fn on_call_back(socket: &'static Socket) {
    let errno = errno::get();
    if let Some(control) = socket.control.lock() {
        let what = socket.numbers.closed.look();
        match (what != closed::OPEN).then(|| calls_inside(socket, what)) {
            Some(Inside::Nobody) => end(socket, control).tell(),
            Some(Inside::Interrupted) => orphan(socket),
            Some(Inside::Kernel | Inside::Ours) | None => {}
        }
    } else {
        orphan(socket);
    }
    errno::set(errno);
}

/// Leaves the close to the service thread, because the caller is a signal handler that has interrupted this thread in a
/// use of the object. Until the close the connection has a private fd for its TCP socket.
#[cold]
fn orphan(socket: &'static Socket) {
    let fd = socket.numbers.fd.load(Acquire);
    if fd >= 0
        && !table::still(fd, socket)
        && socket.numbers.is_behind(fd)
        // SAFETY: the program is about to close `fd`, so `fd` is open, and it still stands for the socket.
        && let Ok(copy) = PrivateFd::duplicate_closing(unsafe { BorrowedFd::borrow_raw(fd) })
    {
        socket.numbers.fd.store(copy.release(), Release);
    }
    socket.numbers.orphaned.store(true, SeqCst);
    ORPHANS.store(true, SeqCst);
    Library::get().waiters.ring(crate::objects::waiters::SERVICE);
}

static ORPHANS: AtomicBool = AtomicBool::new(false);

/// Carries out the closes that signal handlers have left to the service thread. Only the service thread calls this.
pub(crate) fn end_orphans() {
    if !ORPHANS.swap(false, SeqCst) {
        return;
    }
    for socket in socket::all().filter(|s| s.numbers.orphaned.swap(false, SeqCst)) {
        let Some(mut control) = socket.control.lock() else {
            continue;
        };
        control.own.fds.retain(|fd| table::still(*fd, socket));
        let anchor = socket.numbers.fd.load(Acquire);
        if let Some(other) = control.own.fds.first() {
            socket.numbers.fd.store(*other, Release);
            drop(PrivateFd::adopt(anchor));
            continue;
        }
        let is_held = match socket.numbers.closed.look() {
            closed::OPEN => hold(socket),
            what => calls_inside(socket, what) != Inside::Nobody,
        };
        if !is_held {
            end(socket, control).tell();
        }
    }
}

/// Ends a connection that has no fd of the program's any more, and that no call uses. Returns the peer's waiter to wake
/// once the kernel's socket is closed. If the TCP socket has a private fd, it is closed here.
fn end(socket: &'static Socket, mut control: Guard<'static, Control>) -> Farewell {
    let anchor = socket.numbers.fd.load(Acquire);
    let last = socket.promotion.holders.let_go(socket.is_plain());
    if socket.tx_mode.load(Acquire) == Mode::Foreign {
        socket.tx_mode.go(Move::Reclaimed);
        socket.rx_mode.go(Move::Reclaimed);
    }
    if socket.is_plain() && !socket.is_watched() {
        socket.numbers.fd.store(-1, Release);
        drop(control);
        drop(PrivateFd::adopt(anchor));
        forget(socket);
        return Farewell::NONE;
    }
    // A close with unread data resets the connection (RFC 9293, 3.10.4; RFC 2525, 2.17). If the fd was closed without a
    // hook, it may stand for another file already, so it cannot be used for a reset.
    let is_lost = anchor < 0 || !socket.numbers.is_behind(anchor);
    if is_lost && last && connection::return_unread(socket, &control) {
        // The stream ends without an end mark, because the peer must not take this for an orderly end.
        let_go_of(socket, &mut control);
        drop(control);
        forget(socket);
        return Farewell::NONE;
    }
    let is_unread = rx::has_unread(socket) && !is_lost;
    let resets = last && (is_unread || refuses_what_came(socket));
    // If the program has asked for a reset, no end of the stream may precede it: the peer would take that for an
    // orderly end.
    if last && !resets && !is_hard(socket) && stay_behind(socket, &mut control) {
        drop(control);
        forget_interest(socket);
        // From here on the service thread may end the connection, and reuse the object for another connection.
        socket.numbers.left_behind.store(true, Release);
        socket.later(Task::Settle);
        return Farewell::NONE;
    }
    if resets && let Some(anchor) = socket.numbers.anchor_fd() {
        let _ = rustix::net::sockopt::set_socket_linger(anchor, Some(std::time::Duration::ZERO));
    }
    let awaited = if last && socket.rx_mode.load(Acquire) == Mode::Marked {
        connection::scan_left(socket, &mut control)
    } else {
        None
    };
    let (unsent, farewell) = connection::close_tx(socket);
    if last {
        linger(socket, awaited, unsent);
    }
    let_go_of(socket, &mut control);
    drop(control);
    // A connection that was kept for calls has a private fd.
    drop(PrivateFd::adopt(anchor));
    forget(socket);
    farewell
}

/// Returns whether the program has asked for a reset in place of an orderly end (SO_LINGER with time 0).
pub(crate) fn is_hard(socket: &Socket) -> bool {
    let linger = |anchor| rustix::net::sockopt::socket_linger(anchor) == Ok(Some(std::time::Duration::ZERO));
    socket.numbers.anchor_fd().is_some_and(linger)
}

/// Leaves the rest of a close to the service thread, if TCP has not taken the bytes `unsent`, or if markers are
/// `awaited`. The caller holds the control lock.
fn linger(socket: &'static Socket, awaited: Option<Awaited>, unsent: Vec<u8>) {
    let Some(anchor) = socket.numbers.anchor_fd() else {
        return;
    };
    // If the program has asked for a reset, nothing is sent before it.
    if is_hard(socket) || (awaited.is_none() && unsent.is_empty()) {
        return;
    }
    if let Ok(copy) = rdmasock_core::os::privatefd::PrivateFd::duplicate_closing(anchor) {
        let remains = Remains::new(copy, awaited, unsent);
        if remains.unsent.is_empty() && !remains.ends_last() {
            let _ = rustix::net::shutdown(&remains.fd, rustix::net::Shutdown::Write);
        }
        Library::get().service.submit(Command::Linger(remains));
    }
}

/// Closes the stream, and resets both directions of the object.
fn let_go_of(socket: &'static Socket, control: &mut Control) {
    control.handshake = None;
    connection::close_stream(socket, control);
    ready::forget(socket);
    {
        let rx = socket.rx.lock();
        let tx = socket.tx.lock();
        socket.numbers.fd.store(-1, Release);
        socket.rx_mode.go(Move::Closed);
        socket.tx_mode.go(Move::Closed);
        socket.wakes.watched.publish(false);
        drop(tx);
        if let Some(mut rx) = rx {
            *rx = crate::objects::socket::Rx::default();
        }
    }
}

/// Keeps a stream between hosts whose last fd is closed, and its TCP socket, until the peer has received all bytes
/// (P77). Returns false if there is nothing to wait for, or no fd is left for the TCP socket.
fn stay_behind(socket: &'static Socket, control: &mut Control) -> bool {
    if !connection::stay::is_staying(control) || !move_anchor(socket) {
        return false;
    }
    connection::stay::close(socket, control);
    true
}

/// Ends a stream that `stay_behind` has kept, if the peer has received all bytes. Returns whether the stream has ended.
pub(crate) fn finish(socket: &'static Socket) -> bool {
    {
        let Some(mut control) = socket.control.lock() else {
            return false;
        };
        let unsent = socket.tx.lock().is_none_or(|tx| !tx.marker.is_empty());
        if connection::stay::is_staying(&control) || control.handshake.is_some() || unsent {
            return false;
        }
        socket.numbers.left_behind.store(false, Release);
        let anchor = socket.numbers.fd.load(Acquire);
        let_go_of(socket, &mut control);
        drop(PrivateFd::adopt(anchor));
    }
    forget(socket);
    true
}

/// Makes the kernel reset the connection at the end of the process, if bytes on the link are unread; the kernel does
/// not know of those bytes. Returns whether the connection ends by a reset. If so, the caller must not end the stream
/// before.
pub(crate) fn resets_at_exit(socket: &'static Socket) -> bool {
    if rx::has_unread(socket)
        && let Some(anchor) = socket.numbers.anchor_fd()
    {
        let _ = rustix::net::sockopt::set_socket_linger(anchor, Some(std::time::Duration::ZERO));
    }
    is_hard(socket)
}

/// Marks the ring that this end receives in as closed, so that the peer sees that no call will read it any more.
/// Returns whether it has unread data, which the peer has put in before. In that case the kernel's reset wakes the
/// peer's program. It is not woken earlier, because it would find the connection still open.
fn refuses_what_came(socket: &'static Socket) -> bool {
    // If the direction is back on TCP, the ring is not marked: another process, which has received the socket by
    // SCM_RIGHTS, may still read the connection.
    if socket.rx_mode.load(Acquire) == Mode::Tcp {
        return false;
    }
    let wake = connection::refuse(socket);
    if socket.numbers.anchor_fd().is_none() {
        // The socket was closed without a hook, so no reset will notify the peer.
        ready::notify_peer(socket, wake);
    }
    rx::has_unread(socket)
}

/// Removes the socket from all epoll sets, and wakes all threads that sleep for it.
fn forget_interest(socket: &'static Socket) {
    let interest = {
        let Some(mut interest) = socket.wakes.interest.lock() else {
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
    view::end(socket);
    if let Some(listener) = socket.promotion.take_listener() {
        listener.release();
    }
    socket.recycle(Library::current().map(|library| library.stats));
}

#[cfg(test)]
mod tests;
