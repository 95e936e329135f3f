//! redis' suite in Tcl, whose client, servers and replicas communicate over TCP.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::kept;
use crate::case::{Cases, Job, Outcome, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::{Workshop, run};

/// The programs that the suite runs. The installed ones have the version of the suite.
const PROGRAMS: &[&str] = &[
    "redis-server",
    "redis-cli",
    "redis-benchmark",
    "redis-check-rdb",
    "redis-check-aof",
    "redis-sentinel",
];

/// The files of tests for CI.
const CI: &[&str] = &["unit/protocol", "unit/multi", "unit/type/hash", "unit/querybuf"];

/// redis' test suite.
pub struct Redis;

impl Suite for Redis {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["dpkg-dev", "tcl", "redis-server", "redis-tools", "redis-sentinel"]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        let version = kept(shop, "redis", dir, &[("tests", "tests")])?;
        std::fs::create_dir(dir.join("src"))?;
        for program in PROGRAMS {
            // The server's program has several names. The sentinel's package would start at boot and adds only a name.
            let installed = if *program == "redis-sentinel" {
                "redis-server"
            } else {
                program
            };
            std::os::unix::fs::symlink(Path::new("/usr/bin").join(installed), dir.join("src").join(program))?;
        }
        Ok(version)
    }

    fn parts(&self, place: &Place, quick: bool) -> Result<Vec<String>> {
        if quick {
            return Ok(CI.iter().map(|part| (*part).to_owned()).collect());
        }
        let helper = std::fs::read_to_string(place.dir.join("tests/test_helper.tcl"))?;
        let list = helper
            .split_once("set ::all_tests {")
            .context("test_helper.tcl has no list of files")?
            .1;
        let list = list.split_once('}').context("test_helper.tcl has no list of files")?.0;
        Ok(list.split_whitespace().map(str::to_owned).collect())
    }

    fn job(&self, place: &Place, part: &str, selection: Selection<'_>, scratch: &Path) -> Result<Job> {
        // The suite writes below its own folder, so each job gets a copy.
        for dir in ["tests", "src"] {
            run(Command::new("cp").arg("-a").arg(place.dir.join(dir)).arg(scratch))?;
        }
        let mut job = Job::new([
            "tclsh",
            "tests/test_helper.tcl",
            "--clients",
            "1",
            "--durable",
            "--single",
            part,
        ]);
        if let Selection::Only(names) = selection {
            job.command
                .extend(names.iter().flat_map(|name| ["--only".to_owned(), name.clone()]));
        }
        // A file of many cases with replicas takes ten minutes on a busy machine. A case that fills buffers takes two.
        job.limit = Duration::from_secs(1800);
        job.silence = Duration::from_secs(300);
        Ok(job.dir(scratch.to_owned()))
    }

    fn selects(&self) -> bool {
        true
    }

    /// Reads lines such as `[ok]: NAME (N ms)` or `[err]: NAME in FILE`, in colours.
    fn cases(&self, _: &str, ran: &Ran, _: &Path) -> Cases {
        let mut cases = Cases::new();
        for (name, outcome) in ran.output.lines().filter_map(case) {
            // Cases of the same name count as one, which passes if all pass.
            let all = cases.entry(name).or_insert(outcome);
            *all = (*all).max(outcome);
        }
        if cases.is_empty() && ran.output.contains("All tests passed") {
            // Every case of the file needs other settings than this run has.
            cases.insert("the whole file".to_owned(), Outcome::Skipped);
        }
        cases
    }
}

/// Returns the case and outcome in a line, or `None`. Some names contain random numbers, of replicas and keys.
fn case(line: &str) -> Option<(String, Outcome)> {
    let line = without_colours(line);
    let (word, rest) = line.strip_prefix('[')?.split_once("]: ")?;
    let (outcome, name) = match word {
        "ok" => (Outcome::Passed, rest.rsplit_once(" (")),
        "err" | "exception" => (Outcome::Failed, rest.split_once(" in tests/")),
        "ignore" | "skip" => (Outcome::Skipped, None),
        _ => return None,
    };
    let name = name.map_or(rest, |(name, _)| name);
    let name = match name.starts_with("PSYNC2: ") {
        true => name.replace(|c: char| c.is_ascii_digit(), ""),
        false => name.to_owned(),
    };
    Some((name, outcome))
}

/// Returns a line without the terminal's escape sequences.
fn without_colours(line: &str) -> String {
    let mut pieces = line.split("\u{1b}[");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |all, piece| {
        all + piece.split_once('m').map_or("", |(_, text)| text)
    })
}
