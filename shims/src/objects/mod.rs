//! The objects that the layers above share: the instance (`library`), its mailbox and waiters, links, listeners and
//! sockets. Also the count of the processes that hold a socket, how much memory rings may take (`cgroup`), and the
//! program's memory that devices access (`pinned`).

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
