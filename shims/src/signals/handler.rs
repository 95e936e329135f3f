//! Finds out whether a thread is in a signal handler of the program. In a handler some actions are not safe: for
//! example, a handler that has interrupted `malloc` must not start a thread.
//!
//! The answer comes from the frame that the kernel has put on the stack for the handler. `process/sigaction` notes the
//! frame's address. As long as the handler runs, the frame is above the stack pointer, and unchanged. Unwinding the
//! stack is no alternative: programs switch stacks, or overwrite them (greenlets), which would lead an unwinder to
//! arbitrary addresses.
//!
//! A handler that has returned may count as running until its frame is overwritten. The only effect is that an action
//! is put off needlessly. Handlers that `process/sigaction` does not call are not noticed.
//!
//! A thread that sleeps in [`on_duty`] hands its work over to another thread before a handler runs.

use std::ops::Range;

use rdmasock_core::os::thread::Thread;
use rdmasock_core::os::{kernel, thread};

/// The greatest distance on one stack between a handler's frame and the frame of a call that the handler makes, bytes.
const REACH: usize = 1 << 20;

/// The distance from the start of the kernel's frame to the handler's `ucontext`, bytes. The frame begins with the
/// address that the handler returns to (`struct rt_sigframe`, arch/x86/include/asm/sigframe.h).
const BEFORE_CONTEXT: usize = size_of::<usize>();

/// Notes that a handler with the `ucontext` at `context` is about to run on the thread. If the signal has interrupted
/// another handler, that outer handler stays noted.
pub(crate) fn note(thread: &Thread, context: usize) {
    if !is_above(thread, context) {
        // SAFETY: the kernel has just written the frame, which begins at this address.
        let returns_to = unsafe { *((context - BEFORE_CONTEXT) as *const usize) };
        thread.handler.set((context, returns_to));
    }
}

/// Returns whether the calling thread is in a signal handler.
#[cold]
#[inline(never)]
pub(crate) fn is_in_one() -> bool {
    let here = 0u8;
    let thread = thread::current();
    let is_in = is_above(thread, (&raw const here).addr()) && is_its_stack(thread.handler.get().0);
    if !is_in {
        thread.handler.set((0, 0));
    }
    is_in
}

/// Returns whether the noted frame is further out on the stack than `here`, and unchanged.
fn is_above(thread: &Thread, here: usize) -> bool {
    let (context, returns_to) = thread.handler.get();
    let frame = context.wrapping_sub(BEFORE_CONTEXT);
    here < frame
        && frame - here < REACH
        && is_readable(frame)
        // SAFETY: the kernel has confirmed that the word can be read, and it is aligned as `ucontext` is.
        && unsafe { *(frame as *const usize) } == returns_to
}

/// Returns false if `place` lies on the alternate signal stack and the thread is not on that stack; otherwise true.
fn is_its_stack(place: usize) -> bool {
    alternate_stack().is_none_or(|(stack, is_on_it)| is_on_it || !stack.contains(&place))
}

/// Returns the thread's alternate signal stack, and whether the thread is on it. `None` if the kernel does not report
/// it.
pub(super) fn alternate_stack() -> Option<(Range<usize>, bool)> {
    // SAFETY: all zeroes are a valid value of this plain struct, which the call fills.
    let stack = unsafe {
        let mut stack: libc::stack_t = std::mem::zeroed();
        let to = kernel::address(&raw mut stack);
        kernel::call(libc::SYS_sigaltstack, [0, to, 0, 0, 0, 0]).ok()?;
        stack
    };
    let from = stack.ss_sp.addr();
    Some((from..from + stack.ss_size, stack.ss_flags & libc::SS_ONSTACK != 0))
}

/// Returns whether the word at `place` can be read, by rt_sigprocmask(2) with `place` as the mask and an invalid `how`.
/// The kernel reads the mask first: the call fails with EFAULT if it cannot, otherwise with EINVAL.
pub(super) fn is_readable(place: usize) -> bool {
    // SAFETY: the call changes nothing, and the kernel checks the address.
    let asked = unsafe { kernel::call(libc::SYS_rt_sigprocmask, [usize::MAX, place, 0, 8, 0, 0]) };
    asked != Err(rustix::io::Errno::FAULT)
}

// A thread that sleeps may have a duty towards other threads. For example, it polls a link's completions for all of
// them. If a signal interrupts the sleep, the program's handler may block for any time. So before the handler runs, the
// duty is handed over to another thread.

type HandOver<'a> = &'a dyn Fn();

/// Runs `sleep`, a call that blocks. Before the first signal handler that interrupts it, calls `hand_over`, which is
/// async-signal-safe.
pub(crate) fn on_duty<R>(hand_over: HandOver<'_>, sleep: impl FnOnce() -> R) -> R {
    let before = thread::current().duty.replace((&raw const hand_over).cast());
    let _duty = Duty { before };
    sleep()
}

/// Restores the thread's earlier `hand_over` when it is dropped, also if the thread is cancelled.
struct Duty {
    /// The `hand_over` of the outer call of `on_duty`, which a signal handler has interrupted; null if there is none,
    /// or if it has been called already.
    before: *const (),
}

impl Drop for Duty {
    fn drop(&mut self) {
        thread::current().duty.set(self.before);
    }
}

/// Hands the thread's work over. Called before a signal handler runs; the thread has no critical section open.
#[inline]
pub(crate) fn on_handler() {
    let duty = thread::current().duty.replace(std::ptr::null());
    if !duty.is_null() {
        hand_over(duty);
    }
}

#[cold]
fn hand_over(duty: *const ()) {
    // SAFETY: `on_duty` has stored the address of a value in its frame, and this thread has not returned from
    // `on_duty`.
    (unsafe { *duty.cast::<HandOver<'_>>() })();
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;

    static SEEN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn handler(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
        note(thread::current(), context.addr());
        SEEN.store(1 + u32::from(is_in_one()), SeqCst);
    }

    fn install(flags: libc::c_int) {
        // SAFETY: all zeroes are a valid value of this plain struct, and the handler takes what SA_SIGINFO gives.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = flags | libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
        }
    }

    fn raise() -> u32 {
        // SAFETY: the signal has a handler.
        assert_eq!(unsafe { libc::raise(libc::SIGUSR1) }, 0);
        SEEN.swap(0, SeqCst)
    }

    /// Overwrites the stack beyond the caller's frame.
    #[inline(never)]
    fn overwrite() -> u8 {
        let bytes = std::hint::black_box([7u8; 32 * 1024]);
        bytes[bytes.len() / 2]
    }

    #[test]
    fn a_thread_is_in_a_handler_until_that_returns() {
        std::thread::spawn(|| {
            assert!(!is_in_one());
            install(0);
            assert_eq!(raise(), 2);
            overwrite();
            assert!(!is_in_one());
            let stack = vec![0u8; 64 * 1024].leak();
            let alternate = libc::stack_t {
                ss_sp: stack.as_mut_ptr().cast(),
                ss_flags: 0,
                ss_size: stack.len(),
            };
            // SAFETY: the memory is leaked, so it stays valid.
            let set = unsafe { libc::sigaltstack(&alternate, std::ptr::null_mut()) };
            assert_eq!(set, 0);
            install(libc::SA_ONSTACK);
            assert_eq!(raise(), 2);
            // The frame is unchanged, but it is on the alternate stack, and the thread is not.
            assert!(!is_in_one());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn it_is_handed_over_once_and_the_call_beneath_has_its_own() {
        let (outer, inner) = (Cell::new(0), Cell::new(0));
        on_handler();
        on_duty(&|| outer.set(outer.get() + 1), || {
            on_duty(&|| inner.set(inner.get() + 1), || {
                on_handler();
                on_handler();
            });
            on_handler();
        });
        on_handler();
        assert_eq!((outer.get(), inner.get()), (1, 1));
    }
}
