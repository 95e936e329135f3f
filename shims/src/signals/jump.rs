//! `longjmp` and its kin out of a signal handler that has interrupted the library (the classic time-out by alarm(2)):
//! what a call has announced is withdrawn, and what it holds released, before the program is where it wants to be.
//!
//! Nothing is undone behind a call's back. The jump waits, and the call comes to its end as if the kernel had said
//! EINTR:
//!
//! - Where the handler has interrupted the library itself (`thread`: a section is open), the handler is left by
//!   `rt_sigreturn`, as if it had returned. The code that it has interrupted goes on, for the moment that sections
//!   last.
//! - Where it has interrupted a call of libc's that blocks, that call is given up, and [`outside`] returns EINTR in its
//!   place.
//! - The end of the outermost section carries the jump out.
//!
//! A jump whose target is within the handler, or on another stack (coroutines), leaves no call and is none of this
//! file's business. Not seen are handlers that are left by `setcontext` or an exception.

use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};

use rdmasock_core::os::thread;

use crate::sys::errno;
use crate::sys::real::Failure;

/// A call that is one section: nothing of it is left half done by a jump.
#[inline(always)]
pub fn within<R>(call: impl FnOnce() -> R) -> R {
    let thread = thread::current();
    thread.begin();
    let result = call();
    thread.end();
    result
}

/// A cancellation point, for a call that may come to its end without one of libc's. No destructor is alive in the
/// caller.
#[inline(always)]
pub fn cancellation_point() {
    if thread::current().is_cancelled() {
        be_cancelled();
    }
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

#[cold]
#[inline(never)]
fn be_cancelled() {
    // Not in a handler that has interrupted a section: those do not wait for its end (`signals`).
    if thread::current().depth() == 0 {
        // SAFETY: what the forced unwind passes holds nothing.
        unsafe { pthread_testcancel() };
    }
}

/// [`within`], for a call that is a cancellation point.
#[inline(always)]
pub fn within_point<R>(call: impl FnOnce() -> R) -> R {
    cancellation_point();
    within(call)
}

/// Makes a call of libc's that may block, and has no destructor; a jump may leave it. EINTR then, and where the thread
/// is on its way out already.
pub fn outside<R: Failure, F: FnOnce() -> R>(call: F) -> R {
    outside_about(std::ptr::null(), call)
}

/// [`outside`], with what the call is about. Not inlined: see `hooks` on destructors.
#[inline(never)]
fn outside_about<R: Failure, F: FnOnce() -> R>(about: *const (), call: F) -> R {
    /// Also where `pthread_cancel` ends the thread in the call.
    struct Inside<'a>(&'a thread::Outside);
    impl Drop for Inside<'_> {
        fn drop(&mut self) {
            let thread = thread::current();
            thread.step_in(self.0);
            thread.end();
        }
    }

    let thread = thread::current();
    if thread.is_leaving() {
        errno::set(libc::EINTR);
        return R::FAILURE;
    }
    thread.begin();
    let place = thread.about_to_step_out(about);
    let mut job = Job {
        call: ManuallyDrop::new(call),
        result: MaybeUninit::uninit(),
        place: &place,
    };
    let inside = Inside(&place);
    // SAFETY: the job is what `run` of this type takes, and outlives the call.
    let is_left = unsafe { land(run::<R, F>, (&raw mut job).cast(), place.landing.as_ptr()) };
    let result = if is_left {
        errno::set(libc::EINTR);
        R::FAILURE
    } else {
        // SAFETY: `run` has come to its end.
        unsafe { job.result.assume_init() }
    };
    // Its destructor may carry the jump out, and not return; nothing else here has one.
    drop(inside);
    result
}

/// Makes a call that can block; `leave` undoes what precedes it if `pthread_cancel` ends the thread in there. A jump
/// out of a signal handler leaves it with EINTR.
pub fn or_if_cancelled<R: Failure>(call: impl FnOnce() -> R, leave: impl FnOnce()) -> R {
    about_or_if_cancelled(std::ptr::null(), call, leave)
}

/// Makes a call of libc's that cannot block, in the section that is open: nothing leaves it but `pthread_cancel`, which
/// `leave` undoes. Not inlined: see `hooks` on destructors.
#[inline(never)]
pub fn quick_or_if_cancelled<R>(call: impl FnOnce() -> R, leave: impl FnOnce()) -> R {
    let mut unwound = Unwound(Some(leave));
    let result = call();
    unwound.0 = None;
    result
}

/// [`or_if_cancelled`], with what the call is about (`Thread::is_inside`). Not inlined: see `hooks` on destructors.
#[inline(never)]
pub fn about_or_if_cancelled<R: Failure>(about: *const (), call: impl FnOnce() -> R, leave: impl FnOnce()) -> R {
    let mut unwound = Unwound(Some(leave));
    let result = outside_about(about, call);
    unwound.0 = None;
    result
}

struct Unwound<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for Unwound<F> {
    fn drop(&mut self) {
        if let Some(leave) = self.0.take() {
            leave();
        }
    }
}

struct Job<'a, R, F> {
    call: ManuallyDrop<F>,
    result: MaybeUninit<R>,
    place: &'a thread::Outside,
}

/// Only while this is on the stack is there a landing.
unsafe extern "C-unwind" fn run<R: Failure, F: FnOnce() -> R>(job: *mut c_void) {
    // SAFETY: by `outside`.
    let job = unsafe { &mut *job.cast::<Job<'_, R, F>>() };
    // SAFETY: taken once.
    let call = unsafe { ManuallyDrop::take(&mut job.call) };
    let thread = thread::current();
    thread.step_out(job.place);
    // From here on a jump does not come back, and a handler does not wait. What waits already came before.
    if thread.is_due() {
        thread.let_signals_in();
    }
    let result = if thread.is_leaving() {
        errno::set(libc::EINTR);
        R::FAILURE
    } else {
        call()
    };
    thread.step_in(job.place);
    job.result.write(result);
}

pub use machine::before;
use machine::land;

#[cfg(not(target_arch = "x86_64"))]
mod machine {
    //! Jumps are not looked at.

    use std::ffi::{c_int, c_void};

    pub unsafe extern "C" fn before(_: *const c_void, _: c_int) {}

    pub(super) unsafe fn land(run: unsafe extern "C-unwind" fn(*mut c_void), job: *mut c_void, _: *mut usize) -> bool {
        // SAFETY: by the caller's word.
        unsafe { run(job) };
        false
    }
}

#[cfg(target_arch = "x86_64")]
mod machine {
    //! What of this depends on the processor, the kernel's signal frame and glibc's `jmp_buf`.

    use std::arch::{asm, naked_asm};
    use std::ops::Range;

    use rdmasock_core::os::thread::Thread;

    use super::*;

    /// glibc's `struct __jmp_buf_tag`: registers, whether the mask is saved, the mask.
    const ENVIRONMENT: usize = 200;
    /// Where in it the stack pointer is, in words.
    const STACK_POINTER: usize = 6;

    struct Jump {
        environment: [u64; ENVIRONMENT / 8],
        value: c_int,
    }

    impl Jump {
        /// The stack pointer of the frame that it leads to (glibc's PTR_DEMANGLE).
        fn target(&self) -> usize {
            let mangled = self.environment.get(STACK_POINTER).copied().unwrap_or_default();
            let target: u64;
            // SAFETY: reads the thread's pointer guard, where glibc has it (tcbhead_t).
            unsafe {
                asm!(
                    "ror {0}, 0x11",
                    "xor {0}, qword ptr fs:[0x30]",
                    inout(reg) mangled => target,
                    options(nostack, readonly),
                );
            }
            target as usize
        }
    }

    /// Before a jump. Returns where it is to be made at once.
    ///
    /// # Safety
    /// `environment` is a `jmp_buf` that has been filled.
    #[inline]
    pub unsafe extern "C" fn before(environment: *const c_void, value: c_int) {
        let thread = thread::current();
        if thread.depth() != 0 || thread.outside().is_some() || thread.is_leaving() {
            // SAFETY: by the contract.
            unsafe { before_slow(thread, environment, value) };
        }
    }

    #[cold]
    #[inline(never)]
    unsafe fn before_slow(thread: &Thread, environment: *const c_void, value: c_int) {
        let jump = Jump {
            // SAFETY: by `before`'s contract; both types are 8 words and a mask.
            environment: unsafe { environment.cast::<[u64; ENVIRONMENT / 8]>().read() },
            value,
        };
        let here = stack_pointer();
        if thread.depth() != 0 {
            if leaves(here, thread.base(), jump.target())
                && let Some(frame) = signal_frame()
            {
                wait(thread, jump);
                // SAFETY: the frame of a handler that has interrupted this very thread, and that is not gone on with.
                unsafe { return_from_signal(frame) };
            }
        } else if let Some(place) = thread.outside()
            && leaves(here, std::ptr::from_ref(place) as usize, jump.target())
        {
            wait(thread, jump);
            // SAFETY: `run` for this place is on the stack, and nothing between here and there is gone on with.
            unsafe { resume(place.landing.get()) };
        } else if thread.is_leaving() && leaves(here, thread.base(), jump.target()) {
            // The end of a section was about to carry out the one before. It is not to be carried out later, when its
            // target may be gone. SAFETY: ours, by `wait`, and what was interrupted is not gone on with.
            drop(unsafe { Box::from_raw(thread.take_jump().cast::<Jump>()) });
        }
    }

    fn wait(thread: &Thread, jump: Jump) {
        let before = thread.jump().cast::<Jump>();
        if before.is_null() {
            let jump = Box::into_raw(Box::new(jump));
            thread.set_jump(jump.cast(), carry_out);
        } else {
            // The last one counts, as where each is made at once.
            // SAFETY: ours, by the line above.
            unsafe { *before = jump };
        }
    }

    /// The end of an outermost section, with a jump that waits.
    extern "C" fn carry_out() {
        let thread = thread::current();
        let waiting = thread.jump().cast::<Jump>();
        // SAFETY: null, or by `wait`.
        let Some(target) = (unsafe { waiting.as_ref() }).map(Jump::target) else {
            return;
        };
        if let Some(place) = thread.outside()
            && leaves(stack_pointer(), std::ptr::from_ref(place) as usize, target)
        {
            // This call was one of a handler's, which has itself interrupted another.
            // SAFETY: as in `before_slow`.
            unsafe { resume(place.landing.get()) };
        }
        thread.take_jump();
        // SAFETY: ours, and nobody else's any more; then the program's own jump, whose target is still there: it is
        // further out than all that has returned.
        unsafe {
            let jump = *Box::from_raw(waiting);
            crate::sys::real::longjmp()(jump.environment.as_ptr().cast_mut().cast(), jump.value);
        }
    }

    /// Whether a jump from `here` to `target` leaves what has its frame at `limit`: that is on the same stack as the
    /// target, and further in.
    fn leaves(here: usize, limit: usize, target: usize) -> bool {
        let from = match alternate() {
            Some(range) if range.contains(&limit) => here,
            // To a place within the handler.
            Some(range) if range.contains(&target) => return false,
            Some(_) => limit,
            None => here,
        };
        from <= limit && limit < target && is_readable(from..target)
    }

    /// The alternate stack, if the thread is on it.
    fn alternate() -> Option<Range<usize>> {
        // SAFETY: a plain struct, which the call fills.
        unsafe {
            let mut stack: libc::stack_t = std::mem::zeroed();
            let asked = libc::sigaltstack(std::ptr::null(), &raw mut stack);
            let from = stack.ss_sp as usize;
            (asked == 0 && stack.ss_flags & libc::SS_ONSTACK != 0).then_some(from..from + stack.ss_size)
        }
    }

    /// Whether all of it can be read: between two stacks there is something that cannot, as a rule.
    fn is_readable(range: Range<usize>) -> bool {
        const PAGE: usize = 4096;
        (range.start & !(PAGE - 1)..range.end).step_by(PAGE).all(|page| {
            // It reads its set before it looks at a `how` that there is none of: EFAULT or EINVAL.
            let how = usize::MAX;
            // SAFETY: changes nothing, and the kernel checks the address.
            let error = unsafe { syscall(libc::SYS_rt_sigprocmask, how, page, 0, 8) };
            error != -(libc::EFAULT as isize)
        })
    }

    /// The unwinder's view of a frame (Itanium C++ ABI, "Exception Handling").
    #[repr(C)]
    struct Context {
        _opaque: [u8; 0],
    }

    /// `_Unwind_Reason_Code`.
    const GO_ON: c_int = 0;
    const STOP: c_int = 4;

    unsafe extern "C" {
        fn _Unwind_Backtrace(each: extern "C" fn(*mut Context, *mut c_void) -> c_int, argument: *mut c_void) -> c_int;
        fn _Unwind_GetIP(context: *mut Context) -> usize;
        fn _Unwind_GetCFA(context: *mut Context) -> usize;
    }

    struct Search {
        restorers: [usize; 4],
        frame: usize,
    }

    /// The signal frame of the handler that this thread is in, the innermost. What that has interrupted may be another
    /// handler, which then comes to its end before the jump. Found by unwinding, since stacks are full of frames of
    /// signals past; `None` where the handler was compiled without tables for that.
    fn signal_frame() -> Option<usize> {
        let mut search = Search {
            restorers: restorers(),
            frame: 0,
        };
        // SAFETY: only walks the stack, without locks (glibc finds the tables by `_dl_find_object`), and calls `look`.
        unsafe { _Unwind_Backtrace(look, (&raw mut search).cast()) };
        let frame = search.frame;
        // `struct rt_sigframe` begins with the address that the handler returns to (arch/x86/include/asm/sigframe.h).
        // SAFETY: on this thread's stack, by the unwinder's word.
        (frame != 0 && search.restorers.contains(&unsafe { *(frame as *const usize) })).then_some(frame)
    }

    extern "C" fn look(context: *mut Context, search: *mut c_void) -> c_int {
        // SAFETY: by `signal_frame`.
        let search = unsafe { &mut *search.cast::<Search>() };
        // SAFETY: the unwinder's context.
        let (at, above) = unsafe { (_Unwind_GetIP(context), _Unwind_GetCFA(context)) };
        if !search.restorers.contains(&at) {
            return GO_ON;
        }
        search.frame = above - size_of::<usize>();
        STOP
    }

    /// Where handlers return to. One function of libc's for all of them, as a rule.
    fn restorers() -> [usize; 4] {
        /// `struct kernel_sigaction`.
        #[repr(C)]
        #[derive(Default)]
        struct Action {
            handler: usize,
            flags: usize,
            restorer: usize,
            mask: u64,
        }
        let mut found = [usize::MAX; 4];
        let mut count = 0;
        for signal in 1..=64usize {
            let mut action = Action::default();
            let at = (&raw mut action) as usize;
            // SAFETY: only asks; the kernel fills the struct.
            let asked = unsafe { syscall(libc::SYS_rt_sigaction, signal, 0, at, 8) };
            // 0 and 1: SIG_DFL and SIG_IGN.
            if asked == 0
                && action.handler > 1
                && !found.contains(&action.restorer)
                && let Some(slot) = found.get_mut(count)
            {
                *slot = action.restorer;
                count += 1;
            }
        }
        found
    }

    fn stack_pointer() -> usize {
        let at: usize;
        // SAFETY: reads a register.
        unsafe { asm!("mov {}, rsp", out(reg) at, options(nomem, nostack, preserves_flags)) };
        at
    }

    /// The raw system call. The result is as the kernel gives it.
    unsafe fn syscall(number: libc::c_long, a: usize, b: usize, c: usize, d: usize) -> isize {
        let result: isize;
        // SAFETY: by the caller's word.
        unsafe {
            asm!(
                "syscall",
                inout("rax") number as isize => result,
                in("rdi") a,
                in("rsi") b,
                in("rdx") c,
                in("r10") d,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        result
    }

    /// Leaves a handler: the kernel puts all registers and the mask back as they were.
    unsafe fn return_from_signal(frame: usize) -> ! {
        // SAFETY: by the caller's word. The kernel expects the stack pointer where the handler's own return would have
        // left it, above the return address.
        unsafe {
            asm!(
                "mov rsp, {0}",
                "syscall",
                "ud2",
                in(reg) frame + 8,
                in("rax") libc::SYS_rt_sigreturn,
                options(noreturn),
            );
        }
    }

    /// Calls `run(job)`; gives false when that is back, and true when [`resume`] has been given what it stores in
    /// `landing`.
    #[unsafe(naked)]
    pub(super) unsafe extern "C-unwind" fn land(
        run: unsafe extern "C-unwind" fn(*mut c_void),
        job: *mut c_void,
        landing: *mut usize,
    ) -> bool {
        naked_asm!(
            ".cfi_startproc",
            "push rbp",
            ".cfi_def_cfa_offset 16",
            ".cfi_offset rbp, -16",
            "mov rbp, rsp",
            ".cfi_def_cfa_register rbp",
            "push rbx",
            ".cfi_offset rbx, -24",
            "push r12",
            ".cfi_offset r12, -32",
            "push r13",
            ".cfi_offset r13, -40",
            "push r14",
            ".cfi_offset r14, -48",
            "push r15",
            ".cfi_offset r15, -56",
            "sub rsp, 8", // A call needs rsp at a multiple of 16.
            "mov [rdx], rsp",
            "mov rax, rdi",
            "mov rdi, rsi",
            "call rax",
            "xor eax, eax",
            "add rsp, 8",
            "pop r15",
            "pop r14",
            "pop r13",
            "pop r12",
            "pop rbx",
            "pop rbp",
            ".cfi_def_cfa rsp, 8",
            "ret",
            ".cfi_endproc",
        )
    }

    /// Returns true from the [`land`] that has stored this.
    #[unsafe(naked)]
    unsafe extern "C" fn resume(landing: usize) -> ! {
        naked_asm!(
            "mov rsp, rdi",
            "mov eax, 1",
            "add rsp, 8",
            "pop r15",
            "pop r14",
            "pop r13",
            "pop r12",
            "pop rbx",
            "pop rbp",
            "ret",
        )
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// A `jmp_buf` that leads to a frame with this stack pointer.
        fn leading_to(target: usize) -> [u64; ENVIRONMENT / 8] {
            let mut jump = Jump {
                environment: [0; ENVIRONMENT / 8],
                value: 1,
            };
            // Mangling is its own inverse but for the rotation.
            jump.environment[STACK_POINTER] = 0;
            let guard = jump.target() as u64;
            jump.environment[STACK_POINTER] = (target as u64 ^ guard).rotate_left(0x11);
            assert_eq!(jump.target(), target);
            jump.environment
        }

        #[inline(never)]
        fn section() {
            thread::current().begin();
            thread::current().end();
        }

        #[inline(never)]
        fn jump_to(target: usize) {
            let environment = leading_to(target);
            // SAFETY: as good as filled; the jump itself is not made.
            unsafe { before(environment.as_ptr().cast(), 1) };
        }

        #[test]
        fn a_jump_over_the_end_of_a_section_is_instead_of_the_one_that_waits() {
            let thread = thread::current();
            let outermost = stack_pointer();
            let far_out = outermost + 64;
            section();
            // As a handler does in the middle of it; `end` would carry it out, and is interrupted before.
            let environment = leading_to(far_out);
            wait(thread, Jump { environment, value: 1 });
            // Within the handler: what was interrupted goes on.
            jump_to(thread.base() - 16);
            assert!(thread.is_leaving());
            // Out of it.
            jump_to(far_out);
            assert!(!thread.is_leaving(), "it would be made at the next call");
        }
    }
}
