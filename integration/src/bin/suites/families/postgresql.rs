//! PostgreSQL's regression and isolation tests over TCP, on servers that are made for them. Regression tests are
//! scripts with a psql and a backend each. Isolation tests have several sessions whose steps wait for each other.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::{kept, told, version_of};
use crate::case::{Cases, Job, Outcome, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::{Workshop, run};

const PROGRAMS: &str = "/usr/lib/postgresql/15";

/// A test suite of PostgreSQL: regression or isolation.
pub struct Postgresql {
    name: &'static str,
    /// The folder below src/test, the program that runs its tests, and its schedule.
    tests: &'static str,
    runner: &'static str,
    schedule: &'static str,
    /// The number of groups of the schedule that one server is made for.
    together: usize,
    /// Tests whose results other tests need.
    first: &'static [&'static str],
}

/// The suites of this family.
pub const ALL: [Postgresql; 2] = [
    Postgresql {
        name: "postgresql",
        tests: "regress",
        runner: "pg_regress",
        schedule: "parallel_schedule",
        together: usize::MAX,
        first: &["test_setup", "create_index"],
    },
    Postgresql {
        name: "postgresql-isolation",
        tests: "isolation",
        runner: "pg_isolation_regress",
        schedule: "isolation_schedule",
        together: 15,
        first: &[],
    },
];

impl Postgresql {
    /// Returns the tests in their order, in groups that run at the same time.
    fn groups(&self, place: &Place) -> Result<Vec<Vec<String>>> {
        let text = fs::read_to_string(place.dir.join(self.tests).join(self.schedule))?;
        let groups = text.lines().filter_map(|line| line.strip_prefix("test:"));
        Ok(groups
            .map(|group| group.split_whitespace().map(str::to_owned).collect())
            .collect())
    }
}

impl Suite for Postgresql {
    fn name(&self) -> &'static str {
        self.name
    }

    fn packages(&self) -> &'static [&'static str] {
        &["dpkg-dev", "gcc", "libc6-dev", "postgresql-15", "postgresql-client-15"]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        kept(
            shop,
            "postgresql-15",
            dir,
            &[
                (&format!("src/test/{}", self.tests), self.tests),
                ("src/include", "include"),
            ],
        )?;
        if self.tests == "regress" {
            build_functions(shop, dir)?;
        }
        version_of(&format!("{PROGRAMS}/bin/postgres"), 2)
    }

    /// Returns the ranges of the schedule.
    fn parts(&self, place: &Place, _: bool) -> Result<Vec<String>> {
        let count = self.groups(place)?.chunks(self.together).len();
        Ok((0..count).map(|part| format!("schedule {part}")).collect())
    }

    fn is_quick(&self) -> bool {
        false
    }

    fn job(&self, place: &Place, part: &str, selection: Selection<'_>, scratch: &Path) -> Result<Job> {
        let at = |name: &str| scratch.join("tmp").join(name).display().to_string();
        let number: usize = part.trim_start_matches("schedule ").parse()?;
        let schedule: String = self
            .groups(place)?
            .chunks(self.together)
            .nth(number)
            .unwrap_or_default()
            .iter()
            .flat_map(|group| line(group, selection, self.first))
            .collect();
        let file = scratch.join("schedule");
        fs::write(&file, schedule)?;
        let mut job = Job::new([
            format!("{PROGRAMS}/lib/pgxs/src/test/{}/{}", self.tests, self.runner),
            format!("--bindir={PROGRAMS}/bin"),
            format!("--inputdir={}", place.dir.join(self.tests).display()),
            format!("--dlpath={}", place.dir.join("lib").display()),
            format!("--schedule={}", file.display()),
            format!("--outputdir={}", at("out")),
            format!("--temp-instance={}", at("instance")),
            "--host=127.0.0.1".to_owned(),
            "--port=5499".to_owned(),
        ]);
        job.user = Some("postgres");
        job.limit = std::time::Duration::from_secs(1800);
        Ok(job)
    }

    /// Reads lines such as `test NAME ... ok N ms`, without the first word in a group.
    fn cases(&self, _: &str, ran: &Ran, _: &Path) -> Cases {
        told(&ran.output, |line| {
            let (name, rest) = line.split_once(" ... ")?;
            let name = name.strip_prefix("test ").unwrap_or(name).trim();
            let outcome = match rest.split_whitespace().next()? {
                "ok" => Outcome::Passed,
                "FAILED" => Outcome::Failed,
                _ => Outcome::Unfinished,
            };
            (!name.contains(' ')).then(|| (name.to_owned(), outcome))
        })
    }

    fn selects(&self) -> bool {
        true
    }
}

/// Returns a schedule's line with the selected tests of a group and the tests that others need. Returns `None` if no
/// test is left.
fn line(group: &[String], selection: Selection<'_>, first: &[&str]) -> Option<String> {
    let is_chosen = |name: &&String| {
        first.contains(&name.as_str())
            || match selection {
                Selection::All => true,
                Selection::Only(names) => names.contains(name),
                Selection::Except(names) => !names.contains(name),
            }
    };
    let chosen: Vec<&str> = group.iter().filter(is_chosen).map(String::as_str).collect();
    (!chosen.is_empty()).then(|| format!("test: {}\n", chosen.join(" ")))
}

/// Builds the C functions that the regression tests load, beside the extensions that they load from the same folder.
/// The source package has most headers, in the version of the functions. Headers that only a build makes are from the
/// development package.
fn build_functions(shop: &Workshop, dir: &Path) -> Result<()> {
    let (headers, lib) = (dir.join("headers"), dir.join("lib"));
    shop.unpack(&["postgresql-server-dev-15", "libpq-dev"], &headers)?;
    fs::create_dir(&lib)?;
    let include = headers.join("usr/include/postgresql");
    run(Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-w"])
        .arg("-I")
        .arg(dir.join("include"))
        .arg("-I")
        .arg(include.join("15/server"))
        .arg("-I")
        .arg(&include)
        .arg("-o")
        .arg(lib.join("regress.so"))
        .arg(dir.join("regress/regress.c")))?;
    for extension in ["autoinc.so", "refint.so"] {
        std::os::unix::fs::symlink(Path::new(PROGRAMS).join("lib").join(extension), lib.join(extension))?;
    }
    Ok(())
}
