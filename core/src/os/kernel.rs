//! System calls that rustix has no function for, made in line: libc's `syscall` is a function that the library
//! interposes, like those for which it has a name. Nothing here touches errno.

use core::arch::asm;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// Makes a system call. Arguments that it does not have may be anything.
///
/// # Errors
/// The kernel's.
///
/// # Safety
/// What the call demands of its arguments, and that it changes nothing that Rust relies on.
#[inline]
pub unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> Result<usize, Errno> {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    // SAFETY: the kernel's calling convention (syscall(2), "Architecture calling conventions"); the rest by the
    // contract.
    #[cfg(target_arch = "x86_64")]
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
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b,
            in("x2") c,
            in("x3") d,
            in("x4") e,
            in("x5") f,
            options(nostack),
        );
    }
    match result {
        -4095..0 => Err(Errno::from_raw_os_error(-result as i32)),
        done => Ok(done as usize),
    }
}

/// The address of something, as an argument.
#[inline]
pub fn address<T>(of: *const T) -> usize {
    of.expose_provenance()
}

/// setsockopt(2) with an integer.
pub fn set_option(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> Result<(), Errno> {
    let (fd, at) = (fd.as_raw_fd() as usize, address(&raw const value));
    let arguments = [fd, level as usize, name as usize, at, size_of_val(&value), 0];
    // SAFETY: the value is valid for reads of its size for the whole call, which keeps nothing of it.
    unsafe { call(libc::SYS_setsockopt, arguments) }.map(drop)
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
            // SAFETY: asks for a mapping of its own.
            unsafe { call(libc::SYS_mmap, [0, 4096, 0, how, usize::MAX, offset]) }
        };
        assert_eq!(map(1), Err(Errno::INVAL));
        let at = map(0).unwrap();
        // SAFETY: what was mapped above.
        let gone = unsafe { call(libc::SYS_munmap, [at, 4096, 0, 0, 0, 0]) };
        assert_eq!(gone, Ok(0));
    }
}
