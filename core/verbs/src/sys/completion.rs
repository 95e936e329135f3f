//! Completion queues, and the channels that report their events. `queue.rs` interprets the completions.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::Arc;

pub(crate) use ffi::ibv_wc_status as status;
use rdma_sys as ffi;
use rdmasock_core::fabric::plugin;

use super::Object;
use super::context::Context;
use crate::error::{Errno, Result, check_code};

/// A completion queue.
pub(crate) struct Cq {
    pub(super) ptr: Object<ffi::ibv_cq>,
    channel: Arc<CompletionChannel>,
}

/// A completion.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    /// The id of the work request.
    pub id: u64,
    /// The status, one of [`status`].
    pub status: u32,
    /// The number of bytes of a message, or of the peer's WRITE with an immediate.
    pub bytes: u32,
    /// The immediate value of the peer's WRITE, in host order; `None` for other completions.
    pub immediate: Option<u32>,
}

/// The most completions that one poll of a queue returns.
pub(crate) const BATCH: usize = 16;

impl Cq {
    /// Makes a queue of `entries` completions that reports to `channel`, which belongs to the same device.
    pub(crate) fn new(context: Context, channel: &Arc<CompletionChannel>, entries: u32) -> Result<Self> {
        let entries = c_int::try_from(entries).map_err(|_| Errno(libc::EINVAL))?;
        // SAFETY: context and channel live, and the queue keeps an Arc of the channel. Null is handled.
        let ptr = unsafe { ffi::ibv_create_cq(context.0.as_ptr(), entries, null_mut(), channel.ptr.as_ptr(), 0) };
        Ok(Self {
            ptr: Object::made(ptr)?,
            channel: channel.clone(),
        })
    }

    pub(crate) fn fd(&self) -> c_int {
        self.channel.fd
    }

    /// Removes completions from the queue and writes them to `into`. Returns their number.
    pub(crate) fn poll(&self, into: &mut [Done; BATCH]) -> Result<usize> {
        let mut wcs = [const { MaybeUninit::<ffi::ibv_wc>::zeroed() }; BATCH];
        let at = wcs.as_mut_ptr().cast::<ffi::ibv_wc>();
        // SAFETY: the queue lives. The provider writes at most BATCH completions, for which the array has room.
        let got = unsafe {
            let poll = (*(*self.ptr.as_ptr()).context).ops.poll_cq.ok_or(Errno(libc::ENOSYS))?;
            poll(self.ptr.as_ptr(), BATCH as c_int, at)
        };
        let got = usize::try_from(got).map_err(|_| Errno(libc::EIO))?.min(BATCH);
        for (done, wc) in into.iter_mut().zip(&wcs).take(got) {
            // SAFETY: the entry was zeroed, then written by the provider. All fields are numbers, so any bytes are
            // valid.
            let wc = unsafe { wc.assume_init_ref() };
            let with_immediate = wc.opcode == ffi::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
            // SAFETY: both members of the union are a u32.
            let immediate = unsafe { wc.imm_data_invalidated_rkey_union.imm_data };
            *done = Done {
                id: wc.wr_id,
                status: wc.status,
                bytes: wc.byte_len,
                immediate: with_immediate.then(|| u32::from_be(immediate)),
            };
        }
        Ok(got)
    }

    /// Makes the channel's fd readable at the next completion of this queue. First removes all events from the channel,
    /// also the events of other queues, so that old events do not keep the fd readable. So the owner of several queues
    /// on a channel arms all of them, and then polls all of them. If two threads arm at the same time, one thread may
    /// remove the event of a queue that the other has armed already. That is safe, because the first thread then arms
    /// and polls this queue too.
    pub(crate) fn arm(&self) -> Result<()> {
        self.channel.drain();
        // SAFETY: the queue lives.
        unsafe {
            let notify = (*(*self.ptr.as_ptr()).context)
                .ops
                .req_notify_cq
                .ok_or(Errno(libc::ENOSYS))?;
            check_code(notify(self.ptr.as_ptr(), 0))
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: the queue was made by ibv_create_cq and is destroyed once. Its queue pair had an Arc of it and is
        // gone. The kernel drops the queue's events that are still in the channel. If a thread has taken an event of
        // the queue, the call waits until the thread has acknowledged it.
        unsafe { ffi::ibv_destroy_cq(self.ptr.as_ptr()) };
    }
}

/// Reports the completions of one or more completion queues by a single fd.
pub(crate) struct CompletionChannel {
    ptr: Object<ffi::ibv_comp_channel>,
    fd: c_int,
}

impl CompletionChannel {
    pub(crate) fn new(context: Context) -> Result<Self> {
        // SAFETY: the context lives; null is handled.
        let ptr = Object::made(unsafe { ffi::ibv_create_comp_channel(context.0.as_ptr()) })?;
        // SAFETY: the channel was just made, and no other thread has it. If `hide` has not moved the fd, the
        // destruction of the channel closes it.
        unsafe {
            let fd = plugin::hide((*ptr.as_ptr()).fd).inspect_err(|_| {
                ffi::ibv_destroy_comp_channel(ptr.as_ptr());
            })?;
            (*ptr.as_ptr()).fd = fd;
            Ok(Self { ptr, fd })
        }
    }

    /// Removes all events from the channel, and acknowledges them.
    fn drain(&self) {
        let (mut queue, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel lives, and its fd is nonblocking. Both variables are written on success. The queue that
        // the call accesses still exists. If its destruction has passed the kernel, the kernel has dropped its events.
        // If not, the kernel has counted this event, and the destruction waits for its acknowledgement.
        while unsafe { ffi::ibv_get_cq_event(self.ptr.as_ptr(), &mut queue, &mut context) } == 0 {
            // SAFETY: the destruction of the queue waits for this acknowledgement (ibv_get_cq_event(3)), so its memory
            // still exists. Each event is acknowledged once.
            unsafe { ffi::ibv_ack_cq_events(queue, 1) };
        }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: the channel is destroyed once, and the completion queues, its only users, are gone. With its fd taken
        // out, the destruction only frees memory.
        unsafe {
            (*self.ptr.as_ptr()).fd = -1;
            plugin::close(self.fd);
            ffi::ibv_destroy_comp_channel(self.ptr.as_ptr());
        }
    }
}
