//! The calls by which a program enters namespaces. The kernel refuses some of them to a process with several threads.
//! The service thread ends for those, and is made again. Where it cannot be, the library lets go of the process first.

use libc::c_int;
use rdmasock_core::stats::Reason;

use crate::objects::library::Library;
use crate::service::{self, SignalsBlocked};
use crate::signals::handler;
use crate::startup::confine;
use crate::sys::errno;
use crate::sys::real::{SetnsFn, UnshareFn};
use crate::sys::vfork;

const CLONE_NEWTIME: c_int = 0x80;

/// What unshare(2) gives to a process with one thread alone.
const UNSHARED_ALONE: c_int = libc::CLONE_NEWUSER | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM;

/// The namespaces that setns(2) lets a thread enter that shares nothing with others (user, time), or not the root and
/// working directory (mount).
const ENTERED_ALONE: c_int = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | CLONE_NEWTIME;

/// A process whose next child is to be in another of these can have no further thread.
const LEAVES_NO_THREAD: c_int = libc::CLONE_NEWPID | CLONE_NEWTIME;

/// How often a refused call is repeated, and after which time, ns. The kernel forgets a thread's id some instructions
/// before the thread, and a thread of `os/apart.rs` lasts 0.1 ms.
const TRIES: u32 = 20;
const PAUSE: i64 = 50_000;

/// `unshare(2)`.
pub unsafe extern "C" fn unshare(real: UnshareFn, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    let call = || unsafe { real(flags) };
    call_alone(flags & UNSHARED_ALONE != 0, flags, &call)
}

/// `setns(2)`. The kind 0 is any.
pub unsafe extern "C" fn setns(real: SetnsFn, fd: c_int, kind: c_int) -> c_int {
    // SAFETY: the caller's arguments, as they are.
    let call = || unsafe { real(fd, kind) };
    call_alone(kind == 0 || kind & ENTERED_ALONE != 0, kind, &call)
}

/// Makes the call. If it fails as it does for want of being alone, where `may_be_refused` says that this is possible,
/// repeats it without the service thread. A signal handler cannot make that thread again, so there the error stands.
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

/// Whether the call that has failed may have done so because there are several threads.
fn is_refused() -> bool {
    matches!(errno::get(), libc::EINVAL | libc::EUSERS)
}

/// Returns the result of the last try.
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
