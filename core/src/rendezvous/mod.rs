//! How an instance finds the one at the other end of a TCP connection: on the same host by the names
//! of listening ports, on another by its control port (docs/protocol.md, P2–P7, P60–P69). When
//! to ask, and what to make of the answer, is the stream's business.

pub mod control;
pub mod diag;
pub mod guard;
pub mod holders;
pub mod names;
pub mod peers;
pub mod route;
