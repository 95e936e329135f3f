//! Streams, links and fabrics: everything below the POSIX calls, and no POSIX call.
pub mod fabric;
pub mod sync;
//! placeholder
pub mod stats;
