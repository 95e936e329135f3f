//! Ends connections or hands them over to other processes: close, exit, exec, fds that are passed on.

pub(crate) mod close;
pub(crate) mod exit;
pub(crate) mod pass;
pub mod sigaction;
