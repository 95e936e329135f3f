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
fn parent_child_and_destructors_log_each_to_their_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = |pid: u32| folder.path().join(format!("log.{pid}"));
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
        log::after_fork_in_child();
        tracing::info!("from the child");
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: `child` is our child, `status` is a valid place.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);

    let messages = |pid| -> Vec<String> {
        let text = fs::read_to_string(file(pid)).unwrap();
        let texts = text.lines().filter_map(|line| line.split_once(" log: "));
        texts.map(|(_, message)| message.to_owned()).collect()
    };
    assert_eq!(messages(std::process::id()), ["from the parent", "from a destructor"]);
    assert_eq!(messages(child.unsigned_abs()), ["from the child"]);
}
