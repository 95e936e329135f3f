//! Waiting in one call: spin, then sleep until the peer, or this process, says that there is something (ARCHITECTURE,
//! I8). What there has to be is for the caller to say.

mod asleep;
mod record;

use libc::c_int;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::stats::Call;

use crate::blocking;
use crate::closing;
use crate::jump::within;
use crate::library::Library;
use crate::link::{Link, Poller, Remote};
use crate::points::point;
use crate::ready::{self, change_interest};
use crate::socket::{Sleeping, Socket};
use crate::time::Deadline;
use crate::waiters::Waiters;

pub use record::Record;

/// How long one blocking call may still wait, by the socket's own time-out option. Looked up at the
/// first wait.
#[derive(Default)]
pub struct Patience(Option<Deadline>);

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

/// Whether a call with these flags may wait; `Err` is the errno that it fails with otherwise.
pub fn may_wait(socket: &Socket, flags: c_int) -> Result<(), c_int> {
    if flags & libc::MSG_DONTWAIT != 0 || socket.blocking.is_nonblocking() {
        return Err(libc::EAGAIN);
    }
    Ok(())
}

// Not inlined: the forced unwind of pthread_cancel runs the destructors here (see `calls`).
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
    if spinner.spin(spinner.bound(), come) || A::avoid_sleep(socket) {
        return Ok(true);
    }
    // Before each sleep: O_NONBLOCK may have been set since the last.
    let Some(bound) = blocking::patience(socket, A::IS_DATA) else {
        return Err(libc::EAGAIN);
    };
    let deadline = *patience.0.get_or_insert_with(|| bound.deadline());
    if deadline.is_over() {
        return Err(libc::EAGAIN);
    }
    let waiters = &Library::get().waiters;
    let remote = socket.link().and_then(Link::remote);
    let Some(mut lease) = Lease::new(waiters, remote.is_some()) else {
        // Out of waiters or fds: look now and then.
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        });
        return Ok(false);
    };
    // On a link to another host the sleeper itself is woken by what completes. First: arming looks at what has come,
    // and would ring the sleeper's bell for it.
    let poller = remote.and_then(Remote::become_poller);
    let sleeper = Sleeper::new(socket, lease.waiter, A::IS_DATA, !A::IS_DATA);
    point!("wait: the peer knows of the sleeper");
    // Arming has taken in what had come until then; what comes later makes the descriptor readable. A peer that was
    // told of this sleeper before it says that it sleeps does not wake it, but has written before that: one more look.
    // So what a peer that does see it has to wait for is not much more than the way into the kernel.
    lease.begin();
    if A::is_worth_a_look(socket) {
        return Ok(false);
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
    let slept = lease.sleep(deadline.left(), poller.as_ref());
    point!("wait: is awake");
    drop(record);
    // What has come is taken in before the descriptor is made ready for the next sleep: that is two system calls, which
    // the peer then need not wait for. After the sleeper, or it would have its own bell rung.
    drop(sleeper);
    if poller.is_some() && slept.is_ok() {
        ready::progress(socket);
    }
    slept.map(|()| false)
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
        self.waiters.enter_sleep(self.waiter);
        self.sleeps = true;
    }

    /// Sleeps until the waiter is rung, or there is something for the poller. A cancellation point.
    fn sleep(&self, left: crate::time::Timeout, poller: Option<&Poller<'_>>) -> Result<(), c_int> {
        let Some(bell) = self.waiters.doorbell(self.waiter) else {
            return asleep::on_futex(self.futex, self.ticket, left);
        };
        let also = poller.map_or(bell, Poller::fd);
        if asleep::on_two(bell, also, left)? {
            self.waiters.quiet(self.waiter);
        }
        Ok(())
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
