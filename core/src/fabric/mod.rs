//! Fabrics: ways to move bytes between instances, and what a link on any of them has to offer
//! ([`link::LinkEnd`]). Not how links are made, nor what their streams are for.

pub mod arena;
pub mod asleep;
pub mod layout;
#[cfg(not(loom))]
pub mod link;
#[cfg(all(not(loom), any(test, feature = "mem")))]
pub mod mem;
#[cfg(not(loom))]
mod numbers;
#[cfg(not(loom))]
pub mod plugin;
pub mod pollers;
pub mod ready;
#[cfg(not(loom))]
pub mod remote;
pub mod ring;
#[cfg(not(loom))]
mod segments;
#[cfg(not(loom))]
pub mod shm;
#[cfg(not(loom))]
mod side;
#[cfg(not(loom))]
pub mod waiter;
