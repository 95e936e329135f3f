//! `syscall(2)`: system calls by number. A call that has a hook under a libc name is served by that hook.
//! `preload/src/syscall.rs` hands all others to libc by a jump.
//!
//! As its argument `real`, the hook gets a function that makes the system call itself, in place of libc's function.
//! libc's functions are cancellation points, and some take other arguments than the system call.

use core::ffi::c_long;
use core::sync::atomic::{AtomicPtr, Ordering};

use libc::{
    c_char, c_int, c_uint, c_ulong, c_void, epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t, pollfd,
    sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};
use rdmasock_core::os::{kernel, privatefd};
use rdmasock_core::stats::Reason;
use rustix::io::Errno;

use crate::config::{IoUring, config};
use crate::hooks::{fd, io, process, ready, socket};
use crate::notify::{fork, table};
use crate::polling::poll;
use crate::process::pass;
use crate::startup;
use crate::sys::real;
use crate::sys::time::Timeout;
use crate::sys::{errno, iov, vfork};

/// The length of [`HANDLERS`]: larger than every number that is served.
pub const NUMBERS: usize = 448;

/// The handler of a number. It gets six arguments, and uses those that the system call has. It returns what libc's
/// `syscall` returns, and sets errno.
pub type Handler = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> c_long;

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

/// `system_call!(NUMBER(ARGUMENT: TYPE, …) -> RESULT = WORD, …)` returns a function with the signature of libc's that
/// makes the system call with the `WORD`s. Words that are not given are 0.
macro_rules! system_call {
    ($number:ident($($argument:ident: $type:ty),*) -> $result:ty = $($word:expr),*) => {{
        unsafe extern "C" fn system_call($($argument: $type),*) -> $result {
            let mut words = [0; 6];
            for (word, argument) in words.iter_mut().zip([$($word as usize),*]) {
                *word = argument;
            }
            // SAFETY: the system call and its arguments are the program's own.
            result(unsafe { kernel::call(libc::$number, words) }) as $result
        }
        system_call
    }};
}

/// Defines the list of the numbers in the table (`sys/hooked.rs`), with their handlers. A handler calls the row's hook
/// with the system call in place of libc's function. It does so by the function that the row names as `WAY`.
macro_rules! served {
    ($($module:ident with $libc:ident {$(
        $function:ident $arguments:tt -> $result:ty: $($symbol:ident),* $(| $way:ident $number:ident)*;
    )*})*) => {
        const CALLS: &[(c_long, Handler)] = &[
            $($($((libc::$number, served!(@handler $way $number $module $function $arguments $result)),)*)*)*
        ];
    };
    (@handler $way:ident $number:ident $module:ident $function:ident
        ($($argument:ident: $type:ty),*) $result:ty) => {{
        unsafe extern "C" fn serve(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
            let [$($argument,)* ..] = [a, b, c, d, e, f];
            let system_call = system_call!($number($($argument: $type),*) -> $result = $($argument),*);
            // SAFETY: the system call and its arguments are the program's own.
            let served = || unsafe { $module::$function(system_call, $($argument as $type),*) } as c_long;
            // SAFETY: the system call and its arguments are the program's own.
            let plain = || unsafe { system_call($($argument as $type),*) } as c_long;
            $way(a, served, plain)
        }
        serve as Handler
    }};
}

crate::hooked! { served }

/// Returns a system call's result as libc does: -1 on an error, with errno set.
pub(super) fn result(of: Result<usize, Errno>) -> c_long {
    match of {
        Ok(value) => value as c_long,
        Err(error) => errno::fail::<c_long>(error.raw_os_error()),
    }
}

const SERVED: [&[(c_long, Handler)]; 3] = [CALLS, OTHERS, super::memory::MEMORY];

// The functions that a row of the table names as `WAY`. Each decides for one call by number whether the hook serves it
// (`served`), or the system call is made as it is (`plain`). They differ in three points: whether the fd table must
// have an entry for the call's fd, whether the call may wait until a link has bytes or room, and whether it changes the
// library's tables.

/// `PTHREAD_CANCEL_DISABLE` of glibc's pthread.h.
const CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Serves a call that never waits until a link has bytes or room. The call is served in any process, also one that the
/// library's tables do not describe.
fn direct(_first: usize, served: impl FnOnce() -> c_long, _plain: impl FnOnce() -> c_long) -> c_long {
    served()
}

/// Serves a call that may wait until a link has bytes or room. Such a wait is a cancellation point, as in libc's
/// functions, but `syscall` is none. So cancellation is disabled meanwhile.
fn waits(_first: usize, served: impl FnOnce() -> c_long, _plain: impl FnOnce() -> c_long) -> c_long {
    let mut before = 0;
    // SAFETY: async-signal-safe in glibc; the state is this thread's own.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut before) };
    let result = served();
    // SAFETY: the state is this thread's own, from the first call.
    unsafe { pthread_setcancelstate(before, core::ptr::null_mut()) };
    result
}

/// Serves a call by [`waits`] if the fd table has an entry for `fd`; otherwise makes the system call.
fn waits_on(fd: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    if table::is_known(fd as c_int) {
        waits(fd, served, plain)
    } else {
        plain()
    }
}

/// Serves a call that changes the library's tables. They do not describe a child that has just been made by vfork, or
/// by a system call that no hook has seen. Such a child may run on its parent's memory, so it only makes the system
/// call.
fn owns(_first: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    if vfork::is_stranger() { plain() } else { served() }
}

/// Serves a call by [`owns`] if the fd table has an entry for `fd`, or if `fd` is the library's own. Otherwise makes
/// the system call.
fn owns_fd(fd: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    let concerns = table::is_known(fd as c_int) || privatefd::is_private(fd as c_int);
    if concerns { owns(fd, served, plain) } else { plain() }
}

/// Serves a call that makes a new fd from `fd`. If the fd table has an entry for `fd`, serves it by [`owns`]. Otherwise
/// serves it also in a process that the tables do not describe, because the hook then changes nothing but the new fd.
fn owns_made(fd: usize, served: impl FnOnce() -> c_long, plain: impl FnOnce() -> c_long) -> c_long {
    if table::is_known(fd as c_int) {
        owns(fd, served, plain)
    } else {
        served()
    }
}

/// libc's own `syscall`, which gets the calls that are not served. Before it is looked up, the value is a function that
/// looks it up and jumps there.
pub static LIBC: AtomicPtr<c_void> = AtomicPtr::new(unresolved as *mut c_void);

/// Looks up libc's own `syscall`, stores it in `LIBC`, and returns it.
pub(super) extern "C" fn resolve() -> real::syscall {
    let function = real::syscall();
    LIBC.store(function as *mut c_void, Ordering::Relaxed);
    function
}

/// The value of `LIBC` before the library's constructor has run: looks up libc's `syscall`, and jumps there with
/// unchanged arguments.
#[unsafe(naked)]
unsafe extern "C" fn unresolved() {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8", // A call needs rsp at a multiple of 16.
        ".cfi_adjust_cfa_offset 56",
        "call {resolve}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        ".cfi_adjust_cfa_offset -56",
        "jmp rax",
        ".cfi_endproc",
        resolve = sym resolve,
    )
}

// fork and clone by number. A child with memory and descriptors of its own is treated like a child of fork(3): the
// library's fork handlers run, although libc runs no handler of `pthread_atfork`. A call whose child shares memory or
// descriptors with its parent goes on to libc by a jump.

/// The flags by which a child shares memory or descriptors with its parent.
const SHARES: c_int = libc::CLONE_VM | libc::CLONE_FILES;

/// `by_number!(NAME NUMBER: INSTRUCTIONS)` defines a handler. It jumps to `own` if the instructions leave the zero flag
/// set: the child is like a child of fork(3). Otherwise, and from the label 2, it jumps to libc's `syscall`.
///
/// The handler is naked, since a child that shares the memory, or is given a stack, returns on another stack. It undoes
/// the moves of the arguments in `preload/src/syscall.rs`.
macro_rules! by_number {
    ($name:ident $number:ident: $($instruction:literal)*) => {
        #[unsafe(naked)]
        unsafe extern "C" fn $name(_: usize, _: usize, _: usize, _: usize, _: usize, _: usize) -> c_long {
            unsafe extern "C" fn own(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
                // SAFETY: the system call is the program's own. Its child shares no memory, so it continues here on a
                // copy of this stack.
                forked(|| unsafe { kernel::call(libc::$number, [a, b, c, d, e, f]) })
            }
            core::arch::naked_asm!(
                ".cfi_startproc",
                $($instruction,)*
                "jz {own}",
                "2: mov r9, r8",
                "mov r8, rcx",
                "mov rcx, rdx",
                "mov rdx, rsi",
                "mov rsi, rdi",
                "mov edi, {NUMBER}",
                "jmp [rip + {LIBC}]",
                ".cfi_endproc",
                SHARES = const SHARES,
                NUMBER = const libc::$number,
                own = sym own,
                LIBC = sym LIBC,
            )
        }
    };
}

by_number! { clone SYS_clone:
    "test edi, {SHARES}" "jnz 2f" "test rsi, rsi"
}

// In `struct clone_args` the flags are at offset 0 and the stack at offset 40 (linux/sched.h).
by_number! { clone3 SYS_clone3:
    "test rdi, rdi" "jz 2f" "test dword ptr [rdi], {SHARES}" "jnz 2f" "cmp qword ptr [rdi + 40], 0"
}

unsafe extern "C" fn fork_by_number(_: usize, _: usize, _: usize, _: usize, _: usize, _: usize) -> c_long {
    // SAFETY: the system call and its arguments are the program's own.
    forked(|| unsafe { kernel::call(libc::SYS_fork, [0; 6]) })
}

/// Makes a call that forks, with the library's fork handlers around it. No handler runs in a process that the library's
/// tables do not describe, because it may run on its parent's memory.
fn forked(call: impl FnOnce() -> Result<usize, Errno>) -> c_long {
    if vfork::is_stranger() {
        return result(call());
    }
    // `made` is the kernel's own result, in which an errno is negative.
    let made = fork::around(|| call().map_or_else(|e| -e.raw_os_error() as isize, |pid| pid as isize));
    result(usize::try_from(made).map_err(|_| Errno::from_raw_os_error(-made as i32)))
}

// System calls that differ from libc's functions in their arguments, or in the values that they leave in them.

/// The numbers of these system calls, and of exit_group, io_uring_setup, fork, clone and clone3, each with its handler.
const OTHERS: &[(c_long, Handler)] = &[
    (libc::SYS_preadv2, preadv2),
    (libc::SYS_pwritev2, pwritev2),
    (libc::SYS_ppoll, ppoll),
    (libc::SYS_pselect6, pselect6),
    (libc::SYS_epoll_pwait, epoll_pwait),
    (libc::SYS_epoll_pwait2, epoll_pwait2),
    (libc::SYS_exit_group, exit_group),
    (libc::SYS_io_uring_setup, io_uring_setup),
    (libc::SYS_fork, fork_by_number),
    (libc::SYS_clone, clone),
    (libc::SYS_clone3, clone3),
];

/// Defines a handler for a system call that takes its offset in two arguments. On a 64-bit machine the first of them is
/// the whole offset.
macro_rules! vector_at {
    ($name:ident, $number:ident) => {
        unsafe extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
            let call = system_call!($number(fd: c_int, iov: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t
                = fd, iov, count, at, 0, flags);
            let (fd, iov, count, flags) = (a as c_int, b as *const iovec, c as c_int, f as c_int);
            // SAFETY: the system call and its arguments are the program's own.
            let served = || unsafe { io::$name(call, fd, iov, count, d as off_t, flags) } as c_long;
            // SAFETY: the system call and its arguments are the program's own.
            let plain = || result(unsafe { kernel::call(libc::$number, [a, b, c, d, e, f]) });
            waits_on(a, served, plain)
        }
    };
}

vector_at!(preadv2, SYS_preadv2);
vector_at!(pwritev2, SYS_pwritev2);

/// The size of a signal mask that the kernel accepts, bytes.
const MASK_SIZE: usize = 8;

/// Returns whether the kernel accepts a signal mask of `size` bytes at the address `mask`. (libc's type is longer, but
/// only the kernel reads the mask.)
fn is_mask(mask: usize, size: usize) -> bool {
    mask == 0 || size == MASK_SIZE
}

/// Makes the call, and leaves the rest of the time in the program's `timeout`, as the kernel does.
unsafe fn leave_rest(timeout: *mut timespec, call: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the callers pass null or the program's own time-out.
    let given = Timeout::from_timespec(unsafe { timeout.as_ref() }).filter(|given| !given.is_zero());
    let deadline = given.map(Timeout::deadline);
    let done = call();
    if let Some(left) = deadline.and_then(|deadline| deadline.left().to_timespec()) {
        // SAFETY: `timeout` is not null, since a time was read from it.
        unsafe { *timeout = left };
    }
    done
}

unsafe extern "C" fn ppoll(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    let system_call = system_call!(
        SYS_ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int
            = fds, count, timeout, mask, MASK_SIZE
    );
    let (fds, count, timeout) = (a as *mut pollfd, b as nfds_t, c as *mut timespec);
    // SAFETY: `fds` is null or the program's array of `count` entries.
    let served = is_mask(d, e) && unsafe { poll::has_ours(fds, count) };
    if !served {
        // SAFETY: the system call and its arguments are the program's own.
        return result(unsafe { kernel::call(libc::SYS_ppoll, [a, b, c, d, e, f]) });
    }
    // SAFETY: the system call and its arguments are the program's own.
    let call = || unsafe { ready::ppoll(system_call, fds, count, timeout, d as *const sigset_t) };
    // SAFETY: `timeout` is null or the program's own.
    let call = || c_long::from(unsafe { leave_rest(timeout, call) });
    waits(a, call, || 0)
}

/// The sixth argument of pselect6(2).
#[repr(C)]
struct Mask {
    mask: *const sigset_t,
    size: size_t,
}

unsafe extern "C" fn pselect6(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    unsafe extern "C" fn system_call(
        count: c_int,
        read: *mut fd_set,
        write: *mut fd_set,
        except: *mut fd_set,
        timeout: *const timespec,
        mask: *const sigset_t,
    ) -> c_int {
        let mask = Mask { mask, size: MASK_SIZE };
        let sets = [read, write, except].map(|set| set as usize);
        let mask = kernel::address(&raw const mask);
        let words = [count as usize, sets[0], sets[1], sets[2], timeout as usize, mask];
        // SAFETY: the system call and its arguments are the program's own.
        result(unsafe { kernel::call(libc::SYS_pselect6, words) }) as c_int
    }
    let sets = poll::Sets {
        count: a as c_int,
        read: b as *mut fd_set,
        write: c as *mut fd_set,
        except: d as *mut fd_set,
    };
    let timeout = e as *mut timespec;
    // SAFETY: `f` is the address of the program's own value, or an address where no memory can be.
    let mask = match unsafe { iov::plausible(f as *const Mask) } {
        Some(given) if is_mask(given.mask as usize, given.size) => Some(given.mask),
        None if f == 0 => Some(core::ptr::null()),
        _ => None,
    };
    // SAFETY: the sets are null or the program's, with `count` bits.
    let Some(mask) = mask.filter(|_| unsafe { sets.has_ours() }) else {
        // SAFETY: the system call and its arguments are the program's own.
        return result(unsafe { kernel::call(libc::SYS_pselect6, [a, b, c, d, e, f]) });
    };
    // SAFETY: the system call and its arguments are the program's own.
    let call = || unsafe {
        ready::pselect(
            system_call,
            sets.count,
            sets.read,
            sets.write,
            sets.except,
            timeout,
            mask,
        )
    };
    // SAFETY: `timeout` is null or the program's own.
    let call = || c_long::from(unsafe { leave_rest(timeout, call) });
    waits(a, call, || 0)
}

/// Defines a handler for a wait on an epoll set. The last argument of the system call is the size of the mask.
macro_rules! epoll_wait {
    ($name:ident, $number:ident, $timeout:ty) => {
        unsafe extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
            let call = system_call!(
                $number(epoll: c_int, events: *mut epoll_event, n: c_int, time: $timeout, mask: *const sigset_t) -> c_int
                    = epoll, events, n, time, mask, MASK_SIZE
            );
            // SAFETY: the system call and its arguments are the program's own.
            let plain = || result(unsafe { kernel::call(libc::$number, [a, b, c, d, e, f]) });
            if !is_mask(e, f) {
                return plain();
            }
            let (epoll, events, n, mask) = (a as c_int, b as *mut epoll_event, c as c_int, e as *const sigset_t);
            // SAFETY: the system call and its arguments are the program's own.
            let served = || unsafe { ready::$name(call, epoll, events, n, d as $timeout, mask) } as c_long;
            waits_on(a, served, plain)
        }
    };
}

epoll_wait!(epoll_pwait, SYS_epoll_pwait, c_int);
epoll_wait!(epoll_pwait2, SYS_epoll_pwait2, *const timespec);

unsafe extern "C" fn exit_group(a: usize, _: usize, _: usize, _: usize, _: usize, _: usize) -> c_long {
    unsafe extern "C" fn system_call(status: c_int) {
        // SAFETY: the system call is the program's own, and does not return.
        let _ = unsafe { kernel::call(libc::SYS_exit_group, [status as usize, 0, 0, 0, 0, 0]) };
    }
    if vfork::is_stranger() {
        // SAFETY: the system call is the program's own, and does not return.
        unsafe { system_call(a as c_int) };
    }
    // SAFETY: the system call is the program's own, and does not return.
    unsafe { process::exit_now(system_call, a as c_int) };
    0
}

/// Serves io_uring_setup(2): hides io_uring, or takes all connections to TCP once the program has an io_uring. liburing
/// makes this system call inline, where no hook sees it.
unsafe extern "C" fn io_uring_setup(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    let is_on = startup::is_on();
    if is_on && is_hidden(config().io_uring) {
        return errno::fail(libc::ENOSYS);
    }
    // SAFETY: the system call and its arguments are the program's own.
    let ring = result(unsafe { kernel::call(libc::SYS_io_uring_setup, [a, b, c, d, e, f]) });
    if ring >= 0 && is_on {
        pass::all_on_tcp(Reason::IoUring);
    }
    ring
}

/// Returns whether io_uring is hidden from the program. `Auto` hides it from programs with libuv, whose event loop uses
/// an io_uring to add descriptors to its epoll set, and works without one. libuv's functions are exported, in Node too,
/// so `dlsym` finds them.
fn is_hidden(setting: IoUring) -> bool {
    match setting {
        IoUring::Hide => true,
        IoUring::Allow => false,
        // SAFETY: the name is a C string.
        IoUring::Auto => !unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"uv_loop_init".as_ptr()) }.is_null(),
    }
}
