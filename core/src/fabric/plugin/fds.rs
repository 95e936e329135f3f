//! The plugin's hidden fds, so that a fork child can close them. It uses no lock: at the fork another thread of the
//! parent may be anywhere.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

/// The host gives no number as high as this.
const END: usize = 131_072;

static OPEN: [AtomicU64; END / 64] = [const { AtomicU64::new(0) }; END / 64];

fn word(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let n = usize::try_from(fd).ok()?;
    Some((OPEN.get(n / 64)?, 1 << (n % 64)))
}

/// Adds an fd of the plugin. Relaxed everywhere: only a fork child reads the list, which has one thread.
pub fn enter(fd: c_int) {
    if let Some((word, bit)) = word(fd) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Removes an fd that is about to be closed.
pub fn leave(fd: c_int) {
    if let Some((word, bit)) = word(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Empties the list, with each fd of it handed to `each`.
pub fn take_all(mut each: impl FnMut(c_int)) {
    for (at, word) in OPEN.iter().enumerate() {
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            // Below END, which fits.
            each((at * 64) as c_int + bits.trailing_zeros() as c_int);
            bits &= bits - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_entered_and_not_left_is_found_once() {
        for fd in [0, 63, 64, 131_071] {
            enter(fd);
        }
        leave(63);
        for none in [-1, 131_072, c_int::MAX] {
            enter(none);
            leave(none);
        }
        let mut found = Vec::new();
        take_all(|fd| found.push(fd));
        assert_eq!(found, [0, 64, 131_071]);
        take_all(|fd| found.push(fd));
        assert_eq!(found.len(), 3);
    }
}
