//! Signal handlers of the program run where the library is not in the middle of anything: a signal that comes while a
//! section of its thread is open (`core::os::thread`: it holds a lock, or has announced something) waits for the moment
//! that the section lasts. So a handler may do whatever it may do on kernel TCP, wait on a connection for one: no lock
//! is held beneath it, on which the service thread, or its own call, would wait.
//!
//! What is installed is `machine::enter`, which jumps to the program's handler as if it were not there, or puts the
//! signal back: it sends it to its own thread again, with all that the kernel has told of it, and has it blocked when
//! it returns. The end of the section unblocks it, which is when the kernel delivers it.
//!
//! Not held back: what the processor raises, for which the code that it has interrupted cannot go on; handlers that the
//! kernel uninstalls when it calls them (SA_RESETHAND); real-time signals whose handlers are told what they are about,
//! for their order; those that are installed by number. What they jump out of is `jump`'s business.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel, Ordering::Acquire};

use libc::sighandler_t;
use rdmasock_core::os::kernel;
use rdmasock_core::os::thread::{self, Thread};

use crate::objects::library::Library;
use crate::signals::duty;
use crate::signals::handler;
use crate::sys::real::{PthreadCancelFn, SigactionFn, SignalFn};
use crate::sys::vfork;

const COUNT: usize = 65;
/// In a word of `HANDLERS`: the handler is told what the signal is about. No address of the program's has this bit.
const IS_TOLD: usize = 1 << 63;
/// Signals from here on are queued: one that is sent again would come after those that came after it.
const QUEUED: c_int = 32;
/// The highest value that is not a handler's address: SIG_DFL, SIG_IGN, and SIG_HOLD.
const NO_HANDLER: usize = 2;

/// The program's handler of each signal for which `machine::enter` is installed, or was.
static HANDLERS: [AtomicUsize; COUNT] = [const { AtomicUsize::new(0) }; COUNT];

/// Where a signal's handler is kept; `None` for a signal whose handlers do not wait.
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

/// What the program knows the handler of a signal as.
fn known_as(handler: usize, kept: usize) -> usize {
    if handler == entrance() {
        kept & !IS_TOLD
    } else {
        handler
    }
}

/// Whether a handler is to be entered by `machine::enter`, as far as that is for the program to change: a vfork child
/// has its own handlers in the kernel, and this memory is its parent's.
fn is_led(handler: usize) -> bool {
    machine::CAN_ENTER && handler > NO_HANDLER && handler != usize::MAX && !vfork::is_child()
}

/// `sigaction(2)`.
///
/// # Safety
/// As libc's.
#[inline]
pub unsafe extern "C" fn sigaction(
    real: SigactionFn,
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    let Some(slot) = slot(signal) else {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { real(signal, new, old) };
    };
    let mut kept = slot.load(Acquire);
    let mut led;
    let mut given = new;
    // SAFETY: the caller's, which libc reads too.
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
    // SAFETY: the caller's arguments, or a copy of what they led to.
    let result = unsafe { real(signal, given, old) };
    if result != 0 {
        if given != new {
            slot.store(kept, std::sync::atomic::Ordering::Release);
        }
    // SAFETY: the caller's, which libc has written to.
    } else if let Some(action) = unsafe { old.as_mut() } {
        action.sa_sigaction = known_as(action.sa_sigaction, kept);
    }
    result
}

/// `signal(2)` as the BSDs have it: the handler stays.
///
/// # Safety
/// As libc's.
#[inline]
pub unsafe extern "C" fn signal(real: SignalFn, signal: c_int, handler: sighandler_t) -> sighandler_t {
    let Some(slot) = slot(signal).filter(|_| handler != entrance() && is_led(handler)) else {
        // SAFETY: the caller's arguments, as they are.
        return unsafe { signal_once(real, signal, handler) };
    };
    let kept = slot.swap(handler, AcqRel);
    // SAFETY: a handler of a signal, of either kind.
    let before = unsafe { real(signal, entrance()) };
    if before == libc::SIG_ERR {
        slot.store(kept, std::sync::atomic::Ordering::Release);
    }
    known_as(before, kept)
}

/// `sigset(3)`, and `signal(2)` as System V has it: the handler is installed as it is, but that of before was perhaps
/// not.
///
/// # Safety
/// As libc's.
#[inline]
pub unsafe extern "C" fn signal_once(real: SignalFn, signal: c_int, handler: sighandler_t) -> sighandler_t {
    let kept = slot(signal).map_or(0, |slot| slot.load(Acquire));
    // SAFETY: the caller's arguments, as they are.
    let before = unsafe { real(signal, handler) };
    known_as(before, kept)
}

/// `pthread_cancel(3)`. Calls of the thread that do not come to a cancellation point of libc's look for it themselves
/// (`jump::cancellation_point`).
///
/// # Safety
/// As libc's.
#[inline]
pub unsafe extern "C" fn pthread_cancel(real: PthreadCancelFn, target: libc::pthread_t) -> c_int {
    // SAFETY: the caller's argument, as it is.
    unsafe {
        thread::note_cancelled(target);
        real(target)
    }
}

unsafe extern "C-unwind" {
    /// glibc's, declared as what may unwind.
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
}

/// PTHREAD_CANCEL_DEFERRED and PTHREAD_CANCEL_ASYNCHRONOUS of glibc's `pthread.h`.
const DEFERRED: c_int = 0;
const ASYNCHRONOUS: c_int = 1;

/// Defers cancellation. Returns the type of before.
///
/// Nothing to drop: a thread whose type is asynchronous can be cancelled at each instruction of this.
#[inline(never)]
extern "C-unwind" fn defer_cancellation() -> c_int {
    let mut old = DEFERRED;
    // SAFETY: a valid type and place; what may be unwound here holds nothing.
    unsafe { pthread_setcanceltype(DEFERRED, &raw mut old) };
    old
}

/// Has cancellation be asynchronous again; a thread that was cancelled meanwhile ends here. Likewise.
#[inline(never)]
extern "C-unwind" fn undefer_cancellation() {
    // SAFETY: likewise.
    unsafe { pthread_setcanceltype(ASYNCHRONOUS, std::ptr::null_mut()) };
}

/// Where a signal is to go on: the program's handler, or 0 if it waits.
///
/// # Safety
/// The arguments of a signal handler.
unsafe extern "C" fn route(signal: c_int, info: *mut c_void, context: *mut c_void) -> usize {
    let kept = HANDLERS.get(signal as usize).map_or(0, |slot| slot.load(Acquire));
    let thread = thread::current();
    // SAFETY: by the contract.
    if thread.depth() != 0 && unsafe { hold(thread, signal, kept & IS_TOLD != 0, info, context) } {
        return 0;
    }
    thread.note_handled(1u64 << (signal - 1));
    duty::on_handler();
    handler::note(thread, context.addr());
    kept & !IS_TOLD
}

/// Has a signal wait. False if that cannot be.
///
/// # Safety
/// The arguments of a signal handler.
#[cold]
#[inline(never)]
unsafe fn hold(thread: &Thread, signal: c_int, is_told: bool, info: *mut c_void, context: *mut c_void) -> bool {
    if Library::has_retired() || is_told && signal >= QUEUED {
        return false;
    }
    let bit = 1u64 << (signal - 1);
    let number = signal as usize;
    // SAFETY: the kernel's frame, whose mask is 8 bytes.
    let mask = unsafe { &mut *(&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>() };
    if *mask & bit != 0 {
        // The program has it blocked but for the call that it has interrupted (ppoll, epoll_pwait), whose result it is.
        return false;
    }
    // SAFETY: the calls read what they are given.
    unsafe {
        // It may come at once where the handler allows that (SA_NODEFER).
        let (block, mask) = (libc::SIG_BLOCK as usize, kernel::address(&raw const bit));
        let _ = kernel::call(libc::SYS_rt_sigprocmask, [block, mask, 0, 8, 0, 0]);
        let (Ok(process), Ok(id)) = (
            kernel::call(libc::SYS_getpid, [0; 6]),
            kernel::call(libc::SYS_gettid, [0; 6]),
        ) else {
            return false;
        };
        // A handler that is not told anything has no `info` that holds anything.
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

#[cfg(not(target_arch = "x86_64"))]
mod machine {
    //! Handlers do not wait.

    pub const CAN_ENTER: bool = false;

    pub extern "C" fn enter() {}
}

#[cfg(target_arch = "x86_64")]
mod machine {
    use std::arch::naked_asm;

    use super::{defer_cancellation, route, undefer_cancellation};

    pub const CAN_ENTER: bool = true;

    /// The handler that the kernel calls. Nothing of it is on the stack when the program's runs: who unwinds a handler,
    /// or measures its stack, sees what it would see without it.
    ///
    /// Except above a call in which the thread can be cancelled at each instruction, as glibc before 2.41 has it in all
    /// calls that block: there cancellation is deferred until the handler returns. It could end the thread in the
    /// middle of a section of a call of the handler's.
    #[unsafe(naked)]
    pub extern "C" fn enter() {
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
