//! Memory for a test's WRITEs, and what it is filled with.

use std::ffi::c_int;
use std::ptr::null_mut;

/// Memory that is not unmapped but by `unmap`.
pub struct Memory {
    pub at: *mut u8,
    pub len: usize,
}

impl Memory {
    pub fn new(len: usize) -> Self {
        Self::map(len, libc::MAP_SHARED)
    }

    /// Filled, as for `check`, and then not to be written any more. Private: Linux 6.1 pins pages for writing, whatever
    /// they are for, which it refuses where others would see that.
    pub fn read_only(len: usize, seed: u32) -> Self {
        let memory = Self::map(len, libc::MAP_PRIVATE);
        memory.fill(seed);
        // SAFETY: the mapping that was just made.
        assert_eq!(unsafe { libc::mprotect(memory.at.cast(), len, libc::PROT_READ) }, 0);
        memory
    }

    fn map(len: usize, flags: c_int) -> Self {
        // SAFETY: a new mapping.
        let at = unsafe {
            let flags = flags | libc::MAP_ANONYMOUS;
            libc::mmap(null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        Self { at: at.cast(), len }
    }

    /// Fills it with what `check` expects.
    pub fn fill(&self, seed: u32) {
        for (at, byte) in pattern(seed).take(self.len).enumerate() {
            // SAFETY: within the mapping.
            unsafe { self.at.add(at).write_volatile(byte) };
        }
    }

    /// Whether nothing but zeroes is there.
    pub fn is_empty(&self) -> bool {
        // SAFETY: nobody writes any more when this is called.
        let bytes = unsafe { std::slice::from_raw_parts(self.at, self.len) };
        bytes.iter().all(|byte| *byte == 0)
    }

    /// Leaves its addresses without memory.
    pub fn unmap(&self) {
        // SAFETY: the mapping that `new` made; it is not accessed afterwards.
        assert_eq!(unsafe { libc::munmap(self.at.cast(), self.len) }, 0);
    }

    pub fn check(&self, seed: u32) {
        // SAFETY: nobody writes any more when this is called.
        let bytes = unsafe { std::slice::from_raw_parts(self.at, self.len) };
        if let Some(at) = bytes.iter().zip(pattern(seed)).position(|(is, should)| *is != should) {
            panic!("wrong byte at {at}");
        }
    }
}

/// Bytes without a short period.
pub fn pattern(seed: u32) -> impl Iterator<Item = u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as u8
    })
}
