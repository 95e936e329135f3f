//! How a way that is measured is made, and whether a connection was on it: the programs' environment, the server that
//! clients can connect to, a conversation with them, and what `rdmasock stat` says. Not what is measured.

use std::io::Write;
use std::process::ChildStdin;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rdmasock_integration::lab::{Build, Lab, Mode};
use rdmasock_integration::ports::free_port;
use rdmasock_integration::proc::{Cmd, Proc, pause, wait_until};
use rdmasock_integration::stat::Stat;

use crate::results::Way;

/// Longest time of one measurement, on a machine that is busy otherwise.
const TIME: Duration = Duration::from_secs(180);

impl Way {
    /// An experiment on this way.
    ///
    /// # Errors
    /// When the local device is not built; the text names the remedy.
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
            // And what else is asked of it, as the differential suite has it.
            let more = std::env::var("LOCALNIC").unwrap_or_default();
            lab.set("LOCALNIC", format!("roce,{more}"));
            if let Some(least) = self.least_direct() {
                lab.set("RDMASOCK_ZCOPY_MIN", least);
            }
            if let Some(way) = self.fixed() {
                lab.set("RDMASOCK_DEV_WAY", way);
            }
            // The two ends ask each other by name, as within a host.
            lab.set("RDMASOCK_CONTROL_PORT", "0");
        }
        Ok(lab)
    }

    /// The word of `rdmasock stat` for a connection on this way.
    fn path(self) -> Option<&'static str> {
        match self {
            Self::Tcp | Self::Unix | Self::BareOwn | Self::BareOne | Self::Link => None,
            Self::Shm => Some("shm"),
            Self::Device | Self::DeviceDirect | Self::DeviceLent | Self::DeviceDynamic => Some("verbs"),
        }
    }

    /// Whether `number` connections of a process are on this way now, else a sentence on where they are.
    ///
    /// # Errors
    /// When `rdmasock stat` fails, or the library is in a process that must not have it.
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

    /// Refuses a result whose connections are not where they are expected to be.
    ///
    /// # Errors
    /// As [`Way::look`], or with its sentence.
    pub fn check(self, stat: &Stat, process: &Proc, number: usize) -> Result<()> {
        self.look(stat, process, number)?
            .map_err(|sentence| anyhow::anyhow!("refused, {sentence}"))
    }

    /// Has `traffic` made until all connections of a process are on this way.
    ///
    /// # Errors
    /// Those of [`Way::look`] and `traffic`; at the deadline its sentence.
    pub fn settle(
        self,
        lab: &Lab,
        stat: &Stat,
        process: &Proc,
        number: usize,
        mut traffic: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        // A promotion takes milliseconds; what has not come by then does not come.
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

/// Starts a server by the command that `command` makes for an address, and waits until one can connect to it.
///
/// # Errors
/// When it ends, or does not listen in time.
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
    /// Starts it.
    ///
    /// # Errors
    /// Those of starting it.
    pub fn start(command: Cmd) -> Result<Self> {
        let mut process = command.stdin_pipe().spawn()?;
        let orders = process.stdin().context("a pipe")?;
        Ok(Self {
            process,
            orders,
            answers: 0,
        })
    }

    /// Sends it a line.
    ///
    /// # Errors
    /// When it has ended.
    pub fn order(&mut self, line: &str) -> Result<()> {
        if writeln!(self.orders, "{line}").is_err() {
            self.process.check_running()?;
            bail!("{} does not read", self.process.name());
        }
        Ok(())
    }

    /// Waits for the line with which it answers the last.
    ///
    /// # Errors
    /// When it has ended, or there is none in time.
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

    /// Both.
    ///
    /// # Errors
    /// As there.
    pub fn ask(&mut self, lab: &Lab, line: &str) -> Result<String> {
        self.order(line)?;
        self.answer(lab)
    }
}
