//! The system calls that make and change arenas. They bypass libc's functions, because this library exports hooks with
//! the same names.

use core::ptr::null_mut;

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use rustix::process::{Resource, getrlimit};

/// Reserves `len` bytes of addresses without memory, which count only towards RLIMIT_AS. `None` if the kernel refuses.
pub(crate) fn reserve(len: usize) -> Option<usize> {
    // SAFETY: the mapping is fresh, at an address that the kernel chooses.
    let mapped = unsafe { mmap_anonymous(null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE) };
    mapped.ok().map(|at| at.expose_provenance())
}

/// Maps `len` bytes of zeroed memory. Only pages that are touched take memory. `None` if the kernel refuses.
pub(crate) fn zeroes(len: usize) -> Option<usize> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the mapping is fresh, at an address that the kernel chooses.
    let mapped = unsafe { mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE | MapFlags::NORESERVE) };
    mapped.ok().map(|at| at.expose_provenance())
}

/// Unmaps the `len` bytes at `at`.
///
/// # Safety
/// The addresses belong to this allocator, and no code uses them any more.
pub(crate) unsafe fn release(at: usize, len: usize) {
    if len > 0 {
        // SAFETY: by the contract.
        let _ = unsafe { munmap(core::ptr::with_exposed_provenance_mut(at), len) };
    }
}

/// Makes the memory at these addresses accessible. Memory that was not accessible before is zeroed; other memory keeps
/// its content. Returns false if the kernel has no memory.
///
/// # Safety
/// The addresses belong to an arena.
pub(crate) unsafe fn commit(at: usize, len: usize) -> bool {
    let at = core::ptr::with_exposed_provenance_mut(at);
    // SAFETY: by the contract the addresses belong to an arena. Their content stays.
    let is_there = unsafe { mprotect(at, len, MprotectFlags::READ | MprotectFlags::WRITE) }.is_ok();
    if is_there {
        // SAFETY: the addresses belong to an arena, and their content stays. On kernels without huge pages the call
        // fails, which does no harm.
        let _ = unsafe { madvise(at, len, Advice::LinuxHugepage) };
    }
    is_there
}

/// Gives the memory at these addresses back to the kernel. The addresses stay reserved throughout. Returns false if the
/// kernel refuses.
///
/// # Safety
/// The addresses belong to an arena, and no code uses their content any more.
pub(crate) unsafe fn decommit(at: usize, len: usize) -> bool {
    let at = core::ptr::with_exposed_provenance_mut(at);
    // SAFETY: by the contract no code uses the content of these addresses.
    unsafe { mmap_anonymous(at, len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::FIXED) }.is_ok()
}

/// Returns true if the process has a limit on addresses (RLIMIT_AS), which the reservation of an arena could use up.
pub(crate) fn is_limited() -> bool {
    getrlimit(Resource::As).current.is_some()
}
