//! The `rdmasock` command: runs programs with the library, and shows their connections.
//!
//! Each subcommand has a file of its own. This file parses the command line, and prints an error as one message. The
//! exit status is 1 for a failure and 2 for a wrong command line.

#![warn(unreachable_pub)]

mod elf;
mod run;
mod stat;

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Moves the TCP connections of unmodified programs onto shared memory or RDMA.
#[derive(Debug, Parser)]
#[command(name = "rdmasock", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a program with the library
    Run(run::Options),
    /// Show running programs, their links and connections
    Stat(stat::Options),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(options) => run::run(&options),
        Command::Stat(options) => stat::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // A reader such as `head` may close the pipe early.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rdmasock: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
    })
}
