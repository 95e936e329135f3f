//! The state that an epoll set checks of each of its links to other hosts before each sleep. The states of all links
//! lie side by side, so that hundreds of links take a few cache lines, and not several each.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};

use rdmasock_core::fabric::layout::READY_QUEUES;
use rdmasock_core::fabric::waiter::WaiterId;
use rdmasock_core::lock::Lock;

/// The state of one link.
#[derive(Default)]
pub struct News {
    /// A bit for each waiter whose ready queue may have an entry.
    queued: AtomicU64,
    /// Whether the queue pair is armed, see [`End::is_armed`](rdmasock_core::fabric::remote::End::is_armed).
    armed: AtomicBool,
}

const _: () = assert!(READY_QUEUES == u64::BITS);

fn bit(waiter: WaiterId) -> u64 {
    1_u64.checked_shl(waiter.0.into()).unwrap_or(0)
}

impl News {
    /// Resets the state for another link: no queue has an entry, and nothing is armed.
    pub fn reset(&self) {
        self.queued.store(0, SeqCst);
        self.armed.store(false, SeqCst);
    }

    pub fn armed(&self) -> &AtomicBool {
        &self.armed
    }

    /// Returns the value of [`End::is_armed`](rdmasock_core::fabric::remote::End::is_armed).
    pub fn is_armed(&self) -> bool {
        self.armed.load(Acquire)
    }

    /// Notes that the waiter's ready queue got an entry. The caller checks next whether the waiter sleeps. A thread
    /// that goes to sleep says so before it [checks the queue](Self::is_queued). So one of the two sees the other.
    pub fn on_queued(&self, waiter: WaiterId) {
        self.queued.fetch_or(bit(waiter), SeqCst);
    }

    /// Returns whether the waiter's ready queue may have an entry.
    pub fn is_queued(&self, waiter: WaiterId) -> bool {
        self.queued.load(SeqCst) & bit(waiter) != 0
    }

    /// Notes that all entries of the waiter's ready queue are about to be taken out.
    pub fn on_take(&self, waiter: WaiterId) {
        if self.queued.load(Relaxed) & bit(waiter) != 0 {
            self.queued.fetch_and(!bit(waiter), SeqCst);
        }
    }
}

/// Number of states made at a time. A state is never freed, as its link is not.
const AT_A_TIME: usize = 64;

/// The unused states among those that were made last.
static FREE: Lock<&'static [News]> = Lock::new(&[]);

/// Returns a state for a link object that is made.
pub fn new() -> &'static News {
    let mut free = FREE.lock();
    if let Some(first) = free.as_mut().and_then(|free| free.split_off_first()) {
        return first;
    }
    let made: &'static [News; AT_A_TIME] = Box::leak(Box::new(std::array::from_fn(|_| News::default())));
    let [first, rest @ ..] = made;
    // If a thread of the parent held the lock at the fork, the rest is not used.
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
        // This waiter has no ready queue.
        news.on_queued(WaiterId(64));
        assert!(!news.is_queued(WaiterId(64)) && !news.is_queued(first));
    }
}
