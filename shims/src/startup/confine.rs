//! Programs that restrict their own system calls (seccomp(2)) after the library has begun, often on pain of death.
//!
//! Before a filter is installed, it is asked about all system calls of the library. If one is not allowed, the library
//! first ends its part in the process. All connections return to TCP, the service thread ends, names are given up, and
//! the tables are emptied. From then on every hook passes through, in fork children too. A filter that was installed
//! before the program began is not checked here.

mod filter;
mod needs;

use std::sync::atomic::Ordering::Release;

use libc::sock_filter;
use rdmasock_core::os::privatefd;
use rdmasock_core::stats::Reason;

use crate::notify::ready;
use crate::notify::table::{self, Entry};
use crate::objects::library::Library;
use crate::objects::socket::Socket;
use crate::process::pass;
use crate::service;
use crate::sys::{errno, time, vfork};

/// The most steps of a filter (linux/bpf_common.h, BPF_MAXINSNS).
const LONGEST: u16 = 4096;

/// Runs before the strict mode, in which only reading and writing is allowed.
pub fn before_strict() {
    begin(|| false);
}

/// Runs before the program installs the filter `program`.
///
/// # Safety
/// `program` is a filter that the kernel is about to read, or an address that it will refuse.
pub unsafe fn before_filter(program: *const libc::sock_fprog) {
    // SAFETY: the kernel reads a plausible address, by the contract.
    let Some(program) = (unsafe { crate::sys::iov::plausible(program) }) else {
        return;
    };
    let (steps, len) = (program.filter.cast_const(), program.len);
    if !crate::sys::iov::is_plausible(steps) || len == 0 || len > LONGEST {
        return;
    }
    // SAFETY: `program` is a filter, by the contract, and the kernel reads `len` steps from the same address.
    let steps: &[sock_filter] = unsafe { std::slice::from_raw_parts(steps, len.into()) };
    begin(|| needs::are_allowed(steps));
}

fn begin(is_harmless: impl FnOnce() -> bool) {
    if Library::has_retired() || vfork::is_stranger() || vfork::is_child() {
        return;
    }
    let errno = errno::get();
    if !is_harmless() {
        let_go(Reason::Confined);
    }
    errno::set(errno);
}

/// Takes all connections back to TCP and ends the library's part in this process, for `reason`.
pub fn let_go(reason: Reason) {
    pass::all_on_tcp(reason);
    time::wait_until(is_at_rest);
    if let Some(library) = Library::current() {
        tracing::info!(target: "rdmasock", %reason, "nothing is accelerated any more");
        service::end(library);
    }
    table::for_each(0..=u32::MAX, |fd, entry| match entry {
        Entry::None => {}
        Entry::Fresh { .. } => {
            table::put(fd, Entry::None);
        }
        Entry::Listener(listener) => {
            table::put(fd, Entry::None);
            listener.release();
        }
        Entry::Epoll(set) => {
            table::put(fd, Entry::None);
            set.retire();
            set.release(fd, table::another_of);
        }
        Entry::Socket(socket) if is_plain(socket) => {
            table::put(fd, Entry::None);
            forget(socket);
        }
        Entry::Socket(_) => {
            tracing::warn!(target: "rdmasock", fd, "a connection that cannot leave its link is used on");
        }
    });
    privatefd::dismiss_reserve();
    Library::retire();
}

fn is_plain(socket: &'static Socket) -> bool {
    socket.is_plain() && !ready::is_watched(socket)
}

/// Whether the service thread has finished all that the way back to TCP needs.
fn is_at_rest() -> bool {
    let mut all = true;
    table::for_each(0..=u32::MAX, |_, entry| {
        all &= match entry {
            Entry::Socket(socket) => is_plain(socket),
            Entry::Epoll(set) => set.is_kernels_alone(),
            _ => true,
        };
    });
    all
}

/// Releases the socket's object: the socket is the program's alone from now on. The count of its holders is not
/// changed, since this process still holds it.
fn forget(socket: &'static Socket) {
    // Called once for each of the socket's fds; the first call does the work.
    if socket.numbers.fd.swap(-1, Release) < 0 {
        return;
    }
    if let Some(listener) = socket.promotion.take_listener() {
        listener.release();
    }
    socket.recycle(Library::current().map(|library| library.stats));
}
