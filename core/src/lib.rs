//! The socket-free heart of rdmasock: identities, wire format, rendezvous, streams, links, fabrics.
pub mod ids;
pub mod os;
pub mod rendezvous;
pub mod wire;
