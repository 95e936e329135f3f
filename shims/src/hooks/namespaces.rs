//! The calls by which a program enters namespaces. The kernel refuses some of them to a process with several threads.
//! For those the service thread ends, and is made again afterwards. If it cannot be made again, the library lets go of
//! the process first.

use libc::c_int;
use rdmasock_core::stats::Reason;

use crate::objects::library::Library;
use crate::service::{self, SignalsBlocked};
use crate::signals::handler;
use crate::startup::confine;
use crate::sys::real::{SetnsFn, UnshareFn};
use crate::sys::{errno, vfork};

const CLONE_NEWTIME: c_int = 0x80;

/// The flags of unshare(2) that only a process with one thread may use.
const UNSHARED_ALONE: c_int = libc::CLONE_NEWUSER | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM;

/// The namespaces that setns(2) refuses to a thread that shares anything with others (user, time), or that shares its
/// root and working directory (mount).
const ENTERED_ALONE: c_int = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | CLONE_NEWTIME;

/// The namespaces for the next child that leave a process unable to make a thread.
const LEAVES_NO_THREAD: c_int = libc::CLONE_NEWPID | CLONE_NEWTIME;

/// How often a refused call is made, and the pause between two tries, ns. The kernel forgets a thread's id some
/// instructions before the thread, and a thread of `os/apart.rs` lasts 0.1 ms.
const TRIES: u32 = 20;
const PAUSE: i64 = 50_000;

/// `unshare(2)`.
pub unsafe extern "C" fn unshare(real: UnshareFn, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    let call = || unsafe { real(flags) };
    call_alone(flags & UNSHARED_ALONE != 0, flags, &call)
}

/// `setns(2)`. `kind` 0 stands for any kind.
pub unsafe extern "C" fn setns(real: SetnsFn, fd: c_int, kind: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    let call = || unsafe { real(fd, kind) };
    call_alone(kind == 0 || kind & ENTERED_ALONE != 0, kind, &call)
}

/// Makes the call. If it fails as it does in a process with several threads, makes it again without the service thread.
/// `may_be_refused` is whether that can be the reason. A signal handler cannot make that thread again, so there the
/// error stands.
#[inline(never)]
fn call_alone(may_be_refused: bool, flags: c_int, call: &dyn Fn() -> c_int) -> c_int {
    let before = errno::get();
    let mut result = call();
    if result == 0 || !may_be_refused || !is_refused() {
        return result;
    }
    let mut error = errno::get();
    let is_ours = !Library::has_retired() && !vfork::is_child() && !vfork::is_stranger() && !handler::is_in_one();
    if let Some(library) = Library::current().filter(|library| is_ours && library.service.is_started()) {
        let _blocked = SignalsBlocked::new();
        if flags & LEAVES_NO_THREAD != 0 || !service::can_resume() {
            confine::let_go(Reason::Alone);
            result = repeat(call);
            error = errno::get();
        } else if service::pause(library) {
            result = repeat(call);
            error = errno::get();
            service::resume(library);
        }
    }
    errno::set(if result == 0 { before } else { error });
    result
}

/// Returns whether the failed call may have failed because the process has several threads.
fn is_refused() -> bool {
    matches!(errno::get(), libc::EINVAL | libc::EUSERS)
}

/// Makes the call until it is not refused, at most `TRIES` times. Returns the result of the last try.
fn repeat(call: &dyn Fn() -> c_int) -> c_int {
    for _ in 1..TRIES {
        let result = call();
        if result == 0 || !is_refused() {
            return result;
        }
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: PAUSE,
        });
    }
    call()
}
