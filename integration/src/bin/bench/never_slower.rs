//! `bench never-slower`: whole programs for which the library must never be slower than kernel TCP. They have many
//! processes for the cores, short connections, the library at one end only, or bytes that pass through the kernel. Each
//! row alternates between runs without and with the library. The losing rows are printed at the end. `demo` has the
//! programs that must be much faster.

use std::rc::Rc;

use anyhow::Result;
use rdmasock_integration::lab::{Build, Lab, Mode, Role};
use rdmasock_integration::rounds::{Measure, Paths, Program, Rounds};
use rdmasock_integration::servers::databases::{MariaDb, Postgres};
use rdmasock_integration::servers::{Service, relays};
use rdmasock_integration::table::{Better, Goal, Report, Row, Subject};
use rdmasock_integration::{loads, servers};

use crate::Choice;

/// The goal of all rows here: at least this share of kernel TCP's speed, as measurements are off by their noise.
const GOAL: Goal = Goal::Times(Subject::Tcp, 0.97);

/// Bytes of a page, of a file that haproxy passes on, and of one that rsync fetches.
const PAGE: usize = 612;
const FILE: usize = 1 << 20;
const LARGE: usize = 256 << 20;

/// The sizes of one round.
#[derive(Debug, Clone, Copy)]
struct Size {
    requests: u32,
    seconds: u32,
}

/// Measures all rows that are chosen.
///
/// # Errors
/// If the library is not built, or a program fails.
pub fn run(choice: &Choice) -> Result<()> {
    let size = match choice.quick {
        true => Size {
            requests: 50_000,
            seconds: 2,
        },
        false => Size {
            requests: 200_000,
            seconds: 5,
        },
    };
    let public = tempfile::Builder::new().prefix("rdmasock-").tempdir()?;
    let build = match Build::locate() {
        Ok(build) => Some(build.copy_for_all(public.path())?),
        Err(_) if choice.kernel => None,
        Err(error) => return Err(error),
    };
    let rounds = Rounds {
        build,
        number: if choice.quick { 1 } else { choice.rounds },
        kernel: choice.kernel,
    };
    let mut programs = postgres(size);
    programs.push(mariadb(size));
    programs.extend(redis(size));
    programs.extend([nginx(size), relay_small(size), relay_large(size), rsync(size)]);
    for program in &mut programs {
        program.measures.retain(|m| choice.is_wanted(&m.row));
    }
    programs.retain(|program| !program.measures.is_empty());
    let failures = rounds.run(&mut programs)?;

    let rows = programs.into_iter().flat_map(|p| p.measures).map(|m| m.row).collect();
    let title = match choice.kernel {
        true => "Self-check, the library is NOT in use",
        false => "Programs that must never be slower",
    };
    let report = Report::new(title, rounds.number, rows);
    let published = choice.publish(&report, &failures);
    print!("{}", report.losing(Subject::Tcp));
    published
}

/// Makes a row with [`GOAL`].
fn measure(
    name: &str,
    unit: &'static str,
    paths: Paths,
    sample: impl Fn(&Lab, &Service) -> Result<f64> + 'static,
) -> Measure {
    Measure {
        row: Row::new(name, unit, Better::Higher, &[GOAL]),
        paths,
        sample: Box::new(move |lab, server, _| sample(lab, server)),
    }
}

/// Makes a program whose server needs no other server behind it.
fn program(
    name: &'static str,
    mode: Mode,
    start: impl Fn(&Lab) -> Result<Service> + 'static,
    measures: Vec<Measure>,
) -> Program {
    Program {
        name,
        mode,
        start: Box::new(move |lab| Ok(vec![start(lab)?])),
        measures,
        has_unix: false,
    }
}

/// Returns the programs with PostgreSQL, which has a process for each connection. The rows have eight connections for
/// two cores, a hundred connections, and one connection for each transaction.
fn postgres(size: Size) -> Vec<Program> {
    let data = Rc::new(Postgres::default());
    let row = |name: &str, options: &'static [&'static str]| {
        measure(name, "transactions/s", Paths::Unseen, move |lab, server| {
            loads::pgbench(lab, server, size.seconds, options)
        })
    };
    let on = |mode, name, measures| {
        let data = Rc::clone(&data);
        let start = move |lab: &Lab| data.start(lab, Role::Server);
        program(name, mode, start, measures)
    };
    let eight = &["-c", "8", "-j", "2"];
    vec![
        on(
            Mode::Both,
            "PostgreSQL",
            vec![
                row("PostgreSQL, pgbench -S -c 8", eight),
                row("PostgreSQL, pgbench -S -c 100", &["-c", "100", "-j", "2"]),
                row(
                    "PostgreSQL, pgbench -S -c 8 -C, a connection per transaction",
                    &["-c", "8", "-j", "2", "-C"],
                ),
            ],
        ),
        on(
            Mode::ServerOnly,
            "PostgreSQL, server only",
            vec![row("PostgreSQL, pgbench -S -c 8, server only", eight)],
        ),
        on(
            Mode::ClientOnly,
            "PostgreSQL, client only",
            vec![row("PostgreSQL, pgbench -S -c 8, client only", eight)],
        ),
    ]
}

/// Returns the program with MariaDB, which has a thread for each connection: up to fifty for two cores.
fn mariadb(size: Size) -> Program {
    let data = MariaDb::default();
    let row = |test: &'static str, threads| {
        let name = format!("MariaDB, sysbench {test}, {threads} threads");
        measure(&name, "transactions/s", Paths::Any, move |lab, server| {
            loads::sysbench(lab, server, test, threads, size.seconds)
        })
    };
    program(
        "MariaDB",
        Mode::Both,
        move |lab| data.start(lab, Role::Server),
        vec![row("oltp_point_select", 50), row("oltp_read_write", 8)],
    )
}

/// Returns the programs with redis: the library at one end only, and connections of one request.
fn redis(size: Size) -> Vec<Program> {
    let row = |name, paths, options: &'static [&'static str]| {
        measure(name, "requests/s", paths, move |lab, server| {
            let requests = match options {
                [] => size.requests,
                _ => size.requests / 4,
            };
            loads::redis_benchmark(lab, server, Subject::Tcp, "GET", requests, options)
        })
    };
    let on = |mode, name, measure| {
        let start = |lab: &Lab| servers::redis(lab, Role::Server, &[]);
        program(name, mode, start, vec![measure])
    };
    vec![
        on(
            Mode::ServerOnly,
            "redis, server only",
            row("redis GET -c 50, server only", Paths::Any, &[]),
        ),
        on(
            Mode::ClientOnly,
            "redis, client only",
            row("redis GET -c 50, client only", Paths::Any, &[]),
        ),
        on(
            Mode::Both,
            "redis, short connections",
            row("redis GET, a connection per request", Paths::Any, &["-k", "0"]),
        ),
    ]
}

/// Returns the program with nginx. Each connection has one request, and the server closes it.
fn nginx(size: Size) -> Program {
    let row = measure(
        "nginx, a connection per request",
        "requests/s",
        Paths::Any,
        move |lab, server| {
            let header = Some("Connection: close");
            loads::wrk(lab, server, "page", size.seconds, header)
        },
    );
    program("nginx", Mode::Both, |lab| web(lab, "page", PAGE), vec![row])
}

/// Starts nginx with one file.
fn web(lab: &Lab, file: &str, bytes: usize) -> Result<Service> {
    let server = servers::nginx(lab, Role::Server, None)?;
    std::fs::write(lab.path("www").join(file), vec![b'x'; bytes])?;
    Ok(server)
}

/// Returns a program with haproxy before redis. haproxy doubles the number of connections, and passes small requests on
/// by recv and send.
fn relay_small(size: Size) -> Program {
    let row = measure(
        "haproxy before redis, GET -c 50",
        "requests/s",
        Paths::Any,
        move |lab, server| {
            let requests = size.requests / 2;
            loads::redis_benchmark(lab, server, Subject::Tcp, "GET", requests, &[])
        },
    );
    Program {
        name: "haproxy before redis",
        mode: Mode::Both,
        start: Box::new(|lab| behind_relay(lab, servers::redis(lab, Role::Server, &[])?)),
        measures: vec![row],
        has_unix: false,
    }
}

/// Returns a program with haproxy before nginx. haproxy passes the bytes of files on by splice.
fn relay_large(size: Size) -> Program {
    let row = measure(
        "haproxy before nginx, files of 1 MiB",
        "requests/s",
        Paths::Any,
        move |lab, server| loads::wrk(lab, server, "file", size.seconds, None),
    );
    Program {
        name: "haproxy before nginx",
        mode: Mode::Both,
        start: Box::new(|lab| behind_relay(lab, web(lab, "file", FILE)?)),
        measures: vec![row],
        has_unix: false,
    }
}

fn behind_relay(lab: &Lab, back: Service) -> Result<Vec<Service>> {
    let relay = relays::haproxy(lab, Role::Server, back.port)?;
    Ok(vec![relay, back])
}

/// Returns the program with rsync, which has a connection and a process for each transfer.
fn rsync(size: Size) -> Program {
    let row = measure("rsync of 256 MiB", "bytes/s", Paths::Unseen, move |lab, server| {
        loads::rsync(lab, server, "large", LARGE as u64, size.seconds)
    });
    program(
        "rsync",
        Mode::Both,
        |lab| {
            let server = relays::rsync(lab, Role::Server)?;
            lab.random_file("files/large", LARGE, 1)?;
            Ok(server)
        },
        vec![row],
    )
}
