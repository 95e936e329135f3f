//! curl's test suite: the command and programs on libcurl, against the suite's own servers. It is built from Debian's
//! source.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::told;
use crate::case::{Cases, Job, Outcome, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::{Workshop, run};

/// The size of the range of test numbers that one process runs, so that its servers are started once.
const TOGETHER: u32 = 100;

const CONFIGURATION: &[&str] = &[
    "-q",
    "--with-openssl",
    "--without-libpsl",
    "--disable-shared",
    "--disable-manual",
    "--enable-debug",
    "--disable-curldebug",
];

/// curl's test suite.
pub struct Curl;

impl Suite for Curl {
    fn name(&self) -> &'static str {
        "curl"
    }

    fn packages(&self) -> &'static [&'static str] {
        &[
            "build-essential",
            "dpkg-dev",
            "autoconf",
            "automake",
            "libtool",
            "pkg-config",
            "libssl-dev",
            "libnghttp2-dev",
            "zlib1g-dev",
            "patch",
            "perl",
            "python3",
            "libwrap0",
        ]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        let (source, version) = shop.source("curl", dir)?;
        fs::rename(source, dir.join("tree"))?;
        let in_tree = |program: &str| {
            let mut command = Command::new(program);
            command.current_dir(dir.join("tree"));
            command
        };
        // The last patches of Debian build the library for each of its TLS libraries.
        for patch in ["99_nss.patch", "90_gnutls.patch"] {
            let patch = format!("debian/patches/{patch}");
            run(in_tree("patch").args(["-R", "-p1", "-s", "-i", &patch]))?;
        }
        run(in_tree("autoreconf").arg("-fi"))?;
        run(in_tree("./configure").args(CONFIGURATION))?;
        for folder in [".", "tests/server", "tests/libtest", "tests/unit"] {
            run(in_tree("make").args(["-sj2", "-C", folder]))?;
        }
        run(in_tree("find").args([".", "-name", "*.o", "-delete"]))?;
        // stunnel is not installed, since Debian would start it at boot.
        shop.unpack(&["stunnel4"], &dir.join("stunnel"))?;
        Ok(version)
    }

    /// Returns the ranges of numbers that have tests.
    fn parts(&self, place: &Place, _: bool) -> Result<Vec<String>> {
        let dir = place.dir.join("tree/tests/data");
        let mut ranges: Vec<u32> = fs::read_dir(&dir)
            .with_context(|| dir.display().to_string())?
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                let number: u32 = name.strip_prefix("test")?.parse().ok()?;
                Some(number / TOGETHER)
            })
            .collect();
        ranges.sort_unstable();
        ranges.dedup();
        let name = |range: &u32| format!("{} to {}", range * TOGETHER, (range + 1) * TOGETHER - 1);
        Ok(ranges.iter().map(name).collect())
    }

    fn is_quick(&self) -> bool {
        false
    }

    fn job(&self, place: &Place, part: &str, selection: Selection<'_>, scratch: &Path) -> Result<Job> {
        // The suite writes below its own folder. So files are links into the tree, and folders are made anew.
        run(Command::new("cp")
            .arg("-as")
            .arg(place.dir.join("tree/tests"))
            .arg(scratch))?;
        for folder in ["src", "lib", "include", "config.log", "docs"] {
            std::os::unix::fs::symlink(place.dir.join("tree").join(folder), scratch.join(folder))?;
        }
        let mut command = ["perl", "-I.", "runtests.pl", "-a", "-n", "-am"]
            .map(str::to_owned)
            .to_vec();
        match selection {
            Selection::Only(names) => command.extend(names.iter().cloned()),
            Selection::All | Selection::Except(_) => {
                command.extend(part.split(' ').map(str::to_owned));
            }
        }
        if let Selection::Except(names) = selection {
            command.extend(names.iter().map(|name| format!("!{name}")));
        }
        let mut job = Job::new(command).dir(scratch.join("tests"));
        job.limit = Duration::from_secs(1800);
        let stunnel = place.dir.join("stunnel/usr/bin");
        let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", stunnel.display());
        Ok(job.env("PATH", path))
    }

    /// Reads lines such as `PASS: NUMBER - TITLE`, or FAIL. A skipped test has its number only.
    fn cases(&self, _: &str, ran: &Ran, _: &Path) -> Cases {
        told(&ran.output, |line| {
            if let Some(rest) = line.strip_prefix("test ") {
                let (number, _) = rest.split_once(" SKIPPED")?;
                let number: u32 = number.parse().ok()?;
                return Some((number.to_string(), Outcome::Skipped));
            }
            let (word, rest) = line.split_once(": ")?;
            let outcome = match word {
                "PASS" => Outcome::Passed,
                "FAIL" => Outcome::Failed,
                _ => return None,
            };
            let (number, _) = rest.split_once(" - ")?;
            Some((number.to_owned(), outcome))
        })
    }

    fn selects(&self) -> bool {
        true
    }
}
