//! The behaviour of the device: `LOCALNIC`, a comma-separated list of words and `name=number`.

use std::sync::OnceLock;

use rdmasock_core::fabric::plugin::{Level, log};

/// The name of the variable.
pub const VARIABLE: &str = "LOCALNIC";

/// The settings of the device; see the module. Times are those of the wire, or of an operation in the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Settings {
    /// `iwarp`: WRITEs have no immediates, and TCP divides the bytes. Otherwise the device behaves like RoCE.
    pub is_iwarp: bool,
    /// `thread`: a thread of the process executes work requests; otherwise the posting thread does.
    pub has_thread: bool,
    /// `delay=`: µs from the posting of a work request to its effect. Implies `thread`.
    pub delay_us: u64,
    /// `late=`: ms that a peer takes to answer a connection request.
    pub late_ms: u64,
    /// `cut=`: the number of work requests of this end after which a connection ends, or up to twice as many.
    pub cut: u64,
    /// `cutread=`: the number of READs of this end after which a connection ends, or up to twice as many.
    pub cut_read: u64,
    /// `silence=`: counts as `cut` does, but without an error: posted work requests have no effect, and none of the
    /// peer's arrive.
    pub silence: u64,
    /// `gone=`: the number of work requests of the process, or up to twice as many, after which the device is away for
    /// 1 s.
    pub gone: u64,
    /// `pins`: memory that the program has mapped in place of its registered memory is not accessed. Needs
    /// CAP_SYS_ADMIN; not for programs that fork.
    pub has_pins: bool,
    /// `cache=`: the number of queue pairs whose context the device keeps. A work request of another queue pair takes
    /// [`miss_ns`](Self::miss_ns) longer. 0: it keeps all of them.
    pub cache: u32,
    /// `miss=`: ns that the fetch of a queue pair's context takes.
    pub miss_ns: u64,
    /// `seed=`: the seed of all random choices.
    pub seed: u64,
}

impl Settings {
    /// Returns the settings of this process, from its environment.
    pub fn get() -> Self {
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        *SETTINGS.get_or_init(|| {
            let text = std::env::var(VARIABLE).unwrap_or_default();
            Self::parse(&text).unwrap_or_else(|word| {
                log(
                    Level::Error,
                    format_args!("{VARIABLE}: '{word}' is not known; the device is as if it were not set"),
                );
                Self::default()
            })
        })
    }

    /// Parses the variable's value. The error is the word that is not understood.
    pub fn parse(text: &str) -> Result<Self, &str> {
        let mut settings = Self::default();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            let (name, number) = match word.split_once('=') {
                Some((name, number)) => (name, number.parse::<u64>().map_err(|_| word)?),
                None => (word, 1),
            };
            match (name, word.contains('=')) {
                ("roce", false) => settings.is_iwarp = false,
                ("iwarp", false) => settings.is_iwarp = true,
                ("pins", false) => settings.has_pins = true,
                ("thread", false) => settings.has_thread = true,
                ("delay", true) => settings.delay_us = number,
                ("late", true) => settings.late_ms = number,
                ("cut", true) => settings.cut = number,
                ("cutread", true) => settings.cut_read = number,
                ("silence", true) => settings.silence = number,
                ("gone", true) => settings.gone = number,
                ("cache", true) => settings.cache = u32::try_from(number).map_err(|_| word)?,
                ("miss", true) => settings.miss_ns = number,
                ("seed", true) => settings.seed = number,
                _ => return Err(word),
            }
        }
        settings.has_thread |= settings.delay_us > 0;
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_numbers_are_understood() {
        let settings = Settings::parse("iwarp, cut=100,delay=20").unwrap();
        let expected = Settings {
            is_iwarp: true,
            has_thread: true,
            delay_us: 20,
            cut: 100,
            ..Settings::default()
        };
        assert_eq!(settings, expected);
        assert_eq!(Settings::parse(""), Ok(Settings::default()));
        for wrong in ["x", "cut", "cut=", "cut=a", "iwarp=1"] {
            assert_eq!(Settings::parse(wrong), Err(wrong));
        }
    }
}
