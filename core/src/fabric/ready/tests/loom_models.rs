//! Loom models of the ready queue and the sleep flag: no wake-up is lost.

use loom::sync::Arc;
use loom::thread;

use crate::fabric::ready::tests::*;
use crate::sync::loom_models::{Doorbell, check};

struct Waiter {
    queue: PrivateQueue,
    flag: SleepFlag,
    bell: Doorbell,
    mark: RungMark,
}

/// Runs one thread that pushes each of `vqpns`, against a waiter that sweeps and sleeps. A lost wake-up shows as a
/// deadlock, which loom reports.
fn pushers(vqpns: &'static [u32]) {
    check(move || {
        let waiter = Arc::new(Waiter {
            queue: PrivateQueue::default(),
            flag: SleepFlag::default(),
            bell: Doorbell::new(),
            mark: RungMark::default(),
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
        let mut cursor = ReadyCursor::default();
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
