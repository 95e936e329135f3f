//! Memory for the WRITEs of a test, and the pattern that it is filled with.

use std::ffi::c_int;
use std::ptr::null_mut;

/// A mapping. A drop does not unmap it; only `unmap` does.
pub struct Memory {
    pub at: *mut u8,
    pub len: usize,
}

impl Memory {
    pub fn new(len: usize) -> Self {
        Self::map(len, libc::MAP_SHARED)
    }

    /// Maps memory that is filled with the pattern that `check` expects, and then made read-only. The mapping is
    /// private, because Linux 6.1 always pins pages for writing, which it refuses for a shared read-only mapping.
    pub fn read_only(len: usize, seed: u32) -> Self {
        let memory = Self::map(len, libc::MAP_PRIVATE);
        memory.fill(seed);
        // SAFETY: the range is exactly the mapping that was just made.
        assert_eq!(unsafe { libc::mprotect(memory.at.cast(), len, libc::PROT_READ) }, 0);
        memory
    }

    fn map(len: usize, flags: c_int) -> Self {
        // SAFETY: this makes a new mapping, which replaces no other.
        let at = unsafe {
            let flags = flags | libc::MAP_ANONYMOUS;
            libc::mmap(null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        Self { at: at.cast(), len }
    }

    /// Fills the memory with the pattern that `check` expects.
    pub fn fill(&self, seed: u32) {
        for (at, byte) in pattern(seed).take(self.len).enumerate() {
            // SAFETY: the byte is within the mapping.
            unsafe { self.at.add(at).write_volatile(byte) };
        }
    }

    /// Returns whether the memory holds only zeroes.
    pub fn is_empty(&self) -> bool {
        // SAFETY: no thread or device writes any more when this is called.
        let bytes = unsafe { std::slice::from_raw_parts(self.at, self.len) };
        bytes.iter().all(|byte| *byte == 0)
    }

    /// Unmaps the memory. Registrations of its addresses may still exist.
    pub fn unmap(&self) {
        // SAFETY: the range is exactly the mapping that `map` made, and no code accesses it afterwards.
        assert_eq!(unsafe { libc::munmap(self.at.cast(), self.len) }, 0);
    }

    pub fn check(&self, seed: u32) {
        // SAFETY: no thread or device writes any more when this is called.
        let bytes = unsafe { std::slice::from_raw_parts(self.at, self.len) };
        if let Some(at) = bytes.iter().zip(pattern(seed)).position(|(is, should)| *is != should) {
            panic!("wrong byte at {at}");
        }
    }
}

/// Returns pseudo-random bytes, which do not repeat after a short period.
pub fn pattern(seed: u32) -> impl Iterator<Item = u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as u8
    })
}
