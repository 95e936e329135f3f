//! Makes, duplicates and releases the objects behind the program's fds, from socket() to close(). The work of a
//! connection's last close is in `process/close`.

use std::ffi::c_int;
use std::sync::atomic::Ordering::Relaxed;

use rdmasock_core::stats::{Direction, Reason};
use rdmasock_core::stream::handshake::Role;

use crate::notify::epoll::Epoll;
use crate::notify::table;
use crate::notify::table::Entry;
use crate::objects::library::{Library, threshold_of};
use crate::objects::listener::Listener;
use crate::objects::socket::{Farewell, Socket, Stage};
use crate::process::close;
use crate::startup;
use crate::sys::{errno, sockopt};

/// Handles a socket() that returned a TCP socket.
pub(crate) fn on_socket(fd: c_int, nonblocking: bool) {
    if startup::is_on() {
        let serial = table::new_serial();
        let entry = Entry::Fresh { nonblocking, serial };
        drop_entry(table::insert(fd, entry), fd);
    }
}

/// Returns whether an fd is a TCP socket. For an fd that no hook has seen being made.
pub(crate) fn is_tcp(fd: c_int) -> bool {
    if fd < 0 {
        return false;
    }
    // SAFETY: `fd` is the program's, in the middle of its call, and not -1.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let option = |name| sockopt::get(fd, (libc::SOL_SOCKET, name));
    option(libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
        && matches!(option(libc::SO_DOMAIN), Some(libc::AF_INET | libc::AF_INET6))
}

fn is_nonblocking(fd: c_int) -> bool {
    // SAFETY: `fd` is the program's own, in the middle of its call.
    let flags = rustix::fs::fcntl_getfl(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) });
    flags.is_ok_and(|f| f.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Handles a listen() that has succeeded.
pub(crate) fn on_listen(fd: c_int) {
    let known = match table::lookup(fd) {
        Entry::Listener(_) => return,
        Entry::Fresh { .. } => true,
        _ => false,
    };
    let errno = errno::get();
    if startup::is_on() && (known || is_tcp(fd)) {
        let listener = Listener::new(fd);
        drop_entry(table::insert(fd, Entry::Listener(listener)), fd);
        // A connector asks on all service names of a port, and waits for all answers. So a running service thread
        // answers on this listener's name from here on, even before the listener accepts a connection.
        if Library::current().is_some_and(|library| library.service.is_started()) {
            listener.on_accept();
        }
    }
    errno::set(errno);
}

/// Handles an accept() on the listener's socket that returned `fd`.
pub(crate) fn on_accept(listener: &'static Listener, fd: c_int, nonblocking: bool) {
    if let Some(socket) = begin(fd, nonblocking, Direction::Accept) {
        // The accepted connection keeps the listener object in use, because with its last use the process gives up the
        // listener's service name. By that name the peer asks for the connection, also after the program has closed the
        // listening socket.
        let kept = listener.retain().then_some(listener);
        socket.promotion.set_acceptor(kept);
        if listener.keeps_on_tcp.load(Relaxed) {
            crate::notify::threshold::stay(socket, Reason::Asked.into());
        } else {
            socket.promotion.set_stage(Stage::Watching);
        }
    }
    // Called last, because the service thread answers at once for connections that it finds.
    listener.on_accept();
}

/// Handles an accept() on `fd` that returned `new`, if no hook has seen listen() on `fd`. The listening socket may come
/// from another program image (systemd, an exec by the program itself). The library makes the listener's object at its
/// first connection.
pub(crate) fn on_accept_of_unknown(fd: c_int, new: c_int, nonblocking: bool) {
    let errno = errno::get();
    if startup::is_on() && is_tcp(new) {
        // SAFETY: `fd` is the program's, in the middle of its call, and not -1, since accept() has succeeded on it.
        let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        // `fd` may stand for another file by now.
        if sockopt::get(borrowed, (libc::SOL_SOCKET, libc::SO_ACCEPTCONN)) == Some(1) {
            on_listen(fd);
        }
        if let Entry::Listener(listener) = table::lookup(fd) {
            on_accept(listener, new, nonblocking);
        }
    }
    errno::set(errno);
}

/// Makes the object of a socket that is added to an epoll set before it is connected (nginx does so), so that the
/// membership can be recorded. Returns the fd's entry in the table.
#[inline]
pub(crate) fn on_epoll_add(fd: c_int) -> Entry {
    match table::lookup(fd) {
        Entry::Fresh { nonblocking, .. } => {
            begin(fd, nonblocking, Direction::Connect).map_or(Entry::None, Entry::Socket)
        }
        entry => entry,
    }
}

/// Handles a connect() that has succeeded, or that continues in the kernel.
pub(crate) fn on_connect(fd: c_int) {
    let errno = errno::get();
    let socket = match table::lookup(fd) {
        Entry::Fresh { nonblocking, .. } => begin(fd, nonblocking, Direction::Connect),
        Entry::None if startup::is_on() && is_tcp(fd) => begin(fd, is_nonblocking(fd), Direction::Connect),
        Entry::Socket(socket) if socket.promotion.stage() == Stage::New => Some(socket),
        _ => None,
    };
    if let Some(socket) = socket {
        socket.promotion.set_connector();
        socket.promotion.set_stage(Stage::Watching);
        if threshold_of(Role::Connector).is_at_once() {
            crate::notify::threshold::worth_it(socket);
        }
    }
    errno::set(errno);
}

/// Prepares for a send with MSG_FASTOPEN, which connects the socket. If the send fails, a later connect() on the socket
/// still works.
#[cold]
pub(crate) fn before_fast_open(fd: c_int) {
    if let Entry::Socket(socket) = on_epoll_add(fd)
        && socket.promotion.stage() == Stage::New
    {
        socket.promotion.set_connector();
        socket.promotion.set_stage(Stage::Watching);
    }
}

fn begin(fd: c_int, nonblocking: bool, direction: Direction) -> Option<&'static Socket> {
    if !startup::is_on() || !table::covers(fd) {
        return None;
    }
    let socket = Socket::allocate(fd, nonblocking)?;
    if let Some(library) = Library::current() {
        socket.open_statistics(library.stats, direction);
    }
    drop_entry(table::insert(fd, Entry::Socket(socket)), fd);
    Some(socket)
}

/// Prepares for a connect() to AF_UNSPEC, which ends the connection and leaves an unconnected socket.
pub(crate) fn before_disconnect(fd: c_int) {
    let errno = errno::get();
    if let Some(socket) = table::socket(fd) {
        let nonblocking = socket.blocking.is_nonblocking();
        crate::process::pass::release(socket, Reason::Closed);
        let serial = table::new_serial();
        release(table::put(fd, Entry::Fresh { nonblocking, serial }), fd);
    }
    errno::set(errno);
}

/// Handles an epoll_create() that returned `fd`.
pub(crate) fn on_epoll(fd: c_int) {
    if startup::is_on()
        && let Some(epoll) = Epoll::allocate(fd)
    {
        drop_entry(table::insert(fd, Entry::Epoll(epoll)), fd);
    }
}

/// Releases the table's old entry of `fd`, for which the kernel has a new file. If the old entry is a connection, its
/// fd was closed without a hook.
fn drop_entry(entry: Entry, fd: c_int) {
    match entry {
        Entry::Socket(socket) => close::lose(socket, fd),
        entry => release(entry, fd).tell(),
    }
}

/// Removes the entry of `fd` before the kernel closes `fd`. Returns the peer's waiter to wake once `fd` is closed.
pub(crate) fn before_close(fd: c_int) -> Farewell {
    let errno = errno::get();
    let socket = table::socket(fd);
    if let Some(socket) = socket {
        close::hide_markers(socket, fd);
    }
    let entry = table::put(fd, Entry::None);
    if let Some(socket) = socket {
        close::on_removed(socket, fd);
    }
    let farewell = release(entry, fd);
    errno::set(errno);
    farewell
}

fn release(entry: Entry, fd: c_int) -> Farewell {
    match entry {
        Entry::None | Entry::Fresh { .. } => {}
        Entry::Listener(listener) => listener.release(),
        Entry::Epoll(epoll) => epoll.release(fd),
        Entry::Socket(socket) => return close::release(socket, fd),
    }
    Farewell::NONE
}

/// Makes `new` another fd of the object behind `old`.
pub(crate) fn on_dup(old: c_int, new: c_int) {
    let errno = errno::get();
    let mut entry = table::lookup(old);
    match entry {
        Entry::None | Entry::Fresh { .. } => {}
        Entry::Listener(listener) => {
            if !listener.retain() {
                entry = Entry::None;
            }
        }
        Entry::Epoll(epoll) => epoll.retain(new),
        Entry::Socket(socket) => {
            if !socket.numbers.is_behind(new) {
                // Another thread has closed `old` meanwhile. A new file got that number, and `new` is a copy of the new
                // file.
                drop_entry(table::insert(new, Entry::None), new);
                errno::set(errno);
                return;
            }
            if let Some(mut control) = socket.control.lock() {
                control.own.fds.push(new);
            }
            if new <= 2 {
                // With fd 0, 1 or 2 the connection may be used by stdio, whose I/O is inside libc, where no hook sees
                // it.
                crate::data::tx::take_back(socket, Reason::Stdio);
            }
        }
    }
    drop_entry(table::insert(new, entry), new);
    errno::set(errno);
}

/// Records that the program has set or cleared O_NONBLOCK.
pub(crate) fn set_nonblocking(fd: c_int, nonblocking: bool) {
    match table::lookup(fd) {
        Entry::Socket(socket) => socket.blocking.set_nonblocking(nonblocking),
        Entry::Fresh { serial, .. } => {
            table::put(fd, Entry::Fresh { nonblocking, serial });
        }
        _ => {}
    }
}
