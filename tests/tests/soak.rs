//! Peers that come and go leave nothing behind: after many short ones a process has the descriptors, mappings,
//! address space and memory that it had after ten. A thousand of them, or as many as `SOAK_PEERS` says.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_core::stats::instance_of;
use rdmasock_tests::harness::{Paths, clean_environment};

/// Peers that are there before anything is counted: objects and addresses for as many as there are at once exist then.
const FIRST: u64 = 10;
const PEERS: u64 = 1000;
/// Clients at once.
const AT_ONCE: usize = 2;
/// What is still being cleared away gets this long.
const PATIENCE: Duration = Duration::from_secs(20);

/// What more a process may have at the end than after the first peers: what is being cleared away, the allocator's
/// whims, and link objects for a few more peers at once. A leak of one descriptor, mapping or page a peer is far more.
const SLACK: Counts = Counts {
    fds: 4,
    mappings: 40,
    size_kib: 8 * 1024,
    resident_kib: 3 * 1024,
};

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // They compare what a process has, not how fast it is, but two cores are few for more.
    args.test_threads.get_or_insert(1);
    let trials = vec![
        Trial::test("many_clients_of_one_server", many_clients),
        Trial::test("one_client_of_a_server_that_forks", forking_server),
        Trial::test("a_child_for_a_short_connection_is_no_instance", short_child),
        Trial::test("questions_do_not_grow_with_the_processes_of_a_server", questions),
    ];
    libtest_mimic::run(&args, trials).exit_code()
}

fn peers() -> u64 {
    let asked = std::env::var("SOAK_PEERS").ok();
    asked.map_or(PEERS, |n| n.parse().expect("SOAK_PEERS is a number"))
}

/// What a process has.
#[derive(Clone, Copy, Debug)]
struct Counts {
    fds: u64,
    mappings: u64,
    size_kib: u64,
    resident_kib: u64,
}

impl Counts {
    fn of(pid: u32) -> Self {
        let proc = |name: &str| format!("/proc/{pid}/{name}");
        let status = fs::read_to_string(proc("status")).expect("it runs");
        let field = |name: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(name));
            let number = line.and_then(|l| l.split_whitespace().next());
            number.and_then(|n| n.parse().ok()).expect("a number")
        };
        // A thread may have a table of descriptors of its own.
        let tables = fs::read_dir(proc("task")).expect("it runs");
        let fds = tables.filter_map(|t| Some(fs::read_dir(t.ok()?.path().join("fd")).ok()?.count()));
        Self {
            fds: fds.max().expect("a thread") as u64,
            mappings: fs::read_to_string(proc("maps")).expect("it runs").lines().count() as u64,
            size_kib: field("VmSize:"),
            resident_kib: field("VmRSS:"),
        }
    }

    fn is_within(&self, first: &Self) -> bool {
        self.fds <= first.fds + SLACK.fds
            && self.mappings <= first.mappings + SLACK.mappings
            && self.size_kib <= first.size_kib + SLACK.size_kib
            && self.resident_kib <= first.resident_kib + SLACK.resident_kib
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            fds,
            mappings,
            size_kib,
            resident_kib,
        } = self;
        write!(
            f,
            "{fds} descriptors, {mappings} mappings, {size_kib} KiB of addresses, {resident_kib} KiB resident"
        )
    }
}

/// A program of `soak-peer`; killed when this is dropped.
struct Peer(Child);

impl Peer {
    fn start(args: &[&str]) -> Result<Self, Failed> {
        Self::start_with(args, "0")
    }

    fn start_with(args: &[&str], promote_after: &str) -> Result<Self, Failed> {
        let paths = Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario")));
        let mut command = Command::new(env!("CARGO_BIN_EXE_soak-peer"));
        command.args(args);
        clean_environment(&mut command);
        let child = command
            .env("LD_PRELOAD", paths.library?)
            .env("RDMASOCK_PROMOTE_AFTER", promote_after)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        Ok(Self(child))
    }

    /// The next line that it prints.
    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        BufReader::new(self.0.stdout.as_mut().unwrap()).read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// That it has had its connections.
    fn is_done(&mut self) -> Result<(), Failed> {
        match self.line()?.as_str() {
            "done" => Ok(()),
            _ => Err(format!("it ended early: {}", self.0.wait()?).into()),
        }
    }

    fn counts(&self) -> Counts {
        Counts::of(self.0.id())
    }

    /// What it has once it has cleared away what can be, compared with what it had.
    fn settle(&self, first: &Counts) -> Result<(), Failed> {
        let end = Instant::now() + PATIENCE;
        loop {
            let now = self.counts();
            if now.is_within(first) {
                println!("after the first: {first}; after all: {now}");
                return Ok(());
            }
            if Instant::now() > end {
                let words = format!("after {FIRST} peers: {first}\nafter {}: {now}", peers());
                return Err(words.into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Short clients, `AT_ONCE` at a time.
fn come_and_go(port: &str, count: u64) -> Result<(), Failed> {
    let mut left = count;
    while left > 0 {
        let batch = left.min(AT_ONCE as u64);
        left -= batch;
        let clients: Result<Vec<_>, _> = (0..batch).map(|_| Peer::start(&["dial", port, "1"])).collect();
        for mut client in clients? {
            client.is_done()?;
        }
    }
    Ok(())
}

fn many_clients() -> Result<(), Failed> {
    let mut server = Peer::start(&["serve"])?;
    let port = server.line()?;
    come_and_go(&port, FIRST)?;
    let first = server.counts();
    come_and_go(&port, peers() - FIRST)?;
    server.settle(&first)
}

fn forking_server() -> Result<(), Failed> {
    let mut server = Peer::start(&["serve-forking"])?;
    let port = server.line()?;
    // One that has had few peers, and one that has had many.
    let mut few = Peer::start(&["dial", &port, &FIRST.to_string()])?;
    few.is_done()?;
    let first = (few.counts(), server.counts());
    let mut many = Peer::start(&["dial", &port, &peers().to_string()])?;
    many.is_done()?;
    many.settle(&first.0)?;
    server.settle(&first.1)?;
    // They end by themselves.
    for mut client in [few, many] {
        client.0.stdin.take().unwrap().flush()?;
        if !client.0.wait()?.success() {
            return Err("the client failed".into());
        }
    }
    Ok(())
}

/// To be an instance costs a process as much as a short connection does: a child for one becomes none.
fn short_child() -> Result<(), Failed> {
    let mut server = Peer::start_with(&["serve-forking"], "16r")?;
    let port: u16 = server.line()?.parse()?;
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    let mut requests = |count| -> Result<(), Failed> {
        for _ in 0..count {
            stream.write_all(b"request")?;
            stream.read_exact(&mut [0; 7])?;
        }
        Ok(())
    };
    requests(5)?;
    let pid = server.0.id();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    let child = children.trim().parse()?;
    let is_instance = || instance_of(child).is_ok_and(|found| found.is_some());
    if is_instance() {
        return Err("a child that has answered five requests is an instance".into());
    }
    requests(20)?;
    let end = Instant::now() + PATIENCE;
    while !is_instance() {
        if Instant::now() > end {
            return Err("a child that has answered 25 requests is no instance".into());
        }
        requests(1)?;
    }
    Ok(())
}

/// A server with a process for each of a hundred connections: more than a name lists.
fn questions() -> Result<(), Failed> {
    const CONNECTIONS: u64 = 100;
    let mut server = Peer::start_with(&["serve-forking"], "16r")?;
    let port = server.line()?;
    let args = ["dial-at-once", &port, &CONNECTIONS.to_string()];
    let line = Peer::start_with(&args, "16r")?.line()?;
    let asked: u64 = line.parse().map_err(|_| "not all were promoted")?;
    println!("{asked} questions for {CONNECTIONS} connections");
    // One by name and one to who has it, a few over links at first, and what is asked again on a slow machine.
    if asked > 5 * CONNECTIONS {
        return Err(format!("{asked} questions for {CONNECTIONS} connections").into());
    }
    Ok(())
}
