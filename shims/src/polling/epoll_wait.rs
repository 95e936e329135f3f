//! epoll_wait(): reports what is ready in the kernel's set and in the library's list, with one sleep for both.

mod alone;
mod buffer;
mod links;
mod ours;
mod visit;

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use links::{Asleep, Sweep};
use rdmasock_core::cycles;
use rdmasock_core::os::thread;
use rdmasock_core::stats::Call;
use visit::Visit;

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

/// How long waits may be answered from the links alone before the kernel's set is checked again, in
/// [cycles](rdmasock_core::cycles), some 20 us. Short enough not to be noticed, long enough that a busy program makes
/// few system calls.
const KERNEL_EVERY: u64 = 1 << 16;
/// The longest sleep of a set without a bell, ns: no peer can wake it.
const WITHOUT_DOORBELL: u64 = 1_000_000;

/// The items that a harvest checks.
#[derive(Clone, Copy, PartialEq)]
enum Harvest {
    All,
    /// All items; for ready ones, also that their fds are still open by the kernel's word.
    AfterRest,
    /// Only items that were queued since the last harvest.
    News,
}

/// The most rounds in which one harvest checks for newly queued items. Without a bound, a set in which each round finds
/// some would be checked forever.
const ROUNDS: usize = 4;

/// The result of a wait: the program's array, and its filled part.
struct Results {
    events: *mut libc::epoll_event,
    /// The number of entries that are filled.
    front: c_int,
    max: c_int,
    /// The set's count of `moves` before the kernel filled those entries.
    moves: u64,
    /// The number of this result among the set's; 0 before its first harvest.
    serial: Cell<u64>,
}

impl Results {
    /// Returns the same result, with the first `front` entries filled.
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

    /// Fills the `n`th entry behind the filled ones, if there is room.
    fn put(&self, n: c_int, events: u32, u64: u64) {
        if (0..self.room()).contains(&n) {
            // SAFETY: the index is below `max`, and `max` entries are writable by `wait`'s contract.
            unsafe {
                let slot = self.events.add((self.front + n) as usize);
                slot.write(libc::epoll_event { events, u64 });
            }
        }
    }

    fn is_listed(&self, data: u64) -> bool {
        // SAFETY: the first `front` entries are filled.
        (0..self.front).any(|at| unsafe { (*self.events.add(at as usize)).u64 } == data)
    }
}

/// The result of a check of the socket that was reported last.
#[derive(PartialEq)]
enum Last {
    /// No socket of the set is ready.
    Quiet,
    Reported,
    /// Other sockets may be ready too, or there is no such socket.
    NotAlone,
}

impl Epoll {
    /// Carries out epoll_wait() and its kin on `fd`. `real(fd, events, max, timeout)` is the kernel's call. Returns
    /// what epoll_wait() returns, and sets errno.
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
            // SAFETY: `events` is writable for `max` entries, by this function's contract.
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
            // At intervals of `KERNEL_EVERY` the kernel's set is checked too, every other time first. Then neither set
            // can starve the other if the program takes few events at a time.
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
                    // The harvest skipped links, for which the kernel's set has now reported completions.
                    return self.harvest(&visit, &all, Harvest::AfterRest);
                }
                return self.with_ours(&visit, &all, n);
            }
            if !visit.enter() {
                drop(visit);
                // SAFETY: `events` is writable for `max` entries, by this function's contract.
                return unsafe { begin_anew(fd, events, max, deadline.left(), real) };
            }
            if !spun {
                spun = true;
                let peers = Peers::new(self.set.lock().is_none_or(|set| !set.links.far.is_empty()));
                let bound = self.spinner.bound(peers);
                if bound > 0 {
                    // A reply that comes at once does not wait for a check of the kernel's set, which was empty the
                    // last time.
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
                // No fd was left for a bell: the thread checks at intervals.
                let n = self.look(&visit, events, max, &|fd, e, m, _| {
                    real(fd, e, m, deadline.left().at_most(WITHOUT_DOORBELL))
                });
                if n != 0 || deadline.is_over() {
                    return self.with_ours(&visit, &all, n);
                }
                continue;
            };
            let waiters = &Library::get().waiters;
            // Before the sleep flag is raised: arming takes in completions, and would ring the bell of threads that
            // sleep already.
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
            // A signal handler that has run since the call began ends the call after a last check, as in the kernel.
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
                // An item may have become ready just before the time was over.
                return self.harvest(&visit, &all, Harvest::AfterRest);
            }
            spun = false;
        }
    }

    /// Whether the kernel's set has connections, and not only other files.
    fn is_mixed(&self) -> bool {
        self.mixed.load(Relaxed)
    }

    /// Appends ready items of the links to the first `n` entries, which the kernel has filled since `all.moves` was
    /// read. A peer may have sent on a link before it sent what the kernel reports. The program must not get only the
    /// later of the two.
    fn with_ours(&'static self, visit: &Visit, all: &Results, n: c_int) -> c_int {
        if n <= 0 || n >= all.max || !self.is_active() {
            return n;
        }
        n + self.harvest(visit, &all.behind(n), Harvest::All)
    }

    /// Adds ready sockets of the kernel's set to the first `n` entries, which are the library's. Does so if `look` is
    /// true, or if connections are in both sets. In the latter case a peer may have sent on a connection of the
    /// kernel's before it sent on the link. Then adds items that came on links meanwhile. If connections are in both
    /// sets, the kernel's entries are moved to the front.
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
        // SAFETY: `n` is below `max`, so the pointer stays within the array.
        let rest = unsafe { events.add(n as usize) };
        let end = n + self.look(visit, rest, max - n, real).max(0);
        let mut news = 0;
        if n < end && end < max {
            news = self.harvest(visit, &all.behind(end), Harvest::News);
        }
        if n < end && self.moves.load(Acquire) != moves {
            // SAFETY: `end + news` entries are filled.
            return unsafe { without_repeats(events, n as usize, (end + news) as usize) };
        }
        if self.is_mixed() {
            // The order of arrival across the two sets is unknown, so the kernel's entries go first. A peer on a link
            // has usually waited for its replies, so its data there is what it sent last. A peer that sends on a young
            // connection without waiting expects that data to be read before.
            // SAFETY: `end` entries are filled.
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

    /// Checks the socket that was reported last, and alone, for a moment before its peer is asked for a wake-up. That
    /// socket is likely to be the next, and four cache lines then need not move between the two sides. Returns true if
    /// it is reported: `events` has room for one.
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

    /// Checks the set's only listed socket, if it is on a link within this host. If it is ready, reports it and keeps
    /// it in the list.
    fn look_at_last(&'static self, visit: &Visit, events: *mut libc::epoll_event) -> Last {
        let (Some(waiter), Some(mut set)) = (self.waiter(), self.set.lock()) else {
            return Last::NotAlone;
        };
        let (Some(&index), 1) = (set.ready.front(), set.ready.len()) else {
            return Last::NotAlone;
        };
        // Checked under the lock: a closed set cannot become another set before its lock is free.
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
        // An edge-triggered item has to be armed again, and a one-shot item is disabled.
        let goes_on = item.events & (ET | ONESHOT) == 0;
        if others || !goes_on {
            return Last::NotAlone;
        }
        // SAFETY: `max` is above 0, and `max` entries are writable, by `wait`'s contract.
        unsafe {
            events.write(libc::epoll_event {
                events: mask,
                u64: item.data,
            });
        }
        Last::Reported
    }

    /// Reports ready items behind the entries of `to` that are filled. Returns how many.
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
                // The links that had data have no ready item after all: the skipped links are next.
                self.sweep(set, Sweep::Untold);
            } else {
                // The checks took their time. A peer may have sent to a socket that was found empty, and then to one
                // that was not: the first is checked again.
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
            // Another thread that sleeps on this set can report the rest.
            self.ring_if_sleeping();
        }
        n
    }

    /// Checks the first `left` items of the list, while there is room. Returns how many were ready. The `n` entries
    /// before are filled.
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
                // A socket must not be listed twice in one result: the program may have closed it before it comes to
                // the second entry. Either data has come again, or the kernel has reported the socket just before it
                // was taken over. The next result gets it.
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
                // The fd was closed without a hook: the kernel's set would not have it any more.
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

    /// Whether an item that is taken over is ready now: for poll(), select() and sets that hold this one.
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

/// Begins the wait again, on the file that `fd` stands for now. For a wait that has not slept yet.
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
        // SAFETY: `events` is writable for `max` entries, by the contract.
        Entry::Epoll(set) => unsafe { set.wait(fd, events, max, timeout, real) },
        _ => real(fd, events, max, timeout),
    }
}

/// Removes entries from `front` on that repeat one before: the socket moved between the two sets meanwhile. Returns how
/// many entries are left.
///
/// The kernel never lists a socket twice. A program that does one blocking read for each entry would hang at the
/// second.
///
/// # Safety
/// `n` entries are filled.
unsafe fn without_repeats(events: *mut libc::epoll_event, front: usize, n: usize) -> c_int {
    // SAFETY: `n` entries are filled, by the contract.
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
