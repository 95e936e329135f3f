//! The verbs plugin itself, on a stand-in for rdma-core (`c/verbs.c`), as over RoCE and as over iWARP. The tests play
//! scenarios of the differential suite, each promoted and then compared with kernel TCP (`--ignored` plays the others).
//! They also count the remaining registrations and queue pairs.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::harness::{Mode, Paths, References, clean_environment, describe, difference, play};
use rdmasock_tests::observe::{count, promotion_state};
use rdmasock_tests::scenarios;
use rdmasock_tests::scenarios::Scenario;
use rdmasock_tests::standin::{Counters, counters};

/// The scenarios that are played, by the beginnings of their names: each kind of call, and events that end or move
/// links.
const PLAYED: &[&str] = &[
    "calls_send_forms",
    "calls_vectors",
    "close_half_by",
    "close_leave_by_exec",
    "close_reset_keeps_received",
    "close_shutdown_both",
    "demote_at/01",
    "direct_more_forks",
    "direct_more_two_readers",
    "direct_send_both_first",
    "direct_sizes",
    "direct_whole",
    "echo_basic",
    "echo_ipv6",
    "echo_large",
    "echo_sizes",
    "epoll_edge",
    "epoll_level",
    "epoll_more_two_epolls",
    "epoll_oneshot",
    "fds_close_everything",
    "fds_numbering",
    "files_sendfile",
    "flags_oob",
    "flags_peek_large",
    "flags_waitall",
    "lent_forks",
    "lent_into_more_forks",
    "lent_into_whole",
    "lent_sizes",
    "order_of_arrival",
    "poll_select",
    "process_fork_both_write",
    "process_fork_child_then_parent",
    "process_fork_exec",
    "process_pass_to_child",
    "refused_fork_on_a_link",
    "signals_handler_storm",
    "threads_eight_senders",
    "threads_shutdown_wakes",
    "timing_full_epoll",
    "urgent_twice",
    "zerocopy_both_ways",
];
/// How long a process may take to release its resources in the end.
const LIMIT: Duration = Duration::from_secs(30);
/// Pieces of a transfer.
const MANY: usize = 50;

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // As in the differential suite.
    args.test_threads.get_or_insert(5);
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let references = Arc::new(References::default());
    let mut trials = Vec::new();
    // Device settings that the stand-in does not have are tested on the local device.
    let is_playable = |s: &Scenario| s.modes.iter().any(|mode| [Mode::Both, Mode::Roce].contains(mode));
    for scenario in scenarios::all().into_iter().filter(is_playable) {
        let scenario = Arc::new(scenario);
        let is_played = scenario.warms_up && PLAYED.iter().any(|name| scenario.name.starts_with(name));
        let is_left_out =
            !is_played || !scenario.device.is_empty() || scenarios::differs_between_hosts(&scenario.name).is_some();
        for mode in Mode::PLUGIN {
            let (paths, references, scenario) = (Arc::clone(&paths), Arc::clone(&references), Arc::clone(&scenario));
            let name = format!("{}/{}", mode.name(), scenario.name);
            let trial = Trial::test(name, move || same_as_on_tcp(&paths, &references, &scenario, mode));
            trials.push(trial.with_ignored_flag(is_left_out));
        }
    }
    for mode in Mode::PLUGIN {
        let of_all = Arc::clone(&paths);
        let name = format!("killed_peer_leaves_nothing/{}", mode.name());
        trials.push(Trial::test(name, move || killed_peer_leaves_nothing(&of_all, mode)));
        let of_all = Arc::clone(&paths);
        let name = format!("limit_on_locked_memory_keeps_tcp/{}", mode.name());
        trials.push(Trial::test(name, move || limit_keeps_tcp(&of_all, mode)));
    }
    libtest_mimic::run(&args, trials).exit_code()
}

fn same_as_on_tcp(paths: &Paths, references: &References, scenario: &Scenario, mode: Mode) -> Result<(), Failed> {
    let kernel = references.get(paths, scenario);
    let kernel = kernel.map_err(|e| Failed::from(format!("on kernel TCP: {e}")))?;
    let other = play(paths, scenario, mode).map_err(|e| Failed::from(format!("{e:#}")))?;
    match difference(&kernel, &other) {
        None => Ok(()),
        Some(text) => Err(format!("{text}\nthe run:\n{}", describe(&other)).into()),
    }
}

/// A program of `src/stall.rs`, killed when this is dropped.
struct End {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl End {
    fn start(paths: &Paths, mode: Mode, more: &str, words: &[&str]) -> Result<Self, Failed> {
        let mut command = Command::new(&paths.scenario);
        clean_environment(&mut command);
        let device = format!("{}{more}", mode.device().unwrap());
        let set = paths.set_device(mode, &device, &mut command);
        set.map_err(|e| format!("{e:#}"))?;
        let mut child = command
            .env("LD_PRELOAD", paths.library.as_ref()?)
            .env("RDMASOCK_PROMOTE_AFTER", "2r,16K")
            .env("RDMASOCK_ZCOPY_MIN", "128K")
            .args(["helper", "stall"])
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().unwrap());
        Ok(Self { child, lines })
    }

    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn begin(&mut self, what: &str, n: usize) -> Result<(), Failed> {
        // The line is written in one piece: the program reads a line at a time.
        let line = format!("{what} {n}\n");
        Ok(self.child.stdin.as_mut().unwrap().write_all(line.as_bytes())?)
    }

    fn finish(&mut self) -> Result<(), Failed> {
        match self.line()?.as_str() {
            "done" => Ok(()),
            other => Err(format!("it said {other:?}").into()),
        }
    }

    /// Returns the device's resources for the program; `None` if it has not opened the device.
    fn counters(&self) -> Option<Counters> {
        counters(self.child.id())
    }

    fn count(&self, paths: &Paths, event: &str) -> Result<u64, Failed> {
        let count = count(&paths.command, self.child.id(), event).map_err(|e| format!("{e:#}"))?;
        Ok(count.unwrap_or(0))
    }
}

/// Makes a client and its server exchange `messages` messages.
fn exchange(client: &mut End, server: &mut End, messages: usize) -> Result<(), Failed> {
    server.begin("answer", messages)?;
    client.begin("ask", messages)?;
    server.finish()?;
    client.finish()
}

/// A killed peer's registrations, queue pairs and pinned memory end, also those of direct transfers.
fn killed_peer_leaves_nothing(paths: &Paths, mode: Mode) -> Result<(), Failed> {
    let mut server = End::start(paths, mode, "", &["server"])?;
    let port = server.line()?;
    let mut client = End::start(paths, mode, "", &["client", &port])?;
    server.line()?;
    client.line()?;
    exchange(&mut client, &mut server, 20)?;
    let end = Instant::now() + LIMIT;
    while server.count(paths, "direct_received_bytes")? == 0 {
        server.begin("receive-pieces", MANY)?;
        client.begin("send-pieces", MANY)?;
        server.finish()?;
        client.finish()?;
        if Instant::now() > end {
            return Err("nothing goes past the rings".into());
        }
    }
    let before = server.counters().ok_or("the server has not opened the device")?;
    if before.pinned == 0 || before.registered == 0 || before.queue_pairs < 2 {
        return Err(format!("no link with a queue pair for bulk: {before:?}").into());
    }
    drop(client);
    loop {
        let now = server.counters().unwrap_or(before);
        if (now.pinned, now.registered, now.queue_pairs) == (0, 0, 0) {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(format!("before: {before:?}; after: {now:?}").into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process that may not lock enough memory for a link stays on TCP, and releases all memory of the attempt.
fn limit_keeps_tcp(paths: &Paths, mode: Mode) -> Result<(), Failed> {
    let mut server = End::start(paths, mode, ",memlock", &["server"])?;
    let port = server.line()?;
    // Only the soft limit is set.
    let words = [format!("--pid={}", server.child.id()), "--memlock=200000:".to_owned()];
    let status = Command::new("prlimit").args(words).status()?;
    if !status.success() {
        return Err(format!("prlimit: {status}").into());
    }
    let mut client = End::start(paths, mode, "", &["client", &port])?;
    server.line()?;
    client.line()?;
    let end = Instant::now() + LIMIT;
    loop {
        exchange(&mut client, &mut server, 20)?;
        // Attempts go on meanwhile: one may be under way.
        let now = server.counters();
        if now.is_some_and(|now| now.refused > 0 && (now.pinned, now.registered, now.queue_pairs) == (0, 0, 0)) {
            break;
        }
        if Instant::now() > end {
            return Err(format!("the server has {now:?}").into());
        }
    }
    let state = promotion_state(&paths.command, server.child.id()).map_err(|e| format!("{e:#}"))?;
    match state {
        Some(state) if state.promoted == 0 => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}
