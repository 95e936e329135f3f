//! The present readiness of sockets, and the calls that report it: poll, select and epoll_wait.

pub(crate) mod epoll_wait;
pub(crate) mod poll;
pub(crate) mod readiness;
