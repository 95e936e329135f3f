//! A wait on a set: keeps its set, even if the fd is closed or reused meanwhile.
//!
//! This is what `call` does for a connection. A wait that has found no event yet may begin again on the file that the
//! fd stands for by then. From its first sleep or spin on, it holds the set, and makes the kernel's call on a private
//! fd.

use std::cell::Cell;
use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;

use crate::notify::epoll::Epoll;
use crate::notify::table::{self, Entry};

/// A wait on a set, see the module.
pub struct Visit {
    pub set: &'static Epoll,
    fd: c_int,
    generation: u32,
    is_inside: bool,
    /// A check of the kernel's set has reported links to other hosts.
    pub is_told: Cell<bool>,
}

impl Visit {
    /// Records that a wait on `fd` begins; the table has just returned `set` for it.
    pub fn new(set: &'static Epoll, fd: c_int) -> Self {
        Self {
            set,
            fd,
            generation: set.generation.load(Relaxed),
            is_inside: false,
            is_told: Cell::new(false),
        }
    }

    /// Whether the set is still the one on which the wait began.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.is_inside || self.is_named()
    }

    fn is_named(&self) -> bool {
        matches!(table::lookup(self.fd), Entry::Epoll(e) if std::ptr::eq(e, self.set))
            && self.set.generation.load(Relaxed) == self.generation
    }

    /// Holds the set from now on: the wait is about to spin or sleep. Returns false if the fd stands for another file
    /// by now.
    pub fn enter(&mut self) -> bool {
        if !self.is_inside {
            // `Epoll::release` is called once the table has lost the fd, and then checks for waits inside.
            self.set.inside.enter();
            self.is_inside = true;
            if !self.is_named() {
                self.leave();
                return false;
            }
        }
        true
    }

    /// Holds the set without a check: the kernel's wait has been on it already, so it is the right one.
    pub fn stay(&mut self) {
        if !self.is_inside {
            self.set.inside.enter();
            self.is_inside = true;
        }
    }

    /// Returns the fd for the kernel's call.
    pub fn number(&self) -> c_int {
        match self.set.kernel_fd() {
            Some(own) if self.is_inside => own.as_raw_fd(),
            _ => self.fd,
        }
    }

    fn leave(&mut self) {
        self.is_inside = false;
        self.set.inside.leave();
        if self.set.closed.look() {
            self.set.end_if_left();
        }
    }
}

impl Drop for Visit {
    #[inline]
    fn drop(&mut self) {
        if self.is_inside {
            let errno = crate::sys::errno::get();
            self.leave();
            crate::sys::errno::set(errno);
        }
    }
}
