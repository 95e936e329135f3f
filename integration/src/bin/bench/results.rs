//! The results of the parts of `bench`: the samples of each round, their medians, and comparisons. The parts write them
//! to JSON, and `page` reads them. This file measures nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use rdmasock_integration::median;
use serde::{Deserialize, Serialize};

/// A carrier of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Kernel TCP on the loopback interface.
    Tcp,
    /// A Unix stream socket.
    Unix,
    /// The library, within the host.
    Shm,
    /// The library over the local device, as if between hosts: a model. All bytes go through rings.
    Device,
    /// As `Device`, but bytes go straight between the programs' memory where they can.
    DeviceDirect,
    /// As `Device`, but the reader's device reads bytes from the sender's memory where it can.
    DeviceLent,
    /// As `Device`, but the library chooses between these three.
    DeviceDynamic,
    /// Queue pairs of the local device without the library, one for each connection.
    #[value(skip)]
    BareOwn,
    /// A queue pair of the local device without the library, for all connections.
    #[value(skip)]
    BareOne,
    /// The engine of a link of the library over one queue pair of the local device, without sockets.
    #[value(skip)]
    Link,
}

impl Way {
    /// All ways, first those that the others are compared with.
    pub const ALL: [Self; 10] = [
        Self::Tcp,
        Self::Unix,
        Self::Shm,
        Self::Device,
        Self::DeviceDirect,
        Self::DeviceLent,
        Self::DeviceDynamic,
        Self::BareOwn,
        Self::BareOne,
        Self::Link,
    ];
    /// The ways of the local device; the base of their comparisons is the first.
    pub const DEVICE: [Self; 4] = [Self::Device, Self::DeviceDirect, Self::DeviceLent, Self::DeviceDynamic];

    /// Returns the name in tables and pictures.
    pub fn title(self) -> &'static str {
        match self {
            Self::Tcp => "kernel TCP",
            Self::Unix => "Unix socket",
            Self::Shm => "library, shared memory",
            Self::Device => "library, local device (a model)",
            Self::DeviceDirect => "local device, direct (a model)",
            Self::DeviceLent => "local device, lent (a model)",
            Self::DeviceDynamic => "local device, dynamic (a model)",
            Self::BareOwn => "a queue pair each (a model)",
            Self::BareOne => "one queue pair (a model)",
            Self::Link => "one link of the library (a model)",
        }
    }

    /// Returns whether both ends have the library.
    pub fn has_library(self) -> bool {
        !matches!(self, Self::Tcp | Self::Unix | Self::BareOwn | Self::BareOne)
    }

    /// Returns the value of `RDMASOCK_ZCOPY_MIN`, or `None` where it has no effect.
    pub fn least_direct(self) -> Option<&'static str> {
        match self {
            Self::Tcp | Self::Unix | Self::Shm | Self::BareOwn | Self::BareOne | Self::Link => None,
            Self::Device => Some("off"),
            Self::DeviceDirect | Self::DeviceLent => Some("4K"),
            Self::DeviceDynamic => Some("auto"),
        }
    }

    /// Returns the value of `RDMASOCK_DEV_WAY`, or `None` if large sends may take more than one way.
    pub fn fixed(self) -> Option<&'static str> {
        match self {
            Self::DeviceDirect => Some("put"),
            Self::DeviceLent => Some("get"),
            _ => None,
        }
    }
}

/// A series of measurements, by the varied value. The value is the size of a transfer with one of three receivers, the
/// number of connections or client processes, or a load of `device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Series {
    /// Sizes; the receiver blocks in recv(2).
    Recv,
    /// Sizes; the receiver blocks in recv(2) with MSG_WAITALL.
    Waitall,
    /// Sizes; the receiver waits in epoll_wait(2) and then reads without blocking.
    Epoll,
    /// Sizes; the receiver blocks as in `Waitall`, on the ways of the local device alone.
    Threshold,
    /// Connections between two processes.
    Connections,
    /// Client processes with one connection each.
    Clients,
    /// Client processes, with one that sends.
    Among,
    /// Bulk streams beside a connection of small messages.
    Beside,
    /// Connections between two processes, with a thread of the server for each.
    Sleepers,
    /// Bytes of a message, on a queue pair.
    Engine,
    /// Connections on queue pairs.
    QueuePairs,
    /// Threads that use a queue pair.
    Threads,
}

impl Series {
    /// The series of `sweep`.
    pub const RECEIVERS: [Self; 3] = [Self::Recv, Self::Waitall, Self::Epoll];
    /// The series of `scale`.
    pub const CROWDS: [Self; 5] = [
        Self::Connections,
        Self::Clients,
        Self::Among,
        Self::Beside,
        Self::Sleepers,
    ];
    /// The series of `device`.
    pub const MODELS: [Self; 3] = [Self::Engine, Self::QueuePairs, Self::Threads];

    /// Returns the heading of the series.
    pub fn title(self) -> &'static str {
        match self {
            Self::Recv => "Receiver that blocks in recv",
            Self::Waitall => "Receiver that blocks in recv with MSG_WAITALL",
            Self::Epoll => "Receiver that waits in epoll_wait",
            Self::Threshold => "Copies against the programs' own memory",
            Self::Connections => "Connections between two processes",
            Self::Clients => "Client processes of one server",
            Self::Among => "One client process of many that sends",
            Self::Beside => "Small messages beside bulk",
            Self::Sleepers => "Threads of a server that sleep in recv",
            Self::Engine => "A link's engine and the queue pair below it",
            Self::QueuePairs => "Connections with a queue pair each, and on one",
            Self::Threads => "Threads that share a queue pair",
        }
    }

    /// Returns the word for the series in file names.
    pub fn word(self) -> &'static str {
        match self {
            Self::Recv => "recv",
            Self::Waitall => "waitall",
            Self::Epoll => "epoll",
            Self::Threshold => "threshold",
            Self::Connections => "connections",
            Self::Clients => "clients",
            Self::Among => "among",
            Self::Beside => "beside",
            Self::Sleepers => "sleepers",
            Self::Engine => "engine",
            Self::QueuePairs => "queue-pairs",
            Self::Threads => "threads",
        }
    }

    /// Returns the head of the column with the varied values.
    pub fn varied(self) -> &'static str {
        match self {
            Self::Recv | Self::Waitall | Self::Epoll | Self::Threshold => "transfer",
            Self::Connections | Self::QueuePairs => "connections",
            Self::Clients | Self::Among => "processes",
            Self::Beside => "bulk streams",
            Self::Engine => "message",
            Self::Threads | Self::Sleepers => "threads",
        }
    }

    /// Returns the base whose powers the varied values are.
    pub fn base(self) -> f64 {
        match self {
            Self::Recv | Self::Waitall | Self::Epoll | Self::Threshold => 4.0,
            Self::Connections | Self::Clients | Self::Among | Self::QueuePairs => 10.0,
            Self::Beside | Self::Engine | Self::Sleepers => 4.0,
            Self::Threads => 2.0,
        }
    }

    /// Returns the way that the other ways of the series are compared with.
    pub fn compared_with(self) -> Way {
        match self {
            Self::Threshold => Way::Device,
            Self::QueuePairs => Way::BareOwn,
            Self::Engine | Self::Threads => Way::BareOne,
            _ => Way::Tcp,
        }
    }

    /// Returns a varied value as text.
    pub fn value(self, x: u64) -> String {
        match self {
            Self::Recv | Self::Waitall | Self::Epoll | Self::Threshold | Self::Engine => size(x),
            _ => x.to_string(),
        }
    }
}

/// A measured figure. Its unit is in its title.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure {
    Throughput,
    Processor,
    ProcessorSender,
    ProcessorReceiver,
    Direct,
    TripP50,
    TripP99,
    TripP999,
    Messages,
    MessageP50,
    MessageP99,
    MessageProcessor,
    MessageProcessorServer,
    Sleeps,
    Resident,
    Shared,
    Descriptors,
}

impl Figure {
    /// Returns the name of the figure with its unit.
    pub fn title(self) -> &'static str {
        match self {
            Self::Throughput => "throughput, GB/s",
            Self::Processor => "processor seconds per GB, both sides",
            Self::ProcessorSender => "processor seconds per GB, sender",
            Self::ProcessorReceiver => "processor seconds per GB, receiver",
            Self::Direct => "bytes that went past the mirror or the ring, %",
            Self::TripP50 => "round trip, µs, p50",
            Self::TripP99 => "round trip, µs, p99",
            Self::TripP999 => "round trip, µs, p99.9",
            Self::Messages => "messages a second",
            Self::MessageP50 => "time of a message, µs, p50",
            Self::MessageP99 => "time of a message, µs, p99",
            Self::MessageProcessor => "processor µs a message, all processes",
            Self::MessageProcessorServer => "processor µs a message, server",
            Self::Sleeps => "sleeps of the server's threads a message",
            Self::Resident => "resident memory of the server, MiB",
            Self::Shared => "shared memory of the server, MiB",
            Self::Descriptors => "descriptors of the server",
        }
    }

    /// Returns whether a greater value is better.
    fn is_better_higher(self) -> bool {
        matches!(self, Self::Throughput | Self::Direct | Self::Messages)
    }
}

/// The properties of the machine that matter to results, without names.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub cores: usize,
    /// The version of Linux, without the suffix of its builder.
    pub kernel: String,
    pub is_virtual: bool,
    /// The load average of the last minute, taken before the run: threads of other programs that wanted to run.
    pub load: f64,
}

impl Machine {
    /// Returns the properties of this machine.
    ///
    /// # Errors
    /// If /proc cannot be read.
    pub fn this() -> Result<Self> {
        let read = |path: &str| std::fs::read_to_string(path).with_context(|| path.to_owned());
        let (kernel, load) = (read("/proc/sys/kernel/osrelease")?, read("/proc/loadavg")?);
        let load = load.split(' ').next().and_then(|text| text.parse().ok());
        Ok(Self {
            cores: std::thread::available_parallelism()?.get(),
            kernel: kernel.trim().split('-').next().unwrap_or_default().to_owned(),
            is_virtual: read("/proc/cpuinfo")?.contains(" hypervisor"),
            load: load.context("/proc/loadavg")?,
        })
    }
}

/// The samples of one varied value on one way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    pub series: Series,
    pub x: u64,
    pub way: Way,
    /// The samples of each figure, one for each round in order.
    pub samples: BTreeMap<Figure, Vec<f64>>,
}

/// The number of rounds, and the file for their samples.
#[derive(Debug, Args)]
pub struct Repeats {
    /// Also write all samples to PATH as JSON.
    #[arg(long, value_name = "PATH")]
    pub json: Option<PathBuf>,
    /// Run one short round of few cases.
    #[arg(long)]
    pub quick: bool,
    /// How often each measurement is repeated, alternating [default: 3, of transfers 5, with --quick 1].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: Option<u32>,
}

impl Repeats {
    /// Returns the number of rounds; `default` applies without --rounds and --quick.
    pub fn rounds(&self, default: u32) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { default })
    }
}

/// A run of one part.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Results {
    pub machine: Machine,
    pub rounds: u32,
    pub is_quick: bool,
    pub points: Vec<Point>,
    /// Measurements that do not count, with the reason.
    pub refused: Vec<String>,
}

impl Results {
    /// Makes results of this machine, without points.
    ///
    /// # Errors
    /// As [`Machine::this`].
    pub fn new(rounds: u32, is_quick: bool) -> Result<Self> {
        Ok(Self {
            machine: Machine::this()?,
            rounds,
            is_quick,
            ..Self::default()
        })
    }

    /// Adds the figures of one round.
    pub fn add(&mut self, series: Series, x: u64, way: Way, figures: &[(Figure, f64)]) {
        let is_it = |point: &Point| (point.series, point.x, point.way) == (series, x, way);
        let at = self.points.iter().position(is_it).unwrap_or_else(|| {
            self.points.push(Point {
                series,
                x,
                way,
                samples: BTreeMap::new(),
            });
            self.points.len() - 1
        });
        if let Some(point) = self.points.get_mut(at) {
            for (figure, value) in figures {
                point.samples.entry(*figure).or_default().push(*value);
            }
        }
    }

    /// Returns the median of the rounds, or `None` without samples.
    pub fn median(&self, series: Series, x: u64, way: Way, figure: Figure) -> Option<f64> {
        let is_it = |point: &&Point| (point.series, point.x, point.way) == (series, x, way);
        let samples = self.points.iter().find(is_it)?.samples.get(&figure)?;
        (!samples.is_empty()).then(|| median(samples))
    }

    /// Returns how many times as good the figure is on `way` as on `base`, by the medians. Returns `None` if a sample
    /// is missing.
    pub fn times(&self, series: Series, x: u64, way: Way, figure: Figure, base: Way) -> Option<f64> {
        let (value, base) = (
            self.median(series, x, way, figure)?,
            self.median(series, x, base, figure)?,
        );
        let (better, worse) = match figure.is_better_higher() {
            true => (value, base),
            false => (base, value),
        };
        (better > 0.0 && worse > 0.0).then(|| better / worse)
    }

    /// Returns the varied values with samples, in ascending order.
    pub fn values(&self, series: Series) -> Vec<u64> {
        let of_series = self.points.iter().filter(|point| point.series == series);
        let mut values: Vec<u64> = of_series.map(|point| point.x).collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    /// Returns the ways with samples, in the order of [`Way::ALL`].
    pub fn ways(&self, series: Series) -> Vec<Way> {
        let has = |way: &Way| self.points.iter().any(|p| p.series == series && p.way == *way);
        Way::ALL.into_iter().filter(has).collect()
    }

    /// Writes the results as JSON.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }

    /// Reads results that [`Results::write`] has written.
    ///
    /// # Errors
    /// If the file cannot be read or has another form.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is not of a part of bench", path.display()))
    }
}

/// Returns a number of bytes in words.
pub fn size(bytes: u64) -> String {
    match bytes {
        0x10_0000.. if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        0x400.. if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

/// Reads a number of bytes with suffix K, M or G, or none.
///
/// # Errors
/// If the text is no number of bytes, or not from 8 B, which the number of a transfer takes, to 64 GiB.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.chars().last() {
        Some('K') => (text.trim_end_matches('K'), 10),
        Some('M') => (text.trim_end_matches('M'), 20),
        Some('G') => (text.trim_end_matches('G'), 30),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| "not a number of bytes".to_owned())?;
    match number.checked_mul(1 << shift) {
        Some(bytes @ 8..=0x10_0000_0000) => Ok(bytes),
        _ => Err("not from 8 to 64G".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_of_the_rounds_and_ratios_of_the_medians() {
        let mut results = Results::default();
        for (way, values) in [(Way::Tcp, [2.0, 1.0, 9.0]), (Way::Shm, [4.0, 8.0, 3.0])] {
            for value in values {
                let figures = [(Figure::Throughput, value), (Figure::Processor, value)];
                results.add(Series::Recv, 64, way, &figures);
            }
        }
        let times = |figure| results.times(Series::Recv, 64, Way::Shm, figure, Way::Tcp);
        assert_eq!(
            results.median(Series::Recv, 64, Way::Tcp, Figure::Throughput),
            Some(2.0)
        );
        assert_eq!(times(Figure::Throughput), Some(2.0));
        assert_eq!(times(Figure::Processor), Some(0.5));
        assert_eq!(times(Figure::TripP50), None);
        let text = serde_json::to_string(&results).unwrap();
        assert_eq!(serde_json::from_str::<Results>(&text).unwrap(), results);
    }

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes, words) in [
            ("64", 64, "64 B"),
            ("16K", 16 << 10, "16 KiB"),
            ("1M", 1 << 20, "1 MiB"),
        ] {
            assert_eq!(parse_size(text), Ok(bytes));
            assert_eq!(size(bytes), words);
        }
        assert!(
            ["", "7", "x", "1T", "99999999999G"]
                .iter()
                .all(|text| parse_size(text).is_err())
        );
    }
}
