//! Scenarios whose processes get no more memory for the library's heap from one mapping on, or miss one mapping. The
//! tests use each number of that mapping, with a library that refuses it (`core/src/os/heap.rs`). Transcripts must be
//! those of kernel TCP; the connection may be promoted or not.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::environment::{Environment, Outcome};
use rdmasock_tests::harness::{Mode, Paths, References, describe, difference, play_in};
use rdmasock_tests::scenarios;

/// Mappings that are refused, one after the other. Most processes of these scenarios need fewer.
const MAPPINGS: u32 = 14;

/// Scenarios that need most of the library's memory, and each kind of object.
const PLAYED: &[&str] = &[
    "echo_basic",
    "echo_large_both_ways",
    "epoll_level",
    "poll_select",
    "fds_dup2_over",
    "close_unread_data",
    "process_fork_child_then_parent",
    "threads_four_receivers",
];

/// Scenarios that are played between hosts too.
const ON_DEVICE: &[&str] = &["echo_large_both_ways", "epoll_level"];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(4);
    let mut paths = Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario")));
    paths.library = library();
    let paths = Arc::new(paths);
    let references = Arc::new(References::default());
    let mut trials = Vec::new();
    for number in 1..=MAPPINGS {
        for refused in [format!("{number}"), format!("{number}+")] {
            let (paths, references) = (Arc::clone(&paths), Arc::clone(&references));
            let name = format!("heap_refuses/{refused}");
            trials.push(Trial::test(name, move || refuse(&paths, &references, &refused)));
        }
    }
    libtest_mimic::run(&args, trials).exit_code()
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
            "no library with points at {} ({e}): see CONTRIBUTING.md",
            path.display()
        )
    })
}

fn refuse(paths: &Paths, references: &References, refused: &str) -> Result<(), Failed> {
    if let Err(why) = &paths.library {
        return Err(why.into());
    }
    let environment = Environment {
        name: "no memory",
        before: Vec::new(),
        inside: Vec::new(),
        listening: Vec::new(),
        outcome: Outcome::Any,
    };
    let mut failures = Vec::new();
    let mut played = scenarios::all();
    played.retain(|scenario| PLAYED.contains(&scenario.name.as_str()));
    for scenario in &mut played {
        scenario.env.push(("HEAP_REFUSES", refused.to_owned()));
        let kernel = references.get(paths, scenario)?;
        let modes: &[Mode] = match ON_DEVICE.contains(&scenario.name.as_str()) {
            true => &[Mode::Both, Mode::Roce],
            false => &[Mode::Both],
        };
        for mode in modes {
            let name = format!("{}/{}", mode.name(), scenario.name);
            match play_in(Some(&environment), paths, scenario, *mode) {
                Err(e) => failures.push(format!("{name}: {e:#}")),
                Ok(other) => {
                    if let Some(text) = difference(&kernel, &other) {
                        failures.push(format!("{name}: {text}\nthe run:\n{}", describe(&other)));
                    }
                }
            }
        }
    }
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures.join("\n").into())
    }
}
