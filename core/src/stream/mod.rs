//! The byte-stream protocol as state machines without I/O or clock.

pub mod connection;
pub mod handshake;
pub mod mode;
pub mod policy;
pub mod resume;
