//! Reads samples as lines of text, and makes a table of them.

use std::collections::BTreeMap;
use std::io::{BufRead, Read};
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;
use rdmasock_integration::stat::Totals;
use rdmasock_integration::table;
use rdmasock_integration::table::{Better, Goal, Report, Row};
use serde::{Deserialize, Serialize};

use crate::costs;
use crate::costs::Cost;
use crate::subject::{Job, Machine, Subject, name};

/// The beginning of every line of a sample, after the node's name.
const MARK: &str = "sample ";

/// A sample of one job.
#[derive(Debug, Serialize, Deserialize)]
pub struct Sample {
    #[serde(flatten)]
    machine: Machine,
    subject: Subject,
    job: Job,
    size: u32,
    value: f64,
    totals: Option<Totals>,
}

impl Sample {
    /// Makes a sample of this machine.
    pub fn new(subject: Subject, job: Job, size: u32, value: f64, totals: Option<Totals>) -> Self {
        Self {
            machine: Machine::here(),
            subject,
            job,
            size,
            value,
            totals,
        }
    }

    /// Prints the sample as one line.
    pub fn print(&self) -> Result<()> {
        println!("{MARK}{}", serde_json::to_string(self)?);
        Ok(())
    }
}

/// Describes the measurement that rstream was asked for.
#[derive(Debug, Args)]
pub struct Rstream {
    #[arg(long)]
    job: Job,
    #[arg(long)]
    size: u32,
}

/// Turns the last line of rstream's output into a sample: name, bytes, transfers, iterations, total, time, Gb/s, µs a
/// transfer.
pub fn rstream(options: &Rstream) -> Result<()> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let line = text.lines().last().unwrap_or_default();
    let words: Vec<&str> = line.split_whitespace().collect();
    // The Gb/s before it have two digits after the point, which are both 0 for small messages.
    let microseconds = match words.as_slice() {
        [.., _, word] => word.parse::<f64>().ok().filter(|figure| *figure > 0.0),
        _ => None,
    };
    let microseconds = microseconds.with_context(|| format!("not rstream's output: {text}"))?;
    let value = match options.job {
        Job::Connect | Job::Latency => microseconds,
        Job::Bandwidth => f64::from(options.size) * 1e6 / microseconds,
        Job::Messages => 1e6 / microseconds,
        Job::TripCosts | Job::StreamCosts | Job::Ways => bail!("rstream has none of these"),
    };
    Sample::new(Subject::Rstream, options.job, options.size, value, None).print()
}

#[derive(Default)]
struct Device {
    rows: BTreeMap<(Job, u32), Row>,
    failures: BTreeMap<(Job, u32), BTreeMap<Subject, u32>>,
    costs: Vec<Cost>,
    kernel: String,
    cpus: usize,
}

/// A sample that could not be taken.
#[derive(Debug, Deserialize)]
struct Failure {
    device: String,
    subject: Subject,
    job: Job,
    size: u32,
}

/// Reads samples and writes tables. Fails if kernel TCP or the library could not be measured. A failure of rsocket is
/// printed and is no error.
pub fn run(json: Option<&Path>, counts: Option<&Path>) -> Result<()> {
    let mut devices: BTreeMap<String, Device> = BTreeMap::new();
    let mut ours_failed = 0;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let text = line.split_once("| ").map_or(line.as_str(), |(_, text)| text);
        if let Some(text) = text.strip_prefix(MARK) {
            let sample: Sample = serde_json::from_str(text).context("a sample")?;
            eprintln!(
                "{}: {} {} B, {}: {:.4}",
                sample.machine.device,
                name(sample.job),
                sample.size,
                name(sample.subject),
                sample.value
            );
            devices.entry(sample.machine.device.clone()).or_default().add(&sample);
        } else if let Some(text) = text.strip_prefix(costs::MARK) {
            let cost: Cost = serde_json::from_str(text).context("costs")?;
            eprintln!("{}", cost.summary());
            let device = devices.entry(cost.machine.device.clone()).or_default();
            device.is_on(&cost.machine);
            device.costs.push(cost);
        } else if let Some(text) = text.strip_prefix("failed ") {
            let failure: Failure = serde_json::from_str(text).context("a failure")?;
            if failure.subject == Subject::Tcp || failure.subject.has_library() {
                ours_failed += 1;
            }
            let device = devices.entry(failure.device).or_default();
            let key = (failure.job, failure.size);
            device.rows.entry(key).or_insert_with(|| row(key));
            *device
                .failures
                .entry(key)
                .or_default()
                .entry(failure.subject)
                .or_default() += 1;
        } else {
            eprintln!("{line}");
        }
    }
    if devices.is_empty() {
        bail!("no samples");
    }
    let reports: BTreeMap<String, Report> = devices
        .into_iter()
        .map(|(name, device)| Ok((name.clone(), device.report(&name, counts)?)))
        .collect::<Result<_>>()?;
    for report in reports.values() {
        println!("{report}");
    }
    if let Some(path) = json {
        std::fs::write(path, serde_json::to_string_pretty(&reports)? + "\n")
            .with_context(|| format!("write {}", path.display()))?;
    }
    if ours_failed > 0 {
        bail!("{ours_failed} samples of TCP or rdmasock failed");
    }
    Ok(())
}

fn row((job, size): (Job, u32)) -> Row {
    let size = match size {
        0..1024 => format!("{size} B"),
        1024..0x10_0000 => format!("{} KiB", size / 1024),
        _ => format!("{} MiB", size >> 20),
    };
    let goals = [
        Goal::Times(table::Subject::Rsocket, 1.3),
        Goal::Times(table::Subject::Rstream, 1.3),
    ];
    match job {
        Job::Connect => Row::new(
            "connect to first byte, server without it",
            "µs",
            Better::Lower,
            // The goal is as good as TCP, except for the noise of emulated machines.
            &[Goal::Times(table::Subject::Tcp, 0.9)],
        ),
        Job::Latency => Row::new(&format!("{size}, half a round trip"), "µs", Better::Lower, &goals),
        Job::Bandwidth => Row::new(&format!("{size} writes, one way"), "bytes/s", Better::Higher, &goals),
        Job::Ways => Row::new(
            &format!("{size} writes, one way"),
            "bytes/s",
            Better::Higher,
            // The goal of `auto` is to be about as good as the best way.
            &[table::Subject::Rings, table::Subject::Direct, table::Subject::Lent].map(|way| Goal::Times(way, 0.95)),
        ),
        Job::TripCosts | Job::StreamCosts => Row::new(&name(job), "", Better::Lower, &[]),
        Job::Messages => Row::new(
            &format!("{size} messages, one way"),
            "messages/s",
            Better::Higher,
            &goals,
        ),
    }
}

impl Device {
    fn is_on(&mut self, machine: &Machine) {
        self.kernel.clone_from(&machine.kernel);
        self.cpus = machine.cpus;
    }

    fn add(&mut self, sample: &Sample) {
        let key = (sample.job, sample.size);
        let row = self.rows.entry(key).or_insert_with(|| row(key));
        row.add(sample.subject.into(), sample.value);
        if let Some(totals) = sample.totals {
            row.add_bytes(totals.link(), totals.tcp());
        }
        self.is_on(&sample.machine);
    }

    fn report(mut self, on: &str, counts: Option<&Path>) -> Result<Report> {
        let costs = costs::rows(on, &self.costs, counts)?;
        for (key, row) in &mut self.rows {
            let mut notes = Vec::new();
            match (row.link_bytes, row.tcp_bytes) {
                (Some(0), _) => {
                    notes.push("rdmasock: tcp".to_owned());
                    // No byte was on a link, so the row does not measure the library and has no goals.
                    row.goals.clear();
                }
                (Some(link), Some(tcp)) if link < tcp => {
                    notes.push("rdmasock: mostly tcp".to_owned());
                }
                _ => {}
            }
            for (subject, number) in self.failures.get(key).into_iter().flatten() {
                notes.push(format!("{}: {number} failed", name(*subject)));
            }
            row.note = notes.join(", ");
        }
        let rows: Vec<Row> = self.rows.into_values().chain(costs).collect();
        let rounds = rows.iter().map(|row| {
            let samples = row.samples.get(&table::Subject::Tcp);
            samples.map_or(0, Vec::len)
        });
        let rounds = rounds.max().unwrap_or(0) as u32;
        let title = format!("Between two nodes on {on}");
        let mut report = Report::new(&title, rounds, rows);
        report.kernel = self.kernel;
        report.cpus = self.cpus;
        Ok(report)
    }
}
