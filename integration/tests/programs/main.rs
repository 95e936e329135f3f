//! Unmodified programs with the library on both sides, on the server's only and on the client's
//! only. Every result is checked as on kernel TCP; the counters must show promotion in the first
//! case and not one byte on a link in the others. Speed is the business of `demo` and `bench`.
//!
//! `INTEGRATION_MODES` (a comma list of kernel, both, server-only, client-only) selects the modes;
//! `kernel` runs the checks without the library at all. The logs of a failed test stay in
//! `target/test-logs/programs/`.

mod confined;
mod nginx;
mod node;
mod python;
mod redis;
mod streams;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_integration::lab::{Build, Lab, Mode};
use rdmasock_integration::signals;

/// Longer than any of them takes on a machine of which others take most; a hang ends here.
const TIME_LIMIT: Duration = Duration::from_secs(180);

/// A test: its name and what it does.
type Case = (&'static str, fn(&mut Lab) -> Result<()>);

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("programs: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    signals::catch()?;
    signals::raise_nofile()?;
    let mut arguments = Arguments::from_args();
    // Each test runs several busy programs: side by side they would only wait for each other.
    arguments.test_threads.get_or_insert(1);
    let modes = modes()?;
    let mut trials = Vec::new();
    for cases in [
        redis::CASES,
        nginx::CASES,
        streams::CASES,
        python::CASES,
        node::CASES,
        confined::CASES,
    ] {
        for (name, case) in cases {
            trials.extend(modes.iter().map(|mode| trial(name, *case, *mode)));
        }
    }
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}

fn modes() -> Result<Vec<Mode>> {
    let list = std::env::var("INTEGRATION_MODES");
    let list = list.as_deref().unwrap_or("both,server-only,client-only");
    list.split(',')
        .map(|name| {
            Mode::ALL
                .into_iter()
                .find(|mode| mode.name() == name)
                .with_context(|| format!("INTEGRATION_MODES: {name} is not a mode"))
        })
        .collect()
}

fn trial(name: &str, case: fn(&mut Lab) -> Result<()>, mode: Mode) -> Trial {
    let name = format!("{name}::{}", mode.name());
    let logs = logs_dir().join(name.replace("::", "."));
    Trial::test(name, move || {
        let _ = std::fs::remove_dir_all(&logs);
        let mut lab = Lab::new(mode, Build::locate().ok(), TIME_LIMIT).map_err(failed)?;
        lab.log_warnings();
        // Soon, so that a few requests are enough for a test.
        lab.set("RDMASOCK_PROMOTE_AFTER", "2r,16K");
        let result =
            catch_unwind(AssertUnwindSafe(|| case(&mut lab))).unwrap_or_else(|_| Err(anyhow!("the test panicked")));
        if result.is_err() {
            lab.keep_logs(&logs).map_err(failed)?;
        }
        result.map_err(failed)
    })
}

fn failed(error: anyhow::Error) -> Failed {
    format!("{error:#}").into()
}

/// `test-logs/programs` in the target directory that this test runs from.
fn logs_dir() -> PathBuf {
    let here = std::env::current_exe().unwrap_or_default();
    let target = here.ancestors().nth(3).unwrap_or(Path::new("."));
    target.join("test-logs").join("programs")
}
