//! The suites, by how they are fetched and read.

mod curl;
mod erlang;
mod libevent;
mod libuv;
mod memcached;
mod node;
mod perl;
mod php;
mod postgresql;
mod python;
mod redis;
mod ruby;
mod stress;

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::case::{Cases, Outcome, Suite};
use crate::sandbox::Ran;
use crate::workshop::{Workshop, run};

/// All of them, in the order of the table.
pub fn all() -> Vec<Box<dyn Suite>> {
    let mut suites = python::all();
    suites.push(Box::new(redis::Redis));
    suites.push(Box::new(libuv::Libuv));
    suites.push(Box::new(libevent::Libevent));
    suites.push(Box::new(node::Node));
    suites.push(Box::new(memcached::Memcached));
    for suite in postgresql::ALL {
        suites.push(Box::new(suite));
    }
    suites.push(Box::new(curl::Curl));
    suites.push(Box::new(erlang::Erlang));
    suites.push(Box::new(ruby::Ruby));
    suites.push(Box::new(perl::Perl));
    suites.push(Box::new(php::Php));
    suites.push(Box::new(stress::Stress));
    suites
}

/// Builds a target with CMake from `source` in `build`.
fn cmake(source: &Path, build: &Path, options: &[&str], target: &str) -> Result<()> {
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

/// Fetches a source package, keeps these of its folders and files, each under another name, and returns its version.
fn kept(shop: &Workshop, package: &str, dir: &Path, wanted: &[(&str, &str)]) -> Result<String> {
    let (source, version) = shop.source(package, dir)?;
    for (path, name) in wanted {
        let to = dir.join(name);
        if let Some(above) = to.parent() {
            fs::create_dir_all(above)?;
        }
        fs::rename(source.join(path), to).with_context(|| format!("{package} has no {path}"))?;
    }
    fs::remove_dir_all(source)?;
    Ok(version)
}

/// A word of what a program says of its version, counted from 0.
fn version_of(program: &str, word: usize) -> Result<String> {
    let said = run(Command::new(program).arg("--version"))?;
    let version = said.split_whitespace().nth(word);
    Ok(version
        .with_context(|| format!("{program} tells no version"))?
        .to_owned())
}

/// The cases that lines of an output tell of, as `case` reads them. What is told last of a case stands.
fn told(output: &str, case: impl Fn(&str) -> Option<(String, Outcome)>) -> Cases {
    output.lines().filter_map(case).collect()
}

/// The checks of a Perl script, by number and what they are called.
fn tap(output: &str) -> Cases {
    told(output, |line| {
        let (outcome, rest) = match (line.strip_prefix("ok "), line.strip_prefix("not ok ")) {
            (Some(rest), _) => (Outcome::Passed, rest),
            (_, Some(rest)) => (Outcome::Failed, rest),
            _ => return None,
        };
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let expected = rest.contains("# TODO") || rest.to_lowercase().contains("# skip");
        let outcome = if expected { Outcome::Skipped } else { outcome };
        (!number.is_empty()).then(|| (format!("check {number}"), outcome))
    })
}

/// A Perl script as the one case that it is, and each of its checks that fails. Those that pass can be tens of
/// thousands.
fn script_cases(ran: &Ran) -> Cases {
    let mut cases = tap(&ran.output);
    cases.retain(|_, outcome| *outcome != Outcome::Passed);
    let is_skipped = cases.is_empty() && ran.output.lines().any(|line| line.starts_with("1..0"));
    let outcome = match is_skipped {
        true => Outcome::Skipped,
        false => ran.end.outcome(),
    };
    cases.insert("the script".to_owned(), outcome);
    cases
}
