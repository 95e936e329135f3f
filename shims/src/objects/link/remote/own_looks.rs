//! Whether threads of the program check a link all the time, as a thread does that sends without a pause. If they do,
//! each completion would wake the service thread, which would be in their way.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Checks of the program's threads that find something, from one maintenance of links to the next, from which on they
/// are frequent.
const OFTEN: u64 = 16;
/// Number of checks of the service thread after which it compares them with those by other threads. Each of its checks
/// counts as `LOOKS_A_LOOK`, since it checks once more after arming.
const OWN: u32 = 8;
const LOOKS_A_LOOK: u32 = 2;

/// The counts for one link. Only the service thread uses them.
#[derive(Default)]
pub struct OwnLooks {
    /// Checks of all threads that had found something, at the last question.
    finds: AtomicU64,
    /// Checks of all threads at the last question, and checks of the service thread since then.
    all: AtomicU64,
    own: AtomicU32,
}

impl OwnLooks {
    /// Returns whether the program's threads find enough by themselves that the service thread, which is not woken for
    /// the link, need not be. `finds` is the number of checks so far that found something.
    pub fn find_often(&self, finds: u64) -> bool {
        finds.wrapping_sub(self.finds.swap(finds, Relaxed)) >= OFTEN
    }

    /// Counts a check of the service thread, which completions wake. Returns whether it is in the way of other threads,
    /// since they check as often; `looks` gives the number of all checks so far. (The finds are no measure here, since
    /// the service thread often comes first.)
    pub fn is_in_the_way(&self, looks: impl FnOnce() -> u64) -> bool {
        let own = self.own.load(Relaxed) + 1;
        if own < OWN {
            self.own.store(own, Relaxed);
            return false;
        }
        self.own.store(0, Relaxed);
        let looks = looks();
        let since = looks.wrapping_sub(self.all.swap(looks, Relaxed));
        since >= (own + own * LOOKS_A_LOOK).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how often the service thread is found in the way, if other threads check `others` times for each of its
    /// checks.
    fn asked(others: u64) -> u32 {
        let looks = OwnLooks::default();
        let mut all = 0;
        let in_the_way = (0..4 * OWN).filter(|_| {
            all += u64::from(LOOKS_A_LOOK) + others;
            looks.is_in_the_way(|| all)
        });
        in_the_way.count() as u32
    }

    #[test]
    fn the_service_thread_alone_is_in_nobodys_way() {
        assert_eq!(asked(0), 0);
    }

    #[test]
    fn it_is_where_others_look_as_often() {
        assert_eq!(asked(1), 4);
    }

    #[test]
    fn who_finds_little_by_himself_is_helped() {
        let looks = OwnLooks::default();
        assert!(looks.find_often(100) && !looks.find_often(101));
    }
}
