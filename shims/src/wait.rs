//! Waiting in one call: spin, then sleep until the peer, or this process, says that there is something (ARCHITECTURE, I8).
//!
//! A *waiter* is what a peer can wake: a number that is the same on all links, what it sleeps on, and a
//! flag that says whether somebody does. The flags of an instance lie in a page that peers map
//! read-only. Waiter 0 is the service thread; 1..READY_QUEUES have a ready queue on each link and belong
//! to epoll sets; those above belong to threads that sleep in one call, and are handed round.

mod asleep;
mod record;
mod spin;
mod waiters;

use libc::c_int;
pub use rdmasock_core::fabric::waiter::{FLAGS_BYTES, MAX_WAITERS, SLEEPER_MASK, WaiterId};
use rdmasock_core::stats::Call;

use crate::jump::within;
use crate::library::Library;
use crate::link::{Link, Poller, Remote};
use crate::points::point;
use crate::ready::Sleeper;
use crate::socket::Socket;
use crate::time::Deadline;

pub use rdmasock_core::fabric::asleep::Slots;
pub use record::Record;
pub use spin::{Spinner, after_fork, glance};
pub use waiters::{SERVICE, Waiters};

/// How long one blocking call may still wait, by the socket's own time-out option. Looked up at the
/// first wait.
#[derive(Default)]
pub struct Patience(Option<Deadline>);

/// Waits until there may be something to read, for a call that [may wait](may_wait). True if that came while it spun. `Err`
/// is the errno that it fails with.
pub fn for_data(socket: &'static Socket, patience: &mut Patience) -> Result<bool, c_int> {
    within(|| wait_on(socket, patience, &socket.rx_spin, true))
}

/// Waits until there may be room to write; as `for_data`.
pub fn for_space(socket: &'static Socket, patience: &mut Patience) -> Result<bool, c_int> {
    within(|| wait_on(socket, patience, &socket.tx_spin, false))
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
fn wait_on(
    socket: &'static Socket,
    patience: &mut Patience,
    spinner: &Spinner,
    data: bool,
) -> Result<bool, c_int> {
    let there = || {
        if data {
            crate::rx::is_worth_a_look(socket)
        } else {
            crate::tx::is_worth_a_look(socket)
        }
    };
    let come = || {
        crate::ready::progress(socket);
        there()
    };
    if spinner.spin(spinner.bound(), come) {
        return Ok(true);
    }
    if !data && crate::tx::make_room(socket) {
        return Ok(true);
    }
    // Before each sleep: O_NONBLOCK may have been set since the last.
    let Some(bound) = crate::blocking::patience(socket, data) else {
        return Err(libc::EAGAIN);
    };
    let deadline = *patience.0.get_or_insert_with(|| bound.deadline());
    if deadline.is_over() {
        return Err(libc::EAGAIN);
    }
    let waiters = &crate::library::Library::get().waiters;
    let remote = socket.link().and_then(Link::remote);
    let Some(mut lease) = Lease::new(waiters, remote.is_some()) else {
        // Out of waiters or fds: look now and then.
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        });
        return Ok(false);
    };
    // On a link to another host the sleeper itself is woken by what completes. First: arming looks at what has come, and
    // would ring the sleeper's bell for it.
    let poller = remote.and_then(Remote::become_poller);
    let sleeper = Sleeper::new(socket, lease.waiter, data, !data);
    point!("wait: the peer knows of the sleeper");
    // Arming has taken in what had come until then; what comes later makes the descriptor readable. A peer that was told of
    // this sleeper before it says that it sleeps does not wake it, but has written before that: one more look. So what a peer
    // that does see it has to wait for is not much more than the way into the kernel.
    lease.begin();
    if there() {
        return Ok(false);
    }
    let call = if data { Call::Receive } else { Call::Send };
    let unread = if data {
        None
    } else {
        crate::tx::unread(socket)
    };
    let page = Library::get().stats;
    let record = Record::begin(
        page,
        lease.waiter,
        call,
        Some(socket.slot),
        unread.unwrap_or(0),
    );
    point!("wait: is about to sleep");
    let slept = lease.sleep(deadline.left(), poller.as_ref());
    point!("wait: is awake");
    drop(record);
    // What has come is taken in before the descriptor is made ready for the next sleep: that is two system calls, which the
    // peer then need not wait for. After the sleeper, or it would have its own bell rung.
    drop(sleeper);
    if poller.is_some() && slept.is_ok() {
        crate::ready::progress(socket);
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
