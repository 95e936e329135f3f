//! The bytes: sending, receiving, and what a connection asks of its socket.

pub(crate) mod rx;
pub(crate) mod socket_io;
pub(crate) mod tx;
