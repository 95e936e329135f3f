//! Whether threads of the program look at a link all the time, as one does that sends without a pause: the service
//! thread would be woken by each completion, and be in their way.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Looks of the program's threads that find something, from one time that links are maintained to the next, that are
/// many.
const OFTEN: u64 = 16;
/// Looks of the service thread, after which it asks for those of others; and what each of them counts as: it looks once
/// more when it has armed.
const OWN: u32 = 8;
const LOOKS_A_LOOK: u32 = 2;

/// See the module. The service thread's own.
#[derive(Default)]
pub struct OwnLooks {
    /// Of all threads, that have found something, at the last question.
    finds: AtomicU64,
    /// Of all threads, at the last question; and of the service thread's since.
    all: AtomicU64,
    own: AtomicU32,
}

impl OwnLooks {
    /// Whether so many have found something by now that the service thread, which does not hear of the link, need not.
    pub fn find_often(&self, finds: u64) -> bool {
        finds.wrapping_sub(self.finds.swap(finds, Relaxed)) >= OFTEN
    }

    /// The service thread hears of the link, and has looked. Whether it is in the way of others, of all `looks` by
    /// now; what those would find it often finds before them.
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

    /// So many looks of others for one of the service thread's.
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
