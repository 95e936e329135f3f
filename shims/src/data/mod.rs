//! Moves the bytes of a connection: sending, receiving, and what core's connection needs of its socket (`socket_io`).

pub(crate) mod backpressure;
pub(crate) mod rx;
pub(crate) mod scanning;
pub(crate) mod sendfile;
pub(crate) mod socket_io;
pub(crate) mod stop;
pub(crate) mod tx;
pub(crate) mod view;
pub(crate) mod zero_copy;
