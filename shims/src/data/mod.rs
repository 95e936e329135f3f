//! Moves the bytes of a connection. `tx` sends and `rx` receives, `scanning` receives from TCP that may hold markers,
//! and `zero_copy` makes direct transfers. `socket_io` has what core's connection needs of its socket.

pub(crate) mod backpressure;
pub(crate) mod rx;
pub(crate) mod scanning;
pub(crate) mod sendfile;
pub(crate) mod socket_io;
pub(crate) mod stop;
pub(crate) mod tx;
pub(crate) mod view;
pub(crate) mod zero_copy;
