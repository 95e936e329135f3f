//! Zeroed memory for the duration of a call, for buffers that are too large for a small stack. Threads with stacks of
//! 16 KiB and signal handlers on an alternate stack make calls too. The memory comes from the library's own allocator,
//! which signal handlers may use.

/// Returns `len` zeroed bytes; `None` if there is no memory.
pub fn zeroed(len: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).ok()?;
    bytes.resize(len, 0);
    Some(bytes)
}
