//! epoll_wait(): reports what is ready in the kernel's set and in the library's list, with one sleep for both. While no
//! item of a set is taken over, the wait is in the kernel alone.
//!
//! Library fds in the kernel's set are removed from results. A nested set, which another set holds, is kept readable in
//! the kernel while an item is ready.

use std::cell::Cell;
use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU32};

use rdmasock_core::cycles;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::os::{kernel, thread};
use rdmasock_core::stats::Call;
use rustix::io::Errno;

use crate::config::spin;
use crate::config::spin::Peers;
use crate::notify::epoll::{ALWAYS, ET, Epoll, Far, Key, Links, Named, ONESHOT, Set, Stripped, keep, strip};
use crate::notify::fork::reclaim;
use crate::notify::table;
use crate::notify::table::Entry;
use crate::notify::wait::Record;
use crate::objects::library::Library;
use crate::objects::link::Link;
use crate::objects::mailbox::Command;
use crate::objects::socket::EpollSet as _;
use crate::objects::waiters::SERVICE;
use crate::objects::{holders, link, socket};
use crate::polling::readiness;
use crate::polling::readiness::Arm;
use crate::signals::handler;
use crate::signals::jump::or_if_cancelled;
use crate::sys::points::point;
use crate::sys::time::{Deadline, Timeout};
use crate::sys::{errno, time};

/// How long waits may be answered from the links alone before the kernel's set is checked again, in
/// [cycles](rdmasock_core::cycles), some 20 us. Short enough not to be noticed, long enough that a busy program makes
/// few system calls.
const KERNEL_EVERY: u64 = 1 << 16;
/// The longest sleep of a set without a bell, ns: no peer can wake it.
const WITHOUT_DOORBELL: u64 = 1_000_000;
/// The most rounds in which one harvest checks for newly queued items. Without a bound, a set in which each round finds
/// some would be checked forever.
const ROUNDS: usize = 4;
/// The number of links to other hosts that are checked at most, once one of them had data. To check such a link is to
/// poll its completions.
///
/// If a set has more links than this, links for which the kernel's set reports completions are skipped. If one of the
/// others has data, this many more are checked, and the next harvest begins with the rest. To check all of them for one
/// message each would cost more than the messages. (The network does not preserve the order between peers on other
/// hosts either.)
const MANY: usize = 16;
/// How long a thread that has consumed another process's ring stays away from the set, ns.
const OUT_OF_THE_WAY: i64 = 1_000_000;

/// The items that a harvest checks.
#[derive(Clone, Copy, PartialEq)]
enum Harvest {
    All,
    /// All items; for ready ones, also that their fds are still open by the kernel's word.
    AfterRest,
    /// Only items that were queued since the last harvest.
    News,
}

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
        if !due && !deadline.is_zero() && self.await_last(&visit, &all) {
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
            let its_turn = due && !self.mixed.load(Relaxed) && self.turn.fetch_xor(true, Relaxed);
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
            let record = Record::begin(waiter, Call::Epoll, None, 0);
            // A signal handler that has run since the call began ends the call after a last check, as in the kernel.
            let is_interrupted = thread::current().handlers() != handlers;
            let left = if is_interrupted { Timeout::ZERO } else { deadline.left() };
            let hand_over = || {
                asleep.iter().for_each(Asleep::hand_over);
                waiters.ring(waiter);
            };
            let n = handler::on_duty(&hand_over, || real(visit.number(), events, max, left));
            let errno = errno::get();
            point!("epoll: is awake");
            drop(record);
            waiters.leave_sleep(waiter);
            drop(asleep);
            let kept = self.after_sleep(events, n, max);
            if n < 0 {
                errno::set(errno);
                return n;
            }
            if kept > 0 {
                return self.with_ours(&visit, &all, kept);
            }
            if is_interrupted {
                return errno::fail(libc::EINTR);
            }
            if deadline.is_over() {
                // An item may have become ready just before the time was over.
                return self.harvest(&visit, &all, Harvest::AfterRest);
            }
            spun = false;
        }
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
        if n >= all.max || !(look || self.mixed.load(Relaxed)) {
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
        if self.mixed.load(Relaxed) {
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
    /// it is reported: `to` has room for one.
    fn await_last(&'static self, visit: &Visit, to: &Results) -> bool {
        if self.nested.load(Relaxed) || !self.kernel_quiet.load(Relaxed) || !self.spinner.pays() {
            return false;
        }
        let mut last = Last::Quiet;
        spin::glance(|| {
            last = self.look_at_last(visit, to);
            last != Last::Quiet
        });
        last == Last::Reported
    }

    /// Checks the set's only listed socket, if it is on a link within this host. If it is ready, reports it and keeps
    /// it in the list.
    fn look_at_last(&'static self, visit: &Visit, to: &Results) -> Last {
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
        to.put(0, mask, item.data);
        Last::Reported
    }

    /// Reports ready items behind the entries of `to` that are filled. Returns how many.
    fn harvest(&'static self, visit: &Visit, to: &Results, how: Harvest) -> c_int {
        if self.served.load(Acquire) {
            link::all().into_iter().for_each(readiness::tell);
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
        set.ready.extend(set.again.drain(..));
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
            if item.listed_in == serial || item.moved_at > to.moves && to.is_listed(item.data) {
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
        set.ready.iter().filter_map(|index| set.items.get(*index)).any(|item| {
            !item.dead
                && !item.disabled
                && item.taken
                && readiness::evaluate(item.socket, item.events, Arm::IfNotReady) & (item.events | ALWAYS) != 0
        })
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
    let (listed, rest) = all.split_at_mut(front.min(n));
    let kept = keep(rest, |data| !listed.iter().any(|e| e.u64 == data));
    (front + kept) as c_int
}

// A wait in the kernel's set alone. An item may be taken over at any moment of the wait, so the gate counts the thread.
// The thread that makes the set active sees it there, rings the bell, and counts a sleeper for it.

impl Epoll {
    /// Waits in the kernel alone. Returns what epoll_wait() returns. `None` if the set is active or the fd stands for
    /// another file: the caller continues with the library's list.
    fn wait_plain(
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
            return Some(if self.is_ready() {
                errno::fail(libc::EFAULT)
            } else {
                real(fd, events, max, left)
            });
        }
        if self.is_active() {
            return None;
        }
        if self.inherited.load(Acquire) && self.inherited.swap(false, AcqRel) {
            // The process is a fork child, and has inherited its connections.
            socket::in_use().for_each(reclaim);
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
            let errno = errno::get();
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
                errno::set(errno);
                return Some(n);
            }
            // The bell may be in the kernel's set before the set counts as active.
            let kept = if left.is_zero() {
                self.after_look(visit, events, n)
            } else {
                self.after_sleep(events, n, max)
            };
            errno::set(errno);
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

/// Arguments of a FUTEX_WAKE_OP that adds 0 to its second word. The word must be writable, and no thread is woken for
/// it. FUTEX_OP(ADD, 0, LT, 0) of <linux/futex.h>, and FUTEX_WAKE_OP with FUTEX_PRIVATE_FLAG.
const ADD_NOTHING: usize = 1 << 28 | 2 << 24;
const WAKE_OP: usize = 5 | 128;

/// Whether the first entry of the program's array can be written. If it cannot, the kernel returns EFAULT once there is
/// an event. A store by the library would be a segmentation fault, and an endless one if a handler of the program's
/// jumps out of it (`signals/jump`).
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

// The links that a wait checks, and by which it is woken. Links within this host are checked each time. Of many links
// to other hosts, only those are checked whose completions the kernel's set does not report.

/// The links to other hosts that are checked; links within this host always are.
#[derive(Clone, Copy, PartialEq)]
enum Sweep {
    /// All of them.
    Every,
    /// Links whose completions the kernel's set would not report.
    Untold,
    /// Links of [`Sweep::Untold`], until [`MANY`] have been checked after the first with data.
    Some,
    /// Links that had data before in the same harvest.
    Again,
}

impl Links {
    /// Whether any link has something for `waiter`. If so, the next check begins at that link.
    fn have_ready(&mut self, waiter: WaiterId) -> bool {
        if self.near.iter().any(|link| link.has_ready(waiter)) {
            return true;
        }
        let are_many = self.far.len() > MANY;
        let is_ready = |far: &Far| match are_many && far.is_told() {
            // Completions that were taken in already.
            true => far.news.is_queued(waiter),
            false => far.link.has_ready(waiter),
        };
        let found = self.far_in_turn().find(|(_, far)| is_ready(far)).map(|(at, _)| at);
        if let Some(at) = found {
            self.next = at;
        }
        found.is_some()
    }

    /// Whether any link has a wake-up for the service thread, which notifies the set (`Epoll::served`).
    fn have_told_the_service(&self) -> bool {
        let far = self.far.iter().map(|far| far.link);
        self.near.iter().copied().chain(far).any(|link| link.has_ready(SERVICE))
    }
}

impl Epoll {
    fn has_ready(&self) -> bool {
        let Some(waiter) = self.waiter() else {
            return true;
        };
        let Some(mut set) = self.set.lock() else {
            return true;
        };
        !set.ready.is_empty()
            || set.links.have_ready(waiter)
            || self.served.load(Acquire) && set.links.have_told_the_service()
    }

    /// Moves what peers have put into the ready queues to the set's list. Returns true if links were skipped that may
    /// have data, and that the kernel's set would not report.
    fn sweep(&'static self, set: &mut Set, of: Sweep) -> bool {
        let Some(waiter) = self.waiter() else { return false };
        let mut come = std::mem::take(&mut set.come);
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
        for link in &set.links.near {
            drain(link);
        }
        let (mut left, mut next, mut spoke) = (usize::MAX, set.links.next, std::mem::take(&mut set.links.spoke));
        if of == Sweep::Again {
            for link in &spoke {
                link.progress();
                drain(link);
            }
        } else {
            let are_many = set.links.far.len() > MANY;
            for (at, far) in set.links.far_in_turn() {
                let is_left_out = are_many && of != Sweep::Every && far.is_told();
                if is_left_out {
                    // Other threads may have taken in its completions.
                    if far.news.is_queued(waiter) && drain(far.link) {
                        spoke.push(far.link);
                    }
                } else if left > 0 {
                    left -= 1;
                    next = at + 1;
                    far.link.progress();
                    if drain(far.link) {
                        spoke.push(far.link);
                        left = if of == Sweep::Some { left.min(MANY) } else { left };
                    }
                }
            }
        }
        set.links.next = next;
        set.links.spoke = spoke;
        // A queue does not keep an order, and each link has its own. The kernel's list is in the order of arrival.
        come.sort_unstable();
        for (_, index) in come.drain(..) {
            set.enqueue(index);
        }
        set.come = come;
        left == 0
    }

    /// Prepares a sleep: completions on links to other hosts wake this thread itself, or one that sleeps on another
    /// set. Their descriptors are in the kernel's set from the first such sleep on. `None` if there are no such links,
    /// or the service thread handles their completions.
    fn watch_links(&'static self) -> Option<Asleep> {
        if !self.set.lock()?.links.are_to_wake() {
            return None;
        }
        self.watch.enter();
        let asleep = Asleep {
            set: self,
            has_left: AtomicBool::new(false),
        };
        // Read after that: the service thread, if it begins to handle a link's completions now, sees that a thread
        // sleeps.
        let taken_back = Library::get().service.taken_back.look();
        if let (Some(mut set), Some(kernel_fd)) = (self.set.lock(), self.kernel_fd()) {
            let key = Key(self.key.load(Relaxed));
            set.links.watch(kernel_fd, key, &self.watch, taken_back);
        }
        Some(asleep)
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
    /// its event without knowing which link it was.
    fn arm_for_others(&'static self) {
        if let Some(set) = self.set.lock() {
            set.links.far.iter().for_each(|far| far.remote.arm_for_others());
        }
    }

    /// Removes library fds from a kernel result, for a thread that has not slept and need not check again. A ring that
    /// it has consumed is passed on to a sleeping thread. Returns the number of entries left.
    fn after_look(&'static self, visit: &Visit, events: *mut libc::epoll_event, n: c_int) -> c_int {
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
    fn after_sleep(&'static self, events: *mut libc::epoll_event, n: c_int, max: c_int) -> c_int {
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
            time::sleep(OUT_OF_THE_WAY);
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
        // In this order: if a ring of the new epoch is consumed here, its reason is seen below.
        waiters.quiet(waiter);
        if self.is_ready() {
            waiters.ring(waiter);
        }
    }
}

/// Counts a thread as asleep on a set with links to other hosts, until it is dropped.
struct Asleep {
    set: &'static Epoll,
    /// The thread is not counted any more; read by the thread's own signal handlers too.
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

    /// Leaves this thread's completions to others: a signal handler runs above the sleep, for any time.
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

/// A wait on a set: keeps its set, even if the fd is closed or reused meanwhile. `notify/call` does this for a
/// connection.
///
/// A wait that has found no event yet may begin again on the file that the fd stands for by then. From its first sleep
/// or spin on, it holds the set, and makes the kernel's call on a private fd.
struct Visit {
    set: &'static Epoll,
    fd: c_int,
    generation: u32,
    is_inside: bool,
    /// A check of the kernel's set has reported links to other hosts.
    is_told: Cell<bool>,
}

impl Visit {
    /// Records that a wait on `fd` begins; the table has just returned `set` for it.
    fn new(set: &'static Epoll, fd: c_int) -> Self {
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
    fn is_here(&self) -> bool {
        self.is_inside || self.is_named()
    }

    fn is_named(&self) -> bool {
        matches!(table::lookup(self.fd), Entry::Epoll(e) if std::ptr::eq(e, self.set))
            && self.set.generation.load(Relaxed) == self.generation
    }

    /// Holds the set from now on: the wait is about to spin or sleep. Returns false if the fd stands for another file
    /// by now.
    fn enter(&mut self) -> bool {
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
    fn stay(&mut self) {
        if !self.is_inside {
            self.set.inside.enter();
            self.is_inside = true;
        }
    }

    /// Returns the fd for the kernel's call.
    fn number(&self) -> c_int {
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
            let errno = errno::get();
            self.leave();
            errno::set(errno);
        }
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
