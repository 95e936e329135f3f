//! The processor's cycle counter: the same for all processes of a host, and read within some ns.

/// Returns the value of the processor's counter in ticks, one to five per ns. The processors of a host agree on the
/// value to within the time that a cache line takes from one processor to another.
#[inline]
pub fn now() -> u64 {
    // Miri has no such instruction. The code that Miri checks needs only a count that grows.
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
