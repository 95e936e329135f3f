//! The registered allocator as a malloc: `c/alloc.c` plays each case on libc's malloc, on the allocator alone, and on
//! the allocator with the library. What devices know of its memory is in `direct.rs` and `scenarios/direct_alloc.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::harness::{Paths, clean_environment};

const CASES: [&str; 7] = [
    "semantics",
    "threads",
    "handing",
    "forks",
    "memory",
    "limited",
    "limited_late",
];

/// Whose malloc it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    Libc,
    Allocator,
    Both,
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Some take much memory, and say how much there is.
    args.test_threads.get_or_insert(1);
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let mut trials = Vec::new();
    for (whose, name) in [
        (Whose::Libc, "libc"),
        (Whose::Allocator, "allocator"),
        (Whose::Both, "both"),
    ] {
        for case in CASES {
            let paths = Arc::clone(&paths);
            trials.push(Trial::test(format!("{name}/{case}"), move || play(&paths, case, whose)));
        }
    }
    let of_missing = Arc::clone(&paths);
    trials.push(Trial::test("what_is_missing_is_said", move || is_missing(&of_missing)));
    libtest_mimic::run(&args, trials).exit_code()
}

/// `c/alloc.c`, compiled once.
fn program() -> Result<&'static Path, Failed> {
    static PROGRAM: OnceLock<Result<PathBuf, Failed>> = OnceLock::new();
    static DIRECTORY: OnceLock<tempfile::TempDir> = OnceLock::new();
    let made = PROGRAM.get_or_init(|| {
        let program = DIRECTORY
            .get_or_init(|| tempfile::tempdir().unwrap())
            .path()
            .join("alloc");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c/alloc.c");
        let said = Command::new("cc")
            .args(["-O1", "-g", "-Wall", "-Werror", "-pthread"])
            .arg(source)
            .arg("-o")
            .arg(&program)
            .output()
            .map_err(|e| format!("cc (Debian: apt install gcc libc6-dev): {e}"))?;
        match said.status.success() {
            true => Ok(program),
            false => Err(String::from_utf8_lossy(&said.stderr).into_owned().into()),
        }
    });
    made.as_deref().map_err(Clone::clone)
}

fn play(paths: &Paths, case: &str, whose: Whose) -> Result<(), Failed> {
    let mut command = Command::new(program()?);
    clean_environment(&mut command);
    let both = paths.with_allocator().map_err(|e| format!("{e:#}"))?;
    match whose {
        // Its own malloc does not bear a fork past it.
        Whose::Libc => command.env("FORKED_BY_LIBC_ALONE", "1"),
        Whose::Allocator => command.env("LD_PRELOAD", both.split(':').next_back().unwrap_or_default()),
        Whose::Both => command.env("LD_PRELOAD", both).env("RDMASOCK_ALLOC", "registered"),
    };
    let said = command.arg(case).stdin(Stdio::null()).output()?;
    if said.status.success() && said.stdout.is_empty() && said.stderr.is_empty() {
        return Ok(());
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Err(format!("{}\n{}{}", said.status, text(&said.stdout), text(&said.stderr)).into())
}

/// A program with sockets, for which the allocator was asked for and is not there, runs on after one line.
fn is_missing(paths: &Paths) -> Result<(), Failed> {
    let run = |preload: &str| -> Result<String, Failed> {
        let mut command = Command::new("python3");
        clean_environment(&mut command);
        let said = command
            .env("LD_PRELOAD", preload)
            .env("RDMASOCK_ALLOC", "registered")
            .args([
                "-IS",
                "-c",
                "import socket; socket.create_server(('127.0.0.1', 0)).close(); print('done')",
            ])
            .output()?;
        assert!(said.status.success() && said.stdout == b"done\n", "{said:?}");
        Ok(String::from_utf8(said.stderr)?)
    };
    let said = run(&paths.library.as_ref()?.display().to_string())?;
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains("librdmasock_alloc.so") && said.contains("rdmasock run"),
        "{said}"
    );
    assert_eq!(run(&paths.with_allocator().map_err(|e| format!("{e:#}"))?)?, "");
    Ok(())
}
