//! The form of a suite, for the comparison: parts, which are processes of their own, and cases, which have an outcome.
//! `families` has the ways in which suites are fetched and read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::sandbox::Ran;
use crate::workshop::Workshop;

/// How a case ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Passed,
    Failed,
    Skipped,
    /// The case began and has not ended when its process ended or was stopped for its silence. Also a case that never
    /// began.
    Unfinished,
}

/// Cases by name.
pub type Cases = BTreeMap<String, Outcome>;

/// The carrier of connections while a process of a suite runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    Kernel,
    /// The library with its default settings.
    Default,
    /// The library, with each connection promoted as soon as it is connected.
    AtOnce,
}

impl Way {
    /// The ways that are compared with the kernel's.
    pub const LIBRARY: [Self; 2] = [Self::Default, Self::AtOnce];

    /// Returns the name in tables.
    pub fn title(self) -> &'static str {
        match self {
            Self::Kernel => "kernel TCP",
            Self::Default => "library",
            Self::AtOnce => "library, at once",
        }
    }
}

/// Which cases of a part are to run.
#[derive(Debug, Clone, Copy)]
pub enum Selection<'a> {
    All,
    Only(&'a [String]),
    Except(&'a [String]),
}

/// A suite that is fetched and built.
#[derive(Debug)]
pub struct Place {
    pub version: String,
    /// The folder of all that was fetched and built.
    pub dir: PathBuf,
}

/// A process to run.
#[derive(Debug)]
pub struct Job {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Variables beside the few that every job has.
    pub env: Vec<(String, String)>,
    /// The folder that the process runs in; a relative path is below its scratch folder. On `None` it is an empty
    /// folder.
    pub dir: Option<PathBuf>,
    /// A folder that is laid over /usr/share for the process.
    pub over_share: Option<PathBuf>,
    /// The user that the process runs as; on `None` it is root.
    pub user: Option<&'static str>,
    /// The longest time without output before the process is stopped.
    pub silence: Duration,
    /// The longest time that the process may run.
    pub limit: Duration,
}

impl Job {
    /// Makes a job that may run for ten minutes and be silent for two.
    pub fn new<I: IntoIterator<Item: Into<String>>>(command: I) -> Self {
        Self {
            command: command.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            dir: None,
            over_share: None,
            user: None,
            silence: Duration::from_secs(120),
            limit: Duration::from_secs(600),
        }
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, key: &str, value: impl Into<String>) -> Self {
        self.env.push((key.to_owned(), value.into()));
        self
    }

    /// Runs the job in `dir`.
    #[must_use]
    pub fn dir(mut self, dir: PathBuf) -> Self {
        self.dir = Some(dir);
        self
    }
}

/// A test suite of another project.
pub trait Suite: Sync {
    /// Returns the name on the command line and in the table.
    fn name(&self) -> &'static str;

    /// Returns the Debian packages that have to be installed for the suite.
    fn packages(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns the recipe of the fetch, such as pinned versions. If it changes, the suite is fetched anew.
    fn recipe(&self) -> String {
        String::new()
    }

    /// Fetches and builds the suite into an empty folder, and returns its version.
    ///
    /// # Errors
    /// If something cannot be fetched or built.
    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String>;

    /// Returns the parts of the suite; if `quick`, the parts for CI.
    ///
    /// # Errors
    /// If the parts cannot be listed.
    fn parts(&self, place: &Place, quick: bool) -> Result<Vec<String>>;

    /// Returns whether the suite has parts for CI. If not, CI does not fetch it.
    fn is_quick(&self) -> bool {
        true
    }

    /// Returns the process that runs `selection` of a part. `scratch` is a folder for this process alone: empty at
    /// first, and removed afterwards.
    ///
    /// # Errors
    /// If files for the process cannot be written.
    fn job(&self, place: &Place, part: &str, selection: Selection<'_>, scratch: &Path) -> Result<Job>;

    /// Returns the cases that a process ran, read from its output and its files in `scratch`.
    fn cases(&self, part: &str, ran: &Ran, scratch: &Path) -> Cases;

    /// Returns whether [`Suite::job`] respects a selection. If not, it runs the whole part.
    fn selects(&self) -> bool {
        false
    }
}
