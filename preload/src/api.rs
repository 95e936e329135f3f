//! The exported functions of `include/rdmasock.h`. They are not hooks, because libc has no functions of these names.
//! `rdmasock_shims::api` implements them.

use libc::{c_int, iovec, size_t, ssize_t};
use rdmasock_shims::api;
use rdmasock_shims::api::Info;

macro_rules! exported {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $function:ident;)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            // SAFETY: by the contract.
            unsafe { api::$function($($argument),*) }
        }
    )*};
}

exported! {
    /// For each direction of the connection `fd`, stores in `info` the path that it is on (TCP, shared memory or RDMA)
    /// and the numbers of bytes that each path has carried. Returns 0, or -1 with errno.
    ///
    /// # Safety
    /// `info` points to a `struct rdmasock_info`, whose first field is its size.
    rdmasock_info(fd: c_int, info: *mut Info) -> c_int = info;
    /// Requests that the connection `fd` moves to the path `way`: to TCP for good, or to a link as soon as possible.
    /// Returns 0, or -1 with errno.
    ///
    /// # Safety
    /// No precondition: the function is unsafe for its C ABI alone.
    rdmasock_prefer(fd: c_int, way: c_int) -> c_int = prefer;
    /// Points `pieces` to the next received bytes, which stay in the ring, and sets `count` to the number of pieces.
    /// Returns the number of bytes, 0 at the end of the stream, or -1 with errno.
    ///
    /// # Safety
    /// `pieces` has room for the number of entries that `*count` gives.
    rdmasock_view(fd: c_int, pieces: *mut iovec, count: *mut c_int, flags: c_int) -> ssize_t = view;
    /// Removes the first `n` bytes of the view from the ring, as a receive does. Returns 0, or -1 with errno.
    ///
    /// # Safety
    /// No thread reads these bytes any more.
    rdmasock_release(fd: c_int, n: size_t) -> c_int = release;
}
