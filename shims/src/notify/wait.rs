//! The wait of one blocking call. The thread spins, then sleeps until the peer or another thread of this process
//! notifies it (ARCHITECTURE, I8). The caller defines the condition that it waits for ([`Wanted`]).
//!
//! The sleep follows the rules of the kernel's own socket calls. A signal ends or restarts it, and it is a cancellation
//! point. O_NONBLOCK, SO_RCVTIMEO and SO_SNDTIMEO decide whether and how long a call waits.
//!
//! For one sleep the thread leases a *waiter*, which it adds to the socket's sleepers. On a link to another host,
//! arriving bytes make a completion descriptor readable. One of the threads that sleep for the link *polls* that
//! descriptor, and wakes the others, which *stand by*.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::Acquire;

use libc::c_int;
use rdmasock_core::stats::{Asleep, Call, Reason, StatsPage};
use rdmasock_core::{fabric::waiter::WaiterId, os::thread, stream::connection};
use rustix::net::sockopt;

use crate::config::spin::Peers;
use crate::notify::{call, ready, ready::change_interest};
use crate::objects::link::{Link, Poller, Remote, Turn};
use crate::objects::socket::{Known, Sleeping, Socket, Stage};
use crate::objects::{
    holders,
    library::Library,
    waiters::{Kind, Waiters},
};
use crate::signals::{handler, jump::within};
use crate::sys::time::{self, Deadline, Timeout};
use crate::sys::{errno, points::point, real::Cancellable};

/// The longest wait of a call that has moved bytes, once a signal handler has run, ns.
const PARTIAL: u64 = 20_000_000;

/// The state of one blocking call across its waits.
///
/// On TCP, a signal handler that runs at any moment of a blocking call ends or restarts the call, because the kernel
/// checks for signals before each sleep. A handler may also run while a thread spins, or between two sleeps. So the
/// library counts handlers from the beginning of the call.
pub(crate) struct Patience {
    /// When the socket's time-out option ends the call. `None` before the first wait.
    deadline: Option<Deadline>,
    /// The last sleep ended by an event for other threads, so the next wait does not spin.
    was_for_others: bool,
    /// The thread's count of handlers when the call began, or was last restarted.
    handlers: u32,
    /// The last wait was interrupted by a handler after which the kernel restarts a call.
    is_restarted: bool,
    /// The call has moved bytes. If a handler runs before the sleep, [`PARTIAL`] bounds the sleep. The call does not
    /// end at once: the kernel, with its larger buffers, would often have moved more bytes without a wait.
    pub is_partial: bool,
}

impl Default for Patience {
    fn default() -> Self {
        Self::since(thread::current().handlers_at_call())
    }
}

impl Patience {
    /// Creates the state of a call that began when the thread's count of handlers was `handlers`.
    pub(crate) fn since(handlers: u32) -> Self {
        Self {
            deadline: None,
            was_for_others: false,
            handlers,
            is_restarted: false,
            is_partial: false,
        }
    }

    /// Creates the state of a call that waits no longer than `bound`. The socket's time-out option does not apply.
    pub(crate) fn at_most(bound: Timeout) -> Self {
        Self {
            deadline: Some(bound.deadline()),
            ..Self::since(thread::current().handlers())
        }
    }

    /// Whether a signal handler has run since the call began, or was restarted.
    pub(crate) fn is_interrupted(&self) -> bool {
        thread::current().handlers() != self.handlers
    }

    /// Whether the last wait was interrupted by a handler after which the kernel restarts a call (SA_RESTART). Clears
    /// that state. The caller then looks its fd up again, or returns the bytes that it has moved.
    pub(crate) fn take_restart(&mut self) -> bool {
        std::mem::take(&mut self.is_restarted)
    }

    /// Decides how a call goes on after a signal handler has interrupted its wait. `is_data`: the wait was for data,
    /// else for space. `Err` is the errno that the call fails with. `Ok(false)` means that the call is restarted
    /// ([`Self::take_restart`]).
    #[cold]
    pub(crate) fn interrupt(&mut self, socket: &Socket, is_data: bool) -> Result<bool, c_int> {
        let thread = thread::current();
        let bound = time_of_call(socket, is_data);
        let is_bounded = self.deadline.map_or(bound, |d| Some(d.left())) != Some(Timeout::Forever);
        if is_bounded || thread.is_leaving() || !are_calls_restarted(thread.handled()) {
            return Err(libc::EINTR);
        }
        self.handlers = thread.handlers();
        self.is_restarted = true;
        Ok(false)
    }
}

/// The condition that a call waits for. Each kind of wait has a type that implements it.
pub(crate) trait Wanted {
    /// True: the call waits for data. False: for space.
    const IS_DATA: bool = false;

    /// Whether the condition may hold, so that the call should try again. On a link to another host, bytes count only
    /// once they were [taken in](ready::progress).
    fn is_worth_a_look(socket: &'static Socket) -> bool;

    /// Makes a last attempt before a sleep, for example to make room. Returns true if the call should try again.
    fn avoid_sleep(_: &'static Socket) -> bool {
        false
    }

    /// Returns how many sent bytes the reader may not have read yet. `None` for a call that waits for no reader, such
    /// as a receive.
    fn unread(_: &'static Socket) -> Option<u64> {
        None
    }
}

/// Waits until the condition of the call may hold. The caller has checked that the call [may wait](may_wait). Returns
/// true if the condition came while the thread spun, or if `Wanted::avoid_sleep` returned true. Else returns false,
/// also if the call is restarted after a signal handler. `Err` is the errno that the call fails with.
pub(crate) fn wait_for<A: Wanted>(socket: &'static Socket, patience: &mut Patience) -> Result<bool, c_int> {
    within(|| wait_on::<A>(socket, patience))
}

/// Takes a connection to TCP for good, because a thread that waits for its link can get no waiter. On TCP the kernel
/// wakes the thread. Unread bytes on the link follow over TCP.
#[cold]
pub(crate) fn prefer_tcp(socket: &'static Socket) {
    if let Some(mut control) = socket.control.lock() {
        connection::prefer_tcp(socket, &mut control, Reason::Resources);
    }
}

/// Checks whether a call with these flags may wait. `Err` is the errno that it fails with if not.
pub(crate) fn may_wait(socket: &Socket, flags: c_int) -> Result<(), c_int> {
    if flags & libc::MSG_DONTWAIT != 0 || socket.blocking.is_nonblocking() {
        return Err(libc::EAGAIN);
    }
    Ok(())
}

// Not inlined: the forced unwind of pthread_cancel runs destructors in this frame (see `hooks`).
#[inline(never)]
fn wait_on<A: Wanted>(socket: &'static Socket, patience: &mut Patience) -> Result<bool, c_int> {
    let spinner = if A::IS_DATA {
        &socket.wakes.rx_spin
    } else {
        &socket.wakes.tx_spin
    };
    let come = || {
        ready::progress(socket);
        A::is_worth_a_look(socket)
    };
    if !patience.is_partial && patience.is_interrupted() {
        return patience.interrupt(socket, A::IS_DATA);
    }
    let spins = !std::mem::take(&mut patience.was_for_others);
    let peers = Peers::new(socket.link().is_some_and(Link::is_remote));
    if spins && spinner.spin(spinner.bound(peers), come) || A::avoid_sleep(socket) {
        return Ok(true);
    }
    // The bound is read before each sleep: O_NONBLOCK may have been set since the last sleep.
    let Some(bound) = time_of_call(socket, A::IS_DATA) else {
        return Err(libc::EAGAIN);
    };
    let mut deadline = *patience.deadline.get_or_insert_with(|| bound.deadline());
    if patience.is_partial && patience.is_interrupted() {
        deadline = deadline.left().at_most(PARTIAL).deadline();
    }
    if deadline.is_over() {
        return Err(libc::EAGAIN);
    }
    let waiters = &Library::get().waiters;
    let remote = socket.link().and_then(Link::remote);
    // On a link to another host, completions wake only a thread that polls the completion descriptor. That thread rings
    // the other sleeping threads. This thread polls if no other thread does.
    let polls = remote.is_some_and(Remote::is_unpolled);
    let Some(mut lease) = Lease::new(waiters, polls) else {
        // No waiter or fd is left, so the kernel has to wake the thread.
        prefer_tcp(socket);
        time::sleep(1_000_000);
        return Ok(false);
    };
    // Whether this thread polls or stands by is decided before its sleeper is added. Arming the descriptor polls the
    // completions once more. If the sleeper were in place, that would ring this thread's own waiter.
    let (poller, standby) = match remote.map_or(Turn::Down, |remote| remote.in_turn(lease.waiter)) {
        Turn::Polls(_) if !polls => {
            // The threads that polled have just left. This thread's waiter has a futex and no fd, so the thread cannot
            // poll. The call tries again.
            patience.was_for_others = true;
            return Ok(false);
        }
        Turn::Polls(poller) => (Some(poller), None),
        Turn::StandsBy(standby) => (None, Some(standby)),
        Turn::Down => (None, None),
    };
    let slept = loop {
        let slept = sleep::<A>(socket, &mut lease, poller.as_ref(), deadline);
        // Takes in new data before the descriptor is armed for the next sleep, so the data does not wait for the two
        // system calls of arming. `sleep` has removed the sleeper by now. If the sleeper were in place, this would ring
        // the thread's own waiter.
        if poller.is_some() && slept.is_ok() {
            ready::progress(socket);
        }
        let is_for_others = slept == Ok(true) && !A::is_worth_a_look(socket);
        let goes_on =
            is_for_others && !deadline.is_over() && !socket.blocking.is_nonblocking() && !patience.is_interrupted();
        if !goes_on || !poller.as_ref().is_some_and(Poller::stays) {
            patience.was_for_others = is_for_others;
            break slept;
        }
    };
    if let Some(standby) = standby
        && slept == Ok(false)
        && !A::is_worth_a_look(socket)
    {
        patience.was_for_others = true;
        standby.go_on();
    }
    match slept {
        // A handler has interrupted the sleep. The call checks once more for data or space before it fails, as the
        // kernel does.
        Err(libc::EINTR) if !patience.is_partial && patience.is_interrupted() => Ok(false),
        slept => slept.map(|_| false),
    }
}

/// Sleeps once, until the waiter is rung or the poller's descriptor is readable; does not sleep if the condition holds
/// already. Returns true if the descriptor became readable, and the waiter was not rung. `Err` is the errno that the
/// call fails with.
// Not inlined, for the reason at `wait_on`.
#[inline(never)]
fn sleep<A: Wanted>(
    socket: &'static Socket,
    lease: &mut Lease<'_>,
    poller: Option<&Poller<'_>>,
    deadline: Deadline,
) -> Result<bool, c_int> {
    let _sleeper = Sleeper::new(socket, lease.waiter, A::IS_DATA, !A::IS_DATA);
    point!("wait: the peer knows of the sleeper");
    // If the thread polls, the completions from before its descriptor was armed have been taken in. Later ones make the
    // descriptor readable.
    //
    // The wake-up word is armed before the sleep flag is raised (`begin`). So a peer that finds the flag raised waits
    // for little more than this thread's way into the kernel. But a peer that takes the word while the flag is not
    // raised does not wake the thread. So the thread checks two things before it sleeps:
    // - Whether the condition holds: a peer that took the word has published its bytes or space before.
    // - Whether the word still names the thread: another thread may have consumed those bytes by now, and without the
    //   word later bytes would wake no thread.
    lease.begin();
    if A::is_worth_a_look(socket) || !ready::will_be_told(socket, lease.waiter, A::IS_DATA) {
        return Ok(false);
    }
    let call = if A::IS_DATA { Call::Receive } else { Call::Send };
    let unread = A::unread(socket).unwrap_or(0);
    let record = Record::begin(lease.waiter, call, Some(socket.slot), unread);
    point!("wait: is about to sleep");
    let slept = lease.sleep(deadline.left(), poller);
    point!("wait: is awake");
    drop(record);
    slept
}

/// A waiter that a thread holds for the time of one sleep.
struct Lease<'a> {
    waiters: &'a Waiters,
    waiter: WaiterId,
    futex: *const u32,
    /// The futex's value, read before any check for reasons not to sleep. A later ring changes the futex.
    ticket: u32,
    sleeps: bool,
}

impl<'a> Lease<'a> {
    /// Acquires a waiter. `polls`: the thread is to sleep on a link's completion descriptor too. The caller checks for
    /// reasons not to sleep only after this call. `None` if no waiter or fd is left.
    fn new(waiters: &'a Waiters, polls: bool) -> Option<Self> {
        let kind = if polls { Kind::Polling } else { Kind::Thread };
        let waiter = waiters.acquire(kind)?;
        let Some((futex, ticket)) = waiters.futex(waiter) else {
            waiters.release(waiter);
            return None;
        };
        Some(Self {
            waiters,
            waiter,
            futex,
            ticket,
            sleeps: false,
        })
    }

    /// Raises the sleep flag: from now on peers see that the waiter sleeps, or is about to.
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.sleeps, true) {
            self.waiters.enter_sleep(self.waiter);
        }
    }

    /// Sleeps for at most `left`, until the waiter is rung or the descriptor of `poller` is readable. Returns true if
    /// the descriptor is readable and the waiter was not rung. `Err` is the errno that the call fails with. The sleep
    /// is a cancellation point. A signal handler ends it even if the handler runs just before the system call:
    /// `hand_over` then rings the waiter.
    fn sleep(&self, left: Timeout, poller: Option<&Poller<'_>>) -> Result<bool, c_int> {
        let hand_over = || {
            poller.into_iter().for_each(Poller::leave);
            self.waiters.ring(self.waiter);
        };
        let Some(bell) = self.waiters.doorbell(self.waiter) else {
            return handler::on_duty(&hand_over, || on_futex(self.futex, self.ticket, left)).map(|()| false);
        };
        let also = poller.map_or(bell, Poller::fd);
        let is_rung = handler::on_duty(&hand_over, || on_two(bell, also, left))?;
        if is_rung {
            self.waiters.quiet(self.waiter);
        }
        Ok(!is_rung)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if self.sleeps {
            self.waiters.leave_sleep(self.waiter);
        }
        self.waiters.release(self.waiter);
    }
}

/// A waiter in a socket's list of sleepers, until this value is dropped. The thread that has created the value checks
/// once more for reasons not to sleep, and then sleeps on the waiter.
pub(crate) struct Sleeper {
    pub socket: &'static Socket,
    waiter: WaiterId,
}

impl Sleeper {
    /// Adds the waiter to the socket's sleepers. The waiter is woken when bytes can be read (if `data`), or when bytes
    /// can be sent (if `space`).
    pub(crate) fn new(socket: &'static Socket, waiter: WaiterId, data: bool, space: bool) -> Self {
        change_interest(socket, |i| i.sleepers.push(Sleeping { waiter, data, space }));
        Self { socket, waiter }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let waiter = self.waiter;
        change_interest(self.socket, |i| {
            if let Some(at) = i.sleepers.iter().position(|s| s.waiter == waiter) {
                i.sleepers.swap_remove(at);
            }
        });
        if self.socket.numbers.is_closed() {
            call::on_call_back(self.socket);
        }
    }
}

/// If `futex` holds `ticket`, sleeps until a wake-up, a signal handler or the end of the time `left`. `Err` is EINTR
/// after a handler, and EAGAIN when the time is over.
///
/// After a handler with SA_RESTART the kernel restarts a sleep without a time-out. It never restarts one with a
/// time-out.
fn on_futex(futex: *const u32, ticket: u32, left: Timeout) -> Result<(), c_int> {
    let timeout = left.to_timespec();
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let slept = crate::signals::jump::outside(|| {
        // SAFETY: the word is in a mapping that is never removed. `timeout` is null, or points to a timespec in this
        // frame, which outlives the call.
        let result = unsafe { futex_wait(futex, ticket, timeout) };
        if result < 0 {
            errno::set(-result as c_int);
            return -1;
        }
        0
    });
    match if slept < 0 { errno::get() } else { 0 } {
        libc::ETIMEDOUT => Err(libc::EAGAIN),
        libc::EINTR => Err(libc::EINTR),
        // The futex was woken, or did not hold the ticket.
        _ => Ok(()),
    }
}

unsafe extern "C-unwind" {
    /// glibc's function, declared as one that may unwind: `pthread_cancel` may have been called before, and then takes
    /// effect here.
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
}

/// PTHREAD_CANCEL_ASYNCHRONOUS of glibc's `pthread.h`.
const ASYNCHRONOUS: c_int = 1;

/// FUTEX_WAIT on a word that other processes wake. Returns the system call's result, a negative errno on failure.
///
/// The thread can be cancelled meanwhile, as in glibc's own calls: the cancel type is asynchronous around the system
/// call and nothing else.
///
/// This function has a frame of its own, without destructors, because the forced unwind may begin at any of its
/// instructions. Rust's personality routine ends the process if it meets a frame with destructors at an instruction
/// that is no call. The system call is not made by libc's `syscall`, because that is a hook.
///
/// # Safety
/// `futex` is readable; `timeout` is null or readable.
#[inline(never)]
unsafe extern "C-unwind" fn futex_wait(futex: *const u32, ticket: u32, timeout: *const libc::timespec) -> isize {
    let mut old = 0;
    // SAFETY: the type is valid and `old` is writable. The call may unwind, and this frame has no destructors.
    unsafe { pthread_setcanceltype(ASYNCHRONOUS, &raw mut old) };
    let result: isize;
    // SAFETY: futex(2) reads four arguments here, valid by the contract. The kernel changes rax, rcx and r11 only,
    // which are declared.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") libc::SYS_futex as isize => result,
            in("rdi") futex,
            in("rsi") libc::FUTEX_WAIT,
            in("rdx") ticket as usize,
            in("r10") timeout,
            in("r8") 0usize,
            in("r9") 0usize,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
        pthread_setcanceltype(old, std::ptr::null_mut());
    }
    result
}

/// Sleeps until one of the two fds is readable. Returns true if `bell` is. `Err` is the errno that the call fails with.
///
/// The sleep is a ppoll, which the kernel never restarts after a handler. If the sleep has no time-out, this function
/// applies the restart rule of a socket call afterwards.
fn on_two(bell: BorrowedFd<'_>, also: BorrowedFd<'_>, left: Timeout) -> Result<bool, c_int> {
    let timeout = left.to_timespec();
    let mut set = [bell, also].map(|fd| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    });
    let thread = thread::current();
    let handlers = thread.handlers();
    // SAFETY: `set` has two entries; the time-out is null, or points into a timespec that outlives the call.
    let n = crate::signals::jump::outside(|| unsafe {
        crate::sys::real::ppoll().cancellable()(
            set.as_mut_ptr(),
            set.len() as libc::nfds_t,
            timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
            std::ptr::null(),
        )
    });
    match n {
        0 => Err(libc::EAGAIN),
        n if n < 0 => {
            let error = errno::get();
            // If `thread.handlers()` has changed, the library itself has called the signal handler and knows the
            // signal. In that case the caller decides whether the call restarts (`Patience::interrupt`).
            let restart =
                error == libc::EINTR && timeout.is_none() && thread.handlers() == handlers && are_calls_restarted(0);
            if restart { Ok(false) } else { Err(error) }
        }
        _ => Ok(set.first().is_some_and(|bell| bell.revents != 0)),
    }
}

/// Whether the kernel would restart a call that these signals have interrupted. `handled` has a bit for each signal
/// whose handler has run.
///
/// If `handled` is 0, the handler was one that the library does not call (`process/sigaction`), and its signal is
/// unknown. Then every handler must have SA_RESTART. Signals that the processor raises are left out, because a sleeping
/// thread does not get them (Rust's runtime installs handlers for some).
#[cold]
fn are_calls_restarted(handled: u64) -> bool {
    const RAISED: [c_int; 6] = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
        libc::SIGSYS,
    ];
    let is_asked = |signal: c_int| match handled {
        0 => !RAISED.contains(&signal),
        handled => handled & 1 << (signal - 1) != 0,
    };
    (1..=libc::SIGRTMAX()).filter(|signal| is_asked(*signal)).all(|signal| {
        // SAFETY: all zeroes are a valid value of this plain struct, and the call only fills it.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: `action` is writable, and a null new action changes nothing.
        let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        asked != 0
            || matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
            || action.sa_flags & libc::SA_RESTART != 0
    })
}

/// Lists the thread in `rdmasock stat` as one that sleeps until data or space comes over a link. The entry ends when
/// this value is dropped.
pub(crate) struct Record {
    page: &'static StatsPage,
    waiter: WaiterId,
    thread: u32,
}

impl Record {
    /// Records that the thread is about to sleep as `waiter` in `call`. `stream`: the slot of the call's stream; `None`
    /// for a call on a list of fds or an epoll set. `unread`: how many bytes of a sender its reader has not read; 0 for
    /// other calls.
    pub(crate) fn begin(waiter: WaiterId, call: Call, stream: Option<u32>, unread: u64) -> Self {
        let (page, thread) = (Library::get().stats, thread::current().tid());
        if let Some(sleeper) = page.sleeper(waiter.0) {
            sleeper.begin(&Asleep {
                thread,
                call,
                stream,
                since: crate::sys::time::tick(),
                unread,
            });
        }
        Self { page, waiter, thread }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // A fork may have interrupted the sleep. In the child this value still names the parent's thread, which ends
        // the record itself.
        let is_ours = thread::current().tid() == self.thread;
        if is_ours && let Some(sleeper) = self.page.sleeper(self.waiter.0) {
            sleeper.end(self.thread);
        }
    }
}

/// Whether a call with these flags returns at once, even if another process changes the socket's O_NONBLOCK. Without
/// MSG_DONTWAIT the result is false for a socket that was passed to another process: such a socket is not in
/// [`Stage::Watching`] any more, or has several holders.
#[inline]
pub(crate) fn is_quick(socket: &Socket, flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT != 0
        || socket.blocking.is_nonblocking()
            && socket.promotion.stage() == Stage::Watching
            && !socket.promotion.holders.may_be_several()
}

/// Returns how long a call may wait now, to receive (`data`) or to send. `None` if the socket has O_NONBLOCK, so the
/// call may not wait.
///
/// Another process that holds the socket can change O_NONBLOCK and the time-outs without a hook of this process. So the
/// kernel is asked before each sleep. While this process is the only holder, the answer is kept until the program sets
/// a time-out or forks.
fn time_of_call(socket: &Socket, data: bool) -> Option<Timeout> {
    let blocking = &socket.blocking;
    // In a signal handler that has interrupted the lock's holder, the kernel is asked for every value.
    let mut unknown = Known::default();
    let mut guard = blocking.known.lock();
    let known = guard.as_deref_mut().unwrap_or(&mut unknown);
    // The counters are read first. If a time-out changes while the kernel is asked, the counters differ next time, and
    // the kernel is asked again.
    let now = (holders::epoch(), blocking.sets.load(Acquire));
    let is_shared = socket.promotion.holders.may_be_several();
    if is_shared || known.at != Some(now) {
        // While this lock is held, close() cannot close the fd.
        let _control = socket.control.lock();
        if let Some(fd) = socket.numbers.anchor_fd() {
            let flags = rustix::fs::fcntl_getfl(fd);
            if flags.is_ok_and(|f| f.contains(rustix::fs::OFlags::NONBLOCK)) {
                blocking.set_nonblocking(true);
            }
            *known = Known {
                at: (!is_shared).then_some(now),
                receive: option_timeout(fd, sockopt::Timeout::Recv),
                send: option_timeout(fd, sockopt::Timeout::Send),
            };
        }
    }
    if blocking.is_nonblocking() {
        return None;
    }
    Some(match if data { known.receive } else { known.send } {
        0 => Timeout::Forever,
        ns => Timeout::Ns(ns),
    })
}

/// Returns the value of a time-out option, ns; 0 if the option sets no bound, or cannot be read.
fn option_timeout(fd: BorrowedFd<'_>, option: sockopt::Timeout) -> u64 {
    let bound = sockopt::socket_timeout(fd, option).ok().flatten();
    bound.map_or(0, |bound| u64::try_from(bound.as_nanos()).unwrap_or(u64::MAX))
}
