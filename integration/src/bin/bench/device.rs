//! `bench device`: the cost that a link's engine adds to its queue pair, and many connections on one queue pair against
//! one queue pair each. Both run on the local device within one process. The results are of models: the device copies
//! with the processor, and its cache of queue pairs (`LOCALNIC`'s `cache` and `miss`) is invented. This file has the
//! rounds and the comparisons; the loads are in `device/{bare,link}.rs`.

mod bare;
mod link;

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use nix::time::{ClockId, clock_gettime};
use rdmasock_integration::signals;
use rdmasock_localnic::settings::Settings;

use crate::page;
use crate::results::{Figure, Repeats, Results, Series, Way};

#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    repeats: Repeats,
    /// Bytes of a message.
    #[arg(long, value_delimiter = ',', default_value = "8,64,512,4096",
        value_parser = clap::value_parser!(u64).range(1..=4096))]
    messages: Vec<u64>,
    /// Connections [default: 1,10,100,200,400,600,800,1000, with --quick 1,100,1000].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=4000))]
    connections: Option<Vec<u64>>,
    /// Threads that send at the same time.
    #[arg(long, value_delimiter = ',', default_value = "1,3,6", value_parser = clap::value_parser!(u64).range(1..=64))]
    threads: Vec<u64>,
    #[command(flatten)]
    model: Model,
}

/// Properties of the modelled device that matter with many queue pairs.
#[derive(Debug, Clone, Copy, Args)]
struct Model {
    /// Queue pairs whose state the device holds.
    #[arg(long, default_value_t = 400)]
    cache: u32,
    /// ns to load the state of another queue pair.
    #[arg(long, default_value_t = 2000)]
    miss: u64,
}

/// Makes one measurement, in a process of its own so that memory and descriptors are its own.
#[derive(Debug, Args)]
pub struct Case {
    #[arg(long)]
    series: Series,
    #[arg(long)]
    x: usize,
    #[arg(long)]
    bare: Option<Bare>,
    #[arg(long)]
    seconds: f64,
    #[command(flatten)]
    model: Model,
}

/// The queue pairs that carry the load without a link of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Bare {
    /// A queue pair for each connection.
    Own,
    /// A queue pair for all connections.
    One,
}

impl Bare {
    /// Returns the use of queue pairs in `way`, or `None` if `way` has a link.
    fn of(way: Way) -> Option<Self> {
        match way {
            Way::BareOwn => Some(Self::Own),
            Way::BareOne => Some(Self::One),
            _ => None,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::One => "one",
        }
    }
}

/// Returns the ways of a series.
fn ways(series: Series) -> &'static [Way] {
    match series {
        Series::QueuePairs => &[Way::BareOwn, Way::BareOne, Way::Link],
        _ => &[Way::BareOne, Way::Link],
    }
}

/// Measures all series, prints the tables and writes the samples.
///
/// # Errors
/// If a measurement failed.
pub fn run(options: &Options) -> Result<()> {
    let rounds = options.repeats.rounds(3);
    let connections = options
        .connections
        .clone()
        .unwrap_or_else(|| match options.repeats.quick {
            true => vec![1, 100, 1000],
            false => vec![1, 10, 100, 200, 400, 600, 800, 1000],
        });
    let of = |series, values: &[u64]| values.iter().map(move |x| (series, *x)).collect::<Vec<_>>();
    let cases = [
        of(Series::Engine, &options.messages),
        of(Series::QueuePairs, &connections),
        of(Series::Threads, &options.threads),
    ]
    .concat();
    let seconds = if options.repeats.quick { 0.3 } else { 1.0 };
    let mut results = Results::new(rounds, options.repeats.quick)?;
    for round in 1..=rounds {
        for &(series, x) in &cases {
            eprintln!("round {round} of {rounds}: {x} {}", series.word());
            for &way in ways(series) {
                if signals::is_interrupted() {
                    bail!("interrupted");
                }
                match measure(options.model, series, x, way, seconds) {
                    Ok(figures) => results.add(series, x, way, &figures),
                    Err(error) => {
                        let line = format!("{}, {x} {}: {error:#}", way.title(), series.word());
                        results.refused.push(line);
                    }
                }
            }
        }
    }
    page::publish(&results, &Series::MODELS, options.repeats.json.as_deref())
}

/// Starts a process that makes one measurement, and returns its figures.
fn measure(model: Model, series: Series, x: u64, way: Way, seconds: f64) -> Result<Vec<(Figure, f64)>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["device-case", "--series", series.word(), "--x", &x.to_string()]);
    command.args(["--seconds", &seconds.to_string(), "--cache", &model.cache.to_string()]);
    command.args(["--miss", &model.miss.to_string()]);
    if let Some(bare) = Bare::of(way) {
        command.args(["--bare", bare.word()]);
    }
    let said = command.output()?;
    let words = || String::from_utf8_lossy(&said.stderr).into_owned();
    ensure!(said.status.success(), "{}: {}", said.status, words());
    serde_json::from_slice(&said.stdout).with_context(words)
}

/// Makes one measurement in the process that `measure` has started, and prints its figures.
///
/// # Errors
/// If the device fails.
pub fn case(case: &Case) -> Result<()> {
    signals::raise_nofile()?;
    let time = Duration::from_secs_f64(case.seconds);
    let plain = Settings::default();
    let figures = match (case.series, case.bare) {
        (Series::Engine, Some(_)) => [
            bare::trips(plain, case.x, time)?,
            bare::one_way(plain, case.x, 1, time)?,
        ]
        .concat(),
        (Series::Engine, None) => [
            link::trips(plain, case.x, time)?,
            link::one_way(plain, case.x, 1, time)?,
        ]
        .concat(),
        (Series::Threads, Some(_)) => bare::one_way(plain, MESSAGE, case.x, time)?,
        (Series::Threads, None) => link::one_way(plain, MESSAGE, case.x, time)?,
        (Series::QueuePairs, bare) => {
            let settings = Settings {
                cache: case.model.cache,
                miss_ns: case.model.miss,
                ..plain
            };
            match bare {
                Some(bare) => bare::reads(settings, case.x, bare == Bare::Own, time)?,
                None => link::sends(settings, case.x, time)?,
            }
        }
        _ => bail!("no load of the device"),
    };
    println!("{}", serde_json::to_string(&figures)?);
    Ok(())
}

/// Bytes of a message in the series of threads.
const MESSAGE: usize = 64;
/// Bytes of a transfer on one of many connections (RDMAvisor, section 3.2).
const TRANSFER: usize = 64 << 10;

/// Makes round trips until `time` has passed, and returns percentiles of their times in µs.
fn trips_of(time: Duration, mut trip: impl FnMut() -> Result<()>) -> Result<Vec<(Figure, f64)>> {
    // Times are recorded up to 10 s.
    let mut all = Histogram::<u64>::new_with_bounds(1, 10_000_000_000, 3)?;
    let until = Instant::now() + time;
    let mut since = Instant::now();
    while since < until {
        trip()?;
        let now = Instant::now();
        all.saturating_record((now - since).as_nanos() as u64);
        since = now;
    }
    let at = |quantile| all.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(vec![
        (Figure::TripP50, at(0.5)),
        (Figure::TripP99, at(0.99)),
        (Figure::TripP999, at(0.999)),
    ])
}

/// Returns throughput and processor time of transfers on many connections, and the memory and descriptors of this
/// process.
fn costs(bytes: u64, time: Duration, processor: Duration) -> Result<Vec<(Figure, f64)>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    let descriptors = std::fs::read_dir("/proc/self/fd")?.count();
    Ok(vec![
        (Figure::Throughput, bytes as f64 / 1e9 / time.as_secs_f64()),
        (Figure::Processor, processor.as_secs_f64() / (bytes as f64 / 1e9)),
        (Figure::Resident, kib.context("VmRSS")? / 1024.0),
        (Figure::Descriptors, descriptors as f64),
    ])
}

/// Returns the processor time that this process has used.
fn processor() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?.into())
}

/// Returns a generator of pseudo-random numbers below `most`.
fn numbers(most: usize) -> impl FnMut() -> usize {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    move || {
        // xorshift64: Marsaglia, "Xorshift RNGs", 2003.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % most as u64) as usize
    }
}
