//! Measurements on whole programs: a server, what is measured on it, and rounds that alternate between kernel TCP and
//! the library. What `demo` and `bench never-slower` have in common; which programs and which goals is their business.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::lab::{Build, Lab, Mode};
use crate::proc::Proc;
use crate::servers::Service;
use crate::signals;
use crate::stat::Totals;
use crate::table::{Row, Subject};

/// How long one round of one program may take, with a machine that is busy otherwise.
const TIME: Duration = Duration::from_secs(300);

/// What the server's counters have to do with a row, where both ends have the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paths {
    /// Bytes must have gone over a link.
    Link,
    /// The row shows which way they went.
    Any,
    /// They say nothing: each connection has a process of its own, whose counters end with it.
    Unseen,
}

/// Takes a sample from a running server.
pub type Sample = dyn Fn(&Lab, &Service, Subject) -> Result<f64>;

/// Starts the servers of a round: the one that clients connect to, then those behind it.
pub type Start = dyn Fn(&Lab) -> Result<Vec<Service>>;

/// One measurement.
pub struct Measure {
    pub row: Row,
    pub paths: Paths,
    pub sample: Box<Sample>,
}

/// A server and what is measured on it.
pub struct Program {
    pub name: &'static str,
    /// Who has the library in the rounds with it.
    pub mode: Mode,
    pub start: Box<Start>,
    pub measures: Vec<Measure>,
    /// Whether [`Subject::Unix`] is measured too.
    pub has_unix: bool,
}

/// How all programs of a run are measured.
#[derive(Debug)]
pub struct Rounds {
    pub build: Option<Build>,
    pub number: u32,
    /// Kernel TCP in every round: checks the measurements themselves.
    pub kernel: bool,
}

impl Rounds {
    /// Measures all `programs`, one after the other; returns what failed. A failure ends its round of its program only.
    ///
    /// # Errors
    /// When the user has interrupted the run.
    pub fn run(&self, programs: &mut [Program]) -> Result<Vec<String>> {
        let mut failures = Vec::new();
        for program in programs {
            for round in 1..=self.number {
                for subject in [Subject::Tcp, Subject::Library] {
                    let (mode, what) = match subject {
                        Subject::Library if self.kernel => (Mode::Kernel, "rdmasock"),
                        Subject::Library => (program.mode, "rdmasock"),
                        _ => (Mode::Kernel, "kernel TCP"),
                    };
                    eprintln!("{}: round {round} of {}, {what}", program.name, self.number);
                    if let Err(error) = self.round(program, subject, mode) {
                        failures.push(format!("{} ({what}): {error:#}", program.name));
                        eprintln!("  failed: {error:#}");
                    }
                    if signals::is_interrupted() {
                        bail!("interrupted");
                    }
                }
            }
        }
        Ok(failures)
    }

    /// One round of all of a program's measurements on one fresh server.
    fn round(&self, program: &mut Program, subject: Subject, mode: Mode) -> Result<()> {
        let lab = Lab::new(mode, self.build.clone(), TIME)?;
        let mut servers = (program.start)(&lab)?;
        let server = servers.first_mut().context("no server")?;
        lab.check_loaded(&server.proc)?;
        let mut not_promoted = Vec::new();
        for Measure { row, paths, sample } in &mut program.measures {
            let before = totals(&lab, &server.proc)?;
            let value = sample(&lab, server, subject).with_context(|| row.name.clone())?;
            row.add(subject, value);
            if subject == Subject::Tcp && program.has_unix {
                row.add(Subject::Unix, sample(&lab, server, Subject::Unix)?);
            }
            server.proc.check_running()?;
            if mode == Mode::Both && *paths != Paths::Unseen {
                let moved = totals(&lab, &server.proc)?.since(before);
                row.add_bytes(moved.link(), moved.tcp());
                if *paths == Paths::Link && (moved.promoted == 0 || moved.link() == 0) {
                    not_promoted.push(format!("{}: {}", row.name, lab.not_promoted(&server.proc)));
                }
            }
        }
        if !not_promoted.is_empty() {
            bail!("{}", not_promoted.join("; "));
        }
        Ok(())
    }
}

fn totals(lab: &Lab, server: &Proc) -> Result<Totals> {
    match lab.mode() {
        Mode::Both => lab.totals(server.pid()),
        _ => Ok(Totals::default()),
    }
}
