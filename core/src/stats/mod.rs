//! Live counters of an instance in shared memory, for `rdmasock stat`.
//!
//! Each instance owns one [`StatsPage`]: a sealed, sparse memfd named [`MEMFD_NAME`] that the library maps shared and
//! keeps open. A reader finds the memfd among the links of `/proc/<pid>/fd`, maps it read-only and copies the counters
//! ([`StatsReader`]). So a reader never stops, signals or slows the program. Slots that were never used cost no memory.
//!
//! shims keeps the pointer to the instance's own page, and replaces it after a fork. cli prints the figures.

mod layout;
mod page;
mod read;
mod reason;
#[cfg(test)]
mod tests;

pub use crate::stats::layout::{
    Asleep, Call, Counters, Counts, Direction, Event, LINK_SLOTS, LinkState, LinkStats, MEMFD_NAME, Path,
    SLEEPER_SLOTS, STREAM_SLOTS, SleeperSnapshot, SleeperStats, StatsPage, StreamStats,
};
pub use crate::stats::page::StreamInfo;
pub use crate::stats::read::{
    InstanceSnapshot, LinkSnapshot, Process, ReadError, StatsReader, StreamSnapshot, Totals, instance_of, instances,
};
pub use crate::stats::reason::{Reason, Why};
