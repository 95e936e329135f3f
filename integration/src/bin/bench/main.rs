//! Measures the cost of single calls, messages and idle streams on kernel TCP, a Unix socket and the library,
//! alternating in one run. The program starts itself again as both ends of every measurement (`peer`). Its parts:
//!
//! - `never-slower` measures whole programs (`demo` has the programs that the library makes much faster);
//! - `sweep` measures transfers of growing size;
//! - `threshold` compares the ways of a link between hosts;
//! - `scale` measures more and more connections, clients and threads;
//! - `device` measures what lies below a link's sockets;
//! - `page` makes a page and pictures of the results of the other parts.
//!
//! No part is a test with a time limit.

mod crowd;
mod device;
mod idle;
mod never_slower;
mod page;
mod peer;
mod peers;
mod pictures;
mod results;
mod scale;
mod sweep;
mod threshold;
mod transfer;
mod way;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use peer::{Job, Peer};
use rdmasock_integration::lab::{Build, Lab, Mode, Role};
use rdmasock_integration::proc::{Cmd, Proc};
use rdmasock_integration::signals;
use rdmasock_integration::table::{Better, Goal, Report, Row, Subject};

/// Measures calls, messages and idle streams on kernel TCP, Unix sockets and rdmasock.
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Options {
    #[command(subcommand)]
    part: Option<Part>,
    #[command(flatten)]
    choice: Choice,
}

/// The options that all parts take.
#[derive(Debug, Args)]
struct Choice {
    /// Also write the table to FILE as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run one short round.
    #[arg(long)]
    quick: bool,
    /// How often each measurement is repeated, alternating.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Only rows whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Run without the library: checks the benchmark itself.
    #[arg(long, hide = true)]
    kernel: bool,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Measures whole programs for which the library must never be slower than kernel TCP.
    NeverSlower(Choice),
    /// Measures one connection with transfers of growing size: throughput, processor time, round trips.
    Sweep(sweep::Options),
    /// Measures the cost of a transfer over a link between hosts, with copies and without, by size.
    Threshold(threshold::Options),
    /// Measures one server with more and more connections and client processes.
    Scale(scale::Options),
    /// Measures a link's engine, and connections that share a queue pair, on a model of a device.
    Device(device::Options),
    /// Makes docs/benchmarks.md and its pictures of the results that the other parts have written.
    Page(page::Options),
    /// Makes one measurement of device; started by the benchmark itself.
    #[command(hide = true)]
    DeviceCase(device::Case),
    /// Plays an end in a measurement of sweep; started by the benchmark itself.
    #[command(hide = true)]
    Transfer(transfer::Transfer),
    /// Plays an end in a measurement of scale; started by the benchmark itself.
    #[command(hide = true)]
    Crowd(crowd::Crowd),
    /// Plays an end of a measurement; started by the benchmark itself.
    #[command(hide = true)]
    Peer(Peer),
}

/// The state that all measurements share.
struct Bench {
    build: Option<Build>,
    kernel: bool,
    seconds: f64,
    rounds: u32,
    failures: Vec<String>,
}

fn main() -> std::process::ExitCode {
    rdmasock_integration::exit(all())
}

fn all() -> Result<()> {
    let Options { part, choice } = Options::parse();
    match &part {
        Some(Part::Peer(peer)) => return peer::run(peer),
        Some(Part::Transfer(end)) => return transfer::run(end),
        Some(Part::Crowd(end)) => return crowd::run(end),
        Some(Part::Page(options)) => return page::run(options),
        Some(Part::DeviceCase(case)) => return device::case(case),
        _ => {}
    }
    signals::catch()?;
    signals::raise_nofile()?;
    match part {
        Some(Part::NeverSlower(choice)) => never_slower::run(&choice),
        Some(Part::Sweep(options)) => sweep::run(&options),
        Some(Part::Threshold(options)) => threshold::run(&options),
        Some(Part::Scale(options)) => scale::run(&options),
        Some(Part::Device(options)) => device::run(&options),
        _ => calls(&choice),
    }
}

/// Measures calls, messages and idle streams.
fn calls(options: &Choice) -> Result<()> {
    let build = Build::locate();
    let mut bench = Bench {
        build: if options.kernel { build.ok() } else { Some(build?) },
        kernel: options.kernel,
        seconds: if options.quick { 0.3 } else { 1.0 },
        rounds: if options.quick { 1 } else { options.rounds },
        failures: Vec::new(),
    };
    let is_wanted = |row: &Row| options.is_wanted(row);

    let mut rows = Vec::new();
    for (mut row, job, has_unix) in pairs() {
        if is_wanted(&row) {
            bench.pair(&mut row, job, has_unix);
            rows.push(row);
        }
    }
    let mut idle = idle::rows();
    if idle.iter().any(is_wanted) {
        bench.repeat("idle streams", &[Subject::Tcp, Subject::Library], |bench, subject| {
            idle::measure(&bench.lab(subject)?, &mut idle, subject)
        });
        rows.extend(idle);
    }
    let mut peers = peers::rows();
    if peers.iter().any(is_wanted) {
        // The rows of peers start a thousand processes, too many for every round.
        let rounds = std::mem::replace(&mut bench.rounds, 1);
        bench.repeat("peers", &[Subject::Tcp, Subject::Library], |bench, subject| {
            peers::measure(&bench.lab(subject)?, &mut peers, subject, options.quick)
        });
        bench.rounds = rounds;
        rows.extend(peers);
    }
    for (mut row, job) in pass_through() {
        if is_wanted(&row) {
            let name = row.name.clone();
            bench.repeat(&name, &[Subject::Bare, Subject::Library], |bench, subject| {
                let lab = bench.lab(subject)?;
                row.add(subject, figure(&lab, bench.peer(&lab, Role::Client, job, "")?)?);
                Ok(())
            });
            rows.push(row);
        }
    }

    let report = Report::new("Calls, messages and idle streams on one host", bench.rounds, rows);
    options.publish(&report, &bench.failures)
}

impl Choice {
    fn is_wanted(&self, row: &Row) -> bool {
        self.only.as_ref().is_none_or(|text| row.name.contains(text))
    }

    /// Prints and writes the results.
    ///
    /// # Errors
    /// If writing fails, or there are `failures`.
    fn publish(&self, report: &Report, failures: &[String]) -> Result<()> {
        println!("{report}");
        if let Some(path) = &self.json {
            report
                .write(path)
                .with_context(|| format!("write {}", path.display()))?;
        }
        if !failures.is_empty() {
            bail!("{} measurements failed:\n  {}", failures.len(), failures.join("\n  "));
        }
        Ok(())
    }
}

/// Returns the measurements between a server and a client: the row, the job, and whether Unix sockets have it.
fn pairs() -> Vec<(Row, Job, bool)> {
    let fifty = Goal::Times(Subject::Tcp, 50.0);
    let trip = [fifty, Goal::Times(Subject::Bare, 0.25)];
    let row = Row::new;
    vec![
        (
            row("8 B round trip, blocking", "ns", Better::Lower, &trip),
            Job::EchoBlocking,
            true,
        ),
        (
            row("8 B round trip, epoll", "ns", Better::Lower, &trip),
            Job::EchoEpoll,
            true,
        ),
        (
            row(
                "8 B messages one way, large reads",
                "messages/s",
                Better::Higher,
                &[fifty],
            ),
            Job::MessagesLargeReads,
            true,
        ),
        (
            row(
                "8 B messages one way, 8 B reads",
                "messages/s",
                Better::Higher,
                &[fifty],
            ),
            Job::MessagesSmallReads,
            true,
        ),
        (
            row(
                "bulk one way, 1 MiB writes",
                "bytes/s",
                Better::Higher,
                &[Goal::Times(Subject::Tcp, 3.0)],
            ),
            Job::Bulk,
            true,
        ),
    ]
}

/// Returns the measurements of calls on sockets that are not accelerated.
fn pass_through() -> Vec<(Row, Job)> {
    let row = |name| Row::new(name, "ns", Better::Lower, &[Goal::Over(Subject::Bare, 10.0)]);
    vec![
        (row("pass-through recv, UDP socket, EAGAIN"), Job::PassUdp),
        (row("pass-through recv, bad descriptor"), Job::PassBadFd),
    ]
}

impl Bench {
    /// Makes an experiment, for [`Subject::Library`] with the library on both sides, else on neither.
    fn lab(&self, subject: Subject) -> Result<Lab> {
        let mode = match subject {
            Subject::Library if !self.kernel => Mode::Both,
            _ => Mode::Kernel,
        };
        Lab::new(mode, self.build.clone(), Duration::from_secs(120))
    }

    /// Runs `sample` in every round for every subject in turn. A failure is noted and does not end the run.
    fn repeat(&mut self, name: &str, subjects: &[Subject], mut sample: impl FnMut(&Self, Subject) -> Result<()>) {
        eprintln!("{name}");
        for _ in 0..self.rounds {
            for subject in subjects {
                if signals::is_interrupted() {
                    return self.failures.push("interrupted".to_owned());
                }
                if let Err(error) = sample(self, *subject) {
                    self.failures.push(format!("{name}, {subject:?}: {error:#}"));
                }
            }
        }
    }

    fn pair(&mut self, row: &mut Row, job: Job, has_unix: bool) {
        let is_trip = matches!(job, Job::EchoBlocking | Job::EchoEpoll);
        let mut subjects = vec![Subject::Tcp];
        subjects.extend(has_unix.then_some(Subject::Unix));
        subjects.push(Subject::Library);
        subjects.extend(is_trip.then_some(Subject::Bare));
        let name = row.name.clone();
        self.repeat(&name, &subjects, |bench, subject| {
            let lab = bench.lab(subject)?;
            if subject == Subject::Bare {
                row.add(subject, figure(&lab, bench.peer(&lab, Role::Client, Job::Bare, "")?)?);
                return Ok(());
            }
            let (server, address) = bench.server(&lab, job, subject)?;
            row.add(subject, figure(&lab, bench.peer(&lab, Role::Client, job, &address)?)?);
            lab.check_paths(&server, || Ok(()))
        });
    }

    fn server(&self, lab: &Lab, job: Job, subject: Subject) -> Result<(Proc, String)> {
        way::serve(lab, subject == Subject::Unix, |address| {
            self.peer(lab, Role::Server, job, address)
        })
    }

    fn peer(&self, lab: &Lab, role: Role, job: Job, address: &str) -> Result<Cmd> {
        peer::command(lab, role, job, address, self.seconds)
    }
}

/// Runs a client that prints one figure, and returns the figure.
fn figure(lab: &Lab, cmd: Cmd) -> Result<f64> {
    let text = lab.text(cmd)?;
    text.trim().parse().with_context(|| format!("not a figure: {text}"))
}
