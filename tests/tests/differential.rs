//! The differential suite: every scenario in every mode, with links within a host and as between hosts, each side's
//! transcript compared with the one on kernel TCP. `differential kernel/` runs the reference alone.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::harness::{Mode, Paths, References, describe, difference, play};
use rdmasock_tests::scenarios;
use rdmasock_tests::scenarios::Scenario;

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Scenarios are two processes each, and some use a core for each; but most of the time they wait.
    args.test_threads.get_or_insert(5);
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let references = Arc::new(References::default());
    let is_root = nix::unistd::geteuid().is_root();
    let mut trials = Vec::new();
    for scenario in scenarios::all() {
        let scenario = Arc::new(scenario);
        let devices = scenario.modes.contains(&Mode::Both).then_some(Mode::DEVICES);
        for mode in scenario.modes.iter().copied().chain(devices.into_iter().flatten()) {
            let (paths, references) = (Arc::clone(&paths), Arc::clone(&references));
            let played = Arc::clone(&scenario);
            let name = format!("{}/{}", mode.name(), scenario.name);
            let why = mode.device().and_then(|_| why_left_out(&scenario.name, mode));
            let is_left_out = why.is_some() || scenario.for_root && !is_root;
            let trial = Trial::test(name, move || run(&paths, &references, &played, mode));
            trials.push(trial.with_ignored_flag(is_left_out));
        }
    }
    // The order is mixed, so that the scenarios of a family that wait, or use all cores, do not run together. The mix
    // is the same each time.
    trials.sort_by_cached_key(|trial| {
        let mut hasher = DefaultHasher::new();
        trial.name().hash(&mut hasher);
        hasher.finish()
    });
    if !args.ignored && !args.include_ignored {
        for (name, why) in scenarios::DIFFERS_BETWEEN_HOSTS {
            println!("skipped: roce/{name}, iwarp/{name}: {why}");
        }
        println!("skipped: half of the others in one of the two, for they are played in the other");
        for scenario in scenarios::all().iter().filter(|s| s.for_root && !is_root) {
            println!("skipped: {}: only root may make its network namespaces", scenario.name);
        }
    }
    libtest_mimic::run(&args, trials).exit_code()
}

/// Returns why a scenario is not played between hosts in this mode unless it is asked for; `None` if it is played.
fn why_left_out(name: &str, mode: Mode) -> Option<&'static str> {
    if let Some(why) = scenarios::differs_between_hosts(name) {
        return Some(why);
    }
    let mut both_ways = scenarios::BETWEEN_HOSTS_BOTH_WAYS.iter();
    let at = name.bytes().fold(0, u8::wrapping_add) as usize % Mode::DEVICES.len();
    let is_its_turn = Mode::DEVICES.get(at) == Some(&mode);
    (!is_its_turn && !both_ways.any(|family| name.starts_with(family))).then_some("played in the other way")
}

fn run(paths: &Paths, references: &References, scenario: &Scenario, mode: Mode) -> Result<(), Failed> {
    if mode != Mode::Kernel
        && let Err(why) = &paths.library
    {
        return Err(why.into());
    }
    let kernel = references
        .get(paths, scenario)
        .map_err(|e| Failed::from(format!("on kernel TCP: {e}")))?;
    if mode == Mode::Kernel {
        return Ok(());
    }
    let other = play(paths, scenario, mode).map_err(|e| Failed::from(format!("{e:#}")))?;
    match difference(&kernel, &other) {
        None => Ok(()),
        Some(text) => Err(format!("{text}\nthe run:\n{}", describe(&other)).into()),
    }
}
