//! libevent's regression tests, on each of its backends.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::cmake;
use crate::case::{Cases, Job, Outcome, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::{Workshop, run};

/// The backends, each with the variables that forbid the other ones.
const BACKENDS: &[(&str, &[&str])] = &[
    ("epoll", &["EVENT_NOPOLL", "EVENT_NOSELECT"]),
    ("poll", &["EVENT_NOEPOLL", "EVENT_NOSELECT"]),
    ("select", &["EVENT_NOEPOLL", "EVENT_NOPOLL"]),
];

/// The groups for CI.
const CI: &[&str] = &["bufferevent", "listener", "et"];

/// libevent's test suite.
pub struct Libevent;

impl Suite for Libevent {
    fn name(&self) -> &'static str {
        "libevent"
    }

    fn packages(&self) -> &'static [&'static str] {
        &[
            "build-essential",
            "dpkg-dev",
            "cmake",
            "libssl-dev",
            "zlib1g-dev",
            "python3",
        ]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        let (source, version) = shop.source("libevent", dir)?;
        let options = [
            "-DCMAKE_BUILD_TYPE=Release",
            "-DEVENT__DISABLE_BENCHMARK=ON",
            "-DEVENT__DISABLE_SAMPLES=ON",
            "-DEVENT__LIBRARY_TYPE=STATIC",
        ];
        cmake(&source, &dir.join("build"), &options, "regress")?;
        Ok(version)
    }

    fn parts(&self, place: &Place, quick: bool) -> Result<Vec<String>> {
        let list = run(Command::new(place.dir.join("build/bin/regress")).arg("--list-tests"))?;
        let mut groups: Vec<&str> = list
            .lines()
            .filter_map(|line| line.trim().split_once('/').map(|(group, _)| group))
            .filter(|group| !group.contains(' ') && (!quick || CI.contains(group)))
            .collect();
        groups.sort_unstable();
        groups.dedup();
        let with = |(backend, _): &(&str, _)| {
            groups
                .iter()
                .map(move |group| format!("{backend} {group}"))
                .collect::<Vec<_>>()
        };
        Ok(BACKENDS.iter().flat_map(with).collect())
    }

    fn job(&self, place: &Place, part: &str, selection: Selection<'_>, _: &Path) -> Result<Job> {
        let (backend, group) = part.split_once(' ').unwrap_or(("epoll", part));
        let mut command = vec![
            place.dir.join("build/bin/regress").display().to_string(),
            "--timeout".into(),
            "50".into(),
        ];
        match selection {
            Selection::Only(names) => command.extend(names.iter().cloned()),
            Selection::All => command.push(format!("{group}/..")),
            Selection::Except(names) => {
                command.push(format!("{group}/.."));
                command.extend(names.iter().map(|name| format!(":{name}")));
            }
        }
        let forbidden = BACKENDS
            .iter()
            .filter(|(name, _)| *name == backend)
            .flat_map(|(_, others)| others.iter());
        Ok(forbidden.fold(Job::new(command), |job, name| job.env(name, "1")))
    }

    /// Reads lines such as `group/name: OK`; FAILED comes after the output of the case.
    fn cases(&self, _: &str, ran: &Ran, _: &Path) -> Cases {
        let mut cases = Cases::new();
        let mut current: Option<String> = None;
        for line in ran.output.lines() {
            if let Some((name, _)) = line.split_once(": ").filter(|(name, _)| is_name(name)) {
                current = Some(name.to_owned());
                cases.insert(name.to_owned(), Outcome::Unfinished);
            }
            let Some(name) = &current else { continue };
            let outcome = if line.contains("FAILED]") || line.contains("FAILED.") {
                Outcome::Failed
            } else if line.contains("DISABLED") || line.ends_with("SKIPPED") {
                Outcome::Skipped
            } else if line.ends_with("OK") {
                Outcome::Passed
            } else {
                continue;
            };
            cases.insert(name.clone(), outcome);
        }
        cases
    }

    fn selects(&self) -> bool {
        true
    }
}

fn is_name(text: &str) -> bool {
    text.split_once('/').is_some_and(|(group, name)| {
        let word = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "_-".contains(c));
        word(group) && word(name)
    })
}
