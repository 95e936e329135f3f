//! The registered allocator (`arenas.rs`): how it is found, and what it says. Not the calls by number of which it is
//! told (`syscall/memory.rs`).

use core::ffi::c_int;

use crate::config::arenas;
use crate::objects::library::Library;
use crate::signals::jump::within;
use crate::sys::errno;
use crate::sys::vfork;

/// The variable, by its name: the configuration is not read before it is needed.
const VARIABLE: &str = "RDMASOCK_ALLOC";

/// When the library is loaded.
pub fn find_allocator() {
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

/// [`End`](rdmasock_core::allocator::End).
unsafe extern "C" fn end(start: usize, len: usize, force: c_int) -> c_int {
    let Some(library) = Library::current() else {
        return 1;
    };
    if vfork::is_stranger() {
        // On our memory, perhaps; what was registered is not its own. By the epoch nobody uses it.
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
