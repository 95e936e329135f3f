//! The system calls by which arenas come and change, made past libc: its functions are our own hooks.

use core::ptr::null_mut;

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use rustix::process::{Resource, getrlimit};

/// Addresses without memory, which no limit on memory counts but that on addresses.
pub fn reserve(len: usize) -> Option<usize> {
    // SAFETY: a fresh mapping.
    let mapped = unsafe { mmap_anonymous(null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE) };
    mapped.ok().map(|at| at.expose_provenance())
}

/// Memory of zeroes, of which only what is touched exists.
pub fn zeroes(len: usize) -> Option<usize> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping.
    let mapped = unsafe { mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE | MapFlags::NORESERVE) };
    mapped.ok().map(|at| at.expose_provenance())
}

/// Gives addresses back.
///
/// # Safety
/// They are ours, and nobody uses them.
pub unsafe fn release(at: usize, len: usize) {
    if len > 0 {
        // SAFETY: by the contract.
        let _ = unsafe { munmap(core::ptr::with_exposed_provenance_mut(at), len) };
    }
}

/// There is memory at these addresses from now on, of zeroes if there was none. False if there is none to be had.
///
/// # Safety
/// The addresses are of an arena.
pub unsafe fn commit(at: usize, len: usize) -> bool {
    let at = core::ptr::with_exposed_provenance_mut(at);
    // SAFETY: by the contract; what is there stays.
    let is_there = unsafe { mprotect(at, len, MprotectFlags::READ | MprotectFlags::WRITE) }.is_ok();
    if is_there {
        // SAFETY: as above. Where there are no huge pages it fails, and nothing is lost.
        let _ = unsafe { madvise(at, len, Advice::LinuxHugepage) };
    }
    is_there
}

/// There is no memory at these addresses any more, which stay ours: nobody else can have them in between.
///
/// # Safety
/// The addresses are of an arena, and nobody uses what is there.
pub unsafe fn decommit(at: usize, len: usize) -> bool {
    let at = core::ptr::with_exposed_provenance_mut(at);
    // SAFETY: by the contract.
    unsafe { mmap_anonymous(at, len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::FIXED) }.is_ok()
}

/// Whether there is a limit on the addresses that the program may have, which large reservations would use up.
pub fn is_limited() -> bool {
    getrlimit(Resource::As).current.is_some()
}
