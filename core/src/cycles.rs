//! The processor's cycle counter (TSC). All processes of a host read the same counter, and a read takes some ns.

/// Returns the counter in ticks; one ns has one to five ticks. The counters of a host's processors differ by no more
/// than the time in which a cache line moves from one processor to another.
#[inline]
pub fn now() -> u64 {
    // Miri cannot execute this instruction. The code that Miri checks needs only a count that grows.
    #[cfg(miri)]
    {
        use std::sync::atomic::AtomicU64;
        use std::sync::atomic::Ordering::Relaxed;
        static COUNT: AtomicU64 = AtomicU64::new(1);
        COUNT.fetch_add(1, Relaxed)
    }
    #[cfg(not(miri))]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
}
