//! A wait on a set: which set it belongs to, whatever becomes of the number meanwhile. As `call` for a connection: a
//! wait that has not found anything yet may as well begin anew on what the number stands for by then; from its first
//! rest on it holds the set, and makes the kernel's call on a number of ours.

use std::cell::Cell;
use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;

use crate::notify::epoll::Epoll;
use crate::notify::table::{self, Entry};

/// See the module.
pub struct Visit {
    pub set: &'static Epoll,
    fd: c_int,
    generation: u32,
    is_inside: bool,
    /// A look at the kernel's set has told of links to other hosts.
    pub is_told: Cell<bool>,
}

impl Visit {
    /// A wait on `fd`, which the table has just led from to `set`.
    pub fn new(set: &'static Epoll, fd: c_int) -> Self {
        Self {
            set,
            fd,
            generation: set.generation.load(Relaxed),
            is_inside: false,
            is_told: Cell::new(false),
        }
    }

    /// Whether the set is still what the wait began on.
    #[inline]
    pub fn is_here(&self) -> bool {
        self.is_inside || self.is_named()
    }

    fn is_named(&self) -> bool {
        matches!(table::lookup(self.fd), Entry::Epoll(e) if std::ptr::eq(e, self.set))
            && self.set.generation.load(Relaxed) == self.generation
    }

    /// The wait is about to rest, and holds the set from now on. False if it is not its own any more.
    pub fn enter(&mut self) -> bool {
        if !self.is_inside {
            // `Epoll::release` takes the number out of the table, and then looks who is inside.
            self.set.inside.enter();
            self.is_inside = true;
            if !self.is_named() {
                self.leave();
                return false;
            }
        }
        true
    }

    /// As [`Self::enter`], where the kernel's wait has been on the set already: it is the right one.
    pub fn stay(&mut self) {
        if !self.is_inside {
            self.set.inside.enter();
            self.is_inside = true;
        }
    }

    /// The number for the kernel's call.
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
