//! Queue pairs, and the work requests that are posted to them. The callers limit the number of work requests and define
//! their content.

use std::ffi::c_int;
use std::mem::zeroed;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdma_sys as ffi;

use super::Object;
use super::cm::Id;
use super::completion::{BATCH, Cq};
use super::context::Pd;
use crate::error::{Errno, Result, check, check_code};

/// A queue pair that belongs to an rdma_cm id.
pub(crate) struct Qp {
    ptr: Object<ffi::ibv_qp>,
    id: Arc<Id>,
    _pd: Arc<Pd>,
    _cq: Arc<Cq>,
}

/// The operation of a work request in the send queue.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    Send,
    Write {
        to: u64,
        key: u32,
        immediate: Option<u32>,
    },
    /// Reads from the peer's memory into the piece, which must be writable.
    Read {
        from: u64,
        key: u32,
    },
    /// A WRITE of no bytes, which needs no key of the peer. The piece is ignored.
    WriteNothing,
}

/// Local memory that a work request reads or writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub at: *const u8,
    pub len: u32,
    /// The local key (lkey) of its registration.
    pub key: u32,
}

impl Piece {
    pub(crate) const NONE: Self = Self {
        at: std::ptr::null(),
        len: 0,
        key: 0,
    };

    fn sge(&self) -> ffi::ibv_sge {
        ffi::ibv_sge {
            addr: self.at.expose_provenance() as u64,
            length: self.len,
            lkey: self.key,
        }
    }
}

impl Qp {
    /// Makes a reliable queue pair. `lengths` are the lengths of its send and its receive queue, and `inline` is the
    /// wished size of inline data in bytes. Also returns the size of inline data that it has, at most `inline`.
    pub(crate) fn new(id: &Arc<Id>, pd: &Arc<Pd>, cq: &Arc<Cq>, lengths: [u32; 2], inline: u32) -> Result<(Self, u32)> {
        // SAFETY: a structure of numbers and pointers, for which zeroes are valid.
        let mut attr: ffi::ibv_qp_init_attr = unsafe { zeroed() };
        attr.send_cq = cq.ptr.as_ptr();
        attr.recv_cq = cq.ptr.as_ptr();
        attr.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
        [attr.cap.max_send_wr, attr.cap.max_recv_wr] = lengths;
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        attr.cap.max_inline_data = inline;
        // SAFETY: all objects live, because the queue pair has an Arc of each. The attributes are read and written only
        // during the call.
        check(unsafe { ffi::rdma_create_qp(id.ptr.as_ptr(), pd.0.as_ptr(), &mut attr) })?;
        // SAFETY: the id lives, and has a queue pair after the call.
        let ptr = NonNull::new(unsafe { (*id.ptr.as_ptr()).qp })
            .map(Object)
            .ok_or(Errno(libc::EIO))?;
        let qp = Self {
            ptr,
            id: id.clone(),
            _pd: pd.clone(),
            _cq: cq.clone(),
        };
        Ok((qp, attr.cap.max_inline_data.min(inline)))
    }

    /// Returns the path MTU in bytes. Valid only once the queue pair is connected.
    pub(crate) fn path_mtu(&self) -> Result<u32> {
        // SAFETY: structures of numbers and pointers, for which zeroes are valid.
        let (mut attr, mut init): (ffi::ibv_qp_attr, ffi::ibv_qp_init_attr) = unsafe { (zeroed(), zeroed()) };
        let mask = ffi::ibv_qp_attr_mask::IBV_QP_PATH_MTU.0 as c_int;
        // SAFETY: the queue pair lives, and the structures are written during the call.
        check_code(unsafe { ffi::ibv_query_qp(self.ptr.as_ptr(), &mut attr, mask, &mut init) })?;
        // Code 1 stands for 256 bytes, and code 5 for 4,096 (ibv_query_port(3), enum ibv_mtu).
        match attr.path_mtu {
            code @ 1..=5 => Ok(128 << code),
            _ => Ok(0),
        }
    }

    /// Posts a work request.
    ///
    /// # Safety
    /// The piece stays readable until the request has completed; if the request is inline, during the call. The piece
    /// of a READ also stays writable.
    pub(crate) unsafe fn post(&self, id: u64, work: Work, piece: Piece, signal: bool, inline: bool) -> Result<()> {
        let mut sge = piece.sge();
        // SAFETY: a structure of numbers and pointers, for which zeroes are valid.
        let mut wr: ffi::ibv_send_wr = unsafe { zeroed() };
        wr.wr_id = id;
        wr.sg_list = &mut sge;
        wr.num_sge = 1;
        if signal {
            wr.send_flags |= ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        if inline {
            wr.send_flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
        }
        let rdma = |remote_addr, rkey| ffi::rdma_t { remote_addr, rkey };
        wr.opcode = match work {
            Work::Send => ffi::ibv_wr_opcode::IBV_WR_SEND,
            Work::Write { to, key, immediate } => {
                wr.wr.rdma = rdma(to, key);
                match immediate {
                    None => ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE,
                    Some(immediate) => {
                        wr.imm_data_invalidated_rkey_union.imm_data = immediate.to_be();
                        ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM
                    }
                }
            }
            Work::Read { from, key } => {
                wr.wr.rdma = rdma(from, key);
                ffi::ibv_wr_opcode::IBV_WR_RDMA_READ
            }
            Work::WriteNothing => {
                // A device may treat a list entry of 0 bytes as an entry of 2 GiB, so there is no entry.
                wr.num_sge = 0;
                ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE
            }
        };
        let mut bad = null_mut();
        // SAFETY: the queue pair lives. The provider keeps no pointer to the request or to its `sg_list`, and the piece
        // is valid by this function's contract.
        unsafe {
            let post = (*(*self.ptr.as_ptr()).context)
                .ops
                .post_send
                .ok_or(Errno(libc::ENOSYS))?;
            check_code(post(self.ptr.as_ptr(), &mut wr, &mut bad))
        }
    }

    /// Posts receive buffers, at most [`BATCH`], in one call.
    ///
    /// # Safety
    /// The pieces stay writable until each request has completed, and have no other user until then.
    pub(crate) unsafe fn post_receives(&self, list: &[(u64, Piece)]) -> Result<()> {
        if list.is_empty() {
            return Ok(());
        }
        // SAFETY: structures of numbers and pointers, for which zeroes are valid.
        let (mut wrs, mut sges): ([ffi::ibv_recv_wr; BATCH], [ffi::ibv_sge; BATCH]) = unsafe { zeroed() };
        let mut next = null_mut();
        for (((id, piece), wr), sge) in list.iter().zip(&mut wrs).zip(&mut sges) {
            *sge = piece.sge();
            wr.wr_id = *id;
            wr.sg_list = sge;
            wr.num_sge = 1;
            // Each request points to the previous request of the list. So the buffers are posted in reverse order,
            // which does not matter.
            wr.next = next;
            next = wr;
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair lives. The chain of requests lies in the two arrays, which no code accesses before the
        // call, and is read only during the call. The pieces are valid by this function's contract.
        unsafe {
            let post = (*(*self.ptr.as_ptr()).context)
                .ops
                .post_recv
                .ok_or(Errno(libc::ENOSYS))?;
            check_code(post(self.ptr.as_ptr(), next, &mut bad))
        }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: the queue pair was made by rdma_create_qp and is destroyed once. The id, the protection domain and
        // the completion queue that it uses still live.
        unsafe { ffi::rdma_destroy_qp(self.id.ptr.as_ptr()) };
    }
}
