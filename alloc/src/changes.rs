//! System calls of the program's that change what memory is, looked at before they are made: of which memory of the
//! arenas devices are to know nothing any more, and which may be somebody else's afterwards.
//!
//! What is not known to be harmless counts as a change, and what fails counts as if it had been done.

use core::ffi::c_long;

use libc::c_int;
use rdmasock_core::os::kernel;

use crate::arenas::{change, change_all};

/// `SHM_REMAP` of bits/shm.h.
const SHM_REMAP: c_int = 0o40000;
/// Advice that leaves each page where it is (madvise(2)); of asm-generic/mman-common.h where libc has no name for it.
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
    // MADV_COLLAPSE: pages that a device has are not moved.
    25,
];

/// A call with this number is about to be made.
pub fn before(number: c_long, arguments: &[usize; 6]) {
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
        // In a child that has none of it the addresses are anybody's.
        libc::SYS_madvise if c as c_int == libc::MADV_DONTFORK => change(a, b, true),
        libc::SYS_madvise if !HARMLESS.contains(&(c as c_int)) => change(a, b, false),
        // Of several places, which the kernel reads where it can and this cannot.
        libc::SYS_process_madvise if !HARMLESS.contains(&(d as c_int)) => change_all(),
        libc::SYS_shmat if c as c_int & SHM_REMAP != 0 => change(b, segment(a), true),
        _ => {}
    }
}

/// Bytes of a segment of System V's; 0 if that cannot be known, and then it cannot be attached.
fn segment(id: usize) -> usize {
    // SAFETY: all zeroes is one.
    let mut about: libc::shmid_ds = unsafe { core::mem::zeroed() };
    let to = kernel::address(&raw mut about);
    // SAFETY: room for what it tells.
    let told = unsafe { kernel::call(libc::SYS_shmctl, [id, libc::IPC_STAT as usize, to, 0, 0, 0]) };
    told.map_or(0, |_| about.shm_segsz)
}
