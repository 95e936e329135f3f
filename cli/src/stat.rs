//! `rdmasock stat`: prints the connections of the running instances as a table, or with all counters as JSON.
//!
//! The command only reads the counters that instances keep in shared memory, so it does not slow the programs down.

mod connections;
mod json;
mod off;
mod tables;
mod words;

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use off::Off;
use rdmasock_core::stats;
use rdmasock_core::stats::Process;

/// Options of `rdmasock stat`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Show again every SECONDS seconds, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1", value_parser = seconds)]
    watch: Option<Duration>,
    /// Print all that is known as JSON, with --watch one document a line
    #[arg(long)]
    json: bool,
    /// Show only the process with this pid
    #[arg(long)]
    pid: Option<u32>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let accepted = || "a number of seconds from 0.1 to 86400 is accepted".to_owned();
    let number: f64 = text.parse().map_err(|_| accepted())?;
    if (0.1..=86_400.0).contains(&number) {
        Ok(Duration::from_secs_f64(number))
    } else {
        Err(accepted())
    }
}

/// Prints the connections of the instances once, or with `--watch` repeatedly, at the given interval.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut out = std::io::stdout().lock();
    loop {
        let off = off::processes(options.pid);
        let shown = gather(options.pid, !off.is_empty())?;
        let others = peers_of(&shown, options.pid);
        let text = render(options, &shown, &others, &off)?;
        if options.watch.is_some() && !options.json && out.is_terminal() {
            // Escape sequences: cursor to the top left, then clear the screen.
            out.write_all(b"\x1b[H\x1b[2J")?;
        }
        out.write_all(text.as_bytes())?;
        out.flush()?;
        match options.watch {
            Some(interval) => std::thread::sleep(interval),
            None => return Ok(()),
        }
    }
}

/// Returns all instances, or with a `pid` only this process's instance. `is_off`: the process has the library switched
/// off, so it has no instance.
fn gather(pid: Option<u32>, is_off: bool) -> Result<Vec<Process>> {
    let Some(pid) = pid else {
        return stats::instances().context("cannot list /proc");
    };
    if is_off {
        return Ok(Vec::new());
    }
    let found = stats::instance_of(pid).with_context(|| {
        format!("cannot look at process {pid} (it has to run, and to be yours unless you are root)")
    })?;
    let process = found.ok_or_else(|| {
        anyhow!(
            "process {pid} does not run with the library, or has not yet used a socket; start it \
             with `rdmasock run -- PROGRAM`"
        )
    })?;
    Ok(vec![process])
}

/// If `pid` restricts the output to one process, returns the processes at the other ends of its links: their counters
/// are needed for the unread bytes. Otherwise none, as `shown` has all processes. Processes that the caller may not
/// read are left out.
fn peers_of(shown: &[Process], pid: Option<u32>) -> Vec<Process> {
    let Some(pid) = pid else { return Vec::new() };
    let links = shown.iter().flat_map(|p| &p.instance.links);
    let mut pids: Vec<u32> = links.map(|l| l.peer_pid).collect();
    pids.sort_unstable();
    pids.dedup();
    pids.into_iter()
        .filter(|peer| *peer != 0 && *peer != pid)
        .filter_map(|peer| stats::instance_of(peer).ok().flatten())
        .collect()
}

fn render(options: &Options, shown: &[Process], others: &[Process], off: &[Off]) -> Result<String> {
    let connections = connections::all(shown, others);
    if options.json {
        let document = json::document(shown, &connections, off);
        let text = match options.watch {
            Some(_) => serde_json::to_string(&document)?,
            None => serde_json::to_string_pretty(&document)?,
        };
        return Ok(text + "\n");
    }
    Ok(match (shown, off) {
        ([], []) => tables::NONE.to_owned(),
        _ => tables::overview(shown, &connections) + &tables::switched_off(off),
    })
}
