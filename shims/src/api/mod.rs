//! What a program asks of the library itself (`include/rdmasock.h`): one function each, of C's ABI. What they have in
//! common is here: whose a number is.
//!
//! As in [`hooks`](crate::hooks), what blocks or has a destructor lies in functions of Rust's own ABI below these.

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

/// Whether `fd` is a TCP socket of the program's; `Err` is what a call on it fails with otherwise.
fn is_tcp(fd: c_int) -> Result<(), c_int> {
    if fd < 0 || lifecycle::is_hidden(fd) {
        return Err(libc::EBADF);
    }
    // SAFETY: not -1, and only asked about.
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
