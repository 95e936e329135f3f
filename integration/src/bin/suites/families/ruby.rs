//! The tests of Ruby's sockets and of the libraries on them, run by the suite's own runner on Debian's Ruby.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{kept, told};
use crate::case::{Cases, Job, Outcome, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::Workshop;

/// Folders of tests; each file in them is a part.
const FOLDERS: &[&str] = &[
    "socket",
    "net/http",
    "net/protocol",
    "openssl",
    "drb",
    "open-uri",
    "io/wait",
    "io/nonblock",
];

/// Ruby's test suite.
pub struct Ruby;

impl Suite for Ruby {
    fn name(&self) -> &'static str {
        "ruby"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["dpkg-dev", "ruby3.1"]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        kept(shop, "ruby3.1", dir, &[("test", "test"), ("tool", "tool")])
    }

    fn parts(&self, place: &Place, _: bool) -> Result<Vec<String>> {
        let mut parts = Vec::new();
        for folder in FOLDERS {
            let dir = place.dir.join("test").join(folder);
            for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                if name.starts_with("test_") && name.ends_with(".rb") {
                    parts.push(format!("{folder}/{name}"));
                }
            }
        }
        parts.sort();
        Ok(parts)
    }

    fn is_quick(&self) -> bool {
        false
    }

    fn job(&self, place: &Place, part: &str, selection: Selection<'_>, _: &Path) -> Result<Job> {
        let at = |name: &str| place.dir.join(name).display().to_string();
        let mut command = vec![
            "ruby3.1".to_owned(),
            at("test/runner.rb"),
            "--verbose".to_owned(),
            "--tty=no".to_owned(),
        ];
        let names = |names: &[String]| {
            let words: Vec<String> = names.iter().map(|name| escaped(name)).collect();
            format!("/\\A(?:{})\\z/", words.join("|"))
        };
        match selection {
            Selection::All => {}
            Selection::Only(only) => command.push(format!("--name={}", names(only))),
            Selection::Except(seen) => command.push(format!("--ignore-name={}", names(seen))),
        }
        command.push(at(&format!("test/{part}")));
        let mut job = Job::new(command);
        job.silence = Duration::from_secs(90);
        Ok(job)
    }

    /// Reads a line `[N/M] CLASS#test = SECONDS s` for each case. At the end, below `N) Failure:` and the like, are the
    /// cases that did not pass.
    fn cases(&self, _: &str, ran: &Ran, _: &Path) -> Cases {
        let mut cases = told(&ran.output, |line| {
            let (_, line) = line.strip_prefix('[')?.split_once("] ")?;
            let (name, time) = line.split_once(" = ")?;
            let outcome = match time.trim().ends_with(" s") {
                true => Outcome::Passed,
                false => Outcome::Unfinished,
            };
            Some((name.to_owned(), outcome))
        });
        let lines = ran.output.lines();
        for (heading, line) in lines.clone().zip(lines.skip(1)) {
            let outcome = match heading.trim_start_matches([' ', ')']).split_once(") ") {
                Some((_, "Failure:" | "Error:" | "Timeout:")) => Outcome::Failed,
                Some((_, "Skipped:")) => Outcome::Skipped,
                _ => continue,
            };
            let name = line.split(' ').next().unwrap_or(line);
            cases.insert(name.trim_end_matches(':').to_owned(), outcome);
        }
        cases
    }

    fn selects(&self) -> bool {
        true
    }
}

/// Returns a name as a regular expression.
fn escaped(name: &str) -> String {
    let quoted = |c: char| match c.is_alphanumeric() || c == '_' {
        true => c.to_string(),
        false => format!("\\{c}"),
    };
    name.chars().map(quoted).collect()
}
