//! `bench scale`: one server that echoes, on each way in turn, under a growing load. The load grows in connections of
//! one client or in client processes, where all or one send. It also grows in bulk streams beside one connection, and
//! in threads that sleep on one connection each. The figures are messages a second, the time of a message, processor
//! time, sleeps, memory and descriptors of the server. The two ends are in `crowd`.

use anyhow::{Result, bail, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use nix::time::ClockId;
use nix::unistd::Pid;
use rdmasock_integration::lab::{Build, Lab, Role};
use rdmasock_integration::proc::{Cmd, Proc};
use rdmasock_integration::signals;

use crate::crowd::Answered;
use crate::idle::{Usage, field};
use crate::page;
use crate::results::{Figure, Repeats, Results, Series, Way};
use crate::way::{Player, serve};

/// Messages in flight of all clients together, if there are fewer clients than that.
const IN_FLIGHT: usize = 32;
/// Clients that start at the same time.
const AT_ONCE: usize = 10;
/// Descriptors that a process needs beside its connections. The library takes up to a quarter of the limit.
const OTHERS: u64 = 1_000;

#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    repeats: Repeats,
    /// Connections between two processes [default: 1,10,100,1000,10000, with --quick to 1000].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=60_000))]
    connections: Option<Vec<u64>>,
    /// Client processes of one server [default: 1,10,100,1000, with --quick to 100].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=4_000))]
    clients: Option<Vec<u64>>,
    /// Client processes, only one sends [default: 1,10,100,500, with --quick to 100].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=4_000))]
    among: Option<Vec<u64>>,
    /// Bulk streams beside one connection [default: 0,1,4,16, with --quick to 4].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(0..=1_000))]
    bulk: Option<Vec<u64>>,
    /// Connections with a thread of the server for each [default: 1,4,16,64,256, with --quick 1,16,256].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1_000))]
    sleepers: Option<Vec<u64>>,
    /// Only these ways.
    #[arg(long, value_delimiter = ',', default_value = "tcp,unix,shm")]
    ways: Vec<Way>,
}

/// Measures the series, prints the tables and writes the samples.
///
/// # Errors
/// If something is not built, or measurements were refused or failed.
pub fn run(options: &Options) -> Result<()> {
    let build = Build::locate()?;
    let limit = signals::raise_nofile()?;
    let rounds = options.repeats.rounds(3);
    let (connections, clients, among, bulk, sleepers) = match options.repeats.quick {
        true => (
            vec![1, 10, 100, 1_000],
            vec![1, 10, 100],
            vec![1, 10, 100],
            vec![0, 1, 4],
            vec![1, 16, 256],
        ),
        false => (
            vec![1, 10, 100, 1_000, 10_000],
            vec![1, 10, 100, 1_000],
            vec![1, 10, 100, 500],
            vec![0, 1, 4, 16],
            vec![1, 4, 16, 64, 256],
        ),
    };
    let connections = options.connections.clone().unwrap_or(connections);
    let clients = options.clients.clone().unwrap_or(clients);
    let among = options.among.clone().unwrap_or(among);
    let bulk = options.bulk.clone().unwrap_or(bulk);
    let sleepers = options.sleepers.clone().unwrap_or(sleepers);
    let of = |series, values: Vec<u64>| values.into_iter().map(move |value| (series, value));
    let cases: Vec<_> = of(Series::Connections, connections)
        .chain(of(Series::Clients, clients))
        .chain(of(Series::Among, among))
        .chain(of(Series::Beside, bulk))
        .chain(of(Series::Sleepers, sleepers))
        .collect();

    let mut results = Results::new(rounds, options.repeats.quick)?;
    for round in 1..=rounds {
        for &(series, number) in &cases {
            if number + OTHERS > limit / 4 * 3 {
                if round == 1 {
                    let line = format!("{number} {}: more than {limit} open files allow", series.word());
                    results.refused.push(line);
                }
                continue;
            }
            eprintln!("round {round} of {rounds}: {number} {}", series.word());
            for &way in &options.ways {
                if signals::is_interrupted() {
                    bail!("interrupted");
                }
                let seconds = if options.repeats.quick { 0.5 } else { 1.0 };
                match measure(&build, way, series, number as usize, seconds) {
                    Ok(figures) => results.add(series, number, way, &figures),
                    Err(error) => {
                        let line = format!("{}, {number} {}: {error:#}", way.title(), series.word());
                        results.refused.push(line);
                    }
                }
            }
        }
    }
    page::publish(&results, &Series::CROWDS, options.repeats.json.as_deref())
}

fn command(lab: &Lab, role: Role, address: &str, more: &[String]) -> Result<Cmd> {
    let bench = std::env::current_exe()?;
    Ok(lab
        .cmd(role, &bench.display().to_string())?
        .args(["crowd", "--address", address])
        .args(more))
}

/// Measures a round of a case on one way. Fails if a connection was not on that way all the time.
fn measure(build: &Build, way: Way, series: Series, number: usize, seconds: f64) -> Result<Vec<(Figure, f64)>> {
    let (processes, each, bulk, in_flight) = match series {
        Series::Clients => (number, 1, 0, (IN_FLIGHT / number.max(1)).max(1)),
        Series::Among => (number, 1, 0, 1),
        Series::Beside => (1, 1, number, 1),
        Series::Sleepers => (1, number, 0, 1),
        _ => (1, number, 0, IN_FLIGHT),
    };
    let senders = if series == Series::Among { 1 } else { processes };
    let number = processes * (each + bulk);
    let lab = way.lab(build)?;
    let (server, address) = serve(&lab, way == Way::Unix, |address| {
        let threads = (series == Series::Sleepers).then_some("--threads");
        Ok(command(&lab, Role::Server, address, &["--server".to_owned()])?.args(threads))
    })?;
    let options = [
        format!("--connections={each}"),
        format!("--bulk={bulk}"),
        format!("--in-flight={in_flight}"),
        format!("--seconds={seconds}"),
    ];
    let mut clients: Vec<Player> = Vec::new();
    while clients.len() < processes {
        let more = AT_ONCE.min(processes - clients.len());
        let first = clients.len();
        for _ in 0..more {
            clients.push(Player::start(command(&lab, Role::Client, &address, &options)?)?);
        }
        all(&lab, clients.iter_mut().skip(first), "warm")?;
    }
    way.settle(&lab, &build.stat, &server, number, || {
        all(&lab, clients.iter_mut(), "warm").map(drop)
    })?;

    let before = build.stat.totals(server.pid())?;
    let begin = Processor::of(&server, &clients)?;
    let usage_before = Usage::of(&[server.pid()])?;
    let answers = all(&lab, clients.iter_mut().take(senders), "go")?;
    let used = Processor::of(&server, &clients)?;
    let usage = Usage::of(&[server.pid()])?;
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid()))?;
    way.check(&build.stat, &server, number)?;

    let (mut rate, mut served, mut bulk_rate) = (0.0, 0, 0.0);
    let mut times = Histogram::<u64>::new(3)?;
    for answer in answers {
        let answer: Answered = serde_json::from_str(&answer)?;
        rate += answer.messages as f64 / answer.seconds;
        served += answer.served;
        bulk_rate += answer.bulk as f64 / answer.seconds / 1e9;
        for (time, count) in answer.times {
            times.record_n(time, count)?;
        }
    }
    if way.has_library() {
        let since = build.stat.totals(server.pid())?.since(before);
        ensure!(
            since.rx_link_bytes >= served * 64 && since.tcp() == 0 && since.demoted == 0,
            "refused, bytes went over TCP: {since:?}"
        );
    }
    let served = served as f64;
    let us = |quantile| times.value_at_quantile(quantile) as f64 / 1e3;
    let mib = |name| field(&status, name) / 1024.0;
    let mut figures = vec![
        (Figure::Messages, rate),
        (Figure::MessageP50, us(0.5)),
        (Figure::MessageP99, us(0.99)),
        (
            Figure::MessageProcessor,
            (used.server + used.clients - begin.server - begin.clients) * 1e6 / served,
        ),
        (
            Figure::MessageProcessorServer,
            (used.server - begin.server) * 1e6 / served,
        ),
        (Figure::Resident, mib("VmRSS:")),
        (Figure::Shared, mib("RssShmem:")),
        (Figure::Descriptors, usage.descriptors),
    ];
    if bulk > 0 {
        figures.push((Figure::Throughput, bulk_rate));
    }
    if series == Series::Sleepers {
        figures.push((Figure::Sleeps, (usage.sleeps - usage_before.sleeps) / served));
    }
    Ok(figures)
}

/// Gives an order to all clients, and then waits for their answers.
fn all<'a>(lab: &Lab, clients: impl Iterator<Item = &'a mut Player>, order: &str) -> Result<Vec<String>> {
    let mut asked = Vec::new();
    for client in clients {
        client.order(order)?;
        asked.push(client);
    }
    asked.into_iter().map(|client| client.answer(lab)).collect()
}

/// Processor seconds of all threads so far.
struct Processor {
    server: f64,
    clients: f64,
}

impl Processor {
    fn of(server: &Proc, clients: &[Player]) -> Result<Self> {
        let of = |process: &Proc| -> Result<f64> {
            let pid = Pid::from_raw(process.pid().cast_signed());
            let time = ClockId::pid_cpu_clock_id(pid)?.now()?;
            Ok(std::time::Duration::from(time).as_secs_f64())
        };
        let clients: Result<Vec<f64>> = clients.iter().map(|client| of(&client.process)).collect();
        Ok(Self {
            server: of(server)?,
            clients: clients?.iter().sum(),
        })
    }
}
