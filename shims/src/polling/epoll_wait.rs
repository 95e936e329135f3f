//! epoll_wait(): reports what is ready in the kernel's set and in the library's list (`notify/epoll`), with one sleep
//! for both. While no item of a set is taken over, the wait is in the kernel alone.
//!
//! Library fds in the kernel's set are removed from results. A nested set, which another set holds, is kept readable in
//! the kernel while an item is ready.

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU32};

use rdmasock_core::os::{kernel, thread};
use rdmasock_core::{cycles, fabric::waiter::WaiterId, stats::Call};
use rustix::io::Errno;

use crate::config::spin::{self, Peers};
use crate::notify::epoll::{ALWAYS, ET, Epoll, Far, Item, Links, Named, ONESHOT, Set, keep, strip};
use crate::notify::table::{self, Entry};
use crate::notify::{fork::reclaim, wait::Record};
use crate::objects::link::{self, Link};
use crate::objects::socket::{self, EpollSet as _};
use crate::objects::{holders, library::Library, mailbox::Command, waiters::SERVICE};
use crate::polling::readiness::{self, Arm};
use crate::signals::{handler, jump::or_if_cancelled};
use crate::sys::time::{self, Deadline, Timeout};
use crate::sys::{errno, points::point};

/// How long waits may be answered from the links alone before the kernel's set is checked again, in
/// [cycles](rdmasock_core::cycles), some 20 us. Short enough not to be noticed, long enough that a busy program makes
/// few system calls.
const KERNEL_EVERY: u64 = 1 << 16;
/// The longest sleep on a set that has no bell, ns: no peer can wake the thread.
const WITHOUT_DOORBELL: u64 = 1_000_000;
/// The most rounds in which one harvest checks for newly queued items. Without a bound, a set in which each round finds
/// new items would be checked forever.
const ROUNDS: usize = 4;
/// How many more links to other hosts a harvest checks after the first one with data. To check such a link is to poll
/// its completions.
///
/// In a set with more such links than this, a harvest skips those whose completions the kernel's set reports. If one of
/// the others has data, this many more of them are checked, and the next harvest begins with the rest. To check all of
/// them for one message each would cost more than the messages. The order between peers on other hosts may change by
/// this, but the network does not preserve that order either.
const MANY: usize = 16;
/// How long a thread stays away from the set after it has consumed a ring for another process, ns.
const OUT_OF_THE_WAY: i64 = 1_000_000;

/// The kernel's epoll_wait(fd, events, max, time-out), with the program's signal mask.
type Real<'a> = &'a dyn Fn(c_int, *mut libc::epoll_event, c_int, Timeout) -> c_int;

/// The state of an epoll_wait() of the program: the set, kept even if the fd is closed or reused meanwhile, and the
/// result so far. `notify/call` keeps a connection in the same way.
///
/// A wait that has found no event yet begins again if the fd stands for another file by then. From its first sleep or
/// spin on, the wait holds the set, and makes the kernel's call on a private fd.
struct Wait<'a> {
    set: &'static Epoll,
    fd: c_int,
    generation: u32,
    is_inside: bool,
    real: Real<'a>,
    /// The program's array. `max` entries are writable, and the first `filled` are filled.
    events: *mut libc::epoll_event,
    max: c_int,
    filled: c_int,
    /// The set's count of `moves` before the kernel's set was checked.
    moves: u64,
    /// The number of this result among all results of the set; 0 until the result lists an item.
    serial: u64,
}

impl Epoll {
    /// Carries out epoll_wait() and its kin on `fd`. `real` is the kernel's call. Returns what epoll_wait() returns,
    /// and sets errno.
    ///
    /// # Safety
    /// `events` is writable for `max` entries.
    // Not inlined: the forced unwind of pthread_cancel runs the wait's destructor here (see `hooks`).
    #[inline(never)]
    pub(crate) unsafe fn wait(
        &'static self,
        fd: c_int,
        events: *mut libc::epoll_event,
        max: c_int,
        timeout: Timeout,
        real: Real<'_>,
    ) -> c_int {
        let deadline = timeout.deadline();
        let (mut set, mut left) = (self, timeout);
        loop {
            let mut wait = Wait {
                set,
                fd,
                generation: set.generation.load(Relaxed),
                is_inside: false,
                real,
                events,
                max,
                filled: 0,
                moves: set.moves.load(Acquire),
                serial: 0,
            };
            if let Some(n) = wait.run(deadline, left) {
                return n;
            }
            drop(wait);
            left = deadline.left();
            match table::lookup(fd) {
                Entry::Epoll(now) => set = now,
                _ => return real(fd, events, max, left),
            }
        }
    }

    fn is_time_to_look(&self) -> bool {
        let now = cycles::now();
        let due = now.wrapping_sub(self.looked_at.load(Relaxed)) > KERNEL_EVERY;
        if due {
            self.looked_at.store(now, Relaxed);
        }
        due
    }

    /// Whether an item that is taken over is ready now: for poll(), select() and sets that hold this one.
    pub(crate) fn is_ready(&'static self) -> bool {
        if !self.is_active() {
            return false;
        }
        let Some(mut guard) = self.set.lock() else {
            return false;
        };
        let set = &mut *guard;
        self.sweep(set, Sweep::Untold);
        set.links.spoke.clear();
        let mut ready = set.ready.iter().filter_map(|index| set.items.get(*index));
        ready.any(|item| item.is_reported() && item.evaluate(Arm::IfNotReady) != 0)
    }
}

impl Item {
    /// Whether the set's own list reports the item.
    fn is_reported(&self) -> bool {
        self.taken && !self.disabled && !self.dead
    }

    /// Returns the item's readiness, of the events that it is registered for.
    fn evaluate(&self, arm: Arm) -> u32 {
        readiness::evaluate(self.socket, self.events, arm) & (self.events | ALWAYS)
    }
}

impl Wait<'_> {
    /// Waits. `left` is the time until `deadline`. `None` if the fd stands for another file and nothing was reported.
    fn run(&mut self, deadline: Deadline, left: Timeout) -> Option<c_int> {
        let handlers = thread::current().handlers();
        if self.max <= 0 {
            return Some((self.real)(self.fd, self.events, self.max, left));
        }
        if self.events.is_null() || self.set.is_active() && !can_be_written(self.events) {
            return Some(match self.set.is_ready() {
                true => errno::fail(libc::EFAULT),
                false => (self.real)(self.fd, self.events, self.max, left),
            });
        }
        if !self.set.is_active()
            && let Some(n) = self.wait_plain(deadline, left)
        {
            return Some(self.with_ours(n));
        }
        if !self.is_here() {
            return None;
        }
        let mut due = self.set.is_time_to_look();
        if !due && !deadline.is_zero() && self.await_last() {
            return Some(self.with_kernels(false));
        }
        let mut spun = false;
        loop {
            if let Some(n) = self.check(due) {
                return Some(n);
            }
            if deadline.is_zero() {
                let n = self.look(Timeout::ZERO);
                return Some(self.with_ours(n));
            }
            if !self.enter() {
                return None;
            }
            if let Some(n) = self.rest(deadline, handlers, &mut spun) {
                return Some(n);
            }
            due = self.set.is_time_to_look();
        }
    }

    /// Checks the kernel's set and the library's list without a wait. `None` if nothing was reported.
    ///
    /// If `due`, a result of the library's list gets the ready sockets of the kernel's set too. If the last result was
    /// full before the kernel's set could be checked, that set is checked first. So neither of the two starves the
    /// other if the program takes few events at a time.
    fn check(&mut self, due: bool) -> Option<c_int> {
        let set = self.set;
        self.moves = set.moves.load(Acquire);
        let may_have = due || !set.kernel_quiet.load(Relaxed);
        let starved = may_have && set.full.load(Relaxed) && set.full.swap(false, Relaxed);
        if starved {
            let n = self.look(Timeout::ZERO);
            if n > 0 {
                return Some(self.with_ours(n));
            }
        }
        self.harvest(due);
        (self.filled > 0).then(|| self.with_kernels(due && !starved))
    }

    /// Spins if `spun` is false, then sleeps until the kernel's set or the library's list may have an event. Returns
    /// the result of the wait. `None` if both are to be checked again.
    fn rest(&mut self, deadline: Deadline, handlers: u32, spun: &mut bool) -> Option<c_int> {
        let set = self.set;
        if !std::mem::replace(spun, true) {
            let peers = Peers::new(set.set.lock().is_none_or(|set| !set.links.far.is_empty()));
            let bound = set.spinner.bound(peers);
            if bound > 0 {
                // A reply that comes at once does not have to wait for a check of the kernel's set, which had nothing
                // at the last check.
                if set.kernel_quiet.load(Relaxed) && spin::glance(|| set.has_ready()) {
                    return None;
                }
                let n = self.look(Timeout::ZERO);
                if n != 0 {
                    return Some(self.with_ours(n));
                }
                if set.spinner.spin(bound, || set.has_ready()) {
                    return None;
                }
            }
        }
        let Some(waiter) = set.waiter() else {
            // No fd was left for a bell, so the thread checks at intervals.
            let n = self.look(deadline.left().at_most(WITHOUT_DOORBELL));
            return (n != 0 || deadline.is_over()).then(|| self.with_ours(n));
        };
        let waiters = &Library::get().waiters;
        // The links are armed before the sleep flag is raised: arming takes in completions, which would ring the bell
        // of threads that sleep already.
        let asleep = set.watch_links();
        point!("epoll: nothing was there");
        waiters.enter_sleep(waiter);
        point!("epoll: says that it sleeps");
        if set.has_ready() {
            waiters.leave_sleep(waiter);
            return None;
        }
        point!("epoll: is about to sleep");
        let record = Record::begin(waiter, Call::Epoll, None, 0);
        // A signal handler that has run since the call began ends the call after a last check, as in the kernel.
        let is_interrupted = thread::current().handlers() != handlers;
        let left = if is_interrupted { Timeout::ZERO } else { deadline.left() };
        let hand_over = || {
            asleep.iter().for_each(Asleep::hand_over);
            waiters.ring(waiter);
        };
        let n = handler::on_duty(&hand_over, || (self.real)(self.number(), self.events, self.max, left));
        let errno = errno::get();
        point!("epoll: is awake");
        drop(record);
        waiters.leave_sleep(waiter);
        drop(asleep);
        if n < 0 {
            errno::set(errno);
            return Some(n);
        }
        let kept = self.take_in(n, true);
        if kept > 0 {
            return Some(self.with_ours(kept));
        }
        if is_interrupted {
            return Some(errno::fail(libc::EINTR));
        }
        if deadline.is_over() {
            // An item may have become ready just before the time was over.
            self.harvest(true);
            return Some(self.filled);
        }
        *spun = false;
        None
    }

    /// If the kernel's set has just reported entries (`n` above 0), appends ready items of the links: a peer may have
    /// sent on a link before it sent what the kernel reports, and the program must not get only the later of the two.
    /// Returns what epoll_wait() returns.
    fn with_ours(&mut self, n: c_int) -> c_int {
        if n <= 0 {
            return n;
        }
        if self.filled < self.max && self.set.is_active() {
            self.harvest(false);
        }
        self.filled
    }

    /// Completes a result that has entries of the library's list only. Checks the kernel's set too if `look` is true,
    /// or if the kernel's set has connections: a peer may have sent on one of those before it sent on the link. Appends
    /// the ready sockets, then items that came on links meanwhile. If the kernel's set has connections, moves its
    /// entries to the front. Returns the number of entries.
    fn with_kernels(&mut self, look: bool) -> c_int {
        let (set, ours) = (self.set, self.filled);
        if ours == self.max {
            set.full.store(true, Relaxed);
        } else if (look || set.is_mixed()) && self.look(Timeout::ZERO) > 0 {
            let end = self.filled;
            if end < self.max {
                self.harvest(false);
            }
            // SAFETY: the first `filled` entries are filled.
            let all = unsafe { std::slice::from_raw_parts_mut(self.events, self.filled as usize) };
            if set.moves.load(Acquire) != self.moves {
                // A socket may have moved between the kernel's set and the library's list meanwhile. A result must not
                // list it twice, as the kernel's never does: a program that does one blocking read for each entry would
                // hang at the second.
                let (listed, rest) = all.split_at_mut((ours as usize).min(all.len()));
                return ours + keep(rest, |data| !listed.iter().any(|e| e.u64 == data)) as c_int;
            }
            if set.is_mixed()
                && let Some(both) = all.get_mut(..end as usize)
            {
                // The order of arrival across the kernel's set and the library's list is unknown, so the kernel's
                // entries go first. A peer on a link has usually waited for its replies, so its data there is the last
                // that it sent. A peer that sends on a young connection without waiting expects that data to be read
                // before.
                both.rotate_left(ours as usize);
            }
        }
        self.filled
    }

    /// Waits in the kernel's set for at most `left`. Returns what epoll_wait() returns, without the library's fds.
    fn look(&mut self, left: Timeout) -> c_int {
        let n = (self.real)(self.number(), self.free(), self.max - self.filled, left);
        self.set.kernel_quiet.store(n == 0, Relaxed);
        if n <= 0 { n } else { self.take_in(n, false) }
    }

    /// Processes the `n` entries that the kernel has just filled behind the filled ones, and removes library fds from
    /// them. `has_slept`: the thread has slept, and checks the links by itself if no entry is left. Returns how many
    /// entries are left.
    fn take_in(&mut self, n: c_int, has_slept: bool) -> c_int {
        let (set, before) = (self.set, self.filled);
        // SAFETY: the kernel has just filled `n` entries there.
        let stripped = unsafe { strip(self.free(), n, set.key.load(Relaxed)) };
        self.filled += stripped.kept;
        if stripped.foreign {
            holders::ask_owners();
        }
        if stripped.own && set.nested.load(Acquire) {
            set.show_ready();
        }
        set.on_named(&stripped.named);
        if has_slept && before + n == self.max {
            // The array was full. So the entry of the link whose completion woke the thread may be missing.
            set.arm_for_others();
        }
        if stripped.own && (stripped.kept > 0 || !has_slept) && set.has_ready() {
            // This thread has consumed a ring of the bell, and does not sleep again at once. So it rings for a thread
            // that sleeps.
            set.ring_if_sleeping();
        }
        if has_slept && stripped.foreign && stripped.kept == 0 {
            // The other process has to get the ring before this thread sleeps on the same set again.
            time::sleep(OUT_OF_THE_WAY);
        }
        if !has_slept && self.filled == 0 && !stripped.named.is_none() {
            // The last harvest has skipped links whose completions the kernel's set reports, and it has reported some
            // by now.
            self.harvest(true);
        }
        self.filled - before
    }

    /// Returns the place behind the filled entries.
    fn free(&self) -> *mut libc::epoll_event {
        self.events.wrapping_add(self.filled as usize)
    }

    /// If the last result was one socket alone, checks that socket for a moment before its peer is asked for a wake-up.
    /// It is likely to be the next that becomes ready, and without a wake-up four cache lines need not move between the
    /// two sides. Returns true if the socket is reported.
    fn await_last(&mut self) -> bool {
        let set = self.set;
        !set.nested.load(Relaxed)
            && set.kernel_quiet.load(Relaxed)
            && set.spinner.pays()
            && spin::glance(|| self.look_at_last())
            && self.filled > 0
    }

    /// Checks the set's only listed socket, if it is on a link within this host. If it is ready, reports it and keeps
    /// it in the list. Returns true also if the list has to be checked by `harvest`. Returns false if the socket is not
    /// ready: the caller checks again.
    fn look_at_last(&mut self) -> bool {
        let (Some(waiter), Some(mut guard)) = (self.set.waiter(), self.set.set.lock()) else {
            return true;
        };
        // Checked under the lock: a closed set cannot become another set before its lock is free.
        if guard.ready.len() != 1 || !self.is_here() || guard.links.have_ready(waiter) {
            return true;
        }
        let set = &mut *guard;
        let item = set.ready.front().and_then(|index| set.items.get_mut(*index));
        let Some(item) = item.filter(|item| item.is_reported() && item.socket.link().is_some_and(|l| !l.is_remote()))
        else {
            return true;
        };
        let mask = item.evaluate(Arm::No);
        // An edge-triggered item has to be armed again, and a one-shot item is disabled: `harvest` does that.
        if mask != 0 && item.events & (ET | ONESHOT) == 0 {
            self.list(item, mask, &mut set.results);
        }
        mask != 0
    }

    /// Appends the ready items of the list to the entries. `after_rest`: also asks the kernel whether their fds are
    /// still open.
    fn harvest(&mut self, after_rest: bool) {
        let (epoll, before) = (self.set, self.filled);
        if epoll.served.load(Acquire) {
            link::all().into_iter().for_each(readiness::tell);
        }
        let Some(mut guard) = epoll.set.lock() else { return };
        if !self.is_here() {
            return;
        }
        let set = &mut *guard;
        let mut is_partial = epoll.sweep(set, Sweep::Some);
        for _ in 0..ROUNDS {
            self.report(set, after_rest);
            let seen = set.ready.len();
            if self.filled == self.max {
                break;
            } else if self.filled > before {
                // The checks took their time. A peer may have sent to a socket that was found empty, and after that to
                // a socket that was found ready. So the first socket is checked again.
                epoll.sweep(set, Sweep::Again);
            } else if std::mem::take(&mut is_partial) {
                // The links that had data have no ready item after all: the skipped links are next.
                epoll.sweep(set, Sweep::Untold);
            }
            if set.ready.len() == seen {
                break;
            }
        }
        set.links.spoke.clear();
        let more = set.ready.len() > (self.filled - before) as usize;
        drop(guard);
        if epoll.nested.load(Acquire) {
            epoll.show_ready();
        }
        if more {
            // Another thread that sleeps on this set can report the items that are left.
            epoll.ring_if_sleeping();
        }
    }

    /// Checks each item of the list once, while the result has room. Items that stay in the list go to its end.
    fn report(&mut self, set: &mut Set, after_rest: bool) {
        for _ in 0..set.ready.len() {
            if self.filled == self.max {
                break;
            }
            let Some(index) = set.ready.pop_front() else { break };
            let Some(item) = set.items.get_mut(index) else {
                continue;
            };
            item.queued = item.is_reported() && self.check_item(item, after_rest, &mut set.results);
            if item.queued {
                set.ready.push_back(index);
            } else if item.dead {
                set.free.push(index);
            }
        }
    }

    /// Reports an item if it is ready. Returns true if it stays in the list.
    fn check_item(&mut self, item: &mut Item, after_rest: bool, results: &mut u64) -> bool {
        let has_moved = self.set.moves.load(Relaxed) != self.moves;
        if item.listed_in == self.serial && self.serial > 0 || has_moved && self.has(item.data) {
            // A result must not list a socket twice: the program may have closed it before it comes to the second
            // entry. The item is ready again since it was listed, or the kernel may have reported the socket just
            // before it was taken over. The next result lists it.
            return true;
        }
        let is_edge = item.events & ET != 0;
        let mask = item.evaluate(if is_edge { Arm::Always } else { Arm::IfNotReady });
        if let Some(link) = item.socket.link() {
            link.judge(mask != 0);
        }
        if mask == 0 {
            return false;
        }
        if after_rest && !item.socket.numbers.is_alive() {
            // The fd was closed without a hook: the kernel's set would not have it any more.
            Library::get().service.submit(Command::Lost(item.socket.into()));
            return false;
        }
        self.list(item, mask, results);
        item.disabled = item.events & ONESHOT != 0;
        !is_edge && !item.disabled
    }

    /// Fills the next entry of the program's array; the caller has checked that there is room. `results` is the set's
    /// count of results.
    fn list(&mut self, item: &mut Item, events: u32, results: &mut u64) {
        if self.serial == 0 {
            *results += 1;
            self.serial = *results;
        }
        item.listed_in = self.serial;
        // SAFETY: fewer than `max` entries are filled, and `max` are writable by the contract of `Epoll::wait`.
        unsafe { self.free().write(libc::epoll_event { events, u64: item.data }) };
        self.filled += 1;
    }

    /// Whether a filled entry has these data.
    fn has(&self, data: u64) -> bool {
        // SAFETY: the first `filled` entries are filled.
        (0..self.filled as usize).any(|at| unsafe { (*self.events.add(at)).u64 } == data)
    }
}

// A wait in the kernel's set alone. An item may be taken over at any moment of the wait, so the gate counts the thread.
// The thread that makes the set active sees this one in the gate, rings the bell, and counts a sleeper for it.

impl Wait<'_> {
    /// Waits in the kernel alone. Returns what epoll_wait() returns. `None` if the set is active or the fd stands for
    /// another file: the caller continues with the library's list.
    fn wait_plain(&mut self, deadline: Deadline, mut left: Timeout) -> Option<c_int> {
        let set = self.set;
        if set.inherited.load(Acquire) && set.inherited.swap(false, AcqRel) {
            // The process is a fork child. Sockets that it has inherited may be on its parent's links, and have to be
            // taken back to TCP.
            socket::in_use().for_each(reclaim);
        }
        loop {
            point!("epoll alone: the set is not active");
            // Either this thread sees that the set is active, or is not behind the fd any more. Or the thread that has
            // made it so (`activate`, `release`) sees this thread inside the gate.
            if !set.gate.enter() || !self.is_here() {
                set.leave_plain();
                return None;
            }
            point!("epoll alone: is about to sleep");
            let n = or_if_cancelled(
                || (self.real)(self.fd, self.events, self.max, left),
                || {
                    set.leave_plain();
                },
            );
            let errno = errno::get();
            point!("epoll alone: is awake");
            if set.is_active() {
                // The kernel's wait was on this set, so it is the right one even if the fd stands for another file by
                // now.
                self.hold();
            }
            point!("epoll alone: holds the set");
            let others = set.leave_plain();
            if others && set.is_active() {
                // A ring wakes one thread; the next one must leave the kernel's wait too.
                set.ring();
            }
            // The bell may be in the kernel's set, and so among the entries, before the set counts as active.
            let kept = if n < 0 { n } else { self.take_in(n, !left.is_zero()) };
            errno::set(errno);
            let is_active = set.is_active();
            if kept != 0 || left.is_zero() || n == 0 && !is_active {
                return Some(kept);
            }
            // The entries were only library fds of other processes, so the kernel's set may still be the only one to
            // check.
            if is_active || !self.is_here() {
                return None;
            }
            left = deadline.left();
        }
    }

    /// Whether the set is still the one on which the wait began.
    #[inline]
    fn is_here(&self) -> bool {
        self.is_inside || self.is_named()
    }

    fn is_named(&self) -> bool {
        matches!(table::lookup(self.fd), Entry::Epoll(e) if std::ptr::eq(e, self.set))
            && self.set.generation.load(Relaxed) == self.generation
    }

    /// Makes the wait hold the set from now on.
    fn hold(&mut self) {
        if !std::mem::replace(&mut self.is_inside, true) {
            self.set.inside.enter();
        }
    }

    /// Makes the wait hold the set, because it is about to spin or sleep. Returns false if the fd stands for another
    /// file by now.
    fn enter(&mut self) -> bool {
        let was_inside = self.is_inside;
        // `Epoll::release` is called when the table has lost the fd, and then checks for waits that hold the set.
        self.hold();
        was_inside || self.is_named()
    }

    /// Returns the fd for the kernel's call: a private one if the wait holds the set.
    fn number(&self) -> c_int {
        match self.set.kernel_fd() {
            Some(own) if self.is_inside => own.as_raw_fd(),
            _ => self.fd,
        }
    }
}

impl Drop for Wait<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.is_inside {
            let errno = errno::get();
            self.set.inside.leave();
            self.set.end_if_left();
            errno::set(errno);
        }
    }
}

impl Epoll {
    /// Leaves the gate. Returns true if other threads are inside.
    fn leave_plain(&'static self) -> bool {
        let waiter = self.waiter();
        let others = self.gate.leave();
        // The thread that makes the set active counts a sleeper for those inside, and then checks whether they are
        // still there.
        if !others && self.plain_sleeps.look() {
            self.end_plain_sleep(waiter);
        }
        self.end_if_left();
        others
    }
}

/// Arguments of a FUTEX_WAKE_OP that adds 0 to its second word, so that the kernel checks whether the word is writable.
/// No thread is woken. They are FUTEX_OP(ADD, 0, LT, 0) of <linux/futex.h>, and FUTEX_WAKE_OP with FUTEX_PRIVATE_FLAG.
const ADD_NOTHING: usize = 1 << 28 | 2 << 24;
const WAKE_OP: usize = 5 | 128;

/// Whether the first entry of the program's array can be written. If not, the kernel returns EFAULT once there is an
/// event. A store by the library would raise SIGSEGV, again and again if a handler of the program's jumps out of it
/// (`signals/jump`).
///
/// Asks the kernel only if the array is not the one of the thread's last wait.
fn can_be_written(events: *mut libc::epoll_event) -> bool {
    let at = events.addr();
    let thread = thread::current();
    if thread.note_results(at) {
        return true;
    }
    let nobody = AtomicU32::new(0);
    let (word, other) = (kernel::address(&raw const nobody), at & !3);
    // SAFETY: the kernel checks both addresses, and changes neither word.
    let asked = unsafe { kernel::call(libc::SYS_futex, [word, WAKE_OP, 0, 0, other, ADD_NOTHING]) };
    let can = asked != Err(Errno::FAULT);
    if !can {
        thread.note_results(0);
    }
    can
}

// The links that a wait checks, and by which it is woken. Links within this host are checked each time. If there are
// many links to other hosts, only those are checked whose completions the kernel's set does not report.

/// Which links to other hosts are checked. Links within this host always are.
#[derive(Clone, Copy, PartialEq)]
enum Sweep {
    /// Links whose completions the kernel's set would not report.
    Untold,
    /// Links of [`Sweep::Untold`], until [`MANY`] have been checked after the first with data.
    Some,
    /// Links that had data before in the same harvest.
    Again,
}

impl Links {
    /// Whether any link has an entry for `waiter`. If so, the next check begins at that link.
    fn have_ready(&mut self, waiter: WaiterId) -> bool {
        if self.near.iter().any(|link| link.has_ready(waiter)) {
            return true;
        }
        let are_many = self.far.len() > MANY;
        let is_ready = |far: &Far| match are_many && far.is_told() {
            // The kernel's set reports new completions of this link, so only those that were taken in already are
            // checked.
            true => far.news.is_queued(waiter),
            false => far.link.has_ready(waiter),
        };
        let found = in_turn(&self.far, self.next).find(|(_, far)| is_ready(far));
        let found = found.map(|(at, _)| at);
        self.next = found.unwrap_or(self.next);
        found.is_some()
    }

    /// Whether any link has an entry for the service thread, which notifies the set (`Epoll::served`).
    fn have_told_the_service(&self) -> bool {
        let far = self.far.iter().map(|far| far.link);
        self.near.iter().copied().chain(far).any(|link| link.has_ready(SERVICE))
    }
}

/// Returns the links to other hosts with their indices, beginning with `next`.
fn in_turn(far: &[Far], next: usize) -> impl Iterator<Item = (usize, &Far)> {
    let (before, rest) = far.split_at(next.min(far.len()));
    (before.len()..).zip(rest).chain((0..).zip(before))
}

impl Epoll {
    fn has_ready(&self) -> bool {
        let (Some(waiter), Some(mut set)) = (self.waiter(), self.set.lock()) else {
            return true;
        };
        !set.ready.is_empty()
            || set.links.have_ready(waiter)
            || self.served.load(Acquire) && set.links.have_told_the_service()
    }

    /// Moves the entries that peers have put into the ready queues to the set's list. `of`: which links to other hosts
    /// are checked. Returns true if links were skipped that may have data which the kernel's set would not report.
    fn sweep(&'static self, set: &mut Set, of: Sweep) -> bool {
        let Some(waiter) = self.waiter() else { return false };
        let mut come = std::mem::take(&mut set.come);
        let Links {
            near, far, next, spoke, ..
        } = &mut set.links;
        let mut drain = |link: &'static Link| {
            let before = come.len();
            if let Some(remote) = link.remote() {
                remote.news().on_take(waiter);
            }
            link.drain_ready(waiter, |slot, at| {
                let Some(interest) = socket::by_slot(slot).and_then(|socket| socket.wakes.interest.lock()) else {
                    return;
                };
                let items = interest.members.iter().filter(|m| m.is_in(self));
                come.extend(items.map(|m| (at, m.item)));
            });
            come.len() > before
        };
        near.retain(|link| {
            drain(link);
            link.is_alive()
        });
        let mut left = usize::MAX;
        if of == Sweep::Again {
            for link in spoke.iter() {
                link.progress();
                drain(link);
            }
        } else {
            let are_many = far.len() > MANY;
            for (at, far) in in_turn(far, *next) {
                if are_many && far.is_told() {
                    // Other threads may have taken in completions of this link.
                    if far.news.is_queued(waiter) && drain(far.link) {
                        spoke.push(far.link);
                    }
                } else if left > 0 {
                    left -= 1;
                    *next = at + 1;
                    far.link.progress();
                    if drain(far.link) {
                        spoke.push(far.link);
                        left = if of == Sweep::Some { left.min(MANY) } else { left };
                    }
                }
            }
        }
        // A ready queue does not keep an order, and each link has its own queue. The kernel's list is in the order of
        // arrival.
        come.sort_unstable();
        for (_, index) in come.drain(..) {
            set.enqueue(index);
        }
        set.come = come;
        left == 0
    }

    /// Prepares a sleep on a set with links to other hosts: their completions wake this thread, or a thread that sleeps
    /// on another set. The links' descriptors are in the kernel's set from the first such sleep on. `None` if there are
    /// no such links, or if the service thread handles their completions.
    fn watch_links(&'static self) -> Option<Asleep> {
        let mut set = self.set.lock()?;
        if set.links.far.is_empty() || set.links.are_left {
            return None;
        }
        self.watch.enter();
        // Read after `enter`: if the service thread begins to handle a link's completions now, it sees that a thread
        // sleeps.
        let taken_back = Library::get().service.taken_back.look();
        if let Some(kernel_fd) = self.kernel_fd() {
            set.links.watch(kernel_fd, taken_back);
        }
        Some(Asleep {
            set: self,
            has_left: AtomicBool::new(false),
        })
    }

    /// Handles links that the kernel's set has reported.
    fn on_named(&'static self, named: &Named) {
        if !named.is_none()
            && let Some(set) = self.set.lock()
        {
            let far = set.links.far.iter().filter(|far| named.has(far.slot));
            far.for_each(|far| far.remote.on_readable());
        }
    }

    /// Arms the links again for other threads. Several threads may sleep on one link, and this thread may have consumed
    /// the link's event without learning which link it was.
    fn arm_for_others(&'static self) {
        if let Some(set) = self.set.lock() {
            set.links.far.iter().for_each(|far| far.remote.arm_for_others());
        }
    }

    /// Prepares for a nested use: another set is about to hold this one, or a thread to sleep on it in poll() or
    /// select().
    pub(crate) fn on_nested(&'static self) {
        // Both sides use SeqCst: this thread sees that the set is active, or `activate` sees that the set is nested.
        if !self.nested.load(Acquire) && !self.nested.publish(true) {
            if let Some(mut set) = self.set.lock() {
                set.links.leave_to_service();
            }
            if self.is_active() {
                self.show_ready();
            }
        }
    }

    /// Makes the kernel's object of a nested set readable if an item is ready, and only then. A ring makes the object
    /// readable until the ring is consumed. After a ring, peers do not ring again before the waiter's sleep flag has
    /// begun a new epoch. So each thread that has taken items from the set, or has consumed a ring, calls this
    /// afterwards.
    fn show_ready(&'static self) {
        let Some(waiter) = self.waiter() else {
            return;
        };
        let waiters = &Library::get().waiters;
        if self.shown.publish(true) {
            waiters.leave_sleep(waiter);
        }
        waiters.enter_sleep(waiter);
        point!("nested: a new epoch has begun");
        // In this order: if a ring of the new epoch is consumed here, the item that it was rung for is seen below.
        waiters.quiet(waiter);
        if self.is_ready() {
            waiters.ring(waiter);
        }
    }
}

/// Counts a thread as asleep on a set with links to other hosts, until this value is dropped.
struct Asleep {
    set: &'static Epoll,
    /// The thread is not counted any more. The thread's own signal handlers read this too.
    has_left: AtomicBool,
}

impl Asleep {
    fn leave(&self) {
        if !self.has_left.swap(true, Relaxed) && self.set.watch.leave() {
            let errno = errno::get();
            Library::get().service.maintain_later();
            errno::set(errno);
        }
    }

    /// Leaves the links' completions to other threads: a signal handler has interrupted the sleep, and may run for any
    /// time.
    fn hand_over(&self) {
        let errno = errno::get();
        self.leave();
        self.set.arm_for_others();
        errno::set(errno);
    }
}

impl Drop for Asleep {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_is_looked_at_without_being_changed() {
        const PAGE: usize = 4096;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let (write, none) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_NONE);
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, write, flags, -1, 0) };
        let events = page.cast::<libc::epoll_event>();
        // SAFETY: the page was mapped above, readable and writable.
        unsafe { events.cast::<u64>().write(0x0123_4567_89ab_cdef) };
        assert!(can_be_written(events) && can_be_written(events));
        // SAFETY: the page was mapped above, readable and writable.
        let kept = unsafe { events.cast::<u64>().read() };
        assert_eq!(kept, 0x0123_4567_89ab_cdef);
        let other = events.wrapping_add(1);
        for protection in [libc::PROT_READ, none] {
            // SAFETY: the page was mapped above, and no reference into it is alive.
            assert_eq!(unsafe { libc::mprotect(page, PAGE, protection) }, 0);
            assert!(!can_be_written(other) && !can_be_written(other));
        }
        // SAFETY: the page was mapped above, and is not used any more.
        unsafe { libc::munmap(page, PAGE) };
    }
}
