//! The tests of PHP's sockets, streams and servers, run by the suite's own runner on Debian's PHP.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::{kept, told};
use crate::case::{Cases, Job, Outcome, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::{Workshop, run};

const FOLDERS: &[&str] = &[
    "ext/sockets/tests",
    "ext/standard/tests/streams",
    "ext/standard/tests/network",
    "ext/standard/tests/http",
    "ext/openssl/tests",
    "ext/ftp/tests",
    "ext/pcntl/tests",
    "sapi/cli/tests",
];

/// PHP's test suite.
pub struct Php;

impl Suite for Php {
    fn name(&self) -> &'static str {
        "php"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["dpkg-dev", "php8.2-cli"]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        let mut wanted: Vec<_> = FOLDERS.iter().map(|path| (*path, *path)).collect();
        wanted.push(("run-tests.php", "run-tests.php"));
        kept(shop, "php8.2", dir, &wanted)
    }

    fn parts(&self, _: &Place, _: bool) -> Result<Vec<String>> {
        Ok(FOLDERS.iter().map(|part| (*part).to_owned()).collect())
    }

    fn is_quick(&self) -> bool {
        false
    }

    fn job(&self, place: &Place, part: &str, selection: Selection<'_>, scratch: &Path) -> Result<Job> {
        // The runner writes beside each test, and tests use the files of other folders. So each job gets a copy.
        for name in ["ext", "sapi", "run-tests.php"] {
            run(Command::new("cp").arg("-a").arg(place.dir.join(name)).arg(scratch))?;
        }
        let mut command: Vec<String> = ["php8.2", "run-tests.php", "-q", "--offline"].map(Into::into).into();
        command.extend(["--no-color", "--no-progress"].map(Into::into));
        match selection {
            Selection::Only(names) => command.extend(names.iter().cloned()),
            _ => command.push(part.to_owned()),
        }
        let mut job = Job::new(command)
            .dir(scratch.to_owned())
            .env("TEST_PHP_EXECUTABLE", "/usr/bin/php8.2");
        job.limit = Duration::from_secs(1800);
        Ok(job)
    }

    /// Reads lines such as `PASS TITLE [FILE]`, which follow the line of progress that they replace.
    fn cases(&self, _: &str, ran: &Ran, _: &Path) -> Cases {
        told(&ran.output, |line| {
            let line = line.rsplit('\r').next().unwrap_or(line);
            let (word, rest) = line.split_once(' ')?;
            let outcome = match word {
                "PASS" => Outcome::Passed,
                "FAIL" | "BORK" | "LEAK" | "WARN" | "TIMEOUT" => Outcome::Failed,
                "SKIP" | "XFAIL" | "XLEAK" => Outcome::Skipped,
                _ => return None,
            };
            let file = rest.rsplit_once(".phpt]")?.0.rsplit_once('[')?.1;
            Some((format!("{file}.phpt"), outcome))
        })
    }

    fn selects(&self) -> bool {
        true
    }
}
