//! The configuration from `RDMASOCK_*` environment variables.
//!
//! [`VARIABLES`] is the only table of them: parser, messages, `rdmasock run --help` and docs/configuration.md come from
//! it. Nothing here can fail: a bad value costs one line on stderr, and the default is used. The rules file is in
//! rules.rs, the destination of log lines in log.rs.

pub(crate) mod arenas;
pub mod environment;
pub(crate) mod load;
pub mod log;
pub(crate) mod reach;
pub(crate) mod rules;
mod settings;
pub(crate) mod spin;
mod value;
mod variables;
pub mod verbs;
pub(crate) mod ways;

use core::fmt;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use once_cell::race::OnceBox;
use rustix::fd::BorrowedFd;
pub use settings::{Alloc, Config, Fabrics, IoUring, OnExec, Way, ZeroCopy};
pub use value::{LogFilter, PromoteAfter, Size};
use variables::DEVELOPER;
pub use variables::{VARIABLES, Variable};

/// The beginning of all variables' names; alone it is the name of the main switch.
const PREFIX: &str = "RDMASOCK";

/// A variable in the environment that is not as it should be.
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

/// Read once; fork children inherit it.
static CONFIG: OnceBox<Config> = OnceBox::new();

/// Returns the configuration that the user asked for.
#[inline]
pub fn config() -> &'static Config {
    CONFIG.get_or_init(|| Box::new(Config::from_env()))
}

impl Config {
    /// Returns the configuration of this process. Writes one line to stderr for each fault.
    #[must_use]
    pub fn from_env() -> Self {
        let (config, warnings) = Self::from_vars(std::env::vars_os());
        for warning in &warnings {
            warn(&warning.to_string());
        }
        config
    }

    /// Returns the configuration from name–value pairs, and one message for each faulty pair. Ignores names that do not
    /// begin with `RDMASOCK`. An empty value is the same as no variable. Only for the main switch an empty value is a
    /// fault, and switches off.
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
                Some(variable) => {
                    if (variable.set)(&mut config, &value).is_none() {
                        let value = value.to_string_lossy();
                        warnings.push(rejected(variable, &value, variable.accepts));
                    }
                }
            }
        }
        config.reconcile(&mut warnings);
        (config, warnings)
    }

    /// Replaces values that are valid alone but do not fit together.
    fn reconcile(&mut self, warnings: &mut Vec<Warning>) {
        let default = Self::default();
        if self.ring_max > self.arena {
            let accepts = format!("at most RDMASOCK_ARENA, which is {}", self.arena);
            let value = self.ring_max.to_string();
            warnings.push(rejected(&variables::RING_MAX, &value, &accepts));
            self.ring_max = default.ring_max;
        }
        if self.ring_min > self.ring_max {
            let accepts = format!("at most RDMASOCK_RING_MAX, which is {}", self.ring_max);
            let value = self.ring_min.to_string();
            warnings.push(rejected(&variables::RING_MIN, &value, &accepts));
            self.ring_min = default.ring_min;
        }
    }
}

fn is_ours(name: &[u8]) -> bool {
    name.strip_prefix(PREFIX.as_bytes())
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(b"_"))
}

fn rejected(variable: &Variable, value: &str, accepts: &str) -> Warning {
    let instead = if variable.name == PREFIX {
        "off"
    } else {
        variable.default
    };
    Warning {
        problem: format!("{}={}: accepted is {accepts}", variable.name, shown(value)),
        instead: format!("using {instead}"),
    }
}

/// Returns text from outside as a message may show it: on one line, not too long.
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
