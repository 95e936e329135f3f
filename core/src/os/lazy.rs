//! Mappings of which only what is touched takes memory, also in a process that has all of its future memory locked
//! (mlockall(2), MCL_FUTURE): the kernel would fill each new mapping at once. With MCL_CURRENT it fills all that is
//! mapped and can be written, so of what is long and mostly unused only the part that is in use is opened.

use core::ffi::c_void;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munlock, munmap};

/// Maps `bytes` of a file from its beginning, or of nothing, at an address of the kernel's choice. The kernel's errors;
/// EAGAIN where the memory that may be locked does not suffice.
pub fn map(
    bytes: usize,
    protection: ProtFlags,
    flags: MapFlags,
    file: Option<BorrowedFd<'_>>,
) -> Result<*mut c_void, Errno> {
    let (null, none) = (core::ptr::null_mut(), ProtFlags::empty());
    // What cannot be accessed is not filled.
    // SAFETY: a new mapping at an address of the kernel's choice touches nobody's memory.
    let start = unsafe {
        match file {
            Some(fd) => mmap(null, bytes, none, flags, fd, 0),
            None => mmap_anonymous(null, bytes, none, flags),
        }
    }?;
    // SAFETY: exactly the new mapping, which nobody knows yet.
    let opened = unsafe {
        // Where that is refused, it is filled.
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

/// Lets the `bytes` from `start` on be read and written. The kernel's errors.
///
/// # Safety
/// They are within a mapping of [`map`]'s, and are whole pages.
pub unsafe fn open(start: *mut c_void, bytes: usize) -> Result<(), Errno> {
    // SAFETY: by the contract; nothing loses a permission.
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
            // SAFETY: concerns this child's mappings only.
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
            // SAFETY: the mapping is writable.
            unsafe { start.cast::<u8>().add(BYTES - 1).write(1) };
            assert!(resident() < before + 1000 && before < BYTES / 4096);
        });
    }
}
