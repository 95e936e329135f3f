//! The functions of `include/rdmasock.h`, by which a program asks the library itself. Each is one function with the C
//! ABI. This file has the check that they share: whether an fd is a TCP socket of the program.
//!
//! As in [`hooks`](crate::hooks), code that blocks or has destructors lies below these, in functions of Rust's own ABI.

#![allow(
    clippy::missing_safety_doc,
    reason = "the contract of each function is what the header says of the one with its name"
)]

pub mod info;
pub mod prefer;
pub mod view;

use std::ffi::c_int;
use std::os::fd::BorrowedFd;

use crate::startup::lifecycle;
use crate::sys::sockopt;

/// Returns `Ok` if `fd` is a TCP socket of the program. `Err` is the errno with which a call on another fd fails.
fn is_tcp(fd: c_int) -> Result<(), c_int> {
    if fd < 0 || lifecycle::is_hidden(fd) {
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
