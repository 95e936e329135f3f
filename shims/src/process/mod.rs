//! What ends or hands over connections: close, exit, exec, descriptors that are passed on.

pub(crate) mod close;
pub(crate) mod exit;
pub(crate) mod pass;
pub mod sigaction;
