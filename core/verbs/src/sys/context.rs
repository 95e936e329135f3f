//! An open device with its limits and events, protection domains, and the memory that is registered in them. Which
//! device is opened when is for `device.rs` to say.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use rdma_sys as ffi;
use rdmasock_core::fabric::plugin::host;
use rdmasock_core::fabric::remote::qp::Role;

use crate::error::{Errno, Result, check_code};
use crate::memory::Slab;

/// How many devices a process may use.
const CONTEXTS: usize = 64;

/// Those whose fds were hidden, for a fork child.
static HIDDEN: [AtomicPtr<ffi::ibv_context>; CONTEXTS] = [const { AtomicPtr::new(null_mut()) }; CONTEXTS];

/// An open device. librdmacm opens it, shares it among its ids and does not close it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context(pub(super) NonNull<ffi::ibv_context>);

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
pub struct Pd(pub(super) NonNull<ffi::ibv_pd>);

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
        Self::with_slab(pd, slab, ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE)
    }

    /// A slab that the peer may read and write too; its bytes are not looked at. The right to write is what some iWARP
    /// devices ask of memory that a READ is to fill.
    pub fn for_probes(pd: &Arc<Pd>, slab: &Arc<Slab>) -> Result<Self> {
        let access = ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
            | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
            | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ;
        Self::with_slab(pd, slab, access)
    }

    fn with_slab(pd: &Arc<Pd>, slab: &Arc<Slab>, access: ffi::ibv_access_flags) -> Result<Self> {
        // SAFETY: the slab is memory of its own that lives as long as the registration, which has an Arc of it.
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
            Role::Offered => ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ,
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
