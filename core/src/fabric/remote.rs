//! Links between hosts: each end keeps a local picture of the peer's arena, and an engine carries what
//! changes over a queue pair.
//!
//! | file | what |
//! |---|---|
//! | `qp.rs` | what is needed of a queue pair |
//! | `record.rs` | the wire: messages of records |
//! | `end.rs`, `past.rs` | an end of a link, its calls and its threads; the calls about what goes past the rings |
//! | `local.rs`, `tuning.rs`, `counts.rs` | how it reaches those who wait here; what may be set for it; what it counts |
//! | `shared.rs` | what it has that is used without the lock |
//! | `engine.rs` | its state, and what its calls do to that |
//! | `turn.rs`, `receive.rs` | a turn of the engine; what the peer's records do to it |
//! | `pump.rs`, `sender.rs` | what is to be sent, and in which order; the message being collected |
//! | `stream.rs` | the two directions of one stream |
//! | `lend.rs`, `buffers.rs` | send buffers: what is written while the peer's ring has no room |
//! | `direct.rs`, `landing.rs`, `bulk.rs` | what goes straight into the memory of programs: the rules, what the engine does about it, the queue pair for it |
//! | `loan.rs`, `taking.rs` | what the reader's device reads from the memory of a sending program: the rules, what the engine does about it |
//! | `credits.rs`, `chunks.rs` | the peer's receive buffers; registered memory |
//! | `fault.rs` | why a link is down |
//! | `watch.rs` | whether the peer's device still answers |
//! | `mem.rs` | a queue pair in memory, for tests |
//!
//! Each node has, for a link, two arenas of its own (`layout.rs`): `mine`, where its consumers read, and
//! the `mirror` of the peer's, where its producers write. Producer and consumer are those of shm. The
//! engine is the local opposite number of each: it keeps `want_data` of every block of the mirror and
//! `want_space` of every block of mine set to [`ENGINE`], so that whoever publishes something is given
//! that word, hands it to [`LinkEnd::notify`](super::link::LinkEnd::notify), and so has it carried over.
//! What comes from the peer it writes into the blocks as the peer would on shm, and wakes whoever the
//! other attention word names, who is in this process.

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
