//! An open device and its limits, protection domains, and memory that is registered in them. `device.rs` decides which
//! device is opened, and when.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use rdma_sys as ffi;
use rdmasock_core::fabric::plugin;
use rdmasock_core::fabric::remote::qp::{Key, Role};

use super::Object;
use crate::error::{Result, check_code};
use crate::memory::Slab;

/// The most devices that a process may use.
const CONTEXTS: usize = 64;

/// The contexts whose fds were hidden. A fork child invalidates them.
static HIDDEN: [AtomicPtr<ffi::ibv_context>; CONTEXTS] = [const { AtomicPtr::new(null_mut()) }; CONTEXTS];

/// An open device. librdmacm opens it, shares it among its ids, and does not close it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context(pub(super) NonNull<ffi::ibv_context>);

// SAFETY: verbs may be called from any thread. A context is not freed while an id of its device exists, and `device.rs`
// keeps one id of each device for ever.
unsafe impl Send for Context {}
// SAFETY: as for Send.
unsafe impl Sync for Context {}

/// The limits of a device that the plugin uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceLimits {
    pub max_qp_wr: u32,
    pub max_cqe: u32,
    /// The most RDMA READs that a queue pair may have outstanding, in either direction.
    pub max_reads: u32,
}

impl Context {
    /// Hides the context's fds. To be called once, before another thread uses the context.
    pub(crate) fn hide(self) -> Result<()> {
        // SAFETY: the context lives for ever. The caller ensures that no other thread uses its fds now.
        unsafe {
            let ptr = self.0.as_ptr();
            (*ptr).cmd_fd = plugin::hide((*ptr).cmd_fd)?;
            if (*ptr).async_fd >= 0 {
                (*ptr).async_fd = plugin::hide((*ptr).async_fd)?;
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

    /// Invalidates the inherited contexts in a fork child. A use of such a context then fails with EBADF. Otherwise it
    /// could reach another file that has got the number of the closed fd.
    pub(crate) fn forget_all() {
        for place in &HIDDEN {
            if let Some(context) = NonNull::new(place.swap(null_mut(), Ordering::Relaxed)) {
                // SAFETY: contexts live for ever, and this is the only thread of the fork child.
                unsafe {
                    (*context.as_ptr()).cmd_fd = -1;
                    (*context.as_ptr()).async_fd = -1;
                }
            }
        }
    }

    pub(crate) fn is_iwarp(&self) -> bool {
        // SAFETY: the context and its device live for ever.
        unsafe { (*(*self.0.as_ptr()).device).transport_type == ffi::ibv_transport_type::IBV_TRANSPORT_IWARP }
    }

    pub(crate) fn limits(&self) -> Result<DeviceLimits> {
        let mut attr = MaybeUninit::<ffi::ibv_device_attr>::zeroed();
        // SAFETY: the context lives. The attributes are numbers, for which zeroes are valid, and the call writes them.
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
}

/// A protection domain.
pub(crate) struct Pd(pub(super) Object<ffi::ibv_pd>);

impl Pd {
    pub(crate) fn new(context: Context) -> Result<Self> {
        // SAFETY: the context lives. Null is handled.
        Object::made(unsafe { ffi::ibv_alloc_pd(context.0.as_ptr()) }).map(Self)
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: the domain was made by ibv_alloc_pd and is freed once. All objects in it had an Arc of it and are
        // gone.
        unsafe { ffi::ibv_dealloc_pd(self.0.as_ptr()) };
    }
}

/// Registered memory. Which work requests of this end and of the peer may read or write it depends on the access that
/// it was registered with.
pub(crate) struct Mr {
    ptr: Object<ffi::ibv_mr>,
    _pd: Arc<Pd>,
    _slab: Option<Arc<Slab>>,
}

impl Mr {
    /// Registers a slab for work requests of this end. If the slab is for probes, the peer may also read and write it.
    /// Some iWARP devices require the peer's write access for memory that a READ fills. The plugin never uses the bytes
    /// of a slab for probes.
    pub(crate) fn of_slab(pd: &Arc<Pd>, slab: &Arc<Slab>, is_for_probes: bool) -> Result<Self> {
        let own = ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        let shared =
            own | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ;
        let access = if is_for_probes { shared } else { own };
        // SAFETY: the slab's memory lives as long as the registration, which has an Arc of the slab.
        let mut mr = unsafe { Self::new(pd, slab.at().cast(), slab.len(), access) }?;
        mr._slab = Some(slab.clone());
        Ok(mr)
    }

    /// Registers the caller's memory for a role. For `Source` and `Offered` the memory need not be writable.
    ///
    /// # Safety
    /// While the registration exists, the memory is accessed through raw pointers and atomics only.
    pub(crate) unsafe fn of_memory(pd: &Arc<Pd>, at: *mut c_void, len: usize, role: Role) -> Result<Self> {
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
    /// As for `of_memory`.
    unsafe fn new(pd: &Arc<Pd>, at: *mut c_void, len: usize, access: ffi::ibv_access_flags) -> Result<Self> {
        // SAFETY: the domain lives; the kernel checks the range. Null is handled.
        let ptr = unsafe { ffi::ibv_reg_mr(pd.0.as_ptr(), at, len, access.0 as c_int) };
        Ok(Self {
            ptr: Object::made(ptr)?,
            _pd: pd.clone(),
            _slab: None,
        })
    }

    pub(crate) fn key(&self) -> Key {
        // SAFETY: the registration lives.
        let mr = unsafe { self.ptr.0.as_ref() };
        Key {
            local: mr.lkey,
            remote: mr.rkey,
        }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: the registration was made by ibv_reg_mr and is freed once. Its domain still lives.
        unsafe { ffi::ibv_dereg_mr(self.ptr.as_ptr()) };
    }
}
