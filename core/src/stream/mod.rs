//! How a TCP connection is promoted to a link and comes back. The state machines here make no system calls and read no
//! clock.

pub mod connection;
pub mod handshake;
pub mod mode;
pub mod policy;
pub mod resume;
