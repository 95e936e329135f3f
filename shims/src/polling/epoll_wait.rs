//! epoll_wait(): reports what is ready in the kernel's epoll object (the *kernel's set*) and in the library's own list
//! of ready sockets, with one sleep for both. `notify/epoll` has the object of an epoll set, and epoll_ctl().
//!
//! Words of this file:
//!
//! - *item*: a socket in the set, under one fd. An item is *taken over* while the library reports it: the kernel's set
//!   does not have it then.
//! - *active set*: a set with an item that is taken over, or was. It stays active until it is closed. A wait on any
//!   other set is in the kernel alone.
//! - *list*: the indices of the items that may be ready. Peers put entries into the ready queues of their links. A
//!   *sweep* moves these entries to the list, and a *harvest* reports the list's ready items.
//! - *young item*: an item that is taken over, and whose socket may still receive by TCP, for its promotion goes on.
//! - *bell*: an fd of the library in the kernel's set. To *ring* makes it readable, which wakes one thread that sleeps
//!   on the kernel's set. Peers ring only while the set's *sleep flag* is raised.
//! - *nested set*: a set that another set holds, or that poll() or select() was called on. Its kernel's set is kept
//!   readable while an item is ready.
//!
//! The bell and other fds of the library are removed from the results of the kernel's set.

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

/// How long results may come from the library's list alone before the kernel's set is checked again, in
/// [cycles](rdmasock_core::cycles), some 20 us. Short enough not to be noticed, long enough that a busy program makes
/// few system calls.
const KERNEL_EVERY: u64 = 1 << 16;
/// The longest sleep of a thread on a set that has no bell, ns. No peer can wake the thread, so it checks at intervals.
const WITHOUT_DOORBELL: u64 = 1_000_000;
/// The most rounds in which one harvest checks for newly queued items. Without a bound, a harvest would never end on a
/// set in which each round finds new items.
const ROUNDS: usize = 4;
/// Bounds how many links to other hosts one harvest checks. To check such a link is to poll its completions.
///
/// A set with at most this many such links has all of them checked. In a set with more, a harvest skips the links whose
/// completions the kernel's set reports. It checks the other links in turn up to the first that has data, and then this
/// many more. The next harvest begins with the rest. To check all of them for one message each would cost more than the
/// messages. The order between peers on other hosts may change by this, but the network does not preserve that order
/// either.
const MANY: usize = 16;
/// How long a thread sleeps, ns, after the kernel's set has woken it only for a bell, or another library fd, of another
/// process (processes share a set after a fork). That process rings its bell again, and this thread must not take that
/// event too.
const OUT_OF_THE_WAY: i64 = 1_000_000;

/// The kernel's epoll_wait(fd, events, max, time-out), with the program's signal mask.
type Real<'a> = &'a dyn Fn(c_int, *mut libc::epoll_event, c_int, Timeout) -> c_int;

/// The state of one epoll_wait() call of the program: the set, and the result so far.
///
/// If the fd comes to stand for another file before the call has found an event, the call begins again on that file.
/// From its first spin or sleep on an active set, the call *holds* the set: the set's object is not reused before the
/// call returns, even if the program closes the fd. The call then sleeps on a private fd of the set. `notify/call`
/// holds a connection in the same way.
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
    /// How many entries at the front of the result are of sockets that may receive by TCP: first the kernel's entries,
    /// then young items.
    by_tcp: c_int,
    /// What `Epoll::moves` was before this call last checked the kernel's set. If it has changed since, a socket has
    /// moved between the kernel's set and the list, and the result might list it twice.
    moves: u64,
    /// The number of this result, among the results of the set that list items; 0 while this one lists none.
    serial: u64,
}

impl Epoll {
    /// Carries out epoll_wait() and its kin on `fd`. `real` is the kernel's call. Returns what epoll_wait() returns,
    /// and sets errno.
    ///
    /// # Safety
    /// `events` is writable for `max` entries.
    // Not inlined: the forced unwind of pthread_cancel runs the destructor of `wait` in this frame (`hooks` explains
    // it).
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
                by_tcp: 0,
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

    /// Whether an item that is taken over is ready now. For poll(), select() and other sets that hold this one.
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
    /// Whether the library reports the item: it is taken over, not removed, and not disabled by EPOLLONESHOT.
    fn is_reported(&self) -> bool {
        self.taken && !self.disabled && !self.dead
    }

    /// Returns the events that the item's socket is ready for, among those that the program has registered and those
    /// that are always reported.
    fn evaluate(&self, arm: Arm) -> u32 {
        readiness::evaluate(self.socket, self.events, arm) & (self.events | ALWAYS)
    }
}

impl Wait<'_> {
    /// Waits, and returns what epoll_wait() returns. `left` is the time until `deadline`. `None`: no event was found,
    /// and the fd stands for another file by now.
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

    /// Fills the result without a wait: from the library's list, and in the two cases below from the kernel's set.
    /// Returns what epoll_wait() returns; `None` if nothing is ready.
    ///
    /// If `due`, ready entries of the kernel's set are added to a result that has items of the list. If the list's
    /// items had filled the last result, the kernel's set is checked first. So neither of the two starves the other
    /// when the program asks for few events at a time.
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

    /// Spins unless `spun`, then sleeps until the kernel's set or the library's list may have an event. Returns what
    /// epoll_wait() returns; `None` if the caller has to check both again.
    fn rest(&mut self, deadline: Deadline, handlers: u32, spun: &mut bool) -> Option<c_int> {
        let set = self.set;
        if !std::mem::replace(spun, true) {
            let peers = Peers::new(set.set.lock().is_none_or(|set| !set.links.far.is_empty()));
            let bound = set.spinner.bound(peers);
            if bound > 0 {
                // The kernel's set had nothing at the last check. So a reply that comes over a link at once need not
                // wait for another check of the kernel's set.
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
        // The links are armed before the sleep flag is raised. To arm a link polls its completions once more, which
        // rings the bell if the flag is raised. This thread finds what they bring by `has_ready`, and needs no ring.
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
        // If a signal handler has run since the call began, the call checks once more and then fails with EINTR, as in
        // the kernel.
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
            // An item may have become ready just before the deadline.
            self.harvest(true);
            return Some(self.filled);
        }
        *spun = false;
        None
    }

    /// Ends a wait in which the kernel's set has just reported `n` entries. If `n` is above 0, appends ready items of
    /// the list: a peer may have sent on a link before it sent what the kernel reports, and the program must not get
    /// the later of the two alone. Returns what epoll_wait() returns.
    fn with_ours(&mut self, n: c_int) -> c_int {
        if n <= 0 {
            return n;
        }
        if self.filled < self.max && self.set.is_active() {
            self.by_tcp = self.filled;
            self.harvest(false);
        }
        self.filled
    }

    /// Completes a result that has only items of the list, and returns the number of entries. If the result has room,
    /// checks the kernel's set too in three cases. In the first, `look` is true. In the second, the kernel's set has
    /// connections: a peer may have sent on one of them before it sent on the link. In the third, a socket has moved.
    /// Appends what the kernel's set reports, then items that have become ready meanwhile. In the second case, moves
    /// the kernel's entries to the front.
    fn with_kernels(&mut self, look: bool) -> c_int {
        let (set, ours) = (self.set, self.filled);
        if ours == self.max {
            set.full.store(true, Relaxed);
        } else if look || set.is_mixed() || self.has_moved() {
            let n = self.look(Timeout::ZERO);
            if self.has_moved() {
                // A socket may have moved between the kernel's set and the list meanwhile. A result must not list a
                // socket twice, and the kernel's results never do. A program that makes one blocking read for each
                // entry would hang in the second read.
                let all = self.listed();
                let (listed, rest) = all.split_at_mut((ours as usize).min(all.len()));
                self.filled = ours + keep(rest, |data| !listed.iter().any(|e| e.u64 == data)) as c_int;
            }
            if set.is_mixed() {
                // The order of arrival across the kernel's set and the list is unknown. The kernel's entries go first.
                // A peer that uses a link has usually waited for a reply to each request, so its data on the link is
                // the last that it has sent. A peer that sends on a young connection, which is still on TCP, without
                // waiting for a reply, expects that data to be read first.
                self.listed().rotate_left(ours as usize);
                self.by_tcp += self.filled - ours;
            }
            if (n > 0 || self.has_moved()) && self.filled < self.max {
                self.harvest(false);
            }
        }
        self.filled
    }

    /// Waits in the kernel's set for at most `left`, and appends its entries to the result. Returns what epoll_wait()
    /// returns, without the library's fds.
    fn look(&mut self, left: Timeout) -> c_int {
        let n = (self.real)(self.number(), self.free(), self.max - self.filled, left);
        self.set.kernel_quiet.store(n == 0, Relaxed);
        if n <= 0 { n } else { self.take_in(n, false) }
    }

    /// Handles the `n` entries that the kernel has just appended to the result: removes the library's fds, and does
    /// what these ask for. `has_slept`: the kernel's call was a sleep. Returns how many of the `n` entries are left; if
    /// none are, a caller that has slept checks the links itself.
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
            // The array is full, so the entry of the link whose completion has woken this thread may be missing.
            set.arm_for_others();
        }
        if stripped.own && (stripped.kept > 0 || !has_slept) && set.has_ready() {
            // A ring wakes one thread. This thread has consumed a ring and does not sleep again at once, so it rings
            // again for another thread that sleeps on the set.
            set.ring_if_sleeping();
        }
        if has_slept && stripped.foreign && stripped.kept == 0 {
            // The ring was meant for another process that shares the set. `ask_owners` makes that process ring again.
            // Its thread has to get that ring before this thread sleeps on the set again.
            time::sleep(OUT_OF_THE_WAY);
        }
        if !has_slept && self.filled == 0 && !stripped.named.is_none() {
            // The kernel's set has just reported completions of links to other hosts. In a set with more than `MANY`
            // such links the last harvest has not polled these links, so there is one more harvest.
            self.harvest(true);
        }
        self.filled - before
    }

    /// Whether a socket has moved between the kernel's set and the list since this call last checked the kernel's set.
    fn has_moved(&self) -> bool {
        self.set.moves.load(Acquire) != self.moves
    }

    /// Returns the filled entries.
    fn listed(&mut self) -> &mut [libc::epoll_event] {
        // SAFETY: the first `filled` entries are filled, and belong to this call alone.
        unsafe { std::slice::from_raw_parts_mut(self.events, self.filled as usize) }
    }

    /// Returns the place behind the filled entries.
    fn free(&self) -> *mut libc::epoll_event {
        self.events.wrapping_add(self.filled as usize)
    }

    /// If the list has one socket alone, polls that socket for a moment before its peer is asked for a wake-up. The
    /// socket was reported last, and is likely to be ready next. Without a wake-up four cache lines need not move
    /// between the two sides. Returns true if the result lists an item.
    fn await_last(&mut self) -> bool {
        let set = self.set;
        !set.nested.load(Relaxed)
            && set.kernel_quiet.load(Relaxed)
            && set.spinner.pays()
            && spin::glance(|| self.look_at_last())
            && self.filled > 0
    }

    /// Checks the only item in the list, if its socket is on a link within this host. If the socket is ready, reports
    /// the item and keeps it in the list. Returns false if the socket is not ready: the caller polls again. Returns
    /// true if the item was reported, and also if there is no such item or another link has data: then `harvest` has to
    /// check the list.
    fn look_at_last(&mut self) -> bool {
        let (Some(waiter), Some(mut guard)) = (self.set.waiter(), self.set.set.lock()) else {
            return true;
        };
        // The fd is checked under the set's lock: a closed set's object cannot become another set while the lock is
        // held.
        if guard.ready.len() != 1 || !guard.young.is_empty() || !self.is_here() || guard.links.have_ready(waiter) {
            return true;
        }
        let set = &mut *guard;
        let item = set.ready.front().and_then(|index| set.items.get_mut(*index));
        let Some(item) = item.filter(|item| item.is_reported() && item.socket.link().is_some_and(|l| !l.is_remote()))
        else {
            return true;
        };
        let mask = item.evaluate(Arm::No);
        // `harvest` has to report an edge-triggered item, which is armed again then, and a one-shot item, which is
        // disabled.
        if mask != 0 && item.events & (ET | ONESHOT) == 0 {
            self.list(item, mask, &mut set.results);
        }
        mask != 0
    }

    /// Appends the ready items of the list to the result. If `after_rest`, first finds out for each ready item whether
    /// an fd still stands for its socket (`Numbers::is_alive`, which asks the kernel once a tick at most). A socket
    /// that was closed without a hook is then not reported, as the kernel's set would not report it.
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
            if self.filled > 0 && !set.young.is_empty() {
                // A peer may have sent to a young item, and then to an item that is listed.
                self.report_young(set, after_rest);
            }
            let seen = set.ready.len();
            if self.filled == self.max {
                break;
            } else if self.filled > before {
                // A peer may have sent to one socket after that socket was found empty, and then to a second socket,
                // which was found ready. The program must not get the later data alone. So the links that had data are
                // swept again.
                epoll.sweep(set, Sweep::Again);
            } else if std::mem::take(&mut is_partial) {
                // The links that had data have no ready item after all, so the skipped links are swept too.
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
            // The result has no room for the items that are left. Another thread that sleeps on this set can report
            // them.
            epoll.ring_if_sleeping();
        }
    }

    /// Checks each item of the list once, while the result has room. An item that stays in the list goes to its end. If
    /// the list has a young item, all young ones are checked first.
    fn report(&mut self, set: &mut Set, after_rest: bool) {
        let mut has_young = !set.young.is_empty();
        for _ in 0..set.ready.len() {
            if self.filled == self.max {
                break;
            }
            let Some(index) = set.ready.pop_front() else { break };
            if has_young && set.items.get(index).is_some_and(|item| item.young) {
                has_young = false;
                self.report_young(set, after_rest);
                if self.filled == self.max {
                    set.ready.push_front(index);
                    break;
                }
            }
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

    /// Checks the young items, the youngest first. Those for which the result has no room stay in the list.
    #[cold]
    #[inline(never)]
    fn report_young(&mut self, set: &mut Set, after_rest: bool) {
        for _ in 0..set.young.len() {
            let Some(index) = set.young.pop_back() else { break };
            let Some(item) = set.items.get_mut(index).filter(|item| item.young) else {
                continue;
            };
            let has_room = self.filled < self.max;
            let stays = item.is_reported() && (!has_room || self.check_item(item, after_rest, &mut set.results));
            item.young = item.is_young();
            if item.young {
                set.young.push_front(index);
            }
            if stays {
                set.enqueue(index);
            }
        }
    }

    /// Reports an item if it is ready. Returns true if the item stays in the list.
    fn check_item(&mut self, item: &mut Item, after_rest: bool, results: &mut u64) -> bool {
        if item.listed_in == self.serial && self.serial > 0 || self.has_moved() && self.has(item.data) {
            // A result must not list a socket twice: the program may have closed the socket before it comes to the
            // second entry. Either this result has listed the item, which is ready again since. Or the item was taken
            // over a moment ago, and the kernel has reported its socket just before that. The next result lists the
            // item.
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
            // The fd was closed without a hook. The kernel's set would not have the socket any more, so it is not
            // reported.
            Library::get().service.submit(Command::Lost(item.socket.into()));
            return false;
        }
        self.list(item, mask, results);
        item.disabled = item.events & ONESHOT != 0;
        !is_edge && !item.disabled
    }

    /// Writes the next entry of the program's array; the caller has checked that there is room. `results` is the set's
    /// count of results that list items.
    fn list(&mut self, item: &mut Item, events: u32, results: &mut u64) {
        if self.serial == 0 {
            *results += 1;
            self.serial = *results;
        }
        item.listed_in = self.serial;
        // SAFETY: fewer than `max` entries are filled, and `max` are writable by the contract of `Epoll::wait`.
        unsafe { self.free().write(libc::epoll_event { events, u64: item.data }) };
        self.filled += 1;
        let at = self.by_tcp as usize;
        if item.young
            && let Some(rest) = self.listed().get_mut(at..)
        {
            rest.rotate_right(1);
            self.by_tcp += 1;
        }
    }

    /// Whether an entry of the result has this `data` of the program.
    fn has(&self, data: u64) -> bool {
        // SAFETY: the first `filled` entries are filled.
        (0..self.filled as usize).any(|at| unsafe { (*self.events.add(at)).u64 } == data)
    }
}

// A wait in the kernel's set alone, on a set that is not active. An item may be taken over at any moment of the wait,
// and the kernel does not wake the thread for bytes on a link. So the set's *gate* counts the threads in such waits.
// The thread that takes over the first item closes the gate (`activate`). If threads are inside, it raises the set's
// sleep flag on their behalf, so that peers ring. Then it rings once itself. A ring wakes one thread, and each thread
// that leaves a closed gate rings for the next one.

impl Wait<'_> {
    /// Waits in the kernel alone. Returns what epoll_wait() returns. `None` if the set is active or the fd stands for
    /// another file: the caller continues with the library's list, or begins again.
    fn wait_plain(&mut self, deadline: Deadline, mut left: Timeout) -> Option<c_int> {
        let set = self.set;
        if set.inherited.load(Acquire) && set.inherited.swap(false, AcqRel) {
            // The process is a fork child. Sockets that it has inherited may be on its parent's links. The parent has
            // to take these back to TCP before the child uses them.
            socket::in_use().for_each(reclaim);
        }
        loop {
            point!("epoll alone: the set is not active");
            // `enter` counts this thread in, then reads whether the gate is closed; `is_here` reads whether the fd
            // still stands for the set. The threads that close the gate (`activate`) or the last fd (`release`) publish
            // that, then read the count. So this thread sees the change, or the other thread sees this one inside the
            // gate.
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
                // The kernel's wait was on this set. So the call goes on with this set, even if the fd stands for
                // another file by now.
                self.hold();
            }
            point!("epoll alone: holds the set");
            let others = set.leave_plain();
            if others && set.is_active() {
                // A ring wakes one thread. The next thread inside the gate has to leave the kernel's wait too.
                set.ring();
            }
            // `activate` adds the bell to the kernel's set before the set counts as active, so the bell may be among
            // the entries.
            let kept = if n < 0 { n } else { self.take_in(n, !left.is_zero()) };
            errno::set(errno);
            let is_active = set.is_active();
            if kept != 0 || left.is_zero() || n == 0 && !is_active {
                return Some(kept);
            }
            // All entries were fds of the library. If the set is still not active, the thread waits in the kernel alone
            // again.
            if is_active || !self.is_here() {
                return None;
            }
            left = deadline.left();
        }
    }

    /// Whether the call may go on with its set: the call holds the set, or the fd still stands for the set, by the fd
    /// table.
    #[inline]
    fn is_here(&self) -> bool {
        self.is_inside || self.is_named()
    }

    fn is_named(&self) -> bool {
        matches!(table::lookup(self.fd), Entry::Epoll(e) if std::ptr::eq(e, self.set))
            && self.set.generation.load(Relaxed) == self.generation
    }

    /// Makes the call hold the set, if it does not yet.
    fn hold(&mut self) {
        if !std::mem::replace(&mut self.is_inside, true) {
            self.set.inside.enter();
        }
    }

    /// Makes the call hold the set, because it is about to spin or sleep. Returns false if the call did not hold the
    /// set before, and the fd stands for another file by now.
    fn enter(&mut self) -> bool {
        let was_inside = self.is_inside;
        // The call holds the set first, and reads the fd table afterwards. `Epoll::release` does it the other way
        // round: it runs once the table has lost the fd, and then checks for calls that hold the set. So one of the two
        // sees the other.
        self.hold();
        was_inside || self.is_named()
    }

    /// Returns the fd for the kernel's call: a private one if the call holds the set and there is one, else the
    /// program's.
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
        // When the set becomes active, its sleep flag is raised on behalf of the threads inside the gate. The last of
        // them to leave lowers the flag. `activate` lowers it itself if no thread is inside any more.
        if !others && self.plain_sleeps.look() {
            self.end_plain_sleep(waiter);
        }
        self.end_if_left();
        others
    }
}

/// Arguments for a call of futex(2) that writes no new value and wakes no thread. The kernel adds 0 to the second word,
/// and so checks whether that word can be written. `ADD_NOTHING` is FUTEX_OP(ADD, 0, LT, 0) of <linux/futex.h>, and
/// `WAKE_OP` is FUTEX_WAKE_OP with FUTEX_PRIVATE_FLAG.
const ADD_NOTHING: usize = 1 << 28 | 2 << 24;
const WAKE_OP: usize = 5 | 128;

/// Whether the first entry of the program's array can be written. If not, the kernel's own call returns EFAULT once
/// there is an event. A store by the library would raise SIGSEGV instead. If the program's handler jumps out of the
/// signal, the jump waits for the end of the library's code (`signals/jump`), and the store would raise SIGSEGV again
/// and again.
///
/// Asks the kernel only if the array is not the one that the thread has passed last.
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

// The links that a wait checks, and by which it is woken. Links within this host are checked each time. In a set with
// more than `MANY` links to other hosts, a wait checks only those whose completions the kernel's set does not report.

/// Which links to other hosts a sweep checks. Links within this host are always checked.
#[derive(Clone, Copy, PartialEq)]
enum Sweep {
    /// In a set with more than `MANY` links to other hosts: those whose completions the kernel's set would not report.
    /// In any other set: all links.
    Untold,
    /// Links of [`Sweep::Untold`], until [`MANY`] have been checked after the first with data.
    Some,
    /// Links that had data in an earlier sweep of the same harvest.
    Again,
}

impl Links {
    /// Whether the ready queue of any link has an entry for `waiter`. If a link to another host has one, the next check
    /// begins at that link.
    fn have_ready(&mut self, waiter: WaiterId) -> bool {
        if self.near.iter().any(|link| link.has_ready(waiter)) {
            return true;
        }
        let are_many = self.far.len() > MANY;
        let is_ready = |far: &Far| match are_many && far.is_told() {
            // The kernel's set reports the next completion of this link, so the completions are not polled here. Only
            // entries that other threads have already moved into the ready queue count.
            true => far.news.is_queued(waiter),
            false => far.link.has_ready(waiter),
        };
        let found = in_turn(&self.far, self.next).find(|(_, far)| is_ready(far));
        let found = found.map(|(at, _)| at);
        self.next = found.unwrap_or(self.next);
        found.is_some()
    }

    /// Whether any link has an entry in the ready queue of the service thread, which then notifies the set
    /// (`Epoll::served`).
    fn have_told_the_service(&self) -> bool {
        let far = self.far.iter().map(|far| far.link);
        self.near.iter().copied().chain(far).any(|link| link.has_ready(SERVICE))
    }
}

/// Returns the links to other hosts with their indices, beginning with index `next`.
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

    /// Moves the entries of the links' ready queues for this set to the set's list. `of`: which links to other hosts
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
                    // Another thread may have polled this link's completions, and moved entries into the ready queue.
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
        // Sorts the entries by their times of arrival, as the kernel's list is sorted. A ready queue keeps no order,
        // and each link has its own queue.
        come.sort_unstable();
        for (_, index) in come.drain(..) {
            set.enqueue(index);
        }
        set.come = come;
        left == 0
    }

    /// Prepares a sleep on a set with links to other hosts: arms the links, so that their completions make the kernel's
    /// set readable. A completion then wakes this thread, or a thread that sleeps on another set with the same link.
    /// The links' completion descriptors are in the kernel's set from the first such sleep on. `None` if there are no
    /// such links, or if the service thread handles their completions.
    fn watch_links(&'static self) -> Option<Asleep> {
        let mut set = self.set.lock()?;
        if set.links.far.is_empty() || set.links.are_left {
            return None;
        }
        self.watch.enter();
        // `enter` counts this thread as asleep, then `taken_back` is read. A service thread that begins to handle the
        // completions of a link does it the other way round: it changes `taken_back`, then reads the count. So one of
        // the two sees the other.
        let taken_back = Library::get().service.taken_back.look();
        if let Some(kernel_fd) = self.kernel_fd() {
            set.links.watch(kernel_fd, taken_back);
        }
        Some(Asleep {
            set: self,
            has_left: AtomicBool::new(false),
        })
    }

    /// Records that the links that the kernel's set has reported have readable completion descriptors, which have to be
    /// armed again.
    fn on_named(&'static self, named: &Named) {
        if !named.is_none()
            && let Some(set) = self.set.lock()
        {
            let far = set.links.far.iter().filter(|far| named.has(far.slot));
            far.for_each(|far| far.remote.on_readable());
        }
    }

    /// Arms the completion descriptors of the set's links again, if other threads may sleep on them. Once armed, the
    /// descriptor of a link to another host becomes readable at the link's next completion. That wakes one thread, and
    /// the descriptor has to be armed again. This thread may have consumed such an event without learning which link it
    /// belongs to.
    fn arm_for_others(&'static self) {
        if let Some(set) = self.set.lock() {
            set.links.far.iter().for_each(|far| far.remote.arm_for_others());
        }
    }

    /// Prepares for a nested use of the set: another set is about to hold it, or a thread is about to sleep on it in
    /// poll() or select().
    pub(crate) fn on_nested(&'static self) {
        // This thread publishes that the set is nested, then reads whether it is active. `activate` publishes that the
        // set is active, then reads whether it is nested. Both are SeqCst, so at least one of the two threads sees the
        // other's change.
        if !self.nested.load(Acquire) && !self.nested.publish(true) {
            if let Some(mut set) = self.set.lock() {
                set.links.leave_to_service();
            }
            if self.is_active() {
                self.show_ready();
            }
        }
    }

    /// Makes the kernel's object of a nested set readable if an item is ready, and else not readable. A ring makes the
    /// object readable until a thread consumes the ring. Each raising of the sleep flag begins a new *epoch* of the
    /// flag, and a peer rings once an epoch at most. So each thread that has taken items from the set, or has consumed
    /// a ring, calls this function, which begins a new epoch.
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
        // First consumes the rings, then checks the items. If this consumes a ring of the new epoch, the check finds
        // the item that the peer has rung for.
        waiters.quiet(waiter);
        if self.is_ready() {
            waiters.ring(waiter);
        }
    }
}

/// Counts a thread as asleep on a set with links to other hosts, until this value is dropped.
struct Asleep {
    set: &'static Epoll,
    /// The thread is not counted any more. The thread's own signal handlers set this too (`hand_over`).
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
