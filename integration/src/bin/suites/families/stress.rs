//! stress-ng's stressors of sockets and of ways to wait for them, with stress-ng's own verification.

use std::path::Path;

use anyhow::Result;

use crate::case::{Cases, Job, Outcome, Place, Selection, Suite};
use crate::sandbox::Ran;
use crate::workshop::Workshop;

/// The runs: a stressor with its options.
const STRESSORS: &[&str] = &[
    "sock",
    "sock --sock-domain ipv6",
    "sock --sock-opts sendmsg",
    "sock --sock-opts sendmmsg",
    "sock --sock-opts random",
    "sock --sock-zerocopy",
    "sock --sock-if lo",
    "sockabuse",
    "sockfd",
    "sockmany",
    "sctp",
    "epoll",
    "epoll --epoll-domain ipv6",
    "poll",
    "sendfile",
    "splice",
    "netdev",
    "handle",
    "fork",
    "vfork",
    "clone",
    "dup",
    "close",
];

/// stress-ng's stressors as a suite.
pub struct Stress;

impl Suite for Stress {
    fn name(&self) -> &'static str {
        "stress-ng"
    }

    fn packages(&self) -> &'static [&'static str] {
        &["stress-ng"]
    }

    fn fetch(&self, _: &Workshop, _: &Path) -> Result<String> {
        super::version_of("stress-ng", 2)
    }

    fn parts(&self, _: &Place, quick: bool) -> Result<Vec<String>> {
        let parts = STRESSORS.iter().map(|part| (*part).to_owned());
        Ok(parts.take(if quick { 3 } else { usize::MAX }).collect())
    }

    fn job(&self, _: &Place, part: &str, _: Selection<'_>, _: &Path) -> Result<Job> {
        let (stressor, options) = part.split_once(' ').unwrap_or((part, ""));
        let mut command: Vec<String> = ["stress-ng", "--verify", "--timeout", "3"].map(Into::into).into();
        command.extend([format!("--{stressor}"), "2".to_owned()]);
        command.extend(options.split_whitespace().map(str::to_owned));
        Ok(Job::new(command))
    }

    fn cases(&self, part: &str, ran: &Ran, _: &Path) -> Cases {
        let skipped = ran.output.contains("skipped stressor") || ran.output.contains("skipping stressor");
        let outcome = if skipped { Outcome::Skipped } else { ran.end.outcome() };
        Cases::from([(part.to_owned(), outcome)])
    }
}
