//! `rdmasock_view` and `rdmasock_release`: receiving without a copy.

use std::ffi::{c_int, c_void};

use libc::{iovec, ssize_t};

use super::is_tcp;
use crate::data::rx::view as rx;
use crate::notify::closing;
use crate::notify::table::{self, Entry};
use crate::signals::jump::within;
use crate::sys::errno;
use crate::sys::iov::is_plausible;

/// Implements `rdmasock_view`: fills `pieces` and `*count` with the places of the next received bytes. Returns the
/// number of those bytes, or -1 with errno.
pub unsafe extern "C" fn view(fd: c_int, pieces: *mut iovec, count: *mut c_int, flags: c_int) -> ssize_t {
    if !is_plausible(pieces) || !is_plausible(count) {
        return errno::fail(libc::EFAULT);
    }
    // SAFETY: the program passes a pointer to its `int`. The read needs no alignment.
    let most = unsafe { count.read_unaligned() };
    if most < 1 || flags & !libc::MSG_DONTWAIT != 0 {
        return errno::fail(libc::EINVAL);
    }
    let before = errno::get();
    match look(fd, most as usize, flags) {
        Ok((found, n)) => {
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
            errno::set(before);
            n as ssize_t
        }
        Err(error) => errno::fail(error),
    }
}

// Not inlined: the forced unwind of pthread_cancel runs destructors in the functions below (see `hooks`).
#[inline(never)]
fn look(fd: c_int, most: usize, flags: c_int) -> Result<(rx::Pieces, usize), c_int> {
    match within(|| closing::connection(fd)) {
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

/// Implements `rdmasock_release`: receives the first `n` bytes of the view of `fd`. Returns 0, or -1 with errno.
pub unsafe extern "C" fn release(fd: c_int, n: usize) -> c_int {
    let before = errno::get();
    let released = within(|| match closing::connection(fd) {
        Some(socket) => rx::release(socket, n),
        None => Err(match why_not(fd) {
            libc::EOPNOTSUPP | libc::ENOTCONN => libc::EINVAL,
            error => error,
        }),
    });
    match released {
        Ok(()) => {
            errno::set(before);
            0
        }
        Err(error) => errno::fail(error),
    }
}
