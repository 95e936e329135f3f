//! The processor's cycle counter: the same for all processes of a host, and read within some ns.

/// Returns the ticks of the processor's counter, one to five per ns. Processors of a host agree on it to within the
/// time that a cache line takes from one to the other.
#[inline]
pub fn now() -> u64 {
    // Miri has no such instruction. Any increasing count suffices for what it checks.
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
