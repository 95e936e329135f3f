//! Completion queues, and the channels that tell of what comes into them. What a completion means is for others.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_sys as ffi;
use rdmasock_core::fabric::plugin::host;

use super::context::Context;
use crate::error::{Errno, Result, check_code};

pub use ffi::ibv_wc_status as status;

/// A completion queue with a channel of its own.
#[derive(Debug)]
pub struct Cq {
    pub(super) ptr: NonNull<ffi::ibv_cq>,
    channel: CompletionChannel,
    /// An event was asked for, and has not been taken.
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
    pub fn new(context: Context, entries: u32) -> Result<Self> {
        let channel = CompletionChannel::new(context)?;
        let entries = c_int::try_from(entries).map_err(|_| Errno(libc::EINVAL))?;
        // SAFETY: context and channel live, the channel as long as the queue; null is handled.
        let ptr = unsafe { ffi::ibv_create_cq(context.0.as_ptr(), entries, null_mut(), channel.ptr.as_ptr(), 0) };
        let ptr = NonNull::new(ptr).ok_or_else(Errno::last)?;
        Ok(Self {
            ptr,
            channel,
            is_armed: AtomicBool::new(false),
        })
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

    /// Takes the channel's event, so that its fd is not readable because of the past, and asks for one more. No system
    /// call but that look where the last one asked for has not come. Two at once: one of them may return before the
    /// other has asked; what came until then is for that other to find, who has to look once more as everybody.
    pub fn arm(&self) -> Result<()> {
        if self.is_armed.load(Ordering::Acquire) {
            let (mut cq, mut context) = (null_mut(), null_mut());
            // SAFETY: the channel lives, and its fd is nonblocking; both are written on success. The channel is the
            // queue's own, so the event was its.
            unsafe {
                if ffi::ibv_get_cq_event(self.channel.ptr.as_ptr(), &mut cq, &mut context) != 0 {
                    return Ok(());
                }
                ffi::ibv_ack_cq_events(self.ptr.as_ptr(), 1);
            }
        }
        self.is_armed.store(true, Ordering::Release);
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
        // SAFETY: made by ibv_create_cq, destroyed once; its queue pair had an Arc of it and is gone, and all events
        // that were taken are acknowledged.
        unsafe { ffi::ibv_destroy_cq(self.ptr.as_ptr()) };
    }
}

#[derive(Debug)]
struct CompletionChannel {
    ptr: NonNull<ffi::ibv_comp_channel>,
    fd: c_int,
}

impl CompletionChannel {
    fn new(context: Context) -> Result<Self> {
        // SAFETY: the context lives; null is handled.
        let ptr = NonNull::new(unsafe { ffi::ibv_create_comp_channel(context.0.as_ptr()) }).ok_or_else(Errno::last)?;
        // SAFETY: it was just made and nobody else has it; it closes its fd if that was not moved.
        unsafe {
            match host::hide((*ptr.as_ptr()).fd) {
                Ok(fd) => {
                    (*ptr.as_ptr()).fd = fd;
                    Ok(Self { ptr, fd })
                }
                Err(errno) => {
                    ffi::ibv_destroy_comp_channel(ptr.as_ptr());
                    Err(errno)
                }
            }
        }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: its completion queue, the only user, is gone; destroyed once. Without its fd it is memory only.
        unsafe {
            (*self.ptr.as_ptr()).fd = -1;
            host::close(self.fd);
            ffi::ibv_destroy_comp_channel(self.ptr.as_ptr());
        }
    }
}
