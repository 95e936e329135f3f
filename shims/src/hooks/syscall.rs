//! `syscall(2)`: system calls by number. A call that has a hook under a libc name is served by that hook.
//! `preload/src/syscall.rs` hands all others to libc by a jump.
//!
//! In place of libc's function (`real`) a hook gets the system call itself, in line. The functions of libc are
//! cancellation points, take other arguments in places, and are not what the program has asked for.

mod forks;
mod memory;
mod others;
mod own;
mod ways;

use core::ffi::c_long;

use libc::{
    c_char, c_int, c_uint, c_ulong, c_void, epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t, pollfd, size_t,
    sockaddr, socklen_t, ssize_t, timespec, timeval,
};
pub use own::{LIBC, resolve};
use rdmasock_core::os::kernel;
pub use ways::Handler;
use ways::{direct, owns, owns_fd, owns_made, result, waits, waits_on};

use super::{confine, fd, io, namespaces, numbers, process, ready, socket};

/// The length of [`HANDLERS`]: larger than every number that is served.
pub const NUMBERS: usize = 448;

/// The handler of each number; `None` for a number that is not served.
pub static HANDLERS: [Option<Handler>; NUMBERS] = {
    let mut handlers = [None; NUMBERS];
    let mut i = 0;
    while i < SERVED.len() {
        let mut k = 0;
        while k < SERVED[i].len() {
            let (number, handler) = SERVED[i][k];
            handlers[number as usize] = Some(handler);
            k += 1;
        }
        i += 1;
    }
    handlers
};

/// `served![(a b c d e f) LIST: WAY NUMBER = FUNCTION(a: TYPE, …) -> RESULT; …]`: a list of numbers with their
/// handlers. A handler calls `FUNCTION`, a hook, with the system call for libc's function, in the way `WAY`.
macro_rules! served {
    (($a:ident $b:ident $c:ident $d:ident $e:ident $f:ident) $list:ident: $($way:ident $number:ident = $call:path, ($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        const $list: &[(c_long, Handler)] = &[$((libc::$number, {
            unsafe extern "C" fn system_call($($arg: $type),*) -> $result {
                let mut words = [0; 6];
                for (word, argument) in words.iter_mut().zip([$($arg as usize),*]) {
                    *word = argument;
                }
                // SAFETY: the program's own call.
                result(unsafe { kernel::call(libc::$number, words) }) as $result
            }
            #[allow(unused_variables, reason = "most calls have fewer")]
            unsafe extern "C" fn serve($a: usize, $b: usize, $c: usize, $d: usize, $e: usize, $f: usize) -> c_long {
                // SAFETY: the program's own call.
                let served = || unsafe { $call(system_call, $($arg as $type),*) } as c_long;
                // SAFETY: likewise.
                let plain = || unsafe { system_call($($arg as $type),*) } as c_long;
                $way($a, served, plain)
            }
            serve as Handler
        })),*];
    };
}

served! { (a b c d e f) BYTES:
    waits_on SYS_read = io::read, (a: c_int, b: *mut c_void, c: size_t) -> ssize_t;
    waits_on SYS_readv = io::readv, (a: c_int, b: *const iovec, c: c_int) -> ssize_t;
    waits_on SYS_recvfrom = io::recvfrom,
        (a: c_int, b: *mut c_void, c: size_t, d: c_int, e: *mut sockaddr, f: *mut socklen_t) -> ssize_t;
    waits_on SYS_recvmsg = io::recvmsg, (a: c_int, b: *mut msghdr, c: c_int) -> ssize_t;
    waits_on SYS_recvmmsg = io::recvmmsg, (a: c_int, b: *mut mmsghdr, c: c_uint, d: c_int, e: *mut timespec) -> c_int;
    waits_on SYS_write = io::write, (a: c_int, b: *const c_void, c: size_t) -> ssize_t;
    waits_on SYS_writev = io::writev, (a: c_int, b: *const iovec, c: c_int) -> ssize_t;
    waits_on SYS_sendto = io::sendto,
        (a: c_int, b: *const c_void, c: size_t, d: c_int, e: *const sockaddr, f: socklen_t) -> ssize_t;
    // On any socket: the message may pass on the fd of a connection.
    waits SYS_sendmsg = io::sendmsg, (a: c_int, b: *const msghdr, c: c_int) -> ssize_t;
    waits SYS_sendmmsg = io::sendmmsg, (a: c_int, b: *mut mmsghdr, c: c_uint, d: c_int) -> c_int;
    waits_on SYS_sendfile = io::sendfile, (a: c_int, b: c_int, c: *mut off_t, d: size_t) -> ssize_t;
    waits SYS_splice = io::splice,
        (a: c_int, b: *mut off_t, c: c_int, d: *mut off_t, e: size_t, f: c_uint) -> ssize_t;
}

served! { (a b c d e f) SOCKETS:
    owns SYS_socket = socket::socket, (a: c_int, b: c_int, c: c_int) -> c_int;
    owns_fd SYS_listen = socket::listen, (a: c_int, b: c_int) -> c_int;
    owns_made SYS_accept = socket::accept, (a: c_int, b: *mut sockaddr, c: *mut socklen_t) -> c_int;
    owns_made SYS_accept4 = socket::accept4, (a: c_int, b: *mut sockaddr, c: *mut socklen_t, d: c_int) -> c_int;
    owns SYS_connect = socket::connect, (a: c_int, b: *const sockaddr, c: socklen_t) -> c_int;
    direct SYS_shutdown = socket::shutdown, (a: c_int, b: c_int) -> c_int;
    direct SYS_getsockopt = socket::getsockopt,
        (a: c_int, b: c_int, c: c_int, d: *mut c_void, e: *mut socklen_t) -> c_int;
    direct SYS_setsockopt = socket::setsockopt,
        (a: c_int, b: c_int, c: c_int, d: *const c_void, e: socklen_t) -> c_int;
}

served! { (a b c d e f) DESCRIPTORS:
    owns_fd SYS_close = fd::close, (a: c_int) -> c_int;
    owns SYS_close_range = fd::close_range, (a: c_uint, b: c_uint, c: c_int) -> c_int;
    owns_made SYS_dup = fd::dup, (a: c_int) -> c_int;
    owns SYS_dup3 = fd::dup3, (a: c_int, b: c_int, c: c_int) -> c_int;
    owns_made SYS_fcntl = fd::fcntl, (a: c_int, b: c_int, c: c_ulong) -> c_int;
    direct SYS_ioctl = fd::ioctl, (a: c_int, b: c_ulong, c: *mut c_void) -> c_int;
    owns SYS_epoll_create1 = ready::epoll_create1, (a: c_int) -> c_int;
    owns SYS_epoll_ctl = ready::epoll_ctl, (a: c_int, b: c_int, c: c_int, d: *mut epoll_event) -> c_int;
}

served! { (a b c d e f) FILES:
    direct SYS_openat = numbers::openat, (a: c_int, b: *const c_char, c: c_int, d: c_uint) -> c_int;
    direct SYS_socketpair = numbers::socketpair, (a: c_int, b: c_int, c: c_int, d: *mut c_int) -> c_int;
    direct SYS_pipe2 = numbers::pipe2, (a: *mut c_int, b: c_int) -> c_int;
    direct SYS_eventfd2 = numbers::eventfd, (a: c_uint, b: c_int) -> c_int;
    direct SYS_timerfd_create = numbers::timerfd_create, (a: c_int, b: c_int) -> c_int;
    direct SYS_inotify_init1 = numbers::inotify_init1, (a: c_int) -> c_int;
    direct SYS_memfd_create = numbers::memfd_create, (a: *const c_char, b: c_uint) -> c_int;
}

served! { (a b c d e f) PROCESSES:
    owns SYS_execve = process::execve,
        (a: *const c_char, b: *const *const c_char, c: *const *const c_char) -> c_int;
    owns SYS_execveat = process::execveat,
        (a: c_int, b: *const c_char, c: *const *const c_char, d: *const *const c_char, e: c_int) -> c_int;
    owns SYS_prctl = confine::prctl, (a: c_int, b: c_ulong, c: c_ulong, d: c_ulong, e: c_ulong) -> c_int;
    owns SYS_seccomp = confine::seccomp, (a: c_uint, b: c_uint, c: *mut c_void) -> c_int;
    owns SYS_unshare = namespaces::unshare, (a: c_int) -> c_int;
    owns SYS_setns = namespaces::setns, (a: c_int, b: c_int) -> c_int;
}

/// Calls that newer architectures do not have.
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[(c_long, Handler)] = &[];

#[cfg(target_arch = "x86_64")]
served! { (a b c d e f) OLD:
    waits SYS_poll = ready::poll, (a: *mut pollfd, b: nfds_t, c: c_int) -> c_int;
    waits SYS_select = ready::select,
        (a: c_int, b: *mut fd_set, c: *mut fd_set, d: *mut fd_set, e: *mut timeval) -> c_int;
    owns SYS_epoll_create = ready::epoll_create, (a: c_int) -> c_int;
    waits_on SYS_epoll_wait = ready::epoll_wait, (a: c_int, b: *mut epoll_event, c: c_int, d: c_int) -> c_int;
    owns SYS_dup2 = fd::dup2, (a: c_int, b: c_int) -> c_int;
    direct SYS_open = numbers::open, (a: *const c_char, b: c_int, c: c_uint) -> c_int;
    direct SYS_creat = numbers::creat, (a: *const c_char, b: c_uint) -> c_int;
    direct SYS_pipe = numbers::pipe, (a: *mut c_int) -> c_int;
}

const SERVED: [&[(c_long, Handler)]; 9] = [
    BYTES,
    SOCKETS,
    DESCRIPTORS,
    FILES,
    PROCESSES,
    OLD,
    others::OTHERS,
    forks::FORKS,
    memory::MEMORY,
];
