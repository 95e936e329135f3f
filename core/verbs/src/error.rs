//! Errors as the interface has them: an errno. libibverbs reports them in four ways; here they become one.

use std::ffi::c_int;

/// A positive errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", std::io::Error::from_raw_os_error(*.0))]
pub struct Errno(pub c_int);

/// Result with an [`Errno`].
pub type Result<T> = std::result::Result<T, Errno>;

impl Errno {
    /// What the last failing call of this thread has left.
    pub fn last() -> Self {
        match std::io::Error::last_os_error().raw_os_error() {
            Some(code) if code > 0 => Self(code),
            _ => Self(libc::EIO),
        }
    }

    /// As the functions of the interface return it.
    pub fn code(self) -> i32 {
        -self.0
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

/// For a call that says 0, or -1 and errno.
pub fn check(result: c_int) -> Result<()> {
    if result == 0 { Ok(()) } else { Err(Errno::last()) }
}

/// For a call that says 0 or an errno: positive by its manual, negative from some providers (siw).
pub fn check_code(result: c_int) -> Result<()> {
    match result {
        0 => Ok(()),
        -1 => Err(Errno::last()),
        code => Err(Errno(code.checked_abs().unwrap_or(libc::EIO))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn posting_errors_of_either_sign_are_one() {
        assert_eq!(check_code(0), Ok(()));
        assert_eq!(check_code(libc::EINVAL), Err(Errno(libc::EINVAL)));
        assert_eq!(check_code(-libc::EINVAL), Err(Errno(libc::EINVAL)));
        assert_eq!(check_code(c_int::MIN), Err(Errno(libc::EIO)));
        assert_eq!(Errno(libc::EAGAIN).code(), -libc::EAGAIN);
    }

    #[test]
    fn minus_one_means_errno() {
        // SAFETY: closing no fd only sets errno.
        unsafe { libc::close(-1) };
        assert_eq!(check_code(-1), Err(Errno(libc::EBADF)));
        // SAFETY: as before.
        unsafe { libc::close(-1) };
        assert_eq!(check(-1), Err(Errno(libc::EBADF)));
    }
}
