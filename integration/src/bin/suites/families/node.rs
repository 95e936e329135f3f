//! Node's test/parallel and test/sequential, where each test is a program. They run on Debian's Node, which is unpacked
//! beside the machine's own.

use std::path::Path;

use anyhow::Result;

use crate::case::{Cases, Job, Outcome, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::Workshop;

/// The subjects of tests to run: the word after `test-` in a file name.
const SUBJECTS: &[&str] = &["net", "http", "https", "http2", "tls", "cluster", "child-process"];

/// Node's test suite.
pub struct Node;

impl Suite for Node {
    fn name(&self) -> &'static str {
        "node"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["dpkg-dev", "openssl"]
    }

    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String> {
        let version = shop.unpack(
            &[
                "nodejs",
                "libnode108",
                "libuv1",
                "libc-ares2",
                "libnghttp2-14",
                "libicu72",
                "libbrotli1",
                "node-acorn",
                "node-cjs-module-lexer",
                "node-undici",
            ],
            &dir.join("node"),
        )?;
        let parts = ["test", "benchmark", "deps/v8/tools", "lib", "doc", "tools"];
        let in_tree = parts.map(|part| (part, format!("tree/{part}")));
        let wanted = in_tree.each_ref().map(|(part, to)| (*part, to.as_str()));
        super::kept(shop, "nodejs", dir, &wanted)?;
        Ok(version)
    }

    fn parts(&self, place: &Place, _quick: bool) -> Result<Vec<String>> {
        let mut parts = Vec::new();
        for kind in ["parallel", "sequential"] {
            for entry in std::fs::read_dir(place.dir.join("tree/test").join(kind))?.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let about = |subject: &&str| name.starts_with(&format!("test-{subject}-"));
                if SUBJECTS.iter().any(about) && name.contains("js") {
                    parts.push(format!("{kind}/{name}"));
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
        let node = place.dir.join("node/usr");
        let command = [node.join("bin/node").display().to_string(), format!("test/{part}")];
        let mut job = Job::new(command)
            .env(
                "LD_LIBRARY_PATH",
                node.join("lib/x86_64-linux-gnu").display().to_string(),
            )
            .env("NODE_TEST_DIR", scratch.display().to_string())
            .dir(place.dir.join("tree"));
        // Debian's Node reads some of its modules from /usr/share.
        job.over_share = Some(node.join("share"));
        job.silence = std::time::Duration::from_secs(60);
        Ok(job)
    }

    fn cases(&self, part: &str, ran: &Ran, _: &Path) -> Cases {
        let skipped = ran.output.lines().any(|line| line.starts_with("1..0 # Skipped"));
        let outcome = if skipped { Outcome::Skipped } else { ran.end.outcome() };
        Cases::from([(part.to_owned(), outcome)])
    }
}
