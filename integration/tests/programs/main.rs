//! Unmodified programs with the library on both sides, on the server's side only, and on the client's side only. Every
//! result is checked as on kernel TCP. The counters must show promotion if both sides have the library, and no byte on
//! a link otherwise. `demo` and `bench` measure speed.
//!
//! `INTEGRATION_MODES` (a comma list of kernel, both, server-only, client-only, roce, iwarp) selects the modes. Mode
//! `kernel` runs the checks without the library. `roce` and `iwarp` have the library on both sides and links as between
//! hosts, on the local device (`core/localnic`). The logs of a failed test stay in `target/test-logs/programs/`.

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

/// Ends a test that hangs. No test takes this long, even if other programs use most of the machine.
const TIME_LIMIT: Duration = Duration::from_secs(180);

/// The sides that have the library, and the kind of local device if links are made on it.
type How = (Mode, Option<&'static str>);

/// The devices that links may be made on in place of shared memory.
const DEVICES: [&str; 2] = ["roce", "iwarp"];

/// Programs whose connections cannot be moved to the local device, with the reason. An entry is a name of a test or its
/// beginning.
const NOT_ON_DEVICE: [(&str, &str); 5] = [
    ("nginx", OTHER_USER),
    ("memcached", OTHER_USER),
    ("confined_nginx", OTHER_USER),
    ("confined_sshd", OTHER_USER),
    ("confined_vsftpd", OTHER_USER),
];
const OTHER_USER: &str = "it runs as another user, whose memory the device does not reach";

/// A test: its name and its function.
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
    // Each test runs several busy programs, so tests side by side would only wait for each other.
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
            trials.extend(modes.iter().map(|how| trial(name, *case, *how)));
        }
    }
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}

fn modes() -> Result<Vec<How>> {
    let list = std::env::var("INTEGRATION_MODES");
    let list = list.as_deref().unwrap_or("both,server-only,client-only,roce,iwarp");
    list.split(',')
        .map(|name| {
            let sides = Mode::ALL.into_iter().map(|mode| (mode.name(), (mode, None)));
            let devices = DEVICES.map(|device| (device, (Mode::Both, Some(device))));
            sides
                .chain(devices)
                .find(|(known, _)| *known == name)
                .map(|(_, how)| how)
                .with_context(|| format!("INTEGRATION_MODES: {name} is not a mode"))
        })
        .collect()
}

fn trial(name: &str, case: fn(&mut Lab) -> Result<()>, (mode, device): How) -> Trial {
    let why = NOT_ON_DEVICE
        .iter()
        .find(|(program, _)| device.is_some() && name.starts_with(program));
    let name = format!("{name}::{}", device.unwrap_or(mode.name()));
    if let Some((_, why)) = why {
        println!("skipped: {name}: {why}");
    }
    let logs = logs_dir().join(name.replace("::", "."));
    let trial = Trial::test(name, move || {
        let _ = std::fs::remove_dir_all(&logs);
        let mut lab = Lab::new(mode, Build::locate().ok(), TIME_LIMIT).map_err(failed)?;
        if let Some(device) = device {
            use_device(&mut lab, device).map_err(failed)?;
        }
        lab.log_warnings();
        // The low threshold lets a few requests suffice for a promotion.
        lab.set("RDMASOCK_PROMOTE_AFTER", "2r,16K");
        let result =
            catch_unwind(AssertUnwindSafe(|| case(&mut lab))).unwrap_or_else(|_| Err(anyhow!("the test panicked")));
        if result.is_err() {
            lab.keep_logs(&logs).map_err(failed)?;
        }
        result.map_err(failed)
    });
    trial.with_ignored_flag(why.is_some())
}

/// Makes links on the local device.
fn use_device(lab: &mut Lab, device: &str) -> Result<()> {
    let plugin = std::env::current_exe()?.with_file_name("librdmasock_localnic.so");
    lab.set("RDMASOCK_DEV_LOCAL_DEVICE", plugin.display().to_string());
    lab.set("LOCALNIC", device);
    // Port 0 makes both ends ask each other by name, as within a host.
    lab.set("RDMASOCK_CONTROL_PORT", "0");
    Ok(())
}

fn failed(error: anyhow::Error) -> Failed {
    format!("{error:#}").into()
}

/// Returns `test-logs/programs` in the target directory that this test runs from.
fn logs_dir() -> PathBuf {
    let here = std::env::current_exe().unwrap_or_default();
    let target = here.ancestors().nth(3).unwrap_or(Path::new("."));
    target.join("test-logs").join("programs")
}
