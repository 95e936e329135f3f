//! Plays a scenario: two processes, in one of ten modes, and compares their transcripts.
//!
//! The harness runs without the library and knows no scenario. `tests/differential.rs` makes the matrix;
//! `tests/environment_matrix.rs` makes the matrix of scenarios and environments.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::ctx::{ANSWERED, ASKED, COUNTED, SEEN, Side, WARM};
use crate::environment;
use crate::environment::Environment;
use crate::observe::{Promotion, count, promotion_state, reasons};
use crate::scenarios::Scenario;
use crate::standin::Standin;

/// The longest time that a scenario may take. Then its processes are killed and it has failed.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);
/// How long the observer waits for a promotion; longer than a virtual machine may stand still.
const PROMOTION_LIMIT: Duration = Duration::from_secs(20);

/// Which sides have the library preloaded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, clap::ValueEnum)]
pub enum Mode {
    /// Neither side: the reference.
    Kernel,
    /// Both sides, so that the connection is promoted.
    Both,
    /// The client only.
    Client,
    /// The server only.
    Server,
    /// Neither side, in a storm of signals (`storm`).
    KernelStorm,
    /// Both sides, in a storm of signals.
    Storm,
    /// Both sides, over the local device with immediates.
    Roce,
    /// Both sides, over the local device without immediates.
    Iwarp,
    /// Both sides, over the verbs plugin on the stand-in for rdma-core, as RoCE.
    Verbs,
    /// Both sides, over the verbs plugin on the stand-in, as iWARP.
    VerbsIwarp,
}

impl Mode {
    /// The modes of every scenario, the reference first.
    pub const ALL: [Self; 4] = [Self::Kernel, Self::Both, Self::Client, Self::Server];

    /// The modes in which links are as between hosts.
    pub const DEVICES: [Self; 2] = [Self::Roce, Self::Iwarp];

    /// The modes in which the verbs plugin runs.
    pub const PLUGIN: [Self; 2] = [Self::Verbs, Self::VerbsIwarp];

    /// Returns the mode's name in a test's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Both => "both",
            Self::Client => "client",
            Self::Server => "server",
            Self::KernelStorm => "kernel-storm",
            Self::Storm => "storm",
            Self::Roce => "roce",
            Self::Iwarp => "iwarp",
            Self::Verbs => "verbs",
            Self::VerbsIwarp => "verbs-iwarp",
        }
    }

    /// Returns whether neither side has the library.
    pub fn is_plain(self) -> bool {
        matches!(self, Self::Kernel | Self::KernelStorm)
    }

    /// Returns whether the timer of `storm` fires.
    pub fn storms(self) -> bool {
        matches!(self, Self::KernelStorm | Self::Storm)
    }

    /// Returns the words for the local device or the stand-in (`LOCALNIC`, `VERBS_STANDIN`); `None` where neither is
    /// used.
    pub fn device(self) -> Option<&'static str> {
        match self {
            Self::Roce | Self::Verbs => Some("roce"),
            Self::Iwarp | Self::VerbsIwarp => Some("iwarp"),
            _ => None,
        }
    }

    /// Returns whether `side` has the library.
    pub fn preloads(self, side: Side) -> bool {
        match self {
            Self::Kernel | Self::KernelStorm => false,
            Self::Both | Self::Storm | Self::Roce | Self::Iwarp | Self::Verbs | Self::VerbsIwarp => true,
            Self::Client => side == Side::Client,
            Self::Server => side == Side::Server,
        }
    }
}

/// The results of one side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SideOutcome {
    /// The lines of the side's transcript.
    pub transcript: String,
    /// The side's stdout and stderr.
    pub output: String,
    /// The side's exit status, or the signal that ended it.
    pub exit: String,
}

/// The results of both sides.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The server's results.
    pub server: SideOutcome,
    /// The client's results.
    pub client: SideOutcome,
}

impl Outcome {
    /// Returns the results of one side.
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
    /// The local device's plugin.
    pub device: PathBuf,
}

impl Paths {
    /// Finds the files: by `RDMASOCK_LIBRARY` and `RDMASOCK_COMMAND`, or beside the scenario binary.
    pub fn find(scenario: &Path) -> Self {
        let beside = |name: &str| scenario.with_file_name(name);
        let named = std::env::var_os("RDMASOCK_LIBRARY").map(PathBuf::from);
        let library = named.unwrap_or_else(|| beside("librdmasock.so"));
        let release = if cfg!(debug_assertions) { "" } else { " --release" };
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
            device: beside("deps/librdmasock_localnic.so"),
        }
    }
}

impl Paths {
    /// Returns the stand-in for rdma-core; the first call compiles it.
    pub fn standin(&self) -> Result<Arc<Standin>> {
        Standin::get(self.library.as_ref().map_err(|why| anyhow!("{why}"))?)
    }

    /// Sets the variables by which a program moves its connections to the device of a mode, as `words` describe that
    /// device.
    pub fn set_device(&self, mode: Mode, words: &str, command: &mut Command) -> Result<()> {
        if Mode::PLUGIN.contains(&mode) {
            self.standin()?.set(command, words);
        } else {
            command
                .env("RDMASOCK_DEV_LOCAL_DEVICE", &self.device)
                .env("LOCALNIC", words)
                // Peers ask by name, as within a host: a single control port would serve all tests that run at once.
                .env("RDMASOCK_CONTROL_PORT", "0");
        }
        Ok(())
    }

    /// Returns the files to preload for the library with the registered allocator, which lies beside it.
    pub fn with_allocator(&self) -> Result<String> {
        let library = self.library.as_ref().map_err(|why| anyhow!("{why}"))?;
        let allocator = library.with_file_name("librdmasock_alloc.so");
        let release = if cfg!(debug_assertions) { "" } else { " --release" };
        if !allocator.is_file() {
            bail!(
                "no {}: build it with `cargo build{release} -p rdmasock-alloc`",
                allocator.display()
            );
        }
        Ok(format!("{}:{}", library.display(), allocator.display()))
    }
}

/// Removes LD_PRELOAD and every `RDMASOCK*` variable from `command`, except those for logging. Sets RUST_BACKTRACE=0,
/// so that a failed expectation is one line.
pub fn clean_environment(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("RDMASOCK") && !text.starts_with("RDMASOCK_LOG") {
            command.env_remove(&name);
        }
    }
    command.env_remove("LD_PRELOAD").env("RUST_BACKTRACE", "0");
}

/// Where a side runs, and in what.
#[derive(Clone, Copy)]
struct Place<'a> {
    dir: &'a Path,
    environment: Option<&'a Environment>,
}

impl Place<'_> {
    fn file(&self, side: Side, what: &str) -> PathBuf {
        self.dir.join(format!("{}.{what}", side.name()))
    }

    /// Makes the files that a side writes. They are pipes where the environment may limit files or change the side's
    /// user.
    fn make(&self, side: Side) -> Result<Vec<(&'static str, fs::File)>> {
        let mut made = Vec::new();
        for what in ["transcript", "output"] {
            let path = self.file(side, what);
            let mut options = fs::OpenOptions::new();
            options.read(true).write(true);
            if self.environment.is_some() {
                nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?;
                options.custom_flags(libc::O_NONBLOCK);
            } else {
                options.create(true);
            }
            made.push((what, options.open(&path)?));
        }
        Ok(made)
    }

    /// Returns the command that plays a side, with its launcher.
    fn command(&self, paths: &Paths, side: Side, library: Option<&Path>) -> Command {
        let program = &paths.scenario;
        let mut command = Command::new(program);
        clean_environment(&mut command);
        let Some(environment) = self.environment else {
            if let Some(library) = library {
                command.env("LD_PRELOAD", library);
            }
            return command;
        };
        let of_kernel = Path::new("none");
        let word = |word: &String| {
            word.replace("{dir}", &self.dir.to_string_lossy())
                .replace("{side}", side.name())
                .replace("{program}", &program.to_string_lossy())
                .replace("{library}", &library.unwrap_or(of_kernel).to_string_lossy())
        };
        command
            .args(["helper", "within"])
            .arg(library.unwrap_or(of_kernel))
            .args(environment.before.iter().map(word))
            .arg("--")
            .arg(program);
        for inside in environment.inside.iter().map(word) {
            command.args(["--enter", &inside]);
        }
        for listening in environment.listening.iter().map(word) {
            command.args(["--enter-listening", &listening]);
        }
        command
    }
}

/// A running side; killed with its children if it is still there when this is dropped.
struct Running {
    side: Side,
    child: Child,
    exit: Option<ExitStatus>,
    written: Vec<(&'static str, fs::File)>,
}

impl Running {
    fn start(paths: &Paths, scenario: &Scenario, mode: Mode, side: Side, place: Place) -> Result<Self> {
        let written = place.make(side)?;
        let output = || fs::File::options().append(true).open(place.file(side, "output"));
        let library = if mode.preloads(side) {
            let library = paths.library.as_ref().map_err(|why| anyhow!("{why}"))?;
            Some(library.as_path())
        } else {
            None
        };
        let mut command = place.command(paths, side, library);
        command
            .args(["--name", &scenario.name, "--side", side.name()])
            .arg("--dir")
            .arg(place.dir)
            .stdin(Stdio::null())
            .stdout(output()?)
            .stderr(output()?)
            .process_group(0);
        if !mode.is_plain() && scenario.warms_up {
            command.arg("--observed");
        }
        if mode.storms() {
            command.arg("--storm");
        }
        if library.is_some() {
            // Soon, so that a scenario need not go on for long.
            command.env("RDMASOCK_PROMOTE_AFTER", "2r,16K");
            if let Some(device) = mode.device() {
                paths.set_device(mode, &words(device, scenario.device), &mut command)?;
            }
            if scenario.env.iter().any(|(name, _)| *name == "RDMASOCK_ALLOC") {
                command.env("LD_PRELOAD", paths.with_allocator()?);
            }
            let dir = place.dir.to_string_lossy();
            let variables = scenario.env.iter();
            command.envs(variables.map(|(name, value)| (name, value.replace("{dir}", &dir))));
            let held = scenario.held.iter().filter(|(held, _)| *held == side);
            command.envs(held.map(|(_, point)| ("POINT_TO_HOLD", point)));
        }
        let child = command
            .spawn()
            .with_context(|| format!("starting {}", paths.scenario.display()))?;
        Ok(Self {
            side,
            child,
            exit: None,
            written,
        })
    }

    fn has_ended(&mut self) -> Result<bool> {
        if self.exit.is_none() {
            self.exit = self.child.try_wait()?;
        }
        Ok(self.exit.is_some())
    }

    fn outcome(&self) -> SideOutcome {
        let text = |what: &str| {
            let mut bytes = Vec::new();
            let mut file = &self.written.iter().find(|(name, _)| *name == what).unwrap().1;
            // A pipe gives EAGAIN at its end. This end is open for writing too, and the read need not wait for children
            // that hold a copy.
            let _ = file.read_to_end(&mut bytes);
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

/// Plays `scenario` in `mode` and checks that it was promoted, or not, as the mode demands.
pub fn play(paths: &Paths, scenario: &Scenario, mode: Mode) -> Result<Outcome> {
    play_in(None, paths, scenario, mode)
}

/// As [`play`], with both sides in an environment.
pub fn play_in(environment: Option<&Environment>, paths: &Paths, scenario: &Scenario, mode: Mode) -> Result<Outcome> {
    let dir = tempfile::tempdir()?;
    let dir = dir.path();
    if environment.is_some() {
        // The sides may run as another user.
        fs::set_permissions(dir, fs::Permissions::from_mode(0o777))?;
    }
    let place = Place { dir, environment };
    let start = Instant::now();
    let mut server = Running::start(paths, scenario, mode, Side::Server, place)?;
    let mut client = Running::start(paths, scenario, mode, Side::Client, place)?;
    let mut seen = None;
    while start.elapsed() < TIME_LIMIT {
        let ended = [server.has_ended()?, client.has_ended()?];
        if ended == [true, true] {
            break;
        }
        let failed = |r: &Running| r.exit.is_some_and(|e| e.code() == Some(101));
        if failed(&server) || failed(&client) {
            // The other side would wait for this side until the time limit.
            std::thread::sleep(Duration::from_millis(200));
            server.has_ended()?;
            client.has_ended()?;
            break;
        }
        if !mode.is_plain() && seen.is_none() && dir.join(WARM).exists() {
            seen = Some(match environment.map(|e| e.outcome) {
                Some(environment::Outcome::Plain(reason)) => watch_plain(paths, reason, &server, &client),
                Some(environment::Outcome::Any) => Ok(()),
                Some(environment::Outcome::Unknown) => watch_unknown(paths, &server, &client),
                _ => watch(paths, mode, &server, &client),
            });
            fs::write(dir.join(SEEN), b"")?;
        }
        if dir.join(ASKED).exists() {
            fs::remove_file(dir.join(ASKED))?;
            let answer = match mode.device() {
                Some(_) => {
                    let counts = COUNTED.map(|event| received(paths, event, [&server, &client]));
                    let [written, read, landed] = counts;
                    format!("{} {} {}", written?, read?, landed?)
                }
                None => String::new(),
            };
            fs::write(dir.join("answer"), answer)?;
            fs::rename(dir.join("answer"), dir.join(ANSWERED))?;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let outcome = Outcome {
        server: server.outcome(),
        client: client.outcome(),
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

/// Returns the device's words, the scenario's, and those of the caller's `LOCALNIC` (such as `thread`).
fn words(device: &str, of_scenario: &str) -> String {
    let more = std::env::var("LOCALNIC").unwrap_or_default();
    format!("{device},{of_scenario},{more}")
}

/// Returns the count of an event at both sides: see [`Ctx::past_the_rings`](crate::ctx::Ctx::past_the_rings).
fn received(paths: &Paths, event: &str, sides: [&Running; 2]) -> Result<u64> {
    let counts = sides.map(|side| count(&paths.command, side.child.id(), event));
    counts.into_iter().map(|count| Ok(count?.unwrap_or(0))).sum()
}

/// Waits for the promotion in mode `both`; makes sure that there is none in the others.
fn watch(paths: &Paths, mode: Mode, server: &Running, client: &Running) -> Result<()> {
    let ask = |r: &Running| -> Result<Promotion> {
        promotion_state(&paths.command, r.child.id())?
            .ok_or_else(|| anyhow!("the {} is not among the instances", r.side.name()))
    };
    let end = Instant::now() + PROMOTION_LIMIT;
    if mode.preloads(Side::Server) && mode.preloads(Side::Client) {
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
    let with = if mode.preloads(Side::Server) { server } else { client };
    std::thread::sleep(Duration::from_millis(30));
    let state = ask(with)?;
    if state.promoted > 0 || state.on_link > 0 {
        bail!("promoted although only the {} has the library", with.side.name());
    }
    Ok(())
}

/// Waits until one end reports that it stays on TCP because of `reason`, and neither is on a link.
fn watch_plain(paths: &Paths, reason: &str, server: &Running, client: &Running) -> Result<()> {
    let end = Instant::now() + PROMOTION_LIMIT;
    loop {
        let mut given = Vec::new();
        let mut on_link = 0;
        for side in [server, client] {
            let pid = side.child.id();
            // The command fails if the library has no entry for the other end.
            given.extend(reasons(&paths.command, pid).unwrap_or_default());
            let state = promotion_state(&paths.command, pid).unwrap_or_default();
            on_link += state.map_or(0, |state| state.on_link);
        }
        if on_link == 0 && given.iter().any(|given| given.contains(reason)) {
            return Ok(());
        }
        if Instant::now() > end {
            bail!("not on TCP because of {reason}: {on_link} ends on a link, {given:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Makes sure that neither end is among the instances.
fn watch_unknown(paths: &Paths, server: &Running, client: &Running) -> Result<()> {
    for side in [server, client] {
        if let Ok(Some(state)) = promotion_state(&paths.command, side.child.id()) {
            bail!("the {} is an instance: {state:?}", side.side.name());
        }
    }
    Ok(())
}

/// Returns both transcripts with the output of the sides; of a long transcript, only the end.
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
        self.get_in(None, paths, scenario)
    }

    /// The outcome of `scenario` on kernel TCP in an environment.
    pub fn get_in(
        &self,
        environment: Option<&Environment>,
        paths: &Paths,
        scenario: &Scenario,
    ) -> Result<Outcome, String> {
        let place = environment.map_or("", |e| e.name);
        let slot = {
            let mut known = self.known.lock().unwrap();
            let name = format!("{place}/{}", scenario.name);
            Arc::clone(known.entry(name).or_default())
        };
        let played = || play_in(environment, paths, scenario, Mode::Kernel);
        slot.get_or_init(|| played().map_err(|e| format!("{e:#}"))).clone()
    }
}

/// Returns the difference between two outcomes; `None` if they are equal.
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

/// Returns the lines that differ, with up to three equal lines before and after.
fn diff(a: &str, b: &str) -> String {
    const AROUND: usize = 3;
    let (a, b): (Vec<_>, Vec<_>) = (a.lines().collect(), b.lines().collect());
    let same = |x: &[&str], y: &[&str]| x.iter().zip(y).take_while(|(p, q)| p == q).count();
    let head = same(&a, &b);
    let reversed = |x: &[&str]| -> Vec<_> { x[head..].iter().rev().copied().map(String::from).collect() };
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
