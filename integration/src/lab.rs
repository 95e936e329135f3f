//! An experiment: a temporary directory, a deadline, and the sides that have the library preloaded. The lab starts
//! programs accordingly, and afterwards checks their counters.

use std::cell::Cell;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::ports;
use crate::proc::{Cmd, Proc, wait_until};
use crate::stat::{Stat, Totals};

/// The sides that have the library preloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Kernel,
    Both,
    ServerOnly,
    ClientOnly,
}

impl Mode {
    /// All modes, the baseline first.
    pub const ALL: [Self; 4] = [Self::Kernel, Self::Both, Self::ServerOnly, Self::ClientOnly];

    /// Returns the name in test names and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Both => "both",
            Self::ServerOnly => "server-only",
            Self::ClientOnly => "client-only",
        }
    }

    fn preloads(self, role: Role) -> bool {
        match role {
            Role::Server => matches!(self, Self::Both | Self::ServerOnly),
            Role::Client => matches!(self, Self::Both | Self::ClientOnly),
            Role::Outsider => false,
        }
    }
}

/// The part that a program plays. An outsider is a tool of the experiment and never has the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Server,
    Client,
    Outsider,
}

/// The built library and the built command.
#[derive(Debug, Clone)]
pub struct Build {
    pub library: PathBuf,
    pub stat: Stat,
}

impl Build {
    /// Finds the release build in the target directory of the running program.
    ///
    /// # Errors
    /// If the library or the command is not built; the text names the remedy.
    pub fn locate() -> Result<Self> {
        let here = std::env::current_exe()?;
        let release = here
            .ancestors()
            .map(|dir| dir.join("release"))
            .find(|dir| dir.join("librdmasock.so").is_file())
            .context("librdmasock.so is not built: cargo build --release -p rdmasock")?;
        let command = release.join("rdmasock");
        ensure!(
            command.is_file(),
            "the rdmasock command is not built: cargo build --release -p rdmasock-cli"
        );
        Ok(Self {
            library: release.join("librdmasock.so"),
            stat: Stat::new(command),
        })
    }

    /// Returns the build with the library, and its plugin if there is one, copied to `dir`. A server that runs as
    /// another user cannot load the library from a home directory, and would run on without it.
    ///
    /// # Errors
    /// If a file cannot be copied.
    pub fn copy_for_all(self, dir: &Path) -> Result<Self> {
        std::fs::set_permissions(dir, PermissionsExt::from_mode(0o755))?;
        for name in ["librdmasock.so", "librdmasock_verbs.so"] {
            let from = self.library.with_file_name(name);
            if from.is_file() {
                std::fs::copy(&from, dir.join(name))?;
            }
        }
        Ok(Self {
            library: dir.join("librdmasock.so"),
            ..self
        })
    }
}

/// An experiment. Its files are removed when it is dropped.
#[derive(Debug)]
pub struct Lab {
    dir: TempDir,
    mode: Mode,
    build: Option<Build>,
    deadline: Instant,
    vars: Vec<(String, String)>,
    commands: Cell<u32>,
}

impl Lab {
    /// Makes an experiment that may take `time`. `build` is needed in every mode but [`Mode::Kernel`]; on `None` the
    /// library is located.
    ///
    /// # Errors
    /// If the temporary directory cannot be made, or the library is not built.
    pub fn new(mode: Mode, build: Option<Build>, time: Duration) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("rdmasock-").tempdir()?;
        // Workers that drop their privileges read files in this directory.
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755))?;
        let build = match mode {
            Mode::Kernel => build,
            _ => Some(build.map_or_else(Build::locate, Ok)?),
        };
        let deadline = Instant::now() + time;
        Ok(Self {
            dir,
            mode,
            build,
            deadline,
            vars: Vec::new(),
            commands: Cell::new(0),
        })
    }

    /// Returns the sides that have the library.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the time at which every wait gives up.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Returns a path in the temporary directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Sets a variable for every preloaded program that is started from now on.
    pub fn set(&mut self, key: &str, value: impl Into<String>) {
        self.vars.push((key.to_owned(), value.into()));
    }

    /// Makes the library log warnings into the temporary directory.
    pub fn log_warnings(&mut self) {
        let file = self.path("rdmasock.%p.log").display().to_string();
        self.set("RDMASOCK_LOG", "warn");
        self.set("RDMASOCK_LOG_FILE", file);
    }

    /// Returns a command whose output goes to a numbered log in the temporary directory. The library is preloaded if
    /// the mode has it for this role.
    ///
    /// # Errors
    /// If the program is not installed.
    pub fn cmd(&self, role: Role, program: &str) -> Result<Cmd> {
        let number = self.commands.replace(self.commands.get() + 1);
        let name = program.rsplit('/').next().unwrap_or(program);
        let mut cmd = Cmd::new(program, self.path(&format!("{number:02}-{name}.log")))?;
        if let (true, Some(build)) = (self.mode.preloads(role), &self.build) {
            cmd = cmd.env("LD_PRELOAD", &build.library);
            for (key, value) in &self.vars {
                cmd = cmd.env(key, value);
            }
        }
        Ok(cmd)
    }

    /// Starts a server and waits until it listens on `port`.
    ///
    /// # Errors
    /// If the server ends, or does not listen in time.
    pub fn serve(&self, cmd: Cmd, port: u16) -> Result<Proc> {
        let mut proc = cmd.spawn()?;
        wait_until("a server to listen", self.deadline(), || {
            proc.check_running()?;
            Ok(ports::is_listening(port))
        })?;
        Ok(proc)
    }

    /// Runs a client to its successful end and returns its standard output. If only the client has the library, its
    /// counters must not show a byte on a link while it runs.
    ///
    /// # Errors
    /// If the client fails or is not done in time.
    pub fn run(&self, cmd: Cmd) -> Result<Vec<u8>> {
        self.finish(cmd.spawn()?)
    }

    /// Does the same as [`Lab::run`] for a client that runs already.
    ///
    /// # Errors
    /// As [`Lab::run`].
    pub fn finish(&self, client: Proc) -> Result<Vec<u8>> {
        let group = client.pid();
        // The checks become rarer, since each takes time from a possible measurement.
        let mut pause = Duration::from_millis(150);
        let mut look = Instant::now() + pause;
        client.success(self.deadline, || {
            if self.mode == Mode::ClientOnly && Instant::now() > look {
                pause *= 3;
                look = Instant::now() + pause;
                must_be_on_tcp(self.totals(group)?)?;
            }
            Ok(())
        })
    }

    /// Does the same as [`Lab::run`] and returns the output as text.
    ///
    /// # Errors
    /// As [`Lab::run`], or if the output is not UTF-8.
    pub fn text(&self, cmd: Cmd) -> Result<String> {
        Ok(String::from_utf8(self.run(cmd)?)?)
    }

    /// Returns the counters of a running program; all are zero without the library.
    ///
    /// # Errors
    /// If `rdmasock stat` fails.
    pub fn totals(&self, group: u32) -> Result<Totals> {
        self.build
            .as_ref()
            .map_or(Ok(Totals::default()), |build| build.stat.totals(group))
    }

    /// Returns the reasons why streams of a running program are on TCP; empty without the library.
    ///
    /// # Errors
    /// If `rdmasock stat` fails.
    pub fn reasons(&self, group: u32) -> Result<String> {
        let Some(build) = &self.build else {
            return Ok(String::new());
        };
        let instances = build.stat.group(group)?;
        let reasons: Vec<_> = instances.iter().map(crate::stat::Instance::reasons).collect();
        Ok(reasons.join("; "))
    }

    /// Checks the counters of a server while it runs. With both sides preloaded, streams were promoted and bytes went
    /// over a link. With the server alone preloaded, no byte went over a link. A promotion takes its time on a busy
    /// machine, so `more` makes traffic until bytes are on a link.
    ///
    /// # Errors
    /// If the counters differ from that; the text has them, with the reasons of the streams. Also if `more` fails.
    pub fn check_paths(&self, server: &Proc, mut more: impl FnMut() -> Result<()>) -> Result<()> {
        match self.mode {
            Mode::Kernel | Mode::ClientOnly => Ok(()),
            Mode::ServerOnly => {
                self.check_loaded(server)?;
                must_be_on_tcp(self.totals(server.pid())?)
            }
            Mode::Both => {
                self.check_loaded(server)?;
                let promoted = wait_until("promotion", self.deadline(), || {
                    let totals = self.totals(server.pid())?;
                    let done = totals.promoted > 0 && totals.link() > 0;
                    if !done {
                        more()?;
                    }
                    Ok(done)
                });
                promoted.with_context(|| self.not_promoted(server))
            }
        }
    }

    /// Checks that the library is active in a server that should have it. A program that cannot load it would run on
    /// without it.
    ///
    /// # Errors
    /// If the library is not active.
    pub fn check_loaded(&self, server: &Proc) -> Result<()> {
        if !self.mode.preloads(Role::Server) {
            return Ok(());
        }
        let build = self.build.as_ref().context("no build")?;
        ensure!(
            !build.stat.group(server.pid())?.is_empty(),
            "{}",
            self.not_promoted(server)
        );
        Ok(())
    }

    /// Returns a sentence on a server that was expected to be promoted.
    pub fn not_promoted(&self, server: &Proc) -> String {
        let instances = self
            .build
            .as_ref()
            .and_then(|build| build.stat.group(server.pid()).ok());
        let said: Vec<String> = instances
            .unwrap_or_default()
            .iter()
            .map(|i| format!("{} {}: {:?}, reasons: {}", i.program, i.pid, i.totals, i.reasons()))
            .collect();
        let said = match said.is_empty() {
            true => "rdmasock stat does not list it: the library is not active in it".to_owned(),
            false => said.join(" | "),
        };
        format!("{} was not promoted: {said}", server.name())
    }

    /// Makes a file of `size` bytes that look random (xorshift64*, the same for the same seed).
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn random_file(&self, name: &str, size: usize, seed: u64) -> Result<PathBuf> {
        let path = self.path(name);
        let mut out = std::io::BufWriter::new(std::fs::File::create(&path)?);
        let mut state = seed | 1;
        let mut left = size;
        while left > 0 {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            let word = state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes();
            let take = left.min(word.len());
            out.write_all(word.get(..take).unwrap_or_default())?;
            left -= take;
        }
        out.flush()?;
        Ok(path)
    }

    /// Returns the sha256 of a file, from coreutils.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn sha256(&self, path: &Path) -> Result<String> {
        let line = self.text(self.cmd(Role::Outsider, "sha256sum")?.args([path]))?;
        Ok(line.split_whitespace().next().unwrap_or_default().to_owned())
    }

    /// Copies the logs out of the temporary directory.
    ///
    /// # Errors
    /// If a log cannot be copied.
    pub fn keep_logs(&self, to: &Path) -> Result<()> {
        std::fs::create_dir_all(to)?;
        for entry in std::fs::read_dir(self.dir.path())?.flatten() {
            let path = entry.path();
            let kept = matches!(path.extension().and_then(|e| e.to_str()), Some("log" | "err" | "conf"));
            if let (true, Some(name)) = (kept, path.file_name()) {
                std::fs::copy(&path, to.join(name))?;
            }
        }
        Ok(())
    }
}

fn must_be_on_tcp(totals: Totals) -> Result<()> {
    ensure!(
        totals.link() == 0 && totals.promoted == 0,
        "the other side has no library, but the counters say {totals:?}"
    );
    Ok(())
}
