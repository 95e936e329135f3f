//! The NIC's thread, if the settings ask for one; and the device as a whole, which can disappear and return.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::{Errno, Result};
use rdmasock_core::lock::Lock;

use crate::faults::due;
use crate::settings::Settings;

/// How long the thread spins before it sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// How long the device stays away.
const GONE_FOR: Duration = Duration::from_secs(1);

/// The work that remains for a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// No work.
    Nothing,
    /// Work that is due at this time.
    Until(Instant),
}

/// A queue pair, as the device handles it.
pub trait Served: Send + Sync {
    /// Executes the due work requests.
    fn run(&self) -> Left;
    /// Ends the queue pair: the device has disappeared.
    fn lose_device(&self);
}

/// The NIC's thread; see the module.
pub struct Nic {
    new: Lock<Vec<Arc<dyn Served>>>,
    thread: Thread,
}

static NIC: Lock<Option<Arc<Nic>>> = Lock::new(None);

impl Nic {
    /// Returns this process's NIC. The first call starts its thread.
    pub fn get() -> Result<Arc<Self>> {
        let mut nic = NIC.lock().ok_or(Errno(libc::EDEADLK))?;
        if let Some(nic) = &*nic {
            return Ok(Arc::clone(nic));
        }
        let (give, take) = std::sync::mpsc::sync_channel::<Arc<Self>>(1);
        let blocked = Blocked::all();
        let thread = std::thread::Builder::new()
            .name("localnic".to_owned())
            .spawn(move || {
                if let Ok(nic) = take.recv() {
                    nic.run();
                }
            })
            .map_err(|_| Errno(libc::EAGAIN))?;
        drop(blocked);
        let new = Arc::new(Self {
            new: Lock::new(Vec::new()),
            thread: thread.thread().clone(),
        });
        give.send(Arc::clone(&new)).map_err(|_| Errno(libc::EAGAIN))?;
        *nic = Some(Arc::clone(&new));
        Ok(new)
    }

    /// Hands a queue with work to the thread, which does not have it yet.
    pub fn add(&self, queue: Arc<dyn Served>) {
        if let Some(mut new) = self.new.lock() {
            new.push(queue);
        }
        self.thread.unpark();
    }

    fn run(&self) {
        let mut active: Vec<Arc<dyn Served>> = Vec::new();
        let mut quiet_since = Instant::now();
        loop {
            if let Some(mut new) = self.new.lock()
                && !new.is_empty()
            {
                active.append(&mut new);
                quiet_since = Instant::now();
            }
            let mut next: Option<Instant> = None;
            active.retain(|queue| match queue.run() {
                Left::Nothing => false,
                Left::Until(due) => {
                    next = Some(next.map_or(due, |next| next.min(due)));
                    true
                }
            });
            let now = Instant::now();
            match next {
                Some(next) if next <= now + SPIN => std::hint::spin_loop(),
                Some(next) => std::thread::park_timeout(next - now - SPIN),
                None if now < quiet_since + SPIN => std::hint::spin_loop(),
                None => std::thread::park(),
            }
        }
    }
}

/// While it lives, all signals of the calling thread are blocked. A thread that it starts inherits that.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn all() -> Self {
        // SAFETY: plain values, which the calls fill.
        let (mut all, mut old) = unsafe { std::mem::zeroed::<(libc::sigset_t, libc::sigset_t)>() };
        // SAFETY: valid pointers.
        unsafe {
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        }
        Self(old)
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: restores the thread's mask from before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

/// The queue pairs of this process.
static LIVE: Lock<Vec<Weak<dyn Served>>> = Lock::new(Vec::new());
/// Work requests of this process until the device disappears; 0 if it stays.
static LEFT: AtomicU64 = AtomicU64::new(0);
/// The time at which the device returns.
static GONE: Lock<Option<Instant>> = Lock::new(None);

/// Enters a queue pair, which ends when the device disappears. ENODEV while the device is away.
pub fn enter(settings: &Settings, number: u32, queue: Weak<dyn Served>) -> Result<()> {
    check()?;
    let mut live = LIVE.lock().ok_or(Errno(libc::EDEADLK))?;
    live.retain(|queue| queue.strong_count() > 0);
    live.push(queue);
    if LEFT.load(Relaxed) == 0 {
        let left = due(settings.gone, settings.seed, u64::from(number));
        LEFT.store(left.unwrap_or(0), Relaxed);
    }
    Ok(())
}

/// Fails with ENODEV while the device is away.
pub fn check() -> Result<()> {
    let gone = GONE.lock().ok_or(Errno(libc::EDEADLK))?;
    match *gone {
        Some(until) if Instant::now() < until => Err(Errno(libc::ENODEV)),
        _ => Ok(()),
    }
}

/// Counts a work request, at which the device may disappear.
pub fn count_request() {
    if LEFT.load(Relaxed) == 0 || LEFT.fetch_sub(1, Relaxed) != 1 {
        return;
    }
    if let Some(mut gone) = GONE.lock() {
        *gone = Some(Instant::now() + GONE_FOR);
    }
    let all = LIVE.lock().map(|mut live| std::mem::take(&mut *live));
    for queue in all.unwrap_or_default().iter().filter_map(Weak::upgrade) {
        queue.lose_device();
    }
}

/// Forgets the thread and the queue pairs in a fork child: they are the parent's.
///
/// # Safety
/// No other thread exists.
pub unsafe fn forget() {
    LEFT.store(0, Relaxed);
    // SAFETY: by this function's contract.
    unsafe {
        std::mem::forget(NIC.get_unlocked().take());
        NIC.reset();
        std::mem::forget(std::mem::take(LIVE.get_unlocked()));
        LIVE.reset();
        *GONE.get_unlocked() = None;
        GONE.reset();
    }
}
