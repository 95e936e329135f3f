//! Logs failures with their remedy. The first failure with a remedy is logged at the level `Error`, later ones at
//! `Debug`, because the library tries again with every peer.

use std::sync::atomic::{AtomicBool, Ordering};

use rdmasock_core::fabric::plugin::{Level, log};
use rustix::process::{Resource, getrlimit};

use crate::error::Errno;

/// Whether a remedy was logged at the level `Error` already.
static SAID: AtomicBool = AtomicBool::new(false);

/// Logs a text at the level `Debug`.
pub(crate) fn debug(text: std::fmt::Arguments<'_>) {
    log(Level::Debug, text);
}

/// Logs that `doing` has failed with this errno, and returns the errno.
pub(crate) fn explain(doing: &str, errno: Errno) -> Errno {
    match remedy(errno, getrlimit(Resource::Memlock).current) {
        Some(remedy) if !SAID.swap(true, Ordering::Relaxed) => {
            log(Level::Error, format_args!("verbs: {doing}: {remedy}"));
        }
        Some(remedy) => debug(format_args!("verbs: {doing}: {remedy}")),
        None => debug(format_args!("verbs: {doing}: {errno}")),
    }
    errno
}

/// Returns what the administrator can do about this errno. `memlock` is the limit on locked memory in bytes, `None` if
/// there is no limit. Returns `None` if no remedy is known.
fn remedy(errno: Errno, memlock: Option<u64>) -> Option<String> {
    match (errno.0, memlock) {
        (libc::ENOMEM | libc::EPERM | libc::EAGAIN, Some(limit)) => Some(format!(
            "the memlock limit is {} KiB: raise it with ulimit -l, or in /etc/security/limits.conf",
            limit / 1024
        )),
        (libc::ENOENT | libc::ENXIO, _) => Some("there is no /dev/infiniband/rdma_cm: modprobe rdma_ucm".to_owned()),
        (libc::EACCES | libc::EPERM, _) => {
            Some("no access to /dev/infiniband: give the user the right to read and write there".to_owned())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_helped_is_told() {
        let text = remedy(Errno(libc::ENOMEM), Some(65_536)).unwrap();
        assert!(text.contains("memlock limit is 64 KiB") && text.contains("ulimit -l"));
        assert!(remedy(Errno(libc::ENOENT), None).unwrap().contains("rdma_ucm"));
        assert!(remedy(Errno(libc::EACCES), None).unwrap().contains("/dev/infiniband"));
        assert_eq!(remedy(Errno(libc::ECONNREFUSED), Some(0)), None);
        assert_eq!(remedy(Errno(libc::ENOMEM), None), None);
    }
}
