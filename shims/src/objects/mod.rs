//! The objects that the layers above share: the instance, its mailbox, links, listeners and sockets, and the count of
//! processes that hold a socket.

pub(crate) mod cgroup;
pub(crate) mod holders;
pub(crate) mod library;
pub(crate) mod link;
pub(crate) mod listener;
pub(crate) mod local_link;
pub(crate) mod mailbox;
pub(crate) mod pinned;
pub(crate) mod remote_link;
pub(crate) mod socket;
pub(crate) mod waiters;
