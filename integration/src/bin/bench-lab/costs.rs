//! Measures the cost of a round trip and of a MiB beside time: instructions, system calls, sleeps and packets. The
//! lab's plugin of the emulator (integration/lab/counter) counts instructions and system calls. Both ends print their
//! own figures as lines of text. The host joins these lines with the counts of the emulators.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use rdmasock_integration::stat::Totals;
use rdmasock_integration::table;
use rdmasock_integration::table::{Better, Goal, Row};
use serde::{Deserialize, Serialize};

use crate::subject::{Job, Machine, Subject, name};

#[path = "../../../lab/counter/marks.rs"]
mod marks;

/// The beginning of every line of costs, after the node's name.
pub const MARK: &str = "cost ";

/// The node with the client.
const CLIENT: &str = "b";

/// The resources that this end has used since [`Meter::begin`].
pub struct Meter {
    begin: Instant,
    sleeps: i64,
    packets: u64,
}

/// The costs of `units` round trips or MiB on one node.
#[derive(Debug, Serialize, Deserialize)]
pub struct Cost {
    #[serde(flatten)]
    pub machine: Machine,
    node: String,
    subject: Subject,
    job: Job,
    size: u32,
    units: f64,
    seconds: f64,
    sleeps: i64,
    packets: u64,
    /// The library's counters in the client; `None` without the library.
    totals: Option<Totals>,
}

impl Meter {
    pub fn begin() -> Result<Self> {
        let meter = Self {
            sleeps: sleeps()?,
            packets: packets()?,
            begin: Instant::now(),
        };
        mark::<{ marks::BEGIN }>();
        Ok(meter)
    }

    /// Ends the measurement of `units` round trips or MiB.
    pub fn end(self, subject: Subject, job: Job, size: u32, units: f64) -> Result<Cost> {
        mark::<{ marks::END }>();
        Ok(Cost {
            machine: Machine::here(),
            node: std::env::var("LAB_NODE").unwrap_or_default(),
            subject,
            job,
            size,
            units,
            seconds: self.begin.elapsed().as_secs_f64(),
            sleeps: sleeps()? - self.sleeps,
            packets: packets()? - self.packets,
            totals: None,
        })
    }
}

impl Cost {
    /// Prints the costs as one line, with `totals`, the library's counters in this process.
    pub fn print(mut self, totals: Option<Totals>) -> Result<()> {
        self.totals = totals;
        println!("{MARK}{}", serde_json::to_string(&self)?);
        Ok(())
    }

    /// Returns a summary in one line, for the person who runs the benchmark.
    pub fn summary(&self) -> String {
        let Self {
            machine, node, size, ..
        } = self;
        let (job, subject) = (name(self.job), name(self.subject));
        let each = Duration::from_secs_f64(self.seconds / self.units);
        format!("{}: {job} {size} B, {subject} on node {node}: {each:?}", machine.device)
    }
}

/// Executes a mark for the counter. Without a counter the instruction has no effect.
fn mark<const DISPLACEMENT: i32>() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction has no effect (`marks::NOP` with a displacement).
    unsafe {
        std::arch::asm!(".byte 0x0f, 0x1f, 0x80", ".long {}", const DISPLACEMENT, options(nostack, preserves_flags));
    }
}

/// Returns how often threads of this process have given up the processor to wait.
fn sleeps() -> Result<i64> {
    Ok(getrusage(UsageWho::RUSAGE_SELF)?.voluntary_context_switches())
}

/// Returns the packets that this machine has sent. Machines of the lab have one network interface.
fn packets() -> Result<u64> {
    let path = "/sys/class/net/eth0/statistics/tx_packets";
    let text =
        std::fs::read_to_string(path).with_context(|| format!("{path}: costs are measured in emulated machines"))?;
    Ok(text.trim().parse()?)
}

/// The counts of an emulator between two marks: instructions in user space, instructions of the kernel, and system
/// calls.
type Counted = [u64; 3];
/// The lines that one end has printed, each with the counts of its emulator, in the order of the runs.
type End<'a> = Vec<(&'a Cost, Counted)>;

/// Reads the counts of a node's emulator, one line of its file for each run.
fn read_counts(directory: &Path, device: &str, node: &str) -> Result<Vec<Counted>> {
    let path = directory.join(format!("counts-{device}-{node}"));
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let line = |line: &str| -> Option<Counted> {
        let numbers: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
        numbers.try_into().ok()
    };
    text.lines()
        .map(|text| line(text).with_context(|| format!("{}: not a count: {text}", path.display())))
        .collect()
}

/// A figure of a table.
struct Figure {
    name: &'static str,
    unit: &'static str,
    /// The goal: the least factor by which the library should be better than rsocket.
    goal: Option<f64>,
    of: fn(&Cost, &Counted) -> f64,
}

/// The figures of a table, for one round trip or MiB. The rows add up both machines.
const FIGURES: [Figure; 6] = [
    Figure {
        name: "instructions in user space",
        unit: "",
        // The library has the goal of at most 0.7 times rsocket's value.
        goal: Some(1.43),
        of: |_, [user, _, _]| *user as f64,
    },
    Figure {
        name: "instructions of the kernel",
        unit: "",
        goal: None,
        of: |_, [_, kernel, _]| *kernel as f64,
    },
    Figure {
        name: "system calls",
        unit: "",
        goal: Some(1.0),
        of: |_, [_, _, calls]| *calls as f64,
    },
    Figure {
        name: "sleeps",
        unit: "",
        goal: Some(1.0),
        of: |cost, _| cost.sleeps as f64,
    },
    Figure {
        name: "packets",
        unit: "",
        goal: Some(1.0),
        of: |cost, _| cost.packets as f64,
    },
    Figure {
        name: "time",
        unit: "ms",
        goal: None,
        // Only the client's time counts, since the client waits for the end of each measurement.
        of: |cost, _| if cost.node == CLIENT { cost.seconds * 1e3 } else { 0.0 },
    },
];

/// Returns the rows of a device, from the lines that its nodes have printed. The lines of each node are in the order of
/// the runs.
pub fn rows(device: &str, costs: &[Cost], counts: Option<&Path>) -> Result<Vec<Row>> {
    if costs.is_empty() {
        return Ok(Vec::new());
    }
    let counts = counts.context("costs were measured, but where the counts are was not said")?;
    let mut ends: BTreeMap<(Job, u32, Subject), [End; 2]> = BTreeMap::new();
    for (index, node) in ["a", CLIENT].into_iter().enumerate() {
        let counted = read_counts(counts, device, node)?;
        let said: Vec<&Cost> = costs.iter().filter(|cost| cost.node == node).collect();
        ensure!(
            counted.len() == said.len(),
            "{device}: node {node} has measured {} times, its emulator {} times",
            said.len(),
            counted.len()
        );
        for (cost, counted) in said.into_iter().zip(counted) {
            let both = ends.entry((cost.job, cost.size, cost.subject)).or_default();
            let Some(end) = both.get_mut(index) else {
                bail!("two nodes")
            };
            end.push((cost, counted));
        }
    }
    let mut rows: BTreeMap<(Job, u32), Vec<Row>> = BTreeMap::new();
    for ((job, size, subject), [servers, clients]) in &ends {
        let rows = rows.entry((*job, *size)).or_insert_with(|| {
            let new = |figure: &Figure| {
                let goal = figure.goal.map(|times| Goal::Times(table::Subject::Rsocket, times));
                let goals: Vec<Goal> = goal.into_iter().collect();
                Row::new(
                    &format!("{}: {}", unit(*job, *size), figure.name),
                    figure.unit,
                    Better::Lower,
                    &goals,
                )
            };
            FIGURES.iter().map(new).collect()
        });
        for (server, client) in servers.iter().zip(clients) {
            for (row, figure) in rows.iter_mut().zip(&FIGURES) {
                let each = |(cost, counted): &(&Cost, Counted)| (figure.of)(cost, counted) / cost.units;
                row.add((*subject).into(), each(server) + each(client));
                if let Some(totals) = client.0.totals {
                    row.add_bytes(totals.link(), totals.tcp());
                }
            }
        }
    }
    Ok(rows.into_values().flatten().collect())
}

fn unit(job: Job, size: u32) -> String {
    match job {
        Job::TripCosts => format!("{size} B there and back"),
        _ => format!("a MiB in writes of {} KiB", size >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(node: &str, subject: Subject, units: f64) -> Cost {
        Cost {
            machine: Machine::here(),
            node: node.to_owned(),
            subject,
            job: Job::TripCosts,
            size: 64,
            units,
            seconds: 1.0,
            sleeps: 20,
            packets: 40,
            totals: None,
        }
    }

    #[test]
    fn a_figure_is_of_both_machines() -> Result<()> {
        let directory = tempfile::tempdir()?;
        std::fs::write(directory.path().join("counts-siw-a"), "100 200 30\n400 0 0\n")?;
        std::fs::write(directory.path().join("counts-siw-b"), "300 400 50\n600 0 0\n")?;
        let costs = [
            cost("a", Subject::Library, 10.0),
            cost("b", Subject::Library, 10.0),
            cost("b", Subject::Rsocket, 10.0),
            cost("a", Subject::Rsocket, 10.0),
        ];
        let rows = rows("siw", &costs, Some(directory.path()))?;
        let medians: Vec<_> = rows.iter().map(|row| row.median(table::Subject::Library)).collect();
        assert_eq!(medians, [40.0, 60.0, 8.0, 4.0, 8.0, 100.0].map(Some));
        let user = rows.first().context("a row")?;
        assert_eq!(user.times(table::Subject::Rsocket), Some(2.5));
        Ok(())
    }

    #[test]
    fn an_end_that_is_missing_is_told() -> Result<()> {
        let directory = tempfile::tempdir()?;
        std::fs::write(directory.path().join("counts-siw-a"), "100 200 30\n")?;
        std::fs::write(directory.path().join("counts-siw-b"), "")?;
        let costs = [cost("a", Subject::Library, 10.0), cost("b", Subject::Library, 10.0)];
        assert!(rows("siw", &costs, Some(directory.path())).is_err());
        assert!(rows("siw", &costs, None).is_err());
        Ok(())
    }
}
