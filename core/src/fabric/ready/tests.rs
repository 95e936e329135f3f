//! Tests of the ready queue and the sleep flag: sequences of operations, and loom models.

use crate::fabric::ready::*;
use crate::sync::{RungMark, SleepFlag};

#[cfg(not(loom))]
mod sequences {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_sweep_ends_though_streams_are_pushed_again() {
        let (queue, mut cursor) = (PrivateQueue::default(), ReadyCursor::default());
        for v in [0, 63, 64, 16383, 16383, 99999] {
            queue.push(v);
        }
        assert!(!cursor.is_idle(&queue));
        cursor.begin(&queue);
        let mut seen = Vec::new();
        while let Some(v) = cursor.pop(&queue) {
            seen.push(v);
            queue.push(v);
        }
        assert_eq!(seen, [0, 63, 64, 16383]);
        assert!(!cursor.is_idle(&queue));
    }

    #[test]
    fn hostile_contents_are_only_spurious_streams() {
        let (queue, mut cursor) = (PrivateQueue::default(), ReadyCursor::default());
        for s in &queue.0[0].summary {
            s.reset(u64::MAX);
        }
        queue.0[1].words[3].reset(u64::MAX);
        cursor.begin(&queue);
        let all: Vec<u32> = std::iter::from_fn(|| cursor.pop(&queue)).collect();
        assert_eq!(all, (7 * 64..8 * 64).collect::<Vec<u32>>());
        assert!(cursor.is_idle(&queue));
    }

    #[test]
    fn the_bell_rings_once_per_sleep_and_process() {
        let (flag, a, b) = (SleepFlag::default(), RungMark::default(), RungMark::default());
        assert!(!flag.must_ring(&a));
        flag.begin();
        assert!(flag.must_ring(&a) && !flag.must_ring(&a));
        assert!(flag.must_ring(&b));
        // The bell rings again for a second sleeper, and after one of two sleepers has woken.
        flag.begin();
        assert!(flag.must_ring(&a) && !flag.must_ring(&a));
        flag.end();
        assert!(flag.must_ring(&a) && !flag.must_ring(&a));
        flag.end();
        assert!(!flag.is_sleeping() && !flag.must_ring(&a));
    }

    proptest! {
        #[test]
        fn what_is_pushed_is_popped(
            ops in proptest::collection::vec(proptest::option::of(0..MAX_STREAMS), 1..if cfg!(miri) { 50 } else { 300 }),
        ) {
            let (queue, mut cursor) = (PrivateQueue::default(), ReadyCursor::default());
            let mut model = BTreeSet::new();
            for op in ops {
                match op {
                    Some(v) => {
                        queue.push(v);
                        model.insert(v);
                    }
                    None => {
                        cursor.begin(&queue);
                        if let Some(v) = cursor.pop(&queue) {
                            // The queue may hold the stream still, since it may have been pushed again after its word
                            // was taken.
                            model.remove(&v);
                        }
                    }
                }
            }
            let mut rest = BTreeSet::new();
            while !cursor.is_idle(&queue) {
                cursor.begin(&queue);
                rest.extend(std::iter::from_fn(|| cursor.pop(&queue)));
            }
            prop_assert!(model.is_subset(&rest));
        }
    }
}

#[cfg(loom)]
mod loom_models;
