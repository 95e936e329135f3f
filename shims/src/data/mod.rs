//! Moving bytes: sending, receiving, and the services that a connection needs from its socket.

pub(crate) mod rx;
pub(crate) mod socket_io;
pub(crate) mod tx;
