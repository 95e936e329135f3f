//! The state that the library keeps for each thread: its id, and where in the library it is. Also the start of the
//! library's own threads ([`spawn`]).
//!
//! Every call uses this state, so it is found by two instructions (the initial-exec model of TLS, which a preloaded
//! library may use). `thread_local!` in a shared library would call the loader. The state has no destructor.
//!
//! A thread is *within* the library while it has a section open. Between `begin` and `end` it has announced an
//! operation, or holds a lock. During a section a signal handler of the program has to wait (`shims::signals`). If a
//! handler that cannot wait makes a `longjmp` (a *jump*), the jump waits instead (`shims::signals::jump`). While a
//! thread makes a libc call that may block, the thread is [outside](Outside), however many sections are open.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, compiler_fence};

use rustix::io::Errno;

use crate::os::kernel;

// The bits of `Thread::due`: kinds of work that may wait for the end of a section.
const JUMP: u32 = 1;
const SIGNALS: u32 = 2;

/// The state of a thread; the module's description says what it is for.
#[repr(C)]
#[derive(Debug)]
pub struct Thread {
    /// The kernel's id of the thread; 0 until it is first needed.
    tid: Cell<u32>,
    /// The number of open sections, which are nested.
    depth: Cell<u32>,
    /// The stack pointer at the beginning of the outermost section.
    base: Cell<usize>,
    /// The kinds of work that wait for the end of the sections (`JUMP`, `SIGNALS`). Atomic because the thread's own
    /// signal handlers access it; `handlers` is atomic for the same reason.
    due: AtomicU32,
    /// The number of library fds that this thread has in transit, on their way to a private number. Each further fd is
    /// a part of the first fd's transit (`os::privatefd`).
    pub(super) transits: Cell<u32>,
    /// The number of open periods in which the thread needs all library fds settled, at their private numbers
    /// (`os::privatefd`).
    pub(super) settles: Cell<u32>,
    /// The count of signal handlers that have run; wraps.
    handlers: AtomicU32,
    /// Signals that wait for the end of the sections, one bit for each. The kernel has them blocked.
    held: AtomicU64,
    /// The jump that waits for the end of the sections; null if there is none.
    jump: Cell<*mut u8>,
    /// The innermost outside call that has not returned; null if there is none.
    outside: Cell<*const Outside>,
    /// Signals whose handlers have run since a call last [cleared them](Self::handlers_at_call), one bit for each.
    handled: AtomicU64,
    /// The frame of the signal handler that was noted last: the address of the handler's `ucontext`, and the handler's
    /// return address; zeroes if there is none.
    pub handler: Cell<(usize, usize)>,
    /// The address to which the program last had the results of a wait written; 0 if there is none.
    results: Cell<usize>,
    /// The work that the thread does for other threads while it sleeps; null if there is none. While this thread runs a
    /// signal handler, another thread has to do that work.
    pub duty: Cell<*const ()>,
    /// Whether `pthread_cancel` was called for the thread. Other threads set it.
    cancelled: AtomicBool,
}

const BYTES: usize = 104;
const _: () = assert!(size_of::<Thread>() <= BYTES);

std::arch::global_asm!(
    ".pushsection .tbss.rdmasock_thread, \"awT\", @nobits",
    ".globl rdmasock_thread",
    ".hidden rdmasock_thread",
    ".type rdmasock_thread, @object",
    ".size rdmasock_thread, {bytes}",
    ".p2align 4",
    "rdmasock_thread:",
    ".zero {bytes}",
    ".popsection",
    bytes = const BYTES,
);

/// Returns the calling thread's state. The reference must not leave the thread.
#[inline(always)]
pub fn current() -> &'static Thread {
    let at: *const Thread;
    // SAFETY: the address of this thread's copy of the variable above. The copy is zero at first, which is a valid
    // `Thread`, and lives as long as the thread.
    unsafe {
        std::arch::asm!(
            "mov {at}, qword ptr [rip + rdmasock_thread@gottpoff]",
            "add {at}, qword ptr fs:[0]",
            at = out(reg) at,
            options(pure, nomem, nostack),
        );
        &*at
    }
}

/// Notes that the thread with this `pthread_t` is about to be cancelled. In glibc a `pthread_t` is the address of the
/// thread control block, and every thread's copy of a variable lies at the same distance from that block.
///
/// # Safety
/// The thread has not been joined.
pub unsafe fn note_cancelled(pthread: libc::pthread_t) {
    let own: usize;
    // SAFETY: reads the calling thread's pointer to its own control block.
    unsafe { std::arch::asm!("mov {}, qword ptr fs:[0]", out(reg) own, options(pure, readonly, nostack)) };
    let at = std::ptr::from_ref(current()).wrapping_byte_offset((pthread as usize).wrapping_sub(own) as isize);
    // SAFETY: the address of that thread's copy, which lives until the thread is joined. The field is atomic.
    unsafe { (*at).cancelled.store(true, Relaxed) };
}

/// A libc call that may block, and that a jump may leave. The value lies in the stack frame of the library's function
/// that makes the call.
#[derive(Debug)]
pub struct Outside {
    /// The outside call that was interrupted by the signal handler which makes this call; null if there is none.
    before: *const Outside,
    /// The object that the call is about, for [`Thread::is_inside`].
    about: *const (),
    /// The number of sections that were open at the call.
    depth: u32,
    base: usize,
    /// The stack pointer to continue with when a jump leaves the call.
    pub landing: Cell<usize>,
}

/// The address of the function that carries out the waiting jump, or a part of it; 0 before the first jump.
static CARRY_OUT: AtomicUsize = AtomicUsize::new(0);

impl Thread {
    /// Returns the kernel's id of the thread.
    #[inline]
    pub fn tid(&self) -> u32 {
        match self.tid.get() {
            0 => self.ask_tid(),
            id => id,
        }
    }

    #[cold]
    fn ask_tid(&self) -> u32 {
        let id = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        self.tid.set(id);
        id
    }

    /// Forgets the id in a fork child, since the surviving thread has a new id.
    pub fn forget_tid(&self) {
        self.tid.set(0);
    }

    /// Opens a section.
    #[inline(always)]
    pub fn begin(&self) {
        let depth = self.depth.get();
        if depth == 0 {
            self.base.set(stack_pointer());
        }
        self.depth.set(depth + 1);
        // What the section shows to other threads (a lock that it holds, a sleeper's flag) is stored after this point,
        // and is withdrawn before `end`. The fence keeps that order for signal handlers.
        compiler_fence(SeqCst);
    }

    /// Closes the section that was opened last. If it is the outermost section, runs the waiting signal handlers, and
    /// carries out a waiting jump. After a jump this does not return.
    #[inline(always)]
    pub fn end(&self) {
        compiler_fence(SeqCst);
        let depth = self.depth.get().wrapping_sub(1);
        self.depth.set(depth);
        // A signal that arrives before the store of `depth` is held, and this load finds it in `due`. A signal that
        // arrives after the store finds no open section.
        compiler_fence(SeqCst);
        if depth == 0 && self.due.load(Relaxed) != 0 {
            self.settle();
        }
    }

    #[cold]
    #[inline(never)]
    fn settle(&self) {
        self.let_signals_in();
        if self.is_leaving() {
            carry_out();
        }
    }

    /// Notes that a signal waits for the end of the open sections. The library's handler, which calls this, has made
    /// the signal pending again, and has blocked it for the time after its own return.
    pub fn hold_signal(&self, bit: u64) {
        self.held.fetch_or(bit, Relaxed);
        self.due.fetch_or(SIGNALS, Relaxed);
    }

    /// Counts the handler of a signal, which is about to run.
    pub fn note_handled(&self, bit: u64) {
        self.handled.fetch_or(bit, Relaxed);
        self.handlers.fetch_add(1, Relaxed);
    }

    /// Returns the count of handlers that have run; wraps. If the count differs later, a handler has run in between.
    #[inline]
    pub fn handlers(&self) -> u32 {
        self.handlers.load(Relaxed)
    }

    /// Returns [`Self::handlers`] for a call that begins, and clears [`Self::handled`]. Does not clear it if a signal
    /// handler that has interrupted an outside call makes the call: the interrupted call needs the signals.
    #[inline]
    pub fn handlers_at_call(&self) -> u32 {
        if self.outside.get().is_null() && self.handled() != 0 {
            self.handled.store(0, Relaxed);
        }
        self.handlers()
    }

    /// Returns the signals whose handlers have run since [`Self::handlers_at_call`] last cleared them, one bit for
    /// each.
    pub fn handled(&self) -> u64 {
        self.handled.load(Relaxed)
    }

    /// Returns whether any work waits for the end of the sections.
    #[inline]
    pub fn is_due(&self) -> bool {
        self.due.load(Relaxed) != 0
    }

    /// Runs the waiting signal handlers. To be called when no section is open.
    #[cold]
    pub fn let_signals_in(&self) {
        self.due.fetch_and(!SIGNALS, Relaxed);
        let held = self.held.swap(0, Relaxed);
        if held != 0 {
            let unblock = libc::SIG_UNBLOCK as usize;
            // SAFETY: the mask has 8 bytes. No announcement and no change is in progress, so the handlers may do
            // anything.
            let _ = unsafe {
                let mask = kernel::address(&raw const held);
                kernel::call(libc::SYS_rt_sigprocmask, [unblock, mask, 0, 8, 0, 0])
            };
        }
    }

    /// Returns whether `pthread_cancel` was called for the thread.
    #[inline(always)]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Relaxed)
    }

    /// Returns whether `at` is the address of the program's results that was noted last. If it is not, notes it.
    pub fn note_results(&self, at: usize) -> bool {
        self.results.replace(at) == at
    }

    /// Returns the number of open sections.
    pub fn depth(&self) -> u32 {
        self.depth.get()
    }

    /// Returns the stack pointer at the beginning of the outermost section.
    pub fn base(&self) -> usize {
        self.base.get()
    }

    /// Returns whether the thread is on its way out of the library, to the target of a jump. In that case a call that
    /// fails is not tried again.
    #[inline]
    pub fn is_leaving(&self) -> bool {
        !self.jump.get().is_null()
    }

    /// Returns the waiting jump; null if there is none.
    pub fn jump(&self) -> *mut u8 {
        self.jump.get()
    }

    /// Makes a jump wait until the open sections have ended, and the outside calls that it leaves. Then `carry_out` is
    /// called.
    pub fn set_jump(&self, jump: *mut u8, carry_out: extern "C" fn()) {
        CARRY_OUT.store(carry_out as usize, Relaxed);
        self.jump.set(jump);
        self.due.fetch_or(JUMP, Relaxed);
    }

    /// Forgets the waiting jump and returns it; null if there is none.
    pub fn take_jump(&self) -> *mut u8 {
        self.due.fetch_and(!JUMP, Relaxed);
        self.jump.replace(null_mut())
    }

    /// Returns the innermost outside call that has not returned; `None` if there is none.
    pub fn outside(&self) -> Option<&Outside> {
        // SAFETY: null, or in the frame of a call that has not returned yet.
        unsafe { self.outside.get().as_ref() }
    }

    /// Returns whether the thread is in an outside call about this object. If it is, the caller is a signal handler
    /// that has interrupted that call.
    pub fn is_inside(&self, about: *const ()) -> bool {
        // SAFETY: as in `outside`.
        let mut calls = std::iter::successors(self.outside(), |call| unsafe { call.before.as_ref() });
        calls.any(|call| call.about == about)
    }

    /// Returns the state that [`Self::step_out`] needs. The caller has to keep it in its own stack frame.
    #[inline]
    pub fn about_to_step_out(&self, about: *const ()) -> Outside {
        Outside {
            before: self.outside.get(),
            about,
            depth: self.depth.get(),
            base: self.base.get(),
            landing: Cell::new(0),
        }
    }

    /// Marks the thread as outside, for a call that is about to begin. From now on a `longjmp` out of a handler ends
    /// that call, and the thread first goes on in the library, at the stack pointer in `landing`.
    #[inline]
    pub fn step_out(&self, outside: &Outside) {
        self.outside.set(outside);
        compiler_fence(SeqCst);
        self.depth.set(0);
        compiler_fence(SeqCst);
    }

    /// Ends the outside call, after it has returned or a jump has left it.
    #[inline]
    pub fn step_in(&self, outside: &Outside) {
        compiler_fence(SeqCst);
        self.base.set(outside.base);
        self.depth.set(outside.depth);
        compiler_fence(SeqCst);
        self.outside.set(outside.before);
    }
}

#[cold]
#[inline(never)]
fn carry_out() {
    let address = CARRY_OUT.load(Relaxed);
    if address != 0 {
        // SAFETY: `set_jump` has stored the address of a function of this type.
        let carry_out: extern "C" fn() = unsafe { std::mem::transmute(address) };
        carry_out();
    }
}

#[inline(always)]
fn stack_pointer() -> usize {
    let at: usize;
    // SAFETY: reads a register.
    unsafe { std::arch::asm!("mov {}, rsp", out(reg) at, options(nomem, nostack, preserves_flags)) };
    at
}

// The start of the library's own threads. `std::thread` is not used, since it takes memory from libc's `malloc`, and
// aborts if `malloc` has none.

type Body = Box<dyn FnOnce() + Send>;

/// Runs `body` in a new, detached thread with a stack of `stack` bytes. The caller has blocked all signals. The thread
/// inherits that mask, so it runs no signal handler of the program. Fails with the errors of pthread_create(3).
pub fn spawn(name: &'static CStr, stack: usize, body: impl FnOnce() + Send + 'static) -> Result<(), Errno> {
    let body: Body = Box::new(move || {
        let _ = rustix::thread::set_name(name);
        body();
    });
    let body = Box::into_raw(Box::new(body));
    // SAFETY: the attributes are initialised before they are used. `body` is a valid box, which the thread takes over.
    let failed = unsafe {
        let mut attributes = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        libc::pthread_attr_setdetachstate(&mut attributes, libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_attr_setstacksize(&mut attributes, stack);
        let failed = libc::pthread_create(&mut std::mem::zeroed(), &attributes, run, body.cast());
        libc::pthread_attr_destroy(&mut attributes);
        failed
    };
    if failed != 0 {
        // SAFETY: no thread was made that would take the box over.
        drop(unsafe { Box::from_raw(body) });
        return Err(Errno::from_raw_os_error(failed));
    }
    Ok(())
}

extern "C" fn run(body: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` has leaked this box for this thread alone.
    let body = unsafe { Box::from_raw(body.cast::<Body>()) };
    let _ = catch_unwind(AssertUnwindSafe(body));
    null_mut()
}
