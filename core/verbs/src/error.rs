//! Converts the ways in which libibverbs and librdmacm report errors to one `Result`.

use std::ffi::c_int;

pub(crate) use rdmasock_core::fabric::plugin::{Errno, Result};

/// Converts the result of a function that returns 0, or -1 with errno set.
pub(crate) fn check(result: c_int) -> Result<()> {
    if result == 0 { Ok(()) } else { Err(Errno::last()) }
}

/// Converts the result of a function that returns 0 or an errno. By its manual the errno is positive, but some
/// providers (siw) return it negative. -1 means that errno is set.
pub(crate) fn check_code(result: c_int) -> Result<()> {
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
        // SAFETY: closing -1 only sets errno.
        unsafe { libc::close(-1) };
        assert_eq!(check_code(-1), Err(Errno(libc::EBADF)));
        // SAFETY: as above.
        unsafe { libc::close(-1) };
        assert_eq!(check(-1), Err(Errno(libc::EBADF)));
    }
}
