//! From socket() to the last close(): which numbers stand for which objects. What the last close of a connection leads to
//! is in `close`.

mod close;

pub use close::{
    connection, connection_at, end_orphans, finish, is_alive, is_behind, look_again,
    look_at_anchor, on_call_back, on_its_file, reset_if_unread,
};

use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;

use rdmasock_core::os::privatefd;
use rdmasock_core::stats::{Direction, Reason};
use rdmasock_core::stream::handshake::Role;

use crate::epoll::Epoll;
use crate::errno;
use crate::library::{Library, threshold_of};
use crate::listener::Listener;
use crate::promote::Farewell;
use crate::socket::{Socket, Stage};
use crate::sockopt;
use crate::table::{self, Entry};

/// socket() gave a TCP socket.
pub fn on_socket(fd: c_int, nonblocking: bool) {
    if Library::is_on() {
        let serial = table::new_serial();
        let entry = Entry::Fresh {
            nonblocking,
            serial,
        };
        drop_entry(table::insert(fd, entry), fd);
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
    if Library::is_on() && (known || is_tcp(fd)) {
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
        Entry::Fresh { nonblocking, .. } => {
            begin(fd, nonblocking, Direction::Connect).map_or(Entry::None, Entry::Socket)
        }
        entry => entry,
    }
}

/// connect() has succeeded or begun.
pub fn on_connect(fd: c_int) {
    let errno = errno::get();
    let socket = match table::lookup(fd) {
        Entry::Fresh { nonblocking, .. } => begin(fd, nonblocking, Direction::Connect),
        Entry::None if Library::is_on() && is_tcp(fd) => {
            begin(fd, is_nonblocking(fd), Direction::Connect)
        }
        Entry::Socket(socket) if socket.stage() == Stage::New => Some(socket),
        _ => None,
    };
    if let Some(socket) = socket {
        socket.role.store(0, Relaxed);
        socket.set_stage(Stage::Watching);
        if threshold_of(Role::Connector).is_at_once() {
            crate::tx::worth_it(socket);
        }
    }
    errno::set(errno);
}

fn begin(fd: c_int, nonblocking: bool, direction: Direction) -> Option<&'static Socket> {
    if !Library::is_on() || !table::covers(fd) {
        return None;
    }
    let socket = Socket::allocate(fd, nonblocking)?;
    if let Some(library) = Library::current() {
        socket.open_statistics(library.stats, direction);
    }
    drop_entry(table::insert(fd, Entry::Socket(socket)), fd);
    Some(socket)
}

/// connect() to AF_UNSPEC is about to dissolve the connection.
pub fn before_disconnect(fd: c_int) {
    let errno = errno::get();
    if let Some(socket) = table::socket(fd) {
        let nonblocking = socket.blocking.is_nonblocking();
        crate::pass::release(socket, Reason::Closed);
        let serial = table::new_serial();
        let entry = Entry::Fresh {
            nonblocking,
            serial,
        };
        release(table::put(fd, entry), fd);
    }
    errno::set(errno);
}

/// A connection of a fork child has proved worth an instance: it is in its statistics from now on, and where it was accepted
/// this instance answers too. False if there can be none.
#[cold]
pub fn adopt(socket: &'static Socket) -> bool {
    let Some(library) = Library::ensure() else {
        return false;
    };
    if !socket.adopted.swap(true, Relaxed) {
        let direction = match socket.role() {
            Role::Acceptor => Direction::Accept,
            Role::Connector => Direction::Connect,
        };
        socket.open_statistics(library.stats, direction);
    }
    true
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
    if Library::is_on()
        && let Some(epoll) = Epoll::allocate(fd)
    {
        drop_entry(table::insert(fd, Entry::Epoll(epoll)), fd);
    }
}

/// An entry that a new file has replaced: the number was closed where no hook saw it.
fn drop_entry(entry: Entry, fd: c_int) {
    match entry {
        Entry::Socket(socket) => close::lose(socket, fd),
        entry => release(entry, fd).tell(),
    }
}

/// Before the kernel closes `fd`. Gives who is to be told when it has.
pub fn before_close(fd: c_int) -> Farewell {
    let errno = errno::get();
    let farewell = release(table::put(fd, Entry::None), fd);
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
            if !close::is_behind(socket, new) {
                // Another has closed `old` and got the number meanwhile.
                drop_entry(table::insert(new, Entry::None), new);
                errno::set(errno);
                return;
            }
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
        Entry::Fresh { serial, .. } => {
            table::put(
                fd,
                Entry::Fresh {
                    nonblocking,
                    serial,
                },
            );
        }
        _ => {}
    }
}
