//! Processes that have the library loaded but switched off by the variable `RDMASOCK`. They keep no counters, so they
//! are found by `/proc`: the library is mapped, and the environment at the program's start switches it off.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rdmasock_shims::config::Config;

/// A process whose library is switched off.
#[derive(Debug)]
pub(crate) struct Off {
    /// The process's pid.
    pub pid: u32,
    /// The base name of the executable.
    pub program: String,
    /// The value of `RDMASOCK`.
    pub value: String,
}

/// Returns the processes with a library that is switched off, in the order of their pids. Processes that the caller may
/// not read are left out. With `only`, checks only the process with that pid.
pub(crate) fn processes(only: Option<u32>) -> Vec<Off> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    let mut pids: Vec<u32> = match only {
        Some(pid) => vec![pid],
        None => entries
            .filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
            .collect(),
    };
    pids.sort_unstable();
    pids.into_iter()
        .filter_map(|pid| look_at(pid, &Path::new("/proc").join(pid.to_string())))
        .collect()
}

fn look_at(pid: u32, folder: &Path) -> Option<Off> {
    let maps = fs::read(folder.join("maps")).ok()?;
    let is_library = |line: &[u8]| line.ends_with(b"/librdmasock.so") || line.ends_with(b"/librdmasock.so (deleted)");
    maps.split(|byte| *byte == b'\n').find(|line| is_library(line))?;
    let environment = fs::read(folder.join("environ")).ok()?;
    // getenv(3) returns the first of several variables with one name.
    let mut variables = environment.split(|byte| *byte == 0);
    let value = OsStr::from_bytes(variables.find_map(|v| v.strip_prefix(b"RDMASOCK="))?);
    let (config, _) = Config::from_vars([("RDMASOCK".into(), value.into())]);
    let program = fs::read_link(folder.join("exe")).ok()?;
    (!config.enabled).then(|| Off {
        pid,
        program: program.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        value: value.to_string_lossy().into_owned(),
    })
}
