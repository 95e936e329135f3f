//! Completion queues, and the channels that tell of what comes into them. What a completion means is for others.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_sys as ffi;
use rdmasock_core::fabric::plugin::host;
use rdmasock_core::lock::Lock;

use super::context::Context;
use crate::error::{Errno, Result, check_code};

pub use ffi::ibv_wc_status as status;

/// A completion queue.
pub struct Cq {
    pub(super) ptr: NonNull<ffi::ibv_cq>,
    channel: Arc<CompletionChannel>,
    /// An event was asked for: it is to come, or in the channel, or who has taken it asks for the next one.
    is_armed: AtomicBool,
}

// SAFETY: verbs may be called from any thread.
unsafe impl Send for Cq {}
// SAFETY: as for Send.
unsafe impl Sync for Cq {}

/// One completion.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    /// What the work request was given.
    pub id: u64,
    /// One of [`status`].
    pub status: u32,
    /// Bytes received, or placed.
    pub bytes: u32,
    /// Of a WRITE with one, in host order.
    pub immediate: Option<u32>,
}

/// How many completions are taken at once.
pub const BATCH: usize = 16;

impl Cq {
    /// One that tells by this channel, which is of the same device.
    pub fn new(context: Context, channel: &Arc<CompletionChannel>, entries: u32) -> Result<Self> {
        let entries = c_int::try_from(entries).map_err(|_| Errno(libc::EINVAL))?;
        // SAFETY: context and channel live, the channel as long as the queue; null is handled.
        let ptr = unsafe { ffi::ibv_create_cq(context.0.as_ptr(), entries, null_mut(), channel.ptr.as_ptr(), 0) };
        let ptr = NonNull::new(ptr).ok_or_else(Errno::last)?;
        let cq = Self {
            ptr,
            channel: channel.clone(),
            is_armed: AtomicBool::new(false),
        };
        channel.queues.lock().ok_or(Errno(libc::EDEADLK))?.push(QueuePtr(ptr));
        Ok(cq)
    }

    pub fn fd(&self) -> c_int {
        self.channel.fd
    }

    /// Takes what has completed; gives how many of `into` that are.
    pub fn poll(&self, into: &mut [Done; BATCH]) -> Result<usize> {
        let mut wcs = [const { MaybeUninit::<ffi::ibv_wc>::zeroed() }; BATCH];
        let at = wcs.as_mut_ptr().cast::<ffi::ibv_wc>();
        // SAFETY: the queue lives; at most BATCH completions are written, which is what there is room for.
        let got = unsafe {
            let poll = (*(*self.ptr.as_ptr()).context).ops.poll_cq.ok_or(Errno(libc::ENOSYS))?;
            poll(self.ptr.as_ptr(), BATCH as c_int, at)
        };
        let got = usize::try_from(got).map_err(|_| Errno(libc::EIO))?.min(BATCH);
        for (done, wc) in into.iter_mut().zip(&wcs).take(got) {
            // SAFETY: zeroed, and then written by the provider: numbers only. Each is read as it is.
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

    /// The next completion makes the channel's fd readable, which it is not any more because of the past. No system
    /// call but a look at the channel where the last event asked for has not come.
    ///
    /// What the look finds of another queue is taken, too, and that one is asked for its next event in its owner's
    /// place: who arms one queue of a channel arms and then polls all of them, and may have armed that one before. Two
    /// at once: one of them may return before the other has asked; what came until then is for that other to find, who
    /// has to look once more as everybody.
    pub fn arm(&self) -> Result<()> {
        if !self.is_armed.swap(true, Ordering::AcqRel) {
            // SAFETY: the queue lives.
            return unsafe { ask(self.ptr) };
        }
        while let Some(event) = self.channel.take() {
            if event.queue == self.ptr {
                // SAFETY: the queue lives.
                return unsafe { ask(self.ptr) };
            }
            self.channel.ask_again(&event);
        }
        Ok(())
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // Nobody else asks it for events afterwards. Who has taken one has still to acknowledge it, for which this
        // waits.
        let Some(mut queues) = self.channel.queues.lock() else {
            // In a handler above this thread's own use of the list: it stays.
            return;
        };
        queues.retain(|queue| queue.0 != self.ptr);
        drop(queues);
        // SAFETY: made by ibv_create_cq, destroyed once; its queue pair had an Arc of it and is gone. An event of it
        // that is in the channel goes with it, and one that was taken is acknowledged by its `Taken`.
        unsafe { ffi::ibv_destroy_cq(self.ptr.as_ptr()) };
    }
}

/// Asks a queue for an event of its next completion.
///
/// # Safety
/// The queue lives, and nobody has begun to destroy it.
unsafe fn ask(queue: NonNull<ffi::ibv_cq>) -> Result<()> {
    // SAFETY: by this function's contract.
    unsafe {
        let notify = (*(*queue.as_ptr()).context)
            .ops
            .req_notify_cq
            .ok_or(Errno(libc::ENOSYS))?;
        check_code(notify(queue.as_ptr(), 0))
    }
}

/// A queue as its channel's list has it.
struct QueuePtr(NonNull<ffi::ibv_cq>);

// SAFETY: verbs may be called from any thread.
unsafe impl Send for QueuePtr {}

/// Tells by one fd of what comes into one completion queue, or several.
pub struct CompletionChannel {
    ptr: NonNull<ffi::ibv_comp_channel>,
    fd: c_int,
    /// Its queues, but for those that are being destroyed.
    queues: Lock<Vec<QueuePtr>>,
}

// SAFETY: verbs may be called from any thread; the fd is only written before the channel is shared and after it is not
// any more.
unsafe impl Send for CompletionChannel {}
// SAFETY: as for Send.
unsafe impl Sync for CompletionChannel {}

/// An event that was taken out of a channel; dropping it acknowledges it, and until then its queue's memory stays:
/// destroying it waits for that (ibv_get_cq_event(3)).
struct Taken {
    queue: NonNull<ffi::ibv_cq>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: the queue's memory stays until this; acknowledged once.
        unsafe { ffi::ibv_ack_cq_events(self.queue.as_ptr(), 1) };
    }
}

impl CompletionChannel {
    pub fn new(context: Context) -> Result<Self> {
        // SAFETY: the context lives; null is handled.
        let ptr = NonNull::new(unsafe { ffi::ibv_create_comp_channel(context.0.as_ptr()) }).ok_or_else(Errno::last)?;
        // SAFETY: it was just made and nobody else has it; it closes its fd if that was not moved.
        unsafe {
            match host::hide((*ptr.as_ptr()).fd) {
                Ok(fd) => {
                    (*ptr.as_ptr()).fd = fd;
                    Ok(Self {
                        ptr,
                        fd,
                        queues: Lock::new(Vec::new()),
                    })
                }
                Err(errno) => {
                    ffi::ibv_destroy_comp_channel(ptr.as_ptr());
                    Err(errno)
                }
            }
        }
    }

    /// The next event, if there is one.
    fn take(&self) -> Option<Taken> {
        let (mut queue, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel lives, and its fd is nonblocking; both are written on success. The queue that the call
        // looks at is there: the kernel drops a queue's events when it destroys it, and has counted this one otherwise.
        if unsafe { ffi::ibv_get_cq_event(self.ptr.as_ptr(), &mut queue, &mut context) } != 0 {
            return None;
        }
        NonNull::new(queue).map(|queue| Taken { queue })
    }

    /// Asks the queue of an event for the next one, unless it is being destroyed: its memory is there, but not what a
    /// provider writes to when it is asked (siw unmaps that first).
    fn ask_again(&self, event: &Taken) {
        let Some(queues) = self.queues.lock() else {
            // In a handler above this thread's own use of the list. Then the queue may be half destroyed.
            return;
        };
        if queues.iter().any(|queue| queue.0 == event.queue) {
            // What is wrong with it is for its owner to find.
            // SAFETY: it is in the list, which who destroys it takes it from first, under the lock.
            let _ = unsafe { ask(event.queue) };
        }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: its completion queues, the only users, are gone; destroyed once. Without its fd it is memory only.
        unsafe {
            (*self.ptr.as_ptr()).fd = -1;
            host::close(self.fd);
            ffi::ibv_destroy_comp_channel(self.ptr.as_ptr());
        }
    }
}
