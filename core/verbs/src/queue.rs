//! The data path of a connection: its queue pair, completion queue and buffers. `connect.rs` and `listen.rs` connect
//! the queue pair.
//!
//! More receive buffers are posted than the peer may use, by the number of completions in a batch. The buffers of a
//! batch are posted again only after the whole batch. But the caller may grant a buffer to the peer again earlier, when
//! it gets its completion. Then one of the additional buffers serves.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdmasock_core::fabric::plugin::Fate;
use rdmasock_core::fabric::plugin::serve::Slots;
use rdmasock_core::fabric::remote::qp::{Completed, Limits, Read, Region, Role, Write};
use rdmasock_core::lock::Lock;
use rdmasock_core::sync::Published;

use crate::error::{Errno, Result};
use crate::explain::{debug, explain};
use crate::memory::Slab;
use crate::probe_target::{Offer, ProbeTarget};
use crate::sizes::Sizes;
use crate::sys::{BATCH, CompletionChannel, Context, Cq, Done, Id, Mr, Pd, Piece, Qp, Work, status};

/// The length in bytes of a receive buffer, and of a slot's buffer for a message to be sent.
const BUFFER_BYTES: usize = 4096 + 64;
/// The sizes of inline data to try, in bytes, the largest first. A device refuses a size that is too large. 80 is the
/// most that siw allows.
const INLINE: [u32; 5] = [256, 128, 80, 64, 0];
/// From this length on (in bytes), siw sends from the pages of the message itself if the work request asks for no
/// completion. A retransmission may then read the pages even after a later work request has completed. So such messages
/// ask for a completion.
const IWARP_ZERO_COPY: u32 = 4096;
/// The most batches of completions that one `poll` handles.
const BATCHES: usize = 64;
/// The bit of a work request's id that marks a receive.
const RECEIVE: u64 = 1 << 63;
/// The id of a probe. `Slots` does not count probes.
const PROBE: u64 = 1 << 62;
/// The bit of a work request's id that marks a READ. The other bits are `Turn::frees`, as in the id of a WRITE or
/// message.
const READ: u64 = 1 << 61;

/// The resources that connections beside each other share. A work request of one connection may access memory that was
/// registered with another, and one fd reports the completions of all.
#[derive(Clone)]
pub(crate) struct Common {
    context: Context,
    pd: Arc<Pd>,
    channel: Arc<CompletionChannel>,
}

impl Common {
    /// Makes new resources, for a connection that is not beside another.
    pub(crate) fn new(context: Context) -> Result<Self> {
        let pd = Pd::new(context).map_err(|errno| explain("making a protection domain", errno))?;
        let channel = CompletionChannel::new(context).map_err(|errno| explain("making a completion channel", errno))?;
        Ok(Self {
            context,
            pd: Arc::new(pd),
            channel: Arc::new(channel),
        })
    }
}

/// A queue pair and its resources. Fields are in the order in which they are dropped.
pub(crate) struct Queue {
    qp: Qp,
    cq: Arc<Cq>,
    /// The registered memory of callers, by handle.
    registered: Lock<BTreeMap<u64, Mr>>,
    /// The registration of `slab`.
    mr: Mr,
    /// The memory for probes. On iWARP only.
    probe_target: Option<ProbeTarget>,
    /// The receive buffers, then the buffers of messages to be sent, one a slot.
    slab: Arc<Slab>,
    common: Common,
    slots: Slots,
    sizes: Sizes,
    reads: u8,
    inline: u32,
    is_iwarp: bool,
    /// Whether this end may send. On iWARP the accepting end may send only after the connecting end's first message,
    /// because siw treats an earlier message as a violation.
    may_speak: Published<AtomicBool>,
    /// Whether a probe is in the send queue.
    probing: AtomicBool,
    /// Whether a thread is in `poll`.
    polling: AtomicBool,
    fate: Arc<Fate>,
}

impl Queue {
    /// Makes the queue pair of `id`, and posts its receive buffers. `reads` is the number of READs that may be
    /// outstanding. `accepts`: this is the accepting end.
    pub(crate) fn new(
        id: &Arc<Id>,
        common: Common,
        sizes: Sizes,
        reads: u8,
        fate: &Arc<Fate>,
        accepts: bool,
    ) -> Result<Self> {
        let said = |doing: &'static str| move |errno| explain(doing, errno);
        let (context, pd) = (common.context, &common.pd);
        let cq = Cq::new(context, &common.channel, sizes.completions()).map_err(said("making a completion queue"))?;
        let cq = Arc::new(cq);
        let pieces = (sizes.posted() + sizes.slots) as usize;
        let slab = Slab::new(pieces * BUFFER_BYTES).map(Arc::new)?;
        let mr = Mr::of_slab(pd, &slab, false).map_err(said("registering buffers"))?;
        let probe_target = context.is_iwarp().then(|| ProbeTarget::new(pd)).transpose();
        let probe_target = probe_target.map_err(said("registering memory for probes"))?;
        let mut made = Err(Errno(libc::EINVAL));
        for inline in INLINE {
            made = Qp::new(id, pd, &cq, [sizes.sends, sizes.posted()], inline);
            if made.is_ok() {
                break;
            }
        }
        let (qp, inline) = made.map_err(said("making a queue pair"))?;
        let queue = Self {
            qp,
            cq,
            registered: Lock::new(BTreeMap::new()),
            mr,
            probe_target,
            slab,
            common,
            slots: Slots::new(sizes.slots, sizes.bytes),
            sizes,
            reads,
            inline,
            is_iwarp: context.is_iwarp(),
            may_speak: Published::from(!accepts || !context.is_iwarp()),
            probing: AtomicBool::new(false),
            polling: AtomicBool::new(false),
            fate: fate.clone(),
        };
        let mut list = Buffers::NONE;
        for index in 0..sizes.posted() as usize {
            list.add(queue.buffer(index)?);
            if list.len == BATCH {
                queue.post_receives(&mut list)?;
            }
        }
        queue.post_receives(&mut list)?;
        Ok(queue)
    }

    /// Returns the resources that a connection beside this one shares.
    pub(crate) fn common(&self) -> Common {
        self.common.clone()
    }

    /// Returns the memory that the peer's probes may read; `None` if there is none (not iWARP).
    pub(crate) fn offer(&self) -> Option<Offer> {
        self.probe_target.as_ref().map(ProbeTarget::offer)
    }

    /// Returns the limits of the queue pair. `packet_bytes` is 0 on iWARP, where TCP divides the bytes into packets,
    /// and before the queue pair is connected.
    pub(crate) fn limits(&self) -> Limits {
        Limits {
            // `Sizes` wishes for at most 128, which fits a u16.
            receive_buffers: self.sizes.receives as u16,
            buffer_bytes: BUFFER_BYTES as u32,
            immediate: !self.is_iwarp,
            packet_bytes: if self.is_iwarp {
                0
            } else {
                self.qp.path_mtu().unwrap_or(0)
            },
            reads: self.reads,
        }
    }

    pub(crate) fn completion_fd(&self) -> i32 {
        self.cq.fd()
    }

    /// Registers memory with the device, until `deregister` or the end of this queue pair.
    ///
    /// # Safety
    /// As for `QueuePair::register`.
    pub(crate) unsafe fn register(&self, at: *mut c_void, len: usize, role: Role) -> Result<Region> {
        // SAFETY: by this function's contract. `registered` drops the registration with the queue pair.
        let mr = unsafe { Mr::of_memory(&self.common.pd, at, len, role) }
            .map_err(|errno| explain("registering memory", errno))?;
        // No two registrations of a device have the same key at a time, so the key can be the handle.
        let key = mr.key();
        let handle = key.local.into();
        let mut registered = self.registered.lock().ok_or(Errno(libc::EDEADLK))?;
        registered.insert(handle, mr);
        Ok(Region { key, handle })
    }

    /// Ends the registration `handle`. When this returns, the device does not access the memory any more.
    pub(crate) fn deregister(&self, handle: u64) {
        let given_up = self.registered.lock().and_then(|mut all| all.remove(&handle));
        // The drop is made without the lock, because it may take the device some time.
        drop(given_up);
    }

    /// Posts a WRITE.
    ///
    /// # Safety
    /// The source is within memory that was registered under its local key, and stays unchanged until the peer has the
    /// bytes.
    pub(crate) unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<()> {
        if write.len == 0 {
            return Err(Errno(libc::EINVAL));
        }
        if immediate.is_some() && self.is_iwarp {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        let source = Piece {
            at: write.from,
            len: write.len,
            key: write.local,
        };
        let (to, key) = (write.to, write.remote);
        self.post(write.len, |_| Ok((Work::Write { to, key, immediate }, source)))
    }

    /// Posts a READ.
    ///
    /// # Safety
    /// The target is within memory that was registered under its local key. No code relies on its bytes before the READ
    /// has completed, or the queue pair is destroyed.
    pub(crate) unsafe fn read(&self, read: &Read) -> Result<()> {
        if read.len == 0 {
            return Err(Errno(libc::EINVAL));
        }
        let sink = Piece {
            at: read.to,
            len: read.len,
            key: read.local,
        };
        let (from, key) = (read.from, read.remote);
        self.post(read.len, |_| Ok((Work::Read { from, key }, sink)))
    }

    /// Posts a message. Its bytes are copied.
    pub(crate) fn send(&self, message: &[u8]) -> Result<()> {
        if message.len() > BUFFER_BYTES {
            return Err(Errno(libc::EMSGSIZE));
        }
        let len = message.len() as u32;
        self.post(len, |slot| {
            let at = self.slab.piece(self.sizes.posted() as usize + slot, BUFFER_BYTES)?;
            // SAFETY: the slot has room for the message, whose length was checked. The slot belongs to this turn alone,
            // and the last work request that used it has completed.
            unsafe { message.as_ptr().copy_to_nonoverlapping(at, message.len()) };
            let key = self.mr.key().local;
            Ok((Work::Send, Piece { at, len, key }))
        })
    }

    /// Posts a work request of `len` bytes. `make` gets the number of a free slot and returns the request. EAGAIN if
    /// the queue is full or this end may not send yet; then `poll` reports `Room` later.
    fn post(&self, len: u32, make: impl FnOnce(usize) -> Result<(Work, Piece)>) -> Result<()> {
        if self.fate.code() <= 0 {
            return Err(Errno(libc::ENOTCONN));
        }
        let is_silent = || !self.may_speak.look();
        if is_silent() && self.slots.turn_away(is_silent) {
            return Err(Errno(libc::EAGAIN));
        }
        let mut turn = self.slots.turn(len).ok_or(Errno(libc::EAGAIN))?;
        let (work, piece) = make(turn.slot)?;
        // Each READ asks for a completion, because `poll` reports it.
        let is_read = matches!(work, Work::Read { .. });
        turn.signal |= is_read;
        let id = turn.frees | if is_read { READ } else { 0 };
        let inline = !is_read && len <= self.inline;
        let lent = matches!(work, Work::Send) && self.is_iwarp && len >= IWARP_ZERO_COPY;
        // SAFETY: a slot is not reused before its work request has completed. Other memory is valid by the contracts of
        // `write` and `read`.
        let posted = unsafe { self.qp.post(id, work, piece, turn.signal || lent, inline) };
        match posted {
            Ok(()) => {
                self.slots.posted(turn);
                Ok(())
            }
            Err(errno) => Err(self.give_up(errno)),
        }
    }

    /// Posts a probe: a work request that completes only when the peer's device has answered it, after all earlier
    /// requests. The send queue always has room for it. On RoCE and InfiniBand the probe is a WRITE of no bytes, which
    /// completes when the peer's device has acknowledged it. On iWARP a WRITE completes as soon as TCP has taken it, so
    /// there the probe is a READ from `target`, the memory that the peer offers for probes.
    pub(crate) fn probe(&self, target: Option<Offer>) -> Result<()> {
        if self.fate.code() <= 0 {
            return Err(Errno(libc::ENOTCONN));
        }
        // Only one probe may be under way: the send queue keeps room for one.
        if !self.may_speak.load(Ordering::Acquire) || self.probing.load(Ordering::Acquire) {
            return Err(Errno(libc::EAGAIN));
        }
        let (work, piece) = match &self.probe_target {
            Some(probe_target) => {
                let Offer { key, address: from } = target.ok_or(Errno(libc::EOPNOTSUPP))?;
                (Work::Read { from, key }, probe_target.sink()?)
            }
            None => (Work::WriteNothing, Piece::NONE),
        };
        self.probing.store(true, Ordering::Release);
        // SAFETY: the memory that a READ writes to is `probe_target`'s, which lives as long as the queue pair and is
        // used for probes only.
        let posted = unsafe { self.qp.post(PROBE, work, piece, true, false) };
        posted.map_err(|errno| self.give_up(errno))
    }

    /// Ends the connection after a failed post. By the count of `slots` the queue had room, so the failure is
    /// permanent.
    fn give_up(&self, errno: Errno) -> Errno {
        if self.fate.end(errno) {
            debug(format_args!("verbs: posting failed: {errno}"));
        }
        Errno(libc::ENOTCONN)
    }

    /// Makes the completion fd readable at the next completion.
    pub(crate) fn arm(&self) -> Result<()> {
        match self.fate.over() {
            Some(reason) => Err(reason),
            None => self.cq.arm(),
        }
    }

    /// Passes each completion that is an event for the caller to `each`. Returns the number of events. If the
    /// connection has ended, passes the completions from before the end, then fails with the reason.
    pub(crate) fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize> {
        // The contract permits one caller at a time. To be safe, a second caller gets no event.
        if self.polling.swap(true, Ordering::Acquire) {
            return Ok(0);
        }
        let events = self.take_batches(each);
        self.polling.store(false, Ordering::Release);
        match (events, self.fate.over()) {
            (0, Some(reason)) => Err(reason),
            _ => Ok(events),
        }
    }

    fn take_batches(&self, each: &mut dyn FnMut(Completed<'_>)) -> usize {
        let mut events = 0;
        for _ in 0..BATCHES {
            let mut batch = [Done::default(); BATCH];
            let got = match self.cq.poll(&mut batch) {
                Ok(got) => got,
                Err(errno) => {
                    self.fate.end(errno);
                    break;
                }
            };
            let mut again = Buffers::NONE;
            for done in batch.iter().take(got) {
                events += self.take(done, &mut again, each);
            }
            if let Err(errno) = self.post_receives(&mut again)
                && self.fate.end(errno)
            {
                debug(format_args!("verbs: posting receive buffers failed: {errno}"));
            }
            if got < BATCH {
                break;
            }
        }
        events
    }

    /// Handles one completion, and passes its events to `each`. Returns the number of events. Adds a used receive
    /// buffer to `again`.
    fn take(&self, done: &Done, again: &mut Buffers, each: &mut dyn FnMut(Completed<'_>)) -> usize {
        if let Some(reason) = failure(done.status) {
            if self.fate.end(reason) {
                debug(format_args!("verbs: a work request failed with status {}", done.status));
            }
            return 0;
        }
        if done.id == PROBE {
            self.probing.store(false, Ordering::Release);
            each(Completed::Probed);
            return 1;
        }
        let mut events = 0;
        if done.id & RECEIVE == 0 {
            if done.id & READ != 0 {
                each(Completed::Read);
                events += 1;
            }
            if self.slots.completed(done.id & !READ) {
                each(Completed::Room);
                events += 1;
            }
            return events;
        }
        let Ok(buffer) = self.buffer((done.id & !RECEIVE) as usize) else {
            return 0;
        };
        if !self.may_speak.load(Ordering::Relaxed) {
            // This is the connecting end's first message, which is empty (see `greet`).
            self.may_speak.publish(true);
            if self.slots.is_wanted() {
                each(Completed::Room);
                events += 1;
            }
            if done.bytes == 0 {
                again.add(buffer);
                return events;
            }
        }
        match done.immediate {
            Some(immediate) => each(Completed::Written {
                immediate,
                bytes: done.bytes,
            }),
            None => {
                let len = (done.bytes as usize).min(BUFFER_BYTES);
                // SAFETY: the bytes are within the slab. The device does not write to the buffer until it is posted
                // again, which happens after the callback.
                each(Completed::Received(unsafe {
                    std::slice::from_raw_parts(buffer.1.at, len)
                }));
            }
        }
        again.add(buffer);
        events + 1
    }

    /// Sends an empty message from the connecting end on iWARP. After it the accepting end may send. The accepting
    /// end's `poll` does not report the message. It needs no credit, because more receive buffers are posted than there
    /// are credits.
    pub(crate) fn greet(&self) -> Result<()> {
        self.send(&[])
    }

    /// Returns the receive buffer with this index, and the id of the work request for it.
    fn buffer(&self, index: usize) -> Result<(u64, Piece)> {
        let piece = Piece {
            at: self.slab.piece(index, BUFFER_BYTES)?,
            len: BUFFER_BYTES as u32,
            key: self.mr.key().local,
        };
        Ok((RECEIVE | index as u64, piece))
    }

    /// Posts the buffers of the list, and empties it.
    fn post_receives(&self, buffers: &mut Buffers) -> Result<()> {
        let len = std::mem::take(&mut buffers.len);
        let posted = buffers.list.get(..len).unwrap_or_default();
        // SAFETY: the buffers lie in this queue's slab, which lives as long as the queue pair. Each buffer has just
        // completed, or was never posted before, so it has no other user.
        unsafe { self.qp.post_receives(posted) }
    }
}

/// Receive buffers that are to be posted, at most `BATCH`, each with the id of its work request.
struct Buffers {
    list: [(u64, Piece); BATCH],
    len: usize,
}

impl Buffers {
    const NONE: Self = Self {
        list: [(0, Piece::NONE); BATCH],
        len: 0,
    };

    fn add(&mut self, buffer: (u64, Piece)) {
        if let Some(place) = self.list.get_mut(self.len) {
            *place = buffer;
            self.len += 1;
        }
    }
}

/// Returns the errno with which a completion of this status ends the connection; `None` for a success.
fn failure(wc_status: u32) -> Option<Errno> {
    let errno = match wc_status {
        status::IBV_WC_SUCCESS => return None,
        status::IBV_WC_WR_FLUSH_ERR => libc::ECONNRESET,
        status::IBV_WC_RETRY_EXC_ERR | status::IBV_WC_RESP_TIMEOUT_ERR => libc::ETIMEDOUT,
        status::IBV_WC_REM_ACCESS_ERR | status::IBV_WC_LOC_ACCESS_ERR | status::IBV_WC_LOC_PROT_ERR => libc::EACCES,
        status::IBV_WC_REM_INV_REQ_ERR | status::IBV_WC_LOC_LEN_ERR => libc::EPROTO,
        status::IBV_WC_RNR_RETRY_EXC_ERR => libc::ENOBUFS,
        _ => libc::EIO,
    };
    Some(Errno(errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_but_success_is_a_failure() {
        assert_eq!(failure(0), None);
        assert!((1..30).all(|status| failure(status).is_some()));
        assert_eq!(failure(12), Some(Errno(libc::ETIMEDOUT)));
    }
}
