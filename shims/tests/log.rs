//! The log as a process has it: installed once, used by fork children and late destructors.
//! One test, because the subscriber is the process's.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::cell::Cell;
use std::fs;

use rdmasock_shims::config::{Config, log};

struct LogsWhenDropped;

impl Drop for LogsWhenDropped {
    fn drop(&mut self) {
        tracing::info!("from a destructor");
    }
}

thread_local!(static LATE: Cell<Option<LogsWhenDropped>> = const { Cell::new(None) });

#[test]
fn parent_child_and_destructors_log_to_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let (config, warnings) = Config::from_vars([
        ("RDMASOCK_LOG".into(), "info".into()),
        ("RDMASOCK_LOG_FILE".into(), folder.path().join("log.%p").into()),
    ]);
    assert!(warnings.is_empty());
    assert_eq!(log::fd(), None);
    log::init(&Config::default());
    assert_eq!(log::fd(), None, "off installs nothing");
    log::init(&config);
    let fd = log::fd().unwrap();
    // A second call changes nothing.
    log::init(&config);
    assert_eq!(log::fd(), Some(fd));

    tracing::info!("from the parent");
    tracing::debug!("not wanted");
    std::thread::spawn(|| LATE.set(Some(LogsWhenDropped))).join().unwrap();

    // SAFETY: the child calls nothing but the log, which is made for it, and _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        tracing::info!("from the child");
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: `child` is our child, `status` is a valid place.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);

    let file = folder.path().join(format!("log.{}", std::process::id()));
    let text = fs::read_to_string(file).unwrap();
    let messages: Vec<&str> = text.lines().filter_map(|l| Some(l.split_once(" log: ")?.1)).collect();
    assert_eq!(messages, ["from the parent", "from a destructor", "from the child"]);
}
