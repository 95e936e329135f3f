//! The system calls that make and change arenas. They bypass libc, whose functions of these names are this library's
//! hooks.

use core::ptr::null_mut;

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use rustix::process::{Resource, getrlimit};

/// Reserves addresses without memory, which count towards RLIMIT_AS alone. `None` if the kernel has none.
pub(crate) fn reserve(len: usize) -> Option<usize> {
    // SAFETY: the mapping is fresh, at an address that the kernel chooses.
    let mapped = unsafe { mmap_anonymous(null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE) };
    mapped.ok().map(|at| at.expose_provenance())
}

/// Maps memory of zeroes; the kernel backs only the pages that are touched. `None` if it refuses.
pub(crate) fn zeroes(len: usize) -> Option<usize> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the mapping is fresh, at an address that the kernel chooses.
    let mapped = unsafe { mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE | MapFlags::NORESERVE) };
    mapped.ok().map(|at| at.expose_provenance())
}

/// Unmaps addresses.
///
/// # Safety
/// The addresses are this allocator's, and no code uses them.
pub(crate) unsafe fn release(at: usize, len: usize) {
    if len > 0 {
        // SAFETY: by the contract.
        let _ = unsafe { munmap(core::ptr::with_exposed_provenance_mut(at), len) };
    }
}

/// Makes memory at these addresses accessible, of zeroes where there was none. Returns false if the kernel has none.
///
/// # Safety
/// The addresses are of an arena.
pub(crate) unsafe fn commit(at: usize, len: usize) -> bool {
    let at = core::ptr::with_exposed_provenance_mut(at);
    // SAFETY: the caller promises that the addresses are an arena's; the content stays.
    let is_there = unsafe { mprotect(at, len, MprotectFlags::READ | MprotectFlags::WRITE) }.is_ok();
    if is_there {
        // SAFETY: as above; the content stays. The call fails on kernels without huge pages, which does no harm.
        let _ = unsafe { madvise(at, len, Advice::LinuxHugepage) };
    }
    is_there
}

/// Gives the memory at these addresses back to the kernel. The addresses stay reserved throughout. Returns false if the
/// kernel refuses.
///
/// # Safety
/// The addresses are an arena's, and no code uses their content.
pub(crate) unsafe fn decommit(at: usize, len: usize) -> bool {
    let at = core::ptr::with_exposed_provenance_mut(at);
    // SAFETY: the caller promises that no code uses the addresses' content.
    unsafe { mmap_anonymous(at, len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::FIXED) }.is_ok()
}

/// Returns true if the program has a limit on addresses (RLIMIT_AS), which large reservations would use up.
pub(crate) fn is_limited() -> bool {
    getrlimit(Resource::As).current.is_some()
}
