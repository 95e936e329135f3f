//! Interruptions of a call: signal handlers, cancellation, jumps out of both, the end of the first thread.

pub(crate) mod ending;
pub(crate) mod handler;
pub mod jump;
