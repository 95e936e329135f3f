//! All that is said to libibverbs and librdmacm: thin owners of their objects, each of which keeps its parents
//! alive. Another binding than rdma-sys means another version of this file. No policy here: not what
//! a connection is, nor how long its queues are.
//!
//! The libraries close fds through libc's close, which does not see hidden numbers, so every fd is taken from
//! its struct before that.

use std::ffi::{CStr, c_int, c_void};
use std::mem::{MaybeUninit, zeroed};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use rdma_sys as ffi;
use rdmasock_core::fabric::plugin::{Address, PRIVATE_BYTES};
use rdmasock_core::fabric::remote::qp::Role;

use crate::error::{Errno, Result, check, check_code};
use crate::memory::Slab;
use rdmasock_core::fabric::plugin::host;

pub use ffi::ibv_wc_status as status;
pub use ffi::rdma_cm_event_type as event;

/// Longest private data that a connection request can carry on every transport, in bytes.
pub const WIRE_BYTES: usize = PRIVATE_BYTES + 12;
const _: () = assert!(WIRE_BYTES == 56);

/// Private data of a peer.
#[derive(Clone, Copy, Debug)]
pub struct Private {
    pub bytes: [u8; WIRE_BYTES],
    pub len: u32,
}

impl Private {
    pub const NONE: Self = Self {
        bytes: [0; WIRE_BYTES],
        len: 0,
    };

    /// # Safety
    /// `at` is null, or that many bytes can be read there.
    unsafe fn copy(at: *const c_void, len: u8) -> Self {
        let mut private = Self::NONE;
        if !at.is_null() {
            let len = usize::from(len).min(WIRE_BYTES);
            // SAFETY: `len` is no more than either side has, by the contract and by the line above.
            unsafe { at.cast::<u8>().copy_to_nonoverlapping(private.bytes.as_mut_ptr(), len) };
            private.len = len as u32;
        }
        private
    }
}

/// A socket address as C has it.
fn sockaddr(address: &Address) -> Result<libc::sockaddr_storage> {
    // SAFETY: a structure of numbers, for which zeroes are a value.
    let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
    let at = (&raw mut storage).cast::<c_void>();
    match address.family {
        4 => {
            let [a, b, c, d, ..] = address.ip;
            let v4 = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port.to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes([a, b, c, d]),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: a sockaddr_storage is as large and as aligned as any address.
            unsafe { at.cast::<libc::sockaddr_in>().write(v4) };
        }
        6 => {
            let v6 = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port.to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: address.ip },
                sin6_scope_id: address.scope,
            };
            // SAFETY: as above.
            unsafe { at.cast::<libc::sockaddr_in6>().write(v6) };
        }
        _ => return Err(Errno(libc::EAFNOSUPPORT)),
    }
    Ok(storage)
}

/// An event of the connection manager, with all of it copied out.
#[derive(Debug)]
pub struct Event {
    /// One of [`event`].
    pub kind: u32,
    /// 0, a negative errno, or a positive reason of the transport.
    pub status: i32,
    pub private: Private,
    /// With a connection request.
    pub incoming: Option<Incoming>,
}

/// An event channel of the connection manager.
#[derive(Debug)]
pub struct Channel {
    ptr: NonNull<ffi::rdma_event_channel>,
    fd: c_int,
}

// SAFETY: librdmacm's functions on a channel may be called from any thread, and its fd is only written here
// before the channel is shared and after it is not any more.
unsafe impl Send for Channel {}
// SAFETY: as for Send.
unsafe impl Sync for Channel {}

impl Channel {
    pub fn open() -> Result<Self> {
        // SAFETY: no arguments; null is handled.
        let ptr = NonNull::new(unsafe { ffi::rdma_create_event_channel() }).ok_or_else(Errno::last)?;
        // SAFETY: the channel was just made and nobody else has it.
        match host::hide(unsafe { (*ptr.as_ptr()).fd }) {
            Ok(fd) => {
                // SAFETY: as above.
                unsafe { (*ptr.as_ptr()).fd = fd };
                Ok(Self { ptr, fd })
            }
            Err(errno) => {
                // SAFETY: as above; it closes its fd, which was not moved.
                unsafe { ffi::rdma_destroy_event_channel(ptr.as_ptr()) };
                Err(errno)
            }
        }
    }

    pub fn fd(&self) -> c_int {
        self.fd
    }

    /// The next event, if there is one; it is acknowledged when this returns.
    pub fn next(&self) -> Result<Option<Event>> {
        let mut ptr = null_mut();
        // SAFETY: the channel lives, and `ptr` is written on success.
        if unsafe { ffi::rdma_get_cm_event(self.ptr.as_ptr(), &mut ptr) } != 0 {
            return match Errno::last() {
                Errno(libc::EAGAIN) => Ok(None),
                errno => Err(errno),
            };
        }
        // SAFETY: the event is ours until it is acknowledged. The connection is of a TCP-like port space, so
        // the event carries `conn`, zeroed where the kind of event has none; its private data lies in the event.
        let event = unsafe {
            let kind = (*ptr).event;
            let conn = (*ptr).param.conn;
            Event {
                kind,
                status: (*ptr).status,
                private: Private::copy(conn.private_data, conn.private_data_len),
                incoming: NonNull::new((*ptr).id)
                    .filter(|_| kind == event::RDMA_CM_EVENT_CONNECT_REQUEST)
                    .map(Incoming),
            }
        };
        // SAFETY: got above, acknowledged once, and not used afterwards.
        unsafe { ffi::rdma_ack_cm_event(ptr) };
        Ok(Some(event))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: nobody else has the channel any more: ids own theirs. Without its fd it is memory only.
        unsafe { (*self.ptr.as_ptr()).fd = -1 };
        host::close(self.fd);
        // SAFETY: made by rdma_create_event_channel, destroyed once.
        unsafe { ffi::rdma_destroy_event_channel(self.ptr.as_ptr()) };
    }
}

/// The id of a connection request, still on its listener's channel; dropping it rejects it.
#[derive(Debug)]
pub struct Incoming(NonNull<ffi::rdma_cm_id>);

// SAFETY: ids may be used from any thread.
unsafe impl Send for Incoming {}

impl Incoming {
    /// Gives it a channel of its own.
    pub fn migrate(self) -> Result<Id> {
        let channel = Channel::open()?;
        // SAFETY: both live, and no event of this id is unacknowledged (none but the request has come, and
        // that one is counted for the listener): it does not wait.
        check(unsafe { ffi::rdma_migrate_id(self.0.as_ptr(), channel.ptr.as_ptr()) })?;
        let ptr = self.0;
        std::mem::forget(self);
        Ok(Id { ptr, channel })
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        // SAFETY: the id is ours since the request was taken; its channel is the listener's, which is in a call
        // of its own meanwhile and so alive.
        unsafe {
            ffi::rdma_reject(self.0.as_ptr(), std::ptr::null(), 0);
            ffi::rdma_destroy_id(self.0.as_ptr());
        }
    }
}

/// An id of the connection manager: a listener, or a connection. Has a channel of its own.
#[derive(Debug)]
pub struct Id {
    ptr: NonNull<ffi::rdma_cm_id>,
    channel: Channel,
}

// SAFETY: librdmacm's functions on an id may be called from any thread; the fields of the id that are read here
// (verbs, qp) change only in calls that precede its being shared.
unsafe impl Send for Id {}
// SAFETY: as for Send.
unsafe impl Sync for Id {}

impl Id {
    pub fn new() -> Result<Self> {
        let channel = Channel::open()?;
        let mut ptr = null_mut();
        // SAFETY: the channel lives and will live as long as the id; `ptr` is written on success.
        check(unsafe {
            ffi::rdma_create_id(
                channel.ptr.as_ptr(),
                &mut ptr,
                null_mut(),
                ffi::rdma_port_space::RDMA_PS_TCP,
            )
        })?;
        let ptr = NonNull::new(ptr).ok_or(Errno(libc::ENOMEM))?;
        Ok(Self { ptr, channel })
    }

    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    pub fn bind(&self, local: &Address) -> Result<()> {
        let mut local = sockaddr(local)?;
        // SAFETY: the id lives; the address is read during the call.
        check(unsafe { ffi::rdma_bind_addr(self.ptr.as_ptr(), (&raw mut local).cast()) })
    }

    pub fn listen(&self, backlog: c_int) -> Result<()> {
        // SAFETY: the id lives.
        check(unsafe { ffi::rdma_listen(self.ptr.as_ptr(), backlog) })
    }

    /// The local port, in host order.
    pub fn port(&self) -> u16 {
        // SAFETY: the id lives.
        u16::from_be(unsafe { ffi::rdma_get_src_port(self.ptr.as_ptr()) })
    }

    pub fn resolve_address(&self, local: &Address, remote: &Address, timeout_ms: c_int) -> Result<()> {
        let (mut local, mut remote) = (sockaddr(local)?, sockaddr(remote)?);
        // SAFETY: the id lives; the addresses are read during the call.
        check(unsafe {
            ffi::rdma_resolve_addr(
                self.ptr.as_ptr(),
                (&raw mut local).cast(),
                (&raw mut remote).cast(),
                timeout_ms,
            )
        })
    }

    pub fn resolve_route(&self, timeout_ms: c_int) -> Result<()> {
        // SAFETY: the id lives.
        check(unsafe { ffi::rdma_resolve_route(self.ptr.as_ptr(), timeout_ms) })
    }

    /// How long an acknowledgement may take before a request is sent again: 4.096 µs times two to this power
    /// (InfiniBand specification, 9.7.6.1.3). Without effect on iWARP, where TCP sees to that.
    pub fn set_ack_timeout(&self, exponent: u8) {
        // linux/rdma_user_cm.h; not in every binding.
        const RDMA_OPTION_ID: c_int = 0;
        const RDMA_OPTION_ID_ACK_TIMEOUT: c_int = 3;
        let mut exponent = exponent;
        // SAFETY: the id lives; one byte is read during the call.
        let _ = unsafe {
            ffi::rdma_set_option(
                self.ptr.as_ptr(),
                RDMA_OPTION_ID,
                RDMA_OPTION_ID_ACK_TIMEOUT,
                (&raw mut exponent).cast(),
                1,
            )
        };
    }

    /// The device, once an address is bound or resolved.
    pub fn context(&self) -> Option<Context> {
        // SAFETY: the id lives.
        NonNull::new(unsafe { (*self.ptr.as_ptr()).verbs }).map(Context)
    }

    pub fn connect(&self, private: &[u8], depth: u8) -> Result<()> {
        let mut param = conn_param(private, depth)?;
        // SAFETY: the id lives; the parameters, and the private data that they point to, are read during the call.
        check(unsafe { ffi::rdma_connect(self.ptr.as_ptr(), &mut param) })
    }

    pub fn accept(&self, private: &[u8], depth: u8) -> Result<()> {
        let mut param = conn_param(private, depth)?;
        // SAFETY: as in `connect`.
        check(unsafe { ffi::rdma_accept(self.ptr.as_ptr(), &mut param) })
    }

    pub fn reject(&self) -> Result<()> {
        // SAFETY: the id lives; no private data.
        check(unsafe { ffi::rdma_reject(self.ptr.as_ptr(), std::ptr::null(), 0) })
    }

    pub fn disconnect(&self) -> Result<()> {
        // SAFETY: the id lives.
        check(unsafe { ffi::rdma_disconnect(self.ptr.as_ptr()) })
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: made by rdma_create_id or a request, destroyed once; its queue pair, which has an Arc of it, is
        // gone, all its events are acknowledged, and its channel goes after this.
        unsafe { ffi::rdma_destroy_id(self.ptr.as_ptr()) };
    }
}

fn conn_param(private: &[u8], depth: u8) -> Result<ffi::rdma_conn_param> {
    if private.len() > WIRE_BYTES {
        return Err(Errno(libc::EINVAL));
    }
    Ok(ffi::rdma_conn_param {
        private_data: private.as_ptr().cast(),
        private_data_len: private.len() as u8,
        responder_resources: depth,
        initiator_depth: depth,
        flow_control: 1,
        retry_count: 7,
        // 7: for ever.
        rnr_retry_count: 7,
        srq: 0,
        qp_num: 0,
    })
}

/// How many devices a process may use.
const CONTEXTS: usize = 64;

/// Those whose fds were hidden, for a fork child.
static HIDDEN: [AtomicPtr<ffi::ibv_context>; CONTEXTS] = [const { AtomicPtr::new(null_mut()) }; CONTEXTS];

/// An open device. librdmacm opens it, shares it among its ids and does not close it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context(NonNull<ffi::ibv_context>);

// SAFETY: verbs may be called from any thread, and the context is never freed while an id of the device exists;
// `device.rs` keeps one for ever.
unsafe impl Send for Context {}
// SAFETY: as for Send.
unsafe impl Sync for Context {}

/// The limits of a device that matter here.
#[derive(Clone, Copy, Debug)]
pub struct DeviceLimits {
    pub max_qp_wr: u32,
    pub max_cqe: u32,
    /// RDMA READs that a queue pair can have outstanding.
    pub max_reads: u32,
}

impl Context {
    /// Hides its fds. To be called once, before another thread uses it.
    pub fn hide(self) -> Result<()> {
        // SAFETY: the context lives for ever, and by this function's condition nobody else uses its fds now.
        unsafe {
            let ptr = self.0.as_ptr();
            (*ptr).cmd_fd = host::hide((*ptr).cmd_fd)?;
            if (*ptr).async_fd >= 0 {
                (*ptr).async_fd = host::hide((*ptr).async_fd)?;
            }
        }
        for place in &HIDDEN {
            let free = place.compare_exchange(null_mut(), self.0.as_ptr(), Ordering::Relaxed, Ordering::Relaxed);
            if free.is_ok() {
                break;
            }
        }
        Ok(())
    }

    /// In a fork child: whoever uses a context that was inherited gets EBADF instead of somebody else's fd.
    pub fn forget_all() {
        for place in &HIDDEN {
            if let Some(context) = NonNull::new(place.swap(null_mut(), Ordering::Relaxed)) {
                // SAFETY: contexts live for ever, and a fork child has this thread only.
                unsafe {
                    (*context.as_ptr()).cmd_fd = -1;
                    (*context.as_ptr()).async_fd = -1;
                }
            }
        }
    }

    pub fn name(&self) -> &CStr {
        // SAFETY: the context and its device live for ever, and so does the name, which ends with a zero.
        unsafe { CStr::from_ptr((*(*self.0.as_ptr()).device).name.as_ptr()) }
    }

    pub fn is_iwarp(&self) -> bool {
        // SAFETY: as in `name`.
        unsafe { (*(*self.0.as_ptr()).device).transport_type == ffi::ibv_transport_type::IBV_TRANSPORT_IWARP }
    }

    pub fn limits(&self) -> Result<DeviceLimits> {
        let mut attr = MaybeUninit::<ffi::ibv_device_attr>::zeroed();
        // SAFETY: the context lives; the attributes, numbers for which zeroes are a value, are written by the call.
        let attr = unsafe {
            check_code(ffi::ibv_query_device(self.0.as_ptr(), attr.as_mut_ptr()))?;
            attr.assume_init()
        };
        let number = |n: c_int| u32::try_from(n).unwrap_or(0);
        Ok(DeviceLimits {
            max_qp_wr: number(attr.max_qp_wr),
            max_cqe: number(attr.max_cqe),
            max_reads: number(attr.max_qp_rd_atom).min(number(attr.max_qp_init_rd_atom)),
        })
    }

    /// Takes the events of the device that have come, each with its kind (of ibv_event_type) and the address
    /// of the object that it is about.
    pub fn drain_events(&self, mut each: impl FnMut(u32, usize)) {
        loop {
            let mut event = MaybeUninit::<ffi::ibv_async_event>::zeroed();
            // SAFETY: the context lives, and its async fd is nonblocking; on success the event is written.
            if unsafe { ffi::ibv_get_async_event(self.0.as_ptr(), event.as_mut_ptr()) } != 0 {
                return;
            }
            let at = event.as_mut_ptr();
            // SAFETY: zeroed, then written. The kind is read as a number, because the kernel may know kinds that
            // the enum does not; the object's address is only compared, and a port's number in its place is
            // smaller than any address.
            let (kind, object) = unsafe { ((&raw const (*at).event_type).cast::<u32>().read(), (*at).element.qp) };
            each(kind, object.addr());
            // SAFETY: got above, acknowledged once; its object cannot be gone before.
            unsafe { ffi::ibv_ack_async_event(at) };
        }
    }
}

/// A protection domain.
#[derive(Debug)]
pub struct Pd(NonNull<ffi::ibv_pd>);

// SAFETY: verbs may be called from any thread.
unsafe impl Send for Pd {}
// SAFETY: as for Send.
unsafe impl Sync for Pd {}

impl Pd {
    pub fn new(context: Context) -> Result<Self> {
        // SAFETY: the context lives; null is handled.
        NonNull::new(unsafe { ffi::ibv_alloc_pd(context.0.as_ptr()) })
            .map(Self)
            .ok_or_else(Errno::last)
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: made by ibv_alloc_pd, freed once; all that was made in it had an Arc of it and is gone.
        unsafe { ffi::ibv_dealloc_pd(self.0.as_ptr()) };
    }
}

/// Registered memory: readable by this end's work requests, writable by the peer's if so wished.
#[derive(Debug)]
pub struct Mr {
    ptr: NonNull<ffi::ibv_mr>,
    _pd: Arc<Pd>,
    _slab: Option<Arc<Slab>>,
}

// SAFETY: verbs may be called from any thread; the keys do not change.
unsafe impl Send for Mr {}
// SAFETY: as for Send.
unsafe impl Sync for Mr {}

impl Mr {
    /// A slab, for this end only.
    pub fn of_slab(pd: &Arc<Pd>, slab: &Arc<Slab>) -> Result<Self> {
        // SAFETY: the slab is memory of its own that lives as long as the registration, which has an Arc of it.
        let mut mr = unsafe {
            Self::new(
                pd,
                slab.at().cast(),
                slab.len(),
                ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE,
            )
        }?;
        mr._slab = Some(slab.clone());
        Ok(mr)
    }

    /// A slab that the peer may read and write too. That it may write is what some iWARP devices ask of memory
    /// that a READ is to fill.
    pub fn for_probes(pd: &Arc<Pd>, slab: &Arc<Slab>) -> Result<Self> {
        let access = ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
            | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
            | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ;
        // SAFETY: as in `of_slab`; its bytes are not looked at.
        let mut mr = unsafe { Self::new(pd, slab.at().cast(), slab.len(), access) }?;
        mr._slab = Some(slab.clone());
        Ok(mr)
    }

    /// Somebody's memory, for a role. What this end only reads may be memory that cannot be written.
    ///
    /// # Safety
    /// While the registration exists the memory is accessed through raw pointers and atomics only.
    pub unsafe fn of_memory(pd: &Arc<Pd>, at: *mut c_void, len: usize, role: Role) -> Result<Self> {
        let written = ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        let access = match role {
            Role::Source => ffi::ibv_access_flags(0),
            Role::Both | Role::Target => written,
        };
        // SAFETY: by this function's contract.
        unsafe { Self::new(pd, at, len, access) }
    }

    /// # Safety
    /// As of `of_memory`.
    unsafe fn new(pd: &Arc<Pd>, at: *mut c_void, len: usize, access: ffi::ibv_access_flags) -> Result<Self> {
        // SAFETY: the domain lives; the kernel checks the range; null is handled.
        let ptr = unsafe { ffi::ibv_reg_mr(pd.0.as_ptr(), at, len, access.0 as c_int) };
        Ok(Self {
            ptr: NonNull::new(ptr).ok_or_else(Errno::last)?,
            _pd: pd.clone(),
            _slab: None,
        })
    }

    pub fn local_key(&self) -> u32 {
        // SAFETY: the registration lives.
        unsafe { (*self.ptr.as_ptr()).lkey }
    }

    pub fn remote_key(&self) -> u32 {
        // SAFETY: the registration lives.
        unsafe { (*self.ptr.as_ptr()).rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: made by ibv_reg_mr, freed once, before its domain.
        unsafe { ffi::ibv_dereg_mr(self.ptr.as_ptr()) };
    }
}

/// A completion queue with a channel of its own.
#[derive(Debug)]
pub struct Cq {
    ptr: NonNull<ffi::ibv_cq>,
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

/// How long the queues of a queue pair are.
#[derive(Clone, Copy, Debug)]
pub struct QueueLengths {
    pub sends: u32,
    pub receives: u32,
}

/// A queue pair, in an id.
#[derive(Debug)]
pub struct Qp {
    ptr: NonNull<ffi::ibv_qp>,
    id: Arc<Id>,
    _pd: Arc<Pd>,
    _cq: Arc<Cq>,
}

// SAFETY: verbs may be called from any thread.
unsafe impl Send for Qp {}
// SAFETY: as for Send.
unsafe impl Sync for Qp {}

/// What a work request of the send queue does.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    Send,
    Write {
        to: u64,
        key: u32,
        immediate: Option<u32>,
    },
    /// Into the piece, which is not only read then.
    Read {
        from: u64,
        key: u32,
    },
    /// A WRITE without bytes, which needs no key of the peer's. The piece is not looked at.
    WriteNothing,
}

/// Memory that a work request reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub at: *const u8,
    pub len: u32,
    /// lkey.
    pub key: u32,
}

impl Piece {
    pub const NONE: Self = Self {
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
    /// A reliable one, with this many bytes inline at most; gives how many it has.
    pub fn new(id: &Arc<Id>, pd: &Arc<Pd>, cq: &Arc<Cq>, lengths: QueueLengths, inline: u32) -> Result<(Self, u32)> {
        // SAFETY: a structure of numbers and pointers, for which zeroes are a value.
        let mut attr: ffi::ibv_qp_init_attr = unsafe { zeroed() };
        attr.send_cq = cq.ptr.as_ptr();
        attr.recv_cq = cq.ptr.as_ptr();
        attr.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
        attr.cap.max_send_wr = lengths.sends;
        attr.cap.max_recv_wr = lengths.receives;
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        attr.cap.max_inline_data = inline;
        // SAFETY: all live, and the queue pair has an Arc of each; the attributes are read and written during the call.
        check(unsafe { ffi::rdma_create_qp(id.ptr.as_ptr(), pd.0.as_ptr(), &mut attr) })?;
        // SAFETY: the id lives, and after the call it has a queue pair.
        let ptr = NonNull::new(unsafe { (*id.ptr.as_ptr()).qp }).ok_or(Errno(libc::EIO))?;
        let qp = Self {
            ptr,
            id: id.clone(),
            _pd: pd.clone(),
            _cq: cq.clone(),
        };
        Ok((qp, attr.cap.max_inline_data.min(inline)))
    }

    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair lives.
        unsafe { (*self.ptr.as_ptr()).qp_num }
    }

    /// Bytes that a packet of it carries at most; only once it is connected.
    pub fn path_mtu(&self) -> Result<u32> {
        // SAFETY: structures of numbers and pointers, for which zeroes are a value.
        let (mut attr, mut init): (ffi::ibv_qp_attr, ffi::ibv_qp_init_attr) = unsafe { (zeroed(), zeroed()) };
        let mask = ffi::ibv_qp_attr_mask::IBV_QP_PATH_MTU.0 as c_int;
        // SAFETY: the queue pair lives, and the structures are written during the call.
        check_code(unsafe { ffi::ibv_query_qp(self.ptr.as_ptr(), &mut attr, mask, &mut init) })?;
        // 1 is 256 bytes, 5 is 4,096 (ibv_query_port(3), enum ibv_mtu).
        match attr.path_mtu {
            code @ 1..=5 => Ok(128 << code),
            _ => Ok(0),
        }
    }

    /// The address that [`Context::drain_events`] names it by.
    pub fn address(&self) -> usize {
        self.ptr.as_ptr().addr()
    }

    /// Posts a work request.
    ///
    /// # Safety
    /// The piece can be read until the request has completed, or during the call if it is inline; that of a READ
    /// can be written.
    pub unsafe fn post(&self, id: u64, work: Work, piece: Piece, signal: bool, inline: bool) -> Result<()> {
        let mut sge = piece.sge();
        // SAFETY: a structure of numbers and pointers, for which zeroes are a value.
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
        wr.opcode = match work {
            Work::Send => ffi::ibv_wr_opcode::IBV_WR_SEND,
            Work::Write { to, key, immediate } => {
                wr.wr.rdma = ffi::rdma_t {
                    remote_addr: to,
                    rkey: key,
                };
                match immediate {
                    None => ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE,
                    Some(immediate) => {
                        wr.imm_data_invalidated_rkey_union.imm_data = immediate.to_be();
                        ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM
                    }
                }
            }
            Work::Read { from, key } => {
                wr.wr.rdma = ffi::rdma_t {
                    remote_addr: from,
                    rkey: key,
                };
                ffi::ibv_wr_opcode::IBV_WR_RDMA_READ
            }
            Work::WriteNothing => {
                // Some devices take an entry without bytes for one of 2 GiB.
                wr.num_sge = 0;
                ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE
            }
        };
        let mut bad = null_mut();
        // SAFETY: the queue pair lives; the request and its list are read during the call, the piece by this
        // function's contract.
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
    /// The pieces can be written until each request has completed, and nobody else uses them until then.
    pub unsafe fn post_receives(&self, list: &[(u64, Piece)]) -> Result<()> {
        if list.is_empty() {
            return Ok(());
        }
        // SAFETY: structures of numbers and pointers, for which zeroes are a value.
        let (mut wrs, mut sges): ([ffi::ibv_recv_wr; BATCH], [ffi::ibv_sge; BATCH]) = unsafe { zeroed() };
        let mut next = null_mut();
        for (((id, piece), wr), sge) in list.iter().zip(&mut wrs).zip(&mut sges) {
            *sge = piece.sge();
            wr.wr_id = *id;
            wr.sg_list = sge;
            wr.num_sge = 1;
            // Each points to the one before it: the order of receive buffers does not matter.
            wr.next = next;
            next = wr;
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair lives; the chain lies in the arrays, which are not touched until the call, and is
        // read during it; the pieces by this function's contract.
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
        // SAFETY: made by rdma_create_qp, destroyed once, before the id, the domain and the queue that it uses.
        unsafe { ffi::rdma_destroy_qp(self.id.ptr.as_ptr()) };
    }
}

/// Before the first of all calls: tells the library to keep registered memory whole across a fork, where the
/// kernel does not do so by itself (since 5.12 it does).
pub fn prepare_for_fork() {
    // SAFETY: no arguments. It fails where it comes too late, and then things are as if it had not been called.
    unsafe { ffi::ibv_fork_init() };
}
