//! System calls of the program that change pages or addresses. Before the program makes such a call, the memory of
//! arenas in its range is deregistered from all devices. If the call takes addresses away from an arena, the allocator
//! does not use them again.
//!
//! A call counts as a change unless it is known to be harmless, and even if it fails.

use core::ffi::c_long;

use libc::c_int;
use rdmasock_core::os::kernel;

use crate::arenas::{change, change_all};

/// `SHM_REMAP` of bits/shm.h.
const SHM_REMAP: c_int = 0o40000;
/// The values of madvise(2) that leave each page in place. Values that the libc crate has no name for are from
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

/// Handles a system call that the program is about to make, by its number and arguments.
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
        // A fork child has no mapping at these addresses, so the kernel may use them for another mapping there. So they
        // count as taken away.
        libc::SYS_madvise if c as c_int == libc::MADV_DONTFORK => change(a, b, true),
        libc::SYS_madvise if !HARMLESS.contains(&(c as c_int)) => change(a, b, false),
        // The argument of this call is a list of ranges. A read of the list here could fault, so all arenas count as
        // changed.
        libc::SYS_process_madvise if !HARMLESS.contains(&(d as c_int)) => change_all(),
        libc::SYS_shmat if c as c_int & SHM_REMAP != 0 => change(b, segment(a), true),
        _ => {}
    }
}

/// Returns the size of a System V segment in bytes. 0 if the kernel does not report it; then shmat fails too.
fn segment(id: usize) -> usize {
    // SAFETY: all zeroes are a valid `shmid_ds`.
    let mut about: libc::shmid_ds = unsafe { core::mem::zeroed() };
    let to = kernel::address(&raw mut about);
    // SAFETY: `to` points to a `shmid_ds`, which the call fills.
    let told = unsafe { kernel::call(libc::SYS_shmctl, [id, libc::IPC_STAT as usize, to, 0, 0, 0]) };
    told.map_or(0, |_| about.shm_segsz)
}
