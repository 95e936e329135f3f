//! The registered allocator as a malloc: `c/alloc.c` plays each case on libc's malloc, on the allocator alone, and on
//! the allocator with the library. `direct.rs` and `scenarios/direct_alloc.rs` test its registrations with devices.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::harness::{Paths, clean_environment};
use rdmasock_tests::observe::count;

const CASES: [&str; 7] = [
    "semantics",
    "threads",
    "handing",
    "forks",
    "memory",
    "limited",
    "limited_late",
];

/// The malloc that a case runs on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    Libc,
    Allocator,
    Both,
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Some cases take much memory, and measure how much there is.
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
    for device in ["roce", "iwarp"] {
        let paths = Arc::clone(&paths);
        let name = format!("python_exchanges_arrays/{device}");
        trials.push(Trial::test(name, move || exchange(&paths, device)));
    }
    let of_git = Arc::clone(&paths);
    trials.push(Trial::test("git_makes_a_repository", move || git(&of_git)));
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
        // libc's own malloc does not survive a fork that bypasses it.
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

/// A process, killed if it still runs when this is dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Unmodified Python programs that send arrays to each other, whose sums agree. Devices keep the registration of
/// their memory from step to step.
fn exchange(paths: &Paths, device: &str) -> Result<(), Failed> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../integration/tensors/exchange.py");
    let both = paths.with_allocator().map_err(|e| format!("{e:#}"))?;
    let start = |words: &[&str]| -> Result<(Killed, BufReader<ChildStdout>), Failed> {
        let mut command = Command::new("python3");
        clean_environment(&mut command);
        let mut child = command
            .env("LD_PRELOAD", &both)
            .env("RDMASOCK_ALLOC", "registered")
            .env("RDMASOCK_ZCOPY_MIN", "128K")
            .env("RDMASOCK_DEV_LOCAL_DEVICE", &paths.device)
            .env("LOCALNIC", device)
            .env("RDMASOCK_CONTROL_PORT", "0")
            .env("RDMASOCK_PROMOTE_AFTER", "2r,16K")
            .arg("-IS")
            .arg(&script)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().unwrap());
        Ok((Killed(child), lines))
    };
    let line = |from: &mut BufReader<ChildStdout>| -> Result<String, Failed> {
        let mut line = String::new();
        from.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    };
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let (server, mut of_server) = start(&["server", "1.5", "20"])?;
        let port = line(&mut of_server)?;
        let (client, mut of_client) = start(&["client", "1.5", "20", &port])?;
        for lines in [&mut of_server, &mut of_client] {
            let said = line(lines)?;
            assert!(said.starts_with("{\"seconds\""), "{said:?}");
        }
        let kept = [&server, &client].map(|end| count(&paths.command, end.0.id(), "alloc_hits"));
        let kept: u64 = kept.into_iter().map(|hits| hits.ok().flatten().unwrap_or(0)).sum();
        if kept > 0 {
            return Ok(());
        }
        // On a machine that has much else to do, no reader may have waited.
        assert!(
            Instant::now() < end,
            "nothing was sent from memory that the device knew"
        );
    }
}

/// Runs git on the allocator: it has threads, children and files that it maps.
fn git(paths: &Paths) -> Result<(), Failed> {
    let directory = tempfile::tempdir()?;
    let both = paths.with_allocator().map_err(|e| format!("{e:#}"))?;
    std::fs::write(directory.path().join("large"), "0123456789".repeat(400_000))?;
    for words in [
        "init --quiet",
        "add large",
        "-c user.name=a -c user.email=a commit --quiet --message=b",
        "repack -a -d --quiet --threads=4",
        "fsck --full --strict --no-progress",
        "clone --quiet . clone",
    ] {
        let mut command = Command::new("git");
        clean_environment(&mut command);
        let said = command
            .current_dir(directory.path())
            .env("LD_PRELOAD", &both)
            .env("RDMASOCK_ALLOC", "registered")
            .args(words.split(' '))
            .output()?;
        assert!(said.status.success(), "git {words}: {said:?}");
    }
    Ok(())
}

/// A program with sockets, where the allocator was requested and is missing, runs on after one line.
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
