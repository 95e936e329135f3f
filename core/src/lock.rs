//! A small lock for library state: spins briefly, then sleeps on a futex.
//!
//! No thread may block while it holds the lock. Unlike `std::sync::Mutex` the lock has no poisoning, calls no libc
//! function (so it enters no hook), can be reset in a fork child, and knows its owner. A signal handler that interrupts
//! the lock's owner and asks for the same lock gets `None` instead of a deadlock. A thread that holds a lock has a
//! section open. Until the section ends, `os::thread` defers the program's signal handlers in that thread, and a
//! `longjmp` out of one.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::thread::futex;

use crate::os::thread;

const WAITERS: u32 = 1 << 31;
/// The number of checks before a thread sleeps; critical sections are far shorter than a sleep.
const SPINS: u32 = 200;

/// A lock that knows its owner; the module's description has its rules.
pub struct Lock<T> {
    /// The owner's thread id, 0 when free. The top bit is set if a thread may sleep.
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only accessed through a Guard, and one Guard exists at a time (word != 0).
unsafe impl<T: Send> Sync for Lock<T> {}
// SAFETY: moving the lock moves the value, which is Send.
unsafe impl<T: Send> Send for Lock<T> {}

impl<T: Default> Default for Lock<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Lock<T> {
    /// Returns a free lock around `value`.
    pub const fn new(value: T) -> Self {
        Self {
            word: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock. Returns `None` if this very thread holds it, so that the caller is a signal handler which has
    /// interrupted the owner.
    #[inline]
    pub fn lock(&self) -> Option<Guard<'_, T>> {
        let thread = thread::current();
        let me = thread.tid();
        // The section begins before the lock is taken. Otherwise a jump between the two would leave the lock taken for
        // ever.
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
            let _ = futex::wake(&self.word, futex::Flags::PRIVATE, 1);
        }
    }

    /// Takes the lock if it is free; otherwise returns `None`.
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
                // Other threads may still sleep, so the bit is set. If none sleeps, that costs one needless wake-up.
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
            // The loop checks the word again after any return of the wait: woken, word changed, or interrupted.
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, seen | WAITERS, None);
        }
    }

    /// Frees the lock in a fork child, where no other thread exists, regardless of its owner.
    ///
    /// # Safety
    /// No other thread of this process may use the lock. A thread may have been in the middle of a change of the value.
    /// So the caller must replace the value, or know that it was not being changed.
    pub unsafe fn reset(&self) {
        self.word.store(0, Release);
    }

    /// Frees the lock in a fork child, as [`Self::reset`] does, with a new value. The old value is leaked: another
    /// thread of the parent may have been changing it.
    ///
    /// # Safety
    /// No other thread of this process may use the lock.
    pub unsafe fn renew(&self)
    where
        T: Default,
    {
        // SAFETY: by this function's contract. The old value is not used.
        unsafe {
            std::mem::forget(std::mem::take(self.get_unlocked()));
            self.reset();
        }
    }

    /// Returns the value without taking the lock.
    ///
    /// # Safety
    /// No other code may be using the value.
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
    /// Frees the lock, but keeps the thread's section open. Within it the caller notifies others of what was done under
    /// the lock.
    #[inline]
    pub fn unlock(self) -> Section {
        let guard = std::mem::ManuallyDrop::new(self);
        guard.lock.unlock();
        Section(())
    }
}

/// The section of a [`Guard`] that was unlocked; ends when dropped.
#[derive(Debug)]
pub struct Section(());

impl Drop for Section {
    #[inline]
    fn drop(&mut self) {
        thread::current().end();
    }
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
