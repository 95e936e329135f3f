//! Buffers that are too large for a small stack, for the duration of a call. Calls are also made by threads with stacks
//! of 16 KiB, and by signal handlers on an alternate stack. The memory comes from the library's own allocator, which
//! signal handlers may use.

/// Returns `len` zeroed bytes; `None` if there is no memory.
pub fn zeroed(len: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).ok()?;
    bytes.resize(len, 0);
    Some(bytes)
}
