//! The calls that replace, spawn or end a process. Before an exec or a spawn, streams whose descriptor survives it go
//! back to TCP. The work around a `fork` is done by the library's handlers of `pthread_atfork`.

use libc::{FILE, c_char, c_int, c_void, pid_t, posix_spawn_file_actions_t, posix_spawnattr_t};

use crate::hooks::simple::hooks;
use crate::signals::jump::within;
use crate::sys::real::{
    CloneChildFn, CloneFn, ExecEnvFn, ExecFn, ExecveatFn, ExitFn, FexecveFn, ForkFn, PopenFn, PosixSpawnDup2Fn,
    PosixSpawnFn, SystemFn,
};

/// The arguments or the environment of a program.
type Strings = *const *const c_char;

hooks! {
    /// `execve(2)`.
    pub fn execve(ExecEnvFn, path: *const c_char, argv: Strings, envp: Strings) -> c_int;
    |plain| { before_exec(true); plain() }

    /// `execv(3)`, and `execl`.
    pub fn execv(ExecFn, path: *const c_char, argv: Strings) -> c_int;
    |plain| { before_exec(true); plain() }

    /// `execvp(3)`, and `execlp`.
    pub fn execvp(ExecFn, file: *const c_char, argv: Strings) -> c_int;
    |plain| { before_exec(true); plain() }

    /// `execvpe(3)`.
    pub fn execvpe(ExecEnvFn, file: *const c_char, argv: Strings, envp: Strings) -> c_int;
    |plain| { before_exec(true); plain() }

    /// `fexecve(3)`.
    pub fn fexecve(FexecveFn, fd: c_int, argv: Strings, envp: Strings) -> c_int;
    |plain| { before_exec(true); plain() }

    /// `execveat(2)`.
    pub fn execveat(ExecveatFn, dir: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int) -> c_int;
    |plain| { before_exec(true); plain() }

    /// `posix_spawn(3)` and `posix_spawnp`; both return an error number, not -1. The child runs inside libc, without
    /// hooks.
    pub fn posix_spawn(
        PosixSpawnFn, pid: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char
    ) -> c_int;
    |plain| { before_exec(false); plain() }

    /// `posix_spawn_file_actions_adddup2(3)`: the spawned program gets a copy of `old`, even if `old` is close-on-exec.
    pub fn posix_spawn_file_actions_adddup2(
        PosixSpawnDup2Fn, actions: *mut posix_spawn_file_actions_t, old: c_int, new: c_int
    ) -> c_int;
    |plain| { crate::process::pass::for_program(old); plain() }

    /// `system(3)`; spawns inside libc.
    pub fn system(SystemFn, command: *const c_char) -> c_int;
    |plain| { before_exec(false); plain() }

    /// `popen(3)`; spawns inside libc.
    pub fn popen(PopenFn, command: *const c_char, mode: *const c_char) -> *mut FILE;
    |plain| { before_exec(false); plain() }

    /// `fork(2)`. The library's handlers of `pthread_atfork` do the work before and after it. Signal handlers run
    /// before or after it, and a jump out of one leaves no lock of libc locked.
    pub fn fork(ForkFn) -> pid_t;
    |plain| within(plain)

    /// `_Fork(3)`: no handler of `pthread_atfork` runs, so the library's handlers are called here.
    pub fn fork_bare(ForkFn) -> pid_t;
    |plain| crate::notify::fork::around(|| plain() as isize) as pid_t

    /// `_exit(2)` and `_Exit`: no handler of `atexit` runs. Does not return.
    pub fn exit_now(ExitFn, status: c_int);
    |plain| { crate::process::exit::at_exit(); plain() }

    /// `quick_exit(3)`: only the handlers of `at_quick_exit` run. Does not return.
    pub fn quick_exit(ExitFn, status: c_int);
    |plain| { crate::process::exit::at_exit(); plain() }
}

/// The function that a child of `clone` runs.
#[derive(Clone, Copy)]
struct Work {
    function: CloneChildFn,
    argument: *mut c_void,
}

/// Runs the program's function in the child, which has a copy of the memory, and ends the process with its status. The
/// return to libc would end the calling thread alone, and the service thread would keep the process alive.
unsafe extern "C" fn work(at: *mut c_void) -> c_int {
    crate::notify::fork::child();
    // SAFETY: `at` lies in the frame of `clone` in the parent, which has not ended in this copy of the memory.
    let work = unsafe { *at.cast::<Work>() };
    // SAFETY: the program's own function.
    let status = unsafe { (work.function)(work.argument) };
    // SAFETY: libc's own function, which does not return.
    unsafe { exit_now(crate::sys::real::_exit(), status) };
    status
}

/// A child of `clone` with one of these flags is not treated like a child of fork(3). If it has other thread-local
/// storage, the library cannot be entered before the child has set that up.
const SHARES: c_int = libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_SETTLS;

/// `clone(2)`, libc's function. A child with its own memory and descriptors is treated like a child of fork(3). A child
/// that borrows the memory until it execs is treated like a child of vfork(2).
#[inline]
pub unsafe extern "C" fn clone(
    real: CloneFn,
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
        // SAFETY: the caller's arguments, but for the function, which calls the program's.
        let call = || unsafe { real(Some(work), stack, flags, at, parent, storage, child) } as isize;
        return crate::notify::fork::around(call) as c_int;
    }
    let borrows =
        flags & (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES) == libc::CLONE_VM | libc::CLONE_VFORK;
    if borrows {
        crate::sys::vfork::prepare();
    }
    // SAFETY: the caller's arguments, as they are.
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
