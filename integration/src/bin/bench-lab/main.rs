//! `scripts/bench-lab`: latency, bandwidth and message rate between the two nodes of the RDMA lab, on kernel TCP,
//! rsocket and rdmasock. On the nodes it is the peer program (`server`, `client`). On the host it makes a table of
//! their samples (`report`). The order of the measurements is in integration/lab/bench.

mod costs;
mod counted;
mod peer;
mod report;
mod stream;
mod subject;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Measures between the two nodes of the RDMA lab.
#[derive(Debug, Parser)]
struct Options {
    #[command(subcommand)]
    part: Part,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Serves one client after the other.
    Server(peer::Server),
    /// Takes one sample and prints it as JSON.
    Client(peer::Client),
    /// Turns rstream's output on standard input into a sample.
    Rstream(report::Rstream),
    /// Makes tables of the samples on standard input; other lines there are passed on.
    Report {
        /// Also write the tables to FILE as JSON.
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// The directory with the files of counts that the emulators have written.
        #[arg(long, value_name = "DIRECTORY")]
        counts: Option<PathBuf>,
    },
}

fn main() -> std::process::ExitCode {
    rdmasock_integration::exit(run())
}

fn run() -> Result<()> {
    match Options::parse().part {
        Part::Server(server) => peer::serve(&server),
        Part::Client(client) => peer::sample(&client),
        Part::Rstream(rstream) => report::rstream(&rstream),
        Part::Report { json, counts } => report::run(json.as_deref(), counts.as_deref()),
    }
}
