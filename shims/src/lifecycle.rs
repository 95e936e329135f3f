//! From socket() to the last close(): which numbers stand for which objects.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use rdmasock_core::os::privatefd::{self, PrivateFd};
use rdmasock_core::stats::{Direction, Reason};

use crate::epoll::Epoll;
use crate::errno;
use crate::fork;
use crate::library::Library;
use crate::listener::Listener;
use crate::promote;
use crate::ready;
use crate::rx;
use crate::service::Command;
use crate::socket::{Control, Socket, Stage, mode};
use crate::sockopt;
use crate::table::{self, Entry};

/// socket() gave a TCP socket.
pub fn on_socket(fd: c_int, nonblocking: bool) {
    if Library::ensure().is_some() {
        drop_entry(table::insert(fd, Entry::Fresh { nonblocking }), fd);
    }
}

/// Whether a number that the library has not seen being made is a TCP socket.
pub fn is_tcp(fd: c_int) -> bool {
    if fd < 0 {
        return false;
    }
    // SAFETY: the program's number, in the middle of its call, and not -1.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let option = |name| sockopt::get(fd, (libc::SOL_SOCKET, name));
    let errno = errno::get();
    let tcp = option(libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
        && matches!(
            option(libc::SO_DOMAIN),
            Some(libc::AF_INET | libc::AF_INET6)
        );
    errno::set(errno);
    tcp
}

fn is_nonblocking(fd: c_int) -> bool {
    // SAFETY: the program's own fd, in the middle of its call.
    let flags = rustix::fs::fcntl_getfl(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) });
    flags.is_ok_and(|f| f.contains(rustix::fs::OFlags::NONBLOCK))
}

/// listen() has succeeded.
pub fn on_listen(fd: c_int) {
    let known = match table::lookup(fd) {
        Entry::Listener(_) => return,
        Entry::Fresh { .. } => true,
        _ => false,
    };
    let errno = errno::get();
    if Library::ensure().is_some() && (known || is_tcp(fd)) {
        drop_entry(table::insert(fd, Entry::Listener(Listener::new(fd))), fd);
    }
    errno::set(errno);
}

/// accept() has given `fd`.
pub fn on_accept(listener: &'static Listener, fd: c_int, nonblocking: bool) {
    if let Some(socket) = begin(fd, nonblocking, Direction::Accept) {
        socket.role.store(1, Relaxed);
        // Its peer asks by the name, also after the program has closed the listening socket.
        listener.retain();
        socket
            .listener
            .store(std::ptr::from_ref(listener).cast_mut(), Relaxed);
        socket.set_stage(Stage::Watching);
    }
    // Only now: it answers at once for what it finds.
    listener.on_accept();
}

/// A socket joins an epoll set before it is connected (as nginx's do): it gets its object now, so
/// that the membership is known.
#[inline]
pub fn on_epoll_add(fd: c_int) -> Entry {
    match table::lookup(fd) {
        Entry::Fresh { nonblocking } => {
            begin(fd, nonblocking, Direction::Connect).map_or(Entry::None, Entry::Socket)
        }
        entry => entry,
    }
}

/// connect() has succeeded or begun.
pub fn on_connect(fd: c_int) {
    let errno = errno::get();
    let socket = match table::lookup(fd) {
        Entry::Fresh { nonblocking } => begin(fd, nonblocking, Direction::Connect),
        Entry::None if Library::ensure().is_some() && is_tcp(fd) => {
            begin(fd, is_nonblocking(fd), Direction::Connect)
        }
        Entry::Socket(socket) if socket.stage() == Stage::New => Some(socket),
        _ => None,
    };
    if let Some(socket) = socket {
        socket.role.store(0, Relaxed);
        socket.set_stage(Stage::Watching);
        if Library::get().threshold.is_at_once() {
            crate::tx::worth_it(socket);
        }
    }
    errno::set(errno);
}

fn begin(fd: c_int, nonblocking: bool, direction: Direction) -> Option<&'static Socket> {
    let library = Library::ensure()?;
    if !table::covers(fd) {
        return None;
    }
    let socket = Socket::allocate(fd, nonblocking)?;
    socket.open_statistics(library.stats, direction);
    drop_entry(table::insert(fd, Entry::Socket(socket)), fd);
    Some(socket)
}

/// connect() to AF_UNSPEC is about to dissolve the connection.
pub fn before_disconnect(fd: c_int) {
    let errno = errno::get();
    if let Some(socket) = table::socket(fd) {
        let nonblocking = socket.blocking.is_nonblocking();
        crate::pass::release(socket, Reason::Closed);
        release(table::put(fd, Entry::Fresh { nonblocking }), fd);
    }
    errno::set(errno);
}

/// A fork child uses a connection that its parent made: it is this instance's from now on, and for
/// an accepted one this instance answers too.
#[cold]
pub fn on_inherited(socket: &'static Socket) {
    let errno = errno::get();
    if let Some(library) = Library::ensure()
        && !socket.adopted.swap(true, Relaxed)
    {
        let accepted = socket.role.load(Relaxed) == 1;
        let direction = if accepted {
            Direction::Accept
        } else {
            Direction::Connect
        };
        socket.open_statistics(library.stats, direction);
        if let Some(listener) = socket.listener() {
            listener.on_accept();
        }
    }
    errno::set(errno);
}

/// Shows the addresses in the statistics, once the connection has proved to last.
pub fn show_addresses(socket: &'static Socket) {
    if let (Some(stats), Some(fd)) = (socket.stats(), socket.anchor_fd()) {
        let local = rustix::net::getsockname(fd)
            .ok()
            .and_then(|a| SocketAddr::try_from(a).ok());
        let peer = rustix::net::getpeername(fd)
            .ok()
            .flatten()
            .and_then(|a| SocketAddr::try_from(a).ok());
        stats.set_addrs(local, peer);
    }
}

/// epoll_create() has given `fd`.
pub fn on_epoll(fd: c_int) {
    if Library::ensure().is_some()
        && let Some(epoll) = Epoll::allocate(fd)
    {
        drop_entry(table::insert(fd, Entry::Epoll(epoll)), fd);
    }
}

/// An entry that a new file has replaced: the number was closed where no hook saw it.
fn drop_entry(entry: Entry, fd: c_int) {
    release(entry, fd);
}

/// Before the kernel closes `fd`.
pub fn before_close(fd: c_int) {
    let errno = errno::get();
    release(table::put(fd, Entry::None), fd);
    errno::set(errno);
}

fn release(entry: Entry, fd: c_int) {
    match entry {
        Entry::None | Entry::Fresh { .. } => {}
        Entry::Listener(listener) => listener.release(),
        Entry::Epoll(epoll) => epoll.release(fd),
        Entry::Socket(socket) => release_socket(socket, fd),
    }
}

fn release_socket(socket: &'static Socket, fd: c_int) {
    if fork::is_shared(socket) && is_only_number(socket, fd) && !socket.is_plain() {
        // The other holders go on with the kernel's socket.
        crate::pass::release(socket, Reason::Inherited);
    }
    let Some(mut control) = socket.control.lock() else {
        return;
    };
    control.fds.retain(|f| *f != fd);
    if let Some(other) = control.fds.first() {
        socket.fd.store(*other, Release);
        return;
    }
    crate::tx::answer_if_asked(socket);
    let last = fork::let_go(socket);
    let foreign = socket.tx_mode.load(Acquire) == mode::FOREIGN;
    if foreign {
        socket.tx_mode.store(mode::TCP, Release);
        socket.rx_mode.store(mode::TCP, Release);
    }
    if socket.is_plain() && !ready::is_watched(socket) {
        socket.fd.store(-1, Release);
        drop(control);
        forget(socket);
        return;
    }
    if !last {
        fork::returned(socket);
    }
    // A close with unread data resets the connection (RFC 9293, 3.10.4; RFC 2525, 2.17).
    let resets = last && (rx::has_unread(socket) || refuses_what_came(socket));
    if last && !resets && stay_behind(socket, &mut control) {
        drop(control);
        forget_interest(socket);
        // From here on it can come to its end, and be another connection.
        socket.left_behind.store(true, Release);
        Library::get().service.submit(Command::settle(socket));
        return;
    }
    if resets && let Some(anchor) = socket.anchor_fd() {
        let _ = rustix::net::sockopt::set_socket_linger(anchor, Some(std::time::Duration::ZERO));
    }
    let awaited = if last && socket.rx_mode.load(Acquire) == mode::MARKED {
        promote::scan_left(socket, &mut control)
    } else {
        None
    };
    let unsent = promote::close_tx(socket);
    if last {
        promote::linger(socket, awaited, unsent);
    }
    let_go_of(socket, &mut control);
    drop(control);
    forget(socket);
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
        socket.rx_mode.store(mode::TCP, SeqCst);
        socket.tx_mode.store(mode::TCP, SeqCst);
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
    if !promote::resume::is_staying(control) {
        return false;
    }
    let Some(Ok(copy)) = socket.anchor_fd().map(PrivateFd::duplicate) else {
        return false;
    };
    let service = &Library::get().service;
    service.forget_anchor(socket);
    socket.fd.store(copy.release(), Release);
    service.watch_again(socket);
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

/// Nobody reads the link any more. True if something came before the other end could know. (Where
/// something is unread anyway, the reset tells it, and not before it is there: a program that was told
/// by us would find the connection still standing.)
fn refuses_what_came(socket: &'static Socket) -> bool {
    // A direction that is back on TCP may have another holder, who got the socket by SCM_RIGHTS.
    if socket.rx_mode.load(Acquire) == mode::TCP {
        return false;
    }
    promote::refuse(socket);
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
    socket.recycle(Library::get().stats);
}

/// `new` is another number for what `old` stands for.
pub fn on_dup(old: c_int, new: c_int) {
    let errno = errno::get();
    let entry = table::lookup(old);
    match entry {
        Entry::None => {}
        Entry::Fresh { .. } => {}
        Entry::Listener(listener) => listener.retain(),
        Entry::Epoll(epoll) => epoll.retain(),
        Entry::Socket(socket) => {
            if let Some(mut control) = socket.control.lock() {
                control.fds.push(new);
            }
            if new <= 2 {
                // stdio's own writes are inside libc, where no hook sees them.
                crate::tx::take_back(socket, Reason::Stdio);
            }
        }
    }
    drop_entry(table::insert(new, entry), new);
    errno::set(errno);
}

/// Whether the program must not see that this number is open.
#[inline]
pub fn is_hidden(fd: c_int) -> bool {
    privatefd::is_private(fd)
}

/// O_NONBLOCK was set or cleared.
pub fn set_nonblocking(fd: c_int, nonblocking: bool) {
    match table::lookup(fd) {
        Entry::Socket(socket) => socket.blocking.set_nonblocking(nonblocking),
        Entry::Fresh { .. } => {
            table::put(fd, Entry::Fresh { nonblocking });
        }
        _ => {}
    }
}
