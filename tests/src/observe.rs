//! Asks `rdmasock stat` whether a process's connections were promoted, and for its other counts.
//!
//! The queries are in one place, so that they can change without a change of the harness.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// The promotions of one process, as the library counts them.
#[derive(Clone, Copy, Default, Debug)]
pub struct Promotion {
    /// Streams, open or closed, that moved both directions to a link.
    pub promoted: u64,
    /// Open streams that have both directions on a link now.
    pub on_link: usize,
}

#[derive(Deserialize)]
struct Report {
    instances: Vec<Instance>,
}

#[derive(Deserialize)]
struct Instance {
    pid: u32,
    totals: Totals,
    events: HashMap<String, u64>,
    streams: Vec<Stream>,
    held: Option<String>,
}

#[derive(Deserialize)]
struct Totals {
    promoted: u64,
}

#[derive(Deserialize)]
struct Stream {
    tx_path: String,
    rx_path: String,
    why_tcp: Option<String>,
}

/// Asks `command` (the `rdmasock` binary) about `pid`. `None` if the command lists no such instance.
pub fn promotion_state(command: &Path, pid: u32) -> Result<Option<Promotion>> {
    Ok(instance(command, pid)?.map(|i| Promotion {
        promoted: i.totals.promoted,
        on_link: i
            .streams
            .iter()
            .filter(|s| s.tx_path != "tcp" && s.rx_path != "tcp")
            .count(),
    }))
}

/// Returns why connections of `pid` are on TCP: the reasons for all of them, and for each that is.
pub fn reasons(command: &Path, pid: u32) -> Result<Vec<String>> {
    let Some(instance) = instance(command, pid)? else {
        return Ok(Vec::new());
    };
    let streams = instance.streams.into_iter().filter_map(|s| s.why_tcp);
    Ok(instance.held.into_iter().chain(streams).collect())
}

/// Returns how often `pid` has counted an event, by its name. `None` if there is no such instance, or no such event.
pub fn count(command: &Path, pid: u32, event: &str) -> Result<Option<u64>> {
    Ok(instance(command, pid)?.and_then(|i| i.events.get(event).copied()))
}

fn instance(command: &Path, pid: u32) -> Result<Option<Instance>> {
    let out = Command::new(command)
        .args(["stat", "--json", "--pid", &pid.to_string()])
        .output()
        .with_context(|| {
            format!(
                "{} is missing: build it with `cargo build -p rdmasock-cli`",
                command.display()
            )
        })?;
    if out.stdout.is_empty() && !out.status.success() {
        let text = String::from_utf8_lossy(&out.stderr);
        bail!("rdmasock stat --json --pid {pid}: {}", text.trim());
    }
    let report: Report = serde_json::from_slice(&out.stdout).context("rdmasock stat --json")?;
    Ok(report.instances.into_iter().find(|i| i.pid == pid))
}
