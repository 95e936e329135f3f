//! Interruptions of a call and ends of its thread: signal handlers, cancellation, jumps out of both, and the end of the
//! main thread.

pub(crate) mod ending;
pub(crate) mod handler;
pub mod jump;
