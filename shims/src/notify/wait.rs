//! Waiting in one call: spin, then sleep until the peer, or this process, says that there is something (ARCHITECTURE,
//! I8). What there has to be is for the caller to say.

mod asleep;
mod record;

use libc::c_int;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::os::thread;
use rdmasock_core::stats::{Call, Reason};
use rdmasock_core::stream::connection;

use crate::config::spin::Peers;
use crate::notify::blocking;
use crate::notify::closing;
use crate::notify::ready::{self, change_interest};
use crate::objects::library::Library;
use crate::objects::link::{Link, Poller, Remote, Turn};
use crate::objects::socket::{Sleeping, Socket};
use crate::objects::waiters::Waiters;
use crate::signals::duty;
use crate::signals::jump::within;
use crate::sys::points::point;
use crate::sys::time::{Deadline, Timeout};

pub use record::Record;

/// How long a call that has moved bytes still waits after a handler has run, ns.
const PARTIAL: u64 = 20_000_000;

/// What one blocking call knows of its waits.
///
/// The kernel looks for signals before each sleep, so a handler that runs at any moment of a call ends the call. Here
/// handlers are counted from the beginning of the call: one may run while the thread spins, or before it sleeps again.
pub struct Patience {
    /// How long it may still wait, by the socket's own time-out option. Looked up at the first wait.
    deadline: Option<Deadline>,
    /// The last sleep ended for others: there is nothing to spin for.
    was_for_others: bool,
    /// The thread's count of handlers when the call began, or was restarted last.
    handlers: u32,
    /// Whether a wait has ended where the kernel restarts the call.
    is_restarted: bool,
    /// The call has moved bytes. A handler that runs before the sleep then bounds it ([`PARTIAL`]): the kernel, which
    /// has larger buffers, would often not have waited at all, and the call would return less than there.
    pub is_partial: bool,
}

impl Default for Patience {
    fn default() -> Self {
        Self::since(thread::current().handlers_at_call())
    }
}

impl Patience {
    /// Of a call that began when the thread's count of handlers was `handlers`.
    pub fn since(handlers: u32) -> Self {
        Self {
            deadline: None,
            was_for_others: false,
            handlers,
            is_restarted: false,
            is_partial: false,
        }
    }

    /// Of a call that does not wait for longer than this, whatever the socket's option says.
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

    /// Whether the last wait has ended where the kernel restarts the call (SA_RESTART), which looks the fd up again. A
    /// call that has moved bytes returns them instead.
    pub fn take_restart(&mut self) -> bool {
        std::mem::take(&mut self.is_restarted)
    }

    /// Ends a wait of a call that a handler has interrupted, for data or for space. `Err` is the errno that the call
    /// fails with; else it is restarted ([`Self::take_restart`]).
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

/// What a call waits for, as its direction knows it.
pub trait Wanted {
    /// Something to read; else room to write.
    const IS_DATA: bool;

    /// Whether to look again, by what has been [taken in](ready::progress).
    fn is_worth_a_look(socket: &'static Socket) -> bool;

    /// The last that can be done against a sleep. True if it has helped.
    fn avoid_sleep(_: &'static Socket) -> bool {
        false
    }

    /// Bytes of a sender that its reader is not known to have read.
    fn unread(_: &'static Socket) -> Option<u64> {
        None
    }
}

/// Waits until what is awaited may be there, for a call that [may wait](may_wait). True if that came while it spun.
/// `Err` is the errno that it fails with.
pub fn wait_for<A: Wanted>(socket: &'static Socket, patience: &mut Patience) -> Result<bool, c_int> {
    within(|| wait_on::<A>(socket, patience))
}

/// Takes a connection to TCP for good, because nothing could wake a thread that waits for its link. Unread bytes
/// follow by TCP.
#[cold]
pub fn prefer_tcp(socket: &'static Socket) {
    if let Some(mut control) = socket.control.lock() {
        connection::prefer_tcp(socket, &mut control, Reason::Resources);
    }
}

/// Whether a call with these flags may wait; `Err` is the errno that it fails with otherwise.
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
    // Before each sleep: O_NONBLOCK may have been set since the last.
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
    // On a link to another host one of those who sleep is woken by what completes, and rings the others.
    let polls = remote.is_some_and(Remote::is_unpolled);
    let Some(mut lease) = Lease::new(waiters, polls) else {
        // Out of waiters or fds: the kernel is to wake the thread.
        prefer_tcp(socket);
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        });
        return Ok(false);
    };
    // First: arming looks at what has come, and would ring the sleeper's bell for it.
    let (poller, standby) = match remote.map_or(Turn::Down, |remote| remote.in_turn(lease.waiter)) {
        Turn::Polls(_) if !polls => {
            // The others have just left, and this waiter cannot poll.
            patience.was_for_others = true;
            return Ok(false);
        }
        Turn::Polls(poller) => (Some(poller), None),
        Turn::StandsBy(standby) => (None, Some(standby)),
        Turn::Down => (None, None),
    };
    let slept = loop {
        let slept = sleep::<A>(socket, &mut lease, poller.as_ref(), deadline);
        // What has come is taken in before the descriptor is made ready for the next sleep: that is two system calls,
        // which the peer then need not wait for. After the sleeper, or it would have its own bell rung.
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
        // The call looks once more for data or space, as the kernel does.
        Err(libc::EINTR) if !patience.is_partial && patience.is_interrupted() => Ok(false),
        slept => slept.map(|_| false),
    }
}

/// What a sleep came to.
enum Slept {
    /// What was awaited was there before.
    Not,
    /// The waiter was rung, or there was no reason.
    Rung,
    /// Something has completed, and the waiter was not rung.
    Completed,
}

/// One sleep: until the waiter is rung, or there is something for the poller.
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
    // Arming has taken in what had come until then; what comes later makes the descriptor readable. A peer that was
    // told of this sleeper before it says that it sleeps does not wake it, but has written before that: one more look.
    // So what a peer that does see it has to wait for is not much more than the way into the kernel. What the other has
    // written a third thread may have taken by now: then the word is gone too, and nobody would tell of what follows.
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

/// A waiter for the time of one sleep.
struct Lease<'a> {
    waiters: &'a Waiters,
    waiter: WaiterId,
    futex: *const u32,
    /// As the futex was before anything was looked at.
    ticket: u32,
    sleeps: bool,
}

impl<'a> Lease<'a> {
    /// `polls`: beside being rung there is a descriptor to sleep on. What could be a reason not to sleep is looked
    /// at after this.
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

    /// From now on peers see that the waiter sleeps, or is just about to.
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.sleeps, true) {
            self.waiters.enter_sleep(self.waiter);
        }
    }

    /// Sleeps until the waiter is rung, or there is something for the poller. A cancellation point. A signal handler
    /// above the sleep ends it, also one that runs just before the kernel's call.
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

/// A thread's interest for as long as the value lives. The thread looks once more after making
/// it, and sleeps on the waiter's doorbell then.
pub struct Sleeper {
    pub socket: &'static Socket,
    waiter: WaiterId,
}

impl Sleeper {
    /// From now on the waiter's doorbell rings when there is `data` to read, or `space` to write.
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
