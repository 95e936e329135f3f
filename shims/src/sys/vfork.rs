//! Detects processes that see the library's tables in memory, although the tables describe another process. Hooks call
//! [`is_child`] before they change a table.
//!
//! - The child of `vfork(2)` runs on its parent's memory until it execs or exits. The thread that called vfork waits
//!   meanwhile. The child has descriptors of its own, so its `close` must not end the parent's stream. vfork itself is
//!   in `preload/src/vfork.rs`, since an ordinary function cannot wrap it.
//! - The child of a fork or clone that no hook has seen (an inline system call) has a copy of the parent's memory,
//!   except for one page that the kernel fills with zeroes. That page holds the address of the fd table. So every
//!   lookup of an fd finds nothing, and each call passes through to the kernel.

use core::ffi::c_void;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use libc::{c_int, c_long};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

/// A page that the child of any fork or clone finds full of zeroes (MADV_WIPEONFORK), whether or not a hook has seen
/// the call.
#[repr(C, align(4096))]
struct Page {
    table: AtomicPtr<c_void>,
}

static PAGE: Page = Page {
    table: AtomicPtr::new(core::ptr::null_mut()),
};

/// The address of the fd table, outside of `PAGE`. A child that no hook has seen still has it.
static TABLE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

/// Returns the address of the fd table. Null before there is a table, and in a child that no hook has seen.
#[inline]
pub fn table() -> *mut c_void {
    PAGE.table.load(Ordering::Acquire)
}

/// Sets the address of the fd table. Returns `Ok(false)` if there is one already. `Err` means that the kernel cannot
/// wipe a page (before Linux 4.14). Without the wipe, a child that no hook has seen would use its parent's links.
pub fn set_table(table: *mut c_void) -> Result<bool, Errno> {
    let page = (&raw const PAGE).cast_mut().cast();
    // SAFETY: the range is whole pages of the library's own. They hold one atomic, for which zero is a valid value.
    unsafe { madvise(page, size_of::<Page>(), Advice::LinuxWipeOnFork) }?;
    let (null, order) = (core::ptr::null_mut(), Ordering::AcqRel);
    let is_first = PAGE
        .table
        .compare_exchange(null, table, order, Ordering::Acquire)
        .is_ok();
    if is_first {
        TABLE.store(table, Ordering::Release);
    }
    Ok(is_first)
}

/// Returns whether this process began by a fork or clone that no hook has seen.
#[inline]
pub fn is_stray() -> bool {
    table().is_null() && !TABLE.load(Ordering::Relaxed).is_null()
}

/// The number of vfork calls whose child still runs on this process's memory.
///
/// All accesses are Relaxed. To the memory order, the child is the same thread as the caller of vfork, which has
/// counted it. Another thread that finds a count above 0 only takes the slower of two correct paths.
static RUNNING: AtomicU32 = AtomicU32::new(0);

/// The process that owns this memory; valid while [`RUNNING`] is not 0.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// The process that the library's tables describe; 0 before the library is loaded.
static HOME: AtomicI32 = AtomicI32::new(0);

/// Records the process that the tables describe. Called when the library is loaded, and in the child of a fork.
pub fn remember_process() {
    HOME.store(pid(), Ordering::Relaxed);
}

/// Returns whether the tables describe another process than the caller's. The caller's process may have begun by an
/// inline system call of vfork, clone or fork, which no hook has seen. It may run on its parent's memory, and has
/// descriptors of its own. Costs a system call.
pub fn is_stranger() -> bool {
    let home = HOME.load(Ordering::Relaxed);
    home != 0 && home != pid()
}

fn pid() -> c_int {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Counts a vfork that is about to begin. Runs in the parent, before the system call.
pub extern "C" fn prepare() {
    if !is_child() {
        OWNER.store(pid(), Ordering::Relaxed);
    }
    RUNNING.fetch_add(1, Ordering::Relaxed);
}

/// Subtracts the child of a [prepared](prepare) vfork: the child has execed or exited.
pub fn end() {
    RUNNING.fetch_sub(1, Ordering::Relaxed);
}

/// Ends a vfork. Runs in the parent, after the system call, which returns when the child has execed or exited. `result`
/// is the system call's result: a process id, or a negated errno. Returns the value that vfork(2) returns, and sets
/// errno if the call has failed.
pub extern "C" fn done(result: c_long) -> c_int {
    end();
    if result < 0 {
        return crate::sys::errno::fail(-result as c_int);
    }
    result as c_int
}

/// Returns whether the caller is a vfork child, which borrows its parent's memory. Costs a load, and a system call
/// while there is such a child.
#[inline]
pub fn is_borrower() -> bool {
    RUNNING.load(Ordering::Relaxed) != 0 && OWNER.load(Ordering::Relaxed) != pid()
}

/// Returns whether the library's tables describe another process than the caller's: it borrows the memory, or no hook
/// has seen it begin. Costs what [`is_borrower`] costs, and two loads.
#[inline]
pub fn is_child() -> bool {
    is_borrower() || is_stray()
}

/// Restores the fd table's address in the child of a fork that a hook has seen.
pub fn restore_table() {
    PAGE.table.store(TABLE.load(Ordering::Relaxed), Ordering::Release);
}

/// Resets the count of vforks in the child of a fork. The child's memory is its own, even if another thread of the
/// parent was in vfork at the time.
pub fn on_fork_child() {
    RUNNING.store(0, Ordering::Relaxed);
    remember_process();
}
