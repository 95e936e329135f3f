//! poll() and select() over two kinds of fds: those that the kernel reports on, and TCP sockets that the library
//! reports on, because they are on a link or may move there.
//!
//! The library's sockets are left out of the array that the kernel gets; `polling/readiness` checks them. In their
//! place the kernel's array has a *bell*, an fd of the library by which peers and other threads wake the sleeping
//! thread. For links to other hosts it may also have completion descriptors. Of all threads that sleep for such a link,
//! one *polls* its descriptor, and the others *stand by*: the polling thread wakes them.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use libc::{nfds_t, pollfd};
use rdmasock_core::fabric::waiter::{Slots, WaiterId};
use rdmasock_core::os::{kernel, thread};
use rdmasock_core::scratch;
use rdmasock_core::stats::Call;
use smallvec::SmallVec;

use crate::config::spin::{Peers, Spinner};
use crate::notify::table::{self, Entry, Token};
use crate::notify::wait::{Record, Sleeper, prefer_tcp};
use crate::notify::{call, epoll::ALWAYS};
use crate::objects::library::Library;
use crate::objects::link::{Link, Poller, StandBy, Turn};
use crate::objects::socket::{Socket, Stage};
use crate::objects::waiters::Kind;
use crate::polling::readiness::{self, Arm};
use crate::signals::{handler, jump::within};
use crate::sys::{errno, points::point, time::Timeout};

static SPINNER: Spinner = Spinner::new();

/// The number of entries, including the bell's, that need no heap memory.
const FEW: usize = 9;
/// The longest sleep of a thread that has got no waiter, ns. No peer can wake the thread, so it checks at intervals.
const WITHOUT_WAITER: u64 = 1_000_000;
type Tokens = SmallVec<[Token; FEW]>;
type Entries = SmallVec<[pollfd; FEW]>;

/// Returns an entry for poll() that has no result yet.
fn entry(fd: c_int, events: i16) -> pollfd {
    pollfd { fd, events, revents: 0 }
}

/// Whether the library reports on this fd, or may begin to during the call.
fn is_ours(fd: c_int) -> bool {
    match table::lookup(fd) {
        Entry::Socket(socket) => socket.promotion.stage() != Stage::Plain,
        Entry::Epoll(set) => {
            // From now on the set's kernel object is readable while a socket is ready that the library reports. This
            // also holds if the library takes over the first socket of the set during the wait.
            within(|| set.on_nested());
            set.is_active()
        }
        _ => false,
    }
}

/// Whether the library reports on an fd in the array, or may begin to during the call.
///
/// # Safety
/// `fds` is null or has `count` entries.
#[inline]
pub(crate) unsafe fn has_ours(fds: *const pollfd, count: nfds_t) -> bool {
    // SAFETY: `fds` is not null (`is_plausible`), so it has `count` entries by the contract, and `i` is below that.
    crate::sys::iov::is_plausible(fds) && (0..count as usize).any(|i| is_ours(unsafe { (*fds.add(i)).fd }))
}

/// libc's own poll() for these arguments (fds, their number, time-out), with the program's signal mask.
type Real<'a> = &'a dyn Fn(*mut pollfd, nfds_t, Timeout) -> c_int;

/// Carries out poll() and its kin. Returns what poll() returns, and sets errno.
#[inline(never)]
pub(crate) fn poll(set: &mut [pollfd], timeout: Timeout, real: Real<'_>) -> c_int {
    for p in set.iter() {
        if let Some(socket) = table::socket(p.fd) {
            socket.blocking.set_polled();
            crate::notify::fork::reclaim(socket);
        }
    }
    if Library::current().is_none() && Library::ensure().is_none() {
        // This process is a fork child without an instance, and has no memory or fds for one. So none of its sockets is
        // on a link.
        return real(set.as_mut_ptr(), set.len() as nfds_t, timeout);
    }
    let deadline = timeout.deadline();
    let (mut copy, mut tokens) = (Entries::new(), Tokens::new());
    if copy.try_reserve(set.len() + 1).is_err() || tokens.try_reserve(set.len()).is_err() {
        return errno::fail(libc::ENOMEM);
    }
    let handlers = thread::current().handlers();
    // A token identifies the file behind an fd. As in the kernel, the files are looked up when the call begins, and
    // again when an fd is ready or the time is over. A file that gets one of the fds meanwhile does not concern the
    // call.
    look_up(set, &mut tokens);
    let mut spun = false;
    let mut is_last = deadline.is_zero();
    let mut kept = Vec::new();
    loop {
        // First decides which entries the kernel reports on, then checks the sockets that the library reports on. If
        // the library takes over a socket in between, `merge` sees that the entry has moved.
        copy.clear();
        copy.extend(set.iter().zip(&tokens).map(|(p, token)| {
            let is_kernels = !is_watched(p.fd) && table::token(p.fd) == *token;
            entry(if is_kernels { p.fd } else { -1 }, p.events)
        }));
        point!("poll: it is seen what is the kernel's");
        let ours = evaluate(set, &tokens);
        let is_far = |p: &pollfd| table::socket(p.fd).and_then(Socket::link).is_some_and(Link::is_remote);
        // The array is searched for links to other hosts only if the thread may spin.
        let peers = Peers::new(spun || ours > 0 || set.iter().any(is_far));
        let spin = if spun { 0 } else { SPINNER.bound(peers) };
        if ours > 0 || is_last || spin > 0 {
            if copy.iter().any(|p| p.fd >= 0) {
                let r = real(copy.as_mut_ptr(), copy.len() as nfds_t, Timeout::ZERO);
                if r < 0 {
                    return r;
                }
            }
            match merge(set, &copy, &tokens) {
                None => continue,
                Some(ready) if ready > 0 || is_last => return ready,
                Some(_) => {}
            }
            spun = true;
            if SPINNER.spin(spin, || evaluate(set, &tokens) > 0) {
                continue;
            }
        }
        let waiters = &Library::get().waiters;
        let mut room = SmallVec::<[(u32, Sleeper); FEW]>::new();
        let has_memory = room.try_reserve(set.len()).is_ok();
        let lease = has_memory.then(|| waiters.acquire(Kind::Polling)).flatten().map(Lease);
        // Without memory or a waiter, only the kernel can wake the thread. So the connections go to TCP for good. Until
        // all of them are on TCP, the thread checks at intervals.
        let is_woken = lease.is_some() || stay_on_tcp(set);
        // Declared after the lease of the waiter, and so dropped before it. A dropped sleeper is removed from its
        // socket's list by the id of the waiter, which the waiter's next owner may have put into the same list.
        let mut sleepers = room;
        // Decides which completion descriptors this thread polls, before the sleepers are added. To arm a descriptor
        // polls its completions once more, which would ring this thread's own bell.
        let mut pollers = std::mem::take(&mut kept);
        let mut standing_by = Vec::new();
        if let Some(lease) = &lease {
            standing_by = take_turns(set, lease.0, &mut pollers);
            for (p, token) in set.iter().zip(&tokens) {
                if let Some(socket) = table::socket(p.fd).filter(|s| s.is_watched())
                    && table::token(p.fd) == *token
                {
                    let data = p.events & (libc::POLLIN | libc::POLLRDNORM | libc::POLLRDHUP | libc::POLLPRI) != 0;
                    let space = p.events & (libc::POLLOUT | libc::POLLWRNORM) != 0;
                    let sleeper = Sleeper::new(socket, lease.0, data, space);
                    sleepers.push((u32::from(p.events as u16), sleeper));
                }
            }
            point!("poll: sleeps on what is ours");
            lease.look_on(&copy);
        }
        if evaluate(set, &tokens) > 0 {
            continue;
        }
        let mut entries = set.iter().zip(&copy).zip(&tokens);
        if entries.any(|((p, c), token)| has_moved(p, c, *token)) {
            spun = false;
            continue;
        }
        point!("poll: is about to sleep");
        // If a signal handler has run since the call began, the call checks once more and then fails with EINTR, as in
        // the kernel.
        let is_interrupted = thread::current().handlers() != handlers;
        let left = match deadline.left() {
            _ if is_interrupted => Timeout::ZERO,
            left if is_woken => left,
            left => left.at_most(WITHOUT_WAITER),
        };
        let waiter = lease.as_ref().map(|lease| lease.0);
        let bell = waiter
            .and_then(|waiter| waiters.doorbell(waiter))
            .map(|d| d.as_raw_fd());
        let completions = pollers.iter().map(|poller| poller.fd().as_raw_fd());
        seat(&mut copy, bell.into_iter().chain(completions));
        let asleep = waiter.filter(|_| !sleepers.is_empty());
        let record = asleep.map(|waiter| Record::begin(waiter, Call::Poll, None, 0));
        let hand_over = || {
            pollers.iter().for_each(Poller::leave);
            waiter.into_iter().for_each(|waiter| waiters.ring(waiter));
        };
        let r = handler::on_duty(&hand_over, || real(copy.as_mut_ptr(), copy.len() as nfds_t, left));
        let error = errno::get();
        point!("poll: is awake");
        drop(record);
        // The sleepers hold their connections, so the connections can be checked even if their fds are closed.
        let is_there = sleepers
            .iter()
            .any(|(events, sleeper)| readiness::evaluate(sleeper.socket, *events, Arm::No) & (events | ALWAYS) != 0);
        drop(sleepers);
        let is_rung = |c: &pollfd| Some(c.fd) == bell && c.revents != 0;
        let rung = waiter.filter(|_| copy.iter().any(is_rung));
        unseat(&mut copy, set);
        point!("poll: is not told any more");
        if let Some(waiter) = rung {
            waiters.quiet(waiter);
        }
        if r < 0 {
            errno::set(error);
            return r;
        }
        let is_over = deadline.is_over();
        // If nothing is ready for this call, the sleep was ended by an event for other threads. The thread then sleeps
        // again without a spin.
        spun = !(is_there || is_over || copy.iter().any(|c| c.revents != 0));
        if spun {
            standing_by.into_iter().for_each(StandBy::go_on);
            kept = pollers;
            if is_interrupted {
                return errno::fail(libc::EINTR);
            }
        } else {
            drop((pollers, standing_by));
            let is_same = |(p, token): (&pollfd, &Token)| table::token(p.fd) == *token;
            if set.iter().zip(&tokens).all(is_same) {
                evaluate(set, &tokens);
                if let Some(ready) = merge(set, &copy, &tokens)
                    && (ready > 0 || is_over)
                {
                    return ready;
                }
            }
            look_up(set, &mut tokens);
            is_last = is_over;
        }
    }
}

/// Takes the connections to TCP for good. Returns true if all of them are there, and false if the library may still
/// report on one.
#[cold]
fn stay_on_tcp(set: &[pollfd]) -> bool {
    let sockets = || set.iter().filter_map(|p| table::socket(p.fd));
    let is_there = |s: &Socket| matches!(s.promotion.stage(), Stage::Pinned | Stage::Plain) && !s.is_watched();
    sockets().filter(|s| !is_there(s)).for_each(prefer_tcp);
    sockets().all(is_there)
}

/// Looks up the files behind the fds, and stores their tokens.
fn look_up(set: &[pollfd], tokens: &mut Tokens) {
    tokens.clear();
    let now = crate::sys::time::tick();
    tokens.extend(set.iter().map(|p| {
        // `connection_at` removes the table's entry of an fd that was closed without a hook.
        let _ = call::connection_at(p.fd, now);
        if let Entry::Epoll(set) = table::lookup(p.fd) {
            set.on_nested();
        }
        table::token(p.fd)
    }));
}

/// Decides for each link to another host whether the thread polls its completion descriptor or stands by. `pollers` has
/// the links that the thread polled in its last sleep, if that sleep was ended by an event for other threads. The
/// thread keeps those that it may poll again, and adds further ones. Returns the links where it stands by.
fn take_turns(set: &[pollfd], waiter: WaiterId, pollers: &mut Vec<Poller<'static>>) -> Vec<StandBy<'static>> {
    let mut standing_by: Vec<StandBy<'_>> = Vec::new();
    pollers.retain(Poller::stays);
    for p in set {
        let Some(remote) = table::socket(p.fd).and_then(Socket::link).and_then(Link::remote) else {
            continue;
        };
        let is_this = |one| std::ptr::eq(remote, one);
        if pollers.iter().any(|k| is_this(k.remote)) || standing_by.iter().any(|s| is_this(s.remote)) {
            continue;
        }
        match remote.in_turn(waiter) {
            Turn::Polls(poller) => pollers.push(poller),
            Turn::StandsBy(standby) => standing_by.push(standby),
            Turn::Down => {}
        }
    }
    standing_by
}

/// Adds the thread's bell and completion descriptors to the kernel's array. As far as possible they replace entries
/// that the kernel does not report on, because an array may not be longer than the limit of open files.
fn seat(copy: &mut Entries, fds: impl Iterator<Item = c_int>) {
    for fd in fds {
        let seat = entry(fd, libc::POLLIN);
        match copy.iter_mut().find(|p| p.fd < 0) {
            Some(free) => *free = seat,
            None => copy.push(seat),
        }
    }
}

/// Removes the bell and the completion descriptors, which are not in the program's array.
fn unseat(copy: &mut Entries, set: &[pollfd]) {
    copy.truncate(set.len());
    for (seat, p) in copy.iter_mut().zip(set).filter(|(seat, p)| seat.fd != p.fd) {
        *seat = entry(-1, p.events);
    }
}

struct Lease(WaiterId);

impl Lease {
    /// Publishes which sockets the kernel polls for this thread. If the library begins to report on one of them, it
    /// rings the thread's waiter.
    fn look_on(&self, kernel: &[pollfd]) {
        let sockets = kernel.iter().filter_map(|p| table::socket(p.fd));
        let slots = sockets.fold(Slots::default(), |slots, socket| slots.with(socket.slot));
        if !slots.is_empty() {
            Library::get().waiters.onlookers.enter(self.0.0, slots);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let waiters = &Library::get().waiters;
        waiters.onlookers.leave(self.0.0);
        waiters.release(self.0);
    }
}

fn is_watched(fd: c_int) -> bool {
    table::socket(fd).is_some_and(Socket::is_watched)
}

/// Sets `revents` of the entries that the library reports on. Returns how many are ready.
fn evaluate(set: &mut [pollfd], tokens: &[Token]) -> c_int {
    let mut ready = 0;
    for (p, token) in set.iter_mut().zip(tokens) {
        p.revents = 0;
        match table::lookup(p.fd) {
            _ if table::token(p.fd) != *token => {}
            Entry::Socket(socket) if socket.is_watched() => {
                let events = p.events as u16 as u32;
                p.revents = (readiness::evaluate(socket, events, Arm::No) & (events | ALWAYS)) as i16;
            }
            Entry::Epoll(epoll) if p.events & libc::POLLIN != 0 && epoll.is_ready() => p.revents = libc::POLLIN,
            _ => {}
        }
        ready += c_int::from(p.revents != 0);
    }
    ready
}

/// Whether the kernel polls an fd that it should leave out, or leaves out one that it should poll. `entry` is the
/// program's entry, and `kernel` is the entry that the kernel got for it. The library may have begun or ceased to
/// report on the socket since. An fd that stands for another file since the call began should be left out, and is not
/// reported.
fn has_moved(entry: &pollfd, kernel: &pollfd, token: Token) -> bool {
    let is_same = table::token(entry.fd) == token;
    let is_ours = is_watched(entry.fd);
    entry.fd >= 0 && (kernel.fd >= 0 && (is_ours || !is_same) || kernel.fd < 0 && is_same && !is_ours)
}

/// Adds the kernel's results to `set`. Returns how many entries are ready. `None` if an entry has moved (`has_moved`),
/// so that possibly neither the kernel nor the library has checked it.
fn merge(set: &mut [pollfd], kernel: &[pollfd], tokens: &[Token]) -> Option<c_int> {
    let mut ready = 0;
    for ((p, k), token) in set.iter_mut().zip(kernel).zip(tokens) {
        if has_moved(p, k, *token) {
            return None;
        }
        if k.fd >= 0 {
            p.revents |= k.revents;
            if k.revents & libc::POLLHUP != 0 && table::socket(p.fd).is_some_and(|s| s.has_untold()) {
                p.revents |= libc::POLLERR;
            }
        }
        ready += c_int::from(p.revents != 0);
    }
    Some(ready)
}

/// Returns how many fds select() has to check if the program passes `count`. The kernel checks no fd beyond the
/// process's fd table, so the program's sets may have no bits for such fds. They always have bits for fds below
/// FD_SETSIZE. (The table has 64 or 128 entries at first, and doubles when it grows.)
fn within_table(count: c_int) -> c_int {
    let mut size = libc::FD_SETSIZE as c_int;
    while size < count && is_in_table(size) {
        size *= 2;
    }
    count.min(size)
}

/// Whether the kernel's fd table has an entry for `fd`. If `fd` is not open, select() fails with EBADF only if the
/// table has the entry.
fn is_in_table(fd: c_int) -> bool {
    // SAFETY: the call only asks whether the fd is in use.
    if rustix::io::fcntl_getfd(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }).is_ok() {
        return true;
    }
    // `bits` has whole words, as the kernel reads them. Without memory for it the result is true: then the program's
    // own count is used.
    let Some(mut bits) = scratch::zeroed((fd as usize / 64 + 1) * 8) else {
        return true;
    };
    if let Some(byte) = bits.get_mut(fd as usize / 8) {
        *byte = 1 << (fd % 8);
    }
    let mut none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let (set, time) = (kernel::address(bits.as_mut_ptr()), kernel::address(&raw mut none));
    // SAFETY: the set has a bit for each fd below the count, and both addresses outlive the call.
    let asked = unsafe { kernel::call(libc::SYS_pselect6, [fd as usize + 1, set, 0, 0, time, 0]) };
    asked == Err(rustix::io::Errno::BADF)
}

/// The three sets of a select() call, and its count.
pub(crate) struct Sets {
    pub count: c_int,
    pub read: *mut libc::fd_set,
    pub write: *mut libc::fd_set,
    pub except: *mut libc::fd_set,
}

const READ_EVENTS: i16 = libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND;
const WRITE_EVENTS: i16 = libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND;
/// The poll events for which select() reports an fd as readable, and as writable (select(2), "Correspondence between
/// select and poll").
const READ_READY: i16 = READ_EVENTS | libc::POLLHUP | libc::POLLERR;
const WRITE_READY: i16 = WRITE_EVENTS | libc::POLLERR;

impl Sets {
    fn word(set: *mut libc::fd_set, fd: c_int) -> *mut u64 {
        set.cast::<u64>().wrapping_add(fd as usize / 64)
    }

    unsafe fn has(set: *mut libc::fd_set, fd: c_int) -> bool {
        // SAFETY: the program's set has a bit for every fd below its count, which may be above FD_SETSIZE.
        !set.is_null() && unsafe { *Self::word(set, fd) } >> (fd % 64) & 1 != 0
    }

    /// Returns the sets, each with the poll events that it asks for and those that it reports.
    fn all(&self) -> [(*mut libc::fd_set, i16, i16); 3] {
        [
            (self.read, READ_EVENTS, READ_READY),
            (self.write, WRITE_EVENTS, WRITE_READY),
            (self.except, libc::POLLPRI, libc::POLLPRI),
        ]
    }

    /// Returns the poll events that the sets ask for of an fd below the count.
    unsafe fn asked(&self, fd: c_int) -> i16 {
        // SAFETY: the callers pass an fd below the count, for which each set is null or has a bit.
        let asks = self
            .all()
            .into_iter()
            .filter(|(set, ..)| unsafe { Self::has(*set, fd) });
        asks.fold(0, |events, (_, asked, _)| events | asked)
    }

    /// Whether the library reports on an fd in the sets, or may begin to during the call.
    ///
    /// # Safety
    /// The sets are null or hold `count` bits.
    pub(crate) unsafe fn has_ours(&self) -> bool {
        // The program's sets may be shorter than its count says, because the kernel does not read beyond its fd table.
        let end = self.count.min(table::highest() + 1);
        // SAFETY: `fd` is below the count, so the sets are null or have its bit, by the contract.
        (0..end.max(0)).any(|fd| unsafe { self.asked(fd) } != 0 && is_ours(fd))
    }

    /// Carries out select() by way of [`poll`].
    ///
    /// # Safety
    /// The sets are null or hold `count` bits.
    pub(crate) unsafe fn select(&self, timeout: Timeout, real: Real<'_>) -> c_int {
        let mut set = Vec::new();
        for fd in 0..within_table(self.count) {
            // SAFETY: `fd` is below the count, so the sets are null or have its bit, by the contract.
            let events = unsafe { self.asked(fd) };
            if events != 0 {
                if set.try_reserve(1).is_err() {
                    return errno::fail(libc::ENOMEM);
                }
                set.push(entry(fd, events));
            }
        }
        let n = poll(&mut set, timeout, real);
        if n < 0 {
            return n;
        }
        if set.iter().any(|p| p.revents & libc::POLLNVAL != 0) {
            return errno::fail(libc::EBADF);
        }
        let mut bits = 0;
        for p in &set {
            for (to, _, reports) in self.all() {
                // SAFETY: each fd in `set` is below the count, so the sets are null or have its bit, by the contract.
                match unsafe { Self::has(to, p.fd) } {
                    true if p.revents & reports != 0 => bits += 1,
                    // SAFETY: as above, and `has` has found this set's bit.
                    true => unsafe { *Self::word(to, p.fd) &= !(1 << (p.fd % 64)) },
                    false => {}
                }
            }
        }
        bits
    }
}
