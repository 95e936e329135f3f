//! Zeroed memory for the duration of a call, too large for a small stack. Threads with 16 KiB and signal handlers on an
//! alternate stack make calls too. It comes from the library's own allocator, which signal handlers may use.

use std::ops::{Deref, DerefMut};

/// Zeroed bytes; empty by default.
#[derive(Default)]
pub struct Scratch(Vec<u8>);

impl Scratch {
    /// Returns `len` zeroed bytes; `None` without memory.
    pub fn new(len: usize) -> Option<Self> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).ok()?;
        bytes.resize(len, 0);
        Some(Self(bytes))
    }
}

impl Deref for Scratch {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
