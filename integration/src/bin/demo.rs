//! `scripts/demo`: unmodified redis, nginx and iperf3 on kernel TCP and with the library,
//! alternately in one run, as a table. Fails when a program fails or is not promoted; that a goal
//! is missed only shows in the table. What single calls cost is the benchmark's business (`bench`).

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use rdmasock_integration::lab::{Build, Lab, Mode, Role};
use rdmasock_integration::proc::Proc;
use rdmasock_integration::servers::{self, Service};
use rdmasock_integration::signals;
use rdmasock_integration::stat::Totals;
use rdmasock_integration::table::{Better, Goal, Report, Row, Subject};

/// Runs redis, nginx and iperf3 on kernel TCP and with rdmasock, and compares.
#[derive(Debug, Parser)]
struct Options {
    /// Also write the table to FILE as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// One short round: shows that it works, not how fast.
    #[arg(long)]
    quick: bool,
    /// How often each measurement is repeated, alternating.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Only rows whose program has this name (redis, nginx, iperf3).
    #[arg(long, value_name = "PROGRAM")]
    only: Option<String>,
    /// Kernel TCP on both sides of the table: checks the demonstration itself.
    #[arg(long, hide = true)]
    kernel: bool,
}

/// The sizes of one round.
#[derive(Debug, Clone, Copy)]
struct Size {
    requests: u32,
    seconds: u32,
}

/// One measurement: its row, and how to take a sample from a running server.
struct Measure {
    row: Row,
    is_promoted: bool,
    sample: Box<Sample>,
}

type Sample = dyn Fn(&Lab, &Service, Subject) -> Result<f64>;

/// A server and what is measured on it.
struct Program {
    name: &'static str,
    start: fn(&Lab) -> Result<Service>,
    measures: Vec<Measure>,
    /// Whether [`Subject::Unix`] is measured too.
    has_unix: bool,
}

fn main() -> std::process::ExitCode {
    rdmasock_integration::exit(all())
}

fn all() -> Result<()> {
    let options = Options::parse();
    signals::catch()?;
    signals::raise_nofile()?;
    let build = Build::locate();
    let build = if options.kernel {
        build.ok()
    } else {
        Some(build?)
    };
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
    let rounds = if options.quick { 1 } else { options.rounds };

    let mut programs = vec![redis(size), nginx(size), iperf3(size)];
    programs.retain(|program| {
        options
            .only
            .as_deref()
            .is_none_or(|name| name == program.name)
    });
    let mut failures = Vec::new();
    for program in &mut programs {
        for round in 1..=rounds {
            for subject in [Subject::Tcp, Subject::Library] {
                let what = if subject == Subject::Tcp {
                    "kernel TCP"
                } else {
                    "rdmasock"
                };
                eprintln!("{}: round {round} of {rounds}, {what}", program.name);
                let mode = match subject {
                    Subject::Library if !options.kernel => Mode::Both,
                    _ => Mode::Kernel,
                };
                if let Err(error) = run(program, subject, mode, build.clone()) {
                    failures.push(format!("{} ({what}): {error:#}", program.name));
                    eprintln!("  failed: {error:#}");
                }
                if signals::is_interrupted() {
                    bail!("interrupted");
                }
            }
        }
    }

    let rows = programs
        .into_iter()
        .flat_map(|p| p.measures)
        .map(|m| m.row)
        .collect();
    let title = match options.kernel {
        true => "Self-check, the library is NOT in use",
        false => "Unmodified programs on one host",
    };
    let report = Report::new(title, rounds, rows);
    println!("{report}");
    if let Some(path) = &options.json {
        report
            .write(path)
            .with_context(|| format!("write {}", path.display()))?;
    }
    if !failures.is_empty() {
        bail!(
            "{} of the runs failed:\n  {}",
            failures.len(),
            failures.join("\n  ")
        );
    }
    Ok(())
}

/// One round of all of a program's measurements on one fresh server.
fn run(program: &mut Program, subject: Subject, mode: Mode, build: Option<Build>) -> Result<()> {
    let lab = Lab::new(mode, build, Duration::from_secs(180))?;
    let mut server = (program.start)(&lab)?;
    let mut not_promoted = Vec::new();
    for Measure {
        row,
        is_promoted,
        sample,
    } in &mut program.measures
    {
        let before = totals(&lab, &server.proc)?;
        let value = sample(&lab, &server, subject).with_context(|| row.name.clone())?;
        row.add(subject, value);
        if subject == Subject::Tcp && program.has_unix {
            row.add(Subject::Unix, sample(&lab, &server, Subject::Unix)?);
        }
        server.proc.check_running()?;
        if mode == Mode::Both {
            let moved = totals(&lab, &server.proc)?.since(before);
            row.add_bytes(moved.link(), moved.tcp());
            if *is_promoted && (moved.promoted == 0 || moved.link() == 0) {
                not_promoted.push(format!("{}: {}", row.name, lab.not_promoted(&server.proc)));
            }
        }
    }
    if !not_promoted.is_empty() {
        bail!("{}", not_promoted.join("; "));
    }
    Ok(())
}

fn totals(lab: &Lab, server: &Proc) -> Result<Totals> {
    match lab.mode() {
        Mode::Both => lab.totals(server.pid()),
        _ => Ok(Totals::default()),
    }
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
            is_promoted: true,
            sample: Box::new(move |lab: &Lab, server: &Service, subject| {
                redis_benchmark(lab, server, subject, test, pipeline, requests)
            }),
        }
    };
    let single = [
        Goal::Times(Subject::Tcp, 5.0),
        Goal::Times(Subject::Unix, 2.5),
    ];
    let pipelined = [Goal::Times(Subject::Tcp, 2.5)];
    Program {
        name: "redis",
        start: |lab| servers::redis(lab, Role::Server, &[]),
        measures: vec![
            measure("SET", 1, &single),
            measure("GET", 1, &single),
            measure("SET", 16, &pipelined),
            measure("GET", 16, &pipelined),
        ],
        has_unix: true,
    }
}

fn redis_benchmark(
    lab: &Lab,
    server: &Service,
    subject: Subject,
    test: &str,
    pipeline: u32,
    requests: u32,
) -> Result<f64> {
    let cmd = lab.cmd(Role::Client, "redis-benchmark")?;
    let cmd = match subject {
        Subject::Unix => cmd.args([PathBuf::from("-s"), servers::redis_unix(lab, server.port)]),
        _ => cmd.args(["-h", "127.0.0.1", "-p", &server.port.to_string()]),
    };
    let cmd = cmd
        .args([
            "-c",
            "50",
            "-n",
            &requests.to_string(),
            "-P",
            &pipeline.to_string(),
        ])
        .args(["-t", test, "--csv"]);
    let text = lab.text(cmd)?;
    // "test","rps","avg_latency_ms",… and then one line a test, every field in quotes.
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("\"{test}")));
    line.and_then(|line| line.split(',').nth(1)?.trim_matches('"').parse().ok())
        .with_context(|| format!("no figure in what redis-benchmark printed: {text}"))
}

fn nginx(size: Size) -> Program {
    let measure = |name: &str, header: Option<&'static str>, factor: f64| Measure {
        row: Row::new(
            name,
            "requests/s",
            Better::Higher,
            &[Goal::Times(Subject::Tcp, factor)],
        ),
        is_promoted: header.is_none(),
        sample: Box::new(move |lab: &Lab, server: &Service, _| wrk(lab, server, size, header)),
    };
    let mut per_request = measure(
        "nginx, a connection per request",
        Some("Connection: close"),
        0.97,
    );
    per_request.row.note = "stays on TCP: one request is below the threshold".to_owned();
    Program {
        name: "nginx",
        start: |lab| {
            let server = servers::nginx(lab, Role::Server, None)?;
            std::fs::write(lab.path("www").join("index.html"), [b'x'; 612])?;
            Ok(server)
        },
        measures: vec![
            measure("nginx keep-alive, wrk -c 50", None, 2.5),
            per_request,
        ],
        has_unix: false,
    }
}

fn wrk(lab: &Lab, server: &Service, size: Size, header: Option<&str>) -> Result<f64> {
    let mut cmd = lab.cmd(Role::Client, "wrk")?.args([
        "-t",
        "1",
        "-c",
        "50",
        "-d",
        &format!("{}s", size.seconds),
    ]);
    if let Some(header) = header {
        cmd = cmd.args(["-H", header]);
    }
    let text = lab.text(cmd.args([server.url("index.html")]))?;
    if text.contains("Non-2xx") || text.contains("Socket errors") {
        bail!("wrk counted errors: {text}");
    }
    text.lines()
        .find_map(|line| {
            line.trim()
                .strip_prefix("Requests/sec:")?
                .trim()
                .parse()
                .ok()
        })
        .filter(|rate: &f64| *rate > 0.0)
        .with_context(|| format!("no figure in what wrk printed: {text}"))
}

fn iperf3(size: Size) -> Program {
    let goals = [Goal::Times(Subject::Tcp, 3.0)];
    Program {
        name: "iperf3",
        start: |lab| servers::iperf3(lab, Role::Server),
        measures: vec![Measure {
            row: Row::new("iperf3, one stream", "bytes/s", Better::Higher, &goals),
            is_promoted: true,
            sample: Box::new(move |lab: &Lab, server: &Service, _| {
                let cmd = lab.cmd(Role::Client, "iperf3")?;
                let port = server.port.to_string();
                let seconds = size.seconds.to_string();
                let json =
                    lab.run(cmd.args(["-c", "127.0.0.1", "-p", &port, "-t", &seconds, "-J"]))?;
                let json: serde_json::Value = serde_json::from_slice(&json)?;
                json.pointer("/end/sum_received/bits_per_second")
                    .and_then(serde_json::Value::as_f64)
                    .filter(|rate| *rate > 0.0)
                    .map(|bits| bits / 8.0)
                    .with_context(|| format!("no figure in what iperf3 printed: {json}"))
            }),
        }],
        has_unix: false,
    }
}
