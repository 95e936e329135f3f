//! The present readiness of sockets: poll, select and epoll_wait.

pub(crate) mod epoll_wait;
pub(crate) mod poll;
pub(crate) mod readiness;
