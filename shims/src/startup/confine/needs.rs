//! The system calls that the library makes for links within the host, and for streams on them. They come in addition to
//! the program's own, in the program's threads and in the service thread. Named as strace shows them, with the
//! arguments that filters check.

use libc::{
    AF_INET, AF_NETLINK, AF_UNIX, F_ADD_SEALS, F_DUPFD, F_DUPFD_CLOEXEC, F_GET_SEALS, F_GETFD, F_GETFL, F_OFD_GETLK,
    FIONREAD, MADV_DONTDUMP, MADV_DONTFORK, MADV_DONTNEED, MADV_POPULATE_WRITE, MADV_REMOVE, MAP_ANONYMOUS,
    MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE, SOCK_CLOEXEC, SOCK_DGRAM, SOCK_NONBLOCK,
    SOCK_SEQPACKET, SOCK_STREAM, c_int, c_long,
};

use super::filter::{Answer, Call, answer};

/// Calls that have to be allowed with any arguments.
const ANY: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_brk,
    libc::SYS_clock_nanosleep,
    libc::SYS_clone,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_connect,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_exit,
    libc::SYS_fallocate,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getdents64,
    libc::SYS_geteuid,
    libc::SYS_getpeername,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_kill,
    libc::SYS_listen,
    libc::SYS_lseek,
    libc::SYS_memfd_create,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munlock,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_ppoll,
    libc::SYS_prctl,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_prlimit64,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_socketpair,
    libc::SYS_statx,
    libc::SYS_tgkill,
    libc::SYS_uname,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Calls that have to be allowed with this second argument.
const SECOND: &[(c_long, c_int)] = &[
    (libc::SYS_fcntl, F_DUPFD),
    (libc::SYS_fcntl, F_DUPFD_CLOEXEC),
    (libc::SYS_fcntl, F_GETFD),
    (libc::SYS_fcntl, F_GETFL),
    (libc::SYS_fcntl, F_OFD_GETLK),
    (libc::SYS_fcntl, F_ADD_SEALS),
    (libc::SYS_fcntl, F_GET_SEALS),
    (libc::SYS_ioctl, FIONREAD as c_int),
];

/// Calls that have to be allowed with this third argument.
const THIRD: &[(c_long, c_int)] = &[
    (libc::SYS_madvise, MADV_DONTNEED),
    (libc::SYS_madvise, MADV_REMOVE),
    (libc::SYS_madvise, MADV_DONTDUMP),
    (libc::SYS_madvise, MADV_DONTFORK),
    (libc::SYS_madvise, MADV_POPULATE_WRITE),
];

/// Families and types of sockets that have to be allowed.
const SOCKETS: &[[c_int; 2]] = &[
    [AF_UNIX, SOCK_SEQPACKET],
    [AF_UNIX, SOCK_DGRAM],
    [AF_UNIX, SOCK_STREAM],
    [AF_NETLINK, SOCK_DGRAM],
    [AF_INET, SOCK_DGRAM],
];

/// Protections and flags of mappings that have to be allowed.
const MAPPINGS: &[[c_int; 2]] = &[
    [PROT_NONE, MAP_SHARED | MAP_NORESERVE],
    [PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE],
    [PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS],
];

/// Whether a filter allows all system calls of the library.
pub fn are_allowed(filter: &[libc::sock_filter]) -> bool {
    let with = |number, arguments| Call { number, arguments };
    let any = ANY.iter().map(|number| with(*number, [0; 6]));
    let second = SECOND
        .iter()
        .map(|(number, second)| with(*number, [3, *second as u64, 0, 0, 0, 0]));
    let third = THIRD
        .iter()
        .map(|(number, third)| with(*number, [4096, 4096, *third as u64, 0, 0, 0]));
    let sockets = SOCKETS.iter().map(|[family, kind]| {
        let kind = kind | SOCK_CLOEXEC | SOCK_NONBLOCK;
        with(libc::SYS_socket, [*family as u64, kind as u64, 0, 0, 0, 0])
    });
    let mappings = MAPPINGS.iter().map(|[protection, flags]| {
        let (protection, flags) = (*protection as u64, *flags as u64);
        with(libc::SYS_mmap, [0, 4096, protection, flags, 3, 0])
    });
    // If clone3 fails, libc makes threads with clone. So clone3 may fail, but must not end the process.
    let is_clone3_known = answer(filter, &with(libc::SYS_clone3, [0; 6])) != Answer::Other;
    is_clone3_known
        && any
            .chain(second)
            .chain(third)
            .chain(sockets)
            .chain(mappings)
            .all(|call| answer(filter, &call) == Answer::Allowed)
}
