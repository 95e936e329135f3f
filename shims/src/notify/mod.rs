//! What tells threads of changes: sockets that are ready, epoll sets, descriptors, waits, a promotion that is worth it.

pub(crate) mod anchor;
pub(crate) mod blocking;
pub(crate) mod call;
pub(crate) mod closing;
pub(crate) mod epoll;
pub(crate) mod fork;
pub(crate) mod ready;
pub(crate) mod reclaim;
pub(crate) mod reset;
pub(crate) mod table;
pub(crate) mod threshold;
pub(crate) mod wait;
