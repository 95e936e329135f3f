//! Decides which fault is due at a work request. Pure.

use crate::settings::Settings;

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection ends in the middle of the work request.
    Cut,
    /// From now on no work request has an effect, and none of the peer's arrive.
    Silence,
}

/// The faults of one end of a connection.
#[derive(Debug)]
pub struct Faults {
    cut_in: Option<u64>,
    read_cut_in: Option<u64>,
    is_read: bool,
    silent_in: Option<u64>,
}

impl Faults {
    /// Returns the faults for the settings; `number` is the connection's, so that the faults of connections differ.
    pub fn new(settings: &Settings, number: u64) -> Self {
        Self {
            cut_in: due(settings.cut, settings.seed, number),
            read_cut_in: due(settings.cut_read, settings.seed, number),
            is_read: false,
            silent_in: due(settings.silence, settings.seed, !number),
        }
    }

    /// Marks the [next](Self::next) work request as a READ.
    pub fn on_read(&mut self) {
        self.is_read = true;
    }

    /// Counts a work request; returns the fault that is due at it, if one is.
    pub fn next(&mut self) -> Option<Fault> {
        let is_read = std::mem::take(&mut self.is_read);
        if is_read && count_down(&mut self.read_cut_in) || count_down(&mut self.cut_in) {
            return Some(Fault::Cut);
        }
        count_down(&mut self.silent_in).then_some(Fault::Silence)
    }
}

/// Returns a number from `least` to below twice that; `None` for 0.
pub fn due(least: u64, seed: u64, number: u64) -> Option<u64> {
    (least > 0).then(|| least.saturating_add(scramble(seed ^ scramble(number)) % least))
}

fn count_down(left: &mut Option<u64>) -> bool {
    match left {
        Some(0) => {
            *left = None;
            true
        }
        Some(n) => {
            *n -= 1;
            false
        }
        None => false,
    }
}

/// SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
fn scramble(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_cut_once_between_the_number_and_twice_that() {
        let settings = Settings {
            cut: 100,
            ..Settings::default()
        };
        let when = |number| {
            let mut faults = Faults::new(&settings, number);
            let at = (0..1000).find(|_| faults.next().is_some()).unwrap();
            assert!((0..1000).all(|_| faults.next().is_none()));
            at
        };
        let all: Vec<usize> = (0..20).map(when).collect();
        assert!(all.iter().all(|at| (100..200).contains(at)));
        assert!(all.iter().any(|at| at != all.first().unwrap()));
    }

    #[test]
    fn reads_are_counted_apart() {
        let settings = Settings {
            cut_read: 3,
            ..Settings::default()
        };
        let mut faults = Faults::new(&settings, 0);
        assert!((0..1000).all(|_| faults.next().is_none()));
        let at = (0..1000).find(|_| {
            assert!(faults.next().is_none(), "another");
            faults.on_read();
            faults.next().is_some()
        });
        assert!((3..6).contains(&at.unwrap()));
    }

    #[test]
    fn without_settings_there_are_no_faults() {
        let mut faults = Faults::new(&Settings::default(), 0);
        assert!((0..1000).all(|_| faults.next().is_none()));
    }
}
