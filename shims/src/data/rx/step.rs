//! What one look of a receive comes to, wherever it looks.

use std::ffi::c_int;

use crate::notify::call::Place;

/// What one look of a receive came to.
pub enum RecvStep {
    /// Look again.
    Again,
    /// The kernel's own call.
    Kernel,
    /// Nothing there.
    Empty,
    /// The call waits with a buffer, and is to wait no more.
    Leave,
    /// The connection is not this call's ([`Place`]).
    Elsewhere(Place),
    /// This many bytes came.
    Got(usize),
    /// This many bytes came, and more may be elsewhere.
    GotPart(usize),
    /// The call fails.
    Fail(c_int),
}
