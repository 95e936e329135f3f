//! The C interface between the library and a plugin that provides queue pairs. The library opens the plugin when it
//! first needs one. The interface consists of two tables of functions, each with a version and its size. Both sides are
//! built from this file and from the structures of `remote/qp.rs`. The file also has the code that all plugins share:
//! the errors, the state of a connection, the hidden fds, and the calls of the library's table. [`serve`] makes a
//! plugin's table.
//!
//! A function that returns an `i32` returns 0, a count, or a negative errno. No panic, and no exception, crosses the
//! interface. Pointers are valid only during the call, unless the function's description says otherwise.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::fmt::Arguments;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use rustix::fs::{Mode, OFlags};

use crate::fabric::remote::qp::Limits;

pub mod serve;

/// The version of the tables; changes with any change to this file, and to the structures of `remote/qp.rs`.
pub const ABI: u32 = 9;

/// The name of the plugin's only symbol, a function of type [`Entry`](serve::Entry).
pub const ENTRY: &CStr = c"rdmasock_verbs_plugin";

/// The length of the private data of a connection request or its answer, in bytes. Every transport can carry 56; the
/// plugin uses the other 12 itself.
pub const PRIVATE_BYTES: usize = 44;

/// The functions of the library, the plugin's host, that the plugin calls.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Host {
    /// The version of the table, [`ABI`].
    pub abi: u32,
    /// The size of this table in bytes.
    pub size: u32,
    /// Writes a line of UTF-8 to the log, with a level of [`Level`].
    pub log: unsafe extern "C" fn(level: u32, text: *const u8, len: usize),
    /// Moves an fd to a number that the program does not see. Returns that number, or a negative errno; after an error
    /// `fd` is as before. A fork child of the program closes all these fds.
    pub hide_fd: unsafe extern "C" fn(fd: c_int) -> i32,
    /// Closes an fd that `hide_fd` returned. (libc's close is hooked, and does not see hidden fds.)
    pub close_fd: unsafe extern "C" fn(fd: c_int),
    /// Returns the folder in which the kernel shows network interfaces and RDMA devices; tests may replace it. The path
    /// lives as long as the process.
    pub sys_class: unsafe extern "C" fn() -> *const c_char,
}

/// An IP address and a port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Address {
    /// The port in host byte order; 0 stands for any port.
    pub port: u16,
    /// The scope id of a link-local IPv6 address.
    pub scope: u32,
    /// The address in network order. An IPv4 address is stored as an IPv4-mapped IPv6 address.
    pub ip: [u8; 16],
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        let (ip, scope) = match address {
            SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
            SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
        };
        Self {
            port: address.port(),
            scope,
            ip: ip.octets(),
        }
    }
}

impl Address {
    /// Returns the address as a socket address.
    pub fn socket(&self) -> SocketAddr {
        match Ipv6Addr::from(self.ip).to_canonical() {
            IpAddr::V4(ip) => SocketAddr::new(ip.into(), self.port),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, self.port, 0, self.scope).into(),
        }
    }
}

/// A connection request that a listener has received.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The connection, which the library accepts or rejects.
    pub conn: *mut Conn,
    /// The private data of the peer's request, padded with zeroes.
    pub private: [u8; PRIVATE_BYTES],
}

/// The limits of a connection, and the fds of its events.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Info {
    /// An fd that is readable when [`Plugin::state`](serve::Plugin::state) has an event to process.
    pub state_fd: c_int,
    /// An fd that is readable when a completion has come after [`Plugin::arm`](serve::Plugin::arm).
    pub completion_fd: c_int,
    /// The limits of the queue pair.
    pub limits: Limits,
    /// The private data of the peer's accept, padded with zeroes.
    pub private: [u8; PRIVATE_BYTES],
}

/// A completion that [`Plugin::poll`](serve::Plugin::poll) passes to its callback.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The kind, a constant of [`completion`].
    pub kind: u32,
    /// The immediate, in host byte order.
    pub immediate: u32,
    /// The message; null if there is none.
    pub bytes: *const u8,
    /// The length in bytes of the message, or of the bytes that the peer has written.
    pub len: u32,
}

/// The kinds of a [`Completion`].
pub mod completion {
    /// A message of the peer has come.
    pub const RECEIVED: u32 = 1;
    /// A WRITE of the peer with an immediate has completed.
    pub const WRITTEN: u32 = 2;
    /// The send queue has room again.
    pub const ROOM: u32 = 3;
    /// The peer's device has answered a probe.
    pub const PROBED: u32 = 4;
    /// A READ has completed: its bytes have arrived.
    pub const READ: u32 = 5;
}

/// A listener of the plugin.
#[repr(C)]
#[derive(Debug)]
pub struct Listener {
    _opaque: [u8; 0],
}

/// A connection of the plugin, with its queue pair and its buffers.
#[repr(C)]
#[derive(Debug)]
pub struct Conn {
    _opaque: [u8; 0],
}

/// A positive errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", std::io::Error::from_raw_os_error(*.0))]
pub struct Errno(pub c_int);

/// A result with an [`Errno`].
pub type Result<T> = std::result::Result<T, Errno>;

impl Errno {
    /// Returns the errno of this thread's last failed call.
    pub fn last() -> Self {
        match std::io::Error::last_os_error().raw_os_error() {
            Some(code) if code > 0 => Self(code),
            _ => Self(libc::EIO),
        }
    }

    /// Returns the negative errno, as the functions of the interface return it.
    pub fn code(self) -> i32 {
        -self.0
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

/// Whether a connection is up, and why it has ended: one word that every thread may read. 0: not up yet. 1: up.
/// Negative: ended, with this errno. The first reason stays.
#[derive(Debug, Default)]
pub struct Fate(AtomicI32);

impl Fate {
    /// Returns the word: 0 if the connection is not up yet, 1 if it is up, a negative errno if it has ended.
    pub fn code(&self) -> i32 {
        self.0.load(Ordering::Acquire)
    }

    /// Returns why the connection has ended; `None` if it has not.
    pub fn over(&self) -> Option<Errno> {
        let code = self.code();
        (code < 0).then_some(Errno(-code))
    }

    /// Records that the connection is up, unless it has ended already.
    pub fn up(&self) {
        let _ = self.0.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Records that the connection has ended. Returns true if it had not before.
    pub fn end(&self, reason: Errno) -> bool {
        let code = -reason.0.max(1);
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |now| (now >= 0).then_some(code))
            .is_ok()
    }
}

/// The table of the library's functions. The plugin's entry function sets it once.
static HOST: AtomicPtr<Host> = AtomicPtr::new(std::ptr::null_mut());

/// How important a line of the log is.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum Level {
    /// Something does not work; the line names the remedy.
    Error = 1,
    /// Something has ended; the line gives the reason.
    Debug = 4,
}

/// Checks the table of the library's functions, and stores it for the other functions of this file. Fails with EINVAL
/// if `host` is null, and with EPROTO if the table has another version or size.
///
/// # Safety
/// `host` is null, or points to a table that has at least its first two fields, and as many bytes as its `size` says.
/// The table lives as long as the process.
pub unsafe fn attach(host: *const Host) -> Result<()> {
    if host.is_null() {
        return Err(Errno(libc::EINVAL));
    }
    // SAFETY: by this function's contract these two fields exist in any version.
    let (abi, size) = unsafe { ((*host).abi, (*host).size) };
    if abi != ABI || size as usize != size_of::<Host>() {
        return Err(Errno(libc::EPROTO));
    }
    // Release: pairs with the Acquire in `host`.
    HOST.store(host.cast_mut(), Ordering::Release);
    Ok(())
}

fn host() -> Option<&'static Host> {
    // SAFETY: the pointer is null, or leads to a table that `attach` has checked and that lives as long as the process.
    unsafe { HOST.load(Ordering::Acquire).as_ref() }
}

/// Writes one line to the library's log. Has no effect if no library is attached.
pub fn log(level: Level, text: Arguments<'_>) {
    if let Some(host) = host() {
        let line = text.to_string();
        // SAFETY: pointer and length describe a string that lives during the call.
        unsafe { (host.log)(level as u32, line.as_ptr(), line.len()) };
    }
}

/// Returns the folder in which the kernel shows network interfaces and RDMA devices.
pub fn sys_class() -> &'static Path {
    let Some(host) = host() else {
        return Path::new("/sys/class");
    };
    // SAFETY: the function comes from a checked table. Its path ends with a zero, and lives as long as the process.
    let path = unsafe { CStr::from_ptr((host.sys_class)()) };
    Path::new(OsStr::from_bytes(path.to_bytes()))
}

/// Makes `fd` nonblocking and moves it to a hidden number. If no library is attached, as in tests, the fd keeps its
/// number.
pub fn hide(fd: c_int) -> Result<c_int> {
    // SAFETY: the caller's fd is open during this call, and the borrow ends with the call.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(borrowed)?;
    rustix::fs::fcntl_setfl(borrowed, flags | OFlags::NONBLOCK)?;
    let Some(host) = host() else {
        return Ok(fd);
    };
    // SAFETY: the function comes from a checked table, and takes any number.
    let hidden = unsafe { (host.hide_fd)(fd) };
    if hidden < 0 {
        return Err(Errno(-hidden));
    }
    Ok(hidden)
}

/// An fd at a hidden number for as long as the value lives. A program that closes fds which are not its own does not
/// close this one. A program that counts on the lowest free number sees no difference.
#[derive(Debug)]
pub struct Hidden(c_int);

impl Hidden {
    /// Opens `path` for reading.
    pub fn open(path: &Path, flags: OFlags) -> Result<Self> {
        let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC;
        Self::place(rustix::fs::open(path, flags, Mode::empty())?)
    }

    /// Moves an fd that was just opened to a hidden number, and makes it nonblocking.
    pub fn place(fd: OwnedFd) -> Result<Self> {
        // The fd must not be closed as an `OwnedFd`: that calls libc's close, which may be the library's hook.
        let fd = fd.into_raw_fd();
        hide(fd).map(Self).inspect_err(|_| {
            // SAFETY: the caller opened the fd and has passed it to this function.
            unsafe { rustix::io::close(fd) };
        })
    }

    /// Returns the number of the fd.
    pub fn number(&self) -> c_int {
        self.0
    }
}

impl AsFd for Hidden {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the fd is open until `self` is dropped.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        close(self.0);
    }
}

/// Closes an fd that [`hide`] returned.
pub fn close(fd: c_int) {
    match host() {
        // SAFETY: `hide` returned the fd, and its owner does not use it any more.
        Some(host) => unsafe { (host.close_fd)(fd) },
        // SAFETY: as above.
        None => unsafe { rustix::io::close(fd) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_stays() {
        let fate = Fate::default();
        assert_eq!((fate.code(), fate.over()), (0, None));
        fate.up();
        assert_eq!((fate.code(), fate.over()), (1, None));
        assert!(fate.end(Errno(libc::ECONNRESET)));
        assert!(!fate.end(Errno(libc::EIO)));
        fate.up();
        assert_eq!(fate.code(), -libc::ECONNRESET);
        assert_eq!(fate.over(), Some(Errno(libc::ECONNRESET)));
    }
}
