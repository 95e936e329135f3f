//! libuv's own tests. Each is a process, which starts helpers of its own.

use std::path::Path;

use anyhow::Result;

use super::cmake;
use crate::case::{Cases, Job, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::Workshop;

/// The beginnings of the names of tests for CI.
const CI: &[&str] = &["tcp_", "poll_", "ping_pong", "delayed_accept", "pipe_connect"];

/// libuv's test suite.
pub struct Libuv;

impl Suite for Libuv {
    fn name(&self) -> &'static str {
        "libuv"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["build-essential", "dpkg-dev", "cmake"]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        let (source, version) = shop.source("libuv1", dir)?;
        cmake(
            &source,
            &dir.join("build"),
            &["-DCMAKE_BUILD_TYPE=Release"],
            "uv_run_tests_a",
        )?;
        // Tests read and write files below the folder that they run in.
        std::fs::rename(source.join("test"), dir.join("test"))?;
        Ok(version)
    }

    fn parts(&self, place: &Place, quick: bool) -> Result<Vec<String>> {
        // Only these lines of the list name a test. The program refuses to print its list as root.
        let list = std::fs::read_to_string(place.dir.join("test/test-list.h"))?;
        let mut names: Vec<String> = list
            .lines()
            .filter_map(|line| line.trim().strip_prefix("TEST_ENTRY"))
            .filter_map(|line| {
                line.split_once('(')?
                    .1
                    .split([',', ')'])
                    .next()
                    .map(|name| name.trim().to_owned())
            })
            .filter(|name| name != "name")
            .collect();
        names.sort();
        names.dedup();
        names.retain(|name| !quick || CI.iter().any(|prefix| name.starts_with(prefix)));
        Ok(names)
    }

    fn job(&self, place: &Place, part: &str, _: Selection<'_>, scratch: &Path) -> Result<Job> {
        let dir = scratch.join("tmp");
        std::fs::create_dir(&dir)?;
        std::os::unix::fs::symlink(place.dir.join("test"), dir.join("test"))?;
        let mut job = Job::new([
            place.dir.join("build/uv_run_tests_a").display().to_string(),
            part.to_owned(),
        ]);
        job.user = Some("nobody");
        Ok(job)
    }

    fn cases(&self, part: &str, ran: &Ran, _: &Path) -> Cases {
        let skipped = ran
            .output
            .lines()
            .any(|line| line.starts_with("ok ") && line.contains("# SKIP"));
        let unknown = ran.output.contains("No test with that name");
        let outcome = if skipped || unknown {
            crate::case::Outcome::Skipped
        } else {
            ran.end.outcome()
        };
        Cases::from([(part.to_owned(), outcome)])
    }
}
