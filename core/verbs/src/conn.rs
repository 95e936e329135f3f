//! A connection: its rdma_cm id, its queue, and its state.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rdmasock_core::fabric::plugin::serve::Connection;
use rdmasock_core::fabric::plugin::{Fate, Info, PRIVATE_BYTES};
use rdmasock_core::fabric::remote::qp::{Completed, Read, Region, Role, Write};
use rdmasock_core::lock::Lock;

use crate::error::{Errno, Result};
use crate::explain::{debug, explain};
use crate::probe_target::{Offer, compose};
use crate::queue::{Common, Queue};
use crate::sizes::Sizes;
use crate::sys::{Context, Event, Id, Private, event};

/// The time-out of an acknowledgement, as the exponent for `Id::set_ack_timeout`: about 1 s. A request is repeated
/// seven times, so the connection ends after a silence of the peer of about 8 s.
const ACK_TIMEOUT: u8 = 18;

/// The most READs that may be outstanding on a connection for bulk. With several, further READs are on their way while
/// the peer's device answers one.
const BULK_READS: u32 = 8;

/// A connection, from its request on. The order of the fields is the order in which they have to be dropped.
pub(crate) struct Conn {
    /// Set by `accept` or `connect`.
    queue: OnceLock<Queue>,
    /// The private data of the peer's accept. A thread handles the events of the id only while it holds this lock.
    private: Lock<Private>,
    /// The memory that the peer offers for this end's probes.
    offer: OnceLock<Offer>,
    /// Whether rdma_disconnect was called.
    left: AtomicBool,
    fate: Arc<Fate>,
    context: Context,
    id: Arc<Id>,
}

impl Conn {
    /// Makes a connection for an id that has a device: the id of a request, or an id whose route is resolved. ENODEV if
    /// it has none.
    pub(crate) fn new(id: Id) -> Result<Self> {
        Ok(Self {
            queue: OnceLock::new(),
            private: Lock::new(Private::NONE),
            offer: OnceLock::new(),
            left: AtomicBool::new(false),
            fate: Arc::default(),
            context: id.context().ok_or(Errno(libc::ENODEV))?,
            id: Arc::new(id),
        })
    }

    /// Returns the id, for `connect`, which waits on its events.
    pub(crate) fn id(&self) -> &Id {
        &self.id
    }

    /// Returns whether the device is an iWARP device.
    pub(crate) fn is_iwarp(&self) -> bool {
        self.context.is_iwarp()
    }

    /// Returns the queue. ENOTCONN before `accept` or `connect` has made it.
    pub(crate) fn queue(&self) -> Result<&Queue> {
        self.queue.get().ok_or(Errno(libc::ENOTCONN))
    }

    /// Stores the peer's offer of memory for probes, if `private`, the peer's private data, contains one.
    pub(crate) fn hear(&self, private: &Private) {
        if let Some(offer) = Offer::read(private) {
            let _ = self.offer.set(offer);
        }
    }

    /// Fails with EPROTO if probes need memory of the peer (on iWARP) and the peer has offered none.
    pub(crate) fn check_offer(&self) -> Result<()> {
        let is_missing = self.is_iwarp() && self.offer.get().is_none();
        if is_missing { Err(Errno(libc::EPROTO)) } else { Ok(()) }
    }

    /// Begins to connect. If there is a connection `beside`, this one shares its resources. [`state`](Self::state)
    /// reports the result.
    pub(crate) fn connect(&self, private: &[u8], beside: Option<&Self>) -> Result<()> {
        let depth = self.make_queue(false, beside)?;
        let private = compose(private, self.queue()?.offer())?;
        self.id
            .connect(&private, depth)
            .map_err(|errno| explain("connecting", errno))
    }

    /// Makes the queue. Returns the number of READs that each end may have outstanding. For a connection beside
    /// another, which is for bulk, this is `BULK_READS`, or the device's limit if that is lower. Otherwise it is one,
    /// for a probe on iWARP (RoCE and InfiniBand do not use it, but some devices require at least one).
    fn make_queue(&self, accepts: bool, beside: Option<&Self>) -> Result<u8> {
        let (common, wish) = match beside {
            None => (Common::new(self.context)?, Sizes::MESSAGES),
            Some(other) => (self.common_with(other)?, Sizes::BULK),
        };
        let limits = self.context.limits()?;
        let sizes = wish.fit(&limits).ok_or(Errno(libc::EOPNOTSUPP))?;
        self.id.set_ack_timeout(ACK_TIMEOUT);
        let depth = limits.max_reads.min(if beside.is_some() { BULK_READS } else { 1 }) as u8;
        let reads = if beside.is_some() { depth } else { 0 };
        let queue = Queue::new(&self.id, common, sizes, reads, &self.fate, accepts)?;
        self.queue.set(queue).map_err(|_| Errno(libc::EISCONN))?;
        Ok(depth)
    }

    /// Returns the resources of `other`, which this connection is to share. ENODEV if `other` is on another device,
    /// ENOTCONN if it has no queue yet.
    fn common_with(&self, other: &Self) -> Result<Common> {
        if self.context != other.context {
            let doing = "connecting beside a connection that is on another device";
            return Err(explain(doing, Errno(libc::ENODEV)));
        }
        Ok(other.queue()?.common())
    }

    fn on_event(&self, event: &Event, private: &mut Private) {
        match verdict(event.kind, event.status) {
            Verdict::Nothing => {}
            Verdict::Up => {
                *private = event.private;
                self.hear(private);
                self.fate.up();
            }
            Verdict::Over(reason) => {
                if self.fate.end(reason) {
                    debug(format_args!("verbs: connection over: event {}, {reason}", event.kind));
                }
                if event.kind == event::RDMA_CM_EVENT_DISCONNECTED {
                    self.leave();
                }
            }
        }
    }

    /// Disconnects, only once. The work requests of the queue pair complete with an error, and the peer is notified.
    fn leave(&self) {
        if self.queue.get().is_some() && !self.left.swap(true, Ordering::Relaxed) {
            let _ = self.id.disconnect();
        }
    }
}

impl Connection for Conn {
    fn accept(&self, private: &[u8], beside: Option<&Self>) -> Result<()> {
        if let Some(reason) = self.fate.over() {
            return Err(reason);
        }
        self.check_offer()?;
        let depth = self.make_queue(true, beside)?;
        let private = compose(private, self.queue()?.offer())?;
        self.id.accept(&private, depth).map_err(|errno| {
            self.fate.end(errno);
            explain("accepting", errno)
        })
    }

    fn reject(self) {
        let _ = self.id.reject();
    }

    // Fails with ENOTCONN before there is a queue.
    fn info(&self) -> Result<Info> {
        let queue = self.queue()?;
        let private = self.private.lock().map_or(Private::NONE, |private| *private);
        Ok(Info {
            state_fd: self.id.channel().fd(),
            completion_fd: queue.completion_fd(),
            limits: queue.limits(),
            private: words(&private),
        })
    }

    fn state(&self) -> i32 {
        // If another thread is handling events, this returns the current state without waiting.
        if let Some(mut private) = self.private.try_lock() {
            loop {
                match self.id.channel().next() {
                    Ok(Some(event)) => self.on_event(&event, &mut private),
                    Ok(None) => break,
                    Err(errno) => {
                        self.fate.end(errno);
                        break;
                    }
                }
            }
        }
        self.fate.code()
    }

    unsafe fn register(&self, at: *mut c_void, len: usize, role: Role) -> Result<Region> {
        // SAFETY: by this function's contract.
        unsafe { self.queue()?.register(at, len, role) }
    }

    fn deregister(&self, handle: u64) {
        if let Ok(queue) = self.queue() {
            queue.deregister(handle);
        }
    }

    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.queue()?.write(write, immediate) }
    }

    unsafe fn read(&self, read: &Read) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.queue()?.read(read) }
    }

    fn send(&self, message: &[u8]) -> Result<()> {
        self.queue()?.send(message)
    }

    fn probe(&self) -> Result<()> {
        self.queue()?.probe(self.offer.get().copied())
    }

    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize> {
        self.queue()?.poll(each)
    }

    fn arm(&self) -> Result<()> {
        self.queue()?.arm()
    }

    fn disconnect(&self) {
        self.fate.end(Errno(libc::ENOTCONN));
        self.leave();
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Returns the library's part of a peer's private data.
pub(crate) fn words(private: &Private) -> [u8; PRIVATE_BYTES] {
    private.bytes.first_chunk().copied().unwrap_or([0; PRIVATE_BYTES])
}

/// The effect of an rdma_cm event on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Nothing,
    Up,
    Over(Errno),
}

/// Returns the effect of an event, by its kind and status.
pub(crate) fn verdict(kind: u32, status: i32) -> Verdict {
    // A negative status is a negative errno. A positive status is a reason code of the transport, which is ignored.
    let or = |default| Errno(status.checked_neg().filter(|errno| *errno > 0).unwrap_or(default));
    match kind {
        event::RDMA_CM_EVENT_ESTABLISHED => Verdict::Up,
        event::RDMA_CM_EVENT_DISCONNECTED => Verdict::Over(Errno(libc::ECONNRESET)),
        event::RDMA_CM_EVENT_REJECTED => Verdict::Over(Errno(libc::ECONNREFUSED)),
        event::RDMA_CM_EVENT_UNREACHABLE => Verdict::Over(or(libc::EHOSTUNREACH)),
        event::RDMA_CM_EVENT_CONNECT_ERROR => Verdict::Over(or(libc::EIO)),
        event::RDMA_CM_EVENT_ADDR_ERROR | event::RDMA_CM_EVENT_ROUTE_ERROR => Verdict::Over(or(libc::EHOSTUNREACH)),
        event::RDMA_CM_EVENT_DEVICE_REMOVAL => Verdict::Over(Errno(libc::ENODEV)),
        _ => Verdict::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_an_errno() {
        let over = |code| Verdict::Over(Errno(code));
        assert_eq!(verdict(event::RDMA_CM_EVENT_ESTABLISHED, 0), Verdict::Up);
        assert_eq!(verdict(event::RDMA_CM_EVENT_REJECTED, 28), over(libc::ECONNREFUSED));
        assert_eq!(
            verdict(event::RDMA_CM_EVENT_UNREACHABLE, -libc::ETIMEDOUT),
            over(libc::ETIMEDOUT)
        );
        assert_eq!(verdict(event::RDMA_CM_EVENT_CONNECT_ERROR, 3), over(libc::EIO));
        assert_eq!(verdict(event::RDMA_CM_EVENT_CONNECT_ERROR, i32::MIN), over(libc::EIO));
        assert_eq!(verdict(event::RDMA_CM_EVENT_TIMEWAIT_EXIT, 0), Verdict::Nothing);
    }
}
