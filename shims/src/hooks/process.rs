//! The calls that replace, spawn or end a process, move it to other namespaces, or restrict its system calls. Before an
//! exec or a spawn, streams whose descriptor survives it go back to TCP. The work around a `fork` is done by the
//! library's handlers of `pthread_atfork`.

use libc::{FILE, c_char, c_int, c_uint, c_ulong, c_void, pid_t, posix_spawn_file_actions_t, posix_spawnattr_t};
use rdmasock_core::stats::Reason;

use crate::hooks::hooks;
use crate::objects::library::Library;
use crate::service;
use crate::service::SignalsBlocked;
use crate::signals::handler;
use crate::signals::jump::within;
use crate::startup::seccomp;
use crate::sys::{errno, real, time, vfork};

/// The arguments or the environment of a program.
type Strings = *const *const c_char;

hooks! {
    /// `execve(2)` and `execvpe(3)`.
    pub fn execve(path: *const c_char, argv: Strings, envp: Strings) -> c_int;
    |plain| { before_exec(true); plain() }

    /// `execv(3)` and `execvp`, and `execl` and `execlp`.
    pub fn execv(path: *const c_char, argv: Strings) -> c_int;
    |plain| { before_exec(true); plain() }

    /// `fexecve(3)`.
    pub fn fexecve(fd: c_int, argv: Strings, envp: Strings) -> c_int;
    |plain| { before_exec(true); plain() }

    /// `execveat(2)`.
    pub fn execveat(dir: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int) -> c_int;
    |plain| { before_exec(true); plain() }

    /// `posix_spawn(3)` and `posix_spawnp`; both return an error number, not -1. The child runs inside libc, without
    /// hooks.
    pub fn posix_spawn(
        pid: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char
    ) -> c_int;
    |plain| { before_exec(false); plain() }

    /// `posix_spawn_file_actions_adddup2(3)`: the spawned program gets a copy of `old`, even if `old` is close-on-exec.
    pub fn posix_spawn_file_actions_adddup2(
        actions: *mut posix_spawn_file_actions_t, old: c_int, new: c_int
    ) -> c_int;
    |plain| { crate::process::pass::for_program(old); plain() }

    /// `system(3)`; spawns inside libc.
    pub fn system(command: *const c_char) -> c_int;
    |plain| { before_exec(false); plain() }

    /// `popen(3)`; spawns inside libc.
    pub fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE;
    |plain| { before_exec(false); plain() }

    /// `fork(2)`. The library's handlers of `pthread_atfork` do the work before and after it. The call is a critical
    /// section, so signal handlers run before or after it, and a jump out of a handler leaves no lock of libc locked.
    pub fn fork() -> pid_t;
    |plain| within(plain)

    /// `_Fork(3)`: libc runs no handler of `pthread_atfork`, so the library's handlers are called here.
    pub fn fork_bare() -> pid_t;
    |plain| crate::notify::fork::around(|| plain() as isize) as pid_t

    /// `_exit(2)` and `_Exit`: libc runs no handler of `atexit`, so the library's handler is called here. Does not
    /// return.
    pub fn exit_now(status: c_int);
    |plain| { crate::process::exit::at_exit(); plain() }

    /// `quick_exit(3)`: libc runs only handlers of `at_quick_exit`, so the library's handler is called here. Does not
    /// return.
    pub fn quick_exit(status: c_int);
    |plain| { crate::process::exit::at_exit(); plain() }
}

/// The type of a function that a child of `clone` runs.
type CloneChildFn = unsafe extern "C" fn(*mut c_void) -> c_int;

/// The program's function that a child of `clone` runs, and its argument.
#[derive(Clone, Copy)]
struct Work {
    function: CloneChildFn,
    argument: *mut c_void,
}

/// Runs in a child of `clone` that has a copy of the memory. Calls the program's function, and ends the process with
/// its result as the status. A return to libc would end only this thread, and the child's service thread would keep the
/// process alive.
unsafe extern "C" fn work(at: *mut c_void) -> c_int {
    crate::notify::fork::child();
    // SAFETY: `at` lies in the frame of `clone` in the parent, which has not ended in this copy of the memory.
    let work = unsafe { *at.cast::<Work>() };
    // SAFETY: the program has passed this function with this argument to `clone`.
    let status = unsafe { (work.function)(work.argument) };
    // SAFETY: libc's own function, which does not return.
    unsafe { exit_now(real::_exit(), status) };
    status
}

/// The flags of `clone` with which a child is not treated like a child of fork(3). By the first two it shares memory or
/// descriptors with its parent. By CLONE_SETTLS it has other thread-local storage, and no code of the library can run
/// before the child has set that up.
const SHARES: c_int = libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_SETTLS;

/// `clone(2)`, libc's function. A child with its own memory and descriptors is treated like a child of fork(3). A child
/// that borrows the memory until it execs is treated like a child of vfork(2).
#[inline]
pub unsafe extern "C" fn clone(
    real: real::clone,
    function: Option<CloneChildFn>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut pid_t,
    storage: *mut c_void,
    child: *mut pid_t,
) -> c_int {
    if let Some(function) = function
        && flags & SHARES == 0
    {
        let mut own = Work { function, argument };
        let at = (&raw mut own).cast();
        // SAFETY: the caller's arguments are passed on, except that `work` calls the program's function with its
        // argument.
        let call = || unsafe { real(Some(work), stack, flags, at, parent, storage, child) } as isize;
        return crate::notify::fork::around(call) as c_int;
    }
    let borrows =
        flags & (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES) == libc::CLONE_VM | libc::CLONE_VFORK;
    if borrows {
        crate::sys::vfork::prepare();
    }
    // SAFETY: the caller's arguments are passed on unchanged.
    let pid = unsafe { real(function, stack, flags, argument, parent, storage, child) };
    if borrows {
        crate::sys::vfork::end();
    }
    pid
}

/// Takes streams whose descriptor survives an exec back to TCP.
#[inline]
fn before_exec(replaces: bool) {
    if !crate::sys::vfork::is_stray() {
        crate::process::pass::before_exec(replaces);
    }
}

// The kernel refuses some calls that enter namespaces in a process with several threads. For such a call the service
// thread ends, and is started again afterwards. If it could not be started again, the library first ends its part in
// the process (`seccomp::let_go`).

const CLONE_NEWTIME: c_int = 0x80;

/// The flags of unshare(2) that only a process with one thread may use.
const UNSHARED_ALONE: c_int = libc::CLONE_NEWUSER | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM;

/// The kinds of namespaces that setns(2) refuses in a process with several threads (user, time), or to a thread that
/// shares its root and working directory with others (mount).
const ENTERED_ALONE: c_int = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | CLONE_NEWTIME;

/// The kinds of namespaces that begin with the next child. A process that has entered one of these can make no thread.
const LEAVES_NO_THREAD: c_int = libc::CLONE_NEWPID | CLONE_NEWTIME;

/// The most tries of a refused call, and the pause between two tries, ns. A call may be refused for a moment after the
/// service thread has ended: the kernel forgets a thread's id some instructions before the thread, and a thread of
/// `core/src/os/apart.rs` lasts 0.1 ms.
const TRIES: u32 = 20;
const PAUSE: i64 = 50_000;

/// `unshare(2)`.
pub unsafe extern "C" fn unshare(real: real::unshare, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    let call = || unsafe { real(flags) };
    call_alone(flags & UNSHARED_ALONE != 0, flags, &call)
}

/// `setns(2)`. `kind` 0 stands for any kind.
pub unsafe extern "C" fn setns(real: real::setns, fd: c_int, kind: c_int) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    let call = || unsafe { real(fd, kind) };
    call_alone(kind == 0 || kind & ENTERED_ALONE != 0, kind, &call)
}

/// Makes the call. If it fails with an error by which the kernel refuses it in a process with several threads, makes it
/// again without the service thread. `may_be_refused` says whether the kernel refuses such a call. A signal handler
/// cannot start the service thread again, so in a handler the error is returned.
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
            seccomp::let_go(Reason::Alone);
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
        time::sleep(PAUSE);
    }
    call()
}

/// `prctl(2)`. Arguments are arbitrary where the option has none.
#[inline]
pub unsafe extern "C" fn prctl(
    real: real::prctl,
    option: c_int,
    a: c_ulong,
    b: c_ulong,
    c: c_ulong,
    d: c_ulong,
) -> c_int {
    if option == libc::PR_SET_SECCOMP {
        match a as c_uint {
            libc::SECCOMP_MODE_STRICT => seccomp::before_strict(),
            // SAFETY: the address is the one that the program passes to the kernel for a filter.
            libc::SECCOMP_MODE_FILTER => unsafe { seccomp::before_filter(b as *const _) },
            _ => {}
        }
    }
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { real(option, a, b, c, d) }
}

/// `seccomp(2)`, for which libc has no function.
pub unsafe extern "C" fn seccomp(
    real: real::seccomp,
    operation: c_uint,
    flags: c_uint,
    argument: *mut c_void,
) -> c_int {
    match operation {
        libc::SECCOMP_SET_MODE_STRICT => seccomp::before_strict(),
        // SAFETY: the address is the one that the program passes to the kernel for a filter.
        libc::SECCOMP_SET_MODE_FILTER => unsafe { seccomp::before_filter(argument.cast()) },
        _ => {}
    }
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { real(operation, flags, argument) }
}
