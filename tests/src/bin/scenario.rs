//! Plays one scenario: one side of it (as the harness calls it), or both (by hand).
//!
//! `scenario --name X [--mode M] [--repeat N]` runs both sides and prints the transcripts, and
//! the difference from kernel TCP; `scenario --name X --side server --dir D` plays one side.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rdmasock_tests::ctx::{Ctx, Side};
use rdmasock_tests::harness::{Mode, Paths};
use rdmasock_tests::scenarios::{Scenario, helper};
use rdmasock_tests::{environment, harness, scenarios, storm};

/// Plays a scenario of the differential suite.
#[derive(Parser)]
struct Args {
    /// The scenario, or `list`, or `all` (both sides only).
    #[arg(long)]
    name: String,
    /// Play only this side; the other side is started in the same way, with the same --dir.
    #[arg(long, requires = "dir")]
    side: Option<Side>,
    /// A directory for the run's transcripts and its barrier, empty or not yet there.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// A harness watches: wait in the warm-up until the harness has seen the promotion.
    #[arg(long)]
    observed: bool,
    /// An environment that the side enters before it makes a socket: see `environment::enter`.
    #[arg(long)]
    enter: Vec<String>,
    /// An environment that the side enters when its listener listens, or before it connects.
    #[arg(long)]
    enter_listening: Vec<String>,
    /// Play the side in a storm of signals.
    #[arg(long)]
    storm: bool,
    /// Which sides get the library, when both are played.
    #[arg(long, value_enum, default_value = "kernel")]
    mode: Mode,
    /// Play the scenario that often and compare the runs.
    #[arg(long, default_value_t = 1)]
    repeat: u32,
}

fn main() -> ExitCode {
    // An exec scenario runs this binary as its program: `scenario helper <what> …`.
    let words: Vec<String> = std::env::args().collect();
    if words.get(1).is_some_and(|w| w == "helper") {
        return helper::main(&words[2..]);
    }
    let args = Args::parse();
    let all = scenarios::all();
    if args.name == "list" {
        for s in &all {
            println!("{}", s.name);
        }
        return ExitCode::SUCCESS;
    }
    let chosen: Vec<&Scenario> = all
        .iter()
        .filter(|s| args.name == "all" || s.name == args.name)
        .collect();
    if chosen.is_empty() {
        eprintln!("no scenario {}; `--name list` prints them", args.name);
        return ExitCode::FAILURE;
    }
    match (args.side, &args.dir) {
        (Some(side), Some(dir)) => {
            std::fs::create_dir_all(dir).unwrap();
            rdmasock_tests::scenarios::behave_like_a_c_program();
            let mut ctx = Ctx::meet(side, dir, chosen[0].param, args.observed);
            for word in &args.enter {
                environment::enter(word).ok();
            }
            ctx.when_listening = args.enter_listening;
            if args.storm {
                storm::begin();
            }
            (chosen[0].run)(&ctx);
            assert!(!args.storm || storm::has_blown(), "no signal has come");
            ExitCode::SUCCESS
        }
        _ => both(&chosen, &args),
    }
}

/// Plays both sides and prints what happened.
fn both(chosen: &[&Scenario], args: &Args) -> ExitCode {
    let paths = Paths::find(&std::env::current_exe().unwrap());
    let mut failed = 0;
    for scenario in chosen {
        let kernel = harness::play(&paths, scenario, Mode::Kernel);
        for run in 0..args.repeat {
            let other = harness::play(&paths, scenario, args.mode);
            let verdict = match (&kernel, &other) {
                (Ok(k), Ok(o)) => harness::difference(k, o),
                (Err(e), _) | (_, Err(e)) => Some(format!("{e:#}\n")),
            };
            if let (1, Ok(o)) = (chosen.len(), &other) {
                println!("{}", harness::describe(o));
            }
            if let Some(text) = verdict {
                failed += 1;
                println!("{} run {run}: differs from kernel TCP\n{text}", scenario.name);
            }
        }
    }
    println!("{failed} runs differ");
    if failed > 0 {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
