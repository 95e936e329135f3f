//! Loom models of threads that sleep in the kernel when their socket or set moves to the library.

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use crate::fabric::waiter::*;
use crate::sync::loom_models::check;

/// A doorbell: each ring wakes one thread.
struct Doorbell(Mutex<u32>, Condvar);

impl Doorbell {
    fn new() -> Self {
        Self(Mutex::new(0), Condvar::new())
    }
    fn ring(&self) {
        *self.0.lock().unwrap() += 1;
        self.1.notify_one();
    }
    fn wait(&self) {
        let mut rings = self.0.lock().unwrap();
        while *rings == 0 {
            rings = self.1.wait(rings).unwrap();
        }
        *rings -= 1;
    }
}

/// Threads in poll while their socket moves to the library. A thread that is not woken is a deadlock, which loom
/// reports.
#[test]
fn loom_a_thread_in_poll_is_woken_when_its_socket_becomes_ours() {
    check(|| {
        let all = Arc::new((Onlookers::new(2), Published::<AtomicBool>::default()));
        let bells = Arc::new([Doorbell::new(), Doorbell::new()]);
        let pollers = [0u16, 1].map(|id| {
            let (all, bells) = (all.clone(), bells.clone());
            thread::spawn(move || {
                let (onlookers, is_ours) = &*all;
                onlookers.enter(id, Slots::default().with(u32::from(id) * 64 + 5));
                if !is_ours.look() {
                    bells[usize::from(id)].wait();
                }
                onlookers.leave(id);
            })
        });
        let (onlookers, is_ours) = &*all;
        is_ours.publish(true);
        for id in onlookers.of(5) {
            bells[usize::from(id)].ring();
        }
        for poller in pollers {
            poller.join().unwrap();
        }
    });
}

/// Threads in the kernel's wait on an epoll set when the library takes over one of its members. All must be woken,
/// though a ring wakes only one.
#[test]
fn loom_all_in_the_kernels_wait_come_out_when_the_gate_is_closed() {
    check(|| {
        let all = Arc::new((Gate::default(), Doorbell::new()));
        let waiters = [(); 2].map(|()| {
            let all = all.clone();
            thread::spawn(move || {
                let (gate, bell) = &*all;
                if !gate.enter() {
                    let _ = gate.leave();
                    return;
                }
                bell.wait();
                if gate.leave() && gate.is_closed() {
                    bell.ring();
                }
            })
        });
        let (gate, bell) = &*all;
        if gate.close() {
            bell.ring();
        }
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}
