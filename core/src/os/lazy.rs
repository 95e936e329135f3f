//! Mappings of which only the touched pages take memory, also in a process that has locked all its future memory
//! (mlockall(2), MCL_FUTURE). There the kernel would fill each new mapping at once. With MCL_CURRENT it fills all
//! mappings that can be written. So only the part in use of a long, mostly unused mapping is opened.

use core::ffi::c_void;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munlock, munmap};

/// Maps `bytes` of a file from its beginning, or anonymous memory without a file, at an address that the kernel
/// chooses. Fails with the kernel's errno; EAGAIN if the limit of locked memory is too low.
pub fn map(
    bytes: usize,
    protection: ProtFlags,
    flags: MapFlags,
    file: Option<BorrowedFd<'_>>,
) -> Result<*mut c_void, Errno> {
    let (null, none) = (core::ptr::null_mut(), ProtFlags::empty());
    // The kernel does not fill a mapping that permits no access.
    // SAFETY: a new mapping at an address that the kernel chooses replaces no other.
    let start = unsafe {
        match file {
            Some(fd) => mmap(null, bytes, none, flags, fd, 0),
            None => mmap_anonymous(null, bytes, none, flags),
        }
    }?;
    // SAFETY: exactly the new mapping, whose address no other code has yet.
    let opened = unsafe {
        // If munlock is refused, mprotect fills the mapping.
        let _ = munlock(start, bytes);
        mprotect(start, bytes, MprotectFlags::from_bits_retain(protection.bits()))
    };
    if let Err(error) = opened {
        // SAFETY: as above.
        let _ = unsafe { munmap(start, bytes) };
        return Err(error);
    }
    Ok(start)
}

/// Permits reads and writes of the `bytes` from `start` on. Fails with the kernel's errno.
///
/// # Safety
/// The range consists of whole pages, within a mapping that [`map`] has made.
pub unsafe fn open(start: *mut c_void, bytes: usize) -> Result<(), Errno> {
    // SAFETY: by the contract; the range loses no permission.
    unsafe { mprotect(start, bytes, MprotectFlags::READ | MprotectFlags::WRITE) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::forked::in_child;

    fn resident() -> usize {
        let status = std::fs::read_to_string("/proc/self/statm").unwrap();
        status.split(' ').nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn only_what_is_touched_is_filled_where_memory_is_locked() {
        in_child(|| {
            // SAFETY: affects the mappings of this child only.
            if unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
                println!("skipped: no memory may be locked");
                return;
            }
            const BYTES: usize = 64 << 20;
            let both = ProtFlags::READ | ProtFlags::WRITE;
            let Ok(start) = map(BYTES, both, MapFlags::PRIVATE, None) else {
                println!("skipped: not that much memory may be locked");
                return;
            };
            let before = resident();
            // SAFETY: the byte lies within the mapping, which is writable.
            unsafe { start.cast::<u8>().add(BYTES - 1).write(1) };
            assert!(resident() < before + 1000 && before < BYTES / 4096);
        });
    }
}
