//! Loom models of the ready queue and the sleeper flag: no wake-up is lost.

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
