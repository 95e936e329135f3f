//! Moving bytes: sending, receiving, and the services that a connection needs from its socket.

pub(crate) mod backpressure;
pub(crate) mod rx;
pub(crate) mod scanning;
pub(crate) mod sendfile;
pub(crate) mod socket_io;
pub(crate) mod stop;
pub(crate) mod tx;
pub(crate) mod view;
pub(crate) mod zero_copy;
