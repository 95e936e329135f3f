//! What every hooked libc call does: one function a call, which either serves it from an accelerated
//! stream or hands it to libc's own, which it gets as its first argument.
//!
//! Two rules keep `pthread_cancel` and redhook's `catch_unwind` out of each other's way:
//! - The functions here are `extern "C"`, so that the compiler knows that nothing unwinds out of
//!   them; redhook's `catch_unwind` around them then vanishes. Were it left, it would abort the process on
//!   the forced unwind of a cancelled thread, and on a panic repeat the real call.
//! - What blocks goes through the `extern "C-unwind"` functions of [`crate::real`]. The forced unwind
//!   then passes through the frames between, running their destructors.

#![allow(
    clippy::missing_safety_doc,
    reason = "the contract of each function is that of the libc function it is named after, and that `real` is that function"
)]

pub mod bypass;
pub mod fd;
pub mod io;
pub mod process;
pub mod ready;
pub mod socket;
pub mod vfork;

use crate::real;

/// Runs when the library is loaded, before `main`, but perhaps after the first hook: a constructor
/// of another library can have called one.
pub extern "C" fn on_load() {
    real::resolve_all();
}
