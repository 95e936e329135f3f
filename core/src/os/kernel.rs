//! System calls for which rustix has no function, as inline instructions. libc's functions for these calls, `syscall`
//! included, would enter the library's own hooks. No function here touches errno.

use core::arch::asm;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// Makes a system call. The kernel ignores arguments that the call does not have.
///
/// # Errors
/// The kernel's errno.
///
/// # Safety
/// The arguments meet the demands of the system call, and the call changes nothing that Rust relies on.
#[inline]
pub unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> Result<usize, Errno> {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    // SAFETY: the kernel's calling convention (syscall(2), "Architecture calling conventions"); the rest by the
    // contract.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack, preserves_flags),
        );
    }
    match result {
        -4095..0 => Err(Errno::from_raw_os_error(-result as i32)),
        done => Ok(done as usize),
    }
}

/// Returns the address of a value, as an argument for [`call`].
#[inline]
pub fn address<T>(of: *const T) -> usize {
    of.expose_provenance()
}

/// Calls setsockopt(2) with an integer.
pub fn set_option(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> Result<(), Errno> {
    let (fd, at) = (fd.as_raw_fd() as usize, address(&raw const value));
    let arguments = [fd, level as usize, name as usize, at, size_of_val(&value), 0];
    // SAFETY: the value is valid for reads of its size for the whole call, and the kernel keeps no pointer to it.
    unsafe { call(libc::SYS_setsockopt, arguments) }.map(drop)
}

/// Returns the first `N` bytes of the value of a socket's option (getsockopt(2)), and how many of them the kernel has
/// written.
pub fn option<const N: usize>(fd: BorrowedFd<'_>, level: c_int, name: c_int) -> Result<([u8; N], usize), Errno> {
    let mut value = [0; N];
    let mut len = N as libc::socklen_t;
    let (fd, level, name) = (fd.as_raw_fd() as usize, level as usize, name as usize);
    let (to, at) = (address(value.as_mut_ptr()), address(&raw mut len));
    // SAFETY: the kernel writes at most `len` bytes to `value`, and their number to `len`.
    unsafe { call(libc::SYS_getsockopt, [fd, level, name, to, at, 0]) }?;
    Ok((value, N.min(len as usize)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_six_arguments_arrive_and_errors_are_the_kernels() {
        let own = std::process::id() as usize;
        // SAFETY: getpid has no preconditions.
        let pid = unsafe { call(libc::SYS_getpid, [0; 6]) };
        assert_eq!(pid, Ok(own));
        // The sixth argument of mmap is the offset, which has to be a multiple of the page size.
        let map = |offset: usize| {
            let how = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
            // SAFETY: a new mapping at an address that the kernel chooses replaces no other.
            unsafe { call(libc::SYS_mmap, [0, 4096, 0, how, usize::MAX, offset]) }
        };
        assert_eq!(map(1), Err(Errno::INVAL));
        let at = map(0).unwrap();
        // SAFETY: the range was mapped above, and no reference into it exists.
        let gone = unsafe { call(libc::SYS_munmap, [at, 4096, 0, 0, 0, 0]) };
        assert_eq!(gone, Ok(0));
    }
}
