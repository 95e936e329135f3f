//! The objects: the instance, its mailbox, links, listeners, sockets, and who holds them.

pub(crate) mod ancestors;
pub(crate) mod cgroup;
pub(crate) mod holders;
pub(crate) mod library;
pub(crate) mod link;
pub(crate) mod listener;
pub(crate) mod mailbox;
pub(crate) mod offers;
pub(crate) mod pinned;
pub(crate) mod socket;
pub(crate) mod waiters;
