//! Reports which sockets are ready now, for the calls poll, select and epoll_wait.

pub(crate) mod epoll_wait;
pub(crate) mod poll;
pub(crate) mod readiness;
