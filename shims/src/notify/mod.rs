//! Notifies threads of changes: readiness of sockets, epoll sets, the fd table, waits, forks, and connections that are
//! worth a promotion.

pub(crate) mod call;
pub(crate) mod epoll;
pub(crate) mod fork;
pub(crate) mod ready;
pub(crate) mod reset;
pub(crate) mod table;
pub(crate) mod threshold;
pub(crate) mod wait;
