//! The outcome of one attempt of a receive, from the link or among markers.

use std::ffi::c_int;

use crate::notify::call::Place;

/// The outcome of one attempt of a receive.
pub enum RecvStep {
    /// Try again.
    Again,
    /// The receive is for the kernel: make its own call.
    Kernel,
    /// There is nothing to receive now.
    Empty,
    /// The call waits with a buffer ([`Landing`](super::direct::Landing)), and has to end that wait.
    Leave,
    /// The connection is no longer the one of this call ([`Place`]).
    Elsewhere(Place),
    /// The attempt has received this many bytes.
    Got(usize),
    /// The attempt has received this many bytes, and more may be in TCP or on the link.
    GotPart(usize),
    /// The call fails with this errno.
    Fail(c_int),
}
