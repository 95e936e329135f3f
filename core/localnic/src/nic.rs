//! The thread that is the NIC, where there is one, and the device as a whole: it can go away and come back.

use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::Thread;
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::errno::{Errno, Result};
use rdmasock_core::lock::Lock;

use crate::faults::due;
use crate::settings::Settings;

/// How long the thread looks for work before it sleeps.
const SPIN: Duration = Duration::from_micros(20);
/// How long the device is gone.
const GONE_FOR: Duration = Duration::from_secs(1);

/// What is left to do for a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing.
    Nothing,
    /// Something, at this time.
    Until(Instant),
}

/// A queue pair, as the device has it.
pub trait Served: Send + Sync {
    /// Carries out what is due.
    fn run(&self) -> Left;
    /// The device is gone.
    fn lose_device(&self);
}

/// See the module.
pub struct Nic {
    new: Lock<Vec<Arc<dyn Served>>>,
    thread: Thread,
}

static NIC: Lock<Option<Arc<Nic>>> = Lock::new(None);

impl Nic {
    /// The one of this process; its thread starts with the first call.
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

    /// Something waits in this queue, of which the thread does not know.
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

/// All signals of the calling thread are blocked, which a thread that it starts inherits.
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
        // SAFETY: what the thread had before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

/// The queue pairs of this process.
static LIVE: Lock<Vec<Weak<dyn Served>>> = Lock::new(Vec::new());
/// Work requests of this process until the device goes; 0 if it stays.
static LEFT: AtomicU64 = AtomicU64::new(0);
/// Until when it is gone.
static GONE: Lock<Option<Instant>> = Lock::new(None);

/// One more queue pair, which ends when the device goes. ENODEV while it is gone.
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

/// Whether the device is there: ENODEV if not.
pub fn check() -> Result<()> {
    let gone = GONE.lock().ok_or(Errno(libc::EDEADLK))?;
    match *gone {
        Some(until) if Instant::now() < until => Err(Errno(libc::ENODEV)),
        _ => Ok(()),
    }
}

/// A work request is carried out: the device may be gone with it.
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

/// In a fork child: the thread and the queue pairs are the parent's.
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
