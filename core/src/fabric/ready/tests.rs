//! Tests of the ready queue and the sleeper flag: sequences, and loom models.

use super::*;

#[cfg(not(loom))]
mod sequences {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_sweep_ends_though_streams_are_pushed_again() {
        let (queue, mut cursor) = (PrivateQueue::new(), ReadyCursor::new());
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
        let (queue, mut cursor) = (PrivateQueue::new(), ReadyCursor::new());
        for s in &queue.0[0].summary {
            s.store(u64::MAX, Ordering::Relaxed);
        }
        queue.0[1].words[3].store(u64::MAX, Ordering::Relaxed);
        cursor.begin(&queue);
        let all: Vec<u32> = std::iter::from_fn(|| cursor.pop(&queue)).collect();
        assert_eq!(all, (7 * 64..8 * 64).collect::<Vec<u32>>());
        assert!(cursor.is_idle(&queue));
    }

    #[test]
    fn the_bell_rings_once_per_sleep_and_process() {
        let (flag, a, b) = (SleepFlag::new(), RungMark::new(), RungMark::new());
        assert!(!flag.must_ring(&a));
        flag.begin();
        assert!(flag.must_ring(&a) && !flag.must_ring(&a));
        assert!(flag.must_ring(&b));
        // A second sleeper, and one that wakes while the other sleeps on, are new occasions.
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
            ops in proptest::collection::vec(proptest::option::of(0..MAX_STREAMS), 1..300),
        ) {
            let (queue, mut cursor) = (PrivateQueue::new(), ReadyCursor::new());
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
                            // It may have been pushed again after its word was taken.
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
mod loom_models {
    use super::*;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    /// An eventfd: `ring` adds, `wait` sleeps until there is something and takes it all.
    struct Doorbell(Mutex<u32>, Condvar);

    impl Doorbell {
        fn ring(&self) {
            *self.0.lock().unwrap() += 1;
            self.1.notify_all();
        }
        fn wait(&self) {
            let mut n = self.0.lock().unwrap();
            while *n == 0 {
                n = self.1.wait(n).unwrap();
            }
            *n = 0;
        }
    }

    struct Waiter {
        queue: PrivateQueue,
        flag: SleepFlag,
        bell: Doorbell,
        mark: RungMark,
    }

    /// A lost wake-up shows as a deadlock, which loom reports.
    fn pushers(vqpns: &'static [u32]) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let waiter = Arc::new(Waiter {
                queue: PrivateQueue::new(),
                flag: SleepFlag::new(),
                bell: Doorbell(Mutex::new(0), Condvar::new()),
                mark: RungMark::new(),
            });
            let threads: Vec<_> = vqpns
                .iter()
                .map(|&v| {
                    let w = waiter.clone();
                    thread::spawn(move || {
                        w.queue.push(v);
                        if w.flag.must_ring(&w.mark) {
                            w.bell.ring();
                        }
                    })
                })
                .collect();
            let mut cursor = ReadyCursor::new();
            let mut missing: Vec<u32> = vqpns.to_vec();
            while !missing.is_empty() {
                cursor.begin(&waiter.queue);
                while let Some(v) = cursor.pop(&waiter.queue) {
                    missing.retain(|&m| m != v);
                }
                if !missing.is_empty() {
                    waiter.flag.begin();
                    if cursor.is_idle(&waiter.queue) {
                        waiter.bell.wait();
                    }
                    waiter.flag.end();
                }
            }
            for t in threads {
                t.join().unwrap();
            }
        });
    }

    #[test]
    fn loom_sleeper_is_woken() {
        pushers(&[3]);
    }

    #[test]
    fn loom_two_pushers_in_one_word() {
        pushers(&[3, 5]);
    }

    #[test]
    fn loom_two_pushers_in_two_words() {
        pushers(&[3, 70]);
    }
}
