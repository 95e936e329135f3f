//! Lists all objects of one type that the process has made. A fork child needs the whole list, because not every object
//! can be found by an fd. The child repairs the objects that another thread of its parent was changing at the fork.

use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

struct Node<T: 'static> {
    object: T,
    before: *const Node<T>,
}

/// A list of objects that only grows. Adding an object never blocks.
pub(crate) struct Registry<T: 'static> {
    last: AtomicPtr<Node<T>>,
}

impl<T: Sync> Registry<T> {
    /// Returns an empty registry.
    pub(crate) const fn new() -> Self {
        Self {
            last: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Adds an object, which is never freed. Returns a reference to it.
    pub(crate) fn add(&self, object: T) -> &'static T {
        let mut before = self.last.load(Relaxed);
        let node = Box::leak(Box::new(Node { object, before }));
        while let Err(now) = self.last.compare_exchange_weak(before, node, Release, Relaxed) {
            before = now;
            node.before = now;
        }
        &node.object
    }

    /// Returns all objects, the youngest first.
    pub(crate) fn all(&self) -> impl Iterator<Item = &'static T> + use<T> {
        let mut next = self.last.load(Acquire).cast_const();
        std::iter::from_fn(move || {
            // SAFETY: `next` is null or a node on the list. A node on the list is never freed and never changed.
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
