//! The suites, by how they are fetched and read.

mod libevent;
mod libuv;
mod memcached;
mod node;
mod postgresql;
mod python;
mod redis;
mod stress;

use std::path::Path;

use anyhow::Result;

use crate::case::{Cases, Outcome, Suite};
use crate::workshop::run;

/// All of them, in the order of the table.
pub fn all() -> Vec<Box<dyn Suite>> {
    let mut suites = python::all();
    suites.push(Box::new(redis::Redis));
    suites.push(Box::new(libuv::Libuv));
    suites.push(Box::new(libevent::Libevent));
    suites.push(Box::new(node::Node));
    suites.push(Box::new(memcached::Memcached));
    suites.push(Box::new(postgresql::Postgresql));
    suites.push(Box::new(stress::Stress));
    suites
}

/// Builds a target with CMake from `source` in `build`.
fn cmake(source: &Path, build: &Path, options: &[&str], target: &str) -> Result<()> {
    use std::process::Command;
    run(Command::new("cmake")
        .arg("-S")
        .arg(source)
        .arg("-B")
        .arg(build)
        .args(options))?;
    run(Command::new("cmake")
        .arg("--build")
        .arg(build)
        .args(["--target", target, "-j", "2"]))?;
    Ok(())
}

/// The checks of a Perl script, by number and what they are called.
fn tap(output: &str) -> Cases {
    let mut cases = Cases::new();
    for line in output.lines() {
        let (outcome, rest) = match (line.strip_prefix("ok "), line.strip_prefix("not ok ")) {
            (Some(rest), _) => (Outcome::Passed, rest),
            (_, Some(rest)) => (Outcome::Failed, rest),
            _ => continue,
        };
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let expected = rest.contains("# TODO") || rest.to_lowercase().contains("# skip");
        let outcome = if expected { Outcome::Skipped } else { outcome };
        if !number.is_empty() {
            cases.insert(format!("check {number}"), outcome);
        }
    }
    cases
}
