//! `bench sweep`: transfers of growing size in one direction of one connection, with three kinds of receivers, on each
//! way in turn. The figures are throughput, processor time and, for small sizes, the time of a round trip. The two ends
//! are in `transfer`.

use anyhow::{Result, bail, ensure};
use clap::Args;
use rdmasock_integration::lab::{Build, Lab, Role};
use rdmasock_integration::proc::Cmd;
use rdmasock_integration::signals;

use crate::page;
use crate::results::{Figure, Repeats, Results, Series, Way, parse_size, size};
use crate::transfer::{Moved, Trips};
use crate::way::{Player, serve};

/// Round trips are measured up to this size in bytes.
const LARGEST_TRIP: u64 = 64 << 10;
/// The most transfers and round trips of a measurement; more small ones would take minutes.
const MOST_TRANSFERS: u64 = 500_000;
const MOST_TRIPS: u64 = 20_000;
/// Counters of `rdmasock stat` for bytes that did not go through rings.
const PAST_THE_RINGS: [&str; 2] = ["direct_received_bytes", "rendezvous_received_bytes"];
/// The least number of round trips, as percentiles of fewer mean nothing.
const FEWEST_TRIPS: u64 = 1_000;

/// The amount of transfers to measure, and the file for the samples.
#[derive(Debug, Args)]
pub struct Extent {
    #[command(flatten)]
    pub repeats: Repeats,
    /// Bytes that a measurement moves, at most 500,000 transfers [default: 1G, with --quick 128M].
    #[arg(long, value_parser = parse_size)]
    bytes: Option<u64>,
}

#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    extent: Extent,
    /// Bytes of a transfer, with suffix K, M or G.
    #[arg(long, value_delimiter = ',', value_parser = parse_size,
        default_value = "64,1K,16K,64K,256K,1M,4M,16M,64M")]
    sizes: Vec<u64>,
    /// Only these ways.
    #[arg(long, value_delimiter = ',', default_value = "tcp,unix,shm")]
    ways: Vec<Way>,
    /// Only these receivers.
    #[arg(long, value_delimiter = ',', default_value = "recv,waitall,epoll")]
    receivers: Vec<Series>,
}

/// The work of one cell of the table: the size and number of transfers.
#[derive(Debug, Clone, Copy)]
struct Case {
    receiver: Series,
    size: u64,
    count: u64,
    trips: u64,
}

/// Measures the sizes, prints the tables and writes the samples.
///
/// # Errors
/// If something is not built, or measurements were refused or failed.
pub fn run(options: &Options) -> Result<()> {
    ensure!(
        options.receivers.iter().all(|r| Series::RECEIVERS.contains(r)),
        "a receiver is one of recv, waitall and epoll"
    );
    let plan = Plan {
        receivers: &options.receivers,
        sizes: &options.sizes,
        ways: &options.ways,
    };
    let results = rounds(&options.extent, &plan)?;
    page::publish(&results, &Series::RECEIVERS, options.extent.repeats.json.as_deref())
}

/// The cases of each round.
pub struct Plan<'a> {
    pub receivers: &'a [Series],
    pub sizes: &'a [u64],
    pub ways: &'a [Way],
}

/// Measures all cases of a plan, in as many rounds as `extent` has.
///
/// # Errors
/// If something is not built.
pub fn rounds(extent: &Extent, plan: &Plan<'_>) -> Result<Results> {
    let is_quick = extent.repeats.quick;
    let build = Build::locate()?;
    let rounds = extent.repeats.rounds(5);
    let bytes = extent.bytes.unwrap_or(if is_quick { 128 << 20 } else { 1 << 30 });
    let mut results = Results::new(rounds, is_quick)?;
    for round in 1..=rounds {
        for &receiver in plan.receivers {
            for &size in plan.sizes {
                let case = Case::new(receiver, size, bytes);
                eprintln!(
                    "round {round} of {rounds}: {}, {}",
                    receiver.word(),
                    crate::results::size(size)
                );
                for &way in plan.ways {
                    if signals::is_interrupted() {
                        bail!("interrupted");
                    }
                    match measure(&build, way, case) {
                        Ok(figures) => results.add(receiver, size, way, &figures),
                        Err(error) => results.refused.push(case.name(way, &error)),
                    }
                }
            }
        }
    }
    Ok(results)
}

impl Case {
    fn new(receiver: Series, size: u64, bytes: u64) -> Self {
        let count = bytes / size.max(1);
        Self {
            receiver,
            size,
            count: count.clamp(1, MOST_TRANSFERS),
            trips: count.clamp(FEWEST_TRIPS, MOST_TRIPS),
        }
    }

    fn name(self, way: Way, error: &anyhow::Error) -> String {
        format!(
            "{}, {}, {}: {error:#}",
            way.title(),
            self.receiver.word(),
            size(self.size)
        )
    }

    fn command(self, lab: &Lab, role: Role, address: &str) -> Result<Cmd> {
        let bench = std::env::current_exe()?;
        let cmd = lab
            .cmd(role, &bench.display().to_string())?
            .args(["transfer", "--address", address, "--receiver", self.receiver.word()])
            .args(["--size", &self.size.to_string(), "--count", &self.count.to_string()])
            .args(["--trips", &self.trips.to_string()]);
        Ok(match role {
            Role::Server => cmd.args(["--server"]),
            _ => cmd,
        })
    }
}

/// Measures a round of a case on one way. Fails if the connection was not on that way all the time.
fn measure(build: &Build, way: Way, case: Case) -> Result<Vec<(Figure, f64)>> {
    let lab = way.lab(build)?;
    let (server, address) = serve(&lab, way == Way::Unix, |address| {
        case.command(&lab, Role::Server, address)
    })?;
    let mut client = Player::start(case.command(&lab, Role::Client, &address)?)?;
    client.ask(&lab, "warm")?;
    way.settle(&lab, &build.stat, &server, 1, || {
        client.ask(&lab, "warm")?;
        Ok(())
    })?;
    let before = build.stat.totals(server.pid())?;
    let past_the_rings = || -> Result<u64> {
        let each = PAST_THE_RINGS.map(|name| build.stat.count(server.pid(), name));
        each.into_iter().sum::<Result<u64>>()
    };
    let direct_before = past_the_rings()?;

    let moved: Moved = serde_json::from_str(&client.ask(&lab, "transfer")?)?;
    let direct = past_the_rings()? - direct_before;
    let trips: Option<Trips> = match case.size <= LARGEST_TRIP {
        true => Some(serde_json::from_str(&client.ask(&lab, "trips")?)?),
        false => None,
    };

    way.check(&build.stat, &server, 1)?;
    way.check(&build.stat, &client.process, 1)?;
    if way.has_library() {
        let since = build.stat.totals(server.pid())?.since(before);
        ensure!(
            since.rx_link_bytes >= moved.bytes && since.tcp() == 0 && since.demoted == 0,
            "refused, bytes went over TCP: {since:?}"
        );
    }
    let gigabytes = moved.bytes as f64 / 1e9;
    let mut figures = vec![
        (Figure::Throughput, gigabytes / moved.seconds),
        (Figure::Processor, (moved.sender + moved.receiver) / gigabytes),
        (Figure::ProcessorSender, moved.sender / gigabytes),
        (Figure::ProcessorReceiver, moved.receiver / gigabytes),
    ];
    if way.least_direct().is_some() {
        // The counters include the first transfers, an eighth more, which do not count.
        let share = direct as f64 / (moved.bytes as f64 * 9.0 / 8.0);
        figures.push((Figure::Direct, 100.0 * share.min(1.0)));
    }
    if let Some(trips) = trips {
        let us = |ns: u64| ns as f64 / 1e3;
        figures.extend([
            (Figure::TripP50, us(trips.p50)),
            (Figure::TripP99, us(trips.p99)),
            (Figure::TripP999, us(trips.p999)),
        ]);
    }
    Ok(figures)
}
