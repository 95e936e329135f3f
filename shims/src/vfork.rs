//! `vfork(2)`: the child runs on its parent's memory, while the thread that called it stands still, until
//! it execs or exits. What a hook changes there in our tables, the parent would see, although the
//! child's descriptors are its own: a `close` before the exec would end the parent's stream. So hooks
//! ask [`is_child`] before they change anything.
//!
//! The call itself is in `preload/src/vfork.rs`, since a function cannot wrap it.

use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use libc::{c_int, c_long};

/// Calls of vfork whose child still runs on our memory.
///
/// Relaxed throughout: the child is the thread that counted, as far as memory order goes, and other
/// threads only take the slower of two correct paths.
static RUNNING: AtomicU32 = AtomicU32::new(0);

/// The process that owns this memory; valid while `RUNNING` is not 0.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// The process that the library's tables are about; 0 before the library is loaded.
static HOME: AtomicI32 = AtomicI32::new(0);

/// When the library is loaded, and in the child of a fork.
pub fn remember_process() {
    HOME.store(pid(), Ordering::Relaxed);
}

/// Whether the caller is a process that began in a way that no hook sees: by the system calls of vfork, clone or
/// fork. It may run on our memory, and its descriptors are its own. Costs a system call.
pub fn is_stranger() -> bool {
    let home = HOME.load(Ordering::Relaxed);
    home != 0 && home != pid()
}

fn pid() -> c_int {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Before the system call, in the parent.
pub extern "C" fn prepare() {
    if !is_child() {
        OWNER.store(pid(), Ordering::Relaxed);
    }
    RUNNING.fetch_add(1, Ordering::Relaxed);
}

/// After it, in the parent, once the child has gone. `result` is the system call's: a process id, or
/// a negated errno. Returns what vfork returns.
pub extern "C" fn done(result: c_long) -> c_int {
    RUNNING.fetch_sub(1, Ordering::Relaxed);
    if result < 0 {
        // SAFETY: `__errno_location` returns the calling thread's errno, a valid c_int.
        unsafe { *libc::__errno_location() = -result as c_int };
        return -1;
    }
    result as c_int
}

/// Whether the caller is a vfork child, and so only borrows this memory. Costs a load; a system call
/// while there is such a child.
#[inline]
pub fn is_child() -> bool {
    RUNNING.load(Ordering::Relaxed) != 0 && OWNER.load(Ordering::Relaxed) != pid()
}

/// In the child of a real fork, whose memory is its own whatever another thread of the parent did.
pub fn on_fork_child() {
    RUNNING.store(0, Ordering::Relaxed);
    remember_process();
}
