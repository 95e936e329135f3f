//! Handles `longjmp` and `siglongjmp` out of a signal handler that has interrupted the library (the classic time-out by
//! alarm(2)). Before the program continues at the target, the interrupted call withdraws what it has announced to other
//! threads, and releases its locks.
//!
//! So the jump waits, and the interrupted call finishes as if the kernel had returned EINTR:
//!
//! - If the handler has interrupted the library's own code (a section is open, `core::os::thread`), the jump ends the
//!   handler by `rt_sigreturn`, as if it had returned. The interrupted code continues to the end of the section, which
//!   is short.
//! - If the handler has interrupted a blocking call of libc, the jump leaves that call, and [`outside`] fails with
//!   EINTR in its place.
//! - At the end of the outermost section the thread jumps to the program's target.
//!
//! A jump whose target is within the handler, or on another stack (coroutines), leaves no call of the library, and is
//! made at once. If a handler is left by `setcontext` or an exception, no hook sees that.

use std::ffi::{c_int, c_void};
use std::mem::{ManuallyDrop, MaybeUninit};

use rdmasock_core::os::thread;

use crate::sys::errno;
use crate::sys::real::Failure;

/// Runs `call` as one critical section: a jump out of a signal handler waits for its end.
#[inline(always)]
pub fn within<R>(call: impl FnOnce() -> R) -> R {
    let thread = thread::current();
    thread.begin();
    let result = call();
    thread.end();
    result
}

/// A cancellation point, for a hook that may finish without a cancellation point of libc. The caller has no live
/// destructor.
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
    // With a section open, the thread is in a handler that could not wait for the end of the section
    // (`process/sigaction`). It must not end there.
    if thread::current().depth() == 0 {
        // SAFETY: the call may unwind; the frames that the forced unwind passes have no live destructors, by the
        // callers' contract.
        unsafe { pthread_testcancel() };
    }
}

/// Calls `cancellation_point`, then [`within`].
#[inline(always)]
pub fn within_point<R>(call: impl FnOnce() -> R) -> R {
    cancellation_point();
    within(call)
}

/// Makes a call of libc that may block and has no destructor. A jump may leave the call. Fails with EINTR if a jump has
/// left it, or if a jump of the thread waits already.
pub fn outside<R: Failure, F: FnOnce() -> R>(call: F) -> R {
    outside_about(std::ptr::null(), call)
}

/// Does what [`outside`] does, for a call about the object `about` (null: none). Not inlined: see `hooks` on
/// destructors.
#[inline(never)]
fn outside_about<R: Failure, F: FnOnce() -> R>(about: *const (), call: F) -> R {
    /// Ends the outside call and the section when it is dropped, also if `pthread_cancel` ends the thread in the call.
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
    // SAFETY: `job` has the type that this `run` expects, and outlives the call.
    let is_left = unsafe { land(run::<R, F>, (&raw mut job).cast(), place.landing.as_ptr()) };
    let result = if is_left {
        errno::set(libc::EINTR);
        R::FAILURE
    } else {
        // SAFETY: `land` has returned false, so `run` has finished and written the result.
        unsafe { job.result.assume_init() }
    };
    // This drop may make the waiting jump, and then does not return. No other value in this frame has a destructor.
    drop(inside);
    result
}

/// Makes a call that can block. If `pthread_cancel` ends the thread in the call, `leave` runs, which undoes the
/// caller's work before the call. If a jump out of a signal handler leaves the call, fails with EINTR.
pub fn or_if_cancelled<R: Failure>(call: impl FnOnce() -> R, leave: impl FnOnce()) -> R {
    about_or_if_cancelled(std::ptr::null(), call, leave)
}

/// Makes a call of libc that cannot block, in the open section. No jump can leave the call. If `pthread_cancel` ends
/// the thread in it, `leave` runs, which undoes the caller's work before the call. Not inlined: see `hooks` on
/// destructors.
#[inline(never)]
pub fn quick_or_if_cancelled<R>(call: impl FnOnce() -> R, leave: impl FnOnce()) -> R {
    let mut unwound = Unwound(Some(leave));
    let result = call();
    unwound.0 = None;
    result
}

/// Does what [`or_if_cancelled`] does, for a call about the object `about` (`Thread::is_inside`). Not inlined: see
/// `hooks` on destructors.
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

/// Runs the job's call, outside. A jump may resume at the landing only while this frame is on the stack.
unsafe extern "C-unwind" fn run<R: Failure, F: FnOnce() -> R>(job: *mut c_void) {
    // SAFETY: `outside_about` passes a job with these types, which outlives this call.
    let job = unsafe { &mut *job.cast::<Job<'_, R, F>>() };
    // SAFETY: only this line takes the call out, and it runs once for each job.
    let call = unsafe { ManuallyDrop::take(&mut job.call) };
    let thread = thread::current();
    thread.step_out(job.place);
    // From here on a jump leaves this frame, and signal handlers do not wait. Signals that have waited for the section
    // are delivered first.
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

mod machine {
    //! The code that depends on the processor, the kernel's signal frame and glibc's `jmp_buf`.

    use std::arch::{asm, naked_asm};
    use std::ops::Range;

    use rdmasock_core::os::kernel;
    use rdmasock_core::os::thread::Thread;

    use super::*;
    use crate::signals::handler;

    /// The size of glibc's `struct __jmp_buf_tag`, bytes: registers, whether the mask is saved, the mask.
    const ENVIRONMENT: usize = 200;
    /// The index of the stack pointer in `struct __jmp_buf_tag`, in words of 8 bytes.
    const STACK_POINTER: usize = 6;

    struct Jump {
        environment: [u64; ENVIRONMENT / 8],
        value: c_int,
    }

    impl Jump {
        /// Returns the stack pointer of the target frame (glibc's PTR_DEMANGLE).
        fn target(&self) -> usize {
            let mangled = self.environment.get(STACK_POINTER).copied().unwrap_or_default();
            let target: u64;
            // SAFETY: reads the thread's pointer guard from glibc's `tcbhead_t`, which every thread has.
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

    /// Runs before libc's `longjmp`. Returns if the jump is to be made at once; otherwise the jump waits, and this does
    /// not return.
    ///
    /// # Safety
    /// `environment` is a `jmp_buf` that has been filled.
    #[inline]
    pub unsafe extern "C" fn before(environment: *const c_void, value: c_int) {
        let thread = thread::current();
        if thread.depth() != 0 || thread.outside().is_some() || thread.is_leaving() {
            // SAFETY: `environment` is a filled `jmp_buf`, by the contract.
            unsafe { before_slow(thread, environment, value) };
        }
    }

    #[cold]
    #[inline(never)]
    unsafe fn before_slow(thread: &Thread, environment: *const c_void, value: c_int) {
        let jump = Jump {
            // SAFETY: `environment` is a filled `jmp_buf`, by `before`'s contract, and has `ENVIRONMENT` bytes.
            environment: unsafe { environment.cast::<[u64; ENVIRONMENT / 8]>().read() },
            value,
        };
        let here = stack_pointer();
        if thread.depth() != 0 {
            if leaves(here, thread.base(), jump.target())
                && let Some(frame) = signal_frame()
            {
                wait(thread, jump);
                // SAFETY: `frame` belongs to a running handler that has interrupted this thread. All code between that
                // frame and this one ends here.
                unsafe { return_from_signal(frame) };
            }
        } else if let Some(place) = thread.outside()
            && leaves(here, std::ptr::from_ref(place) as usize, jump.target())
        {
            wait(thread, jump);
            // SAFETY: `run` for this place is on the stack. All code between its frame and this one ends here.
            unsafe { resume(place.landing.get()) };
        } else if thread.is_leaving() && leaves(here, thread.base(), jump.target()) {
            // An earlier jump waits, which the end of a section was about to make. This jump replaces it, because the
            // earlier target may be gone later.
            // SAFETY: the box is from `wait`. The interrupted code, which might use the box, does not continue.
            drop(unsafe { Box::from_raw(thread.take_jump().cast::<Jump>()) });
        }
    }

    fn wait(thread: &Thread, jump: Jump) {
        let before = thread.jump().cast::<Jump>();
        if before.is_null() {
            let jump = Box::into_raw(Box::new(jump));
            thread.set_jump(jump.cast(), carry_out);
        } else {
            // The last jump replaces earlier ones, as if each had been made at once.
            // SAFETY: `before` is not null, so it is a box from the branch above, and only this thread uses it.
            unsafe { *before = jump };
        }
    }

    /// Makes the waiting jump. Called at the end of an outermost section.
    extern "C" fn carry_out() {
        let thread = thread::current();
        let waiting = thread.jump().cast::<Jump>();
        // SAFETY: the pointer is null, or a box from `wait`.
        let Some(target) = (unsafe { waiting.as_ref() }).map(Jump::target) else {
            return;
        };
        if let Some(place) = thread.outside()
            && leaves(stack_pointer(), std::ptr::from_ref(place) as usize, target)
        {
            // The ended section belongs to a call of a handler, and that handler has interrupted another outside call.
            // The jump leaves that call first.
            // SAFETY: `run` for this place is on the stack. All code between its frame and this one ends here, as in
            // `before_slow`.
            unsafe { resume(place.landing.get()) };
        }
        thread.take_jump();
        // SAFETY: the box is from `wait`, and `take_jump` has removed the only other pointer. The jump is the program's
        // own. Its target frame still exists, because it is further out than all frames that have returned.
        unsafe {
            let jump = *Box::from_raw(waiting);
            crate::sys::real::longjmp()(jump.environment.as_ptr().cast_mut().cast(), jump.value);
        }
    }

    /// Returns whether a jump from `here` to `target` leaves the frame at `limit`: whether that frame is on the same
    /// stack as the target, and further in.
    fn leaves(here: usize, limit: usize, target: usize) -> bool {
        let from = match alternate() {
            Some(range) if range.contains(&limit) => here,
            // The target is within the handler.
            Some(range) if range.contains(&target) => return false,
            Some(_) => limit,
            None => here,
        };
        from <= limit && limit < target && is_readable(from..target)
    }

    /// Returns the alternate signal stack; `None` if the thread is not on it.
    fn alternate() -> Option<Range<usize>> {
        handler::alternate_stack().and_then(|(stack, is_on_it)| is_on_it.then_some(stack))
    }

    /// Returns whether all pages of the range can be read. Between two stacks there is usually an unreadable page.
    fn is_readable(range: Range<usize>) -> bool {
        const PAGE: usize = 4096;
        let mut pages = (range.start & !(PAGE - 1)..range.end).step_by(PAGE);
        pages.all(handler::is_readable)
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

    /// Returns the signal frame of the innermost handler that this thread is in. That handler may have interrupted
    /// another handler, which then finishes before the jump. The frame is found by unwinding, since a search through
    /// the stack would also find frames of earlier signals. `None` if the handler was compiled without unwind tables.
    fn signal_frame() -> Option<usize> {
        let mut search = Search {
            restorers: restorers(),
            frame: 0,
        };
        // SAFETY: the unwinder only walks the stack, from glibc 2.35 on without locks (it finds the tables by
        // `_dl_find_object`), and calls `look` with `search`.
        unsafe { _Unwind_Backtrace(look, (&raw mut search).cast()) };
        let frame = search.frame;
        // `struct rt_sigframe` begins with the address that the handler returns to (arch/x86/include/asm/sigframe.h).
        // SAFETY: the unwinder has found the frame on this thread's stack.
        (frame != 0 && search.restorers.contains(&unsafe { *(frame as *const usize) })).then_some(frame)
    }

    extern "C" fn look(context: *mut Context, search: *mut c_void) -> c_int {
        // SAFETY: `signal_frame` passes its `Search`, which outlives the walk.
        let search = unsafe { &mut *search.cast::<Search>() };
        // SAFETY: the context is the unwinder's, valid during this call.
        let (at, above) = unsafe { (_Unwind_GetIP(context), _Unwind_GetCFA(context)) };
        if !search.restorers.contains(&at) {
            return GO_ON;
        }
        search.frame = above - size_of::<usize>();
        STOP
    }

    /// Returns the addresses that handlers return to. As a rule all handlers return to one function of libc.
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
            let at = kernel::address(&raw mut action);
            // SAFETY: a null new action changes nothing; the kernel fills the struct.
            let asked = unsafe { kernel::call(libc::SYS_rt_sigaction, [signal, 0, at, 8, 0, 0]) };
            // 0 and 1: SIG_DFL and SIG_IGN.
            if asked.is_ok()
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

    /// Leaves a handler: the kernel restores the registers and the signal mask from `frame`.
    unsafe fn return_from_signal(frame: usize) -> ! {
        // SAFETY: `frame` belongs to a running handler, by the caller's contract. The kernel expects the stack pointer
        // where the handler's own return would have left it, above the return address.
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

    /// Stores a stack pointer in `landing` and calls `run(job)`. Returns false when `run` returns, and true when
    /// [`resume`] is called with the stored value.
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

    /// Makes the call of [`land`] that has stored `landing` return true.
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

        /// Returns a `jmp_buf` whose target frame has this stack pointer.
        fn leading_to(target: usize) -> [u64; ENVIRONMENT / 8] {
            let mut jump = Jump {
                environment: [0; ENVIRONMENT / 8],
                value: 1,
            };
            // glibc mangles a pointer by XOR with the guard, then by a rotation.
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
            // SAFETY: `before` only reads the environment, whose stack pointer is filled; the jump itself is not made.
            unsafe { before(environment.as_ptr().cast(), 1) };
        }

        #[test]
        fn a_jump_over_the_end_of_a_section_is_instead_of_the_one_that_waits() {
            let thread = thread::current();
            let outermost = stack_pointer();
            let far_out = outermost + 64;
            section();
            // Makes the state in which a thread ends a section after a handler has jumped to `far_out` within it: the
            // jump is stored, and not made yet.
            let environment = leading_to(far_out);
            wait(thread, Jump { environment, value: 1 });
            // A jump within the handler: the waiting jump stays.
            jump_to(thread.base() - 16);
            assert!(thread.is_leaving());
            // A jump out of the handler.
            jump_to(far_out);
            assert!(!thread.is_leaving(), "it would be made at the next call");
        }
    }
}
