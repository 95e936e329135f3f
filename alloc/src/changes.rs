//! System calls of the program that change pages or addresses. Before such a call is made, the arenas' memory that it
//! names is deregistered. Addresses that it takes away are not used again.
//!
//! A call that is not known to be harmless counts as a change, and so does a call that fails.

use core::ffi::c_long;

use libc::c_int;
use rdmasock_core::os::kernel;

use crate::arenas::{change, change_all};

/// `SHM_REMAP` of bits/shm.h.
const SHM_REMAP: c_int = 0o40000;
/// Advice of madvise(2) that leaves each page in place. Numbers without a name in libc are from
/// asm-generic/mman-common.h.
const HARMLESS: [c_int; 12] = [
    libc::MADV_NORMAL,
    libc::MADV_RANDOM,
    libc::MADV_SEQUENTIAL,
    libc::MADV_WILLNEED,
    libc::MADV_HUGEPAGE,
    libc::MADV_NOHUGEPAGE,
    libc::MADV_DONTDUMP,
    libc::MADV_DODUMP,
    libc::MADV_POPULATE_READ,
    libc::MADV_POPULATE_WRITE,
    libc::MADV_DOFORK,
    // MADV_COLLAPSE: the kernel does not move pages that a device has pinned.
    25,
];

/// Handles a system call of the program that is about to be made.
pub(crate) fn before(number: c_long, arguments: &[usize; 6]) {
    let [a, b, c, d, e, _] = *arguments;
    match number {
        libc::SYS_munmap => change(a, b, true),
        libc::SYS_mmap if d as c_int & libc::MAP_FIXED != 0 => change(a, b, true),
        libc::SYS_mremap => {
            change(a, b.max(1), true);
            if d as c_int & libc::MREMAP_FIXED != 0 {
                change(e, c, true);
            }
        }
        libc::SYS_mprotect | libc::SYS_pkey_mprotect => change(a, b, false),
        // A child has no mapping there, so the kernel may give it these addresses for another one.
        libc::SYS_madvise if c as c_int == libc::MADV_DONTFORK => change(a, b, true),
        libc::SYS_madvise if !HARMLESS.contains(&(c as c_int)) => change(a, b, false),
        // The call has a list of places. Reading the list here could fault, so all arenas count as changed.
        libc::SYS_process_madvise if !HARMLESS.contains(&(d as c_int)) => change_all(),
        libc::SYS_shmat if c as c_int & SHM_REMAP != 0 => change(b, segment(a), true),
        _ => {}
    }
}

/// Returns the bytes of a System V segment; 0 if the kernel does not tell, and then the segment cannot be attached.
fn segment(id: usize) -> usize {
    // SAFETY: all zeroes are a valid `shmid_ds`.
    let mut about: libc::shmid_ds = unsafe { core::mem::zeroed() };
    let to = kernel::address(&raw mut about);
    // SAFETY: `to` points to a `shmid_ds`, which the call fills.
    let told = unsafe { kernel::call(libc::SYS_shmctl, [id, libc::IPC_STAT as usize, to, 0, 0, 0]) };
    told.map_or(0, |_| about.shm_segsz)
}
