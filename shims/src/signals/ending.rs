//! Ends a process whose main thread has ended by itself (`pthread_exit`), once no thread of the program is left.
//!
//! libc calls `exit(0)` in the last thread that ends. libc counts the service thread too, which does not end. So the
//! service thread starts a thread that makes this call. The library's own work at an exit is in `process/exit`.
//!
//! A main thread that ends by itself runs the destructors of its thread-specific keys; a main thread that calls `exit`,
//! or returns from `main`, does not. After such a destructor has run, the service thread checks from time to time how
//! many threads the process has. If the program has none left, there are two: the service thread, and the main thread,
//! which the kernel keeps as a zombie until the last thread ends.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};

use rdmasock_core::os::privatefd::Transit;
use rustix::fs::{CWD, Mode, OFlags};

/// The value of `KEY` before the key is created.
const NONE: u32 = u32::MAX;
/// For a key of this number or above, pthread_setspecific(3) allocates memory (PTHREAD_KEY_2NDLEVEL_SIZE).
const IN_THREAD: u32 = 32;
/// The first interval between two checks of the number of threads, and the longest, ns.
const FIRST: u64 = 1_000_000;
const LONGEST: u64 = 64_000_000;

/// The thread-specific key whose destructor is `main_ends`. Only the main thread has a value for it.
static KEY: AtomicU32 = AtomicU32::new(NONE);
/// Whether the main thread has begun to end by itself.
static HAS_BEGUN: AtomicBool = AtomicBool::new(false);
/// The function that wakes the service thread, if there is one, for its check.
static TELL: OnceLock<fn()> = OnceLock::new();

/// Begins to watch for the end of the main thread. Called by the main thread when the library is loaded. `tell` wakes
/// the service thread, if there is one, so that it checks its [`ThreadWatch`].
pub(crate) fn watch_main_thread(tell: fn()) {
    let _ = TELL.set(tell);
    let mut key = 0;
    // SAFETY: the functions stay valid for the life of the process.
    unsafe {
        if libc::pthread_key_create(&raw mut key, Some(main_ends)) == 0 {
            KEY.store(key, Release);
            mark_main_thread();
            libc::pthread_atfork(None, None, Some(in_child));
        }
    }
}

/// Runs in a fork child. The thread that has forked is the child's main thread, even if it was another thread in the
/// parent.
extern "C" fn in_child() {
    HAS_BEGUN.store(false, Relaxed);
    if KEY.load(Acquire) < IN_THREAD {
        mark_main_thread();
    }
}

fn mark_main_thread() {
    let any = (&raw const KEY).cast();
    // SAFETY: the key is never deleted, and its destructor does not read the value.
    unsafe { libc::pthread_setspecific(KEY.load(Acquire), any) };
}

extern "C" fn main_ends(_: *mut c_void) {
    HAS_BEGUN.store(true, Release);
    if let Some(tell) = TELL.get() {
        tell();
    }
}

/// The service thread's wait for the program's other threads to end.
pub(crate) struct ThreadWatch {
    /// When the next check is due, monotonic ns; 0 if none is due.
    at: u64,
    every: u64,
    /// Whether a thread was started that ends the process.
    is_over: bool,
    /// The signal mask of the thread that has started the service thread. The thread that ends the process gets this
    /// mask.
    mask: libc::sigset_t,
}

impl ThreadWatch {
    /// Creates a watch for which no check is due yet.
    pub(crate) fn new(mask: libc::sigset_t) -> Self {
        Self {
            at: 0,
            every: FIRST,
            is_over: false,
            mask,
        }
    }

    /// Returns when the next check is due, monotonic ns; `None` if none is due.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        (self.at != 0).then_some(self.at)
    }

    /// Checks whether a thread of the program is left, if a check is due at `now`. If none is left, ends the process.
    /// Costs one load while the main thread lives.
    pub(crate) fn on_timeout(&mut self, now: u64) {
        if !HAS_BEGUN.load(Acquire) || self.is_over || now < self.at {
            return;
        }
        if is_alone() {
            self.is_over = end_process(self.mask);
        }
        self.at = if self.is_over { 0 } else { now + self.every };
        self.every = (self.every * 2).min(LONGEST);
    }
}

/// Returns whether the main thread has ended and the calling thread is the only other one. If true, it stays true,
/// because there is no thread that could start another.
fn is_alone() -> bool {
    let mut text = [MaybeUninit::uninit(); 512];
    let _transit = Transit::begin();
    // Without /proc the answer is false.
    let Ok(file) = rustix::fs::openat(CWD, c"/proc/self/stat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
        return false;
    };
    match rustix::io::read(&file, &mut text) {
        Ok((text, _)) => is_zombie_and_one(text),
        Err(_) => false,
    }
}

/// Returns whether a text as in proc_pid_stat(5) shows the main thread as a zombie, and two threads.
fn is_zombie_and_one(stat: &[u8]) -> bool {
    /// The position of the field with the number of threads, counted from the field with the state.
    const THREADS: usize = 17;
    // The program's name, in parentheses before these fields, may contain any character.
    let Some(end) = stat.iter().rposition(|byte| *byte == b')') else {
        return false;
    };
    let mut fields = stat[end + 1..]
        .split(|byte| byte.is_ascii_whitespace())
        .filter(|field| !field.is_empty());
    fields.next() == Some(b"Z") && fields.nth(THREADS - 1) == Some(b"2")
}

/// Starts a thread that ends the process by `exit(0)`, as libc would. The service thread is free to do what exit
/// handlers request from it. Returns false if no thread can be made.
fn end_process(mask: libc::sigset_t) -> bool {
    let mask = Box::into_raw(Box::new(mask)).cast();
    // SAFETY: `end` expects a pointer to a mask. The mask is leaked, so it outlives the thread.
    unsafe {
        let mut thread = std::mem::zeroed();
        libc::pthread_create(&raw mut thread, std::ptr::null(), end, mask) == 0
    }
}

extern "C" fn end(mask: *mut c_void) -> *mut c_void {
    // SAFETY: `mask` is the leaked mask of `end_process`. `exit` runs the program's exit handlers, as libc would here.
    unsafe {
        libc::pthread_sigmask(libc::SIG_SETMASK, mask.cast(), std::ptr::null_mut());
        libc::exit(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_those_of_the_manual() {
        let stat = |state: &str, threads: &str| {
            let fields = format!("17 (a ) 2 b) {state} 1 1 1 0 -1 4 5 6 7 8 9 10 11 12 20 0 {threads} 0 99 2");
            is_zombie_and_one(fields.as_bytes())
        };
        assert!(stat("Z", "2"));
        assert!(!stat("Z", "3"));
        assert!(!stat("S", "2"));
        assert!(!is_zombie_and_one(b"17 (a"));
        assert!(!is_zombie_and_one(b"17 (a) Z 1"));
        let own = std::fs::read("/proc/self/stat").unwrap();
        assert!(!is_zombie_and_one(&own));
    }
}
