//! Child processes that never outlive their owner. Each runs in a process group of its own, with its output in a file.
//! Dropping the owner ends and reaps the whole group.

use std::fs::{File, OpenOptions};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Gid, Pid, Uid};

use crate::filter::Filter;
use crate::signals;

/// The interval between checks of a wait.
const TICK: Duration = Duration::from_millis(5);
/// The time that a program has to end by itself after SIGTERM.
const GRACE: Duration = Duration::from_secs(20);

/// A command and the file that its output goes to.
#[derive(Debug)]
pub struct Cmd {
    command: Command,
    name: String,
    log: PathBuf,
    stdin: Stdio,
}

impl Cmd {
    /// Makes a command of `program`, which is searched with [`find`]. Standard output and error go to `log` (which is
    /// replaced) and `log` + ".err".
    ///
    /// If the program is not installed; the text names the remedy.
    pub fn new(program: &str, log: PathBuf) -> Result<Self> {
        let path = find(program)?;
        Ok(Self {
            command: Command::new(path),
            name: program.rsplit('/').next().unwrap_or(program).to_owned(),
            log,
            stdin: Stdio::null(),
        })
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<I: IntoIterator<Item: AsRef<std::ffi::OsStr>>>(mut self, args: I) -> Self {
        self.command.args(args);
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, key: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    /// Connects standard input to a file.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn stdin_file(mut self, path: &Path) -> Result<Self> {
        self.stdin = File::open(path).with_context(|| path.display().to_string())?.into();
        Ok(self)
    }

    /// Connects standard input to a pipe, whose write end is [`Proc::stdin`].
    #[must_use]
    pub fn stdin_pipe(mut self) -> Self {
        self.stdin = Stdio::piped();
        self
    }

    /// Sets the user and group that the program runs as; only root may do so.
    #[must_use]
    pub fn owner(mut self, user: Uid, group: Gid) -> Self {
        self.command.uid(user.as_raw()).gid(group.as_raw());
        self
    }

    /// Restricts the program's system calls by `filter` from its beginning.
    #[must_use]
    pub fn confined(mut self, filter: Filter) -> Self {
        // SAFETY: loading is async-signal-safe, and the filter was made before the fork.
        unsafe {
            self.command.pre_exec(move || filter.load());
        }
        self
    }

    /// Starts the program.
    ///
    /// # Errors
    /// If the log cannot be written or the program cannot be executed.
    pub fn spawn(mut self) -> Result<Proc> {
        let create = |path: &Path| OpenOptions::new().create(true).write(true).truncate(true).open(path);
        let err_log = self.log.with_extension("err");
        self.command
            .stdin(self.stdin)
            .stdout(create(&self.log)?)
            .stderr(create(&err_log)?)
            .process_group(0);
        // SAFETY: prctl is async-signal-safe and touches no memory of this process; it runs between fork and exec.
        unsafe {
            self.command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let child = self.command.spawn().with_context(|| format!("start {}", self.name))?;
        Ok(Proc {
            child,
            name: self.name,
            log: self.log,
        })
    }
}

/// A running child. On drop it is ended and reaped with its process group.
#[derive(Debug)]
pub struct Proc {
    child: Child,
    name: String,
    log: PathBuf,
}

impl Proc {
    /// Returns the process id, which is also the id of the process group.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the program's name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the write end of the child's standard input. Returns `None` the second time, or without
    /// [`Cmd::stdin_pipe`].
    pub fn stdin(&mut self) -> Option<std::process::ChildStdin> {
        self.child.stdin.take()
    }

    /// Returns the bytes that the child has written to standard output so far.
    pub fn stdout(&self) -> Vec<u8> {
        std::fs::read(&self.log).unwrap_or_default()
    }

    /// Returns the text that the child has written to standard output so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout()).into_owned()
    }

    /// Sends a signal to the child, not to its group.
    ///
    /// # Errors
    /// If kill(2) fails.
    pub fn signal(&self, signal: Signal) -> nix::Result<()> {
        kill(self.nix_pid(), signal)
    }

    /// Returns whether the child is still running, and reaps it if it has ended.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until the child ends, and calls `watch` again and again.
    ///
    /// # Errors
    /// At `deadline`, on an interrupt, or if `watch` fails. The program is then still running.
    pub fn wait(&mut self, deadline: Instant, mut watch: impl FnMut() -> Result<()>) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            watch()?;
            pause(deadline).with_context(|| format!("{} has not ended", self.name))?;
        }
    }

    /// Waits for a successful end and returns standard output.
    ///
    /// # Errors
    /// As [`Proc::wait`], or if the program exits with a failure; the error has the end of its output.
    pub fn success(mut self, deadline: Instant, watch: impl FnMut() -> Result<()>) -> Result<Vec<u8>> {
        let status = self.wait(deadline, watch)?;
        if !status.success() {
            bail!("{}", self.obituary(status));
        }
        Ok(self.stdout())
    }

    /// Checks that the child is still running.
    ///
    /// # Errors
    /// If the child has ended; the error has the end of its output.
    pub fn check_running(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{}", self.obituary(status)),
        }
    }

    fn obituary(&self, status: ExitStatus) -> String {
        let how = match status.signal() {
            Some(signal) => format!("was killed by signal {signal}"),
            None => format!("exited with status {}", status.code().unwrap_or(-1)),
        };
        let output = |path: &Path| tail(&std::fs::read(path).unwrap_or_default(), 600);
        let (out, err) = (output(&self.log), output(&self.log.with_extension("err")));
        format!("{} {how}\n  stdout: {out}\n  stderr: {err}", self.name)
    }

    fn nix_pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Returns whether the child has ended. Leaves it unreaped, so that the id of its process group stays taken.
    fn has_ended(&self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        !matches!(waitid(Id::Pid(self.nix_pid()), flags), Ok(WaitStatus::StillAlive))
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        // After the reaping, another process group may get this id. So the group gets signals only before.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = kill(self.nix_pid(), Signal::SIGTERM);
            let deadline = Instant::now() + GRACE;
            while !self.has_ended() && Instant::now() < deadline {
                std::thread::sleep(TICK);
            }
            let _ = killpg(self.nix_pid(), Signal::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

/// Sleeps for `TICK`.
///
/// # Errors
/// If `deadline` has passed, or if the user has interrupted the run.
pub fn pause(deadline: Instant) -> Result<()> {
    if signals::is_interrupted() {
        bail!("interrupted");
    }
    if Instant::now() >= deadline {
        bail!("timed out");
    }
    std::thread::sleep(TICK);
    Ok(())
}

/// Waits until `done` is true.
///
/// # Errors
/// If [`pause`] fails, with `what` for context, or if `done` fails.
pub fn wait_until(what: &str, deadline: Instant, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    while !done()? {
        pause(deadline).with_context(|| format!("waiting for {what}"))?;
    }
    Ok(())
}

/// Returns the path of an installed program. The distribution's directories come before `PATH`, so that no shell
/// wrapper of a version manager is measured.
///
/// If the program is not installed; the text names the remedy.
pub fn find(program: &str) -> Result<PathBuf> {
    if program.contains('/') {
        return Ok(program.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    ["/usr/bin", "/usr/sbin", "/bin", "/usr/local/bin"]
        .into_iter()
        .map(PathBuf::from)
        .chain(std::env::split_paths(&path))
        .map(|dir| dir.join(program))
        .find(|candidate| candidate.is_file())
        .with_context(|| {
            format!("{program} is not installed; scripts/test, scripts/demo and scripts/never-slower install what they use with apt")
        })
}

/// Returns the last `limit` bytes of some output, trimmed, for messages.
pub fn tail(output: &[u8], limit: usize) -> String {
    let start = output.len().saturating_sub(limit);
    String::from_utf8_lossy(output.get(start..).unwrap_or_default())
        .trim()
        .to_owned()
}
