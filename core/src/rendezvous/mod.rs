//! How an instance finds the one at the other end of a TCP connection on the same host: by the names
//! of listening ports (DESIGN §4; docs/protocol.md, P2–P7). When to ask, and what to make of the
//! answer, is the stream's business.

pub mod diag;
pub mod names;
pub mod peers;
