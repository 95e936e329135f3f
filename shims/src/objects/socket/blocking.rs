//! Whether the calls of a socket wait, and for how long, as far as this process knows: O_NONBLOCK, SO_RCVTIMEO and
//! SO_SNDTIMEO. The kernel is asked in `notify/blocking.rs`.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};

use rdmasock_core::lock::Lock;

/// O_NONBLOCK and the timeouts of a socket, as far as this process knows.
pub struct Blocking {
    /// O_NONBLOCK as this process last saw it.
    nonblocking: AtomicBool,
    /// A hook has seen the program ask for the socket's readiness: by epoll, poll or select.
    polled: AtomicBool,
    /// Number of times that the program has set one of the timeouts.
    pub sets: AtomicU32,
    pub known: Lock<Known>,
}

/// The timeouts that the kernel has reported.
#[derive(Default)]
pub struct Known {
    /// The epoch of forks and the value of `sets` when the kernel was asked; `None` if it has to be asked.
    pub at: Option<(u32, u32)>,
    /// SO_RCVTIMEO and SO_SNDTIMEO in ns; 0: no timeout.
    pub receive: u64,
    pub send: u64,
}

impl Blocking {
    pub const fn new() -> Self {
        Self {
            nonblocking: AtomicBool::new(false),
            polled: AtomicBool::new(false),
            sets: AtomicU32::new(0),
            known: Lock::new(Known {
                at: None,
                receive: 0,
                send: 0,
            }),
        }
    }

    /// Resets the values for a new socket.
    pub fn reset(&self, nonblocking: bool) {
        self.set_nonblocking(nonblocking);
        self.polled.store(false, Relaxed);
        self.sets.fetch_add(1, Release);
    }

    /// Forgets the timeouts of the same socket in a fork child.
    ///
    /// # Safety
    /// The caller is the only thread.
    pub unsafe fn after_fork(&self) {
        // SAFETY: by the contract, no other thread uses the lock.
        unsafe {
            *self.known.get_unlocked() = Known::default();
            self.known.reset();
        }
    }

    /// Notes that the program has set or cleared O_NONBLOCK.
    pub fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Relaxed);
    }

    /// Returns O_NONBLOCK as this process last saw it.
    pub fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Relaxed)
    }

    /// Notes that the program asks for the socket's readiness in a call that has a hook.
    #[inline]
    pub fn set_polled(&self) {
        if !self.polled.load(Relaxed) {
            self.polled.store(true, Relaxed);
        }
    }

    /// Returns whether the socket is non-blocking, and no hook has seen the program ask for its readiness. Such a
    /// program may ask by inline system calls (`rustix`), which report the readiness of the TCP socket alone.
    pub fn is_polled_unseen(&self) -> bool {
        self.is_nonblocking() && !self.polled.load(Relaxed)
    }

    /// Notes that the program has set a socket option. A timeout is then asked of the kernel again.
    pub fn on_set(&self, level: c_int, name: c_int) {
        /// SO_RCVTIMEO_NEW and SO_SNDTIMEO_NEW, for a 64-bit time_t on 32-bit machines (linux/socket.h). Every kernel
        /// takes them.
        const NEW: [c_int; 2] = [66, 67];
        if level == libc::SOL_SOCKET && (name == libc::SO_RCVTIMEO || name == libc::SO_SNDTIMEO || NEW.contains(&name))
        {
            self.sets.fetch_add(1, Release);
        }
    }
}
