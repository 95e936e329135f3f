//! Plays a scenario: two processes, in one of six modes, and compares their transcripts.
//!
//! It runs without the library and knows no scenario; `tests/differential.rs` makes the matrix.

use std::collections::HashMap;
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::ctx::{SEEN, Side, WARM};
use crate::observe::{Promotion, promotion_state};
use crate::scenarios::Scenario;

/// Longest time that a scenario may take; then its processes are killed and it has failed.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);
/// How long the observer waits for a promotion; longer than a virtual machine may stand still.
const PROMOTION_LIMIT: Duration = Duration::from_secs(20);

/// Which sides have the library preloaded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, clap::ValueEnum)]
pub enum Mode {
    /// None: the reference.
    Kernel,
    /// Both, so that the connection is promoted.
    Both,
    /// The client only.
    Client,
    /// The server only.
    Server,
    /// None, in a storm of signals (`storm`).
    KernelStorm,
    /// Both, in such a storm.
    Storm,
}

impl Mode {
    /// All of them, the reference first.
    pub const ALL: [Self; 4] = [Self::Kernel, Self::Both, Self::Client, Self::Server];

    /// The name in a test's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Both => "both",
            Self::Client => "client",
            Self::Server => "server",
            Self::KernelStorm => "kernel-storm",
            Self::Storm => "storm",
        }
    }

    /// Whether neither side has the library.
    pub fn is_plain(self) -> bool {
        matches!(self, Self::Kernel | Self::KernelStorm)
    }

    /// Whether the timer of `storm` fires.
    pub fn storms(self) -> bool {
        matches!(self, Self::KernelStorm | Self::Storm)
    }

    /// Whether `side` has the library.
    pub fn preloads(self, side: Side) -> bool {
        match self {
            Self::Kernel | Self::KernelStorm => false,
            Self::Both | Self::Storm => true,
            Self::Client => side == Side::Client,
            Self::Server => side == Side::Server,
        }
    }
}

/// What one side left behind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SideOutcome {
    /// The lines of its transcript.
    pub transcript: String,
    /// What it wrote to stdout and stderr.
    pub output: String,
    /// How it ended.
    pub exit: String,
}

/// What both sides left behind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The server's.
    pub server: SideOutcome,
    /// The client's.
    pub client: SideOutcome,
}

impl Outcome {
    /// One side's.
    pub fn side(&self, side: Side) -> &SideOutcome {
        match side {
            Side::Server => &self.server,
            Side::Client => &self.client,
        }
    }
}

/// Where the files under test are.
pub struct Paths {
    /// The `scenario` binary.
    pub scenario: PathBuf,
    /// The library to preload, or why there is none.
    pub library: Result<PathBuf, String>,
    /// The `rdmasock` command.
    pub command: PathBuf,
}

impl Paths {
    /// Finds them: `RDMASOCK_LIBRARY` and `RDMASOCK_COMMAND`, or beside the scenario binary.
    pub fn find(scenario: &Path) -> Self {
        let beside = |name: &str| scenario.with_file_name(name);
        let named = std::env::var_os("RDMASOCK_LIBRARY").map(PathBuf::from);
        let library = named.unwrap_or_else(|| beside("librdmasock.so"));
        let release = if cfg!(debug_assertions) {
            ""
        } else {
            " --release"
        };
        let library = match fs::canonicalize(&library) {
            Ok(path) => Ok(path),
            Err(e) => Err(format!(
                "no library at {} ({e}): build it with `cargo build{release} -p rdmasock -p \
                 rdmasock-cli`, or set RDMASOCK_LIBRARY",
                library.display()
            )),
        };
        let command = std::env::var_os("RDMASOCK_COMMAND").map(PathBuf::from);
        Self {
            scenario: scenario.to_path_buf(),
            library,
            command: command.unwrap_or_else(|| beside("rdmasock")),
        }
    }
}

/// Takes every `RDMASOCK*` variable out of `command`, except those for logging; a failed
/// expectation is one line, without a backtrace.
pub fn clean_environment(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("RDMASOCK") && !text.starts_with("RDMASOCK_LOG") {
            command.env_remove(&name);
        }
    }
    command.env_remove("LD_PRELOAD").env("RUST_BACKTRACE", "0");
}

/// A running side; killed with its children if it is still there when this is dropped.
struct Running {
    side: Side,
    child: Child,
    exit: Option<ExitStatus>,
}

impl Running {
    fn start(
        paths: &Paths,
        scenario: &Scenario,
        mode: Mode,
        side: Side,
        dir: &Path,
    ) -> Result<Self> {
        let output = fs::File::create(dir.join(format!("{}.output", side.name())))?;
        let mut command = Command::new(&paths.scenario);
        clean_environment(&mut command);
        command
            .args(["--name", &scenario.name, "--side", side.name()])
            .arg("--dir")
            .arg(dir)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0);
        if !mode.is_plain() && scenario.warms_up {
            command.arg("--observed");
        }
        if mode.storms() {
            command.arg("--storm");
        }
        if mode.preloads(side) {
            let library = paths.library.as_ref().map_err(|why| anyhow!("{why}"))?;
            command.env("LD_PRELOAD", library);
            // Soon, so that a scenario need not go on for long.
            command.env("RDMASOCK_PROMOTE_AFTER", "2r,16K");
            command.envs(scenario.env.iter().map(|(k, v)| (k, v)));
        }
        let child = command
            .spawn()
            .with_context(|| format!("starting {}", paths.scenario.display()))?;
        Ok(Self {
            side,
            child,
            exit: None,
        })
    }

    fn has_ended(&mut self) -> Result<bool> {
        if self.exit.is_none() {
            self.exit = self.child.try_wait()?;
        }
        Ok(self.exit.is_some())
    }

    fn outcome(&self, dir: &Path) -> SideOutcome {
        let text = |what: &str| {
            let path = dir.join(format!("{}.{what}", self.side.name()));
            let bytes = fs::read(path).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let exit = match self.exit {
            None => "killed: it took too long".into(),
            Some(status) => match status.signal() {
                Some(signal) => format!("signal {signal}"),
                None => format!("exit {}", status.code().unwrap_or(-1)),
            },
        };
        SideOutcome {
            transcript: text("transcript"),
            output: text("output"),
            exit,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The side is the leader of its own process group: only what it started is in it.
        let group = nix::unistd::Pid::from_raw(self.child.id() as i32);
        let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

/// Plays `scenario` in `mode` and checks that it was promoted, or not, as it should be.
pub fn play(paths: &Paths, scenario: &Scenario, mode: Mode) -> Result<Outcome> {
    let dir = tempfile::tempdir()?;
    let dir = dir.path();
    let start = Instant::now();
    let mut server = Running::start(paths, scenario, mode, Side::Server, dir)?;
    let mut client = Running::start(paths, scenario, mode, Side::Client, dir)?;
    let mut seen = None;
    while start.elapsed() < TIME_LIMIT {
        let ended = [server.has_ended()?, client.has_ended()?];
        if ended == [true, true] {
            break;
        }
        let failed = |r: &Running| r.exit.is_some_and(|e| e.code() == Some(101));
        if failed(&server) || failed(&client) {
            // The other side would wait for it until the time limit.
            std::thread::sleep(Duration::from_millis(200));
            server.has_ended()?;
            client.has_ended()?;
            break;
        }
        if !mode.is_plain() && seen.is_none() && dir.join(WARM).exists() {
            seen = Some(watch(paths, mode, &server, &client));
            fs::write(dir.join(SEEN), b"")?;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let outcome = Outcome {
        server: server.outcome(dir),
        client: client.outcome(dir),
    };
    drop((server, client));
    for side in Side::ALL {
        let s = outcome.side(side);
        if s.exit == "exit 101" || s.exit.starts_with("killed") {
            bail!("{}", describe(&outcome));
        }
    }
    if !mode.is_plain() && scenario.warms_up {
        seen.ok_or_else(|| anyhow!("the scenario never warmed up"))??;
    }
    Ok(outcome)
}

/// Waits for the promotion in mode `both`; makes sure that there is none in the others.
fn watch(paths: &Paths, mode: Mode, server: &Running, client: &Running) -> Result<()> {
    let ask = |r: &Running| -> Result<Promotion> {
        promotion_state(&paths.command, r.child.id())?
            .ok_or_else(|| anyhow!("the {} is not among the instances", r.side.name()))
    };
    let end = Instant::now() + PROMOTION_LIMIT;
    if matches!(mode, Mode::Both | Mode::Storm) {
        // The storm has a connection of its own.
        let others = usize::from(mode.storms());
        loop {
            let (s, c) = (ask(server), ask(client));
            if let (Ok(s), Ok(c)) = (&s, &c)
                && s.on_link > others
                && c.on_link > others
            {
                return Ok(());
            }
            if Instant::now() > end {
                bail!("not promoted in {PROMOTION_LIMIT:?}: server {s:?}, client {c:?}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let with = if mode.preloads(Side::Server) {
        server
    } else {
        client
    };
    std::thread::sleep(Duration::from_millis(30));
    let state = ask(with)?;
    if state.promoted > 0 || state.on_link > 0 {
        bail!(
            "promoted although only the {} has the library",
            with.side.name()
        );
    }
    Ok(())
}

/// Both transcripts with what the sides printed; of a long one, its end.
pub fn describe(outcome: &Outcome) -> String {
    let one = |side: Side| {
        let s = outcome.side(side);
        format!(
            "{} ({}):\n{}{}",
            side.name(),
            s.exit,
            last_lines("", &s.transcript),
            last_lines("  printed: ", &s.output)
        )
    };
    format!("{}{}", one(Side::Server), one(Side::Client))
}

/// The last lines of `text`, each after `prefix`.
fn last_lines(prefix: &str, text: &str) -> String {
    const SHOWN: usize = 60;
    let lines: Vec<_> = text.lines().collect();
    let skipped = lines.len().saturating_sub(SHOWN);
    let mut shown = String::new();
    if skipped > 0 {
        shown += &format!("{prefix}({skipped} lines before)\n");
    }
    for line in &lines[skipped..] {
        shown += &format!("{prefix}{line}\n");
    }
    shown
}

/// The kernel outcomes played so far, by scenario; each scenario's reference is played once.
#[derive(Default)]
pub struct References {
    #[allow(clippy::type_complexity)]
    known: Mutex<HashMap<String, Arc<OnceLock<Result<Outcome, String>>>>>,
}

impl References {
    /// The outcome of `scenario` on kernel TCP.
    pub fn get(&self, paths: &Paths, scenario: &Scenario) -> Result<Outcome, String> {
        let slot = {
            let mut known = self.known.lock().unwrap();
            Arc::clone(known.entry(scenario.name.clone()).or_default())
        };
        slot.get_or_init(|| play(paths, scenario, Mode::Kernel).map_err(|e| format!("{e:#}")))
            .clone()
    }
}

/// The difference between two outcomes, or None.
pub fn difference(kernel: &Outcome, other: &Outcome) -> Option<String> {
    let mut text = String::new();
    for side in Side::ALL {
        let (k, o) = (kernel.side(side), other.side(side));
        for (what, a, b) in [
            ("transcript", &k.transcript, &o.transcript),
            ("output", &k.output, &o.output),
            ("exit", &k.exit, &o.exit),
        ] {
            if a != b {
                text += &format!("{} {what}: - kernel, + this mode\n", side.name());
                text += &diff(a, b);
            }
        }
    }
    (!text.is_empty()).then_some(text)
}

/// The lines that differ, with up to three equal lines before and after.
fn diff(a: &str, b: &str) -> String {
    const AROUND: usize = 3;
    let (a, b): (Vec<_>, Vec<_>) = (a.lines().collect(), b.lines().collect());
    let same = |x: &[&str], y: &[&str]| x.iter().zip(y).take_while(|(p, q)| p == q).count();
    let head = same(&a, &b);
    let reversed =
        |x: &[&str]| -> Vec<_> { x[head..].iter().rev().copied().map(String::from).collect() };
    let (ra, rb): (Vec<String>, Vec<String>) = (reversed(&a), reversed(&b));
    let tail = ra.iter().zip(&rb).take_while(|(p, q)| p == q).count();
    let mut text = String::new();
    for line in &a[head.saturating_sub(AROUND)..head] {
        text += &format!("    {line}\n");
    }
    for line in &a[head..a.len() - tail] {
        text += &format!("  - {line}\n");
    }
    for line in &b[head..b.len() - tail] {
        text += &format!("  + {line}\n");
    }
    for line in a[a.len() - tail..].iter().take(AROUND) {
        text += &format!("    {line}\n");
    }
    text
}
