//! Peers that come and go leave nothing behind: after many short peers a process has the descriptors, mappings, address
//! space, memory and idleness that it had after ten. There are a thousand peers within a host, a fifth of that over
//! each kind of the local device and a twentieth over the verbs plugin, or as many as `SOAK_PEERS` says. `scripts/soak`
//! runs them for hours.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{fmt, fs};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_core::stats::instance_of;
use rdmasock_tests::harness::{Paths, clean_environment};
use rdmasock_tests::standin;

/// Peers before the first count: by then there are objects and addresses for as many peers as there are at once.
const FIRST: u64 = 10;
const PEERS: u64 = 1000;
/// The divisor for clients that use a server in every way: there are fewer of them.
const PEERS_A_CLIENT: u64 = 10;
/// The fabrics that connections are promoted to.
const FABRICS: [&str; 4] = ["shm", "roce", "iwarp", "verbs"];
/// Connections between two processes at once. The service threads of a busy machine cannot answer this many questions
/// at a time, all asked at once, within the time limit for one.
const AT_ONE_TIME: u64 = 6000;
/// How often the threads of an idle process may be woken in a second.
const WAKES: u64 = 6;
/// Clients at once.
const AT_ONCE: usize = 2;
/// The time that a process gets to clear away its remains.
const PATIENCE: Duration = Duration::from_secs(20);

/// The excess that a process may have at the end over its counts after the first peers. It covers remains that are
/// still being cleared away, variations of the allocator, and link objects for a few more peers at once. A leak of one
/// descriptor, mapping or page a peer is far more.
const SLACK: Counts = Counts {
    fds: 4,
    mappings: 40,
    locked_kib: 0,
    pinned_kib: 0,
    size_kib: 8 * 1024,
    resident_kib: 3 * 1024,
};

/// A test of one fabric.
type OnFabric = fn(&'static str) -> Result<(), Failed>;

/// KiB of addresses of link objects between hosts for a few more peers at once, beside `SLACK`.
const FAR_KIB: u64 = 30 * 1024;

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // The tests compare what a process has, not how fast it is, but two cores are too few for more at a time.
    args.test_threads.get_or_insert(1);
    let mut trials = vec![
        Trial::test("a_child_for_a_short_connection_is_no_instance", short_child),
        Trial::test("questions_do_not_grow_with_the_processes_of_a_server", questions),
        Trial::test("thousands_of_connections_of_one_pair_all_promote", thousands),
    ];
    for fabric in FABRICS {
        let each: [(&str, OnFabric); 3] = [
            ("many_clients_of_one_server", many_clients),
            ("one_client_of_a_server_that_forks", forking_server),
            ("every_kind_of_object", every_kind),
        ];
        let test = |(name, run): (&str, OnFabric)| Trial::test(format!("{fabric}/{name}"), move || run(fabric));
        trials.extend(each.map(test));
    }
    libtest_mimic::run(&args, trials).exit_code()
}

fn peers(fabric: &str) -> u64 {
    let asked = std::env::var("SOAK_PEERS").ok();
    let few = match fabric {
        "shm" => 1,
        "verbs" => 20,
        _ => 5,
    };
    asked.map_or(PEERS / few, |n| n.parse().expect("SOAK_PEERS is a number"))
}

/// The resources of a process.
#[derive(Clone, Copy, Debug)]
struct Counts {
    fds: u64,
    mappings: u64,
    locked_kib: u64,
    /// Memory that the verbs plugin has registered.
    pinned_kib: u64,
    size_kib: u64,
    resident_kib: u64,
}

/// Returns how often the threads of a process have gone to sleep.
fn sleeps_of(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let of = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let line = status
            .lines()
            .find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse::<u64>().ok()
    };
    tasks.filter_map(|task| of(task.ok()?)).sum()
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
        // A thread may have an fd table of its own.
        let tables = fs::read_dir(proc("task")).expect("it runs");
        let fds = tables.filter_map(|t| Some(fs::read_dir(t.ok()?.path().join("fd")).ok()?.count()));
        Self {
            fds: fds.max().expect("a thread") as u64,
            mappings: fs::read_to_string(proc("maps")).expect("it runs").lines().count() as u64,
            locked_kib: field("VmLck:") + field("VmPin:"),
            pinned_kib: standin::counters(pid).map_or(0, |counters| counters.pinned as u64 / 1024),
            size_kib: field("VmSize:"),
            resident_kib: field("VmRSS:"),
        }
    }

    fn is_within(&self, first: &Self, fabric: &str) -> bool {
        let more_kib = if fabric == "shm" { 0 } else { FAR_KIB };
        self.fds <= first.fds + SLACK.fds
            && self.mappings <= first.mappings + SLACK.mappings
            && self.locked_kib <= first.locked_kib + SLACK.locked_kib
            && self.pinned_kib <= first.pinned_kib + SLACK.pinned_kib
            && self.size_kib <= first.size_kib + SLACK.size_kib + more_kib
            && self.resident_kib <= first.resident_kib + SLACK.resident_kib
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            fds,
            mappings,
            locked_kib,
            pinned_kib,
            size_kib,
            resident_kib,
        } = self;
        write!(
            f,
            "{fds} descriptors, {mappings} mappings, {locked_kib} KiB locked, {pinned_kib} KiB pinned, {size_kib} KiB of addresses, \
             {resident_kib} KiB resident"
        )
    }
}

/// A program of `soak-peer`, and the fabric that its connections are promoted to; killed when this is dropped.
struct Peer(Child, &'static str);

impl Peer {
    fn start(fabric: &'static str, args: &[&str]) -> Result<Self, Failed> {
        Self::start_with(fabric, args, "0")
    }

    fn start_with(fabric: &'static str, args: &[&str], promote_after: &str) -> Result<Self, Failed> {
        let paths = Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario")));
        let mut command = Command::new(env!("CARGO_BIN_EXE_soak-peer"));
        command.args(args);
        clean_environment(&mut command);
        if fabric == "verbs" {
            let standin = paths.standin().map_err(|e| format!("{e:#}"))?;
            standin.set(&mut command, "roce");
        } else if fabric != "shm" {
            command.env("RDMASOCK_DEV_LOCAL_DEVICE", &paths.device);
            command.env("LOCALNIC", fabric);
            // Peers ask by name, as within a host: a single control port would serve all tests that run at once.
            command.env("RDMASOCK_CONTROL_PORT", "0");
        }
        let child = command
            .env("LD_PRELOAD", paths.library?)
            .env("RDMASOCK_PROMOTE_AFTER", promote_after)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        Ok(Self(child, fabric))
    }

    /// Returns the next line that the program prints.
    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        BufReader::new(self.0.stdout.as_mut().unwrap()).read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// Waits until the program's connections have ended.
    fn is_done(&mut self) -> Result<(), Failed> {
        match self.line()?.as_str() {
            "done" => Ok(()),
            _ => Err(format!("it ended early: {}", self.0.wait()?).into()),
        }
    }

    fn counts(&self) -> Counts {
        Counts::of(self.0.id())
    }

    /// Waits until the program's counts are within [`SLACK`] of `first` and its threads rest; fails after [`PATIENCE`].
    fn settle(&self, first: &Counts) -> Result<(), Failed> {
        let end = Instant::now() + PATIENCE;
        loop {
            let before = sleeps_of(self.0.id());
            std::thread::sleep(Duration::from_secs(1));
            let (now, sleeps) = (self.counts(), sleeps_of(self.0.id()) - before);
            if now.is_within(first, self.1) && sleeps <= WAKES {
                println!("after the first: {first}; after all: {now}; woken {sleeps} times a second");
                return Ok(());
            }
            if Instant::now() > end {
                let words = format!("after {FIRST} peers: {first}\nafter all: {now}; woken {sleeps} times a second");
                return Err(words.into());
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The program may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs short clients, `AT_ONCE` at a time.
fn come_and_go(fabric: &'static str, port: &str, count: u64) -> Result<(), Failed> {
    let mut left = count;
    while left > 0 {
        let batch = left.min(AT_ONCE as u64);
        left -= batch;
        let clients: Result<Vec<_>, _> = (0..batch).map(|_| Peer::start(fabric, &["dial", port, "1"])).collect();
        for mut client in clients? {
            client.is_done()?;
        }
    }
    Ok(())
}

fn many_clients(fabric: &'static str) -> Result<(), Failed> {
    let mut server = Peer::start(fabric, &["serve"])?;
    let port = server.line()?;
    come_and_go(fabric, &port, FIRST)?;
    let first = server.counts();
    come_and_go(fabric, &port, peers(fabric) - FIRST)?;
    server.settle(&first)
}

/// A server with threads, sets, listeners, children that go on with a connection, and children that are killed with
/// one.
fn every_kind(fabric: &'static str) -> Result<(), Failed> {
    let mut server = Peer::start(fabric, &["serve-every-way"])?;
    let port = server.line()?;
    let clients = |count| -> Result<u64, Failed> {
        let mut promoted = 0;
        for _ in 0..count {
            let line = Peer::start(fabric, &["dial-every-way", &port, "1"])?.line()?;
            promoted += line.parse::<u64>().map_err(|_| "a client ended early")?;
        }
        Ok(promoted)
    };
    clients(FIRST)?;
    let first = server.counts();
    let count = (peers(fabric) / PEERS_A_CLIENT).max(20);
    let promoted = clients(count)?;
    if promoted < count {
        return Err(format!("{promoted} connections of {count} clients were promoted").into());
    }
    server.settle(&first)
}

/// All connections between two processes are promoted, and each is asked for once.
fn thousands() -> Result<(), Failed> {
    let mut server = Peer::start("shm", &["serve-many"])?;
    let port = server.line()?;
    let line = Peer::start("shm", &["dial-at-once", &port, &AT_ONE_TIME.to_string()])?.line()?;
    let asked: u64 = line.parse().map_err(|_| "not all were promoted")?;
    println!("{asked} questions for {AT_ONE_TIME} connections");
    if asked > AT_ONE_TIME + AT_ONE_TIME / 10 {
        return Err(format!("{asked} questions for {AT_ONE_TIME} connections").into());
    }
    Ok(())
}

fn forking_server(fabric: &'static str) -> Result<(), Failed> {
    let mut server = Peer::start(fabric, &["serve-forking"])?;
    let port = server.line()?;
    // The first client has had few peers, the second many.
    let mut few = Peer::start(fabric, &["dial", &port, &FIRST.to_string()])?;
    few.is_done()?;
    let first = (few.counts(), server.counts());
    let mut many = Peer::start(fabric, &["dial", &port, &peers(fabric).to_string()])?;
    many.is_done()?;
    many.settle(&first.0)?;
    server.settle(&first.1)?;
    // The clients end by themselves.
    for mut client in [few, many] {
        client.0.stdin.take().unwrap().flush()?;
        if !client.0.wait()?.success() {
            return Err("the client failed".into());
        }
    }
    Ok(())
}

/// To be an instance costs a process as much as a short connection does: a child for a short connection becomes none.
fn short_child() -> Result<(), Failed> {
    let mut server = Peer::start_with("shm", &["serve-forking"], "16r")?;
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

/// A server with a process for each of a hundred connections: more processes than a name lists.
fn questions() -> Result<(), Failed> {
    const CONNECTIONS: u64 = 100;
    let mut server = Peer::start_with("shm", &["serve-forking"], "16r")?;
    let port = server.line()?;
    let args = ["dial-at-once", &port, &CONNECTIONS.to_string()];
    let line = Peer::start_with("shm", &args, "16r")?.line()?;
    let asked: u64 = line.parse().map_err(|_| "not all were promoted")?;
    println!("{asked} questions for {CONNECTIONS} connections");
    // Each connection has one question by name and one to its owner. A few questions over links come first, and a slow
    // machine repeats some.
    if asked > 5 * CONNECTIONS {
        return Err(format!("{asked} questions for {CONNECTIONS} connections").into());
    }
    Ok(())
}
