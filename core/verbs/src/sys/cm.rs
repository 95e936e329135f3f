//! The objects of the connection manager (librdmacm): channels with their events, ids, and the private data of peers.
//! The queue pair of an id is in `qp.rs`.

use std::ffi::{c_int, c_void};
use std::ptr::{NonNull, null_mut};

pub(crate) use ffi::rdma_cm_event_type as event;
use rdma_sys as ffi;
use rdmasock_core::fabric::plugin;
use rdmasock_core::fabric::plugin::{Address, PRIVATE_BYTES};
use rustix::net::addr::SocketAddrArg;

use super::Object;
use super::context::Context;
use crate::error::{Errno, Result, check};

/// The length of the private data in bytes: the most that a connection request can carry on every transport.
pub(crate) const WIRE_BYTES: usize = PRIVATE_BYTES + 12;
const _: () = assert!(WIRE_BYTES == 56);

/// Private data that a peer has sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Private {
    pub bytes: [u8; WIRE_BYTES],
    pub len: u32,
}

impl Private {
    pub(crate) const NONE: Self = Self {
        bytes: [0; WIRE_BYTES],
        len: 0,
    };

    /// # Safety
    /// `at` is null, or `len` bytes can be read there.
    unsafe fn copy(at: *const c_void, len: u8) -> Self {
        let mut private = Self::NONE;
        if !at.is_null() {
            let len = usize::from(len).min(WIRE_BYTES);
            // SAFETY: the source has `len` bytes by the contract, and the target has by the line above.
            unsafe { at.cast::<u8>().copy_to_nonoverlapping(private.bytes.as_mut_ptr(), len) };
            private.len = len as u32;
        }
        private
    }
}

/// A copy of an event of the connection manager.
pub(crate) struct Event {
    /// The kind, one of [`event`].
    pub kind: u32,
    /// The status: 0, a negative errno, or a positive reason code of the transport.
    pub status: i32,
    pub private: Private,
    /// The new id, if the event is a connection request.
    pub incoming: Option<Incoming>,
}

/// An event channel of the connection manager.
pub(crate) struct Channel {
    ptr: Object<ffi::rdma_event_channel>,
    fd: c_int,
}

impl Channel {
    pub(crate) fn open() -> Result<Self> {
        // SAFETY: the function has no arguments. Null is handled.
        let ptr = Object::made(unsafe { ffi::rdma_create_event_channel() })?;
        // SAFETY: the channel was just made, and no other thread has it.
        let hidden = plugin::hide(unsafe { (*ptr.as_ptr()).fd });
        // SAFETY: the channel was just made, and no other thread has it. `hide` has failed and has not moved the fd, so
        // the destruction closes it.
        let fd = hidden.inspect_err(|_| unsafe { ffi::rdma_destroy_event_channel(ptr.as_ptr()) })?;
        // SAFETY: the channel was just made, and no other thread has it.
        unsafe { (*ptr.as_ptr()).fd = fd };
        Ok(Self { ptr, fd })
    }

    pub(crate) fn fd(&self) -> c_int {
        self.fd
    }

    /// Returns the next event, already acknowledged; `None` if there is none.
    pub(crate) fn next(&self) -> Result<Option<Event>> {
        let mut ptr = null_mut();
        // SAFETY: the channel lives, and `ptr` is written on success.
        if unsafe { ffi::rdma_get_cm_event(self.ptr.as_ptr(), &mut ptr) } != 0 {
            return match Errno::last() {
                Errno(libc::EAGAIN) => Ok(None),
                errno => Err(errno),
            };
        }
        // SAFETY: this thread owns the event until it is acknowledged. All ids are of RDMA_PS_TCP, so the member of the
        // union is `conn`. It is zeroed if the kind of event has no parameters. The private data lies in the event.
        let event = unsafe {
            let kind = (*ptr).event;
            let conn = (*ptr).param.conn;
            Event {
                kind,
                status: (*ptr).status,
                private: Private::copy(conn.private_data, conn.private_data_len),
                incoming: NonNull::new((*ptr).id)
                    .filter(|_| kind == event::RDMA_CM_EVENT_CONNECT_REQUEST)
                    .map(|id| Incoming(Object(id))),
            }
        };
        // SAFETY: the event was taken above, is acknowledged once, and is not used afterwards.
        unsafe { ffi::rdma_ack_cm_event(ptr) };
        Ok(Some(event))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the id that owns this channel was its only user, and is gone. With its fd taken out, the destruction
        // below only frees memory.
        unsafe { (*self.ptr.as_ptr()).fd = -1 };
        plugin::close(self.fd);
        // SAFETY: the channel was made by rdma_create_event_channel and is destroyed once.
        unsafe { ffi::rdma_destroy_event_channel(self.ptr.as_ptr()) };
    }
}

/// The id of a connection request. It is still on the channel of its listener. A drop rejects the request.
pub(crate) struct Incoming(Object<ffi::rdma_cm_id>);

impl Incoming {
    /// Moves the id to a channel of its own.
    pub(crate) fn migrate(self) -> Result<Id> {
        let channel = Channel::open()?;
        // SAFETY: id and channel live. The call does not wait: it would wait only for the acknowledgement of the id's
        // events. The one event so far, the request, counts as the listener's.
        check(unsafe { ffi::rdma_migrate_id(self.0.as_ptr(), channel.ptr.as_ptr()) })?;
        let ptr = Object(self.0.0);
        std::mem::forget(self);
        Ok(Id { ptr, channel })
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        // SAFETY: this value owns the id. The id uses the listener's channel, which lives, because values of this type
        // only exist during `Listener::next`.
        unsafe {
            ffi::rdma_reject(self.0.as_ptr(), std::ptr::null(), 0);
            ffi::rdma_destroy_id(self.0.as_ptr());
        }
    }
}

/// An id of the connection manager, for a listener or a connection, with a channel of its own.
pub(crate) struct Id {
    pub(super) ptr: Object<ffi::rdma_cm_id>,
    channel: Channel,
}

impl Id {
    pub(crate) fn new() -> Result<Self> {
        let channel = Channel::open()?;
        let mut ptr = null_mut();
        // SAFETY: the channel lives as long as the id. `ptr` is written on success.
        check(unsafe {
            ffi::rdma_create_id(
                channel.ptr.as_ptr(),
                &mut ptr,
                null_mut(),
                ffi::rdma_port_space::RDMA_PS_TCP,
            )
        })?;
        let ptr = NonNull::new(ptr).map(Object).ok_or(Errno(libc::ENOMEM))?;
        Ok(Self { ptr, channel })
    }

    pub(crate) fn channel(&self) -> &Channel {
        &self.channel
    }

    pub(crate) fn bind(&self, local: &Address) -> Result<()> {
        let local = local.socket();
        // SAFETY: the id lives; the address is read during the call.
        check(unsafe { local.with_sockaddr(|at, _| ffi::rdma_bind_addr(self.ptr.as_ptr(), at.cast_mut().cast())) })
    }

    pub(crate) fn listen(&self, backlog: c_int) -> Result<()> {
        // SAFETY: the id lives.
        check(unsafe { ffi::rdma_listen(self.ptr.as_ptr(), backlog) })
    }

    /// Returns the local port, in host order.
    pub(crate) fn port(&self) -> u16 {
        // SAFETY: the id lives.
        u16::from_be(unsafe { ffi::rdma_get_src_port(self.ptr.as_ptr()) })
    }

    pub(crate) fn resolve_address(&self, local: &Address, remote: &Address, timeout_ms: c_int) -> Result<()> {
        let (local, remote) = (local.socket(), remote.socket());
        // SAFETY: the id lives; the addresses are read during the call.
        check(unsafe {
            local.with_sockaddr(|from, _| {
                remote.with_sockaddr(|to, _| {
                    let (from, to) = (from.cast_mut().cast(), to.cast_mut().cast());
                    ffi::rdma_resolve_addr(self.ptr.as_ptr(), from, to, timeout_ms)
                })
            })
        })
    }

    pub(crate) fn resolve_route(&self, timeout_ms: c_int) -> Result<()> {
        // SAFETY: the id lives.
        check(unsafe { ffi::rdma_resolve_route(self.ptr.as_ptr(), timeout_ms) })
    }

    /// Sets how long the device waits for an acknowledgement before it repeats a request: 4.096 µs times two to the
    /// power of `exponent` (InfiniBand specification, 9.7.6.1.3). No effect on iWARP, where TCP retransmits.
    pub(crate) fn set_ack_timeout(&self, exponent: u8) {
        // These are defined in linux/rdma_user_cm.h, and some bindings lack them.
        const RDMA_OPTION_ID: c_int = 0;
        const RDMA_OPTION_ID_ACK_TIMEOUT: c_int = 3;
        let mut exponent = exponent;
        // SAFETY: the id lives, and one byte is read during the call.
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

    /// Returns the device of the id; `None` before an address is bound or resolved.
    pub(crate) fn context(&self) -> Option<Context> {
        // SAFETY: the id lives.
        NonNull::new(unsafe { (*self.ptr.as_ptr()).verbs }).map(Context)
    }

    pub(crate) fn connect(&self, private: &[u8; WIRE_BYTES], depth: u8) -> Result<()> {
        let mut param = conn_param(private, depth);
        // SAFETY: the id lives. The parameters, and the private data that they point to, are read during the call.
        check(unsafe { ffi::rdma_connect(self.ptr.as_ptr(), &mut param) })
    }

    pub(crate) fn accept(&self, private: &[u8; WIRE_BYTES], depth: u8) -> Result<()> {
        let mut param = conn_param(private, depth);
        // SAFETY: as in `connect`.
        check(unsafe { ffi::rdma_accept(self.ptr.as_ptr(), &mut param) })
    }

    pub(crate) fn reject(&self) -> Result<()> {
        // SAFETY: the id lives; no private data.
        check(unsafe { ffi::rdma_reject(self.ptr.as_ptr(), std::ptr::null(), 0) })
    }

    pub(crate) fn disconnect(&self) -> Result<()> {
        // SAFETY: the id lives.
        check(unsafe { ffi::rdma_disconnect(self.ptr.as_ptr()) })
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: the id was made by rdma_create_id or by a request, and is destroyed once. Its queue pair had an Arc
        // of it and is gone. All its events are acknowledged, and its channel is dropped after this.
        unsafe { ffi::rdma_destroy_id(self.ptr.as_ptr()) };
    }
}

fn conn_param(private: &[u8; WIRE_BYTES], depth: u8) -> ffi::rdma_conn_param {
    ffi::rdma_conn_param {
        private_data: private.as_ptr().cast(),
        private_data_len: WIRE_BYTES as u8,
        responder_resources: depth,
        initiator_depth: depth,
        flow_control: 1,
        retry_count: 7,
        // The value 7 means that there is no limit.
        rnr_retry_count: 7,
        srq: 0,
        qp_num: 0,
    }
}
