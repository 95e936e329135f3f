//! A wait in the kernel's set alone, while no item of the set is taken over.
//!
//! An item may be taken over at any moment of the wait, so the gate counts the thread. The thread that makes the set
//! active sees it there, rings the bell, and counts a sleeper for it.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use super::buffer::can_be_written;
use super::visit::Visit;
use crate::notify::epoll::Epoll;
use crate::signals::jump::or_if_cancelled;
use crate::sys::points::point;
use crate::sys::time::{Deadline, Timeout};

impl Epoll {
    /// Waits in the kernel alone. Returns what epoll_wait() returns. `None` if the set is active or the fd stands for
    /// another file: the caller continues with the library's list.
    pub(super) fn wait_plain(
        &'static self,
        visit: &mut Visit,
        events: *mut libc::epoll_event,
        max: c_int,
        deadline: Deadline,
        mut left: Timeout,
        real: &impl Fn(c_int, *mut libc::epoll_event, c_int, Timeout) -> c_int,
    ) -> Option<c_int> {
        let fd = visit.number();
        if max <= 0 {
            return Some(real(fd, events, max, left));
        }
        if events.is_null() || self.is_active() && !can_be_written(events) {
            let is_there = self.is_ready();
            return Some(if is_there {
                crate::sys::errno::fail(libc::EFAULT)
            } else {
                real(fd, events, max, left)
            });
        }
        if self.is_active() {
            return None;
        }
        if self.inherited.load(Acquire) && self.inherited.swap(false, AcqRel) {
            crate::notify::reclaim::reclaim_all();
        }
        loop {
            point!("epoll alone: the set is not active");
            // Either this thread sees that the set is active or another's, or the thread that made it so (`activate`,
            // `release`) sees this one inside.
            if !self.gate.enter() || !visit.is_here() {
                self.leave_plain();
                return None;
            }
            point!("epoll alone: is about to sleep");
            let n = or_if_cancelled(
                || real(fd, events, max, left),
                || {
                    self.leave_plain();
                },
            );
            let errno = crate::sys::errno::get();
            point!("epoll alone: is awake");
            if self.is_active() {
                visit.stay();
            }
            point!("epoll alone: holds the set");
            let others = self.leave_plain();
            if others && self.is_active() {
                // A ring wakes one thread; the next one must leave the kernel's wait too.
                self.ring();
            }
            if n < 0 {
                crate::sys::errno::set(errno);
                return Some(n);
            }
            // The bell may be in the kernel's set before the set counts as active.
            let kept = if left.is_zero() {
                self.after_look(visit, events, n)
            } else {
                self.after_sleep(events, n, max)
            };
            crate::sys::errno::set(errno);
            let is_active = self.is_active();
            if kept > 0 || left.is_zero() || n == 0 && !is_active {
                return Some(kept);
            }
            // Only another process's library fds were reported, so the set may still be the kernel's alone.
            if is_active || !visit.is_here() {
                return None;
            }
            left = deadline.left();
        }
    }

    /// Leaves the gate. Returns true if other threads are inside.
    fn leave_plain(&'static self) -> bool {
        let waiter = self.waiter();
        let others = self.gate.leave();
        // The thread that makes the set active counts a sleeper for those inside, and then checks whether they are
        // still there.
        if !others && self.plain_sleeps.look() {
            self.end_plain_sleep(waiter);
        }
        if self.closed.look() {
            self.end_if_left();
        }
        others
    }
}
