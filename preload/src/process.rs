//! The hooks of the calls that replace, spawn, restrict, move or end a process. The implementation is in
//! `rdmasock_shims::hooks::process`. Three are elsewhere: the shims handle `exit` by `atexit`, `variadic.rs` has
//! `execl*`, and `vfork.rs` has `vfork`.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "every body hands on its caller's arguments, under its caller's contract"
)]

use libc::{FILE, c_char, c_int, c_ulong, c_void, pid_t, posix_spawn_file_actions_t, posix_spawnattr_t};
use rdmasock_shims::config::environment;
use rdmasock_shims::hooks::process as calls;
use rdmasock_shims::sys::real;
use redhook::hook;

hook! {
    unsafe fn execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int => hook_execve {
        calls::execve(environment::execve, path, argv, envp)
    }
}

hook! {
    unsafe fn execv(path: *const c_char, argv: *const *const c_char) -> c_int => hook_execv {
        calls::execv(environment::execv, path, argv)
    }
}

hook! {
    unsafe fn execvp(file: *const c_char, argv: *const *const c_char) -> c_int => hook_execvp {
        calls::execvp(environment::execvp, file, argv)
    }
}

hook! {
    unsafe fn execvpe(file: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int => hook_execvpe {
        calls::execvpe(environment::execvpe, file, argv, envp)
    }
}

hook! {
    unsafe fn fexecve(fd: c_int, argv: *const *const c_char, envp: *const *const c_char) -> c_int => hook_fexecve {
        calls::fexecve(environment::fexecve, fd, argv, envp)
    }
}

hook! {
    unsafe fn execveat(dir: c_int, path: *const c_char, argv: *const *const c_char, envp: *const *const c_char, flags: c_int) -> c_int => hook_execveat {
        calls::execveat(environment::execveat, dir, path, argv, envp, flags)
    }
}

hook! {
    unsafe fn posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t, attributes: *const posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int => hook_posix_spawn {
        calls::posix_spawn(environment::posix_spawn, pid, path, actions, attributes, argv, envp)
    }
}

hook! {
    unsafe fn posix_spawnp(pid: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t, attributes: *const posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int => hook_posix_spawnp {
        calls::posix_spawn(environment::posix_spawnp, pid, path, actions, attributes, argv, envp)
    }
}

hook! {
    unsafe fn posix_spawn_file_actions_adddup2(actions: *mut posix_spawn_file_actions_t, old: c_int, new: c_int) -> c_int => hook_posix_spawn_file_actions_adddup2 {
        calls::posix_spawn_file_actions_adddup2(real::posix_spawn_file_actions_adddup2(), actions, old, new)
    }
}

hook! {
    unsafe fn system(command: *const c_char) -> c_int => hook_system {
        calls::system(real::system(), command)
    }
}

hook! {
    unsafe fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE => hook_popen {
        calls::popen(real::popen(), command, mode)
    }
}

hook! {
    unsafe fn fork() -> pid_t => hook_fork {
        calls::fork(real::fork())
    }
}

hook! {
    unsafe fn _Fork() -> pid_t => hook_fork_bare {
        calls::fork_bare(real::_Fork())
    }
}

hook! {
    unsafe fn clone(function: Option<real::CloneChildFn>, stack: *mut c_void, flags: c_int, argument: *mut c_void, parent: *mut pid_t, storage: *mut c_void, child: *mut pid_t) -> c_int => hook_clone {
        calls::clone(real::clone(), function, stack, flags, argument, parent, storage, child)
    }
}

hook! {
    unsafe fn __clone(function: Option<real::CloneChildFn>, stack: *mut c_void, flags: c_int, argument: *mut c_void, parent: *mut pid_t, storage: *mut c_void, child: *mut pid_t) -> c_int => hook_clone_internal {
        calls::clone(real::__clone(), function, stack, flags, argument, parent, storage, child)
    }
}

hook! {
    unsafe fn _exit(status: c_int) => hook_exit {
        calls::exit_now(real::_exit(), status)
    }
}

hook! {
    unsafe fn _Exit(status: c_int) => hook_exit_c99 {
        calls::exit_now(real::_Exit(), status)
    }
}

hook! {
    unsafe fn quick_exit(status: c_int) => hook_quick_exit {
        calls::quick_exit(real::quick_exit(), status)
    }
}

hook! {
    unsafe fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int => hook_prctl {
        calls::prctl(real::prctl(), option, a, b, c, d)
    }
}

hook! {
    unsafe fn unshare(flags: c_int) -> c_int => hook_unshare {
        calls::unshare(real::unshare(), flags)
    }
}

hook! {
    unsafe fn setns(fd: c_int, kind: c_int) -> c_int => hook_setns {
        calls::setns(real::setns(), fd, kind)
    }
}
