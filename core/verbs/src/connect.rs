//! Makes a connection, with a time-out: resolves address and route, makes the queue pair, and connects.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::Address;
use rdmasock_core::fabric::plugin::serve::Connection;

use crate::conn::{Conn, Verdict, verdict};
use crate::device;
use crate::error::{Errno, Result};
use crate::explain::explain;
use crate::sys::{Id, event};

/// How long the connecting end on iWARP waits before it sends its first message. The accepting end's siw answers the
/// request before it takes over the TCP socket. Data that arrives in between is not read until more data arrives.
/// Without the wait, one in 50 connections in the lab stood still.
const IWARP_SETTLES: Duration = Duration::from_millis(50);

/// Makes one attempt to connect. If there is a connection `beside`, the new one shares its resources. `timeout` applies
/// to the resolution of address and route together, and again to the peer's answer. On siw rdma_connect itself also
/// waits for the TCP connection, until the kernel's own time-out.
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

/// Waits for the event `wanted`. If another event ends the attempt, fails with its reason.
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

/// Sleeps until the id has an event, or until the deadline `until`. ETIMEDOUT if the deadline has passed already.
fn wait(id: &Id, until: Instant) -> Result<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Errno(libc::ETIMEDOUT));
    }
    let timeout = Timespec::try_from(left).map_err(|_| Errno(libc::EINVAL))?;
    // SAFETY: the fd of the channel is open as long as the id lives, which is borrowed here.
    let fd = unsafe { BorrowedFd::borrow_raw(id.channel().fd()) };
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns the time until the deadline in ms, at least 1, because the kernel does not accept 0.
fn milliseconds(until: Instant) -> i32 {
    let left = until.saturating_duration_since(Instant::now()).as_millis();
    i32::try_from(left).unwrap_or(i32::MAX).max(1)
}
