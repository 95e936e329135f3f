//! How two sides that share words do not miss each other; and the atomics of shared memory. These are std's, or loom's
//! under `--cfg loom`, so that the models check the code that ships. Locks and threads are elsewhere.
//!
//! # First publish, then check
//! Wherever two sides must not miss each other, each first stores a word and then loads the word that the other stores
//! (Dekker's protocol). A sleeper announces that it sleeps, then checks for work. A thread with work publishes it, then
//! checks for a sleeper. A processor may execute the load before the store, and then both find nothing. A full fence
//! between the two on *both* sides forbids that. All pairs use one of these:
//!
//! | | one side | the other |
//! |---|---|---|
//! | [`Published`] | publishes a word, then reads another | publishes that other, then reads the first |
//! | [`Attention`] | asks for a notification, then checks for news | publishes, then takes the waiter to notify |
//! | [`SleepFlag`] | raises it, checks, sleeps | publishes, then checks whether to ring |
//! | [`Presence`] | counts itself in, then checks whether it may stay | publishes the closing, then checks the count |
//! | [`Request`] | publishes, then asks if no request is pending | takes the request, then checks what is to be done |
//! | [`Handoff`] | adds work, then tries a lock | releases that lock, then checks for work |
//! | [`store_load_fence`] | stores, fences, loads | the same with the words exchanged; for words with other uses too |
//!
//! # The cost of each
//! All but the last two announce by a `SeqCst` read-modify-write and check by a `SeqCst` load. The single total order
//! of such operations forbids that both sides miss, and no further instruction is needed (x86-64: the locked
//! instruction is the fence; aarch64: `stlxr` and `ldar`). So no function for the protocol takes an ordering: there
//! would be one correct argument.
//!
//! # How this is checked
//! The loom models try every interleaving, and find missing releases and acquires. But loom treats a `SeqCst` access as
//! `AcqRel`, and honours `SeqCst` fences only. So a model has a fence at the places where the total order does its
//! work. Miri follows the orderings themselves, and so checks that those accesses are `SeqCst`. The tests beside the
//! models run in Miri too, often enough to fail if an ordering is weaker.

#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// Two sides with a word each. A side publishes its word, and then [reads](Self::look) the other's word. So it sees
/// what the other side published before reading here, or the other side sees its publication. Writes before a
/// publication are released to the side that reads it.
///
/// In memory: the atomic alone, where 0 means that nothing is published.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Published<A>(A);

macro_rules! published {
    ($($atomic:ty: $value:ty),*) => {$(
        impl From<$value> for Published<$atomic> {
            /// Returns a word with this value, which no other thread can access yet.
            fn from(value: $value) -> Self {
                Self(<$atomic>::new(value))
            }
        }

        impl Published<$atomic> {
            /// Publishes the value; returns the one before. Then look.
            #[inline(always)]
            pub fn publish(&self, value: $value) -> $value {
                let before = self.0.swap(value, Ordering::SeqCst);
                fence_after_rmw();
                before
            }

            /// Publishes the value without the order towards a later look, which may come too early. For a side that
            /// need not notify the other. A look that sees the value acquires the writes before it.
            #[inline(always)]
            pub fn publish_quietly(&self, value: $value) {
                self.0.store(value, Ordering::Release);
            }

            /// Returns what the other side has published. To be called after the own word was published. Acquires the
            /// writes before that publication.
            #[inline(always)]
            pub fn look(&self) -> $value {
                self.0.load(Ordering::SeqCst)
            }

            /// Returns the value, where the other side cannot miss a publication.
            #[inline(always)]
            pub fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }

            /// Takes the value; leaves the word with nothing published. Acquires the writes of all threads that have
            /// published here.
            #[inline]
            pub fn take(&self) -> $value {
                self.0.swap(<$value>::default(), Ordering::SeqCst)
            }

            /// Sets the value where no other thread uses the word.
            pub fn reset(&self, value: $value) {
                self.0.store(value, Ordering::Relaxed);
            }
        }
    )*};
}

published!(AtomicBool: bool, AtomicU8: u8, AtomicU32: u32, AtomicU64: u64);

macro_rules! published_numbers {
    ($($atomic:ty: $value:ty),*) => {$(
        impl Published<$atomic> {
            /// Publishes these bits, in addition to the bits that are set. Then look.
            #[inline(always)]
            pub fn add_bits(&self, bits: $value) {
                self.0.fetch_or(bits, Ordering::SeqCst);
                fence_after_rmw();
            }

            /// Clears these bits; returns the bits among them that were set.
            #[inline(always)]
            pub fn take_bits(&self, bits: $value) -> $value {
                self.0.fetch_and(!bits, Ordering::SeqCst) & bits
            }
        }
    )*};
}

published_numbers!(AtomicU32: u32, AtomicU64: u64);

impl Published<AtomicU32> {
    /// Publishes the value if nothing is published. Otherwise returns the word's value as the error, and changes
    /// nothing. Then look.
    pub fn claim(&self, value: u32) -> Result<(), u32> {
        self.0.compare_exchange(0, value, Ordering::SeqCst, Ordering::SeqCst)?;
        fence_after_rmw();
        Ok(())
    }

    /// Adds one to a count, and so publishes it. Then look.
    pub fn add_one(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Subtracts one that [`add_one`](Self::add_one) has added.
    pub fn take_one(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Publishes a pointer, which releases the value that it points to.
impl<T> Published<AtomicPtr<T>> {
    /// Publishes `new` if the word is `before`; otherwise returns the word's value as the error. May fail without a
    /// reason. Then look.
    pub fn exchange(&self, before: *mut T, new: *mut T) -> Result<(), *mut T> {
        self.0
            .compare_exchange_weak(before, new, Ordering::SeqCst, Ordering::Relaxed)?;
        fence_after_rmw();
        Ok(())
    }

    /// Returns the pointer that the other side has published, and acquires the writes before that.
    pub fn look(&self) -> *mut T {
        self.0.load(Ordering::SeqCst)
    }

    /// Takes the pointer and leaves null, which means that nothing is published.
    pub fn take(&self) -> *mut T {
        self.0.swap(std::ptr::null_mut(), Ordering::SeqCst)
    }
}

/// A word by which a reader asks a publisher for a notification. The reader arms the word, then checks for news; the
/// publisher publishes its news, then takes the word. So the reader finds the news, or the publisher finds the word
/// armed. A publisher that takes a value other than 0 must notify the waiter that the value names.
///
/// In memory: one word, where 0 names no waiter.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Attention(AtomicU32);

impl Attention {
    /// Asks for a notification by these bits, in addition to the bits that are set. Then check for news
    /// ([`Published::look`]).
    #[inline]
    pub fn arm(&self, bits: u32) {
        self.0.fetch_or(bits, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Arms the word as [`arm`](Self::arm) does, for a reader that has armed it before and whose bits are seldom taken
    /// since.
    #[inline]
    pub fn keep_armed(&self, bits: u32) {
        // If the bits are still set, no publisher has taken them: a publisher that publishes after this load takes
        // them.
        if self.0.load(Ordering::SeqCst) & bits != bits {
            self.0.fetch_or(bits, Ordering::SeqCst);
        }
        fence_after_rmw();
    }

    /// Takes the word after a [publication](Published::publish). Returns the waiters to notify of it; 0 if there
    /// are none.
    #[inline(always)]
    pub fn take(&self) -> u32 {
        // The word is seldom set: a load leaves the cache line shared, a swap would not.
        if self.0.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        let bits = self.0.swap(0, Ordering::SeqCst);
        fence_after_rmw();
        bits
    }

    /// Returns the bits that this side has armed and no publisher has taken. A reader that arms the word before it
    /// raises its [`SleepFlag`] checks this afterwards. A publisher that took the word before has
    /// found the flag down, so it rings no bell.
    #[inline]
    pub fn left(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Withdraws the bits that this side has armed; writes to the cache line only if needed. A notification that a
    /// publisher has begun already still arrives.
    pub fn disarm(&self, bits: u32) {
        if self.0.load(Ordering::Relaxed) & bits != 0 {
            self.0.fetch_and(!bits, Ordering::SeqCst);
        }
    }

    /// Disarms the word where neither side uses it. Releases the resets before it to later users of the word.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Release);
    }
}

/// Bits of the flag that count sleepers; the others are the epoch.
const SLEEPERS: u64 = 0xffff;
const EPOCH: u64 = SLEEPERS + 1;

/// Tells whether a waiter sleeps, or is about to. Only the waiter writes to it; peers may map it read-only. All-zero:
/// no thread sleeps. `fabric::waiter` and `os::doorbell` do the sleeping and waking.
///
/// Holds the number of sleeping threads and an epoch that every `begin` advances. Together they never repeat: 48 bits
/// of epoch do not wrap, and between two `begin`s the number only falls. So a peer can tell that it has rung for this
/// state already.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct SleepFlag(AtomicU64);

/// The state for which one process last rang at a waiter. Private to the ringing process.
#[derive(Debug, Default)]
pub struct RungMark(AtomicU64);

impl SleepFlag {
    /// Announces that this thread is about to sleep. Then check again every reason not to sleep, sleep if there is
    /// none, call [`end`](Self::end), and sweep.
    pub fn begin(&self) {
        self.0.fetch_add(EPOCH + 1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Announces that this thread is awake. If it leaves entries in the queues while other threads sleep on the same
    /// waiter, it must ring for them.
    pub fn end(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns whether a thread sleeps, or is about to. To be called after a [publication](Published).
    pub fn is_sleeping(&self) -> bool {
        self.0.load(Ordering::SeqCst) & SLEEPERS != 0
    }

    /// Returns `true` if the doorbell must be rung now, after a [publication](Published). It does so at most
    /// once per process and state of the flag. A bell that was rung for this state leads to an `end`, which changes the
    /// state, and a sweep.
    pub fn must_ring(&self, mark: &RungMark) -> bool {
        let now = self.0.load(Ordering::SeqCst);
        now & SLEEPERS != 0 && mark.0.load(Ordering::Relaxed) != now && mark.0.swap(now, Ordering::Relaxed) != now
    }
}

impl RungMark {
    /// Forgets the last ring, for another peer's waiter.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Counts the threads inside a region. A thread that enters counts itself, then checks whether it may stay, and leaves
/// at once if not. A thread that needs the region empty publishes that it is closed, then checks the count. So no
/// thread stays unseen. The last thread to leave checks whether another waits for that, which has
/// [published](Published) its wait first. So one of the two finds the region empty.
#[derive(Debug, Default)]
pub struct Presence(AtomicU32);

impl Presence {
    /// Counts the calling thread in. Then check whether it may stay ([`Published::look`]).
    #[inline(always)]
    pub fn enter(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Counts the calling thread out; returns `true` if it was the last. Then check whether another thread waits for
    /// that. Releases the accesses inside to a thread that sees the region [empty](Self::is_empty).
    #[inline(always)]
    pub fn leave(&self) -> bool {
        let is_last = self.0.fetch_sub(1, Ordering::SeqCst) == 1;
        fence_after_rmw();
        is_last
    }

    /// Returns whether the region is empty. To be called after the closing was published, or by the last thread that
    /// left.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// Returns the number of threads inside.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Empties the region in a fork child, which has none of the other threads.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// A request that many threads make, and one thread serves later for all of them. Before a thread asks, it has
/// [published](Published) what is to be done, or has changed it under a lock that the server takes. Only the
/// first to ask notifies the server. The server first clears the request, and then checks what is to be done. So what a
/// thread has published is served after it asked, or is requested again.
#[derive(Debug, Default)]
pub struct Request(AtomicBool);

impl Request {
    /// Makes the request. Returns `true` for the first request since the server last began: the caller must notify the
    /// server.
    #[inline]
    #[must_use]
    pub fn ask(&self) -> bool {
        // The request is mostly pending already: a load leaves the cache line shared, a swap would not.
        !self.0.load(Ordering::SeqCst) && !self.0.swap(true, Ordering::SeqCst)
    }

    /// Returns whether a request is pending. Only a hint.
    #[inline]
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Clears the request before it is served: later requests count anew. Then check what is to be done. Returns `true`
    /// if a request was pending.
    pub fn begin(&self) -> bool {
        let was_asked = self.0.swap(false, Ordering::SeqCst);
        fence_after_rmw();
        was_asked
    }
}

/// Work to be done under a lock that callers only try to take. A thread with work adds it, and then tries the lock. The
/// holder of the lock takes the work, does it, releases the lock, and then [checks](Self::is_empty) again. So one of
/// the two does the work, and neither waits. The holder may be the very thread that a signal handler has interrupted.
#[derive(Debug, Default)]
pub struct Handoff(AtomicU32);

impl Handoff {
    /// Adds these bits to the work. Then, until [none is left](Self::is_empty), try the lock and [take](Self::take) the
    /// work; finished if another thread holds the lock.
    pub fn add(&self, bits: u32) {
        self.0.fetch_or(bits, Ordering::SeqCst);
    }

    /// Returns whether there is no work. To be called after work was added, before the lock is tried; and after the
    /// lock was released.
    pub fn is_empty(&self) -> bool {
        // The lock's own operations are not `SeqCst`. This fence is ordered before the attempt to lock, and after the
        // release.
        store_load_fence();
        self.0.load(Ordering::SeqCst) == 0
    }

    /// Takes the work. The caller holds the lock.
    pub fn take(&self) -> u32 {
        self.0.swap(0, Ordering::SeqCst)
    }
}

/// Orders this side's stores before its later loads, where the other side does the same with the words exchanged. For
/// words with other uses too, whose own orderings do not give that. It is a full fence, so it is not for the path of
/// each message.
#[inline]
pub fn store_load_fence() {
    fence(Ordering::SeqCst);
}

/// Separates, in a loom model, a `SeqCst` read-modify-write from the `SeqCst` loads that follow it: loom honours
/// `SeqCst` fences only.
#[inline(always)]
fn fence_after_rmw() {
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}

#[cfg(all(test, loom))]
pub(crate) mod loom_models;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;
