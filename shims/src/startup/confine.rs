//! A program that restricts its own system calls (seccomp(2)), often on pain of death, and always after the library has
//! begun.
//!
//! Before that happens its filter is asked about all that the library does. Where that is not allowed, the library lets
//! go of the process first: all connections go back to TCP, its thread ends, its names are given up, and the tables are
//! emptied, so that every hook passes through from then on. It does not come back, in fork children neither. What is
//! restricted from outside before the program begins is not seen here.

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
use crate::sys::errno;
use crate::sys::time;
use crate::sys::vfork;

/// A filter is not longer (linux/bpf_common.h, BPF_MAXINSNS).
const LONGEST: u16 = 4096;

/// Before the strict mode, in which reading and writing is all that is left.
pub fn before_strict() {
    begin(|| false);
}

/// Before the program's filter.
///
/// # Safety
/// `program` is a filter that the kernel is about to read, or an address that it will refuse.
pub unsafe fn before_filter(program: *const libc::sock_fprog) {
    // SAFETY: by the contract.
    let Some(program) = (unsafe { crate::sys::iov::plausible(program) }) else {
        return;
    };
    let (steps, len) = (program.filter.cast_const(), program.len);
    if !crate::sys::iov::is_plausible(steps) || len == 0 || len > LONGEST {
        return;
    }
    // SAFETY: by the contract; the kernel reads as many.
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

/// All that the service thread has to do for the way back is done.
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

/// The socket is the program's alone. (What counts its holders is left as it is: it goes on being held.)
fn forget(socket: &'static Socket) {
    // Under several numbers it comes here several times.
    if socket.numbers.fd.swap(-1, Release) < 0 {
        return;
    }
    if let Some(listener) = socket.promotion.take_listener() {
        listener.release();
    }
    socket.recycle(Library::current().map(|library| library.stats));
}
