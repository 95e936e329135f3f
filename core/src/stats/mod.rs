//! Live counters of an instance in shared memory, for `rdmasock stat`.
//!
//! Each instance owns one [`StatsPage`]: a sealed, sparse memfd named [`MEMFD_NAME`] that the library maps shared and
//! keeps open. A reader finds it among the links of `/proc/<pid>/fd`, maps it read-only and copies what it needs
//! ([`StatsReader`]). So reading never stops, signals or slows the program. Slots that were never used cost no memory.
//!
//! The pointer to an instance's own page is in shims, which replaces it after a fork. cli prints the figures.

mod codes;
mod find;
mod layout;
mod page;
mod read;
mod reason;
mod sleepers;
#[cfg(test)]
mod tests;

pub use codes::{Call, Direction, Event, LINK_SLOTS, LinkState, MEMFD_NAME, Path, SLEEPER_SLOTS, STREAM_SLOTS};
pub use find::{Process, instance_of, instances};
pub use layout::{Counts, LinkStats, StatsPage, StreamStats};
pub use page::{InstanceInfo, LinkInfo, StreamInfo};
pub use read::{InstanceSnapshot, LinkSnapshot, ReadError, StatsReader, StreamSnapshot, Totals};
pub use reason::{Reason, Why};
pub use sleepers::{Asleep, SleeperSnapshot, SleeperStats, Waiting};
