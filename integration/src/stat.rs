//! Reads the library's own counters with `rdmasock stat --json`, from outside the programs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// Bytes and promotions of one or more instances, over open and closed streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    pub tx_tcp_bytes: u64,
    pub rx_tcp_bytes: u64,
    pub tx_link_bytes: u64,
    pub rx_link_bytes: u64,
    pub promoted: u64,
    pub demoted: u64,
    pub streams: u64,
}

impl Totals {
    /// Returns the bytes that went over links, both directions.
    pub fn link(&self) -> u64 {
        self.tx_link_bytes + self.rx_link_bytes
    }

    /// Returns the bytes that went over TCP, both directions.
    pub fn tcp(&self) -> u64 {
        self.tx_tcp_bytes + self.rx_tcp_bytes
    }

    fn zip(self, other: Self, op: fn(u64, u64) -> u64) -> Self {
        Self {
            tx_tcp_bytes: op(self.tx_tcp_bytes, other.tx_tcp_bytes),
            rx_tcp_bytes: op(self.rx_tcp_bytes, other.rx_tcp_bytes),
            tx_link_bytes: op(self.tx_link_bytes, other.tx_link_bytes),
            rx_link_bytes: op(self.rx_link_bytes, other.rx_link_bytes),
            promoted: op(self.promoted, other.promoted),
            demoted: op(self.demoted, other.demoted),
            streams: op(self.streams, other.streams),
        }
    }

    /// Returns the sum, field by field.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        self.zip(other, u64::saturating_add)
    }

    /// Returns the increase since `earlier`, field by field.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        self.zip(earlier, u64::saturating_sub)
    }
}

#[derive(Debug, Deserialize)]
struct Report {
    instances: Vec<Instance>,
}

/// A process with the library loaded.
#[derive(Debug, Clone, Deserialize)]
pub struct Instance {
    pub pid: u32,
    #[serde(default)]
    pub program: String,
    #[serde(default)]
    pub totals: Totals,
    #[serde(default)]
    pub streams: Vec<Stream>,
    /// Counters of the whole process, by name.
    #[serde(default)]
    pub events: BTreeMap<String, u64>,
}

/// An open stream of an instance.
#[derive(Debug, Clone, Deserialize)]
pub struct Stream {
    /// The local address; `None` while the connection is below the threshold.
    #[serde(default)]
    pub local: Option<String>,
    /// The peer's address; `None` while the connection is below the threshold.
    #[serde(default)]
    pub peer: Option<String>,
    pub tx_path: String,
    pub rx_path: String,
    #[serde(default)]
    pub why_tcp: Option<String>,
}

impl Instance {
    /// Returns the distinct reasons why streams of this instance are on TCP, for messages.
    pub fn reasons(&self) -> String {
        let mut reasons: Vec<&str> = self
            .streams
            .iter()
            .filter_map(|stream| stream.why_tcp.as_deref())
            .collect();
        reasons.sort_unstable();
        reasons.dedup();
        reasons.join("; ")
    }
}

/// The built `rdmasock` command.
#[derive(Debug, Clone)]
pub struct Stat {
    command: PathBuf,
}

impl Stat {
    /// Makes a reader of counters that runs `command`, the path of the built `rdmasock`.
    pub fn new(command: PathBuf) -> Self {
        Self { command }
    }

    /// Returns the path of the command.
    pub fn command(&self) -> &Path {
        &self.command
    }

    /// Returns the live instances in process group `group`: a server with all its workers.
    ///
    /// # Errors
    /// If the command fails or prints another form than the documented JSON.
    pub fn group(&self, group: u32) -> Result<Vec<Instance>> {
        let output = Command::new(&self.command)
            .args(["stat", "--json"])
            .output()
            .with_context(|| format!("run {} stat --json", self.command.display()))?;
        if !output.status.success() {
            bail!("rdmasock stat failed: {}", crate::proc::tail(&output.stderr, 400));
        }
        let report: Report = serde_json::from_slice(&output.stdout).context("rdmasock stat --json")?;
        let mut instances = report.instances;
        instances.retain(|instance| process_group(instance.pid) == Some(group));
        Ok(instances)
    }

    /// Returns the count of an event, added up over the instances of [`Stat::group`].
    ///
    /// # Errors
    /// As [`Stat::group`].
    pub fn count(&self, group: u32, event: &str) -> Result<u64> {
        let instances = self.group(group)?;
        Ok(instances.iter().filter_map(|instance| instance.events.get(event)).sum())
    }

    /// Returns the totals, added up over the instances of [`Stat::group`].
    ///
    /// # Errors
    /// As [`Stat::group`].
    pub fn totals(&self, group: u32) -> Result<Totals> {
        let instances = self.group(group)?;
        Ok(instances
            .iter()
            .fold(Totals::default(), |sum, instance| sum.plus(instance.totals)))
    }
}

/// Returns the process group of a process: the third field after the parenthesised name (proc_pid_stat(5)). Returns
/// `None` if the process does not exist.
fn process_group(pid: u32) -> Option<u32> {
    let line = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = line.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_documented_json() {
        let json = r#"{"instances":[{"pid":1,"uid":0,"program":"redis-server","id":"00",
            "uptime_s":1.5,"totals":{"tx_tcp_bytes":1,"tx_tcp_calls":0,"tx_link_bytes":5,
            "tx_link_calls":0,"rx_tcp_bytes":2,"rx_tcp_calls":0,"rx_link_bytes":7,
            "rx_link_calls":0,"promoted":1,"demoted":0,"streams":1},"links":[],
            "streams":[{"fd":7,"local":"a","peer":"b","direction":"accept","tx_path":"tcp",
            "rx_path":"shm","why_tcp":"below the threshold"}]}]}"#;
        let report: Report = serde_json::from_str(json).unwrap();
        let instance = &report.instances[0];
        assert_eq!((instance.totals.link(), instance.totals.tcp()), (12, 3));
        assert_eq!(instance.reasons(), "below the threshold");
        let later = instance.totals.plus(instance.totals);
        assert_eq!(later.since(instance.totals), instance.totals);
    }

    #[test]
    fn a_process_has_a_group() {
        // SAFETY: getpgrp has no preconditions.
        let group = unsafe { libc::getpgrp() };
        assert_eq!(process_group(std::process::id()), Some(group.cast_unsigned()));
    }
}
