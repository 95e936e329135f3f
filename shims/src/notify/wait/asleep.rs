//! The sleep of a thread in one call, with the rules of the kernel's own socket calls. A signal ends or restarts it,
//! and it is a cancellation point.

use std::os::fd::{AsRawFd, BorrowedFd};

use libc::c_int;

use crate::sys::time::Timeout;

/// Sleeps until `futex` no longer holds `ticket`, or is woken. `Err` is the errno that the call fails with.
///
/// After a handler with SA_RESTART the kernel restarts the sleep if it has no time-out; with a time-out it never does.
pub fn on_futex(futex: *const u32, ticket: u32, left: Timeout) -> Result<(), c_int> {
    let timeout = left.to_timespec();
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let slept = crate::signals::jump::outside(|| {
        // SAFETY: the word is in a mapping that is never undone; `timeout` is null, or points into `left`'s timespec,
        // which outlives the call.
        let result = unsafe { futex_wait(futex, ticket, timeout) };
        if result < 0 {
            crate::sys::errno::set(-result as c_int);
            return -1;
        }
        0
    });
    match if slept < 0 { crate::sys::errno::get() } else { 0 } {
        libc::ETIMEDOUT => Err(libc::EAGAIN),
        libc::EINTR => Err(libc::EINTR),
        // The futex was woken, or did not hold the ticket.
        _ => Ok(()),
    }
}

unsafe extern "C-unwind" {
    /// glibc's function, declared as one that may unwind: the thread may have been cancelled before.
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
}

/// PTHREAD_CANCEL_ASYNCHRONOUS of glibc's `pthread.h`.
const ASYNCHRONOUS: c_int = 1;

/// FUTEX_WAIT on a word that other processes wake. Returns the system call's result, a negative errno on failure.
///
/// The thread can be cancelled meanwhile, as in glibc's own calls: the cancel type is asynchronous around the system
/// call and nothing else.
///
/// A frame of its own, without destructors. The forced unwind may begin at any of its instructions. Rust's personality
/// routine ends the process if it meets a frame with destructors at an instruction that is no call. Not by libc's
/// `syscall`, which is a hook.
///
/// # Safety
/// `futex` is readable; `timeout` is null or readable.
#[inline(never)]
unsafe extern "C-unwind" fn futex_wait(futex: *const u32, ticket: u32, timeout: *const libc::timespec) -> isize {
    let mut old = 0;
    // SAFETY: the type is valid and `old` is writable. The call may unwind, and this frame has no destructors.
    unsafe { pthread_setcanceltype(ASYNCHRONOUS, &raw mut old) };
    let result: isize;
    // SAFETY: futex(2) reads four arguments here, valid by the contract. The kernel changes rax, rcx and r11 only,
    // which are declared.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") libc::SYS_futex as isize => result,
            in("rdi") futex,
            in("rsi") libc::FUTEX_WAIT,
            in("rdx") ticket as usize,
            in("r10") timeout,
            in("r8") 0usize,
            in("r9") 0usize,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
        pthread_setcanceltype(old, std::ptr::null_mut());
    }
    result
}

/// Sleeps until one of the two fds is readable. Returns true if `bell` is. `Err` is the errno that the call fails with.
///
/// The sleep is a ppoll, which the kernel never restarts after a handler. If the sleep has no time-out, the restart
/// rule of a socket call is applied afterwards.
pub fn on_two(bell: BorrowedFd<'_>, also: BorrowedFd<'_>, left: Timeout) -> Result<bool, c_int> {
    use crate::sys::real::Cancellable;
    let timeout = left.to_timespec();
    let mut set = [bell, also].map(|fd| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    });
    let thread = rdmasock_core::os::thread::current();
    let handlers = thread.handlers();
    // SAFETY: `set` has two entries; the time-out is null, or points into a timespec that outlives the call.
    let n = crate::signals::jump::outside(|| unsafe {
        crate::sys::real::ppoll().cancellable()(
            set.as_mut_ptr(),
            set.len() as libc::nfds_t,
            timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
            std::ptr::null(),
        )
    });
    match n {
        0 => Err(libc::EAGAIN),
        n if n < 0 => {
            let error = crate::sys::errno::get();
            // If the library has counted the handler, the caller decides about the restart.
            let restart =
                error == libc::EINTR && timeout.is_none() && thread.handlers() == handlers && are_calls_restarted(0);
            if restart { Ok(false) } else { Err(error) }
        }
        _ => Ok(set.first().is_some_and(|bell| bell.revents != 0)),
    }
}

/// Whether the kernel would restart a call that these signals have interrupted. `handled` has a bit for each signal
/// whose handler has run.
///
/// If `handled` is 0, the handler was one that the library does not call (`process/sigaction`). Then every handler must
/// have SA_RESTART. Exempt are signals that the processor raises, which a sleeping thread does not get (Rust's runtime
/// installs some).
#[cold]
pub fn are_calls_restarted(handled: u64) -> bool {
    const RAISED: [c_int; 6] = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
        libc::SIGSYS,
    ];
    let is_asked = |signal: c_int| match handled {
        0 => !RAISED.contains(&signal),
        handled => handled & 1 << (signal - 1) != 0,
    };
    (1..=libc::SIGRTMAX()).filter(|signal| is_asked(*signal)).all(|signal| {
        // SAFETY: all zeroes are a valid value of this plain struct, and the call only fills it.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: `action` is writable, and a null new action changes nothing.
        let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        asked != 0
            || matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
            || action.sa_flags & libc::SA_RESTART != 0
    })
}
