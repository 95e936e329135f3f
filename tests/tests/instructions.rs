//! The instructions of common calls, counted by callgrind, which gives the same count for the same path. Bounds keep a
//! change from making them longer. A bound is of the released library, so a library of another profile fails here.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::harness::{Paths, clean_environment};

/// A round of `c/instructions.c` on a link, and the most instructions that it may have, the program's own included. How
/// often a round meets a tick of the clock differs from run to run, so a bound is some 20 % above what was counted.
const ON_LINK: &[(&str, u64)] = &[
    ("send", 900),
    ("write", 900),
    ("writev", 1_600),
    ("epoll", 2_000),
    ("poll", 2_000),
];
/// The most instructions that the library may add to a write and a read that pass through.
const PASSED_ON: u64 = 60;

/// The two numbers of rounds whose difference is counted.
const ROUNDS: [u64; 2] = [1_000, 5_000];

fn main() -> ExitCode {
    let args = Arguments::from_args();
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let directory = Arc::new(tempfile::tempdir().unwrap());
    let program = compile(directory.path());
    let mut trials = Vec::new();
    for (kind, most) in ON_LINK {
        let (paths, program) = (Arc::clone(&paths), program.clone());
        trials.push(Trial::test(format!("link/{kind}"), move || {
            let count = of_a_round(Some(&paths), &program?, "link", kind)?;
            bounded(count, *most)
        }));
    }
    trials.push(Trial::test("pipe/write", move || {
        let program = program?;
        let with = of_a_round(Some(&paths), &program, "pipe", "write")?;
        let without = of_a_round(None, &program, "pipe", "write")?;
        bounded(with.saturating_sub(without), PASSED_ON)
    }));
    libtest_mimic::run(&args, trials).exit_code()
}

fn bounded(count: u64, most: u64) -> Result<(), Failed> {
    println!("{count} instructions");
    if count <= most {
        Ok(())
    } else {
        Err(format!("{count} instructions, where at most {most} are allowed").into())
    }
}

/// Compiles `c/instructions.c` into the directory.
fn compile(directory: &Path) -> Result<PathBuf, Failed> {
    let program = directory.join("instructions");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c/instructions.c");
    let output = Command::new("cc")
        .args(["-O2", "-g", "-Wall", "-Werror", "-pthread", "-Wl,-z,now", "-o"])
        .args([&program, &source])
        .output()
        .map_err(|e| format!("cc (Debian: apt install gcc libc6-dev): {e}"))?;
    if output.status.success() {
        Ok(program)
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned().into())
    }
}

/// Returns the instructions of one round, with the library of `paths`, or without one.
fn of_a_round(paths: Option<&Paths>, program: &Path, path: &str, kind: &str) -> Result<u64, Failed> {
    let [few, many] = ROUNDS.map(|rounds| total(paths, program, [path, kind, &rounds.to_string()]));
    Ok(many?.saturating_sub(few?) / (ROUNDS[1] - ROUNDS[0]))
}

/// Returns the instructions of the whole program.
fn total(paths: Option<&Paths>, program: &Path, arguments: [&str; 3]) -> Result<u64, Failed> {
    let mut command = Command::new("timeout");
    command.args(["--signal", "KILL", "100", "valgrind", "--tool=callgrind"]);
    clean_environment(&mut command);
    if let Some(paths) = paths {
        command.env("LD_PRELOAD", paths.library.as_ref()?);
    }
    let output = command
        .args(["--callgrind-out-file=/dev/null"])
        .arg(program)
        .args(arguments)
        .output()
        .map_err(|e| format!("timeout (coreutils): {e}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let counted = said.lines().find_map(|line| line.split_once("Collected : "));
    match counted.and_then(|(_, count)| count.trim().parse().ok()) {
        Some(count) if output.status.success() => Ok(count),
        _ => Err(format!(
            "valgrind (Debian: apt install valgrind) ended with {}, and said\n{said}",
            output.status
        )
        .into()),
    }
}
