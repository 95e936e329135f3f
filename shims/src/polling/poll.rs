//! poll() and select() over sockets of both kinds.
//!
//! Sockets that the library reports on are taken out of the kernel's set and asked through
//! `ready`; the rest stays in it, together with a doorbell that stands for the former.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use libc::{nfds_t, pollfd};
use rdmasock_core::fabric::asleep::Slots;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::os::{kernel, thread};
use rdmasock_core::stats::Call;
use smallvec::SmallVec;

use crate::config::spin::{Peers, Spinner};
use crate::notify::closing;
use crate::notify::ready;
use crate::notify::table::{self, Entry, Token};
use crate::notify::wait::{Record, Sleeper, prefer_tcp};
use crate::objects::library::Library;
use crate::objects::link::{Link, Poller, StandBy, Turn};
use crate::objects::socket::{Socket, Stage};
use crate::polling::readiness::{self, Arm};
use crate::signals::duty;
use crate::signals::jump::within;
use crate::sys::errno;
use crate::sys::points::point;
use crate::sys::time::Timeout;

/// Reported whether asked for or not.
const ALWAYS: u32 = (libc::POLLERR | libc::POLLHUP) as u32;

static SPINNER: Spinner = Spinner::new();

/// So many entries, and a doorbell's, need no memory.
const FEW: usize = 9;
/// Sleepers of one poll that are kept without a look whether there is memory: less than 1 MiB.
const SLEEPERS: usize = 16_384;
type Tokens = SmallVec<[Token; FEW]>;
type Entries = SmallVec<[pollfd; FEW]>;

/// Whether any number in the set is one that the library may have to say something about.
fn is_ours(fd: c_int) -> bool {
    match table::lookup(fd) {
        Entry::Socket(socket) => socket.promotion.stage() != Stage::Plain,
        Entry::Epoll(set) => {
            // From now on the kernel's object shows what becomes ready, also should the set become active meanwhile.
            within(|| set.on_nested());
            set.is_active()
        }
        _ => false,
    }
}

/// Whether any number in the array is one that the library may have to say something about.
///
/// # Safety
/// `fds` is null or has `count` entries.
#[inline]
pub unsafe fn has_ours(fds: *const pollfd, count: nfds_t) -> bool {
    // SAFETY: by the contract.
    crate::sys::iov::is_plausible(fds) && (0..count as usize).any(|i| is_ours(unsafe { (*fds.add(i)).fd }))
}

/// poll() and its kin. `real(fds, n, timeout)` is libc's own with the program's signal mask.
///
/// # Safety
/// `fds` has `count` entries.
pub unsafe fn poll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: Timeout,
    real: impl Fn(*mut pollfd, nfds_t, Timeout) -> c_int,
) -> c_int {
    if fds.is_null() {
        return real(fds, count, timeout);
    }
    // SAFETY: by the contract, and not null.
    let set = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    poll_slow(set, timeout, &real)
}

#[inline(never)]
fn poll_slow(set: &mut [pollfd], timeout: Timeout, real: &impl Fn(*mut pollfd, nfds_t, Timeout) -> c_int) -> c_int {
    for p in set.iter() {
        if let Some(socket) = table::socket(p.fd) {
            socket.blocking.set_polled();
            crate::notify::reclaim::reclaim(socket);
        }
    }
    if Library::current().is_none() && Library::ensure().is_none() {
        // A fork child that has nothing left to become an instance by, so nothing of its is ours.
        return real(set.as_mut_ptr(), set.len() as nfds_t, timeout);
    }
    let deadline = timeout.deadline();
    let (mut copy, mut tokens) = (Entries::new(), Tokens::new());
    if copy.try_reserve(set.len() + 1).is_err() || tokens.try_reserve(set.len()).is_err() {
        return errno::fail(libc::ENOMEM);
    }
    let handlers = thread::current().handlers();
    // What the numbers stand for. As in the kernel they are looked up when the call begins, and again when something is
    // there or the time is over; what gets a number meanwhile is none of its business.
    look_up(set, &mut tokens);
    let mut spun = false;
    let mut is_last = deadline.is_zero();
    let mut kept = Vec::new();
    loop {
        // What the kernel is to say, and what is ours to say. In this order: what becomes ours in between is seen to
        // have moved.
        copy.clear();
        copy.extend(set.iter().zip(&tokens).map(|(p, token)| {
            let is_kernels = !is_watched(p.fd) && table::token(p.fd) == *token;
            pollfd {
                fd: if is_kernels { p.fd } else { -1 },
                events: p.events,
                revents: 0,
            }
        }));
        point!("poll: it is seen what is the kernel's");
        let ours = evaluate(set, &tokens);
        let n = copy.len() as nfds_t;
        let is_far = |p: &pollfd| table::socket(p.fd).and_then(Socket::link).is_some_and(Link::is_remote);
        // Asked only where it matters.
        let peers = Peers::new(spun || ours > 0 || set.iter().any(is_far));
        let spin = if spun { 0 } else { SPINNER.bound(peers) };
        if ours > 0 || is_last || spin > 0 {
            if copy.iter().any(|p| p.fd >= 0) {
                let r = real(copy.as_mut_ptr(), n, Timeout::ZERO);
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
        let mut sleepers: Vec<(u32, Sleeper)> = Vec::new();
        let has_memory = set.len() <= SLEEPERS || sleepers.try_reserve(set.len()).is_ok();
        let Some(waiter) = has_memory.then(|| waiters.acquire_polling()).flatten() else {
            // Out of waiters or memory: the kernel is to wake the thread. Until all are on TCP it looks every
            // millisecond.
            let left = deadline.left();
            let mut entries = set.iter().zip(&copy).zip(&tokens);
            let is_kernels = stay_on_tcp(set) && !entries.any(|((p, c), token)| has_moved(p, c, *token));
            let step = if is_kernels { left } else { left.at_most(1_000_000) };
            let r = real(copy.as_mut_ptr(), n, step);
            if r < 0 {
                return r;
            }
            if r > 0
                && let Some(ready) = merge(set, &copy, &tokens)
            {
                return ready;
            }
            if thread::current().handlers() != handlers {
                return errno::fail(libc::EINTR);
            }
            look_up(set, &mut tokens);
            spun = false;
            is_last = deadline.is_over();
            continue;
        };
        let lease = Lease(waiter);
        // What completes on links to other hosts wakes this thread itself. First: arming looks at what has come, and
        // would ring the sleeper's bell for it.
        let (pollers, standing_by) = take_turns(set, waiter, std::mem::take(&mut kept));
        sleepers.extend(set.iter().zip(&tokens).filter_map(|(p, token)| {
            let socket = table::socket(p.fd).filter(|s| ready::is_watched(s))?;
            if table::token(p.fd) != *token {
                return None;
            }
            let data = p.events & (libc::POLLIN | libc::POLLRDNORM | libc::POLLRDHUP | libc::POLLPRI) != 0;
            let space = p.events & (libc::POLLOUT | libc::POLLWRNORM) != 0;
            let events = u32::from(p.events as u16);
            Some((events, Sleeper::new(socket, waiter, data, space)))
        }));
        point!("poll: sleeps on what is ours");
        let is_looked_on = lease.look_on(&copy);
        if evaluate(set, &tokens) > 0 {
            continue;
        }
        let mut entries = set.iter().zip(&copy).zip(&tokens);
        if entries.any(|((p, c), token)| has_moved(p, c, *token)) {
            spun = false;
            continue;
        }
        point!("poll: is about to sleep");
        // A signal handler that has run since the call began ends it after a last look, as in the kernel.
        let is_interrupted = thread::current().handlers() != handlers;
        let left = if is_interrupted { Timeout::ZERO } else { deadline.left() };
        // Otherwise nothing rings: the kernel looks up every fd itself.
        let is_told = is_looked_on || !sleepers.is_empty() || copy.iter().any(|p| p.fd < 0);
        let bell = waiters.doorbell(waiter).filter(|_| is_told);
        let bell = bell.map(|d| d.as_raw_fd());
        let completions = pollers.iter().map(|poller| poller.fd().as_raw_fd());
        let seats = Seats::take(&mut copy, bell.into_iter().chain(completions));
        let page = Library::get().stats;
        let record = (!sleepers.is_empty()).then(|| Record::begin(page, waiter, Call::Poll, None, 0));
        let hand_over = || {
            pollers.iter().for_each(Poller::leave);
            waiters.ring(waiter);
        };
        let r = duty::on_duty(&hand_over, || real(copy.as_mut_ptr(), copy.len() as nfds_t, left));
        let error = errno::get();
        point!("poll: is awake");
        drop(record);
        // What the sleepers hold is there to be asked, also where its number is closed.
        let is_there = sleepers
            .iter()
            .any(|(events, sleeper)| readiness::evaluate(sleeper.socket, *events, Arm::No) & (events | ALWAYS) != 0);
        drop(sleepers);
        let rung = bell.is_some() && seats.is_first_ready(&copy);
        seats.leave(&mut copy);
        point!("poll: is not told any more");
        if rung {
            waiters.quiet(waiter);
        }
        if r < 0 {
            errno::set(error);
            return r;
        }
        let is_over = deadline.is_over();
        let is_for_others = !(is_there || is_over || copy.iter().any(|c| c.revents != 0));
        if is_for_others {
            standing_by.into_iter().for_each(StandBy::go_on);
            kept = pollers;
        } else {
            drop((pollers, standing_by));
        }
        if is_there || is_over || copy.iter().any(|c| c.revents != 0) {
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
        } else if is_interrupted {
            return errno::fail(libc::EINTR);
        }
        spun = is_for_others;
    }
}

/// Takes the connections to TCP for good. False if one of them may be the library's to report on still, or again.
#[cold]
fn stay_on_tcp(set: &[pollfd]) -> bool {
    let sockets = || set.iter().filter_map(|p| table::socket(p.fd));
    let is_there = |s: &Socket| {
        let is_for_good = matches!(s.promotion.stage(), Stage::Pinned | Stage::Plain);
        is_for_good && !ready::is_watched(s)
    };
    sockets().filter(|s| !is_there(s)).for_each(prefer_tcp);
    sockets().all(is_there)
}

/// What the numbers stand for now.
fn look_up(set: &[pollfd], tokens: &mut Tokens) {
    tokens.clear();
    let now = crate::sys::time::tick();
    tokens.extend(set.iter().map(|p| {
        // One that was closed past the hooks is taken out of the table by this.
        let _ = closing::connection_at(p.fd, now);
        if let Entry::Epoll(set) = table::lookup(p.fd) {
            set.on_nested();
        }
        table::token(p.fd)
    }));
}

/// Of each link to another host: whether the thread polls, as it did in the last sleep if that has ended for others, or
/// stands by.
fn take_turns(
    set: &[pollfd],
    waiter: WaiterId,
    mut kept: Vec<Poller<'static>>,
) -> (Vec<Poller<'static>>, Vec<StandBy<'static>>) {
    kept.retain(Poller::stays);
    let mut standing_by: Vec<StandBy<'static>> = Vec::new();
    for p in set {
        let Some(remote) = table::socket(p.fd).and_then(Socket::link).and_then(Link::remote) else {
            continue;
        };
        if kept.iter().any(|k| k.is_of(remote)) || standing_by.iter().any(|s| s.is_of(remote)) {
            continue;
        }
        match remote.in_turn(waiter) {
            Turn::Polls(poller) => kept.push(poller),
            Turn::StandsBy(standby) => standing_by.push(standby),
            Turn::Down => {}
        }
    }
    (kept, standing_by)
}

/// Where in the kernel's array the sleeper's own descriptors are: in the places of sockets that are not the kernel's to
/// report on, as far as there are such, because an array may be as long as the limit of open files and no longer.
struct Seats {
    taken: SmallVec<[usize; 4]>,
    /// How long the array was.
    len: usize,
}

impl Seats {
    fn take(copy: &mut Entries, fds: impl Iterator<Item = c_int>) -> Self {
        let len = copy.len();
        let mut taken = SmallVec::new();
        let mut at = 0;
        for fd in fds {
            while copy.get(at).is_some_and(|p| p.fd >= 0) {
                at += 1;
            }
            let seat = pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            };
            match copy.get_mut(at) {
                Some(free) => *free = seat,
                None => copy.push(seat),
            }
            taken.push(at);
            at += 1;
        }
        Self { taken, len }
    }

    fn is_first_ready(&self, copy: &[pollfd]) -> bool {
        let first = self.taken.first().and_then(|at| copy.get(*at));
        first.is_some_and(|p| p.revents != 0)
    }

    fn leave(self, copy: &mut Entries) {
        for at in self.taken {
            if let Some(seat) = copy.get_mut(at) {
                seat.fd = -1;
                seat.revents = 0;
            }
        }
        copy.truncate(self.len);
    }
}

struct Lease(WaiterId);

impl Lease {
    /// From now on the waiter is rung when a socket that is the kernel's to report on becomes ours. False if there is
    /// none.
    fn look_on(&self, kernel: &[pollfd]) -> bool {
        let mut slots = Slots::default();
        for socket in kernel.iter().filter_map(|p| table::socket(p.fd)) {
            slots = slots.with(socket.slot);
        }
        if !slots.is_empty() {
            Library::get().waiters.onlookers.enter(self.0.0, slots);
        }
        !slots.is_empty()
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
    table::socket(fd).is_some_and(ready::is_watched)
}

/// Fills in `revents` of what is ours; gives how many are ready.
fn evaluate(set: &mut [pollfd], tokens: &[Token]) -> c_int {
    let mut ready = 0;
    for (p, token) in set.iter_mut().zip(tokens) {
        p.revents = 0;
        match table::lookup(p.fd) {
            _ if table::token(p.fd) != *token => {}
            Entry::Socket(socket) if ready::is_watched(socket) => {
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

/// Whether an entry is not where the kernel's array has it: a socket that became ours is not the kernel's to report on,
/// and one that went back is; what has got a number since the call began is in neither.
fn has_moved(entry: &pollfd, kernel: &pollfd, token: Token) -> bool {
    let is_same = table::token(entry.fd) == token;
    let is_ours = is_watched(entry.fd);
    entry.fd >= 0 && (kernel.fd >= 0 && (is_ours || !is_same) || kernel.fd < 0 && is_same && !is_ours)
}

/// Adds what the kernel said; gives how many are ready. `None` if one of them has moved meanwhile, of which nobody has
/// been asked who could know.
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

/// What the kernel makes of a count of select(): numbers beyond its table of this process's files do not count, and the
/// sets need not have bits for them. (The table has 64 or 128 entries at first, and twice as many whenever it grows;
/// up to the size of an fd_set every set has its bits.)
fn within_table(count: c_int) -> c_int {
    let mut size = libc::FD_SETSIZE as c_int;
    while size < count && is_in_table(size) {
        size *= 2;
    }
    count.min(size)
}

/// Whether the kernel's table reaches up to a number: asked about one that is not open, it then says so.
fn is_in_table(fd: c_int) -> bool {
    // SAFETY: only asks whether the number is in use.
    if rustix::io::fcntl_getfd(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }).is_ok() {
        return true;
    }
    let mut bits = vec![0u64; fd as usize / 64 + 1];
    if let Some(word) = bits.last_mut() {
        *word = 1 << (fd % 64);
    }
    let mut none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let (set, time) = (kernel::address(bits.as_mut_ptr()), kernel::address(&raw mut none));
    // SAFETY: a set of that many bits, and a time-out of ours.
    let asked = unsafe { kernel::call(libc::SYS_pselect6, [fd as usize + 1, set, 0, 0, time, 0]) };
    asked == Err(rustix::io::Errno::BADF)
}

/// The three sets of a select() call.
pub struct Sets {
    pub count: c_int,
    pub read: *mut libc::fd_set,
    pub write: *mut libc::fd_set,
    pub except: *mut libc::fd_set,
}

const READ_EVENTS: i16 = libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND;
const WRITE_EVENTS: i16 = libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND;
/// What select() calls readable and writable (select(2), "Correspondence between select and poll").
const READ_READY: i16 = READ_EVENTS | libc::POLLHUP | libc::POLLERR;
const WRITE_READY: i16 = WRITE_EVENTS | libc::POLLERR;

impl Sets {
    fn word(set: *mut libc::fd_set, fd: c_int) -> *mut u64 {
        set.cast::<u64>().wrapping_add(fd as usize / 64)
    }

    unsafe fn has(set: *mut libc::fd_set, fd: c_int) -> bool {
        // SAFETY: the program's set has a bit for every number below its count, which may be
        // beyond FD_SETSIZE.
        !set.is_null() && unsafe { *Self::word(set, fd) } >> (fd % 64) & 1 != 0
    }

    unsafe fn keep(set: *mut libc::fd_set, fd: c_int, keep: bool) -> c_int {
        if set.is_null() {
            return 0;
        }
        // SAFETY: as in `has`.
        unsafe {
            let word = Self::word(set, fd);
            let bit = 1u64 << (fd % 64);
            let kept = keep && *word & bit != 0;
            if !kept {
                *word &= !bit;
            }
            c_int::from(kept)
        }
    }

    /// Whether a number in the sets is ours.
    ///
    /// # Safety
    /// The sets are null or hold `count` bits.
    pub unsafe fn has_ours(&self) -> bool {
        // The program's sets need not be as long as its count says: the kernel does not look beyond its table.
        let end = self.count.min(table::highest() + 1);
        (0..end.max(0)).any(|fd| {
            // SAFETY: by the contract.
            let asked = unsafe { Self::has(self.read, fd) || Self::has(self.write, fd) || Self::has(self.except, fd) };
            asked && is_ours(fd)
        })
    }

    /// select() by way of poll().
    ///
    /// # Safety
    /// The sets are null or hold `count` bits.
    pub unsafe fn select(&self, timeout: Timeout, real: impl Fn(*mut pollfd, nfds_t, Timeout) -> c_int) -> c_int {
        let mut set = Vec::new();
        for fd in 0..within_table(self.count) {
            let mut events = 0;
            // SAFETY: by the contract.
            unsafe {
                if Self::has(self.read, fd) {
                    events |= READ_EVENTS;
                }
                if Self::has(self.write, fd) {
                    events |= WRITE_EVENTS;
                }
                if Self::has(self.except, fd) {
                    events |= libc::POLLPRI;
                }
            }
            if events != 0 {
                if set.try_reserve(1).is_err() {
                    return errno::fail(libc::ENOMEM);
                }
                set.push(pollfd { fd, events, revents: 0 });
            }
        }
        // SAFETY: a vector of that length.
        let n = unsafe { poll(set.as_mut_ptr(), set.len() as nfds_t, timeout, real) };
        if n < 0 {
            return n;
        }
        if set.iter().any(|p| p.revents & libc::POLLNVAL != 0) {
            return errno::fail(libc::EBADF);
        }
        let mut bits = 0;
        for p in &set {
            // SAFETY: by the contract.
            unsafe {
                bits += Self::keep(self.read, p.fd, p.revents & READ_READY != 0);
                bits += Self::keep(self.write, p.fd, p.revents & WRITE_READY != 0);
                bits += Self::keep(self.except, p.fd, p.revents & libc::POLLPRI != 0);
            }
        }
        bits
    }
}
