//! `LOCALNIC=pins`: whether memory is still what it was when it was registered. A device has its pages from then on and
//! knows nothing of addresses; this one reaches memory by addresses, so without this what a program maps in the place
//! of registered memory would be reached too, and hide that it should not.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;
/// In an entry of pagemap(5): the page is in memory, and which that is.
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Sees to it that the pages are there, as pinning them does, and tells them from any other. `None` for a process that
/// may not know them (it needs CAP_SYS_ADMIN).
pub fn pin(start: u64, len: u64) -> Option<u64> {
    let (from, end) = (start / PAGE * PAGE, (start + len).next_multiple_of(PAGE));
    let at = std::ptr::with_exposed_provenance_mut::<libc::c_void>(from as usize);
    // SAFETY: it changes nothing but that pages are there; what cannot be written is read.
    unsafe {
        if libc::madvise(at, (end - from) as usize, libc::MADV_POPULATE_WRITE) != 0 {
            libc::madvise(at, (end - from) as usize, libc::MADV_POPULATE_READ);
        }
    }
    pages(None, start, len)
}

/// What tells the pages there from others, in the process `pid` or in this one.
pub fn pages(pid: Option<i32>, start: u64, len: u64) -> Option<u64> {
    let path = pid.map_or("/proc/self/pagemap".to_owned(), |pid| format!("/proc/{pid}/pagemap"));
    let (first, end) = (start / PAGE, (start + len).div_ceil(PAGE));
    let mut entries = vec![0; (end - first) as usize * size_of::<u64>()];
    File::open(path)
        .ok()?
        .read_exact_at(&mut entries, first * size_of::<u64>() as u64)
        .ok()?;
    let mut hasher = DefaultHasher::new();
    let mut is_known = true;
    for entry in entries.chunks_exact(size_of::<u64>()) {
        let entry = u64::from_ne_bytes(entry.try_into().ok()?);
        let frame = if entry & PRESENT == 0 { 0 } else { entry & FRAME };
        is_known &= entry & PRESENT == 0 || frame != 0;
        hasher.write_u64(frame);
    }
    // 0 stands for nothing.
    is_known.then(|| hasher.finish() | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_memory_at_the_same_place_is_told_from_what_was_there() {
        const LEN: usize = 8 * PAGE as usize;
        let map = |at: *mut libc::c_void, how| {
            let (access, how) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | how,
            );
            // SAFETY: anywhere, or in place of what it gave before.
            unsafe { libc::mmap(at, LEN, access, how, -1, 0) }
        };
        let at = map(std::ptr::null_mut(), 0);
        let start = at.expose_provenance() as u64;
        let me = Some(std::process::id() as i32);
        let before = pin(start + 100, 5 * PAGE).expect("root may know pages");
        // SAFETY: mapped just now.
        unsafe { at.cast::<u8>().add(5000).write(1) };
        assert_eq!(pages(me, start + 100, 5 * PAGE), Some(before));
        map(at, libc::MAP_FIXED);
        assert_ne!(pages(me, start + 100, 5 * PAGE), Some(before));
        assert_ne!(pin(start + 100, 5 * PAGE), Some(before));
    }
}
