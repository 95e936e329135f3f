//! How much memory rings may take where a control group limits the process's memory (cgroups(7), versions 1 and 2). The
//! kernel charges a page of a ring to the process that touches it first. If a group exceeds its limit, the kernel kills
//! a process of the group. The service thread reads the group's files and stores how many bytes rings may take. A ring
//! that grows, or a send buffer, takes its bytes from that number. Limits of the address space are checked elsewhere
//! ([`has_few_addresses`](crate::objects::link::has_few_addresses)).
//!
//! Half of the group's limit is left to the program. The bytes in use are subtracted from the other half, and rings may
//! take half of the remainder: (limit / 2 - used) / 2. The service thread reads the files at its start, when a ring
//! grows, and then every second until no ring is large. Each reading replaces the stored number. Pages of files do not
//! count as used, since the kernel can reclaim them.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

use rdmasock_core::os::dir;

use crate::objects::library::Library;
use crate::objects::mailbox::Command;

/// Bytes that rings may still take before the service thread reads the files again; `u64::MAX` without a limit.
static LEFT: AtomicU64 = AtomicU64::new(u64::MAX);
/// Whether a ring was refused memory since the service thread last read the files.
static IS_SHORT: AtomicBool = AtomicBool::new(false);

/// At index 0 for cgroup version 2, at index 1 for version 1: the mount point, the names of the files with the limit
/// and the usage, and the prefix of the names in memory.stat.
const VERSIONS: [(&str, [&str; 2], &str); 2] = [
    ("/sys/fs/cgroup", ["memory.max", "memory.current"], ""),
    (
        "/sys/fs/cgroup/memory",
        ["memory.limit_in_bytes", "memory.usage_in_bytes"],
        "total_",
    ),
];

/// Subtracts the `bytes` of a ring or send buffer from the bytes that rings may still take. False, without a change, if
/// fewer are left.
pub(crate) fn take(bytes: u64) -> bool {
    let without = |left: u64| match left {
        u64::MAX => Some(left),
        left => left.checked_sub(bytes),
    };
    let is_taken = LEFT.fetch_update(AcqRel, Acquire, without).is_ok();
    if !is_taken && !IS_SHORT.swap(true, AcqRel) {
        // The service thread reads the files again within a second.
        Library::get().service.submit(Command::Grown);
    }
    is_taken
}

/// Adds `bytes` to what rings may still take. [`take`] has subtracted them, for a ring that then could not be offered
/// to the peer.
pub(crate) fn give_back(bytes: u64) {
    let with = |left: u64| (left != u64::MAX).then(|| left.saturating_add(bytes));
    let _ = LEFT.fetch_update(AcqRel, Acquire, with);
}

/// Returns whether rings may still take `bytes`. Subtracts nothing.
pub(crate) fn has(bytes: u64) -> bool {
    LEFT.load(Acquire) >= bytes
}

/// Returns whether a ring was refused memory since the service thread last read the files.
pub(crate) fn is_short() -> bool {
    IS_SHORT.load(Acquire)
}

/// Reads the files of the control groups and stores how many bytes rings may take. Service thread only.
pub(crate) fn look() {
    LEFT.store(left("").unwrap_or(u64::MAX), Release);
    IS_SHORT.store(false, Relaxed);
}

/// Returns how many bytes rings may take, by the tightest limit among the process's group and the groups above it.
/// `None` if no limit can be read. `root` is empty, or the folder that has a test's files.
fn left(root: &str) -> Option<u64> {
    let groups = dir::text(&format!("{root}/proc/self/cgroup")).ok()?;
    let paths = groups.lines().filter_map(|line| {
        let (_, line) = line.split_once(':')?;
        let (controllers, path) = line.split_once(':')?;
        let version = usize::from(!controllers.is_empty());
        let is_ours = version == 0 || controllers.split(',').any(|name| name == "memory");
        is_ours.then_some(())?;
        Some((VERSIONS.get(version)?, path))
    });
    let dirs = paths.flat_map(|(version, path)| {
        // The last path is empty and stands for the mount point itself. In a container that may be the process's own
        // group.
        let above = std::iter::successors(Some(path.trim_end_matches('/')), |path| Some(path.rsplit_once('/')?.0));
        above.map(move |path| (version, path))
    });
    dirs.filter_map(|((mount, names, prefix), path)| {
        let read = |name: &str| dir::text(&format!("{root}{mount}{path}/{name}")).ok();
        let [limit, used] = names.map(|name| read(name)?.trim().parse::<u64>().ok());
        // Version 1 writes "no limit" as a large number.
        let limit = limit.filter(|limit| *limit < 1 << 60)?;
        let stat = read("memory.stat").unwrap_or_default();
        let of_files = stat.lines().filter_map(|line| {
            let (name, bytes) = line.strip_prefix(prefix)?.split_once(' ')?;
            matches!(name, "active_file" | "inactive_file").then(|| bytes.parse::<u64>().ok())?
        });
        let used = used?.saturating_sub(of_files.sum());
        Some((limit / 2).saturating_sub(used) / 2)
    })
    .min()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn write(root: &Path, files: &[(&str, String)]) {
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn the_tightest_group_decides() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_str().unwrap();
        assert_eq!(left(root), None);
        write(dir.path(), &[("proc/self/cgroup", "0::/a/b\n".into())]);
        assert_eq!(left(root), None);
        write(
            dir.path(),
            &[
                ("sys/fs/cgroup/a/b/memory.max", "max\n".into()),
                ("sys/fs/cgroup/a/memory.max", format!("{}\n", 64 * MIB)),
                ("sys/fs/cgroup/a/memory.current", format!("{}\n", 50 * MIB)),
                (
                    "sys/fs/cgroup/a/memory.stat",
                    format!(
                        "anon {}\ninactive_file {}\nactive_file {}\n",
                        10 * MIB,
                        30 * MIB,
                        10 * MIB
                    ),
                ),
            ],
        );
        assert_eq!(left(root), Some(11 * MIB));
        write(
            dir.path(),
            &[
                ("sys/fs/cgroup/a/b/memory.max", format!("{}\n", 16 * MIB)),
                ("sys/fs/cgroup/a/b/memory.current", format!("{}\n", 9 * MIB)),
            ],
        );
        assert_eq!(left(root), Some(0));
    }

    #[test]
    fn version_one_is_read_where_it_is_mounted() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_str().unwrap();
        write(
            dir.path(),
            &[
                ("proc/self/cgroup", "8:pids:/\n4:memory,hugetlb:/box\n0::/\n".into()),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", format!("{}\n", 128 * MIB)),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", format!("{}\n", 40 * MIB)),
                (
                    "sys/fs/cgroup/memory/memory.stat",
                    format!("total_inactive_file {}\n", 8 * MIB),
                ),
            ],
        );
        // The group /box has no files here, so the mount point's are used.
        assert_eq!(left(root), Some(16 * MIB));
        let limit = "sys/fs/cgroup/memory/memory.limit_in_bytes";
        write(dir.path(), &[(limit, "9223372036854771712\n".into())]);
        assert_eq!(left(root), None);
    }
}
