//! The end of a process whose main thread has ended before (`pthread_exit`): libc calls `exit(0)` in the last thread
//! that ends. It counts the service thread too, which does not end, so when only that is left, the process is ended
//! from there, by the same call. Not here: what an exit does (`exit`).
//!
//! A main thread that ends by itself, however it does, runs the destructors of its keys; one that calls `exit`, or
//! returns from `main`, does not. From then on, and never before, the service thread looks now and then how many
//! threads there are: two, of which the main thread, that the kernel keeps as a zombie until the last, and the one that
//! looks.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::os::privatefd::Transit;
use rustix::fs::{CWD, Mode, OFlags};

/// No key.
const NONE: u32 = u32::MAX;
/// Keys from this on take memory of libc's for their values (PTHREAD_KEY_2NDLEVEL_SIZE).
const IN_THREAD: u32 = 32;
/// The first time between two looks, and the longest, ns.
const FIRST: u64 = 1_000_000;
const LONGEST: u64 = 64_000_000;

/// The key whose value the main thread alone has.
static KEY: AtomicU32 = AtomicU32::new(NONE);
/// The main thread has come to its end, or is about to.
static HAS_BEGUN: AtomicBool = AtomicBool::new(false);
/// Has the service thread look, if there is one.
static TELL: OnceLock<fn()> = OnceLock::new();

/// When the library is loaded, by the main thread. `tell` has the service thread, if there is one by then, look at its
/// [`ThreadWatch`].
pub fn watch_main_thread(tell: fn()) {
    let _ = TELL.set(tell);
    let mut key = 0;
    // SAFETY: the functions stay for the life of the process.
    unsafe {
        if libc::pthread_key_create(&raw mut key, Some(main_ends)) == 0 {
            KEY.store(key, Release);
            mark_main_thread();
            libc::pthread_atfork(None, None, Some(in_child));
        }
    }
}

/// The thread that forks is its child's main thread, whatever it is here.
extern "C" fn in_child() {
    HAS_BEGUN.store(false, Relaxed);
    if KEY.load(Acquire) < IN_THREAD {
        mark_main_thread();
    }
}

fn mark_main_thread() {
    let any = (&raw const KEY).cast();
    // SAFETY: a key that is never deleted; its destructor uses no value.
    unsafe { libc::pthread_setspecific(KEY.load(Acquire), any) };
}

extern "C" fn main_ends(_: *mut c_void) {
    HAS_BEGUN.store(true, Release);
    if let Some(tell) = TELL.get() {
        tell();
    }
}

/// How the service thread waits for the other threads.
pub struct ThreadWatch {
    /// When it looks next, ns; 0: it does not.
    at: u64,
    every: u64,
    /// The process is being ended.
    is_over: bool,
    /// The mask of the thread that has started the service thread, for the one that ends the process.
    mask: libc::sigset_t,
}

impl ThreadWatch {
    /// Nothing is looked at yet.
    pub fn new(mask: libc::sigset_t) -> Self {
        Self {
            at: 0,
            every: FIRST,
            is_over: false,
            mask,
        }
    }

    /// When it is looked next, monotonic ns.
    pub fn next_timeout(&self) -> Option<u64> {
        (self.at != 0).then_some(self.at)
    }

    /// Ends the process if nobody is left whose it is. Costs a load as long as the main thread lives.
    pub fn on_timeout(&mut self, now: u64) {
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

/// Whether the calling thread is the only one but for the main thread, which has ended. Nobody else can change that.
fn is_alone() -> bool {
    let mut text = [MaybeUninit::uninit(); 512];
    let _transit = Transit::begin();
    // Without /proc it is not known.
    let Ok(file) = rustix::fs::openat(CWD, c"/proc/self/stat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
        return false;
    };
    match rustix::io::read(&file, &mut text) {
        Ok((text, _)) => is_zombie_and_one(text),
        Err(_) => false,
    }
}

/// Reads proc_pid_stat(5): the state of the main thread, and the number of threads.
fn is_zombie_and_one(stat: &[u8]) -> bool {
    /// Counted from the state.
    const THREADS: usize = 17;
    // The name before may contain anything.
    let Some(end) = stat.iter().rposition(|byte| *byte == b')') else {
        return false;
    };
    let mut fields = stat[end + 1..]
        .split(|byte| byte.is_ascii_whitespace())
        .filter(|field| !field.is_empty());
    fields.next() == Some(b"Z") && fields.nth(THREADS - 1) == Some(b"2")
}

/// Ends it as libc would: in a thread like any other of the program's, while the service thread does what an exit may
/// ask of it.
fn end_process(mask: libc::sigset_t) -> bool {
    let mask = Box::into_raw(Box::new(mask)).cast();
    // SAFETY: the thread gets what `end` takes, and keeps it.
    unsafe {
        let mut thread = std::mem::zeroed();
        libc::pthread_create(&raw mut thread, std::ptr::null(), end, mask) == 0
    }
}

extern "C" fn end(mask: *mut c_void) -> *mut c_void {
    // SAFETY: by `end_process`. Exit handlers are the program's, which expects them to run.
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
