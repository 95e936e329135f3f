//! Allow-lists of system calls that kill, as programs load them: for a test program, which has nothing to lose.

mod system_service;

use libc::{c_int, c_long, sock_filter, sock_fprog};
use rdmasock_core::os::kernel;
pub use system_service::SYSTEM_SERVICE;

use crate::sys::Ret;

/// System calls that a guest needs which serves a connection: reading, writing, waiting, memory, and exit. They are
/// like the sandbox of OpenSSH's child before a user has logged in.
pub const SANDBOX: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_brk,
    libc::SYS_close,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_poll,
    libc::SYS_read,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// Further system calls, beside [`SANDBOX`], for a worker that plays scenarios in one process and without files. No
/// call here can begin a thread, share memory, or find another program.
pub const WORKER: &[c_long] = &[
    libc::SYS_accept,
    libc::SYS_bind,
    libc::SYS_clock_nanosleep,
    libc::SYS_connect,
    libc::SYS_dup,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_pwait,
    libc::SYS_fcntl,
    libc::SYS_getpeername,
    libc::SYS_getpid,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_ioctl,
    libc::SYS_listen,
    libc::SYS_lseek,
    libc::SYS_mprotect,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pipe2,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pselect6,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_rt_sigaction,
    libc::SYS_select,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_socket,
    libc::SYS_statx,
    libc::SYS_writev,
];

/// Return values of a filter (linux/seccomp.h).
const ALLOW: u32 = 0x7fff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const ERRNO: u32 = 0x0005_0000;

/// How a filter is loaded.
#[derive(Clone, Copy)]
pub enum By {
    /// prctl(), for the calling thread.
    Prctl,
    /// seccomp() by its number, for all threads.
    Seccomp,
    /// seccomp() for the calling thread, by a system call in line, which no hook sees.
    Unseen,
}

/// Loads a filter by which all calls but `allowed` kill the process.
pub fn load(allowed: &[c_long], by: By) -> Ret {
    // Load the system call's number; then comes one pair of steps for each call.
    let mut steps = vec![step(0x20, 0, 0, 0)];
    for number in allowed {
        steps.push(step(0x15, 0, 1, *number as u32));
        steps.push(step(0x06, 0, 0, ALLOW));
    }
    steps.push(step(0x06, 0, 0, KILL_PROCESS));
    load_steps(&mut steps, by)
}

/// Loads a filter by which all of `calls` fail with `error`. An entry with a third argument matches only that argument.
pub fn refuse(calls: &[(c_long, Option<c_int>)], error: c_int) -> Ret {
    load_steps(&mut refusal(calls, error), By::Prctl)
}

/// As [`refuse`], for this thread only, without the library's knowledge.
pub fn refuse_unseen(calls: &[(c_long, Option<c_int>)], error: c_int) {
    load_steps(&mut refusal(calls, error), By::Unseen).ok();
}

fn refusal(calls: &[(c_long, Option<c_int>)], error: c_int) -> Vec<sock_filter> {
    /// The offset of the lower half of the third argument in `struct seccomp_data`.
    const THIRD: u32 = 32;
    let mut steps = Vec::new();
    for (number, third) in calls {
        let rest = if third.is_some() { 3 } else { 1 };
        steps.push(step(0x20, 0, 0, 0));
        steps.push(step(0x15, 0, rest, *number as u32));
        if let Some(third) = third {
            steps.push(step(0x20, 0, 0, THIRD));
            steps.push(step(0x15, 0, 1, *third as u32));
        }
        steps.push(step(0x06, 0, 0, ERRNO | error as u32));
    }
    steps.push(step(0x06, 0, 0, ALLOW));
    steps
}

const fn step(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

fn load_steps(steps: &mut [sock_filter], by: By) -> Ret {
    let program = sock_fprog {
        len: steps.len() as u16,
        filter: steps.as_mut_ptr(),
    };
    call!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)).ok();
    match by {
        By::Prctl => call!(libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
            0,
            0
        )),
        By::Seccomp => call!(libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const program
        )),
        By::Unseen => {
            let arguments = [
                libc::SECCOMP_SET_MODE_FILTER as usize,
                0,
                (&raw const program).addr(),
                0,
                0,
                0,
            ];
            // SAFETY: the program is a live local.
            let loaded = unsafe { kernel::call(libc::SYS_seccomp, arguments) };
            Ret::of(if loaded.is_ok() { 0 } else { -1 })
        }
    }
}

/// Allows only read, write, and the end of the thread.
pub fn strict() -> Ret {
    call!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT, 0, 0, 0))
}
