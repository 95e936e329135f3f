//! The processor's counter: what is the same for all processes of a host, and costs no more than some ns to read.

/// Ticks of the processor's counter, of which a ns has one to five. Processors of one machine agree on it to within what
/// a cache line takes from one to the other.
#[inline]
pub fn now() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has it.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        (t.tv_sec as u64)
            .wrapping_mul(2_000_000_000)
            .wrapping_add(t.tv_nsec as u64 * 2)
    }
}
