//! `scripts/demo`: unmodified redis, nginx and iperf3 on kernel TCP and with the library, alternating in one run, as a
//! table. Fails if a program fails or is not promoted. A missed goal shows in the table alone. `bench` measures single
//! calls.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Parser;
use rdmasock_integration::lab::{Build, Lab, Mode, Role};
use rdmasock_integration::rounds::{Measure, Paths, Program, Rounds};
use rdmasock_integration::servers::Service;
use rdmasock_integration::table::{Better, Goal, Report, Row, Subject};
use rdmasock_integration::{loads, picture, servers, signals};

/// Runs redis, nginx and iperf3 on kernel TCP and with rdmasock, and compares.
#[derive(Debug, Parser)]
struct Options {
    /// Also write the table to FILE as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also draw the table into FILE as an SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Run one short round, which shows that the library works, not how fast.
    #[arg(long)]
    quick: bool,
    /// How often each measurement is repeated, alternating.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Only rows whose program has this name (redis, nginx, iperf3).
    #[arg(long, value_name = "PROGRAM")]
    only: Option<String>,
    /// Run on kernel TCP on both sides of the table: checks the demonstration itself.
    #[arg(long, hide = true)]
    kernel: bool,
}

/// The sizes of one round.
#[derive(Debug, Clone, Copy)]
struct Size {
    requests: u32,
    seconds: u32,
}

fn main() -> std::process::ExitCode {
    rdmasock_integration::exit(all())
}

fn all() -> Result<()> {
    let options = Options::parse();
    signals::catch()?;
    signals::raise_nofile()?;
    let build = Build::locate();
    let build = if options.kernel { build.ok() } else { Some(build?) };
    let size = match options.quick {
        true => Size {
            requests: 50_000,
            seconds: 1,
        },
        false => Size {
            requests: 200_000,
            seconds: 4,
        },
    };
    let rounds = Rounds {
        build,
        number: if options.quick { 1 } else { options.rounds },
        kernel: options.kernel,
    };
    let mut programs = vec![redis(size), nginx(size), iperf3(size)];
    programs.retain(|program| options.only.as_deref().is_none_or(|name| name == program.name));
    let failures = rounds.run(&mut programs)?;

    let rows = programs.into_iter().flat_map(|p| p.measures).map(|m| m.row).collect();
    let title = match options.kernel {
        true => "Self-check, the library is NOT in use",
        false => "Unmodified programs on one host",
    };
    let report = Report::new(title, rounds.number, rows);
    println!("{report}");
    if let Some(path) = &options.json {
        report
            .write(path)
            .with_context(|| format!("write {}", path.display()))?;
    }
    if let Some(path) = &options.svg {
        picture::draw(&report, path)?;
    }
    if !failures.is_empty() {
        bail!("{} of the runs failed:\n  {}", failures.len(), failures.join("\n  "));
    }
    Ok(())
}

fn redis(size: Size) -> Program {
    let measure = |test: &'static str, pipeline: u32, goals: &[Goal]| {
        let name = format!("redis {test}, -c 50 -P {pipeline}");
        // A pipeline of 16 makes about ten times as many requests a second.
        let requests = if pipeline == 1 {
            size.requests
        } else {
            size.requests * 8
        };
        Measure {
            row: Row::new(&name, "requests/s", Better::Higher, goals),
            paths: Paths::Link,
            sample: Box::new(move |lab: &Lab, server: &Service, subject| {
                let pipeline = pipeline.to_string();
                loads::redis_benchmark(lab, server, subject, test, requests, &["-P", &pipeline])
            }),
        }
    };
    let single = [Goal::Times(Subject::Tcp, 5.0), Goal::Times(Subject::Unix, 2.5)];
    let pipelined = [Goal::Times(Subject::Tcp, 2.5)];
    Program {
        name: "redis",
        mode: Mode::Both,
        start: Box::new(|lab| Ok(vec![servers::redis(lab, Role::Server, &[])?])),
        measures: vec![
            measure("SET", 1, &single),
            measure("GET", 1, &single),
            measure("SET", 16, &pipelined),
            measure("GET", 16, &pipelined),
        ],
        has_unix: true,
    }
}

fn nginx(size: Size) -> Program {
    let measure = |name: &str, header: Option<&'static str>, factor: f64| Measure {
        row: Row::new(name, "requests/s", Better::Higher, &[Goal::Times(Subject::Tcp, factor)]),
        paths: match header {
            None => Paths::Link,
            Some(_) => Paths::Any,
        },
        sample: Box::new(move |lab: &Lab, server: &Service, _| {
            loads::wrk(lab, server, "index.html", size.seconds, header)
        }),
    };
    let mut per_request = measure("nginx, a connection per request", Some("Connection: close"), 0.97);
    per_request.row.note = "stays on TCP: one request is below the threshold".to_owned();
    Program {
        name: "nginx",
        mode: Mode::Both,
        start: Box::new(|lab| {
            let server = servers::nginx(lab, Role::Server, None)?;
            std::fs::write(lab.path("www").join("index.html"), [b'x'; 612])?;
            Ok(vec![server])
        }),
        measures: vec![measure("nginx keep-alive, wrk -c 50", None, 2.5), per_request],
        has_unix: false,
    }
}

fn iperf3(size: Size) -> Program {
    let goals = [Goal::Times(Subject::Tcp, 3.0)];
    Program {
        name: "iperf3",
        mode: Mode::Both,
        start: Box::new(|lab| Ok(vec![servers::iperf3(lab, Role::Server)?])),
        measures: vec![Measure {
            row: Row::new("iperf3, one stream", "bytes/s", Better::Higher, &goals),
            paths: Paths::Link,
            sample: Box::new(move |lab: &Lab, server: &Service, _| loads::iperf3(lab, server, size.seconds)),
        }],
        has_unix: false,
    }
}
