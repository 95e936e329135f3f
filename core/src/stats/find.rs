//! Finds the pages of running instances, by the links of `/proc/<pid>/fd`.
//!
//! Runs in tools and tests, never in the preloaded library, hence std::fs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use super::codes::MEMFD_NAME;
use super::read::{InstanceSnapshot, ReadError, StatsReader};
use super::sleepers::SleeperSnapshot;

/// An instance among the running processes.
#[derive(Clone, Debug)]
pub struct Process {
    /// Pid as the calling process sees it.
    pub pid: u32,
    /// Real uid, from the kernel.
    pub uid: u32,
    /// Its counters.
    pub instance: InstanceSnapshot,
}

/// Returns all instances that the caller may read, by pid. Root may read the instances of all users, other users their
/// own.
///
/// # Errors `/proc` cannot be listed. A process that ends meanwhile, or that the caller may not read, is left out.
pub fn instances() -> io::Result<Vec<Process>> {
    let mut pids: Vec<u32> = fs::read_dir("/proc")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    Ok(pids
        .into_iter()
        .filter_map(|pid| instance_of(pid).ok().flatten())
        .collect())
}

/// Returns the instance that process `pid` is. `None` if it runs without the library.
///
/// # Errors There is no such process, the caller may not read it, or its page cannot be read.
pub fn instance_of(pid: u32) -> Result<Option<Process>, ReadError> {
    let link_text = format!("/memfd:{MEMFD_NAME}");
    let links: Vec<PathBuf> = descriptors(pid)?
        .into_iter()
        .filter(|path| {
            fs::read_link(path).is_ok_and(|to| {
                let to = to.to_string_lossy();
                to.trim_end_matches(" (deleted)") == link_text
            })
        })
        .collect();
    if links.is_empty() {
        return Ok(None);
    }
    let (uid, own_pid) = identity(pid)?;
    let mut failure = None;
    for link in links {
        match StatsReader::open(&link) {
            // A fork child may still have its parent's page open: that page is not its own.
            Ok(reader) if reader.pid() != own_pid => {}
            Ok(reader) => {
                let mut instance = reader.read()?;
                name_threads(&mut instance.sleepers, pid, own_pid);
                return Ok(Some(Process { pid, uid, instance }));
            }
            Err(error) => failure = Some(error),
        }
    }
    failure.map_or(Ok(None), Err)
}

/// Translates the sleepers' thread ids for the calling process, which may be in another pid namespace than process
/// `pid`. Removes sleepers whose thread has ended without waking up.
fn name_threads(sleepers: &mut Vec<SleeperSnapshot>, pid: u32, own_pid: u32) {
    let task = format!("/proc/{pid}/task");
    if pid == own_pid {
        return sleepers.retain(|s| {
            let is_there = |t| Path::new(&task).join(u32::to_string(&t)).exists();
            s.thread.is_none_or(is_there)
        });
    }
    let threads = fs::read_dir(task).into_iter().flatten().filter_map(|t| {
        let t: u32 = t.ok()?.file_name().to_str()?.parse().ok()?;
        Some((identity(t).ok()?.1, t))
    });
    let names: HashMap<u32, u32> = threads.collect();
    sleepers.retain_mut(|s| {
        let Some(own) = s.thread else { return true };
        s.thread = names.get(&own).copied();
        s.thread.is_some()
    });
}

/// Returns the links of a process's open fds. A main thread that has ended before the others has none. Then the links
/// of another thread stand for the process.
fn descriptors(pid: u32) -> io::Result<Vec<PathBuf>> {
    let list = |of: PathBuf| -> io::Result<Vec<PathBuf>> {
        let entries = fs::read_dir(of)?;
        Ok(entries.filter_map(|e| Some(e.ok()?.path())).collect())
    };
    let own = list(format!("/proc/{pid}/fd").into())?;
    if !own.is_empty() {
        return Ok(own);
    }
    let threads = list(format!("/proc/{pid}/task").into())?;
    let theirs = threads.into_iter().filter_map(|t| list(t.join("fd")).ok());
    Ok(theirs.into_iter().find(|l| !l.is_empty()).unwrap_or_default())
}

/// Returns the real uid of a process, and its pid in its own (innermost) pid namespace.
fn identity(pid: u32) -> io::Result<(u32, u32)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let uid = field("Uid:").and_then(|ids| ids.split_whitespace().next()?.parse().ok());
    let inner = field("NSpid:").and_then(|pids| pids.split_whitespace().last()?.parse().ok());
    let uid = uid.ok_or_else(|| io::Error::other("no Uid in its status"))?;
    Ok((uid, inner.unwrap_or(pid)))
}
