//! The sleep of a thread in one call, as the kernel's own socket calls sleep: a signal ends or restarts
//! it, and it is a cancellation point.

use std::os::fd::{AsRawFd, BorrowedFd};

use libc::c_int;

use crate::sys::time::Timeout;

/// Sleeps until `futex` no longer holds `ticket` or is woken. `Err` is the errno that the call fails with.
///
/// Without a bound the kernel restarts the sleep after a handler with SA_RESTART, with a bound never.
pub fn on_futex(futex: *const u32, ticket: u32, left: Timeout) -> Result<(), c_int> {
    let timeout = left.to_timespec();
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let slept = crate::signals::jump::outside(|| {
        // SAFETY: the word is in a mapping that is never undone, and the time-out is valid or null.
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
        // Woken, or no longer the ticket.
        _ => Ok(()),
    }
}

unsafe extern "C-unwind" {
    /// glibc's, declared as what may unwind: the thread may have been cancelled before.
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
}

/// PTHREAD_CANCEL_ASYNCHRONOUS of glibc's `pthread.h`.
const ASYNCHRONOUS: c_int = 1;

/// FUTEX_WAIT on a word that other processes wake; gives what the kernel does, a negative errno. The thread can be
/// cancelled meanwhile, as in glibc's own calls: the type is asynchronous around the system call and nothing else.
///
/// A frame of its own and without anything to drop: the forced unwind begins at any of its instructions, and Rust's
/// personality routine ends the process where it meets a frame that has destructors at an instruction that is no call.
/// Not by libc's `syscall`, which is a hook.
///
/// # Safety
/// `futex` is readable, `timeout` too or null.
#[inline(never)]
unsafe extern "C-unwind" fn futex_wait(futex: *const u32, ticket: u32, timeout: *const libc::timespec) -> isize {
    let mut old = 0;
    // SAFETY: a valid type and place; what may be unwound here holds nothing.
    unsafe { pthread_setcanceltype(ASYNCHRONOUS, &raw mut old) };
    let result: isize;
    // SAFETY: futex(2) with four arguments that matter, valid by the contract; the kernel changes rax, rcx and r11.
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

/// Sleeps until one of the two is readable; true if the first is. `Err` is the errno that the call fails with.
///
/// It has to be ppoll, which the kernel never restarts: what it would have done without a bound is asked for
/// afterwards.
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
    // SAFETY: two entries, and a valid time-out or none.
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
            // A handler that is counted is the caller's to answer.
            let restart =
                error == libc::EINTR && timeout.is_none() && thread.handlers() == handlers && are_calls_restarted(0);
            if restart { Ok(false) } else { Err(error) }
        }
        _ => Ok(set.first().is_some_and(|bell| bell.revents != 0)),
    }
}

/// Whether the kernel restarts a call that a signal has interrupted, by what is `handled`: the handlers that have run,
/// a bit each. Without one it was a handler that is not led (`signals`): then all have to have SA_RESTART, but those of
/// what the processor raises, which a thread that sleeps does not meet (Rust's runtime has some).
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
        // SAFETY: zeroes are a value of this plain struct, and the call only fills it.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        asked != 0
            || matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
            || action.sa_flags & libc::SA_RESTART != 0
    })
}
