//! Scenarios of the differential suite with both sides in an environment: limits, locked memory, small stacks, filters
//! of system calls, another root, user or cgroup. Each side's transcript, output and exit status must be those on
//! kernel TCP in the same environment. The connection is promoted, or stays on TCP for the reason that the environment
//! names.
//!
//! `tests/environments.rs` tests changes in the middle of a connection.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::environment::cgroup::Cgroup;
use rdmasock_tests::environment::{Environment, Outcome};
use rdmasock_tests::harness::{Mode, Paths, References, describe, difference, play_in};
use rdmasock_tests::scenarios;
use rdmasock_tests::scenarios::Scenario;

/// Scenarios for all environments: they finish soon, and together use a connection in most ways.
const EVERYWHERE: &[&str] = &[
    "echo_basic",
    "echo_many_short",
    "calls_send_forms",
    "calls_vectors",
    "flags_peek",
    "flags_dontwait",
    "flags_trunc",
    "close_half_by_client",
    "close_unread_data",
    "close_reset_keeps_received",
    "epoll_level",
    "epoll_edge",
    "epoll_more_two_epolls",
    "poll_odd_fds",
    "poll_select",
    "fds_dup2_over",
    "options_identity",
];

/// Scenarios that need further processes or threads: not played where the filter forbids a program to make them.
const WITH_OTHERS: &[&str] = &[
    "echo_large_both_ways",
    "close_killed_sending",
    "process_fork_child_then_parent",
    "process_fork_per_connection",
    "threads_four_receivers",
    "threads_send_and_receive",
    "epoll_oneshot_threads",
];

/// A row of the matrix.
struct Row {
    environment: Environment,
    /// Whether only root can enter the environment.
    for_root: bool,
    has_others: bool,
}

impl Row {
    fn new(name: &'static str) -> Self {
        Self {
            environment: Environment {
                name,
                before: Vec::new(),
                inside: Vec::new(),
                listening: Vec::new(),
                outcome: Outcome::Promoted,
            },
            for_root: false,
            has_others: true,
        }
    }

    fn before(mut self, words: &[&str]) -> Self {
        self.environment.before = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    fn inside(mut self, words: &[&str]) -> Self {
        self.environment.inside = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    fn listening(mut self, words: &[&str]) -> Self {
        self.environment.listening = words.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    fn unknown(mut self) -> Self {
        self.environment.outcome = Outcome::Unknown;
        self
    }

    fn plain(mut self, reason: &'static str) -> Self {
        self.environment.outcome = Outcome::Plain(reason);
        self
    }

    fn for_root(mut self) -> Self {
        self.for_root = true;
        self
    }

    fn alone(mut self) -> Self {
        self.has_others = false;
        self
    }
}

/// Bytes of memory for both sides of all scenarios that run at a time.
const MEMORY: u64 = 256 << 20;
const OWN_ROOT: &str = "root of its own:{dir}/{side}-root:{program}:{library}:{dir}";
const NO_ROOM: &str = "arena full";
const CONFINED: &str = "the program restricts its system calls";

/// Signals by which an environment ends a process: SIGILL, SIGABRT, SIGBUS, SIGSEGV, SIGXFSZ, SIGSYS.
const DEADLY: &[&str] = &[
    "signal 4",
    "signal 6",
    "signal 7",
    "signal 11",
    "signal 25",
    "signal 31",
];

fn rows(cgroup: Option<&Cgroup>) -> Vec<Row> {
    let mut rows = vec![
        Row::new("address_space").before(&["address space:3221225472"]),
        Row::new("open_files").inside(&["open files:64"]),
        Row::new("file_size").before(&["file size:0"]).unknown(),
        Row::new("locked_memory").inside(&["locked memory:67108864", "lock memory"]),
        Row::new("all_memory_locked").inside(&["locked memory:67108864", "lock all memory"]),
        // Less than the library needs at its start. Root's memory is not counted.
        Row::new("little_locked_memory")
            .before(&["locked memory:8388608", OWN_ROOT, "nobody"])
            .inside(&["lock memory"])
            .for_root()
            .unknown()
            .alone(),
        Row::new("small_stacks")
            .before(&["stack:262144", "small stacks"])
            .inside(&["small stacks"]),
        Row::new("full_shared_memory")
            .before(&["full shared memory"])
            .for_root(),
        Row::new("no_memfds").before(&["no memfds"]).unknown(),
        Row::new("no_memory_to_share")
            .before(&["no memory to share"])
            .plain(NO_ROOM),
        Row::new("no_threads")
            .before(&["no threads"])
            .plain("out of memory or file descriptors")
            .alone(),
        Row::new("nobody").before(&[OWN_ROOT, "nobody"]).for_root(),
        Row::new("becomes_nobody").inside(&["nobody"]).for_root(),
        Row::new("own_root").before(&[OWN_ROOT]).for_root(),
        Row::new("read_only_root").before(&["read-only root:{dir}"]).for_root(),
        Row::new("system_service_before_start").before(&["system service"]),
        Row::new("system_service").inside(&["system service:all threads"]),
        Row::new("system_service_when_listening").listening(&["system service:all threads"]),
        Row::new("worker").inside(&["worker:all threads"]).unknown().alone(),
        Row::new("worker_when_listening")
            .listening(&["worker"])
            .plain(CONFINED)
            .alone(),
    ];
    if let Some(cgroup) = cgroup {
        rows.push(Row::new("memory_cgroup").before(&[&cgroup.word()]));
    }
    rows
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Scenarios spend more time waiting for each other than working.
    args.test_threads.get_or_insert(4);
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let references = Arc::new(References::default());
    let scenarios: Vec<_> = scenarios::all().into_iter().map(Arc::new).collect();
    let named = |name: &&str| -> Arc<Scenario> {
        let found = scenarios.iter().find(|scenario| scenario.name == *name);
        Arc::clone(found.unwrap_or_else(|| panic!("no scenario {name}")))
    };
    let mut trials = Vec::new();
    let cgroup = Cgroup::with_memory(MEMORY);
    if let Err(why) = &cgroup {
        trials.push(Trial::test("memory_cgroup", || Ok(())).with_ignored_flag(true));
        println!("skipped: memory_cgroup: {why}");
    }
    for row in rows(cgroup.as_ref().ok()) {
        let others = if row.has_others { WITH_OTHERS } else { &[] };
        let row = Arc::new(row);
        for scenario in EVERYWHERE.iter().chain(others).map(named) {
            let (paths, references, row) = (paths.clone(), references.clone(), row.clone());
            let name = format!("{}/{}", row.environment.name, scenario.name);
            trials.push(Trial::test(name, move || run(&paths, &references, &scenario, &row)));
        }
    }
    libtest_mimic::run(&args, trials).exit_code()
}

fn run(paths: &Paths, references: &References, scenario: &Scenario, row: &Row) -> Result<(), Failed> {
    if row.for_root && !nix::unistd::geteuid().is_root() {
        println!("skipped: only root may be in {}", row.environment.name);
        return Ok(());
    }
    let environment = Some(&row.environment);
    let kernel = references
        .get_in(environment, paths, scenario)
        .map_err(|e| Failed::from(format!("on kernel TCP: {e}")))?;
    // If the scenario itself cannot be played in an environment, the comparison shows nothing.
    if [&kernel.server, &kernel.client]
        .iter()
        .any(|side| DEADLY.contains(&side.exit.as_str()))
    {
        return Err(format!("killed on kernel TCP:\n{}", describe(&kernel)).into());
    }
    let other = play_in(environment, paths, scenario, Mode::Both).map_err(|e| Failed::from(format!("{e:#}")))?;
    match difference(&kernel, &other) {
        None => Ok(()),
        Some(text) => Err(format!("{text}\nthe run:\n{}", describe(&other)).into()),
    }
}
