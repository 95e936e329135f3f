//! The values of variables that are more complex than a word or a number, each with its notation.

use core::fmt;

use tracing::level_filters::LevelFilter;

/// Returns the items of a comma-separated list.
pub(super) fn items(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim)
}

/// A number of bytes, written as a number with an optional suffix K, M or G (powers of 1,024).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(u64);

impl Size {
    const SUFFIXES: [(char, u32); 3] = [('G', 30), ('M', 20), ('K', 10)];

    /// Returns `n` bytes.
    #[must_use]
    pub const fn of_bytes(n: u64) -> Self {
        Self(n)
    }

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

    /// Returns whether the size is a power of two from `least` to `most`.
    pub(super) fn is_ring_size(self, least: Self, most: Self) -> bool {
        self.0.is_power_of_two() && (least..=most).contains(&self)
    }

    /// Reads the notation; the suffix may be in lower case. `None` means not accepted.
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

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |shift: u32| self.0 != 0 && self.0.trailing_zeros() >= shift;
        match Self::SUFFIXES.iter().find(|(_, shift)| fits(*shift)) {
            Some((letter, shift)) => write!(f, "{}{letter}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

/// When a connection has proved worth promoting: at the first threshold of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromoteAfter {
    /// The request at whose beginning the connection is promoted. Requests are counted by turns from receiving to
    /// sending, and the first send is request 1.
    requests: u32,
    /// The bytes in either direction after which the connection is promoted.
    bytes: u64,
}

impl PromoteAfter {
    const NEVER: Self = Self {
        requests: u32::MAX,
        bytes: u64::MAX,
    };

    /// Returns whether a connection has to be promoted on which `requests` requests have begun and `bytes` bytes have
    /// gone in the busier direction.
    #[inline]
    #[must_use]
    pub const fn is_reached(&self, requests: u32, bytes: u64) -> bool {
        requests >= self.requests || bytes >= self.bytes
    }

    /// Returns the thresholds as the policy in core takes them.
    #[must_use]
    pub fn threshold(&self) -> rdmasock_core::stream::policy::Threshold {
        rdmasock_core::stream::policy::Threshold {
            requests: (self.requests != u32::MAX).then_some(self.requests),
            bytes: (self.bytes != u64::MAX).then_some(self.bytes),
        }
    }

    /// Reads `16r,1M`, one of the two alone, or `0`. `None` means not accepted.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut found = Self::NEVER;
        for item in items(text) {
            match item.strip_suffix(['r', 'R']) {
                Some(count) => {
                    let requests = Size::parse(count)?.bytes();
                    found.requests = u32::try_from(requests).ok().filter(|n| *n > 0)?;
                }
                None => found.bytes = Size::parse(item)?.bytes(),
            }
        }
        Some(found)
    }
}

impl Default for PromoteAfter {
    fn default() -> Self {
        Self {
            requests: 16,
            bytes: Size::mib(1).bytes(),
        }
    }
}

/// The levels of the log: a level for everything, and levels for some targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilter {
    default: LevelFilter,
    targets: Vec<(String, LevelFilter)>,
}

impl LogFilter {
    /// Returns the most verbose level that any target has.
    #[must_use]
    pub fn most(&self) -> LevelFilter {
        let levels = self.targets.iter().map(|(_, level)| *level);
        levels.fold(self.default, LevelFilter::max)
    }

    /// Returns the level of `target`. The longest name decides that is `target` itself or a module above it. A name may
    /// leave out the crate: `link` is `rdmasock::link`.
    #[must_use]
    pub fn level_of(&self, target: &str) -> LevelFilter {
        let short = target.split_once("::").map_or(target, |(_, rest)| rest);
        let is_above = |name: &str| {
            [target, short].iter().any(|path| {
                path.strip_prefix(name)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
            })
        };
        self.targets
            .iter()
            .filter(|(name, _)| is_above(name))
            .max_by_key(|(name, _)| name.len())
            .map_or(self.default, |(_, level)| *level)
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut found = Self::default();
        for item in items(text) {
            match item.split_once('=') {
                None => found.default = level(item)?,
                Some((target, _)) if target.trim().is_empty() => return None,
                Some((target, word)) => {
                    let target = target.trim().to_owned();
                    found.targets.push((target, level(word.trim())?));
                }
            }
        }
        Some(found)
    }
}

impl Default for LogFilter {
    fn default() -> Self {
        Self {
            default: LevelFilter::OFF,
            targets: Vec::new(),
        }
    }
}

fn level(word: &str) -> Option<LevelFilter> {
    Some(match word.to_ascii_lowercase().as_str() {
        "off" => LevelFilter::OFF,
        "error" => LevelFilter::ERROR,
        "warn" => LevelFilter::WARN,
        "info" => LevelFilter::INFO,
        "debug" => LevelFilter::DEBUG,
        "trace" => LevelFilter::TRACE,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_size_is_read_as_it_was_written(bytes in any::<u64>(), zeros in 0_u32..40) {
            let size = Size::of_bytes(bytes >> zeros << zeros);
            prop_assert_eq!(Size::parse(&size.to_string()), Some(size));
            prop_assert_eq!(Size::parse(&size.to_string().to_lowercase()), Some(size));
        }

        #[test]
        fn no_text_breaks_the_parsers(text in "\\PC{0,20}|[0-9rKMG,=]{0,20}") {
            let _ = (Size::parse(&text), PromoteAfter::parse(&text), LogFilter::parse(&text));
        }

        #[test]
        fn the_first_threshold_decides(requests in 1_u32..100, kib in 1_u32..1000, r: u32, b: u64) {
            let after = PromoteAfter::parse(&format!("{requests}r,{kib}K")).unwrap();
            let expected = r >= requests || b >= Size::kib(kib).bytes();
            prop_assert_eq!(after.is_reached(r, b), expected);
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
    fn zero_promotes_at_once() {
        assert!(PromoteAfter::parse("0").unwrap().is_reached(0, 0));
        assert!(!PromoteAfter::parse("1r").unwrap().is_reached(0, u64::MAX - 1));
        for text in ["", "0r", "r", "2r,", "2x", "2r;16K"] {
            assert_eq!(PromoteAfter::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_longest_target_decides() {
        let filter = LogFilter::parse("warn,rdmasock_core::link=off, stream=TRACE,stream::promote=info").unwrap();
        assert_eq!(filter.most(), LevelFilter::TRACE);
        for (target, level) in [
            ("rdmasock_shims::io", LevelFilter::WARN),
            ("rdmasock_core::link::credit", LevelFilter::OFF),
            ("rdmasock_core::linkage", LevelFilter::WARN),
            ("rdmasock_core::stream", LevelFilter::TRACE),
            ("rdmasock_core::stream::promote", LevelFilter::INFO),
        ] {
            assert_eq!(filter.level_of(target), level, "{target}");
        }
        for text in ["loud", "link=", "=warn", "warn,", "5"] {
            assert_eq!(LogFilter::parse(text), None, "{text:?}");
        }
    }
}
