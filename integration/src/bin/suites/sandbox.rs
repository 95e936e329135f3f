//! Runs a process of a suite so that no later process, and none that runs at the same time, can notice it. The process
//! has its own loopback, temporary files, shared memory and process ids; all its processes end with it. It has a
//! scratch folder that is removed, and no variable of the user's environment.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rdmasock_integration::proc::Cmd;
use rdmasock_integration::signals;

use crate::case::{Job, Outcome, Way};

/// The interval between checks for silence.
const TICK: Duration = Duration::from_millis(50);

/// Brings loopback up, and stays as the first process of the namespace. It reaps children, and the job that it starts
/// gets signals as any other process does.
///
/// The first argument is a folder to lay over /usr/share. The second is a folder that other users may not enter. The
/// third is the folder of the suites, which the job's user has to see. /tmp and the second folder are covered by empty
/// folders that contain only the third.
///
/// Process ids begin anew in each job, so a job must not find files that another job has named after a process id.
/// /dev, /etc and /usr are read-only: suites that run as root make files there, and change the modes of devices.
const INIT: &str = r#"ip link set lo up || exit 125
[ -z "$1" ] || mount -t overlay -o "ro,lowerdir=$1:/usr/share" overlay /usr/share || exit 125
cover() { mount --bind "$3" /mnt && mount -t tmpfs -o "mode=$2" none "$1" && mkdir -p "$3" && mount --move /mnt "$3"; }
cover /tmp 1777 "$3" || exit 125
[ -z "$2" ] || cover "$2" 755 "$3" || exit 125
for dir in /dev /etc /usr; do mount --rbind "$dir" "$dir" && mount -o remount,bind,ro "$dir" || exit 125; done
mount -t tmpfs -o mode=1777 none /dev/shm || exit 125
shift 3; "$@" 2>&1; exit $?"#;

/// The end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The process exited with this status. After a signal the status is 128 plus the signal's number.
    Exited(i32),
    /// The process was stopped, for its silence or at its limit.
    Stopped,
}

impl End {
    /// Returns the outcome of a process that is one case.
    pub fn outcome(self) -> Outcome {
        match self {
            Self::Exited(0) => Outcome::Passed,
            Self::Exited(_) => Outcome::Failed,
            Self::Stopped => Outcome::Unfinished,
        }
    }
}

/// The results of a process that has ended.
#[derive(Debug)]
pub struct Ran {
    pub end: End,
    /// Standard output and error.
    pub output: String,
    /// Ends of connections that were promoted; 0 unless the process was counted.
    pub promoted: usize,
}

/// The folders in which jobs run, and the library that they get.
#[derive(Debug)]
pub struct Sandbox {
    library: PathBuf,
    /// The folder of the suites; the folder of the jobs is below it.
    base: PathBuf,
    root: PathBuf,
    next: AtomicU32,
}

/// A folder that is removed when this object is dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder that cannot be removed does no harm: the next run clears the folder above.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Sandbox {
    /// Makes the folder of this process's jobs below `base`, with a copy of `library`.
    ///
    /// # Errors
    /// If the folder or the copy cannot be made.
    pub fn new(library: &Path, base: PathBuf) -> Result<Self> {
        let root = base.join(format!("run-{}", std::process::id()));
        if root.exists() {
            std::fs::remove_dir_all(&root)?;
        }
        std::fs::create_dir_all(&root).with_context(|| root.display().to_string())?;
        let copy = root.join("librdmasock.so");
        std::fs::copy(library, &copy).with_context(|| library.display().to_string())?;
        Ok(Self {
            library: copy,
            base,
            root,
            next: AtomicU32::new(0),
        })
    }

    /// Makes an empty folder, in which every user may make files.
    ///
    /// # Errors
    /// If the folder cannot be made.
    pub fn scratch(&self) -> Result<Scratch> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.root.join(number.to_string());
        std::fs::create_dir(&path)?;
        open_to_all(&path)?;
        Ok(Scratch(path))
    }

    /// Runs `job`. If `counted`, the library logs into the scratch folder, and its promotions are counted.
    ///
    /// # Errors
    /// If the job cannot be started, or the run is interrupted.
    pub fn run(&self, job: &Job, way: Way, scratch: &Path, counted: bool) -> Result<Ran> {
        let temp = scratch.join("tmp");
        let logs = scratch.join("log");
        for dir in [&temp, &logs] {
            std::fs::create_dir_all(dir)?;
            open_to_all(dir)?;
        }
        let output = scratch.join("output");
        let closed = match job.user {
            Some(_) => closed_above(&self.base).unwrap_or_default(),
            None => PathBuf::new(),
        };
        let mut proc = Cmd::new("unshare", output.clone())?
            .args(["--net", "--ipc", "--pid", "--fork", "--kill-child"])
            .args(["--mount-proc"])
            .args(["sh", "-c", INIT, "init"])
            .args([job.over_share.clone().unwrap_or_default(), closed, self.base.clone()])
            .args(self.command(job, way, scratch, counted))
            .spawn()?;
        let (mut ran, mut silent, mut heard) = (Duration::ZERO, Duration::ZERO, 0);
        let mut looked = Instant::now();
        let end = loop {
            if !proc.is_running() {
                let never = || Ok(());
                let status = proc.wait(Instant::now(), never)?;
                break End::Exited(status.code().unwrap_or(-1));
            }
            // A step counts as at most 20 ticks. A longer stop of the whole machine, such as a virtual machine, is no
            // silence.
            let step = looked.elapsed().min(TICK * 20);
            looked = Instant::now();
            ran += step;
            silent += step;
            let length = said(&output) + said(&scratch.join("cases"));
            if length != heard {
                (silent, heard) = (Duration::ZERO, length);
            }
            if silent > job.silence || ran > job.limit {
                break End::Stopped;
            }
            if signals::is_interrupted() {
                bail!("interrupted");
            }
            std::thread::sleep(TICK);
        };
        drop(proc);
        let text = std::fs::read(&output).unwrap_or_default();
        Ok(Ran {
            end,
            output: String::from_utf8_lossy(&text).into_owned(),
            promoted: promotions(&logs),
        })
    }

    /// Returns the arguments after the first three of `INIT`: the user, the environment, the folder, and the job's own.
    fn command(&self, job: &Job, way: Way, scratch: &Path, counted: bool) -> Vec<String> {
        let temp = scratch.join("tmp");
        let dir = match &job.dir {
            Some(dir) => scratch.join(dir),
            None => temp.clone(),
        };
        let mut words: Vec<String> = Vec::new();
        if let Some(user) = job.user {
            words.extend(["setpriv", "--reuid", user, "--regid", "nogroup"].map(Into::into));
            words.push("--clear-groups".into());
        }
        words.extend(["env", "-i", "-C"].map(Into::into));
        words.push(dir.display().to_string());
        let temp = temp.display();
        words.push("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into());
        words.extend(["LANG=C.UTF-8".into(), "TERM=dumb".into(), "USER=root".into()]);
        words.push(format!("TMPDIR={temp}"));
        words.push(format!("HOME={temp}"));
        words.extend(job.env.iter().map(|(key, value)| format!("{key}={value}")));
        if way != Way::Kernel {
            words.push(format!("LD_PRELOAD={}", self.library.display()));
            if counted {
                let logs = scratch.join("log");
                words.push("RDMASOCK_LOG=rdmasock::promote=debug".into());
                words.push(format!("RDMASOCK_LOG_FILE={}/%p", logs.display()));
            }
        }
        if way == Way::AtOnce {
            words.push("RDMASOCK_PROMOTE_AFTER=0".into());
        }
        words.extend(job.command.iter().cloned());
        words
    }
}

/// Allows every user to write into `dir`, for jobs that run as another user.
fn open_to_all(dir: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o1777))?)
}

/// Returns the highest folder above `dir` that other users may not enter, or `None`.
fn closed_above(dir: &Path) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let is_closed = |dir: &&Path| std::fs::metadata(dir).is_ok_and(|data| data.permissions().mode() & 1 == 0);
    dir.ancestors().filter(is_closed).last().map(Path::to_owned)
}

fn said(file: &Path) -> u64 {
    std::fs::metadata(file).map_or(0, |data| data.len())
}

/// Returns the number of ends of connections that logged a promotion.
fn promotions(logs: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(logs) else {
        return 0;
    };
    entries
        .flatten()
        .filter_map(|entry| std::fs::read(entry.path()).ok())
        .map(|text| {
            String::from_utf8_lossy(&text)
                .lines()
                .filter(|line| line.contains(" promoted"))
                .count()
        })
        .sum()
}
