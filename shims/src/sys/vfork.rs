//! Processes that the library's tables are not about, although they have them. Hooks ask [`is_child`] before they
//! change anything.
//!
//! - The child of `vfork(2)` runs on its parent's memory, while the thread that called it stands still, until it execs
//!   or exits. Its descriptors are its own: a `close` before the exec would end the parent's stream. The call itself is
//!   in `preload/src/vfork.rs`, since a function cannot wrap it.
//! - The child of a fork or clone that no hook has seen (a system call in line) has a copy of the parent's memory, but
//!   for one page that the kernel fills with zeroes. The address of the fd table lies there. So every lookup finds
//!   nothing, and each call is the kernel's.

use core::ffi::c_void;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};
use libc::{c_int, c_long};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

/// A page that the child of a fork or clone finds full of zeroes (MADV_WIPEONFORK), whoever has made the child.
#[cfg_attr(target_arch = "aarch64", repr(C, align(65536)))]
#[cfg_attr(not(target_arch = "aarch64"), repr(C, align(4096)))]
struct Page {
    table: AtomicPtr<c_void>,
}

static PAGE: Page = Page {
    table: AtomicPtr::new(core::ptr::null_mut()),
};

/// What the page holds in a process whose beginning the library knows.
static TABLE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

/// Returns the address of the fd table, null where there is none.
#[inline]
pub fn table() -> *mut c_void {
    PAGE.table.load(Ordering::Acquire)
}

/// Sets the address of the fd table. False if it has one already. Fails where the kernel cannot wipe a page (before
/// Linux 4.14): a child that no hook has seen would use its parent's links.
pub fn set_table(table: *mut c_void) -> Result<bool, Errno> {
    let page = (&raw const PAGE).cast_mut().cast();
    // SAFETY: whole pages of the library's own, which hold an atomic that is valid when it is zero.
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

/// Whether this process began by a fork or clone that no hook has seen.
#[inline]
pub fn is_stray() -> bool {
    table().is_null() && !TABLE.load(Ordering::Relaxed).is_null()
}

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

/// The child of a call that was [prepared](prepare) has gone.
pub fn end() {
    RUNNING.fetch_sub(1, Ordering::Relaxed);
}

/// After the system call, in the parent, once the child has gone. `result` is the system call's: a process id, or
/// a negated errno. Returns what vfork returns.
pub extern "C" fn done(result: c_long) -> c_int {
    end();
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
pub fn is_borrower() -> bool {
    RUNNING.load(Ordering::Relaxed) != 0 && OWNER.load(Ordering::Relaxed) != pid()
}

/// Whether the library's tables are not about the calling process: it borrows the memory, or no hook has seen how it
/// began. Costs what [`is_borrower`] costs, and two loads.
#[inline]
pub fn is_child() -> bool {
    is_borrower() || is_stray()
}

/// In the child of a fork that was seen: it has the fd table again.
pub fn restore_table() {
    PAGE.table.store(TABLE.load(Ordering::Relaxed), Ordering::Release);
}

/// In the child of a real fork, whose memory is its own whatever another thread of the parent did.
pub fn on_fork_child() {
    RUNNING.store(0, Ordering::Relaxed);
    remember_process();
}
