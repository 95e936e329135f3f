//! Links between hosts: each end keeps a local copy of the peer's arena (the *mirror*), and an engine carries changes
//! over a queue pair.
//!
//! | file | what it has |
//! |---|---|
//! | `qp.rs` | the queue pair that an end uses |
//! | `record.rs` | the wire: messages of records |
//! | `end.rs`, `past.rs` | an end of a link, its calls and its threads; the calls for transfers that bypass the rings |
//! | `local.rs`, `tuning.rs`, `counts.rs` | the way to the waiters of this process; settings; counters |
//! | `shared.rs` | the parts of an end that are used without the lock |
//! | `engine.rs` | the engine's state, and the effects of the end's calls on it |
//! | `turn.rs`, `receive.rs` | a turn of the engine; the effects of the peer's records |
//! | `pump.rs`, `sender.rs` | what is sent, and in which order; the message being collected |
//! | `stream.rs` | the two directions of one stream |
//! | `lend.rs`, `buffers.rs` | send buffers, for bytes for which the peer's ring has no room |
//! | `direct.rs`, `landing.rs` | WRITEs straight into the memory of programs: the rules; the engine's part |
//! | `loan.rs`, `taking.rs` | READs from the memory of a sending program: the rules; the engine's part |
//! | `bulk.rs` | the queue pair for both |
//! | `credits.rs`, `chunks.rs` | the peer's receive buffers; registered memory |
//! | `fault.rs` | why a link is down |
//! | `watch.rs` | whether the peer's device still answers |
//! | `mem.rs` | a queue pair in memory, for tests |
//!
//! Each node has, for a link, two arenas of its own (`layout.rs`): `mine`, where its consumers read, and the `mirror`
//! of the peer's, where its producers write. Producer and consumer are the same types as on shm. The engine is the
//! local counterpart of each. It keeps `want_data` of every block of the mirror and `want_space` of every block of
//! `mine` set to [`ENGINE`]. So a cursor that publishes a change gets that word. Its caller passes the word to
//! [`LinkEnd::notify`](super::link::LinkEnd::notify), and the engine carries the change over. Changes from the peer it
//! writes into the blocks as the peer would on shm. Then it wakes the waiters of this process that the other attention
//! word names.

mod buffers;
mod bulk;
mod chunks;
mod counts;
mod credits;
mod direct;
mod end;
mod engine;
mod fault;
mod landing;
mod lend;
mod loan;
mod local;
#[cfg(any(test, feature = "mem"))]
pub mod mem;
mod past;
mod pump;
pub mod qp;
mod receive;
pub mod record;
mod sender;
mod shared;
mod stream;
mod taking;
#[cfg(test)]
mod tests;
mod tuning;
mod turn;
mod watch;

pub use counts::{Counts, DirectCounts};
pub use direct::{Buffer, Landed};
pub use end::End;
pub use fault::{Breach, Fault};
pub use local::{ENGINE, Local};
pub use tuning::{MIN_BUFFER, MIN_BUFFERS, Tuning, Unusable};
