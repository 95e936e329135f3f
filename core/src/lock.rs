//! A small lock for library state: spins briefly, then sleeps on a futex.
//!
//! No thread may block while it holds the lock. Unlike `std::sync::Mutex`, the lock has no poisoning, and calls no libc
//! function, which could be a hook of the library. A fork child can free it. The lock knows its owner: if a signal
//! handler interrupts the owner and asks for the same lock, it gets `None` instead of a deadlock.
//!
//! A thread that holds a lock has a *section* open. Until the section ends, `os::thread` defers the program's signal
//! handlers in that thread, and a `longjmp` out of a handler.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::thread::futex;

use crate::os::thread;

const WAITERS: u32 = 1 << 31;
/// The number of times that a thread checks a taken lock before it sleeps. Critical sections are far shorter than a
/// sleep, so most locks are free again earlier.
const SPINS: u32 = 200;

/// A lock that knows its owner. The file's header has its rules.
pub struct Lock<T> {
    /// The owner's thread id; 0 if the lock is free. The top bit, `WAITERS`, is set if a thread may sleep on the word.
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only accessed through a `Guard`, and at most one `Guard` exists at a time (word != 0). The
// caller of `get_unlocked` promises that no other code uses the value.
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

    /// Takes the lock. Returns `None` if the calling thread holds the lock already: the caller is a signal handler that
    /// has interrupted the owner.
    #[inline]
    pub fn lock(&self) -> Option<Guard<'_, T>> {
        let thread = thread::current();
        let me = thread.tid();
        // The section begins before the lock is taken. If it began afterwards, a jump out of a signal handler between
        // the two steps would leave the lock taken for ever.
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
                // A thread that may have slept sets the bit, because `unlock` wakes only one thread and others may
                // still sleep. If none sleeps, that costs one needless wake-up.
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
            // The wait ends when the thread is woken, when the word has changed, or by a signal. The loop checks the
            // word again in each case.
            let _ = futex::wait(&self.word, futex::Flags::PRIVATE, seen | WAITERS, None);
        }
    }

    /// Frees the lock, whichever thread owns it. For a fork child, in which no other thread exists.
    ///
    /// # Safety
    /// No other thread of this process may use the lock. The owner in the parent may have been in the middle of a
    /// change of the value. So the caller must replace the value, or know that it was not being changed.
    pub unsafe fn reset(&self) {
        self.word.store(0, Release);
    }

    /// Frees the lock in a fork child, as [`Self::reset`] does, and replaces the value by its default. The old value is
    /// leaked, because a thread of the parent may have been in the middle of a change of it.
    ///
    /// # Safety
    /// No other thread of this process may use the lock.
    pub unsafe fn renew(&self)
    where
        T: Default,
    {
        // SAFETY: by this function's contract. The old value is moved and forgotten, but not used.
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
    /// Frees the lock, but keeps the thread's section open. In that section the caller notifies other threads of what
    /// it did under the lock.
    #[inline]
    pub fn unlock(self) -> Section {
        let guard = std::mem::ManuallyDrop::new(self);
        guard.lock.unlock();
        Section(())
    }
}

/// The section that `Guard::unlock` keeps open. It ends when the value is dropped.
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
