//! Whether a thread is in a signal handler of the program's, for what must not be done there: who has interrupted
//! `malloc` cannot make a thread.
//!
//! Told by the frame that the kernel has put on the stack for the handler (`signals` notes where): it is above the
//! stack pointer, and as it was. Not by unwinding: programs switch stacks, or overwrite them (greenlets), and an
//! unwinder that does not know reads anywhere. A frame of a handler that has returned may be taken for one that has
//! not, as long as nothing has been written over it: then what was asked for is put off in vain. Handlers that are not
//! led by `signals` are not seen.

use rdmasock_core::os::kernel;
use rdmasock_core::os::thread::{self, Thread};

/// A handler's frame and the call are not further apart on one stack, bytes.
const REACH: usize = 1 << 20;

/// The kernel's frame begins this many bytes before the `ucontext` that the handler is given, with the address that it
/// returns to (`struct rt_sigframe`, arch/x86/include/asm/sigframe.h).
const BEFORE_CONTEXT: usize = size_of::<usize>();

/// A handler with this `ucontext` is about to run on the thread. If it has interrupted another, that counts.
pub fn note(thread: &Thread, context: usize) {
    if !is_above(thread, context) {
        // SAFETY: the kernel has just written the frame.
        let returns_to = unsafe { *((context - BEFORE_CONTEXT) as *const usize) };
        thread.note_handler(context, returns_to);
    }
}

/// Whether the calling thread is in a handler.
#[cold]
#[inline(never)]
pub fn is_in_one() -> bool {
    let here = 0u8;
    let thread = thread::current();
    let is_in = is_above(thread, (&raw const here).addr()) && is_its_stack(thread.handler().0);
    if !is_in {
        thread.note_handler(0, 0);
    }
    is_in
}

/// Whether the frame that was noted is further out than `here`, and as it was.
fn is_above(thread: &Thread, here: usize) -> bool {
    let (context, returns_to) = thread.handler();
    let frame = context.wrapping_sub(BEFORE_CONTEXT);
    here < frame
        && frame - here < REACH
        && is_readable(frame)
        // SAFETY: the kernel says that it can be read. Aligned as `ucontext` is.
        && unsafe { *(frame as *const usize) } == returns_to
}

/// Whether a place that is on the alternate stack, if it is, is on the one that the thread is on.
fn is_its_stack(place: usize) -> bool {
    // SAFETY: a plain struct, which the call fills.
    let (stack, asked) = unsafe {
        let mut stack: libc::stack_t = std::mem::zeroed();
        let to = kernel::address(&raw mut stack);
        let asked = kernel::call(libc::SYS_sigaltstack, [0, to, 0, 0, 0, 0]);
        (stack, asked)
    };
    let from = stack.ss_sp.addr();
    let is_on_it = stack.ss_flags & libc::SS_ONSTACK != 0;
    asked.is_err() || is_on_it || !(from..from + stack.ss_size).contains(&place)
}

/// Whether a word can be read. The kernel reads a mask before it looks at a `how` that there is none of: EFAULT or
/// EINVAL.
fn is_readable(place: usize) -> bool {
    // SAFETY: changes nothing, and the kernel checks the address.
    let asked = unsafe { kernel::call(libc::SYS_rt_sigprocmask, [usize::MAX, place, 0, 8, 0, 0]) };
    asked != Err(rustix::io::Errno::FAULT)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    use super::*;

    static SEEN: AtomicU32 = AtomicU32::new(0);

    extern "C" fn handler(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
        note(thread::current(), context.addr());
        SEEN.store(1 + u32::from(is_in_one()), SeqCst);
    }

    fn install(flags: libc::c_int) {
        // SAFETY: plain memory, and a handler of that kind.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = flags | libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
        }
    }

    fn raise() -> u32 {
        // SAFETY: it has a handler.
        assert_eq!(unsafe { libc::raise(libc::SIGUSR1) }, 0);
        SEEN.swap(0, SeqCst)
    }

    /// Writes over what was on the stack.
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
            // SAFETY: memory that stays.
            let set = unsafe { libc::sigaltstack(&alternate, std::ptr::null_mut()) };
            assert_eq!(set, 0);
            install(libc::SA_ONSTACK);
            assert_eq!(raise(), 2);
            // As it was, but the thread is on the other stack.
            assert!(!is_in_one());
        })
        .join()
        .unwrap();
    }
}
