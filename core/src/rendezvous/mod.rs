//! How an instance finds the one at the other end of a TCP connection: on the same host by the names of listening
//! ports, on another host by its control port (docs/protocol.md, P2–P7, P60–P69). The stream decides when to ask, and
//! what an answer leads to.

pub mod control;
pub mod diag;
pub mod guard;
pub mod holders;
pub mod names;
pub mod peers;
pub mod route;
