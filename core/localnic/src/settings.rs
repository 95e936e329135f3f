//! How the device behaves: `LOCALNIC`, a comma-separated list of words and `name=number`.

use std::sync::OnceLock;

use rdmasock_core::fabric::plugin::host::{Level, log};

/// The variable.
pub const VARIABLE: &str = "LOCALNIC";

/// See the module. Times are of the wire, or of what the device takes for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Settings {
    /// `iwarp`: WRITEs have no immediates, and TCP cuts what is sent. Else as RoCE.
    pub is_iwarp: bool,
    /// `thread`: a thread of the process carries work requests out; else who posts them does.
    pub has_thread: bool,
    /// `delay=`: µs from the posting of a work request to its effect. Has the thread do it.
    pub delay_us: u64,
    /// `late=`: ms that a peer takes to answer a request to connect.
    pub late_ms: u64,
    /// `cut=`: a connection ends after so many work requests of this end, or up to twice as many.
    pub cut: u64,
    /// `cutread=`: as `cut`, of READs alone.
    pub cut_read: u64,
    /// `silence=`: as `cut`, but nothing tells: what is posted has no effect, and nothing comes.
    pub silence: u64,
    /// `gone=`: after so many work requests of the process, or up to twice as many, the device is gone for a second.
    pub gone: u64,
    /// `pins`: what a program has mapped in the place of memory of its own that was registered is not reached. Needs
    /// CAP_SYS_ADMIN; not for programs that fork.
    pub has_pins: bool,
    /// `cache=`: the device knows so many queue pairs by heart, and takes [`miss_ns`](Self::miss_ns) longer for a work
    /// request of another. 0: all of them.
    pub cache: u32,
    /// `miss=`: ns that it takes to fetch what it has to know of a queue pair.
    pub miss_ns: u64,
    /// `seed=`: for what is left to chance.
    pub seed: u64,
}

impl Settings {
    /// Those of this process, from its environment.
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

    /// Reads the variable's value. The error is the word that is not understood.
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
