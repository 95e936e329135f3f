//! Measurements of whole programs, for `demo` and `bench never-slower`: a server, the measurements on it, and rounds
//! that alternate between kernel TCP and the library. `demo` and `bench` choose the programs and the goals.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::lab::{Build, Lab, Mode};
use crate::proc::Proc;
use crate::servers::Service;
use crate::signals;
use crate::stat::Totals;
use crate::table::{Row, Subject};

/// The longest time of one round of one program, with room for other load on the machine.
const TIME: Duration = Duration::from_secs(300);

/// The use of the server's counters for a row, in rounds with the library on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paths {
    /// The counters must show bytes on a link.
    Link,
    /// The row shows the bytes on a link and on TCP.
    Any,
    /// The counters are not used: each connection has a process of its own, and the counters end with the process.
    Unseen,
}

/// Takes a sample from a running server.
pub type Sample = dyn Fn(&Lab, &Service, Subject) -> Result<f64>;

/// Starts the servers of a round: first the one that clients connect to, then the ones behind it.
pub type Start = dyn Fn(&Lab) -> Result<Vec<Service>>;

/// A row of the table, with the function that takes its samples.
pub struct Measure {
    pub row: Row,
    pub paths: Paths,
    pub sample: Box<Sample>,
}

/// A server, with the measurements on it.
pub struct Program {
    pub name: &'static str,
    /// The sides that have the library, in rounds with the library.
    pub mode: Mode,
    pub start: Box<Start>,
    pub measures: Vec<Measure>,
    /// True if [`Subject::Unix`] is measured too.
    pub has_unix: bool,
}

/// The rounds that all programs of a run are measured in.
#[derive(Debug)]
pub struct Rounds {
    pub build: Option<Build>,
    pub number: u32,
    /// True if every round runs on kernel TCP: this checks the measurements themselves.
    pub kernel: bool,
}

impl Rounds {
    /// Measures all `programs`, one after the other, and returns the failures. A failure ends only the round of that
    /// program.
    ///
    /// # Errors
    /// If the user has interrupted the run.
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

    /// Takes a sample of each of a program's measurements, on one fresh server.
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
