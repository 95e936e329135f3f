//! memcached's t/: Perl scripts that start a server and report each check by TAP.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::case::{Cases, Job, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::{Workshop, run};

/// Scripts that check the source code, or that take minutes.
const NOT: &[&str] = &["whitespace.t", "malicious-commands.t"];
/// memcached's test suite.
pub struct Memcached;

impl Suite for Memcached {
    fn name(&self) -> &'static str {
        "memcached"
    }

    fn packages(&self) -> &'static [&'static str] {
        &[
            "build-essential",
            "dpkg-dev",
            "autoconf",
            "automake",
            "libevent-dev",
            "libssl-dev",
            "libio-socket-ssl-perl",
        ]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        let (source, version) = shop.source("memcached", dir)?;
        let tree = dir.join("tree");
        std::fs::rename(source, &tree)?;
        run(Command::new("autoreconf").arg("-fi").current_dir(&tree))?;
        run(Command::new("./configure")
            .args(["-q", "--enable-tls"])
            .current_dir(&tree))?;
        run(Command::new("make")
            .args(["-j2", "memcached", "memcached-debug", "sizes", "testapp", "timedrun"])
            .current_dir(&tree))?;
        Ok(version)
    }

    fn parts(&self, place: &Place, _: bool) -> Result<Vec<String>> {
        let mut parts: Vec<String> = std::fs::read_dir(place.dir.join("tree/t"))?
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.ends_with(".t") && !NOT.contains(&name.as_str()))
            .collect();
        parts.sort();
        Ok(parts)
    }

    fn is_quick(&self) -> bool {
        false
    }

    fn job(&self, place: &Place, part: &str, _: Selection<'_>, _: &Path) -> Result<Job> {
        let job = Job::new(["perl".to_owned(), format!("t/{part}")]).env("T_MEMD_USE_DAEMON", "");
        Ok(job.dir(place.dir.join("tree")))
    }

    fn cases(&self, _: &str, ran: &Ran, _: &Path) -> Cases {
        super::script_cases(ran)
    }
}
