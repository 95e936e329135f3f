//! The registered allocator (`config/arenas.rs`): how it is found, its calls into the library, and the system calls by
//! number that it is notified of, because they change the memory map. It finds out about libc's functions itself
//! (`alloc/`).

use core::ffi::{c_int, c_long};

use rdmasock_core::os::kernel;

use crate::config::arenas;
use crate::hooks::syscall::{Handler, result};
use crate::objects::library::Library;
use crate::signals::jump::within;
use crate::sys::{errno, vfork};

/// The variable, by name, since the configuration is not read before it is needed.
const VARIABLE: &str = "RDMASOCK_ALLOC";

/// Finds the allocator, if the variable asks for it. Called when the library is loaded.
pub(super) fn find_allocator() {
    // SAFETY: libc's own variable.
    if unsafe { environ.is_null() } {
        return;
    }
    if std::env::var_os(VARIABLE).is_some_and(|value| value == "registered") {
        arenas::find(end);
    }
}

unsafe extern "C" {
    static environ: *const *const libc::c_char;
}

/// Implements [`End`](rdmasock_core::allocator::End).
unsafe extern "C" fn end(start: usize, len: usize, force: c_int) -> c_int {
    let Some(library) = Library::current() else {
        return 1;
    };
    if vfork::is_stranger() {
        // This process may run on the memory of its parent, and the registrations are the parent's. No call uses them,
        // since the epoch has changed.
        return 0;
    }
    let errno = errno::get();
    let ended = within(|| {
        let free = library.arenas.end(start, len, force != 0);
        library.free_kept(free.unwrap_or(0));
        free.is_some()
    });
    errno::set(errno);
    ended.into()
}

/// Defines handlers that notify the allocator before the system call.
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
