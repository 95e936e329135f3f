//! The processor's counter: what is the same for all processes of a host, and costs no more than some ns to read.

/// Ticks of the processor's counter, of which a ns has one to five. Processors of one machine agree on it to within
/// what a cache line takes from one to the other.
#[inline]
pub fn now() -> u64 {
    // Miri has no such instruction; any count does for what it looks for.
    #[cfg(miri)]
    {
        use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
        static COUNT: AtomicU64 = AtomicU64::new(1);
        COUNT.fetch_add(1, Relaxed)
    }
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has it.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(all(not(target_arch = "x86_64"), not(miri)))]
    {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        (t.tv_sec as u64)
            .wrapping_mul(2_000_000_000)
            .wrapping_add(t.tv_nsec as u64 * 2)
    }
}
