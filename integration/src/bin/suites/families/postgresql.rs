//! PostgreSQL's isolation tests, over TCP: several sessions whose steps wait for each other, on a server that is made for them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::case::{Cases, Job, Outcome, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::{Workshop, run};

const PROGRAMS: &str = "/usr/lib/postgresql/15";
/// Specifications that one server is made for.
const TOGETHER: usize = 15;

/// The suite.
pub struct Postgresql;

impl Suite for Postgresql {
    fn name(&self) -> &'static str {
        "postgresql-isolation"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["dpkg-dev", "postgresql-15", "postgresql-client-15"]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        let (source, _) = shop.source("postgresql-15", dir)?;
        std::fs::rename(source.join("src/test/isolation"), dir.join("isolation"))?;
        std::fs::remove_dir_all(source)?;
        let said = run(Command::new(format!("{PROGRAMS}/bin/postgres")).arg("--version"))?;
        Ok(said
            .split_whitespace()
            .nth(2)
            .context("postgres tells no version")?
            .to_owned())
    }

    /// A part is a range of the schedule.
    fn parts(&self, place: &Place, quick: bool) -> Result<Vec<String>> {
        let count = schedule(place)?.len().div_ceil(TOGETHER);
        let parts = (0..count).map(|part| format!("schedule {part}"));
        Ok(parts.take(if quick { 1 } else { count }).collect())
    }

    fn job(
        &self,
        place: &Place,
        part: &str,
        selection: Selection<'_>,
        scratch: &Path,
    ) -> Result<Job> {
        let at = |name: &str| scratch.join("tmp").join(name).display().to_string();
        let mut command = vec![
            format!("{PROGRAMS}/lib/pgxs/src/test/isolation/pg_isolation_regress"),
            format!("--bindir={PROGRAMS}/bin"),
            format!("--inputdir={}", place.dir.join("isolation").display()),
            format!("--outputdir={}", at("out")),
            format!("--temp-instance={}", at("instance")),
            "--host=127.0.0.1".to_owned(),
            "--port=5499".to_owned(),
        ];
        match selection {
            Selection::Only(names) => command.extend(names.iter().cloned()),
            _ => {
                let number: usize = part.trim_start_matches("schedule ").parse()?;
                command.extend(
                    schedule(place)?
                        .into_iter()
                        .skip(number * TOGETHER)
                        .take(TOGETHER),
                );
            }
        }
        let mut job = Job::new(command);
        job.user = Some("postgres");
        Ok(job)
    }

    /// `test NAME ... ok N ms`
    fn cases(&self, _: &str, ran: &Ran, _: &Path) -> Cases {
        let case = |line: &str| {
            let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
            let outcome = match rest.split_whitespace().next()? {
                "ok" => Outcome::Passed,
                "FAILED" => Outcome::Failed,
                _ => Outcome::Unfinished,
            };
            Some((name.trim().to_owned(), outcome))
        };
        ran.output.lines().filter_map(case).collect()
    }

    fn selects(&self) -> bool {
        true
    }
}

/// The specifications in their order.
fn schedule(place: &Place) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(place.dir.join("isolation/isolation_schedule"))?;
    let tests = text.lines().filter_map(|line| line.strip_prefix("test:"));
    Ok(tests
        .flat_map(str::split_whitespace)
        .map(str::to_owned)
        .collect())
}
