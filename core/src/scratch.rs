//! Memory for the length of a call that would not fit a small stack: threads of 16 KiB and signal handlers on an
//! alternate stack make calls too. From the library's own allocator, so also there.

use std::ops::{Deref, DerefMut};

/// Zeroed bytes; none by default.
#[derive(Default)]
pub struct Scratch(Vec<u8>);

impl Scratch {
    /// `None` without memory.
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
