//! The configuration from `RDMASOCK_*` environment variables.
//!
//! [`VARIABLES`] is the only table of them: parser, messages, `rdmasock run --help` and docs/configuration.md come from
//! it. Reading them cannot fail: for a bad value the default is used, and one line is written to stderr. The rules file
//! is in rules.rs, the destination of log lines in log.rs.

use core::fmt;
use std::ffi::{CString, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use once_cell::race::OnceBox;
use rdmasock_core::stream::policy::Threshold;
use rustix::fd::BorrowedFd;
use serde::Deserialize;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;

use crate::config::variables::DEVELOPER;
pub use crate::config::variables::{Size, VARIABLES, Variable};

pub(crate) mod arenas;
pub mod environment;
pub mod log;
pub(crate) mod reach;
pub(crate) mod rules;
pub(crate) mod spin;
mod variables;
pub mod verbs;
pub(crate) mod ways;

/// The beginning of all variables' names. The main switch has this name itself.
const PREFIX: &str = "RDMASOCK";

bitflags::bitflags! {
    /// The fabrics that may be used.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Fabrics: u8 {
        /// Shared memory, within a host.
        const SHM = 1;
        /// RDMA, between hosts.
        const VERBS = 2;
    }
}

/// The answer to a program that asks for an io_uring. No hook sees the I/O that goes through an io_uring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IoUring {
    /// [`Self::Hide`] for a program with libuv, which then uses epoll; else [`Self::Allow`].
    #[default]
    Auto,
    /// The call fails with ENOSYS, as on a kernel without io_uring.
    Hide,
    /// The program gets its io_uring, and all its connections stay on TCP from then on.
    Allow,
}

/// How an exec changes an environment that lacks `LD_PRELOAD`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnExec {
    /// The exec adds `LD_PRELOAD` and the library's variables.
    #[default]
    Keep,
    /// The exec leaves the environment as the program has made it.
    Leave,
}

/// The size from which on the device copies from program to program, past the rings, between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroCopy {
    /// The device never copies from program to program.
    #[default]
    Off,
    /// The size from which on a copy costs more than a registration.
    Auto,
    /// This size.
    From(Size),
}

/// A protocol that a developer fixes for large sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// Through a ring.
    Eager,
    /// Into a buffer that the receiver has posted; without one, through a ring.
    Put,
    /// From memory that the sender offers; if that is not possible, through a ring.
    Get,
}

/// Where the large blocks of malloc come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Alloc {
    /// From the program's own malloc.
    #[default]
    Off,
    /// From memory that stays registered with devices: `librdmasock_alloc.so` is preloaded too.
    Registered,
}

/// The settings of a process. Every combination that the parser can make is valid.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// If false, every call passes through.
    pub enabled: bool,
    /// The fabrics that may be used.
    pub fabrics: Fabrics,
    /// The levels of the log.
    pub log: Targets,
    /// The path of the log file, with `%p` not yet replaced; `None` is stderr.
    pub log_file: Option<PathBuf>,
    /// The threshold at which a stream is promoted.
    pub promote_after: Threshold,
    /// The longest time that a waiting thread spins before it sleeps.
    pub spin: Duration,
    /// The size of a stream's first ring, bytes, a power of two.
    pub ring_min: Size,
    /// The size of a stream's largest ring, bytes, a power of two, at least `ring_min`, at most `arena`.
    pub ring_max: Size,
    /// The largest size of a link's arena on each side, bytes, a power of two.
    pub arena: Size,
    /// The size from which on the device copies from program to program, between hosts.
    pub zcopy: ZeroCopy,
    /// Where the large blocks of malloc come from.
    pub alloc: Alloc,
    /// The answer to a program that asks for an io_uring.
    pub io_uring: IoUring,
    /// How an exec changes an environment without `LD_PRELOAD`.
    pub on_exec: OnExec,
    /// The path of the rules file.
    pub rules: Option<PathBuf>,
    /// The UDP port on which hosts ask each other; 0 means none.
    pub control_port: u16,
    /// The path of the file with the control port's secret.
    pub secret_file: Option<PathBuf>,
    /// For tests: networks that count as reached by an RDMA device of this host.
    pub pretend_rdma: Vec<IpNet>,
    /// For tests: the path of a plugin that has queue pairs between processes of this host.
    pub local_device: Option<PathBuf>,
    /// For tests: the folder that the plugin reads in place of `/sys/class`.
    pub sys_class: Option<CString>,
    /// For developers: the protocol of large sends between hosts, if the sends can use it.
    pub way: Option<Way>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            enabled: true,
            fabrics: Fabrics::SHM | Fabrics::VERBS,
            log: Targets::new().with_default(LevelFilter::OFF),
            log_file: None,
            promote_after: Threshold {
                requests: Some(16),
                bytes: Some(Size::mib(1).bytes()),
            },
            spin: Duration::from_micros(200),
            ring_min: Size::kib(4),
            ring_max: Size::mib(4),
            arena: Size::gib(1),
            zcopy: ZeroCopy::default(),
            alloc: Alloc::default(),
            io_uring: IoUring::default(),
            on_exec: OnExec::default(),
            rules: None,
            control_port: 4797,
            secret_file: None,
            pretend_rdma: Vec::new(),
            local_device: None,
            sys_class: None,
            way: None,
        }
    }
}

/// A variable in the environment that is unknown or has a bad value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The variable, its value and the accepted values.
    pub problem: String,
    /// The value that is used instead.
    pub instead: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.problem, self.instead)
    }
}

/// The configuration. It is read once; fork children inherit it.
static CONFIG: OnceBox<Config> = OnceBox::new();

/// Returns the configuration of this process, and reads it at the first call.
#[inline]
pub fn config() -> &'static Config {
    CONFIG.get_or_init(|| Box::new(Config::from_env()))
}

impl Config {
    /// Reads the configuration from the environment. Writes one line to stderr for each fault.
    #[must_use]
    pub fn from_env() -> Self {
        let (config, warnings) = Self::from_vars(std::env::vars_os());
        for warning in &warnings {
            warn(&warning.to_string());
        }
        config
    }

    /// Returns the configuration from name–value pairs, and one message for each faulty pair. Ignores names that do not
    /// begin with `RDMASOCK`. An empty value counts as no variable. The exception is the main switch: an empty value is
    /// a fault there, and switches the library off.
    pub fn from_vars(vars: impl IntoIterator<Item = (OsString, OsString)>) -> (Self, Vec<Warning>) {
        let mut config = Self::default();
        let mut warnings = Vec::new();
        for (name, value) in vars {
            if !is_ours(name.as_bytes()) || (value.is_empty() && name != PREFIX) {
                continue;
            }
            let name = name.to_string_lossy();
            match VARIABLES.iter().chain(DEVELOPER).find(|variable| variable.name == name) {
                None => warnings.push(Warning {
                    problem: format!(
                        "{} is not a variable of rdmasock ({} is)",
                        shown(&name),
                        variables::nearest(&name),
                    ),
                    instead: "it is ignored".to_owned(),
                }),
                Some(variable) if (variable.set)(&mut config, &value).is_none() => {
                    let (value, accepts) = (value.to_string_lossy(), variable.accepts);
                    let instead = if name == PREFIX { "off" } else { variable.default };
                    warnings.push(Warning {
                        problem: format!("{name}={}: accepted is {accepts}", shown(&value)),
                        instead: format!("using {instead}"),
                    });
                }
                Some(_) => {}
            }
        }
        config.ring_max = config.ring_max.min(config.arena);
        config.ring_min = config.ring_min.min(config.ring_max);
        (config, warnings)
    }
}

fn is_ours(name: &[u8]) -> bool {
    name.strip_prefix(PREFIX.as_bytes())
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(b"_"))
}

/// Returns text from the environment in a form for messages: on one line, cut to `LONGEST` letters.
fn shown(text: &str) -> String {
    const LONGEST: usize = 80;
    let mut line: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if text.chars().nth(LONGEST).is_some() {
        line.push('…');
    }
    line
}

/// Writes one line to stderr, past the hooks. Ignores a failure.
pub(crate) fn warn(message: &str) {
    let line = format!("rdmasock: {message}\n");
    // SAFETY: fd 2 is only used for this one write. If the program has closed it, the write fails with EBADF.
    let stderr = unsafe { BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(stderr, line.as_bytes());
}

#[cfg(test)]
mod tests;
