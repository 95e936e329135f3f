//! Implements the functions that `include/rdmasock.h` declares, for programs that know of the library. `rdmasock_info`
//! is implemented by `info` here, a function with the C ABI, and the others likewise.
//!
//! Code that blocks or has destructors lies in other functions, which have Rust's own ABI. [`hooks`](crate::hooks) says
//! why.
#![allow(
    clippy::missing_safety_doc,
    reason = "the contract of each function is what the header says of the one with its name"
)]

use std::ffi::{c_int, c_void};
use std::io::Write;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use libc::{iovec, ssize_t};
use rdmasock_core::os::privatefd;
use rdmasock_core::stats::{Path, Reason, StreamStats, Why};
use rdmasock_core::stream::handshake::Role;

use crate::data::{tx, view as rx};
use crate::notify::fork::reclaim;
use crate::notify::table::Entry;
use crate::notify::{call, table, threshold};
use crate::objects::library;
use crate::objects::link::Link;
use crate::objects::socket::{Mode, Socket, Stage, tuple_of};
use crate::signals::jump::within;
use crate::startup;
use crate::startup::lifecycle;
use crate::sys::iov::is_plausible;
use crate::sys::{errno, sockopt};

/// Calls `function` and returns its result to the program. Sets errno if `function` fails, and preserves errno if not.
#[inline]
fn result<T: From<i8>>(function: impl FnOnce() -> Result<T, c_int>) -> T {
    let before = errno::get();
    match function() {
        Ok(value) => {
            errno::set(before);
            value
        }
        Err(error) => errno::fail(error),
    }
}

/// Returns `Ok` if `fd` is a TCP socket of the program. `Err` is the errno for any other fd: EBADF if it is not open or
/// is the library's own, ENOTSOCK if it is no socket, and EOPNOTSUPP if it is a socket of another kind.
fn is_tcp(fd: c_int) -> Result<(), c_int> {
    if fd < 0 || privatefd::is_private(fd) {
        return Err(libc::EBADF);
    }
    // SAFETY: `fd` is not -1, and the calls below only query it, whether it is open or not.
    let number = unsafe { BorrowedFd::borrow_raw(fd) };
    if rustix::io::fcntl_getfd(number).is_err() {
        Err(libc::EBADF)
    } else if sockopt::get(number, (libc::SOL_SOCKET, libc::SO_TYPE)).is_none() {
        Err(libc::ENOTSOCK)
    } else if lifecycle::is_tcp(fd) {
        Ok(())
    } else {
        Err(libc::EOPNOTSUPP)
    }
}

// `rdmasock_info`: what a connection runs on, and how many bytes it has carried.

/// `RDMASOCK_WAYS`: the number of ways in which bytes move (TCP, shared memory, RDMA).
const WAYS: usize = 3;

/// `struct rdmasock_info` of `include/rdmasock.h`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Info {
    /// Size in bytes: set by the caller to the size of its struct, by the library to the bytes that it has filled.
    pub size: u32,
    /// The way of the sending direction (`enum rdmasock_way`).
    pub sends_by: u32,
    /// The way of the receiving direction (`enum rdmasock_way`).
    pub receives_by: u32,
    /// The code of the [`Reason`] for which a direction is on TCP, 0 (`Reason::None`) if neither direction is.
    pub why: u32,
    /// The code of the [`Reason`] that the peer gave when it declined a promotion, 0 if it gave none.
    pub peer_why: u32,
    /// Always 0.
    pub reserved: u32,
    /// Bytes sent, in total for each way.
    pub sent: [u64; WAYS],
    /// Bytes received, in total for each way.
    pub received: [u64; WAYS],
    /// Bytes that direct transfers have sent, past the rings (`data/zero_copy`).
    pub sent_directly: u64,
    /// Bytes that direct transfers have received, past the rings (`data/zero_copy`).
    pub received_directly: u64,
    /// The text of the reason, ended by a zero byte.
    pub why_text: [u8; 128],
}

/// The size of the struct's first version, bytes: no program passes a smaller one.
const FIRST: usize = size_of::<Info>();
const _: () = assert!(FIRST == 216);

/// Implements `rdmasock_info`: fills `*info` with the state of the connection `fd`. Returns 0, or -1 and sets errno.
pub unsafe extern "C" fn info(fd: c_int, info: *mut Info) -> c_int {
    if !is_plausible(info) {
        return errno::fail(libc::EFAULT);
    }
    // SAFETY: the program passes a pointer to its struct, which begins with `size`. The read needs no alignment.
    let size = unsafe { (&raw const (*info).size).read_unaligned() } as usize;
    if size < FIRST {
        return errno::fail(libc::EINVAL);
    }
    result(|| {
        let known = within(|| info_of(fd))?;
        // SAFETY: the program says that its struct has `size` bytes, which is at least `FIRST`, the size of `Info`.
        unsafe {
            info.cast::<u8>().write_bytes(0, size);
            info.write_unaligned(known);
        }
        Ok(0)
    })
}

fn info_of(fd: c_int) -> Result<Info, c_int> {
    if let Some(socket) = call::connection(fd) {
        return info_of_socket(socket, fd);
    }
    match table::lookup(fd) {
        Entry::Listener(_) | Entry::Fresh { .. } => Err(libc::ENOTCONN),
        Entry::Epoll(_) => Err(libc::ENOTSOCK),
        _ => {
            is_tcp(fd)?;
            is_connected(fd)?;
            let is_on = startup::is_on();
            let why = if is_on { Reason::Unseen } else { Reason::Disabled };
            Ok(told(blank(), why.into()))
        }
    }
}

fn is_connected(fd: c_int) -> Result<(), c_int> {
    // SAFETY: the caller has found `fd` to be a TCP socket, so it is not -1. The program keeps it open during its call.
    let peer = rustix::net::getpeername(unsafe { BorrowedFd::borrow_raw(fd) });
    peer.map(drop).map_err(|error| error.raw_os_error())
}

fn info_of_socket(socket: &'static Socket, fd: c_int) -> Result<Info, c_int> {
    let counts = socket.told.stats();
    let sent = counts.map(|stats| stats.tx.load()).unwrap_or_default();
    let received = counts.map(|stats| stats.rx.load()).unwrap_or_default();
    let has_carried = sent.tcp_bytes | sent.link_bytes | received.tcp_bytes | received.link_bytes != 0;
    if !has_carried && socket.is_plain() {
        is_connected(fd)?;
    }
    let mut info = blank();
    let between_hosts = socket.told.was_between_hosts.load(Relaxed);
    let by_link = if between_hosts { Path::Verbs } else { Path::Shm };
    let ledger = &socket.told.ledger;
    for (place, counts, way) in [
        (&mut info.sent, sent, &ledger.sent),
        (&mut info.received, received, &ledger.received),
    ] {
        let link_bytes = counts.link_bytes + way.bytes.load(Acquire);
        *place = match by_link {
            Path::Verbs => [counts.tcp_bytes, 0, link_bytes],
            _ => [counts.tcp_bytes, link_bytes, 0],
        };
    }
    {
        let rx = socket.rx.lock();
        info.receives_by = way_of(socket, socket.rx_mode.load(Acquire));
        info.received_directly = rx.map_or(0, |rx| rx.own.direct.bytes);
    }
    {
        let tx = socket.tx.lock();
        info.sends_by = way_of(socket, socket.tx_mode.load(Acquire));
        info.sent_directly = tx.map_or(0, |tx| tx.own.direct.bytes);
    }
    let tcp = Path::Tcp as u32;
    if info.sends_by != tcp && info.receives_by != tcp {
        return Ok(info);
    }
    Ok(told(info, why(socket, counts)))
}

/// Returns the way of a direction in this mode, which is the code of its [`Path`].
fn way_of(socket: &Socket, mode: Mode) -> u32 {
    let path = match mode {
        Mode::Link => socket.link().map_or(Path::Tcp, Link::path),
        _ => Path::Tcp,
    };
    path as u32
}

fn why(socket: &Socket, counts: Option<&StreamStats>) -> Why {
    if socket.tx_mode.load(Acquire) == Mode::Foreign {
        return Reason::Inherited.into();
    }
    let known = counts.and_then(|stats| stats.why().ok());
    match known {
        Some(why) if why.reason != Reason::BelowThreshold => why,
        _ => library::reason().unwrap_or(Reason::BelowThreshold).into(),
    }
}

/// Returns an `Info` whose fields are 0, except for `size`: both directions are on TCP, no bytes were carried, and no
/// reason is given.
fn blank() -> Info {
    const _: () = assert!(Path::Tcp as u32 == 0 && Reason::None as u32 == 0);
    Info {
        size: size_of::<Info>() as u32,
        // SAFETY: all zeroes are a valid value of this plain struct.
        ..unsafe { std::mem::zeroed() }
    }
}

fn told(mut info: Info, why: Why) -> Info {
    info.why = why.reason as u32;
    info.peer_why = why.peer.unwrap_or_default() as u32;
    if why.reason != Reason::None
        && let Some((_, mut text)) = info.why_text.split_last_mut()
    {
        // Text beyond the end of the field is cut.
        let _ = write!(text, "{why}");
    }
    info
}

// `rdmasock_prefer`: a program chooses what a connection runs on.

/// The value of `RDMASOCK_TCP`.
const TCP: c_int = 0;
/// The value of `RDMASOCK_LINK`.
const LINK: c_int = 3;

/// Implements `rdmasock_prefer`: makes the connection `fd` prefer `way`. Returns 0, or -1 and sets errno.
pub unsafe extern "C" fn prefer(fd: c_int, way: c_int) -> c_int {
    result(|| within(|| set_preference(fd, way)).map(|()| 0))
}

fn set_preference(fd: c_int, way: c_int) -> Result<(), c_int> {
    let stays = match way {
        TCP => true,
        LINK => false,
        _ => return is_tcp(fd).and(Err(libc::EINVAL)),
    };
    let entry = match call::connection(fd) {
        Some(socket) => Entry::Socket(socket),
        // A socket that is not connected yet gets its object here, so that the preference is recorded for the later
        // connection. `on_epoll_add` makes that object, and returns the entry that any other fd has.
        None => lifecycle::on_epoll_add(fd),
    };
    match entry {
        Entry::Socket(socket) if stays => {
            stay(socket);
            Ok(())
        }
        Entry::Socket(socket) => hurry(socket),
        Entry::Listener(listener) => {
            // Applies to connections that are accepted from now on. This end cannot ask for links, because only
            // connectors do.
            listener.keeps_on_tcp.store(stays, Relaxed);
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
    // If no attempt has begun yet, a later one finds this reason and ends.
    tx::take_back(socket, Reason::Asked);
    if !socket.may_be_on_link() {
        threshold::stay(socket, Reason::Asked.into());
    }
}

/// Asks for a link without waiting for the threshold. Returns EOPNOTSUPP as the error if the connection stays on TCP
/// for good.
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
    // A socket that is not connected yet asks for its promotion with its first bytes.
    if socket.promotion.stage() == Stage::Watching && tuple_of(socket).is_some() {
        threshold::worth_it(socket);
    }
    Ok(())
}

// `rdmasock_view` and `rdmasock_release`: receiving without a copy.

/// Implements `rdmasock_view`: writes the address and length of each piece of the next received bytes to the array
/// `pieces`, and the number of pieces to `*count`. Returns the number of those bytes, or -1 and sets errno.
pub unsafe extern "C" fn view(fd: c_int, pieces: *mut iovec, count: *mut c_int, flags: c_int) -> ssize_t {
    if !is_plausible(pieces) || !is_plausible(count) {
        return errno::fail(libc::EFAULT);
    }
    // SAFETY: the program passes a pointer to its `int`. The read needs no alignment.
    let most = unsafe { count.read_unaligned() };
    if most < 1 || flags & !libc::MSG_DONTWAIT != 0 {
        return errno::fail(libc::EINVAL);
    }
    result(|| {
        let (found, n) = look(fd, most as usize, flags)?;
        let used = found.iter().take(most as usize).filter(|(_, len)| *len > 0);
        let mut filled = 0;
        for (at, len) in used {
            // SAFETY: the program says that its array has `most` entries, and `filled` is less.
            unsafe {
                pieces.add(filled).write_unaligned(iovec {
                    iov_base: at.cast::<c_void>(),
                    iov_len: *len,
                });
            }
            filled += 1;
        }
        // SAFETY: the program passes a pointer to its `int`. The write needs no alignment.
        unsafe { count.write_unaligned(filled as c_int) };
        Ok(n as ssize_t)
    })
}

// Not inlined: the forced unwind of pthread_cancel runs destructors in functions that this one calls (see `hooks`).
#[inline(never)]
fn look(fd: c_int, most: usize, flags: c_int) -> Result<(rx::Pieces, usize), c_int> {
    match within(|| call::connection(fd)) {
        Some(socket) => rx::view(socket, fd, most, flags),
        None => Err(why_not(fd)),
    }
}

/// Returns the errno for an fd that stands for no connection.
fn why_not(fd: c_int) -> c_int {
    match table::lookup(fd) {
        Entry::Listener(_) | Entry::Fresh { .. } => libc::ENOTCONN,
        _ => is_tcp(fd).err().unwrap_or(libc::EOPNOTSUPP),
    }
}

/// Implements `rdmasock_release`: counts the first `n` bytes of the view of `fd` as received. Returns 0, or -1 and sets
/// errno.
pub unsafe extern "C" fn release(fd: c_int, n: usize) -> c_int {
    let released = || match call::connection(fd) {
        Some(socket) => rx::release(socket, n),
        None => Err(match why_not(fd) {
            libc::EOPNOTSUPP | libc::ENOTCONN => libc::EINVAL,
            error => error,
        }),
    };
    result(|| within(released).map(|()| 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_reason_fits() {
        let longest = Reason::ALL.iter().max_by_key(|r| r.text().len()).unwrap();
        let info = told(blank(), Why::declined(*longest));
        let text: Vec<u8> = info.why_text.iter().copied().take_while(|c| *c != 0).collect();
        assert_eq!(String::from_utf8(text).unwrap(), Why::declined(*longest).to_string());
    }
}
