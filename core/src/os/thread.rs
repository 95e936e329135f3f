//! What the library keeps of each thread: its id, and where in the library it is.
//!
//! Every call touches this, so it is found by two instructions (the initial-exec model of TLS, which a preloaded
//! library may use); `thread_local!` in a shared library is a call of the loader's. Nothing here has a destructor.
//!
//! A thread is *within* the library while it has a section open: between `begin` and `end` it has announced something,
//! or holds a lock, and a signal handler of the program has to wait (`shims::signals`), as has a `longjmp` out of one
//! that could not (`shims::jump`). A call of libc's that may block is made [outside](Outside), however deep it is.

use std::cell::Cell;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst, compiler_fence,
};

use crate::os::kernel;

/// What may be due at the end of a section.
mod due {
    pub const JUMP: u32 = 1;
    pub const SIGNALS: u32 = 2;
}

/// See the module.
#[repr(C)]
#[derive(Debug)]
pub struct Thread {
    /// The kernel's id; 0 until asked for.
    tid: Cell<u32>,
    /// Sections that are open, one in another.
    depth: Cell<u32>,
    /// The stack pointer where the outermost began.
    base: Cell<usize>,
    /// What waits for the end of the sections. Atomic for the thread's own signal handlers, as is the next.
    due: AtomicU32,
    /// Descriptors of ours that it has under way, one as a part of another (`os::privatefd`).
    transits: Cell<u32>,
    /// Times for which it wants none under way.
    settles: Cell<u32>,
    /// Count of signal handlers that have run; wraps.
    handlers: AtomicU32,
    /// Signals that wait, a bit each; the kernel has them blocked.
    held: AtomicU64,
    /// A jump that waits; null if there is none.
    jump: Cell<*mut u8>,
    /// The innermost call that is made outside; null if there is none.
    outside: Cell<*const Outside>,
    /// Signals whose handlers have run since the outermost call [began to count](Self::handlers_at_call), a bit each.
    handled: AtomicU64,
    /// The frame of the signal handler that was last noted, by its `ucontext`, and where that returns to; 0 is none.
    handler: Cell<(usize, usize)>,
    /// Where the program had what it waits for written to last; 0 if nowhere.
    results: Cell<usize>,
    /// What the thread does for others while it sleeps; null if that is nothing.
    duty: Cell<*const ()>,
    /// Whether `pthread_cancel` was called for the thread. Set by other threads.
    cancelled: AtomicBool,
}

const BYTES: usize = 104;
const _: () = assert!(size_of::<Thread>() <= BYTES);

#[cfg(target_arch = "x86_64")]
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

/// The calling thread's. The reference is not to leave the thread.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn current() -> &'static Thread {
    let at: *const Thread;
    // SAFETY: the address of this thread's copy of the variable above, which is zero at first, a valid `Thread`, and
    // lives as long as the thread.
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

/// The calling thread's. The reference is not to leave the thread.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub fn current() -> &'static Thread {
    thread_local! {
        static THREAD: Thread = const {
            Thread {
                tid: Cell::new(0),
                depth: Cell::new(0),
                base: Cell::new(0),
                due: AtomicU32::new(0),
                transits: Cell::new(0),
                settles: Cell::new(0),
                handlers: AtomicU32::new(0),
                held: AtomicU64::new(0),
                jump: Cell::new(std::ptr::null_mut()),
                outside: Cell::new(std::ptr::null()),
                handler: Cell::new((0, 0)),
                results: Cell::new(0),
                handled: AtomicU64::new(0),
                duty: Cell::new(std::ptr::null()),
                cancelled: AtomicBool::new(false),
            }
        };
    }
    // SAFETY: without a destructor it is valid for as long as the thread.
    THREAD.with(|t| unsafe { &*std::ptr::from_ref(t) })
}

/// Notes that the thread with this `pthread_t` is about to be cancelled. In glibc a `pthread_t` is the address of the
/// thread control block. Every thread's copy of a variable has the same distance from its block.
///
/// # Safety
/// The thread has not been joined.
#[cfg(target_arch = "x86_64")]
pub unsafe fn note_cancelled(pthread: libc::pthread_t) {
    let own: usize;
    // SAFETY: reads the calling thread's pointer to its own control block.
    unsafe { std::arch::asm!("mov {}, qword ptr fs:[0]", out(reg) own, options(pure, readonly, nostack)) };
    let at = std::ptr::from_ref(current()).wrapping_byte_offset((pthread as usize).wrapping_sub(own) as isize);
    // SAFETY: the copy of that thread, which lives until it is joined. The field is atomic.
    unsafe { (*at).cancelled.store(true, Relaxed) };
}

/// Does nothing: the place of a thread's copy depends on the processor.
///
/// # Safety
/// None.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn note_cancelled(_: libc::pthread_t) {}

/// A call that may block, and that a jump may leave; in the frame of whoever makes it.
#[derive(Debug)]
pub struct Outside {
    /// The one that this one was made in, by a signal handler.
    before: *const Outside,
    /// What it is about, for [`Thread::is_inside`].
    about: *const (),
    /// How deep the thread was.
    depth: u32,
    base: usize,
    /// The stack pointer to go on with when the call is left.
    pub landing: Cell<usize>,
}

/// Carries out the jump that waits, or a part of it; set when there first is one.
static CARRY_OUT: AtomicUsize = AtomicUsize::new(0);

impl Thread {
    /// The kernel's id of the thread.
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

    /// In a fork child: the surviving thread has a new id.
    pub fn forget_tid(&self) {
        self.tid.set(0);
    }

    /// How many descriptors of ours it has under way.
    pub fn transits(&self) -> &Cell<u32> {
        &self.transits
    }

    /// How many times it wants none under way.
    pub fn settles(&self) -> &Cell<u32> {
        &self.settles
    }

    /// Opens a section.
    #[inline(always)]
    pub fn begin(&self) {
        let depth = self.depth.get();
        if depth == 0 {
            self.base.set(stack_pointer());
        }
        self.depth.set(depth + 1);
        // What is announced in the section is announced after this, and withdrawn before `end`.
        compiler_fence(SeqCst);
    }

    /// Closes the section that was opened last. Where that is the outermost, handlers that wait run, and a jump that
    /// waits is carried out: then this does not return.
    #[inline(always)]
    pub fn end(&self) {
        compiler_fence(SeqCst);
        let depth = self.depth.get().wrapping_sub(1);
        self.depth.set(depth);
        // A signal that comes before this load waits, and one that comes after it finds nothing to wait for.
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

    /// Has a signal wait for the end of the sections that are open. It is pending, and blocked when the handler
    /// returns.
    pub fn hold_signal(&self, bit: u64) {
        self.held.fetch_or(bit, Relaxed);
        self.due.fetch_or(due::SIGNALS, Relaxed);
    }

    /// Counts the handler of a signal, which is about to run.
    pub fn note_handled(&self, bit: u64) {
        self.handled.fetch_or(bit, Relaxed);
        self.handlers.fetch_add(1, Relaxed);
    }

    /// Returns the count of handlers that have run. A call that compares it later knows whether a signal has come
    /// meanwhile.
    #[inline]
    pub fn handlers(&self) -> u32 {
        self.handlers.load(Relaxed)
    }

    /// Returns [`Self::handlers`] for a call that begins, and forgets the signals before it. The call of a signal
    /// handler forgets none: the call beneath it needs them.
    #[inline]
    pub fn handlers_at_call(&self) -> u32 {
        if self.outside.get().is_null() && self.handled() != 0 {
            self.handled.store(0, Relaxed);
        }
        self.handlers()
    }

    /// Returns the signals whose handlers have run, a bit each.
    pub fn handled(&self) -> u64 {
        self.handled.load(Relaxed)
    }

    /// What the thread does for others while it sleeps, which somebody else is to do while it runs a signal handler.
    pub fn duty(&self) -> &Cell<*const ()> {
        &self.duty
    }

    /// Whether anything waits for the end of the sections.
    #[inline]
    pub fn is_due(&self) -> bool {
        self.due.load(Relaxed) != 0
    }

    /// Handlers that wait run now. No section is open.
    #[cold]
    pub fn let_signals_in(&self) {
        self.due.fetch_and(!due::SIGNALS, Relaxed);
        let held = self.held.swap(0, Relaxed);
        if held != 0 {
            let unblock = libc::SIG_UNBLOCK as usize;
            // SAFETY: a mask of 8 bytes. Nothing is announced, nor in the middle of a change: the handlers may do
            // anything.
            let _ = unsafe {
                let mask = kernel::address(&raw const held);
                kernel::call(libc::SYS_rt_sigprocmask, [unblock, mask, 0, 8, 0, 0])
            };
        }
    }

    /// Whether `pthread_cancel` was called for the thread.
    #[inline(always)]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Relaxed)
    }

    /// Notes the frame of a signal handler, by its `ucontext`, and where that returns to.
    pub fn note_handler(&self, context: usize, returns_to: usize) {
        self.handler.set((context, returns_to));
    }

    /// What was noted last.
    pub fn handler(&self) -> (usize, usize) {
        self.handler.get()
    }

    /// Whether what the program waits for was last written here; if not, it is from now on.
    pub fn note_results(&self, at: usize) -> bool {
        self.results.replace(at) == at
    }

    /// How many sections are open.
    pub fn depth(&self) -> u32 {
        self.depth.get()
    }

    /// The stack pointer where the outermost began.
    pub fn base(&self) -> usize {
        self.base.get()
    }

    /// Whether the thread is on its way out of the library, to where a jump leads: whatever fails is not tried again.
    #[inline]
    pub fn is_leaving(&self) -> bool {
        !self.jump.get().is_null()
    }

    /// The jump that waits.
    pub fn jump(&self) -> *mut u8 {
        self.jump.get()
    }

    /// Has a jump wait for the end of the sections that are open, and of calls that are left. `carry_out` is called
    /// then.
    pub fn set_jump(&self, jump: *mut u8, carry_out: extern "C" fn()) {
        CARRY_OUT.store(carry_out as usize, Relaxed);
        self.jump.set(jump);
        self.due.fetch_or(due::JUMP, Relaxed);
    }

    /// Forgets it.
    pub fn take_jump(&self) -> *mut u8 {
        self.due.fetch_and(!due::JUMP, Relaxed);
        self.jump.replace(std::ptr::null_mut())
    }

    /// The innermost call that is made outside.
    pub fn outside(&self) -> Option<&Outside> {
        // SAFETY: null, or in the frame of a call that is not back yet.
        unsafe { self.outside.get().as_ref() }
    }

    /// Whether the thread is in a call outside about this: the caller is in a signal handler above it.
    pub fn is_inside(&self, about: *const ()) -> bool {
        let mut place = self.outside();
        while let Some(call) = place {
            if call.about == about {
                return true;
            }
            // SAFETY: as in `outside`.
            place = unsafe { call.before.as_ref() };
        }
        false
    }

    /// What [`Self::step_out`] needs, in the caller's frame.
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

    /// From now on a jump leaves the call at its landing.
    #[inline]
    pub fn step_out(&self, outside: &Outside) {
        self.outside.set(outside);
        compiler_fence(SeqCst);
        self.depth.set(0);
        compiler_fence(SeqCst);
    }

    /// The call is back, or was left.
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
        // SAFETY: stored by `set_jump` from a function of this type.
        let carry_out: extern "C" fn() = unsafe { std::mem::transmute(address) };
        carry_out();
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn stack_pointer() -> usize {
    let at: usize;
    // SAFETY: reads a register.
    unsafe { std::arch::asm!("mov {}, rsp", out(reg) at, options(nomem, nostack, preserves_flags)) };
    at
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn stack_pointer() -> usize {
    0
}
