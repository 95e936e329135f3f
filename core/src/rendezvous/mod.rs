//! How an instance finds the instance at the other end of a TCP connection (docs/protocol.md, P2–P7, P60–P69). An
//! instance asks the other end about the connection: within a host by the names of the listening port, between hosts by
//! the control port. `stream` and shims decide when to ask, and on the steps after an answer.

pub mod control;
pub mod diag;
pub mod names;
pub mod peers;
