//! How threads wait and are notified. `ready` notifies the threads and epoll sets that wait for a socket, `epoll` has
//! the epoll sets, and `wait` is the wait of one blocking call. `table` leads from an fd to its object, and `call` ties
//! a call that waits to its connection. `fork`, `reset` and `threshold` handle a fork, a connection that was reset, and
//! a connection that has carried enough for a promotion.

pub(crate) mod call;
pub(crate) mod epoll;
pub(crate) mod fork;
pub(crate) mod ready;
pub(crate) mod reset;
pub(crate) mod table;
pub(crate) mod threshold;
pub(crate) mod wait;
