//! Connects the library to the registered allocator (`alloc/`, `config/arenas.rs`): finds it, serves its calls into the
//! library, and notifies it of system calls by number that change the memory map. The allocator itself hooks the
//! functions of libc that do so.

use core::ffi::{c_int, c_long};

use rdmasock_core::os::kernel;

use crate::config::arenas;
use crate::hooks::syscall::{Handler, result};
use crate::objects::library::Library;
use crate::signals::jump::within;
use crate::sys::{errno, vfork};

/// The environment variable that asks for the allocator. It is read by its name, since the configuration is read only
/// when it is needed.
const VARIABLE: &str = "RDMASOCK_ALLOC";

/// Finds the allocator, if `VARIABLE` asks for it. Called when the library is loaded.
pub(super) fn find_allocator() {
    // SAFETY: `environ` is libc's own variable.
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
        // This process may run on the memory of its parent, and the registrations are the parent's. They stay, but no
        // call uses them, since the epoch has changed.
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

/// Defines handlers of system calls that notify the allocator first.
macro_rules! changes {
    ($($name:ident $number:ident;)*) => {
        /// The numbers of these system calls, with their handlers. The allocator checks the arguments.
        pub(super) const MEMORY: &[(c_long, Handler)] = &[$((libc::$number, $name)),*];

        $(unsafe extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
            arenas::before(libc::$number, [a, b, c, d, e, f]);
            // SAFETY: the system call and its arguments are the program's own.
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
