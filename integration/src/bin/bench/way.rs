//! Prepares a way that is measured, and checks that connections were on it. This file has the environment of programs,
//! the start of servers, the conversation with clients, and questions to `rdmasock stat`. It measures nothing.

use std::io::Write;
use std::process::ChildStdin;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rdmasock_integration::lab::{Build, Lab, Mode};
use rdmasock_integration::ports::free_port;
use rdmasock_integration::proc::{Cmd, Proc, pause, wait_until};
use rdmasock_integration::stat::Stat;

use crate::results::Way;

/// The longest time of one measurement, with room for other load on the machine.
const TIME: Duration = Duration::from_secs(180);

impl Way {
    /// Makes an experiment on this way.
    ///
    /// # Errors
    /// If the local device is not built; the text names the remedy.
    pub fn lab(self, build: &Build) -> Result<Lab> {
        let mode = match self.has_library() {
            true => Mode::Both,
            false => Mode::Kernel,
        };
        let mut lab = Lab::new(mode, Some(build.clone()), TIME)?;
        if Self::DEVICE.contains(&self) {
            let plugin = build.library.with_file_name("librdmasock_localnic.so");
            ensure!(
                plugin.is_file(),
                "the local device is not built: cargo build --release -p rdmasock-localnic"
            );
            lab.set("RDMASOCK_DEV_LOCAL_DEVICE", plugin.display().to_string());
            // Further words of the caller's `LOCALNIC` follow, as in the differential suite.
            let more = std::env::var("LOCALNIC").unwrap_or_default();
            lab.set("LOCALNIC", format!("roce,{more}"));
            if let Some(least) = self.least_direct() {
                lab.set("RDMASOCK_ZCOPY_MIN", least);
            }
            if let Some(way) = self.fixed() {
                lab.set("RDMASOCK_DEV_WAY", way);
            }
            // Port 0 makes the two ends ask each other by name, as within a host.
            lab.set("RDMASOCK_CONTROL_PORT", "0");
        }
        Ok(lab)
    }

    /// Returns the word of `rdmasock stat` for a connection on this way, or `None` without the library.
    fn path(self) -> Option<&'static str> {
        match self {
            Self::Tcp | Self::Unix | Self::BareOwn | Self::BareOne | Self::Link => None,
            Self::Shm => Some("shm"),
            Self::Device | Self::DeviceDirect | Self::DeviceLent | Self::DeviceDynamic => Some("verbs"),
        }
    }

    /// Checks that exactly `number` connections of a process are on this way now. If not, the inner `Err` says where
    /// they are.
    ///
    /// # Errors
    /// If `rdmasock stat` fails, or if a process has the library against the plan.
    pub fn look(self, stat: &Stat, process: &Proc, number: usize) -> Result<Result<(), String>> {
        let instances = stat.group(process.pid())?;
        let Some(path) = self.path() else {
            ensure!(
                instances.is_empty(),
                "{} has the library, but is to be measured without: unset LD_PRELOAD",
                process.name()
            );
            return Ok(Ok(()));
        };
        let streams = instances.iter().flat_map(|instance| &instance.streams);
        let is_there = |stream: &&_| {
            let stream: &rdmasock_integration::stat::Stream = stream;
            stream.tx_path == path && stream.rx_path == path
        };
        let there = streams.filter(is_there).count();
        if there == number {
            return Ok(Ok(()));
        }
        let mut reasons: Vec<_> = instances.iter().map(|instance| instance.reasons()).collect();
        reasons.retain(|reason| !reason.is_empty());
        let reasons = match reasons.is_empty() {
            true => "rdmasock stat says no reason".to_owned(),
            false => reasons.join("; "),
        };
        Ok(Err(format!(
            "{there} of {number} connections on the expected path, {path}: {reasons}"
        )))
    }

    /// Checks like [`Way::look`], and refuses a result whose connections are elsewhere.
    ///
    /// # Errors
    /// As [`Way::look`], or with its sentence.
    pub fn check(self, stat: &Stat, process: &Proc, number: usize) -> Result<()> {
        self.look(stat, process, number)?
            .map_err(|sentence| anyhow::anyhow!("refused, {sentence}"))
    }

    /// Calls `traffic` until all connections of a process are on this way.
    ///
    /// # Errors
    /// If [`Way::look`] or `traffic` fails, or with its sentence after 30 s.
    pub fn settle(
        self,
        lab: &Lab,
        stat: &Stat,
        process: &Proc,
        number: usize,
        mut traffic: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        // A promotion takes milliseconds, so a connection that is elsewhere after this time stays there.
        let last = std::time::Instant::now() + Duration::from_secs(30);
        loop {
            let Err(sentence) = self.look(stat, process, number)? else {
                return Ok(());
            };
            ensure!(std::time::Instant::now() < last, "refused, {sentence}");
            traffic()?;
            pause(lab.deadline())?;
        }
    }
}

/// Starts a server by the command that `command` makes for an address, and waits until clients can connect to it.
///
/// # Errors
/// If the server ends, or does not listen in time.
pub fn serve(lab: &Lab, is_unix: bool, command: impl FnOnce(&str) -> Result<Cmd>) -> Result<(Proc, String)> {
    if !is_unix {
        let port = free_port()?;
        let address = format!("127.0.0.1:{port}");
        return Ok((lab.serve(command(&address)?, port)?, address));
    }
    let path = lab.path("socket");
    let address = path.display().to_string();
    let mut server = command(&address)?.spawn()?;
    wait_until("the Unix socket", lab.deadline(), || {
        server.check_running()?;
        Ok(path.exists())
    })?;
    Ok((server, address))
}

/// A program that answers each line of its standard input with a line.
pub struct Player {
    pub process: Proc,
    orders: ChildStdin,
    answers: usize,
}

impl Player {
    /// Starts the program.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub fn start(command: Cmd) -> Result<Self> {
        let mut process = command.stdin_pipe().spawn()?;
        let orders = process.stdin().context("a pipe")?;
        Ok(Self {
            process,
            orders,
            answers: 0,
        })
    }

    /// Sends a line to the program.
    ///
    /// # Errors
    /// If the program has ended.
    pub fn order(&mut self, line: &str) -> Result<()> {
        if writeln!(self.orders, "{line}").is_err() {
            self.process.check_running()?;
            bail!("{} does not read", self.process.name());
        }
        Ok(())
    }

    /// Waits for the answer to the last line.
    ///
    /// # Errors
    /// If the program has ended, or has not answered in time.
    pub fn answer(&mut self, lab: &Lab) -> Result<String> {
        let mut answer = None;
        wait_until("an answer", lab.deadline(), || {
            let text = self.process.text();
            let (whole, _) = text.rsplit_once('\n').unwrap_or_default();
            answer = whole
                .lines()
                .nth(self.answers)
                .filter(|line| !line.is_empty())
                .map(str::to_owned);
            if answer.is_none() {
                self.process.check_running()?;
            }
            Ok(answer.is_some())
        })?;
        self.answers += 1;
        answer.context("an answer")
    }

    /// Sends a line and waits for the answer.
    ///
    /// # Errors
    /// As [`Player::order`] and [`Player::answer`].
    pub fn ask(&mut self, lab: &Lab, line: &str) -> Result<String> {
        self.order(line)?;
        self.answer(lab)
    }
}
