//! What a device has to know of a queue pair before it carries out a work request of it: a real one keeps that for as
//! many as its memory holds, and fetches it over the bus for others. Off unless `LOCALNIC` names a number.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use lru::LruCache;
use rdmasock_core::lock::Lock;

use crate::settings::Settings;

/// The queue pairs of this process that its device knows.
static KNOWN: Lock<Option<LruCache<u32, ()>>> = Lock::new(None);

/// A work request of a queue pair is about to be carried out: takes the time that it takes to fetch what is not known.
pub fn fetch(settings: &Settings, number: u32) {
    let Some(most) = NonZeroUsize::new(settings.cache as usize) else {
        return;
    };
    let is_known = KNOWN.lock().is_none_or(|mut known| {
        let known = known.get_or_insert_with(|| LruCache::new(most));
        known.put(number, ()).is_some()
    });
    if !is_known {
        let until = Instant::now() + Duration::from_nanos(settings.miss_ns);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    }
}

/// In a fork child: the queue pairs are the parent's.
///
/// # Safety
/// No other thread exists.
pub unsafe fn forget() {
    // SAFETY: by this function's contract.
    unsafe {
        std::mem::forget(KNOWN.get_unlocked().take());
        KNOWN.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_lately_is_known() {
        let settings = Settings::parse("cache=2,miss=3000000").unwrap();
        let took = |number| {
            let since = Instant::now();
            fetch(&settings, number);
            since.elapsed() >= Duration::from_millis(3)
        };
        assert_eq!([7, 8, 7, 9, 7, 8].map(took), [true, true, false, true, false, true]);
    }
}
