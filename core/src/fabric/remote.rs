//! Links between hosts: each end keeps a local picture of the peer's arena, and an engine carries what
//! changes over a queue pair.
//!
//! | file | what |
//! |---|---|
//! | `qp.rs` | what is needed of a queue pair |
//! | `record.rs` | the wire: messages of records |
//! | `end.rs` | an end of a link, its calls and its threads |
//! | `ground.rs` | what it has that is used without the lock |
//! | `engine.rs` | its state, and what the peer's records do to it |
//! | `pump.rs` | what is to be sent, and in which order |
//! | `stream.rs` | the two directions of one stream |
//! | `lend.rs`, `buffers.rs` | send buffers: what is written while the peer's ring has no room |
//! | `credits.rs`, `chunks.rs` | the peer's receive buffers; registered memory |
//! | `fault.rs` | why a link is down |
//! | `watch.rs` | whether the peer's device still answers |
//! | `mem.rs` | a queue pair in memory, for tests |
//!
//! Each node has, for a link, two arenas of its own (`layout.rs`): `mine`, where its consumers read, and
//! the `mirror` of the peer's, where its producers write. Producer and consumer are those of shm. The
//! engine is the local opposite number of each: it keeps `want_data` of every block of the mirror and
//! `want_space` of every block of mine set to [`ENGINE`], so that whoever publishes something is given
//! that word, hands it to [`LinkEnd::notify`](super::LinkEnd::notify), and so has it carried over.
//! What comes from the peer it writes into the blocks as the peer would on shm, and wakes whoever the
//! other attention word names, who is in this process.

mod buffers;
mod chunks;
mod credits;
mod end;
mod engine;
mod fault;
mod ground;
mod lend;
#[cfg(any(test, feature = "mem"))]
pub mod mem;
mod pump;
pub mod qp;
pub mod record;
mod stream;
#[cfg(test)]
mod tests;
mod watch;

pub use end::{Counts, ENGINE, End, Local, MIN_BUFFER, MIN_BUFFERS, Tuning, Unusable};
pub use fault::{Breach, Fault};
