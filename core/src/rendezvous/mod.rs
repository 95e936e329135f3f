//! How an instance finds the one at the other end of a TCP connection (docs/protocol.md, P2–P7, P60–P69). On the same
//! host it asks by the names of listening ports, on another host by the control port. The stream decides when to ask,
//! and what an answer leads to.

pub mod control;
pub mod diag;
pub mod names;
pub mod peers;
