//! How many threads can run on this machine, and on how many processors: read from the kernel when somebody asks.
//! Not what follows from it (`spin.rs`).

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{
    AtomicI32, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use rdmasock_core::os::privatefd::PrivateFd;

/// As of now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Threads that can run, the caller's included.
    pub running: u32,
    /// Processors that this process may use.
    pub processors: u32,
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
}
