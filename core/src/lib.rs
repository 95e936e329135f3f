//! The core of rdmasock below the POSIX calls: identities, wire format, rendezvous, the promotion protocol, links and
//! fabrics.

#![warn(missing_docs, unreachable_pub)]

#[cfg(not(loom))]
pub mod allocator;
#[cfg(not(loom))]
mod codes;
pub mod cycles;

pub mod fabric;
pub mod region;
pub mod sync;

#[cfg(all(not(loom), feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(not(loom))]
pub mod ids;
#[cfg(not(loom))]
pub mod lock;
#[cfg(not(loom))]
pub mod os;
#[cfg(not(loom))]
pub mod rendezvous;
#[cfg(not(loom))]
pub mod scratch;
#[cfg(not(loom))]
pub mod sparse;
#[cfg(not(loom))]
pub mod stats;
#[cfg(not(loom))]
pub mod stream;
#[cfg(not(loom))]
pub mod wire;
