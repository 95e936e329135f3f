//! The errors of the interface: an errno.

use std::ffi::c_int;

/// A positive errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", std::io::Error::from_raw_os_error(*.0))]
pub struct Errno(pub c_int);

/// Result with an [`Errno`].
pub type Result<T> = std::result::Result<T, Errno>;

impl Errno {
    /// Returns the errno of this thread's last failed call.
    pub fn last() -> Self {
        match std::io::Error::last_os_error().raw_os_error() {
            Some(code) if code > 0 => Self(code),
            _ => Self(libc::EIO),
        }
    }

    /// Returns the negative errno, as the functions of the interface do.
    pub fn code(self) -> i32 {
        -self.0
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}
