//! Waits in one call: spins, then sleeps until the peer or this process notifies it (ARCHITECTURE, I8). The caller
//! defines the condition ([`Wanted`]).

mod asleep;
mod record;

use libc::c_int;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::os::thread;
use rdmasock_core::stats::{Call, Reason};
use rdmasock_core::stream::connection;
pub use record::Record;

use crate::config::spin::Peers;
use crate::notify::ready::{self, change_interest};
use crate::notify::{blocking, closing};
use crate::objects::library::Library;
use crate::objects::link::{Link, Poller, Remote, Turn};
use crate::objects::socket::{Sleeping, Socket};
use crate::objects::waiters::Waiters;
use crate::signals::duty;
use crate::signals::jump::within;
use crate::sys::points::point;
use crate::sys::time::{Deadline, Timeout};

/// Bound on the wait of a call that has moved bytes, after a handler has run, ns.
const PARTIAL: u64 = 20_000_000;

/// The state of one blocking call across its waits.
///
/// The kernel checks for signals before each sleep, so a handler that runs at any moment of a call ends the call. Here
/// handlers are counted from the beginning of the call, since one may run while the thread spins, or before it sleeps
/// again.
pub struct Patience {
    /// The end of the call's time, by the socket's time-out option. `None` before the first wait.
    deadline: Option<Deadline>,
    /// The last sleep ended by an event for other threads, so the next wait does not spin.
    was_for_others: bool,
    /// The thread's count of handlers when the call began, or was last restarted.
    handlers: u32,
    /// The last wait has ended where the kernel restarts the call.
    is_restarted: bool,
    /// The call has moved bytes. If a handler runs before the sleep, [`PARTIAL`] bounds the sleep. The kernel has
    /// larger buffers and would often not have waited at all; ended at once, the call would return less than on TCP.
    pub is_partial: bool,
}

impl Default for Patience {
    fn default() -> Self {
        Self::since(thread::current().handlers_at_call())
    }
}

impl Patience {
    /// Creates the state of a call that began when the thread's count of handlers was `handlers`.
    pub fn since(handlers: u32) -> Self {
        Self {
            deadline: None,
            was_for_others: false,
            handlers,
            is_restarted: false,
            is_partial: false,
        }
    }

    /// Creates the state of a call that waits no longer than `bound`. The socket's time-out option does not matter.
    pub fn at_most(bound: Timeout) -> Self {
        Self {
            deadline: Some(bound.deadline()),
            ..Self::since(thread::current().handlers())
        }
    }

    /// Whether a signal handler has run since the call began, or was restarted.
    pub fn is_interrupted(&self) -> bool {
        thread::current().handlers() != self.handlers
    }

    /// Whether the last wait has ended where the kernel restarts the call (SA_RESTART); clears that. A restarted call
    /// looks its fd up again; a call that has moved bytes returns them instead.
    pub fn take_restart(&mut self) -> bool {
        std::mem::take(&mut self.is_restarted)
    }

    /// Ends a wait for data or for space that a handler has interrupted. `Err` is the errno that the call fails with;
    /// `Ok` means that the call is restarted ([`Self::take_restart`]).
    #[cold]
    pub fn interrupt(&mut self, socket: &Socket, is_data: bool) -> Result<bool, c_int> {
        let thread = thread::current();
        let bound = blocking::patience(socket, is_data);
        let is_bounded = self.deadline.map_or(bound, |d| Some(d.left())) != Some(Timeout::Forever);
        if is_bounded || thread.is_leaving() || !asleep::are_calls_restarted(thread.handled()) {
            return Err(libc::EINTR);
        }
        self.handlers = thread.handlers();
        self.is_restarted = true;
        Ok(false)
    }
}

/// The condition that a call waits for, as its direction defines it.
pub trait Wanted {
    /// True: the call waits for data. False: for space.
    const IS_DATA: bool;

    /// Whether the call should try again, by what has been [taken in](ready::progress) so far.
    fn is_worth_a_look(socket: &'static Socket) -> bool;

    /// Makes a last attempt to avoid a sleep. Returns true if the call should try again.
    fn avoid_sleep(_: &'static Socket) -> bool {
        false
    }

    /// Returns the bytes of a sender that its reader is not known to have read. `None` if there is no such count, as
    /// for a receiver.
    fn unread(_: &'static Socket) -> Option<u64> {
        None
    }
}

/// Waits until the condition may hold, for a call that [may wait](may_wait). Returns true if that came while the thread
/// spun. `Err` is the errno that the call fails with.
pub fn wait_for<A: Wanted>(socket: &'static Socket, patience: &mut Patience) -> Result<bool, c_int> {
    within(|| wait_on::<A>(socket, patience))
}

/// Takes a connection to TCP for good, because no waiter is left to wake a thread that waits for its link. Unread bytes
/// follow over TCP.
#[cold]
pub fn prefer_tcp(socket: &'static Socket) {
    if let Some(mut control) = socket.control.lock() {
        connection::prefer_tcp(socket, &mut control, Reason::Resources);
    }
}

/// Checks whether a call with these flags may wait. `Err` is the errno that it fails with if not.
pub fn may_wait(socket: &Socket, flags: c_int) -> Result<(), c_int> {
    if flags & libc::MSG_DONTWAIT != 0 || socket.blocking.is_nonblocking() {
        return Err(libc::EAGAIN);
    }
    Ok(())
}

// Not inlined: the forced unwind of pthread_cancel runs the destructors here (see `hooks`).
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
    // Read before each sleep: O_NONBLOCK may have been set since the last.
    let Some(bound) = blocking::patience(socket, A::IS_DATA) else {
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
    // On a link to another host, completions wake one of the sleeping threads, which rings the others.
    let polls = remote.is_some_and(Remote::is_unpolled);
    let Some(mut lease) = Lease::new(waiters, polls) else {
        // Out of waiters or fds: the kernel has to wake the thread.
        prefer_tcp(socket);
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        });
        return Ok(false);
    };
    // Before the sleeper is added: arming takes in completions, and would ring the sleeper's bell for them.
    let (poller, standby) = match remote.map_or(Turn::Down, |remote| remote.in_turn(lease.waiter)) {
        Turn::Polls(_) if !polls => {
            // The polling threads have just left, and this waiter has no bell to poll with.
            patience.was_for_others = true;
            return Ok(false);
        }
        Turn::Polls(poller) => (Some(poller), None),
        Turn::StandsBy(standby) => (None, Some(standby)),
        Turn::Down => (None, None),
    };
    let slept = loop {
        let slept = sleep::<A>(socket, &mut lease, poller.as_ref(), deadline);
        // New data is taken in before the descriptor is armed for the next sleep. Arming costs two system calls, for
        // which the peer then need not wait. The sleeper is gone by now; otherwise its own bell would be rung.
        if poller.is_some() && matches!(slept, Ok(Slept::Rung | Slept::Completed)) {
            ready::progress(socket);
        }
        let is_for_others = matches!(slept, Ok(Slept::Completed)) && !A::is_worth_a_look(socket);
        let goes_on =
            is_for_others && !deadline.is_over() && !socket.blocking.is_nonblocking() && !patience.is_interrupted();
        if !goes_on || !poller.as_ref().is_some_and(Poller::stays) {
            patience.was_for_others = is_for_others;
            break slept;
        }
    };
    if let Some(standby) = standby
        && matches!(slept, Ok(Slept::Rung))
        && !A::is_worth_a_look(socket)
    {
        patience.was_for_others = true;
        standby.go_on();
    }
    match slept {
        // The call checks once more for data or space, as the kernel does.
        Err(libc::EINTR) if !patience.is_partial && patience.is_interrupted() => Ok(false),
        slept => slept.map(|_| false),
    }
}

/// The result of a sleep.
enum Slept {
    /// The condition held already, so the thread did not sleep.
    Not,
    /// The waiter was rung, or the sleep ended without a reason.
    Rung,
    /// The poller's descriptor became readable, and the waiter was not rung.
    Completed,
}

/// Sleeps once, until the waiter is rung or the poller's descriptor is readable. `Err` is the errno that the call fails
/// with.
// Not inlined: as `wait_on`.
#[inline(never)]
fn sleep<A: Wanted>(
    socket: &'static Socket,
    lease: &mut Lease<'_>,
    poller: Option<&Poller<'_>>,
    deadline: Deadline,
) -> Result<Slept, c_int> {
    let _sleeper = Sleeper::new(socket, lease.waiter, A::IS_DATA, !A::IS_DATA);
    point!("wait: the peer knows of the sleeper");
    // Arming has taken in what had come until then; later completions make the descriptor readable.
    // One more check before the sleep, for two reasons:
    // - A peer that took the wake-up word before `begin` does not wake the thread, but has published its bytes or space
    //   before. So a peer that sees the sleep flag waits for little more than the thread's way into the kernel.
    // - A third thread may have consumed those bytes by now. Then the wake-up word is gone too, and later bytes would
    //   wake no thread.
    lease.begin();
    if A::is_worth_a_look(socket) || !ready::will_be_told(socket, lease.waiter, A::IS_DATA) {
        return Ok(Slept::Not);
    }
    let call = if A::IS_DATA { Call::Receive } else { Call::Send };
    let page = Library::get().stats;
    let record = Record::begin(
        page,
        lease.waiter,
        call,
        Some(socket.slot),
        A::unread(socket).unwrap_or(0),
    );
    point!("wait: is about to sleep");
    let slept = lease.sleep(deadline.left(), poller);
    point!("wait: is awake");
    drop(record);
    slept
}

/// A waiter, held for the time of one sleep.
struct Lease<'a> {
    waiters: &'a Waiters,
    waiter: WaiterId,
    futex: *const u32,
    /// The futex's value, read before any check for a reason not to sleep.
    ticket: u32,
    sleeps: bool,
}

impl<'a> Lease<'a> {
    /// Acquires a waiter. `polls`: the thread also sleeps on the descriptor of a link. Checks for a reason not to sleep
    /// come after this. `None` if no waiter or fd is left.
    fn new(waiters: &'a Waiters, polls: bool) -> Option<Self> {
        let waiter = if polls {
            waiters.acquire_polling()
        } else {
            waiters.acquire()
        }?;
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

    /// Sleeps until the waiter is rung, or the poller's descriptor is readable. A cancellation point. A signal handler
    /// that interrupts the sleep ends it, also one that runs just before the system call.
    fn sleep(&self, left: crate::sys::time::Timeout, poller: Option<&Poller<'_>>) -> Result<Slept, c_int> {
        let hand_over = || {
            poller.into_iter().for_each(Poller::leave);
            self.waiters.ring(self.waiter);
        };
        let Some(bell) = self.waiters.doorbell(self.waiter) else {
            duty::on_duty(&hand_over, || asleep::on_futex(self.futex, self.ticket, left))?;
            return Ok(Slept::Rung);
        };
        let also = poller.map_or(bell, Poller::fd);
        if !duty::on_duty(&hand_over, || asleep::on_two(bell, also, left))? {
            return Ok(Slept::Completed);
        }
        self.waiters.quiet(self.waiter);
        Ok(Slept::Rung)
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

/// Keeps a waiter among the socket's sleepers until it is dropped. The thread checks once more after creating it, and
/// then sleeps on the waiter.
pub struct Sleeper {
    pub socket: &'static Socket,
    waiter: WaiterId,
}

impl Sleeper {
    /// Adds the waiter to the sleepers: it is rung when there is `data` to read, or `space` to write.
    pub fn new(socket: &'static Socket, waiter: WaiterId, data: bool, space: bool) -> Self {
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
            closing::on_call_back(self.socket);
        }
    }
}
