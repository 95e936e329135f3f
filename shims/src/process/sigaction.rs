//! Makes the program's signal handlers wait while their thread has a critical section of the library open.
//!
//! In a critical section (`core::os::thread`) a thread holds a lock, or has announced an operation to other threads. A
//! handler that runs only outside sections may do all that it may do on kernel TCP, such as wait on a connection. The
//! code that it has interrupted holds no lock on which the service thread or the handler's own call would wait.
//!
//! The installed handler is `machine::enter`. Outside sections it jumps to the program's handler, without a frame of
//! its own on the stack. Within a section it puts the signal back: it sends the signal to its own thread again, with
//! all information from the kernel, and returns with the signal blocked. The end of the section unblocks the signal,
//! and then the kernel delivers it.
//!
//! These handlers do not wait:
//!
//! - handlers of signals that the processor raises, since the interrupted code cannot continue;
//! - handlers that the kernel uninstalls when it calls them (SA_RESETHAND);
//! - handlers of real-time signals that get a `siginfo_t`, because the signals have to stay in order;
//! - handlers that are installed by a system call without a hook.
//!
//! Jumps out of handlers are in `signals/jump`.

use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use libc::sighandler_t;
use rdmasock_core::os::thread::Thread;
use rdmasock_core::os::{kernel, thread};

use crate::objects::library::Library;
use crate::signals::handler;
use crate::sys::{real, vfork};

const COUNT: usize = 65;
/// The bit of a word of `HANDLERS` that says that the handler takes a `siginfo_t` (SA_SIGINFO). No address of the
/// program has this bit.
const IS_TOLD: usize = 1 << 63;
/// The first real-time signal. Real-time signals are queued: a signal that is sent again would come after later ones.
const QUEUED: c_int = 32;
/// The highest of the values SIG_DFL, SIG_IGN and SIG_HOLD, which stand for no handler's address.
const NO_HANDLER: usize = 2;

/// For each signal, the program's handler that `machine::enter` calls. A word may be left from a handler that was
/// replaced.
static HANDLERS: [AtomicUsize; COUNT] = [const { AtomicUsize::new(0) }; COUNT];

/// Returns the word of `HANDLERS` for a signal; `None` for a signal whose handlers never wait.
fn slot(signal: c_int) -> Option<&'static AtomicUsize> {
    match signal {
        libc::SIGSEGV | libc::SIGBUS | libc::SIGFPE | libc::SIGILL | libc::SIGTRAP | libc::SIGSYS | libc::SIGABRT => {
            None
        }
        1.. => HANDLERS.get(signal as usize),
        _ => None,
    }
}

fn entrance() -> usize {
    machine::enter as *const () as usize
}

/// Returns the handler to report to the program for the installed `handler`: `kept`, without the bit, in place of
/// `machine::enter`.
fn known_as(handler: usize, kept: usize) -> usize {
    if handler == entrance() {
        kept & !IS_TOLD
    } else {
        handler
    }
}

/// Returns whether `machine::enter` is to be installed for this handler. False in a vfork child, which has handlers of
/// its own in the kernel, but has its parent's `HANDLERS`.
fn is_led(handler: usize) -> bool {
    handler > NO_HANDLER && handler != usize::MAX && !vfork::is_child()
}

/// Carries out `sigaction(2)`.
///
/// # Safety
/// The same as for libc's function.
#[inline]
pub unsafe extern "C" fn sigaction(
    real: real::sigaction,
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    let Some(slot) = slot(signal) else {
        // SAFETY: the caller's arguments are passed on unchanged.
        return unsafe { real(signal, new, old) };
    };
    let mut kept = slot.load(Acquire);
    let mut led;
    let mut given = new;
    // SAFETY: `new` is the caller's, null or readable: libc reads it too.
    if let Some(action) = unsafe { new.as_ref() }
        && action.sa_flags & libc::SA_RESETHAND == 0
        && action.sa_sigaction != entrance()
        && is_led(action.sa_sigaction)
    {
        let is_told = action.sa_flags & libc::SA_SIGINFO != 0;
        kept = slot.swap(action.sa_sigaction | if is_told { IS_TOLD } else { 0 }, AcqRel);
        led = *action;
        led.sa_sigaction = entrance();
        given = &raw const led;
    }
    // SAFETY: the caller's arguments are passed on, or a copy of the action that `new` points to.
    let result = unsafe { real(signal, given, old) };
    if result != 0 {
        if given != new {
            slot.store(kept, Release);
        }
    // SAFETY: `old` is the caller's, null or writable: libc has written to it.
    } else if let Some(action) = unsafe { old.as_mut() } {
        action.sa_sigaction = known_as(action.sa_sigaction, kept);
    }
    result
}

/// Carries out `signal(2)` with the semantics of the BSDs: the handler stays installed.
///
/// # Safety
/// The same as for libc's function.
#[inline]
pub unsafe extern "C" fn signal(real: real::signal, signal: c_int, handler: sighandler_t) -> sighandler_t {
    let Some(slot) = slot(signal).filter(|_| handler != entrance() && is_led(handler)) else {
        // SAFETY: the caller's arguments are passed on unchanged.
        return unsafe { signal_once(real, signal, handler) };
    };
    let kept = slot.swap(handler, AcqRel);
    // SAFETY: `machine::enter` is a handler for signals with and without SA_SIGINFO.
    let before = unsafe { real(signal, entrance()) };
    if before == libc::SIG_ERR {
        slot.store(kept, Release);
    }
    known_as(before, kept)
}

/// Carries out `sigset(3)`, and `signal(2)` with the semantics of System V. The handler is installed unchanged. If
/// `machine::enter` was installed before, returns the program's handler that it called, and not its own address.
///
/// # Safety
/// The same as for libc's function.
#[inline]
pub unsafe extern "C" fn signal_once(real: real::signal_once, signal: c_int, handler: sighandler_t) -> sighandler_t {
    let kept = slot(signal).map_or(0, |slot| slot.load(Acquire));
    // SAFETY: the caller's arguments are passed on unchanged.
    let before = unsafe { real(signal, handler) };
    known_as(before, kept)
}

/// Carries out `pthread_cancel(3)`. Also notes the cancellation in the target thread's state. Hooks that may return
/// without a cancellation point of libc check the note themselves (`jump::cancellation_point`).
///
/// # Safety
/// The same as for libc's function.
#[inline]
pub unsafe extern "C" fn pthread_cancel(real: real::pthread_cancel, target: libc::pthread_t) -> c_int {
    // SAFETY: the caller's argument is passed on unchanged. It is a thread that has not been joined, by libc's
    // contract.
    unsafe {
        thread::note_cancelled(target);
        real(target)
    }
}

unsafe extern "C-unwind" {
    /// glibc's function, declared as one that may unwind.
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
}

/// PTHREAD_CANCEL_DEFERRED and PTHREAD_CANCEL_ASYNCHRONOUS of glibc's `pthread.h`.
const DEFERRED: c_int = 0;
const ASYNCHRONOUS: c_int = 1;

/// Defers the thread's cancellation. Returns the previous cancellation type.
///
/// The frame of this function has no destructors, because a thread with the asynchronous type can be cancelled at each
/// instruction here.
#[inline(never)]
extern "C-unwind" fn defer_cancellation() -> c_int {
    let mut old = DEFERRED;
    // SAFETY: the type is valid and `old` is writable. The call may unwind, and this frame has no destructors.
    unsafe { pthread_setcanceltype(DEFERRED, &raw mut old) };
    old
}

/// Makes cancellation asynchronous again. A thread that was cancelled meanwhile ends in this call, so the frame of this
/// function has no destructors either.
#[inline(never)]
extern "C-unwind" fn undefer_cancellation() {
    // SAFETY: the type is valid, and null is allowed for the old one. The call may unwind, and this frame has no
    // destructors.
    unsafe { pthread_setcanceltype(ASYNCHRONOUS, std::ptr::null_mut()) };
}

/// Decides whether a signal waits. Returns the address of the program's handler, or 0 if the signal waits.
///
/// # Safety
/// The arguments are those that the kernel passes to a signal handler.
unsafe extern "C" fn route(signal: c_int, info: *mut c_void, context: *mut c_void) -> usize {
    let kept = HANDLERS.get(signal as usize).map_or(0, |slot| slot.load(Acquire));
    let thread = thread::current();
    // SAFETY: the arguments are from the kernel's call of a signal handler, by the contract.
    if thread.depth() != 0 && unsafe { hold(thread, signal, kept & IS_TOLD != 0, info, context) } {
        return 0;
    }
    thread.note_handled(1u64 << (signal - 1));
    handler::on_handler();
    handler::note(thread, context.addr());
    kept & !IS_TOLD
}

/// Makes a signal wait until the section ends. Returns false if the signal cannot wait.
///
/// # Safety
/// The arguments are those that the kernel passes to a signal handler.
#[cold]
#[inline(never)]
unsafe fn hold(thread: &Thread, signal: c_int, is_told: bool, info: *mut c_void, context: *mut c_void) -> bool {
    if Library::has_retired() || is_told && signal >= QUEUED {
        return false;
    }
    let bit = 1u64 << (signal - 1);
    let number = signal as usize;
    // SAFETY: `context` is the kernel's frame, by the contract, and its mask has 8 bytes.
    let mask = unsafe { &mut *(&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>() };
    if *mask & bit != 0 {
        // The program has the signal unblocked only during the call that the signal has interrupted (ppoll,
        // epoll_pwait). The program waits for the signal in that call, so the signal cannot wait.
        return false;
    }
    // SAFETY: each system call gets valid addresses, of `bit` or of the kernel's `info`, and only reads there.
    unsafe {
        // The signal is blocked first: with SA_NODEFER the second one could come at once.
        let (block, mask) = (libc::SIG_BLOCK as usize, kernel::address(&raw const bit));
        let _ = kernel::call(libc::SYS_rt_sigprocmask, [block, mask, 0, 8, 0, 0]);
        let (Ok(process), Ok(id)) = (
            kernel::call(libc::SYS_getpid, [0; 6]),
            kernel::call(libc::SYS_gettid, [0; 6]),
        ) else {
            return false;
        };
        // Without SA_SIGINFO the handler gets no `info` that could be passed on.
        let sent = if is_told {
            let about = kernel::address(info);
            kernel::call(libc::SYS_rt_tgsigqueueinfo, [process, id, number, about, 0, 0])
        } else {
            kernel::call(libc::SYS_tgkill, [process, id, number, 0, 0, 0])
        };
        if sent.is_err() {
            return false;
        }
    }
    *mask |= bit;
    thread.hold_signal(bit);
    true
}

mod machine {
    use std::arch::naked_asm;

    use super::{defer_cancellation, route, undefer_cancellation};

    /// The handler that the kernel calls. It has no frame on the stack while the program's handler runs. So code that
    /// unwinds from the program's handler, or measures the handler's stack, finds the same as without the library.
    ///
    /// The exception is a handler that has interrupted a call in which the thread can be cancelled at each instruction.
    /// In glibc before 2.41, all calls that block are such. In that case cancellation is deferred until the program's
    /// handler returns. Otherwise it could end the thread in the middle of a section of a call that the handler makes.
    #[unsafe(naked)]
    pub(super) extern "C" fn enter() {
        naked_asm!(
            ".cfi_startproc",
            "push rdi",
            ".cfi_def_cfa_offset 16",
            "push rsi",
            ".cfi_def_cfa_offset 24",
            "push rdx",
            ".cfi_def_cfa_offset 32",
            "call {defer}",
            "mov rdx, qword ptr [rsp]",
            "mov rsi, qword ptr [rsp + 8]",
            "mov rdi, qword ptr [rsp + 16]",
            "push rax",
            ".cfi_def_cfa_offset 40",
            "sub rsp, 8",
            ".cfi_def_cfa_offset 48",
            "call {route}",
            "add rsp, 8",
            ".cfi_def_cfa_offset 40",
            "pop rcx",
            ".cfi_def_cfa_offset 32",
            "pop rdx",
            ".cfi_def_cfa_offset 24",
            "pop rsi",
            ".cfi_def_cfa_offset 16",
            "pop rdi",
            ".cfi_def_cfa_offset 8",
            "test ecx, ecx",
            "jnz 2f",
            "test rax, rax",
            "jz 4f",
            "jmp rax",
            "2:",
            "sub rsp, 8",
            ".cfi_def_cfa_offset 16",
            "test rax, rax",
            "jz 3f",
            "call rax",
            "3:",
            "call {undefer}",
            "add rsp, 8",
            ".cfi_def_cfa_offset 8",
            "4:",
            "ret",
            ".cfi_endproc",
            defer = sym defer_cancellation,
            route = sym route,
            undefer = sym undefer_cancellation,
        )
    }
}
