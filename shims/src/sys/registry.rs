//! Every object of a kind that was ever made, for what concerns them all: a fork child has to put right what another
//! thread of its parent was about to change, whether or not a number leads to it.

use std::sync::atomic::{
    AtomicPtr,
    Ordering::{Acquire, Relaxed, Release},
};

struct Node<T: 'static> {
    object: T,
    before: *const Node<T>,
}

/// See the module. Grows only; who adds never waits.
pub struct Registry<T: 'static> {
    last: AtomicPtr<Node<T>>,
}

impl<T: Sync> Registry<T> {
    /// Of nothing yet.
    pub const fn new() -> Self {
        Self {
            last: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Keeps an object for good.
    pub fn add(&self, object: T) -> &'static T {
        let mut before = self.last.load(Relaxed);
        let node = Box::leak(Box::new(Node { object, before }));
        while let Err(now) = self.last.compare_exchange_weak(before, node, Release, Relaxed) {
            before = now;
            node.before = now;
        }
        &node.object
    }

    /// All of them, the youngest first.
    pub fn all(&self) -> impl Iterator<Item = &'static T> + use<T> {
        let mut next = self.last.load(Acquire).cast_const();
        std::iter::from_fn(move || {
            // SAFETY: null, or a node that is never freed and, once it is on the list, never changed.
            let node = unsafe { next.as_ref() }?;
            next = node.before;
            Some(&node.object)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_threads_add_at_the_same_time_is_all_there() {
        static ALL: Registry<u32> = Registry::new();
        std::thread::scope(|s| {
            for thread in 0..4 {
                s.spawn(move || {
                    for i in 0..1000 {
                        assert_eq!(*ALL.add(thread * 1000 + i), thread * 1000 + i);
                    }
                });
            }
        });
        let mut all: Vec<u32> = ALL.all().copied().collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..4000));
    }
}
