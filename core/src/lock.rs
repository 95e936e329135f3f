//! A small lock for library state: spins briefly, then sleeps on a futex.
//!
//! Not for anything that blocks while it is held. What it has over `std::sync::Mutex`: no
//! poisoning, no libc call (so no hook is re-entered), it can be reset in a fork child, and it
//! knows its owner: a signal handler that interrupts the critical section and asks for the same
//! lock gets `None` instead of a deadlock. A thread that holds one is within the library (`thread`): what a handler
//! above it jumps out of is finished first.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use crate::os::thread;

const WAITERS: u32 = 1 << 31;
/// How often to look again before sleeping; critical sections are far shorter than a sleep.
const SPINS: u32 = 200;

/// The calling thread's kernel id.
#[inline]
pub fn tid() -> u32 {
    thread::current().tid()
}

/// In a fork child: the surviving thread has a new id.
pub fn forget_tid() {
    thread::current().forget_tid();
}

/// The lock; see the module.
pub struct Lock<T> {
    /// Owner's thread id, 0 when free; the top bit says that somebody sleeps.
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached through a Guard, which exists once at a time (word != 0).
unsafe impl<T: Send> Sync for Lock<T> {}
// SAFETY: moving the lock moves the value, which is Send.
unsafe impl<T: Send> Send for Lock<T> {}

impl<T> Lock<T> {
    /// A free lock around `value`.
    pub const fn new(value: T) -> Self {
        Self {
            word: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock; `None` if this very thread holds it (we are in a signal handler).
    #[inline]
    pub fn lock(&self) -> Option<Guard<'_, T>> {
        let thread = thread::current();
        let me = thread.tid();
        // First: a jump between the two would leave the lock for ever.
        thread.begin();
        if self.word.compare_exchange(0, me, Acquire, Relaxed).is_err() && self.lock_slow(me).is_none() {
            thread.end();
            return None;
        }
        Some(Guard { lock: self })
    }

    #[inline]
    fn unlock(&self) {
        if self.word.swap(0, Release) & WAITERS != 0 {
            futex_wake(&self.word);
        }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        let thread = thread::current();
        thread.begin();
        if self.word.compare_exchange(0, thread.tid(), Acquire, Relaxed).is_err() {
            thread.end();
            return None;
        }
        Some(Guard { lock: self })
    }

    #[cold]
    fn lock_slow(&self, me: u32) -> Option<()> {
        let mut spins = 0;
        loop {
            let seen = self.word.load(Relaxed);
            if seen & !WAITERS == me {
                return None;
            }
            if seen == 0 {
                // Others may still sleep: keep the bit, at worst one needless wake-up.
                let mine = if spins > SPINS { me | WAITERS } else { me };
                if self.word.compare_exchange(0, mine, Acquire, Relaxed).is_ok() {
                    return Some(());
                }
                continue;
            }
            if spins <= SPINS {
                spins += 1;
                spin_loop();
                continue;
            }
            if seen & WAITERS == 0
                && self
                    .word
                    .compare_exchange(seen, seen | WAITERS, Relaxed, Relaxed)
                    .is_err()
            {
                continue;
            }
            futex_wait(&self.word, seen | WAITERS);
        }
    }

    /// In a fork child, where no other thread exists: frees the lock whoever held it.
    ///
    /// # Safety
    /// No other thread of this process may use the lock, and the value may have been left in the
    /// middle of a change: the caller must replace it or know that it was not being changed.
    pub unsafe fn reset(&self) {
        self.word.store(0, Release);
    }

    /// The value, without the lock.
    ///
    /// # Safety
    /// Nobody else may be using the value.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get_unlocked(&self) -> &mut T {
        // SAFETY: by this function's contract.
        unsafe { &mut *self.value.get() }
    }
}

/// The right to use a lock's value.
pub struct Guard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard exists, so this thread holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard exists, so this thread holds the lock.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.unlock();
        thread::current().end();
    }
}

impl<T> Guard<'_, T> {
    /// Frees the lock. The section that it was goes on, for what is still owed to others because of what was done under
    /// it.
    #[inline]
    pub fn unlock(self) -> Section {
        let guard = std::mem::ManuallyDrop::new(self);
        guard.lock.unlock();
        Section(())
    }
}

/// What is left of a [`Guard`] that was unlocked: ends a section of the thread when it is dropped.
#[derive(Debug)]
pub struct Section(());

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        thread::current().end();
    }
}

fn futex_wait(word: &AtomicU32, expected: u32) {
    // Any return (woken, changed, interrupted) means: look again.
    let _ = rustix::thread::futex::wait(word, rustix::thread::futex::Flags::PRIVATE, expected, None);
}

fn futex_wake(word: &AtomicU32) {
    let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::PRIVATE, 1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_threads_count_to_the_sum() {
        let lock = Lock::new(0u64);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..50_000 {
                        *lock.lock().unwrap() += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock().unwrap(), 200_000);
    }

    #[test]
    fn the_owner_that_asks_again_is_told_so() {
        let lock = Lock::new(());
        let _held = lock.lock().unwrap();
        assert!(lock.lock().is_none());
    }
}
