//! Protocols between two *sides*, threads or processes, that share words of memory. By each protocol neither side
//! misses a change that the other side makes. The file also exports the atomics of shared memory: std's, or loom's
//! under `--cfg loom`, so that the models check the code that ships. Locks are in `lock`, threads in `os::thread`.
//!
//! # First publish, then check
//! Wherever two sides must not miss each other, each first stores a word and then loads the word that the other side
//! stores (Dekker's protocol). For example, a sleeper announces that it sleeps, then checks for work. A thread with
//! work publishes it, then checks for a sleeper. Without a fence, a processor may execute the load before the store,
//! and then neither side sees the other's store. A full fence between store and load on *both* sides forbids that. All
//! such pairs use one of these items:
//!
//! | | one side | the other |
//! |---|---|---|
//! | [`Published`] | publishes its word, then reads the other side's | the same with the words exchanged |
//! | [`Attention`] | asks for a notification, then checks for news | publishes, then takes the waiter to notify |
//! | [`SleepFlag`] | raises the flag, checks for work, sleeps | publishes work, then checks whether to ring |
//! | [`Presence`] | counts itself in, then checks whether it may stay | publishes the closing, then checks the count |
//! | [`Request`] | publishes work, then asks unless a request is pending | takes the request, then checks for work |
//! | [`Handoff`] | adds work, then tries a lock | releases that lock, then checks for work |
//! | [`store_load_fence`] | stores, fences, loads | the same with the words exchanged; for words with other uses too |
//!
//! # The cost of each
//! The first five rows announce by a `SeqCst` read-modify-write and check by a `SeqCst` load. The single total order of
//! such operations forbids that both sides miss each other, and no further instruction is needed (x86-64: the locked
//! instruction is the fence; aarch64: `stlxr` and `ldar`). No function of these types takes an ordering for that as an
//! argument, since only `SeqCst` would be correct.
//!
//! # How this is checked
//! The loom models try every interleaving, and find missing releases and acquires. But loom treats a `SeqCst` access as
//! `AcqRel`: only a `SeqCst` fence gives a total order there. So under loom each place where a protocol relies on the
//! total order has a fence (`fence_after_rmw`). Miri follows the orderings of the accesses, so it checks that they are
//! `SeqCst`. The tests in `tests` run in Miri too, often enough to fail if an ordering is weaker.

#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// A word that belongs to one side; the other side has such a word too. A side publishes a value in its own word, and
/// then [reads](Self::look) the other side's word. So at least one of the two sides sees what the other has published.
/// A side that reads a published value also sees the writes that came before its publication.
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
            /// Publishes the value, and returns the word's value before that. The caller calls `look` on the other
            /// side's word next.
            #[inline(always)]
            pub fn publish(&self, value: $value) -> $value {
                let before = self.0.swap(value, Ordering::SeqCst);
                fence_after_rmw();
                before
            }

            /// Publishes the value without the fence, so the processor may execute a later `look` of this side first.
            /// For a side that need not notify the other side. A `look` that sees the value acquires the writes before
            /// the publication.
            #[inline(always)]
            pub fn publish_quietly(&self, value: $value) {
                self.0.store(value, Ordering::Release);
            }

            /// Returns what the other side has published, and acquires the writes before that publication. The caller
            /// has published its own word before.
            #[inline(always)]
            pub fn look(&self) -> $value {
                self.0.load(Ordering::SeqCst)
            }

            /// Returns the value, outside the protocol: a publication at the same time may be missed.
            #[inline(always)]
            pub fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }

            /// Returns the value and sets the word to 0, so that nothing is published. Acquires the writes of all
            /// threads that have published in this word.
            #[inline]
            pub fn take(&self) -> $value {
                self.0.swap(<$value>::default(), Ordering::SeqCst)
            }

            /// Sets the value while no other thread uses the word.
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
            /// Publishes these bits, in addition to the bits that are set. The caller calls `look` on the other side's
            /// word next.
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
    /// nothing. The caller calls `look` on the other side's word next.
    pub fn claim(&self, value: u32) -> Result<(), u32> {
        self.0.compare_exchange(0, value, Ordering::SeqCst, Ordering::SeqCst)?;
        fence_after_rmw();
        Ok(())
    }

    /// Adds one to the count in the word, and so publishes it. The caller calls `look` on the other side's word next.
    pub fn add_one(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Subtracts one from the count, to undo one call of [`add_one`](Self::add_one).
    pub fn take_one(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A word that publishes a pointer. A publication releases the value that the pointer points to.
impl<T> Published<AtomicPtr<T>> {
    /// Publishes `new` if the word is `before`; otherwise returns the word's value as the error. May fail spuriously,
    /// with `before` as the error. The caller calls `look` on the other side's word next.
    pub fn exchange(&self, before: *mut T, new: *mut T) -> Result<(), *mut T> {
        self.0
            .compare_exchange_weak(before, new, Ordering::SeqCst, Ordering::Relaxed)?;
        fence_after_rmw();
        Ok(())
    }

    /// Returns the pointer that the other side has published, and acquires the writes before its publication.
    pub fn look(&self) -> *mut T {
        self.0.load(Ordering::SeqCst)
    }

    /// Returns the pointer, and sets the word to null, which means that nothing is published.
    pub fn take(&self) -> *mut T {
        self.0.swap(std::ptr::null_mut(), Ordering::SeqCst)
    }
}

/// A wake-up word, by which a reader asks a publisher for a notification. The reader arms the word, then checks for
/// news. The publisher publishes its news, then takes the word. So the reader finds the news, or the publisher finds
/// the word armed. A publisher that takes a value other than 0 must notify the waiter that the value names.
///
/// In memory: one word, where 0 names no waiter.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Attention(AtomicU32);

impl Attention {
    /// Asks for a notification by these bits, in addition to the bits that are set. The caller checks for news next
    /// ([`Published::look`]).
    #[inline]
    pub fn arm(&self, bits: u32) {
        self.0.fetch_or(bits, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Arms the word as [`arm`](Self::arm) does. Cheaper if the bits are still set from an earlier call, since it then
    /// only loads the word.
    #[inline]
    pub fn keep_armed(&self, bits: u32) {
        // Bits that are still set need not be set again. A publisher that publishes after this load takes them. The
        // caller's check, which comes next, finds what was published before.
        if self.0.load(Ordering::SeqCst) & bits != bits {
            self.0.fetch_or(bits, Ordering::SeqCst);
        }
        fence_after_rmw();
    }

    /// Clears the word, after a [publication](Published::publish). Returns its value, which names the waiters to
    /// notify; 0 if there are none.
    #[inline(always)]
    pub fn take(&self) -> u32 {
        // The word is seldom set. A load leaves the cache line shared between the processors, and a swap would not.
        if self.0.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        let bits = self.0.swap(0, Ordering::SeqCst);
        fence_after_rmw();
        bits
    }

    /// Returns the bits that this side has armed and no publisher has taken. For a reader that arms the word first and
    /// raises its [`SleepFlag`] afterwards: it calls this with the flag up, and must not sleep if the bits are gone. A
    /// publisher that took them in between has found the flag down, and rings no doorbell.
    #[inline]
    pub fn left(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Withdraws the bits that this side has armed. Writes to the cache line only if some of them are set. If a
    /// publisher has taken the word before, its notification still arrives.
    pub fn disarm(&self, bits: u32) {
        if self.0.load(Ordering::Relaxed) & bits != 0 {
            self.0.fetch_and(!bits, Ordering::SeqCst);
        }
    }

    /// Disarms the word while neither side uses it. Later users of the word see the writes before this one.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Release);
    }
}

/// The bits of a `SleepFlag` that count sleeping threads. The bits above count the calls of `begin`: the epoch.
const SLEEPERS: u64 = 0xffff;
const EPOCH: u64 = SLEEPERS + 1;

/// Shows whether a thread of a waiter sleeps, or is about to. Only the waiter's process writes to the flag; peers may
/// map it read-only. In zeroed memory the flag says that no thread sleeps. `fabric::waiter` and `os::doorbell` do the
/// sleeping and waking.
///
/// The flag holds the number of sleeping threads and an *epoch*, a count of the calls of `begin`. Together they never
/// repeat: the 48 bits of the epoch do not wrap, and between two `begin`s the number only falls. So a peer can detect
/// that it has rung the doorbell for the flag's present value already.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct SleepFlag(AtomicU64);

/// The value that a waiter's `SleepFlag` had when one process last rang the waiter's doorbell. Private to that process.
#[derive(Debug, Default)]
pub struct RungMark(AtomicU64);

impl SleepFlag {
    /// Announces that this thread is about to sleep. The thread then checks every reason not to sleep once more, and
    /// sleeps if there is none. After that it calls [`end`](Self::end), and goes through its ready queues.
    pub fn begin(&self) {
        self.0.fetch_add(EPOCH + 1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Announces that this thread is awake. It must ring the doorbell if it leaves entries in its ready queues while
    /// other threads sleep as the same waiter.
    pub fn end(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns whether a thread sleeps, or is about to. To be called after a [publication](Published).
    pub fn is_sleeping(&self) -> bool {
        self.0.load(Ordering::SeqCst) & SLEEPERS != 0
    }

    /// Returns `true` if the doorbell must be rung, after a [publication](Published). Returns `true` at most once for
    /// each process and value of the flag. One ring for a value suffices, because the sleeper that it wakes changes the
    /// value by `end`, and goes through its ready queues.
    pub fn must_ring(&self, mark: &RungMark) -> bool {
        let now = self.0.load(Ordering::SeqCst);
        now & SLEEPERS != 0 && mark.0.load(Ordering::Relaxed) != now && mark.0.swap(now, Ordering::Relaxed) != now
    }
}

impl RungMark {
    /// Forgets the last ring. Called before the mark is used for another peer's waiter.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Counts the threads inside a region of code. A thread that enters counts itself, then checks whether it may stay, and
/// leaves at once if not. A thread that needs the region empty publishes that the region is closed, then checks the
/// count. So the closing thread sees each thread that stays.
///
/// A thread that waits for the region to be empty [publishes](Published) that it waits, then checks the count. The last
/// thread to leave checks whether a thread waits. So the waiting thread finds the region empty, or the last thread
/// finds the waiting thread.
#[derive(Debug, Default)]
pub struct Presence(AtomicU32);

impl Presence {
    /// Counts the calling thread in. The thread then checks whether it may stay ([`Published::look`]).
    #[inline(always)]
    pub fn enter(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        fence_after_rmw();
    }

    /// Counts the calling thread out; returns `true` if it was the last. The last thread then checks whether another
    /// thread waits for the region to be empty. A thread that sees the region [empty](Self::is_empty) also sees the
    /// writes that were made inside.
    #[inline(always)]
    pub fn leave(&self) -> bool {
        let is_last = self.0.fetch_sub(1, Ordering::SeqCst) == 1;
        fence_after_rmw();
        is_last
    }

    /// Returns whether the region is empty. Called after the closing was published, or by the last thread that left.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// Returns the number of threads inside.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Sets the count to 0 in a fork child, in which the other threads do not exist.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// A request that many threads make, and one thread, the server, serves later for all of them. Before a thread asks, it
/// has [published](Published) its work, or has added it under a lock that the server takes. Only the first thread to
/// ask notifies the server. The server first clears the request, and then checks for work. So it finds the work of all
/// threads that asked before it cleared the request, and a thread that asks later notifies it again.
#[derive(Debug, Default)]
pub struct Request(AtomicBool);

impl Request {
    /// Makes the request. Returns `true` for the first request since the server last cleared it: the caller must notify
    /// the server.
    #[inline]
    #[must_use]
    pub fn ask(&self) -> bool {
        // A request is mostly pending already. A load leaves the cache line shared between the processors, and a swap
        // would not.
        !self.0.load(Ordering::SeqCst) && !self.0.swap(true, Ordering::SeqCst)
    }

    /// Returns whether a request is pending. Only a hint.
    #[inline]
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Clears the request before it is served, so that the next request notifies the server again. The server then
    /// checks for work. Returns `true` if a request was pending.
    pub fn begin(&self) -> bool {
        let was_asked = self.0.swap(false, Ordering::SeqCst);
        fence_after_rmw();
        was_asked
    }
}

/// Work to be done under a lock that callers only try to take. A thread with work adds it, and then tries the lock. The
/// holder of the lock takes the work, does it, releases the lock, and then [checks](Self::is_empty) again. So the
/// thread or the holder does the work, and neither waits. This holds even if the thread is a signal handler that has
/// interrupted the lock's holder.
#[derive(Debug, Default)]
pub struct Handoff(AtomicU32);

impl Handoff {
    /// Adds these bits to the work. The caller then tries the lock and [takes](Self::take) the work, as long as work
    /// [is left](Self::is_empty). It may stop when another thread holds the lock.
    pub fn add(&self, bits: u32) {
        self.0.fetch_or(bits, Ordering::SeqCst);
    }

    /// Returns whether there is no work. To be called after adding work and before trying the lock, and again after
    /// releasing the lock.
    pub fn is_empty(&self) -> bool {
        // The lock's own operations are not `SeqCst`. The fence orders the addition of work before the attempt to lock,
        // and the release of the lock before the load that follows.
        store_load_fence();
        self.0.load(Ordering::SeqCst) == 0
    }

    /// Takes the work. The caller holds the lock.
    pub fn take(&self) -> u32 {
        self.0.swap(0, Ordering::SeqCst)
    }
}

/// Orders this side's earlier stores before its later loads. The other side does the same: it stores the word that this
/// side loads, and loads the word that this side stores. For words that have other uses too, whose own orderings do not
/// suffice. This is a full fence, which is too slow for the path of each message.
#[inline]
pub fn store_load_fence() {
    fence(Ordering::SeqCst);
}

/// Under loom, separates a `SeqCst` read-modify-write from the `SeqCst` loads that follow it, since loom honours
/// `SeqCst` fences only. Otherwise does nothing.
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
