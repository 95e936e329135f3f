//! POSIX socket semantics over the engine: what the hooks in `preload/` call.
//!
//! The rooms, lowest first; none knows one that comes later.
//!
//! 1. The process around us: `errno real time iov points duty handler jump vfork ending`; what the user wants: `config
//!    rules log reach verbs`; the kernel's sockets: `sockopt tcp_info identity keepalive`; small parts: `registry
//!    ledger kept_on_tcp offers load spin ways waiters ancestors`.
//! 2. What is left to the service thread: `mailbox`. The instance, as data: `library`, `signals`, and
//!    `cgroup`.
//! 3. Objects: `link listener holders`, then `socket`.
//! 4. Whom to tell: `ready anchor`; what a socket comes to without moving a byte: `blocking threshold reset reclaim`.
//! 5. Sets and numbers: `epoll`, `table`, `closing`, then whose a `call` is and how it can `wait`; `fork`.
//! 6. Bytes: `tx rx`. What a connection asks of the world: `socket_io`.
//! 7. What is ready now: `readiness`, and who asks: `poll epoll_wait`.
//! 8. Ends and hand-overs: `pass close exit`.
//! 9. The second thread: `service`. Making the instance: `instance`. Numbers that come and go: `lifecycle`, `confine`.
//! 10. `calls`, one function a hook; `api`, one a function of `include/rdmasock.h`.
//!
//! What lies above and has to be told from below is given downwards as a function, once: who wakes and starts the
//! thread (`mailbox::Thread`), who makes an instance in a fork child (`library`), and who ends a connection
//! (`closing::Told`).

#![warn(missing_docs)]

mod ancestors;
mod anchor;
pub mod api;
mod arenas;
mod blocking;
mod budget;
mod call;
pub mod calls;
mod cgroup;
mod close;
mod closing;
pub mod config;
mod confine;
mod duty;
mod ending;
pub mod environment;
mod epoll;
mod epoll_wait;
mod errno;
mod exit;
mod fork;
mod handler;
mod holders;
mod identity;
mod instance;
mod iov;
pub mod jump;
mod keepalive;
mod kept_on_tcp;
mod ledger;
mod library;
mod lifecycle;
mod link;
mod listener;
mod load;
pub mod log;
mod mailbox;
mod offers;
mod pass;
mod pinned;
mod points;
mod poll;
mod reach;
mod readiness;
mod ready;
pub mod real;
mod reclaim;
mod registry;
mod remains;
mod reset;
mod rules;
mod rx;
mod served;
mod service;
pub mod signals;
mod socket;
mod socket_io;
mod sockopt;
mod spin;
mod table;
mod tcp_info;
mod threshold;
mod time;
mod tx;
pub mod verbs;
pub mod vfork;
mod wait;
mod waiters;
mod ways;
