//! What is known of whether a socket's calls wait, and for how long: O_NONBLOCK, SO_RCVTIMEO and SO_SNDTIMEO. Not who
//! asks the kernel (`blocking`).

use std::ffi::c_int;
use std::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{Relaxed, Release},
};

use rdmasock_core::lock::Lock;

/// What this process knows of them.
pub struct Blocking {
    /// O_NONBLOCK as last seen.
    nonblocking: AtomicBool,
    /// A hook has seen the program ask for the socket's readiness: by epoll, poll or select.
    polled: AtomicBool,
    /// How often the program has set one of the options.
    pub sets: AtomicU32,
    pub known: Lock<Known>,
}

/// What the kernel has said.
#[derive(Default)]
pub struct Known {
    /// The epoch of forks and `sets` when the kernel was asked; `None` if it has to be asked.
    pub at: Option<(u32, u32)>,
    /// ns, 0 for no bound.
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

    /// For a new socket.
    pub fn reset(&self, nonblocking: bool) {
        self.set_nonblocking(nonblocking);
        self.polled.store(false, Relaxed);
        self.sets.fetch_add(1, Release);
    }

    /// For the same socket in a fork child.
    ///
    /// # Safety
    /// The only thread.
    pub unsafe fn after_fork(&self) {
        // SAFETY: by the contract.
        unsafe {
            *self.known.get_unlocked() = Known::default();
            self.known.reset();
        }
    }

    /// The program has set O_NONBLOCK.
    pub fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Relaxed);
    }

    /// O_NONBLOCK as last seen.
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

    /// Whether the socket is non-blocking, and no hook has seen the program ask for its readiness. The program may ask
    /// by system calls in line (`rustix`), and those report the TCP socket alone.
    pub fn is_polled_unseen(&self) -> bool {
        self.is_nonblocking() && !self.polled.load(Relaxed)
    }

    /// The program has set an option.
    pub fn on_set(&self, level: c_int, name: c_int) {
        /// For a 64-bit time_t on 32-bit machines (linux/socket.h); every kernel takes them.
        const NEW: [c_int; 2] = [66, 67];
        if level == libc::SOL_SOCKET && (name == libc::SO_RCVTIMEO || name == libc::SO_SNDTIMEO || NEW.contains(&name))
        {
            self.sets.fetch_add(1, Release);
        }
    }
}
