//! What a suite consists of, as the comparison sees it: parts, which are processes of their own, and cases, which
//! have an outcome. Not how any suite is fetched or read: `families` has that.

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
    /// It began, and has not ended when its process did, or when it was stopped for its silence; or it never began.
    Unfinished,
}

/// Cases by name.
pub type Cases = BTreeMap<String, Outcome>;

/// What a process of a suite runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    Kernel,
    /// With the library as it is by default.
    Default,
    /// With the library, each connection promoted as soon as it is connected.
    AtOnce,
}

impl Way {
    /// Those that are compared with the kernel's.
    pub const LIBRARY: [Self; 2] = [Self::Default, Self::AtOnce];

    /// As the tables call it.
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

/// A suite that lies ready.
#[derive(Debug)]
pub struct Place {
    pub version: String,
    /// Holds all that was fetched and built.
    pub dir: PathBuf,
}

/// A process to run.
#[derive(Debug)]
pub struct Job {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Beside the few variables that every job has.
    pub env: Vec<(String, String)>,
    /// Where it runs, if relative in its scratch folder; an empty folder otherwise.
    pub dir: Option<PathBuf>,
    /// A folder that it sees laid over /usr/share.
    pub over_share: Option<PathBuf>,
    /// The user that it runs as; root otherwise.
    pub user: Option<&'static str>,
    /// How long it may be silent before it is stopped.
    pub silence: Duration,
    /// How long it may run.
    pub limit: Duration,
}

impl Job {
    /// A job that may run for ten minutes and be silent for two.
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

    /// Runs in `dir`.
    #[must_use]
    pub fn dir(mut self, dir: PathBuf) -> Self {
        self.dir = Some(dir);
        self
    }
}

/// One suite.
pub trait Suite: Sync {
    /// As it is called on the command line and in the table.
    fn name(&self) -> &'static str;

    /// Debian packages that have to be installed for it.
    fn packages(&self) -> &'static [&'static str] {
        &[]
    }

    /// What it is fetched by; where that changes it is fetched anew.
    fn recipe(&self) -> String {
        String::new()
    }

    /// Fetches and builds it into an empty folder, and returns its version.
    ///
    /// # Errors
    /// When something cannot be had or built.
    fn fetch(&self, shop: &Workshop, dir: &Path) -> Result<String>;

    /// Its parts; if `quick`, those that are for CI.
    ///
    /// # Errors
    /// When they cannot be listed.
    fn parts(&self, place: &Place, quick: bool) -> Result<Vec<String>>;

    /// Whether it has parts for CI; if not, it is not fetched there.
    fn is_quick(&self) -> bool {
        true
    }

    /// The process that runs `selection` of a part. `scratch` is its own, empty, and removed afterwards.
    ///
    /// # Errors
    /// When what it needs cannot be written.
    fn job(&self, place: &Place, part: &str, selection: Selection<'_>, scratch: &Path) -> Result<Job>;

    /// The cases that a process ran, from what it left.
    fn cases(&self, part: &str, ran: &Ran, scratch: &Path) -> Cases;

    /// Whether [`Suite::job`] heeds a selection. Where not, it runs the part.
    fn selects(&self) -> bool {
        false
    }
}
