//! Keeps the kernel's object of a set in step with the library. Removes library fds from results, and makes a nested
//! set readable while an item is ready.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::visit::Visit;
use crate::notify::epoll::Epoll;
use crate::notify::epoll::key::{Stripped, strip};
use crate::objects::holders;
use crate::objects::library::Library;
use crate::sys::points::point;

/// How long a thread that has consumed another process's ring stays away from the set, ns.
const OUT_OF_THE_WAY: i64 = 1_000_000;

impl Epoll {
    /// Removes library fds from a kernel result, for a thread that has not slept and need not check again. A ring that
    /// it has consumed is passed on to a sleeping thread. Returns the number of entries left.
    pub(super) fn after_look(&'static self, visit: &Visit, events: *mut libc::epoll_event, n: c_int) -> c_int {
        let stripped = self.strip(events, n);
        if !stripped.named.is_none() {
            visit.is_told.set(true);
            self.on_named(&stripped.named);
        }
        if stripped.own && self.has_ready() {
            self.ring_if_sleeping();
        }
        stripped.kept
    }

    /// Removes library fds from the result of a sleep. The thread checks the links again if no entry is left. There was
    /// room for `max` entries. Returns the number of entries left.
    pub(super) fn after_sleep(&'static self, events: *mut libc::epoll_event, n: c_int, max: c_int) -> c_int {
        let stripped = self.strip(events, n);
        self.on_named(&stripped.named);
        if n == max {
            // The entry of the link that woke the thread may not have found room.
            self.arm_for_others();
        }
        if stripped.own && stripped.kept > 0 && self.has_ready() {
            self.ring_if_sleeping();
        }
        if stripped.foreign && stripped.kept == 0 {
            // The process that the ring was meant for has to get it before this thread sleeps on the same set again.
            let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: OUT_OF_THE_WAY,
            });
        }
        stripped.kept
    }

    fn strip(&'static self, events: *mut libc::epoll_event, n: c_int) -> Stripped {
        // SAFETY: the kernel has just filled `n` entries.
        let stripped = unsafe { strip(events, n, self.key.load(Relaxed)) };
        if stripped.foreign {
            holders::give_ring_back();
        }
        if stripped.own && self.nested.load(Acquire) {
            self.show_ready();
        }
        stripped
    }

    /// Prepares for a nested use: another set is about to hold this one, or a thread to sleep on it in poll() or
    /// select().
    pub fn on_nested(&'static self) {
        // Both sides use SeqCst (`activate`): one of the two sees the other.
        if !self.nested.load(Acquire) && !self.nested.publish(true) {
            if let Some(mut set) = self.set.lock() {
                set.links.leave_to_service(self.kernel_fd(), &self.watch);
            }
            if self.is_active() {
                self.show_ready();
            }
        }
    }

    /// Makes the kernel's object of a nested set show whether an item is ready. It is readable until a ring is
    /// consumed, and after a ring, peers do not ring again before a new epoch. So every thread that has taken items
    /// from the set, or has consumed a ring, calls this afterwards.
    pub(super) fn show_ready(&'static self) {
        let Some(waiter) = self.waiter() else {
            return;
        };
        let waiters = &Library::get().waiters;
        if self.shown.publish(true) {
            waiters.leave_sleep(waiter);
        }
        waiters.enter_sleep(waiter);
        point!("nested: a new epoch has begun");
        // In this order: if a ring of the new epoch is consumed here, its reason is seen below.
        waiters.quiet(waiter);
        if self.is_ready() {
            waiters.ring(waiter);
        }
    }
}
