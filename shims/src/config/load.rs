//! How many threads can run on this machine, and on how many processors. The kernel is asked only on request; `spin.rs`
//! draws the conclusions.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU32};

use rdmasock_core::os::privatefd::PrivateFd;

/// The load at the moment of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Threads that can run, the caller's included.
    pub running: u32,
    /// Processors that this process may use.
    pub processors: u32,
}

static FD: AtomicI32 = AtomicI32::new(-1);
static PROCESSORS: AtomicU32 = AtomicU32::new(0);

/// Forgets the descriptor in a fork child, where it is closed.
pub fn after_fork() {
    FD.store(-1, Release);
}

/// Returns how many processors this process may use, which is a container's or taskset's share. `None` if the kernel
/// does not report it.
pub fn processors() -> Option<u32> {
    let mut processors = PROCESSORS.load(Relaxed);
    if processors == 0 {
        processors = rustix::thread::sched_getaffinity(None).ok()?.count();
        PROCESSORS.store(processors, Relaxed);
    }
    Some(processors)
}

/// Asks the kernel for the load, by one system call. `None` if it does not report it.
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
    // SAFETY: the descriptor was opened above, and is never closed.
    let n = rustix::io::pread(unsafe { BorrowedFd::borrow_raw(fd) }, &mut text, 0).ok()?;
    Some(Load {
        running: running(text.get(..n)?)?,
        processors,
    })
}

/// Returns the running threads from a text such as "0.00 0.01 0.05 2/123 4567", whose fourth field is running/existing.
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
