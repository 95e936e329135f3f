//! A small lock for library state: spins briefly, then sleeps on a futex.
//!
//! Not for anything that blocks while it is held. What it has over `std::sync::Mutex`: no
//! poisoning, no libc call (so no hook is re-entered), it can be reset in a fork child, and it
//! knows its owner: a signal handler that interrupts the critical section and asks for the same
//! lock gets `None` instead of a deadlock.

use std::cell::{Cell, UnsafeCell};
use std::hint::spin_loop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

const WAITERS: u32 = 1 << 31;
/// How often to look again before sleeping; critical sections are far shorter than a sleep.
const SPINS: u32 = 200;

thread_local! {
    /// This thread's id; 0 until asked for. No destructor, so it may be read at any time.
    static TID: Cell<u32> = const { Cell::new(0) };
}

/// The calling thread's kernel id.
#[inline]
pub fn tid() -> u32 {
    TID.with(|t| match t.get() {
        0 => {
            let id = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            t.set(id);
            id
        }
        id => id,
    })
}

/// In a fork child: the surviving thread has a new id.
pub fn forget_tid() {
    TID.with(|t| t.set(0));
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
        let me = tid();
        if self.word.compare_exchange(0, me, Acquire, Relaxed).is_err() {
            self.lock_slow(me)?;
        }
        Some(Guard { lock: self })
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.word
            .compare_exchange(0, tid(), Acquire, Relaxed)
            .ok()
            .map(|_| Guard { lock: self })
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
                if self
                    .word
                    .compare_exchange(0, mine, Acquire, Relaxed)
                    .is_ok()
                {
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
        if self.lock.word.swap(0, Release) & WAITERS != 0 {
            futex_wake(&self.lock.word);
        }
    }
}

fn futex_wait(word: &AtomicU32, expected: u32) {
    // Any return (woken, changed, interrupted) means: look again.
    let _ =
        rustix::thread::futex::wait(word, rustix::thread::futex::Flags::PRIVATE, expected, None);
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
