//! Handles programs that restrict their own system calls (seccomp(2)) after the library has begun. A forbidden call of
//! the library would often kill the process.
//!
//! Before the program installs a filter, the library runs the filter on all system calls that the library makes. If the
//! filter forbids one, the library first ends its part in the process. All connections return to TCP, the service
//! thread ends, names are given up, and the tables are emptied. From then on every hook passes through, in fork
//! children too. A filter that was installed before the program began is not checked here.

use std::sync::atomic::Ordering::Release;

use libc::{
    AF_INET, AF_NETLINK, AF_UNIX, F_ADD_SEALS, F_DUPFD, F_DUPFD_CLOEXEC, F_GET_SEALS, F_GETFD, F_GETFL, F_OFD_GETLK,
    FIONREAD, MADV_DONTDUMP, MADV_DONTFORK, MADV_DONTNEED, MADV_POPULATE_WRITE, MADV_REMOVE, MAP_ANONYMOUS,
    MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE, SOCK_CLOEXEC, SOCK_DGRAM, SOCK_NONBLOCK,
    SOCK_SEQPACKET, SOCK_STREAM, c_int, c_long, sock_filter,
};
use rdmasock_core::os::privatefd;
use rdmasock_core::stats::Reason;

use crate::notify::table;
use crate::notify::table::Entry;
use crate::objects::library::Library;
use crate::objects::socket::Socket;
use crate::process::pass;
use crate::service;
use crate::sys::{errno, time, vfork};

/// The most instructions of a filter (linux/bpf_common.h, BPF_MAXINSNS).
const LONGEST: u16 = 4096;

/// Runs before the program enters the strict mode, which allows only read(2), write(2), _exit(2) and sigreturn(2).
pub(crate) fn before_strict() {
    begin(|| false);
}

/// Runs before the program installs the filter `program`.
///
/// # Safety
/// `program` is a filter that the kernel is about to read, or an address that the kernel will refuse.
pub(crate) unsafe fn before_filter(program: *const libc::sock_fprog) {
    // SAFETY: a plausible address leads to a filter, by the contract.
    let Some(program) = (unsafe { crate::sys::iov::plausible(program) }) else {
        return;
    };
    let (steps, len) = (program.filter.cast_const(), program.len);
    if !crate::sys::iov::is_plausible(steps) || len == 0 || len > LONGEST {
        return;
    }
    // SAFETY: `program` is a filter, by the contract, so `len` instructions can be read at the address `steps`.
    let steps: &[sock_filter] = unsafe { std::slice::from_raw_parts(steps, len.into()) };
    begin(|| are_allowed(steps));
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
pub(crate) fn let_go(reason: Reason) {
    pass::all_on_tcp(reason);
    time::wait_until(is_at_rest);
    if let Some(library) = Library::current() {
        tracing::info!(target: "rdmasock", %reason, "nothing is accelerated any more");
        service::end(library);
    }
    table::for_each(0..=u32::MAX, |fd, entry| {
        if let Entry::Socket(socket) = entry
            && !is_plain(socket)
        {
            tracing::warn!(target: "rdmasock", fd, "a connection that cannot leave its link is used on");
            return;
        }
        table::put(fd, Entry::None);
        match entry {
            Entry::None | Entry::Fresh { .. } => {}
            Entry::Listener(listener) => listener.release(),
            Entry::Epoll(set) => {
                set.retire();
                set.release(fd);
            }
            Entry::Socket(socket) => forget(socket),
        }
    });
    privatefd::dismiss_reserve();
    Library::retire();
}

fn is_plain(socket: &'static Socket) -> bool {
    socket.is_plain() && !socket.is_watched()
}

/// Returns whether the service thread has finished its part of the way back to TCP, for all sockets and epoll sets.
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

/// Releases the socket's object: from here on the library does not know the socket. The count of its holders is not
/// changed, since this process still holds the socket.
fn forget(socket: &'static Socket) {
    // This function is called once for each of the socket's fds. The first call does the work.
    if socket.numbers.fd.swap(-1, Release) < 0 {
        return;
    }
    if let Some(listener) = socket.promotion.take_listener() {
        listener.release();
    }
    socket.recycle(Library::current().map(|library| library.stats));
}

// The system calls that the library makes for links within the host, and for streams on them, in the program's threads
// and in the service thread. They are named as strace shows them, with the arguments that filters check.

/// Calls that the filter has to allow with any arguments. They are tested with arguments of 0.
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

/// The flags of each socket that the library makes.
const SOCKET: c_int = SOCK_CLOEXEC | SOCK_NONBLOCK;

/// Calls that the filter has to allow with these arguments.
const WITH: &[(c_long, [c_int; 5])] = &[
    (libc::SYS_fcntl, [3, F_DUPFD, 0, 0, 0]),
    (libc::SYS_fcntl, [3, F_DUPFD_CLOEXEC, 0, 0, 0]),
    (libc::SYS_fcntl, [3, F_GETFD, 0, 0, 0]),
    (libc::SYS_fcntl, [3, F_GETFL, 0, 0, 0]),
    (libc::SYS_fcntl, [3, F_OFD_GETLK, 0, 0, 0]),
    (libc::SYS_fcntl, [3, F_ADD_SEALS, 0, 0, 0]),
    (libc::SYS_fcntl, [3, F_GET_SEALS, 0, 0, 0]),
    (libc::SYS_ioctl, [3, FIONREAD as c_int, 0, 0, 0]),
    (libc::SYS_madvise, [4096, 4096, MADV_DONTNEED, 0, 0]),
    (libc::SYS_madvise, [4096, 4096, MADV_REMOVE, 0, 0]),
    (libc::SYS_madvise, [4096, 4096, MADV_DONTDUMP, 0, 0]),
    (libc::SYS_madvise, [4096, 4096, MADV_DONTFORK, 0, 0]),
    (libc::SYS_madvise, [4096, 4096, MADV_POPULATE_WRITE, 0, 0]),
    (libc::SYS_socket, [AF_UNIX, SOCK_SEQPACKET | SOCKET, 0, 0, 0]),
    (libc::SYS_socket, [AF_UNIX, SOCK_DGRAM | SOCKET, 0, 0, 0]),
    (libc::SYS_socket, [AF_UNIX, SOCK_STREAM | SOCKET, 0, 0, 0]),
    (libc::SYS_socket, [AF_NETLINK, SOCK_DGRAM | SOCKET, 0, 0, 0]),
    (libc::SYS_socket, [AF_INET, SOCK_DGRAM | SOCKET, 0, 0, 0]),
    (libc::SYS_mmap, [0, 4096, PROT_NONE, MAP_SHARED | MAP_NORESERVE, 3]),
    (
        libc::SYS_mmap,
        [0, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, 3],
    ),
    (
        libc::SYS_mmap,
        [0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, 3],
    ),
];

/// Returns whether a filter allows all system calls of the library.
fn are_allowed(filter: &[libc::sock_filter]) -> bool {
    let is = |number, arguments| matches!(answer(filter, &Call { number, arguments }), Some(ALLOW | LOG));
    // If clone3 fails, libc starts threads with clone. So the filter may make clone3 fail, but must not end the process
    // for it.
    let clone3 = Call {
        number: libc::SYS_clone3,
        arguments: [0; 6],
    };
    matches!(answer(filter, &clone3), Some(ALLOW | LOG | ERRNO))
        && ANY.iter().all(|number| is(*number, [0; 6]))
        && WITH.iter().all(|(number, arguments)| {
            let [a, b, c, d, e] = arguments.map(|argument| argument as u64);
            is(*number, [a, b, c, d, e, 0])
        })
}

// An interpreter for seccomp filters. It finds out what a filter does with a system call, without making that call. It
// knows the part of classic BPF that the kernel accepts in filters (seccomp(2); Linux, kernel/seccomp.c,
// `seccomp_check_filter`).

/// A system call as a filter sees it.
#[derive(Clone, Copy, Debug)]
struct Call {
    /// The number of the system call.
    number: c_long,
    /// The six arguments that a filter may check. Arguments that `ANY` and `WITH` do not give are 0.
    arguments: [u64; 6],
}

/// AUDIT_ARCH_X86_64 (linux/audit.h), by which filters check the architecture: the ELF machine, 64 bits, little-endian.
const ARCHITECTURE: u32 = 62 | 0xc000_0000;

/// The mask of the action in a filter's result, and three actions (linux/seccomp.h).
const ACTION: u32 = 0xffff_0000;
const ALLOW: u32 = 0x7fff_0000;
const LOG: u32 = 0x7ffc_0000;
const ERRNO: u32 = 0x0005_0000;

/// Returns the action that `filter` returns for `call`; `None` if the kernel would not accept the filter.
fn answer(filter: &[sock_filter], call: &Call) -> Option<u32> {
    run(filter, call).map(|word| word & ACTION)
}

/// Returns the 32-bit word at `offset` in the `struct seccomp_data` of `call`. The instruction pointer in it is not
/// known, and counts as 0. `None` for an offset that the kernel refuses.
fn load(call: &Call, offset: u32) -> Option<u32> {
    let half = |of: u64| (of >> (offset % 8 * 8)) as u32;
    match offset {
        0 => Some(call.number as u32),
        4 => Some(ARCHITECTURE),
        8 | 12 => Some(0),
        16..64 if offset.is_multiple_of(4) => call.arguments.get((offset as usize - 16) / 8).map(|a| half(*a)),
        _ => None,
    }
}

/// Runs the filter and returns its result; `None` if the kernel would not accept the filter. Always ends, since jumps
/// only lead forward.
fn run(filter: &[sock_filter], call: &Call) -> Option<u32> {
    /// `sizeof(struct seccomp_data)`
    const LENGTH: u32 = 64;
    let (mut a, mut x) = (0u32, 0u32);
    let mut memory = [0u32; 16];
    let mut at = 0usize;
    loop {
        let step = filter.get(at)?;
        at += 1;
        let k = step.k;
        // Each code is a sum of BPF_* constants (linux/bpf_common.h): 0x20 is BPF_LD + BPF_W + BPF_ABS. The lowest
        // three bits are the class: 4 is BPF_ALU, 5 is BPF_JMP.
        match step.code {
            0x20 => a = load(call, k)?,
            0x80 => a = LENGTH,
            0x81 => x = LENGTH,
            0x00 => a = k,
            0x01 => x = k,
            0x60 => a = *memory.get(k as usize)?,
            0x61 => x = *memory.get(k as usize)?,
            0x02 => *memory.get_mut(k as usize)? = a,
            0x03 => *memory.get_mut(k as usize)? = x,
            0x07 => x = a,
            0x87 => a = x,
            0x84 => a = a.wrapping_neg(),
            0x06 => return Some(k),
            0x16 => return Some(a),
            code if code & 7 == 4 => {
                let by = if code & 8 == 0 { k } else { x };
                a = match code & 0xf0 {
                    0x00 => a.wrapping_add(by),
                    0x10 => a.wrapping_sub(by),
                    0x20 => a.wrapping_mul(by),
                    0x30 => a.checked_div(by)?,
                    0x40 => a | by,
                    0x50 => a & by,
                    0x60 => a.checked_shl(by)?,
                    0x70 => a.checked_shr(by)?,
                    0xa0 => a ^ by,
                    _ => return None,
                };
            }
            0x05 => at = at.checked_add(k as usize)?,
            code if code & 7 == 5 => {
                let with = if code & 8 == 0 { k } else { x };
                let is_true = match code & 0xf0 {
                    0x10 => a == with,
                    0x20 => a > with,
                    0x30 => a >= with,
                    0x40 => a & with != 0,
                    _ => return None,
                };
                at += usize::from(if is_true { step.jt } else { step.jf });
            }
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn step(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
        sock_filter { code, jt, jf, k }
    }

    fn call(number: c_long, first: u64) -> Call {
        Call {
            number,
            arguments: [first, 0, 0, 0, 0, 0],
        }
    }

    const KILL: u32 = 0x8000_0000;

    #[test]
    fn an_allow_list_allows_what_is_on_it() {
        let filter = [
            step(0x20, 0, 0, 4),
            step(0x15, 1, 0, ARCHITECTURE),
            step(0x06, 0, 0, KILL),
            step(0x20, 0, 0, 0),
            step(0x15, 0, 1, libc::SYS_read as u32),
            step(0x06, 0, 0, ALLOW),
            step(0x15, 0, 1, libc::SYS_clone3 as u32),
            step(0x06, 0, 0, ERRNO | 38),
            step(0x06, 0, 0, KILL),
        ];
        let of = |number| answer(&filter, &call(number, 0));
        assert_eq!(of(libc::SYS_read), Some(ALLOW));
        assert_eq!(of(libc::SYS_clone3), Some(ERRNO));
        assert_eq!(of(libc::SYS_write), Some(KILL));
    }

    #[test]
    fn arguments_are_seen_in_halves() {
        // The filter requires that the upper half of the first argument is 7, and that bit 0 of the lower half is set
        // after a right shift by 3.
        let filter = [
            step(0x20, 0, 0, 20),
            step(0x15, 0, 5, 7),
            step(0x20, 0, 0, 16),
            step(0x74, 0, 0, 3),
            step(0x07, 0, 0, 0),
            step(0x87, 0, 0, 0),
            step(0x45, 1, 0, 1),
            step(0x06, 0, 0, KILL),
            step(0x06, 0, 0, LOG),
        ];
        let of = |first| answer(&filter, &call(0, first));
        assert_eq!(of(7 << 32 | 8), Some(LOG));
        assert_eq!(of(7 << 32 | 4), Some(KILL));
        assert_eq!(of(8), Some(KILL));
    }

    #[test]
    fn what_is_no_filter_allows_nothing() {
        for odd in [
            &[][..],
            &[step(0x00, 0, 0, ALLOW)],
            &[step(0x05, 0, 0, u32::MAX)],
            &[step(0x15, 200, 200, 0)],
            &[step(0x20, 0, 0, 2)],
            &[step(0x20, 0, 0, 64)],
            &[step(0x34, 0, 0, 0), step(0x06, 0, 0, ALLOW)],
            &[step(0x02, 0, 0, 16), step(0x06, 0, 0, ALLOW)],
            &[step(0x28, 0, 0, 0), step(0x06, 0, 0, ALLOW)],
        ] {
            assert_eq!(answer(odd, &call(0, 0)), None);
        }
    }
}
