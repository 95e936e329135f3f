//! epoll_wait(): what is ready in the kernel's set and in ours, and one sleep for both.

mod alone;
mod buffer;
mod links;
mod ours;
mod visit;

use links::{Asleep, Sweep};
use visit::Visit;

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use rdmasock_core::cycles;
use rdmasock_core::os::thread;
use rdmasock_core::stats::Call;

use crate::config::spin::{self, Peers};
use crate::notify::epoll::{ALWAYS, ET, Epoll, ONESHOT, Set};
use crate::notify::table::{self, Entry};
use crate::notify::wait::Record;
use crate::objects::library::Library;
use crate::objects::mailbox::Command;
use crate::polling::readiness::{self, Arm};
use crate::polling::served;
use crate::signals::duty;
use crate::sys::points::point;
use crate::sys::time::Timeout;

/// How long waits may be answered from the links alone before the kernel's set is looked at again,
/// [cycles](rdmasock_core::cycles), some 20 us: short enough not to be felt, long enough that a busy program makes few
/// calls.
const KERNEL_EVERY: u64 = 1 << 16;
/// How long to sleep at a time where nobody can wake us, ns.
const WITHOUT_DOORBELL: u64 = 1_000_000;

/// What a harvest is to look at.
#[derive(Clone, Copy, PartialEq)]
enum Harvest {
    All,
    /// The same, and that the kernel would still know of what is ready.
    AfterRest,
    /// Only what has come since the last.
    News,
}

/// How often a harvest looks at what has come meanwhile: a set that is found in full each time is not looked at for
/// ever.
const ROUNDS: usize = 4;

/// Where a wait's results go.
struct Results {
    events: *mut libc::epoll_event,
    /// Entries that are filled.
    front: c_int,
    max: c_int,
    /// How often items had moved between the two sets before the kernel filled those.
    moves: u64,
    /// Which of the set's results these are; 0 before the first look at ours.
    serial: Cell<u64>,
}

impl Results {
    /// The same result, of which the first `front` entries are filled.
    fn behind(&self, front: c_int) -> Self {
        Self {
            front,
            serial: self.serial.clone(),
            ..*self
        }
    }

    fn serial(&self, set: &mut Set) -> u64 {
        if self.serial.get() == 0 {
            set.results += 1;
            self.serial.set(set.results);
        }
        self.serial.get()
    }

    fn room(&self) -> c_int {
        self.max - self.front
    }

    /// Fills the `n`th entry behind the front.
    fn put(&self, n: c_int, events: u32, u64: u64) {
        if (0..self.room()).contains(&n) {
            // SAFETY: `max` entries are writable by `wait`'s contract.
            unsafe {
                let slot = self.events.add((self.front + n) as usize);
                slot.write(libc::epoll_event { events, u64 });
            }
        }
    }

    fn is_listed(&self, data: u64) -> bool {
        // SAFETY: these are filled.
        (0..self.front).any(|at| unsafe { (*self.events.add(at as usize)).u64 } == data)
    }
}

/// What a look at the socket that was reported last has found.
#[derive(PartialEq)]
enum Last {
    /// Nothing.
    Quiet,
    Reported,
    /// Others may be ready too, or there is no such socket.
    NotAlone,
}

impl Epoll {
    /// epoll_wait() and its kin on number `fd`. `real(fd, events, max, timeout)` is the kernel's.
    ///
    /// # Safety
    /// `events` is writable for `max` entries.
    // Not inlined: the forced unwind of pthread_cancel runs the visit's destructor here (see `hooks`).
    #[inline(never)]
    pub unsafe fn wait(
        &'static self,
        fd: c_int,
        events: *mut libc::epoll_event,
        max: c_int,
        timeout: Timeout,
        real: &impl Fn(c_int, *mut libc::epoll_event, c_int, Timeout) -> c_int,
    ) -> c_int {
        let mut visit = Visit::new(self, fd);
        let handlers = thread::current().handlers();
        let deadline = timeout.deadline();
        let mut all = Results {
            events,
            front: 0,
            max,
            moves: self.moves.load(Acquire),
            serial: Cell::new(0),
        };
        if let Some(n) = self.wait_plain(&mut visit, events, max, deadline, timeout, real) {
            return self.with_ours(&visit, &all, n);
        }
        if !visit.is_here() {
            drop(visit);
            // SAFETY: by this function's contract.
            return unsafe { begin_anew(fd, events, max, timeout, real) };
        }
        let due = self.is_time_to_look();
        if !due && !deadline.is_zero() && self.await_last(&visit, events) {
            if max == 1 {
                self.full.store(1, Relaxed);
            }
            return self.with_kernels(&visit, &all, 1, false, real);
        }
        let mut due = Some(due);
        let mut spun = false;
        loop {
            // Now and then the kernel's set is looked at too, every other time first: neither may keep
            // the other out where the program takes few events at a time.
            let due = due.take().unwrap_or_else(|| self.is_time_to_look());
            all.moves = self.moves.load(Acquire);
            let may_have = due || !self.kernel_quiet.load(Relaxed);
            let starved = may_have && self.full.load(Relaxed) != 0 && self.full.swap(0, Relaxed) != 0;
            let its_turn = due && !self.is_mixed() && self.turn.fetch_xor(true, Relaxed);
            if starved || its_turn {
                let n = self.look(&visit, events, max, real);
                if n > 0 {
                    return self.with_ours(&visit, &all, n);
                }
            }
            let how = if due { Harvest::AfterRest } else { Harvest::All };
            let n = self.harvest(&visit, &all, how);
            if n == max {
                self.full.store(1, Relaxed);
            }
            if n > 0 {
                let look = due && !(starved || its_turn);
                return self.with_kernels(&visit, &all, n, look, real);
            }
            if deadline.is_zero() {
                let n = self.look(&visit, events, max, real);
                if n == 0 && visit.is_told.take() {
                    // Links were left out of which the kernel has told.
                    return self.harvest(&visit, &all, Harvest::AfterRest);
                }
                return self.with_ours(&visit, &all, n);
            }
            if !visit.enter() {
                drop(visit);
                // SAFETY: by this function's contract.
                return unsafe { begin_anew(fd, events, max, deadline.left(), real) };
            }
            if !spun {
                spun = true;
                let peers = Peers::new(self.set.lock().is_none_or(|set| !set.links.far.is_empty()));
                let bound = self.spinner.bound(peers);
                if bound > 0 {
                    // An answer that comes at once does not wait for a look at a kernel's set that
                    // was empty the last time.
                    if self.kernel_quiet.load(Relaxed) && spin::glance(|| self.has_ready()) {
                        continue;
                    }
                    let k = self.look(&visit, events, max, real);
                    if k != 0 {
                        return self.with_ours(&visit, &all, k);
                    }
                    if self.spinner.spin(bound, || self.has_ready()) {
                        continue;
                    }
                }
            }
            let Some(waiter) = self.waiter() else {
                // There was no number left for a doorbell: looks now and then.
                let n = self.look(&visit, events, max, &|fd, e, m, _| {
                    real(fd, e, m, deadline.left().at_most(WITHOUT_DOORBELL))
                });
                if n != 0 || deadline.is_over() {
                    return self.with_ours(&visit, &all, n);
                }
                continue;
            };
            let waiters = &Library::get().waiters;
            // First: arming looks at what has come, and would ring the bell of whoever sleeps already.
            let asleep = self.watch_links();
            point!("epoll: nothing was there");
            waiters.enter_sleep(waiter);
            point!("epoll: says that it sleeps");
            if self.has_ready() {
                waiters.leave_sleep(waiter);
                continue;
            }
            point!("epoll: is about to sleep");
            let page = Library::get().stats;
            let record = Record::begin(page, waiter, Call::Epoll, None, 0);
            // A signal handler that has run since the call began ends it after a last look, as in the kernel.
            let is_interrupted = thread::current().handlers() != handlers;
            let left = if is_interrupted { Timeout::ZERO } else { deadline.left() };
            let hand_over = || {
                asleep.iter().for_each(Asleep::hand_over);
                waiters.ring(waiter);
            };
            let n = duty::on_duty(&hand_over, || real(visit.number(), events, max, left));
            let errno = crate::sys::errno::get();
            point!("epoll: is awake");
            drop(record);
            waiters.leave_sleep(waiter);
            drop(asleep);
            let kept = self.after_sleep(events, n, max);
            if n < 0 {
                crate::sys::errno::set(errno);
                return n;
            }
            if kept > 0 {
                return self.with_ours(&visit, &all, kept);
            }
            if is_interrupted {
                return crate::sys::errno::fail(libc::EINTR);
            }
            if deadline.is_over() {
                // Something may have come with the last tick.
                return self.harvest(&visit, &all, Harvest::AfterRest);
            }
            spun = false;
        }
    }

    /// Whether the kernel's set has connections too.
    fn is_mixed(&self) -> bool {
        self.mixed.load(Relaxed)
    }

    /// Behind the first `n` entries, which the kernel has filled since `moves` was read, what the links have: who has
    /// sent on one of them before he sent what the kernel reports is not to be heard in the wrong order.
    fn with_ours(&'static self, visit: &Visit, all: &Results, n: c_int) -> c_int {
        if n <= 0 || n >= all.max || !self.is_active() {
            return n;
        }
        n + self.harvest(visit, &all.behind(n), Harvest::All)
    }

    /// Behind the first `n` entries, which are ours, what the kernel has, and what has come on links before that: if
    /// connections are in both sets, for who has sent on one of the kernel's before he sent what is ours is not to be
    /// heard in the wrong order; else if it is time to `look`. The kernel's are then the first.
    fn with_kernels(
        &'static self,
        visit: &Visit,
        all: &Results,
        n: c_int,
        look: bool,
        real: &impl Fn(c_int, *mut libc::epoll_event, c_int, Timeout) -> c_int,
    ) -> c_int {
        if n >= all.max || !(look || self.is_mixed()) {
            return n;
        }
        let Results { events, max, moves, .. } = *all;
        // SAFETY: n < max entries are used.
        let rest = unsafe { events.add(n as usize) };
        let end = n + self.look(visit, rest, max - n, real).max(0);
        let mut news = 0;
        if n < end && end < max {
            news = self.harvest(visit, &all.behind(end), Harvest::News);
        }
        if n < end && self.moves.load(Acquire) != moves {
            // SAFETY: so many entries are filled.
            return unsafe { without_repeats(events, n as usize, (end + news) as usize) };
        }
        if self.is_mixed() {
            // Which came first nobody knows. Who is on a link has mostly waited for his answers, so that what is there
            // is what he sent last; who sends on a young connection and does not wait expects to be heard before that.
            // SAFETY: so many entries are filled.
            unsafe { std::slice::from_raw_parts_mut(events, end as usize) }.rotate_left(n as usize);
        }
        end + news
    }

    fn is_time_to_look(&self) -> bool {
        let now = cycles::now();
        let due = now.wrapping_sub(self.looked_at.load(Relaxed)) > KERNEL_EVERY;
        if due {
            self.looked_at.store(now, Relaxed);
        }
        due
    }

    fn look(
        &'static self,
        visit: &Visit,
        events: *mut libc::epoll_event,
        max: c_int,
        real: &impl Fn(c_int, *mut libc::epoll_event, c_int, Timeout) -> c_int,
    ) -> c_int {
        let n = real(visit.number(), events, max, Timeout::ZERO);
        self.kernel_quiet.store(n == 0, Relaxed);
        if n <= 0 { n } else { self.after_look(visit, events, n) }
    }

    /// What was reported last, and alone, is likely to be the next: its ring is looked at for a moment before its peer
    /// is asked to tell. That saves the peer, and us, four cache lines that would have to change sides. True if it is
    /// reported: `events` has room for one.
    fn await_last(&'static self, visit: &Visit, events: *mut libc::epoll_event) -> bool {
        if self.nested.load(Relaxed) || !self.kernel_quiet.load(Relaxed) || !self.spinner.pays() {
            return false;
        }
        let mut last = Last::Quiet;
        spin::glance(|| {
            last = self.look_at_last(visit, events);
            last != Last::Quiet
        });
        last == Last::Reported
    }

    /// The set has one socket left to look at, on a link within this host: it is reported if it is ready, and stays the
    /// one to be looked at.
    fn look_at_last(&'static self, visit: &Visit, events: *mut libc::epoll_event) -> Last {
        let (Some(waiter), Some(mut set)) = (self.waiter(), self.set.lock()) else {
            return Last::NotAlone;
        };
        let (Some(&index), 1) = (set.ready.front(), set.ready.len()) else {
            return Last::NotAlone;
        };
        // Under the lock: a set that is closed is not another's before it is free.
        if !visit.is_here() {
            return Last::NotAlone;
        }
        let others = set.links.have_ready(waiter);
        let Some(item) = set.items.get(index) else {
            return Last::NotAlone;
        };
        let is_near = item.socket.link().is_some_and(|l| !l.is_remote());
        if item.dead || item.disabled || !item.taken || !is_near {
            return Last::NotAlone;
        }
        let mask = readiness::evaluate(item.socket, item.events, Arm::No) & (item.events | ALWAYS);
        if mask == 0 && !others {
            return Last::Quiet;
        }
        // An edge has to be armed again, and ONESHOT is over.
        let goes_on = item.events & (ET | ONESHOT) == 0;
        if others || !goes_on {
            return Last::NotAlone;
        }
        // SAFETY: one entry is writable by `wait`'s contract.
        unsafe {
            events.write(libc::epoll_event {
                events: mask,
                u64: item.data,
            });
        }
        Last::Reported
    }

    /// Reports what is ready, behind the first `front` of `max` entries, which the kernel has filled since `moves` was
    /// read.
    fn harvest(&'static self, visit: &Visit, to: &Results, how: Harvest) -> c_int {
        if self.served.load(Acquire) {
            served::tell_all();
        }
        let Some(mut guard) = self.set.lock() else {
            return 0;
        };
        if !visit.is_here() {
            return 0;
        }
        let set = &mut *guard;
        let before = set.ready.len();
        set.links.spoke.clear();
        let mut is_partial = self.sweep(set, Sweep::Some);
        set.links.drop_dead(self.kernel_fd(), &self.watch);
        if how == Harvest::News {
            set.ready.rotate_left(before);
        }
        let mut left = set.ready.len() - if how == Harvest::News { before } else { 0 };
        let mut n = 0;
        for _ in 0..ROUNDS {
            n += self.report(set, left, to, n, how);
            if n == to.room() {
                break;
            }
            let before = set.ready.len();
            if n == 0 {
                if !std::mem::take(&mut is_partial) {
                    break;
                }
                // Those that had something have nothing after all.
                self.sweep(set, Sweep::Untold);
            } else {
                // A look took its time: who has sent to one that was found empty, and then to one that was not, is
                // heard now.
                self.sweep(set, Sweep::Again);
            }
            left = set.ready.len() - before;
            if left == 0 {
                break;
            }
            set.ready.rotate_left(before);
        }
        let Set { ready, again, .. } = set;
        ready.extend(again.drain(..));
        set.links.spoke.clear();
        let more = set.ready.len() > n as usize;
        let mixed = set.plain > 0 || self.has_plain.load(Relaxed);
        if self.mixed.load(Relaxed) != mixed {
            self.mixed.store(mixed, Relaxed);
        }
        drop(guard);
        if self.nested.load(Acquire) {
            self.show_ready();
        }
        if more {
            // Another thread that sleeps on this set can take the rest.
            self.ring_if_sleeping();
        }
        n
    }

    /// Looks at the first `left` of the list, as long as there is room; gives how many were ready. `n` entries are
    /// filled before.
    fn report(&self, set: &mut Set, left: usize, to: &Results, mut n: c_int, how: Harvest) -> c_int {
        let before = n;
        let serial = to.serial(set);
        for _ in 0..left {
            if n == to.room() {
                break;
            }
            let Some(index) = set.ready.pop_front() else {
                break;
            };
            let Some(item) = set.items.get_mut(index) else {
                continue;
            };
            item.queued = false;
            if item.dead {
                set.free.push(index);
                continue;
            }
            if item.disabled || !item.taken {
                continue;
            }
            let is_listed = item.listed_in == serial || item.moved_at > to.moves && to.is_listed(item.data);
            if is_listed {
                // Something has come for it again, or the kernel has reported it just before it became ours: the next
                // result's. A program may have closed it before it comes to a second entry.
                item.queued = true;
                set.again.push(index);
                continue;
            }
            let arm = if item.events & ET != 0 {
                Arm::Always
            } else {
                Arm::IfNotReady
            };
            let mask = readiness::evaluate(item.socket, item.events, arm) & (item.events | ALWAYS);
            if let Some(link) = item.socket.link() {
                link.judge(mask != 0);
            }
            if mask == 0 {
                continue;
            }
            if how == Harvest::AfterRest && !item.socket.numbers.is_alive() {
                // Closed past the hooks: the kernel's set would not have it any more.
                Library::get().service.submit(Command::Lost(item.socket.into()));
                continue;
            }
            to.put(n, mask, item.data);
            n += 1;
            item.listed_in = serial;
            if item.events & ONESHOT != 0 {
                item.disabled = true;
            } else if item.events & ET == 0 {
                item.queued = true;
                set.again.push(index);
            }
        }
        n - before
    }

    /// Whether any taken-over item is ready now: for poll(), select() and sets that hold this one.
    pub fn is_ready(&'static self) -> bool {
        if !self.is_active() {
            return false;
        }
        let Some(mut guard) = self.set.lock() else {
            return false;
        };
        let set = &mut *guard;
        self.sweep(set, Sweep::Every);
        set.links.spoke.clear();
        for at in 0..set.ready.len() {
            let Some(item) = set.ready.get(at).and_then(|i| set.items.get(*i)) else {
                continue;
            };
            if !item.dead
                && !item.disabled
                && item.taken
                && readiness::evaluate(item.socket, item.events, Arm::IfNotReady) & (item.events | ALWAYS) != 0
            {
                return true;
            }
        }
        false
    }
}

/// The wait has not begun yet, and its number stands for something else by now.
///
/// # Safety
/// `events` is writable for `max` entries.
#[cold]
unsafe fn begin_anew(
    fd: c_int,
    events: *mut libc::epoll_event,
    max: c_int,
    timeout: Timeout,
    real: &impl Fn(c_int, *mut libc::epoll_event, c_int, Timeout) -> c_int,
) -> c_int {
    match table::lookup(fd) {
        // SAFETY: by the contract.
        Entry::Epoll(set) => unsafe { set.wait(fd, events, max, timeout, real) },
        _ => real(fd, events, max, timeout),
    }
}

/// Drops what the entries from `front` on repeat of those before: a socket that went from one of the
/// two sets to the other in between. The kernel never lists one twice, and a program that reads once,
/// blocking, for each entry would hang at the second.
///
/// # Safety
/// `n` entries are filled.
unsafe fn without_repeats(events: *mut libc::epoll_event, front: usize, n: usize) -> c_int {
    // SAFETY: by the contract.
    let all = unsafe { std::slice::from_raw_parts_mut(events, n) };
    let mut kept = front;
    for at in front..n {
        let (before, from) = all.split_at(at);
        let Some(event) = from.first().copied() else {
            break;
        };
        let listed = before.get(..front).unwrap_or_default();
        if listed.iter().any(|e| e.u64 == event.u64) {
            continue;
        }
        if let Some(slot) = all.get_mut(kept) {
            *slot = event;
            kept += 1;
        }
    }
    kept as c_int
}
