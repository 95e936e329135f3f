//! No thread sleeps on when its event has come, no wait reports an unregistered event, and a child of a fork reads only
//! the program's bytes, wherever another thread is held up. The scenarios `wakes_…` run with a library whose threads
//! are held up at one point after the other (`shims/src/sys/points.rs`). The differential suite plays them without
//! that.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::ctx::Side;
use rdmasock_tests::harness::{Mode, Paths, References, describe, difference, play};
use rdmasock_tests::scenarios;

/// The points, as they are named in the library.
const POINTS: &[&str] = &[
    "activate: the kernel's set has the doorbell",
    "activate: the set is active",
    "answer: no other process has it",
    "epoll alone: holds the set",
    "epoll alone: is about to sleep",
    "epoll alone: is awake",
    "epoll alone: the set is not active",
    "epoll: is about to sleep",
    "epoll: is awake",
    "epoll: nothing was there",
    "epoll: says that it sleeps",
    NODELAY,
    "hand back: neither set has the socket",
    "interest: it is known whom the peer is to tell",
    "interest: the peer is to tell nobody",
    "nested: a new epoch has begun",
    "notify: it is known whom",
    NUMBER,
    "poll: is about to sleep",
    "poll: is awake",
    "poll: is not told any more",
    "poll: it is seen what is the kernel's",
    "poll: sleeps on what is ours",
    "readable: is about to look",
    "receive: is about to sleep in the kernel",
    "receive: is awake",
    "take over: both sets have the socket",
    "take over: the kernel's set has it no more",
    "unwatch: sets have been told",
    "unwatch: the socket is the kernel's, and nobody knows",
    "wait: is about to sleep",
    "wait: is awake",
    "wait: the peer knows of the sleeper",
    "watch: pollers have been told",
    "watch: the socket is ours, and nobody knows",
    "writable: markers are out",
];

/// The point whose scenario tests TCP_NODELAY, not a wake-up.
const NODELAY: &str = "flush: TCP_NODELAY is on for a moment";

/// The point whose fabric matters: on a device no message comes before the engine knows the number.
const NUMBER: &str = "opened: the peer's number is not known";

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // A run sleeps most of its time.
    args.test_threads.get_or_insert(8);
    let mut paths = Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario")));
    paths.library = library();
    let paths = Arc::new(paths);
    let references = Arc::new(References::default());
    let trials = POINTS.iter().map(|point| {
        let (paths, references) = (Arc::clone(&paths), Arc::clone(&references));
        Trial::test(*point, move || hold(&paths, &references, point))
    });
    libtest_mimic::run(&args, trials.collect()).exit_code()
}

/// The library with points.
fn library() -> Result<PathBuf, String> {
    let path = std::env::var_os("RDMASOCK_POINTS_LIBRARY").map_or_else(
        || {
            let profiles = Path::new(env!("CARGO_BIN_EXE_scenario")).ancestors().nth(2);
            profiles.unwrap_or(Path::new(".")).join("points/librdmasock.so")
        },
        PathBuf::from,
    );
    path.canonicalize().map_err(|e| {
        format!(
            "no library with points at {} ({e}): build it with `cargo build --profile points -p rdmasock --features \
             points`, or set RDMASOCK_POINTS_LIBRARY",
            path.display()
        )
    })
}

/// Plays every scenario with threads held up at one point, which some of them reach.
fn hold(paths: &Paths, references: &References, point: &str) -> Result<(), Failed> {
    if let Err(why) = &paths.library {
        return Err(why.into());
    }
    let dir = tempfile::tempdir()?;
    let reached = dir.path().join("reached");
    let mut failures = Vec::new();
    let mut played = scenarios::all();
    played.retain(|scenario| {
        if point == NODELAY {
            scenario.name == "told_options_nodelay_at_a_promotion"
        } else {
            scenario.name.starts_with("wakes_")
        }
    });
    for scenario in &mut played {
        // Without spinning, threads reach the point where they sleep before the library has asked about a promotion.
        scenario.env = vec![
            ("RDMASOCK_SPIN_US", "0".into()),
            ("POINTS_REACHED", reached.to_string_lossy().into()),
        ];
        let kernel = references
            .get(paths, scenario)
            .map_err(|e| Failed::from(format!("on kernel TCP: {e}")))?;
        let differs = scenarios::differs_between_hosts(&scenario.name).is_some();
        let modes: &[Mode] = match point {
            NUMBER if !differs => &[Mode::Both, Mode::Roce, Mode::Iwarp],
            _ => &[Mode::Both],
        };
        for (side, mode) in Side::ALL
            .into_iter()
            .flat_map(|side| modes.iter().map(move |mode| (side, *mode)))
        {
            scenario.held = Some((side, point.into()));
            let name = format!("{}/{} with the {} held up", mode.name(), scenario.name, side.name());
            match play(paths, scenario, mode) {
                Err(e) => failures.push(format!("{name}: {e:#}")),
                Ok(other) => {
                    if let Some(text) = difference(&kernel, &other) {
                        let run = describe(&other);
                        failures.push(format!("{name}: {text}\nthe run:\n{run}"));
                    }
                }
            }
        }
    }
    let reached = std::fs::read_to_string(&reached)?;
    let reached: BTreeSet<&str> = reached.lines().collect();
    if !reached.contains(point) {
        failures.push("no scenario comes to this point".into());
    }
    let others = reached.iter().filter(|p| !POINTS.contains(p));
    failures.extend(others.map(|p| format!("{p:?} is not in the list")));
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures.join("\n").into())
    }
}
