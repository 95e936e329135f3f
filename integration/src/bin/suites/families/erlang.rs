//! The tests of Erlang's gen_tcp and inet, run by Erlang's Common Test.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::kept;
use crate::case::{Cases, Job, Outcome, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::{Workshop, entry, run};

const SUITES: &[&str] = &[
    "gen_tcp_api_SUITE",
    "gen_tcp_echo_SUITE",
    "gen_tcp_misc_SUITE",
    "inet_SUITE",
    "inet_sockopt_SUITE",
    "sendfile_SUITE",
];
/// The longest of these suites runs in pieces: a group, or cases that are in no group below `FIRST`.
const LONG: &str = "gen_tcp_misc_SUITE";
const FIRST: &str = "inet_backend_default";
const PIECES: &[&str] = &[
    "ctrl_proc",
    "close",
    "active",
    "shutdown",
    "econnreset",
    "linger_zero",
    "busy_disconnect",
    "partial_recv_and_close",
    "pktoptions",
    "accept",
    "send_timeout",
    "socket_monitor",
    "case iter_max_socks",
    "case wrapping_oct",
    "case zombie_sockets",
    "case default_options http_bad_packet busy_send fill_sendq so_priority otp_7731 otp_7816 otp_8102 otp_9389 otp_12242 delay_send_error bidirectional_traffic otp_17492",
];
/// The modules that the suites call.
const HELPERS: &[&str] = &[
    "kernel_test_lib",
    "kernel_test_sys_monitor",
    "kernel_test_global_sys_monitor",
    "ts_install_cth",
];
/// A stand-in for the hook of Erlang's own build. The hook would compile C programs that these suites do not need.
const HOOK: &str = "-module(ts_install_cth).\n-export([init/2]).\ninit(_, _) -> {ok, []}.\n";

/// Erlang's test suites.
pub struct Erlang;

impl Suite for Erlang {
    fn name(&self) -> &'static str {
        "erlang"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["dpkg-dev", "erlang-base", "erlang-common-test", "erlang-dev"]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        let wanted = [
            ("lib/kernel/test", "test"),
            ("lib/kernel/src", "kernel/src"),
            ("lib/kernel/include", "kernel/include"),
        ];
        let version = kept(shop, "erlang", dir, &wanted)?;
        let tests = dir.join("test");
        fs::write(tests.join("ts_install_cth.erl"), HOOK)?;
        let sources = SUITES.iter().chain(HELPERS);
        run(Command::new("erlc")
            .arg("-I")
            .arg(dir)
            .args(sources.map(|name| format!("{name}.erl")))
            .current_dir(&tests))?;
        Ok(version)
    }

    fn parts(&self, _: &Place, _: bool) -> Result<Vec<String>> {
        let whole = SUITES.iter().filter(|suite| **suite != LONG);
        let pieces = PIECES.iter().map(|piece| format!("{LONG} {piece}"));
        Ok(pieces.chain(whole.map(|part| (*part).to_owned())).collect())
    }

    fn is_quick(&self) -> bool {
        false
    }

    fn job(&self, place: &Place, part: &str, _: Selection<'_>, _: &Path) -> Result<Job> {
        let (suite, piece) = part.split_once(' ').unwrap_or((part, ""));
        let words = ["ct_run", "-noinput", "-no_auto_compile", "-logdir", "."];
        let mut command = words.map(str::to_owned).to_vec();
        command.extend(["-suite".to_owned(), suite.to_owned(), "-dir".to_owned()]);
        command.push(place.dir.join("test").display().to_string());
        let words: Vec<&str> = piece.split_whitespace().collect();
        match words.as_slice() {
            [] => {}
            ["case", cases @ ..] => {
                select(&mut command, "-group", &[FIRST]);
                select(&mut command, "-case", cases);
            }
            groups => select(&mut command, "-group", groups),
        }
        let mut job = Job::new(command);
        // The time limit of a case is below these limits. Output goes to files, so the process is silent.
        job.silence = Duration::from_secs(900);
        job.limit = Duration::from_secs(1800);
        Ok(job)
    }

    /// Reads the log that Common Test writes for programs: `=case`, the group of the case, and `=result`.
    fn cases(&self, _: &str, _: &Ran, scratch: &Path) -> Cases {
        let mut cases = Cases::new();
        let mut name = String::new();
        for line in log(&scratch.join("tmp")).unwrap_or_default().lines() {
            let (key, value) = line.split_once(' ').unwrap_or((line, ""));
            let value = value.trim();
            let outcome = match key {
                "=case" => {
                    value.clone_into(&mut name);
                    continue;
                }
                "=group_props" => {
                    let group = value.split(['{', ',', '}']).nth(2).unwrap_or_default();
                    name = format!("{group} {name}");
                    continue;
                }
                "=result" if value.starts_with("ok") => Outcome::Passed,
                "=result" if value.contains("skipped") => Outcome::Skipped,
                "=result" => Outcome::Failed,
                _ => continue,
            };
            // In this log, functions that prepare a group are cases too.
            if !name.contains("_per_") || outcome == Outcome::Failed {
                cases.insert(name.clone(), outcome);
            }
        }
        cases
    }
}

/// Restricts ct_run to `names`.
fn select(command: &mut Vec<String>, option: &str, names: &[&str]) {
    command.push(option.to_owned());
    command.extend(names.iter().map(|name| (*name).to_owned()));
}

/// Returns the text of the log. It lies two folders below `dir`, and both have names with the time.
fn log(dir: &Path) -> Option<String> {
    let run = entry(dir, |name| name.starts_with("ct_run.")).ok()?;
    let suite = entry(&run, |name| name.ends_with(".logs")).ok()?;
    let last = entry(&suite, |name| name.starts_with("run.")).ok()?;
    fs::read_to_string(last.join("suite.log")).ok()
}
