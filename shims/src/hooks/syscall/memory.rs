//! System calls that change the memory map: the registered allocator is notified before each. It finds out about libc's
//! functions itself (`alloc/`).

use core::ffi::c_long;

use rdmasock_core::os::kernel;

use super::ways::{Handler, result};
use crate::config::arenas;

macro_rules! changes {
    ($($name:ident $number:ident;)*) => {
        /// Calls whose arguments the allocator checks.
        pub(super) const MEMORY: &[(c_long, Handler)] = &[$((libc::$number, $name)),*];

        $(unsafe extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
            arenas::before(libc::$number, [a, b, c, d, e, f]);
            // SAFETY: the program's own call.
            result(unsafe { kernel::call(libc::$number, [a, b, c, d, e, f]) })
        })*
    };
}

changes! {
    mmap SYS_mmap;
    munmap SYS_munmap;
    mremap SYS_mremap;
    mprotect SYS_mprotect;
    pkey_mprotect SYS_pkey_mprotect;
    madvise SYS_madvise;
    process_madvise SYS_process_madvise;
    shmat SYS_shmat;
}
