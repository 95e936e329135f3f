//! Fabrics: the ways to move bytes between instances, and the calls that a link on any of them offers
//! ([`link::LinkEnd`]). Not here: how links are made, and the purpose of their streams.

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
