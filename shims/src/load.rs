//! How many threads can run on this machine, and on how many processors: read from the kernel when somebody asks, and
//! its average over the last second or so. Not what follows from it (`spin.rs`, `steering.rs`).

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{
    AtomicI32, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::os::privatefd::PrivateFd;

use crate::config::config;

/// As of now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Threads that can run, the caller's included.
    pub running: u32,
    /// Processors that this process may use.
    pub processors: u32,
}

/// Time between two looks for the average, ns.
const LOOK_EVERY: u64 = 50_000_000;

/// One thread for each processor is so much of a [share](Load::share).
pub const ONE: u8 = 32;

impl Load {
    /// How many threads can run for each processor, in 32nds.
    fn share(self) -> u32 {
        let share = u64::from(self.running) * u64::from(ONE) / u64::from(self.processors.max(1));
        share.min(u8::MAX.into()) as u32
    }
}

static FD: AtomicI32 = AtomicI32::new(-1);
static PROCESSORS: AtomicU32 = AtomicU32::new(0);

/// In a fork child, whose copy of the descriptor is closed.
pub fn after_fork() {
    FD.store(-1, Release);
}

/// How many processors this process may use: a container's or taskset's share.
pub fn processors() -> Option<u32> {
    let mut processors = PROCESSORS.load(Relaxed);
    if processors == 0 {
        processors = rustix::thread::sched_getaffinity(None).ok()?.count();
        PROCESSORS.store(processors, Relaxed);
    }
    Some(processors)
}

/// Asks the kernel: a system call.
pub fn now() -> Option<Load> {
    let processors = processors()?;
    let mut fd = FD.load(Acquire);
    if fd < 0 {
        let placed = PrivateFd::open(|| {
            rustix::fs::open(
                c"/proc/loadavg",
                rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC,
                rustix::fs::Mode::empty(),
            )
        })
        .ok()?;
        fd = placed.as_raw_fd();
        std::mem::forget(placed);
        FD.store(fd, Release);
    }
    let mut text = [0u8; 64];
    // SAFETY: opened above and kept for good.
    let n = rustix::io::pread(unsafe { BorrowedFd::borrow_raw(fd) }, &mut text, 0).ok()?;
    Some(Load {
        running: running(text.get(..n)?)?,
        processors,
    })
}

/// "0.00 0.01 0.05 2/123 4567": the fourth field is running/existing.
fn running(text: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(text).ok()?;
    text.split(' ').nth(3)?.split('/').next()?.parse().ok()
}

/// An average of looks, of which each counts less the older it is. In 256ths of a share; 0: none yet.
struct Average(AtomicU32);

impl Average {
    /// Each look is so many parts of it.
    const PARTS: u32 = 8;

    fn add(&self, share: u32) {
        let new = share << 8;
        let old = self.0.load(Relaxed);
        let next = match old {
            0 => new,
            old => old - old / Self::PARTS + new / Self::PARTS,
        };
        self.0.store(next.max(1), Relaxed);
    }

    fn get(&self) -> Option<u8> {
        match self.0.load(Relaxed) {
            0 => None,
            average => u8::try_from(average >> 8).ok(),
        }
    }
}

/// How many threads could run for each processor lately, in 32nds; 255: or more. `None`: not known. The time is that of
/// the kernel's clock's last [tick](crate::time::tick); a look at most each 50 ms asks the kernel.
pub fn average(now: u64) -> Option<u8> {
    static AVERAGE: Average = Average(AtomicU32::new(0));
    static AT: AtomicU64 = AtomicU64::new(0);
    if let Some(fixed) = config().load {
        return Some(fixed);
    }
    let at = AT.load(Relaxed);
    if now.wrapping_sub(at) >= LOOK_EVERY
        && AT.compare_exchange(at, now, Relaxed, Relaxed).is_ok()
        && let Some(load) = self::now()
    {
        AVERAGE.add(load.share());
    }
    AVERAGE.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_text_is_understood() {
        assert_eq!(running(b"0.00 0.01 0.05 2/123 4567\n"), Some(2));
        for wrong in [&b""[..], b"0.00 0.01 0.05", b"0.00 0.01 0.05 x/123 4", b"\xff"] {
            assert_eq!(running(wrong), None);
        }
        assert!(now().is_some_and(|load| load.running > 0 && load.processors > 0));
    }

    #[test]
    fn a_share_is_threads_for_each_processor() {
        let share = |running, processors| Load { running, processors }.share();
        assert_eq!(share(2, 2), u32::from(ONE));
        assert_eq!((share(0, 4), share(1, 4), share(6, 4)), (0, 8, 48));
        assert_eq!((share(1000, 2), share(1, 0)), (255, 32));
    }

    #[test]
    fn the_average_follows_and_a_moment_does_not_change_it_much() {
        let average = Average(AtomicU32::new(0));
        assert_eq!(average.get(), None);
        average.add(32);
        assert_eq!(average.get(), Some(32));
        average.add(96);
        assert_eq!(average.get(), Some(40));
        (0..40).for_each(|_| average.add(255));
        assert!(average.get().unwrap() > 250);
        (0..80).for_each(|_| average.add(0));
        assert_eq!(average.get(), Some(0));
    }
}
