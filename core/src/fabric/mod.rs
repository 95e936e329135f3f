//! Fabrics: ways to move bytes between instances, and what a link on any of them has to offer
//! ([`LinkEnd`]). Not how links are made, nor what their streams are for.

pub mod arena;
pub mod layout;
#[cfg(all(not(loom), any(test, feature = "mem")))]
pub mod mem;
pub mod ready;
pub mod ring;

#[cfg(not(loom))]
pub use link::{Capabilities, LinkEnd, OpenError, Opened, SendError};

#[cfg(not(loom))]
mod link;
