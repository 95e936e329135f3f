//! Allow-lists of system calls that kill, as programs load them: for a test program, which has nothing to lose.

use libc::{c_long, sock_filter, sock_fprog};

use crate::sys::Ret;

/// What the guest itself needs that serves a connection, in the manner of the sandbox in which OpenSSH's child talks before
/// anybody has logged in: reading, writing, waiting, memory, and the way out.
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

/// Of systemd's `@system-service` (systemd.exec(5), SystemCallFilter=) what a server may meet: @basic-io, @default, @file-system,
/// @io-event, @ipc, @memlock, @network-io, @process, @resources, @signal, @sync, @timer and single ones. Not in it are, among
/// others, io_uring's neighbours ptrace, mount, bpf and module loading.
pub const SYSTEM_SERVICE: &[c_long] = &[
    // @basic-io
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    // @default
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_execve,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_get_robust_list,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getpgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getrandom,
    libc::SYS_getrlimit,
    libc::SYS_getsid,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_membarrier,
    libc::SYS_nanosleep,
    libc::SYS_pause,
    libc::SYS_prlimit64,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    // @file-system
    libc::SYS_access,
    libc::SYS_chdir,
    libc::SYS_faccessat,
    libc::SYS_fallocate,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_ftruncate,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_lstat,
    libc::SYS_newfstatat,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_stat,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_unlink,
    // @io-event
    libc::SYS_epoll_create,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_eventfd2,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_select,
    // @ipc
    libc::SYS_memfd_create,
    libc::SYS_pipe,
    libc::SYS_pipe2,
    // @memlock
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mlockall,
    libc::SYS_munlock,
    libc::SYS_munlockall,
    // @network-io
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socket,
    libc::SYS_socketpair,
    // @process
    libc::SYS_arch_prctl,
    libc::SYS_capget,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_fork,
    libc::SYS_getrusage,
    libc::SYS_kill,
    libc::SYS_pidfd_open,
    libc::SYS_prctl,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_tgkill,
    libc::SYS_times,
    libc::SYS_vfork,
    libc::SYS_wait4,
    libc::SYS_waitid,
    // @resources, @signal, @sync, @timer
    libc::SYS_setrlimit,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_alarm,
    libc::SYS_timer_create,
    libc::SYS_timer_settime,
    // Single ones.
    libc::SYS_ioctl,
    libc::SYS_madvise,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_sysinfo,
    libc::SYS_umask,
    libc::SYS_uname,
];

/// What the kernel makes of a filter's word (linux/seccomp.h).
const ALLOW: u32 = 0x7fff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;

/// How a filter is loaded.
#[derive(Clone, Copy)]
pub enum By {
    /// prctl(), for the calling thread.
    Prctl,
    /// seccomp() by its number, for all threads.
    Seccomp,
}

/// Loads a filter by which all calls but `allowed` kill the process.
pub fn load(allowed: &[c_long], by: By) -> Ret {
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    // The number; one pair of steps for each.
    let mut steps = vec![step(0x20, 0, 0, 0)];
    for number in allowed {
        steps.push(step(0x15, 0, 1, *number as u32));
        steps.push(step(0x06, 0, 0, ALLOW));
    }
    steps.push(step(0x06, 0, 0, KILL_PROCESS));
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
    }
}

/// Only read, write, and the end of the thread.
pub fn strict() -> Ret {
    call!(libc::prctl(
        libc::PR_SET_SECCOMP,
        libc::SECCOMP_MODE_STRICT,
        0,
        0,
        0
    ))
}
