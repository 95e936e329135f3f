//! Ends a process whose main thread has ended before (`pthread_exit`) when only the service thread is left.
//!
//! libc calls `exit(0)` in the last thread that ends. It counts the service thread too, which does not end. So the
//! service thread has the process ended by the same call. The work of an exit itself is in `process/exit`.
//!
//! A main thread that ends by itself runs the destructors of its keys; one that calls `exit`, or returns from `main`,
//! does not. After that, and never before, the service thread checks from time to time how many threads there are. If
//! only it is left there are two: the kernel keeps the main thread as a zombie until the last thread ends.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};

use rdmasock_core::os::privatefd::Transit;
use rustix::fs::{CWD, Mode, OFlags};

/// The value of `KEY` before there is a key.
const NONE: u32 = u32::MAX;
/// Keys from this on need memory of libc's for their values (PTHREAD_KEY_2NDLEVEL_SIZE).
const IN_THREAD: u32 = 32;
/// The first interval between two checks, and the longest, ns.
const FIRST: u64 = 1_000_000;
const LONGEST: u64 = 64_000_000;

/// The key; only the main thread has a value for it.
static KEY: AtomicU32 = AtomicU32::new(NONE);
/// The main thread has begun to end.
static HAS_BEGUN: AtomicBool = AtomicBool::new(false);
/// Makes the service thread check, if there is one.
static TELL: OnceLock<fn()> = OnceLock::new();

/// Begins to watch the main thread. Called by the main thread when the library is loaded. `tell` makes the service
/// thread, if there is one by then, check its [`ThreadWatch`].
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

/// The thread that forks is the child's main thread, even if it is another thread here.
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
    /// When the next check is due, monotonic ns; 0: none is.
    at: u64,
    every: u64,
    /// The process is being ended.
    is_over: bool,
    /// The signal mask of the thread that has started the service thread, for the thread that ends the process.
    mask: libc::sigset_t,
}

impl ThreadWatch {
    /// Creates a watch without a check that is due.
    pub(crate) fn new(mask: libc::sigset_t) -> Self {
        Self {
            at: 0,
            every: FIRST,
            is_over: false,
            mask,
        }
    }

    /// Returns when the next check is due, monotonic ns. `None` if none is.
    pub(crate) fn next_timeout(&self) -> Option<u64> {
        (self.at != 0).then_some(self.at)
    }

    /// Ends the process if no thread of the program is left. Costs one load while the main thread lives.
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

/// Whether the calling thread is the only one beside the main thread, which has ended. Then no other thread can change
/// that.
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

/// Whether proc_pid_stat(5) shows the main thread as a zombie, and two threads.
fn is_zombie_and_one(stat: &[u8]) -> bool {
    /// The place of the number of threads, counted from the state.
    const THREADS: usize = 17;
    // The name before may contain any character.
    let Some(end) = stat.iter().rposition(|byte| *byte == b')') else {
        return false;
    };
    let mut fields = stat[end + 1..]
        .split(|byte| byte.is_ascii_whitespace())
        .filter(|field| !field.is_empty());
    fields.next() == Some(b"Z") && fields.nth(THREADS - 1) == Some(b"2")
}

/// Ends the process as libc would, in a thread like any other of the program's. The service thread meanwhile does the
/// work that an exit may ask for. Returns false if no thread can be made.
fn end_process(mask: libc::sigset_t) -> bool {
    let mask = Box::into_raw(Box::new(mask)).cast();
    // SAFETY: `end` takes the mask that it gets, which is leaked and so outlives the thread.
    unsafe {
        let mut thread = std::mem::zeroed();
        libc::pthread_create(&raw mut thread, std::ptr::null(), end, mask) == 0
    }
}

extern "C" fn end(mask: *mut c_void) -> *mut c_void {
    // SAFETY: `mask` is the leaked mask of `end_process`. Exit handlers are the program's, which expects them to run.
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
