//! Streams, links and fabrics: everything below the POSIX calls, and no POSIX call.
pub mod fabric;
pub mod sync;
//! placeholder
pub mod stats;
//! The socket-free heart of rdmasock: identities, wire format, rendezvous, streams, links, fabrics.
pub mod ids;
pub mod wire;
