//! Models a device's cache of queue pair contexts. A real device keeps the context of as many queue pairs as its memory
//! holds, and fetches others over the bus. Off unless `LOCALNIC` names a number.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use lru::LruCache;
use rdmasock_core::lock::Lock;

use crate::settings::Settings;

/// The queue pairs of this process whose context is in the cache.
static KNOWN: Lock<Option<LruCache<u32, ()>>> = Lock::new(None);

/// Spins for the time of a fetch, if the queue pair's context is not in the cache. Called before each work request.
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

/// Forgets the queue pairs in a fork child: they are the parent's.
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
