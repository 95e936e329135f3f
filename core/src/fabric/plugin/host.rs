//! A plugin's access to the host: the log, and the numbers for fds that the program does not see.

use std::ffi::{CStr, OsStr, c_int};
use std::fmt::Arguments;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::fs::{Mode, OFlags};

use super::errno::{Errno, Result};
use super::{ABI, Host, fds};

/// The host's table; set once, by the entry.
static HOST: AtomicPtr<Host> = AtomicPtr::new(std::ptr::null_mut());

/// How important a line of the log is.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum Level {
    /// Something does not work, with the remedy.
    Error = 1,
    /// Why something ended.
    Debug = 4,
}

/// Takes the host's table.
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
    // Release: pairs with the Acquire in `get`.
    HOST.store(host.cast_mut(), Ordering::Release);
    Ok(())
}

fn get() -> Option<&'static Host> {
    // SAFETY: null, or a table that `attach` has checked and that lives as long as the process.
    unsafe { HOST.load(Ordering::Acquire).as_ref() }
}

/// Writes one line to the host's log.
pub fn log(level: Level, text: Arguments<'_>) {
    if let Some(host) = get() {
        let line = text.to_string();
        // SAFETY: pointer and length describe a string that lives during the call.
        unsafe { (host.log)(level as u32, line.as_ptr(), line.len()) };
    }
}

/// Returns the folder where the kernel shows network interfaces and RDMA devices.
pub fn sys_class() -> &'static Path {
    let Some(host) = get() else {
        return Path::new("/sys/class");
    };
    // SAFETY: the function of a checked table; its path ends with a zero and lives as long as the process.
    let path = unsafe { CStr::from_ptr((host.sys_class)()) };
    Path::new(OsStr::from_bytes(path.to_bytes()))
}

/// Makes `fd` nonblocking and moves it to a hidden number, where a fork child finds it.
pub fn hide(fd: c_int) -> Result<c_int> {
    let host = get().ok_or(Errno(libc::EINVAL))?;
    // SAFETY: the caller's fd is open for the duration of this call; it is not kept.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(borrowed)?;
    rustix::fs::fcntl_setfl(borrowed, flags | OFlags::NONBLOCK)?;
    // SAFETY: the function of a checked table; it takes any number.
    let hidden = unsafe { (host.hide_fd)(fd) };
    if hidden < 0 {
        return Err(Errno(-hidden));
    }
    fds::enter(hidden);
    Ok(hidden)
}

/// A file at a hidden number for as long as the value lives. So a program that closes numbers that are not its own, or
/// counts on the lowest free number, does no harm and sees no difference. With no host attached, as in tests, the file
/// keeps the number that the kernel gave.
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
        // Not to be closed as an `OwnedFd`: that calls libc's close, which may be the host's hook.
        let fd = fd.into_raw_fd();
        if get().is_none() {
            return Ok(Self(fd));
        }
        hide(fd).map(Self).inspect_err(|_| {
            // SAFETY: opened by the caller, and given up.
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
        // SAFETY: open until `self` is dropped.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        if get().is_some() {
            close(self.0);
        } else {
            // SAFETY: opened by `open`, and given up.
            unsafe { rustix::io::close(self.0) };
        }
    }
}

/// Closes an fd that [`hide`] returned.
pub fn close(fd: c_int) {
    fds::leave(fd);
    if let Some(host) = get() {
        // SAFETY: the fd is one that `hide_fd` gave, and its owner gives it up.
        unsafe { (host.close_fd)(fd) };
    }
}
