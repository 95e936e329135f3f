//! Makes a connection within a time: resolves address and route, makes the queue pair, connects.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::Address;
use rdmasock_core::fabric::plugin::serve::Connection;

use crate::conn::{Conn, Verdict, verdict};
use crate::device;
use crate::error::{Errno, Result};
use crate::explain::explain;
use crate::sys::{Id, event};

/// How long the connecting end on iWARP waits before anything is sent. siw's accept answers first and takes over the
/// socket afterwards; data that arrives in between is not read until more arrives. Without the wait, one in 50
/// connections in the lab stood still.
const IWARP_SETTLES: Duration = Duration::from_millis(50);

/// Connects, from one port; shares the resources of `beside` if there is one. The timeout applies to the resolution of
/// the route, and again to the peer's answer. On siw the call itself waits for the TCP connection, until the kernel's
/// own timeout.
pub(crate) fn connect(
    local: &Address,
    remote: &Address,
    private: &[u8],
    timeout: Duration,
    beside: Option<&Conn>,
) -> Result<Conn> {
    let until = after(timeout)?;
    device::open(local)?;
    let id = Id::new().map_err(|errno| explain("opening the connection manager", errno))?;
    let local = Address { port: 0, ..*local };
    id.resolve_address(&local, remote, milliseconds(until))?;
    expect(&id, event::RDMA_CM_EVENT_ADDR_RESOLVED, until)?;
    id.resolve_route(milliseconds(until))?;
    expect(&id, event::RDMA_CM_EVENT_ROUTE_RESOLVED, until)?;
    let conn = Conn::new(id)?;
    conn.connect(private, beside)?;
    let until = after(timeout)?;
    loop {
        match conn.state() {
            0 => wait(conn.id(), until)?,
            1 => {
                conn.check_offer()?;
                if conn.is_iwarp() {
                    std::thread::sleep(IWARP_SETTLES);
                    conn.queue()?.greet()?;
                }
                return Ok(conn);
            }
            code => return Err(explain("connecting", Errno(-code))),
        }
    }
}

fn after(timeout: Duration) -> Result<Instant> {
    Instant::now().checked_add(timeout).ok_or(Errno(libc::EINVAL))
}

/// Waits for the event `wanted`. Fails with the reason if another event shows that it will not arrive.
fn expect(id: &Id, wanted: u32, until: Instant) -> Result<()> {
    loop {
        match id.channel().next()? {
            Some(event) if event.kind == wanted => return Ok(()),
            Some(event) => {
                if let Verdict::Over(reason) = verdict(event.kind, event.status) {
                    return Err(explain("finding the way", reason));
                }
            }
            None => wait(id, until)?,
        }
    }
}

/// Sleeps until the id has an event, or until the deadline; ETIMEDOUT if that has passed.
fn wait(id: &Id, until: Instant) -> Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Errno(libc::ETIMEDOUT));
    }
    let timeout = Timespec::try_from(left).map_err(|_| Errno(libc::EINVAL))?;
    // SAFETY: the channel's fd is open as long as the id, which is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(id.channel().fd()) };
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns the remaining time in ms, at least 1: the kernel does not accept 0.
fn milliseconds(until: Instant) -> i32 {
    let left = until.saturating_duration_since(Instant::now()).as_millis();
    i32::try_from(left).unwrap_or(i32::MAX).max(1)
}
