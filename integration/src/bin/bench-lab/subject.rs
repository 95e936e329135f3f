//! The jobs of a measurement, the subjects that carry the bytes, and the machine that a figure is of.

use clap::ValueEnum;
use rdmasock_integration::table;
use serde::{Deserialize, Serialize};

/// A kind of measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
// The names of the command line.
#[serde(rename_all = "kebab-case")]
pub enum Job {
    /// The time from connect to the first byte of the answer of a server without the library.
    Connect = 1,
    /// Half a round trip; both ends block in recv.
    Latency,
    /// Bytes one way; reads are as large as the writes.
    Bandwidth,
    /// Messages one way; reads are large.
    Messages,
    /// The cost of a round trip beside time.
    TripCosts,
    /// The cost of a MiB one way beside time.
    StreamCosts,
    /// Bandwidth by each of the library's ways.
    Ways,
}

/// A carrier of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    Tcp,
    /// librspreload in front of the same program.
    Rsocket,
    /// rsocket's own benchmark.
    Rstream,
    Library,
    /// The library; all bytes go through rings.
    Rings,
    /// The library; bytes go straight between the programs' memory where they can.
    Direct,
    /// The library; the reader's device reads the bytes where it can.
    Lent,
}

impl Subject {
    /// Returns whether the library is preloaded into the program.
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

/// Describes the machine that a figure was measured on.
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

/// Returns the name of a value on the command line.
pub fn name(value: impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}
