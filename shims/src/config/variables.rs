//! The table of environment variables: names, defaults, accepted values, meanings, and how each value gets into a
//! [`Config`]. Values that are more complex than a word or a number have a type and a parser of their own.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use rdmasock_core::stream::policy::Threshold;
use serde::de::value::StrDeserializer;
use serde::de::{DeserializeOwned, IntoDeserializer, value};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;

use crate::config::{Config, Fabrics, ZeroCopy};

/// An environment variable.
#[derive(Debug)]
pub struct Variable {
    /// The variable's name.
    pub name: &'static str,
    /// The value that is used if the variable is not set: as a user would write it, or a description of it.
    pub default: &'static str,
    /// A description of the accepted values.
    pub accepts: &'static str,
    /// A description of the variable's effect.
    pub meaning: &'static str,
    /// Stores a value. `None` means that the value is not accepted. The configuration is then unchanged, except that a
    /// bad value of the main switch switches it off.
    pub(super) set: fn(&mut Config, &OsStr) -> Option<()>,
}

impl Variable {
    /// Returns the option of `rdmasock run` that sets the variable, without the dashes.
    #[must_use]
    pub fn option(&self) -> String {
        let name = self.name.strip_prefix("RDMASOCK_").unwrap_or("ACCELERATE");
        name.to_ascii_lowercase().replace('_', "-")
    }
}

/// Every variable that the library or the command reads.
pub const VARIABLES: &[Variable] = &[
    Variable {
        name: "RDMASOCK",
        default: "on",
        accepts: "on, 1, yes or true; or off, 0, no or false",
        meaning: "main switch; off, and for any other value: every call passes through",
        set: |config, value| {
            // A user who sets any other value means to switch off.
            config.enabled = false;
            set(&mut config.enabled, on_off(value))
        },
    },
    Variable {
        name: "RDMASOCK_FABRICS",
        default: "shm,verbs",
        accepts: "a comma-separated list of: shm, verbs",
        meaning: "what connections may be moved to: shared memory on the same host; RDMA verbs between hosts",
        set: |config, value| set(&mut config.fabrics, fabrics(value)),
    },
    Variable {
        name: "RDMASOCK_LOG",
        default: "off",
        accepts: "off, error, warn, info, debug or trace, or a comma-separated list of these and of target=level",
        meaning: "what is logged; the targets are rdmasock, rdmasock::promote, rdmasock::link and rdmasock::verbs",
        set: |config, value| set(&mut config.log, log_filter(value.to_str()?)),
    },
    Variable {
        name: "RDMASOCK_LOG_FILE",
        default: "stderr",
        accepts: "a path; %p in it becomes the pid (children by fork use their parent's file)",
        meaning: "where log lines go; they are appended",
        set: |config, value| set(&mut config.log_file, Some(Some(PathBuf::from(value)))),
    },
    Variable {
        name: "RDMASOCK_PROMOTE_AFTER",
        default: "16r,1M",
        accepts: "a comma-separated list of <N>r (N from 1) and <bytes> with suffix K or M, or 0",
        meaning: "when a connection leaves TCP: as its Nth request begins, or after that many bytes in \
                  either direction (a call counts as 256 at least), whichever comes first; 0: as soon as it is connected",
        set: |config, value| set(&mut config.promote_after, promote_after(value.to_str()?)),
    },
    Variable {
        name: "RDMASOCK_SPIN_US",
        default: "200",
        accepts: "a number from 0 to 10000",
        meaning: "longest time that a waiting thread spins before it sleeps",
        set: |config, value| set(&mut config.spin, spin(value)),
    },
    Variable {
        name: "RDMASOCK_RING_MIN",
        default: "4K",
        accepts: "a power of two from 4K to 64M",
        meaning: "size of a stream's ring when it is promoted, and when it has been idle, at most RDMASOCK_RING_MAX; \
                  between hosts 16 times as much",
        set: |config, value| set(&mut config.ring_min, size(value, Size::kib(4), Size::mib(64))),
    },
    Variable {
        name: "RDMASOCK_RING_MAX",
        default: "4M",
        accepts: "a power of two from 4K to 64M",
        meaning: "size that a stream's ring may grow to while its reader does not read, at most RDMASOCK_ARENA; while it \
                  does, at most 1M",
        set: |config, value| set(&mut config.ring_max, size(value, Size::kib(4), Size::mib(64))),
    },
    Variable {
        name: "RDMASOCK_ARENA",
        default: "1G",
        accepts: "a power of two from 16M to 64G",
        meaning: "largest size of a link on each side; addresses and memory are taken as streams need them",
        set: |config, value| set(&mut config.arena, size(value, Size::mib(16), Size::gib(64))),
    },
    Variable {
        name: "RDMASOCK_ZCOPY_MIN",
        default: "off",
        accepts: "auto, off, or a size from 4K to 1G",
        meaning: "between hosts: from which size on a blocking send and a blocking receive have the device copy from \
                  program to program, past the rings; auto: from where a copy costs more than telling the device of the \
                  memory; off: never",
        set: |config, value| set(&mut config.zcopy, zero_copy(value)),
    },
    Variable {
        name: "RDMASOCK_ALLOC",
        default: "off",
        accepts: "off or registered",
        meaning: "registered: large blocks of malloc come from memory that devices know for longer than a call, for what \
                  RDMASOCK_ZCOPY_MIN has them take from the program's memory; librdmasock_alloc.so is preloaded too",
        set: |config, value| set(&mut config.alloc, word(value)),
    },
    Variable {
        name: "RDMASOCK_RULES",
        default: "no rules: every connection may be moved",
        accepts: "the path of a TOML file",
        meaning: "rules by program, port, address and direction: accelerate or leave",
        set: |config, value| set(&mut config.rules, Some(Some(PathBuf::from(value)))),
    },
    Variable {
        name: "RDMASOCK_IO_URING",
        default: "auto",
        accepts: "auto, hide or allow",
        meaning: "what a program gets that asks for an io_uring; hide: ENOSYS, as from a kernel without it, which many \
                  take for a reason to use epoll; allow: the ring, and all of its connections stay on TCP from then on; \
                  auto: hide for programs with libuv (Node), else allow",
        set: |config, value| set(&mut config.io_uring, word(value)),
    },
    Variable {
        name: "RDMASOCK_EXEC",
        default: "keep",
        accepts: "keep or leave",
        meaning: "what a program gets that is executed with an environment without LD_PRELOAD; keep: the library and \
                  these variables all the same; leave: what the environment says",
        set: |config, value| set(&mut config.on_exec, word(value)),
    },
    Variable {
        name: "RDMASOCK_CONTROL_PORT",
        default: "4797",
        accepts: "a number from 0 to 65535",
        meaning: "UDP port on which programs of different hosts find each other, the same on all of them; 0: none",
        set: |config, value| set(&mut config.control_port, value.to_str()?.parse().ok()),
    },
    Variable {
        name: "RDMASOCK_SECRET_FILE",
        default: "none: what comes to the control port is not authenticated",
        accepts: "the path of a file of 16 to 4096 bytes that others cannot read",
        meaning: "secret that the control port's datagrams are signed with, the same on all hosts; if it cannot be used, \
                  no connection moves between hosts",
        set: |config, value| set(&mut config.secret_file, Some(Some(PathBuf::from(value)))),
    },
    Variable {
        name: "RDMASOCK_LIBRARY",
        default: "beside the rdmasock command, or in ../lib from there",
        accepts: "the path of librdmasock.so",
        meaning: "library that `rdmasock run` preloads",
        set: |_, _| Some(()),
    },
];

/// Variables for developers: not in docs/configuration.md, and not options of `rdmasock run`.
pub(super) const DEVELOPER: &[Variable] = &[
    Variable {
        name: "RDMASOCK_DEV_PRETEND_RDMA",
        default: "the devices that there are",
        accepts: "a comma-separated list of networks such as 10.0.0.0/8",
        meaning: "this host counts as having an RDMA device that leads to these networks (tests of the control port)",
        set: |config, value| {
            let networks = items(value.to_str()?).map(|item| item.parse().ok());
            set(&mut config.pretend_rdma, networks.collect())
        },
    },
    Variable {
        name: "RDMASOCK_DEV_LOCAL_DEVICE",
        default: "the devices that there are",
        accepts: "the path of librdmasock_localnic.so, or of librdmasock_verbs.so",
        meaning: "connections within this host are moved to this device, as if they were between hosts",
        set: |config, value| set(&mut config.local_device, Some(Some(PathBuf::from(value)))),
    },
    Variable {
        name: "RDMASOCK_DEV_SYS_CLASS",
        default: "/sys/class",
        accepts: "the path of a folder",
        meaning: "where the verbs plugin looks for devices (tests with a stand-in for rdma-core)",
        set: |config, value| set(&mut config.sys_class, CString::new(value.as_bytes()).ok().map(Some)),
    },
    Variable {
        name: "RDMASOCK_DEV_WAY",
        default: "as RDMASOCK_ZCOPY_MIN says",
        accepts: "eager, put or get",
        meaning: "the protocol of sends of RDMASOCK_ZCOPY_MIN or more, where they can have it (measurements)",
        set: |config, value| set(&mut config.way, word(value).map(Some)),
    },
];

/// Stores `value` in the field. `None`, a value that was not accepted, leaves the field unchanged.
fn set<T>(field: &mut T, value: Option<T>) -> Option<()> {
    *field = value?;
    Some(())
}

fn on_off(value: &OsStr) -> Option<bool> {
    match value.to_ascii_lowercase().to_str()? {
        "on" | "1" | "yes" | "true" => Some(true),
        "off" | "0" | "no" | "false" => Some(false),
        _ => None,
    }
}

/// Returns the variant with the name `value`, in lower case; `None` if there is none.
fn word<T: DeserializeOwned>(value: &OsStr) -> Option<T> {
    let word: StrDeserializer<'_, value::Error> = value.to_str()?.into_deserializer();
    T::deserialize(word).ok()
}

fn fabrics(value: &OsStr) -> Option<Fabrics> {
    items(value.to_str()?).try_fold(Fabrics::empty(), |all, item| match item {
        "shm" => Some(all | Fabrics::SHM),
        "verbs" => Some(all | Fabrics::VERBS),
        _ => None,
    })
}

/// Parses a threshold: `16r,1M`, one of the two items alone, or `0`. `None` means not accepted.
fn promote_after(text: &str) -> Option<Threshold> {
    let mut found = Threshold {
        requests: None,
        bytes: None,
    };
    for item in items(text) {
        match item.strip_suffix(['r', 'R']) {
            Some(count) => {
                let requests = Size::parse(count)?.bytes();
                found.requests = Some(u32::try_from(requests).ok().filter(|n| *n > 0)?);
            }
            None => found.bytes = Some(Size::parse(item)?.bytes()),
        }
    }
    Some(found)
}

fn spin(value: &OsStr) -> Option<Duration> {
    let us = value.to_str()?.parse().ok()?;
    (us <= 10_000).then_some(Duration::from_micros(us))
}

fn zero_copy(value: &OsStr) -> Option<ZeroCopy> {
    match value.to_str()? {
        "auto" => Some(ZeroCopy::Auto),
        "off" => Some(ZeroCopy::Off),
        size => {
            let size = Size::parse(size)?;
            let is_in_range = (Size::kib(4)..=Size::gib(1)).contains(&size);
            is_in_range.then_some(ZeroCopy::From(size))
        }
    }
}

/// Parses a power of two from `least` to `most`. `None` means not accepted.
fn size(value: &OsStr, least: Size, most: Size) -> Option<Size> {
    let size = Size::parse(value.to_str()?)?;
    (size.0.is_power_of_two() && (least..=most).contains(&size)).then_some(size)
}

/// Returns the name of the variable that is most similar to `name`.
pub(super) fn nearest(name: &str) -> &'static str {
    let names = VARIABLES.iter().map(|variable| variable.name);
    names
        .min_by_key(|known| strsim::levenshtein(known, name))
        .unwrap_or_default()
}

/// Returns the items of a comma-separated list.
fn items(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim)
}

/// A number of bytes, written as a number with an optional suffix K, M or G (powers of 1,024).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(u64);

impl Size {
    const SUFFIXES: [(char, u32); 3] = [('G', 30), ('M', 20), ('K', 10)];

    /// Returns `n` × 1,024 bytes.
    #[must_use]
    pub const fn kib(n: u32) -> Self {
        Self((n as u64) << 10)
    }

    /// Returns `n` × 1,024² bytes.
    #[must_use]
    pub const fn mib(n: u32) -> Self {
        Self((n as u64) << 20)
    }

    /// Returns `n` × 1,024³ bytes.
    #[must_use]
    pub const fn gib(n: u32) -> Self {
        Self((n as u64) << 30)
    }

    /// Returns the size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Parses a size; the suffix may be in lower case. `None` means not accepted.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let suffix = text.chars().next_back()?.to_ascii_uppercase();
        let (digits, shift) = match Self::SUFFIXES.iter().find(|(letter, _)| *letter == suffix) {
            Some((letter, shift)) => (text.get(..text.len() - letter.len_utf8())?, *shift),
            None => (text, 0),
        };
        // Only digits are accepted, because parse() would take a sign too.
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        digits.parse::<u64>().ok()?.checked_mul(1 << shift).map(Self)
    }
}

/// Parses the log's filter: a level for all targets, and levels for single targets. An item without `=` has to be a
/// level. `None` means not accepted.
fn log_filter(text: &str) -> Option<Targets> {
    let is_valid = |item: &str| {
        let level = item.split_once('=').map_or(item, |(_, level)| level);
        // `parse` would also accept a number, or an empty text, as a level.
        level.starts_with(|first: char| first.is_ascii_alphabetic()) && level.parse::<LevelFilter>().is_ok()
    };
    text.split(',').all(is_valid).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tracing::Level;

    use super::*;

    proptest! {
        #[test]
        fn a_size_is_read_with_its_suffix(n in 0_u64..1 << 30, at in 0..3_usize) {
            let (letter, shift) = Size::SUFFIXES[at];
            for text in [format!("{n}{letter}"), format!("{n}{}", letter.to_ascii_lowercase())] {
                prop_assert_eq!(Size::parse(&text), Some(Size(n << shift)));
            }
            prop_assert_eq!(Size::parse(&n.to_string()), Some(Size(n)));
        }

        #[test]
        fn no_text_breaks_the_parsers(text in "\\PC{0,20}|[0-9rKMG,=]{0,20}") {
            let _ = (Size::parse(&text), promote_after(&text), log_filter(&text));
        }
    }

    #[test]
    fn sizes_that_are_none() {
        for text in [
            "",
            "K",
            "-1",
            "+1",
            "1 K",
            "1KB",
            "0x10",
            "1.5M",
            "99999999999999999999",
            "17179869184G",
        ] {
            let parsed = Size::parse(text);
            assert_eq!(parsed, None, "{text:?}");
        }
    }

    #[test]
    fn thresholds_are_read() {
        for (text, requests, bytes) in [
            ("16r,1M", Some(16), Some(1 << 20)),
            ("1K, 2R", Some(2), Some(1024)),
            ("1r", Some(1), None),
            ("0", None, Some(0)),
        ] {
            assert_eq!(promote_after(text), Some(Threshold { requests, bytes }), "{text:?}");
        }
        for text in ["", "0r", "r", "2r,", "2x", "2r;16K"] {
            assert_eq!(promote_after(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_longest_target_decides() {
        let filter = log_filter("warn,rdmasock::link=off,rdmasock=TRACE").unwrap();
        for (target, level, is_logged) in [
            ("rdmasock_core", Level::WARN, true),
            ("h2", Level::INFO, false),
            ("rdmasock::link", Level::ERROR, false),
            ("rdmasock::promote", Level::TRACE, true),
        ] {
            assert_eq!(filter.would_enable(target, &level), is_logged, "{target}");
        }
        for text in ["loud", "link=", "link", "warn,", "5", ""] {
            assert_eq!(log_filter(text), None, "{text:?}");
        }
    }
}
