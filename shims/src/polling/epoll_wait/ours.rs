//! What the kernel's object of a set shows of what is ours: the ring that is taken out of a result, and, of a set that
//! another holds, whether something is ready.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::visit::Visit;
use crate::notify::epoll::Epoll;
use crate::notify::epoll::key::{Stripped, strip};
use crate::objects::holders;
use crate::objects::library::Library;
use crate::sys::points::point;

/// For how long a thread that has taken another process's ring is out of the way, ns.
const OUT_OF_THE_WAY: i64 = 1_000_000;

impl Epoll {
    /// Takes what is ours out of what the kernel has reported to a thread that does not sleep, and need not look again:
    /// a ring that it has taken from one that does is passed on.
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

    /// The same after a sleep, from which the thread comes back to look if nothing else was reported. There was room
    /// for `max` entries.
    pub(super) fn after_sleep(&'static self, events: *mut libc::epoll_event, n: c_int, max: c_int) -> c_int {
        let stripped = self.strip(events, n);
        self.on_named(&stripped.named);
        if n == max {
            // What it was woken for may not have found room.
            self.arm_for_others();
        }
        if stripped.own && stripped.kept > 0 && self.has_ready() {
            self.ring_if_sleeping();
        }
        if stripped.foreign && stripped.kept == 0 {
            // Whose it was is to have it, before this thread sleeps on the same set again.
            let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: OUT_OF_THE_WAY,
            });
        }
        stripped.kept
    }

    fn strip(&'static self, events: *mut libc::epoll_event, n: c_int) -> Stripped {
        // SAFETY: the kernel has just filled n entries.
        let stripped = unsafe { strip(events, n, self.key.load(Relaxed)) };
        if stripped.foreign {
            holders::give_ring_back();
        }
        if stripped.own && self.nested.load(Acquire) {
            self.show_ready();
        }
        stripped
    }

    /// Another set is about to hold this one, or a thread to sleep on it in poll() or select().
    pub fn on_nested(&'static self) {
        // SeqCst on both sides (`activate`): one of the two sees the other.
        if !self.nested.load(Acquire) && !self.nested.publish(true) {
            if let Some(mut set) = self.set.lock() {
                set.links.leave_to_service(self.kernel_fd(), &self.watch);
            }
            if self.is_active() {
                self.show_ready();
            }
        }
    }

    /// Has the kernel's object of a nested set show what is true now: it is readable for as long as a ring has not been
    /// taken from it, and after a ring peers do not ring again before there is a new epoch. So whoever has taken from
    /// the set, or has taken a ring, comes here afterwards.
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
        // In this order: what a ring of the new epoch was for is seen below, should the ring be taken here.
        waiters.quiet(waiter);
        if self.is_ready() {
            waiters.ring(waiter);
        }
    }
}
