//! What is measured, what carries it, and on which machine.

use clap::ValueEnum;
use rdmasock_integration::table;
use serde::{Deserialize, Serialize};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
// As on the command line.
#[serde(rename_all = "kebab-case")]
pub enum Job {
    /// From connect to the first byte of the answer, of a server that has not the library.
    Connect = 1,
    /// Half a round trip, both ends blocking in recv.
    Latency,
    /// One way, reads as large as the writes.
    Bandwidth,
    /// One way, large reads.
    Messages,
    /// What a round trip costs beside time.
    TripCosts,
    /// What a MiB one way costs beside time.
    StreamCosts,
    /// As bandwidth, by each of the library's ways.
    Ways,
}

/// What carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    Tcp,
    /// librspreload in front of the same program.
    Rsocket,
    /// rsocket's own benchmark.
    Rstream,
    Library,
    /// The library, with all bytes by rings.
    Rings,
    /// With all that can straight between the programs' memory.
    Direct,
    /// With all that can read by the reader's device.
    Lent,
}

impl Subject {
    /// Whether the library is in front of the program.
    pub fn has_library(self) -> bool {
        matches!(self, Self::Library | Self::Rings | Self::Direct | Self::Lent)
    }
}

impl From<Subject> for table::Subject {
    fn from(subject: Subject) -> Self {
        match subject {
            Subject::Tcp => Self::Tcp,
            Subject::Rsocket => Self::Rsocket,
            Subject::Rstream => Self::Rstream,
            Subject::Library => Self::Library,
            Subject::Rings => Self::Rings,
            Subject::Direct => Self::Direct,
            Subject::Lent => Self::Lent,
        }
    }
}

/// What a figure was taken on.
#[derive(Debug, Serialize, Deserialize)]
pub struct Machine {
    pub device: String,
    pub kernel: String,
    pub cpus: usize,
}

impl Machine {
    pub fn here() -> Self {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            device: std::env::var("LAB_DEVICE").unwrap_or_default(),
            kernel: kernel.trim().to_owned(),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
        }
    }
}

/// The name of a value on the command line.
pub fn name(value: impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}
