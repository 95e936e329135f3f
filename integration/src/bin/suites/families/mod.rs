//! The suites: how each is fetched and read.

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

/// Returns all suites, in the order of the table.
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

/// Builds a CMake target from `source` in `build`.
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

/// Fetches a source package and returns its version. Of its folders and files it keeps those in `wanted`, each under
/// another name.
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

/// Returns a word of the output of `program --version`; `word` counts from 0.
fn version_of(program: &str, word: usize) -> Result<String> {
    let said = run(Command::new(program).arg("--version"))?;
    let version = said.split_whitespace().nth(word);
    Ok(version
        .with_context(|| format!("{program} tells no version"))?
        .to_owned())
}

/// Returns the cases in the lines of an output, which `case` reads. The last line for a case decides.
fn told(output: &str, case: impl Fn(&str) -> Option<(String, Outcome)>) -> Cases {
    output.lines().filter_map(case).collect()
}

/// Returns the checks of a Perl script, each named `check NUMBER`. A check marked TODO or skip counts as skipped.
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

/// Returns a Perl script as one case, and each of its checks that did not pass. Checks that pass are left out, as they
/// can be tens of thousands.
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
