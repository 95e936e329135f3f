//! The tests of perl's sockets and of its modules for sockets: scripts that report each check by TAP, run by Debian's
//! perl.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::{kept, script_cases};
use crate::case::{Cases, Job, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::{Workshop, run};

/// Folders of the source. Each is the root of a distribution, with its scripts in t.
const DISTRIBUTIONS: &[&str] = &[
    "cpan/Socket",
    "cpan/IO-Socket-IP",
    "cpan/HTTP-Tiny",
    "cpan/libnet",
    "dist/IO",
];
/// Scripts of perl's own tests.
const CORE: &[&str] = &["t/io/socket.t", "t/io/socketpair.t"];

/// perl's test suite.
pub struct Perl;

impl Suite for Perl {
    fn name(&self) -> &'static str {
        "perl"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["dpkg-dev", "perl"]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        let wanted: Vec<_> = DISTRIBUTIONS.iter().chain(&["t"]).map(|path| (*path, *path)).collect();
        let version = kept(shop, "perl", dir, &wanted)?;
        // The scripts of perl's own tests search for modules in ../lib alone.
        let lib = dir.join("lib");
        fs::create_dir(&lib)?;
        let folders = run(Command::new("perl").args(["-e", "print join qq(\\n), reverse @INC"]))?;
        for folder in folders.lines().filter(|folder| Path::new(folder).is_dir()) {
            run(Command::new("cp").arg("-rsf").arg(format!("{folder}/.")).arg(&lib))?;
        }
        Ok(version)
    }

    fn parts(&self, place: &Place, _: bool) -> Result<Vec<String>> {
        let mut parts: Vec<String> = CORE.iter().map(|part| (*part).to_owned()).collect();
        for distribution in DISTRIBUTIONS {
            let dir = place.dir.join(distribution).join("t");
            for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                if name.ends_with(".t") {
                    parts.push(format!("{distribution}/t/{name}"));
                }
            }
        }
        parts.sort();
        Ok(parts)
    }

    fn is_quick(&self) -> bool {
        false
    }

    fn job(&self, place: &Place, part: &str, _: Selection<'_>, scratch: &Path) -> Result<Job> {
        // The scripts write into their working directory, so each job gets a copy.
        let root = part.split_once("/t/").map_or("t", |(root, _)| root);
        let home = scratch.join(root);
        fs::create_dir_all(&home)?;
        run(Command::new("cp").arg("-aT").arg(place.dir.join(root)).arg(&home))?;
        std::os::unix::fs::symlink(place.dir.join("lib"), scratch.join("lib"))?;
        let script = part.strip_prefix(root).unwrap_or(part);
        let script = script.trim_start_matches('/').to_owned();
        Ok(Job::new(["perl".to_owned(), script]).dir(home))
    }

    fn cases(&self, _: &str, ran: &Ran, _: &Path) -> Cases {
        script_cases(ran)
    }
}
