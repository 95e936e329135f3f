//! A control group of this process's own that limits memory (cgroups(7)), where one may be made.

use std::fs;
use std::path::{Path, PathBuf};

/// A control group that is removed when it is dropped; it must be empty then.
#[derive(Debug)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes a group beside or below this process's own, which may use `bytes` of memory. The error is why there can be
    /// none.
    pub fn with_memory(bytes: u64) -> Result<Self, String> {
        Self::version_two(bytes).or_else(|why| Self::version_one(bytes).map_err(|other| format!("{why}; {other}")))
    }

    fn version_one(bytes: u64) -> Result<Self, String> {
        let all = fs::read_to_string("/proc/self/cgroup").map_err(|e| e.to_string())?;
        let mut groups = all.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let own = groups.find(|(controllers, _)| controllers.split(',').any(|name| name == "memory"));
        let (_, own) = own.ok_or("nor is this process in one of version 1 for memory")?;
        let path = format!("/sys/fs/cgroup/memory{own}/rdmasock-tests-{}", std::process::id());
        fs::create_dir(&path).map_err(|e| format!("{path}: {e}"))?;
        let made = Self(path.into());
        fs::write(made.0.join("memory.limit_in_bytes"), bytes.to_string()).map_err(|e| e.to_string())?;
        Ok(made)
    }

    /// Returns the file by which a process enters the group.
    pub fn entrance(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }

    fn version_two(bytes: u64) -> Result<Self, String> {
        let (root, own) = (mounted()?, own()?);
        let mut parents = own.ancestors().map(|path| root.join(path));
        let has_memory = |path: &PathBuf| {
            let given = fs::read_to_string(path.join("cgroup.subtree_control")).unwrap_or_default();
            given.split_whitespace().any(|name| name == "memory")
        };
        let parent = parents
            .find(has_memory)
            .ok_or("no control group of version 2 above this process gives its children the memory controller")?;
        let path = parent.join(format!("rdmasock-tests-{}", std::process::id()));
        fs::create_dir(&path).map_err(|e| format!("none can be made in {}: {e}", parent.display()))?;
        let made = Self(path);
        for (file, value) in [("memory.max", bytes.to_string()), ("memory.swap.max", "0".into())] {
            let file = made.0.join(file);
            fs::write(&file, value).map_err(|e| format!("{}: {e}", file.display()))?;
        }
        Ok(made)
    }

    /// Returns the word by which a launcher enters the group.
    pub fn word(&self) -> String {
        format!("cgroup:{}", self.0.display())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

fn mounted() -> Result<PathBuf, String> {
    let mounts = fs::read_to_string("/proc/mounts").map_err(|e| e.to_string())?;
    let mut fields = mounts.lines().map(|line| line.split(' '));
    let found = fields.find_map(|mut field| {
        let at = field.nth(1)?;
        (field.next() == Some("cgroup2")).then(|| PathBuf::from(at))
    });
    found.ok_or_else(|| "no control groups of version 2 are mounted".into())
}

/// Returns this process's group, relative to where groups are mounted.
fn own() -> Result<PathBuf, String> {
    let all = fs::read_to_string("/proc/self/cgroup").map_err(|e| e.to_string())?;
    let own = all.lines().find_map(|line| line.strip_prefix("0::/"));
    let own = own.ok_or("this process is in no control group of version 2")?;
    Ok(Path::new(own).to_path_buf())
}
