//! What a set looks at of each of its links to other hosts before each sleep, side by side: where there are hundreds it
//! is a few lines of memory so, and not several for each.

use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, SeqCst},
};

use rdmasock_core::fabric::layout::READY_QUEUES;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::lock::Lock;

/// One link's.
#[derive(Default)]
pub struct News {
    /// For whom something may be in its ready queues, a bit each.
    queued: AtomicU64,
    /// See [`End::is_armed`](rdmasock_core::fabric::remote::End::is_armed).
    armed: AtomicBool,
}

const _: () = assert!(READY_QUEUES == u64::BITS);

fn bit(waiter: WaiterId) -> u64 {
    1_u64.checked_shl(waiter.0.into()).unwrap_or(0)
}

impl News {
    /// For another link: nothing is queued or armed.
    pub fn reset(&self) {
        self.queued.store(0, SeqCst);
        self.armed.store(false, SeqCst);
    }

    pub fn armed(&self) -> &AtomicBool {
        &self.armed
    }

    /// As [`End::is_armed`](rdmasock_core::fabric::remote::End::is_armed).
    pub fn is_armed(&self) -> bool {
        self.armed.load(Acquire)
    }

    /// Something was put into the ready queue for the waiter. Then it is looked whether that sleeps; who goes to sleep
    /// says so before it [asks](Self::is_queued): so one sees the other.
    pub fn on_queued(&self, waiter: WaiterId) {
        self.queued.fetch_or(bit(waiter), SeqCst);
    }

    /// Whether there may be something for the waiter.
    pub fn is_queued(&self, waiter: WaiterId) -> bool {
        self.queued.load(SeqCst) & bit(waiter) != 0
    }

    /// All that is there for the waiter is about to be taken out.
    pub fn on_take(&self, waiter: WaiterId) {
        if self.queued.load(Relaxed) & bit(waiter) != 0 {
            self.queued.fetch_and(!bit(waiter), SeqCst);
        }
    }
}

/// How many are made at a time. What one is of is never freed, as links are not.
const AT_A_TIME: usize = 64;

/// What is left of those that were made last.
static FREE: Lock<&'static [News]> = Lock::new(&[]);

/// One more, for a link that is made.
pub fn new() -> &'static News {
    let mut free = FREE.lock();
    if let Some(first) = free.as_mut().and_then(|free| free.split_off_first()) {
        return first;
    }
    let made: &'static [News; AT_A_TIME] = Box::leak(Box::new(std::array::from_fn(|_| News::default())));
    let [first, rest @ ..] = made;
    // Where a thread of the parent held the lock at the fork the rest is not used.
    if let Some(free) = free.as_mut() {
        **free = rest;
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_its_own_and_those_made_together_lie_together() {
        let all: Vec<_> = (0..2 * AT_A_TIME).map(|_| new()).collect();
        for (at, news) in all.iter().enumerate() {
            assert!(!news.armed().swap(true, Relaxed), "{at}");
        }
        let next = |pair: &&[&'static News]| matches!(pair, [a, b] if a.armed.as_ptr().addr() + size_of::<News>() == b.armed.as_ptr().addr());
        let together = all.windows(2).filter(next).count();
        assert!(together >= 2 * AT_A_TIME - 4, "{together}");
    }

    #[test]
    fn a_waiter_hears_of_its_own_alone() {
        let (news, [first, last]) = (News::default(), [0, 63].map(WaiterId));
        news.on_queued(first);
        news.on_queued(last);
        news.on_take(first);
        assert!(news.is_queued(last) && !news.is_queued(first));
        // Without a ready queue.
        news.on_queued(WaiterId(64));
        assert!(!news.is_queued(WaiterId(64)) && !news.is_queued(first));
    }
}
