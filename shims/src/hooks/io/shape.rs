//! The shape of the calls on one fd. Without a connection the call goes to libc's own function, with unchanged
//! arguments; on a connection it is served. Not for calls on two fds (`file.rs`).

use libc::{c_int, iovec, off_t};

use crate::sys::iov::Iov;

/// Defines a call as two functions, of the shape that `hooks/mod.rs` explains:
///
/// ```text
/// call! {
///     pub fn NAME(TYPE OF LIBC'S, fd, ARGUMENT: TYPE, …) -> RESULT;
///     before EXPRESSION;                    // optional: runs before libc's function, if `fd` has no connection
///     fn NAME_ON(socket, plain, kernel) …   // a block
/// }
/// ```
///
/// The block serves the call on `socket`. It may leave the call to libc by `plain()`. It may go to the kernel by
/// `kernel(fd)`, which may block, and is a cancellation point.
macro_rules! call {
    (
        $(#[$what:meta])*
        pub fn $name:ident($real:ty, $fd:ident $(, $argument:ident: $type:ty)*) -> $result:ty;
        $(before $before:expr;)?
        fn $served:ident($socket:ident, $plain:ident, $kernel:ident) $body:block
    ) => {
        $(#[$what])*
        #[inline]
        pub unsafe extern "C" fn $name(real: $real, $fd: c_int $(, $argument: $type)*) -> $result {
            match $crate::notify::table::socket($fd) {
                // SAFETY: the caller's arguments, as they are.
                None => unsafe {
                    $($before;)?
                    real($fd $(, $argument)*)
                },
                // SAFETY: likewise.
                Some(socket) => unsafe { $served(socket, real, $fd $(, $argument)*) },
            }
        }

        #[inline(never)]
        unsafe extern "C" fn $served(
            $socket: &'static $crate::objects::socket::Socket,
            real: $real,
            $fd: c_int
            $(, $argument: $type)*
        ) -> $result {
            // SAFETY: the caller's arguments, as they are.
            let $plain = move || unsafe { real($fd $(, $argument)*) };
            // SAFETY: the caller's arguments, as they are, but for the fd.
            let $kernel = move |fd: c_int| unsafe { $crate::sys::real::Cancellable::cancellable(real)(fd $(, $argument)*) };
            $body
        }
    };
}
pub(super) use call;

/// Defines calls as fortified programs make them: libc aborts if `len` exceeds `size`, and accepts the call otherwise.
/// Each is served as the call without `size`, and gets that call's libc function.
macro_rules! fortified {
    ($(
        $(#[$what:meta])*
        pub fn $name:ident($real:ty $(, $argument:ident: $type:ty)*) = $served:ident($plain:path);
    )*) => {$(
        $(#[$what])*
        #[inline]
        pub unsafe extern "C" fn $name(
            real: $real,
            fd: c_int,
            buf: *mut c_void,
            len: size_t,
            size: size_t
            $(, $argument: $type)*
        ) -> ssize_t {
            match $crate::notify::table::socket(fd) {
                // SAFETY: the caller's arguments, as they are.
                Some(socket) if len <= size => unsafe { $served(socket, $plain(), fd, buf, len $(, $argument)*) },
                // SAFETY: likewise.
                _ => unsafe { real(fd, buf, len, size $(, $argument)*) },
            }
        }
    )*};
}
pub(super) use fortified;

/// Returns the buffers of preadv2(2) or pwritev2(2), and the call's flags as flags of recv(2) or send(2). `None` if the
/// kernel refuses the call on a socket.
///
/// # Safety
/// As for [`Iov::vector`].
pub(super) unsafe fn vector_at(iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> Option<(Iov, c_int)> {
    if offset != -1 {
        return None;
    }
    let flags = match flags {
        0 => 0,
        libc::RWF_NOWAIT => libc::MSG_DONTWAIT,
        _ => return None,
    };
    // SAFETY: by the contract.
    Some((unsafe { Iov::vector(iov, count) }?, flags))
}
